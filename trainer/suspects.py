"""Suspects of a loss spike: documents and batches that a run read near a step, ranked by how far from usual they were. The ranking itself is SQL (suspects.sql)."""

from __future__ import annotations

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import UserError
from trainer.run import load_run

BASELINE_STEPS = 64
"""Steps before and after the window that say what is usual."""


def rank_suspects(
    catalog: Catalog, run: str, *, step: int, island: int | None = None, window: int = 8, most: int = 20
) -> pa.Table:
    """The documents, then the batches, that stand out most; see manifests/sql/suspects.sql.

    Args:
        catalog: of the store.
        run: the run, or a branch of one.
        step: inner step at which the loss went up.
        island: only of this one; None: of all.
        window: steps up to that one that are looked at.
        most: rows of each kind.

    Raises:
        UserError: no such run, or it has no record of these steps.
    """
    load_run(catalog.store, run, catalog=catalog)
    found = catalog.ask(
        "suspects", run=run, step=step, island=island, window=window, baseline=BASELINE_STEPS, most=most
    )
    if found.num_rows == 0:
        of = "" if island is None else f" of island {island}"
        raise UserError(
            f"run {run} has no record{of} of steps {max(1, step - window + 1)} to {step}; "
            f"`atoll sql \"select island, max(step) from consumption where run = '{run}' group by island\"` says how far it is"
        )
    return found
