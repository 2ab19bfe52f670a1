"""Strategies: shares that sum to one, and an adaptive mix that moves, but not far and not to nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.schemas import TIERS
from trainer.strategies import ADAPTIVE, STEP_CAP, STRATEGIES, UNIFORM, WEIGHT_FLOOR, adapt, start_weights

_EFFECTIVENESS = st.fixed_dictionaries(
    {tier: st.one_of(st.none(), st.floats(-5, 5), st.just(math.nan), st.just(math.inf)) for tier in TIERS}
)
_WEIGHTS = (
    st.fixed_dictionaries({tier: st.one_of(st.just(0.0), st.floats(WEIGHT_FLOOR, 1)) for tier in TIERS})
    .filter(lambda weights: sum(weights.values()) > 0)
    .map(lambda weights: {tier: weight / sum(weights.values()) for tier, weight in weights.items()})
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_starts_with_shares_that_sum_to_one(strategy: str) -> None:
    weights = start_weights(strategy, {"S": 10, "A": 30, "B": 60})
    assert list(weights) == list(TIERS)
    assert sum(weights.values()) == pytest.approx(1)


def test_uniform_takes_every_tier_by_its_size() -> None:
    assert start_weights(UNIFORM, {"S": 10, "A": 30, "B": 60}) == {"S": 0.1, "A": 0.3, "B": 0.6, "C": 0.0}


def test_start_weights_are_the_callers_own() -> None:
    start_weights("balanced", {})["S"] = 1.0
    assert start_weights("balanced", {})["S"] == 0.2


@given(weights=_WEIGHTS, effectiveness=_EFFECTIVENESS)
def test_adapted_weights_sum_to_one_and_zero_stays_zero(
    weights: dict[str, float], effectiveness: dict[str, float | None]
) -> None:
    adapted = adapt(weights, effectiveness)
    assert sum(adapted.values()) == pytest.approx(1)
    assert [tier for tier in TIERS if adapted[tier] == 0] == [tier for tier in TIERS if weights[tier] == 0]


@given(weights=_WEIGHTS, effectiveness=_EFFECTIVENESS)
def test_a_weight_changes_by_no_more_than_the_cap_before_normalising(
    weights: dict[str, float], effectiveness: dict[str, float | None]
) -> None:
    adapted = adapt(weights, effectiveness)
    most = (1 + STEP_CAP) / (1 - STEP_CAP)
    for tier in TIERS:
        if weights[tier] > WEIGHT_FLOOR * 2:
            assert weights[tier] / most - 1e-9 <= adapted[tier] <= weights[tier] * most + 1e-9


@given(effectiveness=st.lists(_EFFECTIVENESS, min_size=1, max_size=60))
def test_no_tier_falls_far_below_the_floor_however_bad_it_is(effectiveness: list[dict[str, float | None]]) -> None:
    weights = start_weights(ADAPTIVE, {})
    for step in effectiveness:
        weights = adapt(weights, step)
    # Normalising after the floor takes at most the floors' own sum, and a step's growth, from it.
    assert min(weights.values()) >= WEIGHT_FLOOR / (1 + STEP_CAP + len(TIERS) * WEIGHT_FLOOR)


def test_the_mix_moves_towards_the_effective_tier() -> None:
    weights = start_weights(ADAPTIVE, {})
    adapted = adapt(weights, {"S": 0.3, "A": 0.1, "B": 0.1, "C": -0.1})
    assert adapted["S"] > weights["S"]
    assert adapted["C"] < weights["C"]
    assert adapted["S"] / weights["S"] > adapted["A"] / weights["A"] > adapted["C"] / weights["C"]


def test_a_step_worked_out_by_hand() -> None:
    # exp(2 · ±0.05) = 1.10517, 0.90484; C was not measured and keeps its weight before normalising.
    adapted = adapt({"S": 0.5, "A": 0.25, "B": 0.0, "C": 0.25}, {"S": 0.1, "A": 0.0, "B": None, "C": None})
    total = 0.5 * 1.105171 + 0.25 * 0.904837 + 0.25
    expected = {"S": 0.5 * 1.105171 / total, "A": 0.25 * 0.904837 / total, "B": 0, "C": 0.25 / total}
    assert adapted == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "effectiveness",
    [
        dict.fromkeys(TIERS, None),
        {"S": 1.0, "A": None, "B": None, "C": None},
        {"S": 1.0, "A": math.nan, "B": math.inf, "C": None},
        dict.fromkeys(TIERS, 0.25),
    ],
)
def test_the_mix_stays_where_there_is_nothing_to_compare(effectiveness: dict[str, float | None]) -> None:
    weights = start_weights(ADAPTIVE, {})
    assert adapt(weights, effectiveness) == pytest.approx(weights)
