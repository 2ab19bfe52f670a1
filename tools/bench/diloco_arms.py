"""How each arm of the DiLoCo benchmark trains: one large batch, ours, torchft's. The arms that there are, and what is made of them, stand in diloco_quality.py.

Every arm takes the same number of inner steps of the same global batch, on the same documents, each of which comes once at most; all begin with one model that plain
training on other documents has made, as DiLoCo's authors do (arXiv 2311.08105, section 3). M islands share the batch and the documents. Islands and syncer run in
turn in one process, so that a seed always gives the same figure: what a round sends is merged right after it and received a round later (τ = H / P).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manifests.catalog import Catalog
from manifests.store import Store
from manifests.tables import open_store
from tools.bench.plain import train_plainly
from tools.bench.tiered import make_tiered_store
from tools.bench.turns import train_in_turn
from trainer.run import Run, create_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.mixer import MixedStream

BATCH = 16
"""Sequences of all islands together in one inner step."""
PARTS = 8
"""Parts that the documents are cut into by their ids: M islands have 8 / M of them each."""
START = "start"
"""Group of the documents that the common start is trained on: a half of all."""
_GROUPS = f"CASE WHEN hash(doc_id) % 2 = 0 THEN '{START}' ELSE (hash(doc_id) // 2 % {PARTS})::VARCHAR END"
VOCAB_SIZE = 384
COMMON: dict[str, Any] = {"seq_len": 128, "sync_every": 24, "num_fragments": 4, "device": "cpu"}
"""What the configuration of every run has."""
START_SEED = 1000
_TORCHFT_TIMEOUT_S = 1200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    documents: int
    start_steps: int
    """Steps of the plain training that makes the start of all arms."""
    start_lr: float
    steps: int
    """Inner steps; a multiple of H = 24, or torchft would leave the rest out."""
    warmup_steps: int
    hidden: int
    layers: int
    islands: tuple[int, ...]
    """The M that are measured."""
    main: int
    """The M of the figures without one in their name."""
    means: tuple[int, ...]
    """The M that plain averaging is measured with."""
    torchft: tuple[int, ...]
    """The M that torchft is measured with."""
    holdout_sequences: int
    seeds: tuple[int, ...]
    workers: int
    """Processes that train arms, one each."""
    start: str = ""
    """Folder of the model that all arms begin with."""

    @property
    def model(self) -> dict[str, Any]:
        """The model: where it lies, or before it does, a Hugging Face configuration."""
        if self.start:
            return {"path": self.start}
        return {
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train."""

    kind: str
    """sync, ours or torchft."""
    islands: int
    """M; of sync: how many islands' sequences make up its batch."""
    lr: float
    """Peak of the inner learning rate."""
    outer: tuple[float, float] = (0.7, 0.9)
    """Outer learning rate and Nesterov momentum."""
    wire: str = "int4"
    merge: str = "rda"
    keep: float = 1.0

    @property
    def name(self) -> str:
        """As people read it."""
        if self.kind != "ours":
            return f"{self.kind}, M={self.islands}"
        special = ", mean" * (self.merge == "mean") + f", keep={self.keep:g}" * (self.keep != 1)
        return f"ours, M={self.islands}, {self.wire}{special}"


def train(arm: Arm, *, seed: int, store: Store, size: Size) -> float:
    """Trains in a store that is this arm's alone; returns the holdout loss, nats per token."""
    run = _run_of(arm, seed, store, size)
    kinds = {"sync": _train_sync, "ours": _train_ours, "torchft": _train_torchft}
    return kinds[arm.kind](run, size)


def make_store(folder: Path, size: Size) -> Store:
    """A store with real text, tokenised and sharded, all in one tier; the one that is there, if it is."""
    from tools.realtext import export_wikipedia

    if folder.exists():
        return open_store(str(folder))
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    text = folder.with_suffix(".parquet")
    export_wikipedia(text, num_documents=size.documents, seed=0)
    make_tiered_store(
        part, text, corpus="wikipedia", holdout_share=0.1, vocab_size=VOCAB_SIZE, tiers="A", shard_bytes=100_000
    )
    part.rename(folder)
    return open_store(str(folder))


