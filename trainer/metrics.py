"""Metrics of a run: JSON lines of each role (an island, the syncer), kept as objects in the store, and told to an experiment tracker where one is wanted.

A writer is one role in one incarnation. Its lines go out as parts numbered from 0, `<incarnation>-<part>.jsonl`; every so many parts are merged into one object,
`<incarnation>-<first part>-<last part>.jsonl`, so that a month is a few hundred objects. Each line says which part it was in: a reader counts none twice,
whatever of parts and merged objects it finds. Nothing else of a run rests on these lines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from manifests.errors import AtollError, ObjectMissing, ObjectTaken, UserError
from manifests.store import Store

MERGE_PARTS = 100
"""Objects that are merged into one."""
MERGE_BYTES = 4 << 20
"""Fewer are merged once they are this large together; an object of this size stays as it is."""
MAX_LINES = 10_000
"""Lines that wait for a store at most; the oldest are dropped, and counted."""
_LEVELS = 2
"""Objects are merged, and merged ones again."""
_NAME = re.compile(r"(?P<role>[^/]+)/(?P<incarnation>\d{3,})-(?P<first>\d{6,})(?:-(?P<last>\d{6,}))?\.jsonl")
_EVERY_LINE = {"time": int | float, "kind": str, "part": int}
_TRIES = 4
_FETCHES = 16


class Logger(Protocol):
    """Who else is told the lines."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Takes one line."""

    def close(self) -> None:
        """Writes what is left."""


@dataclass(kw_only=True, slots=True)
class _Steps:
    """Inner steps that make one line."""

    first_step: int
    last_step: int = 0
    count: int = 0
    loss_sum: float = 0.0
    lr: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    at: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """The line's values."""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "loss": self.loss_sum / self.count,
            "lr": self.lr,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.seconds if self.seconds > 0 else None,
            "step_time_s": self.seconds / self.count,
            **self.more,
        }


class Metrics:
    """Takes lines from a role's threads at once, and writes them in a thread of its own. It never fails: training doesn't rest on it."""

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        role: str,
        incarnation: int,
        every_s: float = 5.0,
        loggers: Sequence[Logger] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            store: the store.
            folder: of the role, `runs/<run>/metrics/<role>`.
            role: `island-0003`, or `syncer`.
            incarnation: of the role; no other writer has the same.
            every_s: how often what was noted is written, seconds.
            loggers: who else is told every line; closed with this.
            clock: seconds since the epoch.
        """
        self._role, self._incarnation, self._clock = role, incarnation, clock
        self._every_s = every_s
        self._loggers = list(loggers)
        self._writer = PartWriter(store, folder, incarnation=incarnation)
        self._lock = threading.Lock()
        self._noted: deque[dict[str, Any]] = deque()
        self._steps: _Steps | None = None
        self._dropped = 0
        self._unwritten: deque[dict[str, Any]] = deque()
        self._sending: list[dict[str, Any]] = []
        self._has_complained = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"metrics of {role}", daemon=True)
        self._thread.start()

    def note(self, kind: str, **values: Any) -> None:
        """Takes one line, to be written soon; from any thread."""
        line = self._line(kind, self._clock(), values)
        with self._lock:
            self._append(self._noted, line)

    def note_step(self, step: int, loss: float, lr: float, tokens: int, seconds: float, **more: Any) -> None:
        """Takes an inner step; the steps between two writes make one line of kind `steps`.

        Args:
            step: its number.
            loss: its mean loss, nats per token; the line has the mean over its steps.
            lr: its learning rate; the line has the last one.
            tokens: its tokens; the line has their sum, and their rate while steps were taken.
            seconds: how long it took; the line has the mean, `step_time_s`.
            more: values of which the line has the last one.
        """
        with self._lock:
            if self._steps is None:
                self._steps = _Steps(first_step=step)
            steps = self._steps
            steps.last_step, steps.lr, steps.at = step, lr, self._clock()
            steps.count += 1
            steps.loss_sum += loss
            steps.tokens += tokens
            steps.seconds += seconds
            steps.more |= more

    def close(self) -> None:
        """Writes the rest, if the store can be reached, and closes the loggers."""
        self._closing.set()
        self._thread.join()

    def _line(self, kind: str, at: float, values: Mapping[str, Any]) -> dict[str, Any]:
        head = {"time": round(at, 3), "role": self._role, "incarnation": self._incarnation, "kind": kind}
        line = head | {name: _plain(value) for name, value in values.items()} | head
        strange = [name for name, value in values.items() if value is not None and line[name] is None]
        return line | {"not_finite": strange} if strange else line

    def _append(self, lines: deque[dict[str, Any]], line: dict[str, Any]) -> None:
        if len(lines) >= MAX_LINES:
            lines.popleft()
            self._dropped += 1
        lines.append(line)

    # What follows runs in the thread.

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._turn()
        self._turn()
        for logger in self._loggers:
            self._tell(logger, logger.close)

    def _turn(self) -> None:
        with self._lock:
            steps, self._steps = self._steps, None
            noted = list(self._noted)
            self._noted.clear()
        if steps is not None:
            noted.append(self._line("steps", steps.at, steps.values()))
        for logger in list(self._loggers):
            for line in noted:
                if not self._tell(logger, lambda logger=logger, line=line: logger.log(line)):  # type: ignore[misc]
                    break
        with self._lock:
            for line in noted:
                self._append(self._unwritten, line)
        try:
            self._write()
        except AtollError as e:
            self._complain(f"metrics of {self._role} can't be written: {e}; they are kept, and tried again")

    def _write(self) -> None:
        # Lines that failed to go out go again as they were: the store may have them.
        while self._sending or self._unwritten:
            if not self._sending:
                self._sending = self._next_lines()
            self._writer.write(self._sending)
            self._sending = []
        self._writer.tidy()

    def _next_lines(self) -> list[dict[str, Any]]:
        with self._lock:
            lines = list(self._unwritten)
            self._unwritten.clear()
            dropped, self._dropped = self._dropped, 0
        return [self._line("dropped", self._clock(), {"lines": dropped}), *lines] if dropped else lines

    def _tell(self, logger: Logger, call: Callable[[], None]) -> bool:
        """Calls a logger; one that fails is told nothing more."""
        try:
            call()
        except Exception as e:  # another project's code
            warnings.warn(f"{type(logger).__name__} is told no more metrics of {self._role}: {e!r}", stacklevel=2)
            self._loggers = [other for other in self._loggers if other is not logger]
            return False
        return True

    def _complain(self, message: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            warnings.warn(message, stacklevel=2)


def _plain(value: Any) -> Any:
    """A copy of the value as JSON has it; a number that isn't finite is null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # of numpy and torch


