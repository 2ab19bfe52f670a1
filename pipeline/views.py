"""The shards that a tier version's views show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
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
    """The shards of a version's views in one pool that the catalog's reader may read, by tier and in the views' order.

    Raises:
        Failure: a view's index.json and the tables name different shards.
        ObjectMissing: an index.json is gone.
    """
    shown = """
        SELECT views.tier, object, shard, view_shards.documents, view_shards.tokens
        FROM views LEFT JOIN view_shards USING (tier_version, pool, tier, job) WHERE tier_version = ? AND pool = ?
        ORDER BY views.tier, position
    """
    members: list[Member] = []
    for (tier, path), found in groupby(catalog.rows(shown, [tier_version, pool]), itemgetter("tier", "object")):
        rows = [row for row in found if row["shard"] is not None]
        entries = read_index(catalog.store.get(path))
        if catalog.rights is not None:
            allowed = {row["shard"] for row in rows}
            entries = [entry for entry in entries if shard_name(entry) in allowed]
        if [shard_name(entry) for entry in entries] != [row["shard"] for row in rows]:
            raise Failure(
                f"{catalog.store.uri}/{path} names {len(entries)} shards, and view_shards {len(rows)} or others; restore both from a backup"
            )
        members += [
            Member(tier=tier, shard=row["shard"], entry=entry, documents=row["documents"], tokens=row["tokens"])
            for row, entry in zip(rows, entries, strict=True)
        ]
    return members
