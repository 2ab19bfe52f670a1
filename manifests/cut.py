"""Cuts: which version of every table an answer is made from, so that all tables of one answer agree.

A cut is a version for each table. It is consistent when whatever a parent row (`jobs`, `checkpoints`, `runs`) vouches for is there: children are
committed before their parents by the same writer, so the newest cut pins parents first, and a cut at a time takes every commit up to it by
the writers' own clocks, which puts a child before its parent whatever the clocks of other writers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from manifests.errors import UserError
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import find_table, table_error

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
        return _pin_now(store, wanted, {})
    if isinstance(at, Mapping):
        unknown = sorted(set(at) - set(TABLES))
        if unknown:
            raise UserError(f"no table named {unknown[0]!r}; there are {', '.join(sorted(TABLES))}")
        return _pin_now(store, wanted, at)
    moment = _committed_at(store, at) if isinstance(at, bytes) else at
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(wanted, pool.map(lambda name: _table_at(store, name, moment), wanted), strict=True))


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
        if all(name.strip() in TABLES and version.strip().isdigit() for name, _, version in pairs):
            return {name.strip(): int(version) for name, _, version in pairs}
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as e:
        raise UserError(
            f"--at {text!r}: give a time such as 2026-01-31T12:00:00, a checkpoint's id (32 hex digits), or TABLE=VERSION,TABLE=VERSION"
        ) from e
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def commit_times(table: DeltaTable) -> dict[int, datetime]:
    """When each version was committed, by its writer's clock."""
    return {
        int(entry["version"]): datetime.fromtimestamp(entry.get("timestamp", 0) / 1000, UTC)
        for entry in table.history()
    }


def version_at(times: Mapping[int, datetime], moment: datetime) -> int | None:
    """The last version committed up to a moment; None: there was none yet."""
    # Everything before a version is part of it, so the last one in time is the one of the highest number.
    return max((version for version, time in times.items() if time <= moment), default=None)


def _pin_now(store: Store, names: list[str], versions: Mapping[str, int]) -> Tables:
    def find(name: str) -> DeltaTable | None:
        return find_table(store, name, version=versions.get(name))

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
    try:
        version = version_at(commit_times(table), moment)
    except (DeltaError, OSError) as e:
        raise table_error(store, name, e) from e
    if version is None:
        raise UserError(f"{store.uri} didn't exist yet at {moment.isoformat()}; see `atoll tables history`")
    return table if version == table.version() else find_table(store, name, version=version)


def _committed_at(store: Store, checkpoint: bytes) -> datetime:
    """When a checkpoint's row was committed."""
    table = find_table(store, "checkpoints")
    rows = (
        table.to_pyarrow_table(columns=["written_at"], filters=[("checkpoint", "=", checkpoint)]).to_pylist()
        if table is not None
        else []
    )
    if table is None or not rows:
        raise UserError(
            f'no checkpoint {checkpoint.hex()} in {store.uri}; see `atoll sql "select checkpoint, run, island, step from checkpoints"`'
        )
    # The row carries the time before its commit, by the same clock, cut to whole milliseconds in the log.
    written = rows[0]["written_at"] - timedelta(milliseconds=1)
    for version, moment in sorted(commit_times(table).items()):
        if moment >= written and _has_checkpoint(store, version, checkpoint):
            return moment
    return max(commit_times(table).values())


def _has_checkpoint(store: Store, version: int, checkpoint: bytes) -> bool:
    table = find_table(store, "checkpoints", version=version)
    assert table is not None
    found = table.to_pyarrow_table(columns=["checkpoint"], filters=[("checkpoint", "=", checkpoint)])
    return found.num_rows > 0
