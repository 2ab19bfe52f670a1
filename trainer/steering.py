"""The syncer's part of the feedback: puts what islands tell into the table `feedback`, and decides on their mixes. In the background: no merge waits for it.

Islands tell in the headers of their outer gradients and are answered on the tape, so that feedback costs no request of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.tables import append, open_table
from trainer.checkpoints import round_of_message
from trainer.choice import TABLES_WEIGHED, Switch, choose_mix
from trainer.errands import Inline, Lane
from trainer.feedback import Feedback
from trainer.messages import Key, Levels
from trainer.run import Run
from trainer.talk import GivenMix, Talk


class Steering:
    """Decides for all islands of a run, one after the other."""

    def __init__(self, run: Run, talk: Talk, *, in_background: bool) -> None:
        """Puts into the table what a dead syncer has heard and not put there.

        Args:
            run: the run.
            talk: what stands on the tape so far.
            in_background: False: all is done at once.
        """
        self._run = run
        self._lane: Lane | Inline = Lane("feedback") if in_background else Inline()
        self._lock = threading.Lock()
        self._decided: dict[int, GivenMix] = {}
        self._put: dict[int, int] = {}
        self.troubles: list[tuple[int, str]] = []
        """Islands whose mix could not be decided, and why; whoever reads it empties it."""
        self.switches: list[tuple[int, Switch]] = []
        """Islands that go over to another strategy; likewise."""
        self._lane.add(partial(self._put_all, talk))

    def hear(self, talk: Talk, tier_versions: Mapping[int, int]) -> None:
        """Takes in what stands on the tape now.

        Args:
            talk: the whole of it.
            tier_versions: the islands that have told something new, and the tier version that each reads.
        """
        if tier_versions:
            self._lane.add(partial(self._answer, talk, tier_versions))

    def decided(self) -> dict[int, GivenMix]:
        """Mixes that don't stand on the tape yet."""
        with self._lock:
            return dict(self._decided)

    def given(self, mixes: Mapping[int, GivenMix]) -> None:
        """Mixes that stand on the tape now."""
        with self._lock:
            self._decided = {i: mix for i, mix in self._decided.items() if mixes.get(i) != mix}

    def check(self) -> None:
        """Raises what has failed."""
        self._lane.check()

    def drain(self) -> None:
        """Waits until all that was told is in the table."""
        self._lane.drain()

    def close(self) -> None:
        """Ends the thread once it has done what it's at."""
        self._lane.close()

    def _answer(self, talk: Talk, tier_versions: Mapping[int, int]) -> None:
        told = {
            island: states for island in tier_versions if (states := talk.states(island))
        }  # else its base hasn't come
        for island, states in told.items():
            self._put_rows(island, states)
        if not told or self._run.config.group_by:
            return
        catalog = Catalog(self._run.store, tables=TABLES_WEIGHED)
        for island, states in told.items():
            with self._lock:
                coming = dict(talk.mixes) | self._decided
            try:
                mix, switch = choose_mix(self._run, catalog, island, max(states), tier_versions[island], coming)
            except UserError as e:
                self.troubles.append((island, str(e)))
                continue
            if switch is not None:
                self.switches.append((island, switch))
            with self._lock:
                self._decided[island] = mix

    def _put_all(self, talk: Talk) -> None:
        """What a dead syncer has heard."""
        table = open_table(self._run.store, "feedback")
        for island in talk.heard:
            self._put[island] = table.transaction_version(self._writer(island)) or 0
            self._put_rows(island, talk.states(island))

    def _writer(self, island: int) -> str:
        return f"feedback/{self._run.name}/{island}"

    def _put_rows(self, island: int, states: Mapping[Key, Levels]) -> None:
        """Appends what isn't in the table yet, row by row: a message is put there once, whoever does it and however often."""
        for (_, sequence), levels in sorted(states.items(), key=lambda item: item[0][1]):
            if sequence > self._put.get(island, 0):
                row = {
                    "run": self._run.name,
                    "island": island,
                    "sequence": sequence,
                    "round": round_of_message(self._run, sequence),
                    **Feedback.from_levels(levels).to_row(),
                }
                append(self._run.store, "feedback", [row], writer=self._writer(island), sequence=sequence)
                self._put[island] = sequence
