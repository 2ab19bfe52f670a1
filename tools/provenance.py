"""Which documents made a checkpoint, and whether the ledger agrees with what the islands counted themselves."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.schemas import TIERS


def last_global_checkpoint(catalog: Catalog, run: str) -> dict[str, Any]:
    """The row of a run's last global checkpoint.

    Raises:
        UserError: there is none yet.
    """
    rows = catalog.ask("last_checkpoint", run=run).to_pylist()
    if not rows:
        raise UserError(f'run {run!r} has no global checkpoint yet; `atoll sql "select run from runs"` lists the runs')
    return rows[0]


def checkpoint_mix(catalog: Catalog, run: str) -> pa.Table:
    """Corpora and tiers that made the run's last global checkpoint; see manifests/sql/questions/checkpoint_mix.sql."""
    return catalog.ask("checkpoint_mix", checkpoint=last_global_checkpoint(catalog, run)["checkpoint"])


def check_ledger(catalog: Catalog, run: str) -> str:
    """Compares the consumption table with the counters in the islands' checkpoints, tier by tier.

    Raises:
        Failure: they differ; the message says where.
    """
    checkpoint = last_global_checkpoint(catalog, run)
    counted = {tier: checkpoint[f"tokens_{tier.lower()}"] for tier in TIERS}
    recorded = dict.fromkeys(TIERS, 0)
    for row in catalog.ask("ledger", checkpoint=checkpoint["checkpoint"]).to_pylist():
        recorded[row["tier"]] = row["tokens"]
    if counted != recorded:
        raise Failure(f"run {run}: the islands counted {counted} tokens, the consumption table has {recorded}")
    total = sum(counted.values())
    return f"the ledger agrees with the islands' own counters: {total:,} tokens, " + ", ".join(
        f"{tier} {counted[tier]:,}" for tier in TIERS
    )
