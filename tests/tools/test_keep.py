"""The commands that keep the tables: what they print, and how they exit."""

from __future__ import annotations

import csv
import io
import os
from datetime import UTC, datetime, timedelta

import pytest

from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append, open_table
from tests.manifests.handmade import checkpoint, event, span
from tools.cli import _run


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with three events in two files, and consumption of which half counts."""
    append(store, "events", [event(), event()], writer="w", sequence=1)
    append(store, "events", [event()])
    append(store, "consumption", [span(1), span(2)])
    append(store, "checkpoints", [checkpoint(1)])
    return store


def _rows(
    command: list[str], store: Store, capfd: pytest.CaptureFixture[str], *, code: int = 0
) -> list[dict[str, str]]:
    assert _run(["tables", *command, "--store", store.uri, "--format", "csv"]) == code
    return list(csv.DictReader(io.StringIO(capfd.readouterr().out)))


def test_list_counts_what_counts(filled: Store, capfd: pytest.CaptureFixture[str]) -> None:
    rows = {row["table"]: row for row in _rows(["list"], filled, capfd)}
    assert list(rows) == list(TABLES)
    assert [rows["events"][column] for column in ("version", "rows", "files", "a row is")] == [
        "2", "3", "2", "one thing that happened",
    ]  # fmt: skip
    assert rows["consumption"]["rows"] == "1"
    assert int(rows["events"]["bytes"]) > 1000
    assert {row["table"]: row["rows"] for row in _rows(["list", "--at", "events=1"], filled, capfd)}["events"] == "2"
    earlier = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    assert _run(["tables", "list", "--at", earlier, "--store", filled.uri]) == 2


def test_schema_tells_what_each_column_means(capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(["tables", "schema", "consumption", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
    assert [row["name"] for row in rows] == TABLES["consumption"].schema.names
    (loss,) = [row for row in rows if row["name"] == "loss"]
    assert loss == {
        "name": "loss", "type": "float", "null": "true", "unit": "nats per token", "meaning": "mean loss of the span's tokens",
    }  # fmt: skip


def test_history_compact_and_vacuum(filled: Store, capfd: pytest.CaptureFixture[str]) -> None:
    assert [row["writer"] for row in _rows(["history", "events"], filled, capfd)] == ["", "w", ""]
    (done,) = _rows(["compact", "events", "runs", "--target-mb", "1"], filled, capfd)
    assert (done["table"], done["files_before"], done["files_after"]) == ("events", "2", "1")
    assert _rows(["compact"], filled, capfd) == []
    # Nothing is old enough.
    assert _rows(["vacuum", "--retention-hours", "0", "--yes"], filled, capfd) == []


def test_vacuum_lists_and_deletes_with_yes(filled: Store, capfd: pytest.CaptureFixture[str]) -> None:
    left = filled.root / "tables" / "events" / "left.parquet"
    left.write_bytes(b"from an append that died")
    two_hours_ago = datetime.now(UTC).timestamp() - 7200
    os.utime(left, (two_hours_ago, two_hours_ago))
    (row,) = _rows(["vacuum", "events", "--retention-hours", "1"], filled, capfd)
    assert (row["path"], row["size_bytes"]) == ("tables/events/left.parquet", "24")
    assert left.exists()
    assert _run(["tables", "vacuum", "events", "--retention-hours", "1", "--yes", "--store", filled.uri]) == 0
    assert "1 files of 24 bytes deleted" in capfd.readouterr().err
    assert not left.exists()


def test_check_fails_with_what_it_found(filled: Store, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(["tables", "check", "events", "--store", filled.uri]) == 0
    assert "1 tables, 2 files, 3 rows: nothing is wrong" in capfd.readouterr().err
    path = open_table(filled, "events").file_uris()[0]
    with open(path, "ab") as file:
        file.write(b"more")
    (finding,) = _rows(["check", "events"], filled, capfd, code=1)
    assert finding["table"] == "events"
    assert path.endswith(finding["path"])
    assert "bytes, the log says" in finding["finding"]
    assert [row["table"] for row in _rows(["check"], filled, capfd, code=1)] == ["events", "consumption_rounds"]


@pytest.mark.parametrize("command", ["schema", "history", "compact", "vacuum", "check"])
def test_an_unknown_table_is_refused_with_those_that_there_are(
    command: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if command == "schema" else ["--store", store.uri]
    assert _run(["tables", command, "evnts", *where]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: no table named 'evnts'; there are jobs, sources, ")
    assert len(shown.strip().splitlines()) == 1
