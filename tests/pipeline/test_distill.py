"""The job `distill` on scores made by hand: what it predicts and what not, that a broken attempt goes on, that a finished one changes nothing."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from manifests.catalog import Catalog
from manifests.editions import set_policy
from manifests.errors import UserError
from manifests.jobs import Job, make_job
from manifests.store import Store
from manifests.tables import create_store, read
from pipeline.distill import DistillConfig, distill
from pipeline.distilled import rank_correlation
from pipeline.engine import InProcess
from pipeline.ingest import ingest
from pipeline.overlap import holdout_hashes, ngrams_path
from pipeline.sources import SourceSpec
from pipeline.texts import read_texts
from pipeline.tier import TierConfig, tier
from pipeline.tokenizer import load_tokenizer, train_tokenizer

WORDS = ["tide", "reef", "coral", "lagoon", "island", "current", "sand", "shell", "wave", "palm", "anchor", "harbour"]
NUM_DOCUMENTS, NUM_DIRECT = 420, 240
CONFIG = DistillConfig(partition_size=50)


def fill(store: Store, folder: Path, *, count: int = NUM_DOCUMENTS, seed: int = 0, license_: str = "MIT") -> None:
    """Documents whose label is the share of noise in them."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for share in rng.uniform(0, 0.6, count):
        words = rng.choice(WORDS, rng.integers(20, 60)).tolist()
        for place in np.flatnonzero(rng.random(len(words)) < share):
            words[place] = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz0123456789#%"), 6))
        texts.append(" ".join(words))
        labels.append(str(share))
    path = folder / f"reef-{seed}.parquet"
    pq.write_table(pa.table({"text": texts, "label": labels}), path, row_group_size=100)
    spec = SourceSpec(uri=str(path), format="parquet", corpus="reef", columns={"text": "text", "label": "label"}, license=license_)  # fmt: skip
    ingest(store, [spec], holdout_share=0.1)


def add_scores(
    store: Store,
    *,
    num: int | None = NUM_DIRECT,
    shuffled: bool = False,
    method: str = "m",
    tokenizer: str | None = None,
) -> str:
    """A finished score job: of a sample drawn evenly, or of all documents (num None), the score less the share of noise; returns its id."""
    catalog = Catalog(store)
    documents = catalog.rows("SELECT doc_id, label::DOUBLE AS share FROM documents WHERE split = 'train' ORDER BY doc_id")  # fmt: skip
    ingests = [row["job"] for row in catalog.rows("SELECT DISTINCT job FROM documents")]
    job = make_job(
        store,
        "score",
        config={"sample": num, "method": method, "shuffled": shuffled, "tokenizer": tokenizer},
        inputs={"ingest": ingests},
    )
    rng = np.random.default_rng(7)
    scores = np.array([0.2 - row["share"] for row in documents]) + rng.normal(0, 0.03, len(documents))
    if shuffled:
        rng.shuffle(scores)
    same = {"method": method, "stderr": 0.03, "checkpoint": "c", "probe": "p", "scored_at": 0, "direct": True, "job": job.id}  # fmt: skip
    rows = [same | {"doc_id": row["doc_id"], "score": score} for row, score in zip(documents, scores, strict=True)]
    job.append("influence", rows[:num], part=1)
    job.commit({})
    return job.id


@pytest.fixture
def sampled(store: Store, tmp_path: Path) -> Store:
    fill(store, tmp_path)
    add_scores(store)
    return store


def predicted(store: Store) -> list[dict[str, Any]]:
    """All that counts, but for the time."""
    sql = "SELECT doc_id, method, score, stderr, checkpoint, probe, direct FROM influence WHERE NOT direct ORDER BY doc_id"
    return Catalog(store).rows(sql)


def test_every_document_left_out_by_the_sample_is_predicted_once_and_no_other(sampled: Store) -> None:
    summary = distill(sampled, config=CONFIG)
    catalog = Catalog(sampled)
    rows = predicted(sampled)
    direct = {row["doc_id"] for row in catalog.rows("SELECT doc_id FROM influence WHERE direct")}
    train = {row["doc_id"] for row in catalog.rows("SELECT doc_id FROM documents WHERE split = 'train'")}
    assert {row["doc_id"] for row in rows} == train - direct
    assert len(rows) == len(train - direct) == summary["documents"] > 50
    assert {(r["method"], r["checkpoint"], r["probe"], r["direct"]) for r in rows} == {("distilled/m", "c", "p", False)}
    assert summary["fitted_on"] == NUM_DIRECT
    assert "warning" not in summary


