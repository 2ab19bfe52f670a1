"""The main job against the plain one: four islands on their own mixes of tiers, and one process on all data uniformly, at equal tokens.

Both read the same pool and are measured on the same holdout; the text, the scores and the tiers are made once for each seed.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manifests.catalog import Catalog
from manifests.errors import Failure
from manifests.strategies import UNIFORM
from manifests.tables import open_store
from tools.bench.frame import Benchmark, Figure, interleave, run_benchmark
from tools.bench.plain import train_plainly
from tools.demo import ISLANDS, OUTER, VOCAB_SIZE
from tools.output import STDERR


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    wikipedia: int
    code: int
    """0: that corpus is left out."""
    per_kind: int
    score_options: tuple[str, ...]
    islands: int
    steps: int
    seeds: tuple[int, ...]


LR = 4e-3
FULL = Size(
    wikipedia=1500,
    code=400,
    per_kind=400,
    score_options=("--steps", "160", "--checkpoints", "2"),
    islands=ISLANDS,
    steps=96,
    seeds=(0, 1, 2),
)
QUICK = Size(
    wikipedia=150,
    code=0,
    per_kind=20,
    score_options=("--steps", "4", "--checkpoints", "1"),
    islands=2,
    steps=8,
    seeds=(0,),
)


def measure(quick: bool) -> Mapping[str, Figure]:
    """Runs all arms for every seed."""
    size = QUICK if quick else FULL
    rates: list[float] = []
    # The import takes seconds, and both cores are seldom busy while the data are prepared.
    threading.Thread(target=importlib.import_module, args=("trainer.model",), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="atoll-mainjob-") as folder:
        root = Path(folder)
        stores: dict[int, str] = {}

        def store_of(seed: int) -> str:
            if seed not in stores:
                stores[seed] = _prepare(root / f"seed-{seed}", size, seed)
            return stores[seed]

        def tiered(seed: int) -> float:
            store = store_of(seed)
            began = time.monotonic()
            loss = _train_islands(store, "tiered", size, seed)
            rates.append(_trained_tokens(store, "tiered") / (time.monotonic() - began))
            return loss

        arms = {"tiered": tiered, "uniform": lambda seed: train_uniform(store_of(seed), size, seed)}
        losses = interleave(arms, repetitions=size.seeds)
    figures = {
        "tokens_per_s": Figure(values=rates, unit="tokens/s", meaning="all islands together, their start-up included"),
        "loss_tiered": Figure(
            values=losses["tiered"], unit="nats/token", meaning="holdout loss of the final global model"
        ),
        "loss_uniform": Figure(
            values=losses["uniform"],
            unit="nats/token",
            meaning="same model, one process, one large batch, all data uniformly, equal tokens",
        ),
    }
    ratio = [a / b for a, b in zip(losses["tiered"], losses["uniform"], strict=True)]
    figures["tiered_vs_uniform"] = Figure(
        values=ratio, unit="ratio", meaning="loss_tiered / loss_uniform, seed by seed"
    )
    return figures


def train_uniform(store_uri: str, size: Size, seed: int) -> float:
    """Plain training in this process: the islands' batches together as one batch, as many steps, the uniform mix.

    Returns:
        Holdout loss, nats per token.
    """
    from trainer.feed import holdout_tokens, open_stream
    from trainer.model import build_model, holdout_loss, learning_rate, pick_device
    from trainer.plan import configure_run
    from trainer.run import Run
    from trainer.strategies import decide

    store = open_store(store_uri)
    catalog = Catalog(store)
    config = configure_run(
        store, run="uniform", tier_version=None, steps=size.steps, seed=seed, num_islands=size.islands
    )
    run = Run(store=store, config=config, branch=None)
    decision = decide(
        catalog, run="uniform", island=0, strategy=UNIFORM, tier_version=config.tier_version, pool=config.pool
    )
    stream = open_stream(run, catalog, island=0, weights=decision.weights)
    device = pick_device(config.device)
    model = build_model(config).to(device)
    batch_size = config.batch_size * size.islands
    train_plainly(model, config, [stream], batch_size=batch_size, lr=lambda step: learning_rate(step, config))
    return holdout_loss(model, holdout_tokens(run, catalog).to(device))


def _prepare(folder: Path, size: Size, seed: int) -> str:
    """Text, documents, scores, tiers, shards of one seed; returns the store's address."""
    from tools.realtext import export_stdlib_code, export_wikipedia
    from tools.synthetic import make_synthetic

    folder.mkdir()
    store = str(folder / "store")
    export_wikipedia(folder / "wikipedia.parquet", num_documents=size.wikipedia, seed=seed)
    if size.code:
        export_stdlib_code(folder / "code.parquet", num_documents=size.code, seed=seed)
    make_synthetic(folder / "wikipedia.parquet", folder / "finephrase", num_per_kind=size.per_kind, seed=seed)
    common = ["--holdout-share", "0.1", "--store", store]
    _atoll("ingest", str(folder / "wikipedia.parquet"), "--corpus", "wikipedia", *common)
    if size.code:
        _atoll("ingest", str(folder / "code.parquet"), "--corpus", "python", *common)
    _atoll("ingest", str(folder / "finephrase"), "--format", "finephrase", "--corpus", "finephrase", *common)
    _atoll("tokenizer", "--vocab-size", str(VOCAB_SIZE), "--store", store)
    _atoll("score", *size.score_options, "--seed", str(seed), "--store", store)
    _atoll("tier", "--store", store)
    _atoll("shard", "--store", store)
    return store


def _train_islands(store: str, run: str, size: Size, seed: int) -> float:
    options = ["--islands", str(size.islands), "--steps", str(size.steps), "--lr", str(LR), *OUTER, "--seed", str(seed)]
    _atoll("train", "--run", run, *options, "--store", store)
    rows = Catalog(open_store(store)).ask("last_checkpoint", run=run).to_pylist()
    return float(rows[0]["holdout_loss"])


def _trained_tokens(store: str, run: str) -> int:
    rows = Catalog(open_store(store)).rows("SELECT sum(tokens)::BIGINT AS tokens FROM consumption WHERE run = ?", [run])
    return int(rows[0]["tokens"])


def _atoll(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tools.cli", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        STDERR.print(done.stderr, markup=False)
        raise Failure(f"`atoll {' '.join(arguments)}` ended with exit code {done.returncode}")


BENCHMARK = Benchmark(
    name="mainjob",
    question="What do four islands on mixes of influence tiers reach, against plain training on all data at equal tokens?",
    measure=measure,
    notes=(
        "The model has 1.1 M parameters and starts from scratch, and the islands make few outer steps: DiLoCo's price stands at its highest, "
        "and is in `loss_tiered` together with what the tiers do.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
