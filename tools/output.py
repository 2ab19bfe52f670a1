"""Printing answers: data to stdout as a table, CSV or JSON lines; talk to stderr. One set of formats for all commands."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.csv
from rich.console import Console
from rich.table import Table

STDERR = Console(stderr=True, highlight=False, soft_wrap=True)
"""Where progress and remarks go."""


class Format(StrEnum):
    """How an answer is printed."""

    table = "table"
    csv = "csv"
    json = "json"


def print_answer(answer: pa.Table, format_: Format, *, title: str | None = None) -> None:
    """Prints a table of rows. Ids (binary columns) are shown as hex; JSON is one object a line."""
    shown = _ids_as_hex(answer)
    if format_ is Format.csv:
        pa.csv.write_csv(_lists_as_text(shown), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    elif format_ is Format.json:
        for row in shown.to_pylist():
            print(json.dumps(row, default=_json_value))
    else:
        table = Table(title=title, title_justify="left", header_style="bold")
        for field in shown.schema:
            numeric = any(is_kind(field.type) for is_kind in _NUMERIC)
            table.add_column(field.name, justify="right" if numeric else "left", overflow="fold")
        for row in shown.to_pylist():
            table.add_row(*(_cell(value) for value in row.values()))
        # A pipe has no width: let no column be cut there.
        Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


_NUMERIC = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Decimal):  # DuckDB's sum of integers
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _json_value(value: Any) -> Any:
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return str(value)


def _ids_as_hex(answer: pa.Table) -> pa.Table:
    columns = []
    for field, column in zip(answer.schema, answer.columns, strict=True):
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            columns.append(pa.array([v.hex() if v is not None else None for v in column.to_pylist()], pa.string()))
        elif pa.types.is_list(field.type) and pa.types.is_binary(field.type.value_type):
            texts = [[v.hex() for v in ids] if ids is not None else None for ids in column.to_pylist()]
            columns.append(pa.array(texts, pa.list_(pa.string())))
        else:
            columns.append(column)
    return pa.table(columns, names=answer.schema.names)


def _lists_as_text(answer: pa.Table) -> pa.Table:
    columns = [
        pa.array([json.dumps(v, default=str) for v in column.to_pylist()], pa.string())
        if pa.types.is_nested(field.type)
        else column
        for field, column in zip(answer.schema, answer.columns, strict=True)
    ]
    return pa.table(columns, names=answer.schema.names)
