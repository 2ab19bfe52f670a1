"""A small run and a branch of it, made by hand, so that every question has an answer that can be worked out by hand.

Each document lies alone in a shard of its name. Run `r` has two islands and one fragment: island 0 closes A1 and A2, island 1 B1 and B2. A1 was
merged as version 1, which B2 had seen. Branch `b` keeps that merge; island 0 goes on from A1 (C2, C3), island 1 from B1 (D2, D3). C2 was merged
as version 2, which D3 had seen. A segment with document d was never committed.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from manifests.catalog import Catalog
from manifests.consumption import append_consumption
from manifests.jobs import make_job
from manifests.store import Store
from manifests.tables import append, to_table

DOCS = {name: name.encode() * 16 for name in "abcde"}
KINDS = {"a": ("x", "l"), "b": ("x", "l"), "c": ("y", "l"), "d": ("y", "l"), "e": ("z", "closed")}
"""Document → corpus and licence."""
START = datetime(2026, 1, 31, 12, tzinfo=UTC)
A1, A2, B1, B2, GLOBAL, C2, C3, D2, D3, GLOBAL_B = (bytes([n]) * 16 for n in range(1, 11))
NAMES = {
    A1: "A1", A2: "A2", B1: "B1", B2: "B2", GLOBAL: "GLOBAL", C2: "C2", C3: "C3", D2: "D2", D3: "D3", GLOBAL_B: "GLOBAL_B",
}  # fmt: skip


def tell(store: Store) -> Catalog:
    """Writes it all into a new store."""
    _write_documents(store)
    _write_tiers(store)
    branch = {"parent_run": "r", "merge": 1, "clock": [1], "island_checkpoints": {"0": A1.hex(), "1": B1.hex()}}
    plain = {"config": "{}", "command": "c", "code_version": "v"}
    append(store, "runs", [plain | {"run": "r"}, plain | {"run": "b", "parent_run": "r", "branch": json.dumps(branch)}])
    rows = [
        _checkpoint(A1, "r", 0, 1, clock=0, holdout_loss=2.0),
        _checkpoint(B1, "r", 1, 1, clock=0, holdout_loss=3.0),
        _checkpoint(A2, "r", 0, 2, clock=0, parent=A1, holdout_loss=1.0),
        _checkpoint(B2, "r", 1, 2, clock=1, parent=B1),
        _checkpoint(GLOBAL, "r", -1, 1, clock=1, merged=(A1,), holdout_loss=2.5),
        _checkpoint(C2, "b", 0, 2, clock=1, parent=A1, holdout_loss=1.5),
        _checkpoint(D2, "b", 1, 2, clock=1, parent=B1),
        _checkpoint(C3, "b", 0, 3, clock=1, parent=C2, holdout_loss=1.0),
        _checkpoint(D3, "b", 1, 3, clock=2, parent=D2, holdout_loss=2.0),
        _checkpoint(GLOBAL_B, "b", -1, 2, clock=2, merged=(C2,), holdout_loss=1.5),
    ]
    append(store, "checkpoints", [row | {"written_at": START + timedelta(minutes=n)} for n, row in enumerate(rows)])
    spans = [
        _span(A1, "r", 0, 1, "a", "S", 10, loss=4.0),
        _span(A2, "r", 0, 2, "b", "S", 20, loss=3.0, contribution=0.5),
        _span(B1, "r", 1, 1, "c", "B", 40, loss=5.0),
        _span(B2, "r", 1, 2, "c", "B", 80, loss=2.0, contribution=-0.25),
        _span(b"never committed!", "r", 1, 3, "d", "C", 160, loss=1.0),
        _span(C2, "b", 0, 2, "e", "A", 5, loss=6.0, contribution=0.25),
        _span(C2, "b", 0, 2, "e", "A", 6, loss=None, token_start=5),
        _span(C3, "b", 0, 3, "b", "S", 20, loss=2.0, contribution=1.0),
        _span(D2, "b", 1, 2, "c", "B", 40, loss=4.0),
        _span(D3, "b", 1, 3, "a", "S", 7, loss=1.0),
    ]
    append_consumption(store, to_table("consumption", spans), writer="w", sequence=1)
    append(store, "events", [_merge("r", 1, A1), _merge("b", 2, C2)])
    return Catalog(store)


def _write_documents(store: Store) -> None:
    job = make_job(store, "ingest", config={}, inputs={})
    documents, places, shards = [], [], []
    for name, doc_id in DOCS.items():
        corpus, license_ = KINDS[name]
        kind = {"corpus": corpus, "origin": "real", "license": license_, "access": "public", "job": job.id}
        documents.append(
            kind | {"doc_id": doc_id, "split": "train", "text_bytes": 1, "source_uri": "u", "source_row": 0}
        )
        places.append({"pool": "p", "shard": name, "position": 0, "doc_id": doc_id, "tokens": 99, "job": job.id})
        size = {"documents": 1, "tokens": 99, "raw_bytes": 1, "zip_bytes": 1, "score_low": 0.0, "score_high": 1.0}
        shards.append(kind | size | {"pool": "p", "shard": name, "tier": "S", "entry": "{}"})
    job.append("documents", documents, part=1)
    job.append("shards", places, part=1)
    job.append("shard_index", shards, part=1)
    job.commit({})


def _write_tiers(store: Store) -> None:
    """Between versions 1 and 2 a moved from S to A, c from B to A; d was left out, e came in. Document d is forgotten."""
    job = make_job(store, "tier", config={}, inputs={})
    for version, tiers in (
        (1, {"a": "S", "b": "S", "c": "B", "d": "C"}),
        (2, {"a": "A", "b": "S", "c": "A", "e": "C"}),
    ):
        rows = [
            {"tier_version": version, "doc_id": DOCS[name], "tier": tier, "score": 1.0, "method": "m", "job": job.id}
            for name, tier in tiers.items()
        ]
        job.append("tiers", rows, part=version)
    tombstone = {
        "doc_id": DOCS["d"],
        "corpus": "y",
        "license": "l",
        "access": "public",
        "predicate": "p",
        "reason": "r",
    }
    job.append("tombstones", [tombstone | {"job": job.id}], part=3)
    job.commit({})


def _checkpoint(
    identity: bytes,
    run: str,
    island: int,
    round_: int,
    *,
    clock: int,
    parent: bytes | None = None,
    merged: tuple[bytes, ...] = (),
    holdout_loss: float | None = None,
) -> dict[str, Any]:
    return {
        "checkpoint": identity, "run": run, "island": island, "incarnation": 0, "round": round_, "step": round_, "tokens": 0,
        "tokens_s": 0, "tokens_a": 0, "tokens_b": 0, "tokens_c": 0, "clock": [clock], "parent": parent, "merged": list(merged),
        "object": "o", "hash": "h", "size_bytes": 1, "stream": "{}", "mixture": "{}", "anchor": True, "loss": 1.0,
        "holdout_loss": holdout_loss,
    }  # fmt: skip


def _span(
    checkpoint: bytes,
    run: str,
    island: int,
    step: int,
    doc: str,
    tier: str,
    tokens: int,
    *,
    loss: float | None,
    token_start: int = 0,
    contribution: float | None = None,
) -> dict[str, Any]:
    return {
        "run": run, "island": island, "incarnation": 0, "step": step, "position": 0, "shard": doc, "shard_position": 0, "tier": tier,
        "origin": "real", "token_start": token_start, "tokens": tokens, "loss": loss, "checkpoint": checkpoint,
        "contribution": contribution,
    }  # fmt: skip


def _merge(run: str, merge: int, checkpoint: bytes) -> dict[str, Any]:
    contribution = {
        "island": 0,
        "checkpoint": checkpoint.hex(),
        "base_version": 0,
        "tokens": 10,
        "steps": 1,
        "weight": 100.0,
    }
    detail = json.dumps({"merge": merge, "contributions": [contribution]})
    return {"run": run, "kind": "merge", "fragment": 0, "version": merge, "detail": detail}
