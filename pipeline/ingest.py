"""Ingest: from the rows of sources to rows of `documents`. The text itself stays where it is (texts.py reads it back).

Rows are read, normalised and hashed in partitions, wherever the engine does it. Which of them are duplicates is decided here, in the order of the
rows, and so is the same whatever the engine. The rows read, over all sources in order, are cut into parts of a fixed number of rows, so that a part
holds the same rows in every attempt; an attempt after a crash goes on behind the last part that is finished.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import read
from pipeline.engine import Engine, InProcess
from pipeline.identity import hash_text, in_holdout, normalise
from pipeline.partitions import Partition, count_rows, partitions, read_partition
from pipeline.readers import require_present
from pipeline.seen import SeenIds
from pipeline.sources import Layout, RejectedRow, SourceDocument, SourceSpec, expand

ROWS_PER_PART = 50_000
_KNOWN_ROWS = 65_536
_SCHEMA = TABLES["documents"].schema


def ingest(
    store: Store,
    specs: Sequence[SourceSpec],
    *,
    holdout_share: float,
    report: Report = report_nothing,
    rows_per_part: int = ROWS_PER_PART,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Adds the documents of some sources to a store.

    A document whose text the store has already, from a committed job or from an earlier row of this one, is a duplicate and is dropped.

    Args:
        specs: what to read; each may stand for many files.
        holdout_share: share of the real documents that is kept from training; one for all ingests of a store.
        engine: where rows are read and hashed; in this process by default.

    Returns:
        What came out: per corpus under `corpora` rows, documents, duplicates, rejected, holdout, holdout_derived, bytes; the sums;
        `rejected_because`; `job`; and `already_done` where the same ingest was finished before and nothing was changed.

    Raises:
        UserError: a source can't be read as told, or has no usable document at all, or the share isn't the store's.
    """
    if not 0 <= holdout_share < 1:
        raise UserError(f"holdout share {holdout_share} is not from 0 to below 1; give a share such as 0.05")
    groups = [[replace(spec, uri=uri) for uri in expand(spec.uri, spec.format)] for spec in specs]
    files = [spec for group in groups for spec in group]
    _check_names(files)
    prints = [_fingerprint(spec) for spec in files]
    config = {
        "holdout_share": holdout_share,
        "rows_per_part": rows_per_part,
        "sources": [json.loads(spec.to_json()) for spec in files],
    }
    job = make_job(store, "ingest", config=config, inputs={"files": prints})
    if (done := job.summary()) is not None:
        _Tally.clear(job)
        return done | {"already_done": True}
    _check_share(store, holdout_share)
    tally = _Tally.load(job)
    with SeenIds() as seen:
        _add_known(store, job, seen)
        reading = _Reading(job, files, seen, tally)
        reading.read(engine or InProcess(), holdout_share, rows_per_part, report)
    for spec, before in zip(files, prints, strict=True):
        if _fingerprint(spec) != before:
            raise Failure(f"source {spec.uri} changed while it was read; run the ingest again")
    return _finish(job, specs, groups, reading)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Digest:
    """What the rows of a partition, or of a piece of one, came to; nothing is known yet of other partitions."""

    file: int
    """Number of the source."""
    rows: npt.NDArray[np.int64]
    """Numbers of the rows read, in order."""
    documents: pa.Table
    rejected: list[tuple[int, str]]
    """Row and reason."""
    absent: frozenset[str]
    """Columns that none of its lines of JSON has."""

    def piece(self, start: int, stop: int) -> _Digest:
        """Of the rows read, those from one place to another."""
        rows = self.rows[start:stop]
        first, end = np.searchsorted(self.documents["source_row"].to_numpy(), [rows[0], rows[-1] + 1]).tolist()
        return replace(
            self,
            rows=rows,
            documents=self.documents.slice(first, end - first),
            rejected=[(row, reason) for row, reason in self.rejected if rows[0] <= row <= rows[-1]],
        )


def _digest(job: str, share: float, partition: Partition) -> _Digest:
    """Reads, normalises and hashes a partition: what can be done anywhere."""
    layout = Layout.of(partition.spec)
    absent = set(layout.columns) if partition.content is not None and partition.spec.format != "datasets" else set()
    rows: list[int] = []
    rejected: list[tuple[int, str]] = []
    documents: list[tuple[Any, ...]] = []
    for row in read_partition(partition, absent):
        rows.append(row.row)
        if isinstance(row, RejectedRow):
            rejected.append((row.row, row.reason))
        else:
            documents.append(_document(job, share, partition.spec, row))
    columns = zip(*documents, strict=True) if documents else [()] * len(_SCHEMA)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
    return _Digest(
        file=partition.file,
        rows=np.array(rows, np.int64),
        documents=pa.Table.from_arrays(arrays, schema=_SCHEMA),
        rejected=rejected,
        absent=frozenset(absent),
    )


