"""Time travel: what `--at` takes, what it shows, and that a cut never shows a parent without its children."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.consumption import append_consumption
from manifests.cut import At, parse_at, version_at
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import append, open_table, to_table
from tests.manifests.handmade import START, checkpoint, checkpoint_id, date_commit, date_creation, event, span

ROOT = Path(__file__).parents[2]
SECOND = timedelta(seconds=1)
OF_TRAINING = ("consumption", "consumption_rounds", "checkpoints")


def _kinds(store: Store, at: At | None = None) -> list[str]:
    return [
        row["kind"] for row in Catalog(store, at=at, tables=["events"]).rows("SELECT kind FROM events ORDER BY kind")
    ]


def _segment(store: Store, number: int, moment: datetime) -> None:
    """A segment's consumption, committed at a moment by the clock of its writer; its checkpoint comes separately."""
    spans = to_table("consumption", [span(number)])
    append_consumption(store, spans, writer=f"consumption/{number}", sequence=1)
    date_commit(store, "consumption", moment)
    date_commit(store, "consumption_rounds", moment)


def _close(store: Store, number: int, moment: datetime) -> None:
    append(store, "checkpoints", [checkpoint(number, written_at=moment)], writer=f"checkpoint/{number}", sequence=1)
    date_commit(store, "checkpoints", moment)


@pytest.fixture
def dated(store: Store) -> Store:
    """A store whose events a, b and c were committed one, two and three seconds after its start."""
    date_creation(store, START)
    for number, kind in enumerate("abc", start=1):
        append(store, "events", [event(kind=kind)])
        date_commit(store, "events", START + number * SECOND)
    return store


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-01-31T12:00", START),
        ("2026-01-31 12:00:00.5", START + timedelta(seconds=0.5)),
        ("2026-01-31T13:00+01:00", START),
        ("2026-01-31T12:00Z", START),
        ("2026-01-31", START.replace(hour=0)),
        ("00" * 15 + "0a", checkpoint_id(10)),
        ("events=3", {"events": 3}),
        (" events = 3 , jobs=0", {"events": 3, "jobs": 0}),
    ],
)
def test_at_is_a_time_a_checkpoint_or_versions(text: str, at: At) -> None:
    assert parse_at(text) == at


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "events=", "events=x", "events=-1", "events=²", "evnts=3", "events=1;jobs=2", "zz" * 16, "0a"],
)
def test_what_at_cannot_be_is_refused_with_what_it_can_be(text: str) -> None:
    with pytest.raises(UserError, match="give a time such as 2026-01-31T12:00:00, a checkpoint's id"):
        parse_at(text)


def test_a_time_shows_what_was_committed_up_to_it(dated: Store) -> None:
    assert [_kinds(dated, START + number * SECOND) for number in range(4)] == [[], ["a"], ["a", "b"], ["a", "b", "c"]]
    assert _kinds(dated, START + 2.5 * SECOND) == ["a", "b"]
    assert _kinds(dated, START.replace(year=2099)) == ["a", "b", "c"]


def test_versions_show_the_tables_that_they_name_as_they_were_and_others_as_they_are(dated: Store) -> None:
    append(dated, "runs", [{"run": "r", "config": "{}", "command": "c", "code_version": "v"}])
    catalog = Catalog(dated, at={"events": 1})
    assert catalog.rows("SELECT kind, (SELECT count(*) FROM runs) AS runs FROM events") == [{"kind": "a", "runs": 1}]


