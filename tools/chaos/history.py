"""What a run's processes did, as it was seen from outside: lives, steps, merges, faults. Plain data, and plain questions about it; the measures stand in measures.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.chaos.crew import Crew, Life, Told
from tools.chaos.schedule import EVERYONE, GLOBAL, KINDS, Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """A fault that was done."""

    fault: Fault
    target: int
    """Whom it struck: where the islands hold the syncer's role, the one that held it."""
    at_s: float

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.at_s + self.fault.seconds

    def strikes(self, island: int) -> bool:
        """Whether it struck this one."""
        return self.target in (island, EVERYONE)

    @property
    def kills(self) -> bool:
        """Whether its victim's process ended by it."""
        return self.fault.kind in ("kill", "syncer", "machine")


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """A run's. Times are of time.monotonic()."""

    began_s: float
    """When all islands had taken a step."""
    period_s: float
    """From one sync of a fragment to its next, without faults."""
    lives: Mapping[int, Sequence[Life]]
    """By role."""
    merges: Sequence[Told]
    leaders: Sequence[Told]
    struck: Sequence[Struck]
    planted: Sequence[str]
    """Objects that were put in the store to do harm."""

    @property
    def islands(self) -> list[int]:
        """Numbers of the islands."""
        return sorted(role for role in self.lives if role != GLOBAL)

    @property
    def deaths(self) -> list[tuple[int, str]]:
        """Roles that died without being killed, and what they said last."""
        return [
            (role, life.how)
            for role, lives in sorted(self.lives.items())
            for life in lives
            if life.how not in ("killed", "finished", "")
        ]

    def steps(self, island: int) -> list[tuple[float, int]]:
        """All steps that it took, those that it took again among them, by time."""
        return [step for life in self.lives[island] for step in life.steps]

    def span_s(self, island: int) -> tuple[float, float]:
        """From its first step to its last."""
        steps = self.steps(island)
        return steps[0][0], steps[-1][0]

    def away_s(self, island: int) -> float:
        """Time within its span that faults took from it, however good the software is: its machine was away, or it was stopped or slowed."""
        began_s, ended_s = self.span_s(island)
        total_s = 0.0
        for one in self.struck:
            if not one.strikes(island):
                continue
            kind = KINDS[one.fault.kind]
            share = kind.share if kind.name != "slow" else 1 - 1 / one.fault.strength
            total_s += share * max(0.0, min(one.end_s, ended_s) - max(one.at_s, began_s))
        return total_s

    def gaps(self, island: int) -> Iterator[tuple[float, float]]:
        """From each step to the next one of the same life."""
        for life in self.lives[island]:
            times = [at_s for at_s, _ in life.steps]
            yield from itertools.pairwise(times)


def history_of(
    crew: Crew, struck: Sequence[Struck], *, began_s: float, period_s: float, planted: Sequence[str]
) -> History:
    """What a crew has seen."""
    return History(
        began_s=began_s,
        period_s=period_s,
        lives={number: list(role.lives) for number, role in crew.roles.items()},
        merges=list(crew.merges),
        leaders=list(crew.leaders),
        struck=list(struck),
        planted=list(planted),
    )
