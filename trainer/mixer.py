"""An island's stream: sequences from its groups by asked weights, which may change between any two sequences.

Its whole state is a few numbers, and from it the very next token comes. Which group each sequence comes from is apportion.py's to say, its documents' order stream.py's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from manifests.errors import Failure
from trainer.apportion import next_group, usable_weights
from trainer.stream import GroupStream, Sequence

CHANGED = "what the stream reads has changed since the checkpoint"


class MixedStream:
    """Sequences mixed from groups of documents."""

    def __init__(
        self,
        groups: Mapping[str, GroupStream],
        *,
        names: Seq[str],
        seq_len: int,
        weights: Mapping[str, float],
        max_repeats: int | None = None,
        last_resort: Collection[str] = frozenset(),
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            groups: a stream for each group that has documents.
            names: all groups, best first: a group that has run out leaves its weight to the next one.
            seq_len: tokens in a sequence.
            weights: asked share of the sequences for each group; see `set_weights`.
            max_repeats: how often a document may come again; None: without end.
            last_resort: groups that take no weight over while another one has documents.
            fingerprint: what the order of the documents follows from, by name: a state is only taken where it's the same.
        """
        self.groups = dict(groups)
        self._names = tuple(names)
        self._seq_len = seq_len
        self._max_repeats = max_repeats
        self._last_resort = frozenset(last_resort)
        self._fingerprint = dict(fingerprint or {})
        self._credits = dict.fromkeys(self._names, 0.0)
        self._left_out: dict[str, Any] = {}
        """States of groups that had documents when the state was saved and have none now: they may come back."""
        self._asked: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        """The share that each group really gets."""
        self.set_weights(weights)

    @property
    def asked(self) -> dict[str, float]:
        """The weights that were asked for."""
        return dict(self._asked)

    @property
    def exhausted(self) -> list[str]:
        """Groups whose documents have come as often as they may."""
        return [name for name in self._names if name in self.groups and not self._has_more(name)]

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Takes new weights from the next sequence on; nothing is lost or repeated. A group without documents leaves its share to the next one.

        Raises:
            ValueError: a weight is negative or not a number, or of a group that there isn't.
            Failure: no group has documents left.
        """
        unknown = sorted(set(weights) - set(self._names))
        if unknown:
            raise ValueError(f"there is no group {unknown[0]!r}; there are {', '.join(self._names)}")
        self._asked = {name: float(weights.get(name, 0.0)) for name in self._names}
        self._reweigh()

    def next_sequence(self) -> Sequence:
        """The next sequence of the mix.

        Raises:
            AtollError: a shard can't be read, or all groups have come as often as they may. The stream stays where it was.
        """
        chosen, owed = next_group(list(self.weights.values()), list(self._credits.values()))
        name = self._names[chosen]
        if not self._has_more(name):  # all the others, too, or it would have no weight
            raise Failure(self._nothing_left())
        sequence = self.groups[name].take(self._seq_len)
        self._credits = dict(zip(self._names, owed, strict=True))
        if not self._has_more(name) and any(self._has_more(other) for other in self._names):
            self._reweigh()
        return sequence

    def carry_credits(self, older: MixedStream) -> None:
        """Takes over what an older stream owes to the groups, so that the mix stays as asked across the change."""
        for name in self._names:
            self._credits[name] = older._credits.get(name, 0.0)

    def state(self) -> str:
        """The whole state, as JSON text of well under 10 KB."""
        return json.dumps(
            {
                "fingerprint": self._fingerprint,
                "credits": self._credits,
                "groups": self._left_out | {name: stream.state() for name, stream in self.groups.items()},
            }
        )

    def load_state(self, state: str) -> None:
        """Goes to where `state` was taken.

        Raises:
            Failure: it was taken of a stream over other data; the message names what differs.
        """
        loaded = json.loads(state)
        if "fingerprint" not in loaded:
            raise Failure("the checkpoint's stream was saved by an older Atoll, before any release; train a new run")
        found = loaded["fingerprint"]
        differing = [name for name in self._fingerprint if found.get(name) != self._fingerprint[name]]
        if differing:
            told = "; ".join(f"{name}: {found.get(name)} there, {self._fingerprint[name]} now" for name in differing)
            raise Failure(
                f"{CHANGED} ({told}): going on would repeat and lose documents; restore it, or train a new run"
            )
        self._credits = {name: loaded["credits"].get(name, 0.0) for name in self._names}
        self._left_out = {name: state for name, state in loaded["groups"].items() if name not in self.groups}
        for name, stream in self.groups.items():
            if name in loaded["groups"]:
                stream.load_state(loaded["groups"][name])
        self._reweigh()

    def close(self) -> None:
        """Stops all readers."""
        for stream in self.groups.values():
            stream.close()

    def _has_more(self, name: str) -> bool:
        stream = self.groups.get(name)
        if stream is None or stream.num_documents == 0:
            return False
        return self._max_repeats is None or stream.passes <= self._max_repeats

    def _reweigh(self) -> None:
        available = {name: self._has_more(name) for name in self._names}
        if not any(available.values()) and self.groups:
            # The next sequence says so; the state can still be saved.
            available = {name: name in self.groups for name in self._names}
        self.weights = usable_weights(self._asked, available, last_resort=self._last_resort)

    def _nothing_left(self) -> str:
        passes = ", ".join(f"{name} {stream.passes}" for name, stream in self.groups.items())
        return (
            f"every document has come {(self._max_repeats or 0) + 1} times (passes: {passes}), and max_repeats allows no more; "
            "add documents, or train a new run with a higher --max-repeats or fewer --steps"
        )
