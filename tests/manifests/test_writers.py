"""Many writers at once, in processes of their own: every row is there, and there once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manifests.catalog import Catalog
from manifests.log import history
from manifests.store import Store
from manifests.tables import create_store

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from manifests.store import Store
from manifests.tables import append
from tests.manifests.handmade import event

store, name, writer, commits, rows = Store(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
sys.stdin.readline()
for number in range(commits):
    batch = [event(run=name, kind=str(number), round=row) for row in range(rows)]
    if append(store, "events", batch, writer=writer, sequence=number + 1):
        print(number)
"""


def _write_at_once(uri: str, writers: list[tuple[str, str]], *, commits: int, rows: int) -> list[set[int]]:
    """Starts a process for each (name, writer); returns the numbers of the commits that each says it made."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, uri, name, writer, str(commits), str(rows)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for name, writer in writers
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate() for process in processes]
    assert [errors for _, errors in answers] == [""] * len(writers)
    return [{int(line) for line in out.split()} for out, _ in answers]


@pytest.mark.parametrize(("where", "commits", "rows"), [("folder", 25, 100), ("s3", 3, 20)])
def test_four_writers_at_once_lose_and_double_no_row(
    where: str, commits: int, rows: int, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue("store").uri if where == "folder" else request.getfixturevalue("s3_environment")
    store = create_store(uri)
    names = [(f"w{number}", f"w{number}") for number in range(4)]
    assert _write_at_once(uri, names, commits=commits, rows=rows) == [set(range(commits))] * 4
    (counts,) = Catalog(store).rows(
        "SELECT count(*) AS n, count(DISTINCT (run, kind, round)) AS different, count(DISTINCT run) AS runs FROM events"
    )
    assert counts == {"n": 4 * commits * rows, "different": 4 * commits * rows, "runs": 4}
    assert sorted(history(store, "events")["version"].to_pylist()) == list(range(4 * commits + 1))


def test_of_two_processes_with_one_name_each_commit_is_made_by_one(store: Store) -> None:
    first, second = _write_at_once(store.uri, [("a", "same"), ("b", "same")], commits=8, rows=3)
    assert first | second == set(range(8))
    assert not first & second
    rows = Catalog(store).rows("SELECT kind, count(*) AS n FROM events GROUP BY kind")
    assert {row["kind"]: row["n"] for row in rows} == {str(number): 3 for number in range(8)}
