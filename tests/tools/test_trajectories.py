"""The course of runs as data: what the tables hold, read again; and a card that says what every column is."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append
from tests.manifests.handmade import checkpoint, event, mixture, run
from tools.cli import _run

FILES = ("events", "feedback", "losses", "mixtures", "runs")


@pytest.fixture
def filled(store: Store) -> Store:
    append(store, "runs", [run("r"), run("other")])
    append(store, "mixtures", [mixture(round=4, weight_s=0.5), mixture(round=0), mixture(run="other")])
    append(store, "checkpoints", [checkpoint(1), checkpoint(2, run="other"), checkpoint(3, island=-1)])
    append(store, "events", [event()])
    return store


def test_a_runs_course_is_what_the_tables_hold_of_it(filled: Store, tmp_path: Path) -> None:
    out = tmp_path / "course"
    assert _run(["trajectories", "r", "--out", str(out), "--store", filled.uri]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["README.md", *(f"{name}.parquet" for name in FILES)]
    mixes = pq.read_table(out / "mixtures.parquet").to_pylist()
    assert [(row["round"], row["weight_s"]) for row in mixes] == [(0, 1.0), (4, 0.5)]
    assert [row["island"] for row in pq.read_table(out / "losses.parquet").to_pylist()] == [-1, 0]
    assert _run(["trajectories", "r", "other", "--out", str(tmp_path / "both"), "--store", filled.uri]) == 0
    assert pq.read_table(tmp_path / "both" / "losses.parquet").num_rows == 3


def test_the_card_says_what_every_column_is(filled: Store, tmp_path: Path) -> None:
    out = tmp_path / "course"
    assert _run(["trajectories", "r", "--out", str(out), "--store", filled.uri]) == 0
    card = (out / "README.md").read_text()
    for name in FILES:
        table = pq.read_table(out / f"{name}.parquet")
        section = card.split(f"## {name}.parquet ({table.num_rows:,} rows)")[1].split("\n## ")[0]
        schema = TABLES["checkpoints" if name == "losses" else name].schema
        for column in table.schema:
            meaning = schema.field(column.name).metadata[b"meaning"].decode()
            (line,) = (line for line in section.splitlines() if line.startswith(f"| `{column.name}` |"))
            assert meaning in line


@pytest.mark.parametrize(
    ("arguments", "why"), [(["r", "nobody"], "no run nobody"), (["r", "--out", "."], "exists; name a new folder")]
)
def test_what_cant_be_written_is_refused_and_nothing_is_left(
    filled: Store, tmp_path: Path, arguments: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "course")]
    assert _run(["trajectories", *arguments, *out, "--store", filled.uri]) == 2
    assert why in capfd.readouterr().err
    assert not (tmp_path / "course").exists()
