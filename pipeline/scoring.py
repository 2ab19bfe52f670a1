"""Scoring one partition of documents: what a worker of the job `score` does, here or on another machine. The job itself is score.py's.

A worker finds all that it needs in the store: the checkpoints, the directions to compare with, the holdout's n-grams. Partitions are whole blocks (comparer.py), so
that a score depends on the document and its block alone: not on the partition, the engine or the number of threads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import safetensors.numpy
import torch

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.schemas import TABLES
from manifests.store import Store
from pipeline.comparer import Comparer
from pipeline.influence import Direction, Form, combine
from pipeline.overlap import ngrams_path, repeats_holdout
from pipeline.scoring_model import Checkpoint, build_model, choose_device
from pipeline.scoring_texts import Partition, encode_documents
from pipeline.tokenizer import load_tokenizer

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all partitions of a job share."""

    store: str
    """URI of the store."""
    job: str
    tokenizer: str
    model: str
    """Fields of the model's config, JSON."""
    model_path: str | None
    seed: int
    num_checkpoints: int
    num_folds: int
    form: Form
    method: str
    probe: str
    probe_weights: tuple[float, ...]
    longest: int
    """Tokens of a document looked at by one checkpoint."""
    sequence_length: int
    """Longest sequence that the model must take."""
    device: str
    num_threads: int
    """Blocks compared side by side; each needs a copy of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What came out of a partition."""

    number: int
    rows: pa.Table
    """Of `influence`."""
    left_out: dict[str, int]
    """Documents without a score, by reason."""


def checkpoint_path(job: str, k: int) -> str:
    """Where a job's checkpoint lies in the store."""
    return f"scoring/{job}/checkpoint-{k}.safetensors"


def direction_path(job: str, k: int) -> str:
    """Where the direction at a checkpoint lies in the store."""
    return f"scoring/{job}/direction-{k}.safetensors"


def score_partition(task: Task, partition: Partition) -> Scored:
    """Scores a partition's documents. The same bits wherever it runs, on one kind of processor."""
    worker = _worker(task)
    ids = partition.ids
    encoded = encode_documents(worker.catalog, worker.tokenizer, ids)
    sequences = [encoded[doc_id] for doc_id in ids.to_pylist()]
    reasons = np.full(len(sequences), "", dtype=object)
    for place, tokens in enumerate(sequences):
        if len(tokens) < 2:
            reasons[place] = "fewer than two tokens"
        elif repeats_holdout(tokens, worker.ngrams):
            reasons[place] = "repeats the holdout"
    scores_DKC = worker.compare(
        [tokens if not reason else tokens[:0] for tokens, reason in zip(sequences, reasons, strict=True)]
    )
    scores_DKPF = scores_DKC.unflatten(2, (len(task.probe_weights), task.num_folds))
    score_D, stderr_D = combine(scores_DKPF, [d.weight for d in worker.directions], task.probe_weights)
    kept = (torch.isfinite(score_D) & torch.isfinite(stderr_D)).numpy()
    reasons[~kept & (reasons == "")] = "the loss or its gradient is not a number"
    mask = pa.array(kept)
    rows = _rows(task, ids.filter(mask), score_D[kept].numpy(), stderr_D[kept].numpy())
    return Scored(number=partition.number, rows=rows, left_out=dict(Counter(r for r in reasons.tolist() if r)))


class _Worker:
    """A task, loaded."""

    def __init__(self, task: Task) -> None:
        self._task = task
        store = Store(task.store)
        self.catalog = Catalog(store, rights=rights_of(store, "job:score"))
        self.tokenizer = load_tokenizer(store, self.catalog, task.tokenizer)
        device = choose_device(task.device)
        model = build_model(
            json.loads(task.model),
            task.model_path,
            vocab_size=self.tokenizer.vocab_size,
            longest=task.sequence_length,
            seed=task.seed,
            device=device,
        )
        checkpoints = range(task.num_checkpoints)
        parameters = [
            Checkpoint.from_bytes(store.get(checkpoint_path(task.job, k))).to(device).parameters for k in checkpoints
        ]
        self.directions = [
            Direction.from_bytes(store.get(direction_path(task.job, k)), device=device) for k in checkpoints
        ]
        self.ngrams = safetensors.numpy.load(store.get(ngrams_path(task.job)))["ngrams"]
        self.compare = Comparer(
            model, parameters, self.directions, form=task.form, longest=task.longest, num_threads=task.num_threads
        ).compare


@lru_cache(maxsize=1)
def _worker(task: Task) -> _Worker:
    return _Worker(task)


def _rows(task: Task, ids: Any, scores: npt.NDArray[np.float64], stderrs: npt.NDArray[np.float64]) -> pa.Table:
    same: Mapping[str, Any] = {
        "method": task.method,
        "checkpoint": f"scoring/{task.job}",
        "probe": task.probe,
        "scored_at": datetime.now(UTC),
        "direct": True,
        "job": task.job,
    }
    own = {"doc_id": ids, "score": pa.array(scores), "stderr": pa.array(stderrs)}
    schema = TABLES["influence"].schema
    columns = [own[f.name] if f.name in own else pa.array([same[f.name]] * len(ids), f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)
