"""An island's stream: sequences of packed documents, mixed from the tiers by asked weights, with the spans that each is made of.

Its whole state is a few numbers (`state`), and from it the very next token comes. The tier of every sequence is decided by apportion.py, the
order of documents by order.py. A sequence is cut from one tier; a document that doesn't end with it goes on in the tier's next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import Failure
from manifests.mds import read_index, shard_name
from manifests.schemas import TIERS
from manifests.store import Store
from trainer.apportion import next_group, usable_weights
from trainer.order import TierOrder
from trainer.reader import ShardReader

_NOTHING: npt.NDArray[Any] = np.empty(0)


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
class Sequence:
    """`seq_len` tokens of one tier, and where they come from."""

    tokens: npt.NDArray[Any]
    tier: str
    spans: list[Span]


class TierStream:
    """One tier's documents as an endless row of tokens, pass after pass."""

    def __init__(
        self,
        store: Store,
        index: bytes,
        *,
        tier: str,
        token_dtype: np.dtype[Any],
        key: str,
        origins: Mapping[str, str],
        excluded: frozenset[bytes] = frozenset(),
        forbidden: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            store: where the pool lies.
            index: the view's index.json.
            tier: name of the view.
            token_dtype: type of the pool's tokens.
            key: everything that the order depends on, as text.
            origins: shard name → real or synthetic.
            excluded: documents that are passed over.
            forbidden: shards whose documents are passed over, and which are never fetched.
        """
        self.tier = tier
        entries = read_index(index)
        self._names = [shard_name(entry) for entry in entries]
        self._origins = [origins[name] for name in self._names]
        self._counts = [int(entry["samples"]) for entry in entries]
        self._reader = ShardReader(store, entries, token_dtype=token_dtype)
        self._key = key
        self._excluded = excluded
        self._forbidden = [name in forbidden for name in self._names]
        self._pass = 0
        self._index = 0
        self._offset = 0
        self._order: TierOrder | None = None

    @property
    def num_documents(self) -> int:
        """Documents in the tier's view, excluded ones too."""
        return sum(self._counts)

    def state(self) -> dict[str, int]:
        """Where the next token is: pass, document within it, token within that."""
        return {"pass": self._pass, "index": self._index, "offset": self._offset}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Goes to where `state` was taken."""
        self._pass, self._index, self._offset = state["pass"], state["index"], state["offset"]
        self._order = None

    def take(self, num_tokens: int) -> Sequence:
        """The next `num_tokens` tokens.

        Raises:
            Failure: a shard can't be read, or every document of the tier is left out.
        """
        pieces: list[npt.NDArray[Any]] = []
        spans: list[Span] = []
        filled = 0
        passed_over = 0
        while filled < num_tokens:
            order = self._order_of_pass()
            shard_number, position = order.locate(self._index)
            doc_id, tokens = self._document(shard_number, position)
            # The rest of a document that is left out is passed over too: that it is may be newer than the cursor.
            if self._offset >= len(tokens):
                passed_over = passed_over + 1
                if passed_over > 2 * self.num_documents:
                    raise Failure(
                        f"tier {self.tier} has no document left to read: all are excluded, forbidden or empty"
                    )
                self._next_document(order)
                continue
            passed_over = 0
            piece = tokens[self._offset : self._offset + num_tokens - filled]
            spans.append(
                Span(
                    doc_id=doc_id,
                    tier=self.tier,
                    origin=self._origins[shard_number],
                    shard=self._names[shard_number],
                    shard_position=position,
                    start=self._offset,
                    tokens=len(piece),
                    offset=filled,
                )
            )
            pieces.append(piece)
            filled += len(piece)
            self._offset += len(piece)
            if self._offset == len(tokens):
                self._next_document(order)
        return Sequence(tokens=np.concatenate(pieces), tier=self.tier, spans=spans)

    def close(self) -> None:
        """Stops the reader's thread."""
        self._reader.close()

    def _document(self, shard_number: int, position: int) -> tuple[bytes, npt.NDArray[Any]]:
        """A document's id and tokens; none where it is left out."""
        if self._forbidden[shard_number]:
            return b"", _NOTHING
        shard = self._reader.shard(shard_number)
        doc_id = shard.doc_id(position)
        return doc_id, _NOTHING if doc_id in self._excluded else shard.tokens(position)

    def _order_of_pass(self) -> TierOrder:
        if self._order is None:
            self._order = TierOrder(self._counts, key=f"{self._key}/{self.tier}/pass {self._pass}")
            self._prefetch(self._order)
        return self._order

    def _prefetch(self, order: TierOrder) -> None:
        upcoming = order.upcoming_shards(self._index)
        self._reader.prefetch(number for number in upcoming if not self._forbidden[number])

    def _next_document(self, order: TierOrder) -> None:
        self._index += 1
        self._offset = 0
        if self._index == order.num_documents:
            self._pass += 1
            self._index = 0
            self._order = None
        elif self._index % 64 == 0:
            self._prefetch(order)


class MixedStream:
    """Sequences mixed from the tiers by weights that may change between any two sequences."""

    def __init__(self, tiers: Mapping[str, TierStream], *, seq_len: int, weights: Mapping[str, float]) -> None:
        """
        Args:
            tiers: a stream for each tier that has documents.
            seq_len: tokens in a sequence.
            weights: asked share of the sequences for each tier; see `set_weights`.
        """
        self._tiers = dict(tiers)
        self._seq_len = seq_len
        self._credits = [0.0] * len(TIERS)
        self._left_out: dict[str, Any] = {}
        """States of tiers that had documents when the state was saved and have none now: they may come back."""
        self.weights: dict[str, float] = {}
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Takes new weights from the next sequence on; nothing is lost or repeated. A tier without documents gives its share to the others."""
        available = {tier: tier in self._tiers and self._tiers[tier].num_documents > 0 for tier in TIERS}
        self.weights = usable_weights({tier: float(weights.get(tier, 0.0)) for tier in TIERS}, available)

    def next_sequence(self) -> Sequence:
        """The next sequence of the mix."""
        chosen, self._credits = next_group([self.weights[tier] for tier in TIERS], self._credits)
        return self._tiers[TIERS[chosen]].take(self._seq_len)

    def state(self) -> str:
        """The whole state, as JSON text of well under 10 KB."""
        return json.dumps(
            {
                "credits": self._credits,
                "tiers": self._left_out | {tier: stream.state() for tier, stream in self._tiers.items()},
            }
        )

    def load_state(self, state: str) -> None:
        """Goes to where `state` was taken."""
        loaded = json.loads(state)
        self._credits = loaded["credits"]
        self._left_out = {tier: state for tier, state in loaded["tiers"].items() if tier not in self._tiers}
        for tier, stream in self._tiers.items():
            if tier in loaded["tiers"]:
                stream.load_state(loaded["tiers"][tier])

    def close(self) -> None:
        """Stops all readers."""
        for stream in self._tiers.values():
            stream.close()
