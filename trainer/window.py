"""A window of documents in the order in which they are read, their tokens laid one after the other.

A sequence is then a slice, and the spans that it is made of are found by a binary search: no work for each document as it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.mds import DecodedShard

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Documents that have tokens, in reading order."""

    numbers: _Ints
    """Each document's number in the pass."""
    shards: _Ints
    """Number of the shard that holds it."""
    positions: _Ints
    """Its place within the shard."""
    doc_ids: list[bytes]
    first_tokens: _Ints
    """The first of its tokens that is here; 0 but for a document of which a part has been read before."""
    starts: _Ints
    """Where its tokens begin in `tokens`; one more: where the last one's end."""
    tokens: npt.NDArray[Any]

    def find(self, number: int, offset: int) -> tuple[int, int]:
        """The first document from `number` on, and the place in `tokens` of token `offset` of it, or of its first one where it isn't `number` itself."""
        document = int(np.searchsorted(self.numbers, number))
        if document == len(self.numbers):
            return document, len(self.tokens)
        place = int(self.starts[document])
        if self.numbers[document] == number:
            place = min(place + offset, int(self.starts[document + 1]))
        return document, place

    def piece(self, document: int, place: int, stop: int) -> tuple[int, _Ints, _Ints]:
        """The documents that `tokens[place:stop]` is made of, the first of which is `document`.

        Returns:
            The number of the first document after them; for each of them the place of its first token there, and the number of tokens.
        """
        end = int(self.starts.searchsorted(stop))
        edges = self.starts[document : end + 1].copy()
        edges[0], edges[-1] = place, stop
        return end, edges[:-1], edges[1:] - edges[:-1]


def make_window(
    shards: Mapping[int, DecodedShard],
    shard_of: _Ints,
    position_of: _Ints,
    numbers: _Ints,
    *,
    token_dtype: np.dtype[Any],
    excluded: Collection[bytes] = frozenset(),
    first_tokens: _Ints | None = None,
) -> Window:
    """Lays out documents of shards.

    Args:
        shards: the shards, by number.
        shard_of: shard of each document, in reading order.
        position_of: place of each within its shard.
        numbers: number of each in the pass, ascending.
        token_dtype: type of the tokens.
        excluded: documents that are left out; those without tokens are, too.
        first_tokens: tokens of each that are left out at its front; None: none.
    """
    ids, tokens = _slices(shards, shard_of, position_of)
    first = np.zeros(len(numbers), dtype=np.int64) if first_tokens is None else first_tokens
    if first_tokens is not None:
        tokens = [piece[k * token_dtype.itemsize :] for piece, k in zip(tokens, first.tolist(), strict=True)]
    sizes = np.fromiter((len(piece) for piece in tokens), dtype=np.int64, count=len(tokens))
    kept = sizes > 0
    if excluded:
        kept &= np.fromiter((doc_id not in excluded for doc_id in ids), dtype=np.bool_, count=len(ids))
    if not kept.all():
        which = np.flatnonzero(kept).tolist()
        ids, tokens = [ids[i] for i in which], [tokens[i] for i in which]
        numbers, shard_of, position_of, first, sizes = (
            column[kept] for column in (numbers, shard_of, position_of, first, sizes)
        )
    return Window(
        numbers=numbers,
        shards=shard_of,
        positions=position_of,
        doc_ids=ids,
        first_tokens=first,
        starts=np.concatenate([[0], np.cumsum(sizes // token_dtype.itemsize)]),
        tokens=np.frombuffer(b"".join(tokens), dtype=token_dtype),
    )


def _slices(
    shards: Mapping[int, DecodedShard], shard_of: _Ints, position_of: _Ints
) -> tuple[list[bytes], list[memoryview]]:
    """Each document's id, and its tokens as bytes where they lie."""
    first = np.empty(len(shard_of), dtype=np.int64)
    stop = np.empty(len(shard_of), dtype=np.int64)
    for number, shard in shards.items():
        of_it = np.flatnonzero(shard_of == number)
        first[of_it], stop[of_it] = shard.byte_ranges(position_of[of_it])
    raw = {number: shard.raw for number, shard in shards.items()}
    ids, tokens = [], []
    for number, begin, end in zip(shard_of.tolist(), first.tolist(), stop.tolist(), strict=True):
        data = raw[number]
        ids.append(bytes(data[begin - DecodedShard.ID_BYTES : begin]))
        tokens.append(data[begin:end])
    return ids, tokens
