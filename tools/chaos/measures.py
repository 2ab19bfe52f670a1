"""What faults cost a run: goodput, participation, times to come back. Pure functions of histories (history.py) and of what the store says (checks.py).

**Goodput** is useful steps over healthy capacity. A useful step's update is in the final global parameters: the steps of all contributions that were merged, over the
number of fragments. Steps that died with their process, were taken again, or whose outer gradient was refused or dropped count for nothing. Healthy capacity is the
time from an island's first step to its last, less what faults took from it however good the software is (its machine away, the process stopped, the share of a slow
step), times the rate of the same run without faults. So restarts, steps taken again and lost gradients lower it; an outage itself doesn't.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.chaos.crew import Life
from tools.chaos.facts import Facts
from tools.chaos.history import History, Struck
from tools.chaos.schedule import EVERYONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What came out. Lists have an entry for each time that it happened."""

    goodput: float
    participation: float
    """Mean over the merges: islands in it, of those that live."""
    merged_share: float
    """Useful steps over all steps that the islands' counters have."""
    loss_vs_fault_free: float
    """Final holdout loss over that of the run without faults, less 1."""
    detect_s: list[float]
    """From a kill to when it was seen."""
    first_merge_s: list[float]
    """From a fault to the next merge of anyone."""
    rejoin_s: list[float]
    """From a killed island's machine being back to the island's first step."""
    caught_up_s: list[float]
    """… to its first step that it hadn't taken before."""
    merged_again_s: list[float]
    """… to the first merge that it's in."""
    takeover_s: list[float]
    """From a syncer's death to somebody taking the role."""
    stall_s: float
    """Longest time between two steps of an island that no fault struck at the time."""
    stall_healthy_s: float
    """Likewise, in the run without faults."""


def measure(struck: History, healthy: History, facts: Facts, healthy_facts: Facts) -> Measures:
    """All of it."""
    useful = useful_steps(facts)
    rate = useful_steps(healthy_facts) / sum(_span_s(healthy, island) for island in healthy.islands)
    capacity = rate * sum(_span_s(struck, i) - struck.away_s(i) for i in struck.islands)
    taken = sum(max(step for _, step in struck.steps(island)) for island in struck.islands)
    shares = participation(struck)
    kills = [one for one in struck.struck if one.kills]
    returns = _returns(struck)
    return Measures(
        goodput=useful / capacity,
        participation=statistics.fmean(shares) if shares else float("nan"),
        merged_share=useful / taken,
        loss_vs_fault_free=facts.holdout_loss / healthy_facts.holdout_loss - 1,
        detect_s=[s for one in kills for s in _detect_s(struck, one)],
        first_merge_s=_after([one.at_s for one in struck.struck], [told.at_s for told in struck.merges]),
        rejoin_s=[times[0] for times in returns],
        caught_up_s=[times[1] for times in returns],
        merged_again_s=_merged_again_s(struck),
        takeover_s=takeovers_s(struck),
        stall_s=longest_gap_s(struck),
        stall_healthy_s=longest_gap_s(healthy),
    )


def useful_steps(facts: Facts) -> float:
    """Steps whose update is in the final global parameters."""
    return sum(one.steps for one in facts.contributions) / facts.fragments


def participation(history: History) -> list[float]:
    """Of each merge, the share of the live islands that are in it. An island lives once its process has taken new steps for a sync period, until its last step;
    steps that it takes again after a death are none. While it's stopped or cut off it doesn't, nor in the sync period after."""
    born = {island: _born_s(history, island) for island in history.islands}
    shares = []
    for told in history.merges:
        live = {island for island in history.islands if _lives(history, island, born[island], told.at_s)} | set(
            told.islands
        )
        if live:
            shares.append(len(set(told.islands)) / len(live))
    return shares


def _born_s(history: History, island: int) -> list[tuple[float, float]]:
    """Of each process of an island that took a new step, when it took the first, and when its last."""
    born, before = [], 0
    for life in history.lives[island]:
        new = [at_s for at_s, step in life.steps if step > before]
        before = max([before, *(step for _, step in life.steps)])
        if new:
            born.append((new[0], new[-1]))
    return born