def make_start(folder: Path, store: Store, size: Size) -> Size:
    """The size with the model that all arms begin with in a folder; the one that is there, if it is. Its learning rate stays at its peak."""
    from trainer.model import build_model

    if not folder.exists():
        plain = replace(size, steps=size.start_steps, warmup_steps=24)
        run = _run_of(Arm(kind="sync", islands=1, lr=size.start_lr), START_SEED, store, plain, group=START)
        model = build_model(run.config)
        _train_plainly(run, model, lr=lambda step: size.start_lr * min(1.0, step / 24))
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)  # type: ignore[operator]
        part.rename(folder)
    return replace(size, start=str(folder))


def _run_of(arm: Arm, seed: int, store: Store, size: Size, *, group: str | None = None) -> Run:
    """A run whose M islands have their own parts of the documents; or all of a group."""
    from trainer.plan import configure_run

    parts: list[Sequence[object]] = [[group]] if group is not None else []
    parts = parts or [
        range(island * PARTS // arm.islands, (island + 1) * PARTS // arm.islands) for island in range(arm.islands)
    ]
    config = configure_run(
        store,
        run=group or "arm",
        tier_version=None,
        model=size.model,
        group_by=_GROUPS,
        group_weights=tuple({str(part): 1.0 for part in own} for own in parts),
        num_islands=arm.islands,
        quorum=arm.islands,
        steps=size.steps,
        warmup_steps=size.warmup_steps,
        lr=arm.lr,
        batch_size=BATCH // arm.islands,
        wire=arm.wire,
        merge=arm.merge,
        keep=arm.keep,
        outer_lr=arm.outer[0],
        outer_momentum=arm.outer[1],
        # The islands measure it in every outer cycle; ours is measured at the end, on more.
        holdout_sequences=8,
        checkpoint_cycles=1000,
        seed=seed,
        **COMMON,
    )
    return create_run(store, config)


def _streams(run: Run) -> list[MixedStream]:
    """The islands' streams."""
    from trainer.feed import open_stream

    catalog = Catalog(run.store)
    islands = range(run.config.num_islands)
    return [open_stream(run, catalog, island=n, weights=run.config.weights_of(n) or {}) for n in islands]


def _holdout(run: Run, size: Size) -> torch.Tensor:
    from trainer.feed import holdout_tokens

    config = replace(run.config, holdout_sequences=size.holdout_sequences)
    return holdout_tokens(Run(store=run.store, config=config, branch=None), Catalog(run.store))


def _train_ours(run: Run, size: Size) -> float:
    """Islands and syncer, a round of each in turn."""
    from trainer.model import build_model, holdout_loss, parameters_of
    from trainer.tape import prepare_run

    prepare_run(run)
    syncer = train_in_turn(run)
    model = build_model(run.config)
    own = parameters_of(model)
    for name, value in syncer.state.parameters().items():
        own[name].copy_(value)
    return holdout_loss(model, _holdout(run, size))


def _train_sync(run: Run, size: Size) -> float:
    """One process with one large batch: the very sequences that M islands get."""
    from trainer.model import build_model, holdout_loss, learning_rate

    model = build_model(run.config)
    _train_plainly(run, model, lr=lambda step: learning_rate(step, run.config))
    return holdout_loss(model, _holdout(run, size))


def _train_plainly(run: Run, model: nn.Module, *, lr: Callable[[int], float]) -> None:
    """On the sequences of all islands of the run."""
    train_plainly(model, run.config, _streams(run), batch_size=run.config.batch_size, lr=lr)


def _train_torchft(run: Run, size: Size) -> float:
    """torchft's DiLoCo on the streams of M islands."""
    from tools.bench.diloco_torchft import run_torchft

    config = run.config
    folder = Path(run.store.root) / "torchft"
    folder.mkdir()
    files = []
    for number, stream in enumerate(_streams(run)):
        tokens_SL = np.stack([stream.next_sequence().tokens for _ in range(config.steps * config.batch_size)])
        stream.close()
        files.append(folder / f"{number}.npy")
        np.save(files[-1], tokens_SL.astype(np.int64))
    np.save(folder / "holdout.npy", _holdout(run, size).numpy())
    result = run_torchft(
        folder / "run",
        model=size.model | {"vocab_size": VOCAB_SIZE},
        token_files=files,
        holdout_file=folder / "holdout.npy",
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        steps=config.steps,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        gradient_clip=config.gradient_clip,
        sync_every=config.sync_every,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        seed=config.seed,
        timeout_s=_TORCHFT_TIMEOUT_S,
    )
    return result.holdout_loss
