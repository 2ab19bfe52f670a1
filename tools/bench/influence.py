"""Influence held against truth: planted harm, training again on other choices of the documents, and bergson on the same model and documents.

Wikipedia leads with planted harm and real rephrasings by SmolLM2-135M (harms.py) are scored by Atoll's own job, once by each method, and by the baselines that a user would try
first. The planted kind is never shown to a scorer. What is trained again, and why, stands in counterfactual.py and selection.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
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
from pipeline.score import score
from pipeline.score_config import DEFAULT_MODEL, ScoreConfig
from pipeline.scoring_texts import encode_documents
from pipeline.sources import SourceSpec
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer, train_tokenizer
from tools.bench import counterfactual, online
from tools.bench.baselines import BASELINES
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.harms import GROSS, Harm, Planted, planted_corpus, wikipedia_texts
from tools.bench.retraining import Laboratory
from tools.bench.selection import losses_by_choice
from tools.output import STDERR

Scores = npt.NDArray[np.float64]
Values = dict[str, list[float]]
"""Of each figure, one for each seed."""
_HOLDOUT_SHARE = 0.9
"""Holdout leads are ingested as real text, of which this share is held out; the corpus is ingested as synthetic, of which nothing is."""
_SMALL_MODEL = dict(DEFAULT_MODEL) | {"hidden_size": 64, "intermediate_size": 172}
"""Of the counterfactual: small, for it is trained dozens of times."""
_NUM_GROUPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...]
    num_clean: int
    num_per_harm: int
    num_holdout: int
    num_base: int
    """Clean leads that stand for the real text which the corpus is added to."""
    steps: int
    vocab_size: int
    laboratory_documents: int
    laboratory_holdout: int
    epochs: float
    """Tokens of a training on a choice of the documents, as a multiple of all documents' tokens."""
    counterfactual: counterfactual.Size
    side_by_side: bool = True
    """Whether trainings run in processes of their own."""


FULL = Size(
    seeds=(0, 1, 2),
    num_clean=1000,
    num_per_harm=80,
    num_holdout=300,
    num_base=60,
    steps=240,
    vocab_size=2048,
    laboratory_documents=256,
    laboratory_holdout=96,
    epochs=1.0,
    counterfactual=counterfactual.Size(num_halves=32, epochs=6, orders=2, num_checkpoints=4),
)
QUICK = Size(
    seeds=(0,),
    side_by_side=False,
    num_clean=50,
    num_per_harm=7,
    num_holdout=40,
    num_base=8,
    steps=6,
    vocab_size=512,
    laboratory_documents=32,
    laboratory_holdout=16,
    epochs=0.5,
    counterfactual=counterfactual.Size(
        num_halves=3,
        epochs=1,
        orders=1,
        num_checkpoints=2,
        methods=("trajectory, ekfac, dot, damping 0.01", "reverse, dot, damping 0.01"),
        bergson_methods=("dot", "ekfac:damping=0.1,reduction=mean"),
    ),
)


