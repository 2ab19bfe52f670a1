"""A store that can't be reached for a while: islands go on and the syncer stands by again, nothing is lost, and what lasts too long is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import StoreUnreachable
from manifests.store import Store
from tiny import silent, start_run
from trainer.island import Island
from trainer.roles import run_syncer
from trainer.wire import CorruptObject, reread


class Outage:
    """While it lasts, nothing of the store can be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lasts = False
        self.failures = 0
        for name in ("get", "put_new", "put_content", "exists", "list", "delete"):
            monkeypatch.setattr(Store, name, self._failing(getattr(Store, name)))

    def end(self) -> None:
        """The store is there again."""
        self.lasts = False

    def _failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if self.lasts:
                self.failures += 1
                raise StoreUnreachable("it's away")
            return method(*arguments, **more)

        return call


def test_outage_ends_neither_island_nor_syncer(tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.errands._PAUSES_S", (0.02, 0.05))
    run = start_run(tiny_store, "r", steps=12)
    outage = Outage(monkeypatch)
    steps: list[int] = []

    def emit(status: dict[str, Any]) -> None:
        if status["state"] == "training":
            steps.append(status["step"])
            if len(steps) == 6:
                outage.lasts = True
                threading.Timer(1.0, outage.end).start()
            time.sleep(0.05)

    islands = [Island(run, number, emit=emit) for number in range(2)]
    said: list[str] = []
    threads = [threading.Thread(target=island.train) for island in islands]
    syncer = threading.Thread(
        target=run_syncer, args=(tiny_store, "r"), kwargs={"emit": lambda s: said.append(s["state"])}
    )
    for thread in [syncer, *threads]:
        thread.start()
    for thread in [*threads, syncer]:
        thread.join(60)
    assert outage.failures > 0
    assert "cut off" in said
    assert said[-1] == "finished"
    rows = Catalog(tiny_store).rows(
        "SELECT island, incarnation, max(step) AS step FROM checkpoints WHERE run = 'r' AND island >= 0 GROUP BY ALL ORDER BY ALL"
    )
    assert rows == [{"island": 0, "incarnation": 0, "step": 12}, {"island": 1, "incarnation": 0, "step": 12}]


def test_outage_that_lasts_too_long_ends_the_island(tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.errands._PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr("trainer.errands.PATIENCE_S", 0.05)
    run = start_run(tiny_store, "r")
    outage = Outage(monkeypatch)
    island = Island(run, 0, emit=silent)
    outage.lasts = True
    with pytest.raises(StoreUnreachable):
        island.train()


def test_what_comes_damaged_is_read_again_but_not_for_ever() -> None:
    tries: list[int] = []

    @reread
    def read(good_at: int) -> str:
        tries.append(1)
        if len(tries) < good_at:
            raise CorruptObject("damaged")
        return "good"

    assert read(3) == "good"
    tries.clear()
    with pytest.raises(CorruptObject, match="damaged"):
        read(100)
    assert len(tries) == 4
