"""Strategies: how an island mixes the tiers. One is a row of the table `strategies`, whose weights SQL computes (manifests/sql/mixture.sql) over what the store
knows; or a user's own, in Python, named `module:object`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import canonical_json
from manifests.questions import question
from manifests.schemas import TIERS
from manifests.strategies import UNIFORM
from trainer.feedback import Feedback
from trainer.worth import Worth

TABLES_READ = ("strategies", "feedback", "view_shards", "views")
"""Tables that a decision is made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a strategy in Python decides by."""

    run: str
    island: int
    tokens: Mapping[str, int]
    """In the view of each tier that the island may read; 0: the tier is empty."""
    previous: Mapping[str, float] | None
    """The island's weights so far, by tier; None: it begins."""
    worth: Worth | None
    """What the tiers are worth by all that is known of the run; None: nothing is known yet."""
    histories: Mapping[int, Sequence[Feedback]] = field(default_factory=dict)
    """What the islands have told of late, the newest last."""


class Strategy(Protocol):
    """A user's own strategy: `--strategies package.module:Name` names a class without arguments, or an object. It's asked in the process of the syncer, and of
    each island as that begins."""

    def mix(self, seen: Seen) -> Mapping[str, float]:
        """The share of each tier, S, A, B and C; they needn't sum to one, and what isn't named is 0."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A mix, and all that it was computed from."""

    weights: Mapping[str, float]
    """Share of the sequences, by tier."""
    query: str
    """The SQL; of a strategy in Python its name."""
    parameters: str
    """What it was asked with, JSON."""
    inputs: str
    """Versions of the tables that it read, JSON."""


def is_python(strategy: str) -> bool:
    """Whether a name is that of a strategy in Python."""
    return ":" in strategy


def load_strategy(name: str) -> Strategy:
    """A user's own strategy.

    Raises:
        UserError: it can't be imported, or isn't one.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        strategy = found() if isinstance(found, type) else found
    except Exception as e:  # a user's module may raise anything
        raise UserError(
            f"strategy {name} can't be loaded: {type(e).__name__}: {e}; it's a class or an object of a module that every role of the run can import"
        ) from e
    if not callable(getattr(strategy, "mix", None)):
        raise UserError(f"strategy {name} has no method `mix`; see trainer.strategies.Strategy")
    return strategy


def decide(
    catalog: Catalog,
    *,
    run: str,
    island: int,
    strategy: str,
    tier_version: int,
    pool: str,
    sequence: int = 0,
    previous: Mapping[str, float] | None = None,
    worth: Worth | None = None,
    histories: Mapping[int, Sequence[Feedback]] | None = None,
) -> Decision:
    """What an island reads next.

    Args:
        catalog: pins at least TABLES_READ.
        run: name of the run.
        island: number of the island.
        strategy: name in the table `strategies`, or module:object.
        tier_version: tier version that it reads.
        pool: pool that it reads from.
        sequence: number of its feedback message that decides; 0: none yet.
        previous: its weights so far; None: it begins.
        worth: what the tiers are worth by all that is known; None: by its own message alone.
        histories: what the islands have told, for a strategy in Python.

    Raises:
        UserError: there is no such strategy, its weights leave no tier to read, or it's one in Python that fails.
    """
    read = TABLES_READ if catalog.rights is None else (*TABLES_READ, "shard_index")
    inputs = canonical_json({table: catalog.versions[table] for table in read})
    parameters: dict[str, Any] = {
        "run": run,
        "island": island,
        "sequence": sequence,
        "strategy": UNIFORM if is_python(strategy) else strategy,
        "tier_version": tier_version,
        "pool": pool,
        "previous": [previous[tier] for tier in TIERS] if previous else [],
        "effectiveness": [worth.effectiveness.get(tier) for tier in TIERS] if worth else [],
        "error": [worth.error.get(tier) for tier in TIERS] if worth else [],
    }
    rows = catalog.ask("mixture", **parameters).to_pylist()
    if not rows:
        raise UserError(f"strategy {strategy} is not known; {known_strategies(catalog)}")
    told = canonical_json(parameters | ({"worth": worth.describe()} if worth else {}))
    if is_python(strategy):
        tokens = {row["tier"]: row["tokens"] for row in rows}
        seen = Seen(run=run, island=island, tokens=tokens, previous=previous, worth=worth, histories=histories or {})
        return Decision(weights=_own_mix(strategy, seen), query=strategy, parameters=told, inputs=inputs)
    weights = {row["tier"]: row["weight"] for row in rows}
    if None in weights.values():
        raise UserError(
            f"strategy {strategy} leaves no tier of tier version {tier_version} to read; `atoll strategies` shows its weights"
        )
    return Decision(weights=weights, query=question("mixture"), parameters=told, inputs=inputs)


def _own_mix(name: str, seen: Seen) -> dict[str, float]:
    strategy = load_strategy(name)
    try:
        asked = dict(strategy.mix(seen))
        values = {tier: float(asked.pop(tier, 0.0)) for tier in TIERS}
    except Exception as e:  # a user's code may raise anything
        raise UserError(f"strategy {name} failed: {type(e).__name__}: {e}") from e
    if asked:
        raise UserError(f"strategy {name} gave a weight to {next(iter(asked))!r}; tiers are {', '.join(TIERS)}")
    readable = {tier: value if seen.tokens[tier] else 0.0 for tier, value in values.items()}
    total = math.fsum(readable.values())
    if not all(math.isfinite(value) and value >= 0 for value in values.values()) or total <= 0:
        raise UserError(
            f"strategy {name} gave {values}; weights must be 0 or more, and that of a tier with documents above 0"
        )
    return {tier: value / total for tier, value in readable.items()}


def known_strategies(catalog: Catalog) -> str:
    """The names that there are, for a message."""
    names = [row["strategy"] for row in catalog.rows("SELECT strategy FROM strategies ORDER BY strategy")]
    return f"there are {', '.join(names)}; and module:object names one in Python"
