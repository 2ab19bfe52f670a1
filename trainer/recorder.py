"""What a segment's steps consumed, kept as columns until the round is committed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.schemas import TABLES
from trainer.stream import Sequence, SpanColumns

_SCHEMA = TABLES["consumption"].schema


class SpanRecorder:
    """Collects the spans of steps, with their losses and their contributions."""

    def __init__(self) -> None:
        self._clear()

    def record(
        self,
        step: int,
        sequences: Seq[Sequence],
        losses_BL: npt.NDArray[np.float32],
        contributions_BL: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Notes the spans of one step.

        Args:
            step: number of the inner step.
            sequences: the batch, in its order.
            losses_BL: loss of every predicted token, (batch, seq_len - 1): the sequence's first token is not predicted.
            contributions_BL: contribution of every place, (batch, seq_len); None: not measured.
        """
        for number, (sequence, losses) in enumerate(zip(sequences, losses_BL, strict=True)):
            spans = sequence.columns
            self._spans.append(spans)
            self._steps.append(np.full(len(spans), step))
            self._positions.append(number * len(sequence.tokens) + spans.offsets)
            self._losses.append(_mean_losses(spans, losses))
            if contributions_BL is None:
                self._contributions.append(np.full(len(spans), np.nan, dtype=np.float32))
            else:
                self._contributions.append(_sums(spans, contributions_BL[number]))

    def take(self, *, run: str, island: int, incarnation: int, checkpoint: bytes) -> pa.Table:
        """Everything noted since the last call, as rows of `consumption` that count with a checkpoint."""
        count = sum(len(spans) for spans in self._spans)
        columns: dict[str, Any] = {
            "run": [run] * count,
            "island": np.full(count, island),
            "incarnation": np.full(count, incarnation),
            "step": _chained(self._steps, np.int64),
            "position": _chained(self._positions, np.int32),
            "shard": _chained([spans.shards for spans in self._spans], np.object_),
            "shard_position": _chained([spans.shard_positions for spans in self._spans], np.int32),
            "tier": _chained([spans.tiers for spans in self._spans], np.object_),
            "origin": _chained([spans.origins for spans in self._spans], np.object_),
            "token_start": _chained([spans.starts for spans in self._spans], np.int32),
            "tokens": _chained([spans.tokens for spans in self._spans], np.int32),
            "loss": pa.array(_chained(self._losses, np.float32), pa.float32(), from_pandas=True),
            "checkpoint": [checkpoint] * count,
            "contribution": pa.array(_chained(self._contributions, np.float32), pa.float32(), from_pandas=True),
        }
        self._clear()
        return pa.table([pa.array(columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)

    def _clear(self) -> None:
        self._spans: list[SpanColumns] = []
        self._steps: list[npt.NDArray[np.int64]] = []
        self._positions: list[npt.NDArray[np.int64]] = []
        self._losses: list[npt.NDArray[np.float32]] = []
        self._contributions: list[npt.NDArray[np.float32]] = []


def _chained(parts: Seq[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype)


def _mean_losses(spans: SpanColumns, losses: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Mean loss of each span's predicted tokens; NaN where it has none: losses[i] belongs to token i + 1."""
    sums = np.concatenate([[0.0], np.cumsum(losses, dtype=np.float64)])
    first = np.maximum(spans.offsets, 1) - 1
    end = spans.offsets + spans.tokens - 1
    predicted = np.maximum(end - first, 0)
    means = (sums[np.maximum(end, first)] - sums[first]) / np.where(predicted > 0, predicted, np.nan)
    return means.astype(np.float32)


def _sums(spans: SpanColumns, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sum over each span's places."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return (sums[spans.offsets + spans.tokens] - sums[spans.offsets]).astype(np.float32)
