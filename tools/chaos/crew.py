"""The processes of a run under chaos: started, watched, started again when they die. What they said is kept with its time; nothing is judged here.

All are forked from one process that has imported torch and runs nothing, so that a restart costs what a restart costs, not Python's imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from manifests.errors import Failure
from tools.bench.diloco_processes import Environment
from tools.chaos.inside import Orders, live
from tools.chaos.schedule import GLOBAL

_CONTEXT = multiprocessing.get_context("forkserver")
_POLL_S = 0.05
_END_WAIT_S = 10.0
_RESTART_PAUSE_S = 0.2
_MOST_DEATHS = 25
"""Of one role, without a fault that explains them."""


@dataclass(kw_only=True, slots=True)
class Life:
    """One process of a role, from its start to its end. Times are of time.monotonic(), which all processes of the machine share."""

    began_s: float
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When it took which step."""
    ended_s: float | None = None
    how: str = ""
    """It ended: "finished", "killed" by a fault, or what its log says last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """A merge, or that somebody took the syncer's role, as a role said it."""

    at_s: float
    by: int
    merge: int | None = None
    islands: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True)
class Role:
    """An island, or the syncer."""

    island: int
    log: Path
    lives: list[Life] = field(default_factory=list)
    process: ForkServerProcess | None = None
    statuses: Connection | None = None
    commands: Connection | None = None
    start_at_s: float = 0.0
    finished: bool = False
    killed: bool = False
    """By a fault, since its last start."""
    nudges: dict[str, Any] = field(default_factory=dict)
    deaths: int = 0
    """That no fault explains."""

    @property
    def name(self) -> str:
        """As people read it."""
        return "the syncer" if self.island == GLOBAL else f"island {self.island}"

    @property
    def runs(self) -> bool:
        """Whether there's a process."""
        return self.process is not None


class Crew:
    """All processes of one run, as a context: at its end none is left."""

    def __init__(
        self,
        store_uri: str,
        run: str,
        folder: Path,
        *,
        islands: int,
        step_s: float,
        has_syncer: bool,
        environments: Mapping[int, Environment],
    ) -> None:
        """
        Args:
            store_uri: the store's address.
            run: the run; its first state lies in the store.
            folder: for logs and caches, of which a role's outlives its processes as a disk does.
            islands: how many.
            step_s: how long a step lasts, seconds.
            has_syncer: whether a process of its own stands by for the syncer's role, besides the islands' processes.
            environments: by role.
        """
        self._store_uri, self._run, self._folder = store_uri, run, folder
        self._step_s, self._environments = step_s, environments
        numbers = range(GLOBAL if has_syncer else 0, islands)
        self.roles = {n: Role(island=n, log=folder / f"{self._label(n)}.log") for n in numbers}
        self.merges: list[Told] = []
        self.leaders: list[Told] = []
        """Who took the syncer's role."""

    @property
    def islands(self) -> list[Role]:
        """The islands, by number."""
        return [role for number, role in sorted(self.roles.items()) if number != GLOBAL]

    @property
    def is_over(self) -> bool:
        """Whether all have finished."""
        return all(role.finished for role in self.roles.values())

    @property
    def leader(self) -> int | None:
        """Who took the syncer's role last."""
        return self.leaders[-1].by if self.leaders else None

    def __enter__(self) -> Crew:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [role.process for role in self.roles.values() if role.process is not None]
        for process in running:
            process.kill()
        for process in running:
            process.join(_END_WAIT_S)

    def tend(self) -> None:
        """Takes in what the processes say, and starts those that should run and don't; a short while at most.

        Raises:
            Failure: a process died over and over, and no fault did it.
        """
        for role in self.roles.values():
            if not role.runs and not role.finished and time.monotonic() >= role.start_at_s:
                self._start(role)
        talking = {role.statuses: role for role in self.roles.values() if role.statuses is not None}
        if not talking:
            time.sleep(_POLL_S)
            return
        for found in wait(list(talking), _POLL_S):
            assert isinstance(found, Connection)
            role = talking[found]
            try:
                while found.poll():
                    self._hear(role, *found.recv())
            except (EOFError, OSError):
                self._see_end(role)

    def kill(self, number: int, *, away_s: float) -> None:
        """Kills a process as a fault does; it's started again no sooner than its machine is back."""
        role = self.roles[number]
        role.start_at_s = max(role.start_at_s, time.monotonic() + away_s)
        if role.process is not None:
            role.killed = True
            role.process.kill()

    def signal(self, number: int, what: signal.Signals) -> None:
        """Sends a process a signal, if there's one."""
        process = self.roles[number].process
        if process is not None and process.pid is not None and process.exitcode is None:
            os.kill(process.pid, what)

    def nudge(self, number: int, **nudges: Any) -> None:
        """Tells a role what it's to be like from now on (inside.Nudges), also after a restart."""
        role = self.roles[number]
        role.nudges |= nudges
        if role.commands is not None:
            try:
                role.commands.send(nudges)
            except OSError:
                return  # it has just died; the next one is told at its start

    def _label(self, number: int) -> str:
        return "syncer" if number == GLOBAL else f"island-{number}"

    def _start(self, role: Role) -> None:
        label = self._label(role.island)
        cache = self._folder / "caches" / label
        cache.mkdir(parents=True, exist_ok=True)
        statuses, status = _CONTEXT.Pipe(duplex=False)
        commands, command = _CONTEXT.Pipe(duplex=False)
        orders = Orders(
            store_uri=self._store_uri,
            run=self._run,
            island=role.island,
            step_s=self._step_s,
            environment={"ATOLL_CACHE": str(cache), **self._environments[role.island]},
            log=role.log,
            nudges=dict(role.nudges),
        )
        role.killed = False
        role.lives.append(Life(began_s=time.monotonic()))
        role.process = _CONTEXT.Process(target=live, args=(status, commands, orders), daemon=True)
        role.process.start()
        status.close()  # or a dead process' end would never be seen
        commands.close()
        role.statuses, role.commands = statuses, command

    def _hear(self, role: Role, at_s: float, said: dict[str, Any]) -> None:
        if said["state"] == "training":
            role.lives[-1].steps.append((at_s, said["step"]))
        elif said["state"] == "merged":
            self.merges.append(Told(at_s=at_s, by=role.island, merge=said["merge"], islands=tuple(said["islands"])))
        elif said["state"] == "leading":
            self.leaders.append(Told(at_s=at_s, by=role.island))

    def _see_end(self, role: Role) -> None:
        process, life = role.process, role.lives[-1]
        assert process is not None
        process.join(_END_WAIT_S)
        for connection in (role.statuses, role.commands):
            if connection is not None:
                connection.close()
        role.process = role.statuses = role.commands = None
        life.ended_s = time.monotonic()
        role.start_at_s = max(role.start_at_s, life.ended_s + _RESTART_PAUSE_S)
        if process.exitcode == 0:
            role.finished, life.how = True, "finished"
        elif role.killed:
            life.how = "killed"
        else:
            role.deaths += 1
            life.how = _last_line(role.log) or f"ended with code {process.exitcode}"
            if role.deaths > _MOST_DEATHS:
                raise Failure(
                    f"{role.name} died {role.deaths} times of itself, last of: {life.how}; its log is {role.log}"
                )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else ""
