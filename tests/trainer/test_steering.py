"""Feedback from the islands to the table and back as mixes: by the headers of outer gradients and the tape, through deaths of either side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append, create_store
from tiny import fabricate, messages_of, silent, start_run, tape_of
from tools.bench.turns import train_in_turn
from trainer.diversity import diversity
from trainer.feedback import SCALES, Feedback, TierLoss
from trainer.island import Island
from trainer.messages import Teller, to_text
from trainer.run import Run
from trainer.syncer import Syncer
from trainer.talk import Talk
from trainer.tape import first_state, read_global, replay
from trainer.wire import pack, unpack

ADAPTIVE: dict[str, Any] = {"strategies": ("adaptive",), "steps": 12}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Syncer]:
    """A run that is over, and its syncer; not to be changed."""
    store = create_store(str(tmp_path_factory.mktemp("trained") / "store"))
    fabricate(store)
    run = start_run(store, "r", **ADAPTIVE)
    return run, train_in_turn(run)


def _rows(run: Run, sql: str) -> list[dict[str, Any]]:
    return Catalog(run.store).rows(sql, [run.name])


def test_every_message_comes_into_the_table_once_and_soon_as_what_has_changed(trained: tuple[Run, Syncer]) -> None:
    run, _ = trained
    rows = _rows(run, "SELECT island, sequence, round FROM feedback WHERE run = ? ORDER BY island, sequence")
    assert [tuple(row.values()) for row in rows] == [(i, n, 2 * n) for i in range(2) for n in range(1, 7)]
    for island in range(2):
        backs = [message.back for message in messages_of(run, island)]
        assert backs[0] == 0
        assert all(backs[2:])  # one is acknowledged by then
    for island in ("0", "1"):
        decided = [merge["mixes"][island]["key"][1] for merge in tape_of(run) if island in merge["mixes"]]
        assert decided == list(range(1, len(decided) + 1))
        assert len(decided) >= 4
    (first,) = _rows(run, "SELECT * FROM mixtures WHERE run = ? AND island = 1")
    assert first["reason"] == "first assignment"  # two islands haven't seen enough to move by in six cycles


def test_islands_tell_as_rarely_as_they_are_asked_to(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"feedback_rounds": 5})  # a cycle has 2; the run 12
    train_in_turn(run)
    rows = _rows(run, "SELECT island, sequence, round FROM feedback WHERE run = ? ORDER BY island, sequence")
    assert [tuple(row.values()) for row in rows] == [(i, n, r) for i in range(2) for n, r in ((1, 5), (2, 10), (3, 12))]
    measured = _rows(
        run,
        "SELECT DISTINCT round FROM checkpoints WHERE run = ? AND island >= 0 AND holdout_loss IS NOT NULL ORDER BY 1",
    )
    assert [row["round"] for row in measured] == [5, 10, 12]


def test_a_row_says_what_the_island_said(trained: tuple[Run, Syncer]) -> None:
    run, syncer = trained
    states = syncer.state.talk.states(0)
    row = _rows(run, "SELECT * FROM feedback WHERE run = ? AND island = 0 AND sequence = 6")[0]
    said = Feedback.from_levels(states[max(states)]).to_row()
    assert [row[name] for name in said] == [
        pytest.approx(x, nan_ok=True) if x is not None else None for x in said.values()
    ]
    assert all(row[f"effectiveness_error_{tier}"] > 0 for tier in "sabc" if row[f"effectiveness_{tier}"] is not None)
    assert row["step_time_s"] > 0
    assert row["upload_bps"] > 0


def test_who_reads_the_tape_knows_what_the_syncer_knows(trained: tuple[Run, Syncer]) -> None:
    run, syncer = trained
    anatomy = first_state(run)[1]
    assert syncer.state.talk.mixes.keys() == {0, 1}
    assert replay(run, anatomy, start=0).talk == syncer.state.talk
    assert replay(run, anatomy).talk == read_global(run, anatomy).talk == syncer.state.talk
    assert Talk.from_json(json.loads(json.dumps(syncer.state.talk.to_json()))) == syncer.state.talk


def test_a_new_syncer_puts_into_the_table_what_a_dead_one_heard(
    tiny_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.steering.Steering._put_rows", lambda *_: None)
        train_in_turn(run)
    assert _rows(run, "SELECT * FROM feedback WHERE run = ?") == []
    for _ in range(2):
        Syncer(run, emit=silent, in_background=False).close()
        rows = _rows(run, "SELECT island, sequence FROM feedback WHERE run = ? ORDER BY ALL")
        assert [tuple(row.values()) for row in rows] == [(i, n) for i in range(2) for n in range(1, 7)]


def test_an_island_that_comes_back_is_heard_and_goes_on_with_its_mix(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"num_islands": 1})
    syncer = Syncer(run, emit=silent, in_background=False)
    weights = {}
    for rounds in (5, 7):  # the first life ends amid a cycle, without a word
        island = Island(run, 0, emit=silent, in_background=False)
        if weights:
            assert dict(island.mixture.weights) == weights
        for _ in range(rounds):
            island.train_round()
            island.receive_now()
            syncer.sweep()
        weights = dict(island.mixture.weights)
    island.finish()
    assert syncer.serve() is not None
    rows = _rows(run, "SELECT sequence FROM feedback WHERE run = ? ORDER BY sequence")
    assert [row["sequence"] for row in rows] == list(range(1, 7))
    assert {message.incarnation for message in messages_of(run, 0)} == {0, 1}


@pytest.mark.parametrize(
    "text",
    [[""], ["rubbish"], [7], 7, [to_text(Teller(scales=SCALES, island=9, incarnation=0).tell(1, {}))]],
    ids=["empty", "rubbish", "a number", "no list", "of another island"],
)
def test_a_damaged_message_is_refused_and_its_outer_gradient_counts(tiny_store: Store, text: object) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"num_islands": 1})
    island = Island(run, 0, emit=silent, in_background=False)
    for _ in range(2):
        island.train_round()
    path = run.outer_path(0, 2, 1)
    tensors, description = unpack(tiny_store.get(path), name=path)
    assert len(description["feedback"]) == 1
    tiny_store.delete(path)
    tiny_store.put_new(path, pack(tensors, description | {"feedback": text}))
    syncer = Syncer(run, emit=silent, in_background=False)
    syncer.sweep()
    assert [c["island"] for merge in tape_of(run) for c in merge["contributions"]] == [0, 0]
    assert [merge["feedback"] for merge in tape_of(run)] == [{}, {}]
    (event,) = _rows(run, "SELECT detail FROM events WHERE run = ? AND kind = 'refused'")
    assert path in event["detail"]
    assert "its outer gradient counts" in event["detail"]


def test_a_strategy_that_leaves_nothing_to_read_keeps_the_mix_and_is_told(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"num_islands": 1})
    nothing = {f"weight_{tier.lower()}": 0.0 for tier in TIERS}
    row = {"strategy": "adaptive", **nothing, "learning_rate": 0.0, "weight_floor": 0.0, "step_cap": 0.1, "reason": "x"}
    append(tiny_store, "strategies", [row | {"weight_s": 1.0}])
    island = Island(run, 0, emit=silent, in_background=False)
    append(tiny_store, "strategies", [row])
    syncer = Syncer(run, emit=silent, in_background=False)
    for _ in range(run.config.num_rounds):
        island.train_round()
        island.receive_now()
        syncer.sweep()
    assert dict(island.mixture.weights) == {"S": 1.0, "A": 0.0, "B": 0.0, "C": 0.0}
    told = _rows(run, "SELECT detail FROM events WHERE run = ? AND kind = 'mix_stays'")
    assert "leaves no tier" in told[0]["detail"]


def test_an_island_whose_strategy_is_left_to_the_rules_switches_as_they_say(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"strategies": ("auto",)})
    islands = [Island(run, number, emit=silent, in_background=False) for number in range(2)]
    assert [island.mixture.strategy for island in islands] == ["balanced", "balanced"]
    syncer = Syncer(run, emit=silent, in_background=False)
    for _ in range(run.config.num_rounds):
        for island, step_time_s in zip(islands, (0.1, 1.0), strict=True):
            island.train_round()
            island._step_times = [step_time_s] * 100
        for island in islands:
            island.receive_now()
        syncer.sweep()
    assert [island.mixture.strategy for island in islands] == ["aggressive", "conservative"]
    events = _rows(
        run, "SELECT island, detail FROM events WHERE run = ? AND kind = 'strategy_switched' ORDER BY island"
    )
    assert [event["island"] for event in events] == [0, 1]
    assert "fast" in events[0]["detail"]
    mixes = _rows(run, "SELECT * FROM mixtures WHERE run = ? AND island = 0 ORDER BY written_at")
    assert mixes[-1]["reason"].startswith("aggressive in place of balanced: a step takes 0.1 s")
    assert mixes[-1]["weight_c"] == 0


def test_adaptive_mixes_are_set_apart_and_where_they_would_be_is_not_forgotten(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"min_diversity": 0.05})
    syncer = train_in_turn(run)
    first, second = (syncer.state.talk.mixes[island] for island in range(2))
    assert diversity([first.weights, second.weights]) >= 0.04  # what each would read differs a little
    for island in range(2):
        rows = _rows(
            run,
            f"SELECT * FROM mixtures WHERE run = ? AND island = {island} AND reason LIKE 'feedback%' ORDER BY round",
        )
        before = None
        for row in rows:
            told = json.loads(row["parameters"])
            tried = [tier for tier in TIERS if told["spread"]["mix"][tier] > 0.03]
            assert told["spread"]["towards"] == tried[island % len(tried)]
            assert row["reason"].endswith(f"more {told['spread']['towards']}, for islands to differ")
            if before is not None:
                assert told["previous"] == pytest.approx([before[tier] for tier in TIERS])
            before = told["spread"]["mix"]


def test_the_mix_moves_by_what_all_islands_have_gone_through(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"num_islands": 4, "min_diversity": 0.01})
    train_in_turn(run)
    rows = _rows(run, "SELECT * FROM mixtures WHERE run = ? AND reason LIKE 'feedback%' ORDER BY round, island")
    asked = [json.loads(row["parameters"]) for row in rows]
    observations = [told["worth"]["observations"] for told in asked]
    assert observations == sorted(observations)
    assert observations[-1] >= 8
    assert asked[-1]["worth"]["method"] == "regression"
    # What was decided can be worked out again from what stands there.
    names = ("run", "island", "sequence", "strategy", "tier_version", "pool", "previous", "effectiveness", "error")
    found = Catalog(run.store).ask("mixture", **{name: asked[-1][name] for name in names}).to_pylist()
    assert {row["tier"]: row["weight"] for row in found} == pytest.approx(asked[-1]["spread"]["mix"])


def test_with_online_influence_the_mix_moves_by_what_was_measured(tiny_store: Store) -> None:
    options = {"online_influence": True, "online_refresh": 2, "online_sequences": 2}
    run = start_run(tiny_store, "r", **ADAPTIVE | options)
    train_in_turn(run)
    told = _rows(run, "SELECT * FROM feedback WHERE run = ? ORDER BY island, sequence")
    sql = (
        "SELECT sum(contribution) AS total FROM consumption JOIN checkpoints USING (checkpoint) "
        "WHERE consumption.run = ? AND consumption.island = 0 AND round BETWEEN 11 AND 12 AND tier = 'S'"
    )
    (contributed,) = _rows(run, sql)
    last = [row for row in told if row["island"] == 0][-1]
    assert last["effectiveness_s"] == pytest.approx(0, abs=10 * abs(contributed["total"]))
    assert (last["effectiveness_s"] > 0) == (contributed["total"] > 0)
    mixes = _rows(run, "SELECT parameters FROM mixtures WHERE run = ? AND reason LIKE 'feedback%' ORDER BY written_at")
    assert json.loads(mixes[-1]["parameters"])["worth"]["method"] == "telling"


def test_an_adaptive_island_whose_loss_rises_is_held_still_and_that_is_announced(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **ADAPTIVE | {"num_islands": 1, "steps": 24})
    told: list[dict[str, Any]] = []
    island = Island(run, 0, emit=silent, in_background=False)
    syncer = Syncer(run, emit=told.append, in_background=False)
    read = []
    for round_ in range(1, run.config.num_rounds + 1):
        if 4 <= round_ <= 10:
            # Every tier's loss in the cycle before is taken for far lower than it was.
            island.progress.tier_losses = {tier: TierLoss(mean=0.1, error=0.01) for tier in TIERS}
        island.train_round()
        island.receive_now()
        syncer.sweep()
        read.append(island.mixture.strategy)
    assert read[0] == "adaptive"
    assert "balanced" in read
    assert read[-1] == "adaptive"  # it has had its rest
    switched = [(status["before"], status["after"]) for status in told if status["state"] == "switched"]
    assert switched == [("adaptive", "balanced"), ("balanced", "adaptive")]
    (event, _) = _rows(
        run, "SELECT detail FROM events WHERE run = ? AND kind = 'strategy_switched' ORDER BY written_at"
    )
    assert "risen 3 cycles running" in event["detail"]
