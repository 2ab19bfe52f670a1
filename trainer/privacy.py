"""Differential privacy of what islands tell of their training losses: clipped, with Gaussian noise, and a budget for the whole run. Pure functions; the accountant is dp-accounting.

The unit is one sequence of every cycle: whoever reads all of a run's messages learns next to nothing of whether an island trained on this sequence or on another in its place,
in each of its cycles. A document that fills several sequences of a cycle counts as several. A sequence is in one tier, so a cycle's tier means are one release, and a run's
messages compose. What is told beside the means is worked out of them, or isn't of training losses: the holdout's loss, times, rates.

It's for feedback that goes further than the store: outer gradients, checkpoints and the tables `consumption` and `checkpoints` hold losses and parameters as they are.
Noise is drawn in floating point (Mironov, 2012, shows what that may leak); that messages are quantised afterwards helps, and proves nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from manifests.errors import UserError
from manifests.schemas import TIERS
from trainer.feedback import Feedback, TierLoss

KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How losses are released."""

    multiplier: float
    """Standard deviation of the noise, in units of what one sequence can change."""
    clip: float
    """Largest distance of a loss from its centre that counts, nats."""
    key: bytes
    """Secret of the island: who knows it can take the noise away."""


@cache
def noise_multiplier(epsilon: float, delta: float, num_messages: int) -> float:
    """The least noise with which a run's messages together are (ε, δ)-private, in units of what one sequence can change.

    Composition of Gaussian mechanisms by Rényi divergence (Mironov, Rényi Differential Privacy, 2017), by dp-accounting.

    Raises:
        UserError: dp-accounting isn't installed.
    """
    accounting = _accounting()

    def events(multiplier: float) -> object:
        return accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(multiplier), num_messages)

    found = accounting.calibrate_dp_mechanism(accounting.rdp.RdpAccountant, events, epsilon, delta)
    return float(found)


@cache
def spent_epsilon(multiplier: float, delta: float, num_messages: int) -> float:
    """What so many messages cost.

    Raises:
        UserError: dp-accounting isn't installed.
    """
    if num_messages == 0:
        return 0.0
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant()
    accountant.compose(accounting.GaussianDpEvent(multiplier), num_messages)
    return float(accountant.get_epsilon(delta))


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as e:
        raise UserError("differential privacy of feedback needs dp-accounting: pip install 'atoll[privacy]'") from e
    return dp_accounting


def released_means(
    losses_by_tier: Mapping[str, Sequence[float]], centres: Mapping[str, float], noise: Noise, *, context: str
) -> dict[str, TierLoss]:
    """Each tier's mean loss with noise, and an error that says nothing of the losses: as if they were spread as far as the clipping allows.

    One sequence in place of another changes a tier's mean by 2 · clip / n at most. The noise is drawn from the secret, the context and the means themselves: a round
    that is taken again to the bit tells the same message again, at no further cost, and whatever differs gets noise of its own.

    Args:
        losses_by_tier: loss of every sequence, nats per token.
        centres: by tier, where its losses are expected, by what has been released.
        noise: how much.
        context: island and number of the message.
    """
    clipped = {
        tier: fmean(min(max(loss - centres[tier], -noise.clip), noise.clip) for loss in losses)
        for tier, losses in losses_by_tier.items()
        if losses
    }
    seed = hashlib.blake2b(context.encode(), key=noise.key, digest_size=32)
    for tier, mean in clipped.items():
        seed.update(struct.pack(">sd", tier.encode(), mean))
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(int.from_bytes(seed.digest(), "big"))))
    released = {}
    for tier in TIERS:
        drawn = float(rng.normal())
        if tier not in clipped:
            continue
        num = len(losses_by_tier[tier])
        deviation = noise.multiplier * 2 * noise.clip / num
        error = math.hypot(noise.clip / math.sqrt(num), deviation)
        released[tier] = TierLoss(mean=centres[tier] + clipped[tier] + drawn * deviation, error=error)
    return released


def summarise_privately(
    *,
    holdout_loss: float,
    losses_by_tier: Mapping[str, Sequence[float]],
    previous: Mapping[str, TierLoss],
    noise: Noise,
    context: str,
    step_time_s: float | None,
    upload_bps: float | None,
    latency_s: float | None,
) -> tuple[Feedback, dict[str, TierLoss]]:
    """A cycle's message of released means alone, and the means that the next one compares with.

    Args:
        holdout_loss: measured at its end; nothing of the training losses.
        losses_by_tier: loss of every sequence of the cycle, by tier.
        previous: what this function returned for the cycle before, or nothing: then losses are expected where the holdout's is.
        noise: how much.
        context: island and number of the message.
        step_time_s: median time of an inner step.
        upload_bps: bits per second.
        latency_s: of a small request.
    """
    centres = {tier: previous[tier].mean if tier in previous else holdout_loss for tier in TIERS}
    now = released_means(losses_by_tier, centres, noise, context=context)
    known = [tier for tier in now if tier in previous]
    descents = {tier: previous[tier].mean - now[tier].mean for tier in known}
    total = sum(len(losses_by_tier[tier]) for tier in now)
    loss = math.fsum(now[tier].mean * len(losses_by_tier[tier]) for tier in now) / total if total else None
    message = Feedback(
        loss_trend=-fmean(descents.values()) if known else None,
        convergence_rate=None,
        convergence_error=None,
        generalization_gap=holdout_loss - loss if loss is not None else None,
        effectiveness={tier: descents.get(tier) for tier in TIERS},
        effectiveness_error={
            tier: math.hypot(previous[tier].error, now[tier].error) if tier in descents else None for tier in TIERS
        },
        step_time_s=step_time_s,
        upload_bps=upload_bps,
        latency_s=latency_s,
    )
    return message, dict(previous) | now
