"""What may be done about harmful documents: each remedy's branch starts where it says, a replay comes out to the bit, and nothing unsound is started from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.catalog import Catalog
from manifests.errors import AtollError, UserError
from manifests.flags import set_flags
from manifests.store import Store
from manifests.tables import create_store
from tiny import copy_store, doc_id, fabricate, silent, start_run
from tools.bench.turns import train_in_turn
from tools.provenance import check_ledger
from trainer.damping import Directions, find_directions, search
from trainer.island import Island
from trainer.outlook import fit_trend, outlook_table
from trainer.remedies import apply_rollback, find_damping, holdout_measure, state_at
from trainer.rollback import Plan, plan_rollback
from trainer.run import Run, load_run, read_excluded
from trainer.syncer import Syncer
from trainer.tape import first_state
from trainer.undo import undo_rollback
from trainer.wire import unpack

STEPS, STOPPED = 12, 8
NUM_DOCUMENTS = 96


def _train_some(run: Run, rounds: int) -> None:
    """As `train_in_turn`, but a kill comes after so many rounds."""
    islands = [Island(run, number, emit=silent, in_background=False) for number in range(run.config.num_islands)]
    syncer = Syncer(run, emit=silent, in_background=False)
    for _ in range(rounds):
        for island in islands:
            island.train_round()
        for island in islands:
            island.receive_now()
        syncer.sweep()
    for island in islands:
        island.close()
    syncer.close()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of two islands that was killed after two thirds of its rounds."""
    store = create_store(str(tmp_path_factory.mktemp("stopped") / "store"))
    fabricate(store)
    _train_some(start_run(store, "r", steps=STEPS), STOPPED)
    return store


@pytest.fixture
def store(stopped: Store, tmp_path: Path) -> Store:
    """A copy of it."""
    return copy_store(stopped, tmp_path / "copy")


def _late(store: Store, *, after: int) -> int:
    """A document that is first read after a step, as soon as possible."""
    number_of = {doc_id(n): n for n in range(NUM_DOCUMENTS)}
    rows = Catalog(store).rows("SELECT doc_id, min(step) AS step FROM consumption WHERE run = 'r' GROUP BY doc_id")
    return min((row["step"], number_of[row["doc_id"]]) for row in rows if row["step"] > after)[1]


def _plan(store: Store, *, after: int = 5) -> Plan:
    return plan_rollback(store, "r", f"corpus = 'c{_late(store, after=after)}'")


def _parameters(run: Run) -> dict[str, torch.Tensor]:
    merge = max(int(info.path[-20:-12]) for info in run.store.list(f"{run.folder}/merges"))
    return state_at(run, first_state(run)[1], merge).parameters()


def _island_tensors(run: Run, island: int) -> dict[str, torch.Tensor]:
    """Parameters and moments in an island's last checkpoint."""
    sql = "SELECT object FROM checkpoints WHERE run = ? AND island = ? AND object <> '' ORDER BY round DESC LIMIT 1"
    path = Catalog(run.store).rows(sql, [run.name, island])[0]["object"]
    return unpack(run.store.get(path), name=path)[0]


