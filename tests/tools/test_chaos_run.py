"""The harness itself on a short real run: processes killed and cut off, and every invariant holds; and what its command says to a user's mistake."""

from __future__ import annotations

import pytest

from tools.chaos.harness import Plan, run_chaos
from tools.chaos.report import figures_of
from tools.cli import _run


@pytest.mark.timeout(240)  # half a minute on two quiet cores
def test_killed_and_cut_off_processes_leave_an_exact_ledger_and_one_global_state() -> None:
    plan = Plan(
        minutes=0.1,
        faults_per_hour=1_800,
        islands=2,
        kinds=("kill", "partition", "syncer"),
        step_s=0.05,
        sync_every=16,
        num_fragments=2,
        num_documents=60,
    )
    result = run_chaos(plan)
    assert [finding.what for finding in result.findings] == []
    kinds = [one.fault.kind for one in result.struck.struck]
    assert sorted(kinds) == ["kill", "partition", "syncer"]
    killed = next(one for one in result.struck.struck if one.fault.kind == "kill")
    lives = result.struck.lives[killed.target]
    assert len(lives) > 1
    assert lives[0].how == "killed"
    assert result.facts.tokens == plan.islands * plan.steps * plan.batch_size * plan.seq_len
    assert len(result.struck.leaders) > len(result.healthy.leaders)
    figures = figures_of(result)
    assert figures["faults"].median == 3
    assert figures["ledger_errors"].median == figures["broken_invariants"].median == 0
    assert 0 < figures["goodput"].median < 1.5
    assert figures["rejoin_s_p50"].median > 0


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["--kinds", "flood"], "there are kill"),
        (["--minutes", "0"], "--minutes"),
        (["--islands", "0"], "--islands"),
        (["--faults-per-hour", "-1"], "faults per hour"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], mend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["chaos", *arguments]) == 2
    shown = capsys.readouterr().err
    assert len(shown.strip().splitlines()) == 1
    assert mend in shown


def test_missing_seaweedfs_is_named_with_its_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert _run(["chaos", "--minutes", "1"]) == 1
    assert "pip install 'atoll[test]'" in capsys.readouterr().err
