"""Feedback under differential privacy: the noise against formulas of its own, and an island's budget through restarts and to its end."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.schemas import TIERS
from manifests.store import Store
from tiny import copy_store, messages_of, silent, start_run, tiny_config
from tools.bench.turns import train_in_turn
from tools.cli import _run
from trainer.checkpoints import Inputs
from trainer.feedback import summarise_told
from trainer.island import Island
from trainer.privacy import (
    Budget,
    ToldLoss,
    clipped_mean,
    epsilon_spent,
    feedback_budget,
    next_centre,
    noise_multiplier,
    sensitivity,
    tell_losses,
)
from trainer.run import Run, load_run

PRIVATE: dict[str, Any] = {"feedback_epsilon": 4.0, "num_islands": 1, "strategies": ("adaptive",), "steps": 12}
BUDGET = Budget(epsilon=1.0, delta=1e-5, clip=0.5, messages=4, multiplier=2.0)


# The mathematics.


def _delta(epsilon: float, sigma: float) -> float:
    """Theorem 8, Balle and Wang (2018), of one Gaussian of sensitivity 1."""
    normal = statistics.NormalDist()
    a, b = 1 / (2 * sigma), epsilon * sigma
    return normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_the_noise_of_one_message_is_the_analytic_gaussian_mechanisms(epsilon: float, delta: float) -> None:
    sigma = noise_multiplier(epsilon=epsilon, delta=delta, messages=1)
    assert _delta(epsilon, sigma) == pytest.approx(delta, rel=1e-5)
    assert _delta(epsilon, 0.999 * sigma) > delta


def test_many_messages_cost_what_an_accountant_for_any_composition_says() -> None:
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    sigma = noise_multiplier(epsilon=1.0, delta=1e-5, messages=40)
    accountant = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(sigma), 40))
    assert accountant.get_epsilon(1e-5) == pytest.approx(1.0, abs=1e-3)


def test_what_is_spent_grows_to_the_budget_and_not_above() -> None:
    config = tiny_config("r", **PRIVATE)
    budget = feedback_budget(config)
    assert budget is not None
    assert budget.messages == config.num_messages == 6
    spent = [budget.spent(messages) for messages in range(8)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[6] == spent[7] == pytest.approx(4.0, abs=1e-6)
    assert spent[6] <= 4.0
    assert spent[1] == pytest.approx(epsilon_spent(multiplier=budget.multiplier, delta=1e-5, messages=1))
    assert feedback_budget(tiny_config("r")) is None


@given(
    losses=st.lists(st.floats(), min_size=1, max_size=20),
    place=st.integers(0, 19),
    other=st.floats(),
    centre=st.floats(-20, 20),
    clip=st.floats(1e-3, 10),
)
def test_one_sequence_replaced_moves_the_mean_by_no_more_than_the_sensitivity(
    losses: list[float], place: int, other: float, centre: float, clip: float
) -> None:
    replaced = list(losses)
    replaced[place % len(losses)] = other
    before, after = (clipped_mean(x, centre=centre, clip=clip) for x in (losses, replaced))
    assert abs(before - after) <= sensitivity(clip, len(losses)) * (1 + 1e-9) + 1e-12
    assert centre - clip - 1e-9 <= before <= centre + clip + 1e-9


def test_losses_that_lie_near_the_centre_keep_their_mean() -> None:
    assert clipped_mean([2.0, 2.5, 3.0], centre=2.4, clip=1.0) == pytest.approx(2.5)
    assert clipped_mean([2.0, 9.0], centre=2.0, clip=1.0) == pytest.approx(2.5)
    assert clipped_mean([math.nan, -math.inf], centre=2.0, clip=1.0) == pytest.approx(2.0)


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    chance = random.Random(0)
    losses = {"S": [2.0] * 8, "A": [3.0], "B": [], "C": [2.5] * 4}
    told = [
        tell_losses(losses, centres={"S": 2.0, "A": 3.0, "C": 2.5}, first_centre=9.0, budget=BUDGET, gauss=chance.gauss)
        for _ in range(5_000)
    ]
    for tier, n in (("S", 8), ("A", 1), ("C", 4)):
        noise = 2.0 * 2 * 0.5 / n
        means = [one[tier].mean for one in told]
        assert statistics.stdev(means) == pytest.approx(noise, rel=0.04)
        assert statistics.fmean(means) == pytest.approx(losses[tier][0], abs=4 * noise / math.sqrt(5_000))
        assert {one[tier].error for one in told} == {math.hypot(0.5 / math.sqrt(n), noise)}
    assert all("B" not in one for one in told)


def test_a_tier_that_has_no_centre_yet_takes_the_first() -> None:
    told = tell_losses({"S": [5.0]}, centres={"A": 1.0}, first_centre=4.8, budget=BUDGET, gauss=lambda mean, _: mean)
    assert told["S"].mean == 5.0
    assert tell_losses({"S": [9.0]}, centres={}, first_centre=4.8, budget=BUDGET, gauss=lambda *_: 0.0)["S"].mean == 5.3


def test_the_centre_follows_a_falling_loss_and_does_not_run_after_noise() -> None:
    chance, budget = random.Random(1), Budget(epsilon=4, delta=1e-5, clip=1.0, messages=40, multiplier=6.8)
    for n, near in ((200, 0.3), (1, 6.0)):  # with one sequence the noise has a deviation of 13.6 nats
        centres: dict[str, float] = {}
        for cycle in range(40):
            true = 3.0 + 6.0 * math.exp(-cycle / 10)
            told = tell_losses({"S": [true] * n}, centres=centres, first_centre=9.0, budget=budget, gauss=chance.gauss)
            centres = {"S": told["S"].centre}
        assert abs(centres["S"] - true) < near
    assert next_centre(5.0, 1e9, clip=1.0, noise=0.0) == 6.0


def test_the_accountant_is_not_imported_before_it_is_asked() -> None:
    code = "import sys, trainer.island, tools.watching; assert 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=90)


# What is told.


def test_a_message_follows_from_the_noised_means() -> None:
    told = {
        "S": ToldLoss(mean=2.0, error=0.3, sequences=3, centre=2.1),
        "A": ToldLoss(mean=4.0, error=0.4, sequences=1, centre=3.9),
    }
    rest: dict[str, Any] = {"holdout_loss": 3.0, "step_times_s": [0.2], "upload_bps": None, "latency_s": None}
    first, known = summarise_told(told, previous={}, **rest)
    assert first.generalization_gap == pytest.approx(3.0 - (3 * 2.0 + 4.0) / 4)
    assert (first.loss_trend, first.convergence_rate, first.convergence_error) == (None, None, None)
    second, _ = summarise_told({"S": ToldLoss(mean=1.5, error=0.4, sequences=3, centre=2.0)}, previous=known, **rest)
    assert second.effectiveness == {"S": 0.5, "A": None, "B": None, "C": None}
    assert second.effectiveness_error["S"] == pytest.approx(0.5)
    assert second.loss_trend == -0.5
    assert summarise_told({}, previous={}, **rest)[0].generalization_gap is None


def test_cycles_with_the_same_noised_means_are_told_the_same(tiny_store: Store) -> None:
    island = Island(start_run(tiny_store, "r", **PRIVATE), 0, emit=silent, in_background=False)
    same = {tier: ToldLoss(mean=4.0, error=0.5, sequences=2, centre=4.0) for tier in TIERS}
    messages = []
    for odd, loss in ((4.1, 4.0), (0.3, 3.0), (math.nan, math.nan)):
        island.progress.sequence, island.progress.tier_losses = 0, {}
        island.progress.cycle_losses = {tier: [4.0, odd if tier == "S" else 4.2] for tier in TIERS}
        island._told = same
        island._end_cycle(loss, 4.2)
        messages.append(island._untold.pop())
    assert messages[0] == messages[1] == messages[2]
    island.close()


def _told_of(run: Run) -> dict[int, dict[str, ToldLoss]]:
    """What is on record, by round."""
    rows = Catalog(run.store).rows("SELECT round, inputs FROM checkpoints WHERE run = ? AND island = 0", [run.name])
    told = {row["round"]: Inputs.from_json(row["inputs"]).told for row in rows}
    return {round_: dict(losses) for round_, losses in told.items() if losses is not None}


def test_a_run_tells_its_planned_messages_and_its_mix_moves(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **PRIVATE)
    train_in_turn(run)
    rows = Catalog(tiny_store).rows("SELECT * FROM feedback WHERE run = 'r' ORDER BY sequence")
    assert [row["sequence"] for row in rows] == list(range(1, 7))
    assert {(row["convergence_rate"], row["convergence_error"]) for row in rows} == {(0, None)}
    told = _told_of(run)
    assert sorted(told) == [2, 4, 6, 8, 10, 12]
    budget = feedback_budget(run.config)
    assert budget is not None
    for losses in told.values():
        assert sum(loss.sequences for loss in losses.values()) == 4  # two steps of two
        for loss in losses.values():
            noise = budget.multiplier * 2 / loss.sequences
            assert loss.error == pytest.approx(math.hypot(1 / math.sqrt(loss.sequences), noise))
    mixes = Catalog(tiny_store).rows("SELECT DISTINCT weights FROM mixtures WHERE run = 'r'")
    assert len(mixes) > 1


def test_noise_is_nothing_that_the_runs_seed_gives(tiny_store: Store, tmp_path: Path) -> None:
    run = start_run(tiny_store, "r", **PRIVATE)
    other = load_run(copy_store(tiny_store, tmp_path / "copy"), "r")
    for one in (run, other):
        island = Island(one, 0, emit=silent, in_background=False)
        for _ in range(2):
            island.train_round()
        island.close()
    losses = [
        Catalog(one.store).rows("SELECT loss, holdout_loss FROM checkpoints WHERE island = 0 ORDER BY round")
        for one in (run, other)
    ]
    assert losses[0] == losses[1]
    first, second = _told_of(run)[2], _told_of(other)[2]
    assert first.keys() == second.keys()
    assert all(first[tier].mean != second[tier].mean for tier in first)


# Restarts, and the end of the budget.


def test_a_cycle_that_is_taken_again_is_told_with_the_noise_that_it_had(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **PRIVATE | {"checkpoint_cycles": 3, "steps": 12})
    known: dict[str, Any] = {}
    for rounds in (2, 3, 3, 4):  # all but the last die between two whole checkpoints, one amid a cycle
        island = Island(run, 0, emit=silent, in_background=False)
        progress = island.progress
        assert (progress.tier_losses, progress.centres) == (known.get("losses", {}), known.get("centres", {}))
        recorded = _told_of(run)
        for _ in range(rounds):
            island.train_round()
        now = _told_of(run)
        assert {round_: now[round_] for round_ in recorded} == recorded
        known = {"losses": dict(progress.tier_losses), "centres": dict(progress.centres)}
        island.close()
    assert progress.sequence == 6
    assert sorted(_told_of(run)) == [2, 4, 6, 8, 10, 12]
    sequences = [message.sequence for message in messages_of(run, 0)]
    assert sequences == sorted(set(sequences)) == list(range(1, 7))
    assert _events(run) == []


def test_what_a_whole_checkpoint_holds_is_not_told_again(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **PRIVATE)
    first = Island(run, 0, emit=silent, in_background=False)
    for _ in range(4):
        first.train_round()
    first.close()
    second = Island(run, 0, emit=silent, in_background=False)
    assert (second.progress.sequence, len(second._untold)) == (2, 0)
    assert second.progress.tier_losses == first.progress.tier_losses
    assert second.progress.centres == first.progress.centres
    second.close()


def _events(run: Run) -> list[dict[str, Any]]:
    rows = Catalog(run.store).rows("SELECT detail FROM events WHERE run = ? AND kind = 'feedback_spent'", [run.name])
    return [json.loads(row["detail"]) for row in rows]


def test_a_spent_budget_tells_nothing_more_and_says_so_once(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **PRIVATE)
    island = Island(run, 0, emit=silent, in_background=False)
    island.progress.sequence = 5  # as a run that goes on for longer than was planned would have it
    for _ in range(8):
        island.train_round()
    assert [message.sequence for message in messages_of(run, 0)] == [6]
    assert sorted(_told_of(run)) == [2]
    assert _events(run) == [{"epsilon": 4.0, "messages": 6}]
    island.close()


# Options.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"feedback_epsilon": -1.0}, "feedback_epsilon"),
        ({"feedback_epsilon": math.nan}, "feedback_epsilon"),
        ({"feedback_epsilon": math.inf}, "feedback_epsilon"),
        ({"feedback_delta": 0.0}, "feedback_delta"),
        ({"feedback_delta": 1.0}, "feedback_delta"),
        ({"feedback_delta": math.nan}, "feedback_delta"),
        ({"feedback_clip": 0.0}, "feedback_clip"),
        ({"feedback_clip": math.inf}, "feedback_clip"),
    ],
)
def test_a_budget_that_could_not_be_is_refused_with_the_options_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        tiny_config("r", **options)


def test_a_run_from_before_there_was_privacy_reads_as_one_without() -> None:
    config = tiny_config("r")
    loaded = json.loads(config.to_json())
    old = {
        name: value
        for name, value in loaded.items()
        if name not in ("feedback_epsilon", "feedback_delta", "feedback_clip")
    }
    assert type(config).from_json(json.dumps(old)) == config


def test_inputs_come_back_from_json_with_what_was_told() -> None:
    told = {"S": ToldLoss(mean=1 / 3, error=0.1, sequences=3, centre=0.2)}
    for inputs in (Inputs(receipts=[(1, 2)], told=told), Inputs(sent=False), Inputs(told={})):
        assert Inputs.from_json(inputs.to_json()) == inputs


def test_without_the_accountant_the_run_is_not_made_and_the_mend_is_said(
    tiny_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # as where it isn't installed
    options = ["--store", tiny_store.uri, "--run", "r", "--feedback-epsilon", "4"]
    assert _run(["train", *options]) == 2
    assert "pip install 'atoll[privacy]'" in capsys.readouterr().err
    assert Catalog(tiny_store).rows("SELECT * FROM runs") == []
    with pytest.raises(UserError, match="dp-accounting"):
        Island(start_run(tiny_store, "r", **PRIVATE), 0, emit=silent, in_background=False)
