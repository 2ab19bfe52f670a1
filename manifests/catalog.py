"""SQL over a store: one version of every table, pinned, shown as DuckDB views.

Only rows that count are in the views (schemas.py); the schema `raw` holds every row. The connection is read-only towards the world: it can
read the pinned files and nothing else of the machine. A table's files are fetched, and its view is made, when a query first names it.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import unquote

import duckdb
import pyarrow as pa

from manifests.cut import At, pin
from manifests.errors import Failure, ObjectMissing, UserError
from manifests.guard import require_guarded
from manifests.policy import Rights
from manifests.questions import MACROS, VIEWS, statement
from manifests.schemas import TABLES, TableSpec
from manifests.statements import require_reading
from manifests.store import Store, first_line
from manifests.tables import created_version

_OF_FILES = (duckdb.IOException, duckdb.InvalidInputException)
"""Errors that are a file's fault where they name one."""
_COUNTS = {
    None: "",
    "job": " WHERE job IN (SELECT job FROM raw.jobs)",
    "checkpoint": " WHERE checkpoint IN (SELECT checkpoint FROM raw.checkpoints)",
}
_LISTING = frozenset({"show", "describe", "information_schema", "duckdb_views", "duckdb_columns", "duckdb_tables"})
"""Words of a query that looks at the catalog itself, and so needs all of it."""
_LABELLED = {"documents": "doc_id", "shard_index": "shard"}
"""Tables that carry the labels which rights are decided by, and the column that leads to them."""


def cache_root() -> Path:
    """Where immutable files of remote stores are kept on this machine: $ATOLL_CACHE, or ~/.cache/atoll."""
    return Path(os.environ.get("ATOLL_CACHE") or Path.home() / ".cache" / "atoll")


