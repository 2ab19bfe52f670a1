"""Engines: where the parts of a batch job are worked on, here one after another or on a Ray cluster; the results are the same.

What is done with a part is the job's business (ingest.py, score.py, bands.py); here is only how parts are handed out, and what becomes of errors.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from manifests.errors import AtollError, Failure, UserError
from manifests.jobs import code_version
from manifests.store import first_line

T = TypeVar("T")
R = TypeVar("R")

_RETRIES = 3
"""Times that a part is given to another worker after the one that had it died."""
_CONNECT_WAIT_S = 10.0
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else it phones home
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else it prints every worker that dies
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns on every start
    "RAY_task_oom_retries": str(_RETRIES),  # else a part that is too large for its node is tried for ever
}


class Engine(Protocol):
    """Works on the items of a job."""

    def map(self, work: Callable[[T], R], items: Iterable[T], *, name: Callable[[T], str] = str) -> Iterator[R]:
        """The results in the order of the items; items are drawn lazily, and only a bounded number are being worked on or lie finished.

        Args:
            work: a function of a module, or a functools.partial of one. It, the items and the results can be pickled, and it depends on
                nothing but its arguments and what they name: it may run on another machine, and twice.
            name: what an item is called in an error: its file and rows.

        Raises:
            AtollError: the first item, in their order, that failed with one; as it was raised.
            Failure: the workers of an item died, several times.
        """

    def close(self) -> None:
        """Cancels what is being worked on."""


@contextmanager
def open_engine(ray: str | None = None, *, workers: int | None = None, gpu: bool = False) -> Iterator[Engine]:
    """An engine for as long as the context lasts.

    Args:
        ray: None works in this process. `local` starts a Ray on this machine; `auto`, HOST:PORT and ray://HOST:PORT are clusters that
            run. Their machines have this same version of Atoll installed, and reach the files and the store by the same names.
        workers: the most items worked on at once on Ray; two for each CPU, or GPU, by default.
        gpu: whether each item on Ray has a GPU of its own. Ray hides all GPUs from work that asks for none.

    Raises:
        UserError: Ray isn't installed, no cluster answers, it has no GPU, or the number of workers makes no sense.
    """
    if workers is not None and (ray is None or workers < 1):
        raise UserError("--workers goes with --ray" if ray is None else f"--workers {workers}: give at least one")
    engine = RayEngine(ray, workers, gpu=gpu) if ray is not None else InProcess()
    try:
        yield engine
    finally:
        engine.close()


class InProcess:
    """Works here, on one item after another, as their results are drawn."""

    def map(self, work: Callable[[T], R], items: Iterable[T], *, name: Callable[[T], str] = str) -> Iterator[R]:
        """See Engine."""
        for item in items:
            try:
                result = work(item)
            except AtollError:
                raise
            except Exception as e:
                e.add_note(f"while working on {name(item)}")
                raise
            yield result

    def close(self) -> None:
        """Nothing to do."""


class RayEngine:
    """Works in tasks of a Ray cluster. A part whose worker or machine dies is given to another; an error of ours is not tried again."""

    def __init__(self, address: str, workers: int | None, *, gpu: bool) -> None:
        os.environ.update(RAY_ENVIRONMENT)
        try:
            import ray
        except ImportError as e:
            raise UserError("--ray needs Ray, which isn't installed; pip install 'atoll[ray]'") from e
        self._ray = ray
        self._workers = workers
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(ray, address, workers)
        self._resource = "GPU" if gpu else "CPU"
        if gpu and not ray.cluster_resources().get("GPU"):
            self.close()
            raise UserError(
                f"--ray {address}: the cluster has no GPU; add a machine that has one, or choose --device cpu"
            )
        options = {"max_retries": _RETRIES, "retry_exceptions": False, "num_gpus": int(gpu)}
        self._task: Any = ray.remote(_work_on).options(**options)

    def map(self, work: Callable[[T], R], items: Iterable[T], *, name: Callable[[T], str] = str) -> Iterator[R]:
        """See Engine."""
        there = self._ray.put(work)
        running: deque[tuple[T, Any]] = deque()
        waiting = iter(items)
        while True:
            while len(running) < self._bound():
                try:
                    item = next(waiting)
                except StopIteration:
                    break
                running.append((item, self._task.remote(_versions(), there, item)))
            if not running:
                return
            item, reference = running.popleft()
            yield self._result(item, reference, name)
            del reference  # else its result is held while the next is waited for

    def close(self) -> None:
        """Leaves the cluster, which ends all that it still does for us; one that was started here stops."""
        # Not by ray.cancel: a task that ends at that moment makes Ray 2.60 abort this process.
        if self._ours:
            self._ray.shutdown()

    def _bound(self) -> int:
        """Items in flight: two for each CPU or GPU, so that none waits for us. Clusters grow and shrink, so it's asked each time."""
        if self._workers is not None:
            return self._workers
        return 2 * max(1, int(self._ray.cluster_resources().get(self._resource, 0)))

    def _result(self, item: T, reference: Any, name: Callable[[T], str]) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as e:
            cause = e.cause
            if isinstance(cause, AtollError):
                raise cause from None
            if "failed to import on the worker" in str(e) or isinstance(cause, ModuleNotFoundError):
                raise UserError(
                    f"a machine of the Ray cluster can't import Atoll ({first_line(cause or e)}); install Atoll {code_version()} there"
                ) from e
            error = cause if isinstance(cause, Exception) else e
            error.add_note(f"while working on {name(item)}")
            raise error from e
        except errors.RayError as e:
            raise Failure(
                f"{name(item)}: its workers on Ray died {_RETRIES + 1} times ({type(e).__name__}: {first_line(e)}); "
                "see to their machines' memory, and run it again"
            ) from e


def _versions() -> tuple[str, str]:
    return code_version(), sys.version.split()[0]


def _work_on(versions: tuple[str, str], work: Callable[[T], R], item: T) -> R:
    """What a worker does."""
    if versions != (here := _versions()):
        raise UserError(
            f"{socket.gethostname()} of the Ray cluster has Atoll {here[0]} on Python {here[1]}, this is Atoll {versions[0]} "
            f"on Python {versions[1]}; install the same on both"
        )
    return work(item)


def _connect(ray: Any, address: str, workers: int | None) -> None:
    # Silent: what a user must know comes out as an error of ours.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        options |= {"num_cpus": workers, "include_dashboard": False}
    else:
        _require_port(address)
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as e:
        raise UserError(f"--ray {address}: {first_line(e)}; {_MEND}") from e


_MEND = "start a cluster with `ray start --head`, name another, or give --ray local"


def _require_port(address: str) -> None:
    """Refuses an address where nobody listens, which Ray would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # auto
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_WAIT_S).close()
    except (OSError, ValueError) as e:
        raise UserError(f"--ray {address}: no Ray cluster answers there ({first_line(e)}); {_MEND}") from e
