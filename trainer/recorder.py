"""What a segment's steps consumed, kept as columns until the round is committed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.schemas import TABLES
from trainer.stream import Sequence, Span

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
        self._seq_len = len(sequences[0].tokens)
        for number, (sequence, losses) in enumerate(zip(sequences, losses_BL, strict=True)):
            self._spans += sequence.spans
            self._steps += [step] * len(sequence.spans)
            self._numbers += [number] * len(sequence.spans)
            self._losses.append(_mean_losses(sequence.spans, losses))
            if contributions_BL is None:
                self._contributions.append(np.full(len(sequence.spans), np.nan, dtype=np.float32))
            else:
                self._contributions.append(_sums(sequence.spans, contributions_BL[number]))

    def take(self, *, run: str, island: int, incarnation: int, checkpoint: bytes) -> pa.Table:
        """Everything noted since the last call, as rows of `consumption` that count with a checkpoint."""
        spans, count = self._spans, len(self._spans)
        nothing = np.empty(0, dtype=np.float32)
        losses = np.concatenate([nothing, *self._losses])
        contributions = np.concatenate([nothing, *self._contributions])
        position = np.asarray(self._numbers, dtype=np.int64) * self._seq_len + [span.offset for span in spans]
        columns: dict[str, Any] = {
            "run": [run] * count,
            "island": np.full(count, island),
            "incarnation": np.full(count, incarnation),
            "step": self._steps,
            "position": position.astype(np.int32),
            "shard": [span.shard for span in spans],
            "shard_position": [span.shard_position for span in spans],
            "tier": [span.tier for span in spans],
            "origin": [span.origin for span in spans],
            "token_start": [span.start for span in spans],
            "tokens": [span.tokens for span in spans],
            "loss": pa.array(losses, pa.float32(), from_pandas=True),
            "checkpoint": [checkpoint] * count,
            "contribution": pa.array(contributions, pa.float32(), from_pandas=True),
        }
        self._clear()
        return pa.table([pa.array(columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)

    def _clear(self) -> None:
        self._spans: list[Span] = []
        self._steps: list[int] = []
        self._numbers: list[int] = []
        self._seq_len = 0
        self._losses: list[npt.NDArray[np.float32]] = []
        self._contributions: list[npt.NDArray[np.float32]] = []


def _mean_losses(spans: Seq[Span], losses: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Mean loss of each span's predicted tokens; NaN where it has none: losses[i] belongs to token i + 1."""
    sums = np.concatenate([[0.0], np.cumsum(losses, dtype=np.float64)])
    first = np.asarray([max(span.offset, 1) - 1 for span in spans])
    end = np.asarray([span.offset + span.tokens - 1 for span in spans])
    predicted = np.maximum(end - first, 0)
    means = (sums[np.maximum(end, first)] - sums[first]) / np.where(predicted > 0, predicted, np.nan)
    return means.astype(np.float32)


def _sums(spans: Seq[Span], values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sum over each span's places."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    first = np.asarray([span.offset for span in spans])
    return (sums[first + [span.tokens for span in spans]] - sums[first]).astype(np.float32)
