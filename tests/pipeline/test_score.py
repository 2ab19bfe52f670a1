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

import pipeline.influence
from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.jobs import Job
from manifests.store import Store
from manifests.tables import create_store, read
from pipeline.ingest import ingest
from pipeline.score import ScoreConfig, score
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
    max_holdout_documents=8, partition_size=16, learning_rate=1e-2, device="cpu",
)  # fmt: skip
WORDS = ["tide", "reef", "coral", "lagoon", "island", "current", "sand", "shell", "wave", "palm", "anchor", "harbour"]


def fill(store: Store, folder: Path, *, num_documents: int = 60, holdout_share: float = 0.3) -> None:
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
        ("adam-cosine", "holdout, 8 documents in 2 folds", True)
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
    assert score(corpus, config=replace(CONFIG, method="dot"))["job"] != first["job"]
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
    assert read(corpus, "influence").num_rows == 16 * survives
    assert scores(corpus) == []  # a broken job doesn't count

    def no_training(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    scored = []
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.scoring_model.train", no_training)
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
    agreement = pipeline.influence.agreement

    def spoiled(*arguments: Any, **options: Any) -> torch.Tensor:
        found = agreement(*arguments, **options)
        found[0] = torch.nan
        return found

    monkeypatch.setattr(pipeline.influence, "agreement", spoiled)
    summary = score(corpus, config=CONFIG)
    assert summary["unscored"] >= 3  # one at least in each of the three partitions
    assert summary["documents"] == len(scores(corpus))
    assert all(np.isfinite(row["score"]) for row in scores(corpus))


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
        {"method": "guess"}, {"steps": 0}, {"seq_len": 1}, {"num_folds": 1}, {"num_checkpoints": 400}, {"learning_rate": 0.0},
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
