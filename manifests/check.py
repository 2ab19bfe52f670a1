"""Checking tables: is every file that they are made of there and whole, and do the sums agree with what they sum up?"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import AtollError, Failure, StoreUnreachable
from manifests.jobs import Report, report_nothing
from manifests.log import DataFile, live_files, open_parquet, read_log
from manifests.schemas import TABLES
from manifests.store import Store, first_line

_THREADS = 8
_SUMMED = frozenset({"consumption", "consumption_rounds"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One thing that is wrong with a table."""

    table: str
    path: str | None
    """The file, below the store's root; None: it isn't one file's fault."""
    finding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a check saw."""

    tables: int
    files: int
    rows: int
    damages: list[Damage]


def check(
    store: Store, names: Iterable[str] = tuple(TABLES), *, deep: bool = False, report: Report = report_nothing
) -> Checked:
    """Checks the newest version of tables: the log entry by entry, each data file's presence, size and number of rows, and the sums.

    On a remote store the files are compared by their sizes only, unless `deep`.

    Args:
        store: the store.
        names: the tables.
        deep: also read every value of every file.
        report: told of progress.

    Raises:
        StoreUnreachable: the store failed.
    """
    wanted = list(names)
    damages: list[Damage] = []
    num_files = num_rows = 0
    for number, name in enumerate(wanted, start=1):
        try:
            files = live_files(read_log(store, name)).values()
        except StoreUnreachable:
            raise
        except AtollError as e:
            damages.append(Damage(table=name, path=None, finding=str(e)))
            continue
        sizes = {info.path: info.size_bytes for info in store.list(f"tables/{name}")}
        num_files += len(files)
        num_rows += sum(file.rows or 0 for file in files)
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(partial(_check_file, store, name, sizes, deep=deep), files)
            damages += [damage for damage in found if damage is not None]
        report("tables checked", number, len(wanted))
    if set(wanted) >= _SUMMED and not any(damage.table in _SUMMED | {"checkpoints"} for damage in damages):
        damages += _check_sums(store)
    return Checked(tables=len(wanted), files=num_files, rows=num_rows, damages=damages)


def _check_file(store: Store, name: str, sizes: dict[str, int], file: DataFile, *, deep: bool) -> Damage | None:
    path = f"tables/{name}/{file.path}"

    def damage(finding: str) -> Damage:
        return Damage(table=name, path=path, finding=finding)

    if path not in sizes:
        return damage("missing")
    if sizes[path] != file.size_bytes:
        return damage(f"has {sizes[path]:,} bytes, the log says {file.size_bytes:,}")
    if not store.is_local and not deep:
        return None
    try:
        parquet = open_parquet(store, name, file)
        rows = parquet.metadata.num_rows
        if deep:
            rows = sum(batch.num_rows for batch in parquet.iter_batches())
    except (OSError, pa.ArrowException) as e:
        return damage(f"can't be read as Parquet: {first_line(e)}")
    if file.rows is not None and rows != file.rows:
        return damage(f"has {rows:,} rows, the log says {file.rows:,}")
    return None


def _check_sums(store: Store) -> list[Damage]:
    catalog = Catalog(store, tables=_SUMMED)
    try:
        rows = catalog.ask("rollup_differences").to_pylist()
    except Failure as e:
        return [Damage(table="consumption_rounds", path=None, finding=str(e))]
    damages = []
    for checkpoint, of_checkpoint in groupby(rows, key=lambda row: row["checkpoint"]):
        wrong = list(of_checkpoint)
        first = wrong[0]
        finding = (
            f"checkpoint {checkpoint.hex()}: {len(wrong)} sums differ from consumption, such as shard {first['shard']}, tier {first['tier']}: "
            f"{first['said_spans']:,} spans of {first['said_tokens']:,} tokens, consumption has {first['spans']:,} of {first['tokens']:,}"
        )
        damages.append(Damage(table="consumption_rounds", path=None, finding=finding))
    return damages
