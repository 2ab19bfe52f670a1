"""The job that turns the scores of a store into a new tier version, and the tables that say where the documents went.

How scores of several estimators become one is calibration.py's, where the tiers part tiers.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Job, Report, canonical_json, make_parted_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.schemas import TABLES, TIERS
from manifests.store import Store
from pipeline.calibration import Estimate, calibrate, combine_by_rank
from pipeline.tiers import (
    DEFAULT_SIZES,
    Tiering,
    assign_tiers,
    concentration_by_group,
    require_sizes,
    say_concentration,
)

_PART_ROWS = 500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """What decides the tiers."""

    score_jobs: tuple[str, ...] = ()
    """Jobs whose scores are used, the one whose scale counts first; none: the newest. A distilled scorer's job stands for the job that it completes, too."""
    share: float = 0.8
    """Share of the positive influence that S is to carry."""
    confidence: float = 0.8
    """One-sided confidence that a document of C is harmful."""
    sizes: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(DEFAULT_SIZES))
    """Tier → its smallest and largest share of the documents; see tiers.py for what they decide."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"share is {self.share}; it must lie above 0 and up to 1")
        if not 0.5 <= self.confidence < 1:
            raise UserError(f"confidence is {self.confidence}; it must be at least 0.5 and below 1")
        require_sizes(self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Estimator:
    """A score job, and the job of the distilled scorer that completes it."""

    base: str
    method: str
    completion: str | None = None
    completion_method: str = ""
    num_folds: int | None = None
    """Folds that each standard error of its direct scores rests on; None: the job has made them in another way, and they are taken as they are."""

    @property
    def named(self) -> str:
        """The job that stands for both."""
        return self.completion or self.base


def tier(store: Store, *, config: TierConfig, report: Report = report_nothing) -> dict[str, Any]:
    """Assigns every scored document a tier and commits the new tier version.

    Returns:
        The summary: tier_version, documents of each tier, thresholds, a sentence on the concentration, `scores` (of each estimator: what was read, and how its standard errors
        were calibrated), `corpora` (concentration in each), `notes` where sizes decided, `changes` since the version before (where there is one), `lacking` (documents that only
        some of the estimators scored, where there are several); `already_done` where the same scores were tiered with the same configuration before.

    Raises:
        UserError: the store has no scores, or not of a job that was named, or no tiers can have the sizes.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:tier"))
    estimators = _estimators(catalog, config.score_jobs)
    inputs = {"scores": [[e.base, e.completion] for e in estimators]} | rights_inputs(catalog.rights)
    job = make_parted_job(
        store, "tier", config=asdict(config) | {"score_jobs": [e.named for e in estimators]}, inputs=inputs
    )
    done = job.summary()
    if done is not None:
        return done | {"already_done": True}
    counting = [name for e in estimators for name in (e.base, e.completion) if name is not None]
    documents = catalog.ask("tier_documents", jobs=counting)
    if not documents.num_rows:
        raise UserError(
            f"job {estimators[0].named} has scored no documents{that_may_be_read(catalog.rights)}; run `atoll score`"
        )
    read = [_read(catalog, estimator, counting) for estimator in estimators]
    for estimator, (estimate, _, _) in zip(estimators, read, strict=True):
        if not np.isfinite(estimate.scores).any():
            raise UserError(
                f"job {estimator.named} has scored no documents{that_may_be_read(catalog.rights)}; name others by --score-job"
            )
    combined = combine_by_rank([estimate for estimate, _, _ in read])
    tiering = assign_tiers(
        combined.scores, combined.z, share=config.share, confidence=config.confidence, sizes=config.sizes
    )
    # A dead attempt's rows don't count, but its parts stay: the version must be the one that it took.
    # And a number is taken also where all of its documents are kept from this job.
    numbers = Catalog(store, tables=["tiers"])
    started = numbers.rows("SELECT min(tier_version) AS v FROM raw.tiers WHERE job = ?", [job.id])[0]["v"]
    newest = numbers.rows("SELECT coalesce(max(tier_version), 0) AS v FROM raw.tiers")[0]["v"]
    tier_version = int(started or newest + 1)
    methods, method_codes = _methods(estimators, read[0][2], documents.num_rows)
    for part, start in enumerate(range(0, documents.num_rows, _PART_ROWS), start=1):
        rows = slice(start, min(start + _PART_ROWS, documents.num_rows))
        table = _rows(
            job, tier_version, documents["doc_id"][rows], tiering, combined.scores, methods, method_codes, rows
        )
        job.append("tiers", table, part=part)
        report("documents tiered", rows.stop, documents.num_rows)
    version_row = {
        "tier_version": tier_version,
        "method": methods[0],
        "parameters": canonical_json(asdict(config)),
        "thresholds": canonical_json(tiering.facts()),
        "job": job.id,
    }
    job.append("tier_versions", [version_row], part=1)
    corpora = documents["corpus"].combine_chunks().dictionary_encode()
    summary: dict[str, Any] = {
        "tier_version": tier_version,
        "documents": {name: count for name, count in tiering.counts().items() if count},
        "thresholds": tiering.thresholds,
        "concentration": say_concentration(tiering),
        "scores": [facts for _, facts, _ in read],
        "corpora": concentration_by_group(
            combined.scores, corpora.indices.to_numpy(), corpora.dictionary.to_pylist(), config.share
        ),
    }
    if tiering.notes:
        summary["notes"] = tiering.notes
    if len(read) > 1:
        lacking = np.zeros(documents.num_rows, bool)
        for estimate, _, _ in read:
            lacking |= np.isnan(estimate.scores)
        summary["lacking"] = int(lacking.sum())
    if changes := _changes(store, job, tier_version):
        summary["changes"] = changes
    job.commit(summary)
    return summary


