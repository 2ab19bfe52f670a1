"""Cuts: which version of every table an answer is made from, so that all tables of one answer agree.

A cut is a version for each table. It is consistent when whatever a parent row (`jobs`, `checkpoints`, `runs`) vouches for is there. Children are
committed before their parents by the same writer, so the newest cut pins parents first. A cut at a time goes by the clocks of the writers, which
order the commits of one writer but not those of several: a table's versions may lie out of order in time, even on one machine. So a table of
parents is taken as far as every commit lies before the moment, any other table up to its last commit before it: then the children of each
parent that is there are there too, since by the clock of their writer they are older.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import accumulate

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from manifests.errors import Failure, ObjectMissing, UserError
from manifests.log import DataFile, commit_times, open_parquet, read_log
from manifests.schemas import TABLES
from manifests.store import Store, first_line
from manifests.table_errors import table_error
from manifests.tables import find_table, read_marker_tables

At = datetime | bytes | Mapping[str, int]
"""A point to look from: a time, a checkpoint's id (the moment that it was committed), or versions of tables."""
Tables = dict[str, DeltaTable | None]
"""Table by name, at its version; None: the store didn't have it."""

_PARENTS = ("jobs", "checkpoints", "runs")
_THREADS = 8


def pin(store: Store, names: Iterable[str], at: At | None = None) -> Tables:
    """Opens tables, all at one cut.

    Args:
        store: the store.
        names: the tables.
        at: the point; None: now.

    Raises:
        UserError: the store was empty then, or has no such checkpoint or version.
        Failure: a table's log is damaged.
    """
    wanted = sorted(names)
    if at is None:
        return _pin_in_order(wanted, lambda name: find_table(store, name))
    if isinstance(at, Mapping):
        unknown = sorted(set(at) - set(TABLES))
        if unknown:
            raise UserError(f"no table named {unknown[0]!r}; there are {', '.join(sorted(TABLES))}")
        return _pin_in_order(wanted, lambda name: find_table(store, name, version=at.get(name)))
    moment = _committed_at(store, at) if isinstance(at, bytes) else at
    return _pin_in_order(wanted, lambda name: _table_at(store, name, moment))


def parse_at(text: str) -> At:
    """What `--at` takes: a time (ISO 8601; UTC where it names no zone), a checkpoint's id in hex, or TABLE=VERSION,….

    Raises:
        UserError: it is none of these.
    """
    if len(text) == 32:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    if "=" in text:
        pairs = [item.partition("=") for item in text.split(",")]
        if all(name.strip() in TABLES and version.strip().isdecimal() for name, _, version in pairs):
            return {name.strip(): int(version) for name, _, version in pairs}
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as e:
        raise UserError(
            f"--at {text!r}: give a time such as 2026-01-31T12:00:00, a checkpoint's id (32 hex digits), or TABLE=VERSION,TABLE=VERSION"
        ) from e
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def version_at(name: str, times: Sequence[datetime], moment: datetime) -> int | None:
    """The version of a table in the cut at a moment, by the times of its commits; None: it didn't exist yet."""
    marks = all_committed(times) if name in _PARENTS else first_committed(times)
    version = bisect_right(marks, moment) - 1
    return version if version >= 0 else None


def all_committed(times: Sequence[datetime]) -> list[datetime]:
    """For each version, when it and all before it had been committed, by their writers' clocks."""
    return list(accumulate(times, max))


def first_committed(times: Sequence[datetime]) -> list[datetime]:
    """For each version, when the first of it and all after it had been committed, by their writers' clocks."""
    return list(accumulate(reversed(times), min))[::-1]


def _pin_in_order(names: list[str], find: Callable[[str], DeltaTable | None]) -> Tables:
    parents = [name for name in names if name in _PARENTS]
    children = [name for name in names if name not in _PARENTS]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(parents, pool.map(find, parents), strict=True))
        # Only now: what the pinned parents vouch for is there by the time that the children are pinned.
        return found | dict(zip(children, pool.map(find, children), strict=True))


def _table_at(store: Store, name: str, moment: datetime) -> DeltaTable | None:
    table = find_table(store, name)
    if table is None:
        return None
    version = version_at(name, commit_times(store, name, table.version()), moment)
    if version is None:
        if name in read_marker_tables(store):
            raise UserError(f"{store.uri} didn't exist yet at {moment.isoformat()}; see `atoll tables history jobs`")
        return None  # a newer Atoll brought this table to an older store
    return table if version == table.version() else find_table(store, name, version=version)


def _committed_at(store: Store, checkpoint: bytes) -> datetime:
    """The earliest moment whose cut has a checkpoint: when its row was committed, or the latest of the commits before, where a clock was ahead."""
    table = find_table(store, "checkpoints")
    try:
        rows = (
            table.to_pyarrow_table(columns=["written_at"], filters=[("checkpoint", "=", checkpoint)]).to_pylist()
            if table is not None
            else []
        )
    except (DeltaError, OSError, pa.ArrowException) as e:
        raise table_error(store, "checkpoints", e) from e
    if not rows:
        raise UserError(
            f'no checkpoint {checkpoint.hex()} in {store.uri}; see `atoll sql "select checkpoint, run, island, step from checkpoints"`'
        )
    # The row carries the time before its commit, by the same clock, cut to whole milliseconds in the log.
    written = rows[0]["written_at"] - timedelta(milliseconds=1)
    latest = datetime.min.replace(tzinfo=UTC)
    for commit in read_log(store, "checkpoints"):
        latest = max(latest, commit.time)
        if commit.time >= written and not commit.removed and any(_holds(store, f, checkpoint) for f in commit.added):
            break
    return latest


def _holds(store: Store, file: DataFile, checkpoint: bytes) -> bool:
    try:
        column = open_parquet(store, "checkpoints", file).read(["checkpoint"])["checkpoint"]
    except (ObjectMissing, OSError, pa.ArrowException) as e:
        raise Failure(
            f"checkpoint {checkpoint.hex()} of {store.uri}: the file that would tell when it was committed can't be read: {first_line(e)}; "
            "if `atoll tables vacuum` deleted it, look from another point, else restore it from a backup"
        ) from e
    return checkpoint in column.to_pylist()
