"""How feedback travels: in whole numbers, as what has changed against what its reader is known to have. A network may lose, repeat, delay and reorder it.

Every message stands for the whole state of one island at one of its sequence numbers: a *full* one by itself, any other together with its *base*, a full one that the
reader has acknowledged. So nothing depends on the order of arrival, and to a reader that has lost all it had, or is another one now, everything is told in full.

What a reader has of an island is a set of messages that only grows, less those that no message to come can need; two readers' sets are joined by union. That is a
join-semilattice (Shapiro et al., Conflict-free Replicated Data Types, 2011): joining is commutative, associative and idempotent, so that readers that have got the
same messages know the same, whatever happened on the way. Knows no store and no clock.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from manifests.errors import Failure

VERSION = 1
"""Of the encoding and of the fields' meaning. A reader refuses others."""
FULL_EVERY = 32
"""A message goes with a base that is younger than so many sequence numbers: what has changed since stays small, and a reader needn't keep more."""
NUM_FULL = 16
"""The newest full messages of an island that may be a base: so many are kept, on either side."""
PATIENCE = 8
"""Messages that a field which has changed is left out of, for want of room, before it goes first."""

Levels = tuple[int | None, ...]
"""A state: each field as a multiple of its quantum; None where it's unknown."""
Key = tuple[int, int]
"""Incarnation and sequence number: newer is greater."""


class CorruptMessage(Failure):
    """Bytes that are no message of this version. They must not be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How a field becomes a whole number."""

    name: str
    kind: Literal["linear", "log"]
    """linear: value / quantum. log: ln(value) / quantum, for what is above 0."""
    quantum: float
    """A smaller change isn't told: it should lie below the field's own noise."""
    importance: float = 1.0
    """Where not all fit in, a field's change counts for so much."""

    def level(self, value: float | None) -> int | None:
        """The nearest multiple; None for what is unknown, not finite, or has no logarithm."""
        if value is None or not math.isfinite(value) or (self.kind == "log" and value <= 0):
            return None
        level = round((math.log(value) if self.kind == "log" else value) / self.quantum)
        return max(-_LARGEST, min(_LARGEST, level))

    def value(self, level: int | None) -> float | None:
        """What a reader takes it for."""
        if level is None:
            return None
        return math.exp(level * self.quantum) if self.kind == "log" else level * self.quantum


_LARGEST = 2**31 - 1
_OF_NEWS = 16
"""What becomes known, or unknown, counts for so many quanta."""


def levels_of(values: Mapping[str, float | None], scales: Sequence[Scale]) -> Levels:
    """A state of values by the scales' names; what has none is unknown."""
    return tuple(scale.level(values.get(scale.name)) for scale in scales)


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What is sent, field by field in this order."""

    version: int
    island: int
    incarnation: int
    sequence: int
    back: int
    """The base's sequence number is this much smaller, its incarnation the same; 0: a full message."""
    told: int
    """Bit i is set where field i is told. In a full message the others are unknown; else they are as in the base."""
    changes: tuple[int | None, ...]
    """Of the fields that are told, in order: level less the base's (0 where that is unknown), or None: unknown now."""

    @property
    def key(self) -> Key:
        """Its place among the island's messages."""
        return (self.incarnation, self.sequence)

    @property
    def base(self) -> Key:
        """The message that it goes with."""
        return (self.incarnation, self.sequence - self.back)


_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """As it travels; equal messages are equal bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, scales: Sequence[Scale]) -> Message:
    """A message from its bytes.

    Raises:
        CorruptMessage: they are none, or of another version.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as e:
        raise CorruptMessage(f"not a feedback message: {e}") from e
    if message.version != VERSION:
        raise CorruptMessage(
            f"a feedback message of version {message.version}; this Atoll knows version {VERSION}: run the same Atoll on all islands"
        )
    numbers = (message.island, message.incarnation, message.sequence, message.back, message.told)
    if (
        min(numbers) < 0
        or message.told >= 1 << len(scales)
        or message.told.bit_count() != len(message.changes)
        or message.back > message.sequence
        or any(change is not None and abs(change) > 2 * _LARGEST for change in message.changes)
    ):
        raise CorruptMessage("a feedback message with numbers that can't be")
    return message


def to_text(data: bytes) -> str:
    """Bytes for a description in JSON, five characters for four bytes."""
    return base64.b85encode(data).decode()


def from_text(text: object) -> bytes:
    """What `to_text` was given.

    Raises:
        CorruptMessage: it was never made by it.
    """
    try:
        return base64.b85decode(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError) as e:
        raise CorruptMessage(f"not a feedback message: {e}") from e


# Sending.


