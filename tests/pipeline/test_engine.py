"""Engines: in this process, and on a real Ray cluster of two nodes, of which a worker or all of one node is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.catalog import Catalog
from manifests.errors import Failure, ObjectMissing, UserError
from manifests.mds import CorruptShard
from manifests.store import Store
from manifests.tables import create_store, open_store, read
from pipeline.engine import Engine, InProcess, open_engine
from pipeline.ingest import ingest
from pipeline.pool import shard
from pipeline.retier import RetierConfig, retier
from pipeline.score import score
from pipeline.sources import SourceSpec
from pipeline.tokenizer import train_tokenizer
from tests.pipeline.test_pool import tiered_store
from tests.pipeline.test_retier import SHARDS, add_version, moved_to, tiers_of
from tests.pipeline.test_score import CONFIG, fill, scores
from tests.ray_cluster import RayCluster, running_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def on_ray(cluster: RayCluster) -> Iterator[Engine]:
    with open_engine(cluster.address) as engine:
        yield engine


@pytest.fixture(params=["here", "on Ray"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return InProcess() if request.param == "here" else request.getfixturevalue("on_ray")


def _table(size: int, item: int) -> pa.Table:
    time.sleep(0.02 * (item % 3))
    return pa.table({"item": [item] * size, "thirds": [item / 3] * size})


def _fail(error: type[Exception], item: int) -> int:
    if item == 2:
        raise error(f"item {item} is bad; mend it")
    return item


def _die(item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang_once(folder: str, item: int) -> tuple[int, int]:
    """Leaves a file that names the process. The first that works on item 3 gets nowhere."""
    first = not list(Path(folder).glob(f"{item}-*"))
    Path(folder, f"{item}-{os.getpid()}").touch()
    if item == 3 and first:
        time.sleep(600)
    return item, item**2


def test_results_come_in_the_order_of_the_items_and_items_are_drawn_as_they_are_needed(engine: Engine) -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            drawn.append(item)
            yield item

    results = engine.map(partial(_table, 3), items())
    assert drawn == []
    first = next(results)
    assert len(drawn) <= 4  # two for each CPU
    found = [first, *results]
    assert found == [_table(3, item) for item in range(20)]


def test_an_error_of_ours_comes_out_as_it_was_raised_and_any_other_names_its_item(engine: Engine) -> None:
    for error in (UserError, ObjectMissing, CorruptShard):
        results = engine.map(partial(_fail, error), [0, 1, 2, 3])
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(error, match=r"^item 2 is bad; mend it$") as caught_ours:
            next(results)
        assert type(caught_ours.value) is error
    with pytest.raises(ZeroDivisionError, match="item 2 is bad") as caught:
        list(engine.map(partial(_fail, ZeroDivisionError), [2], name="file {}".format))
    assert caught.value.__notes__ == ["while working on file 2"]


def test_an_item_whose_workers_die_each_time_is_a_failure_that_names_it(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine._RETRIES", 1)
    with (
        open_engine(cluster.address) as engine,
        pytest.raises(Failure, match=r"^rows 7: its workers on Ray died 2 times .*run it again"),
    ):
        list(engine.map(_die, [7], name="rows {}".format))


def test_other_versions_in_the_cluster_are_refused(on_ray: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine._versions", lambda: ("9.9", "3.99.1"))
    with pytest.raises(
        UserError, match=r"of the Ray cluster has Atoll .*, this is Atoll 9\.9 on Python 3\.99\.1; install"
    ):
        list(on_ray.map(_table, [1]))


def _visible_gpus(_: int) -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_work_on_a_gpu_has_one_to_itself_and_a_cluster_without_any_is_refused(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(cluster.address) as engine:
        assert set(engine.map(_visible_gpus, range(2))) == {""}
    with open_engine(cluster.address, gpu=True) as engine:
        assert set(engine.map(_visible_gpus, range(2))) == {"0"}
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(UserError, match="the cluster has no GPU"), open_engine(cluster.address, gpu=True):
        pass


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"--ray 127\.0\.0\.1:9: no Ray cluster answers"), open_engine("127.0.0.1:9"):
        pass


def test_a_number_of_workers_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="--workers goes with --ray"), open_engine(workers=2):
        pass
    with pytest.raises(UserError, match="--workers 0: give at least one"), open_engine("local", workers=0):
        pass


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'atoll\[ray\]'"), open_engine("local"):
        pass


def test_a_killed_worker_costs_nothing_but_time(on_ray: Engine, tmp_path: Path) -> None:
    results = on_ray.map(partial(_hang_once, str(tmp_path)), range(8))
    found = [next(results) for _ in range(3)]
    while not (hanging := list(tmp_path.glob("3-*"))):
        time.sleep(0.05)
    os.kill(int(hanging[0].name.split("-")[1]), signal.SIGKILL)
    found += results
    assert found == [(item, item**2) for item in range(8)]
    assert len(list(tmp_path.glob("3-*"))) == 2


def _sources(folder: Path) -> list[SourceSpec]:
    """A Parquet file of many row groups and some of JSON lines, with duplicates within and across them and rows without text."""
    texts = [f"document {i % 900}" if i % 7 else None for i in range(1200)]
    pq.write_table(pa.table({"text": texts}), folder / "one.parquet", row_group_size=50)
    specs = [SourceSpec(uri=str(folder / "one.parquet"), format="parquet", corpus="one")]
    for number in range(6):
        lines = [f'{{"text": "line {(i * 7 + number) % 500}"}}\n' + "\n" * (i % 3) for i in range(300)]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return [*specs, SourceSpec(uri=str(folder / "*.jsonl"), format="jsonl", corpus="lines")]


def _ingested(store: Store, specs: list[SourceSpec], **options: Any) -> tuple[dict[str, Any], pa.Table]:
    summary = ingest(store, specs, holdout_share=0.1, rows_per_part=170, **options)
    return summary, read(store, "documents")


def test_ingest_is_the_same_wherever_it_works_and_when_half_of_the_cluster_is_killed(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = _sources(tmp_path)
    whole = _ingested(create_store(str(tmp_path / "here")), specs)
    assert whole[0]["documents"] > 1000
    monkeypatch.setattr("pipeline.partitions._RANGE_ROWS", 100)
    monkeypatch.setattr("pipeline.partitions._CARRIED_ROWS", 90)
    assert _ingested(create_store(str(tmp_path / "in pieces")), specs) == whole
    parts: list[int] = []

    def kill_in_the_middle(what: str, done: int, total: int | None) -> None:
        parts.append(done)
        if len(parts) == 2:
            cluster.kill_second_node()

    try:
        with open_engine(cluster.address) as engine:
            found = _ingested(create_store(str(tmp_path / "ray")), specs, engine=engine, report=kill_in_the_middle)
    finally:
        cluster.restore()
    assert found == whole
    assert len(parts) > 10


def test_the_command_says_nothing_of_ray(cluster: RayCluster, tmp_path: Path) -> None:
    _sources(tmp_path)
    command = ["ingest", str(tmp_path / "one.parquet"), "--corpus", "one", "--store", str(tmp_path / "store")]
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", *command, "--ray", cluster.address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert re.fullmatch(r"(  ingest: .*\n)?  one: 8\d\d new documents .*\n  rejected: no text: 172\n", done.stderr), (
        done.stderr
    )


def test_scores_on_a_cluster_are_those_made_here_bit_for_bit(on_ray: Engine, tmp_path: Path) -> None:
    found = []
    for name, engine in (("here", InProcess()), ("ray", on_ray)):
        (tmp_path / name).mkdir()
        store = create_store(str(tmp_path / name / "store"))
        fill(store, tmp_path)
        train_tokenizer(store, Catalog(store), vocab_size=300)
        score(store, config=CONFIG, engine=engine)
        found.append([(row["doc_id"], row["score"].hex(), row["stderr"].hex()) for row in scores(store)])
    assert found[0] == found[1] != []


def _pool(store: Store) -> tuple[dict[str, bytes], list[pa.Table]]:
    """All that says what lies in a pool: its shards, and the rows of tables about it."""
    tables = ("shards", "shard_index", "view_shards", "views", "jobs")
    clocks = {"written_at", "started_at"}
    rows = [read(store, name) for name in tables]
    return (
        {info.path: store.get(info.path) for info in store.list("pool")},
        [table.drop_columns(sorted(clocks & set(table.column_names))) for table in rows],
    )


def test_shards_and_views_made_on_a_cluster_are_those_made_here(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.bands._PART_DOCUMENTS", 7)
    tiered_store(tmp_path)
    found = []
    options: dict[str, Any] = {"here": {}, "ray": {"ray": cluster.address, "workers": 3}}
    for name in options:
        shutil.copytree(tmp_path / "store", tmp_path / name)
        store = open_store(str(tmp_path / name))
        with open_engine(**options[name]) as engine:
            shard(store, config=SHARDS, engine=engine)
            tiers = tiers_of(store, 1)
            add_version(store, moved_to(tiers, sorted(tiers)[::5], "A"))
            assert retier(store, config=RetierConfig(shards=SHARDS), engine=engine)["shards"]["written"] > 3
        found.append(_pool(store))
    assert found[0] == found[1]


def test_shards_that_were_begun_here_are_finished_on_a_cluster(
    on_ray: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.bands._PART_DOCUMENTS", 7)
    whole = tiered_store(tmp_path)
    shutil.copytree(tmp_path / "store", tmp_path / "begun")
    begun = open_store(str(tmp_path / "begun"))
    parts: list[int] = []

    def interrupt(what: str, done: int, total: int | None) -> None:
        parts.append(done)
        if len(parts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shard(begun, config=SHARDS, report=interrupt)
    rest: list[int] = []
    shard(begun, config=SHARDS, engine=on_ray, report=lambda what, done, total: rest.append(done))
    parts.clear()
    shard(whole, config=SHARDS, report=lambda what, done, total: parts.append(done))
    assert rest == parts[3:] != []
    assert _pool(begun) == _pool(whole)
