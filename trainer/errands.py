"""What an island leaves to the background, so that no step waits for the store: a lane is a thread that runs errands one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Lane:
    """Errands in order. The first that fails ends the lane: what comes after it builds on it."""

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
                errand()
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