def test_a_checkpoint_shows_what_was_there_when_it_was_committed(dated: Store) -> None:
    for number in (1, 2):
        _segment(dated, number, START + (number - 0.25) * SECOND)
        _close(dated, number, START + number * SECOND)
    assert _kinds(dated, checkpoint_id(2)) == ["a", "b"]
    seen = Catalog(dated, at=checkpoint_id(1), tables=OF_TRAINING).rows("SELECT checkpoint FROM raw.consumption")
    assert seen == [{"checkpoint": checkpoint_id(1)}]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (START - SECOND, "didn't exist yet at 2026-01-31T11:59:59.*atoll tables history"),
        ({"events": 99}, "table events .* has no version 99.*atoll tables history"),
        ({"events": 10**30}, "table events .* has no version 10{30}.*atoll tables history"),
        ({"nothing": 1}, "no table named 'nothing'; there are checkpoints"),
        (checkpoint_id(9), "no checkpoint 00000000000000000000000000000009.*atoll sql"),
    ],
    ids=["before the store", "unknown version", "absurd version", "unknown table", "unknown checkpoint"],
)
def test_a_point_that_never_was_is_refused_in_one_line(dated: Store, at: At, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Catalog(dated, at=at)
    assert "\n" not in str(caught.value)


def test_time_travel_survives_a_copy_of_the_store(dated: Store, tmp_path: Path) -> None:
    shutil.copytree(dated.root, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*"):
        os.utime(path, (time.time(), time.time()))
    copy = Store(str(tmp_path / "copy"))
    assert _kinds(copy, START + SECOND) == ["a"]
    assert _kinds(copy, {"events": 2}) == ["a", "b"]


def test_a_table_that_came_after_the_store_was_made_is_empty_before_that(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(store.root / "tables" / "policies")
    marker = store.root / "atoll.json"
    marker.write_text(marker.read_text().replace('"policies", ', ""))
    before = datetime.now(UTC)
    append(store, "policies", [{"policy": "p", "text": "t", "reason": "r"}])
    assert Catalog(store, at=before).rows("SELECT * FROM policies") == []
    assert len(Catalog(store).rows("SELECT * FROM policies")) == 1


def test_a_cut_holds_the_children_of_its_parents_though_clocks_disagree(store: Store) -> None:
    """Segment 1 is written by a machine whose clock is ten seconds ahead, segment 2 by one whose clock is right; in true order:

    consumption 2, consumption 1, checkpoint 1, checkpoint 2. A cut between their clocks must not show checkpoint 1 without its consumption.
    """
    date_creation(store, START)
    _segment(store, 2, START + 1 * SECOND)
    _segment(store, 1, START + 12 * SECOND)
    _close(store, 1, START + 13 * SECOND)
    _close(store, 2, START + 4 * SECOND)
    for at in [*(START + number * SECOND for number in range(15)), checkpoint_id(1), checkpoint_id(2)]:
        assert _unaccounted(Catalog(store, at=at, tables=OF_TRAINING), spans=1) == []
    for number in (1, 2):
        catalog = Catalog(store, at=checkpoint_id(number), tables=OF_TRAINING)
        assert {"checkpoint": checkpoint_id(number)} in catalog.rows("SELECT checkpoint FROM checkpoints")


def test_parents_are_cut_at_the_first_commit_from_the_future_children_at_the_last_from_the_past() -> None:
    times = [START + second * SECOND for second in (0, 2, 5, 3, 9)]
    assert [version_at("checkpoints", times, START + second * SECOND) for second in (-1, 2, 4, 5, 9)] == [
        None,
        1,
        1,
        3,
        4,
    ]
    assert [version_at("consumption", times, START + second * SECOND) for second in (-1, 2, 4, 5, 9)] == [
        None,
        1,
        3,
        3,
        4,
    ]


WRITER = """
import sys
from manifests.consumption import append_consumption
from manifests.store import Store
from manifests.tables import append, to_table
from tests.manifests.handmade import checkpoint, span

store, island = Store(sys.argv[1]), int(sys.argv[2])
for round_ in range(1, 13):
    number = island * 1000 + round_
    spans = to_table("consumption", [span(number, island=island, shard=shard) for shard in "aabc"])
    append_consumption(store, spans, writer=f"c/{island}", sequence=round_)
    append(store, "checkpoints", [checkpoint(number, island=island)], writer=f"k/{island}", sequence=round_)
"""


def test_no_catalog_ever_shows_a_checkpoint_without_its_consumption(store: Store) -> None:
    created = datetime.now(UTC)
    code = [sys.executable, "-c", WRITER, store.uri]
    writers = [subprocess.Popen([*code, str(island)], cwd=ROOT) for island in range(3)]
    chance = random.Random(0)
    seen = 0
    while any(writer.poll() is None for writer in writers):
        age = datetime.now(UTC) - created
        for at in (None, created + chance.random() * age):
            catalog = Catalog(store, at=at, tables=OF_TRAINING)
            assert _unaccounted(catalog, spans=4) == []
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    times = [created + chance.random() * (datetime.now(UTC) - created) for _ in range(10)]
    for at in times:
        assert _unaccounted(Catalog(store, at=at, tables=OF_TRAINING), spans=4) == []
    assert seen > 5
    assert open_table(store, "checkpoints").version() == 36


def _unaccounted(catalog: Catalog, *, spans: int) -> list[dict[str, Any]]:
    """Checkpoints in a catalog that lack some of their spans, or of their sums."""
    return catalog.rows(
        """
        SELECT checkpoint
        FROM checkpoints AS k
        LEFT JOIN (SELECT checkpoint, count(*) AS n FROM consumption GROUP BY ALL) AS c USING (checkpoint)
        LEFT JOIN (SELECT checkpoint, sum(spans) AS n FROM consumption_rounds GROUP BY ALL) AS r USING (checkpoint)
        WHERE c.n IS DISTINCT FROM $spans OR r.n IS DISTINCT FROM $spans
        """,
        {"spans": spans},
    )
