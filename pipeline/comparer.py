"""Comparing many documents with directions: in blocks of a fixed number, each on one thread.

So a score depends on the document and its block alone: not on the number of threads, nor on who else is scored.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module

from pipeline.gradients import batches_by_length, pad, window
from pipeline.influence import Direction, Form, compare

Tokens = npt.NDArray[Any]
BLOCK = 64
"""Documents that are sorted into batches together; partitions are whole multiples of it."""
BATCH_TOKENS = 2048


class Comparer:
    """Directions at K checkpoints of a model, loaded, with a copy of the model for each thread."""

    def __init__(
        self,
        model: Module,
        parameters: Sequence[Mapping[str, Tensor]],
        directions: Sequence[Direction],
        *,
        form: Form,
        longest: int,
        num_threads: int,
    ) -> None:
        """Take over the model.

        Args:
            parameters: the model's at each checkpoint.
            longest: tokens of a document that one checkpoint looks at.
        """
        self._parameters, self._directions = parameters, directions
        self._form, self._longest = form, longest
        self._device = next(iter(parameters[0].values())).device
        self._num_columns = len(next(iter(directions[0].target_squares.values())))
        # Hooks and swapped parameters are a model's own, so each thread has one.
        self._models: list[Module] = [copy.deepcopy(model) for _ in range(num_threads - 1)] + [model]

    def compare(self, sequences: Sequence[Tokens]) -> Tensor:
        """scores_DKC; NaN where a document has fewer than two tokens."""
        scores_DKC = torch.full((len(sequences), len(self._directions), self._num_columns), torch.nan)
        blocks = [range(start, min(start + BLOCK, len(sequences))) for start in range(0, len(sequences), BLOCK)]
        free = list(self._models)

        def work(block: range) -> None:
            model = free.pop()
            try:
                self._compare_block(model, [sequences[place] for place in block], scores_DKC[block.start : block.stop])
            finally:
                free.append(model)

        if len(free) == 1:
            with _one_thread(self._device):
                for block in blocks:
                    work(block)
        else:
            with (
                _one_thread(self._device),
                ThreadPoolExecutor(len(free), initializer=torch.set_num_threads, initargs=(1,)) as pool,
            ):
                list(pool.map(work, blocks))
        return scores_DKC

    def _compare_block(self, model: Module, sequences: Sequence[Tokens], scores_DKC: Tensor) -> None:
        num_checkpoints = len(self._directions)
        for k, (parameters, direction) in enumerate(zip(self._parameters, self._directions, strict=True)):
            for places, windows in windows_at(sequences, k, num_checkpoints=num_checkpoints, longest=self._longest):
                padded = pad(windows, device=self._device)
                found_DC, _ = compare(model, parameters, direction, *padded, form=self._form)
                scores_DKC[places, k] = found_DC.float().cpu()


def windows_at(
    sequences: Sequence[Tokens], k: int, *, num_checkpoints: int, longest: int
) -> Iterator[tuple[list[int], list[Tokens]]]:
    """Places and windows of documents at checkpoint k, batch by batch; of a longer document another window at each checkpoint, from its beginning to its end."""
    last = num_checkpoints - 1
    windows = [window(tokens, longest=longest, at=k / last if last else 0.0) for tokens in sequences]
    for places in batches_by_length([len(w) for w in windows], size=max(1, BATCH_TOKENS // longest)):
        yield places, [windows[place] for place in places]


class _one_thread:
    """Sums over several threads depend on their number in the last bits."""

    def __init__(self, device: torch.device) -> None:
        self._before = torch.get_num_threads()
        self._on = device.type == "cpu"

    def __enter__(self) -> None:
        if self._on:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def default_threads(device: torch.device) -> int:
    """How many blocks this process compares side by side: one for each processor, one on a GPU."""
    return len(os.sched_getaffinity(0)) if device.type == "cpu" else 1
