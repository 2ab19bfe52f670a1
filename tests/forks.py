"""Calls functions in processes of their own that start within milliseconds: forked from one that has imported everything and runs nothing.

The process that is forked from only imports: no runtime of delta-rs, obstore, DuckDB or torch has begun there, so that each child begins its own.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_TIMEOUT_S = 120.0


class ChildFailed(Exception):
    """A function raised in its process, or the process ended without an answer; the message is its traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """A process that was started."""

    process: ForkServerProcess
    answers: Connection

    def result(self) -> Any:
        """What the function returned.

        Raises:
            ChildFailed: it raised, or its process was killed.
        """
        if not self.answers.poll(_TIMEOUT_S):
            self.kill()
            raise ChildFailed(f"no answer in {_TIMEOUT_S:.0f} s")
        try:
            succeeded, answer = self.answers.recv()
        except EOFError as e:
            raise ChildFailed(f"no answer, exit code {self.exit_code()}") from e
        self.exit_code()
        if not succeeded:
            raise ChildFailed(answer)
        return answer

    def exit_code(self) -> int | None:
        """The exit code, once the process has ended; `-SIGKILL` where it was killed, None where it goes on and on."""
        self.process.join(_TIMEOUT_S)
        return self.process.exitcode

    def kill(self) -> None:
        """Kills the process, and waits until it is gone; from any thread."""
        self.process.kill()
        wait([self.process.sentinel], _TIMEOUT_S)  # not join: only one thread can be told the exit code


def preload(*modules: str) -> None:
    """Has these modules imported by the process that is forked from. Before the first child; pytest itself is imported, too, as our main module."""
    _CONTEXT.set_forkserver_preload(["pytest", *modules])


def start(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Child:
    """Calls a function of a module in a process of its own, with these variables set beside its environment."""
    answers, answer = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(answer, function, arguments, dict(environment or {})))
    process.start()
    answer.close()  # or a killed child's end would never be seen
    return Child(process=process, answers=answers)


def call(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Calls a function of a module in a process of its own, and waits for what it returns."""
    return start(function, *arguments, environment=environment).result()


def _answer(
    answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    try:
        answer.send((True, function(*arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
