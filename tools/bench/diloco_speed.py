"""What an island's life costs its inner steps, what a slow neighbour costs it, and how many bytes its outer steps send; torchft beside it.

Times are taken of processes that run as `atoll train` starts them, on a real store; blocks of compared sides take turns. Processes: diloco_speed_roles.py.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manifests.store import Store
from tools.bench.diloco_speed_roles import (
    VOCABULARY,
    Blocks,
    Player,
    Seconds,
    make_store,
    play_bare,
    play_island,
    play_syncer,
)
from tools.bench.diloco_torchft import run_torchft
from tools.bench.frame import Figure
from tools.output import STDERR

SYNC_EVERY, FRAGMENTS = 24, 4
_ROUND = SYNC_EVERY // FRAGMENTS
_SEQ_LEN = 128
_SETTLE_S = 0.5
"""After an island's block: its last records go to the store meanwhile."""
_LR, _WARMUP, _DECAY, _CLIP = 1e-3, 16, 0.1, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    documents: int
    model: Mapping[str, Any]
    """Whose step's overhead is measured."""
    batch_size: int
    warm: int
    """Steps of an island before its first block."""
    repetitions: int
    """Of the overhead: blocks of each side."""
    cycles: int
    """Outer cycles that each side is timed for in a repetition of the loss by a slow neighbour."""
    neighbour_repetitions: int
    sleep_s: float
    """In each step of all islands and replicas beside each other: it stands for an accelerator's work, and leaves two cores enough for all of them."""
    with_torchft: bool
    sent_cycles: int
    """Outer cycles whose bytes are counted."""


def _llama(*, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }


_FULL = Scale(
    documents=1200,
    model=_llama(hidden=192, layers=4),
    batch_size=8,
    warm=SYNC_EVERY,
    repetitions=8,
    cycles=2,
    neighbour_repetitions=3,
    sleep_s=0.08,
    with_torchft=True,
    sent_cycles=2,
)
_QUICK = Scale(
    documents=200,
    model=_llama(hidden=96, layers=2),
    batch_size=2,
    warm=_ROUND,
    repetitions=1,
    cycles=1,
    neighbour_repetitions=1,
    sleep_s=0.02,
    with_torchft=False,
    sent_cycles=1,
)
_ROUNDS = "inner step of an island, over whole rounds: data, records, outer gradients, merges, checkpoint and holdout loss of each outer cycle"
_OVERHEADS = {
    "step_overhead": (
        "ratio",
        f"wall clock of an {_ROUNDS} / of a bare loop's that evaluates the same holdout as often",
    ),
    "step_overhead_cpu": (
        "ratio",
        "the same in CPU time of the thread that trains, which nothing else on the machine is in",
    ),
    "step_overhead_with_holdout": ("ratio", f"wall clock of an {_ROUNDS} / of a bare loop's that evaluates nothing"),
    "bare_step_s": (
        "s",
        "wall clock of a step of the bare loop: forward, backward, clipping, AdamW on tokens in memory",
    ),
}
_SENT_MODEL = _llama(hidden=256, layers=10)
_NEIGHBOUR_MODEL = _llama(hidden=64, layers=2)


def measure_speed(quick: bool) -> Mapping[str, Figure]:
    """All of it: up to 8 minutes on two cores; quick: up to 20 s."""
    scale = _QUICK if quick else _FULL
    with tempfile.TemporaryDirectory(prefix="atoll-diloco-", dir=os.environ.get("ATOLL_BENCH_DIR")) as name:
        folder = Path(name)
        store = make_store(folder, num_documents=scale.documents)
        figures = _sent(store, scale)
        figures |= _overhead(store, scale)
        figures |= _lost(folder, store, scale)
    return figures


