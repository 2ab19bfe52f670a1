"""The tier job on a store with scores: a version each time something changes, none when nothing does."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import make_job
from manifests.store import Store
from pipeline.tier import TierConfig, tier, tier_table


def _document(number: int, label: str, job: str) -> dict[str, Any]:
    return {
        "doc_id": bytes([number] * 16), "corpus": "c", "origin": "synthetic", "license": "l", "access": "public", "split": "train",
        "label": label, "text_bytes": 100, "source_uri": "x", "source_row": number, "job": job,
    }  # fmt: skip


def _score_store(store: Store, scores: dict[int, float], *, name: str = "s") -> str:
    from datetime import UTC, datetime

    ingest = make_job(store, "ingest", config={}, inputs={})
    ingest.append("documents", [_document(n, "good" if n < 3 else "bad", ingest.id) for n in range(6)], part=1)
    ingest.commit({})
    job = make_job(store, "score", config={"name": name}, inputs={})
    rows = [
        {
            "doc_id": bytes([n] * 16), "method": "m", "score": score, "stderr": 0.01, "checkpoint": "k", "probe": "p",
            "scored_at": datetime.now(UTC), "direct": True, "job": job.id,
        }
        for n, score in scores.items()
    ]  # fmt: skip
    job.append("influence", rows, part=1)
    job.commit({})
    return job.id


SCORES = {0: 5.0, 1: 3.0, 2: 1.0, 3: 1.0, 4: -0.001, 5: -1.0}


def test_documents_get_the_tiers_that_their_scores_say(store: Store) -> None:
    _score_store(store, SCORES)
    summary = tier(store, config=TierConfig(share=0.8, max_s=0.5))
    assert summary["tier_version"] == 1
    rows = Catalog(store).rows("SELECT doc_id, tier FROM tiers ORDER BY doc_id")
    assert [row["tier"] for row in rows] == ["S", "S", "A", "A", "B", "C"]


def test_same_scores_and_options_change_nothing_new_options_make_a_version(store: Store) -> None:
    _score_store(store, SCORES)
    tier(store, config=TierConfig())
    assert tier(store, config=TierConfig())["already_done"]
    assert Catalog(store).rows("SELECT max(tier_version) AS v, count(*) AS n FROM tiers") == [{"v": 1, "n": 6}]
    assert tier(store, config=TierConfig(share=0.5))["tier_version"] == 2
    assert Catalog(store).rows("SELECT count(*) AS n FROM tiers WHERE tier_version = 1") == [{"n": 6}]


def test_newest_scores_are_used_and_older_ones_can_be_named(store: Store) -> None:
    first = _score_store(store, SCORES)
    _score_store(store, {n: -score for n, score in SCORES.items()}, name="turned")
    assert tier(store, config=TierConfig())["documents"]["C"] == 4
    assert tier(store, config=TierConfig(score_job=first))["documents"]["C"] == 1


def test_attempt_that_died_before_its_commit_leaves_no_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from manifests.jobs import Job

    _score_store(store, SCORES)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            tier(store, config=TierConfig())
    assert Catalog(store).rows("SELECT * FROM tiers") == []
    assert tier(store, config=TierConfig())["tier_version"] == 1
    assert Catalog(store).rows("SELECT count(*) AS n FROM tiers") == [{"n": 6}]


def test_table_says_where_each_planted_label_went(store: Store) -> None:
    _score_store(store, SCORES)
    tier(store, config=TierConfig(share=0.8, max_s=0.5))
    table = {row["tier"]: row for row in tier_table(Catalog(store), 1).to_pylist()}
    assert table["S"]["documents"] == 2
    assert table["S"]["share_of_influence"] == pytest.approx(0.8)
    assert table["S"]["good"] == pytest.approx(2 / 3)
    assert table["S"]["bad"] == 0
    assert table["C"]["bad"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "option", [{"share": 0.0}, {"share": 1.5}, {"confidence": 0.2}, {"confidence": 1.0}, {"max_s": 0.0}]
)
def test_options_out_of_range_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(UserError):
        TierConfig(**option)  # type: ignore[arg-type]


def test_store_without_scores_names_the_mend(store: Store) -> None:
    with pytest.raises(UserError, match="atoll score"):
        tier(store, config=TierConfig())
