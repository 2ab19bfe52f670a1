"""What has been read stays read when the documents move to other groups: from the streams over an older tier version to the ones over a newer.

Pure functions of arrays and rows. A document keeps how often it has come; in its new group it comes again once the group's passes have reached that number. A
document of which a part has been read goes on first in whatever group it now stands.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from manifests.errors import Failure
from trainer.stream import NEVER, GroupStream, Rest

Counts = npt.NDArray[np.uint8]
Place = tuple[str, int]
"""Shard and position."""
IdsOf = Callable[[Sequence[str]], Iterable[tuple[str, int, bytes]]]
"""The documents of shards: shard, position, id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What a new group begins with."""

    seen: Counts
    at_pass: int
    rests: list[Rest]


def carry_over(
    old: Mapping[str, GroupStream],
    new: Mapping[str, Sequence[tuple[str, int]]],
    *,
    members: Mapping[str, Counts | None],
    ids_of: IdsOf,
) -> dict[str, Carried]:
    """How often each document of the new groups has been read, and what is left of those that are begun.

    Args:
        old: the streams so far, by group.
        new: shards of each new group with their number of documents, in the order of its index.
        members: NEVER for the documents of a new group's shards that it hasn't, else 0; None: it has all.
        ids_of: asked for the ids of shards that only one side has: few, after a re-tiering.
    """
    read = _counts_by_shard(old)
    rests = [rest for stream in old.values() for rest in stream.begun()]
    sizes = {shard: size for shards in new.values() for shard, size in shards}
    unknown = sorted(set(sizes) - set(read))
    moved = _Moved(read, rests, gone=sorted(set(read) - set(sizes)), ids_of=ids_of if unknown else lambda _: ())
    found: dict[str, Counts] = {shard: np.zeros(sizes[shard], dtype=np.uint8) for shard in unknown}
    places = {(rest.shard, rest.position): rest.offset for rest in rests if rest.shard in sizes}
    for shard, position, doc_id in ids_of(unknown) if unknown else ():
        found[shard][position] = moved.counts.get(doc_id, 0)
        if doc_id in moved.begun:
            places[shard, position] = moved.begun[doc_id]
    carried = {}
    for name, shards in new.items():
        seen = np.concatenate(
            [np.empty(0, dtype=np.uint8), *(found.get(shard, read.get(shard)) for shard, _ in shards)]  # type: ignore[list-item]
        )
        stranger = members[name]
        # A shard that an older grouping had in part tells nothing of the rest of it: that was in no group, so it has not come.
        seen[seen == NEVER] = 0
        if stranger is not None:
            seen[stranger == NEVER] = NEVER
        carried[name] = Carried(
            seen=seen,
            at_pass=old[name].passes if name in old else 0,
            rests=[
                Rest(shard=shard, position=position, offset=offset)
                for (shard, position), offset in places.items()
                if _has(shards, seen, shard, position)
            ],
        )
    return carried


class _Moved:
    """Documents of shards that the new groups don't have: how often they have come, and which are begun."""

    def __init__(
        self, read: Mapping[str, Counts], rests: Sequence[Rest], *, gone: Sequence[str], ids_of: IdsOf
    ) -> None:
        self.counts: dict[bytes, int] = {}
        self.begun: dict[bytes, int] = {}
        begun = {(rest.shard, rest.position): rest.offset for rest in rests}
        for shard, position, doc_id in ids_of(gone) if gone else ():
            count = int(read[shard][position])
            if count != NEVER:
                self.counts[doc_id] = count
            if (shard, position) in begun:
                self.begun[doc_id] = begun[shard, position]


def _counts_by_shard(streams: Mapping[str, GroupStream]) -> dict[str, Counts]:
    read: dict[str, Counts] = {}
    for stream in streams.values():
        for shard, counts in stream.counts_by_shard():
            # A shard may stand in several groups, each with documents of its own in it.
            read[shard] = np.minimum(read[shard], counts) if shard in read else counts
    return read


def _has(shards: Sequence[tuple[str, int]], seen: Counts, shard: str, position: int) -> bool:
    start = 0
    for name, size in shards:
        if name == shard:
            return bool(seen[start + position] != NEVER)
        start += size
    return False


def pack_seen(seen: Mapping[str, Counts]) -> tuple[str, bytes]:
    """The counts of all groups as an object's content, and its hash."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name.encode().hex(): counts for name, counts in sorted(seen.items())})  # type: ignore[arg-type]
    data = buffer.getvalue()
    return xxhash.xxh3_128_hexdigest(data), data


def unpack_seen(data: bytes, *, name: str) -> dict[str, Counts]:
    """What `pack_seen` made.

    Args:
        name: the object's name, which ends with its hash, for the message.

    Raises:
        Failure: it isn't what was written.
    """
    if xxhash.xxh3_128_hexdigest(data) != name.rpartition("/")[2].partition(".")[0]:
        raise Failure(f"{name} is not what was written; restore it, or train a new run")
    loaded: Any = np.load(io.BytesIO(data), allow_pickle=False)
    return {bytes.fromhex(key).decode(): loaded[key] for key in loaded.files}
