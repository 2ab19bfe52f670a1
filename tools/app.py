"""The typer application and the options that its commands share. The commands stand in tools/commands/, the entry point in cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from tools.output import Format, parse_format

if TYPE_CHECKING:
    from manifests.catalog import Catalog
    from manifests.store import Store

DATA, TRAIN = "Data: from text to tiers and shards", "Training: islands and rollback"
ASK, KEEP = "Asking: SQL and reports", "Keeping: tables, policy, erasure"
DEFAULT_STORE = "atoll-store"
OWNER = "owner"
"""Reader of SQL that comes under no other name: reads everything, unless a rule of the policy names it."""


class InOrder(typer.core.TyperGroup):
    """Lists the commands as the work goes, whichever module added them first."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, panel by panel."""
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        return sorted(super().list_commands(ctx), key=lambda name: (DATA, TRAIN, ASK, KEEP).index(panels[name]))


app = typer.Typer(
    name="atoll",
    cls=InOrder,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="A training mix that steers itself: influence tiers, a mix for each island, checkpoints that know their data.",
    epilog="Start with: atoll demo",
)

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="ATOLL_STORE", help="Where everything lies: a folder, or s3://, gs://, az:// and a prefix."
    ),
]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run.")]
FormatOption = Annotated[
    Format,
    typer.Option("--format", parser=parse_format, metavar="|".join(Format), help="How the answer is printed."),
]
AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="POINT",
        help="Look from a time (2026-01-31T12:00), from a checkpoint (its id in hex), or at TABLE=VERSION,…; now by default.",
    ),
]

AsOption = Annotated[
    str,
    typer.Option(
        "--as", metavar="NAME", help="Ask as the policy's reader sql:NAME: what it may not read is not there."
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="File for the answer, in any format; it appears whole or not at all.")
]


def opened(store: str) -> Store:
    """The store of a --store option."""
    from manifests.tables import open_store

    return open_store(store)


def catalog_of(store: str, at: str | None = None, *, reader: str | None = None) -> Catalog:
    """The catalog of a --store and an --at option; for the SQL of a --as option, with its rights."""
    from manifests.catalog import Catalog
    from manifests.cut import parse_at
    from manifests.editions import rights_of

    its_store = opened(store)
    # The policy of today, also for a look at the past.
    rights = rights_of(its_store, f"sql:{reader}") if reader is not None else None
    return Catalog(its_store, at=parse_at(at) if at is not None else None, rights=rights)
