"""Reading shards: whole, through the store, hash-checked, from a cache that all islands of a host share.

The format is manifests/mds.py. Neither streaming nor torch is imported here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from manifests.catalog import cache_root, write_whole
from manifests.errors import Failure
from manifests.mds import CorruptShard, DecodedShard, decode_shard, object_path, shard_name
from manifests.store import Store

_KEPT_SHARDS = 24
_FETCH_ATTEMPTS = 3


class ShardReader:
    """Decoded shards of one view, fetched ahead in the background."""

    def __init__(self, store: Store, entries: Sequence[Mapping[str, Any]], *, token_dtype: np.dtype[Any]) -> None:
        self._store = store
        self._entries = entries
        self._token_dtype = token_dtype
        # A local store's files are as near as a cache would be.
        self._cache: Path | None = None if store.is_local else cache_root() / "pool"
        self._shards: OrderedDict[int, Future[DecodedShard]] = OrderedDict()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-reader")

    def shard(self, number: int) -> DecodedShard:
        """The shard's documents; waits for the fetch.

        Raises:
            Failure: the shard is corrupt, missing or out of reach, after retries; it names the shard.
        """
        future = self._request(number)
        try:
            return future.result()
        except Failure:
            self._shards.pop(number, None)
            raise

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begins to fetch shards that will be wanted soon."""
        for number in numbers:
            self._request(number)

    def close(self) -> None:
        """Stops fetching."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _request(self, number: int) -> Future[DecodedShard]:
        future = self._shards.get(number)
        if future is None:
            future = self._shards[number] = self._pool.submit(self._fetch, number)
        self._shards.move_to_end(number)
        while len(self._shards) > _KEPT_SHARDS:
            self._shards.popitem(last=False)[1].cancel()
        return future

    def _fetch(self, number: int) -> DecodedShard:
        entry = self._entries[number]
        path = object_path(shard_name(entry))
        cached = self._cache / path.removeprefix("pool/") if self._cache else None
        if cached is not None and cached.exists():
            try:
                return decode_shard(cached.read_bytes(), entry, token_dtype=self._token_dtype)
            except CorruptShard:
                cached.unlink(missing_ok=True)  # fetched again below
        for attempt in range(_FETCH_ATTEMPTS):
            data = self._store.get(path)
            try:
                shard = decode_shard(data, entry, token_dtype=self._token_dtype)
            except CorruptShard as e:
                if attempt + 1 == _FETCH_ATTEMPTS:
                    raise CorruptShard(
                        f"{self._store.uri}/{path}: {e}, {_FETCH_ATTEMPTS} times; run `atoll shard` again with the object removed"
                    ) from e
                continue
            if cached is not None:
                write_whole(cached, data)
            return shard
        raise AssertionError("unreachable")
