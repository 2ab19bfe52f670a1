"""Online influence: exact for the layers that it attributes, held against autograd; and nothing of the training changes by it."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append, open_table
from manifests.upkeep import compact
from pipeline.online import OnlineConfig, score_online
from tests.manifests.handmade import checkpoint, span
from tiny import VOCABULARY, silent, start_run, tiny_config
from trainer.config import RunConfig
from trainer.island import Island
from trainer.model import holdout_loss, make_optimizer, token_losses
from trainer.online import OnlineInfluence, attributed_layers, holdout_gradients, preconditioner
from trainer.recorder import SpanRecorder
from trainer.run import Run
from trainer.stream import Sequence, SpanColumns
from trainer.wire import unpack

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": VOCABULARY, "attention_bias": True,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LR = 1e-3
LENGTH = 24


def _model(spec: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec)).float().train()


def _tokens(count: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)


class Watched:
    """A model after ten steps, watched."""

    def __init__(self, spec: dict[str, Any], **options: Any) -> None:
        self.config: RunConfig = tiny_config(
            "r", **({"seq_len": LENGTH, "online_influence": True, "online_refresh": 10, "gradient_clip": 0.5} | options)
        )
        self.model = _model(spec)
        self.optimizer = make_optimizer(self.model, self.config)
        self.holdout = _tokens(4, seed=99)
        self.online = OnlineInfluence(self.model, self.optimizer, self.holdout, self.config)
        for step in range(10):
            self.online.prepare(step)
            self.backward(_tokens(4, seed=step))
            self.optimizer.step()
            norm = self.clip()
        assert self.online.take(lr=LR, norm=norm) is not None  # from step 8 on
        self.online.prepare(10)
        self.layers = attributed_layers(self.model, self.config.online_layers)
        weights = [layer.weight for layer in self.layers.values()]
        gradients = holdout_gradients(self.model, list(self.layers.values()), self.holdout, batch_size=3)
        self.directions = {
            name: g * preconditioner(self.optimizer, w)
            for name, g, w in zip(self.layers, gradients, weights, strict=True)
        }
        self.online.take(lr=LR, norm=norm)  # of the look at the holdout just now

    def backward(self, tokens_BL: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        token_losses(self.model, tokens_BL).mean().backward()

    def clip(self) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)

    def promised(self) -> float:
        """lr · ⟨g, P v⟩ from the gradients that the optimizer is given."""
        return LR * sum(
            float((layer.weight.grad.double() * self.directions[name].double()).sum())
            for name, layer in self.layers.items()
        )


def _close(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    assert float(expected.abs().min()) > 0
    assert float((found - expected).abs().max() / expected.abs().max()) < relative


CASES = pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (LLAMA, ()),
        (LLAMA, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        (LLAMA | {"tie_word_embeddings": False}, ("lm_head",)),
        (GPT2, ()),
        (GPT2, ("c_attn", "c_fc", "c_proj")),
    ],
    ids=["residual", "all", "head", "gpt2", "gpt2 all"],
)


@CASES
def test_a_document_that_has_its_sequence_to_itself_gets_what_autograd_says(
    spec: dict[str, Any], layers: tuple[str, ...]
) -> None:
    watched = Watched(spec, online_layers=layers)
    tokens = _tokens(5, seed=50)
    watched.backward(tokens)
    norm = watched.clip()
    found = watched.online.take(lr=LR, norm=norm)
    assert found is not None
    assert found.dtype == torch.float32
    clipped = float((watched.config.gradient_clip / norm).clamp(max=1.0))
    assert clipped < 1
    weights = [layer.weight for layer in watched.layers.values()]
    expected = []
    for document in tokens:
        loss = token_losses(watched.model, document[None]).mean() / len(tokens)
        gradients = torch.autograd.grad(loss, weights)
        products = zip(gradients, watched.directions.values(), strict=True)
        expected.append(LR * clipped * sum(float((g.double() * v.double()).sum()) for g, v in products))
    _close(found.double().sum(dim=1), torch.tensor(expected, dtype=torch.float64), 1e-5)


@CASES
def test_contributions_of_a_batch_add_up_to_what_its_gradient_promises(
    spec: dict[str, Any], layers: tuple[str, ...]
) -> None:
    watched = Watched(spec, online_layers=layers)
    watched.backward(_tokens(5, seed=50))
    found = watched.online.take(lr=LR, norm=watched.clip())
    assert found is not None
    assert float(found.double().sum()) == pytest.approx(watched.promised(), rel=1e-5)


def test_documents_of_one_sequence_get_what_their_own_copies_of_the_weights_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each document's places use a copy of every attributed weight: the gradient of that copy is the document's part, whomever attends to it."""
    watched = Watched(LLAMA)
    tokens = _tokens(1, seed=60)
    borders = [0, 5, 6, 17, LENGTH]
    watched.backward(tokens)
    norm = watched.clip()
    found = watched.online.take(lr=LR, norm=norm)
    assert found is not None
    copies: dict[str, list[torch.Tensor]] = {}
    for name, layer in watched.layers.items():
        copies[name] = [layer.weight.detach().clone().requires_grad_() for _ in borders[1:]]

        def forward(x: torch.Tensor, name: str = name, bias: Any = layer.bias) -> torch.Tensor:
            parts = zip(borders, borders[1:], copies[name], strict=False)
            return torch.cat([F.linear(x[:, first:end], copy, bias) for first, end, copy in parts], dim=1)

        monkeypatch.setattr(layer, "forward", forward)
    token_losses(watched.model, tokens).mean().backward()
    clipped = float((watched.config.gradient_clip / norm).clamp(max=1.0))
    expected = [
        LR * clipped * sum(float((copies[n][d].grad.double() * watched.directions[n]).sum()) for n in watched.layers)  # type: ignore[union-attr]
        for d in range(len(borders) - 1)
    ]
    sums = [float(found[0, a:b].double().sum()) for a, b in pairwise(borders)]
    _close(torch.tensor(sums), torch.tensor(expected), 1e-5)


