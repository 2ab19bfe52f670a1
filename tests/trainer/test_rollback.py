"""Rollback: the plan is what consumption and merges say, and the branch has never seen the documents."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import create_store
from tiny import copy_store, doc_id, fabricate, start_run, train_together
from tools.provenance import check_ledger, last_global_checkpoint
from trainer.remedies import apply_rollback
from trainer.rollback import Plan, plan_rollback, plan_table
from trainer.run import GLOBAL, Run, load_run, read_excluded

STEPS = 10
NUM_DOCUMENTS = 96


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a run of two islands that merged all along."""
    store = create_store(str(tmp_path_factory.mktemp("trained") / "store"))
    fabricate(store)
    train_together(start_run(store, "r", steps=STEPS))
    return store


@dataclass(frozen=True, kw_only=True, slots=True)
class Branched:
    """A rollback of one document, and what the old run was before it."""

    document: int
    before: dict[str, Any]
    plan: Plan
    branch: Run


@pytest.fixture(scope="module")
def branched(trained: Store, tmp_path_factory: pytest.TempPathFactory) -> Branched:
    """A branch in a copy of that store, trained to its end."""
    store = copy_store(trained, tmp_path_factory.mktemp("branched") / "store")
    document = _late(store, after=6)
    before = _own(store, "r")
    plan = plan_rollback(store, "r", _where(document))
    branch = apply_rollback(store, plan)
    train_together(branch)
    return Branched(document=document, before=before, plan=plan, branch=branch)


@pytest.fixture
def run(trained: Store, tmp_path: Path) -> Run:
    """The run of a copy of that store."""
    return load_run(copy_store(trained, tmp_path / "copy"), "r")


def _first_steps(store: Store, run: str) -> dict[int, dict[int, int]]:
    """Document → island → first step that trained on it, straight from the rows."""
    number_of = {doc_id(n): n for n in range(NUM_DOCUMENTS)}
    first: dict[int, dict[int, int]] = defaultdict(dict)
    for row in Catalog(store).rows("SELECT island, step, doc_id FROM consumption WHERE run = ?", [run]):
        steps = first[number_of[row["doc_id"]]]
        steps[row["island"]] = min(row["step"], steps.get(row["island"], row["step"]))
    return dict(first)


def _late(store: Store, run: str = "r", *, after: int) -> int:
    """A document that is first read after a step, as soon as possible, and not by all islands at once."""
    late = {n: steps for n, steps in _first_steps(store, run).items() if min(steps.values()) > after}
    return min(late, key=lambda n: (min(late[n].values()), n))


def _made_of(catalog: Catalog, checkpoint: bytes) -> set[str]:
    return set(catalog.ask("checkpoint_documents", checkpoint=checkpoint, most=10_000)["corpus"].to_pylist())


def _where(*documents: int) -> str:
    return "corpus IN (" + ", ".join(f"'c{n}'" for n in documents) + ")"


def _own(store: Store, run: str) -> dict[str, Any]:
    """All that is of a run: its rows and its objects."""
    catalog = Catalog(store)
    tables = ("consumption", "checkpoints", "events", "mixtures", "feedback", "runs")
    rows = {t: catalog.rows(f"SELECT * FROM {t} WHERE run = ? ORDER BY ALL", [run]) for t in tables}
    return rows | {info.path: store.get(info.path) for info in store.list(f"runs/{run}")}


