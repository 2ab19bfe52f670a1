"""The score job on a small corpus and a tiny model: what it writes, that a broken attempt goes on, that a finished one changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import pipeline.comparer
from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.jobs import Job
from manifests.store import Store
from manifests.tables import create_store, read
from pipeline.ingest import ingest
from pipeline.score import score
from pipeline.score_config import ScoreConfig
from pipeline.sources import SourceSpec
from pipeline.tokenizer import train_tokenizer

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CONFIG = ScoreConfig(
    model=MODEL, steps=20, batch_size=4, seq_len=16, num_checkpoints=2, max_document_tokens=12, num_folds=2,
    max_holdout_documents=8, partition_size=64, learning_rate=1e-2, device="cpu",
)  # fmt: skip
WORDS = ["tide", "reef", "coral", "lagoon", "island", "current", "sand", "shell", "wave", "palm", "anchor", "harbour"]


def fill(store: Store, folder: Path, *, num_documents: int = 220, holdout_share: float = 0.3) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3 + n % 30).tolist()) + f" {n}" for n in range(num_documents)]
    pq.write_table(pa.table({"text": texts}), folder / "reef.parquet")
    spec = SourceSpec(uri=str(folder / "reef.parquet"), format="parquet", corpus="reef")
    ingest(store, [spec], holdout_share=holdout_share)


@pytest.fixture
def corpus(store: Store, tmp_path: Path) -> Store:
    fill(store, tmp_path)
    train_tokenizer(store, Catalog(store), vocab_size=300)
    return store


def scores(store: Store) -> list[dict[str, Any]]:
    return Catalog(store).rows("SELECT doc_id, method, score, stderr, probe, direct FROM influence ORDER BY doc_id")


def test_every_document_of_the_train_split_gets_a_score_and_no_other(corpus: Store) -> None:
    summary = score(corpus, config=CONFIG)
    train = Catalog(corpus).rows("SELECT doc_id FROM documents WHERE split = 'train' ORDER BY doc_id")
    rows = scores(corpus)
    assert [row["doc_id"] for row in rows] == [row["doc_id"] for row in train]
    assert {(row["method"], row["probe"], row["direct"]) for row in rows} == {
        ("trajectory/ekfac-cosine", "holdout, 8 documents: reef 1", True)
    }
    assert all(-1 <= row["score"] <= 1 and row["stderr"] > 0 for row in rows)
    assert summary["documents"] == len(train)
    assert (summary["unscored"], summary["already_done"]) == (0, False)
    first, last = summary["checkpoints"]
    assert (first["step"], last["step"]) == (10, 20)
    assert last["train_loss"] < first["train_loss"]


def test_finished_job_changes_nothing_and_another_config_is_another_job(corpus: Store) -> None:
    first = score(corpus, config=CONFIG)
    before = read(corpus, "influence").num_rows
    assert score(corpus, config=replace(CONFIG, device="auto")) == first | {"already_done": True}
    assert read(corpus, "influence").num_rows == before
    assert score(corpus, config=replace(CONFIG, form="dot"))["job"] != first["job"]
    assert read(corpus, "influence").num_rows == 2 * before


@pytest.mark.parametrize("survives", [0, 2])
def test_attempt_that_died_between_partitions_goes_on_to_the_same_rows(
    corpus: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    append = Job.append

    def die_after(job: Job, table: str, rows: Any, *, part: int) -> bool:
        if part > survives:
            raise KeyboardInterrupt
        return append(job, table, rows, part=part)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "append", die_after)
        with pytest.raises(KeyboardInterrupt):
            score(corpus, config=CONFIG)
    assert read(corpus, "influence").num_rows == 64 * survives
    assert scores(corpus) == []  # a broken job doesn't count

    def no_training(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    scored = []
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.scoring_model.train", no_training)
        patch.setattr("pipeline.gradients.mean_gradient", no_training)
        patch.setattr(
            Job, "append", lambda job, table, rows, part: (scored.append(part), append(job, table, rows, part=part))[1]
        )
        score(corpus, config=CONFIG)
    assert min(scored) == survives + 1

    (tmp_path / "whole").mkdir()
    whole = create_store(str(tmp_path / "whole" / "store"))
    fill(whole, tmp_path)
    train_tokenizer(whole, Catalog(whole), vocab_size=300)
    score(whole, config=CONFIG)
    assert scores(corpus) == scores(whole)


def test_document_whose_score_is_no_number_is_left_out_and_counted(
    corpus: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = pipeline.comparer.compare

    def spoiled(*arguments: Any, **options: Any) -> Any:
        found, losses = compare(*arguments, **options)
        found[0] = torch.nan
        return found, losses

    monkeypatch.setattr(pipeline.comparer, "compare", spoiled)
    summary = score(corpus, config=CONFIG)
    assert summary["unscored"] >= 3  # one at least in each of the partitions
    assert summary["left_out"] == {"the loss or its gradient is not a number": summary["unscored"]}
    assert summary["documents"] == len(scores(corpus))
    assert all(np.isfinite(row["score"]) for row in scores(corpus))


def _bits(store: Store) -> list[tuple[Any, ...]]:
    return [(row["doc_id"], row["score"].hex(), row["stderr"].hex()) for row in scores(store)]


def test_partition_size_and_number_of_threads_change_no_bit(
    corpus: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(corpus, config=CONFIG)
    (tmp_path / "other").mkdir()
    other = create_store(str(tmp_path / "other" / "store"))
    fill(other, tmp_path)
    train_tokenizer(other, Catalog(other), vocab_size=300)
    monkeypatch.setattr(pipeline.comparer, "default_threads", lambda device: 3)
    score(other, config=replace(CONFIG, partition_size=128))
    assert _bits(other) == _bits(corpus)


def test_a_job_may_use_the_model_that_another_has_trained(corpus: Store) -> None:
    trained = score(corpus, config=CONFIG)["job"]
    reverse = replace(CONFIG, estimator="reverse", curvature_documents=20)
    itself = score(corpus, config=reverse)["job"]
    # The seed and the tokenizer come with the model, whatever is said here.
    taken = [
        score(corpus, config=replace(config, checkpoint_job=trained[:12], steps=1, seed=7, num_checkpoints=1))["job"]
        for config in (CONFIG, reverse)
    ]
    rows = Catalog(corpus).rows("SELECT job, score FROM influence ORDER BY doc_id")
    by_job = {job: [row["score"] for row in rows if row["job"] == job] for job in (trained, itself, *taken)}
    assert [by_job[job] for job in taken] == [by_job[trained], by_job[itself]]
    with pytest.raises(UserError, match="no such finished job"):
        score(corpus, config=replace(CONFIG, checkpoint_job="none"))


def test_reverse_scores_a_finished_model_and_weighs_the_holdout_by_its_change(corpus: Store, tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**(MODEL | {"vocab_size": 300}))
    for name in ("base", "tuned"):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    tuned = replace(CONFIG, estimator="reverse", checkpoint_paths=(str(tmp_path / "tuned"),), curvature_documents=20)
    plain = score(corpus, config=tuned)
    first = scores(corpus)
    assert plain["method"] == "reverse/ekfac-cosine"
    assert [c["train_loss"] for c in plain["checkpoints"]] == [None]
    changed = score(corpus, config=replace(tuned, base_path=str(tmp_path / "base")))
    both = scores(corpus)
    assert plain["documents"] == changed["documents"] == len(first) == len(both) // 2
    assert {row["score"] for row in both} > {row["score"] for row in first}


def test_finished_checkpoints_need_one_shape(corpus: Store, tmp_path: Path) -> None:
    import transformers

    for name, size in (("a", 16), ("b", 8)):
        config = transformers.AutoConfig.for_model(**(MODEL | {"vocab_size": 300, "hidden_size": size}))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(UserError, match="another shape"):
        score(corpus, config=replace(CONFIG, checkpoint_paths=paths))


def test_sample_scores_so_many_and_a_larger_one_holds_the_smaller(corpus: Store) -> None:
    found = {}
    for size in (20, 50):
        job = score(corpus, config=replace(CONFIG, sample=size))["job"]
        found[size] = {
            row["doc_id"] for row in Catalog(corpus).rows("SELECT doc_id FROM influence WHERE job = ?", [job])
        }
        assert len(found[size]) == size
    assert found[20] < found[50]


def test_probes_are_corpora_with_weights(corpus: Store, tmp_path: Path) -> None:
    other = [f"machine gear wheel {n} steam engine piston {n * 7} valve" for n in range(60)]
    pq.write_table(pa.table({"text": other}), tmp_path / "gears.parquet")
    ingest(
        corpus, [SourceSpec(uri=str(tmp_path / "gears.parquet"), format="parquet", corpus="gears")], holdout_share=0.3
    )
    config = replace(CONFIG, max_holdout_documents=1000, source_documents=8)
    one = score(corpus, config=replace(config, probes={"gears": 1.0}))
    assert one["probes"] == {"gears": 1.0}
    sources = one["checkpoints"][-1]["sources"]
    assert sources == ["gears", "reef", "holdout: gears"]
    cosines = one["checkpoints"][-1]["source_cosines"]
    assert cosines[0][2] > cosines[1][2]  # the corpus of the probe's own kind pulls its way
    # And so do its documents.
    means = Catalog(corpus).rows(
        "SELECT corpus, avg(score) AS score FROM influence JOIN documents USING (doc_id) GROUP BY corpus ORDER BY corpus"
    )
    assert means[0]["score"] > means[1]["score"]
    with pytest.raises(UserError, match="no corpus of the holdout"):
        score(corpus, config=replace(config, probes={"nowhere": 1.0}))


def test_bad_documents_are_left_out_with_the_reason_or_scored(store: Store, tmp_path: Path) -> None:
    """A gigantic one, one of no letters, a repetition of the holdout, one of a single token."""
    fill(store, tmp_path)
    held = Catalog(store).rows(
        "SELECT source_row FROM documents WHERE split = 'holdout' ORDER BY text_bytes DESC LIMIT 1"
    )
    text = pq.read_table(tmp_path / "reef.parquet")["text"][held[0]["source_row"]].as_py()
    texts = ["tide reef " * 100_000, "\u2603\u2604 \x07 \U0001f41f" * 5, text + " tide", "a"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "bad.parquet")
    ingest(
        store,
        [SourceSpec(uri=str(tmp_path / "bad.parquet"), format="parquet", corpus="bad", origin="synthetic")],
        holdout_share=0.3,
    )
    train_tokenizer(store, Catalog(store), vocab_size=300)
    summary = score(store, config=replace(CONFIG, max_holdout_documents=1000))
    assert summary["left_out"]["repeats the holdout"] == 1
    assert summary["unscored"] == sum(summary["left_out"].values())
    scored = Catalog(store).rows("SELECT source_row FROM influence JOIN documents USING (doc_id) WHERE corpus = 'bad'")
    assert {0, 1} <= {row["source_row"] for row in scored}
    assert 2 not in {row["source_row"] for row in scored}


def test_diverging_training_says_the_mend(corpus: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = torch.nn.utils.clip_grad_norm_

    def spoil(parameters: Any, limit: float) -> Any:
        listed = list(parameters)
        clip(listed, limit)
        listed[0].grad.fill_(torch.nan)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoil)
    with pytest.raises(Failure, match="lower the learning rate"):
        score(corpus, config=CONFIG)
    assert scores(corpus) == []


def test_what_is_missing_is_named_with_its_mend(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="atoll tokenizer"):
        score(store, config=CONFIG)
    fill(store, tmp_path, holdout_share=0.0)
    train_tokenizer(store, Catalog(store), vocab_size=300)
    with pytest.raises(UserError, match="larger holdout share"):
        score(store, config=CONFIG)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_path": "/nowhere"}, "no such folder"),
        ({"model": {"model_type": "nonsense"}}, "mend the model's config"),
        ({"model": MODEL | {"num_attention_heads": 3}}, "mend the model's config"),
        ({"model": MODEL | {"vocab_size": 20}}, "the tokenizer 300 tokens"),
        ({"model": MODEL | {"max_position_embeddings": 8}}, "shorten them"),
        ({"device": "nonsense"}, "choose auto or cpu"),
    ],
)
def test_model_that_cannot_score_is_refused(corpus: Store, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        score(corpus, config=replace(CONFIG, **change))


def test_local_model_is_taken_from_its_folder(corpus: Store, tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**(MODEL | {"vocab_size": 300}))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    summary = score(corpus, config=replace(CONFIG, model_path=str(tmp_path / "model")))
    assert summary["documents"] > 0


@pytest.mark.parametrize(
    "option",
    [
        {"estimator": "guess"}, {"form": "guess"}, {"partition_size": 100}, {"steps": 0}, {"seq_len": 1}, {"num_folds": 1}, {"num_checkpoints": 400}, {"learning_rate": 0.0},
        {"max_holdout_documents": 2}, {"model": {}},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        ScoreConfig(**option)


def test_importing_the_job_starts_no_torch() -> None:
    code = "import json, sys, pipeline.score; print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
