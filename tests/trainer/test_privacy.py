"""Differential privacy of feedback: how much noise, of what; that nothing else is told; that a budget is kept over restarts."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import Store
from tiny import messages_of, silent, start_run
from tools.bench.turns import train_in_turn
from tools.watching import Watcher, line
from trainer.feedback import Feedback
from trainer.island import Island
from trainer.plan import configure_run
from trainer.privacy import Noise, noise_multiplier, released_means, spent_epsilon, summarise_privately
from trainer.run import Run
from trainer.syncer import Syncer

PRIVATE: dict[str, Any] = {"strategies": ("adaptive",), "steps": 12, "feedback_epsilon": 4.0}
_LOSSES = st.lists(st.floats(0, 20), min_size=1, max_size=30)


def _noise(multiplier: float = 1.0, clip: float = 0.5, key: bytes = b"k" * 32) -> Noise:
    return Noise(multiplier=multiplier, clip=clip, key=key)


def _delta_of_one_release(multiplier: float, epsilon: float) -> float:
    """Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy (2018), theorem 8, with sensitivity 1."""
    phi = NormalDist().cdf
    a, b = 1 / (2 * multiplier), epsilon * multiplier
    return phi(a - b) - math.exp(epsilon) * phi(-a - b)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_the_noise_is_enough_for_one_release_and_little_more_than_it_must_be(epsilon: float) -> None:
    multiplier = noise_multiplier(epsilon, 1e-5, 1)
    assert _delta_of_one_release(multiplier, epsilon) <= 1e-5
    # Rényi accounting costs some; never a quarter.
    assert _delta_of_one_release(multiplier * 0.75, epsilon) > 1e-5


def test_messages_compose_as_one_release_of_less_noise() -> None:
    """Releases of a Gaussian mechanism are together one with the noise divided by the root of their number."""
    assert noise_multiplier(2.0, 1e-6, 49) == pytest.approx(7 * noise_multiplier(2.0, 1e-6, 1), rel=0.02)
    multiplier = noise_multiplier(2.0, 1e-6, 49)
    spent = [spent_epsilon(multiplier, 1e-6, n) for n in range(50)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[49] == pytest.approx(2.0, rel=1e-3)


@given(losses=_LOSSES, other=st.floats(0, 20), place=st.integers(0, 29), centre=st.floats(0, 20))
def test_one_sequence_in_place_of_another_moves_a_mean_by_less_than_the_noise_is_for(
    losses: list[float], other: float, place: int, centre: float
) -> None:
    changed = [*losses]
    changed[place % len(losses)] = other
    means = [
        released_means({"S": x}, {"S": centre}, _noise(multiplier=0.0), context="c")["S"].mean
        for x in (losses, changed)
    ]
    assert abs(means[0] - means[1]) <= 2 * 0.5 / len(losses) + 1e-9


def test_the_noise_has_the_deviation_that_was_asked_for_and_each_message_its_own() -> None:
    losses = {"S": [3.0] * 10, "A": [2.0] * 5, "B": [], "C": [9.0]}
    centres = {"S": 3.1, "A": 2.0, "B": 0.0, "C": 3.0}
    drawn = [released_means(losses, centres, _noise(2.0), context=f"r/0/{n}") for n in range(4000)]
    assert all("B" not in one for one in drawn)
    for tier, mean, num in (("S", 3.0, 10), ("A", 2.0, 5), ("C", 3.5, 1)):  # C is clipped
        values = [one[tier].mean for one in drawn]
        deviation = 2.0 * 2 * 0.5 / num
        assert stdev(values) == pytest.approx(deviation, rel=0.05)
        assert fmean(values) == pytest.approx(mean, abs=4 * deviation / math.sqrt(4000))
        assert drawn[0][tier].error == pytest.approx(math.hypot(0.5 / math.sqrt(num), deviation))
    again = released_means(losses, centres, _noise(2.0), context="r/0/7")
    assert again == drawn[7]  # taken again to the bit, told again
    assert released_means(losses, centres, _noise(2.0, key=b"x" * 32), context="r/0/7") != drawn[7]
    nearly = {**losses, "S": [3.0] * 9 + [3.0 + 1e-12]}
    assert abs(released_means(nearly, centres, _noise(2.0), context="r/0/7")["S"].mean - drawn[7]["S"].mean) > 1e-6


def _summary(losses: dict[str, list[float]], **more: Any) -> Feedback:
    given: dict[str, Any] = {
        "holdout_loss": 3.0, "losses_by_tier": losses, "previous": {}, "noise": _noise(0.0), "context": "c",
        "step_time_s": 0.1, "upload_bps": None, "latency_s": None,
    }  # fmt: skip
    return summarise_privately(**(given | more))[0]


def _known(told: Feedback) -> dict[str, float]:
    return {name: value for name, value in told.to_row().items() if value is not None and not math.isnan(value)}


def test_nothing_is_told_of_losses_but_their_released_means() -> None:
    """Two cycles of the same means, in other orders and of other spread, tell the same."""
    one = _summary({"S": [3.0, 3.2, 2.8], "A": [3.3], "B": [], "C": []})
    other = _summary({"S": [2.8, 3.0, 3.2], "A": [3.3], "B": [], "C": []})
    spread = _summary({"S": [3.0, 3.0, 3.0], "A": [3.3], "B": [], "C": []})
    for same in (other, spread):
        assert _known(same) == pytest.approx(_known(one))
    assert one.convergence_rate is None
    assert one.generalization_gap == pytest.approx(3.0 - (3 * 3.0 + 3.3) / 4)


def _told(run: Run) -> list[dict[str, Any]]:
    sql = "SELECT effectiveness_s, effectiveness_a, effectiveness_b, generalization_gap FROM feedback WHERE run = ? ORDER BY island, sequence"
    return Catalog(run.store).rows(sql, [run.name])


def test_a_run_tells_as_often_as_its_budget_is_for_and_watch_shows_what_is_spent(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **PRIVATE)
    assert run.config.num_messages == 6
    train_in_turn(run)
    assert len(_told(run)) == 2 * 6
    for island in range(2):
        assert len({(m.incarnation, m.sequence) for m in messages_of(run, island)}) == 6
    view = Watcher(tiny_store, "r").look()
    assert (view.epsilon, view.delta) == (4.0, 1e-5)
    assert view.epsilon_spent == pytest.approx(4.0, rel=1e-3)
    assert "privacy of the feedback: 4 of ε = 4 spent, δ = 1e-05" in line(view, 0.0)
    mixes = Catalog(tiny_store).rows("SELECT parameters FROM mixtures WHERE run = 'r' AND reason LIKE 'feedback%'")
    assert {
        json.loads(row["parameters"])["worth"]["method"] for row in mixes if "worth" in json.loads(row["parameters"])
    } <= {"telling"}


def test_an_island_that_comes_back_tells_no_cycle_with_other_noise(tiny_store: Store, tmp_path: Path) -> None:
    """It dies amid its third cycle, before its first whole checkpoint: the new one takes all rounds again, and goes on."""
    told = []
    for lives in ((12,), (5, 7)):
        store = Store(str(shutil.copytree(tiny_store.root, tmp_path / f"store-{len(lives)}")))
        run = start_run(store, "r", **PRIVATE | {"num_islands": 1, "checkpoint_cycles": 4})
        store.put_new(f"{run.island_folder(0)}/feedback-secret", b"s" * 32)
        syncer = Syncer(run, emit=silent, in_background=False)
        for rounds in lives:
            island = Island(run, 0, emit=silent, in_background=False)
            for _ in range(rounds):
                island.train_round()
                island.receive_now()
                syncer.sweep()
        island.finish()
        assert syncer.serve() is not None
        told.append(_told(run))
    assert len(told[0]) == len(told[1]) == 6
    # The third message tells the change from the second cycle's means, which its life took again. Later merges come at other steps.
    assert told[0][:3] == told[1][:3]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"feedback_epsilon": -1.0}, "feedback_epsilon is -1.0; it must be 0 or more"),
        ({"feedback_delta": 1.0}, "feedback_delta is 1.0; it must lie between 0 and 1"),
        ({"feedback_clip": 0.0}, "feedback_clip is 0.0; it must be above 0"),
        ({"online_influence": True}, "without noise"),
    ],
)
def test_bad_options_are_refused(tiny_store: Store, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        configure_run(tiny_store, run="r", tier_version=None, **PRIVATE | {"steps": 16} | options)


def test_a_missing_accountant_is_told_before_the_run(tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'atoll\[privacy\]'"):
        configure_run(tiny_store, run="r", tier_version=None, **PRIVATE | {"steps": 16, "feedback_delta": 1e-7})
