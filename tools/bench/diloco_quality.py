"""What training in islands costs in quality: the holdout loss of ours, of torchft's DiLoCo and of one large batch, at equal tokens on real text.

Here stand the arms that are compared, their running, and the figures; how an arm trains stands in diloco_arms.py. How long anything takes is measured elsewhere
(diloco_speed.py).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from manifests.store import Store
from manifests.tables import open_store
from tools.bench.diloco_arms import BATCH, COMMON, Arm, Size, make_start, make_store, train
from tools.bench.frame import Figure
from tools.output import STDERR

FOLDER = "ATOLL_BENCH_FOLDER"
"""Environment variable: a folder that keeps the store and what each arm came to, so that a benchmark that was stopped goes on there."""

RATES = {"sync": 4e-3, "ours": 2e-3, "torchft": 2e-3}
"""Peak of the inner learning rate: the best that was tried for each; see NOTES."""
OUTER = (0.7, 0.6)
"""Outer rate and momentum, of ours and torchft's alike."""
NOTES = (
    "Every arm takes 288 steps of 16 sequences of 128 tokens (0.59 M tokens, no document twice), H = 24, P = 4, from one start: a model of 0.12 M parameters after 960 steps of plain training on "
    "other documents, as DiLoCo's authors start from a trained one. M islands have 16 / M sequences a step, far below the critical batch size, and there are 12 outer steps: DiLoCo's price, torchft's as "
    "ours, stands near its highest here.",
    "A merge is received a round (6 steps) after it was sent. torchft has no such delay: all replicas stand still while it averages.",
    "The large batch is made of the very sequences that the M islands get, for each M: another order of the same documents alone moves its loss.",
    "Rates were chosen on seed 100, which is not reported (`python -m tools.bench.diloco_sweep`; M=4). Inner, the large batch: 1e-3 2.7549, 2e-3 2.7339, 4e-3 2.7236, 6e-3 2.7281. Ours with 4 bits at "
    "2e-3, by outer rate and momentum: (0.7, 0.3) 2.7542, (0.7, 0.6) 2.7543, (1, 0.1) 2.7548, (1, 0.3) 2.7559, (0.7, 0.9) 2.9061; at 4e-3: (0.7, 0.3) 2.7611, (1, 0.1) 2.7677, (0.7, 0.6) 2.7782. "
    "torchft: at 2e-3 (0.7, 0.6) 2.7535, (0.7, 0.3) 2.7631; at 4e-3 (0.7, 0.3) 2.7577. So short a run wants little outer momentum; 0.9 needs more outer steps than these 12.",
)
"""What a reader must know to read the figures rightly."""


FULL = Size(
    documents=20_000,
    start_steps=960,
    start_lr=6e-3,
    steps=288,
    warmup_steps=0,
    hidden=64,
    layers=2,
    islands=(1, 2, 4, 8),
    main=4,
    means=(4, 8),
    torchft=(2, 4, 8),
    holdout_sequences=512,
    seeds=(0, 1, 2),
    workers=2,
)
QUICK = Size(
    documents=600,
    start_steps=24,
    start_lr=6e-3,
    steps=24,
    warmup_steps=0,
    hidden=32,
    layers=1,
    islands=(2,),
    main=2,
    means=(2,),
    torchft=(),
    holdout_sequences=32,
    seeds=(0,),
    workers=1,
)


def arms_of(size: Size) -> list[Arm]:
    """All arms."""

    def ours(islands: int, *, wire: str = "int4", merge: str = "rda", keep: float = 1.0) -> Arm:
        return Arm(kind="ours", islands=islands, lr=RATES["ours"], outer=OUTER, wire=wire, merge=merge, keep=keep)

    return [
        *(Arm(kind="sync", islands=islands, lr=RATES["sync"]) for islands in size.islands),
        Arm(kind="sync", islands=size.main, lr=RATES["ours"]),
        *(ours(islands, wire=wire) for islands in size.islands for wire in ("fp32", "int4")),
        *(ours(islands, merge="mean") for islands in size.means),
        ours(size.main, keep=0.0),
        *(Arm(kind="torchft", islands=islands, lr=RATES["torchft"], outer=OUTER) for islands in size.torchft),
    ]


