"""The main job end to end, as its user runs it: on a folder and on S3, killed, interrupted, continued, rolled back."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.catalog import Catalog
from manifests.tables import open_store
from tests.main_job import (
    TRAIN,
    atoll,
    model_option,
    preload,
    prepare,
    query,
    start,
    stop_group,
    succeed,
    upload,
)

LONGER = ("--steps", "48")
"""For runs that are to be caught in the middle."""


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    preload()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that is ready to train on; not to be changed."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, str(folder / "store"))
    return folder


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that folder's store with the run r, which is finished; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared / "store", folder / "store")
    succeed("train", "--run", "r", *TRAIN, *model_option(folder), store=str(folder / "store"))
    return folder


@pytest.fixture
def ready(prepared: Path, tmp_path: Path) -> str:
    """A store that is ready to train on, this test's own. The sources stay where they were ingested from."""
    shutil.copytree(prepared / "store", tmp_path / "store")
    return str(tmp_path / "store")


@pytest.fixture
def trained_s3(trained: Path, s3_environment: str) -> str:
    """A store on an S3 server with the finished run, this test's own."""
    upload(trained / "store", s3_environment)
    return s3_environment


def _check_ledger(store: str, run: str) -> None:
    """The consumption table says what the islands' own counters say, tier by tier and token by token."""
    recorded = query(
        f"select tier, sum(tokens)::bigint as tokens from consumption where run = '{run}' group by tier", store=store
    )
    counted = query(
        "select sum(tokens_s)::bigint as S, sum(tokens_a)::bigint as A, sum(tokens_b)::bigint as B, sum(tokens_c)::bigint as C from ("
        f"select * from checkpoints where run = '{run}' and island >= 0 qualify row_number() over (partition by island order by round desc) = 1)",
        store=store,
    )[0]
    assert {row["tier"]: row["tokens"] for row in recorded} == {tier: n for tier, n in counted.items() if n}
    made = atoll("made", "--run", run, store=store)
    assert made.returncode == 0
    assert "agrees" in made.stderr


def _steps(store: str, run: str) -> dict[int, int]:
    rows = Catalog(open_store(store)).rows(
        "SELECT island, max(step) AS step FROM checkpoints WHERE run = ? AND island >= 0 GROUP BY island", [run]
    )
    return {row["island"]: row["step"] for row in rows}


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline, "the run doesn't get on"
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    """Processes that it has started, and those that these have."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _island_process(train: int, island: int) -> int:
    """Id of the process of an island that `atoll train` has started."""
    for pid in _descendants(train):
        if Path(f"/proc/{pid}/comm").read_text().strip() == f"atoll-island-{island}":
            return pid
    raise AssertionError(f"process {train} has no island {island}")


def test_training_on_a_folder_keeps_an_exact_ledger(trained: Path) -> None:
    store = str(trained / "store")
    assert set(_steps(store, "r").values()) == {32}
    _check_ledger(store, "r")


def test_training_again_changes_nothing_and_with_other_options_is_refused(trained: Path, tmp_path: Path) -> None:
    arguments = ("train", "--run", "r", *TRAIN, *model_option(tmp_path))
    assert "finished already" in atoll(*arguments, store=str(trained / "store")).stderr
    different = atoll(*arguments, "--lr", "0.001", store=str(trained / "store"))
    assert different.returncode == 2
    assert "lr: 0.003 there, 0.001 here" in different.stderr


def test_training_on_s3_keeps_an_exact_ledger(prepared: Path, s3_environment: str, tmp_path: Path) -> None:
    upload(prepared / "store", s3_environment)
    succeed("train", "--run", "r", *TRAIN, *model_option(tmp_path), store=s3_environment)
    assert set(_steps(s3_environment, "r").values()) == {32}
    _check_ledger(s3_environment, "r")


def test_rollback_trains_a_branch_without_the_documents_and_report_is_written(trained_s3: str, tmp_path: Path) -> None:
    store = trained_s3
    bad = "label in ('noisy', 'degenerate')"
    selected = ("--run", "r", "--where", bad)
    plan = succeed("rollback", "plan", *selected, "--format", "json", store=store)
    assert '"redo_steps"' in plan
    succeed("rollback", "apply", *selected, store=store)
    branch = str(query("select run from runs where parent_run = 'r'", store=store)[0]["run"])
    in_branch = f"select count(*) as n from consumption join documents using (doc_id) where run = '{branch}' and {bad}"
    assert query(in_branch, store=store) == [{"n": 0}]
    assert set(_steps(store, branch).values()) == {32}
    succeed("report", "--run", "r", "--out", str(tmp_path / "report.html"), store=store)
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_killed_island_comes_back_and_the_others_go_on(ready: str, tmp_path: Path) -> None:
    process = start("train", "--run", "r", *TRAIN, *LONGER, *model_option(tmp_path), store=ready)
    # The folder tells at once that it trains; a query takes long enough for it to reach its end on a loaded machine.
    _wait_until(lambda: any(Path(ready, "runs/r/outer/0001").glob("*.safetensors")))
    os.kill(_island_process(process.pid, 1), signal.SIGKILL)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "island 1: killed by SIGKILL" in err
    assert set(_steps(ready, "r").values()) == {48}
    _check_ledger(ready, "r")
    kinds = query(
        "select island, count(*) as n from events where kind = 'island_joined' group by all order by island",
        store=ready,
    )
    assert kinds == [{"island": 0, "n": 1}, {"island": 1, "n": 2}]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_interrupted_training_leaves_no_process_and_goes_on(ready: str, tmp_path: Path, how: signal.Signals) -> None:
    arguments = ("train", "--run", "r", *TRAIN, *LONGER, *model_option(tmp_path))
    process = start(*arguments, store=ready)
    _wait_until(lambda: any(Path(ready, "runs/r/outer/0000").glob("*.safetensors")))
    started = _descendants(process.pid)
    assert len(started) >= 4  # two islands, the syncer, and what they are forked from
    stop_group(process, how)
    _, err = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "goes on from there" in err
        assert "Traceback" not in err
    _wait_until_gone(started)
    succeed(*arguments, store=ready)
    assert set(_steps(ready, "r").values()) == {48}
    _check_ledger(ready, "r")


def _wait_until_gone(processes: list[int]) -> None:
    """Waits until none of them is left; that they leave by themselves is the point."""
    deadline = time.monotonic() + 20
    while alive := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.3)
