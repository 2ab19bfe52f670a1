"""Strategies: how an island mixes the tiers. The weights are computed by SQL (manifests/sql/mixture.sql) over what the store knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import canonical_json
from manifests.questions import question
from manifests.schemas import TIERS

TABLES_READ = ("strategies", "feedback", "view_shards", "views")
"""Tables that a decision is made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A mix, and all that it was computed from."""

    weights: Mapping[str, float]
    """Share of the sequences, by tier."""
    query: str
    """The SQL."""
    parameters: str
    """What it was asked with, JSON."""
    inputs: str
    """Versions of the tables that it read, JSON."""


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
) -> Decision:
    """What an island reads next.

    Args:
        catalog: pins at least TABLES_READ.
        run: name of the run.
        island: number of the island.
        strategy: name in the table `strategies`.
        tier_version: tier version that it reads.
        pool: pool that it reads from.
        sequence: number of its feedback message that decides; 0: none yet.
        previous: its weights so far; None: it begins.

    Raises:
        UserError: there is no such strategy, or its weights leave no tier to read.
    """
    parameters: dict[str, Any] = {
        "run": run,
        "island": island,
        "sequence": sequence,
        "strategy": strategy,
        "tier_version": tier_version,
        "pool": pool,
        "previous": [previous[tier] for tier in TIERS] if previous else [],
    }
    rows = catalog.ask("mixture", **parameters).to_pylist()
    if not rows:
        raise UserError(f"strategy {strategy} is not known; {known_strategies(catalog)}")
    weights = {row["tier"]: row["weight"] for row in rows}
    if None in weights.values():
        raise UserError(
            f"strategy {strategy} leaves no tier of tier version {tier_version} to read; `atoll strategies` shows its weights"
        )
    read = TABLES_READ if catalog.rights is None else (*TABLES_READ, "shard_index")
    return Decision(
        weights=weights,
        query=question("mixture"),
        parameters=canonical_json(parameters),
        inputs=canonical_json({table: catalog.versions[table] for table in read}),
    )


def known_strategies(catalog: Catalog) -> str:
    """The names that there are, for a message."""
    names = [row["strategy"] for row in catalog.rows("SELECT strategy FROM strategies ORDER BY strategy")]
    return f"there are {', '.join(names)}"
