"""Batch jobs: their identity, their commit, and the record of how a result came about.

A job's name is the hash of what goes into it, so that the same command run again continues the job, or finds it done. Its rows count once
its row stands in `jobs` (schemas.py); until then nobody sees them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from manifests.store import Store
from manifests.tables import append, open_table, read

Report = Callable[[str, int, int | None], None]
"""Called with (what is being done, units done, units in all or None) as work goes on."""


def report_nothing(what: str, done: int, total: int | None) -> None:
    """The progress report of callers that want none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One batch job on one store. Rows that it appends carry `job.id`."""

    store: Store
    kind: str
    id: str
    """Hex hash of kind, configuration and inputs."""
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def summary(self) -> dict[str, Any] | None:
        """What came out, where the job is finished; else None."""
        jobs = read(self.store, "jobs", columns=["job", "summary"])
        for row in jobs.to_pylist():
            if row["job"] == self.id:
                return dict(json.loads(row["summary"]))
        return None

    def append(self, table: str, rows: Any, *, part: int) -> bool:
        """Appends part number `part` (from 1, in order) of the job's rows to a table; a part that lies there already is left alone."""
        return append(self.store, table, rows, writer=self._writer(table), sequence=part)

    def has_part(self, table: str, part: int) -> bool:
        """Whether part number `part` of the job's rows lies in the table already."""
        return (open_table(self.store, table).transaction_version(self._writer(table)) or 0) >= part

    def commit(self, summary: Mapping[str, Any]) -> None:
        """Makes the job's rows count. The last act of a job; doing it twice does nothing."""
        row = {
            "job": self.id,
            "kind": self.kind,
            "command": command_line(),
            "config": canonical_json(self.config),
            "inputs": canonical_json(self.inputs),
            "summary": canonical_json(summary),
            "code_version": code_version(),
            "started_at": self.started_at,
        }
        append(self.store, "jobs", [row], writer=f"job/{self.id}", sequence=1)

    def _writer(self, table: str) -> str:
        return f"job/{self.id}/{table}"


def make_job(store: Store, kind: str, *, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Job:
    """A job named by what goes into it; `inputs` says which data it reads (file sizes and times, job or version numbers)."""
    identity = canonical_json({"kind": kind, "config": config, "inputs": inputs})
    return Job(store=store, kind=kind, id=xxhash.xxh3_128_hexdigest(identity.encode()), config=config, inputs=inputs)


def make_parted_job(store: Store, kind: str, *, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Job:
    """A job that cuts the documents into parts.

    Without documents that were forgotten meanwhile, the parts of an attempt that died would be cut elsewhere: so the erasures before the attempt belong to its
    identity. A job that was finished before an erasure stays finished.
    """
    rows = read(store, "jobs", columns=["job", "kind", "started_at"]).sort_by(
        [("started_at", "ascending"), ("job", "ascending")]
    )
    finished = set(rows["job"].to_pylist())
    erasures = [row["job"] for row in rows.to_pylist() if row["kind"] == "forget"]
    for num in range(len(erasures) + 1):
        known: Mapping[str, Any] = {"erasures": erasures[:num]} if num else {}
        job = make_job(store, kind, config=config, inputs={**inputs, **known})
        if job.id in finished:
            break
    return job


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def command_line() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def code_version() -> str:
    """Version of the installed Atoll."""
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "not installed"
