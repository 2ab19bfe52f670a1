"""The command `atoll retier`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tools.app import (
    DATA,
    DEFAULT_STORE,
    FormatOption,
    RayOption,
    StoreOption,
    TokenizerOption,
    WorkersOption,
    app,
    opened,
    print_summary,
    print_views,
)
from tools.output import STDERR, Format


@app.command(rich_help_panel=DATA)
def retier(
    store: StoreOption = DEFAULT_STORE,
    tier_version: Annotated[
        int | None, typer.Option(help="Tier version to write views of; the newest by default.")
    ] = None,
    base: Annotated[
        int | None,
        typer.Option(help="Tier version whose shards are taken; the newest before it that has views by default."),
    ] = None,
    shard_bytes: Annotated[int, typer.Option(help="Largest uncompressed size of a new shard, bytes.")] = 1 << 20,
    tokenizer: TokenizerOption = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and do nothing.")] = False,
    format_: FormatOption = Format.table,
) -> None:
    """Write the views of a new tier version over the shards that are there; only those whose documents have parted are written anew.

    Example: atoll retier --plan
    """
    from pipeline.engine import open_engine
    from pipeline.pool import ShardConfig
    from pipeline.retier import RetierConfig, plan_retier
    from pipeline.retier import retier as run_retier
    from tools.progress import progress_report

    its_store = opened(store)
    config = RetierConfig(
        shards=ShardConfig(tier_version=tier_version, shard_bytes=shard_bytes, tokenizer=tokenizer), base=base
    )
    if plan:
        _print_plan(plan_retier(its_store, config=config).facts())
        return
    with open_engine(ray, workers=workers) as engine, progress_report() as report:
        summary = run_retier(its_store, config=config, engine=engine, announce=_print_plan, report=report)
    print_summary({name: value for name, value in summary.items() if name != "tiers"})
    print_views(its_store, summary, format_)


def _print_plan(facts: dict[str, Any]) -> None:
    documents, shards, num_bytes = facts["documents"], facts["shards"], facts["zip_bytes"]
    moved = ", ".join(f"{count:,} from {move}" for move, count in documents["moved"].items()) or "none"
    for line in (
        f"tier version {facts['tier_version']} over the shards of version {facts['base']}",
        f"documents that move: {moved}; {documents['new']:,} new, {documents['gone']:,} gone",
        f"shards: {shards['untouched']:,} untouched, {shards['reassigned']:,} reassigned, {shards['rewritten']:,} to be rewritten",
        f"bytes: {num_bytes['kept']:,} stay, {num_bytes['rewritten']:,} are written anew",
    ):
        STDERR.print(f"  {line}", markup=False)
