"""Tables: atomic, idempotent appends beside other writers, and views that hide half-done work."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import make_job
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append, create_store, open_table, read


def _event(**more: Any) -> dict[str, Any]:
    return {"run": "r", "kind": "test", "detail": "{}"} | more


def test_every_table_of_the_schema_exists_in_a_new_store(store: Store) -> None:
    for name, spec in TABLES.items():
        assert read(store, name).schema.names == spec.schema.names


def test_append_with_the_same_sequence_number_is_done_once(store: Store) -> None:
    assert append(store, "events", [_event()], writer="w", sequence=1)
    assert not append(store, "events", [_event()], writer="w", sequence=1)
    assert append(store, "events", [_event()], writer="w", sequence=2)
    assert append(store, "events", [_event()], writer="other", sequence=1)
    assert read(store, "events").num_rows == 3


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_processes_append_at_once_without_losing_rows(where: str, request: pytest.FixtureRequest) -> None:
    uri = request.getfixturevalue("store").uri if where == "folder" else request.getfixturevalue("s3_environment")
    create_store(uri)
    code = (
        "import sys; from manifests.store import Store; from manifests.tables import append; s = Store(sys.argv[1])\n"
        "for i in range(5): append(s, 'events', [{'run': sys.argv[2], 'kind': 'x', 'detail': str(i)}] * 10, writer=sys.argv[2], sequence=i + 1)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, uri, str(n)]) for n in range(3)]
    assert [w.wait() for w in writers] == [0, 0, 0]
    counts = Catalog(Store(uri)).rows("SELECT run, count(*) AS n, count(DISTINCT detail) AS d FROM events GROUP BY run")
    assert sorted((c["run"], c["n"], c["d"]) for c in counts) == [(str(n), 50, 5) for n in range(3)]


def test_rows_of_a_job_count_when_the_job_is_committed(store: Store) -> None:
    job = make_job(store, "tier", config={}, inputs={})
    job.append(
        "tier_versions",
        [{"tier_version": 1, "method": "m", "parameters": "{}", "thresholds": "{}", "job": job.id}],
        part=1,
    )
    assert job.has_part("tier_versions", 1)
    assert not job.has_part("tier_versions", 2)
    assert Catalog(store).rows("SELECT * FROM tier_versions") == []
    assert len(Catalog(store).rows("SELECT * FROM raw.tier_versions")) == 1
    assert job.summary() is None
    job.commit({"ok": 1})
    assert job.summary() == {"ok": 1}
    assert len(Catalog(store).rows("SELECT * FROM tier_versions")) == 1


def test_a_catalog_keeps_the_versions_that_it_was_opened_at(store: Store) -> None:
    append(store, "events", [_event()])
    catalog = Catalog(store)
    version = open_table(store, "events").version()
    append(store, "events", [_event()])
    assert len(catalog.rows("SELECT * FROM events")) == 1
    assert len(Catalog(store).rows("SELECT * FROM events")) == 2
    assert len(Catalog(store, at={"events": version}).rows("SELECT * FROM events")) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "COPY (SELECT 1) TO '/tmp/atoll-hostile.csv'",
        "COPY (SELECT 1) TO '{table_file}'",
        "ATTACH '/tmp/atoll-hostile.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "DROP VIEW events",
        "INSERT INTO events SELECT * FROM events",
        "CREATE TABLE t AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT nothing FROM events",
        "not even SQL",
        "",
    ],
)
def test_sql_can_only_read_the_pinned_tables(store: Store, statement: str) -> None:
    append(store, "events", [_event()])
    file = next(info.path for info in store.list("tables/events") if info.path.endswith(".parquet"))
    before = store.get(file)
    with pytest.raises(UserError):
        Catalog(store).query(statement.replace("{table_file}", str(store.root / file)))
    assert store.get(file) == before


def test_catalog_of_a_remote_store_reads_from_its_cache(s3_environment: str) -> None:
    store = create_store(s3_environment)
    append(store, "events", [_event()] * 3)
    assert Catalog(store).rows("SELECT count(*) AS n FROM events") == [{"n": 3}]
    assert Catalog(store).rows("SELECT count(*) AS n FROM events") == [{"n": 3}]
