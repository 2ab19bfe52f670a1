"""Ingest: from the rows of sources to rows of `documents`. The text itself stays where it is (texts.py reads it back).

The rows read, over all sources in order, are cut into parts of a fixed number of rows, so that a part holds the same rows in every attempt; an
attempt after a crash walks the same way again and leaves the parts that lie there alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import read
from pipeline.identity import hash_text, in_holdout, normalise
from pipeline.sources import RejectedRow, SourceDocument, SourceSpec, expand, read_rows

ROWS_PER_PART = 50_000
_SCHEMA = TABLES["documents"].schema


def ingest(
    store: Store,
    specs: Sequence[SourceSpec],
    *,
    holdout_share: float,
    report: Report = report_nothing,
    rows_per_part: int = ROWS_PER_PART,
) -> dict[str, Any]:
    """Adds the documents of some sources to a store.

    A document whose text the store has already, from a committed job or from an earlier row of this one, is a duplicate and is dropped.

    Args:
        specs: what to read; each may stand for many files.
        holdout_share: share of the real documents that is kept from training; one for all ingests of a store.

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
        return done | {"already_done": True}
    _check_share(store, holdout_share)
    reading = _Reading(job, holdout_share, _known_ids(store))
    for spec in files:
        reading.read(spec, rows_per_part, report)
    reading.flush(report)
    for spec, before in zip(files, prints, strict=True):
        if _fingerprint(spec) != before:
            raise Failure(f"source {spec.uri} changed while it was read; run the ingest again")
    return _finish(job, specs, groups, reading)


class _Reading:
    """One attempt at a job: walks the rows, and appends their documents part by part."""

    def __init__(self, job: Job, holdout_share: float, known_ids: set[bytes]) -> None:
        self.num_rows: Counter[str] = Counter()
        """Rows read, by source."""
        self.num_rejected: Counter[str] = Counter()
        """Rejected rows, by source."""
        self.reasons: Counter[str] = Counter()
        self._job = job
        self._share = holdout_share
        self._seen = known_ids
        self._part = 1
        self._rows_in_part = 0
        self._rows_done = 0
        self._pending: list[tuple[Any, ...]] = []

    def read(self, spec: SourceSpec, rows_per_part: int, report: Report) -> None:
        source = spec.source_uri
        for row in read_rows(spec):
            self.num_rows[source] += 1
            if isinstance(row, RejectedRow):
                self.num_rejected[source] += 1
                self.reasons[row.reason] += 1
            else:
                self._take(spec, source, row)
            self._rows_in_part += 1
            if self._rows_in_part == rows_per_part:
                self.flush(report)

    def flush(self, report: Report) -> None:
        """Ends the part. One without documents takes its number all the same: numbers follow the rows, not what is kept of them."""
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [pa.array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
            self._job.append("documents", pa.Table.from_arrays(arrays, schema=_SCHEMA), part=self._part)
        self._rows_done += self._rows_in_part
        self._part += 1
        self._rows_in_part = 0
        self._pending = []
        report("ingest", self._rows_done, None)

    def _take(self, spec: SourceSpec, source: str, document: SourceDocument) -> None:
        text = normalise(document.text).encode()
        doc_id = hash_text(text)
        if doc_id in self._seen:
            return
        self._seen.add(doc_id)
        parent_id = hash_text(normalise(document.parent_text).encode()) if document.parent_text is not None else None
        if spec.origin == "real":
            split = "holdout" if in_holdout(doc_id, self._share) else "train"
        else:
            split = "holdout_derived" if parent_id is not None and in_holdout(parent_id, self._share) else "train"
        # In the order of the table's schema.
        self._pending.append(
            (
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
                source,
                document.row,
                self._job.id,
            )
        )


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


def _known_ids(store: Store) -> set[bytes]:
    """Documents of committed jobs. This job's own rows are not among them: it isn't committed, and a new attempt must decide like the one before."""
    known: set[bytes] = set()
    for batch in Catalog(store, tables=["documents", "tombstones"]).query(_KNOWN).to_batches():
        known.update(cast("list[bytes]", batch.column(0).to_pylist()))
    return known


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
            reasons = ", ".join(f"{n} rows: {reason}" for reason, n in reading.reasons.most_common()) or "no rows"
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
        "rejected_because": dict(sorted(reading.reasons.items())),
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
    return summary | {"already_done": False}


def _counts(
    files: Sequence[SourceSpec], reading: _Reading, kept: dict[str, dict[str, int]]
) -> Iterator[tuple[str, dict[str, int]]]:
    nothing = {"documents": 0, "holdout": 0, "holdout_derived": 0, "bytes": 0}
    for spec in files:
        name = spec.source_uri
        rows, rejected, found = reading.num_rows[name], reading.num_rejected[name], kept.get(name, nothing)
        yield name, {"rows": rows, **found, "duplicates": rows - rejected - found["documents"], "rejected": rejected}
