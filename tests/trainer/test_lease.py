"""The syncer's lease: one holder for each term, taken over by each watcher's own clock, whatever the clocks of the others say."""

from __future__ import annotations

import threading

import pytest

from manifests.store import Store
from trainer.lease import Lease


class Clock:
    """A clock that stands until it's moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def lease(store: Store, holder: str, clock: Clock) -> Lease:
    return Lease(store, "runs/r/lease", holder=holder, lapse_s=10.0, clock=clock)


def test_the_role_is_taken_once_and_kept_while_its_holder_lives(store: Store) -> None:
    ours, theirs = Clock(), Clock(1e6)
    one, other = lease(store, "one", ours), lease(store, "other", theirs)
    assert one.take()
    assert not other.take()
    for _ in range(20):
        ours.now += 4.0
        theirs.now += 4.0
        assert one.renew()
        assert not other.take()
    assert other.another_lives
    assert other.holder() == "one"


def test_a_holder_that_is_silent_for_the_lapse_time_of_the_watchers_clock_is_replaced_and_stands_back(
    store: Store,
) -> None:
    ours, theirs = Clock(), Clock(-500.0)
    one, other = lease(store, "one", ours), lease(store, "other", theirs)
    assert one.take()
    assert not other.take()
    theirs.now += 9.9
    assert not other.take()
    theirs.now += 0.2
    assert other.take()
    ours.now += 5.0
    assert not one.renew()
    assert one.term is None
    assert other.holder() == "other"


def test_a_role_that_is_given_back_is_free_at_once(store: Store) -> None:
    one, other = lease(store, "one", Clock()), lease(store, "other", Clock())
    assert one.take()
    one.release()
    assert other.holder() is None
    assert other.take()
    assert other.term == 1


@pytest.mark.parametrize("attempt", range(5))
def test_of_many_who_race_one_has_the_term(store: Store, attempt: int) -> None:
    candidates = [lease(store, f"{attempt}-{n}", Clock()) for n in range(8)]
    threads = [threading.Thread(target=candidate.take) for candidate in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    terms = [candidate.term for candidate in candidates if candidate.term is not None]
    assert len(terms) == len(set(terms))
    assert terms.count(0) == 1
