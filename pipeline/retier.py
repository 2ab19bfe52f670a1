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
from typing import Any

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import UserError
from manifests.jobs import Report, make_parted_job, report_nothing
from manifests.policy import rights_inputs, that_may_be_read
from manifests.store import Store
from pipeline.bands import HOLDOUT, KIND, Part, cut_parts, write_parts
from pipeline.engine import Engine, InProcess
from pipeline.pool import (
    ShardConfig,
    find_tier_version,
    pool_of,
    require_no_views,
    task_of,
    write_views,
)
from pipeline.tokenizer import load_tokenizer
from pipeline.views import Member, members_of

_TABLES = ("documents", "shard_index", "shards", "tier_versions", "tiers", "tokenizers", "view_shards", "views")
"""All that is asked here: a move of a threshold takes no longer than opening the others would."""


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
    engine: Engine | None = None,
    announce: Callable[[dict[str, Any]], None] | None = None,
    report: Report = report_nothing,
) -> dict[str, Any]:
    """Writes the shards that the new tier version needs beside the base's, and commits a view for each tier.

    Args:
        engine: where parts of the documents are worked on; None: in this process. The shards are the same.
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
            "views": ground.base_jobs,
            **rights_inputs(catalog.rights),
        },
    )  # fmt: skip
    if (done := job.summary()) is not None:
        return done | {"already_done": True}
    require_no_views(catalog, tier_version, pool)
    plan = _plan(ground)
    if announce is not None:
        announce(plan.facts())
    parts = _parts_to_write(catalog, plan) if plan.broken or plan.new else []
    if not parts and not plan.kept:
        raise UserError(f"tier version {tier_version} has no documents to shard{that_may_be_read(catalog.rights)}")
    task = task_of(job, ground.tokenizer, config.shards, catalog.rights)
    written = write_parts(job, task, parts, engine or InProcess(), report)
    tiers = write_views(job, tier_version, pool, [*written, *plan.kept])
    facts = plan.facts()
    summary = facts | {
        "shards": facts["shards"] | {"written": len(written)},
        "zip_bytes": facts["zip_bytes"] | {"written": sum(member["zip_bytes"] for member in written)},
        "tiers": tiers,
    }
    job.commit(summary)
    return summary


class _Ground:
    """What is re-tiered, and over which shards."""

    def __init__(self, store: Store, config: RetierConfig) -> None:
        self.catalog = Catalog(store, tables=_TABLES, rights=rights_of(store, "job:shard"))
        self.tokenizer = load_tokenizer(store, self.catalog, config.shards.tokenizer)
        self.tier_version = find_tier_version(self.catalog, config.shards.tier_version)
        self.pool = pool_of(self.tokenizer)
        sql = "SELECT DISTINCT tier_version, job FROM views WHERE pool = ? ORDER BY ALL"
        views = self.catalog.rows(sql, [self.pool])
        versions = sorted({view["tier_version"] for view in views} - {self.tier_version})
        self.base = _base(self.catalog, config.base, versions, self.tier_version, self.pool)
        self.base_jobs = [view["job"] for view in views if view["tier_version"] == self.base]
        """That wrote the base's views."""


def _base(catalog: Catalog, wanted: int | None, versions: Sequence[int], tier_version: int, pool: str) -> int:
    earlier = [version for version in versions if version < tier_version]
    if wanted is None and earlier:
        return earlier[-1]
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
    new = gone = 0
    for row in rows:
        if row["shard"] is None:
            new += row["documents"]
            continue
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
    return Plan(
        tier_version=tier_version,
        base=base,
        pool=pool,
        moved=dict(sorted(moved.items())),
        new=new,
        gone=gone,
        kept=kept,
        reassigned=reassigned,
        broken=broken,
    )


def _parts_to_write(catalog: Catalog, plan: Plan) -> list[Part]:
    """The documents of the broken shards, and those that no shard has."""
    columns = ", ".join(KIND)
    now = f"""
        SELECT doc_id, tier, score FROM tiers WHERE tier_version = $version AND doc_id NOT IN (SELECT doc_id FROM tombstones)
        UNION ALL SELECT DISTINCT doc_id, '{HOLDOUT}', NULL FROM documents WHERE split = '{HOLDOUT}'
    """
    # A shard says the kind of its documents: so a few shards cost no pass over all documents.
    placed = f"""
        WITH broken AS (
            SELECT DISTINCT ON (shard) shard, job, number, {columns}
            FROM shard_index JOIN (SELECT unnest($broken::VARCHAR[]) AS shard, unnest(range(len($broken::VARCHAR[])))::INTEGER AS number) USING (shard)
            ORDER BY shard, job
        ),
        places AS (SELECT doc_id, number AS shard, position, {columns} FROM shards JOIN broken USING (shard, job))
        SELECT doc_id, tier, score, {columns}, shard, position FROM places JOIN ({now}) USING (doc_id)
    """
    parameters: dict[str, Any] = {"version": plan.tier_version, "broken": [member.shard for member in plan.broken]}
    entries = [member.entry for member in plan.broken]
    if not plan.new:
        return cut_parts(catalog, placed, parameters, kinds="shard_index", held_in=entries)
    new = f"""
        SELECT doc_id, tier, score, {columns}, NULL::INTEGER AS shard, NULL::INTEGER AS position
        FROM ({now}) JOIN documents USING (doc_id)
        WHERE (tier <> '{HOLDOUT}' OR split = '{HOLDOUT}') AND doc_id NOT IN (
            SELECT doc_id FROM shards
            WHERE shard IN (SELECT shard FROM view_shards JOIN views USING (tier_version, pool, tier, job) WHERE tier_version = $base AND pool = $pool)
        )
    """
    parameters |= {"base": plan.base, "pool": plan.pool}
    return cut_parts(catalog, f"({placed}) UNION ALL ({new})", parameters, held_in=entries)
