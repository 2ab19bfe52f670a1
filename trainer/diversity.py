"""How far the islands' mixes are apart, and keeping them so: what no island tries, none learns (docs/theory.md). Pure functions of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

Weights = Mapping[str, float]
"""Share by tier, sums to 1."""
_STEPS = 20


def divergence(p: Weights, q: Weights) -> float:
    """Jensen-Shannon divergence of two mixes, nats: 0 for equal ones, ln 2 at most (Lin, Divergence Measures Based on the Shannon Entropy, 1991)."""
    return math.fsum(
        share / 2 * math.log(2 * share / (p[tier] + q[tier]))
        for mix in (p, q)
        for tier, share in mix.items()
        if share > 0
    )


def diversity(mixes: Sequence[Weights]) -> float:
    """Mean divergence over all pairs; 0 where there's no pair."""
    pairs = [divergence(p, q) for p, q in combinations(mixes, 2)]
    return math.fsum(pairs) / len(pairs) if pairs else 0.0


def towards_tier(mix: Weights, tier: str, share: float) -> dict[str, float]:
    """The mix, moved by a share of the way towards one that is half of it and half of one tier."""
    return {name: (1 - share / 2) * weight + share / 2 * (name == tier) for name, weight in mix.items()}


def spread_share(mix: Weights, towards: Sequence[str], minimum: float) -> float:
    """The least share by which islands of one mix, each moved towards a tier of its own, are as diverse as is asked; 1 where even that doesn't reach it.

    Args:
        mix: what they all would read.
        towards: the tier of each island.
        minimum: least `diversity`, nats.
    """

    def reaches(share: float) -> bool:
        return diversity([towards_tier(mix, tier, share) for tier in towards]) >= minimum

    if not reaches(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
