"""Tables of a store: making, opening, appending. Each is a Delta table (delta-rs).

Appends are atomic, safe beside other writers, and idempotent where they carry a writer and a sequence number. What is read at which version is
decided in cut.py and catalog.py; compaction and vacuum are in upkeep.py.
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
from deltalake.schema import Schema as DeltaSchema
from deltalake.writer.properties import ColumnProperties

from manifests.errors import Failure, ObjectMissing, StoreUnreachable, UserError
from manifests.probe import require_sound
from manifests.schemas import SCHEMA_VERSION, TABLES, TableSpec
from manifests.store import MARKER, Store, first_line
from manifests.strategies import BUILT_IN
from manifests.table_errors import no_version, table_error

ZSTD_LEVEL = 3
_ATTEMPTS = 30
_COMMIT_RETRIES = 15
_VERSION = "atoll.schema_version"
_CREATED = "atoll.created_version"
_kept: dict[tuple[object, ...], DeltaTable] = {}
"""Tables that this process has appended to: reading what is new in a log costs a fraction of reading it whole, over a slow link above all. Who appends takes one out."""
_READER_VERSION = 1
"""Of Delta's protocol. Higher ones have features (deletion vectors, column mapping) without which data files are misread."""
_CONFIGURATION = {
    # Delta's defaults throw away the log after 30 days; a month of training must stay open to time travel.
    "delta.enableExpiredLogCleanup": "false",
    "delta.checkpointInterval": "50",
}


def create_store(uri: str) -> Store:
    """Makes a store with all its tables, or opens the one that lies there.

    Safe to run again after a crash and beside another that does the same: the place is probed first, tables are made if absent, the marker comes last.

    Raises:
        UserError: the place can't be written, breaks a promise that the store rests on, or holds a store of another schema.
    """
    store = Store(uri)
    store.make_root()
    if not store.exists(MARKER):
        require_sound(store)
        for name in TABLES:
            _create(store, name)
        append(store, "strategies", BUILT_IN, writer="strategies/built-in", sequence=1)
        marker = {"schema_version": SCHEMA_VERSION, "tables": sorted(TABLES)}
        store.put_content(MARKER, json.dumps(marker).encode())
    return open_store(uri)


def open_store(uri: str) -> Store:
    """Opens a store that exists.

    Raises:
        UserError: there is none, or it is of another schema.
        Failure: its marker is damaged.
    """
    store = Store(uri)
    version = read_marker(store)["schema_version"]
    if version > SCHEMA_VERSION:
        raise UserError(f"{store.uri} is of schema {version}, this Atoll reads up to {SCHEMA_VERSION}; update Atoll")
    if version < SCHEMA_VERSION:
        raise UserError(
            f"{store.uri} is of schema {version}, from before the first release, and this Atoll reads {SCHEMA_VERSION}; "
            "ingest into a new store"
        )
    return store


def read_marker(store: Store) -> dict[str, Any]:
    """What the store says of itself: `schema_version`, and the `tables` that it was made with."""
    try:
        marker = json.loads(store.get(MARKER))
    except ObjectMissing as e:
        raise UserError(f"no Atoll store at {store.uri}; `atoll ingest` makes one, or name another with --store") from e
    except ValueError as e:
        raise _marker_error(store, str(e)) from e
    if not isinstance(marker, dict) or not isinstance(marker.get("schema_version"), int):
        raise _marker_error(store, "it names no schema version")
    return marker


def open_table(store: Store, name: str, *, version: int | None = None) -> DeltaTable:
    """The Delta table itself, at a version or at its newest; made where the store is older than the table.

    Raises:
        UserError: a newer Atoll has changed its schema, something else lies in its place, or it has no such version.
        Failure: its log is damaged.
        StoreUnreachable: the store failed.
    """
    table = find_table(store, name, version=version)
    return _create(store, name) if table is None else table


def find_table(store: Store, name: str, *, version: int | None = None) -> DeltaTable | None:
    """As `open_table`, but None where the store has no such table yet: it was made by an Atoll that didn't know it."""
    assert name in TABLES, name
    uri = store.table_uri(f"tables/{name}")
    try:
        table = DeltaTable(uri, version=version, storage_options=store.table_options)
    except TableNotFoundError as e:
        if version is not None:
            raise no_version(store, name, version) from e
        if name in read_marker_tables(store):
            raise Failure(
                f"table {name} of {store.uri} is gone: {uri}/_delta_log has no commit; restore the folder from a backup"
            ) from e
        return None
    except OverflowError as e:
        assert version is not None
        raise no_version(store, name, version) from e
    except (DeltaError, OSError) as e:
        # delta-rs has no error of its own for a version that is yet to come.
        if version is not None and (newest := find_table(store, name)) is not None and version > newest.version():
            raise no_version(store, name, version) from e
        raise table_error(store, name, e) from e
    _check_schema(store, TABLES[name], table)
    return table


def read_marker_tables(store: Store) -> list[str]:
    """Tables that a whole store must have; none while it is being made."""
    return list(read_marker(store).get("tables", [])) if store.exists(MARKER) else []


