"""Scores from what a run measured as it trained, on rows made by hand with answers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

import pipeline.online
from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import append
from pipeline.online import OnlineConfig, score_online
from tests.manifests.handmade import checkpoint, span
from tests.manifests.small_run import DOCS, tell


@pytest.fixture
def measured(store: Store) -> Store:
    """The small run's documents, and a run `o` of two steps that measured them."""
    tell(store)
    append(store, "checkpoints", [checkpoint(number, run="o") for number in (1, 2)])
    rows = [
        # Document a, in two pieces in step 1: 10 tokens, 1.0 in all; and again in step 2.
        _span(1, "a", 4, 0.25), _span(1, "a", 6, 0.75), _span(2, "a", 10, 3.0),
        _span(1, "b", 40, -4.0), _span(2, "c", 40, None),
        # Forgotten; and in a segment that was never committed.
        _span(1, "d", 10, 100.0), _span(3, "c", 10, 100.0),
    ]  # fmt: skip
    append(store, "consumption", rows)
    return store


def _span(number: int, shard: str, tokens: int, contribution: float | None) -> dict[str, Any]:
    return span(number, run="o", shard=shard, tokens=tokens, contribution=contribution)


def _scores(store: Store, job: str) -> dict[str, tuple[float, float]]:
    names = {doc_id: name for name, doc_id in DOCS.items()}
    rows = Catalog(store).rows("SELECT doc_id, score, stderr FROM influence WHERE job = ?", [job])
    return {names[row["doc_id"]]: (row["score"], row["stderr"]) for row in rows}


def test_score_is_the_contribution_per_token_and_its_error_that_of_all_where_few_are_seen_again(
    measured: Store,
) -> None:
    summary = score_online(measured, OnlineConfig(run="o", window=0))
    # Mean square of the three observations about zero: (1/10 + 9/10 + 16/40) / 3. Document a's own spread: 1 - 16/20.
    variance = 1.4 / 3
    assert _scores(measured, summary["job"]) == {
        "a": (pytest.approx(0.2), pytest.approx(math.sqrt((0.2 + 4 * variance) / 5 / 20))),
        "b": (pytest.approx(-0.1), pytest.approx(math.sqrt(variance / 40))),
    }
    assert (summary["documents"], summary["unscored"], summary["share_negative"]) == (2, 2, 0.5)


def test_error_is_that_within_documents_where_enough_are_seen_again(
    measured: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.online, "_LEAST_DEGREES", 1)
    summary = score_online(measured, OnlineConfig(run="o", window=0))
    assert _scores(measured, summary["job"]) == {
        "a": (pytest.approx(0.2), pytest.approx(0.1)),
        "b": (pytest.approx(-0.1), pytest.approx(math.sqrt(0.2 / 40))),
    }


def test_scores_count_in_typical_sizes_of_their_time(measured: Store) -> None:
    summary = score_online(measured, OnlineConfig(run="o", window=1))
    # Root mean square per token: step 1 √(0.5 / 50) = 0.1, step 2 √(0.9 / 10) = 0.3.
    scores = {name: score for name, (score, _) in _scores(measured, summary["job"]).items()}
    assert scores == {"a": pytest.approx((1.0 / 0.1 + 3.0 / 0.3) / 20), "b": pytest.approx(-1.0)}


def test_rows_say_what_they_are_and_a_finished_job_changes_nothing(
    measured: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    summary = score_online(measured, OnlineConfig(run="o"), lambda *said: seen.append(said))
    said = "SELECT DISTINCT method, checkpoint, probe, direct FROM influence WHERE job = ?"
    assert Catalog(measured).rows(said, [summary["job"]]) == [
        {"method": "online", "checkpoint": "run/o", "probe": "holdout of the run", "direct": True}
    ]
    assert seen == [("score", 2, 4)]
    assert score_online(measured, OnlineConfig(run="o")) == summary | {"already_done": True}
    append(measured, "checkpoints", [checkpoint(3, run="o")])
    monkeypatch.setattr(pipeline.online, "_PART_ROWS", 2)
    later = score_online(measured, OnlineConfig(run="o"))
    assert (later["documents"], later["already_done"]) == (3, False)


def test_a_run_without_contributions_is_an_error_that_says_the_mend(measured: Store) -> None:
    append(measured, "checkpoints", [checkpoint(9, run="n")])
    with pytest.raises(UserError, match=r"run n of .* measured no contributions; train one with --online-influence"):
        score_online(measured, OnlineConfig(run="n"))
    with pytest.raises(UserError, match=r"no run named 'x' with a checkpoint in .*; there are: b, n, o, r"):
        score_online(measured, OnlineConfig(run="x"))


@pytest.mark.parametrize("options", [{"window": -1}, {"prior": 0.0}, {"prior": math.nan}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        OnlineConfig(run="o", **options)