class Catalog:
    """A consistent view of a store's tables, queried by SQL."""

    def __init__(
        self,
        store: Store,
        *,
        at: At | None = None,
        tables: Iterable[str] | None = None,
        rights: Rights | None = None,
        threads: int | None = None,
        memory_limit: str | None = None,
    ) -> None:
        """Pins the tables at one cut.

        Args:
            store: the store.
            at: a time, a checkpoint's id or versions of tables to look from; None: now.
            tables: only these and what makes their rows count; None: all.
            rights: what the asker may read (policy.py): other documents, their shards and their consumption are not there. None: everything.
            threads: threads of a query; None: DuckDB's choice.
            memory_limit: such as `2GB`; None: DuckDB's choice.

        Raises:
            UserError: the store has nothing at this point, or a newer Atoll has written to it.
            Failure: a table's log is damaged.
        """
        self.store = store
        self._at_a_point = at is not None
        self._rights = rights if rights is not None and not rights.everything else None
        self._tables = pin(store, TABLES if tables is None else self._with_needed(tables), at)
        self.versions: dict[str, int] = {
            name: table.version() for name, table in self._tables.items() if table is not None
        }
        self._files = {name: self._paths(name) for name in self._tables}
        self._local = {
            name: [str(self._local_path(name, path)) for path in paths] for name, paths in self._files.items()
        }
        self._ready: set[str] = set()
        # DuckDB's own choice for what memory doesn't hold is the folder that the user happens to be in.
        self.connection = duckdb.connect(
            ":memory:", config={"temp_directory": str(Path(gettempdir()) / "atoll-duckdb")}
        )
        self.connection.execute("CREATE SCHEMA raw")
        self.connection.execute("SET TimeZone = 'UTC'")
        # Rows come in the order of their files only where a query asks for an order; parallel scans need no buffers then.
        self.connection.execute("SET preserve_insertion_order = false")
        if threads is not None:
            self.connection.execute(f"SET threads = {threads}")
        if memory_limit is not None:
            self.connection.execute("SET memory_limit = ?", [memory_limit])
        self.connection.execute("SET allowed_paths = ?", [sorted(p for paths in self._local.values() for p in paths)])
        self.connection.execute("SET enable_external_access = false")
        self.connection.execute("SET autoinstall_known_extensions = false")
        self.connection.execute("SET autoload_known_extensions = false")
        if self._rights is not None:
            self.connection.execute("SET python_enable_replacements = false")
        self.connection.execute("SET lock_configuration = true")

    @property
    def rights(self) -> Rights | None:
        """What the asker may read; None: everything."""
        return self._rights

    def query(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> pa.Table:
        """Answers a query as an Arrow table.

        Raises:
            UserError: the SQL is more than one query, would change something, or DuckDB refuses it; its message is passed on.
            Failure: a data file is missing or damaged.
        """
        try:
            return self._relation(sql, parameters).to_arrow_table()
        except duckdb.Error as e:
            raise self._explain(e, sql) from e

    def stream(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None, *, num_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Answers a query batch by batch, of `num_rows` each but the last; ask this catalog nothing else before the end.

        Raises:
            UserError, Failure: as `query`.
        """
        held: list[pa.RecordBatch] = []
        try:
            for batch in self._relation(sql, parameters).to_arrow_reader(num_rows):
                held.append(batch)
                while sum(part.num_rows for part in held) >= num_rows:
                    table = pa.Table.from_batches(held)
                    yield table.slice(0, num_rows).combine_chunks().to_batches()[0]
                    held = table.slice(num_rows).to_batches()
        except duckdb.Error as e:
            raise self._explain(e, sql) from e
        if sum(part.num_rows for part in held):
            yield pa.Table.from_batches(held).combine_chunks().to_batches()[0]

    def _relation(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None) -> duckdb.DuckDBPyRelation:
        require_reading(self.connection, sql)
        if self._rights is not None:
            told = self.connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
            require_guarded(json.loads(told[0][0]), macros=MACROS)
        self.prepare(sql)
        return self.connection.sql(sql, params=parameters)

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Answers a query as a list of dicts."""
        return self.query(sql, parameters).to_pylist()

    def ask(self, name: str, **parameters: Any) -> pa.Table:
        """Answers a question whose SQL stands under `manifests/sql/`; see questions.py."""
        sql, values = statement(name, parameters)
        return self.query(sql, values or None)

    def files(self, table: str) -> list[str]:
        """The data files of a table at this cut, on this machine; a remote store's may not have been fetched yet."""
        return list(self._local[table])

    def prepare(self, sql: str | None = None) -> None:
        """Makes the views that a query names, and fetches their files; None: all of them.

        Raises:
            Failure: a file can't be fetched.
        """
        words = _words(sql) if sql is not None else _LISTING
        for name in self._objects():
            if words & _LISTING or name in words:
                ready = set(self._ready)
                statements = self._definitions_of(name, ready)
                # All or none, so that a query which fails on a damaged file fails the same way the next time.
                self.connection.begin()
                try:
                    for statement in statements:
                        self.connection.execute(statement)
                except duckdb.Error as e:
                    self.connection.rollback()
                    raise self._damage(e, f"table {name} of {self.store.uri}") from e
                self.connection.commit()
                self._ready = ready

    def definitions(self) -> list[str]:
        """SQL that makes the same views over the same files in another DuckDB database, in order."""
        ready: set[str] = set()
        statements = [s for name in self._objects() for s in self._definitions_of(name, ready)]
        return ["CREATE SCHEMA IF NOT EXISTS raw", *statements]

    def _objects(self) -> list[str]:
        """Names of the tables, views and macros that this cut can show."""
        named = [name for name in (*VIEWS, *MACROS) if all(t in self._tables for t in self._needs(name) if t in TABLES)]
        return [*self._tables, *named]

    def _needs(self, name: str) -> list[str]:
        """Tables, views and macros that one rests on."""
        if name not in TABLES:
            words = _words(VIEWS.get(name) or MACROS[name])
            return [other for other in (*TABLES, *VIEWS, *MACROS) if other in words and other != name]
        counts_with = TABLES[name].counts_with
        needed = [] if counts_with is None else [f"{counts_with}s"]
        needed += {"documents": ["tombstones"], "consumption": ["shards"]}.get(name, [])
        if self._rights is not None:
            columns = TABLES[name].schema.names
            needed += [table for table, column in _LABELLED.items() if column in columns and name not in _LABELLED]
        return needed

    def _with_needed(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._needs(name)
        return found

    def _definitions_of(self, name: str, ready: set[str]) -> list[str]:
        """Statements that make a table's views, a view or a macro, after what it rests on."""
        if name in ready:
            return []
        ready.add(name)
        before = [s for other in self._needs(name) for s in self._definitions_of(other, ready)]
        if name not in TABLES:
            return [*before, VIEWS.get(name) or MACROS[name]]
        self._fetch(name)
        return [*before, self._raw_view(TABLES[name]), self._counting_view(TABLES[name])]

    def _raw_view(self, spec: TableSpec) -> str:
        allowed = f" WHERE {condition}" if (condition := self._allowed(spec)) else ""
        return f"CREATE VIEW raw.{spec.name} AS SELECT * FROM ({self._rows_of(spec)}){allowed}"

    def _rows_of(self, spec: TableSpec) -> str:
        """A query for all rows of a table."""
        table = self._tables[spec.name]
        present = {field.name for field in table.schema().fields} if table is not None else set()
        empty = not self._local[spec.name]
        columns = ", ".join(
            f'"{field.name}"'
            if field.name in present and not empty
            else f'NULL::{_duckdb_type(field.type)} AS "{field.name}"'
            for field in spec.schema
        )
        if empty:
            return f"SELECT {columns} WHERE false"
        options = ""
        grown = table is not None and created_version(table) < spec.version
        if grown:
            options += ", union_by_name = true"  # the oldest files lack the newest columns
        if spec.partition_by:
            types = ", ".join(f"'{c}': {_duckdb_type(spec.schema.field(c).type)}" for c in spec.partition_by)
            options += f", hive_partitioning = true, hive_types = {{{types}}}"
        listed = ", ".join(_quoted(path) for path in self._local[spec.name])
        source = f"read_parquet([{listed}]{options})"
        if grown:
            # Perhaps no file has the newest columns yet.
            nulls = ", ".join(f'NULL::{_duckdb_type(f.type)} AS "{f.name}"' for f in spec.schema if f.nullable)
            source = f"(SELECT * FROM {source} UNION ALL BY NAME SELECT {nulls} WHERE false)"
        return f"SELECT {columns} FROM {source}"

    def _allowed(self, spec: TableSpec) -> str | None:
        """The condition on a table's rows that the asker's rights make."""
        if self._rights is None:
            return None
        if "license" in spec.schema.names and "access" in spec.schema.names:
            return self._rights.condition
        if "shard" in spec.schema.names:
            return "shard IN (SELECT shard FROM raw.shard_index)"
        if "doc_id" in spec.schema.names:
            return "doc_id IN (SELECT doc_id FROM raw.documents)"
        return None

    def _counting_view(self, spec: TableSpec) -> str:
        counts = _COUNTS[spec.counts_with]
        if spec.name == "documents":
            # From the file: a tombstone hides its document also where the asker may not see the tombstone.
            forgotten = (
                f"SELECT doc_id FROM ({self._rows_of(TABLES['tombstones'])}) WHERE job IN (SELECT job FROM raw.jobs)"
            )
            return f"CREATE VIEW documents AS SELECT * FROM raw.documents{counts} AND doc_id NOT IN ({forgotten})"
        if spec.name == "consumption":
            # One row for each place, so that DuckDB drops the join from queries that don't ask for doc_id.
            places = (
                "SELECT shard, position AS shard_position, any_value(doc_id) AS doc_id FROM raw.shards GROUP BY ALL"
            )
            return (
                f"CREATE VIEW consumption AS SELECT c.*, p.doc_id FROM (SELECT * FROM raw.consumption{counts}) AS c "
                f"LEFT JOIN ({places}) AS p USING (shard, shard_position)"
            )
        newest = ""
        if spec.newest_by:
            newest = (
                f" QUALIFY row_number() OVER (PARTITION BY {', '.join(spec.newest_by)} ORDER BY written_at DESC) = 1"
            )
        return f"CREATE VIEW {spec.name} AS SELECT * FROM raw.{spec.name}{counts}{newest}"

    def _paths(self, name: str) -> list[str]:
        table = self._tables[name]
        # The log keeps paths as URLs, so a partition's name may be quoted.
        return (
            [] if table is None else [unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()]
        )

    def _local_path(self, table: str, path: str) -> Path:
        if self.store.is_local:
            return self.store.root / "tables" / table / path
        return cache_root() / "tables" / self.store.uri.replace("://", "/") / table / path

    def _fetch(self, name: str) -> None:
        if self.store.is_local:
            return
        missing = [path for path in self._files[name] if not self._local_path(name, path).exists()]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda path: self._fetch_file(name, path), missing))

    def _fetch_file(self, table: str, path: str) -> None:
        object_ = f"tables/{table}/{path}"
        try:
            write_whole(self._local_path(table, path), self.store.get(object_))
        except ObjectMissing as e:
            raise Failure(f"data file {self.store.uri}/{object_} is missing; {self._lost_file_mend()}") from e

    def _explain(self, error: duckdb.Error, sql: str) -> UserError | Failure:
        path = self._named(error)
        missing = path is not None and not path.is_file()
        # DuckDB has no class of error for a file whose Parquet it can't decode, and then names no file.
        if missing or type(error) is duckdb.Error or (path is not None and isinstance(error, _OF_FILES)):
            named = ", ".join(name for name in self._tables if name in _words(sql))
            return self._damage(error, f"a table that the query reads ({named}) of {self.store.uri}")
        return UserError(f"SQL: {first_line(error)}")

    def _damage(self, error: duckdb.Error, what: str) -> Failure:
        path = self._named(error)
        if path is None:
            return Failure(f"{what} is damaged: {first_line(error)}; `atoll tables check --deep` finds the file")
        text = f"is damaged: {first_line(error)}" if path.is_file() else "is missing"
        mend = self._lost_file_mend() if self.store.is_local else "delete it, it is fetched again"
        return Failure(f"data file {path} {text}; {mend}")

    def _lost_file_mend(self) -> str:
        if self._at_a_point:
            return "if `atoll tables vacuum` deleted it, look from another point, else restore it from a backup"
        return "restore it from a backup"

    def _named(self, error: duckdb.Error) -> Path | None:
        """The data file that an error names."""
        text = str(error)
        named = [path for paths in self._local.values() for path in paths if path in text]
        return Path(min(named, key=text.index)) if named else None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a local file so that it appears whole or not at all, also beside another writer of the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _words(sql: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sql.lower()))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _duckdb_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"{_duckdb_type(type_.value_type)}[]"
    return _DUCKDB_TYPES[type_]


_DUCKDB_TYPES = {
    pa.binary(): "BLOB",
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}
