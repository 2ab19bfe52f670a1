"""An exported model is the run's global model and says where it comes from; the holdout loss by domain agrees with the syncer's."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from manifests.catalog import Catalog
from manifests.editions import current_policy, set_policy
from manifests.errors import Failure, UserError
from manifests.jobs import code_version
from manifests.store import Store
from manifests.tables import create_store
from tiny import VOCABULARY, copy_store, fabricate, start_run, train_together
from trainer.export import evaluate_domains, export_model
from trainer.feed import holdout_tokens
from trainer.model import holdout_loss
from trainer.run import Branch, Run, create_run
from trainer.tape import read_snapshot, snapshots, write_snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run that is over."""

    store: Store
    run: Run
    loss: float
    """The syncer's last holdout loss."""


def put_tokenizer(store: Store) -> None:
    """Puts a real tokenizer where the tiny store says that it has one: the words w0 to w63."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    store.put_content("t.json", Tokenizer(models.WordLevel(words, unk_token="w1")).to_str().encode())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A store with a run that is over; its holdout shards have two licences in turn."""
    store = create_store(str(tmp_path_factory.mktemp("trained") / "store"))
    fabricate(store, licenses=("MIT", "GPL-3.0"))
    put_tokenizer(store)
    run = start_run(store, "r")
    return Trained(store=store, run=run, loss=train_together(run))