def _start_run(store: Store, name: str, **options: Any) -> None:
    """Makes a run and puts its first state in the store."""
    from trainer.plan import configure_run
    from trainer.run import create_run
    from trainer.tape import prepare_run

    defaults: dict[str, Any] = {
        "num_islands": 1, "steps": 600 * _ROUND, "seq_len": _SEQ_LEN, "sync_every": SYNC_EVERY, "num_fragments": FRAGMENTS, "wire": "int4", "max_repeats": 1000,
        "strategies": ("balanced",), "lr": _LR, "warmup_steps": _WARMUP, "weight_decay": _DECAY, "gradient_clip": _CLIP, "holdout_sequences": 16, "device": "cpu",
    }  # fmt: skip
    config = configure_run(store, run=name, tier_version=None, **(defaults | options))
    prepare_run(create_run(store, config))


@contextmanager
def _playing(*players: Player) -> Iterator[None]:
    """Processes that stand still, warm; the syncer goes on at once."""
    try:
        for player in players:
            player.wait()
        yield
    finally:
        for player in players:
            player.stop()


# What an island's life costs its steps.


def _overhead(store: Store, scale: Scale) -> dict[str, Figure]:
    run = "overhead"
    _start_run(store, run, model=scale.model, batch_size=scale.batch_size)
    syncer = Player(play_syncer, store.uri, run)
    bare = Player(play_bare, store.uri, run, Blocks(warm=4, lead=1, timed=SYNC_EVERY))
    # Any four rounds one after the other have one end of a cycle among them.
    island = Player(play_island, store.uri, run, 0, Blocks(warm=scale.warm, lead=_ROUND, timed=SYNC_EVERY))
    values: dict[str, list[float]] = {name: [] for name in _OVERHEADS}
    with _playing(syncer, bare, island):
        before = bare.take_block()
        for repetition in range(scale.repetitions):
            own = island.take_block().step
            time.sleep(_SETTLE_S)
            after = bare.take_block()
            step = _between(before.step, after.step)
            evaluation = _between(before.evaluation, after.evaluation)
            values["step_overhead"].append(own.wall / (step.wall + evaluation.wall / SYNC_EVERY))
            values["step_overhead_cpu"].append(own.cpu / (step.cpu + evaluation.cpu / SYNC_EVERY))
            values["step_overhead_with_holdout"].append(own.wall / step.wall)
            values["bare_step_s"].append(step.wall)
            STDERR.print(
                f"  overhead, repetition {repetition}: {own.wall * 1e3:.1f} ms, bare {step.wall * 1e3:.1f} ms, "
                f"the thread's own {own.cpu * 1e3:.1f} and {step.cpu * 1e3:.1f} ms"
            )
            before = after
    return {
        name: Figure(values=values[name], unit=unit, meaning=meaning) for name, (unit, meaning) in _OVERHEADS.items()
    }


def _between(before: Seconds, after: Seconds) -> Seconds:
    return Seconds(wall=(before.wall + after.wall) / 2, cpu=(before.cpu + after.cpu) / 2)


# What a slow neighbour costs.


def _lost(folder: Path, store: Store, scale: Scale) -> dict[str, Figure]:
    run = "neighbours"
    _start_run(store, run, model=_NEIGHBOUR_MODEL, batch_size=scale.batch_size, num_islands=2)
    blocks = Blocks(warm=_ROUND, lead=_ROUND, timed=scale.cycles * SYNC_EVERY)
    syncer = Player(play_syncer, store.uri, run)
    fast, slow = (Player(play_island, store.uri, run, number, blocks) for number in range(2))
    with _playing(syncer, fast, slow):
        values = {"fast_island_lost": _losses(partial(_island_step_s, fast, slow, scale), scale)}
    if scale.with_torchft:
        values["fast_island_lost_torchft"] = _losses(partial(_replica_step_s, folder, scale), scale)
    sides = {"fast_island_lost": "an island's", "fast_island_lost_torchft": "a replica's of torchft's DiLoCo"}
    what = "1 − (time per step beside a neighbour as fast) / (time per step beside one that takes twice as long by sleeping)"
    return {
        name: Figure(values=found, unit="of its time", meaning=f"{sides[name]} {what}")
        for name, found in values.items()
    }