def _document(job: str, share: float, spec: SourceSpec, document: SourceDocument) -> tuple[Any, ...]:
    """A row of `documents`, in the order of the table's schema."""
    text = normalise(document.text).encode()
    doc_id = hash_text(text)
    parent_id = hash_text(normalise(document.parent_text).encode()) if document.parent_text is not None else None
    if spec.origin == "real":
        split = "holdout" if in_holdout(doc_id, share) else "train"
    else:
        split = "holdout_derived" if parent_id is not None and in_holdout(parent_id, share) else "train"
    return (
        doc_id,
        spec.corpus,
        spec.origin,
        document.generator,
        document.prompt,
        parent_id,
        document.license,
        document.access,
        split,
        document.label,
        document.finish_reason,
        len(text),
        document.tokens,
        spec.source_uri,
        document.row,
        job,
    )


@dataclass(kw_only=True)
class _Tally:
    """How far an attempt at a job has come, and what it counted until there. All of it follows from the rows alone, so every attempt's is the same."""

    part: int = 0
    """Finished parts."""
    file: int = 0
    """Number of the source that is being read."""
    next_row: int = 0
    num_rows: Counter[str] = field(default_factory=Counter)
    """Rows read, by source."""
    num_rejected: Counter[str] = field(default_factory=Counter)
    """Rejected rows, by source."""
    reasons: Counter[str] = field(default_factory=Counter)
    absent: list[str] | None = None
    """Columns that no line of JSON of the source has had; None before its first."""

    @staticmethod
    def folder(job: Job) -> str:
        return f"ingests/{job.id}"

    @classmethod
    def load(cls, job: Job) -> _Tally:
        """That of the last finished part, of whichever attempt."""
        paths = sorted(item.path for item in job.store.list(cls.folder(job)))
        if not paths:
            return cls()
        values = json.loads(job.store.get(paths[-1]))
        for name in ("num_rows", "num_rejected", "reasons"):
            values[name] = Counter(values[name])
        return cls(**values)

    def save(self, job: Job) -> None:
        job.store.put_new(self._path(job, self.part), json.dumps(vars(self), sort_keys=True).encode())
        job.store.delete(self._path(job, self.part - 1))

    @classmethod
    def clear(cls, job: Job) -> None:
        """Once the job is committed nobody asks any more."""
        for item in list(job.store.list(cls.folder(job))):
            job.store.delete(item.path)

    def _path(self, job: Job, part: int) -> str:
        return f"{self.folder(job)}/part-{part:09d}.json"


class _Reading:
    """One attempt at a job: walks the rows from the first unfinished part, and appends their documents part by part."""

    def __init__(self, job: Job, files: Sequence[SourceSpec], seen: SeenIds, tally: _Tally) -> None:
        self.tally = tally
        self._job, self._files, self._seen = job, files, seen
        self._rows_in_part = 0
        self._pending: list[pa.Table] = []

    def read(self, engine: Engine, share: float, rows_per_part: int, report: Report) -> None:
        total = count_rows(self._files)
        for digest in engine.map(partial(_digest, self._job.id, share), self._partitions()):
            while self.tally.file < digest.file:
                self._next_file()
            place = 0
            while place < len(digest.rows):
                stop = min(len(digest.rows), place + rows_per_part - self._rows_in_part)
                self._take(digest.piece(place, stop))
                place = stop
                if self._rows_in_part == rows_per_part:
                    self._flush(report, total)
        while self.tally.file < len(self._files):
            self._next_file()
        self._flush(report, total)

    def _partitions(self) -> Iterator[Partition]:
        start, next_row = self.tally.file, self.tally.next_row
        for file, spec in enumerate(self._files[start:], start):
            yield from partitions(file, spec, start_row=next_row if file == start else 0)

    def _take(self, piece: _Digest) -> None:
        tally, source = self.tally, self._files[piece.file].source_uri
        tally.num_rows[source] += len(piece.rows)
        tally.num_rejected[source] += len(piece.rejected)
        tally.reasons.update(reason for _, reason in piece.rejected)
        tally.next_row = int(piece.rows[-1]) + 1
        tally.absent = sorted(piece.absent if tally.absent is None else piece.absent.intersection(tally.absent))
        self._rows_in_part += len(piece.rows)
        new = self._seen.add(piece.documents["doc_id"].to_pylist())
        self._pending.append(piece.documents.filter(pa.array(new, pa.bool_())))

    def _next_file(self) -> None:
        tally, spec = self.tally, self._files[self.tally.file]
        require_present(spec.uri, Layout.of(spec).text, tally.absent or ())
        tally.file, tally.next_row, tally.absent = tally.file + 1, 0, None

    def _flush(self, report: Report, total: int | None) -> None:
        """Ends the part. One without documents takes its number all the same: numbers follow the rows, not what is kept of them."""
        documents = pa.concat_tables([_SCHEMA.empty_table(), *self._pending]).combine_chunks()
        self.tally.part += 1
        if documents.num_rows:
            self._job.append("documents", documents, part=self.tally.part)
        self.tally.save(self._job)
        self._rows_in_part = 0
        self._pending = []
        report("ingest", self.tally.num_rows.total(), total)