# The objects.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """An object of this writer that will be merged with others."""

    first: int
    last: int
    data: bytes


class PartWriter:
    """Writes one writer's lines as few objects. A kill at any point leaves nothing that a reader would count twice or miss."""

    def __init__(self, store: Store, folder: str, *, incarnation: int) -> None:
        self._store, self._folder, self._incarnation = store, folder, incarnation
        self._part = 0
        self._levels: list[list[_Written]] = [[] for _ in range(_LEVELS)]
        self._covered: list[str] = []
        """Objects that are in a merged one and not deleted yet."""

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes lines as the next part; after an error, to be called again with the same lines.

        Raises:
            AtollError: the store failed; whether it has the lines is unknown.
        """
        while True:
            data = b"".join(json.dumps({**line, "part": self._part}).encode() + b"\n" for line in lines)
            try:
                self._store.put_new(self._path(self._part, self._part), data)
                break
            except ObjectTaken:  # by a stranger: what lies on both sides of his part is not merged
                self._part += 1
                self._levels = [[] for _ in range(_LEVELS)]
        self._levels[0].append(_Written(first=self._part, last=self._part, data=data))
        self._part += 1

    def tidy(self) -> None:
        """Merges what is due, then deletes what was merged; after an error, the next call goes on from there.

        Raises:
            AtollError: the store failed.
        """
        for level, written in enumerate(self._levels):
            while count := _due(written):
                group = written[:count]
                if count > 1:
                    merged = _Written(
                        first=group[0].first, last=group[-1].last, data=b"".join(one.data for one in group)
                    )
                    self._store.put_new(self._path(merged.first, merged.last), merged.data)
                    self._covered += [self._path(one.first, one.last) for one in group]
                    if level + 1 < _LEVELS:
                        self._levels[level + 1].append(merged)
                del written[:count]
        while self._covered:
            self._store.delete(self._covered[0])
            del self._covered[0]

    def _path(self, first: int, last: int) -> str:
        parts = f"{first:06d}" if first == last else f"{first:06d}-{last:06d}"
        return f"{self._folder}/{self._incarnation:03d}-{parts}.jsonl"


def _due(written: Sequence[_Written]) -> int:
    """How many of the first objects make up a merged one; 0: they are too few yet."""
    size_bytes = 0
    for count, one in enumerate(written, start=1):
        size_bytes += len(one.data)
        if count == MERGE_PARTS or size_bytes >= MERGE_BYTES:
            return count
    return 0


# Reading.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """An object of the metrics, by its name."""

    path: str
    role: str
    incarnation: int
    first: int
    last: int
    modified_at: float

    @property
    def writer(self) -> str:
        """The writer, as the cursor names it."""
        return f"{self.role}/{self.incarnation:03d}"


def read_metrics(
    store: Store, run_name: str, *, after: Mapping[str, str] | None = None, newest: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The lines of a run's metrics, role by role in the order in which they were written.

    Lines that can't be read are left out; a line of kind `unreadable` stands for them, with their object and number.

    Args:
        store: the store.
        run_name: name of the run.
        after: what an earlier call returned: only lines that it didn't have.
        newest: only the newest so many objects of each role, of those not seen before; None: all.

    Returns:
        The lines, and a cursor for the next call: the name of the last object of each writer.

    Raises:
        StoreUnreachable: the store failed.
    """
    folder = f"runs/{run_name}/metrics"
    seen = _seen(after or {})
    fetched: dict[str, bytes | None] = {}
    for _ in range(_TRIES):
        listed = _list(store, folder)
        fresh, has_gaps = _fresh(listed, seen)
        wanted = [one for objects in fresh.values() for one in (objects[-newest:] if newest is not None else objects)]
        missing = [one.path for one in wanted if fetched.get(one.path) is None]
        with ThreadPoolExecutor(_FETCHES) as pool:
            fetched |= zip(missing, pool.map(lambda path: _get(store, path), missing), strict=True)
        # What was merged between the listing and the reading is in the next listing.
        if not has_gaps and all(fetched[one.path] is not None for one in wanted):
            break
    lines: list[dict[str, Any]] = []
    for one in wanted:
        data = fetched[one.path]
        if data is not None:
            lines += _lines(one, data, after_part=seen.get(one.writer, -1))
            seen[one.writer] = one.last
    ends = {one.writer: one for one in sorted(listed, key=lambda one: one.last)}
    cursor = dict(after or {}) | {writer: one.path.rpartition("/")[2] for writer, one in ends.items()}
    return lines, cursor


