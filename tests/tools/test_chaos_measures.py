"""Goodput, participation and times, on histories made by hand with the answers worked out by hand."""

from __future__ import annotations

import pytest

from tools.chaos.crew import Life, Told
from tools.chaos.facts import Contribution, Facts
from tools.chaos.history import History, Struck
from tools.chaos.measures import longest_gap_s, measure, participation, takeovers_s
from tools.chaos.schedule import Fault


def _steps(first: int, last: int, *, since_s: float, step_s: float = 1.0) -> list[tuple[float, int]]:
    return [(since_s + (number - first) * step_s, number) for number in range(first, last + 1)]


def _life(began_s: float, steps: list[tuple[float, int]], ended_s: float, how: str) -> Life:
    return Life(began_s=began_s, steps=steps, ended_s=ended_s, how=how)


def _history(lives: dict[int, list[Life]], **more: object) -> History:
    given: dict[str, object] = {
        "began_s": 0.0,
        "period_s": 4.0,
        "merges": [],
        "leaders": [],
        "struck": [],
        "planted": [],
        **more,
    }
    return History(lives=lives, **given)  # type: ignore[arg-type]


def _facts(steps: int, loss: float = 2.0) -> Facts:
    contributions = [Contribution(merge=m, island=0, steps=steps, tokens=0) for m in (1, 2)]
    return Facts(
        holdout_loss=loss,
        merges=2,
        fragments=2,
        contributions=contributions,
        dropped=[],
        refused=0,
        tokens=0,
        leftovers=0,
    )


HEALTHY = _history({0: [_life(-1, _steps(1, 101, since_s=0), 101, "finished")]})
KILLED = _history(
    {
        0: [
            _life(-1, _steps(1, 41, since_s=0), 40.5, "killed"),
            # Away until 44; its first step comes at 46, again those from 33 on, the first new one (42) at 55.
            _life(44, _steps(33, 101, since_s=46), 116, "finished"),
        ]
    },
    struck=[Struck(fault=Fault(at_s=40, kind="kill", target=0, seconds=4), target=0, at_s=40.0)],
    merges=[Told(at_s=30.0, by=-1, merge=1, islands=(0,)), Told(at_s=58.0, by=-1, merge=2, islands=(0,))],
)


def test_goodput_counts_useful_steps_against_the_time_that_faults_left() -> None:
    # 100 s for 101 steps without faults: 1.01 a second. With: 114 s, less 4 of the outage.
    found = measure(KILLED, HEALTHY, _facts(101), _facts(101))
    assert found.goodput == pytest.approx(101 / (1.01 * 110))
    lost = measure(KILLED, HEALTHY, _facts(50), _facts(101))
    assert lost.goodput == pytest.approx(50 / (1.01 * 110))
    assert lost.merged_share == pytest.approx(50 / 101)


def test_a_run_without_faults_has_a_goodput_of_one() -> None:
    assert measure(HEALTHY, HEALTHY, _facts(101), _facts(101)).goodput == pytest.approx(1)


def test_times_to_come_back_begin_when_the_machine_is_back() -> None:
    found = measure(KILLED, HEALTHY, _facts(101, loss=2.02), _facts(101))
    assert found.detect_s == [pytest.approx(0.5)]
    assert found.rejoin_s == [pytest.approx(2)]
    assert found.caught_up_s == [pytest.approx(11)]
    assert found.merged_again_s == [pytest.approx(14)]
    assert found.first_merge_s == [pytest.approx(18)]
    assert found.loss_vs_fault_free == pytest.approx(0.01)


def test_participation_leaves_out_who_can_not_take_part() -> None:
    lives = {n: [_life(-1, _steps(1, 100, since_s=0), 101, "finished")] for n in (0, 1)}
    merges = [
        Told(at_s=2.0, by=-1, merge=1, islands=(0,)),  # nobody has been there for a sync period
        Told(at_s=20.0, by=-1, merge=2, islands=(0,)),
        Told(at_s=30.0, by=-1, merge=3, islands=(0,)),  # 1 is cut off
        Told(at_s=40.0, by=-1, merge=4, islands=(0, 1)),
    ]
    cut = Struck(fault=Fault(at_s=27, kind="partition", target=1, seconds=5), target=1, at_s=27.0)
    assert participation(_history(lives, merges=merges, struck=[cut])) == [1, 0.5, 1, 1]


def test_who_takes_steps_again_does_not_live_yet() -> None:
    whole = _life(-1, _steps(1, 120, since_s=0), 121, "finished")
    merges = [Told(at_s=at_s, by=-1, merge=n, islands=(1,)) for n, at_s in enumerate((39.0, 47.0, 58.0, 60.0))]
    # Island 0 dies at 40, takes its first new step at 55, and has been there for a sync period at 59.
    assert participation(_history({0: KILLED.lives[0], 1: [whole]}, merges=merges)) == [0.5, 1, 1, 0.5]


def test_takeover_is_from_the_holders_death_to_the_next_holder() -> None:
    lives = {
        -1: [_life(0, [], 10, "killed"), _life(11, [], 50, "finished")],
        0: [_life(0, _steps(1, 5, since_s=1), 30, "killed"), _life(31, _steps(6, 9, since_s=33), 50, "finished")],
        1: [_life(0, _steps(1, 5, since_s=1), 20, "killed"), _life(21, _steps(6, 9, since_s=23), 50, "finished")],
    }
    leaders = [Told(at_s=1.0, by=-1), Told(at_s=12.0, by=0), Told(at_s=33.0, by=-1)]
    assert takeovers_s(_history(lives, leaders=leaders)) == [2.0, 3.0]  # island 1 held nothing


def test_only_gaps_that_no_fault_explains_are_stalls() -> None:
    steps = [(0.0, 1), (1.0, 2), (4.0, 3), (5.0, 4), (15.0, 5)]
    stopped = Struck(fault=Fault(at_s=5.5, kind="stop", target=0, seconds=8), target=0, at_s=5.5)
    lives = {0: [_life(-1, steps, 20, "finished")]}
    assert longest_gap_s(_history(lives, struck=[stopped])) == 3
    assert longest_gap_s(_history(lives)) == 10
