"""What an island tells of an outer cycle. Pure functions of what it measured; how it travels stands in messages.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from manifests.schemas import TIERS
from trainer.messages import Levels, Scale
from trainer.privacy import ToldLoss


def _error(name: str) -> str:
    return name.replace("_", "_error_", 1)


_BY_TIER = [f"effectiveness_{tier.lower()}" for tier in TIERS]
_WHERE_UNKNOWN = {"loss_trend": 0.0, "convergence_rate": 0.0, "step_time_s": 0.0, "generalization_gap": math.nan}
"""What columns hold that must hold something."""
_MEASURED = {name: _error(name) for name in _BY_TIER} | {"convergence_rate": "convergence_error"}
"""Columns that have a standard error, and where it stands. They travel as multiples of it: finer is noise, whatever the batch, the cycle and the stage of training."""
_OF_ERRORS = 0.25
SCALES = (
    Scale(name="loss_trend", kind="linear", quantum=5e-3),
    Scale(name="generalization_gap", kind="linear", quantum=5e-3),
    # Decisions are made of the tiers' effectiveness.
    *(
        Scale(name=name, kind="linear", quantum=_OF_ERRORS, importance=4.0 if name in _BY_TIER else 1.0)
        for name in _MEASURED
    ),
    *(Scale(name=name, kind="log", quantum=0.25, importance=2.0) for name in _MEASURED.values()),
    Scale(name="step_time_s", kind="log", quantum=0.1),
    Scale(name="upload_bps", kind="log", quantum=0.5),
    Scale(name="latency_s", kind="log", quantum=0.5),
)
"""The fields as they travel."""
_SCALES = {scale.name: scale for scale in SCALES}


@dataclass(frozen=True, kw_only=True, slots=True)
class TierLoss:
    """A tier's training loss over a cycle, nats per token."""

    mean: float
    error: float
    """Standard error of the mean."""

    @staticmethod
    def of(losses: Sequence[float]) -> TierLoss:
        """Of its sequences; of one alone the error isn't known and taken for its loss itself."""
        # Sums of the standard library are exact. Numpy's depend in their last bit on where an array lies, and a run that is taken up again must tell the same.
        mean = fmean(losses)
        n = len(losses)
        error = math.sqrt(math.fsum((x - mean) ** 2 for x in losses) / (n * (n - 1))) if n > 1 else abs(mean)
        return TierLoss(mean=mean, error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """One island's message about one outer cycle; losses in nats per token. None: not known."""

    loss_trend: float | None
    """Change of the mean training loss against the message before."""
    convergence_rate: float | None
    """Slope of the logarithm of the training loss over the cycle's sequences, per sequence."""
    convergence_error: float | None
    """Its standard error."""
    generalization_gap: float | None
    """Holdout loss less training loss."""
    effectiveness: Mapping[str, float | None]
    """Descent of each tier's training loss since the message before."""
    effectiveness_error: Mapping[str, float | None]
    """Its standard error."""
    step_time_s: float | None
    """Median time of an inner step."""
    upload_bps: float | None
    """Median rate at which outer gradients went out, bits per second."""
    latency_s: float | None
    """Median time of a small request to the store."""

    def to_row(self) -> dict[str, Any]:
        """As the `feedback` table keeps it."""
        columns = self._columns()
        return columns | {name: value for name, value in _WHERE_UNKNOWN.items() if columns[name] is None}

    def to_values(self) -> dict[str, float | None]:
        """As it's told, by the names of SCALES."""
        values = self._columns()
        for name, error_name in _MEASURED.items():
            # Against the error as the reader will have it, so that its rounding doesn't add to this one's.
            error = _SCALES[error_name].value(_SCALES[error_name].level(values[error_name]))
            value = values[name]
            values[name] = value / error if value is not None and error else None
        return values

    def _columns(self) -> dict[str, float | None]:
        return {
            "loss_trend": self.loss_trend,
            "convergence_rate": self.convergence_rate,
            "convergence_error": self.convergence_error,
            "generalization_gap": self.generalization_gap,
            **{name: self.effectiveness[tier] for name, tier in zip(_BY_TIER, TIERS, strict=True)},
            **{_error(name): self.effectiveness_error[tier] for name, tier in zip(_BY_TIER, TIERS, strict=True)},
            "step_time_s": self.step_time_s,
            "upload_bps": self.upload_bps,
            "latency_s": self.latency_s,
        }

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Feedback:
        """What `to_row` gave, out of a row of the table; of what must stand there 0 and NaN are unknown."""

        def known(name: str) -> float | None:
            value = row[name]
            return None if value is None or math.isnan(value) or value == _WHERE_UNKNOWN.get(name) else value

        names = set(_SCALES) - set(_BY_TIER) - set(map(_error, _BY_TIER))
        return Feedback(
            effectiveness={tier: known(name) for name, tier in zip(_BY_TIER, TIERS, strict=True)},
            effectiveness_error={tier: known(_error(name)) for name, tier in zip(_BY_TIER, TIERS, strict=True)},
            **{name: known(name) for name in names},
        )

    @staticmethod
    def from_levels(levels: Levels) -> Feedback:
        """What a reader takes a message's state for."""
        values = {scale.name: scale.value(level) for scale, level in zip(SCALES, levels, strict=True)}
        for name, error_name in _MEASURED.items():
            in_errors, error = values[name], values[error_name]
            values[name] = in_errors * error if in_errors is not None and error is not None else None
        by_tier = {tier: values.pop(name) for name, tier in zip(_BY_TIER, TIERS, strict=True)}
        errors = {tier: values.pop(_error(name)) for name, tier in zip(_BY_TIER, TIERS, strict=True)}
        return Feedback(effectiveness=by_tier, effectiveness_error=errors, **values)


def summarise_cycle(
    *,
    loss: float,
    holdout_loss: float,
    losses_by_tier: Mapping[str, Sequence[float]],
    contributions_by_tier: Mapping[str, Sequence[float]],
    previous: Mapping[str, TierLoss],
    step_times_s: Sequence[float],
    upload_bps: float | None,
    latency_s: float | None,
) -> tuple[Feedback, dict[str, TierLoss]]:
    """A cycle's message, and the losses by tier that the next one compares with.

    Args:
        loss: mean training loss of the cycle's last round.
        holdout_loss: measured at its end.
        losses_by_tier: loss of every sequence of the cycle, in order, by tier.
        contributions_by_tier: what each of them has contributed to the descent of the holdout loss, where that is measured (online.py): then it's what
            a tier's effectiveness is. Else that is the descent of the tier's own training loss.
        previous: what this function returned for the cycle before, or nothing.
        step_times_s: time of every inner step.
        upload_bps: of the cycle's outer gradients, bits per second; None: none went out.
        latency_s: of a small request; None: not measured.
    """
    rate, error = _log_slope(losses_by_tier)
    message, losses = _compare(
        {tier: TierLoss.of(losses) for tier, losses in losses_by_tier.items() if losses},
        previous,
        convergence_rate=rate,
        convergence_error=error,
        generalization_gap=holdout_loss - loss,
        step_time_s=median(step_times_s) if step_times_s else None,
        upload_bps=upload_bps,
        latency_s=latency_s,
    )
    contributed = {tier: TierLoss.of(sums) for tier, sums in contributions_by_tier.items() if sums}
    if contributed:
        message = replace(
            message,
            effectiveness={tier: contributed[tier].mean if tier in contributed else None for tier in TIERS},
            effectiveness_error={tier: contributed[tier].error if tier in contributed else None for tier in TIERS},
        )
    return message, losses


def summarise_told(
    told: Mapping[str, ToldLoss],
    *,
    holdout_loss: float,
    previous: Mapping[str, TierLoss],
    step_times_s: Sequence[float],
    upload_bps: float | None,
    latency_s: float | None,
) -> tuple[Feedback, dict[str, TierLoss]]:
    """`summarise_cycle` where training losses are told under differential privacy: of nothing but the noised means, which is why it costs no more than these.

    The gap is that to the whole cycle's mean loss here, and the slope within the cycle isn't known.

    Args:
        told: what may be known of the cycle's losses, by tier.
        holdout_loss: measured at its end.
        previous: what this function returned for the cycle before, or nothing.
        step_times_s: time of every inner step.
        upload_bps: of the cycle's outer gradients, bits per second; None: none went out.
        latency_s: of a small request; None: not measured.
    """
    total = sum(loss.sequences for loss in told.values())
    mean = math.fsum(loss.mean * loss.sequences for loss in told.values()) / total if total else None
    return _compare(
        {tier: TierLoss(mean=loss.mean, error=loss.error) for tier, loss in told.items()},
        previous,
        convergence_rate=None,
        convergence_error=None,
        generalization_gap=holdout_loss - mean if mean is not None else None,
        step_time_s=median(step_times_s) if step_times_s else None,
        upload_bps=upload_bps,
        latency_s=latency_s,
    )


def _compare(
    now: dict[str, TierLoss], previous: Mapping[str, TierLoss], **more: float | None
) -> tuple[Feedback, dict[str, TierLoss]]:
    """What follows from the losses by tier of a cycle and of those before it, and the rest of the message."""
    known = [tier for tier in now if tier in previous]
    descents = {tier: previous[tier].mean - now[tier].mean for tier in known}
    errors = {tier: math.hypot(previous[tier].error, now[tier].error) for tier in known}
    message = Feedback(
        loss_trend=-fmean(descents.values()) if known else None,
        effectiveness={tier: descents.get(tier) for tier in TIERS},
        effectiveness_error={tier: errors.get(tier) for tier in TIERS},
        **more,
    )
    return message, dict(previous) | now


def _log_slope(losses_by_tier: Mapping[str, Sequence[float]]) -> tuple[float | None, float | None]:
    """Slope of the logarithm of the loss over the cycle's sequences and its standard error: least squares with a level for each tier, since these lie apart.

    Tiers are interleaved evenly, so the i-th of a tier's n sequences stands at about (i + ½) / n of the cycle.
    """
    total = sum(map(len, losses_by_tier.values()))
    x, y, levels = [], [], 0
    for losses in losses_by_tier.values():
        # A loss of 0 has no logarithm; none is that small but by a fault.
        if len(losses) < 2 or min(losses) <= 0:
            continue
        logs = [math.log(loss) for loss in losses]
        places = [(i + 0.5) * total / len(losses) for i in range(len(losses))]
        levels += 1
        x += [place - fmean(places) for place in places]
        y += [log - fmean(logs) for log in logs]
    spread, freedom = math.fsum(place * place for place in x), len(x) - levels - 1
    if freedom < 1:
        return None, None
    slope = math.fsum(a * b for a, b in zip(x, y, strict=True)) / spread
    rest = math.fsum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / freedom / spread)
