"""What the tiers are worth to the holdout by all that the islands of a run have gone through. Pure functions; what moves by it is the mix (manifests/sql/mixture.sql).

Islands that read different mixes in the same cycle tell the tiers apart: what is common to a cycle, the stage of the training and what was merged, falls out of the
comparison (docs/theory.md, section 4). It's their losses at its end that are compared, not by how much these fell: an island that was behind catches up by what it's
sent, whatever it read, and merging has made them all alike before. K tiers, n observations: an island's cycle each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.schemas import TIERS
from trainer.feedback import Feedback

HALF_LIFE = 6.0
"""Cycles after which an observation counts half: what a tier is worth changes with what has been learned, and with what is delivered."""
MEMORY = 24
"""Cycles that are looked back on; what is older counts less than 1/16."""
_PRIORS = (0.0, *np.geomspace(1e-2, 1e6, 161).tolist())
"""Variances of the tiers' worth before anything was seen, in those of the noise; the one that explains the observations best is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What the tiers are worth, from the mean tier's; units differ by method, and don't matter to a mix."""

    effectiveness: Mapping[str, float]
    error: Mapping[str, float]
    """Standard errors."""
    method: str
    observations: int

    @property
    def unknown_share(self) -> float:
        """How much of what tells the tiers apart may be noise: 1 where nothing is known, 0 where all is."""
        noise = math.fsum(error**2 for error in self.error.values()) / len(self.error)
        mean = math.fsum(self.effectiveness.values()) / len(self.effectiveness)
        signal = math.fsum((value - mean) ** 2 for value in self.effectiveness.values()) / len(self.effectiveness)
        return noise / (signal + noise) if signal + noise > 0 else 1.0

    def describe(self) -> dict[str, Any]:
        """How it was found, for the record of a decision."""
        return {"method": self.method, "observations": self.observations}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cycle:
    """What an island went through in an outer cycle."""

    island: int
    number: int
    """Equal for cycles that are compared."""
    loss: float
    """On the holdout at its end, nats per token."""
    shares: Mapping[str, float]
    """Of its tokens, by tier."""
    weight: float = 1.0
    """What it counts: less where the tiers held other documents."""

    @staticmethod
    def from_row(row: Mapping[str, Any], kept: Mapping[int, float]) -> Cycle:
        """Of a row of the question `cycle_losses`.

        Args:
            row: the row.
            kept: share of what the tiers hold now that they held in each tier version (question `tier_overlap`).
        """
        return Cycle(
            weight=kept.get(row["tier_version"], 1.0),
            island=row["island"],
            number=row["round"],
            loss=row["holdout_loss"],
            shares={tier: row[f"share_{tier.lower()}"] for tier in TIERS},
        )


def worth_by_regression(cycles: Sequence[Cycle]) -> Worth | None:
    """Regresses the islands' losses on what they read: a level for each cycle, a slope for each tier.

    Bayesian linear regression with a normal prior around no difference, whose variance is that of greatest marginal likelihood (MacKay, Bayesian Interpolation,
    1992), and observations that count half after HALF_LIFE cycles. Where nothing tells the tiers apart, all come out alike, and the error says how little is known.

    Returns:
        By how many nats a cycle of that tier alone lowers the loss, from the mean tier's: posterior mean and standard deviation. None: too few observations.
    """
    numbers = sorted({cycle.number for cycle in cycles})[-MEMORY:]
    age = {number: len(numbers) - 1 - place for place, number in enumerate(numbers)}
    rows, gains, num_levels = [], [], 0
    for number in numbers:
        together = [cycle for cycle in cycles if cycle.number == number]
        if len(together) < 2:
            continue  # its level takes all that it says
        weight = math.sqrt(0.5 ** (age[number] / HALF_LIFE) * min(cycle.weight for cycle in together))
        if weight == 0:
            continue
        shares = np.array([[cycle.shares[tier] for tier in TIERS] for cycle in together])
        loss = np.array([cycle.loss for cycle in together])
        rows.append(weight * (shares - shares.mean(axis=0)))
        gains.append(weight * (loss.mean() - loss))
        num_levels += 1
    if not rows:
        return None
    design_nK, gain_n = np.concatenate(rows), np.concatenate(gains)
    freedom = len(gain_n) - num_levels
    if freedom < len(TIERS):
        return None
    return _posterior(design_nK, gain_n, freedom)


