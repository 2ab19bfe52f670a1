"""Progress of batch jobs on stderr: a bar with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

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
        _RateColumn(),
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


class _RateColumn(ProgressColumn):
    """Units per second, of late."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(_rate(speed) if speed else "")


class _LineReport:
    def __init__(self) -> None:
        self._began: dict[str, tuple[float, int]] = {}
        """When a kind of work was first heard of, and what had been done of it by then: an earlier attempt's, say."""
        self._printed_at: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        began, done_before = self._began.setdefault(what, (now, done))
        finished = total is not None and done >= total
        if finished or now - self._printed_at.setdefault(what, now) >= _LINE_EVERY_S:
            self._printed_at[what] = now
            text = f"  {what}: {done:,}" + (f" of {total:,}" if total is not None else "")
            if done > done_before and now > began:
                speed = (done - done_before) / (now - began)
                text += f", {_rate(speed)}"
                if total is not None and not finished:
                    text += f", {timedelta(seconds=round((total - done) / speed))} left"
            STDERR.print(text)


def _rate(speed: float) -> str:
    return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.2g}/s"
