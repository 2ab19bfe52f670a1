"""Influence held against planted truth: which kinds of harm do the scores tell from clean text of the same source?

Wikipedia leads with planted harm and real rephrasings by SmolLM2-135M (harms.py) are scored by Atoll's own job, once by each method, and by the baselines that a user would try
first. The planted kind is never shown to a scorer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import rankdata

from manifests.catalog import Catalog
from manifests.store import Store
from manifests.tables import create_store
from pipeline.distill import DistillConfig, distill
from pipeline.ingest import ingest
from pipeline.score import ScoreConfig, score
from pipeline.scoring_texts import encode_documents
from pipeline.sources import SourceSpec
from pipeline.tokenizer import load_tokenizer, train_tokenizer
from tools.bench.baselines import BASELINES
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.harms import GROSS, Harm, planted_corpus, wikipedia_texts
from tools.output import STDERR

Scores = npt.NDArray[np.float64]
_HOLDOUT_SHARE = 0.9
"""Holdout leads are ingested as real text, of which this share is held out; the corpus is ingested as synthetic, of which nothing is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...]
    num_clean: int
    num_per_harm: int
    num_holdout: int
    steps: int
    vocab_size: int


FULL = Size(seeds=(0, 1, 2), num_clean=1000, num_per_harm=80, num_holdout=300, steps=240, vocab_size=2048)
QUICK = Size(seeds=(0,), num_clean=100, num_per_harm=20, num_holdout=60, steps=12, vocab_size=1024)


def measure(quick: bool) -> Mapping[str, Figure]:
    """Named figures over the seeds."""
    size = QUICK if quick else FULL
    found: dict[str, list[float]] = {}
    for seed in size.seeds:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            for name, value in _one_seed(size, seed, Path(folder)).items():
                found.setdefault(name, []).append(value)
                STDERR.print(f"seed {seed}: {name} {value:.3f}", markup=False)
    meanings = {name: _meaning(name) for name in found}
    return {
        name: Figure(values=values, unit=meanings[name][0], meaning=meanings[name][1]) for name, values in found.items()
    }


def _meaning(name: str) -> tuple[str, str]:
    if name == "planted_auc":
        return "AUC", "mean over the kinds of gross harm, both trajectory scores combined by rank"
    if name == "distilled_rank_corr":
        return "Spearman", "of the distilled scorer's predictions, out of sample"
    if name == "docs_per_s":
        return "documents/s", "of the whole job `score`, the training of its model left out"
    method, kind = name.split(": ")
    return "AUC", f"clean text above {kind}, by {method}"


