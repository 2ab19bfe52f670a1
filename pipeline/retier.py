"""Views of a new tier version over the shards of an earlier one: only the shards whose documents have parted are written anew.

A shard whose documents all stand in one tier of the new version goes into that tier's view as it is, wherever it stood before. The documents of all other shards, and those that no
shard has yet, are cut into bands of tier, kind and score as `atoll shard` does, their tokens taken from the old shards; texts are read for new documents only. The old version's views and shards
stay as they are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Report, make_parted_job, report_nothing
from manifests.mds import decode_shard, object_path
from manifests.policy import rights_inputs, that_may_be_read
from manifests.store import Store
from pipeline.pool import (
    HOLDOUT,
    Band,
    ShardConfig,
    cut_bands,
    find_tier_version,
    pool_of,
    require_no_views,
    tokenise,
    write_band,
    write_views,
)
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer
from pipeline.views import Member, members_of

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True, slots=True)
class RetierConfig:
    """What decides the views."""

    shards: ShardConfig
    """Of the shards that are written; its tier version is the new one."""
    base: int | None = None
    """Tier version whose shards are taken; None: the newest before the new one that has views."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a new tier version means for the shards of an earlier one."""

    tier_version: int
    base: int
    pool: str
    moved: Mapping[str, int]
    """Documents by move, as in `S to A`."""
    new: int
    """Documents that no shard of the base has."""
    gone: int
    """Documents of the base that are in no tier of the new version."""
    kept: Sequence[Mapping[str, Any]]
    """Rows for write_views of the shards that stay whole."""
    reassigned: int
    """Shards among those that go to another tier's view."""
    broken: Sequence[Member]
    """Shards whose documents are written anew."""

    def facts(self) -> dict[str, Any]:
        """The plan in numbers."""
        kept_bytes = sum(row["zip_bytes"] for row in self.kept)
        return {
            "tier_version": self.tier_version,
            "base": self.base,
            "pool": self.pool,
            "documents": {"moved": dict(self.moved), "new": self.new, "gone": self.gone},
            "shards": {
                "untouched": len(self.kept) - self.reassigned,
                "reassigned": self.reassigned,
                "rewritten": len(self.broken),
            },
            "zip_bytes": {"kept": kept_bytes, "rewritten": sum(member.zip_bytes for member in self.broken)},
        }


def plan_retier(store: Store, *, config: RetierConfig) -> Plan:
    """Says what `retier` would do, and writes nothing.

    Raises:
        UserError: no such tier version, no views to start from, or the version has views already.
    """
    ground = _Ground(store, config)
    require_no_views(ground.catalog, ground.tier_version, ground.pool)
    return _plan(ground)


def retier(
    store: Store,
    *,
    config: RetierConfig,
    announce: Callable[[dict[str, Any]], None] | None = None,
    report: Report = report_nothing,
) -> dict[str, Any]:
    """Writes the shards that the new tier version needs beside the base's, and commits a view for each tier.

    Args:
        announce: called with the plan's facts before anything is written.

    Returns:
        The summary: the plan's facts, the bytes written, tiers with shards, documents and tokens; `already_done` where it was.

    Raises:
        UserError: no such tier version, no views to start from, or the version was sharded in another way.
        Failure: a shard is damaged, or a source of a new document has changed or gone.
    """
    ground = _Ground(store, config)
    catalog, tier_version, base, pool = ground.catalog, ground.tier_version, ground.base, ground.pool
    job = make_parted_job(
        store,
        "shard",
        config=asdict(config.shards) | {"tier_version": tier_version, "base": base, "tokenizer": ground.tokenizer.id},
        inputs={
            "documents": [r["job"] for r in catalog.rows("SELECT job FROM jobs WHERE kind = 'ingest' ORDER BY job")],
            # An erasure writes a version's views anew.
            "views": [r["job"] for r in catalog.rows("SELECT DISTINCT job FROM views WHERE tier_version = ? AND pool = ? ORDER BY job", [base, pool])],
            **rights_inputs(catalog.rights),
        },
    )  # fmt: skip
    if (done := job.summary()) is not None:
        return done | {"already_done": True}
    require_no_views(catalog, tier_version, pool)
    plan = _plan(ground)
    if announce is not None:
        announce(plan.facts())
    source = _Source(catalog, ground.tokenizer, plan.broken)
    bands = list(_bands_to_write(catalog, plan)) if plan.broken or plan.new else []
    if not bands and not plan.kept:
        raise UserError(f"tier version {tier_version} has no documents to shard{that_may_be_read(catalog.rights)}")
    total, written = sum(len(band.scores) for band in bands), 0
    for part, band in enumerate(bands, start=1):
        if not job.has_part("shard_index", part):
            write_band(job, ground.tokenizer, pool, band, source.tokens(band), part=part, config=config.shards)
        written += len(band.scores)
        report("documents sharded", written, total)
    tiers = write_views(job, tier_version, pool, plan.kept)
    sums = "SELECT count(*) AS shards, coalesce(sum(zip_bytes), 0)::BIGINT AS bytes FROM raw.shard_index WHERE job = ?"
    (own,) = Catalog(store, tables=["shard_index"]).rows(sums, [job.id])
    facts = plan.facts()
    summary = facts | {
        "shards": facts["shards"] | {"written": own["shards"]},
        "zip_bytes": facts["zip_bytes"] | {"written": own["bytes"]},
        "tiers": tiers,
    }
    job.commit(summary)
    return summary


