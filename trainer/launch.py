"""One machine's processes of a run: a syncer and the islands, watched, started again when they die.

Each role is a process of its own that could as well stand on another machine; they meet in the store only. All are forked from one process that has imported what they
need and runs nothing: no runtime of torch, obstore, delta-rs or DuckDB has begun there, so each role begins its own, and a restart costs no imports.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from manifests.catalog import cache_root
from manifests.errors import AtollError, Failure
from manifests.tables import append, open_store
from trainer.run import GLOBAL, Run

MAX_RESTARTS = 5
_RESTART_PAUSE_S = 1.0
_STOP_WAIT_S = 10.0
_POLL_S = 0.1
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ("trainer.roles", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What a role's process is told."""

    island: int
    store_uri: str
    run: str
    logger: str
    log: Path
    num_threads: int


@dataclass(kw_only=True, slots=True)
class Role:
    """One process: an island, or the syncer (island −1)."""

    task: _Task
    process: ForkServerProcess | None = None
    statuses: Connection | None = None
    restarts: int = 0
    start_at: float = 0.0
    finished: bool = False

    @property
    def island(self) -> int:
        """Its number."""
        return self.task.island

    @property
    def name(self) -> str:
        """As people read it."""
        return "syncer" if self.island == GLOBAL else f"island {self.island}"


def warm_up(num_islands: int, *, also: Sequence[str] = ()) -> None:
    """Starts the process that roles are forked from; its imports go on in the background.

    Args:
        num_islands: islands that will share this machine's cores.
        also: further modules that it imports: the caller's own, which multiprocessing imports in each role.
    """
    _CONTEXT.set_forkserver_preload([*_PRELOAD, *also])
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": str(_threads(num_islands)), "TOKENIZERS_PARALLELISM": "false"})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch(
    run: Run,
    *,
    on_status: Callable[[dict[str, Any]], None],
    logger: str = "",
) -> None:
    """Runs all roles of a run on this machine until the syncer has finished.

    Args:
        run: the run; its first fragments lie in the store already, and `warm_up` was called.
        on_status: called in this thread with every status that a role says, and with {"island", "state": "died", …}.
        logger: who else is told the metrics (roles.py).

    Raises:
        Failure: a role died more often than MAX_RESTARTS; the message names its log.
        KeyboardInterrupt: passed on when all roles have stopped; what was committed stays, the run can be continued.
    """
    logs = cache_root() / "logs" / f"{run.name}-{os.getpid()}"
    logs.mkdir(parents=True, exist_ok=True)
    roles = [
        Role(
            task=_Task(
                island=island,
                store_uri=run.store.uri,
                run=run.name,
                logger=logger,
                log=logs / ("syncer.log" if island == GLOBAL else f"island-{island}.log"),
                num_threads=_threads(run.config.num_islands),
            )
        )
        for island in (GLOBAL, *range(run.config.num_islands))
    ]
    try:
        while not roles[0].finished:
            for role in roles:
                _tend(run, role, on_status)
            _listen(roles, on_status)
    finally:
        _stop(roles)


def _tend(run: Run, role: Role, on_status: Callable[[dict[str, Any]], None]) -> None:
    """Starts a role that should be running and isn't."""
    if role.finished:
        return
    if role.process is None:
        if time.monotonic() >= role.start_at:
            _start(role)
        return
    if role.statuses is not None or role.process.is_alive():
        return  # the last thing that it says is that it's gone
    code = role.process.exitcode
    if code == 0:
        role.finished = True
        return
    role.process = None
    role.restarts += 1
    role.start_at = time.monotonic() + _RESTART_PAUSE_S
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    on_status({"island": role.island, "state": "died", "how": how})
    kind = "syncer_died" if role.island == GLOBAL else "island_died"
    append(
        run.store,
        "events",
        [{"run": run.name, "kind": kind, "island": role.island, "detail": json.dumps({"how": how})}],
    )
    if role.restarts > MAX_RESTARTS:
        raise Failure(
            f"{role.name} of run {run.name} died {role.restarts} times, last by {how}: {_last_line(role.task.log)}; "
            f"its log is {role.task.log}"
        )


def _start(role: Role) -> None:
    role.statuses, status = _CONTEXT.Pipe(duplex=False)
    # Not a daemon: those may have no children, and torch.compile has some.
    role.process = _CONTEXT.Process(target=_live, args=(status, role.task), daemon=False)
    role.process.start()
    status.close()  # or a dead process' end would never be seen


def _listen(roles: Sequence[Role], on_status: Callable[[dict[str, Any]], None]) -> None:
    """Passes on what the roles say within a moment."""
    speaking = {role.statuses: role for role in roles if role.statuses is not None}
    if not speaking:
        time.sleep(_POLL_S)
        return
    for connection in wait(list(speaking), _POLL_S):
        assert isinstance(connection, Connection)
        role = speaking[connection]
        try:
            status = connection.recv()
        except EOFError:
            connection.close()
            role.statuses = None
            continue
        island = GLOBAL if status.pop("role", None) == "syncer" else role.island
        on_status({"island": island, **status})


def _stop(roles: Sequence[Role]) -> None:
    running = [role.process for role in roles if role.process is not None and role.process.is_alive()]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _STOP_WAIT_S
    for process in running:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _live(status: Connection, task: _Task) -> None:
    """What a role's process does."""
    os.setsid()  # a Ctrl-C in the terminal reaches the launcher alone, which stops the roles in order
    _end_with_launcher()
    name = "atoll-syncer" if task.island == GLOBAL else f"atoll-island-{task.island}"
    Path("/proc/self/comm").write_text(name)  # what top and ps show
    with task.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch

    from trainer.roles import leave_on_sigterm, run_island, run_syncer

    leave_on_sigterm()
    torch.set_num_threads(task.num_threads)
    turn = threading.Lock()

    def emit(said: dict[str, Any]) -> None:
        with turn:
            status.send(said)

    try:
        store = open_store(task.store_uri)
        if task.island == GLOBAL:
            run_syncer(store, task.run, emit=emit, logger=task.logger)
        else:
            run_island(store, task.run, task.island, emit=emit, logger=task.logger)
    except AtollError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(e.exit_code)


def _threads(num_islands: int) -> int:
    return max(1, (os.cpu_count() or 1) // num_islands)


def _end_with_launcher() -> None:
    """Ends this process when the launcher ends, so that a killed `atoll train` leaves no island behind."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        # The process that this one was forked from lives as long as its children do, so its end tells nothing.
        wait([launcher.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"
