"""Schema versions: a newer Atoll reads and extends what an older one made; an older one refuses what a newer one has changed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake.schema import Schema as DeltaSchema

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.schemas import SCHEMA_VERSION, TABLES, TableSpec
from manifests.store import MARKER, Store
from manifests.tables import append, open_store, open_table, read
from manifests.upkeep import compact
from tests.manifests.handmade import event
from tools.cli import _run

ROOT = Path(__file__).parents[2]
KINDS = "SELECT kind, severity FROM events ORDER BY kind"


def newer_events() -> TableSpec:
    """The table `events` of a later Atoll, with one more column."""
    now = TABLES["events"]
    severity = pa.field("severity", pa.int32(), metadata={"meaning": "how bad it was"})
    return dataclasses.replace(now, schema=now.schema.append(severity), version=now.version + 1)


@pytest.fixture
def old(store: Store) -> Store:
    """A store of today's Atoll with an event `a`."""
    append(store, "events", [event(kind="a")])
    return store


@pytest.fixture
def later(old: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The same store, in the hands of a later Atoll."""
    monkeypatch.setitem(TABLES, "events", newer_events())
    return old


def test_a_store_of_a_newer_schema_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.root / MARKER).write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(UserError, match=f"is of schema {SCHEMA_VERSION + 1}, this Atoll reads up to .*; update Atoll"):
        open_store(store.uri)
    assert _run(["sql", "select 1", "--store", store.uri]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_table_of_a_newer_schema_is_refused(old: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(TABLES, "events", newer_events())
        append(old, "events", [event(kind="b", severity=3)])
    for attempt in (
        lambda: Catalog(old),
        lambda: append(old, "events", [event()]),
        lambda: read(old, "events"),
        lambda: compact(old, ["events"]),
    ):
        with pytest.raises(UserError, match=r"table events .* is of schema 2, this Atoll reads up to 1; update Atoll"):
            attempt()
    assert Catalog(old, tables=["runs"]).rows("SELECT * FROM runs") == []


def test_a_table_of_an_older_schema_reads_as_null_where_columns_came_later(later: Store) -> None:
    assert Catalog(later).rows(KINDS) == [{"kind": "a", "severity": None}]
    assert read(later, "events").schema.names == TABLES["events"].schema.names
    assert read(later, "events", columns=["severity", "kind"]).to_pylist() == [{"severity": None, "kind": "a"}]


def test_an_append_adds_the_columns_that_came_later(later: Store) -> None:
    append(later, "events", [event(kind="b", severity=3)])
    both = [{"kind": "a", "severity": None}, {"kind": "b", "severity": 3}]
    assert Catalog(later).rows(KINDS) == both
    assert read(later, "events", columns=["kind", "severity"]).sort_by("kind").to_pylist() == both
    append(later, "events", [event(kind="c")])
    assert Catalog(later).rows(KINDS) == [*both, {"kind": "c", "severity": None}]
    assert Catalog(later, at={"events": 1}).rows(KINDS) == both[:1]


def test_a_cut_between_the_change_of_the_schema_and_the_first_new_file_can_be_read(later: Store) -> None:
    before = open_table(later, "events").version()
    append(later, "events", [event(kind="b", severity=3)])
    for version in range(before, open_table(later, "events").version()):
        assert Catalog(later, at={"events": version}).rows(KINDS) == [{"kind": "a", "severity": None}]


def test_compaction_merges_files_of_both_schemas(later: Store) -> None:
    append(later, "events", [event(kind="b", severity=3)])
    assert [item.files_after for item in compact(later, ["events"])] == [1]
    assert Catalog(later).rows(KINDS) == [{"kind": "a", "severity": None}, {"kind": "b", "severity": 3}]


def test_an_append_ends_the_change_of_the_schema_that_another_died_in(later: Store) -> None:
    field = DeltaSchema.from_arrow(pa.schema([TABLES["events"].schema.field("severity")])).fields[0]
    open_table(later, "events").alter.add_columns([field])
    append(later, "events", [event(kind="b", severity=3)])
    assert Catalog(later).rows(KINDS) == [{"kind": "a", "severity": None}, {"kind": "b", "severity": 3}]
    assert open_table(later, "events").metadata().configuration["atoll.schema_version"] == "2"


APPENDER = """
import sys
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append
from tests.manifests.handmade import event
from tests.manifests.test_schema_versions import newer_events

store, name, age = Store(sys.argv[1]), sys.argv[2], sys.argv[3]
if age == "later":
    TABLES["events"] = newer_events()
sys.stdin.readline()
for number in range(5):
    append(store, "events", [event(run=name, kind=str(number))], writer=name, sequence=number + 1)
"""


def test_processes_change_the_schema_at_once_without_losing_rows(later: Store) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDER, later.uri, f"{age}{number}", age],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for age, number in [("later", 0), ("later", 1), ("old", 0)]
    ]  # fmt: skip
    errors = [process.communicate("go\n")[1] for process in processes]
    rows = Catalog(later).rows("SELECT run, count(*) AS n FROM events WHERE run <> 'r' GROUP BY run ORDER BY run")
    assert [row for row in rows if row["run"] != "old0"] == [{"run": "later0", "n": 5}, {"run": "later1", "n": 5}]
    assert errors[:2] == ["", ""]
    # The old one goes on until the change, and then is refused.
    assert processes[2].returncode == 0 or "update Atoll" in errors[2].splitlines()[-1]
    assert [field.name for field in open_table(later, "events").schema().fields].count("severity") == 1
