"""Islands and syncer together against what they must equal: plain training, each other, and their own tape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.catalog import Catalog
from manifests.errors import Failure
from manifests.store import Store
from tiny import copy_store, silent, start_run, train_alone, train_together, unhurried
from trainer.feed import open_stream
from trainer.island import Island
from trainer.members import members, say_left
from trainer.model import build_model, learning_rate, make_optimizer, parameters_of, token_losses
from trainer.quantise import Tensors
from trainer.run import Run
from trainer.syncer import Syncer
from trainer.tape import first_state, read_global, replay, snapshots


class Killed(Exception):
    """What a test's fault raises."""


def _lockstep(run: Run, islands: list[Island], *, rounds: int | None = None) -> Syncer:
    """All in this thread: a round of each island, then the merges, then their receipt."""
    syncer = Syncer(run, emit=silent, in_background=False)
    for _ in range(rounds if rounds is not None else run.config.num_rounds):
        for island in islands:
            island.train_round()
        _merge_all(syncer)
        for island in islands:
            island.receive_now()
    return syncer


def _merge_all(syncer: Syncer) -> None:
    for number in range(len(syncer.anatomy.fragments)):
        syncer._look_for_gradients()
        syncer._consider(number, flush=True)


def _islands(run: Run, numbers: list[int] | None = None) -> list[Island]:
    return [
        Island(run, number, emit=silent, in_background=False)
        for number in (numbers if numbers is not None else range(run.config.num_islands))
    ]


def _plain(run: Run) -> Tensors:
    """What training without islands makes of the first island's data."""
    config = run.config
    model = build_model(config)
    optimizer = make_optimizer(model, config)
    stream = open_stream(run, Catalog(run.store), island=0, weights={"S": 0.2, "A": 0.4, "B": 0.3, "C": 0.1})
    for step in range(config.steps):
        tokens = [torch.from_numpy(stream.next_sequence().tokens.astype("int64")) for _ in range(config.batch_size)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, config)
        optimizer.zero_grad(set_to_none=True)
        token_losses(model, torch.stack(tokens)).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
        optimizer.step()
    stream.close()
    return parameters_of(model)


def _own(island: Island) -> Tensors:
    return island.engine.read(list(island.anatomy.shapes))


ONE: dict[str, Any] = {
    "num_islands": 1,
    "strategies": ("balanced",),
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "wire": "fp32",
}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("merge", ["rda", "mean"])
def test_one_island_with_a_plain_outer_step_is_plain_training_to_the_bit(
    tiny_store: Store, fragments: int, merge: str
) -> None:
    run = start_run(tiny_store, "r", **ONE, sync_every=fragments, num_fragments=fragments, steps=12, merge=merge)
    islands = _islands(run)
    syncer = _lockstep(run, islands)
    plain = _plain(run)
    own = _own(islands[0])
    assert all(torch.equal(own[name], plain[name]) for name in plain)
    if (
        fragments == 1
    ):  # H = 1: the global parameters are those of the last step, but for what rounding of a difference leaves
        for name, value in syncer.state.parameters().items():
            torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-9)


