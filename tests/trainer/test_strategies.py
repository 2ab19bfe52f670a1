"""Strategies: shares that sum to one, and a mix that feedback moves, but not far and not to nothing. All through the SQL that islands ask."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.questions import question
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.strategies import ADAPTIVE, BUILT_IN, UNIFORM
from manifests.tables import append
from tiny import fabricate
from trainer.plan import configure_run
from trainer.strategies import TABLES_READ, Seen, decide
from trainer.worth import Worth

STEP_CAP, WEIGHT_FLOOR = 0.5, 0.02
_EFFECTIVENESS = st.fixed_dictionaries(
    {tier: st.one_of(st.none(), st.floats(-5, 5), st.just(math.nan), st.just(math.inf)) for tier in TIERS}
)
_WEIGHTS = (
    st.fixed_dictionaries({tier: st.one_of(st.just(0.0), st.floats(WEIGHT_FLOOR, 1)) for tier in TIERS})
    .filter(lambda weights: sum(weights.values()) > 0)
    .map(lambda weights: {tier: weight / sum(weights.values()) for tier, weight in weights.items()})
)


class Tables:
    """The tables of a decision, made by hand in a database of their own."""

    def __init__(self) -> None:
        self.connection = duckdb.connect()
        self.connection.execute(
            "CREATE TABLE strategies (strategy VARCHAR, weight_s DOUBLE, weight_a DOUBLE, weight_b DOUBLE, weight_c DOUBLE, "
            "learning_rate DOUBLE, weight_floor DOUBLE, step_cap DOUBLE, reason VARCHAR, exploration DOUBLE);"
            "CREATE TABLE feedback (run VARCHAR, island INTEGER, sequence BIGINT, effectiveness_s DOUBLE, effectiveness_a DOUBLE, "
            "effectiveness_b DOUBLE, effectiveness_c DOUBLE, effectiveness_error_s DOUBLE, effectiveness_error_a DOUBLE, "
            "effectiveness_error_b DOUBLE, effectiveness_error_c DOUBLE);"
            "CREATE TABLE view_shards (tier_version INTEGER, pool VARCHAR, tier VARCHAR, job VARCHAR, tokens BIGINT);"
            "CREATE TABLE views (tier_version INTEGER, pool VARCHAR, tier VARCHAR, job VARCHAR);"
            "INSERT INTO views VALUES (1, 'p', 'S', 'j'), (1, 'p', 'A', 'j'), (1, 'p', 'B', 'new'), (2, 'p', 'C', 'j');"
            # B's first edition was replaced; C is of another tier version.
            "INSERT INTO view_shards VALUES (1, 'p', 'S', 'j', 4), (1, 'p', 'S', 'j', 6), (1, 'p', 'A', 'j', 30),"
            "(1, 'p', 'B', 'new', 60), (1, 'p', 'B', 'j', 900), (2, 'p', 'C', 'j', 900)"
        )
        for row in BUILT_IN:
            self.connection.execute(f"INSERT INTO strategies VALUES ({', '.join('?' * len(row))})", list(row.values()))

    def weights(
        self,
        strategy: str,
        previous: Mapping[str, float] | None = None,
        effectiveness: Mapping[str, float | None] | None = None,
        error: Mapping[str, float | None] | None = None,
        *,
        told: bool = True,
    ) -> dict[str, float]:
        """What an island would be told: by its message, or else by what is known of the run."""
        self.connection.execute("DELETE FROM feedback")
        values = [effectiveness[t] for t in TIERS] if effectiveness is not None else []
        errors = [error[t] if error is not None else None for t in TIERS] if effectiveness is not None else []
        if values and told:
            self.connection.execute(
                "INSERT INTO feedback VALUES ('r', 0, 1, ?, ?, ?, ?, ?, ?, ?, ?)", [*values, *errors]
            )
        parameters = {
            "run": "r", "island": 0, "sequence": 1, "strategy": strategy, "tier_version": 1, "pool": "p",
            "previous": [previous[tier] for tier in TIERS] if previous else [],
            "effectiveness": [] if told else values, "error": [] if told else errors,
        }  # fmt: skip
        rows = self.connection.execute(question("mixture"), parameters).fetchall()
        return {row[0]: row[1] for row in rows}


@pytest.fixture(scope="module")
def tables() -> Iterator[Tables]:
    tables = Tables()
    yield tables
    tables.connection.close()


@pytest.mark.parametrize("strategy", [row["strategy"] for row in BUILT_IN])
def test_every_strategy_starts_with_shares_that_sum_to_one(tables: Tables, strategy: str) -> None:
    weights = tables.weights(strategy)
    assert list(weights) == list(TIERS)
    assert sum(weights.values()) == pytest.approx(1)


def test_uniform_takes_every_tier_by_the_size_of_its_newest_view(tables: Tables) -> None:
    assert tables.weights(UNIFORM) == pytest.approx({"S": 0.1, "A": 0.3, "B": 0.6, "C": 0.0})


@settings(deadline=None)
@given(weights=_WEIGHTS, effectiveness=_EFFECTIVENESS)
def test_moved_weights_sum_to_one_and_zero_stays_zero(
    tables: Tables, weights: dict[str, float], effectiveness: dict[str, float | None]
) -> None:
    moved = tables.weights(ADAPTIVE, weights, effectiveness)
    assert sum(moved.values()) == pytest.approx(1)
    assert [tier for tier in TIERS if moved[tier] == 0] == [tier for tier in TIERS if weights[tier] == 0]


@settings(deadline=None)
@given(weights=_WEIGHTS, effectiveness=_EFFECTIVENESS)
def test_a_weight_changes_by_no_more_than_the_cap_before_normalising(
    tables: Tables, weights: dict[str, float], effectiveness: dict[str, float | None]
) -> None:
    moved = tables.weights(ADAPTIVE, weights, effectiveness)
    most = (1 + STEP_CAP) / (1 - STEP_CAP)
    for tier in TIERS:
        if weights[tier] > WEIGHT_FLOOR * 2:
            assert weights[tier] / most - 1e-9 <= moved[tier] <= weights[tier] * most + 1e-9


@settings(deadline=None, max_examples=50)
@given(effectiveness=st.lists(_EFFECTIVENESS, min_size=1, max_size=20))
def test_no_tier_falls_far_below_the_floor_however_bad_it_is(
    tables: Tables, effectiveness: list[dict[str, float | None]]
) -> None:
    weights = tables.weights(ADAPTIVE)
    for step in effectiveness:
        weights = tables.weights(ADAPTIVE, weights, step)
    # Normalising after the floor takes at most the floors' own sum, and a step's growth, from it.
    assert min(weights.values()) >= WEIGHT_FLOOR / (1 + STEP_CAP + len(TIERS) * WEIGHT_FLOOR)


def test_the_mix_moves_towards_the_effective_tier(tables: Tables) -> None:
    weights = tables.weights(ADAPTIVE)
    moved = tables.weights(ADAPTIVE, weights, {"S": 0.3, "A": 0.1, "B": 0.1, "C": -0.1})
    assert moved["S"] > weights["S"]
    assert moved["C"] < weights["C"]
    assert moved["S"] / weights["S"] > moved["A"] / weights["A"] > moved["C"] / weights["C"]


@pytest.mark.parametrize("told", [True, False])
def test_a_step_worked_out_by_hand(tables: Tables, told: bool) -> None:
    # Between the tiers the variance is 0.05² = 0.0025, the errors' mean square (0.01 + 0.0025) / 2 = 0.00625: s = 0.093541.
    # Hoped for are 0.1 + 0.25 · 0.05 = 0.1125 and 0 + 0.25 · 0.1 = 0.025, 0.04375 from their mean, which is 0.467707 s.
    # exp(0.5 · ±0.467707) = 1.263461, 0.791477; C was not measured and keeps its weight before normalising.
    previous = {"S": 0.5, "A": 0.25, "B": 0.0, "C": 0.25}
    effectiveness = {"S": 0.1, "A": 0.0, "B": None, "C": None}
    error = {"S": 0.05, "A": 0.1, "B": None, "C": None}
    moved = tables.weights(ADAPTIVE, previous, effectiveness, error, told=told)
    total = 0.5 * 1.263461 + 0.25 * 0.791477 + 0.25
    expected = {"S": 0.5 * 1.263461 / total, "A": 0.25 * 0.791477 / total, "B": 0, "C": 0.25 / total}
    assert moved == pytest.approx(expected, rel=1e-5)


def test_the_unit_of_effectiveness_doesnt_matter_and_noise_moves_the_mix_little(tables: Tables) -> None:
    weights = tables.weights(ADAPTIVE)
    effectiveness, error = {"S": 0.3, "A": 0.1, "B": 0.1, "C": -0.1}, dict.fromkeys(TIERS, 0.2)
    moved = tables.weights(ADAPTIVE, weights, effectiveness, error)
    small = [{tier: value * 1e-6 for tier, value in given.items()} for given in (effectiveness, error)]
    assert tables.weights(ADAPTIVE, weights, *small) == pytest.approx(moved)
    noisy = tables.weights(ADAPTIVE, weights, effectiveness, dict.fromkeys(TIERS, 2.0))
    certain = tables.weights(ADAPTIVE, weights, effectiveness, dict.fromkeys(TIERS, 0.0))
    assert weights["S"] < noisy["S"] < moved["S"] < certain["S"]


def test_of_two_tiers_that_are_worth_the_same_the_less_known_is_tried_more(tables: Tables) -> None:
    weights = dict.fromkeys(TIERS, 0.25)
    error = {"S": 0.1, "A": 0.1, "B": 0.3, "C": 0.1}
    moved = tables.weights(ADAPTIVE, weights, dict.fromkeys(TIERS, 0.0), error)
    assert moved["B"] > 0.25 > moved["S"] == pytest.approx(moved["C"])


@pytest.mark.parametrize(
    "effectiveness",
    [
        None,
        dict.fromkeys(TIERS, None),
        {"S": 1.0, "A": None, "B": None, "C": None},
        {"S": 1.0, "A": math.nan, "B": math.inf, "C": None},
        dict.fromkeys(TIERS, 0.25),
    ],
)
def test_the_mix_stays_where_there_is_nothing_to_compare(
    tables: Tables, effectiveness: dict[str, float | None] | None
) -> None:
    weights = tables.weights(ADAPTIVE)
    assert tables.weights(ADAPTIVE, weights, effectiveness) == pytest.approx(weights)


def _decide(store: Store, strategy: str, **more: Any) -> dict[str, float]:
    catalog = Catalog(store, tables=TABLES_READ)
    return dict(decide(catalog, run="r", island=0, strategy=strategy, tier_version=1, pool="p", **more).weights)


def test_an_edited_strategy_is_what_counts(store: Store) -> None:
    fabricate(store)
    assert _decide(store, "balanced")["S"] == pytest.approx(0.2)
    edited = {"weight_s": 3.0, "weight_a": 1.0, "weight_b": 0.0, "weight_c": 0.0}
    moving = {"learning_rate": 0.0, "weight_floor": 0.0, "step_cap": 0.0, "reason": "tried"}
    append(store, "strategies", [{"strategy": "balanced", **edited, **moving}])
    assert _decide(store, "balanced") == {"S": 0.75, "A": 0.25, "B": 0.0, "C": 0.0}
    # A strategy without a learning rate is followed as it stands, also by an island that runs.
    assert _decide(store, "balanced", sequence=3, previous=dict.fromkeys(TIERS, 0.25))["S"] == 0.75


def test_a_decision_says_what_it_was_computed_from(store: Store) -> None:
    fabricate(store)
    catalog = Catalog(store, tables=TABLES_READ)
    decision = decide(catalog, run="r", island=1, strategy="uniform", tier_version=1, pool="p")
    again = Catalog(store, at=json.loads(decision.inputs)).query(decision.query, json.loads(decision.parameters))
    assert dict(zip(again["tier"].to_pylist(), again["weight"].to_pylist(), strict=True)) == decision.weights


def test_an_unknown_strategy_is_refused_and_the_known_ones_are_named(store: Store) -> None:
    with pytest.raises(UserError, match=r"bold.*aggressive, balanced"):
        _decide(store, "bold")


class Greedy:
    """A user's strategy: all to the tier that is worth most, where that is known."""

    def mix(self, seen: Seen) -> dict[str, float]:
        if seen.worth is None:
            return {"S": 1.0, "B": 1.0, "C": 2.0}
        return {max(seen.worth.effectiveness, key=lambda tier: seen.worth.effectiveness[tier]): 3.0}