def _check_names(files: Sequence[SourceSpec]) -> None:
    names = Counter(spec.source_uri for spec in files)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(f"source {twice[0]} is named twice; name each file once")
    if not files:
        raise UserError("no source is named; name a file, a folder or a data set")


def _fingerprint(spec: SourceSpec) -> list[list[Any]]:
    """Name, size and time of change of each local file behind a source; for a data set of the hub, its name."""
    path = Path(spec.uri)
    if spec.format == "datasets" and not path.exists():
        return [[spec.source_uri]]
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [[str(file), (stat := os.stat(file)).st_size, stat.st_mtime_ns] for file in files]


def _check_share(store: Store, share: float) -> None:
    jobs = read(store, "jobs", columns=["kind", "config"]).to_pylist()
    earlier = {json.loads(job["config"])["holdout_share"] for job in jobs if job["kind"] == "ingest"}
    if earlier - {share}:
        raise UserError(
            f"{store.uri} holds out a share of {min(earlier - {share})}, not {share}; give that share, or ingest into another store"
        )


# A forgotten document must not come back with the next edition of its source.
_KNOWN = "SELECT doc_id FROM documents UNION ALL SELECT doc_id FROM tombstones"
_OWN = "SELECT doc_id FROM raw.documents WHERE job = ?"


def _add_known(store: Store, job: Job, seen: SeenIds) -> None:
    """Documents of committed jobs, and of the parts of this job that an earlier attempt has left."""
    for sql, parameters in ((_KNOWN, []), (_OWN, [job.id])):
        catalog = Catalog(store, tables=["documents", "tombstones"])
        for batch in catalog.stream(sql, parameters, num_rows=_KNOWN_ROWS):
            seen.add(batch.column(0).to_pylist())


def _finish(
    job: Job, specs: Sequence[SourceSpec], groups: Sequence[Sequence[SourceSpec]], reading: _Reading
) -> dict[str, Any]:
    files = [spec for group in groups for spec in group]
    # Counted in the table, not in passing: parts that an earlier attempt left may have kept what another job has brought since.
    sql = """
        SELECT source_uri, count(*) AS documents, count(*) FILTER (WHERE split = 'holdout') AS holdout,
               count(*) FILTER (WHERE split = 'holdout_derived') AS holdout_derived, sum(text_bytes)::BIGINT AS bytes
        FROM raw.documents WHERE job = ? GROUP BY source_uri
    """
    kept = {row.pop("source_uri"): row for row in Catalog(job.store).rows(sql, [job.id])}
    counts = dict(_counts(files, reading, kept))
    for spec, group in zip(specs, groups, strict=True):
        if not any(counts[file.source_uri]["rows"] - counts[file.source_uri]["rejected"] for file in group):
            reasons = ", ".join(f"{n} rows: {reason}" for reason, n in reading.tally.reasons.most_common()) or "no rows"
            raise UserError(
                f"source {spec.uri} has no usable document ({reasons}); check the file and which column is the text"
            )
    corpora: dict[str, Counter[str]] = {}
    for spec in files:
        corpora.setdefault(spec.corpus, Counter()).update(counts[spec.source_uri])
    total: Counter[str] = Counter()
    for corpus in corpora.values():
        total.update(corpus)
    summary = {
        "corpora": {name: dict(corpus) for name, corpus in sorted(corpora.items())},
        **total,
        "rejected_because": dict(sorted(reading.tally.reasons.items())),
        "job": job.id,
    }
    rows = [
        {
            "source_uri": spec.source_uri,
            "format": spec.format,
            "options": spec.to_json(),
            "corpus": spec.corpus,
            **{name: counts[spec.source_uri][name] for name in ("rows", "documents", "duplicates", "rejected")},
            "job": job.id,
        }
        for spec in files
    ]
    job.append("sources", rows, part=1)
    job.commit(summary)
    _Tally.clear(job)
    return summary | {"already_done": False}


def _counts(
    files: Sequence[SourceSpec], reading: _Reading, kept: dict[str, dict[str, int]]
) -> Iterator[tuple[str, dict[str, int]]]:
    nothing = {"documents": 0, "holdout": 0, "holdout_derived": 0, "bytes": 0}
    for spec in files:
        name = spec.source_uri
        rows, rejected, found = reading.tally.num_rows[name], reading.tally.num_rejected[name], kept.get(name, nothing)
        yield name, {"rows": rows, **found, "duplicates": rows - rejected - found["documents"], "rejected": rejected}
