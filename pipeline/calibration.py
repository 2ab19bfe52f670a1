"""From the scores of one or several estimators to one score and one confidence for each document. Pure functions of arrays: no store, no randomness.

What the scores are then sorted into is tiers.py's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import digamma, ndtri, polygamma, stdtr

Scores = npt.NDArray[np.float64]
_SMALLEST = 1e-5
"""Variances below this share of their median count as that: rounding, not knowledge."""
_MOST_SURE = 37.0
"""Standard deviations beyond which a double has no probability left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPrior:
    """What all standard errors of a group of scores say of any one of them: σ² is distributed as degrees · stderr² / χ²(degrees)."""

    degrees: float
    """Degrees of freedom; infinite where the errors differ no more than chance makes them, 0 where nothing can be said."""
    stderr: float
    """NaN where the group has no standard error at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one estimator says of every document."""

    scores: Scores
    """NaN where it has scored none."""
    z: Scores
    """Score in calibrated standard errors: normal around 0 where the true influence is 0. NaN where nothing is known of the error."""


def fit_error_prior(stderrs: Scores, degrees: float) -> ErrorPrior:
    """Fits the prior to the standard errors of a group, by the moments of log s² (limma's fitFDist: Smyth 2004, Statistical Applications in
    Genetics and Molecular Biology 3(1), section 6.2).

    Args:
        stderrs: of the documents; those that are not finite and above 0 don't count.
        degrees: of freedom that each rests on; infinite: they are known, and a document without one has their root mean square.
    """
    variances = np.square(stderrs[_usable(stderrs)])
    if not len(variances):
        return ErrorPrior(degrees=0.0, stderr=math.nan)
    variances = np.maximum(variances, _SMALLEST * float(np.median(variances)))
    pooled = ErrorPrior(degrees=math.inf, stderr=math.sqrt(float(variances.mean())))
    if math.isinf(degrees):
        return pooled
    if len(variances) == 1:
        return ErrorPrior(degrees=0.0, stderr=pooled.stderr)
    logs = np.log(variances) - float(digamma(degrees / 2) - math.log(degrees / 2))
    excess = float(logs.var(ddof=1)) - float(polygamma(1, degrees / 2))
    if excess <= 0:
        return pooled
    found = 2 * trigamma_inverse(excess)
    log_variance = float(logs.mean()) + float(digamma(found / 2)) - math.log(found / 2)
    return ErrorPrior(degrees=found, stderr=math.exp(log_variance / 2))


def trigamma_inverse(value: float) -> float:
    """The x with trigamma(x) = value > 0, by Newton's method on 1 / trigamma, which is nearly linear (Smyth 2004, appendix)."""
    assert value > 0
    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1e-6:
        return 1 / value
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-10:
            break
    return x


def calibrate(scores: Scores, stderrs: Scores, degrees: float) -> tuple[Scores, ErrorPrior]:
    """Scores in calibrated standard errors, and the prior by which they were.

    A standard error from a few folds is itself a rough guess: among many documents some have a tiny one by chance, and would look harmful without a doubt. So each is moderated
    by what all of them say, s̃² = (d₀ s₀² + d s²) / (d₀ + d), and score / s̃ follows Student's t with d₀ + d degrees of freedom (Smyth 2004, section 3);
    it is given as the normal quantile of the same probability. A document without a standard error, or with one of 0, has s₀ and d₀ degrees.

    Args:
        scores: of a group of documents scored in the same way, finite.
        stderrs: their standard errors.
        degrees: of freedom that each rests on; infinite: they are taken as they are.

    Returns:
        z, NaN for all where the group has no standard error; and the prior.
    """
    prior = fit_error_prior(stderrs, degrees)
    if math.isnan(prior.stderr):
        return np.full(len(scores), np.nan), prior
    usable = _usable(stderrs)
    unknown_degrees = prior.degrees or degrees
    if math.isinf(degrees):
        variances, its_degrees = np.square(stderrs[usable]), math.inf
    elif math.isinf(prior.degrees):
        variances, its_degrees = np.full(int(usable.sum()), prior.stderr**2), math.inf
    else:
        its_degrees = prior.degrees + degrees
        variances = (prior.degrees * prior.stderr**2 + degrees * np.square(stderrs[usable])) / its_degrees
    z = np.empty(len(scores))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        z[usable] = _normal_quantiles(scores[usable] / np.sqrt(variances), its_degrees)
        z[~usable] = _normal_quantiles(scores[~usable] / prior.stderr, unknown_degrees)
    return np.nan_to_num(z), prior


def combine_by_rank(estimates: Sequence[Estimate]) -> Estimate:
    """One estimate of several, whose scores have no common unit.

    Each estimator gives every document that it has scored a mid-rank in (0, 1); the mean of a document's ranks, over those that scored it, orders the documents. The combined score is
    the first estimator's at the place which a document takes in that order: so the share of documents below zero and the curve of influence over documents are the
    first estimator's, and the others only change which documents stand where. (At the mean rank itself, scores of estimators that disagree would all shrink to the median.)

    The combined z is the mean of the estimators' z. Its variance is at most 1, whatever the correlation of their errors, and 1 only where they are perfectly correlated. So held against
    the normal quantile it is conservative: estimators that share a model and a holdout must not look like independent witnesses.

    Args:
        estimates: each document is scored by one of them at least.
    """
    if len(estimates) == 1:
        return estimates[0]
    num = len(estimates[0].scores)
    ranks, times_scored = np.zeros(num), np.zeros(num)
    z, times_known = np.zeros(num), np.zeros(num)
    for estimate in estimates:
        scored = np.isfinite(estimate.scores)
        ranks[scored] += mid_ranks(estimate.scores[scored])
        times_scored += scored
        known = np.isfinite(estimate.z)
        z[known] += estimate.z[known]
        times_known += known
    assert (times_scored > 0).all()
    first = np.sort(estimates[0].scores[np.isfinite(estimates[0].scores)])
    assert len(first)
    scores = np.interp(mid_ranks(ranks / times_scored), (np.arange(len(first)) + 0.5) / len(first), first)
    return Estimate(scores=scores, z=np.where(times_known > 0, z / np.maximum(times_known, 1), np.nan))


def mid_ranks(values: Scores) -> Scores:
    """(rank - ½) / number, equal values sharing the average of their ranks."""
    if not len(values):
        return np.zeros(0)
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1]))
    counts = np.diff(np.append(starts, len(values)))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((starts + counts / 2) / len(values), counts)
    return ranks


def _usable(stderrs: Scores) -> npt.NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        variances = np.square(stderrs)
    return np.isfinite(variances) & (variances > 0) & (stderrs > 0)


def _normal_quantiles(t: Scores, degrees: float) -> Scores:
    """The normal quantiles of the probabilities that Student's t has below these values."""
    size = np.abs(t)
    if not math.isinf(degrees):
        # By the lower tail, which keeps its digits where the upper one rounds to 1.
        size = -ndtri(stdtr(degrees, -size))
    return np.copysign(np.minimum(size, _MOST_SURE), t)
