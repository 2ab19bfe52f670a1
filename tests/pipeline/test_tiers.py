"""Tier thresholds on cases worked by hand, and what must hold for any scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manifests.errors import UserError
from manifests.schemas import TIERS
from pipeline.tiers import (
    Tiering,
    assign_tiers,
    concentration_by_group,
    concentration_of,
    documents_by_chance,
    require_sizes,
    say_concentration,
)

finite = st.floats(-1e3, 1e3)
ANY_SIZE: dict[str, tuple[float, float]] = {}


def _names(tiering: Tiering) -> str:
    return "".join(TIERS[tier] for tier in tiering.tiers)


def _assign(scores: list[float], z: list[float] | None = None, **sizes: tuple[float, float]) -> Tiering:
    return assign_tiers(np.array(scores), np.array(scores if z is None else z), share=0.8, confidence=0.8, sizes=sizes)


def test_hand_worked_case() -> None:
    # Positive influence: 5 + 3 + 1 + 1 = 10; 80 % of it is the first two. The normal quantile of 0.8 is 0.8416: -1 lies below it, -0.1 doesn't.
    tiering = _assign([1.0, 5.0, -1.0, 3.0, -0.1, 1.0])
    assert _names(tiering) == "ASCSBA"
    assert tiering.thresholds == {"S": 3.0, "A": 1.0}
    assert tiering.share_carried == pytest.approx(0.8)
    assert tiering.counts() == {"S": 2, "A": 2, "B": 1, "C": 1}
    assert tiering.notes == []


def test_cap_on_s_is_kept_and_said() -> None:
    tiering = _assign([1.0] * 10, S=(0.0, 0.3))
    assert tiering.counts()["S"] == 3
    assert "would take 80% of the documents, more than S may have" in say_concentration(tiering)
    assert "don't carry the claim" in say_concentration(tiering)


def test_concentrated_scores_carry_the_claim() -> None:
    tiering = _assign([100.0] + [0.1] * 99)
    assert tiering.counts()["S"] == 1
    assert "don't" not in say_concentration(tiering)


def test_s_that_needs_most_documents_is_said_also_without_a_cap() -> None:
    said = say_concentration(_assign([1.0] * 10))
    assert "it takes 80% of the documents to carry 80%: these scores don't carry the claim" in said


def test_noise_does_not_carry_the_claim() -> None:
    scores = np.random.default_rng(0).normal(size=20_000)
    tiering = assign_tiers(scores, scores, share=0.8, confidence=0.8)
    # About a quarter of the documents: it looks concentrated, and is nothing but noise.
    assert documents_by_chance(0.8) == pytest.approx(0.25205, abs=1e-5)
    assert tiering.concentration.documents_for_wanted_share == pytest.approx(documents_by_chance(0.8), abs=0.01)
    lifted, lowered = (assign_tiers(s, s, share=0.8, confidence=0.8) for s in (scores + 0.1, scores - 0.1))
    assert "normal noise around zero would take 25% of the documents" in say_concentration(lifted)
    assert "don't carry the claim" in say_concentration(lifted)
    assert "don't" not in say_concentration(lowered)


def test_no_positive_influence_makes_no_s() -> None:
    tiering = _assign([-1.0, -2.0, 0.0], [-10.0, -20.0, 0.0])
    assert _names(tiering) == "CCA"
    assert tiering.thresholds["S"] is None
    assert "no document has positive influence" in say_concentration(tiering)


def test_nothing_known_of_the_error_makes_no_harm() -> None:
    assert "C" not in _names(_assign([-5.0, -1.0, 1.0], [math.nan] * 3))


def test_sure_harm_needs_a_score_below_zero() -> None:
    # Of estimators that were combined, the first may be sure and the order still put the document above zero.
    assert _names(_assign([1.0, 0.0, -1.0], [-5.0, -5.0, -5.0])) == "SAC"


def test_lorenz_curve_and_gini_by_hand() -> None:
    # 10 documents, 6 + 3 + 1: the first carries 60 %, two 90 %, three all.
    facts = concentration_of(np.array([0.0, 3.0, 0.0, -9.0, 6.0, 0.0, 1.0, 0.0, 0.0, -1.0]), 0.8)
    assert facts.documents_for_wanted_share == 0.2
    curve = dict(facts.lorenz)
    assert [curve[at] for at in (0.1, 0.2, 0.3, 0.5, 0.8)] == pytest.approx([0.6, 0.9, 1.0, 1.0, 1.0])
    assert curve[0.05] == pytest.approx(0.3)
    # Mean difference of all pairs: |6-3| + |6-1| + 7·6 + |3-1| + 7·3 + 7·1 = 80, over n² · mean = 100.
    assert facts.gini == pytest.approx(0.8)


def test_gini_of_equal_documents_is_zero() -> None:
    assert concentration_of(np.full(7, 0.1), 0.8).gini == pytest.approx(0.0, abs=1e-12)
    assert concentration_of(np.zeros(3), 0.8).lorenz[-1] == (0.8, 0.0)


def test_concentration_by_group_looks_at_each_one_alone() -> None:
    scores = np.array([10.0, 1.0, 0.0, 1.0, 0.0, 1.0, -1.0])
    found = concentration_by_group(scores, np.array([1, 0, 1, 0, 1, 0, 2]), ["flat", "steep", "bad", "none"], 0.8)
    assert list(found) == ["bad", "flat", "steep"]
    assert found["steep"] == {"documents": 3, "documents_for_wanted_share": 1 / 3, "gini": pytest.approx(2 / 3)}
    assert found["flat"]["documents_for_wanted_share"] == 1.0
    assert found["bad"]["documents_for_wanted_share"] == 0.0


def test_minimum_of_s_is_filled_with_the_next_best() -> None:
    tiering = _assign([9.0, 0.3, 0.2, 0.1], S=(0.5, 1.0))
    assert _names(tiering) == "SSAB"
    assert "its minimum asks for more" in tiering.notes[0]


def test_maximum_of_c_keeps_the_surest_and_b_takes_the_others() -> None:
    # Four are harmful with confidence, two may be in C; by score alone A would have taken half of the rest.
    tiering = _assign([5.0, -1.0, -2.0, -3.0, -0.5, 4.0], [9.0, -4.0, -2.0, -3.0, -1.0, 9.0], C=(0.0, 0.34))
    assert _names(tiering) == "SCBCBS"
    assert tiering.notes == ["2 documents that are harmful with confidence are not in C: there is no room"]


def test_minimum_of_c_takes_the_next_surest_but_nothing_that_is_not_below_zero() -> None:
    scores, z = [2.0, 1.0, 0.0, -0.2, -0.1, -0.3, 3.0, 3.0, 3.0, 3.0], [9.0, 9.0, 0.0, -0.1, -0.2, math.nan] + [9.0] * 4
    assert _names(_assign(scores, z, C=(0.1, 1.0))).count("C") == 1
    assert _names(_assign(scores, z, C=(0.1, 1.0)))[4] == "C"
    asked = _assign(scores, z, C=(0.5, 1.0))
    assert [n for n, tier in enumerate(_names(asked)) if tier == "C"] == [3, 4, 5]
    assert "C holds 3 documents, fewer than its minimum of 5" in asked.notes[-1]


def test_other_tiers_too_small_for_what_may_not_lie_in_c_are_refused() -> None:
    with pytest.raises(UserError, match="may hold 40% of the documents, and C only those with negative influence, 50%"):
        _assign([1.0] * 5 + [-1.0] * 5, S=(0.0, 0.2), A=(0.0, 0.1), B=(0.0, 0.1))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S": (0.6, 0.5)}, "--size S=0.6..0.5: its minimum is above"),
        ({"S": (0.6, 1.0), "C": (0.5, 1.0)}, "minima add up to 1.1"),
        ({"S": (0.0, 0.2), "A": (0.0, 0.2), "B": (0.0, 0.2), "C": (0.0, 0.2)}, "maxima add up to 0.8"),
        ({"S": (0.0, 1.5)}, "--size S=0..1.5: .* from 0 to 1"),
        ({"S": (math.nan, 1.0)}, "from 0 to 1"),
        ({"D": (0.0, 1.0)}, "no tier 'D'"),
    ],
)
def test_contradictory_sizes_are_refused(sizes: dict[str, tuple[float, float]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_sizes(sizes)


documents_of = st.lists(
    st.tuples(st.one_of(finite, st.integers(-3, 3).map(float)), st.one_of(st.floats(-40, 40), st.just(math.nan))),
    min_size=1,
    max_size=60,
)


def _arrays(documents: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([d[0] for d in documents]), np.array([d[1] for d in documents])


@given(documents_of, st.floats(0.05, 1), st.floats(0.5, 0.99))
def test_tiers_are_ordered_by_score_s_is_the_smallest_set_and_c_only_what_is_harmful(
    documents: list[tuple[float, float]], share: float, confidence: float
) -> None:
    scores, z = _arrays(documents)
    tiering = assign_tiers(scores, z, share=share, confidence=confidence, sizes=ANY_SIZE)
    tiers = np.array(list(_names(tiering)))
    for better, worse in (("S", "A"), ("A", "B")):
        if (tiers == better).any() and (tiers == worse).any():
            assert scores[tiers == better].min() >= scores[tiers == worse].max()
    assert (scores[tiers == "C"] < 0).all()
    assert (z[tiers == "C"] < 0).all()
    gains = np.maximum(scores, 0)
    in_s = np.sort(gains[tiers == "S"])
    if gains.sum() > 0:
        assert in_s.sum() >= share * gains.sum() * (1 - 1e-9)
        assert in_s[1:].sum() < share * gains.sum()
    else:
        assert not len(in_s)
    # An equal document further on is never better off.
    for value in np.unique(scores[tiers != "C"]):
        mine = [TIERS.index(tier) for tier in tiers[(scores == value) & (tiers != "C")]]
        assert mine == sorted(mine)


shares = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda pair: (min(pair), max(pair)))


@given(documents_of, st.dictionaries(st.sampled_from(TIERS), shares), st.floats(0.05, 1), st.floats(0.5, 0.99))
def test_sizes_are_kept(
    documents: list[tuple[float, float]], sizes: dict[str, tuple[float, float]], share: float, confidence: float
) -> None:
    try:
        require_sizes(sizes)
    except UserError:
        assume(False)
    scores, z = _arrays(documents)
    num, num_negative = len(scores), int((scores < 0).sum())
    try:
        tiering = assign_tiers(scores, z, share=share, confidence=confidence, sizes=sizes)
    except UserError:
        most = [sizes.get(tier, (0.0, 1.0))[1] for tier in "SAB"]
        assert num - sum(math.floor(m * num + 1e-9) for m in most) > num_negative
        return
    counts = tiering.counts()
    assert sum(counts.values()) == num
    for tier, (least, most_of) in sizes.items():
        if tier == "C":
            least = min(least, num_negative / num)
        assert counts[tier] >= math.floor(least * num + 1e-9)
        # What rounding leaves is B's: less than one document of each tier.
        assert counts[tier] <= most_of * num + (4 if tier == "B" else 1e-6)
    assert (scores[tiering.tiers == TIERS.index("C")] < 0).all()


@given(documents_of, st.randoms())
def test_order_of_unequal_documents_does_not_matter(documents: list[tuple[float, float]], random: object) -> None:
    unequal = list({d[0]: d for d in documents}.values())
    assume(len({d[1] for d in unequal}) == len(unequal))
    scores, z = _arrays(unequal)
    turned = np.arange(len(scores))
    random.shuffle(turned)  # type: ignore[attr-defined]
    sizes = {"C": (0.1, 0.3), "S": (0.0, 0.5)}
    before = assign_tiers(scores, z, share=0.8, confidence=0.8, sizes=sizes)
    after = assign_tiers(scores[turned], z[turned], share=0.8, confidence=0.8, sizes=sizes)
    assert (after.tiers == before.tiers[turned]).all()
    assert after.facts() == before.facts()