@pytest.mark.parametrize("after", [3, 5])
def test_a_replay_is_to_the_bit_a_run_that_had_skipped_the_documents(store: Store, tmp_path: Path, after: int) -> None:
    plan = _plan(store, after=after)
    assert plan.is_exact
    assert 0 < plan.islands[0].restart_step < STOPPED
    branch = apply_rollback(store, plan)
    train_in_turn(branch)
    never = create_store(str(tmp_path / "never"))
    fabricate(never)
    set_flags(never, plan.doc_ids, flagged=True, predicate="", reason="a test")
    reference = start_run(never, "r", steps=STEPS)
    train_in_turn(reference)
    ours, theirs = _parameters(branch), _parameters(reference)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for island in range(2):
        own, other = _island_tensors(branch, island), _island_tensors(reference, island)
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in other)
    poisoned = load_run(copy_store(store, tmp_path / "again"), "r")
    assert any(not torch.equal(_parameters(poisoned)[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("remedy", ["continue", "damp", "restore"])
def test_a_branch_trains_to_its_end_without_the_documents_and_its_ledger_is_exact(store: Store, remedy: str) -> None:
    plan = _plan(store)
    branch = apply_rollback(store, plan, remedy)
    assert branch.branch is not None
    assert branch.branch.plan == remedy
    assert read_excluded(branch) == set(plan.doc_ids)
    train_in_turn(branch)
    catalog = Catalog(store)
    read = catalog.rows("SELECT DISTINCT doc_id FROM consumption WHERE run = ?", [branch.name])
    assert not {row["doc_id"] for row in read} & set(plan.doc_ids)
    check_ledger(catalog, branch.name)
    steps = catalog.rows("SELECT min(step) AS low, max(step) AS high FROM consumption WHERE run = ?", [branch.name])
    if remedy == "restore":
        redone = max(i.redo_steps for i in plan.islands)
        assert branch.config.steps == STEPS - redone
        assert steps == [{"low": plan.islands[0].restart_step + 1, "high": STEPS - redone}]
    else:
        assert steps == [{"low": STOPPED + 1, "high": STEPS}]
        assert branch.branch.merge == STOPPED


def test_continue_starts_from_the_newest_global_state(store: Store) -> None:
    branch = apply_rollback(store, _plan(store), "continue")
    run = load_run(store, "r")
    before, after = _parameters(run), state_at(branch, first_state(branch)[1], STOPPED).parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_damping_is_never_worse_on_the_holdout_and_its_branch_starts_from_it(store: Store) -> None:
    plan, run, catalog = _plan(store), load_run(store, "r"), Catalog(store)
    damping, state = find_damping(run, catalog, first_state(run)[1], plan)
    assert damping.after <= damping.before
    loss_of = holdout_measure(run, catalog)
    assert loss_of(state.parameters()) == damping.after
    branch = apply_rollback(store, plan, "damp")
    begun = state_at(branch, first_state(branch)[1], plan.newest.merge)
    assert loss_of(begun.parameters()) == damping.after


def test_a_line_search_finds_how_far_to_go_and_stays_where_all_directions_rise(store: Store) -> None:
    run, plan = load_run(store, "r"), _plan(store)
    directions = find_directions(run, first_state(run)[1], end=STOPPED, contributions=plan.touched.contributions)
    now = directions.state.parameters()
    goal = {name: value - 0.45 * directions.steps["remade"][name] for name, value in now.items()}

    def distance(parameters: dict[str, torch.Tensor]) -> float:
        return sum(float(((parameters[name] - goal[name]) ** 2).sum()) for name in goal)

    found = search(directions, distance)
    assert (found.direction, round(found.factor, 3)) == ("remade", 0.45)
    nothing = search(directions, lambda p: sum(float(((p[name] - now[name]) ** 2).sum()) for name in now))
    assert (nothing.direction, nothing.factor, nothing.before) == ("none", 0.0, nothing.after)


def test_remade_without_its_only_suspects_is_the_state_before_them(store: Store) -> None:
    """By hand: where all islands are suspects in every merge, nothing is left to merge."""
    run, plan = load_run(store, "r"), _plan(store)
    everyone = [plan.touched.contributions[0]]
    one = everyone[0]
    all_of_them = [
        type(one)(merge=m["merge"], island=m["island"], share=1.0)
        for m in Catalog(store).rows("SELECT merge, island FROM merges WHERE run = 'r' AND merge > 4")
    ]
    directions: Directions = find_directions(run, first_state(run)[1], end=STOPPED, contributions=all_of_them)
    now, before = directions.state.parameters(), state_at(run, first_state(run)[1], 4).parameters()
    for name, step in directions.steps["remade"].items():
        assert torch.equal(now[name] - before[name], step)


def test_the_plan_says_what_was_touched(store: Store) -> None:
    plan, catalog = _plan(store), Catalog(store)
    rows = catalog.rows(
        "SELECT island, step, tokens FROM consumption WHERE run = 'r' AND doc_id IN (SELECT unnest(?::BLOB[]))",
        [plan.doc_ids],
    )
    assert plan.touched.tokens == sum(row["tokens"] for row in rows)
    assert plan.touched.steps == len({(row["island"], row["step"]) for row in rows})
    assert plan.touched.share == plan.touched.tokens / (2 * STOPPED * 2 * 16)
    # P = 2 and a step is a round: an outer gradient is learned from the two steps before it; the first of a fragment from its first.
    wanted = {(m, row["island"]) for row in rows for m in (row["step"], row["step"] + 1) if m <= STOPPED}
    assert {(c.merge, c.island) for c in plan.touched.contributions} == wanted


def test_the_outlook_has_a_row_for_each_plan_with_its_cost(store: Store) -> None:
    plan = _plan(store)
    rows = {row["plan"]: row for row in outlook_table(store, plan, rounds=4, measure=None).to_pylist()}
    assert list(rows) == ["continue", "damp", "replay", "restore"]
    assert [rows[name]["redo_steps"] for name in rows] == [0, 0, sum(i.redo_steps for i in plan.islands), 0]
    assert [rows[name]["how"] for name in ("continue", "damp", "restore")] == ["measured"] * 3
    assert rows["replay"]["how"] in ("predicted", "unknown")
    assert rows["damp"]["holdout_now"] <= rows["continue"]["holdout_now"]
    assert rows["replay"]["store_bytes"] > rows["continue"]["store_bytes"] > 0
    unmeasured = outlook_table(store, plan, rounds=4, measure=False).to_pylist()
    assert "measured" not in {row["how"] for row in unmeasured}


def test_a_trend_is_a_line_over_the_logarithm_of_the_tokens() -> None:
    trend = fit_trend([(10.0, 5.0), (100.0, 4.0), (1000.0, 3.0)])
    assert trend is not None
    assert trend.at(10_000) == pytest.approx(2.0)
    assert fit_trend([(10.0, 5.0), (100.0, 4.0)]) is None


# What is refused.


def test_continuing_a_run_that_is_over_makes_no_sense_but_damping_it_does(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "over"))
    fabricate(store)
    train_in_turn(start_run(store, "r", steps=4))
    plan = _plan(store, after=2)
    with pytest.raises(UserError, match="nothing left to continue"):
        apply_rollback(store, plan, "continue")
    for remedy in ("damp", "restore"):
        train_in_turn(apply_rollback(store, plan, remedy))


def test_an_unknown_remedy_is_refused(store: Store) -> None:
    with pytest.raises(UserError, match="continue, damp, replay, restore"):
        apply_rollback(store, _plan(store), "pray")


@pytest.mark.parametrize("remedy", ["damp"])
def test_two_processes_that_apply_the_same_plan_end_with_the_same_branch(store: Store, remedy: str) -> None:
    script = (
        "import sys; from manifests.tables import open_store; from trainer.rollback import plan_rollback; from trainer.remedies import apply_rollback; "
        "s = open_store(sys.argv[1]); print(apply_rollback(s, plan_rollback(s, 'r', sys.argv[2]), sys.argv[3]))"
    )
    arguments = [sys.executable, "-c", script, str(store.root), _plan(store).predicate, remedy]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}) for _ in range(2)]  # fmt: skip
    said = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert len(Catalog(store).rows("SELECT * FROM runs WHERE parent_run = 'r'")) == 1


