"""Damaged stores: whatever is broken, the answer is one line that names the table or the file and a mend; never a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import TableFeatures, write_deltalake
from deltalake.exceptions import DeltaError

from manifests.catalog import Catalog
from manifests.check import check
from manifests.errors import AtollError, Failure, StoreUnreachable, UserError
from manifests.log import history
from manifests.store import MARKER, Store
from manifests.table_errors import table_error
from manifests.tables import append, create_store, open_store, open_table, read
from manifests.upkeep import vacuum
from tests.manifests.handmade import event
from tools.cli import _run

QUERY = "SELECT * FROM events"


@pytest.fixture(scope="module")
def whole(new_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with three commits in `events`; not to be touched."""
    store = Store(str(shutil.copytree(new_store, tmp_path_factory.mktemp("whole") / "store")))
    for number in range(3):
        append(store, "events", [event(kind=kind) for kind in "abc"], writer="w", sequence=number + 1)
    return store.root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Store:
    """A copy of it, to be damaged."""
    return Store(str(shutil.copytree(whole, tmp_path / "store")))


def _data_file(table: Path) -> Path:
    return sorted(table.glob("*.parquet"))[0]


def _entry(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def _overwrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 3] = bytes(byte ^ 0x5A for byte in content[4 : len(content) // 3])
    path.write_bytes(content)


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _replace(table: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(table)
    make(table)


def _plain_folder(table: Path) -> None:
    table.mkdir()
    pq.write_table(pa.table({"a": [1]}), table / "data.parquet")


DATA: dict[str, Callable[[Path], None]] = {
    "data file of garbage": lambda table: _overwrite(_data_file(table), b"garbage" * 99),
    "empty data file": lambda table: _overwrite(_data_file(table), b""),
    "data file with flipped bits": lambda table: _flip(_data_file(table)),
    "data file cut short": lambda table: _cut(_data_file(table)),
    "data file of other columns": lambda table: pq.write_table(pa.table({"a": [1]}), _data_file(table)),
    "missing data file": lambda table: _data_file(table).unlink(),
}
LOG: dict[str, Callable[[Path], None]] = {
    "log entry cut in the middle": lambda table: _cut(_entry(table, 2)),
    "newest log entry cut in the middle": lambda table: _cut(_entry(table, 3)),
    "log entry of garbage": lambda table: _overwrite(_entry(table, 2), b"\xff\xfe garbage"),
    "missing log entry 0": lambda table: _entry(table, 0).unlink(),
    "missing log entry 2": lambda table: _entry(table, 2).unlink(),
    "no log": lambda table: shutil.rmtree(table / "_delta_log"),
    "no table": shutil.rmtree,
    "foreign Delta table": lambda table: _replace(table, lambda t: write_deltalake(str(t), pa.table({"a": [1]}))),
    "foreign folder of Parquet files": lambda table: _replace(table, _plain_folder),
    "file instead of the folder": lambda table: _replace(table, lambda t: t.write_text("hello")),
}
MARKERS = {
    "half a marker": b'{"schema_ver',
    "marker of another kind": b"[1]",
    "marker of no version": b"{}",
    "bits": b"\xff\xfe",
}


def _one_line(error: AtollError, *, store: Store) -> str:
    text = str(error)
    assert "\n" not in text
    assert "events" in text
    assert store.uri in text or str(store.root) in text
    assert any(mend in text for mend in ("restore", "move it away", "tables check")), text
    return text


def _sql(store: Store, capsys: pytest.CaptureFixture[str]) -> str:
    """What `atoll sql` complains of."""
    assert _run(["sql", QUERY, "--store", store.uri]) in (1, 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1
    return shown.err


@pytest.mark.parametrize("damage", DATA.values(), ids=DATA)
def test_a_damaged_data_file_is_named_and_appends_go_on(
    damage: Callable[[Path], None], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = _data_file(store.root / "tables" / "events")
    damage(store.root / "tables" / "events")
    for _ in range(2):
        with pytest.raises(Failure) as caught:
            Catalog(store).query(QUERY)
        _one_line(caught.value, store=store)
    with pytest.raises(Failure) as caught:
        read(store, "events")
    _one_line(caught.value, store=store)
    assert "events" in _sql(store, capsys)
    assert append(store, "events", [event()], writer="w", sequence=4)
    assert Catalog(store).rows("SELECT * FROM checkpoints") == []
    damages = check(store, ["events", "runs"], deep=True).damages
    assert [item.path for item in damages] == [f"tables/events/{damaged.name}"]


@pytest.mark.parametrize("damage", LOG.values(), ids=LOG)
def test_a_damaged_log_is_refused_by_readers_and_writers(
    damage: Callable[[Path], None], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store.root / "tables" / "events")
    for attempt in (
        lambda: Catalog(store),
        lambda: append(store, "events", [event()], writer="w", sequence=4),
        lambda: read(store, "events"),
        lambda: history(store, "events"),
        lambda: vacuum(store, ["events"]),
    ):
        with pytest.raises(AtollError) as caught:
            attempt()
        _one_line(caught.value, store=store)
    assert "events" in _sql(store, capsys)
    assert [item.table for item in check(store, ["events", "runs"]).damages] == ["events"]
    assert append(store, "runs", [{"run": "r", "config": "{}", "command": "c", "code_version": "v"}])


def test_versions_before_a_damaged_log_entry_can_still_be_read(store: Store) -> None:
    _cut(_entry(store.root / "tables" / "events", 3))
    assert len(Catalog(store, at={"events": 2}).rows(QUERY)) == 6


def test_an_empty_log_entry_is_found_by_a_check(store: Store) -> None:
    # delta-rs takes it for a commit that changed nothing.
    _overwrite(_entry(store.root / "tables" / "events", 2), b"")
    (damage,) = check(store, ["events"]).damages
    assert "00000000000000000002.json is empty: what this version added is lost" in damage.finding


def test_a_damaged_checkpoint_of_the_log_is_named(store: Store) -> None:
    table = store.root / "tables" / "events"
    open_table(store, "events").create_checkpoint()
    _overwrite(next((table / "_delta_log").glob("*.checkpoint.parquet")), b"garbage" * 99)
    with pytest.raises(Failure) as caught:
        Catalog(store)
    _one_line(caught.value, store=store)


def test_a_table_with_features_that_atoll_would_misread_is_refused(store: Store) -> None:
    features = open_table(store, "events").alter
    features.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    for attempt in (lambda: Catalog(store), lambda: append(store, "events", [event()])):
        with pytest.raises(UserError, match=r"table events .* was given features of Delta by another program"):
            attempt()


@pytest.mark.parametrize("content", MARKERS.values(), ids=MARKERS)
def test_an_unreadable_marker_is_named_with_what_it_should_hold(
    content: bytes, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.root / MARKER).write_bytes(content)
    for opening in (open_store, create_store):
        with pytest.raises(Failure, match=r'atoll.json is damaged: .*write it again as {"schema_version": \d}'):
            opening(store.uri)
    assert "atoll.json" in _sql(store, capsys)


def test_a_lost_file_of_a_remote_store_is_named(s3_environment: str) -> None:
    store = create_store(s3_environment)
    append(store, "events", [event()])
    (path,) = [info.path for info in store.list("tables/events") if info.path.endswith(".parquet")]
    store.delete(path)
    with pytest.raises(Failure, match=f"data file {store.uri}/{path} is missing; restore it from a backup"):
        Catalog(store).query(QUERY)
    assert [item.finding for item in check(store, ["events"]).damages] == ["missing"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Kernel error: Arrow error: External: Generic S3 error: Error performing GET "
            + "x" * 300
            + ": error sending request",
            StoreUnreachable,
        ),
        ("Generic S3 error: Error performing GET in 5.2s, after 8 retries, max_retries: 8", StoreUnreachable),
        ("Kernel error: Json error: expected value at line 1", Failure),
    ],
)
def test_a_store_that_is_away_is_not_called_damaged(
    text: str, kind: type[AtollError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    error = table_error(Store("s3://bucket/store"), "events", DeltaError(text))
    assert type(error) is kind
    assert ("damaged" in str(error)) is (kind is Failure)
