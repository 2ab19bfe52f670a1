"""The processes of a DiLoCo run, for its benchmarks: a syncer and islands that start within a second, each with an environment of its own.

All are forked from one process that has imported torch and runs nothing. What each says goes through a pipe, stamped with the clock that all of the machine's
processes share; what its libraries say goes to a log. None outlives the benchmark, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from manifests.errors import Failure
from manifests.tables import open_store
from trainer.run import GLOBAL

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = (
    "trainer.roles",
    "trainer.plan",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "tools.bench.diloco_processes",
    "tools.bench.diloco_runs",
)
_ANSWER_LIMIT_S = 300.0
_END_WAIT_S = 10.0
_POLL_S = 0.1
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
Environment = Mapping[str, str]


def warm_up() -> None:
    """Starts the process that the others are forked from; its imports go on in the background. SIGTERM ends this process as Ctrl-C does from now on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.update(_ONE_THREAD)
    _CONTEXT.set_forkserver_preload(list(_PRELOAD))
    _CONTEXT.Process(target=os.getpid, daemon=True).start()


def call(function: Callable[..., Any], *arguments: Any, environment: Environment) -> Any:
    """Calls a module's function in a process of its own, so that neither torch nor the store's keys come into this one.

    Raises:
        Failure: it raised, or gave no answer in time.
    """
    answers, answer = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(answer, function, arguments, dict(environment)), daemon=True)
    process.start()
    answer.close()
    try:
        if not answers.poll(_ANSWER_LIMIT_S):
            raise Failure(f"{function.__name__} gave no answer in {_ANSWER_LIMIT_S:.0f} s")
        succeeded, result = answers.recv()
    except EOFError as e:
        raise Failure(f"the process of {function.__name__} ended without an answer") from e
    finally:
        process.kill()
        process.join()
    if not succeeded:
        raise Failure(f"{function.__name__}:\n{result}")
    return result


def _answer(
    answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    settle(environment)
    try:
        answer.send((True, function(*arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))


def settle(environment: Environment) -> None:
    """What every forked process does first: it ends when the benchmark does, however that ends."""
    os.setsid()  # a Ctrl-C in the terminal is the benchmark's alone, which then ends the others
    os.environ.update(environment)
    benchmark = multiprocessing.parent_process()
    assert benchmark is not None

    def end_with_benchmark() -> None:
        # The process that this one was forked from lives as long as its children do, so its end tells nothing.
        wait([benchmark.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_benchmark, daemon=True).start()


@dataclass(kw_only=True, slots=True)
class Role:
    """An island, or the syncer (island −1), as it's seen from here."""

    island: int
    process: ForkServerProcess
    statuses: Connection
    log: Path
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of every inner step, by time.monotonic()."""
    last: dict[str, Any] = field(default_factory=dict)
    """What it said last."""
    ended: bool = False

    @property
    def name(self) -> str:
        """As people read it."""
        return "the syncer" if self.island == GLOBAL else f"island {self.island}"


class Roles:
    """All processes of one run, as a context: at its end none is left."""

    def __init__(self, store_uri: str, run: str, folder: Path, *, environments: Mapping[int, Environment]) -> None:
        """
        Args:
            store_uri: the store's address.
            run: the run; its first state lies in the store.
            folder: for logs, and for a cache of each process.
            environments: by island; the syncer is GLOBAL.
        """
        self._store_uri, self._run, self._folder, self._environments = store_uri, run, folder, environments
        self._roles: dict[int, Role] = {}

    @property
    def islands(self) -> list[Role]:
        """The islands, by number."""
        return [role for number, role in sorted(self._roles.items()) if number != GLOBAL]

    @property
    def steps(self) -> dict[int, int]:
        """Steps that every island said last that it had taken."""
        return {role.island: role.last["step"] for role in self.islands}

    @property
    def syncer(self) -> Role:
        """The syncer."""
        return self._roles[GLOBAL]

    def __enter__(self) -> Roles:
        for island, environment in self._environments.items():
            name = "syncer" if island == GLOBAL else f"island-{island}"
            cache = self._folder / "caches" / name
            cache.mkdir(parents=True)
            statuses, status = _CONTEXT.Pipe(duplex=False)
            log = self._folder / f"{name}.log"
            arguments = (status, self._store_uri, self._run, island, {"ATOLL_CACHE": str(cache), **environment}, log)
            process = _CONTEXT.Process(target=_live, args=arguments, daemon=True)
            process.start()
            status.close()  # or a dead process' end would never be seen
            self._roles[island] = Role(island=island, process=process, statuses=statuses, log=log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for role in self._roles.values():
            role.process.kill()
        for role in self._roles.values():
            role.process.join(_END_WAIT_S)

    def watch(self, until: Callable[[], bool], *, limit_s: float, what: str) -> None:
        """Takes in what the processes say until something has come true.

        Raises:
            Failure: a process died, or time ran out; the message has the last lines of a log.
        """
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline:
                raise Failure(f"{what}: not so in {limit_s:.0f} s; {self._where()}")
            self._take_in()

    def watch_for(self, seconds: float) -> None:
        """Takes in what the processes say for a while."""
        end = time.monotonic() + seconds
        self.watch(lambda: time.monotonic() >= end, limit_s=seconds + 60, what="waiting")

    def watch_out(self, *, limit_s: float) -> None:
        """Takes in what the processes say until all have ended of themselves."""
        self.watch(lambda: all(role.ended for role in self._roles.values()), limit_s=limit_s, what="the run's end")

    def _take_in(self) -> None:
        running = {role.statuses: role for role in self._roles.values() if not role.ended}
        for found in wait(list(running), _POLL_S):
            assert isinstance(found, Connection)
            role = running[found]
            try:
                at_s, status = found.recv()
            except EOFError:
                self._see_end(role)
                continue
            role.last = status
            if status["state"] == "training":
                role.steps.append((at_s, status["step"]))

    def _see_end(self, role: Role) -> None:
        role.ended = True
        role.process.join(_END_WAIT_S)
        if role.process.exitcode != 0:
            lines = role.log.read_text(errors="replace").strip()
            raise Failure(f"{role.name} ended with code {role.process.exitcode}: {lines[-3000:]}")

    def _where(self) -> str:
        return ", ".join(f"{role.name}: {role.last.get('state')}" for role in self._roles.values() if not role.ended)


def _live(status: Connection, store_uri: str, run: str, island: int, environment: Environment, log: Path) -> None:
    settle(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from trainer.roles import run_island, run_syncer

    torch.set_num_threads(1)
    turn = threading.Lock()

    def emit(said: dict[str, Any]) -> None:
        with turn:
            status.send((time.monotonic(), said))

    if island == GLOBAL:
        run_syncer(open_store(store_uri), run, emit=emit)
    else:
        run_island(open_store(store_uri), run, island, emit=emit, hosts_syncer=False)
