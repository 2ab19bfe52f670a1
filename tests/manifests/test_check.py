"""Checks of whole stores, and the SQL that upkeep rests on, with answers worked out by hand."""

from __future__ import annotations

from datetime import timedelta

import pytest

from manifests.catalog import Catalog
from manifests.check import Checked, check
from manifests.consumption import append_consumption
from manifests.store import Store
from manifests.tables import append, to_table
from tests.manifests.handmade import START, checkpoint, checkpoint_id, event, job, mixture, run, span

SPANS = [
    span(1, shard="a", tokens=10, loss=1.5),
    span(1, shard="a", tokens=30, loss=None),
    span(1, shard="b", tier="B", tokens=20, loss=2.0),
    span(2, shard="a", tokens=40, loss=0.5),
    span(3, shard="a", tokens=99),
]
# Of the checkpoints 1 and 2 only: the third was never committed.
SUMS = {
    (1, "a", "S"): (2, 40, 10, 15.0),
    (1, "b", "B"): (1, 20, 20, 40.0),
    (2, "a", "S"): (1, 40, 40, 20.0),
}


@pytest.fixture
def trained(store: Store) -> Store:
    """Two segments that count, and one that doesn't."""
    append_consumption(store, to_table("consumption", SPANS), writer="w", sequence=1)
    append(store, "checkpoints", [checkpoint(1), checkpoint(2)])
    return store


def _sum(
    number: int, shard: str, tier: str, spans: int, tokens: int, loss_tokens: int, loss_sum: float
) -> dict[str, object]:
    return {
        "run": "r", "island": 0, "checkpoint": checkpoint_id(number), "shard": shard, "tier": tier, "origin": "real", "first_step": 1,
        "last_step": 1, "spans": spans, "tokens": tokens, "loss_tokens": loss_tokens, "loss_sum": loss_sum,
    }  # fmt: skip


def test_sums_that_agree_with_consumption_make_no_differences(trained: Store) -> None:
    assert Catalog(trained).ask("rollup_differences").num_rows == 0
    assert check(trained, deep=True).damages == []


def test_each_sum_that_differs_is_told_with_both_sides(store: Store) -> None:
    append(store, "consumption", SPANS)
    append(store, "checkpoints", [checkpoint(1), checkpoint(2)])
    said = SUMS | {(1, "a", "S"): (2, 41, 10, 15.0), (2, "b", "S"): (1, 7, 7, 7.0)}
    del said[1, "b", "B"]
    # The sum of losses of the second checkpoint was added up in another order.
    said[2, "a", "S"] = (1, 40, 40, 20.0 * (1 + 1e-12))
    append(store, "consumption_rounds", [_sum(*key, *sums) for key, sums in said.items()])
    rows = Catalog(store).ask("rollup_differences").to_pylist()
    told = [tuple(row.values()) for row in rows]
    assert told == [
        (checkpoint_id(1), "a", "S", 2, 40, 10, 15.0, 2, 41, 10, 15.0),
        (checkpoint_id(1), "b", "B", 1, 20, 20, 40.0, 0, 0, 0, 0.0),
        (checkpoint_id(2), "b", "S", 0, 0, 0, 0.0, 1, 7, 7, 7.0),
    ]
    findings = [damage.finding for damage in check(store).damages]
    assert [finding[:43] for finding in findings] == [f"checkpoint {checkpoint_id(n).hex()}" for n in (1, 2)]
    assert "2 sums differ" in findings[0]
    assert "shard a, tier S: 2 spans of 41 tokens, consumption has 2 of 40" in findings[0]


def test_a_sum_of_losses_that_is_wrong_is_told(store: Store) -> None:
    append(store, "consumption", [span(1), span(2, loss=float("nan"))])
    append(store, "checkpoints", [checkpoint(1), checkpoint(2)])
    sums = [_sum(1, "a", "S", 1, 10, 10, 15.1), _sum(2, "a", "S", 1, 10, 10, float("nan"))]
    append(store, "consumption_rounds", sums)
    rows = Catalog(store).ask("rollup_differences").to_pylist()
    assert [(row["checkpoint"], row["loss_sum"], row["said_loss_sum"]) for row in rows] == [
        (checkpoint_id(1), 15.0, 15.1)
    ]


def test_a_check_says_what_it_saw(trained: Store) -> None:
    append(trained, "events", [event()] * 7)
    told = []
    seen = check(trained, ["events", "checkpoints", "runs"], report=lambda *progress: told.append(progress))
    assert seen == Checked(tables=3, files=2, rows=9, damages=[])
    assert told[-1] == ("tables checked", 3, 3)


def test_a_file_of_other_rows_than_the_log_says_is_told(store: Store) -> None:
    append(store, "events", [event()] * 3)
    entry = store.root / "tables" / "events" / "_delta_log" / f"{1:020d}.json"
    entry.write_text(entry.read_text().replace('numRecords\\":3', 'numRecords\\":4'))
    assert [damage.finding for damage in check(store).damages] == ["has 3 rows, the log says 4"]


def test_moments_that_something_refers_to(store: Store) -> None:
    def at(hour: int) -> dict[str, object]:
        return {"written_at": START + timedelta(hours=hour)}

    jobs = [job("t") | at(1), job("s", kind="shard") | at(2), job("i", kind="ingest") | at(3)]
    append(store, "jobs", jobs)
    append(store, "runs", [run("going") | at(4), run("done") | at(5)])
    checkpoints = [
        checkpoint(1, run="going") | at(6),
        checkpoint(2, run="going", anchor=False) | at(7),
        checkpoint(3, run="done") | at(8),
        checkpoint(4, run="done", island=-1) | at(9),
    ]
    append(store, "checkpoints", checkpoints)
    append(store, "events", [event(run="done", kind="finished"), event(run="going", kind="merge")])
    moments = Catalog(store).ask("referred_moments")["written_at"].to_pylist()
    assert sorted(moments) == [START + timedelta(hours=hour) for hour in (1, 2, 4, 5, 6, 9)]


def test_versions_that_something_was_computed_from(store: Store) -> None:
    append(store, "mixtures", [mixture(inputs='{"feedback":4,"strategies":1}'), mixture(inputs='{"feedback":4}')])
    append(store, "jobs", [job("a", inputs='{"scores":"0af1","documents":["x"],"tiers":7,"share":0.5}'), job("b")])
    rows = Catalog(store).ask("referred_versions").to_pylist()
    assert sorted((row["name"], row["version"]) for row in rows) == [("feedback", 4), ("strategies", 1), ("tiers", 7)]