def test_the_promise_is_kept_by_a_small_step() -> None:
    watched = Watched(LLAMA)
    watched.backward(_tokens(5, seed=50))
    found = watched.online.take(lr=LR, norm=watched.clip())
    assert found is not None
    model = copy.deepcopy(watched.model).double()
    holdout = watched.holdout
    step = {n: LR * preconditioner(watched.optimizer, x.weight) * x.weight.grad for n, x in watched.layers.items()}

    @torch.no_grad()
    def after(share: float) -> float:
        moved = copy.deepcopy(model)
        for name, change in step.items():
            moved.get_submodule(name).weight -= share * change
        # In float64, unlike the losses of the training: two close numbers are told apart.
        logits = moved(input_ids=holdout).logits[:, :-1]
        return float(F.cross_entropy(logits.flatten(0, 1), holdout[:, 1:].flatten()))

    slope = (after(-1e-3) - after(1e-3)) / 2e-3
    # A float32 backward pass beside a float64 slope.
    assert float(found.double().sum()) == pytest.approx(slope, rel=1e-3)
    assert holdout_loss(watched.model, holdout) == pytest.approx(after(0.0), rel=1e-5)


def test_passes_of_one_step_are_measured_one_after_the_other() -> None:
    watched = Watched(LLAMA)
    tokens = _tokens(6, seed=70)
    watched.backward(tokens)
    at_once = watched.online.take(lr=LR, norm=watched.clip())
    watched.optimizer.zero_grad(set_to_none=True)
    for part in tokens.split(2):
        (token_losses(watched.model, part).mean() / 3).backward()
    in_turn = watched.online.take(lr=LR, norm=watched.clip())
    assert at_once is not None
    assert in_turn is not None
    torch.testing.assert_close(in_turn, at_once, rtol=1e-4, atol=1e-9)


def test_a_look_at_the_holdout_between_leaves_no_trace() -> None:
    watched = Watched(LLAMA)
    tokens = _tokens(3, seed=70)
    watched.backward(tokens)
    norm = watched.clip()
    before = watched.online.take(lr=LR, norm=norm)
    holdout_loss(watched.model, watched.holdout)
    watched.backward(tokens)
    holdout_loss(watched.model, watched.holdout)
    after = watched.online.take(lr=LR, norm=norm)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_in_bfloat16_the_sum_is_still_the_promise() -> None:
    watched = Watched(LLAMA)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = token_losses(watched.model, _tokens(8, seed=80))
    watched.optimizer.zero_grad(set_to_none=True)
    losses.mean().backward()
    found = watched.online.take(lr=LR, norm=watched.clip())
    assert found is not None
    assert found.dtype == torch.float32
    assert float(found.double().sum()) == pytest.approx(watched.promised(), rel=0.02)


