"""Documents that move to other groups: what has been read stays read, what is begun goes on, nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import Failure
from manifests.mds import read_index
from manifests.store import Store
from manifests.tables import create_store
from tiny import PLACES, U32, TinyShard, doc_id, put_shards
from trainer.carry import carry_over, pack_seen, unpack_seen
from trainer.stream import NEVER, GroupStream

GROUPS = ("S", "A", "B")
LENGTHS = (1, 2, 3, 7, 16, 5)
"""Lengths of the documents of each shard of the first version; there are nine."""
ALL = {number: LENGTHS[number % len(LENGTHS)] for number in range(9 * len(LENGTHS))}
FIRST = [list(range(n, n + len(LENGTHS))) for n in range(0, len(ALL), len(LENGTHS))]


class Version:
    """One assignment of shards to groups."""

    def __init__(self, store: Store, groups: Mapping[str, Sequence[Sequence[int]]], *, key: str) -> None:
        self.entries: dict[str, list[dict[str, Any]]] = {}
        self.shards: dict[str, list[TinyShard]] = {}
        self._store, self._key = store, key
        for group, shards in groups.items():
            index, self.shards[group] = put_shards(store, [{n: ALL[n] for n in shard} for shard in shards])
            self.entries[group] = read_index(index)

    def open(self, seen: Mapping[str, Any] | None = None) -> dict[str, GroupStream]:
        streams = {}
        for group, entries in self.entries.items():
            names = dict.fromkeys((shard.name for shard in self.shards[group]), "S")
            streams[group] = GroupStream(
                self._store,
                entries,
                name=group,
                token_dtype=U32,
                key=self._key,
                origins=names,
                tiers=names,
                seen=None if seen is None else seen[group],
            )
        return streams

    def documents(self, group: str) -> set[int]:
        return {n for shard in self.shards[group] for n in shard.documents}

    def sizes(self) -> dict[str, list[tuple[str, int]]]:
        return {g: [(s.name, len(s.documents)) for s in shards] for g, shards in self.shards.items()}

    def ids(self, wanted: Sequence[str]) -> Iterable[tuple[str, int, bytes]]:
        for shards in self.shards.values():
            for shard in shards:
                if shard.name in wanted:
                    for position, number in enumerate(shard.documents):
                        yield shard.name, position, doc_id(number)


def go_over(old: dict[str, GroupStream], before: Version, after: Version) -> dict[str, GroupStream]:
    def ids_of(shards: Sequence[str]) -> list[tuple[str, int, bytes]]:
        return list({*before.ids(shards), *after.ids(shards)})

    carried = carry_over(old, after.sizes(), members=dict.fromkeys(after.entries), ids_of=ids_of)
    _, data = pack_seen({group: one.seen for group, one in carried.items()})
    seen = unpack_seen(data, name=f"{pack_seen({g: c.seen for g, c in carried.items()})[0]}.npz")
    streams = after.open(seen)
    for group, stream in streams.items():
        stream.begin(at_pass=carried[group].at_pass, rests=carried[group].rests)
    return streams


def finish_pass(stream: GroupStream, ledger: Counter[int], upto: int) -> None:
    """Reads token by token until so many passes are finished and nothing is left begun."""
    while stream.passes < upto or stream.begun():
        ledger.update(stream.take(1).tokens.tolist())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return create_store(str(tmp_path_factory.mktemp("carry") / "store"))


@st.composite
def regroupings(draw: st.DrawFn) -> dict[str, list[list[int]]]:
    """Some of the first version's shards as they are, in any group; the documents of the others in new shards."""
    groups: dict[str, list[list[int]]] = {group: [] for group in GROUPS}
    loose: list[int] = []
    for shard in FIRST:
        if draw(st.booleans()):
            groups[draw(st.sampled_from(GROUPS))].append(shard)
        else:
            loose += shard
    for number in draw(st.permutations(loose)):
        group = groups[draw(st.sampled_from(GROUPS))]
        if not group or group[-1] in FIRST or len(group[-1]) == len(LENGTHS):
            group.append([])
        group[-1].append(number)
    return {group: shards for group, shards in groups.items() if shards}


