"""The command `atoll watch`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from manifests.errors import UserError
from tools.app import DEFAULT_STORE, TRAIN, FormatOption, StoreOption, app, opened
from tools.output import Format

_PIPE_WIDTH = 160


@app.command(rich_help_panel=TRAIN)
def watch(
    run: Annotated[str, typer.Argument(help="Name of the run.")] = "main",
    store: StoreOption = DEFAULT_STORE,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print that, and end.")] = False,
    format_: FormatOption = Format.table,
) -> None:
    """Watch a run from any machine that reaches the store: its islands, its syncer, their link; ends with the run, or by Ctrl-C.

    With --format json each look is one JSON document on a line. Where there is no terminal, a line comes now and then.

    Example: atoll watch first --store s3://bucket/atoll
    """
    if format_ not in (Format.table, Format.jsonl):
        raise UserError(f"--format {format_}: a run is watched as table or json")
    from tools import watching

    # A pipe has no width: let no column be cut there.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    watching.watch(opened(store), run, every_s=every, once=once, out=out, as_json=format_ is Format.jsonl)
