"""Groups of documents that a mix is made of: the tiers, or whatever an SQL expression over documents puts together.

A document is in the one group that the expression names for it. So no document is in two groups, and none is lost: where the expression is NULL, the group is `none`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.mds import shard_name
from trainer.carry import Counts
from trainer.config import RunConfig
from trainer.stream import NEVER

MOST_GROUPS = 64
"""A stream's state stays below 10 KB with so many."""
_LONGEST_NAME = 60

_BY_SHARD = """
SELECT shard, coalesce(CAST(({expression}) AS VARCHAR), 'none') AS grouped
FROM (
    SELECT v.tier, v.shard, k.* EXCLUDE (shard)
    FROM view_shards AS v
    JOIN views USING (tier_version, pool, tier, job)
    JOIN shard_kinds AS k USING (shard)
    WHERE v.tier_version = ? AND v.pool = ?
)
"""
_BY_DOCUMENT = """
SELECT shard, position, coalesce(CAST(({expression}) AS VARCHAR), 'none') AS grouped
FROM (
    SELECT d.*, t.tier, t.score, s.shard, s.position
    FROM (SELECT DISTINCT shard, position, doc_id FROM shards WHERE pool = $pool) AS s
    JOIN (
        SELECT shard FROM view_shards JOIN views USING (tier_version, pool, tier, job) WHERE tier_version = $version AND pool = $pool
    ) USING (shard)
    JOIN documents AS d USING (doc_id)
    JOIN tiers AS t ON t.doc_id = d.doc_id AND t.tier_version = $version
)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Documents that a weight is asked for."""

    entries: Sequence[dict[str, Any]]
    """Index entries of the shards that hold them, in the order of the index."""
    tiers: Mapping[str, str]
    """Tier of each shard."""
    forbidden: frozenset[str]
    """Shards that are passed over."""
    members: Counts | None
    """NEVER for each document of the shards that isn't of the group, else 0; None: all are."""

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The shards with their number of documents."""
        return [(shard_name(entry), int(entry["samples"])) for entry in self.entries]


def groups_of(
    catalog: Catalog,
    config: RunConfig,
    tier_version: int,
    entries: Sequence[tuple[str, dict[str, Any]]],
    *,
    forbidden: frozenset[str],
) -> dict[str, Group]:
    """The groups that a run's configuration asks for.

    Args:
        catalog: pins the store's tables.
        config: the run's.
        tier_version: tier version that is read.
        entries: tier and index entry of every shard, tier after tier.
        forbidden: shards that are passed over.

    Raises:
        UserError: the expression isn't SQL over documents, or makes too many groups.
    """
    tiers = {shard_name(entry): tier for tier, entry in entries}
    by_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    masks: dict[str, list[Counts]] = {}
    if not config.group_by:
        for tier, entry in entries:
            by_group[tier].append(entry)
    elif (named := _by_shard(catalog, config, tier_version)) is not None:
        for _, entry in entries:
            by_group[named[shard_name(entry)]].append(entry)
    else:
        names = _by_document(catalog, config, tier_version, [entry for _, entry in entries])
        for _, entry in entries:
            of_shard = names[shard_name(entry)]
            for name in sorted(set(of_shard) - {""}):
                by_group[name].append(entry)
                masks.setdefault(name, []).append(np.where(of_shard == name, 0, NEVER).astype(np.uint8))
    _check_names(config, by_group)
    groups = {}
    for name, members in by_group.items():
        shards = {shard_name(entry) for entry in members}
        groups[name] = Group(
            entries=members,
            tiers={shard: tiers[shard] for shard in shards},
            forbidden=forbidden & shards,
            members=np.concatenate(masks[name]) if name in masks else None,
        )
    return groups


def _by_shard(catalog: Catalog, config: RunConfig, tier_version: int) -> dict[str, str] | None:
    """Each shard's group, where the expression speaks of nothing but what the documents of a shard have in common; None: it doesn't."""
    try:
        rows = catalog.rows(_BY_SHARD.format(expression=config.group_by), [tier_version, config.pool])
    except UserError:
        return None
    return {row["shard"]: row["grouped"] for row in rows}


def _by_document(
    catalog: Catalog, config: RunConfig, tier_version: int, entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """For each shard the group of each of its documents; empty for one that is in no tier."""
    names = {shard_name(entry): np.full(entry["samples"], "", dtype=object) for entry in entries}
    parameters = {"version": tier_version, "pool": config.pool}
    try:
        found = catalog.query(_BY_DOCUMENT.format(expression=config.group_by), parameters)
    except UserError as e:
        raise UserError(
            f"group_by {config.group_by!r} must be an SQL expression over the columns of documents, tier and score: {e}"
        ) from e
    columns = (found[name].to_pylist() for name in ("shard", "position", "grouped"))
    for shard, position, grouped in zip(*columns, strict=True):
        if shard in names:
            names[shard][position] = grouped
    return names


def _check_names(config: RunConfig, groups: Mapping[str, Any]) -> None:
    if not config.group_by:
        return
    if len(groups) > MOST_GROUPS:
        raise UserError(
            f"group_by {config.group_by!r} makes {len(groups)} groups, and at most {MOST_GROUPS} can be mixed; use a coarser expression"
        )
    for name in groups:
        if not 0 < len(name) <= _LONGEST_NAME:
            raise UserError(
                f"group_by {config.group_by!r} names a group {name!r}; names have 1 to {_LONGEST_NAME} characters"
            )
