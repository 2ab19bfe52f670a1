"""Every job that writes is killed at the boundaries of its writes and run again: it ends as if nobody had killed it. On a folder and on S3.

Which boundaries there are is counted by a run that nobody kills (faults.py, s3_proxy.py). All of them are cut where ATOLL_EVERY_CUT is 1. Else,
to be done in a few minutes: in a folder every one of a job with few, every `_STRIDE`th of the others; on S3, in some jobs, of every kind of request one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import pytest

from tests import forks
from tests.faults import Boundary, Killer, install, read_boundaries
from tests.kill_jobs import JOBS, run_job, write_sources
from tests.main_job import upload
from tests.store_content import Content, read_content
from tools.chaos.s3_proxy import Cut, S3Proxy

EVERY_CUT = os.environ.get("ATOLL_EVERY_CUT") == "1"
_STRIDE = {
    "create": 61,
    "ingest": 2,
    "tokenizer": 2,
    "score": 5,
    "tier": 2,
    "shard": 20,
    "train": 38,
    "rollback": 5,
    "forget": 20,
    "retier": 31,
    "compact": 38,
    "vacuum": 4,
}
"""Not divisible by 3, so that it comes upon all three moments of a write."""
_ON_S3 = ("create", "ingest", "shard", "train", "forget", "compact")
"""Between them they make every kind of request."""
_PATIENT = pytest.mark.timeout(3600 if EVERY_CUT else 180)
_THREADS = 2
Moment = Literal["before", "after"]
_MOMENTS: tuple[Moment, Moment] = ("before", "after")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncut:
    """A job that nobody killed."""

    before: Path
    """The folder of the store that it began with; not to be changed."""
    boundaries: list[Boundary]
    content: Content
    """What the store holds after it."""


class Chain:
    """All jobs, one after the other on one store, each run once when it's first asked for."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder
        write_sources(folder)
        (folder / "after").mkdir()
        self._uncut: dict[str, Uncut] = {}

    def __getitem__(self, job: str) -> Uncut:
        for name in JOBS:
            if name not in self._uncut:
                self._uncut[name] = self._run(name)
            if name == job:
                break
        return self._uncut[job]

    def _run(self, name: str) -> Uncut:
        before = self.sources / "before" / name
        shutil.copytree(self.sources / "after", before)
        log = self.sources / f"{name}.log"
        forks.call(_run_cut, name, str(self.sources / "after"), str(self.sources), 0, str(log))
        content = forks.call(read_content, str(self.sources / "after"))
        return Uncut(before=before, boundaries=read_boundaries(log), content=content)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    forks.preload("tests.kill_jobs", "tests.store_content", "tests.faults")
    folder = tmp_path_factory.mktemp("chain")
    yield Chain(folder)
    shutil.rmtree(folder)


def _run_cut(job: str, uri: str, sources: str, kill: int, log: str) -> None:
    install(Killer(kill=kill, log=Path(log)))
    run_job(job, uri, sources)


def _finish(job: str, uri: str, sources: str) -> Content:
    run_job(job, uri, sources)
    return read_content(uri)


def _differences(found: Content, expected: Content) -> list[str]:
    """What is not as without the kill, in words."""
    tables = [
        f"{table}: {[row for row in rows if row not in found.tables[table]]} became "
        f"{[row for row in found.tables[table] if row not in rows]}, {len(rows)} rows {len(found.tables[table])}"
        for table, rows in expected.tables.items()
        if found.tables[table] != rows
    ]
    left = [path for path in found.objects if path not in expected.objects]
    lost = [path for path, hash_ in expected.objects.items() if found.objects.get(path) != hash_]
    return [*tables, *(f"{path} was left" for path in left), *(f"{path} is gone or another" for path in lost)]