def say_changes(changes: Mapping[str, Any]) -> str:
    """The changes since the version before, in a line."""
    moved = ", ".join(f"{count} from {move}" for move, count in changes["moved"].items())
    num_moved = sum(changes["moved"].values())
    return (
        f"since version {changes['before']}: {num_moved} moved{f' ({moved})' if moved else ''}, "
        f"{changes['stayed']} stayed, {changes['new']} new, {changes['gone']} gone"
    )


def tier_table(catalog: Catalog, tier_version: int) -> pa.Table:
    """Documents, tokens, share of influence and share of each planted label by tier, labels as columns; see manifests/sql/tier_table.sql."""
    rows = catalog.ask("tier_table", tier_version=tier_version).to_pylist()
    shares = [dict(row.pop("label_shares") or []) for row in rows]
    labels = sorted({label for share in shares for label in share})
    for row, share in zip(rows, shares, strict=True):
        row.update({label: share.get(label, 0.0) for label in labels})
    return _without_unknown_tokens(pa.Table.from_pylist(rows))


def corpus_table(catalog: Catalog, tier_version: int) -> pa.Table:
    """Documents, tokens, share of influence and mean score by corpus and tier; see manifests/sql/tier_table_by_corpus.sql."""
    return _without_unknown_tokens(catalog.ask("tier_table_by_corpus", tier_version=tier_version))


def _without_unknown_tokens(table: pa.Table) -> pa.Table:
    known = table.num_rows and table["tokens"].null_count < table.num_rows
    return table if known or "tokens" not in table.column_names else table.drop_columns(["tokens"])


def _estimators(catalog: Catalog, wanted: Sequence[str]) -> list[_Estimator]:
    """The score jobs wanted, each with the distilled scorer that was wanted with it, in the order in which they were named first."""
    jobs = {row["job"]: row for row in catalog.ask("tier_jobs").to_pylist()}
    if not jobs:
        raise UserError(f"{catalog.store.uri} has no scores; run `atoll score`")
    completions: dict[str, str | None] = {}
    for name in wanted or [next(iter(jobs))]:
        if name not in jobs:
            raise UserError(f"no score job {name!r}; there are: {', '.join(jobs)}")
        base = jobs[name]["base"]
        if base is None:
            completions.setdefault(name, None)
            continue
        if base not in jobs:
            raise UserError(f"score job {name} completes job {base}, which this store doesn't have; name another one")
        if completions.get(base) not in (None, name):
            raise UserError(
                f"score jobs {completions[base]} and {name} both complete the scores of {base}; name one of them"
            )
        completions[base] = name
    return [
        _Estimator(
            base=base,
            method=jobs[base]["method"] or "",
            completion=completion,
            completion_method=(jobs[completion]["method"] or "") if completion else "",
            num_folds=jobs[base]["num_folds"],
        )
        for base, completion in completions.items()
    ]


