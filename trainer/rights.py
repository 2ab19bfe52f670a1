"""What an island may read. Two editions of the policy decide: the run's, which was in force when it was made, and the newest.

The order of a stream follows from its index, so a run's index must stay what it was: it holds what the run's edition allows, for ever. What the newest edition
takes away is passed over, without changing the order of the rest, from the next start of an island on. What it gives is only in the indexes of new runs.
A branch reads as the run that it branches from: it goes on in the same index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manifests.catalog import Catalog
from manifests.editions import current_policy, policy_of
from manifests.errors import UserError
from manifests.mds import shard_name
from manifests.policy import Rights, joined
from manifests.schemas import TIERS
from trainer.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class IslandRights:
    """What one island, or several together, may read."""

    index: Rights
    """By the run's edition: what is in the index."""
    newest: Rights
    """By the newest edition: what of it isn't passed over."""

    @property
    def both(self) -> Rights:
        """What is really read."""
        return joined(self.index.reader, [self.index, self.newest])


def root_run(catalog: Catalog, run: str) -> str:
    """The run that a run's branches began from; itself where it is no branch."""
    parents = {row["run"]: row["parent_run"] for row in catalog.rows("SELECT run, parent_run FROM runs")}
    while (parent := parents.get(run)) is not None:
        run = parent
    return run


def island_rights(config: RunConfig, catalog: Catalog, *islands: int) -> IslandRights:
    """What an island of a run may read; of several islands: what all of them may."""
    root = root_run(catalog, config.run)
    readers = [f"run:{root}/island:{island}" for island in islands]
    together = readers[0] if len(readers) == 1 else f"every island of run {root}"
    index, newest = (
        joined(together, [policy.rights(reader) for reader in readers] if policy is not None else [])
        for policy in (policy_of(catalog, config.policy), current_policy(catalog))
    )
    return IslandRights(index=index, newest=newest)


def require_documents(config: RunConfig, catalog: Catalog, rights: Rights, *, tier_version: int | None = None) -> None:
    """Sees to it that there is something to train on.

    Args:
        config: the run's.
        catalog: pins the store's tables.
        rights: what may be read.
        tier_version: tier version that is read; None: the run's first.

    Raises:
        UserError: none of the tiers' documents may be read; the message names the rule.
    """
    if rights.everything:
        return
    version = config.tier_version if tier_version is None else tier_version
    left = f"""
        SELECT count(*) AS n FROM view_shards JOIN views USING (tier_version, pool, tier, job)
        WHERE tier_version = ? AND pool = ? AND tier IN {TIERS} AND shard IN (SELECT shard FROM shard_index WHERE {rights.condition})
    """
    if catalog.rows(left, [version, config.pool])[0]["n"] == 0:
        raise UserError(
            f"{rights.reader} may read no document of tier version {version} by {rights.named}; "
            "`atoll policy show` says why, `atoll policy set` widens it for new runs"
        )


class ReadableShards:
    """Shards that somebody may read."""

    def __init__(self, config: RunConfig, catalog: Catalog, rights: IslandRights) -> None:
        self._index = _shards_of(config, catalog, rights.index)
        self._newest = _shards_of(config, catalog, rights.newest)

    def select(self, view: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], frozenset[str]]:
        """The entries of a view that are in the index, and the names of the shards of these that are passed over."""
        entries = [entry for entry in view if self._index is None or shard_name(entry) in self._index]
        names = frozenset(shard_name(entry) for entry in entries)
        return entries, frozenset() if self._newest is None else names - self._newest


def _shards_of(config: RunConfig, catalog: Catalog, rights: Rights) -> frozenset[str] | None:
    """Shards of the run's pool that may be read; None: all. A text that the store holds under several labels may be read by any of them."""
    if rights.everything:
        return None
    sql = f"SELECT DISTINCT shard FROM shard_index WHERE pool = ? AND {rights.condition}"
    return frozenset(row["shard"] for row in catalog.rows(sql, [config.pool]))
