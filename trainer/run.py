"""A run in the store: its row, its folders, its streams. Islands and the syncer find everything else from here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import code_version, command_line
from manifests.store import Store
from manifests.tables import append
from trainer.config import RunConfig

GLOBAL = -1


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
    plan: str = "replay"
    """continue, damp, replay or restore: see remedies.py."""
    brought_back: list[int] = dataclasses.field(default_factory=list)
    """Islands that start on the global parameters: what they had learned and not merged is given up."""


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

    @property
    def folder(self) -> str:
        """Folder of all that belongs to the run."""
        return f"runs/{self.name}"

    def merge_path(self, merge: int) -> str:
        """Object of a merge; numbered from 1 over all fragments, so that the objects are the run's tape."""
        return f"{self.folder}/merges/{merge:08d}.safetensors"

    def snapshot_path(self, merge: int) -> str:
        """Object that names the whole global state after a merge."""
        return f"{self.folder}/snapshots/{merge:08d}.json"

    def outer_folder(self, island: int) -> str:
        """Folder of what an island sends."""
        return f"{self.folder}/outer/{island:04d}"

    def outer_path(self, island: int, round_: int, fragment: int) -> str:
        """Object of an outer gradient: their names ascend as an island sends them."""
        return f"{self.outer_folder(island)}/{round_:08d}-{fragment:04d}.safetensors"

    @property
    def finished_run_path(self) -> str:
        """Object that says that the run is over, with its last holdout loss."""
        return f"{self.folder}/finished.json"

    @property
    def lease_folder(self) -> str:
        """Folder of the syncer's lease."""
        return f"{self.folder}/lease"

    def island_folder(self, island: int) -> str:
        """Folder of what one island keeps."""
        return f"runs/{self.name}/islands/{island:04d}"

    @property
    def members_folder(self) -> str:
        """Folder of what says who takes part (members.py)."""
        return f"{self.folder}/members"


def load_run(store: Store, name: str, *, catalog: Catalog | None = None) -> Run:
    """The run of this name.

    Raises:
        UserError: the store has none; the message names those that it has.
    """
    catalog = catalog or Catalog(store, tables=("runs",))
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


def read_excluded(run: Run) -> frozenset[bytes]:
    """Documents that this run leaves out."""
    if run.branch is None:
        return frozenset()
    data = run.store.get(run.branch.excluded_object)
    return frozenset(data[i : i + 16] for i in range(0, len(data), 16))
