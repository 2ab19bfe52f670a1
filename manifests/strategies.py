"""Strategies as they stand in a new store. From then on the table `strategies` says what they are, and users edit it (tables.py).

A strategy is the weights that an island starts with, and how fast the effectiveness of the tiers moves them (sql/mixture.sql).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from manifests.errors import UserError
from manifests.schemas import TIERS

UNIFORM = "uniform"
ADAPTIVE = "adaptive"


def _strategy(
    name: str,
    weights: tuple[float, float, float, float] | None,
    *,
    learning_rate: float = 0.0,
    exploration: float = 0.0,
) -> dict[str, Any]:
    columns = dict(zip(("weight_s", "weight_a", "weight_b", "weight_c"), weights or (None,) * 4, strict=True))
    moving = {"learning_rate": learning_rate, "weight_floor": 0.02, "step_cap": 0.5}
    return {"strategy": name, **columns, **moving, "reason": "built in", "exploration": exploration}


BUILT_IN = [
    _strategy("aggressive", (0.4, 0.4, 0.2, 0.0)),
    _strategy("balanced", (0.2, 0.4, 0.3, 0.1)),
    _strategy("conservative", (0.1, 0.3, 0.4, 0.2)),
    _strategy(ADAPTIVE, (0.2, 0.4, 0.3, 0.1), learning_rate=0.5, exploration=0.25),
    # No weights: every tier by its size.
    _strategy(UNIFORM, None),
]
"""Rows of `strategies` in a new store."""


def strategy_row(
    name: str,
    *,
    weights: Mapping[str, float] | None,
    learning_rate: float,
    weight_floor: float,
    step_cap: float,
    exploration: float,
    reason: str,
) -> dict[str, Any]:
    """A row of `strategies`, checked.

    Args:
        name: letters, digits, dot, dash and underscore.
        weights: share of the sequences by tier, which needn't sum to one; None: every tier by its size.
        learning_rate: how fast effectiveness moves them; 0: not at all.
        weight_floor: least weight of a tier that has any.
        step_cap: largest change of a weight in one decision, as a share of it.
        exploration: standard errors by which a tier is taken for better than it's known to be.
        reason: why.

    Raises:
        UserError: a value is out of range.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(f"strategy {name!r}: use letters, digits, dot, dash and underscore, at most 100")
    if name == "auto":
        raise UserError("strategy auto: that name leaves an island's strategy to the rules; take another")
    columns: dict[str, float | None] = {f"weight_{tier.lower()}": None for tier in TIERS}
    if weights is not None:
        if set(weights) - set(TIERS):
            raise UserError(
                f"strategy {name}: no tier {sorted(set(weights) - set(TIERS))[0]!r}; tiers are {', '.join(TIERS)}"
            )
        columns = {f"weight_{tier.lower()}": float(weights.get(tier, 0.0)) for tier in TIERS}
        values = list(columns.values())
        if not all(v is not None and math.isfinite(v) and v >= 0 for v in values) or not any(values):
            raise UserError(
                f"strategy {name}: weights must be 0 or more, and one of them above 0; they are {dict(weights)}"
            )
    for option, value, low, high in (
        ("learning rate", learning_rate, 0, 1e6),
        ("weight floor", weight_floor, 0, 0.25),
        ("step cap", step_cap, 0, 1),
        ("exploration", exploration, 0, 10),
    ):
        if not low <= value <= high:
            raise UserError(f"strategy {name}: {option} is {value}; it must lie between {low} and {high:g}")
    moving = {"learning_rate": learning_rate, "weight_floor": weight_floor, "step_cap": step_cap}
    return {"strategy": name, **columns, **moving, "reason": reason, "exploration": exploration}
