"""What a policy reaches in a store: documents by their labels, and which reader may read them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.policy import JOB_KINDS, OWNER, Policy, Rights

_CHANGES = pa.schema(
    [
        ("readers", pa.string()),
        ("license", pa.string()),
        ("access", pa.string()),
        ("documents", pa.int64()),
        ("tokens", pa.int64()),
        ("before", pa.string()),
        ("after", pa.string()),
    ]
)


def reach_table(catalog: Catalog, rights: Rights | None) -> pa.Table:
    """Documents and tokens by licence and label, and whether a reader may read them; no rights: nothing is forbidden."""
    found = catalog.ask("policy_reach")
    may_read = [_allows(rights, row) for row in found.to_pylist()]
    return found.append_column("may_read", pa.array(may_read, pa.bool_()))


def changes_table(catalog: Catalog, before: Policy | None, after: Policy | None) -> pa.Table:
    """What another policy changes: for which readers, and for documents of which labels. Readers of the same change share a row."""
    changes: dict[tuple[Any, ...], list[str]] = {}
    reach = catalog.ask("policy_reach").to_pylist()
    for reader in _readers(catalog, before, after):
        old, new = (policy.rights(reader) if policy is not None else None for policy in (before, after))
        for row in reach:
            was, will = _allows(old, row), _allows(new, row)
            if was != will:
                changes.setdefault((*row.values(), _said(was), _said(will)), []).append(reader)
    rows = [
        dict(zip(_CHANGES.names, (", ".join(readers), *change), strict=True)) for change, readers in changes.items()
    ]
    return pa.Table.from_pylist(rows, schema=_CHANGES)


def _readers(catalog: Catalog, *policies: Policy | None) -> list[str]:
    """Every reader that there is: the islands of all runs, the jobs, and the names for SQL that a policy spells out."""
    runs = catalog.rows("SELECT run, config FROM runs WHERE parent_run IS NULL ORDER BY written_at")
    islands = [
        f"run:{row['run']}/island:{n}" for row in runs for n in range(int(json.loads(row["config"])["num_islands"]))
    ]
    spelled = [r for policy in policies if policy is not None for rule in policy.rules for r in rule.readers]
    names = [r for r in spelled if r.startswith("sql:") and not set("*?") & set(r)]
    return list(dict.fromkeys([*islands, *(f"job:{kind}" for kind in JOB_KINDS), OWNER, *names]))


def _allows(rights: Rights | None, row: dict[str, Any]) -> bool:
    return rights is None or rights.allows(row["license"], row["access"])


def _said(may_read: bool) -> str:
    return "may read" if may_read else "may not"
