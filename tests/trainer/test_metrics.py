"""Metrics: few objects, no line twice, and training that goes on whatever the store does."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manifests.errors import ObjectTaken, StoreUnreachable, UserError
from manifests.store import Store
from trainer import metrics as module
from trainer.metrics import Metrics, PartWriter, find_logger, read_metrics

FOLDER = "runs/r/metrics/island-0003"


class Flaky(Store):
    """A store that fails on demand, and knows the threads that called it."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.is_down = False
        self.loses_replies = False
        self.threads: set[str] = set()

    def put_new(self, path: str, data: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        if self.is_down:
            raise StoreUnreachable("nobody answers")
        super().put_new(path, data)
        if self.loses_replies:
            self.loses_replies = False
            raise StoreUnreachable("the reply is lost")


class Killed(BaseException):
    """The process ends here."""


class Deadly(Store):
    """A store whose caller is killed at the n-th write or deletion: before it takes effect, or after."""

    def __init__(self, uri: str, *, at: int, after: bool) -> None:
        super().__init__(uri)
        self._left, self._after = at, after

    def put_new(self, path: str, data: bytes) -> None:
        self._call(lambda: super(Deadly, self).put_new(path, data))

    def delete(self, path: str) -> None:
        self._call(lambda: super(Deadly, self).delete(path))

    def _call(self, effect: Callable[[], None]) -> None:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        effect()
        if self._left == 0:
            raise Killed


class Listener:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.threads: set[str] = set()
        self.is_closed = False

    def log(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.is_closed = True


def _metrics(store: Store, **options: Any) -> Metrics:
    return Metrics(store, FOLDER, **({"role": "island-0003", "incarnation": 0, "every_s": 3600.0} | options))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _names(store: Store) -> list[str]:
    return sorted(info.path.removeprefix(f"{FOLDER}/") for info in store.list(FOLDER))


def _numbers(lines: list[dict[str, Any]]) -> list[int]:
    return [line["n"] for line in lines]


def test_line_says_who_said_it_and_when(store: Store) -> None:
    metrics = _metrics(store, incarnation=2, clock=lambda: 12.3456)
    metrics.note("round", round=4, mix={"S": 0.5, "A": np.float32(0.5)}, loss=torch.tensor(2.0), time="mine")
    metrics.close()
    lines, _ = read_metrics(store, "r")
    assert lines == [
        {
            "time": 12.346, "role": "island-0003", "incarnation": 2, "kind": "round", "round": 4,
            "mix": {"S": 0.5, "A": 0.5}, "loss": 2.0, "part": 0,
        }
    ]  # fmt: skip
    assert _names(store) == ["002-000000.jsonl"]


def test_number_that_is_not_finite_is_null_and_named(store: Store) -> None:
    metrics = _metrics(store)
    metrics.note("checkpoint", holdout_loss=float("nan"), merge=3, why=None)
    metrics.close()
    (info,) = store.list(FOLDER)
    line = json.loads(store.get(info.path), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line["holdout_loss"] is None
    assert line["not_finite"] == ["holdout_loss"]


def test_steps_between_two_writes_make_one_line(store: Store) -> None:
    metrics = _metrics(store)
    for step in range(11, 61):
        metrics.note_step(step, loss=float(step), lr=1e-3 / step, tokens=100, seconds=0.02, norm=step / 10)
    metrics.close()
    (line,) = read_metrics(store, "r")[0]
    assert (line["kind"], line["first_step"], line["last_step"]) == ("steps", 11, 60)
    assert line["loss"] == pytest.approx(35.5)
    assert line["lr"] == 1e-3 / 60
    assert line["tokens"] == 5000
    assert line["tokens_per_s"] == pytest.approx(5000)
    assert line["step_time_s"] == pytest.approx(0.02)
    assert line["norm"] == 6.0


def test_nothing_noted_writes_nothing(store: Store) -> None:
    metrics = _metrics(store, every_s=0.005)
    time.sleep(0.05)
    metrics.close()
    metrics.close()
    assert _names(store) == []


def test_store_is_never_touched_in_the_callers_thread(store: Store) -> None:
    flaky = Flaky(store.uri)
    metrics = _metrics(flaky, every_s=0.002)

    def note_many(first: int) -> None:
        for n in range(first, first + 500):
            metrics.note("round", n=n)
            metrics.note_step(n, loss=1.0, lr=0.1, tokens=1, seconds=0.1)

    threads = [threading.Thread(target=note_many, args=(first,)) for first in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.close()
    lines, _ = read_metrics(store, "r")
    assert sorted(_numbers([line for line in lines if line["kind"] == "round"])) == list(range(1500))
    assert sum(line["tokens"] for line in lines if line["kind"] == "steps") == 1500
    assert flaky.threads == {"metrics of island-0003"}


def test_failing_store_is_survived_and_said_once(store: Store, recwarn: pytest.WarningsRecorder) -> None:
    flaky = Flaky(store.uri)
    flaky.is_down = True
    metrics = _metrics(flaky, every_s=0.002)
    for n in range(20):
        metrics.note("round", n=n)
        time.sleep(0.003)
    _until(lambda: len(recwarn) > 0)
    assert _names(store) == []
    flaky.is_down = False
    flaky.loses_replies = True
    _until(lambda: len(_names(store)) > 0)
    metrics.note("round", n=20)
    metrics.close()
    assert _numbers(read_metrics(store, "r")[0]) == list(range(21))
    assert [str(warning.message) for warning in recwarn] == [
        "metrics of island-0003 can't be written: nobody answers; they are kept, and tried again"
    ]


def test_close_gives_up_on_a_store_that_stays_away(store: Store) -> None:
    flaky = Flaky(store.uri)
    flaky.is_down = True
    metrics = _metrics(flaky)
    metrics.note("round", n=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        metrics.close()
    assert len(said) == 1


def test_full_buffer_drops_the_oldest_lines_and_counts_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 5)
    metrics = _metrics(store)
    for n in range(12):
        metrics.note("round", n=n)
    metrics.close()
    lines, _ = read_metrics(store, "r")
    assert (lines[0]["kind"], lines[0]["lines"]) == ("dropped", 7)
    assert _numbers(lines[1:]) == [7, 8, 9, 10, 11]


@pytest.mark.filterwarnings("ignore:metrics of")
def test_lines_kept_for_a_lost_store_are_bounded_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 5)
    flaky = Flaky(store.uri)
    flaky.is_down = True
    metrics = _metrics(flaky, every_s=0.002)
    for n in range(40):
        metrics.note("round", n=n)
        time.sleep(0.004)
    flaky.is_down = False
    metrics.close()
    lines, _ = read_metrics(store, "r")
    told = [line["n"] for line in lines if line["kind"] == "round"]
    dropped = sum(line["lines"] for line in lines if line["kind"] == "dropped")
    assert len(told) + dropped == 40
    assert told == sorted(told)
    assert told[-5:] == [35, 36, 37, 38, 39]
    assert dropped >= 25


# Parts and merged objects.


def _write(writer: PartWriter, count: int, *, first: int = 0) -> None:
    for n in range(first, first + count):
        writer.write([{"time": 0.0, "kind": "x", "n": n}])
        writer.tidy()


@pytest.fixture
def small_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGE_PARTS", 3)


@pytest.mark.usefixtures("small_merges")
def test_parts_are_merged_and_merged_again(store: Store) -> None:
    _write(PartWriter(store, FOLDER, incarnation=1), 11)
    assert _names(store) == [
        "001-000000-000008.jsonl", "001-000009.jsonl", "001-000010.jsonl",
    ]  # fmt: skip
    assert _numbers(read_metrics(store, "r")[0]) == list(range(11))


def test_month_of_parts_is_a_few_hundred_objects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGE_PARTS", 10)
    _write(PartWriter(store, FOLDER, incarnation=0), 1_234)
    assert len(_names(store)) == 12 + 3 + 4
    assert _numbers(read_metrics(store, "r")[0]) == list(range(1_234))


def test_large_objects_are_not_merged_further(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGE_BYTES", 200)
    writer = PartWriter(store, FOLDER, incarnation=0)
    for n in range(4):
        writer.write([{"time": 0.0, "kind": "x", "n": n, "text": "y" * (250 if n < 2 else 100)}])
        writer.tidy()
    assert _names(store) == ["000-000000.jsonl", "000-000001.jsonl", "000-000002-000003.jsonl"]
    assert _numbers(read_metrics(store, "r")[0]) == [0, 1, 2, 3]


@pytest.mark.usefixtures("small_merges")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_kill_at_any_write_or_deletion_counts_no_line_twice_and_loses_none_that_was_written(
    store: Store, tmp_path: Path, after: bool
) -> None:
    num_kills = 0
    for at in range(1, 100):
        uri = str(tmp_path / f"killed-{at}")
        Store(uri).make_root()
        writer = PartWriter(Deadly(uri, at=at, after=after), FOLDER, incarnation=0)
        written = 0
        try:
            for n in range(10):
                writer.write([{"time": 0.0, "kind": "x", "n": n}])
                written += 1
                writer.tidy()
        except Killed:
            num_kills += 1
        else:
            break
        found = _numbers(read_metrics(Store(uri), "r")[0])
        assert found == list(range(len(found))), at
        assert len(found) in (written, written + 1), at
        # The next incarnation is another writer.
        _write(PartWriter(Store(uri), FOLDER, incarnation=1), 4, first=100)
        assert _numbers(read_metrics(Store(uri), "r")[0])[-4:] == [100, 101, 102, 103]
    assert num_kills == 10 + 4 + 3 * 4  # parts, merged objects, deletions


@pytest.mark.usefixtures("small_merges")
def test_store_that_fails_at_any_write_or_deletion_gets_every_line_once(store: Store, tmp_path: Path) -> None:
    class Failing(Store):
        """Fails at every second call, after it took effect."""

        calls = 0

        def put_new(self, path: str, data: bytes) -> None:
            super().put_new(path, data)
            self._fail()

        def delete(self, path: str) -> None:
            super().delete(path)
            self._fail()

        def _fail(self) -> None:
            self.calls += 1
            if self.calls % 2:
                raise StoreUnreachable("the reply is lost")

    writer = PartWriter(Failing(store.uri), FOLDER, incarnation=0)

    def again(call: Callable[[], None]) -> None:
        while True:
            try:
                return call()
            except StoreUnreachable:
                pass

    for n in range(14):
        lines = [{"time": 0.0, "kind": "x", "n": n}]
        again(lambda lines=lines: writer.write(lines))  # type: ignore[misc]
        again(writer.tidy)
    assert _names(store) == [
        "000-000000-000008.jsonl",
        "000-000009-000011.jsonl",
        "000-000012.jsonl",
        "000-000013.jsonl",
    ]
    assert _numbers(read_metrics(store, "r")[0]) == list(range(14))


@pytest.mark.usefixtures("small_merges")
def test_strangers_part_is_left_alone_and_counted_once(store: Store) -> None:
    writer = PartWriter(store, FOLDER, incarnation=0)
    _write(writer, 2)
    store.put_new(f"{FOLDER}/000-000002.jsonl", b'{"time": 0, "kind": "x", "n": 77, "part": 2}\n')
    with pytest.raises(ObjectTaken):
        store.put_new(f"{FOLDER}/000-000002.jsonl", b"mine")
    _write(writer, 4, first=2)
    assert _numbers(read_metrics(store, "r")[0]) == [0, 1, 77, 2, 3, 4, 5]


# Reading.


@pytest.mark.usefixtures("small_merges")
def test_reader_with_a_cursor_gets_each_line_once_whatever_is_merged_meanwhile(store: Store) -> None:
    writers = {name: PartWriter(store, f"runs/r/metrics/{name}", incarnation=0) for name in ("island-0000", "syncer")}
    cursor: dict[str, str] | None = None
    found: list[tuple[str, int]] = []
    for n in range(25):
        for writer in writers.values():
            _write(writer, 1, first=n)
        if n % 4 == 1:  # three of four are merged unseen
            lines, cursor = read_metrics(store, "r", after=cursor)
            found += [(line["role"], line["n"]) for line in lines]
    lines, cursor = read_metrics(store, "r", after=cursor)
    found += [(line["role"], line["n"]) for line in lines]
    assert Counter(found) == Counter((name, n) for name in writers for n in range(25))
    assert read_metrics(store, "r", after=cursor) == ([], cursor)


def test_cursor_knows_incarnations_apart(store: Store) -> None:
    old = PartWriter(store, FOLDER, incarnation=0)
    _write(old, 3)
    _write(PartWriter(store, FOLDER, incarnation=1), 1, first=10)
    lines, cursor = read_metrics(store, "r")
    assert _numbers(lines) == [0, 1, 2, 10]
    _write(old, 1, first=3)  # its last words
    lines, _ = read_metrics(store, "r", after=cursor)
    assert [(line["incarnation"], line["n"]) for line in lines] == [(0, 3)]


def test_newest_objects_can_be_had_without_the_old_ones(store: Store) -> None:
    writer = PartWriter(store, FOLDER, incarnation=0)
    _write(writer, 10)
    lines, cursor = read_metrics(store, "r", newest=3)
    assert _numbers(lines) == [7, 8, 9]
    _write(writer, 1, first=10)
    assert _numbers(read_metrics(store, "r", after=cursor)[0]) == [10]


@pytest.mark.usefixtures("small_merges")
def test_objects_merged_between_listing_and_reading_are_read_in_their_new_place(store: Store) -> None:
    writer = PartWriter(store, FOLDER, incarnation=0)
    _write(writer, 2)

    class Overtaken(Store):
        """The third part comes, and with it the merge, just before the first object is read."""

        is_overtaken = False
        lock = threading.Lock()

        def get(self, path: str) -> bytes:
            with self.lock:
                if not self.is_overtaken:
                    self.is_overtaken = True
                    _write(writer, 1, first=2)
            return super().get(path)

    lines, cursor = read_metrics(Overtaken(store.uri), "r")
    assert _numbers(lines) == [0, 1, 2]
    assert read_metrics(store, "r", after=cursor)[0] == []


@pytest.mark.usefixtures("small_merges")
def test_parts_deleted_while_the_listing_passes_them_are_not_missed(store: Store) -> None:
    writer = PartWriter(store, FOLDER, incarnation=0)
    _write(writer, 2)

    class Slow(Store):
        """A first listing that had passed the place of the merged object when it was written, and came to the parts when they were gone."""

        is_first = True

        def list(self, prefix: str, *, after: str | None = None) -> Any:
            if self.is_first:
                self.is_first = False
                _write(writer, 2, first=2)
                return iter([info for info in super().list(prefix) if info.path.endswith("000-000003.jsonl")])
            return super().list(prefix, after=after)

    assert _numbers(read_metrics(Slow(store.uri), "r")[0]) == [0, 1, 2, 3]


def test_damaged_and_foreign_objects_are_passed_over_and_counted(store: Store) -> None:
    _write(PartWriter(store, FOLDER, incarnation=0), 1)
    torn = b'{"time": 1, "kind": "x", "n": 1, "part": 1}\n{"time": 1, "ki'
    store.put_new(f"{FOLDER}/000-000001.jsonl", torn)
    store.put_new(f"{FOLDER}/000-000002.jsonl", b'\xff\xfe\n[1]\n3\n{"kind": "x", "part": 2}\n')
    store.put_new(f"{FOLDER}/notes.txt", b"not a part")
    _write(PartWriter(store, FOLDER, incarnation=1), 1, first=5)
    lines, cursor = read_metrics(store, "r")
    assert [line["n"] for line in lines if line["kind"] == "x"] == [0, 1, 5]
    unreadable = [(line["object"], line["lines"]) for line in lines if line["kind"] == "unreadable"]
    assert unreadable == [(f"{FOLDER}/000-000001.jsonl", 1), (f"{FOLDER}/000-000002.jsonl", 4)]
    assert read_metrics(store, "r", after=cursor) == ([], cursor)


def test_run_without_metrics_has_no_lines(store: Store) -> None:
    assert read_metrics(store, "r") == ([], {})


# Loggers.


def test_loggers_are_told_every_line_in_the_background_and_closed(store: Store) -> None:
    listener = Listener()
    flaky = Flaky(store.uri)
    metrics = _metrics(flaky, loggers=[listener])
    metrics.note("round", n=1)
    metrics.note_step(1, loss=1.0, lr=0.1, tokens=1, seconds=0.1)
    metrics.close()
    assert [line["kind"] for line in listener.lines] == ["round", "steps"]
    assert listener.threads == {"metrics of island-0003"}
    assert listener.is_closed


@pytest.mark.filterwarnings("ignore:metrics of")
def test_loggers_are_told_once_also_while_the_store_is_away(store: Store) -> None:
    listener = Listener()
    flaky = Flaky(store.uri)
    flaky.is_down = True
    metrics = _metrics(flaky, loggers=[listener], every_s=0.002)
    metrics.note("round", n=1)
    _until(lambda: len(listener.lines) == 1)
    time.sleep(0.02)
    metrics.close()
    assert len(listener.lines) == 1


def test_logger_that_fails_is_left_and_the_others_are_not(store: Store, recwarn: pytest.WarningsRecorder) -> None:
    class Broken(Listener):
        def log(self, line: Mapping[str, Any]) -> None:
            super().log(line)
            raise RuntimeError("no disk")

    broken, sound = Broken(), Listener()
    metrics = _metrics(store, loggers=[broken, sound])
    for n in range(3):
        metrics.note("round", n=n)
    metrics.close()
    assert (len(broken.lines), len(sound.lines)) == (1, 3)
    assert _numbers(read_metrics(store, "r")[0]) == [0, 1, 2]
    assert [str(warning.message) for warning in recwarn] == [
        "Broken is told no more metrics of island-0003: RuntimeError('no disk')"
    ]


def _find(name: str, folder: Path) -> Any:
    return find_logger(name, project="atoll-test", run="r", role="island-0003", folder=folder)


def test_logger_that_is_not_known_or_not_installed_says_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _find("", tmp_path) is None
    with pytest.raises(UserError, match="tensorboard, wandb"):
        _find("mlflow", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        _find("wandb", tmp_path)


def test_auto_takes_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name if name in installed else None)
    for name in ("_Trackio", "_TensorBoard", "_Wandb"):
        monkeypatch.setattr(module, name, lambda *_, name=name: name)
    assert _find("auto", tmp_path) is None
    for name, taken in (("wandb", "_Wandb"), ("tensorboard", "_TensorBoard"), ("trackio", "_Trackio")):
        installed.add(name)
        assert _find("auto", tmp_path) == taken


@pytest.mark.filterwarnings("ignore:logger trackio")
def test_auto_passes_over_what_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "_Trackio", broken)
    monkeypatch.setattr(module, "_TensorBoard", lambda *_: "tensorboard")
    assert _find("auto", tmp_path) == "tensorboard"


def _train(store: Store, logger: Any, incarnation: int = 0) -> None:
    metrics = _metrics(store, loggers=[logger], incarnation=incarnation)
    metrics.note_step(7 + incarnation, loss=2.5, lr=0.1, tokens=10, seconds=0.5)
    metrics.note("round", step=7, mix={"S": 0.25}, merge=3, checkpoint=True, strategy="balanced")
    metrics.note("state", state="finished")
    metrics.close()


def test_tensorboard_gets_the_numbers(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train(store, _find("tensorboard", tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "atoll-test" / "r" / "island-0003"))
    events.Reload()
    assert {"steps/loss", "steps/tokens_per_s", "round/mix/S", "round/merge"} <= set(events.Tags()["scalars"])
    assert not any("incarnation" in tag or "checkpoint" in tag for tag in events.Tags()["scalars"])
    (event,) = events.Scalars("steps/loss")
    assert (event.step, event.value) == (7, 2.5)


def test_trackio_gets_the_numbers_and_incarnations_go_on_with_one_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    for incarnation in range(2):
        _train(store, _find("trackio", tmp_path), incarnation)
    (run,) = trackio.Api().runs("atoll-test")
    assert run.name == "r-island-0003"
    values = trackio.sqlite_storage.SQLiteStorage.get_logs("atoll-test", "r-island-0003")
    assert [(v["step"], v["steps/loss"]) for v in values if "steps/loss" in v] == [(7, 2.5), (8, 2.5)]


def test_wandb_writes_offline(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger, other = _find("wandb", tmp_path), _find("wandb", tmp_path)
    assert logger._run.offline
    assert logger._run is not other._run
    logger.log({"time": 1.0, "kind": "steps", "last_step": 7, "loss": 2.5})
    assert (logger._run.summary["steps/loss"], logger._run.summary["step"]) == (2.5, 7)
    _train(store, logger)
    other.close()
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) == 2
