"""The order in which a tier's documents come: a pure function of (seed, pass, tier version, tier).

A pass visits every document once. Shards are permuted, taken in windows of a few, and the documents of a window are permuted together,
so that reading needs only a window of shards at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

WINDOW_SHARDS = 8


class TierOrder:
    """The order of one tier in one pass. Documents are addressed by (shard, position)."""

    def __init__(self, documents_per_shard: npt.ArrayLike, *, key: str) -> None:
        """
        Args:
            documents_per_shard: number of documents in each shard of the view.
            key: everything that the order depends on, as text.
        """
        self._counts = np.asarray(documents_per_shard, dtype=np.int64)
        self._key = key
        shards = _generator(key).permutation(len(self._counts))
        self._windows = [shards[i : i + WINDOW_SHARDS] for i in range(0, len(shards), WINDOW_SHARDS)]
        sizes = [int(self._counts[window].sum()) for window in self._windows]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._current = -1
        self._shard_of = self._position_of = np.empty(0, dtype=np.int64)

    @property
    def num_documents(self) -> int:
        """Documents in a pass."""
        return int(self._starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(shard, position within it) of the pass's document number `index`."""
        start, shard_of, position_of = self.window(index)
        return int(shard_of[index - start]), int(position_of[index - start])

    def window(self, index: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The window that holds document number `index`: number of its first document, and the shard and position of each of its documents."""
        window = int(np.searchsorted(self._starts, index, side="right")) - 1
        if window != self._current:
            self._shard_of, self._position_of = self._permute(window)
            self._current = window
        return int(self._starts[window]), self._shard_of, self._position_of

    def upcoming_shards(self, index: int) -> Iterator[int]:
        """Shards of the window that holds `index` and of the next one: what is worth fetching ahead."""
        window = int(np.searchsorted(self._starts, index, side="right")) - 1
        for ahead in self._windows[window : window + 2]:
            yield from (int(shard) for shard in ahead)

    def _permute(self, window: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        shards = self._windows[window]
        shard_of = np.repeat(shards, self._counts[shards])
        position_of = np.concatenate([np.arange(self._counts[shard]) for shard in shards])
        order = _generator(f"{self._key}/window {window}").permutation(len(shard_of))
        return shard_of[order], position_of[order]


def _generator(key: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(xxhash.xxh3_128_intdigest(key.encode())))
