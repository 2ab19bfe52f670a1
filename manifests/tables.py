"""Tables of a store: making, appending, reading at a version. Each is a Delta table (delta-rs).

Appends are atomic, safe beside other writers, and idempotent where they carry a writer and a sequence number.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from manifests.errors import Failure, ObjectMissing, StoreUnreachable, UserError
from manifests.schemas import SCHEMA_VERSION, TABLES
from manifests.store import MARKER, Store, first_line

_ATTEMPTS = 30
_COMMIT_RETRIES = 15


def create_store(uri: str) -> Store:
    """Makes a store with all its tables, or opens the one that lies there.

    Safe to run again after a crash and beside another that does the same: tables are made if absent, the marker comes last.

    Raises:
        UserError: the place can't be written, or holds a store of a newer schema.
    """
    store = Store(uri)
    store.make_root()
    if not store.exists(MARKER):
        for name in TABLES:
            _create(store, name)
        store.put_content(MARKER, json.dumps({"schema_version": SCHEMA_VERSION}).encode())
    return open_store(uri)


def open_store(uri: str) -> Store:
    """Opens a store that exists.

    Raises:
        UserError: there is none, or it is of a newer schema.
    """
    store = Store(uri)
    try:
        marker = json.loads(store.get(MARKER))
    except ObjectMissing as e:
        raise UserError(f"no Atoll store at {store.uri}; `atoll ingest` makes one, or name another with --store") from e
    except ValueError as e:
        raise Failure(f'{store.uri}/{MARKER} is damaged: {e}; write it again as {{"schema_version": 1}}') from e
    if marker.get("schema_version", 0) > SCHEMA_VERSION:
        raise UserError(
            f"{store.uri} is of schema {marker['schema_version']}, this Atoll reads up to {SCHEMA_VERSION}; update Atoll"
        )
    return store


def open_table(store: Store, name: str, *, version: int | None = None) -> DeltaTable:
    """The Delta table itself, at a version or at its newest."""
    assert name in TABLES, name
    uri = store.table_uri(f"tables/{name}")
    try:
        return DeltaTable(uri, version=version, storage_options=store.table_options)
    except TableNotFoundError:
        if version is not None:
            raise
        return _create(store, name)
    except (DeltaError, OSError) as e:
        raise StoreUnreachable(f"{uri}: {first_line(e)}") from e


def append(
    store: Store,
    name: str,
    rows: pa.Table | Iterable[Mapping[str, Any]],
    *,
    writer: str | None = None,
    sequence: int | None = None,
) -> bool:
    """Appends rows in one atomic commit.

    With `writer` and `sequence` the append is idempotent: a second one of the same writer with a sequence number that is not
    higher changes nothing, so that a writer that never learned of its success may try again.

    Returns:
        Whether the rows were appended now; False: this sequence number was committed before.

    Raises:
        StoreUnreachable: no commit could be made, or its outcome is unknown; try again with the same sequence number.
    """
    data = rows if isinstance(rows, pa.Table) else to_table(name, rows)
    table = open_table(store, name)
    transactions = None
    if writer is not None:
        assert sequence is not None
        transactions = [Transaction(writer, sequence)]
    properties = CommitProperties(app_transactions=transactions, max_commit_retries=_COMMIT_RETRIES)
    for attempt in range(_ATTEMPTS):
        if writer is not None:
            committed = table.transaction_version(writer)
            if committed is not None and sequence is not None and committed >= sequence:
                return False
        try:
            write_deltalake(
                table,
                data,
                mode="append",
                commit_properties=properties,
                writer_properties=WriterProperties(compression="ZSTD"),
            )
        except CommitFailedError:
            # Lost the race more often than delta-rs tries by itself; or another writer took our sequence number.
            time.sleep(random.uniform(0.05, 0.3) * min(attempt + 1, 8))
            table = open_table(store, name)
            continue
        except (DeltaError, OSError) as e:
            raise StoreUnreachable(f"append to table {name} of {store.uri}: {first_line(e)}") from e
        return True
    raise StoreUnreachable(f"append to table {name} of {store.uri}: no commit in {_ATTEMPTS} attempts; run it again")


def to_table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as an Arrow table in the table's schema; a column that a row lacks is null, `written_at` is now."""
    schema = TABLES[name].schema
    now = datetime.now(UTC)
    filled = [({"written_at": now} | dict(row)) if "written_at" in schema.names else row for row in rows]
    return pa.Table.from_pylist(filled, schema=schema)


def read(store: Store, name: str, *, columns: list[str] | None = None, version: int | None = None) -> pa.Table:
    """A table whole, with rows that don't count yet; for what counts, ask the catalog."""
    return open_table(store, name, version=version).to_pyarrow_table(columns=columns)


def _create(store: Store, name: str) -> DeltaTable:
    uri = store.table_uri(f"tables/{name}")
    spec = TABLES[name]
    for _ in range(_ATTEMPTS):
        try:
            return DeltaTable.create(
                uri,
                schema=spec.schema,
                mode="ignore",
                name=name,
                description=f"Atoll: a row is {spec.row}",
                storage_options=store.table_options,
            )
        except CommitFailedError:
            continue  # somebody else is making it
        except (DeltaError, OSError) as e:
            raise StoreUnreachable(f"making table {name} in {store.uri}: {first_line(e)}") from e
    raise StoreUnreachable(f"making table {name} in {store.uri}: no commit in {_ATTEMPTS} attempts; run it again")
