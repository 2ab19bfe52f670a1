"""Tier thresholds on cases worked by hand, and what must hold for any scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tiers import assign_tiers, say_concentration

finite = st.floats(-1e3, 1e3)


def test_hand_worked_case() -> None:
    # Positive influence: 5 + 3 + 1 + 1 = 10; 80 % of it is the first two. Below zero with z = 0.8416: -1 + 0.84 < 0 but not -0.1 + 0.84.
    scores = np.array([1.0, 5.0, -1.0, 3.0, -0.1, 1.0])
    tiering = assign_tiers(scores, np.ones(6), share=0.8, confidence=0.8, max_s=1.0)
    assert tiering.tiers.tolist() == ["A", "S", "C", "S", "B", "A"]
    assert tiering.thresholds == {"S": 3.0, "A": 1.0}
    assert tiering.concentration["s_share_carried"] == pytest.approx(0.8)
    assert tiering.concentration["s_share_of_documents"] == pytest.approx(2 / 6)


def test_cap_on_s_is_kept_and_said() -> None:
    tiering = assign_tiers(np.ones(10), np.zeros(10), share=0.8, confidence=0.9, max_s=0.3)
    assert (tiering.tiers == "S").sum() == 3
    assert "would take 80% of the documents" in say_concentration(tiering)
    assert "don't carry the claim" in say_concentration(tiering)


def test_concentrated_scores_carry_the_claim() -> None:
    tiering = assign_tiers(np.array([100.0] + [0.1] * 99), np.zeros(100), share=0.8, confidence=0.9, max_s=0.5)
    assert (tiering.tiers == "S").sum() == 1
    assert "don't" not in say_concentration(tiering)


def test_no_positive_influence_makes_no_s() -> None:
    tiering = assign_tiers(np.array([-1.0, -2.0, 0.0]), np.array([0.1, 0.1, 0.1]), share=0.8, confidence=0.9, max_s=0.5)
    assert tiering.tiers.tolist() == ["C", "C", "A"]
    assert tiering.thresholds["S"] is None


@given(
    st.lists(st.tuples(finite, st.floats(0, 100)), min_size=1, max_size=60),
    st.floats(0.05, 1),
    st.floats(0.5, 0.99),
    st.floats(0.05, 1),
)
def test_tiers_are_ordered_by_score_and_c_is_only_what_is_harmful(
    documents: list[tuple[float, float]], share: float, confidence: float, max_s: float
) -> None:
    scores, stderrs = np.array([d[0] for d in documents]), np.array([d[1] for d in documents])
    tiering = assign_tiers(scores, stderrs, share=share, confidence=confidence, max_s=max_s)
    tiers = tiering.tiers
    for better, worse in (("S", "A"), ("A", "B")):
        if (tiers == better).any() and (tiers == worse).any():
            assert scores[tiers == better].min() >= scores[tiers == worse].max()
    assert (scores[tiers == "C"] < 0).all()
    assert (tiers == "S").sum() <= max_s * len(scores)
    again = assign_tiers(scores, stderrs, share=share, confidence=confidence, max_s=max_s)
    assert (again.tiers == tiers).all()
