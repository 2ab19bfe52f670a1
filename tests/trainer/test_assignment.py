"""The rules of assignment and of holding still, on hand-made histories."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.schemas import TIERS
from trainer.assignment import HISTORY, REST, RISES, TURNS, assign, reassign, trouble
from trainer.feedback import Feedback


def _told(**more: Any) -> Feedback:
    values: dict[str, Any] = {
        "loss_trend": -0.1, "convergence_rate": None, "convergence_error": None, "generalization_gap": 0.1,
        "effectiveness": dict.fromkeys(TIERS, 0.1), "effectiveness_error": dict.fromkeys(TIERS, 0.02),
        "step_time_s": 1.0, "upload_bps": 1e6, "latency_s": 0.01,
    }  # fmt: skip
    return Feedback(**(values | more))


def _others(*times_s: float) -> dict[int, list[Feedback]]:
    return {number: [_told(step_time_s=time)] * 3 for number, time in enumerate(times_s, start=1)}


@pytest.mark.parametrize(
    ("step_time_s", "uploads_bps", "strategy", "why"),
    [
        (0.8, [1e6, 1e6], "aggressive", "0.80 of the median island's: fast"),
        (0.81, [1e6, 1e6], "adaptive", "differ by a factor of 1.0: steady"),
        (1.24, [1e6, 3.9e6], "adaptive", "factor of 3.9: steady"),
        (1.0, [1e6, 4e6], "balanced", "factor of 4.0: unsteady"),
        (1.25, [1e6, 4e6], "conservative", "1.25 of the median island's: slow"),
        (1.0, [1e6], "balanced", "hasn't been measured twice"),
        (1.0, [None, None, 1e6], "balanced", "hasn't been measured twice"),
    ],
)
def test_the_first_rule_that_applies_counts(
    step_time_s: float, uploads_bps: list[float | None], strategy: str, why: str
) -> None:
    own = [_told(step_time_s=step_time_s, upload_bps=bps) for bps in uploads_bps]
    said = assign(0, {0: own, **_others(1.0, 1.0, 1.0)})
    assert (said.strategy, why in said.why) == (strategy, True), said


def test_an_island_that_has_told_nothing_reads_balanced() -> None:
    assert assign(0, _others(1.0)).strategy == "balanced"
    assert assign(0, {0: [_told(step_time_s=None)], **_others(1.0)}).why == "it hasn't been measured yet"


def test_an_upload_of_long_ago_doesnt_count() -> None:
    own = [_told(upload_bps=9e9), *[_told()] * 6]
    assert assign(0, {0: own}).strategy == "adaptive"


def test_an_island_switches_when_the_rules_say_so_twice_running() -> None:
    fast, usual = _told(step_time_s=0.5), _told()
    others = _others(1.0, 1.0)
    assert reassign(0, "adaptive", {0: [usual, usual, fast], **others}) is None
    found = reassign(0, "adaptive", {0: [usual, fast, fast], **others})
    assert found is not None
    assert found.strategy == "aggressive"
    assert reassign(0, "aggressive", {0: [usual, fast, fast], **others}) is None


def _fell(by: float) -> Feedback:
    return _told(effectiveness=dict.fromkeys(TIERS, by))


# Four tiers of error 0.02: that of their mean is 0.01, so that a change counts from 0.02 on.
UP, DOWN, FLAT = _fell(-0.021), _fell(0.021), _fell(-0.019)
# A tier of a few sequences says nothing, whatever it is.
NOISY_UP = _told(effectiveness={"S": -0.03, "A": -0.03, "B": 4.0, "C": None}, effectiveness_error={"S": 0.02, "A": 0.02, "B": 9.0, "C": None})  # fmt: skip


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ([UP] * RISES, "risen 3 cycles running"),
        ([UP] * (RISES - 1), None),
        ([UP, UP, FLAT, UP], None),
        ([UP, DOWN] * (TURNS // 2), "by turns for 6 cycles"),
        ([UP, DOWN] * (TURNS // 2 - 1) + [UP], None),
        ([DOWN] * HISTORY, None),
        ([FLAT] * HISTORY, None),
        ([NOISY_UP] * RISES, "risen 3 cycles running"),
        ([_told(effectiveness=dict.fromkeys(TIERS, None))] * HISTORY, None),
        (
            [_told(effectiveness=dict.fromkeys(TIERS, -9.0), effectiveness_error=dict.fromkeys(TIERS, None))] * HISTORY,
            None,
        ),
        ([UP] * RISES + [DOWN] * (REST - 1), "risen 3 cycles running"),
        ([UP] * RISES + [DOWN] * REST, None),
        ([], None),
    ],
)
def test_an_island_is_held_still_while_its_loss_certainly_rises_or_oscillates_and_a_while_after(
    history: list[Feedback], why: str | None
) -> None:
    found = trouble(history)
    assert found is None if why is None else why in (found or "")
