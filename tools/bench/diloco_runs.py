"""A small run for DiLoCo's benchmarks, and what the store says of it once it has ended.

Functions with an address of a store are for `diloco_processes.call`: torch, and the keys of a store, belong in no benchmark's own process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.catalog import Catalog
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import open_store
from tools.bench.tiered import make_tiered_store
from trainer.run import Run


def make_store(folder: Path, *, num_documents: int, vocab_size: int) -> str:
    """A store of code from the standard library, with a holdout and shards; its documents lie in the tiers in turn. Returns its address."""
    from tools.realtext import export_stdlib_code

    text = folder / "code.parquet"
    export_stdlib_code(text, num_documents=num_documents, seed=1)
    return make_tiered_store(
        folder / "store", text, corpus="python", holdout_share=0.2, vocab_size=vocab_size, tiers=TIERS
    ).uri


def copy_store(source: str, target: str) -> None:
    """Every object of a store, in another one."""
    old, new = Store(source), Store(target)
    for info in old.list(""):
        new.put_new(info.path, old.get(info.path))


def prepare(store_uri: str, run: str, options: Mapping[str, Any]) -> None:
    """Makes a run and the state that it begins with."""
    from trainer.plan import configure_run
    from trainer.run import create_run
    from trainer.tape import prepare_run

    store = open_store(store_uri)
    prepare_run(create_run(store, configure_run(store, run=run, tier_version=None, device="cpu", **options)))


def tell_to_leave(store_uri: str, run: str) -> None:
    """Tells every island to stop at its round's edge."""
    from trainer.members import members, say_left
    from trainer.run import load_run

    its_run = load_run(open_store(store_uri), run)
    for island in members(its_run):
        say_left(its_run, island)


# What came of it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """A merge as the tape's event tells it."""

    at: float
    """Seconds since the epoch."""
    merge: int
    version: int
    contributions: list[dict[str, Any]]
    dropped: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the store says of a run."""

    merges: list[Merge]
    tokens: dict[int, int]
    """In the ledger, by island."""
    loss_then: float | None
    """Holdout loss of the global parameters as they were at the moment that was asked for, nats per token."""
    lines: list[dict[str, Any]]
    """Of the metrics."""
    holdout_loss: float | None
    """Of the last global parameters."""

    def count_mismatches(self, steps: Mapping[int, int], *, step_tokens: int) -> int:
        """Islands whose tokens in the ledger aren't those of the steps that they said they took."""
        return sum(self.tokens.get(island, 0) != taken * step_tokens for island, taken in steps.items())


def read_outcome(store_uri: str, run: str, then: float | None) -> Outcome:
    """Reads all of it; `then` is when the loss between is of, seconds since the epoch."""
    from trainer.metrics import read_metrics
    from trainer.run import load_run
    from trainer.syncer import finished_loss

    store = open_store(store_uri)
    catalog = Catalog(store)
    its_run = load_run(store, run, catalog=catalog)
    merges = []
    for row in catalog.rows(
        "SELECT epoch(written_at) AS written, version, detail FROM events WHERE run = ? AND kind = 'merge' ORDER BY written",
        [run],
    ):
        detail = json.loads(row["detail"])
        merges.append(
            Merge(
                at=row["written"],
                merge=detail["merge"],
                version=row["version"],
                contributions=detail["contributions"],
                dropped=detail["dropped"],
            )
        )
    tokens = catalog.rows(
        "SELECT island, sum(tokens)::BIGINT AS tokens FROM consumption WHERE run = ? GROUP BY island", [run]
    )
    return Outcome(
        merges=merges,
        tokens={row["island"]: row["tokens"] for row in tokens},
        loss_then=None if then is None else _loss_after(its_run, catalog, sum(merge.at <= then for merge in merges)),
        lines=read_metrics(store, run)[0],
        holdout_loss=finished_loss(its_run),
    )


def _loss_after(run: Run, catalog: Catalog, merge: int) -> float:
    from trainer.feed import holdout_tokens
    from trainer.model import build_model, holdout_loss, parameters_of
    from trainer.tape import anatomy_of, read_global

    model = build_model(run.config)
    own = parameters_of(model)
    for parameters in read_global(run, anatomy_of(run, model), merge=merge).parameters:
        for name, value in parameters.items():
            own[name].copy_(value)
    return holdout_loss(model, holdout_tokens(run, catalog))
