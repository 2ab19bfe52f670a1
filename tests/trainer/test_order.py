"""The order of a pass: every document once, and the same again from the same key."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.order import WINDOW_SHARDS, TierOrder

_COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def _places(order: TierOrder) -> list[tuple[int, int]]:
    return [order.locate(index) for index in range(order.num_documents)]


@settings(max_examples=100, deadline=None)
@given(counts=_COUNTS, key=st.text(max_size=20))
def test_a_pass_visits_every_document_once(counts: list[int], key: str) -> None:
    order = TierOrder(counts, key=key)
    assert sorted(_places(order)) == [(shard, place) for shard, n in enumerate(counts) for place in range(n)]


@settings(max_examples=50, deadline=None)
@given(counts=_COUNTS, key=st.text(max_size=20), seed=st.integers())
def test_documents_are_located_the_same_in_whatever_order_they_are_asked_for(
    counts: list[int], key: str, seed: int
) -> None:
    places = _places(TierOrder(counts, key=key))
    again = TierOrder(counts, key=key)
    indices = list(range(len(places)))
    random.Random(seed).shuffle(indices)
    assert all(again.locate(index) == places[index] for index in indices)


def test_another_key_gives_another_order() -> None:
    counts = [10] * 8
    orders = {tuple(_places(TierOrder(counts, key=f"seed {n}"))) for n in range(5)}
    assert len(orders) == 5


def test_the_order_does_not_change_between_versions_of_atoll() -> None:
    # A change here would make running jobs repeat and lose documents.
    assert _places(TierOrder([2, 1, 3], key="fixed")) == [(0, 0), (1, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


@settings(max_examples=50, deadline=None)
@given(counts=_COUNTS)
def test_reading_needs_only_the_upcoming_shards_of_a_window(counts: list[int]) -> None:
    order = TierOrder(counts, key="k")
    for index in range(order.num_documents):
        upcoming = list(order.upcoming_shards(index))
        assert order.locate(index)[0] in upcoming
        assert len(upcoming) <= 2 * WINDOW_SHARDS


def test_a_tier_of_one_document_is_a_pass_of_one() -> None:
    order = TierOrder([1], key="k")
    assert (order.num_documents, order.locate(0)) == (1, (0, 0))


@pytest.mark.parametrize("size", [1, WINDOW_SHARDS, WINDOW_SHARDS + 1])
def test_shards_are_permuted_too(size: int) -> None:
    firsts = {TierOrder([1] * size, key=f"{n}").locate(0)[0] for n in range(60)}
    assert firsts == set(range(size))
