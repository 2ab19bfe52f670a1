"""Compaction moves rows and loses none; vacuum takes only what nobody can want to look back to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from manifests import compaction
from manifests.catalog import Catalog
from manifests.cut import At
from manifests.errors import Failure, UserError
from manifests.log import history, live_files, read_log
from manifests.store import Store
from manifests.tables import append, create_store, open_table, read
from manifests.upkeep import compact, vacuum
from tests.manifests.handmade import Story, checkpoint, checkpoint_id, date_commit, event, job, mixture, run, span

ROOT = Path(__file__).parents[2]
LATER = datetime.now(UTC) + timedelta(days=30)
"""Past every retention."""


def _kinds(store: Store, at: At | None = None) -> list[str]:
    return [
        row["kind"] for row in Catalog(store, at=at, tables=["events"]).rows("SELECT kind FROM events ORDER BY kind")
    ]


def _files(store: Store, name: str) -> set[str]:
    return {info.path for info in store.list(f"tables/{name}") if info.path.endswith(".parquet")} - {
        info.path for info in store.list(f"tables/{name}/_delta_log")
    }


def _live(store: Store, name: str) -> set[str]:
    return {f"tables/{name}/{path}" for path in live_files(read_log(store, name))}


# Compaction


def test_compaction_merges_files_within_their_partition_and_keeps_rows_in_order(store: Store) -> None:
    for number in range(5):
        rows = [span(number, run=name, step=number * 10 + step) for name in ("a b/c", "d") for step in range(10)]
        append(store, "consumption", rows)
    before = read(store, "consumption").sort_by([("run", "ascending"), ("step", "ascending")])
    (done,) = compact(store, ["consumption"])
    assert (done.files_before, done.files_after) == (10, 2)
    assert done.bytes_after < done.bytes_before
    after = read(store, "consumption")
    assert after.sort_by([("run", "ascending"), ("step", "ascending")]).equals(before)
    for path in _live(store, "consumption"):
        parquet = pq.ParquetFile(store.root / path)
        assert parquet.read()["step"].to_pylist() == list(range(50))
        assert parquet.num_row_groups == 1
        group = parquet.metadata.row_group(0)
        encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
        assert "DELTA_BINARY_PACKED" in encodings["step"]
        assert "BYTE_STREAM_SPLIT" in encodings["loss"]
        assert group.column(0).compression == "ZSTD"
    assert Catalog(store).rows("SELECT run, count(*) AS n FROM raw.consumption GROUP BY run ORDER BY run") == [
        {"run": "a b/c", "n": 50}, {"run": "d", "n": 50},
    ]  # fmt: skip


def test_compaction_leaves_tables_alone_that_gain_nothing(store: Store) -> None:
    append(store, "events", [event()])
    told = []
    done = compact(store, ["events", "runs"], report=lambda *progress: told.append(progress))
    assert [(item.table, item.files_before, item.files_after) for item in done] == [("events", 1, 1), ("runs", 0, 0)]
    assert told == [("tables compacted", 1, 2), ("tables compacted", 2, 2)]
    append(store, "events", [event()])
    compact(store, ["events"])
    version = open_table(store, "events").version()
    compact(store, ["events"])
    assert open_table(store, "events").version() == version == 3


def test_compaction_makes_files_of_about_the_target_size(store: Store) -> None:
    for number in range(8):
        rows = [event(detail=os.urandom(500).hex()) for _ in range(100)]
        append(store, "events", rows, writer="w", sequence=number + 1)
    compact(store, ["events"], target_bytes=250_000)
    assert 2 <= len(_live(store, "events")) <= 4
    with pytest.raises(UserError, match="target size of 0 bytes: give a positive one"):
        compact(store, ["events"], target_bytes=0)


def test_sequence_numbers_survive_compaction_and_the_checkpoint_of_the_log(store: Store) -> None:
    for number in range(3):
        append(store, "events", [event()], writer="w", sequence=number + 1)
    compact(store, ["events"])
    assert list((store.root / "tables/events/_delta_log").glob("*4.checkpoint.parquet"))
    assert not append(store, "events", [event()], writer="w", sequence=3)
    assert append(store, "events", [event()], writer="w", sequence=4)
    assert read(store, "events").num_rows == 4


def test_older_versions_can_be_read_after_compaction(store: Store) -> None:
    story = Story(store)
    first = story.add("events", event(kind="a"))
    story.add("events", event(kind="b"))
    story.compact("events")
    story.add("events", event(kind="c"))
    assert _kinds(store, first) == _kinds(store, {"events": 1}) == ["a"]
    assert _kinds(store) == ["a", "b", "c"]


APPENDER = """
import sys
from manifests.store import Store
from manifests.tables import append
from tests.manifests.handmade import event
store, name = Store(sys.argv[1]), sys.argv[2]
for number in range(12):
    append(store, "events", [event(run=name, kind=str(number))] * 10, writer=name, sequence=number + 1)
