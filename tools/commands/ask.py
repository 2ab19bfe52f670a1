"""Commands that ask: SQL, named questions, a DuckDB file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from manifests.errors import UserError
from tools.app import (
    ASK,
    DEFAULT_STORE,
    OWNER,
    AsOption,
    AtOption,
    FormatOption,
    OutOption,
    StoreOption,
    app,
    catalog_of,
    opened,
)
from tools.output import STDERR, Format, print_answer


@app.command(rich_help_panel=ASK)
def sql(
    query: Annotated[
        str | None, typer.Argument(help="SQL; none: a prompt, or what comes in where stdin is no terminal.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Take the SQL from a file; its statements run one by one.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    at: AtOption = None,
    as_: AsOption = OWNER,
    format_: FormatOption = Format.table,
    out: OutOption = None,
) -> None:
    """Answer SQL over the store's tables, read-only; alone, open a prompt.

    Example: atoll sql "select tier, count(distinct doc_id), sum(tokens) from consumption group by tier"
    """
    if query is not None and file is not None:
        raise UserError("both a query and --file are given; give one of them")
    if query is None and file is None and sys.stdin.isatty():
        if out is not None:
            raise UserError("--out is for one answer; give a query or --file with it")
        from tools.shell import Shell

        Shell(opened(store), at=at, reader=as_, format_=format_).run()
        return
    from tools.asking import run_statements

    text = query if query is not None else _read(file) if file is not None else sys.stdin.read()
    run_statements(catalog_of(store, at, reader=as_), text, format_, out=out)


@app.command(rich_help_panel=ASK)
def ask(
    name: Annotated[str | None, typer.Argument(help="Name of the question; none: list them.")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            metavar="NAME=VALUE",
            help="A parameter; repeat it. Lists are a,b,c. A checkpoint is its id in hex, the first 6 digits or more, or last:RUN.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    at: AtOption = None,
    as_: AsOption = OWNER,
    format_: FormatOption = Format.table,
    out: OutOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the answer into this HTML page: its last column over its first number, a line for each of its texts."
        ),
    ] = None,
) -> None:
    """Answer a named question; alone, list the questions and their parameters.

    Example: atoll ask checkpoint_mix --param checkpoint=last:first
    """
    from tools.asking import ask_question, question_table

    if name is None:
        if param or plot is not None:
            raise UserError(f"{'--param' if param else '--plot'} needs the name of a question; `atoll ask` lists them")
        print_answer(question_table(), format_, out=out)
        return
    answer = ask_question(catalog_of(store, at, reader=as_), name, param or [])
    if plot is not None:
        from tools.plotting import write_plot

        write_plot(answer, plot, title=" ".join([name, *(param or [])]))
        STDERR.print(f"{plot}: open it in a browser", markup=False)
    print_answer(answer, format_, out=out)


@app.command(rich_help_panel=ASK)
def db(
    file: Annotated[Path, typer.Argument(help="The file; an earlier one of this command is replaced.")],
    store: StoreOption = DEFAULT_STORE,
    at: AtOption = None,
    as_: AsOption = OWNER,
    format_: FormatOption = Format.table,
) -> None:
    """Write a DuckDB file with all views, for any DuckDB client: same rows, no copy of them. Prints the versions that it shows.

    Example: atoll db store.duckdb
    """
    from manifests.database import write_database

    catalog = catalog_of(store, at, reader=as_)
    if catalog.rights is not None:
        raise UserError(
            f"the policy keeps documents from sql:{as_}, and a DuckDB file names the data files whole; ask with `atoll sql`"
        )
    versions = write_database(catalog, file)
    print_answer(versions.select(["table", "version"]), format_)
    STDERR.print(
        f"{file} shows {versions['store'][0]} at these versions, for as long as no vacuum deletes their files; "
        f"open it with: duckdb -readonly {file}",
        markup=False,
    )


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as e:
        raise UserError(f"--file {file}: {e.strerror}; name a file with SQL in it") from e
    except UnicodeDecodeError as e:
        raise UserError(f"--file {file}: {e}; save it as UTF-8") from e
