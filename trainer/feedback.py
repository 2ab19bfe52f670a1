"""What an island tells of an outer cycle. Pure functions of what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median
from typing import Any

from manifests.schemas import TIERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """One island's message about one outer cycle; losses in nats per token."""

    loss_trend: float
    """Change of the mean training loss against the message before."""
    convergence_rate: float
    """Slope of the training loss over the cycle's sequences, per sequence."""
    generalization_gap: float
    """Holdout loss less training loss."""
    effectiveness: Mapping[str, float | None]
    """Descent of each tier's training loss since the message before; None where either is unknown."""
    step_time_s: float
    """Median time of an inner step."""

    def to_row(self) -> dict[str, Any]:
        """As the `feedback` table keeps it."""
        return {
            "loss_trend": self.loss_trend,
            "convergence_rate": self.convergence_rate,
            "generalization_gap": self.generalization_gap,
            **{f"effectiveness_{tier.lower()}": self.effectiveness[tier] for tier in TIERS},
            "step_time_s": self.step_time_s,
        }


def summarise_cycle(
    *,
    loss: float,
    holdout_loss: float,
    losses_by_tier: Mapping[str, Sequence[float]],
    previous_tier_losses: Mapping[str, float],
    step_times_s: Sequence[float],
) -> tuple[Feedback, dict[str, float]]:
    """A cycle's message, and the mean loss by tier that the next one compares with.

    Args:
        loss: mean training loss of the cycle's last round.
        holdout_loss: measured at its end.
        losses_by_tier: loss of every sequence of the cycle, in order, by tier.
        previous_tier_losses: what this function returned for the cycle before, or nothing.
        step_times_s: time of every inner step.
    """
    # Sums of the standard library are exact. Numpy's depend in their last bit on where an array lies, and a run that is taken up again must tell the same.
    means = {tier: fmean(losses) for tier, losses in losses_by_tier.items() if losses}
    effectiveness = {
        tier: previous_tier_losses[tier] - means[tier] if tier in means and tier in previous_tier_losses else None
        for tier in TIERS
    }
    slopes = [linear_regression(range(len(x)), x).slope for x in losses_by_tier.values() if len(x) >= 2]
    known = [tier for tier in means if tier in previous_tier_losses]
    message = Feedback(
        loss_trend=fmean(means[t] - previous_tier_losses[t] for t in known) if known else 0.0,
        convergence_rate=fmean(slopes) if slopes else 0.0,
        generalization_gap=holdout_loss - loss,
        effectiveness=effectiveness,
        step_time_s=median(step_times_s) if step_times_s else 0.0,
    )
    return message, dict(previous_tier_losses) | means