"""
COMPACTER = """
import sys
from manifests.store import Store
from manifests.upkeep import compact
for _ in range(4):
    compact(Store(sys.argv[1]), ["events"])
"""


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_compaction_beside_appends_and_another_compaction_loses_and_doubles_no_row(
    where: str, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue("store").uri if where == "folder" else request.getfixturevalue("s3_environment")
    store = create_store(uri)
    # Something to compact from the first moment, whoever comes first.
    for number in (1, 2):
        append(store, "events", [event(run="before", kind=str(number))], writer="before", sequence=number)
    codes = [(APPENDER, "a"), (APPENDER, "b"), (COMPACTER, ""), (COMPACTER, "")]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, uri, name], cwd=ROOT, stderr=subprocess.PIPE)
        for code, name in codes
    ]
    assert [process.communicate()[1] for process in processes] == [b""] * 4
    counts = Catalog(store).rows("SELECT run, kind, count(*) AS n FROM events WHERE run <> 'before' GROUP BY ALL")
    assert {(c["run"], c["kind"]): c["n"] for c in counts} == {(r, str(k)): 10 for r in "ab" for k in range(12)}
    assert "OPTIMIZE" in history(store, "events")["operation"].to_pylist()


def test_a_compaction_that_another_one_overtook_throws_its_work_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in "abc":
        append(store, "events", [event(kind=kind)])
    merge = compaction._merge

    def merge_slowly(*arguments: Any) -> Any:
        monkeypatch.setattr(compaction, "_merge", merge)
        merged = merge(*arguments)
        append(store, "events", [event(kind="d")])
        compact(store, ["events"])
        return merged

    monkeypatch.setattr(compaction, "_merge", merge_slowly)
    assert [item.files_after for item in compact(store, ["events"])] == [1]
    assert _kinds(store) == ["a", "b", "c", "d"]
    assert history(store, "events")["operation"].to_pylist().count("OPTIMIZE") == 1
    assert len(_files(store, "events")) == 6


def test_a_compaction_goes_on_beside_an_append(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in "ab":
        append(store, "events", [event(kind=kind)])
    merge = compaction._merge

    def merge_slowly(*arguments: Any) -> Any:
        append(store, "events", [event(kind="c")])
        return merge(*arguments)

    monkeypatch.setattr(compaction, "_merge", merge_slowly)
    compact(store, ["events"])
    assert _kinds(store) == ["a", "b", "c"]
    assert len(_live(store, "events")) == 2


def test_statistics_of_a_merged_file_cover_those_of_its_parts() -> None:
    parts = [
        {"numRecords": 2, "minValues": {"n": 3, "s": "b"}, "maxValues": {"n": 5, "s": "c"}, "nullCount": {"n": 0, "s": 1}},
        {"numRecords": 1, "minValues": {"n": 4}, "maxValues": {"n": 9}, "nullCount": {"n": 0, "s": 1, "late": 0}},
    ]  # fmt: skip
    assert compaction.merge_statistics(parts) == {
        "numRecords": 3, "minValues": {"n": 3}, "maxValues": {"n": 9}, "nullCount": {"n": 0, "s": 2},
    }  # fmt: skip
    assert "numRecords" not in compaction.merge_statistics([*parts, {}])


# Vacuum


@pytest.fixture
def story(store: Store) -> Story:
    """Event a, then whatever a test adds."""
    story = Story(store)
    story.add("events", event(kind="a"))
    return story


def _go_on(story: Story) -> None:
    """Event b, and a compaction that leaves the files of a and b to those who look back."""
    story.add("events", event(kind="b"))
    story.compact("events")


def test_a_vacuum_lists_what_it_would_delete_and_then_deletes_it(story: Story) -> None:
    _go_on(story)
    old = _files(story.store, "events") - _live(story.store, "events")
    assert len(old) == 2
    listed = vacuum(story.store, now=LATER)
    assert {file.path for file in listed} == old
    assert all(file.size_bytes > 0 and file.table == "events" for file in listed)
    assert _files(story.store, "events") >= old
    told: list[tuple[str, int, int | None]] = []
    assert vacuum(story.store, ["events"], now=LATER, dry_run=False, report=lambda *p: told.append(p)) == listed
    assert told == [("tables looked through", 1, 1), ("files deleted", 1, 2), ("files deleted", 2, 2)]
    assert _files(story.store, "events") == _live(story.store, "events")
    assert _kinds(story.store) == ["a", "b"]
    assert vacuum(story.store, now=LATER) == []


def test_versions_of_the_retention_stay_readable(story: Story) -> None:
    _go_on(story)
    # The compaction was two hours after b: whoever looked in between may read on.
    assert vacuum(story.store, now=story.now + timedelta(hours=3), retention_hours=4, dry_run=False) == []
    assert _kinds(story.store, {"events": 2}) == ["a", "b"]
    assert len(vacuum(story.store, now=story.now + timedelta(hours=5), retention_hours=4, dry_run=False)) == 2
    for hours in (-1, 1e9, float("nan")):
        with pytest.raises(UserError, match=f"retention of {hours} hours: give 0 to 876,000"):
            vacuum(story.store, retention_hours=hours)


def test_what_a_vacuum_took_away_is_said_to_who_looks_for_it(story: Story) -> None:
    _go_on(story)
    vacuum(story.store, now=LATER, dry_run=False)
    with pytest.raises(
        Failure, match=r"tables/events/.* is missing; if `atoll tables vacuum` deleted it, look from another point"
    ):
        _kinds(story.store, {"events": 1})


def test_a_file_of_the_last_hour_is_never_touched_since_its_commit_may_be_to_come(story: Story) -> None:
    store = story.store
    under_way = story.leave_file("events")
    assert under_way is not None
    assert vacuum(store, retention_hours=0, dry_run=False, now=story.now + timedelta(minutes=59)) == []
    story.commit_file("events", under_way)
    assert _kinds(store) == ["a", "a"]


def test_what_a_dead_append_left_is_deleted_when_it_is_old(store: Store) -> None:
    append(store, "consumption", [span(1)])
    (written,) = _files(store, "consumption")
    orphan = (store.root / written).with_name("orphan.parquet")
    shutil.copy(store.root / written, orphan)
    two_hours_ago = datetime.now(UTC).timestamp() - 7200
    for path in store.root.rglob("*.parquet"):
        os.utime(path, (two_hours_ago, two_hours_ago))
    assert vacuum(store) == []
    assert [file.path for file in vacuum(store, retention_hours=0, dry_run=False)] == [
        str(orphan.relative_to(store.root))
    ]
    assert read(store, "consumption").num_rows == 1


Point = Callable[[Story], At]


def _checkpoint(**more: Any) -> Point:
    def make(story: Story) -> At:
        story.add("checkpoints", checkpoint(1, **more))
        return checkpoint_id(1)

    return make


def _finished(point: Point) -> Point:
    def make(story: Story) -> At:
        at = point(story)
        story.add("events", event(kind="finished"))
        return at

    return make


REFERRED: dict[str, Point] = {
    "tier version": lambda story: story.add("jobs", job("t", kind="tier")),
    "pool of shards": lambda story: story.add("jobs", job("s", kind="shard")),
    "creation of a run": lambda story: story.add("runs", run("r")),
    "anchor of a run that goes on": _checkpoint(),
    "global checkpoint": _checkpoint(island=-1),
    "global checkpoint of a finished run": _finished(_checkpoint(island=-1)),
    "versions that a decision read": lambda story: story.add("mixtures", mixture(inputs='{"events":1}')) and {"events": 1},
    "versions that a job read": lambda story: story.add("jobs", job("i", kind="score", inputs='{"events":1,"n":"x"}')) and {"events": 1},
}  # fmt: skip
NOT_REFERRED: dict[str, Point] = {
    "ingest": lambda story: story.add("jobs", job("i", kind="ingest")),
    "checkpoint that is no anchor": _checkpoint(anchor=False),
    "anchor of a finished run": _finished(_checkpoint()),
}


@pytest.mark.parametrize("point", REFERRED.values(), ids=REFERRED)
def test_what_something_still_refers_to_is_kept(point: Point, story: Story) -> None:
    at = point(story)
    _go_on(story)
    story.compact("jobs", "runs", "checkpoints", "mixtures")
    seen = _kinds(story.store, at)
    vacuum(story.store, now=LATER, retention_hours=0, dry_run=False)
    assert _kinds(story.store, at) == seen
    assert "a" in seen
    # Event b's file is nobody's.
    assert len(_files(story.store, "events")) < 3 + len(seen)


@pytest.mark.parametrize("point", NOT_REFERRED.values(), ids=NOT_REFERRED)
def test_what_nothing_refers_to_goes(point: Point, story: Story) -> None:
    point(story)
    _go_on(story)
    vacuum(story.store, now=LATER, retention_hours=0, dry_run=False)
    assert _files(story.store, "events") == _live(story.store, "events")


def test_a_row_whose_commit_came_late_keeps_the_cut_at_its_commit(story: Story) -> None:
    """The checkpoint's row is written, then event b is committed and compacted with a, and only then the checkpoint."""
    _go_on(story)
    append(story.store, "checkpoints", [checkpoint(1, written_at=story.now - timedelta(minutes=1))])
    date_commit(story.store, "checkpoints", story.now + timedelta(minutes=1))
    story.add("events", event(kind="c"))
    story.compact("events")
    assert _kinds(story.store, checkpoint_id(1)) == ["a", "b"]
    vacuum(story.store, now=LATER, dry_run=False)
    assert _kinds(story.store, checkpoint_id(1)) == ["a", "b"]


