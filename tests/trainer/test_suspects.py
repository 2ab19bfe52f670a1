"""Suspects of a loss spike: what stands out near a step comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import create_store
from tiny import fabricate, start_run, train_alone
from tools.cli import _run
from trainer.suspects import rank_suspects


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of one island that trained alone."""
    store = create_store(str(tmp_path_factory.mktemp("suspects") / "store"))
    fabricate(store)
    train_alone(start_run(store, "r", steps=8, num_islands=1), 0)
    return store


def test_documents_and_batches_near_the_step_come_by_how_far_they_are_from_usual(trained: Store) -> None:
    catalog = Catalog(trained)
    found = rank_suspects(catalog, "r", step=5, window=2, most=5).to_pylist()
    documents = [row for row in found if row["kind"] == "document"]
    batches = [row for row in found if row["kind"] == "batch"]
    assert len(documents) == 5
    assert {row["step"] for row in batches} == {4, 5}
    for rows in (documents, batches):
        assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    worst = documents[0]
    assert worst["step"] in (4, 5)
    losses = catalog.rows("SELECT loss FROM consumption WHERE run = 'r' AND tier = ? ORDER BY loss", [worst["tier"]])
    values = [row["loss"] for row in losses]

    def median(numbers: list[float]) -> float:
        ordered, half = sorted(numbers), len(numbers) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    spread = 1.4826 * median([abs(value - median(values)) for value in values])
    assert worst["loss_z"] == pytest.approx((worst["loss"] - median(values)) / spread, rel=1e-4)


def test_steps_that_there_is_no_record_of_are_refused(trained: Store) -> None:
    with pytest.raises(UserError, match="no record of island 3 of steps 1 to 5"):
        rank_suspects(Catalog(trained), "r", step=5, island=3)
    with pytest.raises(UserError, match="there are: r"):
        rank_suspects(Catalog(trained), "q", step=5)


def test_the_commands_say_what_they_found(trained: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    at = ["--store", str(trained.root)]
    assert _run(["rollback", "suspects", "r", "--step", "5", *at]) == 0
    assert "document" in capsys.readouterr().out
    document = Catalog(trained).rows("SELECT doc_id FROM consumption WHERE step > 6 LIMIT 1")[0]["doc_id"].hex()
    where = f"doc_id = from_hex('{document}')"
    assert _run(["rollback", "plan", "r", "--where", where, *at]) == 0
    assert "restore" in capsys.readouterr().out
    assert _run(["rollback", "plan", "--run", "r", "--where", where, "--format", "json", *at]) == 0
    assert capsys.readouterr().out.count('"redo_steps"') == 4
    assert _run(["rollback", "undo", "r", *at]) == 2
    assert "no branch" in capsys.readouterr().err
