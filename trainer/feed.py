"""What an island reads: its stream opened over the store, and taken on to new data at a round's edge.

New data is a newer tier version, documents that were flagged or forgotten, a narrower policy. Nothing comes twice or is lost by any of it: a new tier version begins with
what has been read under the older one (carry.py), everything else leaves the order as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from manifests.catalog import Catalog
from manifests.cut import pin
from manifests.errors import UserError
from manifests.mds import read_index, shard_name
from manifests.policy import that_may_be_read
from manifests.schemas import TABLES, TIERS
from manifests.store import Store
from trainer.carry import Counts, carry_over, pack_seen, unpack_seen
from trainer.config import RunConfig
from trainer.groups import Group, groups_of
from trainer.mixer import MixedStream
from trainer.rights import ReadableShards, island_rights, require_documents
from trainer.run import Run, read_excluded
from trainer.stream import NEVER, GroupStream

if TYPE_CHECKING:
    import torch

HOLDOUT = "holdout"
_WATCHED = ("jobs", "views", "flags", "policies")
"""Tables that say that there's new data. A job's rows count once it stands in `jobs`."""
_GROWING = frozenset({"consumption", "consumption_rounds", "events", "mixtures"})
"""Tables that every round adds to, and no role reads to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A newer tier version that a stream has gone over to."""

    before: int
    after: int
    read: int
    """Its documents that had been read before."""
    begun: int
    """Documents of which the rest was still to come."""


class Feed:
    """An island's stream for its whole life."""

    def __init__(
        self,
        run: Run,
        catalog: Catalog,
        *,
        island: int,
        weights: Mapping[str, float],
        state: str | None = None,
        as_it_was: str | None = None,
    ) -> None:
        """
        Args:
            run: the run.
            catalog: pins the store's tables.
            island: number of the island.
            weights: asked share of the sequences of each group.
            state: where to go on, from `state`; None: at the start.
            as_it_was: a state whose data it shall be, whatever came since; what did is news then. None: what the catalog has.

        Raises:
            UserError: there is nothing to train on, or the policy keeps it all from the island.
            Failure: the state is of other data.
        """
        self._run, self._island = run, island
        loaded = json.loads(state) if state is not None else {}
        self.tier_version: int = loaded.get("tier_version", run.config.tier_version)
        self._seen_path: str | None = loaded.get("seen")
        self.is_as_it_was = as_it_was is not None
        if as_it_was is not None:
            self._watched: dict[str, int] = json.loads(as_it_was)["watched"]
            catalog = Catalog(run.store, at=self._watched)
        else:
            # A version that came while nobody was here is taken at the first edge.
            pinned = {name: version for name, version in catalog.versions.items() if name in _WATCHED}
            self._watched = pinned if self._newest(catalog) == self.tier_version else {}
        self.stream = self._open(catalog, weights)
        if loaded:
            self.stream.load_state(json.dumps(loaded["stream"]))

    def state(self) -> str:
        """All that is needed to go on with the very next token, JSON of well under 10 KB."""
        uneven = any(group.is_uneven for group in self.stream.groups.values())
        return json.dumps(
            {
                "tier_version": self.tier_version,
                "seen": self._seen_path if uneven else None,
                "watched": self._watched,
                "stream": json.loads(self.stream.state()),
            }
        )

    def has_news(self) -> bool:
        """Whether there's something new in the store."""
        return self._versions() != self._watched

    def refresh(self) -> Taken | None:
        """Takes what is new in the store: to be called at a round's edge.

        Returns:
            The newer tier version that was taken, if one was.
        """
        versions = self._versions()
        if versions == self._watched:
            return None
        self._watched = versions
        self.is_as_it_was = False
        catalog = Catalog(self._run.store)
        old = self.stream
        newest = self._newest(catalog)
        if newest == self.tier_version:
            stream = self._open(catalog, old.asked)
            stream.load_state(old.state())
            self.stream = stream
            old.close()
            return None
        return self._take(catalog, newest)

    def close(self) -> None:
        """Stops all readers."""
        self.stream.close()

    def _take(self, catalog: Catalog, version: int) -> Taken:
        run, before, old = self._run, self.tier_version, self.stream
        groups = _groups(run, catalog, self._island, version)
        carried = carry_over(
            old.groups,
            {name: group.sizes for name, group in groups.items()},
            members={name: group.members for name, group in groups.items()},
            ids_of=lambda shards: _ids_of(catalog, run.config, shards),
        )
        seen = {name: one.seen for name, one in carried.items()}
        content, data = pack_seen(seen)
        path = f"{run.island_folder(self._island)}/seen/{content}.npz"
        run.store.put_content(path, data)
        stream = _mix(run, catalog, groups, island=self._island, weights=old.asked, tier_version=version, seen=seen)
        for name, group in stream.groups.items():
            group.begin(at_pass=carried[name].at_pass, rests=carried[name].rests)
        stream.carry_credits(old)
        self.stream, self.tier_version, self._seen_path = stream, version, path
        old.close()
        return Taken(
            before=before,
            after=version,
            read=sum(int(((counts > 0) & (counts != NEVER)).sum()) for counts in seen.values()),
            begun=sum(len(one.rests) for one in carried.values()),
        )

    def _open(self, catalog: Catalog, weights: Mapping[str, float]) -> MixedStream:
        store = self._run.store
        seen = unpack_seen(store.get(self._seen_path), name=self._seen_path) if self._seen_path else None
        return _open(
            self._run, catalog, island=self._island, weights=weights, tier_version=self.tier_version, seen=seen
        )

    def _newest(self, catalog: Catalog) -> int:
        config = self._run.config
        if not config.follow_tiers:
            return self.tier_version
        newest = "SELECT max(tier_version) AS v FROM views WHERE pool = ? AND documents > 0"
        return max(self.tier_version, catalog.rows(newest, [config.pool])[0]["v"] or 0)

    def _versions(self) -> dict[str, int]:
        tables = pin(self._run.store, _WATCHED)
        return {name: table.version() for name, table in tables.items() if table is not None}


