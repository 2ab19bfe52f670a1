"""One group of documents as an endless row of tokens, pass after pass: the tier S, or whatever an SQL expression puts together.

Its whole state is a few numbers (`state`), and from it the very next token comes. The order is order.py's. A sequence is cut from one group (mixer.py decides
which); a document that doesn't end with it goes on in the group's next one.

A document may have been read before a stream begins: under an older tier version (carry.py). `seen` says how often, and a pass reads those that haven't been
read more often than it: so nothing is read again before its turn, wherever it has moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import Failure
from manifests.mds import shard_name
from manifests.store import Store
from trainer.order import TierOrder
from trainer.reader import ShardReader
from trainer.window import Window, make_window

NEVER = 255
"""In `seen`: a document that the group doesn't have, though its shard does."""
MOST_SEEN = 254
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of one document in one sequence."""

    doc_id: bytes
    tier: str
    origin: str
    """real or synthetic."""
    shard: str
    """Hash of the shard that it was read from."""
    shard_position: int
    """The document's place within the shard."""
    start: int
    """First token's place in the document."""
    tokens: int
    offset: int
    """First token's place in the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanColumns:
    """The spans of a sequence as columns of the same length; see Span."""

    doc_ids: list[bytes]
    tiers: npt.NDArray[np.object_]
    origins: npt.NDArray[np.object_]
    shards: npt.NDArray[np.object_]
    shard_positions: _Ints
    starts: _Ints
    tokens: _Ints
    offsets: _Ints

    def __len__(self) -> int:
        return len(self.doc_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """`seq_len` tokens of one group, and where they come from."""

    tokens: npt.NDArray[Any]
    group: str
    columns: SpanColumns

    @property
    def spans(self) -> list[Span]:
        """The pieces of documents that it's made of."""
        c = self.columns
        rows = zip(
            c.doc_ids, c.tiers, c.origins, c.shards, c.shard_positions.tolist(), c.starts.tolist(), c.tokens.tolist(), c.offsets.tolist(),
            strict=True,
        )  # fmt: skip
        return [
            Span(doc_id=i, tier=t, origin=o, shard=s, shard_position=p, start=b, tokens=n, offset=at)
            for i, t, o, s, p, b, n, at in rows
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """A document of which a part has been read under an older tier version: the rest comes first."""

    shard: str
    position: int
    offset: int
    """First token that hasn't been read."""


class GroupStream:
    """One group's documents as an endless row of tokens, pass after pass."""

    def __init__(
        self,
        store: Store,
        entries: Seq[Mapping[str, Any]],
        *,
        name: str,
        token_dtype: np.dtype[Any],
        key: str,
        origins: Mapping[str, str],
        tiers: Mapping[str, str],
        seen: npt.NDArray[np.uint8] | None = None,
        excluded: Collection[bytes] = frozenset(),
        forbidden: Collection[str] = frozenset(),
    ) -> None:
        """
        Args:
            store: where the pool lies.
            entries: index entries of the shards that hold the group's documents; the order follows from them.
            name: name of the group.
            token_dtype: type of the pool's tokens.
            key: everything else that the order depends on, as text.
            origins: shard name → real or synthetic.
            tiers: shard name → tier.
            seen: how often each document, shard after shard, has been read before, at most MOST_SEEN; NEVER: it isn't of the group. None: none has been.
            excluded: documents that are passed over.
            forbidden: shards whose documents are passed over, and which are never fetched.
        """
        self.name = name
        self._names = [shard_name(entry) for entry in entries]
        self._name_column = np.array(self._names, dtype=object)
        self._origins = np.array([origins[n] for n in self._names], dtype=object)
        self._tiers = np.array([tiers[n] for n in self._names], dtype=object)
        self._counts = np.array([int(entry["samples"]) for entry in entries], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)]).astype(np.int64)
        self._reader = ShardReader(store, entries, token_dtype=token_dtype)
        self._token_dtype = token_dtype
        self._key = key
        self._excluded = excluded
        self._forbidden = np.array([n in forbidden for n in self._names], dtype=np.bool_)
        self._seen = seen
        members = seen[seen != NEVER] if seen is not None else np.zeros(0, dtype=np.uint8)
        self.num_documents = int(self._starts[-1]) if seen is None else len(members)
        """Documents of the group, excluded ones too."""
        self._most_seen = int(members.max(initial=0))
        self._has_strangers = seen is not None and len(members) < len(seen)
        self._orders: dict[int, TierOrder] = {}
        self._rests: list[Rest] = []
        self._rests_of_window: list[Rest] = []
        self._pass = int(members.min(initial=MOST_SEEN)) if len(members) else 0
        self._first_pass = self._pass
        self._index = 0
        self._offset = 0
        self._window: Window | None = None
        self._end = 0
        """Number of the first document after the window."""
        self._document = self._place = 0

    @property
    def passes(self) -> int:
        """Passes that are finished."""
        return self._pass

    @property
    def is_uneven(self) -> bool:
        """Whether some documents have been read more often than the pass would have it, so that `seen` still matters."""
        return self._seen is not None and (self._most_seen > self._pass or self._first_pass > 0)

    def state(self) -> dict[str, Any]:
        """Where the next token is: pass, document within it, token within that; and what is left of documents that were begun before the stream was."""
        state: dict[str, Any] = {"pass": self._pass, "index": self._index, "offset": self._offset}
        if self._first_pass:
            state["first_pass"] = self._first_pass
        if self._rests:
            state["rests"] = [[rest.shard, rest.position, rest.offset] for rest in self._rests]
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken."""
        if (state["pass"], state["index"]) != (self._pass, self._index):
            self._reader.forget()
        self._pass, self._index, self._offset = state["pass"], state["index"], state["offset"]
        self._first_pass = state.get("first_pass", 0)
        self._rests = [Rest(shard=s, position=p, offset=o) for s, p, o in state.get("rests", [])]
        self._window = None

    def begin(self, *, at_pass: int, rests: Seq[Rest]) -> None:
        """Starts in a pass, or in the first later one that has documents for it, with the rests of documents that were begun before."""
        first = max(at_pass, self._pass)
        self.load_state({"pass": first, "first_pass": first, "index": 0, "offset": 0})
        self._rests = list(rests)

    def read_counts(self) -> npt.NDArray[np.uint8]:
        """How often each document, shard after shard, has been read so far, one that is begun included; NEVER: it isn't of the group."""
        seen = np.zeros(int(self._starts[-1]), dtype=np.uint8) if self._seen is None else self._seen
        before = seen.astype(np.int64)
        counts = before + np.maximum(0, self._pass - np.maximum(before, self._first_pass))
        done = self._index + (self._offset > 0)
        order, index = self._order(self._pass), 0
        while index < done:
            start, shard_of, position_of = order.window(index)
            places = (self._starts[shard_of] + position_of)[: done - start]
            counts[places[before[places] <= self._pass]] += 1
            index = start + len(shard_of)
        return np.where(seen == NEVER, NEVER, np.minimum(counts, MOST_SEEN)).astype(np.uint8)

    def counts_by_shard(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """`read_counts`, shard by shard."""
        counts = self.read_counts()
        for number, name in enumerate(self._names):
            yield name, counts[self._starts[number] : self._starts[number + 1]]

    def begun(self) -> list[Rest]:
        """The documents of which a part has been read, each with what is left of it."""
        if self._offset == 0:
            return list(self._rests)
        shard, position = self._order(self._pass).locate(self._index)
        return [*self._rests, Rest(shard=self._names[shard], position=position, offset=self._offset)]

    def take(self, num_tokens: int) -> Sequence:
        """The next `num_tokens` tokens.

        Raises:
            AtollError: a shard can't be read, or every document of the group is left out. The stream stays where it was.
        """
        before = self.state()
        try:
            return self._take(num_tokens)
        except BaseException:
            self.load_state(before)
            raise

    def close(self) -> None:
        """Stops the reader's threads."""
        self._reader.close()

    def _take(self, num_tokens: int) -> Sequence:
        pieces: list[npt.NDArray[Any]] = []
        spans: list[SpanColumns] = []
        filled = 0
        while filled < num_tokens:
            window = self._window_with_tokens()
            stop = min(self._place + num_tokens - filled, len(window.tokens))
            end, places, sizes = window.piece(self._document, self._place, stop)
            which = slice(self._document, end)
            shards = window.shards[which]
            spans.append(
                SpanColumns(
                    doc_ids=window.doc_ids[which],
                    tiers=self._tiers[shards],
                    origins=self._origins[shards],
                    shards=self._name_column[shards],
                    shard_positions=window.positions[which],
                    starts=places - window.starts[which] + window.first_tokens[which],
                    tokens=sizes,
                    offsets=places - self._place + filled,
                )
            )
            pieces.append(window.tokens[self._place : stop])
            filled += stop - self._place
            self._move(window, end, stop)
        if len(pieces) == 1:
            return Sequence(tokens=pieces[0], group=self.name, columns=spans[0])
        return Sequence(tokens=np.concatenate(pieces), group=self.name, columns=_joined(spans))

    def _move(self, window: Window, end: int, place: int) -> None:
        """Puts the cursor to `place` of the window; `end` is the first document that begins there or later."""
        part_used = bool(place < window.starts[end])
        self._document, self._place = end - part_used, place
        number = int(window.numbers[end - 1])
        offset = place - int(window.starts[end - 1] - window.first_tokens[end - 1]) if part_used else 0
        if self._rests:
            begun = self._rests_of_window[number]
            part = [Rest(shard=begun.shard, position=begun.position, offset=offset)] if part_used else []
            self._rests = part + self._rests_of_window[number + 1 :]
            if not self._rests:
                self._window = None
            return
        self._index, self._offset = number + (not part_used), offset
        if not part_used and end == len(window.numbers):
            self._index = self._end  # none of the window's documents is left, or only some that are left out
        if self._index == self._order(self._pass).num_documents:
            self._next_pass()

    def _next_pass(self) -> None:
        self._orders.pop(self._pass, None)
        self._pass, self._index, self._offset = self._pass + 1, 0, 0
        self._window = None

    def _window_with_tokens(self) -> Window:
        """The window that the cursor stands in, with a token left in it."""
        passes_at_first = self._pass
        while True:
            if self._window is None:
                self._window = self._rest_window() if self._rests else self._order_window()
                number, offset = (0, 0) if self._rests else (self._index, self._offset)
                self._document, self._place = self._window.find(number, offset)
            if self._place < len(self._window.tokens):
                return self._window
            self._window = None
            if self._rests:
                self._rests = []
                continue
            self._index, self._offset = self._end, 0
            if self._index == self._order(self._pass).num_documents:
                self._next_pass()
            # Two passes, for the first of them may have been begun, and one for each that has no document's turn.
            if self._pass > passes_at_first + 1 + max(0, self._most_seen - passes_at_first):
                raise Failure(f"group {self.name} has no document left to read: all are excluded, forbidden or empty")

    def _rest_window(self) -> Window:
        self._rests_of_window = list(self._rests)
        numbers = {name: number for number, name in enumerate(self._names)}
        shard_of = np.array([numbers[rest.shard] for rest in self._rests], dtype=np.int64)
        return make_window(
            self._reader.take(sorted(set(shard_of.tolist()))),
            shard_of,
            np.array([rest.position for rest in self._rests], dtype=np.int64),
            np.arange(len(self._rests)),
            token_dtype=self._token_dtype,
            excluded=self._excluded,
            first_tokens=np.array([rest.offset for rest in self._rests], dtype=np.int64),
        )

    def _order_window(self) -> Window:
        order = self._order(self._pass)
        start, shard_of, position_of = order.window(self._index)
        self._end = start + len(shard_of)
        turn = self._has_turn(self._pass, shard_of, position_of)
        turn[: self._index - start] = False
        shard_of, position_of = shard_of[turn], position_of[turn]
        wanted = np.unique(shard_of).tolist()
        self._reader.prefetch(wanted)
        self._prefetch_after(order)
        return make_window(
            self._reader.take(wanted),
            shard_of,
            position_of,
            start + np.flatnonzero(turn),
            token_dtype=self._token_dtype,
            excluded=self._excluded,
        )

    def _prefetch_after(self, order: TierOrder) -> None:
        """Begins to fetch the shards of the window after this one."""
        which, index = (self._pass, self._end) if self._end < order.num_documents else (self._pass + 1, 0)
        _, shard_of, position_of = self._order(which).window(index)
        self._reader.prefetch(np.unique(shard_of[self._has_turn(which, shard_of, position_of)]).tolist())

    def _has_turn(self, which: int, shard_of: _Ints, position_of: _Ints) -> npt.NDArray[np.bool_]:
        """Which documents a pass reads."""
        turn = ~self._forbidden[shard_of]
        if self._seen is not None and (self._has_strangers or self._most_seen > which):
            seen = self._seen[self._starts[shard_of] + position_of]
            turn &= (seen <= which) & (seen != NEVER)
        return turn

    def _order(self, which: int) -> TierOrder:
        if which not in self._orders:
            self._orders[which] = TierOrder(self._counts, key=f"{self._key}/{self.name}/pass {which}")
        return self._orders[which]


def _joined(parts: Seq[SpanColumns]) -> SpanColumns:
    arrays = ("tiers", "origins", "shards", "shard_positions", "starts", "tokens", "offsets")
    return SpanColumns(
        doc_ids=[doc_id for part in parts for doc_id in part.doc_ids],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
    )
