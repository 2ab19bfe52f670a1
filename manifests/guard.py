"""What a reader under a policy may write in SQL: queries over the views, and no way past them to the files that they are made of.

The views hold only what the reader may read (catalog.py), but DuckDB can name their files in many ways, run text as SQL, and tell the statistics of a file.
So functions and names in a query's parse tree are let through by a list, not kept out by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from manifests.errors import UserError

_TABLE_FUNCTIONS = frozenset(
    {"unnest", "range", "generate_series", "json_each", "json_tree", "duckdb_columns", "duckdb_tables", "duckdb_views"}
)
_QUALIFIERS = frozenset({"memory", "main", "raw", "system", "information_schema", "pg_catalog"})
_REFUSED_FUNCTIONS = frozenset({"stats"})
"""Scalar functions that tell of rows that the condition of a view leaves out: the least and greatest value of a file."""


def require_guarded(tree: dict[str, Any], *, macros: Iterable[str]) -> None:
    """Lets a query through, or not.

    Args:
        tree: what DuckDB's `json_serialize_sql` says of it.
        macros: our table macros.

    Raises:
        UserError: it could read what the asker's rights keep from it.
    """
    if tree.get("error"):
        raise UserError("SQL: with a policy in force only queries are answered, no EXPLAIN; take the SELECT alone")
    functions = _TABLE_FUNCTIONS | set(macros)
    for node in _nodes(tree):
        kind = node.get("type")
        if kind == "TABLE_FUNCTION":
            name = str(node["function"]["function_name"]).lower()
            if name not in functions:
                raise _refusal(f"{name}()")
        elif kind == "FUNCTION" and str(node.get("function_name")).lower() in _REFUSED_FUNCTIONS:
            raise _refusal(f"{node['function_name']}()")
        elif kind in ("BASE_TABLE", "SHOW_REF"):
            *qualifiers, name = _path(node)
            # A name with a dot or a slash in it, or behind a schema that isn't one, is the path of a file to DuckDB.
            if not re.fullmatch(r"\w*", name) or not _QUALIFIERS.issuperset(q.lower() for q in qualifiers):
                raise _refusal(repr(".".join([*qualifiers, name])))


def _path(node: dict[str, Any]) -> list[str]:
    named = [node.get("catalog_name"), node.get("schema_name"), node.get("table_name")]
    path = (node.get("qualified_name") or {}).get("path") or [part for part in named if part] or [""]
    return [str(part).strip('"') for part in path]


def _refusal(what: str) -> UserError:
    return UserError(
        f"SQL: {what} could read past the policy; with one in force, tables are read through their views (`show tables`)"
    )


def _nodes(tree: Any) -> Iterable[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)
