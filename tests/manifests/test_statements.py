"""No statement writes to the store, reads another file of the machine, or loads an extension: by a catalog, by `atoll sql`, by `connect`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest

import manifests
from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import append
from tests.manifests.hostile import CONFIGURE, IN_MEMORY, LOAD, READ_FILES, WRITE_ELSEWHERE, WRITE_OVER
from tools.cli import _run


@dataclass(frozen=True)
class Place:
    """A store with something to lose."""

    store: Store
    file: Path
    secret: Path
    new: Path

    def fill(self, statement: str) -> str:
        return statement.format(file=self.file, secret=self.secret, new=self.new)


@pytest.fixture(scope="module")
def place(new_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("hostile")
    store = Store(str(shutil.copytree(new_store, folder / "store")))
    append(store, "events", [{"run": "r", "kind": "test", "detail": "{}"}])
    file = next(info.path for info in store.list("tables/events") if info.path.endswith(".parquet"))
    secret = folder / "secret.csv"
    secret.write_text("word\nhush\n")
    return Place(store=store, file=store.root / file, secret=secret, new=folder / "new.csv")


@pytest.fixture(autouse=True)
def unharmed(place: Place) -> Iterator[None]:
    before = place.file.read_bytes()
    yield
    assert place.file.read_bytes() == before
    assert not place.new.exists()


@pytest.fixture(scope="module")
def catalog(place: Place) -> Catalog:
    return Catalog(place.store)


@pytest.mark.parametrize("statement", READ_FILES + LOAD + CONFIGURE + WRITE_ELSEWHERE + WRITE_OVER + IN_MEMORY)
def test_hostile_statement_is_refused(place: Place, catalog: Catalog, statement: str) -> None:
    with pytest.raises(UserError):
        catalog.query(place.fill(statement))


def test_hostile_statements_are_refused_on_the_command_line(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    for statement in (READ_FILES + LOAD + CONFIGURE + WRITE_ELSEWHERE)[::4] + WRITE_OVER + IN_MEMORY[::3]:
        assert _run(["sql", place.fill(statement), "--store", place.store.uri]) == 2, statement
        shown = capfd.readouterr()
        # Several statements: those before the refused one are answered.
        assert "hush" not in shown.out
        assert len(shown.err.strip().splitlines()) == 1


@pytest.mark.parametrize("statement", READ_FILES + LOAD + CONFIGURE + WRITE_ELSEWHERE)
def test_connection_reaches_nothing_but_the_stores_files(place: Place, statement: str) -> None:
    with manifests.connect(place.store.uri) as connection, pytest.raises(duckdb.Error):
        connection.execute(place.fill(statement)).fetchall()


def test_connection_shows_all_views_at_a_point(place: Place) -> None:
    with manifests.connect(place.store.uri) as connection:
        assert connection.sql("SELECT run FROM events").fetchall() == [("r",)]
        assert connection.sql("FROM ancestors('\\x00'::BLOB)").fetchall() == []
        # It is the user's own: what is made in it is in memory.
        connection.execute("CREATE TABLE mine AS SELECT * FROM events")
    with manifests.connect(place.store.uri, at="events=0") as connection:
        assert connection.sql("SELECT run FROM events").fetchall() == []
    with pytest.raises(UserError, match="atoll ingest"):
        manifests.connect(str(place.new))


@pytest.mark.parametrize(
    "statement",
    [
        "explain select 1",
        "/* ; */ explain -- copy\n analyze select 1 as explained",
        "EXPLAIN (FORMAT json) SELECT * FROM events",
        "EXPLAIN ANALYZE WITH t AS (SELECT 1) SELECT * FROM t",
        "EXPLAIN (SELECT 1)",
        "WITH RECURSIVE t (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 3) FROM t",
        "SELECT 'COPY x TO y' AS text, 1 AS copy",
        "SHOW TABLES",
        "DESCRIBE events",
        "SUMMARIZE events",
        "FROM events",
        "VALUES (1)",
        "SELECT 1 EXCEPT SELECT 2;",
    ],
)
def test_what_reads_is_answered(catalog: Catalog, statement: str) -> None:
    assert catalog.query(statement).num_rows > 0
