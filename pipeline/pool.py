"""The job that writes tokenised documents into the pool of shards, and a view for each tier.

Shards are named by their content and never rewritten. Each holds documents of one tier and one kind (corpus, origin, generator, prompt, licence, access), in order of
their score: so a threshold that moves re-assigns whole shards, and so does a question or a policy about kinds. The text stays in its source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Job, Report, make_parted_job, report_nothing
from manifests.mds import index_json
from manifests.policy import Rights, rights_inputs, that_may_be_read
from manifests.schemas import TIERS
from manifests.store import Store
from pipeline.bands import HOLDOUT, KIND, Task, cut_parts, write_parts
from pipeline.engine import Engine, InProcess
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """What decides the shards' content."""

    tier_version: int | None = None
    """Tier version that views are written of; None: the newest."""
    shard_bytes: int = 1 << 20
    """Largest uncompressed size of a shard; a document that is larger alone gets a shard of its own."""
    zstd_level: int = 3
    tokenizer: str | None = None
    """Id of the store's tokenizer; None: the only one."""

    def __post_init__(self) -> None:
        if not 1 << 10 <= self.shard_bytes < 1 << 32:
            raise UserError(f"shard size {self.shard_bytes}: it must lie between 1 KiB and 4 GiB")


def shard(
    store: Store, *, config: ShardConfig, engine: Engine | None = None, report: Report = report_nothing
) -> dict[str, Any]:
    """Tokenises the documents of a tier version and its holdout, writes the shards that are missing, and commits a view for each tier.

    Args:
        engine: where parts of the documents are worked on; None: in this process. The shards are the same.

    Returns:
        The summary: tier_version, pool, shards, bytes, and tiers with documents and tokens; `already_done` where it was.

    Raises:
        UserError: no such tier version, or no tokenizer.
        Failure: a source has changed or gone.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:shard"))
    tier_version = find_tier_version(catalog, config.tier_version)
    tokenizer = load_tokenizer(store, catalog, config.tokenizer)
    pool = pool_of(tokenizer)
    job = make_parted_job(
        store,
        "shard",
        config=asdict(config) | {"tier_version": tier_version, "tokenizer": tokenizer.id},
        inputs={
            "documents": [r["job"] for r in catalog.rows("SELECT job FROM jobs WHERE kind = 'ingest' ORDER BY job")],
            **rights_inputs(catalog.rights),
        },
    )
    done = job.summary()
    if done is not None:
        return done | {"already_done": True}
    require_no_views(catalog, tier_version, pool)
    columns = ", ".join(KIND)
    documents = f"""
        SELECT doc_id, t.tier, t.score, {columns}, NULL::INTEGER AS shard, NULL::INTEGER AS position
        FROM tiers AS t JOIN documents USING (doc_id) WHERE tier_version = $version
        UNION ALL
        SELECT doc_id, '{HOLDOUT}', NULL, {columns}, NULL, NULL FROM documents WHERE split = '{HOLDOUT}'
    """
    parts = cut_parts(catalog, documents, {"version": tier_version})
    if not parts:
        raise UserError(f"tier version {tier_version} has no documents to shard{that_may_be_read(catalog.rights)}")
    written = write_parts(job, task_of(job, tokenizer, config, catalog.rights), parts, engine or InProcess(), report)
    tiers = write_views(job, tier_version, pool, written)
    if not catalog.rows("SELECT 1 FROM pools WHERE pool = ?", [pool]):
        row = {
            "pool": pool,
            "tokenizer": tokenizer.id,
            "token_dtype": np.dtype(tokenizer.token_dtype).name,
            "job": job.id,
        }
        job.append("pools", [row], part=1)
    summary = {
        "tier_version": tier_version,
        "pool": pool,
        "shards": sum(tier["shards"] for tier in tiers.values()),
        "documents": sum(tier["documents"] for tier in tiers.values()),
        "tokens": sum(tier["tokens"] for tier in tiers.values()),
        "zip_bytes": sum(tier["zip_bytes"] for tier in tiers.values()),
        "tiers": tiers,
    }
    job.commit(summary)
    return summary


def pool_of(tokenizer: LoadedTokenizer) -> str:
    """Name of the pool of a tokenizer's tokens."""
    return f"{tokenizer.id[:16]}-{np.dtype(tokenizer.token_dtype).name}"


def find_tier_version(catalog: Catalog, wanted: int | None) -> int:
    """The version wanted, or the newest.

    Raises:
        UserError: there is none.
    """
    versions = [row["tier_version"] for row in catalog.rows("SELECT tier_version FROM tier_versions ORDER BY 1")]
    if not versions:
        raise UserError(f"{catalog.store.uri} has no tiers; run `atoll score`, then `atoll tier`")
    if wanted is not None and wanted not in versions:
        raise UserError(f"no tier version {wanted}; there are {', '.join(map(str, versions))}")
    return wanted if wanted is not None else versions[-1]


def require_no_views(catalog: Catalog, tier_version: int, pool: str) -> None:
    """Views are written once: a run that reads them would lose its place in others."""
    if catalog.rows("SELECT 1 FROM views WHERE tier_version = ? AND pool = ?", [tier_version, pool]):
        raise UserError(
            f"tier version {tier_version} has been sharded into pool {pool} with other options or documents; `atoll tier` makes a new version of the tiers"
        )


def task_of(job: Job, tokenizer: LoadedTokenizer, config: ShardConfig, rights: Rights | None) -> Task:
    """What workers must know of a job."""
    return Task(
        store=job.store.uri,
        job=job.id,
        pool=pool_of(tokenizer),
        tokenizer=tokenizer.id,
        token_dtype=tokenizer.token_dtype.str,
        rights=rights,
        shard_bytes=config.shard_bytes,
        zstd_level=config.zstd_level,
    )


def write_views(
    job: Job, tier_version: int, pool: str, members: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Writes each tier's index.json and its row; a tier without documents gets none.

    Args:
        members: the shards of all views, with tier, shard, entry, documents, tokens, zip_bytes and score_high.
    """
    ordered = sorted(members, key=lambda member: (-member["score_high"], member["shard"]))
    tiers: dict[str, dict[str, int]] = {}
    rows, shard_rows = [], []
    for tier in (*TIERS, HOLDOUT):
        shards = [row for row in ordered if row["tier"] == tier]
        sums = {name: sum(row[name] for row in shards) for name in ("documents", "tokens", "zip_bytes")}
        tiers[tier] = {"shards": len(shards)} | sums
        if not shards:
            continue
        index = index_json([json.loads(row["entry"]) for row in shards])
        path = f"views/{tier_version:06d}/{pool}/{tier}-{xxhash.xxh3_128_hexdigest(index)}/index.json"
        job.store.put_content(path, index)
        rows.append(
            {
                "tier_version": tier_version,
                "pool": pool,
                "tier": tier,
                "object": path,
                "shards": len(shards),
                "documents": sums["documents"],
                "tokens": sums["tokens"],
                "job": job.id,
            }
        )
        view = {"tier_version": tier_version, "pool": pool, "tier": tier, "job": job.id}
        shard_rows += [
            view | {"position": position} | {name: row[name] for name in ("shard", "documents", "tokens")}
            for position, row in enumerate(shards)
        ]
    job.append("view_shards", shard_rows, part=1)
    job.append("views", rows, part=1)
    return tiers
