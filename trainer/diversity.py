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


def kept_diverse(mix: Weights, others: Sequence[Weights], anchor: Weights, minimum: float) -> dict[str, float]:
    """The mix, moved no further towards an anchor than it takes for all mixes together to reach the minimum; the anchor itself where even that doesn't.

    Args:
        mix: what the island would read.
        others: what the other islands read.
        anchor: a mix away from theirs.
        minimum: least `diversity` of all, nats.
    """

    def moved(share: float) -> dict[str, float]:
        return {tier: (1 - share) * weight + share * anchor[tier] for tier, weight in mix.items()}

    def reaches(share: float) -> bool:
        return diversity([moved(share), *others]) >= minimum

    if not others or reaches(0.0):
        return dict(mix)
    if not reaches(1.0):
        return moved(1.0)
    low, high = 0.0, 1.0  # the least share may lie below where it isn't monotone; what is found reaches the minimum
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return moved(high)
