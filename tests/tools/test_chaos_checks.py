"""What is checked after chaos: a run that nothing happened to passes, and each planted breach is found by the check that is there for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from manifests.catalog import Catalog
from manifests.store import Store
from manifests.tables import append, create_store, open_table, read
from tests.trainer.tiny import fabricate, start_run
from tools.bench.turns import train_in_turn
from tools.chaos.checks import look
from tools.chaos.ledger import compare_streams, stream_of
from trainer.run import load_run
from trainer.wire import object_hash, pack, unpack

RUN = "r"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a run that is over; not to be changed."""
    store = create_store(str(tmp_path_factory.mktemp("trained") / "store"))
    fabricate(store)
    train_in_turn(start_run(store, RUN)).close()
    return store.root


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Store:
    """A copy of it, to be damaged."""
    return Store(str(shutil.copytree(trained, tmp_path / "store")))


def _found(store: Store) -> set[str]:
    return {finding.invariant for finding in look(store.uri, RUN, None)[1]}


def test_nothing_is_found_where_nothing_happened(trained: Path) -> None:
    facts, findings, stream = look(str(trained), RUN, stream_of(Catalog(Store(str(trained))), RUN))
    assert findings == []
    assert facts.merges == max(one.merge for one in facts.contributions) > 0
    assert facts.leftovers == facts.refused == 0
    assert len(stream) == 2 * load_run(Store(str(trained)), RUN).config.steps
    # Everything that the islands have learned went into a merge, once for each fragment.
    assert sum(one.steps for one in facts.contributions) == facts.fragments * len(stream)


def _duplicate_row(store: Store) -> None:
    append(store, "consumption", read(store, "consumption").slice(5, 1))


def _lose_token(store: Store) -> None:
    row = read(store, "consumption").slice(3, 1).to_pylist()[0]
    where = f"island = {row['island']} AND step = {row['step']} AND position = {row['position']}"
    open_table(store, "consumption").delete(where)
    append(store, "consumption", [row | {"tokens": row["tokens"] - 1}])


def _lose_step(store: Store) -> None:
    open_table(store, "consumption").delete("island = 1 AND step = 4")


def _move_to_dead_branch(store: Store) -> None:
    rows = read(store, "consumption")
    dead = pa.array([b"\x01" * 16] * rows.num_rows, rows.schema.field("checkpoint").type)
    checkpoint = next(row for row in read(store, "checkpoints").to_pylist() if row["island"] == 0 and row["round"] == 1)
    append(store, "checkpoints", [checkpoint | {"checkpoint": b"\x01" * 16, "object": ""}])
    append(
        store, "consumption", rows.set_column(rows.schema.get_field_index("checkpoint"), "checkpoint", dead).slice(0, 1)
    )


def _count_wrongly(store: Store) -> None:
    open_table(store, "checkpoints").update({"tokens_s": "tokens_s + 1"}, predicate="island = 0")


def _leave_object(store: Store) -> None:
    store.put_new(f"runs/{RUN}/islands/0000/strange.bin", b"x")


def _leave_outer_gradient(store: Store) -> None:
    store.put_new(f"runs/{RUN}/outer/0001/00009000-0000.safetensors", b"x")


def _leave_checkpoint(store: Store) -> None:
    store.put_new(f"runs/{RUN}/islands/0001/checkpoint-000099-000.safetensors", b"x")


def _leave_snapshot(store: Store) -> None:
    store.put_new(f"runs/{RUN}/snapshots/00000005/0000-outer-0123456789abcdef.safetensors", b"x")


def _change_received(store: Store) -> None:
    """One island's view of one fragment, with a checkpoint that is sound in itself."""
    row = next(row for row in read(store, "checkpoints").to_pylist() if row["island"] == 1 and row["object"])
    tensors, description = unpack(store.get(row["object"]), name="checkpoint")
    name = next(name for name in tensors if name.startswith("received/"))
    tensors[name] = tensors[name] + 1e-6
    data = pack(tensors, description)
    (store.root / row["object"]).write_bytes(data)
    open_table(store, "checkpoints").update({"hash": f"'{object_hash(data)}'"}, predicate=f"object = '{row['object']}'")


def _change_merge(store: Store) -> None:
    path = f"runs/{RUN}/merges/00000002.safetensors"
    tensors, description = unpack(store.get(path), name="merge")
    name = next(iter(tensors))
    tensors[name] = tensors[name] ^ 1 if not tensors[name].is_floating_point() else tensors[name] * 1.5
    (store.root / path).write_bytes(pack(tensors, description))


def _lose_outer_gradient(store: Store) -> None:
    sorted((store.root / f"runs/{RUN}/outer/0000").iterdir())[0].unlink()


def _lose_event(store: Store) -> None:
    open_table(store, "events").delete("kind = 'merge' AND version = 1")


def _repeat_event(store: Store) -> None:
    append(store, "events", [row for row in read(store, "events").to_pylist() if row["kind"] == "merge"][:1])


def _lose_file(store: Store) -> None:
    sorted((store.root / "tables/mixtures").glob("*.parquet"))[0].unlink()


BREACHES: list[tuple[Callable[[Store], None], str]] = [
    (_duplicate_row, "ledger"),
    (_lose_token, "ledger"),
    (_lose_step, "ledger"),
    (_move_to_dead_branch, "ledger"),
    (_count_wrongly, "ledger"),
    (_leave_object, "orphans"),
    (_leave_outer_gradient, "orphans"),
    (_leave_checkpoint, "orphans"),
    (_leave_snapshot, "orphans"),
    (_change_received, "global state"),
    (_change_merge, "global state"),
    (_lose_outer_gradient, "global state"),
    (_lose_event, "tape"),
    (_repeat_event, "tape"),
    (_lose_file, "tables"),
]


@pytest.mark.parametrize(("plant", "invariant"), BREACHES, ids=[plant.__name__.strip("_") for plant, _ in BREACHES])
def test_planted_breach_is_found(store: Store, plant: Callable[[Store], None], invariant: str) -> None:
    plant(store)
    assert invariant in _found(store)


def test_another_stream_is_found(trained: Path) -> None:
    stream = stream_of(Catalog(Store(str(trained))), RUN)
    (finding,) = compare_streams({**stream, (1, 3): "other"}, stream)
    assert "step 3 of island 1" in finding.what
    assert compare_streams(stream, {**stream, (0, 99): "more"})
