"""Printing answers: data to stdout or a file as a table, CSV, JSON lines or Parquet; talk to stderr. One set of formats for all commands."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from rich.console import Console
from rich.table import Table

from manifests.errors import UserError
from manifests.store import first_line

STDERR = Console(stderr=True, highlight=False, soft_wrap=True)
"""Where progress and remarks go."""
MOST_ROWS = 1000
"""Rows of an answer that are shown as a table: more are for a program to read."""
_PIPE_WIDTH = 160
"""Columns of a table where there is no terminal to be as wide as."""


class Format(StrEnum):
    """How an answer is printed."""

    table = "table"
    csv = "csv"
    jsonl = "jsonl"
    parquet = "parquet"


def parse_format(text: str) -> Format:
    """What `--format` takes; `json` is another name of `jsonl`.

    Raises:
        UserError: there is no such format.
    """
    try:
        return Format("jsonl" if text == "json" else text)
    except ValueError as e:
        raise UserError(f"--format {text!r}: give one of {', '.join(Format)}") from e


def print_answer(answer: pa.Table, format_: Format, *, title: str | None = None, out: Path | None = None) -> None:
    """Prints a table of rows, or writes it to a file, whole or not at all.

    Ids (binary columns) are shown as hex, except in Parquet. JSON is one object a line; a number that isn't finite is null in it.

    Raises:
        UserError: the file can't be written, or Parquet would go to a terminal.
    """
    if out is not None:
        with whole_file(out) as file:
            _write(answer, format_, file, title=title)
    elif format_ is Format.parquet and sys.stdout.isatty():
        raise UserError("Parquet is not for a terminal; give --out FILE, or send the output to a file or a pipe")
    else:
        sys.stdout.flush()
        _write(answer, format_, sys.stdout.buffer, title=title)
        sys.stdout.buffer.flush()


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes its name once it's whole; after an error nothing is left of it.

    Raises:
        UserError: it can't be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    except OSError as e:
        raise UserError(
            f"{path} can't be written: {e.strerror or first_line(e)}; name a file in a folder that can"
        ) from e
    finally:
        partial.unlink(missing_ok=True)


def _write(answer: pa.Table, format_: Format, file: IO[bytes], *, title: str | None) -> None:
    if format_ is Format.parquet:
        file.write(_parquet(answer))
    elif format_ is Format.csv:
        pa.csv.write_csv(_for_csv(answer), file)
    elif format_ is Format.jsonl:
        for row in _rows(answer):
            values = zip(answer.column_names, (_json_value(value) for value in row), strict=True)
            file.write(json.dumps(dict(values), ensure_ascii=False).encode() + b"\n")
    else:
        _write_table(answer, file, title=title)


def _parquet(answer: pa.Table) -> bytes:
    """In memory: a pipe can't tell how far it is, which the writer asks for."""
    file = io.BytesIO()
    try:
        pa.parquet.write_table(answer, file)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise UserError(f"Parquet has no form for this answer: {first_line(e)}; cast the column in the query") from e
    return file.getvalue()


def _write_table(answer: pa.Table, file: IO[bytes], *, title: str | None) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for field in answer.schema:
        numeric = any(is_kind(field.type) for is_kind in _NUMERIC)
        table.add_column(field.name, justify="right" if numeric else "left", overflow="fold")
    for row in _rows(answer.slice(0, MOST_ROWS)):
        table.add_row(*(_cell(value) for value in row))
    # Values are shown as they are: brackets and colons in them are no markup. A pipe has no width: let no column be cut there.
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    if file is sys.stdout.buffer:
        Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, **plain).print(table)
    else:
        text = io.StringIO()
        Console(file=text, width=_PIPE_WIDTH, **plain).print(table)
        file.write(text.getvalue().encode())
    if answer.num_rows > MOST_ROWS:
        STDERR.print(f"the first {MOST_ROWS:,} of {answer.num_rows:,} rows; --format csv, jsonl or parquet gives all")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NUMERIC = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


def _rows(answer: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The rows by place: two columns may have the same name."""
    for batch in answer.to_batches(max_chunksize=10_000):
        yield from zip(*(_python_values(column) for column in batch.columns), strict=True)


def _python_values(column: pa.Array[Any]) -> list[Any]:
    try:
        return column.to_pylist()
    except (OverflowError, ValueError):  # a time or a span of time that Python has no value for
        try:
            return column.cast(pa.string()).to_pylist()
        except pa.ArrowInvalid as e:
            raise UserError(
                f"a value of type {column.type} is too large to be shown; cast it to VARCHAR in the query"
            ) from e


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Decimal):  # DuckDB's sum of integers
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    # Texts are strangers': let none of them steer the terminal.
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(_with_hex(value)))


def _with_hex(value: Any) -> Any:
    """Ids as hex, wherever they stand in the value."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _with_hex(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_hex(inner) for inner in value]
    return value


def _json_value(value: Any) -> Any:
    """As JSON has it: what it has no form for is null (a number that isn't finite) or text (a time)."""
    if isinstance(value, dict):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(_with_hex(value))


_PLAIN = (
    pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_temporal, pa.types.is_string,
    pa.types.is_large_string, pa.types.is_null,
)  # fmt: skip


def _for_csv(answer: pa.Table) -> pa.Table:
    """The columns that CSV has a form for, and the text of the others."""
    columns = []
    for field, column in zip(answer.schema, answer.columns, strict=True):
        if any(is_kind(field.type) for is_kind in _PLAIN) and not pa.types.is_interval(field.type):
            columns.append(column)
        else:
            values = [value for chunk in column.chunks for value in _python_values(chunk)]
            columns.append(pa.array([_text(value) for value in values], pa.string()))
    return pa.table(columns, names=answer.column_names)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    told = _json_value(value)
    return told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