def start_catalog(store: Store) -> Catalog:
    """The tables that a role may need to start. To pin those that grow with every round is much of a start on a remote store."""
    return Catalog(store, tables=TABLES.keys() - _GROWING)


def open_stream(run: Run, catalog: Catalog, *, island: int, weights: Mapping[str, float]) -> MixedStream:
    """An island's stream at its start, over the run's first tier version.

    Raises:
        UserError: there is nothing to train on, or the policy keeps it all from the island.
    """
    return _open(run, catalog, island=island, weights=weights, tier_version=run.config.tier_version, seen=None)


def _open(
    run: Run,
    catalog: Catalog,
    *,
    island: int,
    weights: Mapping[str, float],
    tier_version: int,
    seen: Mapping[str, Counts] | None,
) -> MixedStream:
    groups = _groups(run, catalog, island, tier_version)
    return _mix(run, catalog, groups, island=island, weights=weights, tier_version=tier_version, seen=seen)


def _mix(
    run: Run,
    catalog: Catalog,
    groups: Mapping[str, Group],
    *,
    island: int,
    weights: Mapping[str, float],
    tier_version: int,
    seen: Mapping[str, Counts] | None,
) -> MixedStream:
    config = run.config
    excluded = read_excluded(run) | _flagged(catalog)
    origins = _shard_origins(catalog, config)
    streams = {
        name: GroupStream(
            run.store,
            group.entries,
            name=name,
            token_dtype=np.dtype(config.token_dtype),
            key=f"seed {config.seed}/island {island}/tiers {tier_version}",
            origins=origins,
            tiers=group.tiers,
            seen=group.members if seen is None else seen.get(name, group.members),
            excluded=excluded,
            forbidden=group.forbidden,
        )
        for name, group in groups.items()
        if _has_documents(catalog, group, excluded)
    }
    if not streams:
        raise UserError(
            f"tier version {tier_version} has no documents to train on in pool {config.pool} of {run.store.uri}; run `atoll shard`"
        )
    try:
        return MixedStream(
            streams,
            names=_names(config, groups),
            seq_len=config.seq_len,
            weights=weights,
            max_repeats=config.max_repeats,
            last_resort=() if config.group_by else ("C",),
            fingerprint=_fingerprint(config, tier_version, groups),
        )
    except ValueError as e:
        raise UserError(str(e)) from e


def _groups(run: Run, catalog: Catalog, island: int, tier_version: int) -> dict[str, Group]:
    """The groups of a tier version, with the shards that the run's edition of the policy allows."""
    config = run.config
    rights = island_rights(config, catalog, island)
    require_documents(config, catalog, rights.both, tier_version=tier_version)
    readable = ReadableShards(config, catalog, rights)
    entries: list[tuple[str, dict[str, Any]]] = []
    forbidden: set[str] = set()
    for tier, view in _views(run.store, catalog, config, tier_version):
        index, barred = readable.select(view)
        entries += [(tier, entry) for entry in index]
        forbidden |= barred
    return groups_of(catalog, config, tier_version, entries, forbidden=frozenset(forbidden))


