"""The job that turns the scores of a store into a new tier version, and the table that says where the documents went."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Report, canonical_json, make_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.schemas import TABLES
from manifests.store import Store
from pipeline.tiers import assign_tiers, say_concentration

_PART_ROWS = 500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """What decides the tiers."""

    score_job: str | None = None
    """Job whose scores are used; None: the newest."""
    share: float = 0.8
    """Share of the positive influence that S is to carry."""
    confidence: float = 0.8
    """One-sided confidence that a document of C is harmful."""
    max_s: float = 0.5
    """Largest share of the documents in S."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"share is {self.share}; it must lie above 0 and up to 1")
        if not 0.5 <= self.confidence < 1:
            raise UserError(f"confidence is {self.confidence}; it must be at least 0.5 and below 1")
        if not 0 < self.max_s <= 1:
            raise UserError(f"max-s is {self.max_s}; it must lie above 0 and up to 1")


def tier(store: Store, *, config: TierConfig, report: Report = report_nothing) -> dict[str, Any]:
    """Assigns every scored document a tier and commits the new tier version.

    Returns:
        The summary: tier_version, documents of each tier, thresholds, concentration and a sentence on it; `already_done` where the same
        scores were tiered with the same configuration before.

    Raises:
        UserError: the store has no scores, or not of the job that was named.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:tier"))
    score_job = _score_job(catalog, config.score_job)
    inputs = {"scores": score_job} | rights_inputs(catalog.rights)
    job = make_job(store, "tier", config=asdict(config) | {"score_job": score_job}, inputs=inputs)
    done = job.summary()
    if done is not None:
        return done | {"already_done": True}
    scores = catalog.query(
        "SELECT doc_id, method, score, stderr FROM influence WHERE job = ? AND doc_id IN (SELECT doc_id FROM documents) ORDER BY doc_id",
        [score_job],
    )
    if not scores.num_rows:
        raise UserError(f"job {score_job} has scored no documents{that_may_be_read(catalog.rights)}; run `atoll score`")
    tiering = assign_tiers(
        scores["score"].to_numpy(),
        scores["stderr"].to_numpy(),
        share=config.share,
        confidence=config.confidence,
        max_s=config.max_s,
    )
    # A dead attempt's rows don't count, but its parts stay: the version must be the one that it took.
    # And a number is taken also where all of its documents are kept from this job.
    numbers = Catalog(store, tables=["tiers"])
    started = numbers.rows("SELECT min(tier_version) AS v FROM raw.tiers WHERE job = ?", [job.id])[0]["v"]
    newest = numbers.rows("SELECT coalesce(max(tier_version), 0) AS v FROM raw.tiers")[0]["v"]
    tier_version = int(started or newest + 1)
    rows = pa.table(
        {
            "tier_version": pa.array(np.full(scores.num_rows, tier_version), pa.int32()),
            "doc_id": scores["doc_id"].cast(pa.binary()),
            "tier": pa.array(tiering.tiers.tolist(), pa.string()),
            "score": scores["score"],
            "method": scores["method"].cast(pa.string()),
            "job": pa.array([job.id] * scores.num_rows, pa.string()),
        },
        schema=TABLES["tiers"].schema,
    )
    for part, start in enumerate(range(0, rows.num_rows, _PART_ROWS), start=1):
        job.append("tiers", rows.slice(start, _PART_ROWS), part=part)
        report("documents tiered", min(start + _PART_ROWS, rows.num_rows), rows.num_rows)
    version_row = {
        "tier_version": tier_version,
        "method": scores["method"][0].as_py(),
        "parameters": canonical_json(asdict(config)),
        "thresholds": canonical_json(tiering.thresholds | tiering.concentration),
        "job": job.id,
    }
    job.append("tier_versions", [version_row], part=1)
    names, counts = np.unique(tiering.tiers, return_counts=True)
    summary = {
        "tier_version": tier_version,
        "documents": {str(name): int(count) for name, count in zip(names, counts, strict=True)},
        "thresholds": tiering.thresholds,
        "concentration": say_concentration(tiering),
    }
    job.commit(summary)
    return summary


def tier_table(catalog: Catalog, tier_version: int) -> pa.Table:
    """Documents, tokens, share of influence and share of each planted label by tier, labels as columns; see manifests/sql/tier_table.sql."""
    rows = catalog.ask("tier_table", tier_version=tier_version).to_pylist()
    shares = [dict(row.pop("label_shares") or []) for row in rows]
    labels = sorted({label for share in shares for label in share})
    for row, share in zip(rows, shares, strict=True):
        if row["tokens"] is None:
            del row["tokens"]
        row.update({label: share.get(label, 0.0) for label in labels})
    return pa.Table.from_pylist(rows)


def _score_job(catalog: Catalog, wanted: str | None) -> str:
    jobs = [row["job"] for row in catalog.rows("SELECT job FROM jobs WHERE kind = 'score' ORDER BY written_at DESC")]
    if not jobs:
        raise UserError(f"{catalog.store.uri} has no scores; run `atoll score`")
    if wanted is not None and wanted not in jobs:
        raise UserError(f"no score job {wanted!r}; there are: {', '.join(jobs)}")
    return wanted or jobs[0]
