"""Which tier the next sequence comes from: a deterministic apportionment, no random draw. Pure functions of numbers.

The realised counts stay within one sequence of the asked shares at every moment, by the algorithm of R. Tijdeman, "The chairman
assignment problem" (Discrete Mathematics 32, 1980): among those who may be served, the one whose deadline is nearest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_EPSILON = 1e-9


def next_group(weights: Sequence[float], credits: Sequence[float]) -> tuple[int, list[float]]:
    """Chooses the group that the next sequence comes from.

    Args:
        weights: asked share of each group, summing to 1.
        credits: for each group, sequences asked so far less sequences given; all 0 at the start.

    Returns:
        The group's number, and the credits afterwards.
    """
    num_groups = sum(weight > 0 for weight in weights)
    margin = 1 / (2 * num_groups - 2) if num_groups > 1 else 0.0
    owed = [credit + weight for credit, weight in zip(credits, weights, strict=True)]
    eligible = [i for i, weight in enumerate(weights) if weight > 0 and owed[i] >= margin - _EPSILON]
    if not eligible:  # can only follow a change of weights, which leaves old credits behind
        eligible = [i for i, weight in enumerate(weights) if weight > 0]

    def deadline(i: int) -> tuple[int, int]:
        # Steps until the group would be a whole sequence (less the margin) behind if it isn't served.
        return (max(0, math.ceil((1 - margin - owed[i]) / weights[i] - _EPSILON)), i)

    chosen = min(eligible, key=deadline)
    owed[chosen] -= 1
    return chosen, owed


def usable_weights(asked: Mapping[str, float], available: Mapping[str, bool]) -> dict[str, float]:
    """Shares of the tiers that have documents: a tier without any gives its share to the others in proportion, or equally
    where those were asked for nothing.

    Raises:
        ValueError: a weight is negative or not a number, or no tier has documents.
    """
    for tier, weight in asked.items():
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight of tier {tier} is {weight}; weights are numbers of 0 or more")
    kept = {tier: (weight if available.get(tier) else 0.0) for tier, weight in asked.items()}
    if not any(available.get(tier) for tier in asked):
        raise ValueError("no tier has documents to train on")
    total = sum(kept.values())
    if total <= 0:
        kept = {tier: float(bool(available.get(tier))) for tier in asked}
        total = sum(kept.values())
    return {tier: weight / total for tier, weight in kept.items()}
