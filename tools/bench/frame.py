"""The frame of all benchmarks: arguments, repetitions, medians and spread, the table, the committed result.

A benchmark is a module with a `Benchmark`; `python -m tools.bench.NAME` runs it: `--quick` ends within 55 s on two cores, `--json` prints one JSON object of
named figures as the last line of stdout, `--out` writes the result to docs/results/NAME.md with all that is needed to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from manifests.catalog import write_whole
from tools.output import STDERR

RESULTS = Path(__file__).parents[2] / "docs" / "results"
_LIBRARIES = ("torch", "transformers", "pyarrow", "deltalake", "duckdb", "mosaicml-streaming", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One named result over the seeds or repetitions."""

    values: Sequence[float]
    unit: str
    meaning: str

    @property
    def median(self) -> float:
        """The figure that is reported."""
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        """Lowest and highest value."""
        return f"{min(self.values):.4g} – {max(self.values):.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One benchmark: its name and the function that measures."""

    name: str
    question: str
    """What it answers, in a sentence."""
    measure: Callable[[bool], Mapping[str, Figure | str]]
    """Called with `quick`; returns the named figures. A result that is no number is a text."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What a reader must know to read the figures rightly."""


def parser_of(name: str, question: str) -> argparse.ArgumentParser:
    """The parser of a benchmark's command line, for one that has options of its own."""
    return argparse.ArgumentParser(prog=f"python -m tools.bench.{name}", description=question)


def run_benchmark(benchmark: Benchmark, *, parser: argparse.ArgumentParser | None = None) -> None:
    """Runs a benchmark from its command line; `parser` has options that the benchmark reads itself."""
    parser = parser or parser_of(benchmark.name, benchmark.question)
    parser.add_argument("--quick", action="store_true", help="a small version that ends within 55 s on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object of named figures as the last line")
    parser.add_argument("--out", action="store_true", help=f"write docs/results/{benchmark.name}.md")
    options = parser.parse_args()
    began = time.monotonic()
    figures = benchmark.measure(options.quick)
    seconds = time.monotonic() - began
    command = shlex.join(["python", "-m", f"tools.bench.{benchmark.name}", *sys.argv[1:]])
    page = _page(benchmark, figures, command=command, seconds=seconds)
    if options.out:
        write_whole(RESULTS / f"{benchmark.name}.md", page.encode())
    if options.json:
        print(json.dumps({name: found if isinstance(found, str) else found.median for name, found in figures.items()}))
    else:
        print(page)


def interleave(
    arms: Mapping[str, Callable[[int], float]], *, repetitions: Sequence[int], report: bool = True
) -> dict[str, list[float]]:
    """Runs every arm once per repetition, in turn, so that a machine that slows down slows all of them.

    Args:
        arms: name → function of the repetition's number or seed, returning a figure.
        repetitions: numbers or seeds, one round each.
        report: whether to say on stderr what came out.
    """
    values: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in repetitions:
        for name, arm in arms.items():
            value = arm(repetition)
            values[name].append(value)
            if report:
                STDERR.print(f"  {name}, repetition {repetition}: {value:.5g}")
    return values


def _page(benchmark: Benchmark, figures: Mapping[str, Figure | str], *, command: str, seconds: float) -> str:
    rows = [f"| `{name}` | {_cells(found)} |" for name, found in figures.items()]
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    notes = "".join(f"\n{note}\n" for note in benchmark.notes)
    return (
        f"# {benchmark.name}\n\n{benchmark.question}\n\n"
        "| figure | median | spread | n | unit | meaning |\n| --- | ---: | ---: | ---: | --- | --- |\n"
        + "\n".join(rows)
        + f"\n{notes}\nCommand: `{command}` ({seconds:.0f} s). Machine: {machine}. Versions: {versions}.\n"
    )


def _cells(found: Figure | str) -> str:
    if isinstance(found, str):
        return f"{found} | | | |"
    return f"{found.median:.4g} | {found.spread} | {len(found.values)} | {found.unit} | {found.meaning}"


def exit_with_parent(parent_pid: int) -> None:
    """Ends this process when its parent is gone, so that a killed `atoll train` leaves no island behind."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
