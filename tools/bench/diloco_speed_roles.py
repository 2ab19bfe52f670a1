"""The store and the processes of the DiLoCo benchmark's speed: an island as it ships, the bare loop beside it, the syncer.

A process takes its steps in blocks and stands still between them, so that two sides can take turns, or begin together. What is compared stands in
diloco_speed.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from manifests.errors import Failure
from manifests.schemas import TIERS
from manifests.store import Store
from tools.bench.diloco_processes import settle
from tools.bench.tiered import make_tiered_store

if TYPE_CHECKING:
    from trainer.engine import Stepped

VOCABULARY = 1024
_TIMEOUT_S = 180
_PRELOADED = ["torch", "trainer.roles", "transformers.models.auto.modeling_auto", "transformers.models.llama"]


def make_store(folder: Path, *, num_documents: int) -> Store:
    """A store with real text, code of the standard library, tokenised in four tiers and a holdout; the scores are made up."""
    from tools.realtext import export_stdlib_code

    text = folder / "code.parquet"
    export_stdlib_code(text, num_documents=num_documents, seed=0)
    return make_tiered_store(
        folder / "store",
        text,
        corpus="python",
        holdout_share=0.1,
        vocab_size=VOCABULARY,
        tiers=TIERS,
        shard_bytes=1 << 16,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """How a process takes its steps."""

    warm: int
    """Steps before it stands still for the first time."""
    lead: int
    """First steps of a block, that aren't timed: caches are warm then, and the background has as much to do as it has in a long run."""
    timed: int
    """Steps of a block after these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Time by two clocks."""

    wall: float
    cpu: float
    """Of the thread that trains: neither other programs nor what it waits for are in it."""

    @staticmethod
    def now() -> Seconds:
        """By this thread's clocks."""
        return Seconds(wall=time.perf_counter(), cpu=time.thread_time())

    def since(self, began: Seconds, *, times: int = 1) -> Seconds:
        """Time of each, where so many have passed."""
        return Seconds(wall=(self.wall - began.wall) / times, cpu=(self.cpu - began.cpu) / times)


_NOTHING = Seconds(wall=0.0, cpu=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What a process says of a block."""

    step: Seconds
    """A timed step, all that came between it and the next included."""
    evaluation: Seconds
    """One evaluation of the holdout, after the steps. Only the bare loop's: an island's is among its steps."""


class Player:
    """A process that takes a block when it's told."""

    def __init__(self, play: Callable[..., None], *arguments: Any) -> None:
        """
        Args:
            play: what it does; called with a connection and the arguments.
            arguments: further ones of it.
        """
        self.name = f"{play.__name__}{arguments}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)  # or each process would import torch anew
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_play, args=(play, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def go(self, *, sleep_s: float = 0.0) -> None:
        """Lets it take its next block, with a sleep in each step."""
        self._connection.send(sleep_s)

    def wait(self) -> Timed:
        """Waits for a block's end.

        Raises:
            Failure: it died, or time ran out.
        """
        if not self._connection.poll(_TIMEOUT_S):
            raise Failure(f"{self.name} didn't finish its block in {_TIMEOUT_S} s")
        try:
            timed: Timed = self._connection.recv()
        except EOFError:
            raise Failure(f"{self.name} died; its traceback stands above") from None
        return timed

    def take_block(self) -> Timed:
        """Lets it take its next block and waits."""
        self.go()
        return self.wait()

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()


def _play(play: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    import torch

    settle({})
    torch.set_num_threads(1)
    play(connection, *arguments)


class _Stage:
    """What an island emits to: prints as the command line does, times blocks, and holds the island between them."""

    def __init__(self, connection: Connection, blocks: Blocks, out: IO[str]) -> None:
        self._connection, self._blocks, self._out = connection, blocks, out
        self._began = Seconds.now()
        self.sleep_s = 0.0

    def __call__(self, status: dict[str, Any]) -> None:
        """Takes a status; a step's comes at its end."""
        print(json.dumps(status), file=self._out, flush=True)
        if status["state"] != "training":
            return
        since_warm = status["step"] - self._blocks.warm
        if since_warm < 0:
            return
        at = since_warm % (self._blocks.lead + self._blocks.timed)
        if at == 0:
            step = Seconds.now().since(self._began, times=self._blocks.timed)
            self._connection.send(Timed(step=step, evaluation=_NOTHING))
            self.sleep_s = self._connection.recv()
        if at == self._blocks.lead:
            self._began = Seconds.now()

    def slowed(self, step: Callable[..., Stepped]) -> Callable[..., Stepped]:
        """A step that takes its sleep, too."""

        def take_step(*arguments: Any, **named: Any) -> Stepped:
            time.sleep(self.sleep_s)
            return step(*arguments, **named)

        return take_step


def play_island(connection: Connection, uri: str, run: str, island: int, blocks: Blocks) -> None:
    """An island as `atoll island` runs it."""
    from trainer.engine import LocalEngine
    from trainer.roles import run_island

    with open(os.devnull, "w") as out:
        stage = _Stage(connection, blocks, out)
        # Within the engine, so that the island knows how slow it is and tells the syncer.
        LocalEngine.step = stage.slowed(LocalEngine.step)  # type: ignore[method-assign]
        run_island(Store(uri), run, island, emit=stage)


def play_syncer(connection: Connection, uri: str, run: str) -> None:
    """A syncer as `atoll syncer` runs it."""
    from trainer.roles import run_syncer

    connection.send(Timed(step=_NOTHING, evaluation=_NOTHING))
    with open(os.devnull, "w") as out:
        run_syncer(Store(uri), run, emit=lambda status: print(json.dumps(status), file=out, flush=True))


def play_bare(connection: Connection, uri: str, run_name: str, blocks: Blocks) -> None:
    """The same steps without Atoll around them, on sequences of the same stream that are in memory, round and round."""
    import torch

    from manifests.catalog import Catalog
    from trainer.feed import holdout_tokens, open_stream
    from trainer.model import build_model, holdout_loss, learning_rate, make_optimizer, token_losses
    from trainer.run import load_run

    run = load_run(Store(uri), run_name)
    config, catalog = run.config, Catalog(run.store)
    stream = open_stream(run, catalog, island=0, weights=dict.fromkeys("SABC", 0.25))
    sequences = [torch.from_numpy(stream.next_sequence().tokens.astype("int64")) for _ in range(16 * config.batch_size)]
    stream.close()
    batches = torch.stack(sequences).split(config.batch_size)
    holdout_NL = holdout_tokens(run, catalog)
    model = build_model(config)
    optimizer = make_optimizer(model, config)
    taken = 0

    def take_steps(count: int) -> Seconds:
        nonlocal taken
        began = Seconds.now()
        for _ in range(count):
            taken += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(taken, config)
            optimizer.zero_grad(set_to_none=True)
            loss = token_losses(model, batches[taken % len(batches)]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
            optimizer.step()
            loss.item()
        return Seconds.now().since(began, times=count)

    timed = Timed(step=take_steps(blocks.warm), evaluation=_NOTHING)
    while True:
        connection.send(timed)
        connection.recv()
        take_steps(blocks.lead)
        step = take_steps(blocks.timed)
        began = Seconds.now()
        holdout_loss(model, holdout_NL)
        timed = Timed(step=step, evaluation=Seconds.now().since(began))