def _one_seed(size: Size, seed: int, folder: Path) -> dict[str, float]:
    planted, holdout = planted_corpus(
        wikipedia_texts(),
        num_clean=size.num_clean,
        num_per_harm=size.num_per_harm,
        num_holdout=size.num_holdout,
        seed=seed,
    )
    store = create_store(str(folder / "store"))
    pq.write_table(pa.table({"text": holdout}), folder / "holdout.parquet")
    # Different harms can make one text; a document has one kind.
    pq.write_table(
        pa.table({"text": [d.text for d in planted], "label": [str(d.harm) for d in planted]}),
        folder / "planted.parquet",
    )
    for name, origin in (("holdout", "real"), ("planted", "synthetic")):
        spec = SourceSpec(
            uri=str(folder / f"{name}.parquet"), format="parquet", corpus=name, origin=origin,
            columns={"label": "label"} if name == "planted" else {},
        )  # fmt: skip
        ingest(store, [spec], holdout_share=_HOLDOUT_SHARE)
    train_tokenizer(store, Catalog(store), vocab_size=size.vocab_size)
    config = ScoreConfig(steps=size.steps, seed=seed, max_holdout_documents=1000, source_documents=0)
    jobs = {}
    figures: dict[str, float] = {}
    methods: dict[str, dict[str, Any]] = {
        "trajectory": {},
        "trajectory with the head": {"layers": "all", "form": "cosine"},
        "reverse": {"estimator": "reverse"},
    }
    for method, options in methods.items():
        began, started = time.monotonic(), [0.0]

        def report(what: str, done: int, total: int | None, started: list[float] = started) -> None:
            if what == "score" and not started[0]:
                started[0] = time.monotonic()

        summary = score(store, config=replace(config, **options), report=report)
        jobs[method] = str(summary["job"])
        STDERR.print(
            f"seed {seed}: {method}: {time.monotonic() - began:.0f} s, holdout loss {summary['checkpoints'][-1]['holdout_loss']}",
            markup=False,
        )
        if method == "trajectory":
            figures["docs_per_s"] = summary["documents"] / (time.monotonic() - started[0])
    kinds, by_method, texts = _scores(store, jobs, [d.text for d in planted], folder)
    by_method["both trajectories by rank"] = rankdata(by_method["trajectory"]) + rankdata(
        by_method["trajectory with the head"]
    )
    by_method["perplexity"] = -_losses(store, jobs["trajectory"], config, texts)
    for name, baseline in BASELINES.items():
        by_method[name] = baseline(list(texts.values()), holdout, seed)
    for method, values in by_method.items():
        for kind in Harm:
            if kind is not Harm.CLEAN:
                figures[f"{method}: {kind}"] = auc(values[kinds == Harm.CLEAN], values[kinds == kind])
    figures["planted_auc"] = float(np.mean([figures[f"both trajectories by rank: {kind}"] for kind in GROSS]))
    sampled = score(store, config=replace(config, sample=len(planted) // 2))
    figures["distilled_rank_corr"] = float(
        distill(store, config=DistillConfig(score_job=sampled["job"], seed=seed))["rank_correlation"]
    )
    return figures


def auc(higher: Scores, lower: Scores) -> float:
    """Chance that one of `higher` stands above one of `lower`, ties counting half (the Mann-Whitney statistic)."""
    ranks = rankdata(np.concatenate([higher, lower]))
    above = ranks[: len(higher)].sum() - len(higher) * (len(higher) + 1) / 2
    return float(above / (len(higher) * len(lower)))


def _scores(
    store: Store, jobs: Mapping[str, str], texts: Sequence[str], folder: Path
) -> tuple[npt.NDArray[np.str_], dict[str, Scores], dict[bytes, str]]:
    """Planted kind, scores by method, and texts by id, of the documents that every method scored, in one order."""
    sql = "SELECT doc_id, label, source_row, " + ", ".join(
        f"max(score) FILTER (WHERE influence.job = '{job}') AS \"{method}\"" for method, job in jobs.items()
    )
    rows = Catalog(store).query(
        f"{sql} FROM influence JOIN documents USING (doc_id) WHERE corpus = 'planted' GROUP BY ALL "
        f"HAVING count(*) = {len(jobs)} ORDER BY doc_id"
    )
    by_method = {method: rows[method].to_numpy() for method in jobs}
    ids, places = rows["doc_id"].to_pylist(), rows["source_row"].to_pylist()
    found = {doc_id: texts[place] for doc_id, place in zip(ids, places, strict=True)}
    return np.array(rows["label"].to_pylist()), by_method, found


def _losses(store: Store, job: str, config: ScoreConfig, texts: Mapping[bytes, str]) -> Scores:
    """Mean loss of each document under the last checkpoint of the trajectory's scoring model: the perplexity filter."""
    import torch

    from pipeline.gradients import batches_by_length, document_losses, pad
    from pipeline.scoring import checkpoint_path
    from pipeline.scoring_model import Checkpoint, build_model

    catalog = Catalog(store)
    tokenizer = load_tokenizer(store, catalog)
    documents = [
        tokens[: config.seq_len]
        for tokens in encode_documents(catalog, tokenizer, pa.array(list(texts), pa.binary())).values()
    ]
    model = build_model(
        config.model, None, vocab_size=tokenizer.vocab_size, longest=config.seq_len, seed=0, device=torch.device("cpu")
    )
    last = Checkpoint.from_bytes(store.get(checkpoint_path(job, config.num_checkpoints - 1)))
    losses = np.zeros(len(documents))
    with torch.no_grad():
        for places in batches_by_length([len(tokens) for tokens in documents], size=32):
            losses[places] = document_losses(
                model, last.parameters, *pad([documents[place] for place in places])
            ).numpy()
    return losses


BENCHMARK = Benchmark(
    name="influence",
    question="Which kinds of planted harm do influence scores tell from clean text of the same source, beside the baselines that a user would try first?",
    measure=measure,
    notes=(
        "Every kind stands against clean leads of the same source; .5 is chance. `reverse` trains its model anew with the same seed and looks at its end only.",
        "`dsir_per_ngram` had its smoothing chosen by its AUC on seed 0.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
