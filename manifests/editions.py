"""The policy of a store: its editions stand in the table `policies`, are never changed, and the newest one counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.policy import Policy, Rights, parse_policy
from manifests.store import Store
from manifests.tables import append, open_table, read

_WRITER = "policies"


def set_policy(store: Store, text: str, reason: str, *, source: str = "the policy") -> tuple[Policy, bool]:
    """Puts an edition in force.

    Args:
        store: the store.
        text: the policy, TOML.
        reason: why it is set.
        source: where the text comes from, for messages.

    Returns:
        The policy, and whether it is new; False: it was in force already, and nothing was changed.

    Raises:
        UserError: it isn't a policy, or no reason is given.
        Failure: somebody else has set another edition at the same time.
    """
    policy = parse_policy(text, source=source)
    if not reason.strip():
        raise UserError("a policy needs a --reason: who reads the audit a year from now will ask for it")
    table = open_table(store, "policies")
    rows = read(store, "policies", version=table.version()).to_pylist()
    newest = max(rows, key=lambda row: row["written_at"], default=None)
    if newest is not None and newest["policy"] == policy.id:
        return policy, False
    # The newest counts by its time: a clock that lags behind another writer's must not put this edition before it.
    now = datetime.now(UTC)
    written_at = now if newest is None else max(now, newest["written_at"] + timedelta(microseconds=1))
    row = {"policy": policy.id, "text": text, "reason": reason, "written_at": written_at}
    number = table.transaction_version(_WRITER) or 0
    appended = append(store, "policies", [row], writer=_WRITER, sequence=number + 1)
    in_force = policy if appended else current_policy(Catalog(store, tables=["policies"]))
    if in_force is None or in_force.id != policy.id:
        raise Failure(
            "somebody else has set another policy at the same moment; see `atoll policy show`, then set yours again"
        )
    return policy, True


def current_edition(catalog: Catalog) -> dict[str, Any] | None:
    """The row of the edition in force at the catalog's cut; None: there is no policy, everybody may read everything."""
    rows = catalog.rows("SELECT policy, text, reason, written_at FROM policies ORDER BY written_at DESC LIMIT 1")
    return rows[0] if rows else None


def current_policy(catalog: Catalog) -> Policy | None:
    """The policy in force at the catalog's cut; None: there is none, everybody may read everything."""
    edition = current_edition(catalog)
    return None if edition is None else _parsed(catalog, edition["policy"], edition["text"])


def policy_of(catalog: Catalog, identity: str) -> Policy | None:
    """An edition by its id; the empty id: there was no policy.

    Raises:
        Failure: the table doesn't have it.
    """
    if not identity:
        return None
    rows = catalog.rows("SELECT text FROM policies WHERE policy = ? LIMIT 1", [identity])
    if not rows:
        raise Failure(
            f"policy {identity} is not in table policies of {catalog.store.uri}; restore the table from a backup"
        )
    return _parsed(catalog, identity, rows[0]["text"])


def rights_of(store: Store, reader: str) -> Rights | None:
    """What a reader may read now; None: there is no policy, and everything may be read.

    The policy in force binds also who looks at an earlier cut: so it is asked of the store, never of a catalog at another time.

    Raises:
        UserError: there is no such kind of reader.
    """
    policy = current_policy(Catalog(store, tables=["policies"]))
    return None if policy is None else policy.rights(reader)


def _parsed(catalog: Catalog, identity: str, text: str) -> Policy:
    return parse_policy(text, source=f"policy {identity[:8]} of {catalog.store.uri}")
