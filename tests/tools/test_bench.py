"""The benchmarks' frame: medians, spread, interleaving, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import frame
from tools.bench.frame import Benchmark, Figure, interleave, run_benchmark

BENCHMARK = Benchmark(
    name="sample",
    question="How long is it?",
    measure=lambda quick: {"length": Figure(values=[3.0, 1.0, 2.0] if not quick else [7.0], unit="m", meaning="of it")},
    notes=("Mind the gap.",),
)


def _run(*options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["sample", *options])
    run_benchmark(BENCHMARK)


def test_table_shows_median_spread_and_what_is_needed_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch=monkeypatch)
    page = capsys.readouterr().out
    assert "| `length` | 2 | 1 – 3 | 3 | m | of it |" in page
    for needed in ("python -m tools.bench.sample", "cores", "torch", "Mind the gap."):
        assert needed in page


def test_json_is_the_last_line_of_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _run("--quick", "--json", monkeypatch=monkeypatch)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"length": 7.0}


def test_result_is_written_where_it_is_committed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    _run("--out", monkeypatch=monkeypatch)
    assert "`length`" in (tmp_path / "sample.md").read_text()


def test_arms_take_turns() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str):  # type: ignore[no-untyped-def]
        return lambda seed: calls.append((name, seed)) or float(seed)

    values = interleave({"a": arm("a"), "b": arm("b")}, repetitions=(1, 2), report=False)
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert values == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
