"""Islands and syncer: the ledger is exact, deaths lose nothing that was committed, and what is damaged or foreign is kept out."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.catalog import Catalog
from manifests.errors import SequenceTaken, UserError
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import create_store
from tiny import copy_store, fabricate, messages_of, silent, start_run, tape_of, train_alone, train_together
from tools.bench.turns import train_in_turn
from tools.provenance import check_ledger, checkpoint_mix, last_global_checkpoint
from trainer.feedback import SCALES
from trainer.island import Island
from trainer.members import claim_incarnation
from trainer.messages import Heard, Levels
from trainer.quantise import quantise
from trainer.run import GLOBAL, Run, load_run
from trainer.syncer import Syncer
from trainer.tape import GlobalState, prepare_run
from trainer.wire import pack, pack_parts, unpack

_SPANS = """
SELECT step, position, doc_id, tier, origin, token_start, tokens, loss
FROM consumption WHERE run = ? AND island = ? ORDER BY step, position
"""


class Killed(Exception):
    """What a test's fault raises."""


@pytest.fixture(scope="module")
def unmerged(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a run whose two islands have finished, with nothing merged yet."""
    store = create_store(str(tmp_path_factory.mktemp("unmerged") / "store"))
    fabricate(store)
    run = start_run(store, "r")
    for island in range(2):
        train_alone(run, island)
    return store


@pytest.fixture
def unmerged_run(unmerged: Store, tmp_path: Path) -> Run:
    """The run of a copy of that store."""
    return load_run(copy_store(unmerged, tmp_path / "copy"), "r")


def _checkpoints(run: Run, catalog: Catalog | None = None) -> list[dict[str, Any]]:
    return (catalog or Catalog(run.store)).rows(
        "SELECT * FROM checkpoints WHERE run = ? ORDER BY island, round", [run.name]
    )


def _last(run: Run, island: int, catalog: Catalog | None = None) -> dict[str, Any]:
    return [row for row in _checkpoints(run, catalog) if row["island"] == island][-1]


def _counters(row: dict[str, Any]) -> dict[str, int]:
    return {tier: row[f"tokens_{tier.lower()}"] for tier in TIERS}


def _recorded(run: Run, island: int, catalog: Catalog | None = None) -> dict[str, int]:
    sums = (catalog or Catalog(run.store)).rows(
        "SELECT tier, sum(tokens)::BIGINT AS n FROM consumption WHERE run = ? AND island = ? GROUP BY tier",
        [run.name, island],
    )
    return dict.fromkeys(TIERS, 0) | {row["tier"]: row["n"] for row in sums}


def _events(run: Run, kind: str) -> list[dict[str, Any]]:
    rows = Catalog(run.store).rows(
        "SELECT * FROM events WHERE run = ? AND kind = ? ORDER BY written_at", [run.name, kind]
    )
    return [row | {"detail": json.loads(row["detail"])} for row in rows]


def _told(run: Run, island: int) -> dict[int, set[Levels]]:
    """What an island has told, message by message, but for what it measured by the clock."""
    heard = reduce(Heard.joined, map(Heard.of, messages_of(run, island)), Heard())
    timed = [i for i, scale in enumerate(SCALES) if scale.name in ("step_time_s", "upload_bps", "latency_s")]
    told: dict[int, set[Levels]] = {}
    for (_, sequence), levels in heard.states(len(SCALES)).items():
        told.setdefault(sequence, set()).add(tuple(level for i, level in enumerate(levels) if i not in timed))
    return told


def _spans(run: Run, island: int) -> list[dict[str, Any]]:
    return Catalog(run.store).rows(_SPANS, [run.name, island])


def _die_before_committing(monkeypatch: pytest.MonkeyPatch, round_: int) -> None:
    import trainer.records

    commit = trainer.records.commit_rounds

    def die(run: Run, island: int, rows: list[dict[str, Any]]) -> None:
        if any(row["round"] == round_ for row in rows):
            raise Killed
        commit(run, island, rows)

    monkeypatch.setattr("trainer.records.commit_rounds", die)


def _check_whole_ledger(run: Run) -> None:
    catalog, config = Catalog(run.store), run.config
    recorded = [_recorded(run, island, catalog) for island in range(config.num_islands)]
    assert [_counters(_last(run, island, catalog)) for island in range(config.num_islands)] == recorded
    total = {tier: sum(sums[tier] for sums in recorded) for tier in TIERS}
    assert sum(total.values()) == config.num_islands * config.steps * config.batch_size * config.seq_len
    assert _counters(last_global_checkpoint(catalog, run.name)) == total
    made = checkpoint_mix(catalog, run.name).to_pylist()
    assert {tier: sum(row["tokens"] for row in made if row["tier"] == tier) for tier in TIERS} == total
    assert sum(row["share"] for row in made) == pytest.approx(1)
    assert "agrees" in check_ledger(catalog, run.name)


def test_ledger_of_islands_that_train_together_is_exact(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", max_staleness=100, steps=24)
    loss = train_together(run)
    _check_whole_ledger(run)
    merges = Catalog(tiny_store).rows("SELECT DISTINCT merge, fragment, version FROM merges WHERE run = 'r'")
    assert sorted(m["merge"] for m in merges) == list(range(1, len(merges) + 1))
    assert len(merges) > run.config.num_fragments
    assert any(max(row["clock"]) > 0 for row in _checkpoints(run) if row["island"] != GLOBAL)
    assert _events(run, "finished")[0]["detail"]["holdout_loss"] == loss


def test_ledger_of_islands_that_never_heard_of_each_other_is_exact(unmerged_run: Run) -> None:
    run = unmerged_run
    Syncer(run, emit=silent).serve()
    _check_whole_ledger(run)
    # Every island's newest outer gradient of every fragment, and none that it supersedes.
    merged = Catalog(unmerged_run.store).rows("SELECT fragment, version, island, steps FROM merges WHERE run = 'r'")
    assert sorted(tuple(row.values()) for row in merged) == [(f, 1, i, 8) for f in range(2) for i in range(2)]


def test_an_outer_gradient_is_merged_once(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", max_staleness=100)  # nothing is too old, however the threads take turns
    train_together(run)
    Syncer(run, emit=silent).serve()
    taken = [path for merge in tape_of(run) for c in merge["contributions"] for path in c["paths"]]
    assert len(taken) == len(set(taken))
    assert sum(c["steps"] for merge in tape_of(run) for c in merge["contributions"]) == 2 * 2 * run.config.steps
    for island in range(2):
        for fragment in range(2):
            rounds = [
                c["round"]
                for event in _events(run, "merge")
                for c in event["detail"]["contributions"]
                if (c["island"], c["fragment"]) == (island, fragment)
            ]
            assert rounds == sorted(rounds)


def test_what_an_island_sends_twice_before_a_merge_goes_in_as_one(tiny_store: Store) -> None:
    run = start_run(
        tiny_store, "r", num_islands=1, strategies=("balanced",), outer_lr=1.0, outer_momentum=0.0, wire="fp32"
    )
    claim_incarnation(run, 0)
    syncer = Syncer(run, emit=silent, in_background=False)
    start = dict(syncer.state.fragments[0].outer.parameters)

    def send(round_: int, moved: float) -> None:
        gradient = {name: torch.full_like(value, moved) for name, value in start.items()}
        said = {
            "run": "r", "island": 0, "round": round_, "fragment": 0, "base_version": 0, "checkpoint": "00" * 16,
            "step": round_, "tokens": 32 * round_, "steps": round_, "step_time_s": 0.1,
        }  # fmt: skip
        shapes = {name: tuple(value.shape) for name, value in start.items()}
        run.store.put_new(run.outer_path(0, round_, 0), pack_parts(quantise(gradient, "fp32"), shapes, "fp32", said))

    send(2, 0.5)
    send(4, 0.25)
    syncer.sweep()
    assert syncer.state.fragments[0].version == 1
    for name, value in start.items():
        torch.testing.assert_close(syncer.state.fragments[0].outer.parameters[name], value - 0.75)
    taken = Catalog(run.store).rows("SELECT tokens, steps FROM merges ORDER BY merge")
    assert taken == [{"tokens": 192, "steps": 6}]


def test_islands_that_come_one_by_one_move_the_global_parameters_as_far_as_if_they_came_together(
    tiny_store: Store,
) -> None:
    """With momentum, too: a merge of one of four islands is a fourth of a step."""
    moved = {}
    for name in ("together", "apart"):
        run = start_run(tiny_store, name, num_islands=4, strategies=("balanced",), wire="fp32", num_fragments=1)
        for island in range(4):
            claim_incarnation(run, island)
        syncer = Syncer(run, emit=silent, in_background=False, clock=lambda: 0.0)
        start = dict(syncer.state.fragments[0].outer.parameters)
        shapes = {tensor: tuple(value.shape) for tensor, value in start.items()}
        for island in range(4):
            gradient = {tensor: torch.full_like(value, 0.5) for tensor, value in start.items()}
            said = {
                "run": name, "island": island, "round": 1, "fragment": 0, "base_version": 0, "checkpoint": "00" * 16,
                "step": 2, "tokens": 64, "steps": 2, "step_time_s": 0.1,
            }  # fmt: skip
            path = run.outer_path(island, 1, 0)
            run.store.put_new(path, pack_parts(quantise(gradient, "fp32"), shapes, "fp32", said))
            syncer._look_for_gradients()
            if name == "apart" or island == 3:
                syncer._consider(0, flush=True)
        assert syncer.state.fragments[0].version == (4 if name == "apart" else 1)
        end = syncer.state.fragments[0].outer.parameters
        moved[name] = float((start["model.norm.weight"] - end["model.norm.weight"]).mean())
    assert moved["together"] == pytest.approx(0.7 * (0.5 + 0.9 * 0.5))
    assert 0.5 * moved["together"] < moved["apart"] < moved["together"]
    parts = [
        event["detail"]["part"]["islands"]
        for event in _events(Run(store=tiny_store, config=run.config, branch=None), "merge")
    ]
    assert parts == [0.25] * 4


def test_an_empty_tier_gives_its_share_away(store: Store) -> None:
    fabricate(store, empty_tiers=("S",))
    run = start_run(store, "r", num_islands=1)
    train_alone(run, 0)
    assert _recorded(run, 0)["S"] == 0
    assert sum(_recorded(run, 0).values()) == 8 * 2 * 16


@pytest.mark.parametrize("round_", [1, 4, 8])
def test_an_island_that_dies_before_its_commit_goes_on_as_if_it_never_had(
    unmerged_run: Run, monkeypatch: pytest.MonkeyPatch, round_: int
) -> None:
    whole, store = unmerged_run, unmerged_run.store
    broken = start_run(store, "broken", num_islands=1)
    with monkeypatch.context() as patch:
        _die_before_committing(patch, round_)
        with pytest.raises(Killed):
            train_alone(broken, 0)
    # The dead segment lies in the table, and nobody sees it.
    raw = Catalog(store).rows("SELECT count(*) AS n FROM raw.consumption WHERE run = 'broken' AND step = ?", [round_])
    assert raw[0]["n"] > 0
    assert max((span["step"] for span in _spans(broken, 0)), default=0) == round_ - 1

    island = Island(broken, 0, emit=silent, in_background=False)
    assert (island.incarnation, island.progress.round) == (1, round_ - 1)
    island.train()
    assert _spans(broken, 0) == _spans(whole, 0)
    assert _counters(_last(broken, 0)) == _counters(_last(whole, 0)) == _recorded(broken, 0)
    assert _told(broken, 0) == _told(whole, 0)
    assert [len(states) for states in _told(whole, 0).values()] == [1, 1, 1, 1]
    ours, theirs = (unpack(run.store.get(_last(run, 0)["object"]), name="o")[0] for run in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_island_that_dies_amid_the_others_leaves_the_ledger_exact(
    unmerged_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = unmerged_run
    run = start_run(whole.store, "broken", max_staleness=100)
    with monkeypatch.context() as patch:
        _die_before_committing(patch, 5)
        with pytest.raises(Killed):
            train_alone(run, 0)
    train_together(run)
    _check_whole_ledger(run)
    data = [{k: v for k, v in span.items() if k != "loss"} for span in _spans(run, 0)]
    assert data == [{k: v for k, v in span.items() if k != "loss"} for span in _spans(whole, 0)]


def test_a_second_incarnation_that_commits_a_round_fences_the_first(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1)
    first, second = Island(run, 0, emit=silent), Island(run, 0, emit=silent)
    second.train()
    with pytest.raises(SequenceTaken, match="island 0"):
        first.train()
    assert {row["incarnation"] for row in _checkpoints(run)} == {second.incarnation}
    assert _counters(_last(run, 0)) == _recorded(run, 0)
    Syncer(run, emit=silent).serve()
    check_ledger(Catalog(tiny_store), "r")


def test_a_new_syncer_records_the_merge_that_a_dead_one_made(
    unmerged_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = unmerged_run

    def die(self: Syncer, description: dict[str, Any], **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Syncer, "_append_merge", die)
        with pytest.raises(Killed):
            Syncer(run, emit=silent, in_background=False).serve()
    assert _events(run, "merge") == []
    assert len(tape_of(run)) == 1
    Syncer(run, emit=silent, in_background=False)
    assert [(e["fragment"], e["version"], e["detail"]["merge"]) for e in _events(run, "merge")] == [(0, 1, 1)]
    Syncer(run, emit=silent, in_background=False).serve()
    assert [(e["fragment"], e["version"], e["detail"]["merge"]) for e in _events(run, "merge")] == [
        (0, 1, 1),
        (1, 1, 2),
    ]
    _check_whole_ledger(run)


def test_a_new_syncer_commits_the_global_checkpoint_that_a_dead_one_owed(
    unmerged_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = unmerged_run

    def die(self: Syncer, state: GlobalState) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Syncer, "_commit_checkpoint", die)
        with pytest.raises(Killed):
            Syncer(run, emit=silent, in_background=False).serve()
    assert _events(run, "merge")[-1]["detail"]["merge"] == run.config.num_fragments
    Syncer(run, emit=silent, in_background=False)
    Syncer(run, emit=silent, in_background=False)
    assert [row["clock"] for row in _checkpoints(run) if row["island"] == GLOBAL] == [[1, 1]]


def test_a_syncer_that_lost_the_race_takes_what_the_winner_made(unmerged_run: Run) -> None:
    run = unmerged_run
    slow, fast = (Syncer(run, emit=silent, in_background=False) for _ in range(2))
    fast.sweep()
    assert slow.serve() == pytest.approx(fast.serve())
    assert slow.state.clock == fast.state.clock == [1, 1]
    assert len(_events(run, "merge")) == 2
    _check_whole_ledger(run)


@pytest.mark.parametrize("damage", ["bytes", "other shapes", "other run", "no steps", "not finite", "foreign"])
def test_a_bad_outer_gradient_is_refused_by_name_and_the_run_finishes(unmerged_run: Run, damage: str) -> None:
    run = unmerged_run
    path = run.outer_path(1, run.config.num_rounds + 1, 0)
    data = unmerged_run.store.get(path)
    parts, description = unpack(data, name=path)
    shapes = description["shapes"]
    first = next(iter(shapes))
    bad = {
        "bytes": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "other shapes": pack(parts, description | {"shapes": shapes | {first: [1]}}),
        "other run": pack(parts, description | {"run": "another"}),
        "no steps": pack(parts, description | {"tokens": 0, "steps": 0}),
        "not finite": pack(parts | {"scales": torch.full_like(parts["scales"], torch.nan)}, description),
        "foreign": b"not ours at all",
    }[damage]
    (unmerged_run.store.root / path).write_bytes(bad)
    Syncer(run, emit=silent).serve()
    refused = _events(run, "refused")
    assert [(e["island"], e["fragment"]) for e in refused] == [(1, 0)]
    assert path in refused[0]["detail"]["why"]
    tape = tape_of(run)
    assert path not in [path for merge in tape for c in merge["contributions"] for path in c["paths"]]
    assert len(_events(run, "finished")) == 1
    check_ledger(Catalog(unmerged_run.store), "r")
    # The island that sent it isn't left waiting for it.
    assert max(merge["rounds"].get("1", 0) for merge in tape if merge["fragment"] == 0) == run.config.num_rounds + 1


def test_an_object_of_no_island_among_the_outer_gradients_is_left_alone(unmerged_run: Run) -> None:
    run = unmerged_run
    unmerged_run.store.put_new(f"{run.outer_folder(0)}/notes.txt", b"hello")
    Syncer(run, emit=silent).serve()
    _check_whole_ledger(run)


def test_checkpoint_objects_are_given_up_except_anchors(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1)
    train_alone(run, 0)
    rows = _checkpoints(run)
    assert [row["round"] for row in rows] == list(range(1, 9))
    assert [row["anchor"] for row in rows] == [False, True] * 4
    assert [bool(row["object"]) for row in rows] == [row["anchor"] for row in rows]
    assert all(tiny_store.exists(row["object"]) for row in rows if row["anchor"])
    assert [row["parent"] for row in rows] == [None, *(row["checkpoint"] for row in rows[:-1])]


def test_a_finished_run_may_be_run_again_and_nothing_changes(unmerged_run: Run) -> None:
    run = unmerged_run
    loss = Syncer(run, emit=silent).serve()
    before = [row["checkpoint"] for row in _checkpoints(run)]
    assert train_together(run) == pytest.approx(loss)
    assert [row["checkpoint"] for row in _checkpoints(run)] == before
    _check_whole_ledger(run)


def test_preparing_a_run_twice_leaves_its_first_fragments(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r")
    before = {info.path: tiny_store.get(info.path) for info in tiny_store.list("runs/r")}
    prepare_run(run)
    assert {info.path: tiny_store.get(info.path) for info in tiny_store.list("runs/r")} == before


def test_an_adaptive_island_records_every_mix_that_it_uses(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1, strategies=("adaptive",), steps=16)
    train_in_turn(run)
    mixes = Catalog(tiny_store).rows("SELECT * FROM mixtures WHERE run = 'r' ORDER BY written_at")
    assert mixes[0]["reason"] == "first assignment"
    # The first message knows no descent yet; a message that knows one tier's alone moves nothing; what the last one decides comes too late.
    numbers = [int(mix["reason"].split()[1].rstrip(",")) for mix in mixes[1:]]
    assert set(numbers) <= set(range(2, 8))
    assert numbers == sorted(numbers)
    assert len(numbers) >= 2
    for before, after, number in zip(mixes, mixes[1:], numbers, strict=False):
        assert after["reason"] == f"feedback {number}, up to round {2 * number}"
        assert after["round"] >= max(2 * number, before["round"])
        # The row has the weights as the stream has scaled them to sum to one: their last bit may differ.
        recorded = [before[f"weight_{tier.lower()}"] for tier in TIERS]
        assert json.loads(after["parameters"])["previous"] == pytest.approx(recorded, rel=1e-15, abs=0)
    for mix in mixes:
        assert sum(mix[f"weight_{tier.lower()}"] for tier in TIERS) == pytest.approx(1)
    messages = Catalog(tiny_store).rows("SELECT sequence, round FROM feedback WHERE run = 'r' ORDER BY sequence")
    assert [tuple(m.values()) for m in messages] == [(n, 2 * n) for n in range(1, 9)]


def test_a_store_without_a_holdout_is_an_error_that_says_the_mend(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", seq_len=100_000)
    with pytest.raises(UserError, match="holdout"):
        Island(run, 0, emit=silent)
