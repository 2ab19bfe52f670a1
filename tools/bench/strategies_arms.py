"""The arms of tools.bench.strategies: what each island reads by, and what befalls the run. One arm is one run on a copy of a graded store (graded.py).

Islands and syncer run in turn, so a seed always comes to the same.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.catalog import Catalog
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.strategies import strategy_row
from manifests.tables import append, open_store
from tools.bench.graded import Documents, deliver_poison, make_graded_store
from tools.bench.plain import train_plainly
from tools.bench.turns import train_in_turn
from trainer.run import Run, create_run

if TYPE_CHECKING:
    from trainer.syncer import Syncer

ISLANDS = 4
START_LR = 4e-3
LOSS, MOST_LATE = 0.3, 5
"""Share of the feedback messages that are lost, and by how many rounds the others are late at most, where the network is bad."""
VOCAB_SIZE = 512
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LOOK_EVERY = 2
"""Outer cycles between two looks at the test loss."""
COMMON: dict[str, Any] = {
    "num_islands": ISLANDS,
    "quorum": ISLANDS,
    "seq_len": 64,
    "batch_size": 8,
    "sync_every": 12,
    "num_fragments": 2,
    "lr": 2e-3,
    "holdout_sequences": 64,
    "checkpoint_cycles": 1000,
    "device": "cpu",
}
"""What the configuration of every arm has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    documents: Documents
    start_steps: int
    """Of the plain training on the uniform mix that makes the model that all arms begin with: past the plateau of the first steps, whose length is a matter of luck."""
    steps: int
    test_sequences: int
    seeds: tuple[int, ...]
    workers: int = 2

    @property
    def settings(self) -> dict[str, Any]:
        """What an arm's result depends on beside the arm and the seed."""
        own = {
            "documents": asdict(self.documents),
            "start_steps": self.start_steps,
            "steps": self.steps,
            "test_sequences": self.test_sequences,
        }
        return own | {"common": COMMON, "model": MODEL, "vocab_size": VOCAB_SIZE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to mix."""

    name: str
    strategies: tuple[str, ...]
    """Of the islands, in turn; a mix such as S=.5,A=.5 is a strategy of its own."""
    more: tuple[tuple[str, Any], ...] = ()
    """Options of the run beside COMMON."""
    is_poisoned: bool = False
    """Half-way a delivery makes the worst documents the best tier (graded.py)."""
    is_lossy: bool = False
    """Feedback goes over a bad network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a run stands after a round."""

    round: int
    tokens: int
    """Trained on by all islands together."""
    loss: float
    """Of the global parameters on text that nobody steers by, nats per token."""


def make_store(folder: Path, size: Size, seed: int) -> Store:
    """The graded store of a seed, and beside it the model that its arms begin with; those that are there, if they are."""
    if not _start(folder).exists():
        for path in (folder, folder.with_suffix(".part")):
            shutil.rmtree(path, ignore_errors=True)
        make_graded_store(folder, size.documents, vocab_size=VOCAB_SIZE, seed=seed)
        with tempfile.TemporaryDirectory(
            prefix="atoll-strategies-"
        ) as scratch:  # arms begin with a store that has no run
            shutil.copytree(folder, Path(scratch) / "store")
            _make_start(open_store(str(Path(scratch) / "store")), _start(folder), size, seed)
    return open_store(str(folder))


def _start(store: Path) -> Path:
    return store.with_name(f"{store.name}-start")


def _make_start(store: Store, folder: Path, size: Size, seed: int) -> None:
    from trainer.feed import open_stream
    from trainer.model import build_model
    from trainer.plan import configure_run
    from trainer.strategies import TABLES_READ, decide

    options = COMMON | {"num_islands": 1, "quorum": 1, "steps": size.start_steps, "warmup_steps": 0}
    config = configure_run(
        store, run="start", tier_version=1, model=MODEL, strategies=("uniform",), seed=1000 + seed, **options
    )
    run = create_run(store, config)
    catalog = Catalog(store, tables=TABLES_READ)
    mix = decide(catalog, run="start", island=0, strategy="uniform", tier_version=1, pool=config.pool)
    model = build_model(config)
    stream = open_stream(run, Catalog(store), island=0, weights=mix.weights)
    train_plainly(
        model, config, [stream], batch_size=2 * config.batch_size, lr=lambda step: START_LR * min(1.0, step / 24)
    )
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)  # type: ignore[operator]
    part.rename(folder)


def train(arm: Arm, *, seed: int, store: Store, size: Size, out: Path) -> list[Point]:
    """Trains an arm on a copy of the store, and leaves its trajectory (tools/trajectories.py) in a new folder.

    Returns:
        Its course.
    """
    from tools.trajectories import export_trajectories

    with tempfile.TemporaryDirectory(prefix="atoll-strategies-") as folder:
        shutil.copytree(store.root, Path(folder) / "store")
        copy = open_store(str(Path(folder) / "store"))
        run = _run_of(arm, seed, copy, size, _start(Path(store.root)))
        course = _train(run, arm, seed, size)
        shutil.rmtree(out, ignore_errors=True)
        export_trajectories(copy, [run.name], out, about=f"arm {arm.name} of tools.bench.strategies, seed {seed}")
    return course


def _run_of(arm: Arm, seed: int, store: Store, size: Size, start: Path) -> Run:
    from trainer.plan import configure_run
    from trainer.tape import prepare_run

    for strategy in arm.strategies:
        if "=" in strategy:
            weights = {part[0]: float(part[2:]) for part in strategy.split(",")}
            row = strategy_row(
                _name(strategy),
                weights=weights,
                learning_rate=0,
                weight_floor=0,
                step_cap=0,
                exploration=0,
                reason="an arm",
            )
            append(store, "strategies", [row])
    config = configure_run(
        store,
        run=f"{arm.name}-{seed}".replace(" ", "-").replace("=", "").replace(",", "-").replace("ε", "epsilon"),
        tier_version=1,
        model={"path": str(start)},
        strategies=tuple(map(_name, arm.strategies)),
        steps=size.steps,
        seed=seed,
        **(COMMON | dict(arm.more)),
    )
    run = create_run(store, config)
    prepare_run(run)
    return run


def _name(strategy: str) -> str:
    return strategy.replace("=", "").replace(",", "-")


def _train(run: Run, arm: Arm, seed: int, size: Size) -> list[Point]:
    import torch

    from trainer.feed import holdout_tokens
    from trainer.island import Island
    from trainer.model import build_model, holdout_loss, parameters_of

    class FarIsland(Island):
        """Its feedback goes over a bad network; its outer gradients don't."""

        _network = random.Random(f"network/{seed}")

        def _take_told(self) -> list[str]:
            late = self.__dict__.setdefault("_late", [])
            for text in super()._take_told():
                if self._network.random() >= LOSS:
                    late.append((self.progress.round + self._network.randint(0, MOST_LATE), text))
            due = [text for at, text in late if at <= self.progress.round]
            late[:] = [one for one in late if one[0] > self.progress.round]
            return due

    config = run.config
    measured = replace(config, holdout_sequences=config.holdout_sequences + size.test_sequences)
    # What the islands measure themselves and steer by comes first.
    test_NL = holdout_tokens(Run(store=run.store, config=measured, branch=None), Catalog(run.store))[
        config.holdout_sequences :
    ]
    model = build_model(config)
    own = parameters_of(model)
    step_tokens = config.batch_size * config.seq_len * config.num_islands
    course: list[Point] = []

    def look(round_: int, syncer: Syncer) -> None:
        if arm.is_poisoned and round_ == config.num_rounds // 2:
            deliver_poison(run.store)
        if round_ % (LOOK_EVERY * config.num_fragments) and round_ != config.num_rounds:
            return
        with torch.no_grad():
            for name, value in syncer.state.parameters().items():
                own[name].copy_(value)
        loss = holdout_loss(model, test_NL)
        course.append(Point(round=round_, tokens=round_ * config.round_steps * step_tokens, loss=loss))

    train_in_turn(run, on_round=look, island_class=FarIsland if arm.is_lossy else None).close()
    return course


def mean_weights(out: Path, tier: str) -> dict[int, float]:
    """By round, the islands' mean weight of a tier in a trajectory that `train` left; a mix holds until the next."""
    import pyarrow.parquet as pq

    assert tier in TIERS
    rows = pq.read_table(out / "mixtures.parquet").to_pylist()
    newest: dict[int, float] = {}
    means = {}
    for row in sorted(rows, key=lambda row: row["round"]):
        newest[row["island"]] = row[f"weight_{tier.lower()}"]
        means[row["round"]] = sum(newest.values()) / len(newest)
    return means


def to_json(course: list[Point]) -> str:
    """A course as text."""
    return json.dumps([asdict(point) for point in course])


def from_json(text: str) -> list[Point]:
    """What `to_json` gave."""
    rows: list[Mapping[str, Any]] = json.loads(text)
    return [Point(**row) for row in rows]
