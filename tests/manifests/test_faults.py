"""The fault tools: a command is killed at every boundary of its writes, on a folder and on S3, and ends well when it is run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import obstore
import pytest

from manifests.errors import StoreUnreachable
from manifests.store import Store
from manifests.tables import read
from tests.faults import ROOT, Boundary, read_boundaries, run_cut
from tests.manifests.few_writes import write
from tools.chaos.s3_proxy import Cut, S3Proxy

MODULE = "tests.manifests.few_writes"
Content = tuple[list[dict[str, Any]], dict[str, bytes]]


def _content(uri: str) -> Content:
    """Rows of the table without their times, and all objects."""
    store = Store(uri)
    rows = [{k: v for k, v in row.items() if k != "written_at"} for row in read(store, "events").to_pylist()]
    objects = {info.path: store.get(info.path) for info in store.list("objects")}
    return sorted(rows, key=lambda row: row["round"]), objects


def _whole(uri: str) -> Content:
    """What a run that nobody killed leaves."""
    write(uri)
    rows, objects = content = _content(uri)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert set(objects) == {"objects/1", "objects/2"}
    return content


def test_folder_is_whole_after_a_kill_at_every_boundary(tmp_path: Path) -> None:
    whole = _whole(str(tmp_path / "unkilled"))
    counted = run_cut([str(tmp_path / "counted")], module=MODULE, log=tmp_path / "log")
    assert counted.returncode == 0, counted.stderr
    boundaries = read_boundaries(tmp_path / "log")
    assert {b.operation for b in boundaries} == {"put", "delete", "create", "write_deltalake"}
    assert {b.moment for b in boundaries} == {"before", "torn", "after"}

    def kill_and_finish(boundary: Boundary) -> None:
        uri, log = str(tmp_path / f"killed-{boundary.number}"), tmp_path / f"log-{boundary.number}"
        killed = run_cut([uri], module=MODULE, kill=boundary.number, log=log)
        assert killed.returncode == -signal.SIGKILL, (boundary, killed.stderr)
        reached = read_boundaries(log)
        assert [(b.number, b.moment, b.operation) for b in reached] == [
            (b.number, b.moment, b.operation) for b in boundaries[: boundary.number]
        ]
        write(uri)
        assert _content(uri) == whole, boundary

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill_and_finish, boundaries))


def test_torn_writes_leave_what_a_death_in_the_middle_leaves(tmp_path: Path) -> None:
    run_cut([str(tmp_path / "counted")], module=MODULE, log=tmp_path / "log")
    torn = {b.operation: b.number for b in read_boundaries(tmp_path / "log") if b.moment == "torn"}

    def left(operation: str) -> list[str]:
        uri = tmp_path / operation
        run_cut([str(uri)], module=MODULE, kill=torn[operation])
        return sorted(str(path.relative_to(uri)) for path in uri.rglob("*") if path.is_file())

    files = left("put")
    assert "objects/2#1" in files
    assert "objects/2" not in files
    assert left("create")[-1] == "tables/events/_delta_log/00000000000000000000.json#1"
    files = left("write_deltalake")
    assert "tables/events/_delta_log/00000000000000000003.json#1" in files
    assert sum(path.endswith(".parquet") for path in files) == 3
    assert read(Store(str(tmp_path / "write_deltalake")), "events").num_rows == 2


def test_command_line_is_run_where_no_module_is_named(tmp_path: Path) -> None:
    run = run_cut(["sql", "select 1", "--store", str(tmp_path / "nowhere")], log=tmp_path / "log")
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert read_boundaries(tmp_path / "log") == []


def _run_through(proxy: S3Proxy, uri: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, uri],
        env=os.environ | {"AWS_ENDPOINT_URL": proxy.endpoint},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_s3_is_whole_after_a_kill_before_and_after_every_write_request(s3_environment: str, s3_server: str) -> None:
    whole = _whole(f"{s3_environment}/unkilled")
    with S3Proxy(s3_server) as counting:
        process = _run_through(counting, f"{s3_environment}/counted")
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
    assert {method for method, _ in counting.writes} == {"PUT", "POST"}  # obstore deletes by POST
    assert any("/tables/events/part-" in path for _, path in counting.writes)
    assert any("/tables/events/_delta_log/" in path for _, path in counting.writes)

    def kill_and_finish(at: tuple[int, Literal["before", "after"]]) -> None:
        uri = f"{s3_environment}/killed-{at[0]}-{at[1]}"
        started = threading.Event()
        running: list[subprocess.Popen[str]] = []

        def on_write(number: int, moment: Literal["before", "after"], method: str, path: str) -> None:
            if (number, moment) == at:
                started.wait()
                running[0].kill()
                running[0].wait()
                raise Cut

        with S3Proxy(s3_server, on_write) as proxy:
            running.append(_run_through(proxy, uri))
            started.set()
            assert running[0].wait(60) == -signal.SIGKILL, at
            assert len(proxy.writes) == at[0]
        write(uri)
        assert _content(uri) == whole, at

    moments: list[Literal["before", "after"]] = ["before", "after"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill_and_finish, [(n + 1, moment) for n in range(len(counting.writes)) for moment in moments]))


def test_proxy_passes_every_kind_of_request(
    s3_environment: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Proxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = Store(s3_environment)
        large = os.urandom(6 << 20)
        obstore.put(store.objects, "parts", large, use_multipart=True, chunk_size=5 << 20)
        assert store.get("parts") == large
        for number in range(50):
            store.put_new(f"many/{number:02d}", b"")
        assert [info.size_bytes for info in store.list("many")] == [0] * 50
        assert not store.exists("absent")
        obstore.delete(store.objects, [f"many/{number:02d}" for number in range(50)])
        assert list(store.list("many")) == []
    assert {method for method, _ in proxy.writes} == {"PUT", "POST"}


def test_proxy_can_lose_a_reply(s3_environment: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer lives on and must not conclude that nothing was written."""

    def lose(number: int, moment: str, method: str, path: str) -> None:
        if moment == "after":
            raise Cut

    monkeypatch.setattr("manifests.store._RETRY", {"max_retries": 1})
    with S3Proxy(s3_server, lose) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with pytest.raises(StoreUnreachable):
            Store(s3_environment).put_new("x", b"written")
        assert Store(s3_environment).get("x") == b"written"