def test_a_plan_may_be_made_while_the_run_goes_on_and_its_branch_keeps_to_the_plans_cut(store: Store) -> None:
    plan = _plan(store)
    train_in_turn(load_run(store, "r"))
    branch = apply_rollback(store, plan, "continue")
    assert branch.branch is not None
    assert branch.branch.merge == STOPPED
    train_in_turn(branch)
    check_ledger(Catalog(store), branch.name)


def _object_of(store: Store, plan: Plan) -> Path:
    checkpoint = plan.newest.starts[0].checkpoint
    return store.root / Catalog(store).rows("SELECT object FROM checkpoints WHERE checkpoint = ?", [checkpoint])[0]["object"]  # fmt: skip


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_flip, "is not what was committed"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "is not what was committed"),
        (lambda path: path.write_bytes(b""), "is not what was committed"),
        (lambda path: path.unlink(), "is gone"),
        (lambda path: path.write_bytes(next(path.parent.parent.glob("0001/check*")).read_bytes()), "not what was"),
    ],
)
def test_a_checkpoint_that_is_not_sound_is_named_with_the_mend(
    store: Store, damage: Callable[[Path], Any], told: str
) -> None:
    plan = _plan(store)
    path = _object_of(store, plan)
    damage(path)
    with pytest.raises(AtollError, match=f"{path.name}.*{told}.*restore it"):
        apply_rollback(store, plan, "continue")
    assert len(Catalog(store).rows("SELECT * FROM runs")) == 1
    if not path.exists():
        apply_rollback(store, _plan(store), "continue")  # planned again, from the one before


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("snapshots/*.json", "continue"),
        ("snapshots/*/*-outer-*", "continue"),
        ("outer/0000/*", "damp"),
        ("snapshots/*/*", "replay"),
    ],
)
def test_a_damaged_tape_is_an_error_that_names_the_run_and_makes_no_branch(
    store: Store, pattern: str, remedy: str
) -> None:
    plan = _plan(store)
    kept = {path: path.read_bytes() for path in (store.root / "runs" / "r").glob(pattern)}
    damages: list[Callable[[Path], Any]] = [_flip, lambda path: path.write_bytes(path.read_bytes()[:40]), Path.unlink]
    for damage in damages:
        for path, data in kept.items():
            path.write_bytes(data)
            damage(path)
        with pytest.raises(AtollError, match=r"runs/r/|run r"):
            apply_rollback(store, plan, remedy)
    assert len(Catalog(store).rows("SELECT * FROM runs")) == 1


