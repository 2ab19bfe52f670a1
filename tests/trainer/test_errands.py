"""What is left to the background: in order, once each, and through outages of the store."""

from __future__ import annotations

import threading

import pytest

from manifests.errors import Failure, StoreUnreachable
from trainer.errands import Lane, Patience


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.errands._PAUSES_S", (0.001, 0.002))


def test_lane_waits_through_an_outage_and_keeps_the_order() -> None:
    done: list[str] = []
    outage = iter([StoreUnreachable("away"), StoreUnreachable("away"), None])

    def first() -> None:
        error = next(outage)
        if error is not None:
            raise error
        done.append("first")

    lane = Lane("test")
    lane.add(first)
    lane.add(lambda: done.append("second"))
    lane.drain()
    assert done == ["first", "second"]
    lane.close()


def test_lane_ends_at_any_other_failure() -> None:
    done: list[str] = []

    def broken() -> None:
        raise Failure("broken")

    lane = Lane("test")
    lane.add(broken)
    with pytest.raises(Failure, match="broken"):
        lane.drain()
    with pytest.raises(Failure, match="broken"):
        lane.add(lambda: done.append("never"))
    assert done == []


def test_outage_that_lasts_too_long_is_an_error() -> None:
    now = [0.0]
    patience = Patience(limit_s=60, clock=lambda: now[0])
    for now[0] in (0.0, 30.0, 59.0):
        patience.bear(StoreUnreachable("away"))
    now[0] = 61.0
    with pytest.raises(StoreUnreachable, match="away"):
        patience.bear(StoreUnreachable("away"))


def test_next_outage_is_borne_as_long_as_the_first() -> None:
    now = [0.0]
    patience = Patience(limit_s=60, clock=lambda: now[0])
    patience.bear(StoreUnreachable("away"))
    now[0] = 1000.0
    patience.bear(StoreUnreachable("away"))


def test_who_is_told_to_stop_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.errands._PAUSES_S", (60.0, 60.0))
    stopping = threading.Event()
    stopping.set()
    Patience().bear(StoreUnreachable("away"), stopping=stopping)
