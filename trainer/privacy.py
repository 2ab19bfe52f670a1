"""Differential privacy of what an island tells of its training losses: clipped means, Gaussian noise, and what a run's messages cost together.

What is protected is one sequence of the rounds of every message (an outer cycle, where nothing else is asked): whoever reads an island's messages, and knows the parameters at every step and all other sequences, can tell
hardly better than before whether that sequence was this one or another of its tier. The bound is on what messages add to what the parameters show: those learn
from every sequence, and who wants that bounded, too, needs a private optimiser (DP-SGD), which Atoll hasn't. Noise is drawn in double precision; what leaves is coarse
multiples of what it was drawn for (messages.py).

Pure functions: where a loss comes from, and how messages travel, stands elsewhere. The accountant is Google's dp-accounting, imported when it's first asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from manifests.errors import UserError
from trainer.config import RunConfig

_SLACK = 1e-9
"""The accountant's search for a multiplier ends within 1e-12 of it, on either side: this much more is on the safe one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldLoss:
    """What may be known of a tier's training losses over a cycle. All that is told follows from these."""

    mean: float
    """Of the clipped losses, with noise, nats per token."""
    error: float
    """Bound on its standard error: it depends on the number of sequences, not on their losses."""
    sequences: int
    """How many there were; the mix says as much."""
    centre: float
    """What the next cycle's losses are clipped around."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What one island's messages of a run may cost."""

    epsilon: float
    delta: float
    clip: float
    """Losses count up to so far from their tier's centre, nats per token."""
    messages: int
    """Messages that the budget is for."""
    multiplier: float
    """Standard deviation of the noise, in sensitivities."""

    def spent(self, messages: int) -> float:
        """Epsilon that so many messages have cost, at `delta`."""
        return epsilon_spent(multiplier=self.multiplier, delta=self.delta, messages=min(messages, self.messages))


def feedback_budget(config: RunConfig) -> Budget | None:
    """The budget of each island of a run; None: nothing is asked.

    Raises:
        UserError: the accountant isn't installed.
    """
    if not config.feedback_epsilon:
        return None
    return Budget(
        epsilon=config.feedback_epsilon,
        delta=config.feedback_delta,
        clip=config.feedback_clip,
        messages=config.num_messages,
        multiplier=noise_multiplier(
            epsilon=config.feedback_epsilon, delta=config.feedback_delta, messages=config.num_messages
        ),
    )


def noise_multiplier(*, epsilon: float, delta: float, messages: int) -> float:
    """The least noise, in sensitivities, with which so many messages together are (epsilon, delta)-private.

    Args:
        epsilon: above 0.
        delta: between 0 and 1.
        messages: one or more; each is told with the noise that this gives.

    Raises:
        UserError: the accountant isn't installed.
    """
    sigma_gaussian, _ = _accountant()
    # n Gaussian mechanisms of multiplier σ, each chosen after the last one's outcome, are together exactly as private as one of σ / √n: Corollary 3.3, Gaussian
    # Differential Privacy (Dong, Roth, Su; arXiv 1905.02383). One is calibrated exactly by Theorem 8, Balle and Wang (arXiv 1805.06530). The accountants for
    # any composition (RDP, PLD) take 7 % more noise here, or minutes.
    return float(sigma_gaussian(epsilon, delta)) * math.sqrt(messages) * (1 + _SLACK)


def epsilon_spent(*, multiplier: float, delta: float, messages: int) -> float:
    """What so many messages with this noise have cost, at delta.

    Raises:
        UserError: the accountant isn't installed.
    """
    if messages == 0:
        return 0.0
    _, epsilon_gaussian = _accountant()
    return float(epsilon_gaussian(multiplier / math.sqrt(messages), delta))


def _accountant() -> tuple[Callable[[float, float], float], Callable[[float, float], float]]:
    try:
        from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
    except ImportError as e:
        raise UserError(
            "feedback with a privacy budget needs the accountant dp-accounting; `pip install 'atoll[privacy]'`, or leave --feedback-epsilon at 0"
        ) from e
    return get_sigma_gaussian, get_epsilon_gaussian


# Telling.


def sensitivity(clip: float, sequences: int) -> float:
    """How far the clipped mean of so many losses can move where one of them is replaced."""
    return 2 * clip / sequences


def clipped_mean(losses: Sequence[float], *, centre: float, clip: float) -> float:
    """Mean of losses, each held within `clip` of `centre`; one that isn't a number counts as the highest."""
    low, high = centre - clip, centre + clip
    return fmean(high if math.isnan(loss) else min(max(loss, low), high) for loss in losses)


def tell_losses(
    losses_by_tier: Mapping[str, Sequence[float]],
    *,
    centres: Mapping[str, float],
    first_centre: float,
    budget: Budget,
    gauss: Callable[[float, float], float],
) -> dict[str, ToldLoss]:
    """One message's worth of a cycle: a noised mean for each tier that it has sequences of.

    Every sequence is of one tier, so that one replaced moves one of the means by its sensitivity at most: all of them together cost what one of them does.

    Args:
        losses_by_tier: loss of every sequence of the cycle.
        centres: those of the message before, by tier.
        first_centre: for tiers that have none; nothing of the training losses is in it.
        budget: the noise and the clipping.
        gauss: draws from a normal distribution of a mean and a standard deviation, in secret, anew every time.
    """
    told = {}
    for tier, losses in losses_by_tier.items():
        if not losses:
            continue
        n, centre = len(losses), centres.get(tier, first_centre)
        noise = budget.multiplier * sensitivity(budget.clip, n)
        mean = clipped_mean(losses, centre=centre, clip=budget.clip) + gauss(0.0, noise)
        told[tier] = ToldLoss(
            mean=mean,
            # Values in an interval of length 2c have a standard deviation of c at most (Popoviciu, 1935).
            error=math.hypot(budget.clip / math.sqrt(n), noise),
            sequences=n,
            centre=next_centre(centre, mean, clip=budget.clip, noise=noise),
        )
    return told


def next_centre(centre: float, mean: float, *, clip: float, noise: float) -> float:
    """The centre moved towards a noised mean, the less the more of that may be noise: it would walk away at random with it else.

    The clipped mean lies within `clip` of the centre, so no step is longer; the gain is a Kalman filter's for a prior of that standard deviation.
    """
    step = (mean - centre) * clip**2 / (clip**2 + noise**2)
    return centre + min(max(step, -clip), clip)
