"""A run's configuration: what can't be trained is refused with the option's name, the rest comes back from JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import UserError
from tiny import tiny_config
from trainer.config import RunConfig


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_islands": 0}, "num_islands"),
        ({"steps": 0}, "steps"),
        ({"batch_size": -1}, "batch_size"),
        ({"num_fragments": 0}, "num_fragments"),
        ({"sync_every": 0}, "sync_every"),
        ({"quorum": 0}, "quorum"),
        ({"holdout_sequences": 0}, "holdout_sequences"),
        ({"seq_len": 1}, "seq_len"),
        ({"num_fragments": 3, "sync_every": 4}, r"sync_every \(4\).*num_fragments \(3\)"),
        ({"steps": 9, "sync_every": 4, "num_fragments": 2}, r"steps \(9\).*take 8 or 10"),
        ({"steps": 1, "sync_every": 4, "num_fragments": 2}, r"steps \(1\).*take 2 or"),
        ({"num_islands": 2, "quorum": 3}, "quorum"),
        ({"strategies": ()}, "strategy"),
        ({"online_refresh": 0}, "online_refresh"),
        ({"online_sequences": 0}, "online_sequences"),
        ({"online_layers": ("o_proj", "")}, "online_layers"),
        ({"lr": 0.0}, "lr"),
        ({"lr": 1.5}, "lr"),
        ({"lr": math.nan}, "lr"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_options_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        tiny_config("r", **options)


@pytest.mark.parametrize("name", ["", "-r", ".r", "a/b", "../r", "a b", "ä", "r" * 101, "r\n"])
def test_a_run_name_that_could_not_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        tiny_config(name)


@given(
    num_islands=st.integers(1, 9),
    num_fragments=st.integers(1, 8),
    round_steps=st.integers(1, 8),
    num_rounds=st.integers(1, 50),
    lr=st.floats(0, 1, exclude_min=True, exclude_max=True),
    strategies=st.lists(st.sampled_from(["aggressive", "balanced", "uniform"]), min_size=1, max_size=5),
)
def test_a_configuration_comes_back_from_json(
    num_islands: int, num_fragments: int, round_steps: int, num_rounds: int, lr: float, strategies: list[str]
) -> None:
    config = tiny_config(
        "r",
        num_islands=num_islands,
        num_fragments=num_fragments,
        sync_every=num_fragments * round_steps,
        steps=round_steps * num_rounds,
        lr=lr,
        strategies=tuple(strategies),
        online_layers=("o_proj",),
    )
    assert RunConfig.from_json(config.to_json()) == config
    assert (config.round_steps, config.num_rounds) == (round_steps, num_rounds)


def test_a_run_from_before_online_influence_reads_as_one_without() -> None:
    config = tiny_config("r")
    old = {name: value for name, value in json.loads(config.to_json()).items() if not name.startswith("online")}
    assert RunConfig.from_json(json.dumps(old)) == config


def test_strategies_are_taken_round_and_round() -> None:
    config = tiny_config("r", num_islands=3, strategies=("aggressive", "uniform"))
    assert [config.strategy_of(island) for island in range(3)] == ["aggressive", "uniform", "aggressive"]
