"""`atoll watch`: a run as its store has it, from nothing but tables to a finished one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from manifests.errors import StoreUnreachable
from manifests.store import Store
from manifests.tables import append
from tools import watching
from tools.cli import _run
from tools.watching import Watcher, document, line, table
from trainer.config import RunConfig
from trainer.lease import Lease
from trainer.members import claim_incarnation, say_finished, say_left
from trainer.metrics import Metrics
from trainer.privacy import feedback_budget
from trainer.run import GLOBAL, Run, create_run


@pytest.fixture
def run(store: Store) -> Run:
    """A run of two islands that nobody has started."""
    return create_run(store, _config())


def _config(**options: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "run": "r", "tier_version": 1, "pool": "p", "token_dtype": "uint16", "vocab_size": 64, "num_islands": 2,
        "strategies": ("balanced", "conservative"), "steps": 64, "num_fragments": 2, "sync_every": 8, "quorum": 1,
    }  # fmt: skip
    return RunConfig(**(defaults | options))


def _checkpoint(run: Run, island: int, *, step: int, number: int = 1, **more: Any) -> None:
    mixture = {"strategy": "balanced", "weights": {"S": 0.2, "A": 0.4, "B": 0.3, "C": 0.1}}
    row = {
        "checkpoint": bytes([island + 1, number] * 8), "run": run.name, "island": island, "incarnation": 0, "round": number, "step": step,
        "tokens": 10, "tokens_s": 10, "tokens_a": 0, "tokens_b": 0, "tokens_c": 0, "clock": [0], "parent": None, "merged": [], "object": "o",
        "hash": "h", "size_bytes": 1, "stream": "{}", "mixture": json.dumps(mixture), "anchor": True, "loss": 3.5, "holdout_loss": None,
    }  # fmt: skip
    append(run.store, "checkpoints", [row | more])


def _event(run: Run, kind: str, *, island: int | None = None, **detail: Any) -> None:
    append(run.store, "events", [{"run": run.name, "kind": kind, "island": island, "detail": json.dumps(detail)}])


def _merge(run: Run, merge: int, islands: list[int], **more: Any) -> None:
    contributions = [{"island": island, "checkpoint": "00", "weight": 1.0} for island in islands]
    _event(run, "merge", merge=merge, contributions=contributions, **more)


def _metrics(run: Run, role: str, incarnation: int = 0, **options: Any) -> Metrics:
    folder = f"{run.folder}/metrics/{role}"
    return Metrics(run.store, folder, role=role, incarnation=incarnation, every_s=3600, **options)


def _rounds(metrics: Metrics, *, merge: int, step: int = 8, up: int = 1000) -> None:
    for n in range(step - 3, step + 1):
        metrics.note_step(n, loss=2.5, lr=1e-3, tokens=1000, seconds=0.5)
    metrics.note(
        "round", round=step // 4, step=step, mix={"S": 0.7, "A": 0.3}, strategy="adaptive", backlog=0, bytes_up=up, bytes_down=2 * up,
        merge=merge, checkpoint=True,
    )  # fmt: skip


def _shown(view: watching.View, now: float | None = None, error: Any = None) -> str:
    out = Console(file=io.StringIO(), width=200)
    out.print(table(view, now if now is not None else time.time(), error))
    return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_run_that_nobody_has_started_shows_what_is_expected(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["watch", "r", "--store", run.store.uri, "--once"]) == 0
    shown = capsys.readouterr()
    assert "run r: 0 merges" in shown.out
    assert shown.out.count("expected") == 2
    assert "0/64" in shown.out
    assert "nobody holds the role" in shown.out
    assert "sent" not in shown.out
    assert "ε" not in shown.out


def test_unknown_run_is_a_line_that_names_the_known_ones(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["watch", "other", "--store", run.store.uri, "--once"]) == 2
    assert "there are: r" in capsys.readouterr().err


def test_tables_alone_are_enough(run: Run) -> None:
    _event(run, "island_joined", island=0)
    _checkpoint(run, 0, step=12)
    _checkpoint(run, GLOBAL, step=12, holdout_loss=3.25)
    _merge(run, 1, [0])
    _merge(run, 2, [0, 1])
    view = Watcher(run.store, "r").look()
    first, second = view.islands
    assert (first.state, first.step, first.loss, first.strategy, first.mix["A"]) == (
        "training",
        12,
        3.5,
        "balanced",
        0.4,
    )
    assert first.incarnations == 1
    assert (second.state, second.step, second.strategy) == ("expected", 0, "conservative")
    assert first.merges_behind is None
    assert (view.merges, view.holdout_loss, view.participation) == (2, 3.25, 0.75)
    assert view.merges_per_minute is not None
    assert "global holdout loss 3.250 (" in _shown(view)


def test_metrics_tell_more_than_the_tables(run: Run) -> None:
    claim_incarnation(run, 0)
    _checkpoint(run, 0, step=4)
    _merge(run, 3, [0], live=4, dropped=[{"island": 1, "round": 2, "why": "stale"}])
    island, syncer = _metrics(run, "island-0000"), _metrics(run, "syncer", 1)
    island.note("state", state="joined", step=0)
    _rounds(island, merge=3)
    syncer.note("lease", holder="island 0", term=1)
    syncer.note("merge", merge=4, fragment=0, version=2, islands=[0, 1], live=2, quarantined=[1], seconds=0.1)
    syncer.note("checkpoint", merge=4, holdout_loss=2.75)
    island.close()
    syncer.close()
    view = Watcher(run.store, "r").look()
    first = view.islands[0]
    assert (first.state, first.step, first.loss, first.tokens_per_s) == ("training", 8, 2.5, 2000)
    assert (first.strategy, first.mix, first.merges_behind) == ("adaptive", {"S": 0.7, "A": 0.3}, 1)
    assert (first.bytes_up, first.bytes_down, first.incarnations) == (1000, 2000, 1)
    assert (view.merges, view.kept_out, view.quarantined, view.holdout_loss) == (4, 1, [1], 2.75)
    assert view.participation == pytest.approx((1 / 4 + 2 / 2) / 2)
    shown = _shown(view)
    for text in (
        "mix S/A/B/C",
        "0.70/0.30/0.00/0.00",
        "2,000",
        "1 kB",
        "2 kB",
        "in quarantine: island 1",
        "62% of the live islands",
    ):
        assert text in shown, text
    assert "island 0 step 8/64 loss 2.500" in line(view, time.time())


def test_link_has_a_rate_once_two_rounds_are_known(run: Run) -> None:
    times = iter([100.0, 110.0])
    metrics = _metrics(run, "island-0000", clock=lambda: next(times, 110.0))
    for up in (1_000_000, 3_000_000):
        metrics.note("round", bytes_up=up, bytes_down=2 * up, merge=1)
    metrics.close()
    first = Watcher(run.store, "r", clock=lambda: 111.0).look().islands[0]
    assert (first.up_bps, first.down_bps) == (200_000, 400_000)
    assert "3 MB, 200 kB/s" in _shown(Watcher(run.store, "r").look())


def test_later_looks_read_on_and_a_new_incarnation_takes_the_place_of_the_old_one(run: Run) -> None:
    watcher = Watcher(run.store, "r", catalog_every_s=0.0)
    old = _metrics(run, "island-0001")
    _rounds(old, merge=2, step=32)
    old.close()
    assert watcher.look().islands[1].step == 32
    new = _metrics(run, "island-0001", 1)
    new.note("state", state="joined")
    _rounds(new, merge=3, step=28)
    new.close()
    view = watcher.look()
    assert (view.islands[1].step, view.islands[1].incarnations) == (28, 2)
    _merge(run, 5, [1])
    _event(run, "refused", island=0, why="damaged")
    view = watcher.look()
    assert (view.islands[1].merges_behind, view.refused) == (2, 1)


def test_states_of_islands_are_told_apart(store: Store) -> None:
    run = create_run(store, _config(num_islands=8, strategies=("balanced",)))
    now = time.time()
    silent = _metrics(run, "island-0000", clock=lambda: now - 3600)
    _rounds(silent, merge=0)
    silent.close()
    waiting = _metrics(run, "island-0001")
    _rounds(waiting, merge=0)
    waiting.note("state", state="waiting")
    waiting.close()
    slow = _metrics(run, "island-0002", clock=lambda: now - 3600)
    slow.note_step(1, loss=2.0, lr=0.1, tokens=1, seconds=900.0)
    slow.close()
    _checkpoint(run, 3, step=4)
    _event(run, "island_died", island=3, how="killed by SIGKILL")
    for island in (4, 5, 6):
        claim_incarnation(run, island)
    say_finished(run, 4, step=64)
    say_left(run, 5)
    claim_incarnation(run, 9)  # it wasn't planned for
    view = Watcher(store, "r").look()
    assert {island.island: island.state for island in view.islands} == {
        0: "silent", 1: "waiting", 2: "training", 3: "died", 4: "finished", 5: "left", 6: "starting", 7: "expected", 9: "starting",
    }  # fmt: skip


def test_loss_that_is_not_finite_is_shown_as_such(run: Run) -> None:
    metrics = _metrics(run, "island-0000")
    metrics.note_step(1, loss=float("nan"), lr=0.1, tokens=1, seconds=0.1)
    metrics.close()
    view = Watcher(run.store, "r").look()
    assert " nan " in _shown(view)
    assert json.loads(json.dumps(document(view, time.time()), allow_nan=False))["islands"][0]["loss"] is None


def test_lines_without_the_expected_fields_do_no_harm(run: Run) -> None:
    island, syncer, other = (_metrics(run, role) for role in ("island-0000", "syncer", "gardener"))
    for metrics in (island, syncer, other):
        for kind in ("steps", "round", "state", "merge", "checkpoint", "lease", "dropped", "novelty"):
            metrics.note(kind)
        metrics.close()
    run.store.put_new(f"{run.folder}/metrics/syncer/000-000001.jsonl", b"torn")
    view = Watcher(run.store, "r").look()
    assert view.unreadable == 1
    assert "metrics: 1 lines can't be read" in _shown(view)


def test_mix_of_groups_is_shown_by_name(store: Store) -> None:
    run = create_run(store, _config(group_by="generator", group_weights=({"faq": 0.6, "table": 0.4},)))
    metrics = _metrics(run, "island-0000")
    metrics.note("round", mix={"faq": 0.6, "table": 0.4}, strategy="by generator")
    metrics.close()
    assert "faq 0.60 table 0.40" in _shown(Watcher(store, "r").look())


def test_names_do_not_steer_the_terminal(run: Run) -> None:
    assert Lease(run.store, run.lease_folder, holder="\x1b[2J[red]island 7", lapse_s=1).take()
    shown = _shown(Watcher(run.store, "r").look())
    assert "\x1b[2J" not in shown
    assert "[red]island 7 (seen" in shown


def test_finished_run_says_so_and_ends(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for island in range(2):
        claim_incarnation(run, island)
        say_finished(run, island, step=64)
        _checkpoint(run, island, step=64)
    _merge(run, 1, [0, 1], live=2)
    _event(run, "finished", holdout_loss=1.5, merges=1)
    for more in ([], ["--once"]):
        assert _run(["watch", "r", "--store", run.store.uri, *more]) == 0
        shown = capsys.readouterr().out
        assert "run r has finished: 1 merges, global holdout loss 1.500" in shown
        assert "64/64" in shown
        assert "nobody" not in shown


def test_privacy_budget_is_shown_with_what_each_island_has_spent(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(store, _config(feedback_epsilon=4.0))
    assert (run.config.num_messages, run.config.round_steps) == (8, 4)
    budget = feedback_budget(run.config)
    assert budget is not None
    _checkpoint(run, 0, step=20, number=5)  # two messages, and half a cycle
    view = Watcher(store, "r").look()
    assert [island.epsilon_spent for island in view.islands] == [budget.spent(2), 0]
    shown = _shown(view)
    for text in ("ε spent", f"{budget.spent(2):.3g}/4", "0/4", "each island's may cost ε = 4 at δ = 1e-05"):
        assert text in shown, text
    assert f"ε {budget.spent(2):.3g}/4" in line(view, time.time())
    assert _run(["watch", "r", "--store", store.uri, "--once", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["feedback_epsilon"], found["feedback_delta"]) == (4.0, 1e-5)
    assert found["islands"][0]["epsilon_spent"] == pytest.approx(budget.spent(2))
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # as where it isn't installed
    view = Watcher(store, "r").look()
    assert view.islands[0].epsilon_spent is None
    assert "?/4" in _shown(view)
    assert "pip install 'atoll[privacy]'" in _shown(view)


def test_json_is_one_document(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _checkpoint(run, 0, step=12)
    _merge(run, 1, [0])
    assert Lease(run.store, run.lease_folder, holder="syncer on here", lapse_s=1).take()
    assert _run(["watch", "r", "--store", run.store.uri, "--once", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["has_finished"], found["merges"], found["syncer"]) == ("r", False, 1, "syncer on here")
    assert found["merged_s_ago"] < 60
    assert [island["step"] for island in found["islands"]] == [12, 0]
    assert found["islands"][1]["seen_s_ago"] is None
    assert _run(["watch", "r", "--store", run.store.uri, "--once", "--format", "csv"]) == 2


def test_json_without_once_is_a_document_for_each_look(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _event(run, "finished", holdout_loss=1.5, merges=1)
    assert _run(["watch", "r", "--store", run.store.uri, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["has_finished"] is True


def test_table_on_a_terminal_moves_until_the_run_has_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=io.StringIO(), width=160, force_terminal=True)
    looks = 0
    look = Watcher.look

    def counted(self: Watcher) -> watching.View:
        nonlocal looks
        looks += 1
        if looks == 3:
            _event(run, "finished", holdout_loss=1.5, merges=0)
            self._asked_at = None  # the tables are asked at once
        return look(self)

    monkeypatch.setattr(Watcher, "look", counted)
    watching.watch(run.store, "r", every_s=0.05, once=False, out=out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert looks == 3
    assert shown.index("run r: 0 merges") < shown.index("run r has finished")


def test_store_that_stays_away_is_said_and_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = Watcher.look

    def failing(self: Watcher) -> watching.View:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise StoreUnreachable("nobody answers")
        if looks == 3:
            _event(run, "finished", holdout_loss=1.5, merges=0)
            self._asked_at = None
        return look(self)

    monkeypatch.setattr(Watcher, "look", failing)
    out = Console(file=io.StringIO(), width=160, force_terminal=True)
    watching.watch(run.store, "r", every_s=0.5, once=False, out=out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("what is shown is old: nobody answers") < shown.index("run r has finished")


def test_store_that_is_away_from_the_start_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Watcher) -> watching.View:
        raise StoreUnreachable("nobody answers")

    monkeypatch.setattr(Watcher, "look", away)
    for more in ([], ["--once"]):
        assert _run(["watch", "r", "--store", run.store.uri, *more]) == 1


def test_interrupt_ends_the_view_without_an_error(run: Run) -> None:
    command = [sys.executable, "-m", "tools.cli", "watch", "r", "--store", run.store.uri, "--every", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    assert "run r: 0 merges | island 0 expected step 0/64" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert (process.returncode, rest, err) == (0, "", "")
