"""Progress of batch jobs on stderr: a bar with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from manifests.jobs import Report
from tools.output import STDERR

_LINE_EVERY_S = 10.0


@contextmanager
def progress_report() -> Iterator[Report]:
    """A report function that shows what it's told for as long as the context lasts."""
    if not STDERR.is_terminal:
        yield _LineReport()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=STDERR) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield report


class _LineReport:
    def __init__(self) -> None:
        self._printed_at: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        first = self._printed_at.setdefault(what, now)
        if (total is not None and done >= total) or now - first >= _LINE_EVERY_S:
            self._printed_at[what] = now
            STDERR.print(f"  {what}: {done:,}" + (f" of {total:,}" if total is not None else ""))
