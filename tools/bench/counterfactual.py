"""Influence beside bergson's, held against training again: do the scores foretell how a model's holdout loss changes with the half of the documents it is
trained on, and what do they cost?

Both sides get the same model, documents and groups of holdout documents. bergson runs in an environment of its own (bergson_side.py); the variable
BERGSON_PYTHON names its interpreter, and without it Atoll's side alone is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from manifests.errors import Failure
from pipeline.comparer import Comparer, default_threads
from pipeline.estimators import curved_direction, fit_curvature, trajectory_direction
from pipeline.gradients import batches_by_length, linear_layers, mean_gradient, pad
from pipeline.influence import Direction, Form
from tools.bench.retraining import (
    Floats,
    Laboratory,
    Tokens,
    Training,
    datamodeling_score,
    mean_rank_correlation,
    random_halves,
    train_all,
)
from tools.output import STDERR

if TYPE_CHECKING:
    from pipeline.scoring_model import Checkpoint

_BERGSON_SIDE = Path(__file__).with_name("bergson_side.py")
_QUERY_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way of scoring of ours."""

    estimator: Literal["trajectory", "reverse"] = "trajectory"
    form: Form = "dot"
    metric: str = "ekfac"
    layers: str = "blocks"
    damping: float = 0.1


_DAMPINGS = (0.0001, 0.001, 0.01, 0.1)
METHODS: Mapping[str, Method] = {
    "trajectory, plain, dot": Method(metric="none"),
    "trajectory, adam, dot": Method(metric="adam"),
    "trajectory, adam, dot, all layers": Method(metric="adam", layers="all"),
    "trajectory, adam, cosine": Method(metric="adam", form="cosine"),
    **{f"trajectory, ekfac, dot, damping {damping}": Method(damping=damping) for damping in _DAMPINGS},
    "trajectory, ekfac, dot, damping 0.001, all layers": Method(layers="all", damping=0.001),
    "trajectory, ekfac, cosine, damping 0.1": Method(form="cosine"),
    **{f"reverse, dot, damping {damping}": Method(estimator="reverse", damping=damping) for damping in _DAMPINGS},
    "reverse, dot, damping 0.001, all layers": Method(estimator="reverse", layers="all", damping=0.001),
    "reverse, cosine, damping 0.1": Method(estimator="reverse", form="cosine"),
}
BERGSON_METHODS = (
    "dot",
    "cosine",
    "trackstar",
    "trak",
    *(f"ekfac:damping={damping},reduction=mean" for damping in _DAMPINGS),
    "ekfac:damping=0.001",
    "shampoo:damping=0.001,reduction=mean",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    num_halves: int
    epochs: int
    """Times that a training sees each document of its half."""
    orders: int
    """Trainings on each half, each with another order of the documents; their losses are averaged."""
    num_checkpoints: int
    """Of the training on all documents, for a trajectory."""
    methods: Sequence[str] = tuple(METHODS)
    bergson_methods: Sequence[str] = BERGSON_METHODS


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came out of one laboratory."""

    datamodeling: Mapping[str, float]
    """By method of ours."""
    datamodeling_bergson: Mapping[str, float]
    documents_per_s: Mapping[str, float]
    """By method of ours, the holdout's gradients and the curvature among the work; start-up and training left out."""
    documents_per_s_bergson: Mapping[str, float]
    ceiling: float | None
    """Mean rank correlation of the losses of the same halves trained on in two orders: what noise leaves of 1."""


def run(laboratory: Laboratory, size: Size, *, seed: int, folder: Path) -> Result:
    """Trains on random halves, and scores all documents by every method."""
    documents = laboratory.documents
    model = laboratory.build()
    torch.set_num_threads(default_threads(torch.device("cpu")))
    everything = range(len(documents))
    checkpoints = laboratory.train(
        model,
        everything,
        num_tokens=size.epochs * laboratory.num_tokens(),
        seed=seed,
        num_checkpoints=size.num_checkpoints,
    )
    scores: dict[str, Floats] = {}
    speeds: dict[str, float] = {}
    for name in size.methods:
        began = time.perf_counter()
        scores[name] = score(laboratory, model, checkpoints, METHODS[name], seed=seed)
        speeds[name] = len(documents) / (time.perf_counter() - began)
    theirs: dict[str, Floats] = {}
    their_speeds: dict[str, float] = {}
    if (python := os.environ.get("BERGSON_PYTHON")) is not None:
        model.save_pretrained(folder / "model")
        found = run_bergson(python, laboratory, folder, methods=size.bergson_methods, seed=seed, model=folder / "model")
        theirs = {name: np.array(scores) for name, scores in found["scores"].items()}
        their_speeds = found["documents_per_s"]
    else:
        STDERR.print("BERGSON_PYTHON is not set: bergson is left out (bergson_side.py says how to install it)")
    halves_MD = random_halves(len(documents), num_halves=size.num_halves, seed=seed)
    half_tokens = size.epochs * laboratory.num_tokens() // 2
    trainings = [
        Training(
            chosen=tuple(np.flatnonzero(half).tolist()), num_tokens=half_tokens, seed=1000 * (seed + 1) + number + 500 * order
        )
        for order in range(size.orders)
        for number, half in enumerate(halves_MD)
    ]  # fmt: skip
    losses_OMG = np.stack([laboratory.by_group(losses) for losses in train_all(laboratory, trainings)])
    losses_OMG = losses_OMG.reshape(size.orders, size.num_halves, laboratory.num_groups)
    losses_MG = losses_OMG.mean(0)
    return Result(
        datamodeling={name: datamodeling_score(found, halves_MD, losses_MG) for name, found in scores.items()},
        datamodeling_bergson={name: datamodeling_score(found, halves_MD, losses_MG) for name, found in theirs.items()},
        documents_per_s=speeds,
        documents_per_s_bergson=their_speeds,
        ceiling=mean_rank_correlation(losses_OMG[0], losses_OMG[1]) if size.orders > 1 else None,
    )


def score(
    laboratory: Laboratory, model: Any, checkpoints: Sequence[Checkpoint], method: Method, *, seed: int
) -> Floats:
    """scores_DG by one of our methods, with the functions that the job `score` uses."""
    layers = linear_layers(model, method.layers)
    used = checkpoints[-1:] if method.estimator == "reverse" else checkpoints
    directions = [_direction(laboratory, model, layers, checkpoint, method, seed=seed) for checkpoint in used]
    comparer = Comparer(
        model,
        [checkpoint.parameters for checkpoint in used],
        directions,
        form=method.form,
        longest=max(len(tokens) for tokens in laboratory.documents),
        num_threads=default_threads(torch.device("cpu")),
    )
    scores_DKG = comparer.compare(laboratory.documents).double().numpy()
    weights_K = np.array([direction.weight for direction in directions])
    return np.einsum("dkg,k->dg", scores_DKG, weights_K / weights_K.sum())


def _direction(
    laboratory: Laboratory, model: Any, layers: list[str], checkpoint: Checkpoint, method: Method, *, seed: int
) -> Direction:
    groups = np.asarray(laboratory.groups)
    gradients = []
    for group in range(laboratory.num_groups):
        queries = [laboratory.holdout[place] for place in np.flatnonzero(groups == group)]
        gradients.append(mean_gradient(model, checkpoint.parameters, layers, list(_batches(queries)))[0])
    if method.metric == "ekfac":
        curvature = fit_curvature(
            model, checkpoint.parameters, layers, list(_batches(laboratory.documents)), rank=None, seed=seed
        )
        return curved_direction(checkpoint.learning_rate, gradients, curvature, damping=method.damping)
    return trajectory_direction(
        model,
        gradients,
        learning_rate=checkpoint.learning_rate,
        second_moments=checkpoint.second_moments if method.metric == "adam" else None,
        rank=None,
        seed=seed,
    )


def _batches(documents: Sequence[Tokens]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for places in batches_by_length([len(tokens) for tokens in documents], size=_QUERY_BATCH):
        yield pad([documents[place] for place in places])


def run_bergson(
    python: str, laboratory: Laboratory, folder: Path, *, methods: Sequence[str], seed: int, model: Path
) -> dict[str, Any]:
    """What bergson_side.py found: scores_DG and documents/s of each method, and more.

    Raises:
        Failure: bergson ended with an error before its first method was through.
    """
    for name, rows in (
        ("documents", [{"input_ids": tokens.tolist()} for tokens in laboratory.documents]),
        (
            "queries",
            [
                {"input_ids": tokens.tolist(), "group": group}
                for tokens, group in zip(laboratory.holdout, laboratory.groups, strict=True)
            ],
        ),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "model": str(model),
        "documents": str(folder / "documents.jsonl"),
        "queries": str(folder / "queries.jsonl"),
        "methods": list(methods),
        "max_tokens": laboratory.seq_len,
        "seed": seed,
        "device": "cpu",
        "threads": default_threads(torch.device("cpu")),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    out = folder / "bergson.json"
    done = subprocess.run(
        [python, str(_BERGSON_SIDE), str(folder / "spec.json"), str(out)], capture_output=True, text=True, check=False
    )
    if not out.exists():
        raise Failure(f"bergson ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    if done.returncode:
        STDERR.print(f"bergson ended early, after {', '.join(found['scores'])}: {done.stderr[-300:]}", markup=False)
    return found
