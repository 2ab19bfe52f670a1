"""What an island leaves to the background, so that no step waits for the store: a lane is a thread that runs errands one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from manifests.errors import StoreUnreachable

PATIENCE_S = 600.0
"""How long the background goes on trying while the store can't be reached, before the process gives up: nothing of it is lost meanwhile, and no step waits."""
_PAUSES_S = (0.25, 5.0)
_ANOTHER_S = 180.0
"""After so long without a failure the next one is of another outage."""


class Patience:
    """Bears an outage of the store: what failed is tried again after a pause that grows, until the outage has lasted too long.

    Only for what is safe to repeat: whether a write took effect isn't known when it fails.
    """

    def __init__(self, *, limit_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = PATIENCE_S if limit_s is None else limit_s, clock
        self._since: float | None = None
        self._last = 0.0
        self._pause_s = _PAUSES_S[0]

    def bear(self, error: StoreUnreachable, *, stopping: threading.Event | None = None) -> None:
        """Waits a while; an event that is set ends the wait.

        Raises:
            StoreUnreachable: the outage has lasted too long.
        """
        now = self._clock()
        if self._since is None or now - self._last > _ANOTHER_S:
            self._since, self._pause_s = now, _PAUSES_S[0]
        if now - self._since >= self._limit_s:
            raise error
        (stopping or threading.Event()).wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
        self._last = self._clock()


def do_patiently(errand: Callable[[], object]) -> None:
    """Does an errand that is safe to repeat, through outages of the store.

    Raises:
        StoreUnreachable: one has lasted too long.
    """
    patience = Patience()
    while True:
        try:
            errand()
            return
        except StoreUnreachable as e:
            patience.bear(e)


class Lane:
    """Errands in order, each safe to repeat: while the store can't be reached they wait. The first that fails ends the lane: what comes after it builds on it."""

    def __init__(self, name: str) -> None:
        self._errands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Errands that aren't done yet."""
        return self._waiting

    def add(self, errand: Callable[[], object]) -> None:
        """Leaves an errand to the lane.

        Raises:
            AtollError: an earlier one has failed.
        """
        self.check()
        with self._changed:
            self._waiting += 1
        self._errands.put(errand)

    def check(self) -> None:
        """Raises what an errand has failed with."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Waits until all is done.

        Raises:
            AtollError: an errand has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0 or self._error is not None)
        self.check()

    def close(self) -> None:
        """Ends the thread once it has done what it was left; doesn't wait."""
        self._errands.put(None)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                do_patiently(errand)
            except BaseException as e:  # handed over to whoever asks next
                with self._changed:
                    self._error = e
                    self._changed.notify_all()
                return
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()


class Inline:
    """Errands done at once, in the caller's thread: for what must come out the same every time."""

    backlog = 0

    def add(self, errand: Callable[[], object]) -> None:
        """Does it."""
        errand()

    def check(self) -> None:
        """Nothing fails later."""

    def drain(self) -> None:
        """Nothing is left."""

    def close(self) -> None:
        """Nothing to end."""
