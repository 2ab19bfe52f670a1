"""A run in the store: its row, its folders, its streams. Islands and the syncer find everything else from here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import code_version, command_line
from manifests.mds import index_json, read_index, shard_name
from manifests.policy import that_may_be_read
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append
from trainer.config import RunConfig
from trainer.rights import ReadableShards, island_rights, require_documents
from trainer.stream import MixedStream, TierStream

if TYPE_CHECKING:
    import torch

GLOBAL = -1
HOLDOUT = "holdout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Where a run starts that was branched from another one by a rollback."""

    parent_run: str
    predicate: str
    """SQL condition over documents that was rolled back."""
    excluded_object: str
    """Object with the 16-byte ids of the documents that are left out from here on, one after the other."""
    clock: list[int]
    """Version of every fragment that the branch starts from."""
    merge: int
    """Number of the last merge that the branch keeps."""
    island_checkpoints: dict[str, str | None]
    """Island number → hex id of the parent run's checkpoint that it starts from; None: from the clean global state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run as it stands in the store."""

    store: Store
    config: RunConfig
    branch: Branch | None

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.run

    def global_path(self, fragment: int, version: int) -> str:
        """Object of a merged fragment."""
        return f"runs/{self.name}/global/{fragment:04d}/{version:08d}.safetensors"

    def momentum_path(self, fragment: int, version: int, content: str) -> str:
        """Object of a fragment's outer momentum; two syncers that race never share one."""
        return f"runs/{self.name}/momentum/{fragment:04d}/{version:08d}-{content}.safetensors"

    def outer_folder(self, fragment: int, base_version: int) -> str:
        """Folder of the outer gradients taken against one version of a fragment."""
        return f"runs/{self.name}/outer/{fragment:04d}/{base_version:08d}"

    def island_folder(self, island: int) -> str:
        """Folder of what one island keeps."""
        return f"runs/{self.name}/islands/{island:04d}"

    def finished_path(self, island: int) -> str:
        """Object that says that an island has done all its steps and sent all that it had."""
        return f"{self.island_folder(island)}/finished.json"

    def newest_version(self, fragment: int) -> int:
        """Highest version of a fragment that has been merged; -1 where there is none."""
        folder = f"runs/{self.name}/global/{fragment:04d}"
        return max((int(PurePosixPath(o.path).name.split(".")[0]) for o in self.store.list(folder)), default=-1)


def load_run(store: Store, name: str, *, catalog: Catalog | None = None) -> Run:
    """The run of this name.

    Raises:
        UserError: the store has none; the message names those that it has.
    """
    catalog = catalog or Catalog(store)
    rows = catalog.rows("SELECT config, branch FROM runs WHERE run = ?", [name])
    if not rows:
        known = [row["run"] for row in catalog.rows("SELECT run FROM runs ORDER BY written_at")]
        mend = f"there are: {', '.join(known)}" if known else "`atoll train` makes one"
        raise UserError(f"no run named {name!r} in {store.uri}; {mend}")
    branch = json.loads(rows[0]["branch"]) if rows[0]["branch"] else None
    return Run(store=store, config=RunConfig.from_json(rows[0]["config"]), branch=Branch(**branch) if branch else None)


def create_run(store: Store, config: RunConfig, *, branch: Branch | None = None) -> Run:
    """Makes a run, or opens the one of the same name and configuration.

    Raises:
        UserError: a run of this name exists with another configuration; the message names what differs.
    """
    run = Run(store=store, config=config, branch=branch)
    row = {
        "run": config.run,
        "parent_run": branch.parent_run if branch else None,
        "config": config.to_json(),
        "branch": json.dumps(dataclasses.asdict(branch), sort_keys=True) if branch else None,
        "command": command_line(),
        "code_version": code_version(),
    }
    if append(store, "runs", [row], writer=f"run/{config.run}", sequence=1):
        return run
    existing = load_run(store, config.run)
    differing = _differences(dataclasses.asdict(existing.config), dataclasses.asdict(config))
    if differing:
        raise UserError(
            f"run {config.run!r} exists with other options ({differing}); give the same to continue it, or another --run"
        )
    return existing


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {old[name]} there, {new[name]} here" for name in old if old[name] != new[name])


