"""Which documents made a checkpoint, and whether the ledger agrees with what the islands counted themselves."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.schemas import TIERS

_FEWEST_DIGITS = 6
"""Digits of an id that may stand for the whole."""


def last_global_checkpoint(catalog: Catalog, run: str) -> dict[str, Any]:
    """The row of a run's last global checkpoint.

    Raises:
        UserError: there is none yet.
    """
    rows = catalog.ask("last_checkpoint", run=run).to_pylist()
    if not rows:
        raise UserError(f'run {run!r} has no global checkpoint yet; `atoll sql "select run from runs"` lists the runs')
    return rows[0]


def require_run(catalog: Catalog, run: str) -> None:
    """Raises a UserError that names the runs that there are, if this one isn't among them."""
    runs = [row["run"] for row in catalog.rows("SELECT run FROM runs ORDER BY written_at")]
    if run not in runs:
        mend = f"there are: {', '.join(runs)}" if runs else "`atoll train` makes one"
        raise UserError(f"no run named {run!r} in {catalog.store.uri}; {mend}")


def find_checkpoint(catalog: Catalog, text: str) -> bytes:
    """A checkpoint by its id in hex, by the first digits of it, or as `last:RUN`: the last global one of a run.

    Raises:
        UserError: it names none, or several.
    """
    if text.startswith("last:"):
        run = text.removeprefix("last:")
        require_run(catalog, run)
        return bytes(last_global_checkpoint(catalog, run)["checkpoint"])
    prefix = text.strip().lower()
    if not re.fullmatch(f"[0-9a-f]{{{_FEWEST_DIGITS},32}}", prefix):
        raise UserError(
            f"checkpoint={text}: give its id in hex, the first {_FEWEST_DIGITS} digits or more of it, or last:RUN"
        )
    found = catalog.rows(
        "SELECT checkpoint FROM checkpoints WHERE starts_with(lower(hex(checkpoint)), ?) LIMIT 2", [prefix]
    )
    if len(found) > 1:
        raise UserError(f"checkpoint={text} is the beginning of several ids; give more digits")
    if not found:
        mend = '`atoll sql "select checkpoint, run, island, step from checkpoints"` lists them'
        raise UserError(f"no checkpoint {text} in {catalog.store.uri}; {mend}")
    return bytes(found[0]["checkpoint"])


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