def created_version(table: DeltaTable) -> int:
    """Version of the schema that the table was made with: its oldest files may lack columns that came later."""
    return int(table.metadata().configuration.get(_CREATED, "0"))


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
        UserError: see `open_table`.
    """
    spec = TABLES[name]
    data = rows if isinstance(rows, pa.Table) else to_table(name, rows)
    if spec.sort_by:
        data = data.sort_by([(column, "ascending") for column in spec.sort_by])
    table = _upgraded(store, spec, _take_kept(store, spec) or open_table(store, name))
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
                writer_properties=writer_properties(spec),
            )
        except CommitFailedError:
            # Lost the race more often than delta-rs tries by itself; or another writer took our sequence number.
            time.sleep(random.uniform(0.05, 0.3) * min(attempt + 1, 8))
            table = open_table(store, name)
            continue
        except (DeltaError, OSError) as e:
            raise StoreUnreachable(f"append to table {name} of {store.uri}: {first_line(e)}") from e
        _kept[_key(store, name)] = table
        return True
    raise StoreUnreachable(f"append to table {name} of {store.uri}: no commit in {_ATTEMPTS} attempts; run it again")


def _key(store: Store, name: str) -> tuple[object, ...]:
    return store.uri, name, frozenset((store.table_options or {}).items())


def _take_kept(store: Store, spec: TableSpec) -> DeltaTable | None:
    table = _kept.pop(_key(store, spec.name), None)
    if table is None:
        return None
    try:
        table.update_incremental()
    except (DeltaError, OSError):
        return None  # opened anew, it says what is wrong
    _check_schema(store, spec, table)
    return table


def to_table(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as an Arrow table in the table's schema; a column that a row lacks is null, `written_at` is now."""
    schema = TABLES[name].schema
    now = datetime.now(UTC)
    filled = [({"written_at": now} | dict(row)) if "written_at" in schema.names else row for row in rows]
    return pa.Table.from_pylist(filled, schema=schema)


def read(store: Store, name: str, *, columns: list[str] | None = None, version: int | None = None) -> pa.Table:
    """A table whole, with rows that don't count yet; for what counts, ask the catalog."""
    schema = TABLES[name].schema
    wanted = columns or schema.names
    table = open_table(store, name, version=version)
    present = {field.name for field in table.schema().fields}
    try:
        data = table.to_pyarrow_table(columns=[column for column in wanted if column in present])
    except (DeltaError, OSError, pa.ArrowException) as e:
        raise table_error(store, name, e) from e
    for column in wanted:
        if column not in present:  # it came later
            data = data.append_column(schema.field(column), pa.nulls(data.num_rows, schema.field(column).type))
    return data.select(wanted)


def writer_properties(spec: TableSpec) -> WriterProperties:
    """How a table's Parquet files are written."""
    columns = {
        column: ColumnProperties(dictionary_enabled=False, encoding=encoding)
        for column, encoding in spec.encodings.items()
    }
    return WriterProperties(compression="ZSTD", compression_level=ZSTD_LEVEL, column_properties=columns or None)


def _marker_error(store: Store, text: str) -> Failure:
    mend = json.dumps({"schema_version": SCHEMA_VERSION})
    return Failure(f"{store.uri}/{MARKER} is damaged: {text}; write it again as {mend}")


def _check_schema(store: Store, spec: TableSpec, table: DeltaTable) -> None:
    where = f"table {spec.name} of {store.uri}"
    version = table.metadata().configuration.get(_VERSION)
    if version is None:
        raise UserError(
            f"{where} was not made by Atoll: a foreign table lies in {store.table_uri(f'tables/{spec.name}')}; move it away"
        )
    if table.protocol().min_reader_version > _READER_VERSION:
        raise UserError(
            f"{where} was given features of Delta by another program that Atoll doesn't read; take them back there"
        )
    if int(version) > spec.version:
        raise UserError(f"{where} is of schema {version}, this Atoll reads up to {spec.version}; update Atoll")
    columns = [field.name for field in table.schema().fields]
    missing = [name for name in spec.schema.names if name not in columns and not spec.schema.field(name).nullable]
    if missing:
        raise Failure(f"{where} lacks the columns {', '.join(missing)}; restore its log from a backup")


def _upgraded(store: Store, spec: TableSpec, table: DeltaTable) -> DeltaTable:
    """The table with the columns that its schema has gained since it was made."""
    for _ in range(_ATTEMPTS):
        if int(table.metadata().configuration[_VERSION]) >= spec.version:
            return table
        present = {field.name for field in table.schema().fields}
        added = [field for field in DeltaSchema.from_arrow(spec.schema).fields if field.name not in present]
        try:
            if added:
                table.alter.add_columns(added)
            table.alter.set_table_properties({_VERSION: str(spec.version)}, raise_if_not_exists=False)
        except CommitFailedError:
            pass  # somebody else upgrades or appends; look again
        except (DeltaError, OSError) as e:
            raise StoreUnreachable(f"adding columns to table {spec.name} of {store.uri}: {first_line(e)}") from e
        table = open_table(store, spec.name)
    raise StoreUnreachable(f"adding columns to table {spec.name} of {store.uri}: no commit in {_ATTEMPTS} attempts")


def _create(store: Store, name: str) -> DeltaTable:
    uri = store.table_uri(f"tables/{name}")
    spec = TABLES[name]
    for _ in range(_ATTEMPTS):
        try:
            table = DeltaTable.create(
                uri,
                schema=spec.schema,
                mode="ignore",
                partition_by=list(spec.partition_by) or None,
                name=name,
                description=f"Atoll: a row is {spec.row}",
                configuration=_CONFIGURATION | {_VERSION: str(spec.version), _CREATED: str(spec.version)},
                storage_options=store.table_options,
                raise_if_key_not_exists=False,
            )
        except CommitFailedError:
            continue  # somebody else is making it
        except (DeltaError, OSError) as e:
            raise StoreUnreachable(f"making table {name} in {store.uri}: {first_line(e)}") from e
        _check_schema(store, spec, table)
        return table
    raise StoreUnreachable(f"making table {name} in {store.uri}: no commit in {_ATTEMPTS} attempts; run it again")
