"""The merge gate: what is let through, who goes into quarantine and how it comes out again."""

from __future__ import annotations

import pytest

from trainer.gate import GateMemory, GateRules, Judged, cosines_to_others, decide


def judged(island: int, *, norm: float = 1.0, cosine: float | None = 0.1, rise: float | None = None) -> Judged:
    return Judged(island=island, norm_per_step=norm, cosine=cosine, rise=rise)


def test_the_cosine_to_the_others_worked_out_by_hand() -> None:
    """Unit vectors east, north, west: the others of east add up to (−1, 1)."""
    cosines = [[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]
    assert cosines_to_others(cosines, [1.0, 1.0, 1.0]) == pytest.approx([-(0.5**0.5), 0.0, -(0.5**0.5)])
    assert cosines_to_others([[1.0, 0.5], [0.5, 1.0]], [1.0, 1.0]) == [None, None]


def test_a_norm_is_judged_by_those_before_once_there_are_some() -> None:
    memory, rules = GateMemory(), GateRules(norm=4.0)
    assert decide(memory, 0, [judged(0, norm=100.0)], rules)[0] == {}
    for _ in range(8):
        decide(memory, 0, [judged(0)], rules)
    assert decide(memory, 0, [judged(0, norm=3.9)], rules)[0] == {}
    assert "times the usual" in decide(memory, 0, [judged(1, norm=40.0), judged(0)], rules)[0][1]
    assert decide(memory, 1, [judged(1, norm=40.0)], rules)[0] == {}  # another fragment has norms of its own


@pytest.mark.parametrize(("bad", "why"), [({"cosine": -0.9}, "cosine"), ({"rise": 0.5}, "holdout")])
def test_what_points_away_or_raises_the_loss_is_kept_out(bad: dict[str, float], why: str) -> None:
    kept_out, _ = decide(GateMemory(), 0, [judged(0), judged(1, **bad)], GateRules(holdout=0.1))
    assert list(kept_out) == [1]
    assert why in kept_out[1]


def test_an_island_goes_into_quarantine_and_comes_out_again() -> None:
    memory, rules = GateMemory(), GateRules(strikes=3)
    bad, good = judged(7, cosine=-0.9), judged(7)
    assert [decide(memory, f, [bad], rules)[1] for f in range(3)] == [[], [], [(7, "quarantined")]]
    # What it sends is dropped even if it's good, until as many in a row were; a bad one begins the count anew.
    assert decide(memory, 0, [good], rules) == ({7: "its island is in quarantine"}, [])
    assert decide(memory, 0, [bad], rules)[1] == []
    memory = GateMemory.from_json(memory.to_json())
    assert [decide(memory, 0, [good], rules)[1] for _ in range(3)] == [[], [], [(7, "released")]]
    assert decide(memory, 0, [good], rules)[0] == {}
