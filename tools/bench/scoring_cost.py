"""What scoring costs as the model and the documents grow, beside bergson on the same model and documents: documents/s and peak memory.

Every measurement is a process of its own. bergson's interpreter is named by BERGSON_PYTHON (bergson_side.py says how to install it); without it Atoll's side
alone is measured. Models are untrained: the cost doesn't depend on it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.retraining import Laboratory
from tools.output import STDERR

_VOCABULARY = 2048
_GROUPS = 4
_METHODS = ("trajectory, ekfac, cosine, damping 0.1", "trajectory, adam, dot")
_BERGSON_METHODS = ("cosine", "ekfac:damping=0.1,reduction=mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model and one number of documents."""

    hidden_size: int
    layers: int
    documents: int

    @property
    def model(self) -> Mapping[str, Any]:
        """The model's config."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.hidden_size * 8 // 3,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }


FULL = (
    Case(hidden_size=96, layers=2, documents=128),
    Case(hidden_size=96, layers=2, documents=1024),
    Case(hidden_size=192, layers=4, documents=128),
    Case(hidden_size=384, layers=4, documents=128),
)
QUICK = (Case(hidden_size=48, layers=1, documents=32),)
_REPETITIONS = 3


def measure(quick: bool) -> Mapping[str, Figure]:
    """Documents/s and peak memory of each case, both sides in turn."""
    figures: dict[str, Figure] = {}
    for case in QUICK if quick else FULL:
        found: dict[str, list[float]] = {}
        for repetition in range(1 if quick else _REPETITIONS):
            laboratory = _laboratory(case, seed=repetition)
            for name, value in (_ours(laboratory) | _bergsons(laboratory)).items():
                found.setdefault(name, []).append(value)
        size = f"{_num_parameters(case) / 1e6:.2f} M parameters, {case.documents} documents"
        for name, values in found.items():
            unit = "MB" if name.startswith("peak") else "documents/s"
            figures[f"{name}: {size}"] = Figure(values=values, unit=unit, meaning="of 20 to 128 tokens")
            STDERR.print(f"  {name}: {size}: {figures[f'{name}: {size}'].median:.4g} {unit}", markup=False)
    return figures


def _laboratory(case: Case, *, seed: int) -> Laboratory:
    rng = np.random.default_rng(seed)
    texts = [
        rng.integers(0, _VOCABULARY, rng.integers(20, 129)).astype(np.uint16)
        for _ in range(case.documents + 8 * _GROUPS)
    ]
    return Laboratory(
        model=case.model,
        vocab_size=_VOCABULARY,
        documents=texts[: case.documents],
        holdout=texts[case.documents :],
        groups=[place % _GROUPS for place in range(8 * _GROUPS)],
        batch_size=8,
        seq_len=128,
        learning_rate=1e-3,
        model_seed=seed,
    )


def _num_parameters(case: Case) -> int:
    return sum(parameter.numel() for parameter in _laboratory(case, seed=0).build().parameters())


def _ours(laboratory: Laboratory) -> dict[str, float]:
    found: dict[str, float] = {}
    for method in _METHODS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            documents_per_s, peak_bytes = pool.submit(_score_here, laboratory, method).result()
        found[f"docs_per_s, Atoll, {method}"] = documents_per_s
        found[f"peak_mb, Atoll, {method}"] = peak_bytes / 1e6
    return found


def _score_here(laboratory: Laboratory, method: str) -> tuple[float, int]:
    """Documents/s, start-up left out, and this process' peak memory."""
    import torch

    from pipeline.comparer import default_threads
    from tools.bench.bergson_side import peak_rss_bytes
    from tools.bench.counterfactual import METHODS, score

    torch.set_num_threads(default_threads(torch.device("cpu")))
    model = laboratory.build()
    (checkpoint,) = laboratory.train(model, range(len(laboratory.documents)), num_tokens=2 * 8 * 128, seed=0)
    began = time.perf_counter()
    score(laboratory, model, [checkpoint], METHODS[method], seed=0)
    return len(laboratory.documents) / (time.perf_counter() - began), peak_rss_bytes()


def _bergsons(laboratory: Laboratory) -> dict[str, float]:
    python = os.environ.get("BERGSON_PYTHON")
    if python is None:
        return {}
    from tools.bench.counterfactual import run_bergson

    found: dict[str, float] = {}
    for method in _BERGSON_METHODS:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            laboratory.build().save_pretrained(Path(folder) / "model")
            result = run_bergson(
                python, laboratory, Path(folder), methods=[method], seed=0, model=Path(folder) / "model"
            )
        found[f"docs_per_s, bergson, {method}"] = result["documents_per_s"][method]
        found[f"peak_mb, bergson, {method}"] = result["peak_rss_bytes"] / 1e6
    return found


BENCHMARK = Benchmark(
    name="scoring_cost",
    question="What does scoring cost as the model and the documents grow, beside bergson on the same model and documents?",
    measure=measure,
    notes=(
        "One checkpoint, 4 groups of 8 holdout documents, two threads each side; the holdout's gradients and the curvature are among the work, imports and the loading of model and data are not.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