def measure_quality(quick: bool) -> Mapping[str, Figure]:
    """Runs all arms for every seed, or takes them from the folder where they are done."""
    size = QUICK if quick else FULL
    arms = arms_of(size)
    with bench_folder() as folder:
        store, size = prepare(folder, size)
        done = Done(folder / "arms.jsonl", size)
        run_arms([(arm, seed) for seed in size.seeds for arm in arms], store, size, done)
        losses = {_name(arm): [done.losses[arm, seed] for seed in size.seeds] for arm in arms}
    return _figures(losses, size)


def _name(arm: Arm) -> str:
    return arm.name + (f", lr={arm.lr:g}" if arm.lr != RATES[arm.kind] else "")


def prepare(folder: Path, size: Size) -> tuple[Store, Size]:
    """The store, and the size with the start of all arms; made once for a folder, in a process of its own."""
    name = f"{size.documents}-{size.start_steps}-{size.hidden}-{size.layers}"
    with _workers(1) as pool:
        start = pool.submit(_prepare_apart, folder / f"store-{size.documents}", folder / f"start-{name}", size).result()
    return open_store(str(folder / f"store-{size.documents}")), start


def _prepare_apart(store: Path, start: Path, size: Size) -> Size:
    made = make_store(store, size)
    if start.exists():
        return make_start(start, made, size)
    with tempfile.TemporaryDirectory(prefix="atoll-diloco-") as folder:  # arms begin with a store that has no run
        copy = Path(folder) / "store"
        shutil.copytree(made.root, copy)
        return make_start(start, open_store(str(copy)), size)


# What is run, and what has been.


class Done:
    """The arms that have been run, in a file that outlives the process."""

    def __init__(self, path: Path, size: Size) -> None:
        """Takes what the file has of arms of this size."""
        names = (
            "documents",
            "start_steps",
            "start_lr",
            "steps",
            "warmup_steps",
            "hidden",
            "layers",
            "holdout_sequences",
        )
        self._settings = {name: getattr(size, name) for name in names} | COMMON | {"batch": BATCH}
        self._path = path
        self.losses: dict[tuple[Arm, int], float] = {}
        """(arm, seed) → holdout loss."""
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            if row["settings"] == self._settings:
                arm = Arm(**(row["arm"] | {"outer": tuple(row["arm"]["outer"])}))
                self.losses[arm, row["seed"]] = row["loss"]

    def add(self, arm: Arm, seed: int, *, loss: float, seconds: float, cpu_seconds: float) -> None:
        """Keeps what an arm came to."""
        self.losses[arm, seed] = loss
        times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
        row = {"arm": asdict(arm), "seed": seed, "loss": loss, **times, "settings": self._settings}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        STDERR.print(f"  {arm.name}, seed {seed}: {loss:.5g} ({seconds:.0f} s, {cpu_seconds:.0f} s of a core)")


def run_arms(tasks: Sequence[tuple[Arm, int]], store: Store, size: Size, done: Done) -> None:
    """Runs what isn't done yet: `size.workers` at once, and torchft's beside them one by one, since they start processes of their own."""
    with _workers(size.workers) as pool, _workers(1) as torchft:
        left = [(arm, seed) for arm, seed in tasks if (arm, seed) not in done.losses]
        begun = {
            (torchft if arm.kind == "torchft" else pool).submit(_train_apart, arm, seed, store.uri, size): (arm, seed)
            for arm, seed in left
        }
        try:
            for future in as_completed(begun):
                arm, seed = begun[future]
                done.add(arm, seed, **future.result())
        except BaseException:
            for future in begun:
                future.cancel()
            raise


def _workers(number: int) -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, mp_context=spawn, initializer=_begin_worker, initargs=(os.getpid(),))


def _begin_worker(parent_pid: int) -> None:
    import torch

    from tools.bench.frame import exit_with_parent

    exit_with_parent(parent_pid)
    torch.set_num_threads(1)


