"""Documents that are forgotten in the middle of a run: it goes on where it was, without them, and what had been trained on them stays on record."""

from __future__ import annotations

from typing import Any

import pytest

import trainer.records
from manifests.catalog import Catalog
from manifests.schemas import TIERS
from manifests.store import Store
from pipeline.forget import forget, plan_erasure
from tiny import silent, start_run, train_alone
from trainer.island import Island
from trainer.run import Run


class Killed(Exception):
    """What a test's fault raises."""


def _read(run: Run, *, after: int = 0) -> list[dict[str, Any]]:
    sql = "SELECT step, doc_id, tier, tokens FROM consumption WHERE run = ? AND step > ? ORDER BY step, position"
    return Catalog(run.store).rows(sql, [run.name, after])


def test_a_run_goes_on_without_what_was_forgotten_meanwhile(tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = start_run(tiny_store, "whole", num_islands=1)
    train_alone(whole, 0)
    run = start_run(tiny_store, "r", num_islands=1)
    really_commit = trainer.records.commit_rounds

    def die(run: Run, island: int, rows: list[dict[str, Any]]) -> None:
        if rows[-1]["round"] == 5:
            raise Killed
        really_commit(run, island, rows)

    with monkeypatch.context() as patch:
        patch.setattr("trainer.records.commit_rounds", die)
        with pytest.raises(Killed):
            train_alone(run, 0)
    early = {row["doc_id"] for row in _read(run)}
    late = {row["doc_id"] for row in _read(whole, after=4)}
    forgotten = {min(early), *sorted(late - early)[:2]}
    where = "hex(doc_id) IN (" + ", ".join(f"'{doc_id.hex().upper()}'" for doc_id in forgotten) + ")"

    erasure = plan_erasure(tiny_store, where, reason="asked to")
    assert set(erasure.doc_ids) == forgotten
    seen = {row["run"]: row for row in erasure.seen.to_pylist() if row["island"] == 0}
    first = min(row["step"] for row in _read(run) if row["doc_id"] in forgotten)
    assert (seen["r"]["first_round"], seen["r"]["last_round"], seen["r"]["checkpoints"]) == (first, 4, 5 - first)
    forget(erasure)

    Island(run, 0, emit=silent, in_background=False).train()
    assert not {row["doc_id"] for row in _read(run, after=4)} & forgotten
    assert {row["doc_id"] for row in _read(run)} & forgotten == early & forgotten
    # Every batch is full, by the island's own counter and by the table.
    config = run.config
    assert sum(row["tokens"] for row in _read(run)) == config.steps * config.batch_size * config.seq_len
    counted = Catalog(tiny_store).rows("SELECT max(tokens) AS n FROM checkpoints WHERE run = 'r' AND island = 0")
    assert counted[0]["n"] == config.steps * config.batch_size * config.seq_len
    # What both runs still read of a tier comes in the same order.
    compared = 0
    for tier in TIERS:
        expected = [row["doc_id"] for row in _read(whole, after=4) if row["tier"] == tier]
        going_on = [row["doc_id"] for row in _read(run, after=4) if row["tier"] == tier]
        common = set(expected) & set(going_on)
        assert _firsts(expected, common) == _firsts(going_on, common)
        compared += len(common)
    assert compared > 5


def _firsts(doc_ids: list[bytes], kept: set[bytes]) -> list[bytes]:
    return list(dict.fromkeys(doc_id for doc_id in doc_ids if doc_id in kept))
