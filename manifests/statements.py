"""SQL text as statements: cutting it up, and letting through only what reads.

The type of a statement doesn't say that it only reads: EXPLAIN ANALYZE runs what it explains, and DuckDB takes COPY … TO in a WITH clause of a SELECT.
A catalog's connection may read the store's files, so such a statement could write over one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import duckdb

from manifests.errors import UserError
from manifests.store import first_line

_READING_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_BLANK = r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)"
_EXPLAIN = re.compile(
    rf"{_BLANK}*explain\b{_BLANK}*(?:analyze\b{_BLANK}*)?(?:\({_BLANK}*(?:analyze|format)\b[^()]*\))?", re.I | re.S
)


def split_statements(connection: duckdb.DuckDBPyConnection, text: str) -> list[str]:
    """The statements of a text, without the semicolons between them.

    Raises:
        UserError: it can't be parsed.
    """
    try:
        return [statement.query.strip().removesuffix(";") for statement in connection.extract_statements(text)]
    except duckdb.Error as e:
        raise UserError(f"SQL: {first_line(e)}") from e


def require_reading(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Lets a single query through, or the explanation of one.

    Raises:
        UserError: it is more than one statement, or would change something.
        duckdb.Error: it can't be parsed.
    """
    statements = connection.extract_statements(sql)
    if not statements:
        raise UserError("SQL: there is no query in this")
    if len(statements) > 1:
        raise UserError(f"SQL: one query at a time, this is {len(statements)}; run them one by one")
    kind = statements[0].type
    if kind is duckdb.StatementType.EXPLAIN:
        explained = _EXPLAIN.match(sql)
        inner = connection.extract_statements(sql[explained.end() :]) if explained else []
        if len(inner) != 1 or inner[0].type is not duckdb.StatementType.SELECT:
            raise UserError("SQL: only a query can be explained; the store is read-only here")
        kind, sql = inner[0].type, inner[0].query
    if kind is not duckdb.StatementType.SELECT:
        raise _refusal(kind.name)
    told = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    tree = json.loads(told[0][0])
    if tree["error"]:
        raise UserError(f"SQL: {tree['error_message']}")
    for node in _nodes(tree):
        name = str(node.get("type"))
        if name.endswith("_NODE") and name not in _READING_NODES:
            raise _refusal(name.split("_")[0])


def _nodes(tree: Any) -> Iterable[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _refusal(what: str) -> UserError:
    return UserError(f"SQL: {what} is not a query; the store is read-only here, use SELECT")