def test_a_tier_version_without_its_view_is_named(store: Store) -> None:
    plan = _plan(store)
    (store.root / "views/000001/p/B/index.json").unlink()
    with pytest.raises(UserError, match=r"view of tier B in tier version 1, is gone.*atoll shard --tier-version 1"):
        apply_rollback(store, plan)


# Undo.


def test_undo_marks_the_branch_deletes_nothing_and_can_be_lifted(store: Store) -> None:
    plan = _plan(store)
    branch = apply_rollback(store, plan)
    objects = {info.path for info in store.list("runs")}
    assert undo_rollback(store, branch.name) == undo_rollback(store, branch.name) == "r"
    assert objects <= {info.path for info in store.list("runs")}
    with pytest.raises(UserError, match=r"was taken back; .*--lift"):
        apply_rollback(store, plan)
    events = Catalog(store).rows("SELECT detail FROM events WHERE kind = 'branch_undone'")
    assert [json.loads(row["detail"]) for row in events] == [{"parent_run": "r"}]
    assert undo_rollback(store, branch.name, lift=True) == branch.name
    assert apply_rollback(store, plan) == branch


def test_undo_is_refused_where_it_makes_no_sense(store: Store) -> None:
    with pytest.raises(UserError, match="no branch"):
        undo_rollback(store, "r")
    with pytest.raises(UserError, match="there are: r"):
        undo_rollback(store, "q")
    branch = apply_rollback(store, _plan(store))
    train_in_turn(branch)
    early = f"corpus = 'c{_late(store, after=0)}'"
    child = apply_rollback(store, plan_rollback(store, branch.name, early), "restore")
    with pytest.raises(UserError, match=f"undo {child.name}"):
        undo_rollback(store, branch.name)
    undo_rollback(store, child.name)
    undo_rollback(store, branch.name)
