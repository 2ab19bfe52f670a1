"""Cuts: which version of every table an answer is made from, so that all tables of one answer agree.

A cut is a version for each table. It is consistent when whatever a parent row (`jobs`, `checkpoints`, `runs`) vouches for is there. Children are
committed before their parents by the same writer, so the newest cut pins parents first. A cut at a time goes by the clocks of the writers, which
order the commits of one writer but not those of several: a table's versions may lie out of order in time, even on one machine. So a table of
parents is taken as far as every commit lies before the moment, any other table up to its last commit before it: then the children of each
parent that is there are there too, since by the clock of their writer they are older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from manifests.errors import UserError
from manifests.log import commit_times
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import find_table, read_marker_tables, table_error

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


def version_at(name: str, times: Mapping[int, datetime], moment: datetime) -> int | None:
    """The version of a table in the cut at a moment, by the times of its commits; None: it didn't exist yet."""
    return all_before(times, moment) if name in _PARENTS else last_before(times, moment)


def last_before(times: Mapping[int, datetime], moment: datetime) -> int | None:
    """The last version that was committed up to a moment, by its writer's clock."""
    return max((version for version, time in times.items() if time <= moment), default=None)


def all_before(times: Mapping[int, datetime], moment: datetime) -> int | None:
    """The last version that was committed up to a moment like all versions before it, by their writers' clocks."""
    found = None
    for version in sorted(times):
        if times[version] > moment:
            break
        found = version
    return found


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
    rows = _checkpoint_rows(store, checkpoint)
    table = find_table(store, "checkpoints")
    if table is None or not rows:
        raise UserError(
            f'no checkpoint {checkpoint.hex()} in {store.uri}; see `atoll sql "select checkpoint, run, island, step from checkpoints"`'
        )
    # The row carries the time before its commit, by the same clock, cut to whole milliseconds in the log.
    written = rows[0]["written_at"] - timedelta(milliseconds=1)
    latest = datetime.min.replace(tzinfo=UTC)
    for version, moment in sorted(commit_times(store, "checkpoints", table.version()).items()):
        latest = max(latest, moment)
        if moment >= written and _checkpoint_rows(store, checkpoint, version=version):
            break
    return latest


def _checkpoint_rows(store: Store, checkpoint: bytes, *, version: int | None = None) -> list[dict[str, Any]]:
    try:
        table = find_table(store, "checkpoints", version=version)
        if table is None:
            return []
        found = table.to_pyarrow_table(columns=["written_at"], filters=[("checkpoint", "=", checkpoint)])
    except (DeltaError, OSError, pa.ArrowException) as e:
        raise table_error(store, "checkpoints", e) from e
    return list(found.to_pylist())
