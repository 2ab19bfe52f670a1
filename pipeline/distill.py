"""The job `distill`: scores at CPU cost for the documents that a score job on a sample left out.

It fits the distilled scorer (distilled.py) to the directly scored documents, keeps it in the store, and predicts the rest of the train split in partitions; an attempt after
a crash goes on with the same scorer at the first partition that isn't there. Its kind is `score` too: it adds rows to those of the job it rests on, its base.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.numpy
import xxhash

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Job, Report, make_job, report_nothing
from manifests.policy import Rights, rights_inputs, that_may_be_read
from manifests.schemas import TABLES
from manifests.store import Store
from pipeline.distilled import VERSION, DistilledModel, features_of, fit
from pipeline.engine import Engine, InProcess
from pipeline.overlap import ngrams_path, repeats_holdout
from pipeline.score import score_counts
from pipeline.texts import read_texts
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer

MIN_FIT = 50
WEAK = 0.3
"""Rank correlation out of sample below which predictions say little."""
_BATCH = 256
"""Texts that are tokenised together."""
_SAMPLE_FIRST = "score a sample first: atoll score --sample N"


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """How documents are predicted; all of it is part of the job's identity."""

    score_job: str | None = None
    """The base: job whose direct scores are learned from; None: the newest that has any."""
    seed: int = 0
    """Of the folds, and of the choice where there are more than `max_fit` scores."""
    max_fit: int = 20_000
    """Most documents to learn from; their features are held in memory, and twice more while fitting."""
    partition_size: int = 2048
    """Documents predicted between two commits."""

    def __post_init__(self) -> None:
        if self.max_fit < MIN_FIT:
            raise ValueError(f"max_fit is {self.max_fit}; it must be {MIN_FIT} or more")
        if self.partition_size < 1:
            raise ValueError(f"partition_size is {self.partition_size}; it must be 1 or more")


