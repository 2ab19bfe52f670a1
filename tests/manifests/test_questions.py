"""The named questions on a hand-made run, with answers worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.consumption import append_consumption
from manifests.errors import UserError
from manifests.jobs import make_job
from manifests.store import Store
from manifests.tables import append, to_table

DOCS = {name: name.encode() * 16 for name in "abcd"}
# Each document lies alone in a shard of its name.
CORPUS = {"a": "x", "b": "x", "c": "y", "d": "y"}
A1, A2, B1, B2, GLOBAL = (bytes([n]) * 16 for n in range(1, 6))


def _checkpoint(
    identity: bytes, island: int, round_: int, *, parent: bytes | None, clock: list[int], merged: tuple[bytes, ...] = ()
) -> dict[str, Any]:
    return {
        "checkpoint": identity, "run": "r", "island": island, "incarnation": 0, "round": round_, "step": round_, "tokens": 0,
        "tokens_s": 0, "tokens_a": 0, "tokens_b": 0, "tokens_c": 0, "clock": clock, "parent": parent, "merged": list(merged),
        "object": "o", "hash": "h", "size_bytes": 1, "stream": "{}", "mixture": "{}", "anchor": True, "loss": 1.0, "holdout_loss": 2.0,
    }  # fmt: skip


def _span(checkpoint: bytes, island: int, doc: str, tier: str, tokens: int) -> dict[str, Any]:
    return {
        "run": "r", "island": island, "incarnation": 0, "step": 1, "position": 0, "shard": doc, "shard_position": 0, "tier": tier, "origin": "real",
        "token_start": 0, "tokens": tokens, "loss": 1.0, "checkpoint": checkpoint,
    }  # fmt: skip


def _shard(name: str, job: str) -> dict[str, Any]:
    return {
        "pool": "p", "shard": name, "tier": "S", "corpus": CORPUS[name], "origin": "real", "license": "l", "access": "public", "entry": "{}",
        "documents": 1, "tokens": 99, "raw_bytes": 1, "zip_bytes": 1, "score_low": 0.0, "score_high": 1.0, "job": job,
    }  # fmt: skip


@pytest.fixture
def catalog(store: Store) -> Catalog:
    """Two islands of two rounds. Island 0's first outer gradient was merged as version 1; only island 1 has seen that. A third segment was never committed."""
    job = make_job(store, "ingest", config={}, inputs={})
    documents = [
        {
            "doc_id": doc_id, "corpus": CORPUS[name], "origin": "real", "license": "l", "access": "public",
            "split": "train", "text_bytes": 1, "source_uri": "u", "source_row": 0, "job": job.id,
        }
        for name, doc_id in DOCS.items()
    ]  # fmt: skip
    job.append("documents", documents, part=1)
    places = [
        {"pool": "p", "shard": n, "position": 0, "doc_id": doc_id, "tokens": 99, "job": job.id}
        for n, doc_id in DOCS.items()
    ]
    job.append("shards", places, part=1)
    job.append("shard_index", [_shard(name, job.id) for name in DOCS], part=1)
    job.commit({})
    append(store, "runs", [{"run": "r", "config": "{}", "command": "c", "code_version": "v"}])
    append(
        store,
        "checkpoints",
        [
            _checkpoint(A1, 0, 1, parent=None, clock=[0]),
            _checkpoint(A2, 0, 2, parent=A1, clock=[0]),
            _checkpoint(B1, 1, 1, parent=None, clock=[0]),
            _checkpoint(B2, 1, 2, parent=B1, clock=[1]),
            _checkpoint(GLOBAL, -1, 1, parent=None, clock=[1], merged=(A1,)),
        ],
    )
    spans = [
        _span(A1, 0, "a", "S", 10),
        _span(A2, 0, "b", "S", 20),
        _span(B1, 1, "c", "B", 40),
        _span(B2, 1, "c", "B", 80),
        _span(b"never committed!", 1, "d", "C", 160),
    ]
    append_consumption(store, to_table("consumption", spans), writer="w", sequence=1)
    merge = {
        "merge": 1,
        "contributions": [
            {"island": 0, "checkpoint": A1.hex(), "base_version": 0, "tokens": 10, "steps": 1, "weight": 100.0}
        ],
    }
    append(store, "events", [{"run": "r", "kind": "merge", "fragment": 0, "version": 1, "detail": json.dumps(merge)}])
    return Catalog(store)


def _made(catalog: Catalog, checkpoint: bytes) -> list[tuple[str, str, int, int]]:
    rows = catalog.ask("checkpoint_mix", checkpoint=checkpoint).to_pylist()
    return [(row["corpus"], row["tier"], row["spans"], row["tokens"]) for row in rows]


def test_consumption_of_a_segment_that_was_never_committed_is_not_shown(catalog: Catalog) -> None:
    assert catalog.rows("SELECT sum(tokens)::BIGINT AS n FROM consumption") == [{"n": 150}]
    assert catalog.rows("SELECT sum(tokens)::BIGINT AS n FROM raw.consumption") == [{"n": 310}]


def test_island_checkpoint_is_made_of_its_own_segments(catalog: Catalog) -> None:
    assert _made(catalog, A1) == [("x", "S", 1, 10)]
    assert _made(catalog, A2) == [("x", "S", 2, 30)]


def test_island_checkpoint_is_made_of_what_had_gone_into_the_fragments_it_had_seen(catalog: Catalog) -> None:
    assert _made(catalog, B2) == [("y", "B", 2, 120), ("x", "S", 1, 10)]


def test_global_checkpoint_is_made_of_what_was_merged(catalog: Catalog) -> None:
    assert _made(catalog, GLOBAL) == [("x", "S", 1, 10)]


def test_merges_are_listed_by_outer_gradient(catalog: Catalog) -> None:
    rows = catalog.rows("SELECT merge, fragment, version, island, checkpoint, tokens FROM merges")
    assert rows == [{"merge": 1, "fragment": 0, "version": 1, "island": 0, "checkpoint": A1, "tokens": 10}]


def test_unknown_question_names_those_that_there_are(catalog: Catalog) -> None:
    with pytest.raises(UserError, match="checkpoint_mix"):
        catalog.ask("nothing")
