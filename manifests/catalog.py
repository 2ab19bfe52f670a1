"""SQL over a store: one version of every table, pinned, shown as DuckDB views.

Only rows that count are in the views (schemas.py); the schema `raw` holds every row. The connection is read-only towards the world: it can
read the pinned files and nothing else of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from manifests.errors import UserError
from manifests.schemas import TABLES, TableSpec
from manifests.store import Store, first_line
from manifests.tables import open_table

_SQL_FOLDER = Path(__file__).parent / "sql"
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_COUNTS = {
    None: "",
    "job": " WHERE job IN (SELECT job FROM raw.jobs)",
    "checkpoint": " WHERE checkpoint IN (SELECT checkpoint FROM raw.checkpoints)",
}


def cache_root() -> Path:
    """Where immutable files of remote stores are kept on this machine: $ATOLL_CACHE, or ~/.cache/atoll."""
    return Path(os.environ.get("ATOLL_CACHE") or Path.home() / ".cache" / "atoll")


class Catalog:
    """A consistent view of a store's tables, queried by SQL."""

    def __init__(self, store: Store, *, versions: Mapping[str, int] | None = None) -> None:
        """Pins the tables, the given ones at their version, the others at their newest."""
        self.store = store
        self.versions: dict[str, int] = {}
        files: dict[str, list[str]] = {}
        # A parent commits after its children, so pin parents first: whatever they vouch for is there when the children are pinned.
        order = sorted(TABLES, key=lambda name: (name not in ("jobs", "checkpoints", "runs"), name))
        for name in order:
            table = open_table(store, name, version=(versions or {}).get(name))
            self.versions[name] = table.version()
            files[name] = self._local_files(name, pa.table(table.get_add_actions())["path"].to_pylist())
        self.connection = duckdb.connect(":memory:")
        self.connection.execute("CREATE SCHEMA raw")
        for name, spec in TABLES.items():
            self._create_raw(spec, files[name])
        for spec in TABLES.values():
            self.connection.execute(
                f"CREATE VIEW {spec.name} AS SELECT * FROM raw.{spec.name}{_COUNTS[spec.counts_with]}"
            )
        self._create_named_views()
        paths = sorted({p for names in files.values() for p in names})
        self.connection.execute("SET TimeZone = 'UTC'")
        self.connection.execute("SET allowed_paths = ?", [paths])
        self.connection.execute("SET enable_external_access = false")
        self.connection.execute("SET lock_configuration = true")

    def query(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> pa.Table:
        """Answers a query as an Arrow table.

        Raises:
            UserError: the SQL is more than one query, would change something, or DuckDB refuses it; its message is passed on.
        """
        try:
            statements = self.connection.extract_statements(sql)
            if len(statements) != 1:
                raise UserError(f"SQL: one query at a time, this is {len(statements)}; run them one by one")
            # A pinned file may be read, so COPY could also write it: only what reads is let through.
            if statements[0].type not in _READING:
                raise UserError(
                    f"SQL: {statements[0].type.name} is not a query; the store is read-only here, use SELECT"
                )
            return self.connection.sql(sql, params=parameters).to_arrow_table()
        except duckdb.Error as e:
            raise UserError(f"SQL: {first_line(e)}") from e

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Answers a query as a list of dicts."""
        return self.query(sql, parameters).to_pylist()

    def ask(self, name: str, **parameters: Any) -> pa.Table:
        """Answers a question whose SQL stands in `manifests/sql/<name>.sql`."""
        return self.query(question(name), parameters or None)

    def _create_raw(self, spec: TableSpec, files: list[str]) -> None:
        if files:
            listed = ", ".join("'" + path.replace("'", "''") + "'" for path in files)
            columns = ", ".join(f'"{c}"' for c in spec.schema.names)
            self.connection.execute(
                f"CREATE VIEW raw.{spec.name} AS SELECT {columns} FROM read_parquet([{listed}], union_by_name = true)"
            )
        else:
            self.connection.register("_empty", spec.schema.empty_table())
            self.connection.execute(f"CREATE TABLE raw.{spec.name} AS SELECT * FROM _empty")
            self.connection.unregister("_empty")

    def _create_named_views(self) -> None:
        for path in sorted((_SQL_FOLDER / "views").glob("*.sql")):
            self.connection.execute(path.read_text())

    def _local_files(self, table: str, paths: list[str]) -> list[str]:
        if self.store.is_local:
            return [str(self.store.root / "tables" / table / path) for path in paths]
        folder = cache_root() / "tables" / self.store.uri.replace("://", "/") / table
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda path: self._fetch(folder, table, path), paths))

    def _fetch(self, folder: Path, table: str, path: str) -> str:
        target = folder / path
        if not target.exists():
            write_whole(target, self.store.get(f"tables/{table}/{path}"))
        return str(target)


def question(name: str) -> str:
    """The SQL of a named question.

    Raises:
        UserError: there is none of this name.
    """
    path = _SQL_FOLDER / f"{name}.sql"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _SQL_FOLDER.glob("*.sql")))
        raise UserError(f"no question named {name!r}; there are: {known}")
    return path.read_text()


def write_whole(path: Path, data: bytes) -> None:
    """Writes a local file so that it appears whole or not at all, also beside another writer of the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