class _Ground:
    """What is re-tiered, and over which shards."""

    def __init__(self, store: Store, config: RetierConfig) -> None:
        self.catalog = Catalog(store, rights=rights_of(store, "job:shard"))
        self.tokenizer = load_tokenizer(store, self.catalog, config.shards.tokenizer)
        self.tier_version = find_tier_version(self.catalog, config.shards.tier_version)
        self.pool = pool_of(self.tokenizer)
        self.base = _base(self.catalog, config.base, self.tier_version, self.pool)


def _base(catalog: Catalog, wanted: int | None, tier_version: int, pool: str) -> int:
    sql = "SELECT DISTINCT tier_version AS v FROM views WHERE pool = ? AND tier_version <> ? ORDER BY v"
    versions = [row["v"] for row in catalog.rows(sql, [pool, tier_version])]
    earlier = [version for version in versions if version < tier_version]
    if wanted is None and earlier:
        return int(earlier[-1])
    if wanted is not None and wanted in versions:
        return wanted
    if wanted is None:
        require_no_views(catalog, tier_version, pool)
    told = f"; there are {', '.join(map(str, versions))}" if versions else ""
    which = "no earlier tier version" if wanted is None else f"tier version {wanted}"
    raise UserError(
        f"{which} has {'views' if wanted is None else 'no views'} in pool {pool}{told}; `atoll shard` writes the shards of a first one"
    )


def _plan(ground: _Ground) -> Plan:
    catalog, tier_version, base, pool = ground.catalog, ground.tier_version, ground.base, ground.pool
    rows = catalog.ask("retier_shards", base=base, version=tier_version, pool=pool).to_pylist()
    by_shard: dict[str, list[dict[str, Any]]] = defaultdict(list)
    moved: dict[str, int] = defaultdict(int)
    gone = 0
    for row in rows:
        by_shard[row["shard"]].append(row)
        if row["tier_after"] is None:
            gone += row["documents"]
        elif row["tier_after"] != row["tier_before"]:
            moved[f"{row['tier_before']} to {row['tier_after']}"] += row["documents"]
    kept: list[dict[str, Any]] = []
    broken: list[Member] = []
    reassigned = 0
    for member in members_of(catalog, base, pool):
        found = by_shard.get(member.shard, [])
        if len(found) != 1 or found[0]["tier_after"] is None:
            broken.append(member)
            continue
        tier = found[0]["tier_after"]
        reassigned += tier != member.tier
        kept.append(
            {
                "tier": tier,
                "shard": member.shard,
                "entry": json.dumps(member.entry, sort_keys=True),
                "documents": member.documents,
                "tokens": member.tokens,
                "zip_bytes": member.zip_bytes,
                "score_high": found[0]["score_high"],
            }
        )
    placed = sum(row["documents"] for row in rows if row["tier_after"] is not None)
    in_tiers = catalog.rows(
        "SELECT (SELECT count(*) FROM tiers WHERE tier_version = ? AND doc_id IN (SELECT doc_id FROM documents)) + (SELECT count(DISTINCT doc_id) FROM documents WHERE split = ?) AS n",
        [tier_version, HOLDOUT],
    )[0]["n"]
    return Plan(
        tier_version=tier_version,
        base=base,
        pool=pool,
        moved=dict(sorted(moved.items())),
        new=in_tiers - placed,
        gone=gone,
        kept=kept,
        reassigned=reassigned,
        broken=broken,
    )


def _bands_to_write(catalog: Catalog, plan: Plan) -> list[Band]:
    only = """
        doc_id IN (SELECT doc_id FROM shards WHERE shard IN (SELECT unnest(?::VARCHAR[])))
        OR doc_id NOT IN (
            SELECT doc_id FROM shards
            WHERE shard IN (SELECT shard FROM view_shards JOIN views USING (tier_version, pool, tier, job) WHERE tier_version = ? AND pool = ?)
        )
    """
    broken = [member.shard for member in plan.broken]
    return list(cut_bands(catalog, plan.tier_version, only=only, parameters=[broken, plan.base, plan.pool]))


class _Source:
    """Tokens of documents: from the shards that are given up, else from their texts."""

    def __init__(self, catalog: Catalog, tokenizer: LoadedTokenizer, broken: Sequence[Member]) -> None:
        self._catalog, self._tokenizer = catalog, tokenizer
        self._entries = {member.shard: member.entry for member in broken}

    def tokens(self, band: Band) -> dict[bytes, npt.NDArray[Any]]:
        """Tokens of every document of a band."""
        import pyarrow as pa

        tokens = self._from_shards(band.doc_ids)
        rest = [doc_id for doc_id in band.doc_ids.to_pylist() if doc_id not in tokens]
        if rest:
            tokens |= tokenise(self._catalog, self._tokenizer, pa.array(rest, pa.binary()))
        return tokens

    def _from_shards(self, doc_ids: pa.ChunkedArray[pa.BinaryScalar]) -> dict[bytes, npt.NDArray[Any]]:
        if not self._entries:
            return {}
        sql = """
            SELECT DISTINCT shard, position, doc_id FROM shards
            WHERE shard IN (SELECT unnest(?::VARCHAR[])) AND doc_id IN (SELECT unnest(?::BLOB[]))
            ORDER BY shard, position
        """
        tokens: dict[bytes, npt.NDArray[Any]] = {}
        places: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for row in self._catalog.rows(sql, [list(self._entries), doc_ids.to_pylist()]):
            places[row["shard"]].append((row["position"], row["doc_id"]))
        for shard, documents in places.items():
            data = self._catalog.store.get(object_path(shard))
            decoded = decode_shard(data, self._entries[shard], token_dtype=self._tokenizer.token_dtype)
            for position, doc_id in documents:
                # A copy: a view would hold the whole shard in memory.
                tokens[doc_id] = np.array(decoded.tokens(position))
        return tokens
