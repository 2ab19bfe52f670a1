"""A DuckDB file that shows a store: all views of a catalog, over the same files, for any DuckDB client. It holds no rows of the tables itself."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import first_line

VERSIONS = "atoll_versions"


def write_database(catalog: Catalog, path: Path) -> pa.Table:
    """Writes the file whole, in the place of an earlier one of its kind.

    Args:
        catalog: the views, at their versions.
        path: the file.

    Returns:
        The file's table `atoll_versions`: store, table, version and written_at.

    Raises:
        UserError: something else lies there, or the folder can't be written.
        Failure: a table's file can't be fetched.
    """
    if path.exists():
        _require_ours(path)
    now = datetime.now(UTC)
    versions = pa.table(
        {
            "store": [catalog.store.uri] * len(catalog.versions),
            "table": sorted(catalog.versions),
            "version": [catalog.versions[name] for name in sorted(catalog.versions)],
            "written_at": pa.array([now] * len(catalog.versions), pa.timestamp("us", tz="UTC")),
        }
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with duckdb.connect(str(partial)) as connection:
            for statement in catalog.definitions():
                connection.execute(statement)
            connection.register("versions", versions)
            connection.execute(f"CREATE TABLE {VERSIONS} AS SELECT * FROM versions")
        os.replace(partial, path)
    except (duckdb.IOException, OSError) as e:
        raise UserError(f"{path} can't be written: {first_line(e)}; name a file in a folder that can") from e
    finally:
        for left in (partial, partial.with_name(f"{partial.name}.wal")):
            left.unlink(missing_ok=True)
    return versions


def _require_ours(path: Path) -> None:
    try:
        with duckdb.connect(str(path), read_only=True) as connection:
            found = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [VERSIONS]).fetchall()
    except (duckdb.Error, OSError):
        found = []
    if not found:
        raise UserError(f"{path} exists and wasn't written by `atoll db`; move it away, or name another file")
