"""One machine's processes of a run: a syncer and the islands, watched, started again when they die.

Each role is a process of its own that could as well stand on another machine; they meet in the store only.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from manifests.catalog import cache_root
from manifests.errors import Failure
from manifests.tables import append
from trainer.run import GLOBAL, Run

MAX_RESTARTS = 5
_RESTART_PAUSE_S = 1.0
_STOP_WAIT_S = 10.0


@dataclass(kw_only=True, slots=True)
class Role:
    """One process: an island, or the syncer (island −1)."""

    island: int
    arguments: list[str]
    log: Path
    process: subprocess.Popen[str] | None = None
    restarts: int = 0
    start_at: float = 0.0
    finished: bool = False
    _log_file: IO[str] | None = field(default=None)

    @property
    def name(self) -> str:
        """As people read it."""
        return "syncer" if self.island == GLOBAL else f"island {self.island}"


def launch(
    run: Run,
    *,
    command: Sequence[str],
    on_status: Callable[[dict[str, Any]], None],
    num_threads: int | None = None,
    logger: str = "",
) -> None:
    """Runs all roles of a run on this machine until the syncer has finished.

    Args:
        run: the run; its first fragments lie in the store already.
        command: command line that `syncer` or `island --island N` is appended to.
        on_status: called in this thread with every status that a role prints, and with {"island", "state": "died", …}.
        num_threads: torch threads of each process; by default the cores are shared out.
        logger: who else is told the metrics (roles.py).

    Raises:
        Failure: a role died more often than MAX_RESTARTS; the message names its log.
        KeyboardInterrupt: passed on when all roles have stopped; what was committed stays, the run can be continued.
    """
    config = run.config
    logs = cache_root() / "logs" / f"{run.name}-{os.getpid()}"
    logs.mkdir(parents=True, exist_ok=True)
    common = ["--store", run.store.uri, "--run", run.name, "--parent-pid", str(os.getpid())]
    common += ["--logger", logger] if logger else []
    roles = [Role(island=GLOBAL, arguments=[*command, "syncer", *common], log=logs / "syncer.log")]
    roles += [
        Role(island=i, arguments=[*command, "island", *common, "--island", str(i)], log=logs / f"island-{i}.log")
        for i in range(config.num_islands)
    ]
    threads = num_threads or max(1, (os.cpu_count() or 1) // config.num_islands)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    statuses: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    try:
        while not roles[0].finished:
            for role in roles:
                _tend(run, role, environment, statuses, on_status)
            try:
                on_status(statuses.get(timeout=0.1))
                while not statuses.empty():
                    on_status(statuses.get())
            except queue.Empty:
                pass
    finally:
        _stop(roles)


def _tend(
    run: Run,
    role: Role,
    environment: dict[str, str],
    statuses: queue.SimpleQueue[dict[str, Any]],
    on_status: Callable[[dict[str, Any]], None],
) -> None:
    """Starts a role that should be running and isn't."""
    if role.finished:
        return
    if role.process is None:
        if time.monotonic() >= role.start_at:
            _start(role, environment, statuses)
        return
    code = role.process.poll()
    if code is None:
        return
    if code == 0:
        role.finished = True
        return
    role.process = None
    role.restarts += 1
    role.start_at = time.monotonic() + _RESTART_PAUSE_S
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    on_status({"island": role.island, "state": "died", "how": how})
    kind = "syncer_died" if role.island == GLOBAL else "island_died"
    append(
        run.store,
        "events",
        [{"run": run.name, "kind": kind, "island": role.island, "detail": json.dumps({"how": how})}],
    )
    if role.restarts > MAX_RESTARTS:
        raise Failure(
            f"{role.name} of run {run.name} died {role.restarts} times, last by {how}: {_last_line(role.log)}; its log is {role.log}"
        )


def _start(role: Role, environment: dict[str, str], statuses: queue.SimpleQueue[dict[str, Any]]) -> None:
    with role.log.open("a") as log:
        # Its own session: a Ctrl-C in the terminal reaches us, and we stop the roles in order.
        role.process = subprocess.Popen(
            role.arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )

    def pump(stream: IO[str]) -> None:
        for line in stream:
            try:
                status = json.loads(line)
                island = GLOBAL if status.pop("role", None) == "syncer" else role.island
                statuses.put({"island": island, **status})
            except ValueError:
                continue  # a library's stray print; statuses are JSON lines

    assert role.process.stdout is not None
    threading.Thread(target=pump, args=(role.process.stdout,), daemon=True).start()


def _stop(roles: Sequence[Role]) -> None:
    running = [role.process for role in roles if role.process is not None and role.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _STOP_WAIT_S
    for process in running:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"


def exit_with_parent(parent_pid: int) -> None:
    """Ends this process when its parent is gone, so that a killed `atoll train` leaves no island behind."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
