"""Reading shards: whole, through the store, hash-checked, from a cache that all islands of a host share.

The format is manifests/mds.py. Neither streaming nor torch is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from manifests.errors import AtollError
from manifests.mds import CorruptShard, DecodedShard, decode_shard, object_path, shard_name
from manifests.shards import fetch_shard
from manifests.store import Store
from trainer.cache import ShardCache

_THREADS = 4


class ShardReader:
    """Decoded shards of one view, fetched ahead in the background."""

    def __init__(self, store: Store, entries: Sequence[Mapping[str, Any]], *, token_dtype: np.dtype[Any]) -> None:
        self._store = store
        self._entries = entries
        self._token_dtype = token_dtype
        # A local store's files are as near as a cache would be.
        self._cache: ShardCache | None = None if store.is_local else ShardCache()
        self._shards: dict[int, Future[DecodedShard]] = {}
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="shard-reader")

    def take(self, numbers: Sequence[int]) -> dict[int, DecodedShard]:
        """These shards' documents; waits for the fetches, and keeps nothing of them.

        Raises:
            AtollError: a shard is corrupt, missing or out of reach, after retries; it names the shard. All are still to be had.
        """
        self.prefetch(numbers)
        try:
            shards = {number: self._shards[number].result() for number in numbers}
        except AtollError:
            for number, future in list(self._shards.items()):
                if future.done() and future.exception() is not None:
                    del self._shards[number]
            raise
        for number in numbers:
            del self._shards[number]
        return shards

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begins to fetch shards that will be wanted soon."""
        for number in numbers:
            if number not in self._shards:
                self._shards[number] = self._pool.submit(self._fetch, number)

    def forget(self) -> None:
        """Gives up what was fetched ahead: the place in the order has changed."""
        for future in self._shards.values():
            future.cancel()
        self._shards = {}

    def close(self) -> None:
        """Stops fetching."""
        self.forget()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, number: int) -> DecodedShard:
        entry = self._entries[number]
        cached = object_path(shard_name(entry)).removeprefix("pool/")
        if self._cache is not None and (data := self._cache.get(cached)) is not None:
            try:
                return decode_shard(data, entry, token_dtype=self._token_dtype)
            except CorruptShard:
                self._cache.drop(cached)  # fetched again below
        shard, data = fetch_shard(self._store, entry, token_dtype=self._token_dtype)
        if self._cache is not None:
            self._cache.put(cached, data)
        return shard
