"""Apportionment: the realised mix stays within one sequence of the asked one, always."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer.apportion import next_group, usable_weights

_SHARES = st.lists(st.one_of(st.just(0.0), st.floats(1e-4, 1.0), st.integers(1, 9).map(float)), min_size=1, max_size=6)


def _serve(weights: list[float], credits: list[float], num_sequences: int) -> tuple[list[int], list[float]]:
    given_ = []
    for _ in range(num_sequences):
        chosen, credits = next_group(weights, credits)
        given_.append(chosen)
    return given_, credits


@settings(max_examples=150, deadline=None)
@given(shares=_SHARES.filter(any), num_sequences=st.integers(1, 2000))
def test_counts_stay_within_one_sequence_of_the_asked_at_every_moment(shares: list[float], num_sequences: int) -> None:
    weights = [share / sum(shares) for share in shares]
    counts = [0] * len(weights)
    credits = [0.0] * len(weights)
    for served in range(1, num_sequences + 1):
        chosen, credits = next_group(weights, credits)
        assert weights[chosen] > 0
        counts[chosen] += 1
        assert all(abs(count - weight * served) < 1 + 1e-6 for count, weight in zip(counts, weights, strict=True)), (
            served
        )


@settings(max_examples=50, deadline=None)
@given(before=_SHARES, after=_SHARES, num_sequences=st.integers(1, 200))
def test_a_group_whose_weight_becomes_zero_is_served_no_more(
    before: list[float], after: list[float], num_sequences: int
) -> None:
    size = min(len(before), len(after))
    before, after = before[:size], after[:size]
    if not (any(before) and any(after)):
        return
    _, credits = _serve([w / sum(before) for w in before], [0.0] * size, num_sequences)
    chosen, credits = _serve([w / sum(after) for w in after], credits, num_sequences)
    assert all(after[group] > 0 for group in chosen)
    assert math.isclose(sum(credits), 0, abs_tol=1e-6)


def test_the_first_sequences_of_halves_and_quarters_are_these() -> None:
    chosen, _ = _serve([0.5, 0.25, 0.25], [0.0] * 3, 8)
    assert [chosen.count(group) for group in range(3)] == [4, 2, 2]
    assert [chosen[:4].count(group) for group in range(3)] == [2, 1, 1]


ASKED = {"S": 0.2, "A": 0.4, "B": 0.3, "C": 0.1}


@pytest.mark.parametrize(
    ("asked", "there", "usable"),
    [
        (ASKED, "SABC", {"S": 0.2, "A": 0.4, "B": 0.3, "C": 0.1}),
        (ASKED, "SBC", {"S": 0.2, "A": 0, "B": 0.7, "C": 0.1}),
        (ASKED, "BC", {"S": 0, "A": 0, "B": 0.9, "C": 0.1}),
        (ASKED, "SAC", {"S": 0.2, "A": 0.7, "B": 0, "C": 0.1}),  # harm takes no weight over
        (ASKED, "SAB", {"S": 0.2, "A": 0.4, "B": 0.4, "C": 0}),
        (ASKED, "C", {"S": 0, "A": 0, "B": 0, "C": 1}),
        ({"S": 0.5, "A": 0, "B": 0.5, "C": 0}, "ABC", {"S": 0, "A": 0, "B": 1, "C": 0}),  # to one that is asked for
        ({"S": 1, "A": 0, "B": 0, "C": 0}, "BC", {"S": 0, "A": 0, "B": 1, "C": 0}),
        ({"S": 0, "A": 0, "B": 0, "C": 0}, "SB", {"S": 0.5, "A": 0, "B": 0.5, "C": 0}),
    ],
)
def test_a_tier_without_documents_leaves_its_share_to_the_next(
    asked: dict[str, float], there: str, usable: dict[str, float]
) -> None:
    available = {tier: tier in there for tier in asked}
    assert usable_weights(asked, available, last_resort=("C",)) == pytest.approx(usable)


@given(
    asked=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    there=st.lists(st.booleans(), min_size=6, max_size=6).filter(any),
)
def test_usable_shares_sum_to_one_and_go_only_to_groups_with_documents(asked: list[float], there: list[bool]) -> None:
    names = [str(n) for n in range(len(asked))]
    available = dict(zip(names, there, strict=False))
    assume(any(available.values()))
    usable = usable_weights(dict(zip(names, asked, strict=True)), available, last_resort=names[-1:])
    assert list(usable) == names
    assert sum(usable.values()) == pytest.approx(1)
    assert all(share >= 0 and (share == 0 or available[name]) for name, share in usable.items())


def test_weights_that_do_not_sum_to_one_are_shares_of_their_sum() -> None:
    assert usable_weights({"S": 3, "A": 1}, {"S": True, "A": True}) == {"S": 0.75, "A": 0.25}


def test_no_group_with_documents_is_an_error() -> None:
    with pytest.raises(ValueError, match="no group has documents"):
        usable_weights({"S": 0.5, "A": 0.5}, {"S": False})


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_that_is_no_share_is_an_error_that_names_its_group(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of A"):
        usable_weights({"S": 0.5, "A": weight}, {"S": True, "A": True})


def test_weights_beyond_all_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="sum to more"):
        usable_weights({"S": 1e308, "A": 1e308}, {"S": True, "A": True})
