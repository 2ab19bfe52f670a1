"""Taking a rollback back: the branch is marked, and its parent is the run to go on with. Nothing is deleted, and the mark can be lifted.

The newest event of kind `branch_undone` or `branch_taken_up` of a branch counts.
"""

from __future__ import annotations

import json

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import append
from trainer.lease import Lease
from trainer.members import members
from trainer.run import Run, load_run

_STATE = """
SELECT kind FROM events WHERE run = ? AND kind IN ('branch_undone', 'branch_taken_up') ORDER BY written_at DESC LIMIT 1
"""


def undo_rollback(store: Store, name: str, *, lift: bool = False) -> str:
    """Marks a branch as taken back, or lifts that. Safe to repeat.

    Args:
        store: the store.
        name: the branch.
        lift: take it up again.

    Returns:
        The run to go on with.

    Raises:
        UserError: there is no such run, it's no branch, others branch from it, or it's being trained.
    """
    catalog = Catalog(store)
    branch = load_run(store, name, catalog=catalog)
    if branch.branch is None:
        raise UserError(f"run {name} is no branch: no rollback has made it, and there's none to take back")
    parent = branch.branch.parent_run
    if is_undone(catalog, name) is not lift:
        return name if lift else parent
    if not lift:
        rows = catalog.rows("SELECT run FROM runs WHERE parent_run = ? ORDER BY run", [name])
        children = [row["run"] for row in rows if not is_undone(catalog, row["run"])]
        if children:
            raise UserError(f"{', '.join(children)} branches from {name}; `atoll rollback undo {children[0]}` first")
        if _is_trained(branch):
            raise UserError(f"run {name} is being trained; stop it first (Ctrl-C, or `atoll leave`)")
    kind = "branch_taken_up" if lift else "branch_undone"
    append(store, "events", [{"run": name, "kind": kind, "detail": json.dumps({"parent_run": parent})}])
    return name if lift else parent


def is_undone(catalog: Catalog, name: str) -> bool:
    """Whether a run is a branch that was taken back."""
    rows = catalog.rows(_STATE, [name])
    return bool(rows) and rows[0]["kind"] == "branch_undone"


def require_not_undone(catalog: Catalog, name: str) -> None:
    """Raises a UserError where a run is a branch that was taken back."""
    if is_undone(catalog, name):
        raise UserError(f"branch {name} was taken back; `atoll rollback undo {name} --lift` takes it up again")


def _is_trained(run: Run) -> bool:
    """Whether its syncer's role is held and an island is awaited that has come; a run that was killed looks so, too, until `atoll leave`."""
    holder = Lease(run.store, run.lease_folder, holder="undo", lapse_s=run.config.lease_s).holder()
    return holder is not None and any(m.is_awaited and m.incarnations for m in members(run).values())
