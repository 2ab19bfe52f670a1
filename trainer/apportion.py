"""Which tier the next sequence comes from: a deterministic apportionment, no random draw. Pure functions of numbers.

The realised counts stay within one sequence of the asked shares at every moment, by the algorithm of R. Tijdeman, "The chairman
assignment problem" (Discrete Mathematics 32, 1980): among those who may be served, the one whose deadline is nearest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

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


def usable_weights(
    asked: Mapping[str, float], available: Mapping[str, bool], *, last_resort: Collection[str] = frozenset()
) -> dict[str, float]:
    """Shares of the groups that have documents, summing to 1; what is asked needn't.

    A group without any leaves its share to the next group in order that is asked for, past the end to the nearest before it; where none is asked for, to the next that
    there is. Where nothing is asked for at all, all that have documents get the same.

    Args:
        asked: weight of each group, in order.
        available: whether a group has documents.
        last_resort: groups that take nothing over while another one has documents: harm is no replacement for what has run out.

    Raises:
        ValueError: a weight is negative or not a number, the sum is beyond all numbers, or no group has documents.
    """
    for name, weight in asked.items():
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight of {name} is {weight}; weights are numbers of 0 or more")
    names = list(asked)
    there = [name for name in names if available.get(name)]
    if not there:
        raise ValueError("no group has documents to train on")
    total = sum(asked.values())
    if total == math.inf:
        raise ValueError("the weights sum to more than a number holds; take smaller ones")
    if total <= 0:
        return {name: float(name in there) / len(there) for name in names}
    shares = {name: asked[name] / total for name in names}
    usable = dict.fromkeys(names, 0.0)
    for place, name in enumerate(names):
        if shares[name] <= 0:
            continue
        if name in there:
            usable[name] += shares[name]
            continue
        order = [other for other in names[place + 1 :] + names[place::-1] if other in there]
        heirs = [other for other in order if other not in last_resort] or order
        heir = next((other for other in heirs if asked[other] > 0), heirs[0])
        usable[heir] += shares[name]
    return usable
