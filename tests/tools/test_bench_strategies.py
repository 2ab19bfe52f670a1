"""The strategies benchmark's own arithmetic, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tools.bench.strategies import FULL, POISONED, Results, _recovery, _tokens_to
from tools.bench.strategies_arms import Point, mean_weights

COURSE = [Point(round=2 * n, tokens=100 * n, loss=loss) for n, loss in enumerate((5.0, 4.0, 4.4, 3.0), start=1)]


@pytest.mark.parametrize(
    ("loss", "tokens"), [(4.5, 150), (4.0, 200), (4.2, 180), (3.7, 350), (3.0, 400), (2.9, math.inf), (5.5, 100)]
)
def test_tokens_to_a_loss_are_those_at_which_it_is_first_reached(loss: float, tokens: float) -> None:
    assert _tokens_to(COURSE, loss) == pytest.approx(tokens)


def _mixtures(folder: Path, rows: list[tuple[int, int, float]]) -> None:
    folder.mkdir(parents=True)
    columns = zip(*rows, strict=True)
    table = dict(zip(("island", "round", "weight_s"), map(list, columns), strict=True))
    pq.write_table(pa.table(table), folder / "mixtures.parquet")


def test_an_island_keeps_its_mix_until_the_next(tmp_path: Path) -> None:
    _mixtures(tmp_path / "t", [(0, 0, 0.2), (1, 0, 0.4), (0, 4, 0.6), (1, 6, 0.8)])
    assert mean_weights(tmp_path / "t", "S") == pytest.approx({0: 0.3, 4: 0.5, 6: 0.7})


def test_a_run_has_recovered_once_its_loss_stays_below_what_it_was_and_its_mix_has_half_of_it(tmp_path: Path) -> None:
    results = Results(tmp_path, FULL)
    half, end = 30, 60
    for seed in FULL.seeds:
        # Until 36 above 4.0, then below; the last seed is above for good.
        after = {32: 4.5, 34: 3.9, 36: 4.1}
        course = [
            Point(round=round_, tokens=round_, loss=4.0 if round_ <= half else after.get(round_, 3.5))
            for round_ in range(2, end + 1, 2)
        ]
        if seed == FULL.seeds[-1]:
            course[-1] = Point(round=end, tokens=end, loss=4.2)
        results.keep(POISONED, seed, course)
        _mixtures(results.out(POISONED, seed), [(0, 0, 0.2), (0, 28, 0.6), (0, 34, 0.4), (0, 40, 0.3), (0, 50, 0.1)])
    figures = _recovery(results)
    assert figures["recovery_rounds"].values == [10.0, 10.0, math.inf]
    assert figures["recovery_rounds_mix"].values == [10.0, 10.0, 10.0]


def test_what_was_run_with_other_settings_is_run_again(tmp_path: Path) -> None:
    from dataclasses import replace

    results = Results(tmp_path, FULL)
    results.keep(POISONED, 0, COURSE)
    assert results.course(POISONED, 0) == COURSE
    assert results.course(replace(POISONED, is_lossy=True), 0) is None
    assert Results(tmp_path, replace(FULL, steps=96)).course(POISONED, 0) is None
