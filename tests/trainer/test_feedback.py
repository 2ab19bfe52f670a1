"""Feedback: a cycle's message, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.schemas import TABLES, TIERS
from trainer.feedback import summarise_cycle


def _cycle(**more: Any) -> dict[str, Any]:
    return {
        "loss": 2.0, "holdout_loss": 2.5, "losses_by_tier": {"S": [3.0, 2.0, 1.0], "A": [4.0, 4.0], "B": [], "C": [1.0]},
        "previous_tier_losses": {"S": 2.5, "A": 3.0, "B": 7.0}, "step_times_s": [0.1, 0.5, 0.2],
    } | more  # fmt: skip


def test_effectiveness_is_each_tiers_descent_where_both_losses_are_known() -> None:
    message, _ = summarise_cycle(**_cycle())
    assert message.effectiveness == {"S": 0.5, "A": -1.0, "B": None, "C": None}


def test_the_trend_is_the_mean_change_over_the_tiers_that_were_known() -> None:
    message, _ = summarise_cycle(**_cycle())
    assert message.loss_trend == pytest.approx((-0.5 + 1.0) / 2)


def test_the_other_fields_are_gap_slope_and_median_time() -> None:
    message, _ = summarise_cycle(**_cycle())
    assert message.generalization_gap == 0.5
    assert message.convergence_rate == pytest.approx((-1.0 + 0.0) / 2)
    assert message.step_time_s == 0.2


def test_a_tier_that_was_not_tried_keeps_its_loss_for_the_next_message() -> None:
    _, losses = summarise_cycle(**_cycle())
    assert losses == {"S": 2.0, "A": 4.0, "B": 7.0, "C": 1.0}


def test_the_first_message_knows_no_trend() -> None:
    message, losses = summarise_cycle(**_cycle(previous_tier_losses={}))
    assert message.loss_trend == 0
    assert message.effectiveness == dict.fromkeys(TIERS, None)
    assert losses == {"S": 2.0, "A": 4.0, "C": 1.0}


def test_a_cycle_without_sequences_is_a_message_all_the_same() -> None:
    message, losses = summarise_cycle(
        **_cycle(losses_by_tier=dict.fromkeys(TIERS, ()), previous_tier_losses={}, step_times_s=[])
    )
    assert (message.loss_trend, message.convergence_rate, message.step_time_s) == (0, 0, 0)
    assert losses == {}


def test_a_message_fills_the_columns_of_its_table() -> None:
    message, _ = summarise_cycle(**_cycle())
    columns = set(TABLES["feedback"].schema.names) - {"run", "island", "sequence", "round", "written_at"}
    assert set(message.to_row()) == columns