def open_stream(run: Run, catalog: Catalog, *, island: int, weights: Mapping[str, float]) -> MixedStream:
    """An island's stream at its start.

    Raises:
        UserError: there is nothing to train on, or the policy keeps it all from the island.
    """
    config = run.config
    excluded = read_excluded(run)
    origins = _shard_origins(catalog, config)
    rights = island_rights(config, catalog, island)
    require_documents(config, catalog, rights.both)
    readable = ReadableShards(config, catalog, rights)
    tiers = {}
    for view in catalog.rows(
        "SELECT tier, object FROM views WHERE tier_version = ? AND pool = ? AND documents > 0",
        [config.tier_version, config.pool],
    ):
        if view["tier"] not in TIERS:
            continue
        index, forbidden = readable.select(read_index(run.store.get(view["object"])))
        if _has_documents(catalog, index, excluded, forbidden):
            tiers[view["tier"]] = TierStream(
                run.store,
                index_json(index),
                tier=view["tier"],
                token_dtype=np.dtype(config.token_dtype),
                key=f"seed {config.seed}/island {island}/tiers {config.tier_version}",
                origins=origins,
                excluded=excluded,
                forbidden=forbidden,
            )
    if not tiers:
        raise UserError(
            f"tier version {config.tier_version} has no documents to train on in pool {config.pool} of {run.store.uri}; run `atoll shard`"
        )
    return MixedStream(tiers, seq_len=config.seq_len, weights=weights)


def _has_documents(
    catalog: Catalog, index: Sequence[Mapping[str, Any]], excluded: frozenset[bytes], forbidden: frozenset[str]
) -> bool:
    """Whether an index has documents that aren't left out."""
    shards = [name for entry in index if (name := shard_name(entry)) not in forbidden]
    if not excluded:
        return bool(shards)
    left = "SELECT 1 FROM shards WHERE shard IN (SELECT unnest(?)) AND doc_id NOT IN (SELECT unnest(?::BLOB[])) LIMIT 1"
    return bool(catalog.rows(left, [shards, sorted(excluded)]))


def _shard_origins(catalog: Catalog, config: RunConfig) -> dict[str, str]:
    rows = catalog.rows("SELECT DISTINCT shard, origin FROM shard_index WHERE pool = ?", [config.pool])
    return {row["shard"]: row["origin"] for row in rows}


def _tokens_in(catalog: Catalog, config: RunConfig, shards: Sequence[str]) -> int:
    sizes = "SELECT DISTINCT shard, tokens FROM shard_index WHERE pool = ? AND shard IN (SELECT unnest(?))"
    return int(
        catalog.rows(f"SELECT coalesce(sum(tokens), 0) AS n FROM ({sizes})", [config.pool, list(shards)])[0]["n"]
    )


def read_excluded(run: Run) -> frozenset[bytes]:
    """Documents that this run leaves out."""
    if run.branch is None:
        return frozenset()
    data = run.store.get(run.branch.excluded_object)
    return frozenset(data[i : i + 16] for i in range(0, len(data), 16))


def holdout_tokens(run: Run, catalog: Catalog) -> torch.Tensor:
    """The first holdout sequences, (holdout_sequences, seq_len), the same for everyone who asks.

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
    tokens = _tokens_in(catalog, config, [name for entry in index if (name := shard_name(entry)) not in forbidden])
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
    stream = TierStream(
        run.store,
        index_json(index),
        tier=HOLDOUT,
        token_dtype=np.dtype(config.token_dtype),
        key="holdout",
        origins=_shard_origins(catalog, config),
        forbidden=forbidden,
    )
    sequences = [stream.take(config.seq_len).tokens for _ in range(num_sequences)]
    stream.close()
    return torch.from_numpy(np.stack(sequences).astype(np.int64))
