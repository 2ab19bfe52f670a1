"""The shards that a tier version's views show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.catalog import Catalog
from manifests.errors import Failure
from manifests.mds import read_index, shard_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A shard in a tier's view."""

    shard: str
    tier: str
    """Whose view it stands in, or holdout."""
    entry: Mapping[str, Any]
    """In the view's index.json."""
    documents: int
    tokens: int

    @property
    def zip_bytes(self) -> int:
        """Its size in the pool."""
        return int(self.entry["zip_data"]["bytes"])


def members_of(catalog: Catalog, tier_version: int, pool: str) -> list[Member]:
    """The shards of a version's views in one pool, by tier and in the views' order.

    Raises:
        Failure: a view's index.json and the tables name different shards.
        ObjectMissing: an index.json is gone.
    """
    members: list[Member] = []
    views = "SELECT tier, object, job FROM views WHERE tier_version = ? AND pool = ? ORDER BY tier"
    shards = "SELECT shard, documents, tokens FROM view_shards WHERE tier_version = ? AND pool = ? AND tier = ? AND job = ? ORDER BY position"
    for view in catalog.rows(views, [tier_version, pool]):
        entries = read_index(catalog.store.get(view["object"]))
        rows = catalog.rows(shards, [tier_version, pool, view["tier"], view["job"]])
        named = [shard_name(entry) for entry in entries]
        if named != [row["shard"] for row in rows]:
            raise Failure(
                f"{catalog.store.uri}/{view['object']} names {len(named)} shards, and view_shards {len(rows)} or others; restore both from a backup"
            )
        members += [Member(tier=view["tier"], entry=entry, **row) for row, entry in zip(rows, entries, strict=True)]
    return members