def _seen(cursor: Mapping[str, str]) -> dict[str, int]:
    """Writer → its last part that was read."""
    found = {}
    for writer, name in cursor.items():
        named = _NAME.fullmatch(f"x/{name}")
        if named:
            found[writer] = int(named["last"] or named["first"])
    return found


def _list(store: Store, folder: str) -> list[_Listed]:
    found = []
    for info in store.list(folder):
        name = _NAME.fullmatch(info.path.removeprefix(f"{folder}/"))
        if name:
            first = int(name["first"])
            last = int(name["last"]) if name["last"] else first
            found.append(
                _Listed(
                    path=info.path,
                    role=name["role"],
                    incarnation=int(name["incarnation"]),
                    first=first,
                    last=last,
                    modified_at=info.modified_at,
                )
            )
    return found


def _fresh(listed: Sequence[_Listed], seen: Mapping[str, int]) -> tuple[dict[str, list[_Listed]], bool]:
    """Role → objects with parts that weren't seen, in order, none inside another; and whether parts between them lack."""
    read_up_to = dict(seen)
    fresh: dict[str, list[_Listed]] = {}
    has_gaps = False
    # Of those that begin with the same part the longest one comes first: the others are inside it.
    for one in sorted(listed, key=lambda one: (one.role, one.incarnation, one.first, -one.last)):
        up_to = read_up_to.get(one.writer, -1)
        if one.last > up_to:
            has_gaps |= one.first > up_to + 1
            fresh.setdefault(one.role, []).append(one)
            read_up_to[one.writer] = one.last
    return fresh, has_gaps


def _get(store: Store, path: str) -> bytes | None:
    try:
        return store.get(path)
    except ObjectMissing:
        return None


