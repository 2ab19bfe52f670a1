"""Diversity of mixes: the divergence against scipy's, and the least move that keeps it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from manifests.schemas import TIERS
from trainer.diversity import divergence, diversity, kept_diverse

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


@given(_MIXES, st.lists(_MIXES, min_size=1, max_size=3), _MIXES, st.floats(0, 0.3))
def test_what_is_kept_reaches_the_minimum_where_the_anchor_does_and_is_a_mix(
    mix: dict[str, float], others: list[dict[str, float]], anchor: dict[str, float], minimum: float
) -> None:
    kept = kept_diverse(mix, others, anchor, minimum)
    assert sum(kept.values()) == pytest.approx(1)
    if diversity([mix, *others]) >= minimum:
        assert kept == mix
    elif diversity([anchor, *others]) >= minimum:
        assert diversity([kept, *others]) >= minimum
    else:
        assert kept == pytest.approx(anchor)


def test_it_moves_no_further_than_it_must() -> None:
    same, anchor = _mix(0.25, 0.25, 0.25, 0.25), _mix(1, 0, 0, 0)
    kept = kept_diverse(same, [same], anchor, 0.01)
    assert diversity([kept, same]) == pytest.approx(0.01, rel=1e-4)
    assert kept["S"] > kept["A"] == kept["B"] == kept["C"] > 0


def test_an_island_alone_reads_what_it_likes() -> None:
    assert kept_diverse(_mix(1, 0, 0, 0), [], _mix(0, 1, 0, 0), 0.5) == _mix(1, 0, 0, 0)