@dataclass(kw_only=True, slots=True)
class Teller:
    """One island's side, for one incarnation of it."""

    scales: Sequence[Scale]
    island: int
    incarnation: int
    budget_bytes: int = 0
    """The changes in a message that isn't full take no more; 0: no bound. One is always told."""
    _full: dict[int, Levels] = field(default_factory=dict)
    """Sequence number → state, of the newest full messages."""
    _acknowledged: int | None = None
    _left_out: dict[int, int] = field(default_factory=dict)
    """Field → messages in a row that had no room for its change."""

    def acknowledge(self, key: Key | None) -> None:
        """Takes which full message is the newest that the reader says it has. None: it has none."""
        is_own = key is not None and key[0] == self.incarnation and key[1] in self._full
        self._acknowledged = key[1] if key is not None and is_own else None

    def tell(self, sequence: int, values: Mapping[str, float | None]) -> bytes:
        """The message of a sequence number, above all before."""
        levels = levels_of(values, self.scales)
        base = self._acknowledged
        if base is not None and sequence - base >= FULL_EVERY:
            base = None
        before: Levels = self._full[base] if base is not None else (None,) * len(levels)
        changed = [i for i, level in enumerate(levels) if level != before[i]]
        chosen = changed if base is None or not self.budget_bytes else self._choose(changed, levels, before)
        message = Message(
            version=VERSION,
            island=self.island,
            incarnation=self.incarnation,
            sequence=sequence,
            back=sequence - base if base is not None else 0,
            told=sum(1 << i for i in chosen),
            changes=tuple(_change(levels[i], before[i]) for i in chosen),
        )
        if base is None:
            self._full[sequence] = _applied(message, before)
            self._full = {n: self._full[n] for n in sorted(self._full)[-NUM_FULL:]}
        return encode(message)

    def _choose(self, changed: list[int], levels: Levels, before: Levels) -> list[int]:
        """Of the fields that have changed the most telling ones that fit in; those that were left out for long go first."""

        def urgency(i: int) -> tuple[bool, float]:
            change = _change(levels[i], before[i])
            novelty = _OF_NEWS if change is None or before[i] is None else abs(change)
            waited = self._left_out.get(i, 0)
            return waited >= PATIENCE, self.scales[i].importance * novelty * (1 + waited)

        room = self.budget_bytes
        chosen: list[int] = []
        for i in sorted(changed, key=urgency, reverse=True):
            room -= len(msgspec.msgpack.encode(_change(levels[i], before[i])))
            if room < 0 and chosen:
                break
            chosen.append(i)
        self._left_out = {i: self._left_out.get(i, 0) + 1 for i in changed if i not in chosen}
        return sorted(chosen)


def _change(level: int | None, before: int | None) -> int | None:
    return None if level is None else level - (before or 0)


def _applied(message: Message, base: Levels) -> Levels:
    levels, changes = list(base), iter(message.changes)
    for i in range(len(levels)):
        if message.told >> i & 1:
            change = next(changes)
            levels[i] = None if change is None else (base[i] or 0) + change
    return tuple(levels)


# Reading.


@dataclass(frozen=True, slots=True)
class Heard:
    """What a reader has of one island."""

    messages: Mapping[Key, Message] = field(default_factory=dict)
    floor: Key = (0, 0)
    """The newest base that the island has used. It goes back to no older one, so that nothing older is kept."""

    @staticmethod
    def of(message: Message) -> Heard:
        """Of one message."""
        return Heard({message.key: message}, message.base if message.back else (0, 0))

    def joined(self, other: Heard) -> Heard:
        """What one has who has both, of the same island."""
        messages = dict(self.messages)
        for key, message in other.messages.items():
            # Two that differ under one key are nobody's doing but a fault's; all readers settle on the same one.
            if key not in messages or _rank(messages[key]) < _rank(message):
                messages[key] = message
        floor = max(self.floor, other.floor)
        full = [key for key, message in sorted(messages.items()) if message.back == 0][-NUM_FULL:]
        kept = {key: m for key, m in sorted(messages.items()) if key >= floor and (m.back > 0 or key in full)}
        return Heard(kept, floor)

    @property
    def acknowledged(self) -> Key | None:
        """The newest full message."""
        return max((key for key, message in self.messages.items() if message.back == 0), default=None)

    def states(self, num_fields: int) -> dict[Key, Levels]:
        """The state at every message whose base is there."""
        nothing: Levels = (None,) * num_fields
        full = {key: _applied(m, nothing) for key, m in self.messages.items() if m.back == 0}
        rest = {key: _applied(m, full[m.base]) for key, m in self.messages.items() if m.back and m.base in full}
        return dict(sorted((full | rest).items()))


def _rank(message: Message) -> tuple[bool, bytes]:
    return message.back == 0, encode(message)