def _lives(history: History, island: int, born_s: list[tuple[float, float]], at_s: float) -> bool:
    if not any(first_s + history.period_s <= at_s <= last_s for first_s, last_s in born_s):
        return False
    return not any(
        one.strikes(island)
        and one.fault.kind in ("stop", "partition")
        and one.at_s <= at_s <= one.end_s + history.period_s
        for one in history.struck
    )


def takeovers_s(history: History) -> list[float]:
    """From each death of the process that held the syncer's role to the next one's taking it; not where all processes were killed, since nobody was left to take it."""
    machines = [one for one in history.struck if one.fault.kind == "machine"]
    deaths = []
    for role, lives in history.lives.items():
        for life in lives:
            if life.ended_s is None or life.how == "finished":
                continue
            if any(one.at_s <= life.ended_s <= one.end_s + 1 for one in machines):
                continue
            last = max(
                (told for told in history.leaders if told.at_s <= life.ended_s),
                key=lambda told: told.at_s,
                default=None,
            )
            if last is not None and last.by == role and last.at_s >= life.began_s:
                deaths.append(life.ended_s)
    return _after(sorted(deaths), [told.at_s for told in history.leaders])


def longest_gap_s(history: History) -> float:
    """Longest time between two steps of one process that no fault struck in between or shortly before."""
    longest_s = 0.0
    for island in history.islands:
        faults = [one for one in history.struck if one.strikes(island) or one.target == EVERYONE]
        for earlier_s, later_s in history.gaps(island):
            if earlier_s >= history.began_s and not any(
                one.at_s <= later_s and one.end_s + 1 >= earlier_s for one in faults
            ):
                longest_s = max(longest_s, later_s - earlier_s)
    return longest_s


def _span_s(history: History, island: int) -> float:
    began_s, ended_s = history.span_s(island)
    return ended_s - began_s


def _detect_s(history: History, one: Struck) -> list[float]:
    """From a kill to the supervisor's seeing it, of each process that it ended."""
    targets = list(history.lives) if one.target == EVERYONE else [one.target]
    found = []
    for role in targets:
        ends = [
            life.ended_s for life in history.lives.get(role, []) if life.how == "killed" and life.ended_s is not None
        ]
        later = [end_s - one.at_s for end_s in ends if end_s >= one.at_s]
        found += [min(later)] if later else []
    return found


def _returns(history: History) -> list[tuple[float, float]]:
    """Of each killed island: from its machine's being back to its first step, and to its first new one; not where it was killed again before."""
    returns = []
    for one, island, lives in _comebacks(history):
        before = max(
            (step for life in history.lives[island] if life.began_s < one.at_s for _, step in life.steps), default=0
        )
        after = [(at_s, step) for life in lives for at_s, step in life.steps]
        new = [at_s for at_s, step in after if step > before]
        if new:
            returns.append((after[0][0] - one.end_s, new[0] - one.end_s))
    return returns


def _merged_again_s(history: History) -> list[float]:
    found = []
    for one, island, lives in _comebacks(history):
        ended_s = lives[-1].ended_s or float("inf")
        later = [
            told.at_s for told in history.merges if island in told.islands and lives[0].began_s < told.at_s < ended_s
        ]
        if later:
            found.append(later[0] - one.end_s)
    return found


def _comebacks(history: History) -> Iterator[tuple[Struck, int, list[Life]]]:
    """Each kill of an island, with the lives that it had between this and the next."""
    for island in history.islands:
        kills = [one for one in history.struck if one.kills and one.strikes(island)]
        for one, next_ in itertools.zip_longest(kills, kills[1:]):
            until_s = next_.at_s if next_ is not None else float("inf")
            lives = [life for life in history.lives[island] if one.at_s <= life.began_s < until_s]
            if lives:
                yield one, island, lives


def _after(times_s: Sequence[float], happened_s: Sequence[float]) -> list[float]:
    """From each time to the next thing that happened."""
    found = []
    for time_s in times_s:
        later = [at_s - time_s for at_s in happened_s if at_s > time_s]
        if later:
            found.append(min(later))
    return found