def test_equal_islands_on_equal_data_are_as_one(tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ONE | {"outer_lr": 0.7, "outer_momentum": 0.9}
    alone = start_run(tiny_store, "alone", **options)
    one = _lockstep(alone, _islands(alone))
    together = start_run(tiny_store, "together", **(options | {"num_islands": 3}))
    islands = _islands(together)
    for island in islands[1:]:
        island.feed.stream = open_stream(together, Catalog(tiny_store), island=0, weights=island.mixture.weights)
    three = _lockstep(together, islands)
    for name, value in one.state.parameters().items():
        torch.testing.assert_close(three.state.parameters()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
def test_a_replay_of_the_tape_gives_the_global_parameters_to_the_bit(tiny_store: Store, wire: str) -> None:
    run = start_run(tiny_store, "r", wire=wire, num_islands=3, steps=12)
    train_together(run)
    anatomy = first_state(run)[1]
    seen: list[int] = []
    state = replay(run, anatomy, start=0, on_merge=seen.append)
    assert seen == list(range(1, state.merge + 1))
    assert len(seen) >= 6
    followed = read_global(run, anatomy)
    last = replay(run, anatomy)
    for number, fragment in enumerate(state.fragments):
        for name, value in fragment.outer.parameters.items():
            assert torch.equal(value, followed.parameters[number][name])
            assert torch.equal(value, last.fragments[number].outer.parameters[name])
        for name, value in fragment.outer.momentum.items():
            assert torch.equal(value, last.fragments[number].outer.momentum[name])


def test_a_tape_that_was_tampered_with_is_named(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1, strategies=("balanced",))
    _lockstep(run, _islands(run))
    anatomy = first_state(run)[1]
    first = run.outer_path(0, 1, 0)
    other = run.outer_path(0, 3, 0)
    (tiny_store.root / first).write_bytes(tiny_store.get(other))
    with pytest.raises(Failure, match="merge 1 of run r comes out otherwise"):
        replay(run, anatomy, start=0)
    tiny_store.delete(first)
    with pytest.raises(Failure, match="merge 1 of run r can't be made again"):
        replay(run, anatomy, start=0)


@pytest.mark.parametrize(("wire", "killed_after"), [("int4", 1), ("fp32", 5), ("int4", 7)])
def test_an_island_killed_amid_merges_goes_on_as_if_it_never_had(
    tiny_store: Store, tmp_path: Path, wire: str, killed_after: int
) -> None:
    options: dict[str, Any] = {"wire": wire, "num_fragments": 2, "sync_every": 4, "steps": 16, "checkpoint_cycles": 2}
    whole_store = copy_store(tiny_store, tmp_path / "whole")
    whole = start_run(whole_store, "r", **options)
    islands = _islands(whole)
    expected = _lockstep(whole, islands)

    run = start_run(tiny_store, "r", **options)
    broken = _islands(run)
    _lockstep(run, broken, rounds=killed_after)
    broken[0].close()
    again = Island(run, 0, emit=silent, in_background=False)
    assert again.progress.round == killed_after
    again.receive_now()
    syncer = _lockstep(run, [again, broken[1]], rounds=run.config.num_rounds - killed_after)
    for name, value in _own(islands[0]).items():
        assert torch.equal(_own(again)[name], value)
    for name, value in expected.state.parameters().items():
        assert torch.equal(syncer.state.parameters()[name], value)


def test_an_island_that_is_far_behind_leaps_to_a_snapshot_and_stands_where_the_tape_is(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", steps=32, num_islands=2)
    late, busy = _islands(run)
    _lockstep(run, [busy], rounds=30)
    assert late.progress.merge == 0
    receipts = late._follower.leap()
    assert receipts
    assert receipts[0].merge in snapshots(run)
    late._install(receipts)
    late.receive_now()
    followed = read_global(run, late.anatomy)
    own = _own(late)
    for parameters in followed.parameters:
        for name, value in parameters.items():
            torch.testing.assert_close(own[name], value)


def test_what_rounding_keeps_back_reaches_the_others_in_the_end(tiny_store: Store) -> None:
    """Error feedback: with 4 bits the global parameters stay as near to the island's own as one step's rounding."""
    run = start_run(tiny_store, "r", **(ONE | {"wire": "int4"}), steps=24, sync_every=2)
    islands = _islands(run)
    syncer = _lockstep(run, islands)
    own, start = _own(islands[0]), first_state(run)[0].parameters()
    apart = sum(float((own[n] - v).pow(2).sum()) for n, v in syncer.state.parameters().items()) ** 0.5
    gone = sum(float((own[n] - v).pow(2).sum()) for n, v in start.items()) ** 0.5
    assert apart < 0.05 * gone


def test_an_island_that_comes_late_takes_the_global_state_and_does_not_become_it(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", steps=16, num_islands=1, strategies=("balanced",), merge="mean")
    first = _islands(run)
    syncer = _lockstep(run, first, rounds=14)
    before = {name: value.clone() for name, value in syncer.state.parameters().items()}
    first[0].close()
    late = Island(run, 5, emit=silent, in_background=False)  # alone, fresh, and none that the run was planned for
    assert all(torch.equal(value, before[name]) for name, value in _own(late).items())
    late.train_round()
    syncer._members_at = -1.0
    syncer._look_for_members()
    _merge_all(syncer)
    moved = sum(float((value - before[name]).pow(2).sum()) for name, value in syncer.state.parameters().items()) ** 0.5
    size = sum(float(value.pow(2).sum()) for value in before.values()) ** 0.5
    start = first_state(run)[0].parameters()
    back = sum(float((start[name] - value).pow(2).sum()) for name, value in before.items()) ** 0.5
    assert 0 < moved < 0.5 * back
    assert moved < 0.1 * size


def test_an_island_that_is_told_to_leave_stops_at_a_rounds_edge_and_comes_back(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", steps=24)
    statuses: list[dict[str, Any]] = []

    def leave_early(status: dict[str, Any]) -> None:
        statuses.append(status)
        if status["state"] == "training":
            unhurried(status)
            if status["step"] == 6:
                say_left(run, 1)

    Island(run, 1, emit=leave_early).train()
    assert statuses[-1]["state"] == "left"
    assert 6 <= statuses[-1]["step"] < 24
    assert members(run)[1].left
    recorded = Catalog(tiny_store).rows("SELECT max(step) AS step FROM checkpoints WHERE run = 'r' AND island = 1")
    assert recorded == [{"step": statuses[-1]["step"]}]
    train_alone(run, 0)
    assert Syncer(run, emit=silent).serve() is not None  # it doesn't wait for the one that has left

    back = Island(run, 1, emit=silent, in_background=False)
    assert not members(run)[1].left
    assert back.progress.step == statuses[-1]["step"]
    back.train()
    tokens = Catalog(tiny_store).rows("SELECT sum(tokens)::BIGINT AS n FROM consumption WHERE island = 1")
    assert tokens == [{"n": 24 * run.config.batch_size * run.config.seq_len}]


def test_an_object_of_no_round_that_a_run_has_silences_no_island(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r")
    for name in ("00009000-0000.safetensors", "00000001-0099.safetensors", "zzz"):
        tiny_store.put_new(f"{run.outer_folder(1)}/{name}", b"not an outer gradient")
    islands = [Island(run, number, emit=silent, in_background=False) for number in range(2)]
    syncer = _lockstep(run, islands)
    for island in islands:
        island.close()
    rounds = {number: fragment.merged_rounds for number, fragment in enumerate(syncer.state.fragments)}
    assert all(merged[0] == merged[1] <= run.config.num_rounds for merged in rounds.values())
    syncer.close()