def loss_of(folder: Path, run: Run) -> float:
    """The holdout loss of an exported model."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return holdout_loss(model, holdout_tokens(run, Catalog(run.store)))


def evaluate(trained: Trained, *, run: str = "r", by: str = "split", **options: Any) -> list[dict[str, Any]]:
    defaults: dict[str, Any] = {"merge": None, "sequences": trained.run.config.holdout_sequences, "device": "cpu"}
    return evaluate_domains(trained.store, run, by=by, **(defaults | options)).to_pylist()


def test_exported_model_has_the_loss_that_the_run_ended_with(trained: Trained, tmp_path: Path) -> None:
    merge = export_model(trained.store, "r", tmp_path / "new" / "model")
    assert merge == max(snapshots(trained.run))
    assert loss_of(tmp_path / "new" / "model", trained.run) == pytest.approx(trained.loss, abs=1e-6)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_exported_tokenizer_loads_and_ends_documents_as_the_run_did(trained: Trained, tmp_path: Path) -> None:
    export_model(trained.store, "r", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert tokenizer.encode("w7") == [7]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("w0", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 0)


def test_export_says_where_the_model_comes_from(trained: Trained, tmp_path: Path) -> None:
    merge = export_model(trained.store, "r", tmp_path / "model")
    origin = json.loads((tmp_path / "model" / "atoll.json").read_text())
    last = origin.pop("last_checkpoint")
    assert origin == {
        "run": "r",
        "parent_run": None,
        "store": trained.store.uri,
        "merge": merge,
        "clock": read_snapshot(trained.run, merge).clock,
        "code_version": code_version(),
    }
    config = trained.run.config
    assert (last["run"], last["merge"]) == ("r", merge)
    assert last["tokens"] == config.num_islands * config.steps * config.batch_size * config.seq_len
    assert last["tokens"] == sum(last[f"tokens_{tier}"] for tier in "sabc")
    assert last["holdout_loss"] == trained.loss


def test_export_of_an_earlier_merge_is_another_model(trained: Trained, tmp_path: Path) -> None:
    assert export_model(trained.store, "r", tmp_path / "one", merge=1) == 1
    origin = json.loads((tmp_path / "one" / "atoll.json").read_text())
    assert (origin["merge"], sum(origin["clock"]), origin["last_checkpoint"]) == (1, 1, None)
    loss = loss_of(tmp_path / "one", trained.run)
    assert abs(loss - trained.loss) > 1e-6
    assert evaluate(trained, merge=1)[-1]["loss"] == pytest.approx(loss, abs=1e-6)


def test_export_of_a_branch_counts_what_its_parent_trained_on(trained: Trained, tmp_path: Path) -> None:
    store = copy_store(trained.store, tmp_path / "copy")
    old = Run(store=store, config=trained.run.config, branch=None)
    merge = snapshots(old)[-1]
    branch = Branch(
        parent_run="r", predicate="false", excluded_object="none", clock=[], merge=merge, island_checkpoints={}
    )
    config = dataclasses.replace(old.config, run="b")
    write_snapshot(Run(store=store, config=config, branch=None), read_snapshot(old, merge))
    create_run(store, config, branch=branch)
    assert export_model(store, "b", tmp_path / "model") == merge
    origin = json.loads((tmp_path / "model" / "atoll.json").read_text())
    assert (origin["run"], origin["parent_run"]) == ("b", "r")
    assert (origin["last_checkpoint"]["run"], origin["last_checkpoint"]["merge"]) == ("r", merge)


def test_export_in_bfloat16_is_of_that_type(trained: Trained, tmp_path: Path) -> None:
    export_model(trained.store, "r", tmp_path / "model", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert loss_of(tmp_path / "model", trained.run) == pytest.approx(trained.loss, abs=0.05)


def test_export_leaves_a_folder_that_exists_as_it_is(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    with pytest.raises(UserError, match="name another folder"):
        export_model(trained.store, "r", tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


@pytest.mark.parametrize(("error", "becomes"), [(KeyboardInterrupt, KeyboardInterrupt), (OSError, Failure)])
def test_interrupted_export_leaves_nothing(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    becomes: type[BaseException],
) -> None:
    def half_way(self: PreTrainedModel, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error("half-way")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", half_way)
    with pytest.raises(becomes):
        export_model(trained.store, "r", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_export_says_what_is_wrong(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run named 'q'"):
        export_model(trained.store, "q", tmp_path / "model")
    with pytest.raises(UserError, match="float32, bfloat16"):
        export_model(trained.store, "r", tmp_path / "model", dtype="float16")
    with pytest.raises(Failure, match="merge 999 was asked for"):
        export_model(trained.store, "r", tmp_path / "model", merge=999)
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="can't be written"):
        export_model(trained.store, "r", tmp_path / "file" / "model")


def test_export_of_a_damaged_tokenizer_says_so(trained: Trained, tmp_path: Path) -> None:
    store = copy_store(trained.store, tmp_path / "copy")
    (store.root / "t.json").write_bytes(b"{")
    with pytest.raises(Failure, match="damaged"):
        export_model(store, "r", tmp_path / "model")


def test_run_that_has_not_begun_is_neither_exported_nor_evaluated(trained: Trained, tmp_path: Path) -> None:
    store = copy_store(trained.store, tmp_path / "copy")
    create_run(store, dataclasses.replace(trained.run.config, run="n"))
    with pytest.raises(UserError, match="atoll train --run n"):
        export_model(store, "n", tmp_path / "model")
    with pytest.raises(UserError, match="atoll train --run n"):
        evaluate_domains(store, "n", merge=None, sequences=1, by="corpus", device="cpu")


def test_loss_of_one_domain_is_the_one_that_the_run_measured(trained: Trained) -> None:
    one, everything = evaluate(trained)
    assert (one["domain"], everything["domain"]) == ("holdout", "all")
    assert (one["documents"], one["sequences"]) == (24, 2)
    assert one["loss"] == pytest.approx(trained.loss, abs=1e-6)
    assert everything["loss"] == one["loss"]
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))


def test_loss_of_all_weighs_domains_by_their_tokens(trained: Trained) -> None:
    *domains, everything = evaluate(trained, by="source_row % 3", sequences=1_000)
    seq_len = trained.run.config.seq_len
    assert [row["domain"] for row in domains] == ["0", "1", "2"]
    assert [row["documents"] for row in domains] == [8, 8, 8]
    assert [row["sequences"] for row in domains] == [row["tokens"] // seq_len for row in domains]
    assert everything["tokens"] == sum(row["tokens"] for row in domains)
    weighted = sum(row["loss"] * row["tokens"] for row in domains) / everything["tokens"]
    assert everything["loss"] == pytest.approx(weighted)
    assert len({row["loss"] for row in domains}) == 3


def test_domain_is_measured_on_its_own_documents_alone(trained: Trained) -> None:
    place = "CASE WHEN source_row = (SELECT max(source_row) FROM documents) THEN 'last' END"
    by_name = {row["domain"]: row for row in evaluate(trained, by=place)}
    assert list(by_name) == ["last", "none", "all"]
    assert (by_name["last"]["documents"], by_name["none"]["documents"]) == (1, 23)


def test_domain_shorter_than_a_sequence_has_no_loss(trained: Trained) -> None:
    *domains, everything = evaluate(trained, by="corpus")
    short = [row for row in domains if row["tokens"] < trained.run.config.seq_len]
    assert len(domains) == 24
    assert 0 < len(short) < 24
    assert all((row["sequences"], row["loss"], row["perplexity"]) == (0, None, None) for row in short)
    assert (everything["documents"], everything["loss"] > 0) == (24, True)


@pytest.mark.parametrize("by", ["colour", "corpus FROM"])
def test_evaluate_names_an_expression_that_is_none(trained: Trained, by: str) -> None:
    with pytest.raises(UserError, match="expression over the columns of documents"):
        evaluate(trained, by=by)


def test_evaluate_refuses_options_out_of_range(trained: Trained) -> None:
    with pytest.raises(UserError, match="sequences is 0"):
        evaluate(trained, sequences=0)
    with pytest.raises(UserError, match="device is 'gpu'"):
        evaluate(trained, device="gpu")


def test_evaluate_shows_only_domains_that_all_islands_may_read(trained: Trained, tmp_path: Path) -> None:
    store = copy_store(trained.store, tmp_path / "copy")
    set_policy(store, '[default]\nlicenses = ["MIT"]\naccess = ["*"]\n', "a test")
    edition = current_policy(Catalog(store))
    assert edition is not None
    run = start_run(store, "p", policy=edition.id, holdout_sequences=3)
    rows = evaluate_domains(store, "p", merge=None, sequences=3, by="license", device="cpu").to_pylist()
    assert [row["domain"] for row in rows] == ["MIT", "all"]
    export_model(store, "p", tmp_path / "model")
    assert rows[-1]["loss"] == pytest.approx(loss_of(tmp_path / "model", run), abs=1e-6)
    # A stricter policy passes over what the run's edition allowed.
    older = evaluate_domains(store, "r", merge=None, sequences=3, by="license", device="cpu").to_pylist()
    assert [row["domain"] for row in older] == ["MIT", "all"]