def _losses(step_s: Callable[[float], float], scale: Scale) -> list[float]:
    """What the fast one of two loses, by its time per step where the other one sleeps so much more in each step."""
    losses = []
    before_s = step_s(0.0)
    for repetition in range(scale.neighbour_repetitions):
        uneven_s = step_s(before_s)
        after_s = step_s(0.0)
        losses.append(1 - (before_s + after_s) / 2 / uneven_s)
        STDERR.print(
            f"  neighbour, repetition {repetition}: as fast {before_s * 1e3:.1f} and {after_s * 1e3:.1f} ms, slow {uneven_s * 1e3:.1f} ms"
        )
        before_s = after_s
    return losses


def _island_step_s(fast: Player, slow: Player, scale: Scale, more_s: float) -> float:
    fast.go(sleep_s=scale.sleep_s)
    slow.go(sleep_s=scale.sleep_s + more_s)
    timed = fast.wait()
    slow.wait()
    return timed.step.wall


def _replica_step_s(parent: Path, scale: Scale, more_s: float) -> float:
    """The same of torchft."""
    import numpy as np

    steps = scale.cycles * SYNC_EVERY
    folder = Path(tempfile.mkdtemp(prefix="torchft-", dir=parent))
    files = [folder / f"{name}.npy" for name in ("0", "1", "holdout")]
    for seed, file in enumerate(files):
        count = steps * scale.batch_size if file.stem != "holdout" else 4
        np.save(file, np.random.default_rng(seed).integers(0, VOCABULARY, (count, _SEQ_LEN)))
    result = run_torchft(
        folder,
        model=_NEIGHBOUR_MODEL,
        token_files=files[:2],
        holdout_file=files[2],
        seq_len=_SEQ_LEN,
        batch_size=scale.batch_size,
        steps=steps,
        lr=_LR,
        warmup_steps=_WARMUP,
        weight_decay=_DECAY,
        gradient_clip=_CLIP,
        sync_every=SYNC_EVERY,
        outer_lr=0.7,
        outer_momentum=0.9,
        seed=0,
        slow={0: scale.sleep_s, 1: scale.sleep_s + more_s},
        timeout_s=180,
    )
    return result.seconds[0] / steps


# What outer steps send.


def _sent(store: Store, scale: Scale) -> dict[str, Figure]:
    """Island and syncer in turn, so that what lies in the store is of whole cycles."""
    import torch

    from trainer.island import Island
    from trainer.run import load_run
    from trainer.syncer import Syncer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where others use the machine, too
    name = "sent"
    _start_run(store, name, model=_SENT_MODEL, batch_size=1, seq_len=16, holdout_sequences=1, checkpoint_cycles=1000)
    run = load_run(store, name)
    island = Island(run, 0, emit=_unheard, in_background=False)
    syncer = Syncer(run, emit=_unheard, in_background=False)
    for _ in range(scale.sent_cycles * FRAGMENTS):
        island.train_round()
        while syncer.sweep()[0]:
            island.receive_now()
    island.close()
    syncer.close()
    torch.set_num_threads(threads)
    assert syncer.merge == scale.sent_cycles * FRAGMENTS, "every outer gradient has its merge"
    parameters = sum(parameter.numel() for parameter in island.engine.model.parameters())
    assert parameters >= 8_000_000
    # Merges have names of their own; their folder is all that comes down to an island that is no newcomer.
    folders = {"up": run.outer_folder(0), "down": str(Path(run.merge_path(1)).parent)}
    bytes_of = {way: sum(info.size_bytes for info in store.list(folder)) for way, folder in folders.items()}
    each = {way: total / parameters / (scale.sent_cycles * SYNC_EVERY) for way, total in bytes_of.items()}
    what = f"objects in the store / {parameters / 1e6:.1f} M parameters / inner steps, int4, H = {SYNC_EVERY}, P = {FRAGMENTS}"
    return {
        "bytes_per_param_step": Figure(
            values=[max(each.values())], unit="bytes", meaning=f"{what}; the larger of up and down"
        ),
        "bytes_per_param_step_down": Figure(values=[each["down"]], unit="bytes", meaning=f"merges: {what}"),
    }


def _unheard(status: dict[str, Any]) -> None:
    """An emit that nobody hears."""