@dataclass(kw_only=True, slots=True)
class _Found:
    """What the seeds brought."""

    figures: Values = field(default_factory=dict)
    results: list[counterfactual.Result] = field(default_factory=list)

    def add(self, seed: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.figures.setdefault(name, []).append(value)
            STDERR.print(f"seed {seed}: {name} {value:.3f}", markup=False)


def measure(quick: bool) -> Mapping[str, Figure]:
    """Named figures over the seeds."""
    size = QUICK if quick else FULL
    found = _Found()
    for seed in size.seeds:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            _one_seed(size, seed, Path(folder), found)
    figures = {
        name: Figure(values=values, unit=_meaning(name)[0], meaning=_meaning(name)[1])
        for name, values in found.figures.items()
    }
    figures |= _counterfactual_figures(found.results)
    overhead = online.measure(quick)
    figures |= {name: figure for name, figure in overhead.items() if name.startswith("online_overhead")}
    # What the issue of this benchmark asks for comes first.
    return {name: figures[name] for name in _FIRST if name in figures} | figures


_FIRST = (
    "planted_auc",
    "lds",
    "lds_bergson",
    "docs_per_s",
    "docs_per_s_vs_bergson",
    "online_overhead",
    "distilled_rank_corr",
    "loss_top_half",
    "loss_all",
    "loss_random_half",
    "loss_bottom_half",
)


def _meaning(name: str) -> tuple[str, str]:
    if name in _MEANINGS:
        return _MEANINGS[name]
    method, kind = name.split(": ")
    return "AUC", f"clean text above {kind}, by {method}"


_NATS = "nats/token"
_MEANINGS = {
    "planted_auc": ("AUC", "mean over the kinds of gross harm, by `trajectory`, the default of `atoll score`"),
    "distilled_rank_corr": ("Spearman", "of the distilled scorer's predictions, out of sample"),
    "docs_per_s": ("documents/s", "of the whole job `score` with its default method, the training of its model left out"),
    "loss_all": (_NATS, "holdout loss after training on all documents"),
    "loss_top_half": (_NATS, "on the half of the tokens with the highest scores, twice over"),
    "loss_random_half": (_NATS, "on a random half, twice over"),
    "loss_bottom_half": (_NATS, "on the half with the lowest scores, twice over"),
    "top_half_less_all": (_NATS, "`loss_top_half` less `loss_all` of the same seed: below zero is better than all"),
    "bottom_half_less_random": (_NATS, "`loss_bottom_half` less `loss_random_half`: above zero is worse than chance"),
    "loss_base": (_NATS, "on the real text alone, as many tokens"),
    "loss_base_and_all": (_NATS, "on the real text and all documents"),
    "loss_base_and_s": (_NATS, "on the real text and tier S (80 % of the positive influence)"),
    "loss_base_and_random_s": (_NATS, "on the real text and as many documents, drawn"),
    "s_documents_share": ("share", "documents that tier S takes"),
    "gain_share_s": ("share", "of what all documents add to the real text alone that S adds"),
    "gain_share_random_s": ("share", "that as many documents, drawn, add"),
}  # fmt: skip


def _counterfactual_figures(results: Sequence[counterfactual.Result]) -> dict[str, Figure]:
    """Our best method and bergson's, each side's chosen by its mean over the seeds, and a row for each method."""
    lds = _transposed([result.datamodeling for result in results])
    lds_bergson = _transposed([result.datamodeling_bergson for result in results])
    speeds = _transposed([result.documents_per_s for result in results])
    speeds_bergson = _transposed([result.documents_per_s_bergson for result in results])
    best = max(lds, key=lambda name: fmean(lds[name]))
    figures = {
        "lds": Figure(values=lds[best], unit="Spearman", meaning=f"linear datamodeling score of our best method here ({best})")
    }  # fmt: skip
    if lds_bergson:
        theirs = max(lds_bergson, key=lambda name: fmean(lds_bergson[name]))
        figures["lds_bergson"] = Figure(
            values=lds_bergson[theirs], unit="Spearman", meaning=f"of bergson's best method here ({theirs})"
        )
        figures["docs_per_s_vs_bergson"] = Figure(
            values=[ours / other for ours, other in zip(speeds[best], speeds_bergson[theirs], strict=True)],
            unit="ratio",
            meaning=f"documents/s of these two ({best}; {theirs}), start-up and loading left out, two threads each",
        )
    if ceilings := [result.ceiling for result in results if result.ceiling is not None]:
        figures["lds_ceiling"] = Figure(
            values=ceilings, unit="Spearman", meaning="between the losses of the same halves trained on in two orders"
        )  # fmt: skip
    for side, scores, speed in (("Atoll", lds, speeds), ("bergson", lds_bergson, speeds_bergson)):
        for name, values in scores.items():
            figures[f"lds, {side}: {name}"] = Figure(
                values=values, unit="Spearman", meaning=f"at {fmean(speed[name]):.0f} documents/s"
            )
    return figures


def _transposed(rows: Sequence[Mapping[str, float]]) -> Values:
    """Of a mapping for each seed, one of lists; only what every seed has."""
    return {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}


def _one_seed(size: Size, seed: int, folder: Path, found: _Found) -> None:
    planted, leads = planted_corpus(
        wikipedia_texts(),
        num_clean=size.num_clean,
        num_per_harm=size.num_per_harm,
        num_holdout=size.num_holdout + size.num_base,
        seed=seed,
    )
    holdout, base = leads[: size.num_holdout], leads[size.num_holdout :]
    store = _planted_store(folder, planted, holdout)
    train_tokenizer(store, Catalog(store), vocab_size=size.vocab_size)
    tokenizer = load_tokenizer(store, Catalog(store))
    config = ScoreConfig(steps=size.steps, seed=seed, max_holdout_documents=1000, source_documents=0)
    jobs, documents_per_s = _score_by_all_methods(store, config, seed)
    found.add(seed, {"docs_per_s": documents_per_s})
    kinds, by_method, texts = _scores(store, jobs, [d.text for d in planted], folder)
    by_method["trajectory and reverse by rank"] = sum(
        (rankdata(by_method[method]) for method in _COMBINED), np.zeros(len(kinds))
    )
    by_method["perplexity"] = -_losses(store, jobs["trajectory"], config, texts)
    for name, baseline in BASELINES.items():
        by_method[name] = baseline(list(texts.values()), holdout, seed)
    aucs = {
        f"{method}: {kind}": auc(values[kinds == Harm.CLEAN], values[kinds == kind])
        for method, values in by_method.items()
        for kind in Harm
        if kind is not Harm.CLEAN
    }
    found.add(seed, {"planted_auc": float(np.mean([aucs[f"trajectory: {kind}"] for kind in GROSS]))} | aucs)
    sampled = score(store, config=replace(config, sample=len(planted) // 2, checkpoint_job=jobs["trajectory"]))
    distilled = distill(store, config=DistillConfig(score_job=sampled["job"], seed=seed))
    found.add(seed, {"distilled_rank_corr": float(distilled["rank_correlation"])})
    laboratory = _laboratory(tokenizer, list(texts.values()), holdout, DEFAULT_MODEL, config)
    laboratory = replace(laboratory, side_by_side=size.side_by_side)
    losses = losses_by_choice(
        laboratory,
        by_method["trajectory"],
        base=tokenizer.encode_batch(base),
        num_tokens=round(size.epochs * laboratory.num_tokens()),
        seed=seed,
    )
    losses["top_half_less_all"] = losses["loss_top_half"] - losses["loss_all"]
    losses["bottom_half_less_random"] = losses["loss_bottom_half"] - losses["loss_random_half"]
    found.add(seed, losses)
    small = _laboratory(
        tokenizer,
        [document.text for document in planted[: size.laboratory_documents]],
        holdout[: size.laboratory_holdout],
        _SMALL_MODEL,
        replace(config, seq_len=64, batch_size=8),
    )
    small = replace(
        small, side_by_side=size.side_by_side, documents=[tokens[: small.seq_len] for tokens in small.documents]
    )
    result = counterfactual.run(small, size.counterfactual, seed=seed, folder=folder)
    found.results.append(result)
    for name, value in (dict(result.datamodeling) | dict(result.datamodeling_bergson)).items():
        STDERR.print(f"seed {seed}: lds {name} {value:.3f}", markup=False)


_METHODS: Mapping[str, Mapping[str, Any]] = {
    "trajectory": {},
    "trajectory in Adam's metric": {"metric": "adam"},
    "trajectory in the plain metric": {"metric": "none"},
    "reverse": {"estimator": "reverse"},
    "reverse by dot product": {"estimator": "reverse", "form": "dot"},
}
_COMBINED = ("trajectory", "reverse")


def _planted_store(folder: Path, planted: Sequence[Planted], holdout: Sequence[str]) -> Store:
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
    return store


def _score_by_all_methods(store: Store, config: ScoreConfig, seed: int) -> tuple[dict[str, str], float]:
    """The job of each method, and the documents/s of the first. The scoring model is trained once."""
    jobs: dict[str, str] = {}
    documents_per_s = 0.0
    for method, options in _METHODS.items():
        began, started = time.monotonic(), [0.0]

        def report(what: str, done: int, total: int | None, started: list[float] = started) -> None:
            if what == "compare with the holdout" and not started[0]:
                started[0] = time.monotonic()

        summary = score(
            store, config=replace(config, **options, checkpoint_job=next(iter(jobs.values()), None)), report=report
        )
        STDERR.print(
            f"seed {seed}: {method}: {time.monotonic() - began:.0f} s, holdout loss {summary['checkpoints'][-1]['holdout_loss']}",
            markup=False,
        )
        if not jobs:
            documents_per_s = summary["documents"] / (time.monotonic() - started[0])
        jobs[method] = str(summary["job"])
    return jobs, documents_per_s


def _laboratory(
    tokenizer: LoadedTokenizer,
    documents: Sequence[str],
    holdout: Sequence[str],
    model: Mapping[str, Any],
    config: ScoreConfig,
) -> Laboratory:
    return Laboratory(
        model=model,
        vocab_size=tokenizer.vocab_size,
        documents=tokenizer.encode_batch(documents),
        holdout=[tokens[: config.seq_len] for tokens in tokenizer.encode_batch(holdout)],
        groups=[place % _NUM_GROUPS for place in range(len(holdout))],
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        learning_rate=config.learning_rate,
        model_seed=config.seed,
    )


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
    question="Do influence scores tell planted harm from clean text, foretell what training on other documents brings, and choose documents well; and what do they cost beside bergson?",
    measure=measure,
    notes=(
        "AUC: every kind stands against clean leads of the same source; .5 is chance. `dsir_per_ngram` had its smoothing chosen by its AUC on seed 0.",
        "Losses: every training sees the same number of tokens, that of the whole corpus once.",
        "Linear datamodeling score: 256 documents of the planted corpus (64 tokens at most), 8 groups of 12 holdout leads, 32 random halves, each trained on in two orders; the mean over the groups of "
        "Spearman's correlation over the halves. `lds` and `lds_bergson` are each side's best of the rows below, chosen by the mean over the seeds.",
        "Needs an environment with bergson, named by BERGSON_PYTHON (tools/bench/bergson_side.py says how).",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