def nothing_known(observations: int) -> Worth:
    """That no tier is known to be worth more than another."""
    return Worth(
        effectiveness=dict.fromkeys(TIERS, 0.0),
        error=dict.fromkeys(TIERS, 1.0),
        method="regression",
        observations=observations,
    )


def _posterior(design_nK: npt.NDArray[np.float64], gain_n: npt.NDArray[np.float64], freedom: int) -> Worth | None:
    u_nK, singular_K, vt_KK = np.linalg.svd(design_nK, full_matrices=False)
    along_K = u_nK.T @ gain_n
    rest = float(gain_n @ gain_n - along_K @ along_K)  # what no mix explains
    best: tuple[float, float, float] | None = None
    for prior in _PRIORS:
        spread_K = 1 + prior * singular_K**2
        squares = rest + float((along_K**2 / spread_K).sum())
        if squares <= 0:
            return None
        noise = squares / freedom
        likelihood = -0.5 * (freedom * math.log(noise) + float(np.log(spread_K).sum()))
        if best is None or likelihood > best[0] + 1e-12:
            best = (likelihood, prior, noise)
    assert best is not None
    _, prior, noise = best
    # A prior of no difference at all would claim to know that; the least one that differs keeps an error.
    shrunk = max(prior, _PRIORS[1])
    mean_K = vt_KK.T @ (prior * singular_K / (1 + prior * singular_K**2) * along_K)
    covariance_KK = noise * shrunk * (np.eye(len(TIERS)) - vt_KK.T @ np.diag(_kept(shrunk, singular_K)) @ vt_KK)
    centring_KK = np.eye(len(TIERS)) - 1 / len(TIERS)
    worth_K = centring_KK @ mean_K
    error_K = np.sqrt(np.maximum(np.diag(centring_KK @ covariance_KK @ centring_KK), 0.0))
    return Worth(
        effectiveness=dict(zip(TIERS, worth_K.tolist(), strict=True)),
        error=dict(zip(TIERS, error_K.tolist(), strict=True)),
        method="regression",
        observations=len(gain_n),
    )


def _kept(prior: float, singular_K: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Share of the prior's variance that the observations have taken, along each singular direction."""
    return prior * singular_K**2 / (1 + prior * singular_K**2)


def worth_by_telling(histories: Mapping[int, Sequence[Feedback]]) -> Worth | None:
    """The mean of what all islands have told of each tier, each by its precision and its age; for what is a measure of worth in every message, as online influence is.

    Returns:
        From the mean tier's; None: fewer than two tiers are known.
    """
    sums = dict.fromkeys(TIERS, (0.0, 0.0))
    count = 0
    for history in histories.values():
        for age, told in enumerate(reversed(history[-MEMORY:])):
            for tier in TIERS:
                value, error = told.effectiveness[tier], told.effectiveness_error[tier]
                if value is None or not error:
                    continue
                precision = 0.5 ** (age / HALF_LIFE) / error**2
                weighted, total = sums[tier]
                sums[tier] = (weighted + precision * value, total + precision)
                count += 1
    known = {tier: (weighted / total, total**-0.5) for tier, (weighted, total) in sums.items() if total > 0}
    if len(known) < 2:
        return None
    centre = math.fsum(mean for mean, _ in known.values()) / len(known)
    return Worth(
        effectiveness={tier: mean - centre for tier, (mean, _) in known.items()},
        error={tier: error for tier, (_, error) in known.items()},
        method="telling",
        observations=count,
    )
