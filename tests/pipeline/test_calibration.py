"""Standard errors moderated and estimators combined: cases worked by hand, simulations with a known truth, and what must hold for any scores."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from pipeline.calibration import Estimate, calibrate, combine_by_rank, fit_error_prior, mid_ranks, trigamma_inverse

FOLD_DEGREES = 3.0


def _estimate(*scores: float, z: list[float] | None = None) -> Estimate:
    return Estimate(scores=np.array(scores), z=np.array(z if z is not None else scores))


@pytest.mark.parametrize("x", [1e-3, 0.5, 1.0, 3.0, 40.0, 1e5])
def test_trigamma_inverse_inverts(x: float) -> None:
    from scipy.special import polygamma

    assert trigamma_inverse(float(polygamma(1, x))) == pytest.approx(x, rel=1e-5)


def test_trigamma_of_one_half_and_of_one_are_known() -> None:
    assert trigamma_inverse(math.pi**2 / 2) == pytest.approx(0.5)
    assert trigamma_inverse(math.pi**2 / 6) == pytest.approx(1.0)


def test_prior_of_a_simulation_is_found_again() -> None:
    rng = np.random.default_rng(0)
    degrees, stderr, num = 8.0, 0.3, 40_000
    variances = degrees * stderr**2 / rng.chisquare(degrees, num)
    prior = fit_error_prior(np.sqrt(variances * rng.chisquare(FOLD_DEGREES, num) / FOLD_DEGREES), FOLD_DEGREES)
    assert prior.degrees == pytest.approx(degrees, rel=0.1)
    assert prior.stderr == pytest.approx(stderr, rel=0.02)


def test_equal_errors_have_an_infinite_prior_and_are_pooled() -> None:
    rng = np.random.default_rng(1)
    measured = 0.5 * np.sqrt(rng.chisquare(FOLD_DEGREES, 2000) / FOLD_DEGREES)
    # A little less spread than chance makes: no variance is left for the truth.
    z, prior = calibrate(np.full(2000, -1.0), measured**0.9, FOLD_DEGREES)
    assert math.isinf(prior.degrees)
    assert np.ptp(z) == 0
    assert z[0] == pytest.approx(-1.0 / math.sqrt(float(np.mean(measured**1.8))))


def test_false_alarms_among_harmless_documents_are_as_many_as_the_confidence_allows() -> None:
    # The truth is 0 for all of them. Without moderation 3 degrees of freedom would call twice as many harmful.
    rng = np.random.default_rng(2)
    num, degrees, confidence = 100_000, 6.0, 0.975
    sigma = np.sqrt(degrees / rng.chisquare(degrees, num))
    scores = rng.normal(0, sigma)
    stderrs = sigma * np.sqrt(rng.chisquare(FOLD_DEGREES, num) / FOLD_DEGREES)
    z, _ = calibrate(scores, stderrs, FOLD_DEGREES)
    quantile = NormalDist().inv_cdf(confidence)
    assert (z < -quantile).mean() == pytest.approx(1 - confidence, rel=0.1)
    assert (scores / stderrs < -quantile).mean() > 2 * (1 - confidence)


def test_one_document_is_judged_by_its_own_error_and_its_few_degrees() -> None:
    z, prior = calibrate(np.array([-2.0]), np.array([1.0]), FOLD_DEGREES)
    assert prior.degrees == 0
    assert z[0] == pytest.approx(stats.norm.ppf(stats.t.cdf(-2.0, FOLD_DEGREES)))


def test_known_errors_are_taken_as_they_are() -> None:
    z, _ = calibrate(np.array([-2.0, 1.0, 3.0]), np.array([1.0, 0.5, 0.0]), math.inf)
    assert z.tolist() == pytest.approx([-2.0, 2.0, 3.0 / math.sqrt((1 + 0.25) / 2)])


@pytest.mark.parametrize("lost", [0.0, math.nan, math.inf, -1.0])
def test_document_without_an_error_has_that_of_the_prior(lost: float) -> None:
    rng = np.random.default_rng(3)
    stderrs = np.exp(rng.normal(0, 2, 500))
    stderrs[0] = lost
    z, prior = calibrate(np.full(500, -2.0), stderrs, FOLD_DEGREES)
    assert prior == fit_error_prior(stderrs[1:], FOLD_DEGREES)
    assert z[0] == pytest.approx(stats.norm.ppf(stats.t.cdf(-2.0 / prior.stderr, prior.degrees)))


def test_nothing_is_known_where_no_document_has_an_error() -> None:
    z, prior = calibrate(np.array([-1.0, 1.0]), np.array([0.0, math.nan]), FOLD_DEGREES)
    assert np.isnan(z).all()
    assert math.isnan(prior.stderr)


@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.one_of(st.floats(), st.floats(1e-3, 1e3), st.just(0.1)),
        ),
        max_size=30,
    ),
    st.one_of(st.integers(1, 20).map(float), st.just(math.inf)),
)
def test_calibrated_z_is_finite_keeps_the_sign_and_no_warning_is_shown(
    documents: list[tuple[float, float]], degrees: float
) -> None:
    scores, stderrs = np.array([d[0] for d in documents]), np.array([d[1] for d in documents])
    z, prior = calibrate(scores, stderrs, degrees)
    assert len(z) == len(scores)
    if not math.isnan(prior.stderr):
        assert np.isfinite(z).all()
        assert (z * np.sign(scores) >= 0).all()


def test_mid_ranks_by_hand() -> None:
    assert mid_ranks(np.array([3.0, 1.0, 2.0, 2.0])).tolist() == [7 / 8, 1 / 8, 4 / 8, 4 / 8]
    assert mid_ranks(np.array([5.0])).tolist() == [0.5]


def test_estimators_combine_by_rank_on_the_scale_of_the_first() -> None:
    # Ranks (1 3 5 7)/8 and (5 1 3 7)/8; their means order the documents b < a < c < d... by 4/16: a 6, b 4, c 8, d 14.
    first = _estimate(-1.0, 0.0, 2.0, 9.0, z=[-2.0, 0.0, 1.0, 2.0])
    second = _estimate(30.0, 10.0, 20.0, 1000.0, z=[0.0, -1.0, 3.0, 2.0])
    combined = combine_by_rank([first, second])
    assert combined.scores.tolist() == [0.0, -1.0, 2.0, 9.0]
    assert combined.z.tolist() == [-1.0, -0.5, 2.0, 2.0]


def test_documents_that_an_estimator_lacks_are_placed_by_the_others() -> None:
    nan = math.nan
    combined = combine_by_rank([_estimate(1.0, 2.0, nan, nan), _estimate(nan, 5.0, 6.0, 4.0)])
    # Mean ranks: 1/4, (3/4 + 1/2) / 2 = 5/8, 5/6, 1/6: places 3/8, 5/8, 7/8, 1/8 on the first one's 1 (at 1/4) to 2 (at 3/4).
    assert combined.scores.tolist() == pytest.approx([1.25, 1.75, 2.0, 1.0])
    assert combined.z.tolist() == pytest.approx([1.0, 3.5, 6.0, 4.0])


def test_estimator_without_errors_has_no_say_in_the_confidence() -> None:
    nan = math.nan
    combined = combine_by_rank([_estimate(1.0, 2.0, z=[-3.0, nan]), _estimate(1.0, 2.0, z=[nan, nan])])
    assert combined.z[0] == -3.0
    assert math.isnan(combined.z[1])


def test_confidence_of_two_estimators_is_conservative_whatever_their_correlation() -> None:
    rng = np.random.default_rng(4)
    quantile = NormalDist().inv_cdf(0.9)
    for correlation in (-0.5, 0.0, 0.6, 1.0):
        z = rng.multivariate_normal([0, 0], [[1, correlation], [correlation, 1]], 50_000)
        combined = combine_by_rank([Estimate(scores=column, z=column) for column in z.T.copy()])
        assert (combined.z < -quantile).mean() < 0.105


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30), st.randoms())
def test_combination_is_monotonous_keeps_the_share_below_zero_and_knows_no_order(
    documents: list[tuple[int, int]], random: object
) -> None:
    first, second = (np.array(column, float) for column in zip(*documents, strict=True))
    combined = combine_by_rank([Estimate(scores=first, z=first), Estimate(scores=second, z=second)])
    above = (first[:, None] > first) & (second[:, None] > second)
    assert (combined.scores[:, None] >= combined.scores)[above].all()
    assert combined.scores.min() >= first.min()
    assert combined.scores.max() <= first.max()
    turned = np.arange(len(first))
    random.shuffle(turned)  # type: ignore[attr-defined]
    again = combine_by_rank(
        [Estimate(scores=first[turned], z=first[turned]), Estimate(scores=second[turned], z=second[turned])]
    )
    assert (again.scores == combined.scores[turned]).all()
    # An increasing change of scale of the second changes nothing.
    other_scale = np.exp(second)
    scaled = combine_by_rank([Estimate(scores=first, z=first), Estimate(scores=other_scale, z=second)])
    assert (scaled.scores == combined.scores).all()


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30, unique=True), st.randoms())
def test_distribution_of_scores_stays_the_first_ones(values: list[float], random: object) -> None:
    # Without ties in the mean ranks, the combined scores are the first one's in another order.
    first = np.array(values)
    second = np.arange(len(values), dtype=float)
    random.shuffle(second)  # type: ignore[attr-defined]
    means = mid_ranks(first) + mid_ranks(second)
    combined = combine_by_rank([Estimate(scores=first, z=first), Estimate(scores=second, z=second)])
    if len(np.unique(means)) == len(means):
        assert sorted(combined.scores.tolist()) == sorted(values)