def test_the_holdouts_gradient_leaves_the_parameters_own_and_the_randomness_alone() -> None:
    model = _model(GPT2 | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})
    token_losses(model, _tokens(2, seed=1)).mean().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = torch.get_rng_state()
    layers = list(attributed_layers(model).values())
    first = holdout_gradients(model, layers, _tokens(4, seed=2), batch_size=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters() if p.grad is not None)
    # Without dropout, and however it's cut into batches.
    for one, other in zip(first, holdout_gradients(model, layers, _tokens(4, seed=2), batch_size=3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_layers_that_cannot_be_attributed_are_refused_by_name() -> None:
    with pytest.raises(
        UserError, match=r"ends in c_proj; name some in online_layers: .*mlp\.down_proj.*self_attn\.o_proj"
    ):
        attributed_layers(_model(LLAMA), ["c_proj"])
    with pytest.raises(UserError, match="layer lm_head is another layer's too"):
        attributed_layers(_model(LLAMA), ["lm_head"])
    assert set(attributed_layers(_model(LLAMA), ["1.mlp.down_proj"])) == {"model.layers.1.mlp.down_proj"}
    assert not attributed_layers(_model(LLAMA)).keys() & {"model.layers.0.self_attn.q_proj"}


def test_a_layer_that_sees_its_batch_in_another_shape_is_refused_by_name() -> None:
    watched = Watched(LLAMA)
    layer = next(iter(watched.layers.values()))
    name = next(iter(watched.layers))
    with pytest.raises(UserError, match=rf"layer {name} sees its batch in the shape \(7, 32\)"):
        layer(torch.zeros(7, layer.in_features))


def test_spans_get_the_sums_of_their_places() -> None:
    recorder = SpanRecorder()

    def sequence(*tokens: int) -> Sequence:
        sizes, zeros = np.array(tokens), np.zeros(len(tokens), dtype=np.int64)
        columns = SpanColumns(
            doc_ids=[b"d" * 16] * len(tokens),
            tiers=np.full(len(tokens), "S", dtype=object),
            origins=np.full(len(tokens), "real", dtype=object),
            shards=np.full(len(tokens), "s", dtype=object),
            shard_positions=zeros,
            starts=zeros,
            tokens=sizes,
            offsets=np.cumsum(sizes) - sizes,
        )
        return Sequence(tokens=np.zeros(4), group="S", columns=columns)

    sequences = [sequence(1, 3), sequence(4)]
    losses = np.zeros((2, 3), dtype=np.float32)
    recorder.record(1, sequences, losses)
    recorder.record(2, sequences, losses, np.asarray([[1, 2, 4, 8], [0.5, 0.25, np.nan, 1]], dtype=np.float32))
    recorder.record(3, sequences, losses, np.asarray([[-1, 2, 4, 8], [0.5, 0.25, 0.125, 1]], dtype=np.float32))
    rows = recorder.take(run="r", island=0, incarnation=0, checkpoint=b"c" * 16)
    assert rows["contribution"].to_pylist() == [None, None, None, 1.0, 14.0, None, -1.0, 14.0, 1.875]


_PLACES = """
SELECT step, position, doc_id, tokens, loss, contribution FROM consumption WHERE run = ? ORDER BY step, position
"""
OPTIONS: dict[str, Any] = {"num_islands": 1, "steps": 16, "sync_every": 4, "online_refresh": 4}


def _train(run: Run, *, rounds: int | None = None) -> None:
    """One island to its end, or to the end of a round, where it dies."""

    class Killed(Exception):
        pass

    def emit(status: dict[str, Any]) -> None:
        if rounds is not None and status["state"] == "training" and status["step"] > rounds * run.config.round_steps:
            raise Killed

    if rounds is None:
        Island(run, 0, emit=silent, in_background=False).train()
    else:
        with pytest.raises(Killed):
            Island(run, 0, emit=emit, in_background=False).train()


def _state(run: Run) -> dict[str, torch.Tensor]:
    rows = Catalog(run.store).rows(
        "SELECT object FROM checkpoints WHERE run = ? ORDER BY round DESC LIMIT 1", [run.name]
    )
    return unpack(run.store.get(rows[0]["object"]), name="o")[0]


@pytest.mark.parametrize("model", [LLAMA, GPT2 | {"resid_pdrop": 0.1, "attn_pdrop": 0.1}], ids=["llama", "dropout"])
def test_an_island_trains_to_the_same_bits_with_it_and_without_also_after_a_death(
    tiny_store: Store, model: dict[str, Any]
) -> None:
    runs = {
        name: start_run(tiny_store, name, model=model, online_influence=name != "off", **OPTIONS)
        for name in ("off", "on", "resumed")
    }
    _train(runs["off"])
    _train(runs["on"])
    _train(runs["resumed"], rounds=4)
    _train(runs["resumed"])
    off, on, resumed = (_state(run) for run in runs.values())
    assert off.keys() == on.keys()
    assert all(torch.equal(off[name], on[name]) and torch.equal(off[name], resumed[name]) for name in off)
    rows = {name: Catalog(tiny_store).rows(_PLACES, [name]) for name in runs}
    assert [row | {"contribution": None} for row in rows["on"]] == rows["off"]
    # It died where the direction falls due, so that even the contributions are the same.
    assert rows["resumed"] == rows["on"]
    measured = {row["step"] for row in rows["on"] if row["contribution"] is not None}
    assert measured == set(range(5, 17))
    summary = score_online(tiny_store, OnlineConfig(run="on"))
    seen = {row["doc_id"] for row in rows["on"] if row["contribution"] is not None}
    scored = Catalog(tiny_store).rows("SELECT * FROM influence WHERE job = ?", [summary["job"]])
    assert {row["doc_id"] for row in scored} == seen
    assert all(row["stderr"] > 0 for row in scored)
    with pytest.raises(UserError, match=r"run off .* measured no contributions; train one with --online-influence"):
        score_online(tiny_store, OnlineConfig(run="off"))


def test_after_a_death_between_two_refreshes_it_is_measured_as_if_there_had_been_none(tiny_store: Store) -> None:
    whole = start_run(tiny_store, "whole", online_influence=True, **OPTIONS)
    resumed = start_run(tiny_store, "resumed", online_influence=True, **OPTIONS)
    _train(whole)
    _train(resumed, rounds=3)
    _train(resumed)
    ours, theirs = (Catalog(tiny_store).rows(_PLACES, [run.name]) for run in (resumed, whole))
    differing = {a["step"] for a, b in zip(ours, theirs, strict=True) if a != b}
    assert not differing
    assert {row["step"] for row in ours if row["contribution"] is not None} == set(range(5, 17))


def test_a_store_from_before_the_column_reads_and_goes_on(tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older Atoll wrote reads as not measured, and is compacted with what the new one adds."""
    new = TABLES["consumption"]
    old = dataclasses.replace(
        new,
        schema=new.schema.remove(new.schema.get_field_index("contribution")),
        version=1,
        encodings={column: encoding for column, encoding in new.encodings.items() if column != "contribution"},
    )
    shutil.rmtree(tiny_store.root / "tables" / "consumption")
    with monkeypatch.context() as patch:
        patch.setitem(TABLES, "consumption", old)
        patch.setattr("manifests.tables.read_marker_tables", lambda store: [])
        open_table(tiny_store, "consumption")
        for number in (1, 2):
            append(tiny_store, "consumption", [span(number)])
    append(tiny_store, "checkpoints", [checkpoint(number) for number in (1, 2, 3)])
    sums = "SELECT count(*) AS n, count(contribution) AS measured, sum(contribution) AS total FROM consumption"
    assert Catalog(tiny_store).rows(sums) == [{"n": 2, "measured": 0, "total": None}]
    assert [item.files_after for item in compact(tiny_store, ["consumption"])] == [1]
    append(tiny_store, "consumption", [span(3, contribution=0.5)])
    assert [item.files_after for item in compact(tiny_store, ["consumption"])] == [1]
    assert Catalog(tiny_store).rows(sums) == [{"n": 3, "measured": 1, "total": 0.5}]
