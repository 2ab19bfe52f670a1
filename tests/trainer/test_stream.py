"""Streams: every token of every document once in a pass, whatever is stopped, resumed, excluded or mixed anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import Failure
from manifests.mds import CorruptShard, object_path, read_index
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import create_store
from tiny import PLACES, U32, TinyShard, doc_id, put_shards
from trainer.mixer import MixedStream
from trainer.stream import GroupStream, Sequence

LENGTHS = (1, 2, 3, 7, 16, 17, 40, 5)
"""Lengths of the documents of each shard; sequences are of 16 tokens."""
SEQ_LEN = 16


class Pool:
    """Views of two tiers, S of six shards and A of three, over one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index: dict[str, bytes] = {}
        self.shards: dict[str, list[TinyShard]] = {}
        first = 0
        for tier, num_shards in (("S", 6), ("A", 3)):
            numbers = range(first, first + num_shards * len(LENGTHS), len(LENGTHS))
            self.index[tier], self.shards[tier] = put_shards(
                store, [dict(zip(range(n, n + len(LENGTHS)), LENGTHS, strict=True)) for n in numbers]
            )
            first = numbers.stop
        self.lengths = {t: {n: k for s in shards for n, k in s.documents.items()} for t, shards in self.shards.items()}

    def tier(self, tier: str, *, key: str = "k", excluded: frozenset[bytes] = frozenset()) -> GroupStream:
        origins = {shard.name: "real" if n % 2 else "synthetic" for n, shard in enumerate(self.shards[tier])}
        return GroupStream(
            self.store,
            read_index(self.index[tier]),
            name=tier,
            token_dtype=U32,
            key=key,
            origins=origins,
            tiers=dict.fromkeys(origins, tier),
            excluded=excluded,
        )

    def mixed(self, weights: Mapping[str, float], **options: frozenset[bytes]) -> MixedStream:
        tiers = {tier: self.tier(tier, **options) for tier in self.index}
        return MixedStream(tiers, names=TIERS, seq_len=SEQ_LEN, weights=weights)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(create_store(str(tmp_path_factory.mktemp("pool") / "store")))


def check_spans(sequence: Sequence) -> None:
    """The spans cover the sequence without gap, and each says which tokens of which document are there."""
    filled = 0
    for span in sequence.spans:
        piece = sequence.tokens[span.offset : span.offset + span.tokens]
        number = int(piece[0]) // PLACES
        assert span.tokens > 0
        assert span.offset == filled
        assert span.doc_id == doc_id(number)
        assert piece.tolist() == [number * PLACES + span.start + place for place in range(span.tokens)]
        assert span.tier == sequence.group
        filled += span.tokens
    assert filled == len(sequence.tokens)


def same(one: Sequence, other: Sequence) -> bool:
    return one.group == other.group and one.spans == other.spans and bool((one.tokens == other.tokens).all())


def tokens_of(sequences: list[Sequence], tier: str) -> list[int]:
    return [int(token) for s in sequences if s.group == tier for token in s.tokens]


def check_ledger(tokens: list[int], lengths: Mapping[int, int]) -> None:
    """The tokens are whole passes over the documents, each document whole and in order, then a part of a pass."""
    seen: list[set[int]] = [set()]
    at = 0
    while at < len(tokens):
        number = tokens[at] // PLACES
        whole = [number * PLACES + place for place in range(lengths[number])]
        assert tokens[at : at + len(whole)] == whole[: len(tokens) - at]
        if len(seen[-1]) == len(lengths):
            seen.append(set())
        assert number not in seen[-1]
        seen[-1].add(number)
        at += len(whole)


@settings(max_examples=25, deadline=None)
@given(take=st.integers(1, 120), num_passes=st.integers(1, 3), key=st.text(max_size=5))
def test_a_pass_gives_every_token_of_every_document_once_in_order(
    pool: Pool, take: int, num_passes: int, key: str
) -> None:
    stream = pool.tier("S", key=key)
    lengths = pool.lengths["S"]
    left = num_passes * sum(lengths.values())
    tokens: list[int] = []
    while left:
        sequence = stream.take(min(take, left))
        check_spans(sequence)
        tokens += sequence.tokens.tolist()
        left -= len(sequence.tokens)
    stream.close()
    assert stream.state() == {"pass": num_passes, "index": 0, "offset": 0}
    check_ledger(tokens, lengths)
    counts = np.unique(tokens, return_counts=True)
    assert counts[0].tolist() == [n * PLACES + place for n in sorted(lengths) for place in range(lengths[n])]
    assert set(counts[1].tolist()) == {num_passes}


def test_passes_come_in_different_orders(pool: Pool) -> None:
    stream = pool.tier("S")
    total = sum(pool.lengths["S"].values())
    first, second = stream.take(total), stream.take(total)
    stream.close()
    assert sorted(first.tokens.tolist()) == sorted(second.tokens.tolist())
    assert first.tokens.tolist() != second.tokens.tolist()


def test_a_span_says_the_origin_of_its_shard(pool: Pool) -> None:
    stream = pool.tier("S")
    origins = {span.doc_id: span.origin for span in stream.take(sum(pool.lengths["S"].values())).spans}
    stream.close()
    for n, shard in enumerate(pool.shards["S"]):
        assert {origins[doc_id(number)] for number in shard.documents} == {"real" if n % 2 else "synthetic"}


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 150), share=st.floats(0, 1))
def test_a_stream_loaded_from_its_state_gives_the_very_same_sequences(pool: Pool, before: int, share: float) -> None:
    weights = {"S": share, "A": 1 - share}
    stream, again = pool.mixed(weights), pool.mixed(weights)
    for _ in range(before):
        stream.next_sequence()
    state = stream.state()
    assert len(state.encode()) < 10_000
    again.load_state(state)
    assert all(same(stream.next_sequence(), again.next_sequence()) for _ in range(40))
    assert stream.state() == again.state()
    stream.close()
    again.close()


