"""Keeping an island's records: consumption, checkpoint rows and outer gradients go to the store in their order, in the background.

A slow store is met by larger commits: all rounds that wait are committed at once, however many they are. An outer gradient goes out once the round that it ends is on record.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from manifests.consumption import append_consumption
from trainer.checkpoints import Whole, commit_rounds
from trainer.drift import Sent
from trainer.errands import do_patiently
from trainer.run import Run
from trainer.tape import Shapes
from trainer.wire import pack_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """An outer gradient that is to go out."""

    fragment: int
    round: int
    sent: Sent
    shapes: Shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What is to be recorded of a round."""

    row: dict[str, Any]
    spans: pa.Table
    sending: Sending | None
    whole: Whole | None


Errand = Callable[[], object]


class RecordKeeper:
    """Records of one island. While the store can't be reached they wait; the first thing that fails ends it: what comes after builds on it."""

    def __init__(self, run: Run, island: int, *, incarnation: int, in_background: bool) -> None:
        self._run, self._island = run, island
        self._writer = f"consumption/{run.name}/{island}/{incarnation}"
        self._waiting: list[Round | Sending | Errand] = []
        self._busy = 0
        self._error: BaseException | None = None
        self._unsent: dict[int, set[int]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self.bytes_up = 0
        """Bytes of outer gradients that have gone out."""
        self._rates_bps: list[float] = []
        self._in_background = in_background
        if in_background:
            threading.Thread(target=self._work, name=f"records of island {island}", daemon=True).start()

    @property
    def backlog(self) -> int:
        """Things that aren't in the store yet."""
        return len(self._waiting) + self._busy

    def record(self, round_: Round) -> None:
        """Takes a round's record, and what it sends."""
        self._add(round_, round_.sending)

    def send(self, sending: Sending) -> None:
        """Takes an outer gradient whose round is on record."""
        self._add(sending, sending)

    def add(self, errand: Errand) -> None:
        """Takes anything else that is to be done in its turn."""
        self._add(errand, None)

    def is_unsent(self, fragment: int) -> bool:
        """Whether an outer gradient of a fragment still waits."""
        return bool(self._unsent.get(fragment))

    def take_upload_bps(self) -> float | None:
        """Median rate of the outer gradients that have gone out since the last call, bits per second; None: there were none."""
        with self._changed:
            rates, self._rates_bps = self._rates_bps, []
        return statistics.median(rates) if rates else None

    def check(self) -> None:
        """Raises what has failed."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Waits until all is in the store.

        Raises:
            AtollError: something has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.backlog == 0 or self._error is not None)
        self.check()

    def close(self) -> None:
        """Ends the thread once it has done what it's at; what waits then is not done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add(self, item: Round | Sending | Errand, sending: Sending | None) -> None:
        self.check()
        with self._changed:
            if sending is not None:
                self._unsent.setdefault(sending.fragment, set()).add(sending.round)
            self._waiting.append(item)
            self._changed.notify_all()
        if not self._in_background:
            self._do_next()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            try:
                self._do_next()
            except BaseException as e:  # handed over to whoever asks next
                with self._changed:
                    self._error = e
                    self._changed.notify_all()
                return

    def _do_next(self) -> None:
        """Does what comes next: an errand, or all rounds up to the next one."""
        with self._changed:
            count = 1
            if isinstance(self._waiting[0], Round):
                while count < len(self._waiting) and isinstance(self._waiting[count], Round):
                    count += 1
            items, self._waiting = self._waiting[:count], self._waiting[count:]
            self._busy = len(items)
        if self._in_background:
            do_patiently(lambda: self._do(items))
        else:
            self._do(items)
        with self._changed:
            self._busy = 0
            self._changed.notify_all()

    def _do(self, items: list[Round | Sending | Errand]) -> None:
        """Does them; safe to repeat: rounds are numbered, an outer gradient's name is taken once."""
        rounds = [item for item in items if isinstance(item, Round)]
        if rounds:
            self._commit(rounds)
        elif isinstance(items[0], Sending):
            self._put(items[0])
        else:
            assert callable(items[0])
            items[0]()

    def _commit(self, rounds: list[Round]) -> None:
        spans = pa.concat_tables([one.spans for one in rounds])
        append_consumption(self._run.store, spans, writer=self._writer, sequence=rounds[-1].row["round"])
        rows = [one.row | (one.whole.to_columns() if one.whole is not None else {}) for one in rounds]
        commit_rounds(self._run, self._island, rows)
        for one in rounds:
            if one.sending is not None:
                self._put(one.sending)

    def _put(self, sending: Sending) -> None:
        path = self._run.outer_path(self._island, sending.round, sending.fragment)
        data = pack_parts(sending.sent.parts, sending.shapes, sending.sent.said["wire"], sending.sent.said)
        began = time.monotonic()
        self._run.store.put_content(path, data)
        seconds = time.monotonic() - began
        with self._changed:
            self.bytes_up += len(data)
            self._rates_bps.append(8 * len(data) / max(seconds, 1e-9))
            self._unsent[sending.fragment].discard(sending.round)
