"""Kills a command at a boundary of one of its writes, and tells which boundaries there are. For tests; works on this process alone.

    python -m tests.faults --kill N [--log FILE] [--module NAME] -- ARGUMENTS…

runs `atoll ARGUMENTS…`, or a module as `python -m NAME ARGUMENTS…`, and sends itself SIGKILL at boundary N, counted from 1; with 0 it runs to
its end. FILE gets a JSON line for every boundary that was reached. A write passes these boundaries:

    before  nothing of it is there
    torn    in a folder only: what a process that dies in the middle leaves behind, a staging file `NAME#1` beside the object; of an append,
            whole data files and a staged log entry, without the commit
    after   it took effect, and its caller never learned of it

A write that raises passes no `after`. On object storage a put is atomic, and delta-rs's own requests are cut by `s3_proxy`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

import deltalake
import obstore
from deltalake import DeltaTable
from deltalake.table import TableAlterer, TableOptimizer
from obstore.store import LocalStore

import manifests.tables

ROOT = Path(__file__).parent.parent
Moment = Literal["before", "torn", "after"]
Tear = Callable[[], None]
"""Leaves in the store what a death in the middle of a write leaves there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """One place at which a process may die."""

    number: int
    """From 1, in the order in which the process reached it."""
    moment: Moment
    operation: str
    place: str
    """Object or table."""


def run_cut(
    arguments: Sequence[str],
    *,
    kill: int = 0,
    log: Path | None = None,
    module: str | None = None,
    timeout_s: float = 170,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own, killed at a boundary; its return code is then `-SIGKILL`."""
    command = [sys.executable, "-m", "tests.faults", "--kill", str(kill)]
    if log is not None:
        command += ["--log", str(log)]
    if module is not None:
        command += ["--module", module]
    return subprocess.run(
        [*command, "--", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False
    )


def read_boundaries(log: Path) -> list[Boundary]:
    """The boundaries that a process reached, in order."""
    return [Boundary(**json.loads(line)) for line in log.read_text().splitlines()]


class Killer:
    """Counts the boundaries of this process, and kills it at one of them."""

    def __init__(self, *, kill: int, log: Path | None = None) -> None:
        self._kill = kill
        self._log = log.open("w") if log is not None else None
        self._lock = threading.Lock()
        self._number = 0

    def reach(self, moment: Moment, operation: str, place: str, tear: Tear | None = None) -> None:
        """Passes a boundary, or dies at it; `tear` leaves what a death in the middle leaves."""
        with self._lock:
            self._number += 1
            if self._log is not None:
                boundary = Boundary(number=self._number, moment=moment, operation=operation, place=place)
                print(json.dumps(asdict(boundary)), file=self._log, flush=True)
            if self._number == self._kill:
                if tear is not None:
                    tear()
                os.kill(os.getpid(), signal.SIGKILL)

    def wrap(
        self,
        operation: str,
        write: Callable[..., Any],
        place_of: Callable[..., str],
        tear_of: Callable[..., Tear | None] | None = None,
    ) -> Callable[..., Any]:
        """The write with its boundaries; `place_of` and `tear_of` see its arguments."""

        def cut(*args: Any, **options: Any) -> Any:
            place = place_of(*args, **options)
            self.reach("before", operation, place)
            tear = tear_of(*args, **options) if tear_of is not None else None
            if tear is not None:
                self.reach("torn", operation, place, tear)
            result = write(*args, **options)
            self.reach("after", operation, place)
            return result

        return cut


def install(killer: Killer) -> None:
    """Puts the killer in the way of all writes that Atoll makes in this process."""
    for owner, name, place_of, tear_of in _WRITES:
        write = getattr(owner, name)
        cut = killer.wrap(name, write, place_of, tear_of)
        setattr(owner, name, staticmethod(cut) if inspect.ismethod(write) else cut)


def main() -> None:
    """The command; see the head of this file."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--kill", type=int, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--module")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    install(Killer(kill=options.kill, log=options.log))
    module = options.module or "tools.cli"
    sys.argv = ["atoll" if options.module is None else module, *options.arguments]
    runpy.run_module(module, run_name="__main__")


def _tear_put(store: Any, path: str, data: bytes, **_: Any) -> Tear | None:
    if not isinstance(store, LocalStore):
        return None
    return lambda: _leave_staged(Path(str(store.prefix)) / path, data[: len(data) // 2])


def _tear_append(table: DeltaTable, data: Any, **_: Any) -> Tear | None:
    folder = _local_folder(table.table_uri)
    if folder is None:
        return None

    def tear() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            deltalake.write_deltalake(scratch, data, partition_by=table.metadata().partition_columns)
            shutil.copytree(scratch, folder, ignore=shutil.ignore_patterns("_delta_log"), dirs_exist_ok=True)
        _leave_staged(folder / "_delta_log" / f"{table.version() + 1:020}.json", b'{"commitInfo":{"timest')

    return tear


def _tear_create(uri: str, **_: Any) -> Tear | None:
    folder = _local_folder(uri)
    if folder is None:
        return None
    return lambda: _leave_staged(folder / "_delta_log" / f"{0:020}.json", b'{"protocol":{"minRead')


def _leave_staged(target: Path, data: bytes) -> None:
    """A half-written file as obstore and delta-rs name it; they rename it to its own name once it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_name(f"{target.name}#1").write_bytes(data)


def _local_folder(uri: str) -> Path | None:
    parsed = urlparse(str(uri))
    if parsed.scheme not in ("", "file"):
        return None
    return Path(unquote(parsed.path) if parsed.scheme else uri)


def _object(_: Any, path: Any, *__: Any, **___: Any) -> str:
    return str(path)


def _table(table: DeltaTable | str, *_: Any, **__: Any) -> str:
    uri = table if isinstance(table, str) else str(table.table_uri)
    return str(_local_folder(uri) or uri)


def _table_of(owner: TableOptimizer | TableAlterer, *_: Any, **__: Any) -> str:
    return _table(owner.table)


# Everything that Atoll writes a store with: where the function is looked up, its name, what it writes to, what it leaves half done.
_WRITES: tuple[tuple[Any, str, Callable[..., str], Callable[..., Tear | None] | None], ...] = (
    (obstore, "put", _object, _tear_put),
    (obstore, "delete", _object, None),
    (manifests.tables, "write_deltalake", _table, _tear_append),
    (DeltaTable, "create", _table, _tear_create),
    (DeltaTable, "vacuum", _table, None),
    (DeltaTable, "create_checkpoint", _table, None),
    (TableOptimizer, "compact", _table_of, None),
    (TableAlterer, "add_columns", _table_of, None),
    (TableAlterer, "set_table_properties", _table_of, None),
)


if __name__ == "__main__":
    main()