@settings(max_examples=20, deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 30)), min_size=1, max_size=5))
def test_changing_the_weights_repeats_and_loses_nothing(pool: Pool, changes: list[tuple[float, int]]) -> None:
    stream = pool.mixed({"S": 0.5, "A": 0.5})
    sequences = [stream.next_sequence() for _ in range(7)]
    for share, num_sequences in changes:
        stream.set_weights({"S": share, "A": 1 - share})
        chosen = [stream.next_sequence() for _ in range(num_sequences)]
        if share in (0, 1):
            assert {s.group for s in chosen} == {"A" if share == 0 else "S"}
        sequences += chosen
    stream.close()
    for sequence in sequences:
        check_spans(sequence)
    for tier in ("S", "A"):
        check_ledger(tokens_of(sequences, tier), pool.lengths[tier])


def test_the_mix_is_within_one_sequence_of_the_asked_one_at_every_moment(pool: Pool) -> None:
    stream = pool.mixed({"S": 0.3, "A": 0.7})
    counts: dict[str, int] = defaultdict(int)
    for served in range(1, 200):
        counts[stream.next_sequence().group] += 1
        assert abs(counts["S"] - 0.3 * served) <= 1
    stream.close()


@settings(max_examples=20, deadline=None)
@given(excluded=st.sets(st.integers(0, 47), max_size=47), before=st.integers(0, 20))
def test_excluded_documents_never_come_and_the_others_all_do(pool: Pool, excluded: set[int], before: int) -> None:
    ids = frozenset(doc_id(n) for n in excluded)
    left = {n: length for n, length in pool.lengths["S"].items() if n not in excluded}
    stream = pool.tier("S", excluded=ids)
    sequences = [stream.take(SEQ_LEN) for _ in range(before)]
    sequences.append(stream.take(2 * sum(left.values()) + 1))
    stream.close()
    for sequence in sequences:
        check_spans(sequence)
    check_ledger(tokens_of(sequences, "S"), left)


@settings(max_examples=20, deadline=None)
@given(before=st.integers(1, 40))
def test_a_document_excluded_half_way_through_is_passed_over_from_there(pool: Pool, before: int) -> None:
    stream = pool.tier("S")
    stream.take(before)
    state = stream.state()
    going_on = stream.take(1).spans[0].doc_id
    again = pool.tier("S", excluded=frozenset([going_on]))
    again.load_state(state)
    spans = again.take(sum(pool.lengths["S"].values())).spans
    stream.close()
    again.close()
    assert going_on not in {span.doc_id for span in spans}
    assert spans[0].start == 0


def test_a_tier_with_all_documents_excluded_is_an_error(pool: Pool) -> None:
    stream = pool.tier("S", excluded=frozenset(doc_id(n) for n in pool.lengths["S"]))
    with pytest.raises(Failure, match="group S has no document left"):
        stream.take(SEQ_LEN)
    stream.close()


def test_a_corrupt_shard_is_an_error_that_names_it(store: Store) -> None:
    pool = Pool(store)
    damaged = pool.shards["S"][2]
    _damage(store.root / object_path(damaged.name))
    stream = pool.tier("S")
    with pytest.raises(CorruptShard, match=rf"{damaged.name}.* 3 times"):
        stream.take(sum(pool.lengths["S"].values()))
    stream.close()


def test_a_missing_shard_is_an_error_that_names_it(store: Store) -> None:
    pool = Pool(store)
    missing = pool.shards["S"][4]
    store.delete(object_path(missing.name))
    stream = pool.tier("S")
    with pytest.raises(Failure, match=missing.name):
        stream.take(sum(pool.lengths["S"].values()))
    stream.close()


def test_a_stream_goes_on_where_it_was_when_its_shard_is_whole_again(store: Store) -> None:
    pool = Pool(store)
    path = store.root / object_path(pool.shards["S"][3].name)
    whole = path.read_bytes()
    _damage(path)
    stream = pool.tier("S")
    tokens: list[int] = []
    with pytest.raises(CorruptShard):  # noqa: PT012
        while True:
            tokens += stream.take(1).tokens.tolist()
    path.write_bytes(whole)
    tokens += stream.take(sum(pool.lengths["S"].values())).tokens.tolist()
    stream.close()
    check_ledger(tokens, pool.lengths["S"])


def test_a_corrupt_cached_file_of_a_remote_store_is_fetched_again(s3_environment: str, tmp_path: Path) -> None:
    pool = Pool(create_store(s3_environment))
    total = sum(pool.lengths["S"].values())
    stream = pool.tier("S")
    expected = stream.take(total)
    stream.close()
    cached = sorted((tmp_path / "cache" / "pool").rglob("*.zstd"))
    assert len(cached) == len(pool.shards["S"])
    whole = [path.read_bytes() for path in cached]
    _damage(cached[0])
    cached[1].write_bytes(b"")
    cached[2].write_bytes(whole[2] + b"x")
    again = pool.tier("S")
    assert same(again.take(total), expected)
    again.close()
    assert [path.read_bytes() for path in cached] == whole


def test_a_cached_shard_is_read_without_the_store(s3_environment: str) -> None:
    pool = Pool(create_store(s3_environment))
    total = sum(pool.lengths["A"].values())
    first = pool.tier("A")
    expected = first.take(total)
    first.close()
    for shard in pool.shards["A"]:
        pool.store.delete(object_path(shard.name))
    again = pool.tier("A")
    assert same(again.take(total), expected)
    again.close()


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
