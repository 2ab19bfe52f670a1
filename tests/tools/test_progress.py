"""Progress where there is no terminal: a line now and then, with rate and time left."""

from __future__ import annotations

import pytest

from tools import progress


def test_lines_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    report = progress._LineReport()
    # Begins where an earlier attempt left off; that isn't this one's rate.
    for seconds, done in ((0, 5000), (5, 5500), (10, 6000), (12, 6200), (40, 10_000)):
        now[0] = seconds
        report("ingest", done, 10_000)
    report("walk", 1, None)
    now[0] = 51.0
    report("walk", 12, None)
    assert capsys.readouterr().err.splitlines() == [
        "  ingest: 6,000 of 10,000, 100/s, 0:00:40 left",
        "  ingest: 10,000 of 10,000, 125/s",
        "  walk: 12, 1/s",
    ]
