"""The tier job on a store with scores: a version each time something changes, none when nothing does."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import Job, make_job
from manifests.store import Store
from pipeline import tier as tier_module
from pipeline.tier import TierConfig, corpus_table, say_changes, tier, tier_table

SCORES = {0: 5.0, 1: 3.0, 2: 1.0, 3: 1.0, 4: -0.001, 5: -1.0}


def _id(number: int) -> bytes:
    return bytes([number] * 16)


def _document(number: int, label: str, job: str) -> dict[str, Any]:
    return {
        "doc_id": _id(number), "corpus": "odd" if number % 2 else "even", "origin": "synthetic", "license": "l", "access": "public", "split": "train",
        "label": label, "text_bytes": 100, "source_uri": "x", "source_row": number, "job": job,
    }  # fmt: skip


def _ingest(store: Store, num: int = 6) -> None:
    ingest = make_job(store, "ingest", config={}, inputs={})
    ingest.append("documents", [_document(n, "good" if n < 3 else "bad", ingest.id) for n in range(num)], part=1)
    ingest.commit({})


def _score(
    store: Store,
    scores: Mapping[int, float],
    *,
    name: str = "s",
    method: str = "m",
    stderr: float = 0.01,
    direct: bool = True,
    parts: int = 1,
    inputs: Mapping[str, Any] | None = None,
    **config: Any,
) -> str:
    """A finished score job; its rows in the order of `scores`, in so many parts."""
    job = make_job(store, "score", config={"name": name} | config, inputs=inputs or {})
    rows = [
        {
            "doc_id": _id(n), "method": method, "score": score, "stderr": stderr, "checkpoint": "k", "probe": "p",
            "scored_at": datetime.now(UTC), "direct": direct, "job": job.id,
        }
        for n, score in scores.items()
    ]  # fmt: skip
    for part in range(parts):
        job.append("influence", rows[part::parts], part=part + 1)
    job.commit({})
    return job.id


def _tiers(store: Store, version: int = 1) -> str:
    rows = Catalog(store).rows("SELECT tier FROM tiers WHERE tier_version = ? ORDER BY doc_id", [version])
    return "".join(row["tier"] for row in rows)


@pytest.fixture
def scored(store: Store) -> Store:
    """A store with six documents and their scores."""
    _ingest(store)
    _score(store, SCORES)
    return store


def test_documents_get_the_tiers_that_their_scores_say(scored: Store) -> None:
    summary = tier(scored, config=TierConfig())
    assert summary["tier_version"] == 1
    assert summary["documents"] == {"S": 2, "A": 2, "B": 1, "C": 1}
    assert _tiers(scored) == "SSAABC"
    assert "changes" not in summary
    recorded = json.loads(Catalog(scored).rows("SELECT thresholds FROM tier_versions")[0]["thresholds"])
    assert recorded["S"] == 3.0
    assert dict(recorded["lorenz"])[0.5] == pytest.approx(0.9)
    assert recorded["documents_for_wanted_share"] == pytest.approx(2 / 6)


def test_same_scores_and_options_change_nothing_new_options_make_a_version(scored: Store) -> None:
    tier(scored, config=TierConfig())
    assert tier(scored, config=TierConfig())["already_done"]
    assert Catalog(scored).rows("SELECT max(tier_version) AS v, count(*) AS n FROM tiers") == [{"v": 1, "n": 6}]
    assert tier(scored, config=TierConfig(share=0.5))["tier_version"] == 2
    assert Catalog(scored).rows("SELECT count(*) AS n FROM tiers WHERE tier_version = 1") == [{"n": 6}]


def test_newest_scores_are_used_and_older_ones_can_be_named(scored: Store) -> None:
    first = Catalog(scored).rows("SELECT job FROM jobs WHERE kind = 'score'")[0]["job"]
    newest = _score(scored, {n: -score for n, score in SCORES.items()}, name="turned")
    assert tier(scored, config=TierConfig())["documents"]["C"] == 4
    assert tier(scored, config=TierConfig(score_jobs=(newest,)))["already_done"]
    assert tier(scored, config=TierConfig(score_jobs=(first,)))["documents"]["C"] == 1


def test_attempt_that_died_before_its_commit_leaves_no_version(scored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Job, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            tier(scored, config=TierConfig())
    assert Catalog(scored).rows("SELECT * FROM tiers") == []
    assert tier(scored, config=TierConfig())["tier_version"] == 1
    assert Catalog(scored).rows("SELECT count(*) AS n FROM tiers") == [{"n": 6}]


def test_documents_forgotten_after_an_attempt_died_leave_the_others_once_each(
    scored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_PART_ROWS", 2)
    append = Job.append

    def append_until(job: Job, table: str, rows: Any, *, part: int) -> bool:
        if part == 2:
            raise KeyboardInterrupt
        return append(job, table, rows, part=part)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "append", append_until)
        with pytest.raises(KeyboardInterrupt):
            tier(scored, config=TierConfig())
    first = min(_id(n) for n in range(6))
    forget = make_job(scored, "forget", config={}, inputs={})
    row = {
        "doc_id": first,
        "corpus": "c",
        "license": "l",
        "access": "a",
        "predicate": "p",
        "reason": "r",
        "job": forget.id,
    }
    forget.append("tombstones", [row], part=1)
    forget.commit({})
    version = tier(scored, config=TierConfig())["tier_version"]
    rows = Catalog(scored).rows("SELECT doc_id FROM tiers WHERE tier_version = ? ORDER BY doc_id", [version])
    assert [row["doc_id"] for row in rows] == sorted(_id(n) for n in range(6) if _id(n) != first)


def test_version_is_the_same_whatever_the_order_of_the_scores_and_the_size_of_parts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    # Many ties: the ids must decide.
    scores = {n: float(rng.choice([-3, -2, -1, 0, 1, 5])) for n in range(60)}
    turned = dict(rng.sample(sorted(scores.items()), len(scores)))
    _ingest(store, num=60)
    _score(store, scores, num_folds=4, name="ordered")
    tier(store, config=TierConfig())
    _score(store, turned, num_folds=4, name="turned", parts=7)
    monkeypatch.setattr(tier_module, "_PART_ROWS", 11)
    assert tier(store, config=TierConfig())["changes"] == {"before": 1, "stayed": 60, "moved": {}, "new": 0, "gone": 0}
    rows = Catalog(store).rows("SELECT tier, score, method FROM tiers ORDER BY tier_version, doc_id")
    assert rows[:60] == rows[60:]
    versions = Catalog(store).rows("SELECT thresholds, method FROM tier_versions ORDER BY tier_version")
    assert versions[0] == versions[1]


def test_changes_since_the_version_before_are_counted(scored: Store) -> None:
    tier(scored, config=TierConfig())
    ingest = make_job(scored, "ingest", config={"more": 1}, inputs={})
    ingest.append("documents", [_document(6, "good", ingest.id)], part=1)
    ingest.commit({})
    # 0 isn't scored any more, 6 is new; 1 was in S.
    _score(scored, {1: -3.0, 2: 1.0, 3: 1.0, 4: -0.001, 5: -1.0, 6: 8.0}, name="later")
    summary = tier(scored, config=TierConfig())
    assert _tiers(scored, 2) == "CAABCS"
    changes = {"before": 1, "stayed": 4, "moved": {"S to C": 1}, "new": 1, "gone": 1}
    assert summary["changes"] == changes
    assert tier(scored, config=TierConfig())["changes"] == changes
    assert say_changes(changes) == "since version 1: 1 moved (1 from S to C), 4 stayed, 1 new, 1 gone"
    asked = Catalog(scored).ask("tier_changes", before=1, after=2).to_pylist()
    assert {(row["tier_before"], row["tier_after"], row["documents"]) for row in asked} == {
        ("S", "C", 1), ("S", None, 1), (None, "S", 1),
    }  # fmt: skip


def test_distilled_scores_complete_the_direct_ones(store: Store) -> None:
    _ingest(store)
    base = _score(store, {0: 5.0, 5: -1.0, 1: 3.0}, num_folds=4)
    # Of document 5, what was measured counts and not the prediction.
    distilled = _score(
        store, {2: 1.0, 3: 1.0, 4: -0.9, 5: 99.0}, name="d", method="distilled/m", stderr=0.5, direct=False, inputs={"base": base}
    )  # fmt: skip
    summary = tier(store, config=TierConfig())
    assert _tiers(store) == "SSABCC"
    rows = Catalog(store).rows("SELECT score, method FROM tiers ORDER BY doc_id")
    assert [row["score"] for row in rows] == [5.0, 3.0, 1.0, 1.0, -0.9, -1.0]
    assert [row["method"] for row in rows] == ["m", "m", *["distilled/m"] * 3, "m"]
    (facts,) = summary["scores"]
    assert (facts["job"], facts["completed_by"], facts["documents"], facts["predicted"]) == (base, distilled, 3, 3)
    assert "lacking" not in summary
    # Naming the direct job beside it says nothing new; alone it leaves the others out.
    assert tier(store, config=TierConfig(score_jobs=(base, distilled)))["already_done"]
    assert sum(tier(store, config=TierConfig(score_jobs=(base,)))["documents"].values()) == 3
    # Its own error decides on a prediction: -0.9 isn't below zero with this confidence.
    assert tier(store, config=TierConfig(confidence=0.99))["documents"]["C"] == 1


def test_errors_of_folds_are_moderated_and_others_are_not(store: Store) -> None:
    _ingest(store)
    # With known errors -0.05 is four of them away.
    scores = dict.fromkeys(range(5), 1.0) | {5: -0.05}
    _score(store, scores, name="known", stderr=0.0125)
    assert tier(store, config=TierConfig(confidence=0.999))["documents"]["C"] == 1
    job = make_job(store, "score", config={"num_folds": 4}, inputs={})
    row = {
        "method": "m",
        "checkpoint": "k",
        "probe": "p",
        "scored_at": datetime.now(UTC),
        "direct": True,
        "job": job.id,
    }
    errors = [0.2, 0.4, 0.3, 0.25, 0.35, 0.0125]
    rows = [row | {"doc_id": _id(n), "score": scores[n], "stderr": errors[n]} for n in range(6)]
    job.append("influence", rows, part=1)
    job.commit({})
    # The last one's error is small by chance: the others say so.
    summary = tier(store, config=TierConfig(confidence=0.999))
    assert "C" not in summary["documents"]
    assert summary["scores"][0]["stderr_calibration"]["degrees"] == 3.0


def test_scores_without_errors_make_tiers_without_c(store: Store) -> None:
    _ingest(store)
    _score(store, SCORES, stderr=float("nan"), num_folds=4)
    assert tier(store, config=TierConfig())["documents"] == {"S": 2, "A": 2, "B": 2}


def test_several_jobs_are_combined_by_rank(scored: Store) -> None:
    first = Catalog(scored).rows("SELECT job FROM jobs WHERE kind = 'score'")[0]["job"]
    # Another estimator on another scale, without document 2, which exchanges the first two.
    second = _score(scored, {0: 0.2, 1: 0.9, 3: 0.1, 4: -0.4, 5: -0.9}, name="o", method="online", stderr=0.1)
    summary = tier(scored, config=TierConfig(score_jobs=(first, second)))
    assert summary["lacking"] == 1
    assert [facts["method"] for facts in summary["scores"]] == ["m", "online"]
    rows = Catalog(scored).rows("SELECT tier, score, method FROM tiers ORDER BY doc_id")
    assert {row["method"] for row in rows} == {"ranks of m, online"}
    # Mean ranks, of 6 and of 5: 0 (11/12 + 7/10)/2, 1 (9/12 + 9/10)/2, so 1 is first; the rest keep their order. 2 has 6/12 and 3 (6/12 + 5/10)/2: equal.
    assert [row["score"] for row in rows] == pytest.approx([3.0, 5.0, 1.0, 1.0, -0.001, -1.0])
    # 4: z of -0.1 and -4, so -2.05 in the mean: harmful.
    assert "".join(row["tier"] for row in rows) == "SSABCC"
    turned = tier(scored, config=TierConfig(score_jobs=(second, first)))
    assert turned["tier_version"] == 2
    # The second of six, place 9/12, lies a quarter of the way from 0.2 (7/10) to 0.9 (9/10).
    assert turned["thresholds"]["S"] == pytest.approx(0.375)


@pytest.mark.parametrize("problem", ["unknown", "two completions", "base gone"])
def test_score_jobs_that_cannot_be_used_are_named(scored: Store, problem: str) -> None:
    base = Catalog(scored).rows("SELECT job FROM jobs WHERE kind = 'score'")[0]["job"]
    if problem == "unknown":
        wanted, message = ("nope",), f"no score job 'nope'; there are: {base}"
    elif problem == "two completions":
        wanted = tuple(
            _score(scored, {0: 1.0}, name=name, method="distilled", direct=False, inputs={"base": base})
            for name in "ab"
        )
        message = "both complete the scores of"
    else:
        wanted = (_score(scored, {0: 1.0}, name="c", method="distilled", direct=False, inputs={"base": "lost"}),)
        message = "completes job lost"
    with pytest.raises(UserError, match=message):
        tier(scored, config=TierConfig(score_jobs=wanted))


def test_sizes_are_kept_and_what_they_decided_is_said(scored: Store) -> None:
    summary = tier(scored, config=TierConfig(sizes={"S": (0.0, 0.2), "C": (0.0, 0.0)}))
    assert summary["documents"] == {"S": 1, "A": 3, "B": 2}
    assert summary["notes"] == ["1 documents that are harmful with confidence are not in C: there is no room"]


def test_table_says_where_each_planted_label_went(scored: Store) -> None:
    tier(scored, config=TierConfig())
    table = {row["tier"]: row for row in tier_table(Catalog(scored), 1).to_pylist()}
    assert table["S"]["documents"] == 2
    assert table["S"]["share_of_influence"] == pytest.approx(0.8)
    assert table["S"]["good"] == pytest.approx(2 / 3)
    assert table["S"]["bad"] == 0
    assert table["C"]["bad"] == pytest.approx(1 / 3)


def test_table_by_corpus_and_its_concentration(scored: Store) -> None:
    summary = tier(scored, config=TierConfig())
    # even: 0 S 5, 2 A 1, 4 B -0.001; odd: 1 S 3, 3 A 1, 5 C -1. Positive influence in all: 10.
    third = pytest.approx(1 / 3)
    assert corpus_table(Catalog(scored), 1).to_pylist() == [
        {"corpus": corpus, "tier": name, "documents": 1, "share_of_corpus": third, "share_of_influence": pytest.approx(share), "mean_score": score}
        for corpus, name, share, score in [
            ("even", "S", 0.5, 5.0), ("even", "A", 0.1, 1.0), ("even", "B", 0.0, -0.001),
            ("odd", "S", 0.3, 3.0), ("odd", "A", 0.1, 1.0), ("odd", "C", 0.0, -1.0),
        ]
    ]  # fmt: skip
    # 5 of 6 is enough; 3 of 4 isn't.
    needed = {name: facts["documents_for_wanted_share"] for name, facts in summary["corpora"].items()}
    assert needed == {"even": third, "odd": pytest.approx(2 / 3)}


def test_tokens_are_told_where_the_pool_knows_them(scored: Store) -> None:
    tier(scored, config=TierConfig())
    assert "tokens" not in tier_table(Catalog(scored), 1).column_names
    job = make_job(scored, "shard", config={}, inputs={})
    # Only documents of odd, so none of the first row's: the column must be there all the same.
    places = [
        {"pool": "p", "shard": "s", "position": n, "doc_id": _id(n), "tokens": 10 + n, "job": job.id} for n in (3, 5)
    ]
    job.append("shards", places, part=1)
    job.commit({})
    by_tier = {row["tier"]: row["tokens"] for row in tier_table(Catalog(scored), 1).to_pylist()}
    assert by_tier == {"S": None, "A": 13, "B": None, "C": 15}
    by_corpus = corpus_table(Catalog(scored), 1).to_pylist()
    assert [row["tokens"] for row in by_corpus] == [None, None, None, None, 13, 15]


@pytest.mark.parametrize(
    "option",
    [{"share": 0.0}, {"share": 1.5}, {"confidence": 0.2}, {"confidence": 1.0}, {"sizes": {"S": (0.5, 0.2)}}],
)
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        TierConfig(**option)


def test_store_without_scores_names_the_mend(store: Store) -> None:
    with pytest.raises(UserError, match="atoll score"):
        tier(store, config=TierConfig())
