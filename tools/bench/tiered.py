"""A store ready to train on for a benchmark that asks nothing of the tiers: real text, tiers given by hand, shards. Scoring would take minutes and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manifests.catalog import Catalog
from manifests.jobs import make_job
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
    job = make_job(store, "tier", config={}, inputs={})
    same = {"tier_version": 1, "method": "in turn", "job": job.id}
    documents = Catalog(store).rows("SELECT doc_id FROM documents WHERE split = 'train' ORDER BY doc_id")
    # One score for all of a tier: within it, their ids decide where documents lie.
    places = [n % len(tiers) for n in range(len(documents))]
    rows = [same | row | {"tier": tiers[at], "score": -float(at)} for at, row in zip(places, documents, strict=True)]
    job.append("tiers", rows, part=1)
    job.append("tier_versions", [same | {"parameters": "{}", "thresholds": "{}"}], part=1)
    job.commit({})
    shard(store, config=ShardConfig() if shard_bytes is None else ShardConfig(shard_bytes=shard_bytes))
    return store
