"""The merge gate: looks at each outer gradient before it's merged, and keeps a bad one out. Pure functions; the tape keeps what was decided.

An island that was stopped several times running is in quarantine: all that it sends is dropped, but looked at, until as many in a row would have passed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MEMORY = 32
"""Norms of accepted outer gradients that a fragment remembers."""
_LEARNING = 6
"""Norms that must be known before one is judged by them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRules:
    """How much is let through."""

    norm: float = 8.0
    """An outer gradient may be as many times the median norm of the last accepted ones of its fragment; 0: any."""
    cosine: float = -0.5
    """Least cosine to the weighted mean of the others, where there are at least two others; −1: any."""
    holdout: float = 0.0
    """Most that the holdout loss of the tentative merge may rise by the outer gradient's being in it, nats per token; 0: it isn't measured."""
    strikes: int = 3
    """Times running that an island is stopped before it is in quarantine, and that it must pass before it is out of it."""


@dataclass(kw_only=True, slots=True)
class GateMemory:
    """What the gate knows of before; part of the global state."""

    norms: dict[int, list[float]] = field(default_factory=dict)
    """Fragment → norms of the last accepted outer gradients, per inner step."""
    strikes: dict[int, int] = field(default_factory=dict)
    """Island → times running that it was stopped, in quarantine: that it would have passed, negative."""
    quarantined: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As a snapshot keeps it."""
        return {
            "norms": {str(k): v for k, v in self.norms.items()},
            "strikes": {str(k): v for k, v in self.strikes.items()},
            "quarantined": self.quarantined,
        }

    @staticmethod
    def from_json(loaded: Mapping[str, Any]) -> GateMemory:
        """What `to_json` made."""
        return GateMemory(
            norms={int(k): list(v) for k, v in loaded["norms"].items()},
            strikes={int(k): int(v) for k, v in loaded["strikes"].items()},
            quarantined=[int(island) for island in loaded["quarantined"]],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What is known of one outer gradient."""

    island: int
    norm_per_step: float
    cosine: float | None
    """To the weighted mean of the others; None: fewer than two others."""
    rise: float | None
    """Of the holdout loss by its being in the merge; None: not measured."""


def cosines_to_others(cosines: Sequence[Sequence[float]], scales: Sequence[float]) -> list[float | None]:
    """Cosine of each vector to the sum of the others.

    Args:
        cosines: of every two vectors.
        scales: norm times weight of each vector in the sum.
    """
    count = len(scales)
    if count < 3:
        return [None] * count
    found: list[float | None] = []
    for i in range(count):
        others = [j for j in range(count) if j != i]
        along = sum(scales[j] * cosines[i][j] for j in others)
        square = sum(scales[j] * scales[k] * cosines[j][k] for j in others for k in others)
        found.append(along / square**0.5 if square > 0 else 0.0)
    return found


def objection(judged: Judged, accepted_norms: Sequence[float], rules: GateRules) -> str | None:
    """Why an outer gradient is kept out; None: it may go in."""
    if rules.norm > 0 and len(accepted_norms) >= _LEARNING:
        median = statistics.median(accepted_norms)
        if median > 0 and judged.norm_per_step > rules.norm * median:
            return f"its norm is {judged.norm_per_step / median:.1f} times the usual one"
    if judged.cosine is not None and judged.cosine < rules.cosine:
        return f"its cosine to the mean of the others is {judged.cosine:.2f}"
    if rules.holdout > 0 and judged.rise is not None and judged.rise > rules.holdout:
        return f"the holdout loss of the merge rises by {judged.rise:.4f} with it"
    return None


def decide(
    memory: GateMemory, fragment: int, judged: Sequence[Judged], rules: GateRules
) -> tuple[dict[int, str], list[tuple[int, str]]]:
    """Who is kept out of a merge; moves the memory.

    Returns:
        Island → why it's kept out, and the islands that go into quarantine ("quarantined") or come out of it ("released").
    """
    norms = memory.norms.setdefault(fragment, [])
    kept_out: dict[int, str] = {}
    changes: list[tuple[int, str]] = []
    for one in judged:
        why = objection(one, norms, rules)
        island = one.island
        if island in memory.quarantined:
            memory.strikes[island] = memory.strikes.get(island, 0) - 1 if why is None else 0
            kept_out[island] = why or "its island is in quarantine"
            if memory.strikes[island] <= -rules.strikes:
                memory.quarantined.remove(island)
                memory.strikes[island] = 0
                changes.append((island, "released"))
            continue
        if why is None:
            memory.strikes[island] = 0
            norms.append(one.norm_per_step)
            del norms[:-MEMORY]
            continue
        kept_out[island] = why
        memory.strikes[island] = memory.strikes.get(island, 0) + 1
        if memory.strikes[island] >= rules.strikes:
            memory.quarantined.append(island)
            memory.strikes[island] = 0
            changes.append((island, "quarantined"))
    return kept_out, changes
