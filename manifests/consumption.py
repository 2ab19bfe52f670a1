"""Writing consumption: the spans of a segment, and their sums by shard that most questions are answered from."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append


def append_consumption(store: Store, spans: pa.Table, *, writer: str, sequence: int) -> bool:
    """Appends the spans of one or more segments, then their sums; both count once their checkpoints do.

    Safe to repeat with the same writer and sequence number, also after a death between the two.

    Args:
        store: the store.
        spans: rows of `consumption`, in the order of steps.
        writer: who writes.
        sequence: its number of this append, going up.

    Returns:
        Whether the spans were appended now; False: they had been before.

    Raises:
        StoreUnreachable: the outcome is unknown; do it again with the same sequence number.
    """
    appended = append(store, "consumption", spans, writer=writer, sequence=sequence)
    append(store, "consumption_rounds", roll_up(spans), writer=writer, sequence=sequence)
    return appended


def roll_up(spans: pa.Table) -> pa.Table:
    """Sums of spans by segment, shard and tier: rows of `consumption_rounds` from rows of `consumption`."""
    has_loss = pc.is_valid(spans["loss"])
    tokens = spans["tokens"].cast(pa.int64())
    loss_tokens = pc.if_else(has_loss, tokens, 0)
    loss = pc.fill_null(spans["loss"].cast(pa.float64()), 0.0)
    summed = (
        spans.select(["run", "island", "checkpoint", "shard", "tier", "origin", "step"])
        .append_column("tokens", tokens)
        .append_column("loss_tokens", loss_tokens)
        .append_column("loss_sum", pc.multiply(loss_tokens.cast(pa.float64()), loss))
        .group_by(["run", "island", "checkpoint", "shard", "tier", "origin"])
        .aggregate(
            [
                ("step", "min"),
                ("step", "max"),
                ("tokens", "count"),
                ("tokens", "sum"),
                ("loss_tokens", "sum"),
                ("loss_sum", "sum"),
            ]
        )
    )
    schema = TABLES["consumption_rounds"].schema
    names = {"step_min": "first_step", "step_max": "last_step", "tokens_count": "spans", "tokens_sum": "tokens"}
    names |= {"loss_tokens_sum": "loss_tokens", "loss_sum_sum": "loss_sum"}
    renamed = summed.rename_columns([names.get(name, name) for name in summed.column_names])
    return renamed.select(schema.names).cast(schema)
