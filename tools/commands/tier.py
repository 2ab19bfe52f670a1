"""The command `atoll tier`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from manifests.errors import UserError
from tools.app import (
    DATA,
    DEFAULT_STORE,
    FormatOption,
    StoreOption,
    app,
    configured,
    given,
    opened,
    print_summary,
)
from tools.output import STDERR, Format, print_answer


class By(StrEnum):
    """What the table has a row for."""

    tier = "tier"
    corpus = "corpus"


@app.command(rich_help_panel=DATA)
def tier(
    store: StoreOption = DEFAULT_STORE,
    score_job: Annotated[
        list[str] | None,
        typer.Option(
            help="Job whose scores are used; repeat it to combine several by rank, the one whose scale counts first. The newest by default."
        ),
    ] = None,
    share: Annotated[float, typer.Option(help="Share of the positive influence that tier S is to carry.")] = 0.8,
    confidence: Annotated[float, typer.Option(help="How sure a negative influence must be for tier C.")] = 0.8,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=MIN..MAX",
            help="Smallest and largest share of the documents in a tier, as in S=0.05..0.5 or C=..0.2; repeat it. S=..0.5 by default.",
        ),
    ] = None,
    by: Annotated[By, typer.Option(help="A row of the table for each tier, or for each corpus and tier.")] = By.tier,
    format_: FormatOption = Format.table,
) -> None:
    """Sort the scored documents into tiers S, A, B and C: a new tier version.

    Example: atoll tier --share 0.8 --size C=..0.2
    """
    from manifests.catalog import Catalog
    from pipeline.tier import TierConfig, corpus_table, tier_table
    from pipeline.tier import tier as run_tier
    from pipeline.tiers import DEFAULT_SIZES
    from tools.progress import progress_report

    options = given(score_jobs=tuple(score_job) if score_job else None)
    sizes = dict(DEFAULT_SIZES) | parse_sizes(size or [])
    config = configured(TierConfig, share=share, confidence=confidence, sizes=sizes, **options)
    its_store = opened(store)
    with progress_report() as report:
        summary = run_tier(its_store, config=config, report=report)
    _print_tiers(summary, share)
    table = corpus_table if by is By.corpus else tier_table
    print_answer(table(Catalog(its_store), summary["tier_version"]), format_)


def parse_sizes(options: list[str]) -> dict[str, tuple[float, float]]:
    """The sizes of `--size` options; a minimum that isn't given is 0, a maximum 1.

    Raises:
        UserError: one isn't of the form, or a tier is named twice.
    """
    sizes: dict[str, tuple[float, float]] = {}
    for option in options:
        tier, equals, bounds = option.partition("=")
        least, dots, most = bounds.partition("..")
        try:
            found = (float(least or 0), float(most or 1))
        except ValueError:
            dots = ""
        if not (tier and equals and dots and (least or most)):
            raise UserError(
                f"--size {option!r}: write TIER=MIN..MAX, shares of the documents, as in S=0.05..0.5 or C=..0.2"
            )
        if tier in sizes:
            raise UserError(
                f"--size {option!r}: tier {tier} has a size already; write both of its bounds in one option"
            )
        sizes[tier] = found
    return sizes


def _print_tiers(summary: dict[str, Any], share: float) -> None:
    from pipeline.tier import say_changes

    told_below = ("corpora", "changes", "notes")
    print_summary({name: value for name, value in summary.items() if name not in told_below})
    for note in summary.get("notes", []):
        STDERR.print(f"  sizes: {note}", markup=False)
    if len(summary["corpora"]) > 1:
        for name, facts in summary["corpora"].items():
            needed = facts["documents_for_wanted_share"]
            carried = (
                f"{needed:.0%} of its {facts['documents']:,} documents carry {share:.0%} of its positive influence"
                if needed
                else f"none of its {facts['documents']:,} documents has positive influence"
            )
            STDERR.print(f"  corpus {name}: {carried}", markup=False)
    if "changes" in summary:
        STDERR.print(f"  {say_changes(summary['changes'])}", markup=False)
