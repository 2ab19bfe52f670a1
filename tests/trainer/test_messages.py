"""The feedback protocol: what it says is what was meant, and no network brings its readers apart."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import reduce

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.messages import (
    FULL_EVERY,
    NUM_FULL,
    PATIENCE,
    VERSION,
    CorruptMessage,
    Heard,
    Message,
    Scale,
    Teller,
    decode,
    encode,
    from_text,
    levels_of,
    to_text,
)

SCALES = (
    Scale(name="gap", kind="linear", quantum=0.01, importance=2.0),
    Scale(name="trend", kind="linear", quantum=0.5),
    Scale(name="time", kind="log", quantum=0.125),
)
_VALUES = st.fixed_dictionaries(
    {scale.name: st.one_of(st.none(), st.floats(-30, 30), st.just(math.nan)) for scale in SCALES}
)


def _teller(**more: int) -> Teller:
    return Teller(scales=SCALES, island=3, incarnation=2, **more)


def _read(messages: Sequence[bytes]) -> Heard:
    return reduce(Heard.joined, [Heard.of(decode(data, SCALES)) for data in messages], Heard())


def test_a_value_comes_back_within_half_a_quantum() -> None:
    linear, _, log = SCALES
    assert linear.value(linear.level(1.2345)) == pytest.approx(1.2345, abs=0.005)
    assert linear.value(linear.level(-1.2345)) == pytest.approx(-1.2345, abs=0.005)
    assert math.log(log.value(log.level(0.037)) or 0) == pytest.approx(math.log(0.037), abs=0.0625)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_unknown(value: float | None) -> None:
    assert [scale.level(value) for scale in SCALES] == [None] * 3
    assert SCALES[0].value(None) is None
    assert SCALES[2].level(0.0) is None


def test_a_message_is_full_until_one_is_acknowledged_and_then_says_what_has_changed() -> None:
    teller = _teller()
    first = decode(teller.tell(1, {"gap": 0.5, "trend": 1.0, "time": 0.1}), SCALES)
    assert (first.back, first.told, first.changes) == (0, 0b111, (50, 2, -18))
    second = decode(teller.tell(2, {"gap": 0.5, "trend": 1.0}), SCALES)
    assert (second.back, second.told, second.changes) == (0, 0b011, (50, 2))
    teller.acknowledge((2, 1))
    third = decode(teller.tell(3, {"gap": 0.53, "trend": 1.0, "time": None}), SCALES)
    assert (third.back, third.told, third.changes) == (2, 0b101, (3, None))
    heard = _read([encode(third), encode(first)])
    assert heard.states(3) == {(2, 1): (50, 2, -18), (2, 3): (53, 2, None)}
    assert heard.acknowledged == (2, 1)


@pytest.mark.parametrize("key", [None, (1, 1), (2, 9)], ids=["lost all", "another incarnation's", "never sent"])
def test_a_reader_that_has_no_base_is_told_in_full(key: tuple[int, int] | None) -> None:
    teller = _teller()
    teller.tell(1, {"gap": 0.5})
    teller.acknowledge((2, 1))
    teller.acknowledge(key)
    assert decode(teller.tell(2, {"gap": 0.6}), SCALES).back == 0


def test_a_base_grows_too_old() -> None:
    teller = _teller()
    teller.tell(1, {"gap": 0.5})
    teller.acknowledge((2, 1))
    backs = [decode(teller.tell(n, {"gap": 0.5}), SCALES).back for n in range(2, FULL_EVERY + 3)]
    assert backs == [*range(1, FULL_EVERY), 0, 0]


@given(st.lists(_VALUES, min_size=1, max_size=80), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_all_readers_come_to_the_same_whatever_is_delivered_how(
    told: list[dict[str, float | None]], chance: random.Random
) -> None:
    """Two readers get the same messages, each in an order of its own and some of them twice; acknowledgements are lost or late, and the island restarts."""
    teller, sent, meant = _teller(), [], {}
    heard = Heard()
    acknowledgements: list[tuple[int, int] | None] = []
    for sequence, values in enumerate(told, start=1):
        if chance.random() < 0.05:
            teller = Teller(scales=SCALES, island=3, incarnation=teller.incarnation + 1)
        data = teller.tell(sequence, values)
        meant[teller.incarnation, sequence] = levels_of(values, SCALES)
        if chance.random() < 0.3:
            continue  # lost for everyone
        sent.append(data)
        if chance.random() < 0.6:
            heard = heard.joined(Heard.of(decode(chance.choice(sent), SCALES)))
        if chance.random() < 0.1:
            heard = Heard()  # the reader that acknowledges is another one now
        acknowledgements.append(heard.acknowledged)
        if chance.random() < 0.5:
            teller.acknowledge(chance.choice(acknowledgements))
    readers = []
    for _ in range(2):
        mail = sent + chance.choices(sent, k=len(sent) // 2) if sent else []
        chance.shuffle(mail)
        cut = chance.randrange(len(mail) + 1)
        readers.append(_read(mail[:cut]).joined(_read(mail[cut:])))
    assert readers[0] == readers[1]
    assert readers[0].joined(readers[1]) == readers[0]
    states = readers[0].states(len(SCALES))
    assert states == {key: meant[key] for key in states}  # nothing is ever misread
    arrived = [decode(data, SCALES) for data in sent]
    if arrived and (arrived[-1].back == 0 or arrived[-1].base in {message.key for message in arrived}):
        assert max(states) == arrived[-1].key  # what can be known is known
    fulls = [message for message in readers[0].messages.values() if message.back == 0]
    assert len(fulls) <= NUM_FULL


_MESSAGES = st.builds(
    lambda incarnation, sequence, back, levels: Message(
        version=VERSION, island=3, incarnation=incarnation, sequence=sequence, back=min(back, sequence),
        told=0b111, changes=tuple(levels),
    ),
    st.integers(1, 2), st.integers(1, 6), st.integers(0, 3), st.lists(st.integers(-2, 2), min_size=3, max_size=3),
)  # fmt: skip


@given(*[st.lists(_MESSAGES, max_size=6)] * 3)
@settings(max_examples=300, deadline=None)
def test_joining_is_a_semilattice_even_for_messages_that_no_island_sends(
    a: list[Message], b: list[Message], c: list[Message]
) -> None:
    x, y, z = (reduce(Heard.joined, map(Heard.of, messages), Heard()) for messages in (a, b, c))
    assert x.joined(x) == x
    assert x.joined(y) == y.joined(x)
    assert x.joined(y).joined(z) == x.joined(y.joined(z))


def test_within_a_budget_the_most_telling_goes_first_and_nothing_waits_for_ever() -> None:
    teller = _teller(budget_bytes=1)
    first = decode(teller.tell(1, {"gap": 0.0, "trend": 0.0, "time": 1.0}), SCALES)
    assert first.told == 0b111  # what others build on is whole
    teller.acknowledge((2, 1))
    told = set()
    for sequence in range(2, 2 * PATIENCE + 4):
        # What changes most is `gap`, ever more; but the others have their turn.
        message = decode(teller.tell(sequence, {"gap": 0.01 * (sequence % 9 + 1), "trend": 0.5, "time": 1.1}), SCALES)
        assert message.told.bit_count() == 1
        told.add(message.told)
    assert told == {0b001, 0b010, 0b100}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a feedback message"),
        (b"\xc1rubbish", "not a feedback message"),
        (msgspec.msgpack.encode([1, 2, 3]), "not a feedback message"),
        (msgspec.msgpack.encode([VERSION + 1, 0, 1, 1, 0, 0, []]), f"of version {VERSION + 1}"),
        (msgspec.msgpack.encode([VERSION, 0, 1, 1, 0, 3, [1]]), "can't be"),
        (msgspec.msgpack.encode([VERSION, 0, 1, 1, 2, 0, []]), "can't be"),
        (msgspec.msgpack.encode([VERSION, 0, 1, 1, 0, 8, [1]]), "can't be"),
        (msgspec.msgpack.encode([VERSION, 0, 1, 1, 0, 1, [2**40]]), "can't be"),
    ],
    ids=[
        "empty",
        "no msgpack",
        "short",
        "version",
        "fewer than told",
        "base before the start",
        "no such field",
        "huge",
    ],
)
def test_rubbish_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(CorruptMessage, match=words):
        decode(data, SCALES)


def test_bytes_travel_in_text() -> None:
    data = _teller().tell(1, {"gap": 0.5})
    assert from_text(to_text(data)) == data
    for rubbish in (7, None, "\N{SNOWMAN}", "\x7f"):
        with pytest.raises(CorruptMessage):
            from_text(rubbish)