def _check_clean(store: Store, plan: Plan, documents: set[int]) -> None:
    """What the branch starts from has not seen the documents, and is the last that has not."""
    catalog = Catalog(store)
    corpora = {f"c{n}" for n in documents}
    rows = {
        row["checkpoint"]: row
        for row in catalog.rows("SELECT * FROM checkpoints WHERE run = ? AND island <> ?", [plan.run, GLOBAL])
    }
    merges = catalog.rows("SELECT * FROM merges WHERE run = ?", [plan.run])
    for merge in merges:
        if merge["version"] <= plan.clock[merge["fragment"]]:
            assert merge["merge"] <= plan.merge
            assert not _made_of(catalog, merge["checkpoint"]) & corpora
    following = [m for m in merges if m["merge"] == plan.merge + 1]
    if not plan.is_exact:  # else it may go back a little further, to where all islands stood together
        assert not following or any(_made_of(catalog, m["checkpoint"]) & corpora for m in following)
    assert plan.merges_undone == max(m["merge"] for m in merges) - plan.merge
    for island in plan.islands:
        anchors = [row for row in rows.values() if row["island"] == island.island and row["anchor"]]
        if island.restart is not None:
            restart = rows[island.restart]
            assert restart in anchors
            assert restart["step"] == island.restart_step
            assert store.exists(restart["object"])
            assert not _made_of(catalog, island.restart) & corpora
            assert all(seen <= limit for seen, limit in zip(restart["clock"], plan.clock, strict=True))
        for later in anchors:
            if later["step"] > island.restart_step and not plan.is_exact:
                beyond = any(seen > limit for seen, limit in zip(later["clock"], plan.clock, strict=True))
                assert beyond or _made_of(catalog, later["checkpoint"]) & corpora


@pytest.mark.parametrize("after", [0, 6])
def test_the_plan_names_the_first_step_and_a_clean_start_of_every_island(trained: Store, after: int) -> None:
    document = _late(trained, after=after)
    first = _first_steps(trained, "r")[document]
    plan = plan_rollback(trained, "r", _where(document))
    assert plan.doc_ids == [doc_id(document)]
    assert {i.island: i.first_step for i in plan.islands} == {0: first.get(0), 1: first.get(1)}
    for island in plan.islands:
        assert island.restart_step < (island.first_step or STEPS + 1)
        assert island.redo_steps == STEPS - island.restart_step
        assert island.redo_tokens == island.redo_steps * 2 * 16
        assert island.documents == (island.island in first)
    _check_clean(trained, plan, {document})
    assert plan_table(plan)["restart_step"].to_pylist() == [i.restart_step for i in plan.islands]


def test_the_plan_counts_the_tokens_of_the_documents_that_each_island_read(trained: Store) -> None:
    documents = sorted(_first_steps(trained, "r"))[:20]
    plan = plan_rollback(trained, "r", _where(*documents))
    rows = Catalog(trained).rows("SELECT island, doc_id, tokens FROM consumption WHERE run = 'r'")
    wanted = {doc_id(n) for n in documents}
    for island in plan.islands:
        own = [row for row in rows if row["island"] == island.island and row["doc_id"] in wanted]
        assert island.tokens == sum(row["tokens"] for row in own)
        assert island.documents == len({row["doc_id"] for row in own})


def test_a_predicate_may_ask_for_tier_and_score(trained: Store) -> None:
    plan = plan_rollback(trained, "r", "tier = 'C' AND score > 0 -- a comment")
    tiers = Catalog(trained).rows("SELECT doc_id FROM tiers WHERE tier = 'C'")
    assert sorted(plan.doc_ids) == sorted(row["doc_id"] for row in tiers)


def test_the_branch_never_sees_the_documents_and_the_old_run_stays_as_it_is(branched: Branched) -> None:
    store, branch, document = branched.branch.store, branched.branch, branched.document
    assert read_excluded(branch) == {doc_id(document)}
    assert document not in _first_steps(store, branch.name)
    catalog = Catalog(store)
    assert f"c{document}" not in _made_of(catalog, last_global_checkpoint(catalog, branch.name)["checkpoint"])
    assert f"c{document}" in _made_of(catalog, last_global_checkpoint(catalog, "r")["checkpoint"])
    steps = catalog.rows(
        "SELECT island, min(step) AS low, max(step) AS high FROM consumption WHERE run = ? GROUP BY island ORDER BY island",
        [branch.name],
    )
    redone = [i for i in branched.plan.islands if i.redo_steps]
    assert [tuple(s.values()) for s in steps] == [(i.island, i.restart_step + 1, STEPS) for i in redone]
    check_ledger(catalog, branch.name)
    assert _own(store, "r") == branched.before


