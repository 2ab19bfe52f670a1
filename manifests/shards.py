"""Fetching a shard of the pool: whole, checked, again where it arrives damaged or not at all, and then with an error that names it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from manifests.errors import ObjectMissing, StoreUnreachable
from manifests.mds import CorruptShard, DecodedShard, decode_shard, object_path, shard_name
from manifests.store import Store

_ATTEMPTS = 3
_PAUSE_S = 1.0
"""Before the second attempt; twice as long before each further one. Within an attempt, the store's own client tries again, too."""


def fetch_shard(store: Store, entry: Mapping[str, Any], *, token_dtype: np.dtype[Any]) -> tuple[DecodedShard, bytes]:
    """A shard's documents, and the object that they came in.

    Args:
        store: where the pool lies.
        entry: the shard's index entry.
        token_dtype: type of the pool's tokens.

    Raises:
        CorruptShard: it's damaged, each time.
        ObjectMissing: there is none.
        StoreUnreachable: the store failed, each time.
    """
    path = object_path(shard_name(entry))
    pause_s = 0.0 if store.is_local else _PAUSE_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            data = store.get(path)
            return decode_shard(data, entry, token_dtype=token_dtype), data
        except ObjectMissing as e:
            raise ObjectMissing(
                f"{e}: a shard of a view is gone; restore it; `atoll shard --verify` shows what else is"
            ) from e
        except CorruptShard as e:
            if attempt == _ATTEMPTS:
                raise CorruptShard(
                    f"{store.uri}/{path}: {e}, {_ATTEMPTS} times; run `atoll shard` again with the object removed"
                ) from e
        except StoreUnreachable as e:
            if attempt == _ATTEMPTS:
                raise StoreUnreachable(f"shard {shard_name(entry)}: {e}; tried {_ATTEMPTS} times") from e
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("unreachable")