def test_vacuum_on_s3(s3_environment: str) -> None:
    store = create_store(s3_environment)
    for kind in "ab":
        append(store, "events", [event(kind=kind)])
    compact(store, ["events"])
    assert vacuum(store, ["events"], retention_hours=0) == []
    assert len(vacuum(store, ["events"], now=LATER, dry_run=False)) == 2
    assert _files(store, "events") == _live(store, "events")
    assert _kinds(store) == ["a", "b"]


# History


def test_history_tells_what_each_version_did_and_who_wrote_it(story: Story) -> None:
    append(story.store, "events", [event(kind="b")] * 2, writer="w", sequence=7)
    story.compact("events")
    rows = history(story.store, "events").to_pylist()
    assert [row["version"] for row in rows] == [3, 2, 1, 0]
    assert [row["operation"] for row in rows] == ["OPTIMIZE", "WRITE", "WRITE", "CREATE TABLE"]
    assert [(row["rows_added"], row["rows_removed"]) for row in rows] == [(3, 3), (2, 0), (1, 0), (0, 0)]
    assert [(row["files_added"], row["files_removed"]) for row in rows] == [(1, 2), (1, 0), (1, 0), (0, 0)]
    assert [(row["writer"], row["sequence"]) for row in rows] == [(None, None), ("w", 7), (None, None), (None, None)]
    assert rows[0]["time"] == story.now
