"""Strategies: how an island mixes the tiers. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from manifests.schemas import TIERS

ADAPTIVE = "adaptive"
UNIFORM = "uniform"
STRATEGIES: dict[str, dict[str, float]] = {
    "aggressive": {"S": 0.4, "A": 0.4, "B": 0.2, "C": 0.0},
    "balanced": {"S": 0.2, "A": 0.4, "B": 0.3, "C": 0.1},
    "conservative": {"S": 0.1, "A": 0.3, "B": 0.4, "C": 0.2},
    # adaptive starts as balanced and moves from there
    ADAPTIVE: {"S": 0.2, "A": 0.4, "B": 0.3, "C": 0.1},
    # uniform takes every tier by its size; the weights are filled in from the views
    UNIFORM: {},
}

WEIGHT_FLOOR = 0.02
STEP_CAP = 0.25
LEARNING_RATE = 2.0


def start_weights(strategy: str, tier_tokens: Mapping[str, int]) -> dict[str, float]:
    """Weights that a strategy starts with.

    Args:
        strategy: a name in STRATEGIES.
        tier_tokens: tokens of each tier's view; only `uniform` looks at them.
    """
    if strategy == UNIFORM:
        total = sum(tier_tokens.values()) or 1
        return {tier: tier_tokens.get(tier, 0) / total for tier in TIERS}
    return dict(STRATEGIES[strategy])


def adapt(weights: Mapping[str, float], effectiveness: Mapping[str, float | None]) -> dict[str, float]:
    """One step of multiplicative weights on the tiers' effectiveness, with a floor and a cap on the change.

    w_t ← w_t · exp(η · (e_t − ē)), each ratio held within 1 ± STEP_CAP, then floored and normalised (the Hedge update of Freund and
    Schapire, 1997). A tier that was not tried keeps its weight. Tier weights of 0 stay 0: what the island may not read, it doesn't try.

    Args:
        weights: the mix so far.
        effectiveness: descent of the training loss since the last step, nats per token, None where it wasn't measured.
    """
    measured = {
        tier: e for tier, e in effectiveness.items() if e is not None and math.isfinite(e) and weights[tier] > 0
    }
    if len(measured) < 2:
        return dict(weights)
    mean = sum(measured.values()) / len(measured)
    moved = {}
    for tier, weight in weights.items():
        ratio = math.exp(LEARNING_RATE * (measured[tier] - mean)) if tier in measured else 1.0
        ratio = min(max(ratio, 1 - STEP_CAP), 1 + STEP_CAP)
        moved[tier] = max(weight * ratio, WEIGHT_FLOOR) if weight > 0 else 0.0
    total = sum(moved.values())
    return {tier: weight / total for tier, weight in moved.items()}
