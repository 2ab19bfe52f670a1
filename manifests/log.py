"""What the log of a table says, commit by commit: the versions, what each added and removed, and who wrote it.

The log is read as it lies in the store, since delta-rs tells neither which files a commit removed nor its app transactions, and its `history`
numbers the commits wrongly while others commit. No entry is ever cleaned away (tables.py), so the log is whole from version 0 on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import Failure, ObjectMissing
from manifests.store import Store
from manifests.tables import find_table

_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One data file, as the log has it."""

    path: str
    """Path below the table's folder."""
    size_bytes: int
    rows: int | None
    """None: its writer didn't say; Atoll always does."""
    action: Mapping[str, Any]
    """What the log says of it, whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One version of a table: what changed with it."""

    version: int
    time: datetime
    """By the clock of its writer."""
    operation: str
    """What delta-rs calls it: WRITE, OPTIMIZE, ADD COLUMN, …"""
    added: tuple[DataFile, ...]
    removed: tuple[str, ...]
    """Paths of the files that this version no longer has."""
    transactions: tuple[tuple[str, int], ...]
    """Writer and sequence number of an idempotent append."""
    changes_schema: bool
    """Whether it says what the table's columns and properties are, rather than changing rows only."""


def read_log(store: Store, name: str) -> list[Commit]:
    """Every commit of a table, from version 0 to the newest; none where the store doesn't have the table.

    Raises:
        UserError: see `open_table`.
        Failure: an entry of the log is missing or damaged.
    """
    table = find_table(store, name)
    if table is None:
        return []
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda version: read_commit(store, name, version), range(table.version() + 1)))


def read_commit(store: Store, name: str, version: int) -> Commit:
    """One commit of a table.

    Raises:
        Failure: its entry is missing or damaged.
    """
    actions = _read_entry(store, name, version)
    return Commit(
        version=version,
        time=_time(actions),
        operation=_info(actions).get("operation", "unknown"),
        added=tuple(_data_file(action["add"]) for action in actions if "add" in action),
        removed=tuple(unquote(action["remove"]["path"]) for action in actions if "remove" in action),
        transactions=tuple((action["txn"]["appId"], action["txn"]["version"]) for action in actions if "txn" in action),
        changes_schema=any("metaData" in action or "protocol" in action for action in actions),
    )


def commit_times(store: Store, name: str, newest: int) -> list[datetime]:
    """When each version of a table up to a newest one was committed, by its writer's clock.

    Raises:
        Failure: an entry of the log is missing or damaged.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = pool.map(lambda version: _read_entry(store, name, version), range(newest + 1))
        return [_time(actions) for actions in entries]


def write_commit(store: Store, name: str, version: int, actions: Iterable[Mapping[str, Any]]) -> None:
    """Makes a version of a table, in Delta's protocol; how it fits the versions before is the caller's to know.

    Raises:
        ObjectTaken: there is such a version already.
        StoreUnreachable: the store failed; whether the version exists now is unknown.
    """
    store.put_new(_entry_path(name, version), "".join(json.dumps(action) + "\n" for action in actions).encode())


def open_parquet(store: Store, name: str, file: DataFile) -> pq.ParquetFile:
    """A data file of a table, opened; what it raises is pyarrow's and the store's."""
    path = f"tables/{name}/{file.path}"
    return pq.ParquetFile(store.root / path if store.is_local else pa.BufferReader(store.get(path)))


def live_files(commits: list[Commit]) -> dict[str, DataFile]:
    """The files of the last of these versions, by path."""
    files: dict[str, DataFile] = {}
    for commit in commits:
        for path in commit.removed:
            files.pop(path, None)
        files |= {file.path: file for file in commit.added}
    return files


def history(store: Store, name: str) -> pa.Table:
    """The versions of a table, the newest first.

    Returns:
        Columns version, time, operation, rows_added, rows_removed, files_added, files_removed, and writer and sequence of an idempotent append.
        A compaction removes as many rows as it adds: they moved.

    Raises:
        UserError: see `open_table`.
        Failure: an entry of the log is missing or damaged.
    """
    rows_of: dict[str, int | None] = {}
    rows = []
    for commit in read_log(store, name):
        rows_of |= {file.path: file.rows for file in commit.added}
        writer, sequence = commit.transactions[0] if commit.transactions else (None, None)
        row = {
            "version": commit.version,
            "time": commit.time,
            "operation": commit.operation,
            "rows_added": sum(file.rows or 0 for file in commit.added),
            "rows_removed": sum(rows_of.get(path) or 0 for path in commit.removed),
            "files_added": len(commit.added),
            "files_removed": len(commit.removed),
            "writer": writer,
            "sequence": sequence,
        }
        rows.append(row)
    return pa.Table.from_pylist(rows[::-1], schema=_HISTORY)


def _read_entry(store: Store, name: str, version: int) -> list[dict[str, Any]]:
    """The actions of a commit."""
    path = _entry_path(name, version)
    try:
        actions = [json.loads(line) for line in store.get(path).splitlines() if line.strip()]
    except ObjectMissing as e:
        raise Failure(f"{store.uri}/{path} is missing: a version of the table is lost; {_MEND}") from e
    except ValueError as e:
        raise Failure(f"{store.uri}/{path} is damaged: {e}; {_MEND}") from e
    if not actions:
        # A crash of the machine can leave an entry empty; delta-rs reads it as a commit that changed nothing.
        raise Failure(f"{store.uri}/{path} is empty: what this version added is lost; {_MEND}")
    return actions


def _entry_path(name: str, version: int) -> str:
    return f"tables/{name}/_delta_log/{version:020d}.json"


def _info(actions: list[dict[str, Any]]) -> dict[str, Any]:
    return next((dict(action["commitInfo"]) for action in actions if "commitInfo" in action), {})


def _time(actions: list[dict[str, Any]]) -> datetime:
    return datetime.fromtimestamp(_info(actions).get("timestamp", 0) / 1000, UTC)


def _data_file(add: Mapping[str, Any]) -> DataFile:
    statistics = json.loads(add.get("stats") or "{}")
    # The log keeps paths as URLs, so a partition's name may be quoted.
    return DataFile(path=unquote(add["path"]), size_bytes=add["size"], rows=statistics.get("numRecords"), action=add)


_MEND = "restore it from a backup"
_HISTORY = pa.schema(
    [
        ("version", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("operation", pa.string()),
        ("rows_added", pa.int64()),
        ("rows_removed", pa.int64()),
        ("files_added", pa.int64()),
        ("files_removed", pa.int64()),
        ("writer", pa.string()),
        ("sequence", pa.int64()),
    ]
)
