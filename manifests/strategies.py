"""Strategies as they stand in a new store. From then on the table `strategies` says what they are, and users edit it.

A strategy is the weights that an island starts with, and how fast the effectiveness of the tiers moves them (sql/mixture.sql).
"""

from __future__ import annotations

from typing import Any

UNIFORM = "uniform"
ADAPTIVE = "adaptive"


def _strategy(
    name: str, weights: tuple[float, float, float, float] | None, *, learning_rate: float = 0.0
) -> dict[str, Any]:
    columns = dict(zip(("weight_s", "weight_a", "weight_b", "weight_c"), weights or (None,) * 4, strict=True))
    moving = {"learning_rate": learning_rate, "weight_floor": 0.02, "step_cap": 0.25}
    return {"strategy": name, **columns, **moving, "reason": "built in"}


BUILT_IN = [
    _strategy("aggressive", (0.4, 0.4, 0.2, 0.0)),
    _strategy("balanced", (0.2, 0.4, 0.3, 0.1)),
    _strategy("conservative", (0.1, 0.3, 0.4, 0.2)),
    _strategy(ADAPTIVE, (0.2, 0.4, 0.3, 0.1), learning_rate=2.0),
    # No weights: every tier by its size.
    _strategy(UNIFORM, None),
]
"""Rows of `strategies` in a new store."""
