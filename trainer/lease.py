"""Who holds a role: a lease in the store that trusts no clock but each watcher's own.

A holder's term is an object that is created once, so each term has one holder. The holder writes a beat every so often; whoever watches takes the role
for free when it has seen nothing new for a while by its own monotonic clock. A holder that was only slow finds the newer term and stands back. Two may believe to
hold the role for a moment: what they write must be safe against that by itself, as the syncer's numbered merges are.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import PurePosixPath

from manifests.errors import ObjectTaken
from manifests.store import Store

_NAME = re.compile(r"(\d+)-(claim|beat-(\d+)|released)(\.json)?")


class Lease:
    """One candidate's view of a lease."""

    def __init__(
        self, store: Store, folder: str, *, holder: str, lapse_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            store: the store.
            folder: where the lease's objects lie.
            holder: this candidate's name, unlike any other's.
            lapse_s: how long a holder may show no sign of life before another takes its place, seconds.
            clock: this process' own.
        """
        self._store, self._folder, self._holder = store, folder, holder
        self._lapse_s, self._clock = lapse_s, clock
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._alive_at: float | None = None
        self.term: int | None = None
        """The term that this candidate holds, while it does."""
        self._beat = 0
        self._beat_at = 0.0

    def take(self) -> bool:
        """Takes the role if it's free: nobody ever held it, the holder gave it back, or has shown no sign of life for the lapse time."""
        term, beat, released = self._look()
        if term >= 0 and not released:
            if self._seen != (term, beat):
                if self._seen is not None:
                    self._alive_at = self._clock()
                self._seen, self._seen_at = (term, beat), self._clock()
                return False
            if self._clock() - self._seen_at < self._lapse_s:
                return False
        try:
            self._store.put_new(self._path(term + 1, "claim.json"), json.dumps({"holder": self._holder}).encode())
        except ObjectTaken:
            return False
        self.term, self._beat, self._beat_at = term + 1, 0, self._clock()
        for info in list(self._store.list(self._folder)):
            found = _NAME.fullmatch(PurePosixPath(info.path).name)
            if found and int(found[1]) < term:  # the term before stays, for whoever listed before this claim
                self._store.delete(info.path)
        return True

    @property
    def another_lives(self) -> bool:
        """Whether another holder was seen to show a sign of life within the lapse time."""
        return self._alive_at is not None and self._clock() - self._alive_at < self._lapse_s

    def renew(self) -> bool:
        """Shows a sign of life, if one is due; False: another one holds the role now."""
        assert self.term is not None, "renew without a lease"
        if self._clock() - self._beat_at < self._lapse_s / 4:
            return True
        term, _, _ = self._look()
        if term > self.term:
            self.term = None
            return False
        self._beat += 1
        self._store.put_content(self._path(self.term, f"beat-{self._beat:08d}"), self._holder.encode())
        if self._beat > 1:
            self._store.delete(self._path(self.term, f"beat-{self._beat - 1:08d}"))
        self._beat_at = self._clock()
        return True

    def release(self) -> None:
        """Gives the role back, so that the next one needn't wait. Where the store can't be told, the lease lapses."""
        if self.term is not None:
            term, self.term = self.term, None
            self._store.put_content(self._path(term, "released"), b"")

    def holder(self) -> str | None:
        """Name of who holds the role by what lies in the store; None: nobody."""
        term, _, released = self._look()
        if term < 0 or released:
            return None
        return str(json.loads(self._store.get(self._path(term, "claim.json")))["holder"])

    def _path(self, term: int, name: str) -> str:
        return f"{self._folder}/{term:06d}-{name}"

    def _look(self) -> tuple[int, int, bool]:
        """The newest term, its newest beat, and whether it was given back; term −1: there was none."""
        beats: dict[int, int] = {}
        released = set()
        for info in self._store.list(self._folder):
            found = _NAME.fullmatch(PurePosixPath(info.path).name)
            if not found:
                continue
            term = int(found[1])
            beats[term] = max(beats.get(term, 0), int(found[3] or 0))
            if found[2] == "released":
                released.add(term)
        term = max(beats, default=-1)
        return term, beats.get(term, 0), term in released