def test_a_branch_is_made_of_all_that_its_start_was_made_of(branched: Branched) -> None:
    catalog = Catalog(branched.branch.store)
    kept = [m for m in catalog.rows("SELECT * FROM merges WHERE run = 'r'") if m["merge"] <= branched.plan.merge]
    assert kept
    made_of = _made_of(catalog, last_global_checkpoint(catalog, branched.branch.name)["checkpoint"])
    for merge in kept:
        assert _made_of(catalog, merge["checkpoint"]) <= made_of


def test_applying_twice_makes_one_branch(run: Run) -> None:
    plan = plan_rollback(run.store, "r", _where(_late(run.store, after=4)))
    first, second = apply_rollback(run.store, plan), apply_rollback(run.store, plan)
    assert first == second == load_run(run.store, plan.new_run)
    assert plan_rollback(run.store, "r", plan.predicate).new_run == plan.new_run
    assert len(Catalog(run.store).rows("SELECT * FROM runs WHERE parent_run = 'r'")) == 1


def test_a_whole_tier_may_be_rolled_back(run: Run) -> None:
    branch = apply_rollback(run.store, plan_rollback(run.store, "r", "tier = 'C'"))
    train_together(branch)
    rows = Catalog(run.store).rows(
        "SELECT tier, sum(tokens) AS n FROM consumption WHERE run = ? GROUP BY tier", [branch.name]
    )
    assert {row["tier"] for row in rows} == {"S", "A", "B"}


def test_a_branch_may_be_rolled_back_to_before_its_start(branched: Branched, tmp_path: Path) -> None:
    store, branch = copy_store(branched.branch.store, tmp_path / "copy"), branched.branch
    late, early = branched.document, _late(store, after=0)
    catalog = Catalog(store)
    assert f"c{early}" in _made_of(catalog, last_global_checkpoint(catalog, branch.name)["checkpoint"])
    second = apply_rollback(store, plan_rollback(store, branch.name, _where(early)))
    assert read_excluded(second) == {doc_id(late), doc_id(early)}
    train_together(second)
    assert not {late, early} & set(_first_steps(store, second.name))
    catalog = Catalog(store)
    made_of = _made_of(catalog, last_global_checkpoint(catalog, second.name)["checkpoint"])
    assert not {f"c{late}", f"c{early}"} & made_of
    check_ledger(catalog, second.name)


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        ("corpus = 'nobody'", "no document matches"),
        ("true", "all 96 documents match"),
        ("no_such_column = 1", "no_such_column"),
        ("corpus = ", "SQL"),
        ("", "SQL"),
        ("corpus = 'c1'; SELECT 1", "SQL"),
        ("corpus = 'c1'); DROP TABLE runs; --", "SQL"),
        ("corpus", "SQL"),
    ],
)
def test_a_predicate_that_makes_no_sense_is_refused(trained: Store, predicate: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_rollback(trained, "r", predicate)


def test_documents_that_nobody_trained_on_need_no_rollback(trained: Store) -> None:
    unread = min(set(range(NUM_DOCUMENTS)) - set(_first_steps(trained, "r")))
    with pytest.raises(UserError, match="nothing to undo"):
        plan_rollback(trained, "r", _where(unread))


def test_holdout_documents_are_not_a_rollbacks_to_take(trained: Store) -> None:
    with pytest.raises(UserError, match="no document matches"):
        plan_rollback(trained, "r", "split = 'holdout'")


def test_an_unknown_run_is_refused_with_the_names_of_those_there_are(trained: Store) -> None:
    with pytest.raises(UserError, match="there are: r"):
        plan_rollback(trained, "q", "true")
