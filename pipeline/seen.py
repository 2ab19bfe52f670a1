"""The ids that an ingest has seen: a set on disk, so that memory doesn't grow with the corpus."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from types import TracebackType

from manifests.errors import Failure

_CACHE_KIB = 32 << 10


class SeenIds:
    """A set of ids in SQLite's own temporary database, of which a part is kept in memory. It's gone with the process, however that ends."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")

    def __enter__(self) -> SeenIds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def add(self, ids: Sequence[bytes]) -> list[bool]:
        """Adds ids; says of each whether it is new: neither seen before, nor earlier among these.

        Raises:
            Failure: the disk of temporary files is full.
        """
        new = [False] * len(ids)
        insert = self._database.cursor().execute
        try:
            insert("BEGIN")
            # Sorted, so that each page of the tree is touched once; the sort is stable, so the first of equal ids stays the first.
            for place in sorted(range(len(ids)), key=ids.__getitem__):
                new[place] = insert("INSERT OR IGNORE INTO seen VALUES (?)", (ids[place],)).rowcount > 0
            insert("COMMIT")
        except sqlite3.OperationalError as e:
            raise Failure(
                f"the ids of documents fill the disk of temporary files ({e}); name a larger one by TMPDIR"
            ) from e
        return new
