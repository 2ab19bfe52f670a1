"""What an island looks for in the store while it trains: new merges, whether there's new data, and whether it is to leave. No step waits for it."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from manifests.errors import AtollError, ObjectMissing, StoreUnreachable
from trainer.errands import Patience
from trainer.messages import Key
from trainer.quantise import Tensors
from trainer.run import Run
from trainer.talk import GivenMix
from trainer.tape import Anatomy, Followed, follow_merge, read_global, read_merge, snapshots

_POLL_S = 0.1
_NEWS_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """A global fragment that has arrived."""

    merge: int
    """The merge that it's as of: all up to it have been seen."""
    fragment: int
    version: int
    parameters: Tensors
    merged_round: int
    """Round of the island's own last outer gradient that is in it, or was dropped."""
    acknowledged: Key | None
    """The island's newest full feedback message that has been heard."""
    mix: GivenMix | None
    """The newest mix that the island has been given."""


class Follower:
    """Follows the tape for one island, in the caller's thread."""

    def __init__(self, run: Run, anatomy: Anatomy, island: int, followed: Followed) -> None:
        self._run, self._anatomy, self._island = run, anatomy, island
        self._followed = followed
        self.bytes_down = 0
        self._looks_s: deque[float] = deque(maxlen=32)

    @property
    def merge(self) -> int:
        """The last merge that has been read."""
        return self._followed.merge

    def next_receipts(self) -> list[Receipt]:
        """What the next merge brings; nothing where there is none yet. Far behind, it leaps to the newest snapshot."""
        began = time.monotonic()
        try:
            number = self._follow()
        except ObjectMissing:
            self._looks_s.append(time.monotonic() - began)
            return []
        return [self._receipt(number)]

    @property
    def latency_s(self) -> float | None:
        """How long the store takes to say that there's nothing new, the median of late; None: never yet."""
        looks_s = list(self._looks_s)
        return statistics.median(looks_s) if looks_s else None

    def up_to(self, merge: int) -> list[Receipt]:
        """What the merges up to one bring together, fragment by fragment.

        Raises:
            ObjectMissing: the tape hasn't got so far.
        """
        if merge - self._followed.merge > self._leap:
            return self._jump(merge)
        touched = set()
        while self._followed.merge < merge:
            touched.add(self._follow())
        return [self._receipt(number) for number in sorted(touched)]

    def all_receipts(self) -> list[Receipt]:
        """Every fragment as it stands."""
        return [self._receipt(number) for number in range(len(self._followed.versions))]

    def leap(self) -> list[Receipt]:
        """Goes to the newest snapshot, if it's far ahead."""
        ahead = self._followed.merge + self._leap
        if self._run.store.exists(self._run.merge_path(ahead + 1)):
            newest = max(snapshots(self._run), default=0)
            if newest > ahead:
                return self._jump(newest)
        return []

    @property
    def _leap(self) -> int:
        return 4 * len(self._anatomy.fragments)

    def _jump(self, merge: int) -> list[Receipt]:
        versions = list(self._followed.versions)
        self._followed = read_global(self._run, self._anatomy, merge=merge)
        return [
            self._receipt(number)
            for number, version in enumerate(self._followed.versions)
            if version != versions[number]
        ]

    def _follow(self) -> int:
        parts, description = read_merge(self._run, self._anatomy, self._followed.merge + 1)
        self.bytes_down += sum(part.numel() * part.element_size() for part in parts.values())
        return follow_merge(self._followed, parts, description)

    def _receipt(self, number: int) -> Receipt:
        followed = self._followed
        heard = followed.talk.heard.get(self._island)
        return Receipt(
            merge=followed.merge,
            fragment=number,
            version=followed.versions[number],
            parameters=followed.parameters[number],
            merged_round=followed.merged_rounds[number].get(self._island, -1),
            acknowledged=heard.acknowledged if heard is not None else None,
            mix=followed.talk.mixes.get(self._island),
        )


class Receiver(threading.Thread):
    """A follower in a thread of its own."""

    def __init__(
        self, follower: Follower, *, has_news: Callable[[], bool], is_told_to_leave: Callable[[], bool]
    ) -> None:
        """
        Args:
            follower: where to go on.
            has_news: looks whether there's new data in the store.
            is_told_to_leave: looks whether the island is to leave.
        """
        super().__init__(name="receiver", daemon=True)
        self._follower, self._has_news, self._is_told_to_leave = follower, has_news, is_told_to_leave
        self.arrived: queue.SimpleQueue[list[Receipt]] = queue.SimpleQueue()
        self.error: AtollError | None = None
        self.news = threading.Event()
        """There's new data."""
        self.leaving = threading.Event()
        """The island is to leave."""
        self.stopping = threading.Event()
        self._looked_at = 0.0

    def run(self) -> None:
        """Polls until told to stop, through outages of the store; any other error ends it and is kept for whoever asks."""
        patience = Patience()
        while not self.stopping.is_set():
            try:
                try:
                    self._look()
                except StoreUnreachable as e:
                    patience.bear(e, stopping=self.stopping)
            except AtollError as e:
                self.error = e
                return
            self.stopping.wait(_POLL_S)

    def _look(self) -> None:
        """Takes in the merges that there are, and now and then looks for the rest."""
        if receipts := self._follower.leap():
            self.arrived.put(receipts)
        while receipts := self._follower.next_receipts():
            self.arrived.put(receipts)
            if self.stopping.is_set():
                return
        if time.monotonic() - self._looked_at >= _NEWS_EVERY_S:
            self._looked_at = time.monotonic()
            if not self.news.is_set() and self._has_news():
                self.news.set()
            if not self.leaving.is_set() and self._is_told_to_leave():
                self.leaving.set()

    def take(self) -> list[Receipt]:
        """What has arrived since the last call, the newest of each fragment, by fragment.

        Raises:
            AtollError: the tape can't be read.
        """
        if self.error is not None:
            raise self.error
        newest: dict[int, Receipt] = {}
        while not self.arrived.empty():
            newest |= {receipt.fragment: receipt for receipt in self.arrived.get()}
        return [newest[number] for number in sorted(newest)]
