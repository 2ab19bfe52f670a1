"""Ranks and workers: together they read the island's one order, whatever their number."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import create_store
from tiny import fabricate, start_run
from trainer.feed import open_stream
from trainer.loader import IslandBatches, data_loader
from trainer.mixer import MixedStream
from trainer.run import load_run

WEIGHTS = dict(zip(TIERS, (0.4, 0.3, 0.2, 0.1), strict=True))
BATCH, STEPS = 4, 9


def opened(store: Store, state: str | None = None) -> MixedStream:
    """Opens the stream, in whatever process."""
    stream = open_stream(load_run(store, "r"), Catalog(store), island=0, weights=WEIGHTS)
    if state is not None:
        stream.load_state(state)
    return stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader") / "store"
    store = create_store(str(folder))
    fabricate(store)
    start_run(store, "r", num_islands=1)
    return folder


def opened_in(folder: Path, state: str | None = None) -> MixedStream:
    """As a worker opens it: it gets the folder's name, no open store."""
    return opened(Store(str(folder)), state)


def steps(
    folder: Path, *, ranks: int, workers: int, state: str | None = None, count: int = STEPS
) -> list[list[list[int]]]:
    """Tokens of each step's sequences, put together from the ranks."""
    parts = []
    for rank in range(ranks):
        batches = IslandBatches(partial(opened_in, folder, state), batch_size=BATCH, rank=rank, num_ranks=ranks)
        parts.append([batch.tokens.tolist() for batch in islice(data_loader(batches, num_workers=workers), count)])
    return [[sequence for part in step for sequence in part] for step in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    stream = opened_in(folder)
    found = [[stream.next_sequence().tokens.tolist() for _ in range(BATCH)] for _ in range(STEPS)]
    stream.close()
    return found


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (4, 0), (1, 3), (2, 1)])
def test_the_order_does_not_depend_on_ranks_and_workers(
    folder: Path, expected: list[list[list[int]]], ranks: int, workers: int
) -> None:
    assert steps(folder, ranks=ranks, workers=workers) == expected


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (4, 0)])
def test_a_batchs_state_resumes_at_the_next_step_with_other_ranks_and_workers(
    folder: Path, expected: list[list[list[int]]], ranks: int, workers: int
) -> None:
    batches = IslandBatches(partial(opened_in, folder), batch_size=BATCH, rank=1, num_ranks=2)
    last = list(islice(data_loader(batches, num_workers=2), 4))[-1]
    assert last.step == 3
    assert steps(folder, ranks=ranks, workers=workers, state=last.state, count=5) == expected[4:]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_ranks": 3}, "multiple of the 3 ranks"), ({"rank": 2, "num_ranks": 2}, "no rank 2"), ({"batch_size": 0}, "multiple")],
)  # fmt: skip
def test_parts_that_there_are_not_are_refused(folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        IslandBatches(partial(opened_in, folder), **({"batch_size": BATCH} | options))