def _read(
    catalog: Catalog, estimator: _Estimator, counting: list[str]
) -> tuple[Estimate, dict[str, Any], npt.NDArray[np.bool_]]:
    """What an estimator says, what the summary tells of it, and which documents the distilled scorer has completed."""
    answer = catalog.ask("tier_scores", jobs=counting, base=estimator.base, completion=estimator.completion)
    scores, stderrs = answer["score"].to_numpy(), answer["stderr"].to_numpy()
    direct, completed = answer["direct"].to_numpy(), answer["completed"].to_numpy()
    predicted = np.isfinite(scores) & ~direct
    # Only those of folds are guesses to be moderated: a prediction's error was measured on many documents at once.
    degrees = math.inf if estimator.num_folds is None else float(estimator.num_folds - 1)
    z = np.full(len(scores), np.nan)
    z[direct], prior = calibrate(scores[direct], stderrs[direct], degrees)
    for group in (predicted & ~completed, completed):
        z[group], _ = calibrate(scores[group], stderrs[group], math.inf)
    facts: dict[str, Any] = {"job": estimator.base, "method": estimator.method, "documents": int(direct.sum())}
    if predicted.any():
        facts |= {"completed_by": estimator.completion, "predicted": int(predicted.sum())}
    if math.isfinite(degrees) and not math.isnan(prior.stderr):
        # JSON has no infinity.
        prior_degrees = prior.degrees if math.isfinite(prior.degrees) else None
        facts["stderr_calibration"] = {"degrees": degrees, "prior_degrees": prior_degrees, "prior_stderr": prior.stderr}
    return Estimate(scores=scores, z=z), facts, completed


def _methods(
    estimators: Sequence[_Estimator], completed: npt.NDArray[np.bool_], num: int
) -> tuple[list[str], npt.NDArray[np.int8]]:
    """Names of methods, the version's first, and the number of each document's one."""
    if len(estimators) > 1:
        return [f"ranks of {', '.join(e.method for e in estimators)}"], np.zeros(num, np.int8)
    return [estimators[0].method, estimators[0].completion_method], completed.astype(np.int8)


def _rows(
    job: Job,
    tier_version: int,
    doc_ids: Any,
    tiering: Tiering,
    scores: npt.NDArray[np.float64],
    methods: list[str],
    method_codes: npt.NDArray[np.int8],
    rows: slice,
) -> pa.Table:
    """A part of `tiers`. Texts are made of numbers only here, so that the whole of a large corpus never has them in memory."""
    num = rows.stop - rows.start
    tiers = pa.DictionaryArray.from_arrays(pa.array(tiering.tiers[rows]), pa.array(TIERS))
    method = pa.DictionaryArray.from_arrays(pa.array(method_codes[rows]), pa.array(methods, pa.string()))
    columns = {
        "tier_version": pa.repeat(pa.scalar(tier_version, pa.int32()), num),
        "doc_id": doc_ids.cast(pa.binary()),
        "tier": tiers.cast(pa.string()),
        "score": pa.array(scores[rows]),
        "method": method.cast(pa.string()),
        "job": pa.repeat(pa.scalar(job.id, pa.string()), num),
    }
    return pa.table(columns, schema=TABLES["tiers"].schema)


def _changes(store: Store, job: Job, tier_version: int) -> dict[str, Any] | None:
    """How many documents moved since the version before; None where there is none. Numbers of documents, not bound to what the job may read."""
    catalog = Catalog(store, tables=["tiers"])
    before = catalog.rows("SELECT max(tier_version) AS v FROM tiers WHERE tier_version < ?", [tier_version])[0]["v"]
    if before is None:
        return None
    changes: dict[str, Any] = {"before": before, "stayed": 0, "moved": {}, "new": 0, "gone": 0}
    for row in catalog.ask("tier_moves", before=before, after=tier_version, job=job.id).to_pylist():
        earlier, later, count = row["tier_before"], row["tier_after"], row["documents"]
        if earlier is None or later is None:
            changes["new" if earlier is None else "gone"] += count
        elif earlier == later:
            changes["stayed"] += count
        else:
            changes["moved"][f"{earlier} to {later}"] = count
    return changes
