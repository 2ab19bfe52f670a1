"""Stores ready to train on for benchmarks that ask nothing of the scores: real text, tiers given by hand, shards. Scoring would take minutes and change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from manifests.catalog import Catalog
from manifests.jobs import make_job
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import create_store


def make_tiered_store(
    folder: Path,
    text: Path,
    *,
    corpus: str,
    holdout_share: float,
    vocab_size: int,
    tiers: Sequence[str],
    shard_bytes: int | None = None,
) -> Store:
    """A new store with the documents of a Parquet file, a tokenizer of their own, a holdout, and shards.

    Args:
        folder: the store's.
        text: the file.
        corpus: its name.
        holdout_share: share of the documents that is kept aside.
        vocab_size: of the tokenizer.
        tiers: what the documents get in turn, by their ids.
        shard_bytes: size of a shard; None: the usual.
    """
    from pipeline.ingest import ingest
    from pipeline.pool import ShardConfig, shard
    from pipeline.sources import SourceSpec
    from pipeline.tokenizer import train_tokenizer

    store = create_store(str(folder))
    ingest(store, [SourceSpec(uri=str(text), format="parquet", corpus=corpus)], holdout_share=holdout_share)
    train_tokenizer(store, Catalog(store), vocab_size=vocab_size)
    documents = Catalog(store).rows("SELECT doc_id FROM documents WHERE split = 'train' ORDER BY doc_id")
    give_tiers(store, 1, {row["doc_id"]: tiers[n % len(tiers)] for n, row in enumerate(documents)})
    shard(store, config=ShardConfig() if shard_bytes is None else ShardConfig(shard_bytes=shard_bytes))
    return store


def give_tiers(store: Store, tier_version: int, tiers: Mapping[bytes, str]) -> None:
    """Makes a tier version by hand: the tier of every document of the split to train on. All of a tier have one score; within it, their ids decide where documents lie."""
    job = make_job(store, "tier", config={"tier_version": tier_version}, inputs={})
    same = {"tier_version": tier_version, "method": "by hand", "job": job.id}
    rows = [
        same | {"doc_id": doc_id, "tier": tier, "score": -float(TIERS.index(tier))}
        for doc_id, tier in sorted(tiers.items())
    ]
    job.append("tiers", rows, part=1)
    job.append("tier_versions", [same | {"parameters": "{}", "thresholds": "{}"}], part=1)
    job.commit({})
