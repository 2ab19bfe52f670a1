"""The job that makes scores of what a run measured as it trained (`--online-influence`): a document's contribution per token to the descent of the holdout loss.

The measuring is trainer/online.py's; here DuckDB adds it up by document (manifests/sql/online_scores.sql), and the answer streams into the table `influence`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.questions import statement
from manifests.schemas import TABLES
from manifests.store import Store

METHOD = "online"
_PART_ROWS = 500_000
_LEAST_DEGREES = 30
"""Second and further observations of documents, in all, that a pooled variance is believed from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    """How contributions become scores. All of it is part of the job's identity."""

    run: str
    """Run that measured them."""
    window: int = 32
    """Inner steps of an island that share a scale: contributions shrink along a training, so a score counts in typical sizes of its time. 0: in nats."""
    prior: float = 4.0
    """Observations that the pooled variance counts for, beside a document's own."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window is {self.window}; it must be 0 or more")
        if not self.prior > 0:
            raise ValueError(f"prior is {self.prior}; it must be above 0")


def score_online(store: Store, config: OnlineConfig, report: Report = report_nothing) -> dict[str, Any]:
    """Scores every document of the train split whose contribution the run measured, up to its newest checkpoints.

    Returns:
        The job, the method, the run, how many documents were scored and how many weren't (not read yet, or before the first measurement), the share below zero, seconds;
        and `already_done` where the same job was finished before and nothing was changed.

    Raises:
        UserError: there is no such run, or it measured nothing.
    """
    started = time.monotonic()
    catalog = Catalog(store, rights=rights_of(store, "job:score"))
    segments = catalog.rows(
        "SELECT run, island, max(round) AS round FROM island_segments($run) GROUP BY run, island ORDER BY run, island",
        {"run": config.run},
    )
    if not segments:
        known = [row["run"] for row in catalog.rows("SELECT DISTINCT run FROM checkpoints ORDER BY run")]
        mend = f"there are: {', '.join(known)}" if known else "`atoll train` makes one"
        raise UserError(f"no run named {config.run!r} with a checkpoint in {store.uri}; {mend}")
    documents = catalog.rows("SELECT count(DISTINCT doc_id) AS n FROM documents WHERE split = 'train'")[0]["n"]
    inputs = {"segments": segments, "documents": documents} | rights_inputs(catalog.rights)
    job = make_job(store, "score", config=asdict(config) | {"method": METHOD}, inputs=inputs)
    if (done := job.summary()) is not None:
        return done | {"already_done": True}
    scored = _append_scores(catalog, job, config, report, total=documents)
    if not scored:
        raise UserError(
            f"run {config.run} of {store.uri} measured no contributions{that_may_be_read(catalog.rights)}; train one with --online-influence"
        )
    counts = "SELECT coalesce(avg((score < 0)::INT), 0) AS negative FROM raw.influence WHERE job = ?"
    summary = {
        "job": job.id,
        "method": METHOD,
        "run": config.run,
        "documents": scored,
        "unscored": documents - scored,
        "share_negative": round(Catalog(store).rows(counts, [job.id])[0]["negative"], 4),
        "seconds": round(time.monotonic() - started, 1),
    }
    job.commit(summary)
    return summary | {"already_done": False}


def _append_scores(catalog: Catalog, job: Job, config: OnlineConfig, report: Report, *, total: int) -> int:
    """Appends the scores part by part; returns how many there are."""
    same = {
        "method": METHOD,
        "checkpoint": f"run/{config.run}",
        "probe": "holdout of the run",
        "scored_at": datetime.now(UTC),
        "direct": True,
        "job": job.id,
    }
    schema = TABLES["influence"].schema
    scored = 0
    for part, found in enumerate(_scores(catalog, config), start=1):
        columns = [
            pa.repeat(pa.scalar(same[field.name], field.type), found.num_rows)
            if field.name in same
            else found[field.name].cast(field.type)
            for field in schema
        ]
        job.append("influence", pa.table(columns, schema=schema), part=part)
        scored += found.num_rows
        report("score", scored, total)
    return scored


def _scores(catalog: Catalog, config: OnlineConfig) -> Iterator[pa.Table]:
    """doc_id, score, stderr and more in parts of one size, in the order of ids, as DuckDB hands them out."""
    sql, parameters = statement("online_scores", asdict(config) | {"least": _LEAST_DEGREES})
    catalog.prepare(sql)
    waiting: list[pa.RecordBatch] = []
    for batch in catalog.connection.sql(sql, params=parameters).to_arrow_reader(_PART_ROWS):
        waiting.append(batch)
        while sum(b.num_rows for b in waiting) >= _PART_ROWS:
            table = pa.Table.from_batches(waiting)
            yield table.slice(0, _PART_ROWS)
            waiting = table.slice(_PART_ROWS).to_batches()
    if sum(b.num_rows for b in waiting):
        yield pa.Table.from_batches(waiting)
