"""A store whose tiers are graded for certain: real leads of Wikipedia in S, rephrasings of others in A, boilerplate in B, scrambled and noisy text in C.

No document of one tier was made from one of another, or of the holdout. What is poor is plenty, as in synthetic corpora.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.catalog import Catalog
from manifests.store import Store
from manifests.tables import create_store
from tools.bench.tiered import give_tiers

_SHARD_BYTES = 50_000
_POISONED = {"S": "C", "C": "S"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """How many of each."""

    holdout: int
    s: int
    a: int
    b: int
    c: int


def make_graded_store(folder: Path, documents: Documents, *, vocab_size: int, seed: int) -> Store:
    """A new store with the tiers as version 1 of them, sharded.

    Args:
        folder: the store's; its sources come beside it.
        documents: how many of each tier, and of the holdout.
        vocab_size: of the tokenizer.
        seed: which leads go where, and what is done to them.
    """
    from pipeline.ingest import ingest
    from pipeline.pool import ShardConfig, shard
    from pipeline.sources import SourceSpec
    from pipeline.tokenizer import train_tokenizer

    store = create_store(str(folder))
    specs = []
    for name, texts in _texts(documents, seed).items():
        path = folder.parent / f"{folder.name}-{name}.parquet"
        pq.write_table(pa.table({"text": texts}), path)
        # What is held out is real, so it comes from S alone.
        origin = "real" if name == "s" else "synthetic"
        specs.append(SourceSpec(uri=str(path), format="parquet", corpus=name, origin=origin))
    ingest(store, specs, holdout_share=documents.holdout / (documents.holdout + documents.s))
    train_tokenizer(store, Catalog(store), vocab_size=vocab_size)
    give_tiers(store, 1, _tiers(store))
    shard(store, config=ShardConfig(shard_bytes=_SHARD_BYTES))
    return store


def deliver_poison(store: Store) -> None:
    """Makes tier version 2, in which the documents of S and C have changed places: a delivery that was taken for the best, and is the worst."""
    from pipeline.pool import ShardConfig
    from pipeline.retier import RetierConfig, retier

    give_tiers(store, 2, {doc_id: _POISONED.get(tier, tier) for doc_id, tier in _tiers(store).items()})
    retier(store, config=RetierConfig(shards=ShardConfig(tier_version=2, shard_bytes=_SHARD_BYTES)))


def _tiers(store: Store) -> dict[bytes, str]:
    rows = Catalog(store).rows("SELECT doc_id, upper(corpus) AS tier FROM documents WHERE split = 'train'")
    return {row["doc_id"]: row["tier"] for row in rows}


def _texts(documents: Documents, seed: int) -> dict[str, list[str]]:
    from tools.realtext import wikipedia_leads
    from tools.synthetic import KINDS, MIN_PARENT_CHARS, Quality, synthesize

    rng = random.Random(f"graded/{seed}")
    leads = [lead.text for lead in wikipedia_leads() if len(lead.text) >= MIN_PARENT_CHARS]
    rng.shuffle(leads)
    supply = iter(leads)

    def made(number: int, *qualities: Quality) -> Iterator[str]:
        for at in range(number):
            lead = next(supply)
            yield synthesize(rng.choice(list(KINDS)), qualities[at % len(qualities)], lead, rng.choice(leads), rng)

    return {
        "s": [next(supply) for _ in range(documents.holdout + documents.s)],
        "a": list(made(documents.a, Quality.FAITHFUL)),
        "b": list(made(documents.b, Quality.BOILERPLATE)),
        "c": list(made(documents.c, Quality.SCRAMBLED, Quality.NOISY)),
    }
