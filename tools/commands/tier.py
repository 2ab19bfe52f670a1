"""The command `atoll tier`."""

from __future__ import annotations

from typing import Annotated

import typer

from tools.app import DATA, DEFAULT_STORE, FormatOption, StoreOption, app, configured, opened, print_summary
from tools.output import Format, print_answer


@app.command(rich_help_panel=DATA)
def tier(
    store: StoreOption = DEFAULT_STORE,
    share: Annotated[float, typer.Option(help="Share of the positive influence that tier S is to carry.")] = 0.8,
    confidence: Annotated[float, typer.Option(help="How sure a negative influence must be for tier C.")] = 0.8,
    max_s: Annotated[float, typer.Option(help="Largest share of the documents in tier S.")] = 0.5,
    format_: FormatOption = Format.table,
) -> None:
    """Sort the scored documents into tiers S, A, B and C: a new tier version.

    Example: atoll tier --share 0.8
    """
    from manifests.catalog import Catalog
    from pipeline.tier import TierConfig, tier_table
    from pipeline.tier import tier as run_tier
    from tools.progress import progress_report

    its_store = opened(store)
    with progress_report() as report:
        summary = run_tier(
            its_store, config=configured(TierConfig, share=share, confidence=confidence, max_s=max_s), report=report
        )
    print_summary(summary)
    print_answer(tier_table(Catalog(its_store), summary["tier_version"]), format_)