def _train_apart(arm: Arm, seed: int, store_uri: str, size: Size) -> dict[str, float]:
    """Trains in a copy of the store, so that no arm waits for another's commits."""
    began, cpu_began = time.monotonic(), _cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="atoll-diloco-") as folder:
        copy = Path(folder) / "store"
        shutil.copytree(open_store(store_uri).root, copy)
        loss = train(arm, seed=seed, store=open_store(str(copy)), size=size)
    return {"loss": loss, "seconds": time.monotonic() - began, "cpu_seconds": _cpu_seconds() - cpu_began}


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@contextmanager
def bench_folder() -> Iterator[Path]:
    """The folder that ATOLL_BENCH_FOLDER names, or one that is gone afterwards."""
    if named := os.environ.get(FOLDER):
        Path(named).mkdir(parents=True, exist_ok=True)
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="atoll-diloco-") as folder:
        yield Path(folder)


# The figures.


def _figures(losses: Mapping[str, Sequence[float]], size: Size) -> dict[str, Figure]:
    """Ratios of holdout losses, seed by seed."""

    def ratio(above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(losses[above], losses[below], strict=True)]

    def figure(values: Sequence[float], meaning: str) -> Figure:
        return Figure(values=values, unit="ratio", meaning=meaning)

    main = size.main
    beside_sync = "holdout loss of ours / of one process with one large batch of the same sequences, seed by seed; target: at most 1.01"
    rounded = {islands: ratio(f"ours, M={islands}, int4", f"ours, M={islands}, fp32") for islands in size.islands}
    figures = {
        "loss_sync": Figure(
            values=losses[f"sync, M={main}"], unit="nats/token", meaning="one process with one large batch"
        ),
        "loss_vs_sync": figure(ratio(f"ours, M={main}, int4", f"sync, M={main}"), f"M={main}, 4 bits: {beside_sync}"),
        "loss_4bit_vs_fp32": figure(
            [value for values in rounded.values() for value in values],
            "ours with 4 bits / with 32, for every M and seed; target: at most 1.001",
        ),
    }
    for islands in size.islands:
        for wire in ("fp32", "int4"):
            figures[f"loss_vs_sync, M={islands}, {wire}"] = figure(
                ratio(f"ours, M={islands}, {wire}", f"sync, M={islands}"), "ours / sync"
            )
    for islands in size.torchft:
        figures[f"torchft_vs_sync, M={islands}"] = figure(
            ratio(f"torchft, M={islands}", f"sync, M={islands}"), "torchft / sync"
        )
    if main in size.torchft:
        beside = "holdout loss of ours / of torchft's DiLoCo, seed by seed; target: at most 1"
        figures["loss_vs_torchft"] = figure(
            ratio(f"ours, M={main}, int4", f"torchft, M={main}"), f"M={main}, 4 bits: {beside}"
        )
    for islands in size.torchft:
        figures[f"loss_vs_torchft, M={islands}"] = figure(
            ratio(f"ours, M={islands}, int4", f"torchft, M={islands}"), "ours with 4 bits / torchft"
        )
    for islands in size.islands:
        figures[f"loss_4bit_vs_fp32, M={islands}"] = figure(rounded[islands], "ours with 4 bits / with 32")
    for islands in size.means:
        figures[f"mean_vs_rda, M={islands}"] = figure(
            ratio(f"ours, M={islands}, int4, mean", f"ours, M={islands}, int4"),
            "plain averaging / RDA, both ours with 4 bits",
        )
    figures["loss_vs_sync, at ours' inner rate"] = figure(
        ratio(f"ours, M={main}, int4", f"sync, M={main}, lr={RATES['ours']:g}"),
        f"M={main}, 4 bits; the large batch at {RATES['ours']:g}, which is below its best",
    )
    figures["keep0_vs_keep1"] = figure(
        ratio(f"ours, M={main}, int4, keep=0", f"ours, M={main}, int4"),
        f"M={main}: what was learned while a fragment was under way is lost / stays",
    )
    return figures