class Asking:
    """A user's strategy that gives what it was made with, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def mix(self, seen: Seen) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


REFUSED = {
    "unknown tier": (Asking({"S": 1.0, "T": 1.0}), "gave a weight to 'T'; tiers are S, A, B, C"),
    "negative": (Asking({"S": 1.0, "A": -1.0}), "weights must be 0 or more"),
    "not finite": (Asking({"S": math.nan}), "weights must be 0 or more"),
    "nothing": (Asking({"B": 0.0}), "that of a tier with documents above 0"),
    "no mapping": (Asking(7), "failed: TypeError"),
    "raises": (Asking(KeyError("x")), "failed: KeyError: 'x'"),
}
no_strategy = 7


def test_a_strategy_in_python_sees_what_there_is_and_its_shares_are_scaled(tiny_store: Store) -> None:
    name = f"{__name__}:Greedy"
    assert _decide(tiny_store, name) == {"S": 0.25, "A": 0.0, "B": 0.25, "C": 0.5}
    worth = Worth(effectiveness={"S": 0.1, "A": 0.2}, error={"S": 0.1, "A": 0.1}, method="x", observations=9)
    assert _decide(tiny_store, name, worth=worth)["A"] == 1.0


@pytest.mark.parametrize("case", REFUSED)
def test_a_strategy_in_python_that_fails_is_the_users_to_mend(
    tiny_store: Store, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, why = REFUSED[case]
    monkeypatch.setattr(sys.modules[__name__], "no_strategy", strategy)
    with pytest.raises(UserError, match=re.escape(why)):
        _decide(tiny_store, f"{__name__}:no_strategy")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.such.module:Name", "ModuleNotFoundError"),
        ("trainer.strategies:Nothing", "AttributeError"),
        (f"{__name__}:no_strategy", "has no method `mix`"),
        (f"{__name__}:Asking", "TypeError"),
    ],
)
def test_a_name_of_no_strategy_in_python_is_refused_before_the_run(tiny_store: Store, name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        configure_run(tiny_store, run="r", tier_version=None, strategies=("balanced", name))
