"""The ground of Atoll: the store, the table schemas, the tables, the SQL over them, the shard format. Imports nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

    from manifests.cut import At


def connect(store_uri: str, at: At | str | None = None) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with all views of a store, for a notebook or a script of your own.

    It can read the store's files of this moment and no other file of the machine, and reaches no network: external access is off, and the
    configuration is locked. Views and tables that you make in it are in memory and gone with it. But it is yours: unlike `atoll sql`, it doesn't
    keep you from writing over a data file of the store by `COPY … TO` that file's own path.

    Args:
        store_uri: a folder, or an address such as s3://bucket/prefix.
        at: a time, a checkpoint's id, versions of tables, or the text of one as `--at` takes it; None: now.

    Raises:
        UserError: there is no store, or it has nothing at this point.
        Failure: a table is damaged, or a file can't be fetched.
    """
    # Here and not above: importing the package is to stay cheap.
    from manifests.catalog import Catalog
    from manifests.cut import parse_at
    from manifests.tables import open_store

    catalog = Catalog(open_store(store_uri), at=parse_at(at) if isinstance(at, str) else at)
    catalog.prepare()
    return catalog.connection