@settings(max_examples=40, deadline=None)
@given(
    takes=st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(1, 150)), max_size=8),
    second=regroupings(),
    more=st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(1, 60)), max_size=4),
    third=regroupings(),
)
def test_no_token_is_lost_or_comes_before_its_turn_whatever_moves(
    store: Store,
    takes: list[tuple[str, int]],
    second: dict[str, list[list[int]]],
    more: list[tuple[str, int]],
    third: dict[str, list[list[int]]],
) -> None:
    ledger: Counter[int] = Counter()
    first = Version(store, {"S": FIRST[:2], "A": FIRST[2:5], "B": FIRST[5:]}, key="1")
    versions = [first, Version(store, second, key="2"), Version(store, third, key="3")]
    streams = first.open()
    for number, reading in enumerate((takes, more, [])):
        for group, tokens in reading:
            if group in streams:
                ledger.update(streams[group].take(tokens).tokens.tolist())
        if number < 2:
            old = streams
            streams = go_over(old, versions[number], versions[number + 1])
            for stream in old.values():
                stream.close()
    before = Counter(ledger)
    last = versions[-1]
    for group, stream in streams.items():
        upto = stream.passes + 1
        finish_pass(stream, ledger, upto)
        for document in last.documents(group):
            tokens = [document * PLACES + place for place in range(ALL[document])]
            come = {ledger[token] for token in tokens}
            read = max(before[token] for token in tokens)
            assert len(come) == 1  # whole, what was begun before included
            assert come <= ({read} if read >= upto else {read, read + 1} if read else {1})
        stream.close()


def test_a_document_that_is_begun_goes_on_first_where_it_now_stands(store: Store) -> None:
    first = Version(store, {"S": FIRST[:2], "A": FIRST[2:4]}, key="1")
    moved = Version(store, {"S": FIRST[2:4], "A": [[*FIRST[0], *FIRST[1]]]}, key="2")
    old = first.open()
    while not old["S"].begun():
        last = int(old["S"].take(1).tokens[-1])
    new = go_over(old, first, moved)
    assert new["S"].begun() == []
    assert new["A"].take(1).tokens.tolist() == [last + 1]


def test_the_state_with_rests_gives_the_very_next_token(store: Store) -> None:
    first = Version(store, {"S": FIRST[:2], "A": FIRST[2:4]}, key="1")
    moved = Version(store, {"A": [[*FIRST[0], *FIRST[1]], *FIRST[2:4]]}, key="2")
    for taken in range(1, 25):
        old = first.open()
        for stream in old.values():
            stream.take(taken)
        stream = go_over(old, first, moved)["A"]
        for _ in range(20):
            state = stream.state()
            expected = stream.take(1)
            stream.load_state(state)
            again = stream.take(1)
            assert (again.tokens.tolist(), again.spans) == (expected.tokens.tolist(), expected.spans)


def test_new_documents_come_in_the_pass_that_their_group_is_in(store: Store) -> None:
    first = Version(store, {"S": FIRST[:2]}, key="1")
    grown = Version(store, {"S": FIRST[:3]}, key="2")
    old = first.open()
    total = sum(ALL[n] for n in first.documents("S"))
    old["S"].take(3 * total)
    new = go_over(old, first, grown)["S"]
    assert new.passes == 3
    tokens = new.take(sum(ALL[n] for n in grown.documents("S"))).tokens
    assert {int(token) // PLACES for token in tokens} == grown.documents("S")
    assert new.passes == 4


def test_documents_that_have_come_more_often_wait_for_the_others(store: Store) -> None:
    first = Version(store, {"S": FIRST[:2], "B": FIRST[2:4]}, key="1")
    moved = Version(store, {"B": FIRST[1:4]}, key="2")
    old = first.open()
    old["S"].take(3 * sum(ALL[n] for n in first.documents("S")))
    new = go_over(old, first, moved)["B"]
    size = sum(ALL[n] for n in first.documents("B"))
    assert new.is_uneven
    passes = [{int(token) // PLACES for token in new.take(size).tokens} for _ in range(3)]
    assert passes == [first.documents("B")] * 3
    assert not new.is_uneven
    tokens = new.take(sum(ALL[n] for n in moved.documents("B"))).tokens
    assert {int(token) // PLACES for token in tokens} == moved.documents("B")


def test_documents_of_another_group_in_the_same_shard_are_never_read(store: Store) -> None:
    version = Version(store, {"S": FIRST[:2]}, key="1")
    seen = np.full(2 * len(LENGTHS), NEVER, dtype=np.uint8)
    seen[[1, 3, 8]] = 0
    stream = version.open({"S": seen})["S"]
    wanted = {FIRST[0][1], FIRST[0][3], FIRST[1][2]}
    assert stream.num_documents == 3
    tokens = stream.take(2 * sum(ALL[n] for n in wanted)).tokens
    assert {int(token) // PLACES for token in tokens} == wanted
    assert stream.passes == 2
    assert (stream.read_counts() == np.where(seen == NEVER, NEVER, 2)).all()


def test_damaged_counts_are_an_error_that_names_the_object(tmp_path: Path) -> None:
    content, data = pack_seen({"S": np.zeros(5, dtype=np.uint8)})
    with pytest.raises(Failure, match=content):
        unpack_seen(data[:-1] + b"x", name=f"runs/r/seen/{content}.npz")
