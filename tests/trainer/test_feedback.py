"""Feedback: a cycle's message, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.stats import linregress

from manifests.schemas import TABLES, TIERS
from trainer.feedback import SCALES, Feedback, TierLoss, summarise_cycle
from trainer.messages import levels_of


def _cycle(**more: Any) -> dict[str, Any]:
    return {
        "loss": 2.0, "holdout_loss": 2.5, "losses_by_tier": {"S": [3.0, 2.0, 1.0], "A": [4.0, 4.0], "B": [], "C": [1.0]},
        "previous": {tier: TierLoss(mean=mean, error=0.3) for tier, mean in {"S": 2.5, "A": 3.0, "B": 7.0}.items()},
        "contributions_by_tier": {}, "step_times_s": [0.1, 0.5, 0.2], "upload_bps": 1e6, "latency_s": 0.01,
    } | more  # fmt: skip


def test_effectiveness_is_each_tiers_descent_where_both_losses_are_known() -> None:
    message, _ = summarise_cycle(**_cycle())
    assert message.effectiveness == {"S": 0.5, "A": -1.0, "B": None, "C": None}


def test_where_contributions_are_measured_they_are_the_effectiveness() -> None:
    contributions = {"S": [0.1, 0.2, 0.3], "A": [0.0, 0.0], "B": [], "C": [-0.4]}
    message, losses = summarise_cycle(**_cycle(contributions_by_tier=contributions))
    assert message.effectiveness == {"S": pytest.approx(0.2), "A": 0.0, "B": None, "C": -0.4}
    # S: the variance is 0.01, of three. Of one sequence alone nothing is known.
    assert message.effectiveness_error == {"S": pytest.approx(0.1 / math.sqrt(3)), "A": 0.0, "B": None, "C": 0.4}
    assert losses["S"].mean == 2.0


def test_its_error_is_that_of_a_difference_of_two_means() -> None:
    message, losses = summarise_cycle(**_cycle())
    # S: deviations 1, 0, −1, so the variance is 1 and the error of the mean √⅓. A: none.
    assert losses["S"].error == pytest.approx(math.sqrt(1 / 3))
    assert message.effectiveness_error["S"] == pytest.approx(math.sqrt(1 / 3 + 0.09))
    assert message.effectiveness_error["A"] == pytest.approx(0.3)
    assert message.effectiveness_error["B"] is None


def test_the_trend_is_the_mean_change_over_the_tiers_that_were_known() -> None:
    message, _ = summarise_cycle(**_cycle())
    assert message.loss_trend == pytest.approx((-0.5 + 1.0) / 2)


def test_the_gap_and_the_median_time() -> None:
    message, _ = summarise_cycle(**_cycle())
    assert message.generalization_gap == 0.5
    assert message.step_time_s == 0.2


def test_the_convergence_rate_of_one_tier_is_the_least_squares_slope_of_the_log_loss() -> None:
    losses = [3.0, 2.6, 2.7, 2.2, 2.1]
    message, _ = summarise_cycle(**_cycle(losses_by_tier={"S": losses}))
    expected = linregress(range(5), [math.log(loss) for loss in losses])
    assert message.convergence_rate == pytest.approx(expected.slope)
    assert message.convergence_error == pytest.approx(expected.stderr)


def test_tiers_that_lie_apart_dont_tilt_the_slope() -> None:
    falling = [math.exp(-0.1 * i) for i in range(4)]
    flat = {"S": falling, "A": [100 * loss for loss in falling]}
    message, _ = summarise_cycle(**_cycle(losses_by_tier=flat))
    # Two sequences of the cycle for each step of a tier.
    assert message.convergence_rate == pytest.approx(-0.05)
    assert message.convergence_error == pytest.approx(0, abs=1e-12)


def test_a_tier_that_was_not_tried_keeps_its_loss_for_the_next_message() -> None:
    _, losses = summarise_cycle(**_cycle())
    assert {tier: loss.mean for tier, loss in losses.items()} == {"S": 2.0, "A": 4.0, "B": 7.0, "C": 1.0}


def test_the_first_message_knows_no_trend() -> None:
    message, losses = summarise_cycle(**_cycle(previous={}))
    assert message.loss_trend is None
    assert message.effectiveness == message.effectiveness_error == dict.fromkeys(TIERS, None)
    assert set(losses) == {"S", "A", "C"}


def test_a_cycle_without_sequences_is_a_message_all_the_same() -> None:
    message, losses = summarise_cycle(
        **_cycle(losses_by_tier=dict.fromkeys(TIERS, ()), previous={}, step_times_s=[], upload_bps=None)
    )
    assert (message.loss_trend, message.convergence_rate, message.step_time_s) == (None, None, None)
    assert losses == {}


def test_a_message_fills_the_columns_of_its_table() -> None:
    message, _ = summarise_cycle(**_cycle())
    spec = TABLES["feedback"].schema
    columns = set(spec.names) - {"run", "island", "sequence", "round", "written_at"}
    assert set(message.to_row()) == columns
    nothing = Feedback.from_levels((None,) * len(SCALES)).to_row()
    assert all(nothing[name] is not None for name in columns if not spec.field(name).nullable)


def test_a_message_comes_back_from_its_journey_within_its_quanta() -> None:
    message, _ = summarise_cycle(**_cycle())
    back = Feedback.from_levels(levels_of(message.to_values(), SCALES))
    error = message.effectiveness_error["S"]
    assert error is not None
    assert back.effectiveness_error["S"] == pytest.approx(error, rel=0.14)
    assert message.effectiveness["S"] == pytest.approx(back.effectiveness["S"], abs=0.15 * error)
    assert message.generalization_gap == pytest.approx(back.generalization_gap, abs=2.6e-3)
    assert message.loss_trend == pytest.approx(back.loss_trend, abs=2.6e-3)
    assert message.step_time_s == pytest.approx(back.step_time_s, rel=0.06)
    assert message.convergence_rate == pytest.approx(back.convergence_rate, abs=0.15 * (message.convergence_error or 0))
    assert back.effectiveness["B"] is None
