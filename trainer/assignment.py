"""Which strategy an island reads by, where the run leaves it to what is measured; and when an adaptive island is better held still. Rules over what islands tell; no store.

RULES says the assignment in words, for users too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from manifests.schemas import TIERS
from manifests.strategies import ADAPTIVE
from trainer.feedback import Feedback

AUTO = "auto"
"""Name that leaves the strategy to the rules."""
BALANCED = "balanced"
FAST, SLOW = 0.8, 1.25
UNSTEADY = 4.0
"""Factor between the fastest and the slowest of the last uploads that makes a link unsteady."""
UPLOADS = 6
"""Messages whose uploads are looked at."""
RISES = 3
"""Messages running in which the loss rises: the island diverges."""
TURNS = 6
"""Messages running in which the loss rises and falls by turns: it oscillates."""
CERTAIN = 2.0
"""A change counts from so many of its standard errors on."""
REST = 4
"""Messages that an island is held still after such a thing."""
HISTORY = TURNS + REST
"""Messages that the rules look back on."""

RULES = f"""The first rule that applies:
  1. an island that hasn't been measured yet reads balanced;
  2. one whose step takes {FAST:g} of the median island's or less reads aggressive: it sees most tokens, the best ones should be among them;
  3. one whose step takes {SLOW:g} of it or more reads conservative;
  4. one whose link is unsteady (the rates of its last {UPLOADS} uploads differ by a factor of {UNSTEADY:g} or more) reads balanced: its feedback comes late, and shouldn't steer;
  5. any other reads adaptive.
An island switches when they say so twice running. Any strategy with a learning rate is held still, at balanced, for {REST} outer cycles after its
loss has certainly risen {RISES} cycles running, or risen and fallen by turns for {TURNS}."""

History = Sequence[Feedback]
"""What an island has told of late, the newest last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """A strategy and why."""

    strategy: str
    why: str


def assign(island: int, histories: Mapping[int, History]) -> Assigned:
    """What the rules say for an island now, by its last message and the others'."""
    own = _step_time_s(histories.get(island, ()))
    times = [time for history in histories.values() if (time := _step_time_s(history)) is not None]
    if own is None:
        return Assigned(strategy=BALANCED, why="it hasn't been measured yet")
    usual = statistics.median(times)
    ratio = own / usual
    speed = f"a step takes {own:.3g} s, {ratio:.2f} of the median island's"
    if ratio <= FAST:
        return Assigned(strategy="aggressive", why=f"{speed}: fast")
    if ratio >= SLOW:
        return Assigned(strategy="conservative", why=f"{speed}: slow")
    uploads = [told.upload_bps for told in histories[island][-UPLOADS:] if told.upload_bps]
    if len(uploads) < 2:
        return Assigned(strategy=BALANCED, why=f"{speed}; its link hasn't been measured twice yet")
    spread = max(uploads) / min(uploads)
    link = f"its last {len(uploads)} uploads differ by a factor of {spread:.1f}"
    if spread >= UNSTEADY:
        return Assigned(strategy=BALANCED, why=f"{speed}; {link}: unsteady")
    return Assigned(strategy=ADAPTIVE, why=f"{speed}; {link}: steady")


def reassign(island: int, present: str, histories: Mapping[int, History]) -> Assigned | None:
    """What an island goes over to; None: it stays. The rules must say so for its last message and the one before."""
    now = assign(island, histories)
    before = assign(island, {**histories, island: histories.get(island, ())[:-1]})
    return now if now.strategy == before.strategy != present else None


def _step_time_s(history: History) -> float | None:
    return next((told.step_time_s for told in reversed(history) if told.step_time_s), None)


def trouble(history: History) -> str | None:
    """Why an adaptive island is to be held still now, in words; None: it may go on.

    It is held for `REST` messages after one that shows divergence or oscillation.
    """
    history = history[-HISTORY:]
    for end in range(len(history), max(0, len(history) - REST), -1):
        if found := _trouble_at(history[:end]):
            return found
    return None


def _trouble_at(history: History) -> str | None:
    signs = [_sign(told) for told in history]
    if len(signs) >= RISES and all(sign > 0 for sign in signs[-RISES:]):
        return f"its loss has risen {RISES} cycles running"
    turns = signs[-TURNS:]
    if len(turns) == TURNS and all(a * b < 0 for a, b in pairwise(turns)):
        return f"its loss has risen and fallen by turns for {TURNS} cycles"
    return None


def _sign(told: Feedback) -> int:
    """Whether the loss has certainly risen (1) or fallen (−1) since the message before; 0: nobody knows."""
    known = [
        (descent, error)
        for tier in TIERS
        if (descent := told.effectiveness[tier]) is not None and (error := told.effectiveness_error[tier])
    ]
    if not known:
        return 0
    # The tiers' descents, each by its precision: one of few sequences says little.
    precision = math.fsum(error**-2 for _, error in known)
    in_errors = math.fsum(descent * error**-2 for descent, error in known) / math.sqrt(precision)
    return 0 if abs(in_errors) < CERTAIN else -1 if in_errors > 0 else 1
