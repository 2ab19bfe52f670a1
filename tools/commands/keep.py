"""Commands that keep the tables in shape: list, schema, history, compact, vacuum, check."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import pyarrow as pa
import typer

from manifests.errors import Failure, UserError
from manifests.schemas import TABLES
from tools.app import DEFAULT_STORE, KEEP, AtOption, FormatOption, StoreOption, app, catalog_of, opened
from tools.output import STDERR, Format, print_answer

tables_app = typer.Typer(no_args_is_help=True, help="The tables: what they hold, and keeping them in shape.")
app.add_typer(tables_app, name="tables", rich_help_panel=KEEP)

TableArgument = Annotated[str, typer.Argument(metavar="TABLE", help="Name of a table; `atoll tables list` names them.")]
TablesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[TABLE]...", help="Names of tables; all of them by default.")
]


@tables_app.command("list")
def list_(store: StoreOption = DEFAULT_STORE, at: AtOption = None, format_: FormatOption = Format.table) -> None:
    """List the tables: version, rows that count, files and their size, and what a row is. Fetches the files of a remote store.

    Example: atoll tables list --at 2026-01-31T12:00
    """
    from manifests.log import live_files, read_log

    catalog = catalog_of(store, at)
    rows: list[dict[str, Any]] = []
    for name, version in catalog.versions.items():
        files = live_files(read_log(catalog.store, name)[: version + 1]).values()
        row = {
            "table": name,
            "version": version,
            "rows": catalog.rows(f"SELECT count(*) AS n FROM {name}")[0]["n"],
            "files": len(files),
            "bytes": sum(file.size_bytes for file in files),
            "a row is": TABLES[name].row,
        }
        rows.append(row)
    print_answer(pa.Table.from_pylist(sorted(rows, key=lambda row: list(TABLES).index(row["table"]))), format_)


@tables_app.command()
def schema(table: TableArgument, format_: FormatOption = Format.table) -> None:
    """Show the columns of a table: their types, whether they can be null, their units and meanings. Needs no store.

    Example: atoll tables schema consumption
    """
    rows = [
        {
            "name": field.name,
            "type": str(field.type),
            "null": field.nullable,
            "unit": (field.metadata or {}).get(b"unit", b"").decode(),
            "meaning": (field.metadata or {}).get(b"meaning", b"").decode(),
        }
        for field in TABLES[_known(table)].schema
    ]
    print_answer(pa.Table.from_pylist(rows), format_, title=f"{table}: a row is {TABLES[table].row}")


@tables_app.command()
def history(table: TableArgument, store: StoreOption = DEFAULT_STORE, format_: FormatOption = Format.table) -> None:
    """Show the versions of a table: when each was made, by what, and what it added and removed.

    Example: atoll tables history consumption
    """
    from manifests.log import history as history_of

    print_answer(history_of(opened(store), _known(table)), format_)


@tables_app.command()
def compact(
    tables: TablesArgument = None,
    store: StoreOption = DEFAULT_STORE,
    target_mb: Annotated[float, typer.Option(help="About how large the files become, MB.")] = 128,
    format_: FormatOption = Format.table,
) -> None:
    """Merge the small files of tables. Safe while a run is going on; what older versions need stays until a vacuum.

    Example: atoll tables compact consumption --target-mb 64
    """
    from manifests.upkeep import compact as run_compact
    from tools.progress import progress_report

    names = _all_known(tables)
    with progress_report() as report:
        done = run_compact(opened(store), names, target_bytes=int(target_mb * (1 << 20)), report=report)
    merged = [asdict(item) for item in done if item.files_after < item.files_before]
    if merged:
        print_answer(pa.Table.from_pylist(merged), format_)
    STDERR.print(f"{len(merged):,} of {len(done):,} tables had small files to merge")


@tables_app.command()
def vacuum(
    tables: TablesArgument = None,
    store: StoreOption = DEFAULT_STORE,
    retention_hours: Annotated[
        float, typer.Option(help="Every version of the last so many hours stays readable; an hour at least.")
    ] = 168,
    yes: Annotated[bool, typer.Option("--yes", help="Delete the files; without it they are only listed.")] = False,
    format_: FormatOption = Format.table,
) -> None:
    """List the files that nothing refers to any more, and delete them with --yes.

    What runs, tier versions, checkpoints and decisions were made from stays.

    Example: atoll tables vacuum --retention-hours 720 --yes
    """
    from manifests.upkeep import vacuum as run_vacuum
    from tools.progress import progress_report

    names = _all_known(tables)
    with progress_report() as report:
        stale = run_vacuum(opened(store), names, retention_hours=retention_hours, dry_run=not yes, report=report)
    size_bytes = sum(file.size_bytes for file in stale)
    if stale:
        print_answer(pa.Table.from_pylist([asdict(file) for file in stale]), format_)
    what = "deleted" if yes else "to delete; with --yes they go"
    STDERR.print(f"{len(stale):,} files of {size_bytes:,} bytes {what}" if stale else "nothing to delete")


@tables_app.command()
def check(
    tables: TablesArgument = None,
    store: StoreOption = DEFAULT_STORE,
    deep: Annotated[bool, typer.Option("--deep", help="Read every value of every file, too.")] = False,
    format_: FormatOption = Format.table,
) -> None:
    """Check that every file of the tables is there and whole, and that sums agree with what they sum up. Exit code 1 where not.

    Example: atoll tables check --deep
    """
    from manifests.check import check as run_check
    from tools.progress import progress_report

    names = _all_known(tables)
    its_store = opened(store)
    with progress_report() as report:
        checked = run_check(its_store, names, deep=deep, report=report)
    if checked.damages:
        print_answer(pa.Table.from_pylist([asdict(damage) for damage in checked.damages]), format_)
        raise Failure(
            f"findings in the tables of {its_store.uri}: {len(checked.damages):,}; restore what is damaged from a backup"
        )
    STDERR.print(f"{checked.tables:,} tables, {checked.files:,} files, {checked.rows:,} rows: nothing is wrong")


def _known(table: str) -> str:
    if table not in TABLES:
        raise UserError(f"no table named {table!r}; there are {', '.join(TABLES)}")
    return table


def _all_known(tables: list[str] | None) -> list[str]:
    return [_known(table) for table in tables or TABLES]