def test_reported_correlation_and_standard_error_hold_for_what_was_predicted(sampled: Store) -> None:
    summary = distill(sampled, config=CONFIG)
    rows = Catalog(sampled).rows(
        "SELECT score, stderr, 0.2 - label::DOUBLE AS truth FROM influence JOIN documents USING (doc_id) WHERE NOT direct"
    )
    scores, truths = np.array([row["score"] for row in rows]), np.array([row["truth"] for row in rows])
    assert summary["rank_correlation"] > 0.8
    assert len(summary["folds"]) == 5
    assert rank_correlation(scores, truths) == pytest.approx(summary["rank_correlation"], abs=0.1)
    assert np.sqrt(np.mean((scores - truths) ** 2)) == pytest.approx(rows[0]["stderr"], rel=0.3)
    stored = Catalog(sampled).rows("SELECT kind, config, summary FROM jobs WHERE job = ?", [summary["job"]])[0]
    assert stored["kind"] == "score"
    assert json.loads(stored["config"])["base"] == summary["base"]
    assert json.loads(stored["summary"])["rank_correlation"] == summary["rank_correlation"]


def test_scores_without_a_trace_in_the_text_are_predicted_with_a_warning(store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    add_scores(store, shuffled=True)
    summary = distill(store, config=CONFIG)
    assert abs(summary["rank_correlation"]) < 0.2
    assert "hardly better than chance" in summary["warning"]


class PickledEngine(InProcess):
    """Hands everything on as a cluster does."""

    def map(self, work: Any, items: Any, *, name: Any = str) -> Any:
        carried = pickle.loads(pickle.dumps(work))
        return super().map(carried, (pickle.loads(pickle.dumps(item)) for item in items), name=name)


def test_document_that_repeats_the_holdout_is_not_predicted_on_any_engine(sampled: Store) -> None:
    tokenizer = train_tokenizer(sampled, Catalog(sampled), vocab_size=300)
    base = add_scores(sampled, tokenizer=tokenizer)
    catalog = Catalog(sampled)
    sql = "SELECT doc_id FROM documents WHERE split = 'train' AND doc_id NOT IN (SELECT doc_id FROM influence WHERE job = ?) ORDER BY doc_id LIMIT 1"
    repeated = catalog.query(sql, [base])["doc_id"].combine_chunks()
    ((_, text),) = read_texts(catalog, doc_ids=repeated)
    tokens = load_tokenizer(sampled, catalog).encode_batch([text])
    sampled.put_content(ngrams_path(base), safetensors.numpy.save({"ngrams": holdout_hashes(tokens)}))
    jobs = [
        distill(sampled, config=DistillConfig(score_job=base, partition_size=size), engine=engine)
        for size, engine in ((50, InProcess()), (64, PickledEngine()))
    ]
    assert [job["unscored"] for job in jobs] == [1, 1]
    rows = [
        Catalog(sampled).rows("SELECT doc_id, score FROM influence WHERE job = ? ORDER BY doc_id", [job["job"]]) for job in jobs
    ]  # fmt: skip
    assert rows[0] == rows[1]
    assert repeated[0].as_py() not in [row["doc_id"] for row in rows[0]]
    assert len(rows[0]) == jobs[0]["documents"] > 50


def test_finished_job_changes_nothing_and_is_no_base(sampled: Store) -> None:
    first = distill(sampled, config=CONFIG)
    before = read(sampled, "influence").num_rows
    assert distill(sampled, config=CONFIG) == first | {"already_done": True}
    assert read(sampled, "influence").num_rows == before
    with pytest.raises(UserError, match="with direct scores"):
        distill(sampled, config=DistillConfig(score_job=first["job"]))


def test_partitioning_changes_no_bit(sampled: Store) -> None:
    found = []
    for size in (7, 50, 2048):
        job = distill(sampled, config=DistillConfig(partition_size=size))["job"]
        sql = "SELECT doc_id, score, stderr FROM influence WHERE job = ? ORDER BY doc_id"
        found.append(Catalog(sampled).rows(sql, [job]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("survives", [0, 2])
def test_attempt_that_died_between_partitions_goes_on_to_the_same_rows(
    sampled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    append = Job.append

    def die_after(job: Job, table: str, rows: Any, *, part: int) -> bool:
        if part > survives:
            raise KeyboardInterrupt
        return append(job, table, rows, part=part)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "append", die_after)
        with pytest.raises(KeyboardInterrupt):
            distill(sampled, config=CONFIG)
    assert predicted(sampled) == []  # a broken job doesn't count

    def no_fit(*_: Any, **__: Any) -> None:
        raise AssertionError("fitted again")

    appended = []
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.distill.fit", no_fit)
        patch.setattr(Job, "append", lambda job, table, rows, part: (appended.append(part), append(job, table, rows, part=part))[1])  # fmt: skip
        distill(sampled, config=CONFIG)
    assert appended[0] == survives + 1

    (tmp_path / "whole").mkdir()
    whole = create_store(str(tmp_path / "whole" / "store"))
    fill(whole, tmp_path)
    add_scores(whole)
    distill(whole, config=CONFIG)
    assert predicted(sampled) == predicted(whole)


def test_newest_base_is_taken_and_another_one_by_its_name(sampled: Store) -> None:
    old = Catalog(sampled).rows("SELECT job FROM jobs WHERE kind = 'score'")[0]["job"]
    new = add_scores(sampled, method="other")
    assert distill(sampled, config=CONFIG)["base"] == new
    named = distill(sampled, config=DistillConfig(score_job=old))
    assert (named["base"], named["method"]) == (old, "distilled/m")


def test_no_more_than_the_most_are_learned_from(sampled: Store) -> None:
    summary = distill(sampled, config=DistillConfig(max_fit=120))
    assert summary["fitted_on"] == 120
    assert summary["rank_correlation"] > 0.6


def test_documents_ingested_since_are_predicted_also_where_the_base_went_over_all(store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    add_scores(store, num=None)
    with pytest.raises(UserError, match=r"nothing to predict.*went over all documents.*atoll score --sample N"):
        distill(store, config=CONFIG)
    fill(store, tmp_path, count=30, seed=1)
    summary = distill(store, config=CONFIG)
    new = Catalog(store).rows(
        "SELECT count(*) AS n FROM documents WHERE split = 'train' AND source_uri LIKE '%reef-1%'"
    )
    assert summary["documents"] == new[0]["n"]


def test_sample_of_everything_leaves_nothing_to_predict(store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    add_scores(store, num=NUM_DOCUMENTS)
    with pytest.raises(UserError, match="nothing to predict: every document has a direct score; score a sample first"):
        distill(store, config=CONFIG)


def test_what_is_missing_is_named_with_its_mend(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no direct scores to learn from; score a sample first: atoll score --sample N"):
        distill(store, config=CONFIG)
    fill(store, tmp_path)
    few = add_scores(store, num=49)
    with pytest.raises(UserError, match="has 49 direct scores, and 50 are the least"):
        distill(store, config=CONFIG)
    with pytest.raises(UserError, match=f"no score job nonsense with direct scores; there are: {few}"):
        distill(store, config=DistillConfig(score_job="nonsense"))


def test_base_with_two_scores_of_a_document_is_refused(sampled: Store) -> None:
    job = make_job(sampled, "score", config={"sample": 60}, inputs={})
    sql = "SELECT * REPLACE (? AS job) FROM influence ORDER BY doc_id LIMIT 60"
    rows = Catalog(sampled).rows(sql, [job.id])
    job.append("influence", rows + [row | {"method": "n"} for row in rows], part=1)
    job.commit({})
    with pytest.raises(UserError, match=r"several scores of a document.*--score-job"):
        distill(sampled, config=CONFIG)


def test_what_the_policy_keeps_from_scoring_is_neither_learned_from_nor_predicted(store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    fill(store, tmp_path, count=60, seed=1, license_="GPL-3.0")
    add_scores(store)
    everything = distill(store, config=CONFIG)
    rule = '[[rule]]\nreaders = ["job:score"]\nlicenses = ["MIT"]\naccess = ["*"]\n'
    set_policy(store, f'[default]\nlicenses = ["*"]\naccess = ["*"]\n{rule}', "a test")
    less = distill(store, config=CONFIG)
    assert less["job"] != everything["job"]
    assert less["fitted_on"] < everything["fitted_on"]
    sql = "SELECT DISTINCT license FROM influence JOIN documents USING (doc_id) WHERE influence.job = ?"
    assert Catalog(store).rows(sql, [less["job"]]) == [{"license": "MIT"}]


def test_tiers_can_be_made_of_the_predictions(sampled: Store) -> None:
    summary = distill(sampled, config=CONFIG)
    tiers = tier(sampled, config=TierConfig(score_jobs=(summary["job"],)))["documents"]
    assert sum(tiers.values()) >= summary["documents"]


@pytest.mark.parametrize("option", [{"max_fit": 49}, {"partition_size": 0}])
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        DistillConfig(**option)


def test_importing_the_job_starts_no_torch_and_no_scipy() -> None:
    code = "import json, sys, pipeline.distill; print(json.dumps([m for m in ('torch', 'scipy') if m in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