def distill(
    store: Store, *, config: DistillConfig, engine: Engine | None = None, report: Report = report_nothing
) -> dict[str, Any]:
    """Predicts the score of every document of the train split that the base has no direct score of.

    The base only knows the documents that it couldn't score by their absence, so of a base that scored a sample, these are predicted too. A base that went over the whole
    split has judged all that there was: only what was ingested since is predicted. A document that repeats the holdout gets no score here either.

    Args:
        engine: where partitions are predicted; None: in this process.

    Returns:
        The summary: job, base, method, documents predicted, not predicted (they repeat the holdout) and fitted on, the facts of the fit (distilled.py), standard error of a prediction, share below zero, seconds; a
        `warning` where the predictions are hardly better than chance; `already_done` where the same job was finished before and nothing was changed.

    Raises:
        UserError: there is no such base, it has too few direct scores, or nothing is left to predict.
        Failure: the text of a document is gone.
    """
    rights = rights_of(store, "job:score")
    catalog = Catalog(store, rights=rights)
    base = _base(catalog, config.score_job)
    direct = _direct_scores(catalog, base)
    ids = _unscored(catalog, base)
    options = asdict(config) | {"base": base["job"], "features": VERSION}
    del options["score_job"]
    inputs = {"base": base["job"], "documents": _fingerprint(ids, direct["doc_id"])} | rights_inputs(catalog.rights)
    job = make_job(store, "score", config=options, inputs=inputs)
    if (done := job.summary()) is not None:
        return done | {"already_done": True}
    started = time.monotonic()
    path = f"scoring/{job.id}/distilled.safetensors"
    if not store.exists(path):
        store.put_content(path, _fit(catalog, direct, config, report).to_bytes())
    # What lies there counts, also where another attempt wrote it: all partitions are predicted by the same scorer.
    model = DistilledModel.from_bytes(store.get(path))
    spec = PartSpec(
        store_uri=store.uri,
        job=job.id,
        model=path,
        rights=rights,
        method=f"distilled/{direct['method'][0].as_py()}",
        checkpoint=direct["checkpoint"][0].as_py(),
        probe=direct["probe"][0].as_py(),
        tokenizer=json.loads(base["config"]).get("tokenizer"),
        ngrams=ngrams_path(base["job"]),
    )
    _predict(job, spec, ids, config.partition_size, engine or InProcess(), report)
    summary = {
        "job": job.id,
        "base": base["job"],
        "method": spec.method,
        **score_counts(store, job, num_wanted=len(ids)),
        "fitted_on": min(len(direct), config.max_fit),
        **model.facts,
        "stderr": round(model.stderr, 6),
        "seconds": round(time.monotonic() - started, 1),
    }
    if (found := model.facts["rank_correlation"]) < WEAK:
        summary["warning"] = (
            f"predicted scores order the documents hardly better than chance (rank correlation {found:.2f} out of sample): "
            "score a larger sample, or more exactly, before tiers are made of them"
        )
    job.commit(summary)
    return summary | {"already_done": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """What all partitions of one job share; small, and can be pickled."""

    store_uri: str
    job: str
    model: str
    """Object of the scorer."""
    rights: Rights | None
    method: str
    checkpoint: str
    probe: str
    tokenizer: str | None
    """Of the base's holdout n-grams; None where it has none, as an online one."""
    ngrams: str
    """Object of the base's holdout n-grams."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Documents that are predicted together."""

    ids: Sequence[bytes]
    name: str
    """Which they are, for errors."""


def predict_part(spec: PartSpec, part: _Part) -> pa.Table:
    """Rows of `influence` for one partition, in the order of the ids. One at a time in a process."""
    opened = _opened(spec)
    found: list[bytes] = []
    repeated: set[bytes] = set()

    def texts() -> Iterator[str]:
        read = read_texts(opened.catalog, doc_ids=pa.array(part.ids, pa.binary()))
        while batch := list(islice(read, _BATCH)):
            found.extend(doc_id for doc_id, _ in batch)
            repeated.update(opened.repeats([doc_id for doc_id, _ in batch], [text for _, text in batch]))
            yield from (text for _, text in batch)

    scores = dict(zip(found, opened.model.predict(texts()).tolist(), strict=True)) if part.ids else {}
    same = {
        "method": spec.method,
        "stderr": opened.model.stderr,
        "checkpoint": spec.checkpoint,
        "probe": spec.probe,
        "scored_at": datetime.now(UTC),
        "direct": False,
        "job": spec.job,
    }
    rows = [same | {"doc_id": doc_id, "score": scores[doc_id]} for doc_id in part.ids if doc_id not in repeated]
    return pa.Table.from_pylist(rows, schema=TABLES["influence"].schema)


class _Opened:
    """What a worker needs of a job, loaded."""

    def __init__(self, spec: PartSpec) -> None:
        store = Store(spec.store_uri)
        self.catalog = Catalog(store, tables=["documents", "sources", "tokenizers"], rights=spec.rights)
        self.model = DistilledModel.from_bytes(store.get(spec.model))
        self._tokenizer: LoadedTokenizer | None = None
        if spec.tokenizer is not None and store.exists(spec.ngrams):
            self._tokenizer = load_tokenizer(store, self.catalog, spec.tokenizer)
            self._ngrams = safetensors.numpy.load(store.get(spec.ngrams))["ngrams"]

    def repeats(self, ids: Sequence[bytes], texts: Sequence[str]) -> list[bytes]:
        """Those that repeat the holdout, by the measure of `atoll score`."""
        if self._tokenizer is None:
            return []
        encoded = self._tokenizer.encode_batch(texts)
        return [doc_id for doc_id, tokens in zip(ids, encoded, strict=True) if repeats_holdout(tokens, self._ngrams)]


@lru_cache(maxsize=1)
def _opened(spec: PartSpec) -> _Opened:
    return _Opened(spec)


def _predict(job: Job, spec: PartSpec, ids: pa.ChunkedArray[Any], size: int, engine: Engine, report: Report) -> None:
    """Appends all partitions that aren't there yet."""
    parts = range(1, -(-len(ids) // size) + 1)
    # They are appended in order.
    numbers = parts[bisect_left(parts, True, key=lambda part: not job.has_part("influence", part)) :]

    def missing() -> Iterator[_Part]:
        for number in numbers:
            start = (number - 1) * size
            own = ids.slice(start, size).to_pylist()
            yield _Part(ids=own, name=f"documents {start} to {start + len(own) - 1} of those to predict")

    try:
        report("predict", min((numbers.start - 1) * size, len(ids)), len(ids))
        results = engine.map(partial(predict_part, spec), missing(), name=lambda part: part.name)
        for number, rows in zip(numbers, results, strict=True):
            job.append("influence", rows, part=number)
            report("predict", min(number * size, len(ids)), len(ids))
    finally:
        _opened.cache_clear()


def _fit(catalog: Catalog, direct: pa.Table, config: DistillConfig, report: Report) -> DistilledModel:
    """The scorer, from no more than `max_fit` of the scores."""
    if len(direct) > config.max_fit:
        chosen = np.random.default_rng(config.seed).choice(len(direct), config.max_fit, replace=False)
        direct = direct.take(np.sort(chosen))
    found: list[bytes] = []

    def texts() -> Iterator[str]:
        for done, (doc_id, text) in enumerate(read_texts(catalog, doc_ids=direct["doc_id"])):
            if done % 1000 == 0:
                report("read", done, len(direct))
            found.append(doc_id)
            yield text

    features = features_of(texts())
    report("read", len(direct), len(direct))
    # The scores in the order in which the texts came.
    place = {doc_id: n for n, doc_id in enumerate(direct["doc_id"].to_pylist())}
    order = np.array([place[doc_id] for doc_id in found])
    return fit(
        features,
        direct["score"].to_numpy()[order],
        direct["stderr"].to_numpy()[order],
        seed=config.seed,
        report=lambda done, total: report("fit", done, total),
    )


def _base(catalog: Catalog, wanted: str | None) -> dict[str, Any]:
    """The row of `jobs` of the base."""
    jobs = catalog.rows(
        """
        SELECT job, config, inputs FROM jobs
        WHERE kind = 'score' AND job IN (SELECT job FROM influence WHERE direct)
        ORDER BY written_at DESC, job
        """
    )
    if wanted is not None and wanted not in [row["job"] for row in jobs]:
        known = ", ".join(row["job"] for row in jobs) or "none"
        raise UserError(
            f"{catalog.store.uri} has no score job {wanted} with direct scores{that_may_be_read(catalog.rights)}; there are: {known}"
        )
    if not jobs:
        raise UserError(
            f"{catalog.store.uri} has no direct scores to learn from{that_may_be_read(catalog.rights)}; {_SAMPLE_FIRST}"
        )
    return next(row for row in jobs if wanted in (None, row["job"]))


def _direct_scores(catalog: Catalog, base: dict[str, Any]) -> pa.Table:
    """Score of each document that the base has measured, in the order of their ids."""
    direct = catalog.query(
        """
        SELECT doc_id, method, score, stderr, checkpoint, probe FROM influence
        WHERE job = ? AND direct AND doc_id IN (SELECT doc_id FROM documents)
        ORDER BY doc_id
        """,
        [base["job"]],
    )
    if len(direct) < MIN_FIT:
        raise UserError(
            f"score job {base['job']} has {len(direct)} direct scores{that_may_be_read(catalog.rights)}, and {MIN_FIT} are the least to learn from; "
            "score a larger sample: atoll score --sample N"
        )
    methods = sorted(set(direct["method"].to_pylist()))
    if len(methods) > 1 or len(direct["doc_id"].unique()) < len(direct):
        raise UserError(
            f"score job {base['job']} has several scores of a document (methods {', '.join(methods)}); choose a job of one with --score-job"
        )
    return direct


def _unscored(catalog: Catalog, base: dict[str, Any]) -> pa.ChunkedArray[Any]:
    """Ids of the documents to predict, in the order in which their texts lie. They stay in memory, some 24 bytes each; texts don't."""
    sampled = json.loads(base["config"]).get("sample") is not None
    judged = [] if sampled else json.loads(base["inputs"]).get("ingest")
    since = "" if sampled else f"AND job NOT IN ({', '.join('?' * len(judged))})" if judged else "AND false"
    ids = catalog.query(
        f"""
        SELECT doc_id FROM documents
        WHERE split = 'train' AND doc_id NOT IN (SELECT doc_id FROM influence WHERE job = ? AND direct) {since}
        QUALIFY row_number() OVER (PARTITION BY doc_id ORDER BY source_uri, source_row) = 1
        ORDER BY source_uri, source_row
        """,
        [base["job"], *(judged or [])],
    )["doc_id"]
    if not len(ids):
        why = (
            "every document has a direct score"
            if sampled
            else f"score job {base['job']} went over all documents{that_may_be_read(catalog.rights)}: every document has a direct score, or can't have one"
        )
        raise UserError(f"there is nothing to predict: {why}; {_SAMPLE_FIRST}")
    return ids


def _fingerprint(*ids: pa.ChunkedArray[Any]) -> list[list[Any]]:
    """Number and hash of some lists of ids: documents that come or are forgotten make another job, whose partitions are others."""
    found: list[list[Any]] = []
    for each in ids:
        hash_ = xxhash.xxh3_128()
        for chunk in each.chunks:
            for start in range(0, len(chunk), 1 << 16):
                hash_.update(b"".join(chunk.slice(start, 1 << 16).to_pylist()))
        found.append([len(each), hash_.hexdigest()])
    return found
