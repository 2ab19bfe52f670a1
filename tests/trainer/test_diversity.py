"""Diversity of mixes: the divergence against scipy's, and the least move apart that keeps it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from manifests.schemas import TIERS
from trainer.diversity import divergence, diversity, spread_share, towards_tier

_MIXES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=4, max_size=4).filter(lambda x: sum(x) > 1e-3).map(
    lambda x: {tier: weight / sum(x) for tier, weight in zip(TIERS, x, strict=True)}
)  # fmt: skip


def _mix(*weights: float) -> dict[str, float]:
    return dict(zip(TIERS, weights, strict=True))


@given(_MIXES, _MIXES)
def test_the_divergence_is_the_square_of_scipys_distance(p: dict[str, float], q: dict[str, float]) -> None:
    expected = jensenshannon(list(p.values()), list(q.values())) ** 2
    assert divergence(p, q) == pytest.approx(0 if math.isnan(expected) else expected, abs=1e-9)
    assert divergence(p, q) == pytest.approx(divergence(q, p), abs=1e-12)


def test_mixes_that_share_nothing_are_ln_2_apart_and_equal_ones_not_at_all() -> None:
    assert divergence(_mix(1, 0, 0, 0), _mix(0, 1, 0, 0)) == pytest.approx(math.log(2))
    assert divergence(_mix(0.5, 0.5, 0, 0), _mix(0.5, 0.5, 0, 0)) == 0
    # Of three pairs two are ln 2 apart.
    assert diversity([_mix(1, 0, 0, 0), _mix(1, 0, 0, 0), _mix(0, 1, 0, 0)]) == pytest.approx(2 / 3 * math.log(2))
    assert diversity([_mix(1, 0, 0, 0)]) == 0


@given(_MIXES, st.lists(st.sampled_from(TIERS), min_size=2, max_size=6), st.floats(1e-4, 0.3))
def test_islands_are_spread_as_far_as_is_asked_and_no_further(
    mix: dict[str, float], towards: list[str], minimum: float
) -> None:
    share = spread_share(mix, towards, minimum)
    spread = [towards_tier(mix, tier, share) for tier in towards]
    for one in spread:
        assert sum(one.values()) == pytest.approx(1)
        assert min(one.values()) >= 0
    reached = diversity(spread)
    if share < 1:
        assert reached >= minimum
        nearer = [towards_tier(mix, tier, share - 1e-4) for tier in towards]
        assert share < 1e-4 or diversity(nearer) < minimum
    else:
        assert reached <= minimum + 1e-4


def test_a_spread_worked_out_by_hand() -> None:
    # Halfway towards half S: 0.75 of each weight, and 0.25 more of S.
    assert towards_tier(_mix(0.4, 0.4, 0.2, 0), "S", 0.5) == pytest.approx(_mix(0.55, 0.3, 0.15, 0))
    assert spread_share(_mix(0.25, 0.25, 0.25, 0.25), ["S", "S"], 0.01) == 1.0