def _lines(one: _Listed, data: bytes, *, after_part: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    unreadable = 0
    for text in data.splitlines():
        try:
            line = json.loads(text)
            is_ours = all(isinstance(line[name], type_) for name, type_ in _EVERY_LINE.items())
        except (ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            unreadable += 1
        elif line["part"] > after_part:
            found.append(line | {"role": one.role, "incarnation": one.incarnation})
    if unreadable:
        said = {"time": one.modified_at, "role": one.role, "incarnation": one.incarnation, "kind": "unreadable"}
        found.append({**said, "object": one.path, "lines": unreadable})
    return found


# Experiment trackers.

LOGGERS = ("trackio", "tensorboard", "wandb")
"""In the order in which `auto` takes them."""


def find_logger(name: str, *, project: str, run: str, role: str, folder: Path) -> Logger | None:
    """An experiment tracker that is installed here.

    Args:
        name: one of LOGGERS; `auto`: the first that is installed; empty: none.
        project: under which the tracker keeps the run.
        run: name of the run.
        role: the role whose lines it will be told.
        folder: on this machine, for what the tracker writes; trackio has its own, $TRACKIO_DIR.

    Returns:
        The tracker; None: none is wanted, or `auto` has found none.

    Raises:
        UserError: there is no such tracker, it isn't installed, or it doesn't start.
    """
    if name == "":
        return None
    if name == "auto":
        for known in LOGGERS:
            if importlib.util.find_spec(known) is not None:
                try:
                    return find_logger(known, project=project, run=run, role=role, folder=folder)
                except UserError as e:
                    warnings.warn(f"{e}; it is passed over", stacklevel=2)
        return None
    if name not in LOGGERS:
        raise UserError(f"logger {name!r} is not known; name one of auto, {', '.join(LOGGERS)}")
    trackers: dict[str, Callable[[str, str, str, Path], Logger]] = {
        "tensorboard": _TensorBoard,
        "trackio": _Trackio,
        "wandb": _Wandb,
    }
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for data
            return trackers[name](project, run, role, folder)
    except ImportError as e:
        raise UserError(f"logger {name} can't be imported ({e}); `pip install {name}` installs it") from e
    except Exception as e:  # another project's code
        raise UserError(f"logger {name} doesn't start: {e!r}; mend that, or name another logger") from e


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """What of a line can be plotted: numbers by `kind/name`, those of a dict by `kind/name/key`, the length of a list."""
    return {f"{line['kind']}/{name}": value for name, value in _pairs(line) if name not in _NOT_PLOTTED}


_NOT_PLOTTED = ("time", "incarnation", "kind", "role")


def _pairs(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
        elif isinstance(value, list):
            yield name, len(value)
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _pairs(value))


def _step_of(line: Mapping[str, Any]) -> int | None:
    """What a line stands at: a step of an island, a merge of the syncer."""
    for name in ("step", "last_step", "merge"):
        if isinstance(line.get(name), int):
            return int(line[name])
    return None


class _TensorBoard:
    """Event files under `<folder>/tensorboard/<project>/<run>/<role>`."""

    def __init__(self, project: str, run: str, role: str, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard" / project / run / role))

    def log(self, line: Mapping[str, Any]) -> None:
        """Takes one line."""
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, global_step=_step_of(line), walltime=line["time"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class _Trackio:
    """A run of a trackio project, on this machine; incarnations of a role go on with the same one."""

    def __init__(self, project: str, run: str, role: str, folder: Path) -> None:
        import trackio  # type: ignore[import-not-found]

        self._run: Any = trackio.init(project=project, name=f"{run}-{role}", group=run, resume="allow")

    def log(self, line: Mapping[str, Any]) -> None:
        """Takes one line."""
        if numbers := _numbers(line):
            self._run.log(numbers, step=_step_of(line))

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


class _Wandb:
    """A run of a W&B project; offline, for `wandb sync` to send, unless the user's WANDB_MODE says otherwise."""

    def __init__(self, project: str, run: str, role: str, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found]

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=project,
            name=f"{run}-{role}",
            group=run,
            job_type=role.partition("-")[0],
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            reinit="create_new",  # an island's process may hold the syncer's role, too
        )
        # Its own step must never go back, as an island's does when it is started again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, line: Mapping[str, Any]) -> None:
        """Takes one line."""
        if numbers := _numbers(line):
            step = _step_of(line)
            self._run.log(numbers if step is None else {**numbers, "step": step})

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()
