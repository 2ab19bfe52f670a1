"""The schedule of faults: pure, seeded, fair to all kinds, and never two at once for one process."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from manifests.errors import UserError
from tools.chaos.schedule import DEFAULT_KINDS, EVERYONE, GLOBAL, KINDS, Fault, make_schedule, parse_kinds


def _schedule(seed: int = 0, minutes: float = 30, rate: float = 125, islands: int = 4) -> list[Fault]:
    return make_schedule(seed=seed, minutes=minutes, faults_per_hour=rate, kinds=tuple(KINDS), islands=islands)


def test_same_seed_same_faults_another_seed_others() -> None:
    assert _schedule(3) == _schedule(3)
    assert _schedule(3) != _schedule(4)


@pytest.mark.parametrize("rate", [125, 1200])
@pytest.mark.parametrize("seed", range(5))
def test_faults_are_as_many_as_asked_for_and_of_all_kinds(seed: int, rate: float) -> None:
    faults = _schedule(seed, rate=rate)
    assert len(faults) == round(30 * rate / 60)
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


@pytest.mark.parametrize("islands", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_two_faults_strike_a_process_at_once(seed: int, islands: int) -> None:
    faults = _schedule(seed, rate=2000, islands=islands)
    for process in range(GLOBAL, islands):
        its = [fault for fault in faults if fault.target in (process, EVERYONE)]
        assert all(before.end_s <= after.at_s for before, after in itertools.pairwise(its))


def test_every_fault_is_of_its_kinds_length_strength_and_target() -> None:
    for fault in _schedule():
        kind = KINDS[fault.kind]
        assert kind.seconds[0] <= fault.seconds <= kind.seconds[1]
        assert kind.most is None or kind.most / 2 <= abs(fault.strength) <= kind.most
        allowed = {"island": range(4), "link": range(-1, 4), "syncer": [GLOBAL], "everyone": [EVERYONE]}[kind.targets]
        assert fault.target in allowed


def test_kinds_are_named_with_commas() -> None:
    assert parse_kinds("") == DEFAULT_KINDS
    assert parse_kinds(" kill, stop,kill ") == ("kill", "stop")
    assert parse_kinds("all") == tuple(KINDS)
    with pytest.raises(UserError, match="flood is no kind of fault; there are kill"):
        parse_kinds("kill,flood")


@pytest.mark.parametrize("wrong", [{"minutes": 0}, {"rate": -1}, {"islands": 0}, {"minutes": float("inf")}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must be"):
        _schedule(**wrong)  # type: ignore[arg-type]
