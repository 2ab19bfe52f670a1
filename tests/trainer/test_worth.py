"""What tiers are worth: by regression over islands and cycles against planted worth and an independent reference; by what islands tell, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manifests.catalog import Catalog
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append
from tests.manifests.handmade import checkpoint, job, mixture
from trainer.feedback import Feedback
from trainer.worth import HALF_LIFE, MEMORY, Cycle, Worth, worth_by_regression, worth_by_telling

PLANTED = {"S": 0.4, "A": 0.2, "B": 0.0, "C": -0.6}
"""Sums to 0, so that it's from the mean tier's."""


def _cycles(
    *,
    islands: int = 4,
    number: int = 12,
    noise: float = 0.02,
    spread: float = 1.0,
    seed: int = 0,
    planted: Any = PLANTED,
) -> list[Cycle]:
    """Cycles of islands whose losses are a level of the cycle, less the planted worth of what they read, and noise."""
    rng = np.random.default_rng(seed)
    found = []
    for at in range(number):
        level = rng.normal(0.3, 0.3)
        for island in range(islands):
            shares = (1 - spread) / 4 + spread * rng.dirichlet([2.0] * 4)
            worth = planted(at) if callable(planted) else planted
            loss = level - float(shares @ [worth[tier] for tier in TIERS]) + rng.normal(0, noise)
            found.append(
                Cycle(island=island, number=at, loss=loss, shares=dict(zip(TIERS, shares.tolist(), strict=True)))
            )
    return found


def test_planted_worth_is_found_and_lies_within_its_errors() -> None:
    misses = []
    for seed in range(40):
        worth = worth_by_regression(_cycles(seed=seed))
        assert worth is not None
        assert worth.observations == 48
        misses += [(worth.effectiveness[tier] - PLANTED[tier]) / worth.error[tier] for tier in TIERS]
        assert all(abs(worth.effectiveness[tier] - PLANTED[tier]) < 0.2 for tier in TIERS)
    # In standard errors; weights by age make some less of the observations than least squares would.
    assert 0.6 < np.std(misses) < 1.4


def test_where_nothing_differs_nothing_is_claimed() -> None:
    signals = []
    for seed in range(40):
        worth = worth_by_regression(_cycles(seed=seed, planted=dict.fromkeys(TIERS, 0.0), noise=0.1))
        assert worth is not None
        signals += [abs(worth.effectiveness[tier]) / worth.error[tier] for tier in TIERS]
    assert float(np.mean(np.array(signals) > 2)) < 0.1


def test_a_direction_that_no_island_has_tried_stays_unknown() -> None:
    """Islands that differ in S against A alone say nothing of B against C."""
    rng = np.random.default_rng(0)
    cycles = []
    for number in range(12):
        for island in range(4):
            s = rng.uniform(0.1, 0.4)
            shares = {"S": s, "A": 0.5 - s, "B": 0.3, "C": 0.2}
            loss = 3 - 0.5 * s + rng.normal(0, 0.005)
            cycles.append(Cycle(island=island, number=number, loss=loss, shares=shares))
    worth = worth_by_regression(cycles)
    assert worth is not None
    assert worth.effectiveness["S"] - worth.effectiveness["A"] == pytest.approx(0.5, abs=0.05)
    assert worth.effectiveness["B"] == pytest.approx(worth.effectiveness["C"])
    assert worth.error["B"] > 3 * abs(worth.effectiveness["B"])


@pytest.mark.parametrize("cycles", [[], _cycles(islands=1), _cycles(islands=2, number=3)])
def test_too_little_to_compare_is_no_answer(cycles: list[Cycle]) -> None:
    assert worth_by_regression(cycles) is None


def test_what_a_tier_is_worth_now_counts_and_not_what_it_was() -> None:
    turned = {"S": -0.6, "A": 0.2, "B": 0.0, "C": 0.4}
    changed = _cycles(number=24, planted=lambda at: PLANTED if at < 12 else turned)
    worth = worth_by_regression(changed)
    assert worth is not None
    assert worth.effectiveness["S"] < worth.effectiveness["C"]
    recent = worth_by_regression(_cycles(number=MEMORY + 40, planted=lambda at: PLANTED if at < 40 else turned))
    assert recent is not None
    assert recent.effectiveness["S"] == pytest.approx(-0.6, abs=0.1)


def test_the_posterior_is_that_of_an_independent_reference() -> None:
    """Solved by normal equations over all levels and slopes at once, with the prior that maximises the evidence on a fine grid."""
    cycles = _cycles(number=6, noise=0.1, seed=3)
    worth = worth_by_regression(cycles)
    assert worth is not None
    shares = np.array([[cycle.shares[tier] for tier in TIERS] for cycle in cycles])
    levels = np.equal.outer([cycle.number for cycle in cycles], range(6)).astype(float)
    roots = np.sqrt([0.5 ** ((5 - cycle.number) / HALF_LIFE) for cycle in cycles])[:, None]
    y = roots[:, 0] * [-cycle.loss for cycle in cycles]
    design = roots * np.hstack([levels, shares])
    # Without the levels: what is orthogonal to them.
    basis = np.linalg.svd(roots * levels)[0][:, 6:]
    y_rest, x_rest = basis.T @ y, basis.T @ (roots * shares)
    best = None
    for prior in np.geomspace(1e-2, 1e6, 2000):
        covariance = np.eye(len(y_rest)) + prior * x_rest @ x_rest.T
        noise = float(y_rest @ np.linalg.solve(covariance, y_rest)) / len(y_rest)
        evidence = -0.5 * (len(y_rest) * math.log(noise) + np.linalg.slogdet(covariance)[1])
        if best is None or evidence > best[0]:
            best = (evidence, prior, noise)
    assert best is not None
    _, prior, noise = best
    penalty = np.diag([0.0] * 6 + [1 / prior] * 4)
    precision = design.T @ design + penalty
    slopes = np.linalg.solve(precision, design.T @ y)[6:]
    centring = np.eye(4) - 0.25
    errors = np.sqrt(np.diag(centring @ (noise * np.linalg.inv(precision))[6:, 6:] @ centring))
    assert [worth.effectiveness[tier] for tier in TIERS] == pytest.approx((centring @ slopes).tolist(), abs=0.003)
    assert [worth.error[tier] for tier in TIERS] == pytest.approx(errors.tolist(), rel=0.1)


def _told(effectiveness: dict[str, float | None], error: dict[str, float | None]) -> Feedback:
    rest = dict.fromkeys(
        (
            "loss_trend",
            "convergence_rate",
            "convergence_error",
            "generalization_gap",
            "step_time_s",
            "upload_bps",
            "latency_s",
        )
    )
    return Feedback(effectiveness=effectiveness, effectiveness_error=error, **rest)


def test_what_islands_tell_counts_by_its_precision_and_age() -> None:
    nothing: dict[str, float | None] = dict.fromkeys(TIERS, None)
    old = _told({**nothing, "S": 1.0}, {**nothing, "S": 0.1})
    new = _told({**nothing, "S": 2.0, "A": 0.5}, {**nothing, "S": 0.2, "A": 0.5})
    quiet = _told(nothing, nothing)
    worth = worth_by_telling({0: [old, *[quiet] * 5, new], 1: [quiet]})
    assert worth is not None
    # S: precisions 100 · ½ (six messages old) and 25: (50 · 1 + 25 · 2) / 75 = 4/3. A: 0.5. Mean of both 11/12.
    assert worth.effectiveness == {"S": pytest.approx(4 / 3 - 11 / 12), "A": pytest.approx(0.5 - 11 / 12)}
    assert worth.error == {"S": pytest.approx(75**-0.5), "A": pytest.approx(0.5)}
    assert worth.observations == 3
    assert worth_by_telling({0: [old], 1: [quiet]}) is None


def test_losses_and_shares_of_cycles_are_read_from_checkpoints(store: Store) -> None:
    def row(
        number: int, island: int, round_: int, loss: float | None, s: int, c: int, run: str = "r"
    ) -> dict[str, Any]:
        tokens = {"tokens_s": s, "tokens_a": 0, "tokens_b": 0, "tokens_c": c, "tokens": s + c}
        return checkpoint(number, run=run, island=island, round=round_, holdout_loss=loss, **tokens)

    rows = [
        row(1, 0, 2, 5.0, 10, 10),
        row(2, 0, 3, None, 20, 20),  # amid a cycle nothing is measured
        row(3, 0, 4, 4.5, 40, 20),
        row(4, 1, 2, math.nan, 10, 10),
        row(5, 1, 4, 4.0, 20, 20),
        row(6, 1, 6, 4.25, 20, 60),
        row(7, -1, 4, 3.0, 0, 0),  # the syncer's
        row(8, 0, 6, 1.0, 99, 99, run="other"),
    ]
    append(store, "checkpoints", rows)
    # Island 0 goes over to tier version 2 after round 3, amid its second cycle.
    versions = [(0, 0, 1), (0, 3, 2), (1, 0, 1), (1, 6, 2)]
    append(store, "mixtures", [mixture(island=i, round=r, tier_version=v) for i, r, v in versions])
    found = [Cycle.from_row(row, {1: 0.25}) for row in Catalog(store).ask("cycle_losses", run="r").to_pylist()]
    assert found == [
        Cycle(island=0, number=4, loss=4.5, shares={"S": 0.75, "A": 0.0, "B": 0.0, "C": 0.25}),
        Cycle(island=1, number=6, loss=4.25, shares={"S": 0.0, "A": 0.0, "B": 0.0, "C": 1.0}, weight=0.25),
    ]


def test_cycles_on_other_documents_count_by_what_is_left_of_them() -> None:
    turned = {"S": -0.6, "A": 0.2, "B": 0.0, "C": 0.4}
    before, after = _cycles(number=12), _cycles(number=18, planted=turned)[-24:]
    for kept, expected in ((1.0, PLANTED["S"]), (0.0, turned["S"])):
        worth = worth_by_regression([*(replace(cycle, weight=kept) for cycle in before), *after[:12]])
        assert worth is not None
        if kept == 0:
            assert worth.effectiveness["S"] == pytest.approx(expected, abs=0.15)
            assert worth.observations == 12
        else:
            assert worth.effectiveness["S"] > turned["S"] + 0.3


def test_what_tiers_have_in_common_with_those_of_another_version_is_that_of_the_worst(store: Store) -> None:
    views = [(1, "S"), (1, "A"), (2, "S"), (2, "A")]
    append(store, "jobs", [job("j")])
    same = {"job": "j", "pool": "p", "position": 0}
    append(
        store,
        "views",
        [
            {
                "job": "j",
                "pool": "p",
                "tier_version": v,
                "tier": t,
                "object": "o",
                "documents": 1,
                "tokens": 1,
                "shards": 1,
            }
            for v, t in views
        ],
    )
    shards = [
        (1, "S", "a", 30),
        (1, "S", "b", 10),
        (1, "A", "c", 50),
        (1, "A", "d", 50),
        (2, "S", "a", 30),
        (2, "S", "c", 10),
        (2, "A", "d", 90),
        (2, "A", "b", 10),
    ]
    append(
        store,
        "view_shards",
        [same | {"tier_version": v, "tier": t, "shard": s, "tokens": n, "documents": 1} for v, t, s, n in shards],
    )
    found = Catalog(store).ask("tier_overlap", tier_version=2, pool="p").to_pylist()
    # S keeps shard a, 30 of 40; A keeps d, 90 of 100.
    assert found == [{"tier_version": 1, "kept": 0.75}, {"tier_version": 2, "kept": 1.0}]


def test_how_much_is_unknown() -> None:
    flat = dict.fromkeys(TIERS, 0.0)
    assert Worth(effectiveness=flat, error=dict.fromkeys(TIERS, 0.1), method="x", observations=1).unknown_share == 1.0
    # The tiers' variance is (0.3² + 0.1² + 0.1² + 0.3²) / 4 = 0.05.
    apart = {"S": 0.3, "A": 0.1, "B": -0.1, "C": -0.3}
    found = Worth(effectiveness=apart, error=dict.fromkeys(TIERS, math.sqrt(0.05)), method="x", observations=1)
    assert found.unknown_share == pytest.approx(0.5)