@_PATIENT
@pytest.mark.parametrize("job", list(JOBS))
def test_folder_is_whole_after_a_kill_and_another_run(job: str, chain: Chain, tmp_path: Path) -> None:
    uncut = chain[job]
    assert uncut.boundaries

    def kill_and_finish(boundary: Boundary) -> list[str]:
        store, log = tmp_path / f"{boundary.number}", tmp_path / f"{boundary.number}.log"
        shutil.copytree(uncut.before, store)
        killed = forks.start(_run_cut, job, str(store), str(chain.sources), boundary.number, str(log))
        assert killed.exit_code() == -signal.SIGKILL, boundary
        assert len(read_boundaries(log)) == boundary.number
        found = forks.call(_finish, job, str(store), str(chain.sources))
        shutil.rmtree(store)
        return _differences(found, uncut.content)

    _check_all(kill_and_finish, uncut.boundaries[:: 1 if EVERY_CUT else _STRIDE.get(job, 1)])


@_PATIENT
@pytest.mark.parametrize("job", list(JOBS) if EVERY_CUT else list(_ON_S3))
def test_s3_is_whole_after_a_kill_and_another_run(job: str, chain: Chain, s3_environment: str, s3_server: str) -> None:
    uncut = chain[job]
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "ATOLL_CACHE"))}
    begin, sources = f"{s3_environment}/uncut", str(chain.sources)
    upload(uncut.before, begin)
    with S3Proxy(s3_server) as counting:
        through = environment | {"AWS_ENDPOINT_URL": counting.endpoint}
        forks.call(run_job, job, begin, sources, environment=through)
    assert not _differences(forks.call(read_content, begin, environment=environment), uncut.content)
    assert counting.writes

    def kill_and_finish(at: tuple[int, Moment]) -> list[str]:
        uri = f"{s3_environment}/{at[0]}-{at[1]}"
        upload(uncut.before, uri)
        started = threading.Event()
        running: list[forks.Child] = []

        def on_write(number: int, moment: Moment, method: str, path: str) -> None:
            if (number, moment) == at:
                started.wait()
                running[0].kill()
                raise Cut

        with S3Proxy(s3_server, on_write) as proxy:
            through = environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
            running.append(forks.start(run_job, job, uri, sources, environment=through))
            started.set()
            assert running[0].exit_code() == -signal.SIGKILL, at
        found = forks.call(_finish, job, uri, sources, environment=environment)
        return _differences(found, uncut.content)

    _check_all(kill_and_finish, _cuts(counting.writes))


def _check_all(kill_and_finish: Callable[[T], list[str]], cuts: Sequence[T]) -> None:
    """Cuts a job everywhere, a few at once."""
    with ThreadPoolExecutor(_THREADS) as pool:
        differences = dict(zip(cuts, pool.map(kill_and_finish, cuts), strict=True))
    assert {cut: found for cut, found in differences.items() if found} == {}
    print(f"killed at {len(cuts)} boundaries")


def _cuts(writes: Sequence[tuple[str, str]]) -> list[tuple[int, Moment]]:
    """Before and after which requests a job is killed: both for all, or for one of every kind, from the middle, before and after in turn."""
    numbers: dict[str, list[int]] = {}
    for number, (method, path) in enumerate(writes, start=1):
        numbers.setdefault(f"{method} {_kind(path)}", []).append(number)
    if EVERY_CUT:
        return [(number, moment) for number in range(1, len(writes) + 1) for moment in _MOMENTS]
    chosen = sorted(same[len(same) // 2] for same in numbers.values())
    return [(number, _MOMENTS[place % 2]) for place, number in enumerate(chosen)]


def _kind(path: str) -> str:
    """What a request is about: entry or checkpoint of a table's log, its data file, an object, or what its query says, such as `delete`."""
    name, _, query = path.partition("?")
    if query:
        return query
    if "/_delta_log/" in name:
        return "log entry" if re.search(r"/\d+\.json$", name) else "log checkpoint"
    return "data file" if "/tables/" in name else "object"
