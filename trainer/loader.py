"""An island's sequences in batches, for several data-parallel ranks and DataLoader workers, in an order that doesn't depend on their number.

A step's batch is the next `batch_size` sequences of the island's one order; rank r of R takes the r-th of R equal parts of it, and worker w of W works on every W-th step. Everyone
draws the whole order, since laying tokens out costs little beside a training step (docs/results/streams.md), and keeps its own part. A batch carries the state after its step:
whoever saves it with the parameters resumes at the very next token, whatever the workers have drawn ahead, and with other numbers of ranks and workers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from manifests.errors import UserError
from trainer.mixer import MixedStream
from trainer.stream import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of one step."""

    step: int
    """Number of the step, from 0, since the stream was opened."""
    tokens: npt.NDArray[Any]
    """(sequences, seq_len)."""
    sequences: list[Sequence]
    """With the spans of each."""
    state: str
    """The stream's state after the step, the other ranks' parts included."""


class IslandBatches(IterableDataset[Batch]):
    """The batches of one rank; see `data_loader`."""

    def __init__(
        self, open_stream: Callable[[], MixedStream], *, batch_size: int, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """
        Args:
            open_stream: opens the island's stream where it is to go on; called in each worker, so it can be pickled where there are any.
            batch_size: sequences of all ranks together in a step.
            rank: which part is taken.
            num_ranks: parts.

        Raises:
            UserError: the batch can't be parted evenly, or there is no such rank.
        """
        if batch_size < 1 or num_ranks < 1 or batch_size % num_ranks:
            raise UserError(f"batch_size {batch_size} must be a multiple of the {num_ranks} ranks")
        if not 0 <= rank < num_ranks:
            raise UserError(f"there is no rank {rank} among {num_ranks}")
        self._open_stream = open_stream
        self._batch_size, self._rank, self._num_ranks = batch_size, rank, num_ranks

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        size = self._batch_size // self._num_ranks
        first = self._rank * size
        stream = self._open_stream()
        try:
            step = 0
            while True:
                sequences = [stream.next_sequence() for _ in range(self._batch_size)]
                if step % num_workers == worker:
                    own = sequences[first : first + size]
                    yield Batch(
                        step=step,
                        tokens=np.stack([sequence.tokens for sequence in own]),
                        sequences=own,
                        state=stream.state(),
                    )
                step += 1
        finally:
            stream.close()


def data_loader(batches: IslandBatches, *, num_workers: int = 0) -> DataLoader[Batch]:
    """A torch DataLoader over the batches of a rank.

    Args:
        batches: the rank's.
        num_workers: processes that read ahead; 0: this one reads. They are spawned, for the threads of the store's clients don't survive a fork.
    """
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        multiprocessing_context="spawn" if num_workers else None,
    )


def _as_it_is(batch: Any) -> Any:
    return batch
