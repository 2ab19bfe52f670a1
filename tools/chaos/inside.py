"""What runs in a role's process under chaos: the island or the syncer as it always is, on steps of a set length, and what the harness may do to it while it runs.

Four things of the process are taken in hand, and nothing else: a step lasts as long as it would on an accelerator of its own, so that the machine's few cores
aren't what is measured; the clock that Python code reads; the size that its files may have; and, for a poisoned island, the order of the tokens that it trains on.
"""

from __future__ import annotations

import datetime as time_of_day
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from manifests.tables import open_store
from tools.bench.diloco_processes import Environment, settle
from tools.chaos.schedule import GLOBAL


@dataclass(kw_only=True, slots=True)
class Nudges:
    """What the harness has told this process to be like."""

    slowness: float = 1.0
    """So many times as long a step lasts."""
    clock_s: float = 0.0
    """By so much the clock is wrong."""
    poisoned: bool = False
    disk_full: bool = False
    """No file can grow."""

    def take(self, said: Mapping[str, Any]) -> None:
        """Becomes what it's told to be."""
        for name, value in said.items():
            setattr(self, name, value)
        # A full disk for this process alone. Python ignores SIGXFSZ, so that a write fails (EFBIG), as it does on a full disk (ENOSPC).
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (0 if self.disk_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a role is, and where."""

    store_uri: str
    run: str
    island: int
    step_s: float
    environment: Environment
    log: Path
    nudges: Mapping[str, Any]
    """That hold from its start."""


def live(status: Connection, commands: Connection, orders: Orders) -> None:
    """A role's whole life, in a process of its own: takes what the harness says from `commands` and says through `status` what it does."""
    settle(orders.environment)
    with orders.log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    import trainer.island
    from trainer.roles import run_island, run_syncer

    torch.set_num_threads(1)
    nudges = Nudges()
    nudges.take(orders.nudges)
    threading.Thread(target=_obey, args=(commands, nudges), daemon=True).start()
    shift_clock(lambda: nudges.clock_s)
    make_engine = trainer.island.make_engine  # type: ignore[attr-defined]

    def make_paced_engine(*arguments: Any, **more: Any) -> Any:
        engine: Any = make_engine(*arguments, **more)
        engine.step = paced(engine.step, nudges, step_s=orders.step_s)
        return engine

    trainer.island.make_engine = make_paced_engine  # type: ignore[attr-defined]
    turn = threading.Lock()

    def emit(said: dict[str, Any]) -> None:
        with turn:
            status.send((time.monotonic(), said))

    store = open_store(orders.store_uri)
    if orders.island == GLOBAL:
        run_syncer(store, orders.run, emit=emit)
    else:
        run_island(store, orders.run, orders.island, emit=emit)


def paced(step: Callable[..., Any], nudges: Nudges, *, step_s: float) -> Callable[..., Any]:
    """An engine's step that lasts as long as it's told to, all that the island does between two steps included; on scrambled tokens where it's poisoned."""
    chance = random.Random(0)
    last = 0.0

    def take(tokens_BL: Any, **more: Any) -> Any:
        nonlocal last
        if nudges.poisoned:
            order = list(range(tokens_BL.numel()))
            chance.shuffle(order)
            tokens_BL = tokens_BL.flatten()[order].reshape(tokens_BL.shape)
        stepped = step(tokens_BL, **more)
        time.sleep(max(0.0, last + step_s * nudges.slowness - time.monotonic()))
        last = time.monotonic()
        return stepped

    return take


def shift_clock(offset_s: Callable[[], float]) -> None:
    """Shifts the clock of this process, as Python code of ours reads it: `time.time`, `time.time_ns`, `datetime.now`. Libraries in other languages have their own."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + offset_s()
    time.time_ns = lambda: real_ns() + int(offset_s() * 1e9)

    class Shifted(datetime):
        """datetime, whose `now` is shifted."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            """The shifted time."""
            return time_of_day.datetime.now(tz) + timedelta(seconds=offset_s())

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("manifests", "trainer") and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]


def _obey(commands: Connection, nudges: Nudges) -> None:
    try:
        while True:
            nudges.take(commands.recv())
    except (EOFError, OSError):
        return  # the harness has let go of this process