def _views(
    store: Store, catalog: Catalog, config: RunConfig, tier_version: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The index of each tier that has documents, in the order of the tiers."""
    views = catalog.rows(
        "SELECT tier, object FROM views WHERE tier_version = ? AND pool = ? AND documents > 0",
        [tier_version, config.pool],
    )
    objects = {row["tier"]: row["object"] for row in views}
    for tier in TIERS:
        if tier in objects:
            yield tier, read_index(store.get(objects[tier]))


def check_groups(store: Store, catalog: Catalog, config: RunConfig) -> None:
    """Sees to it that weights are asked for groups that there are.

    Raises:
        UserError: there is none of that name; the message names those that there are.
    """
    entries = [(tier, entry) for tier, view in _views(store, catalog, config, config.tier_version) for entry in view]
    known = groups_of(catalog, config, config.tier_version, entries, forbidden=frozenset())
    for weights in config.group_weights:
        unknown = [name for name in weights if name not in known]
        if unknown:
            raise UserError(
                f"group_by {config.group_by!r} makes no group {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )


def _names(config: RunConfig, groups: Mapping[str, Group]) -> list[str]:
    """All groups in order, those without documents, too."""
    if not config.group_by:
        return list(TIERS)
    asked = list(dict.fromkeys(name for weights in config.group_weights for name in weights))
    return asked + sorted(set(groups) - set(asked))


def _fingerprint(config: RunConfig, tier_version: int, groups: Mapping[str, Group]) -> dict[str, str]:
    """What the order follows from. The places of the documents, not their content: to forget one leaves its place empty."""
    places = xxhash.xxh3_64()
    for name, group in sorted(groups.items()):
        places.update(json.dumps([name, [size for _, size in group.sizes]]))
        places.update(b"" if group.members is None else group.members.tobytes())
    return {
        "pool": config.pool,
        "tier version": str(tier_version),
        "seed": str(config.seed),
        "policy": config.policy,
        "groups": config.group_by,
        "places of documents": places.hexdigest(),
    }


def _has_documents(catalog: Catalog, group: Group, excluded: frozenset[bytes]) -> bool:
    """Whether a group has documents that aren't left out."""
    shards = [name for name, _ in group.sizes if name not in group.forbidden]
    if not excluded:
        return bool(shards)
    left = "SELECT 1 FROM shards WHERE shard IN (SELECT unnest(?)) AND doc_id NOT IN (SELECT unnest(?::BLOB[])) LIMIT 1"
    return bool(catalog.rows(left, [shards, sorted(excluded)]))


def _flagged(catalog: Catalog) -> frozenset[bytes]:
    rows = catalog.query("SELECT doc_id FROM flags WHERE flagged")
    return frozenset(rows.column(0).to_pylist())


def _ids_of(catalog: Catalog, config: RunConfig, shards: Sequence[str]) -> Iterator[tuple[str, int, bytes]]:
    sql = "SELECT DISTINCT shard, position, doc_id FROM shards WHERE pool = ? AND shard IN (SELECT unnest(?))"
    table = catalog.query(sql, [config.pool, list(shards)])
    yield from zip(*(table[name].to_pylist() for name in ("shard", "position", "doc_id")), strict=True)


def _shard_origins(catalog: Catalog, config: RunConfig) -> dict[str, str]:
    rows = catalog.rows("SELECT DISTINCT shard, origin FROM shard_index WHERE pool = ?", [config.pool])
    return {row["shard"]: row["origin"] for row in rows}


def _tokens_in(catalog: Catalog, config: RunConfig, shards: Sequence[str]) -> int:
    sizes = "SELECT DISTINCT shard, tokens FROM shard_index WHERE pool = ? AND shard IN (SELECT unnest(?))"
    return int(
        catalog.rows(f"SELECT coalesce(sum(tokens), 0) AS n FROM ({sizes})", [config.pool, list(shards)])[0]["n"]
    )


def holdout_tokens(run: Run, catalog: Catalog) -> torch.Tensor:
    """The first holdout sequences, (holdout_sequences, seq_len), the same for everyone who asks, for as long as the run lasts.

    Everyone measures on the same text, or the losses couldn't be compared; so under a policy it holds what every island of the run may read.

    Raises:
        UserError: the store's views have no holdout, or too little for one sequence may be read.
    """
    import torch

    config = run.config
    rights = island_rights(config, catalog, *range(config.num_islands))
    views = catalog.rows(
        "SELECT object FROM views WHERE tier_version = ? AND pool = ? AND tier = ?",
        [config.tier_version, config.pool, HOLDOUT],
    )
    entries = read_index(run.store.get(views[0]["object"])) if views else []
    index, forbidden = ReadableShards(config, catalog, rights).select(entries)
    names = [shard_name(entry) for entry in index]
    tokens = _tokens_in(catalog, config, [name for name in names if name not in forbidden])
    num_sequences = min(config.holdout_sequences, tokens // config.seq_len)
    if num_sequences < 1:
        may = that_may_be_read(rights.both)
        raise UserError(
            f"tier version {config.tier_version} has no holdout of a sequence's length{may}; "
            + (
                "a run measures on what all of its islands may read: widen a rule"
                if may
                else "ingest with --holdout-share"
            )
        )
    stream = GroupStream(
        run.store,
        index,
        name=HOLDOUT,
        token_dtype=np.dtype(config.token_dtype),
        key="holdout",
        origins=_shard_origins(catalog, config),
        tiers=dict.fromkeys(names, HOLDOUT),
        forbidden=forbidden,
    )
    sequences = [stream.take(config.seq_len).tokens for _ in range(num_sequences)]
    stream.close()
    return torch.from_numpy(np.stack(sequences).astype(np.int64))
