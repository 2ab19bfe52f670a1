"""Opening files of text: Parquet, JSON lines, `datasets`. A reader gives rows as they stand, with their number; what a column means is sources.py's.

Each streams, one batch at a time.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import Failure, UserError
from manifests.store import first_line

Rows = Iterator[tuple[int, Mapping[str, Any]]]
Check = Callable[[Sequence[str], Sequence[str]], None]
"""Called with the columns that must be there and those that are, before the first row; raises where one is missing."""

INVALID = "\udc80"
"""Stands for a value that isn't valid UTF-8. It is no valid Unicode itself."""

_BATCH_ROWS = 4096


def read_parquet(
    path: str,
    columns: list[str],
    check: Check,
    *,
    start_row: int = 0,
    stop_row: int | None = None,
    only: npt.NDArray[np.int64] | None = None,
) -> Rows:
    """Rows of a Parquet file. `only`: sorted row numbers; batches without any of them aren't decoded. `stop_row` is a row group's first."""
    place = ""
    try:
        with pq.ParquetFile(path) as file:
            check(columns, file.schema_arrow.names)
            for group, (row, end) in enumerate(_row_groups(file)):
                if end > start_row and (stop_row is None or row < stop_row) and _any_within(only, row, end):
                    place = f", rows {row} to {end - 1},"
                    yield from _row_group(file, group, row, columns, start_row, only)
    except (pa.ArrowException, OSError) as e:
        raise UserError(
            f"source {path}{place} can't be read as Parquet: {first_line(e)}; check the file, or say its format"
        ) from e


def parquet_ranges(path: str, num_rows: int) -> list[tuple[int, int]]:
    """A Parquet file's rows as ranges of whole row groups, of `num_rows` or more where there are as many."""
    ranges: list[tuple[int, int]] = []
    for row, end in parquet_row_groups(path):
        if ranges and ranges[-1][1] - ranges[-1][0] < num_rows:
            row = ranges.pop()[0]
        ranges.append((row, end))
    return ranges


def parquet_row_groups(path: str) -> list[tuple[int, int]]:
    """First row of each row group, and the row after its last."""
    try:
        with pq.ParquetFile(path) as file:
            return _row_groups(file)
    except (pa.ArrowException, OSError) as e:
        raise UserError(
            f"source {path} can't be read as Parquet: {first_line(e)}; check the file, or say its format"
        ) from e


def _row_groups(file: pq.ParquetFile) -> list[tuple[int, int]]:
    ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)], dtype=np.int64)
    return list(pairwise([0, *ends.tolist()]))


def _row_group(
    file: pq.ParquetFile, group: int, row: int, columns: list[str], start_row: int, only: npt.NDArray[np.int64] | None
) -> Rows:
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
        numbers = np.arange(row, row + batch.num_rows)
        row += batch.num_rows
        keep = numbers >= start_row
        if only is not None:
            keep &= np.isin(numbers, only[np.searchsorted(only, numbers[0]) : np.searchsorted(only, row)])
        if not keep.all():
            numbers, batch = numbers[keep], batch.filter(pa.array(keep))
        names = batch.schema.names
        for number, values in zip(numbers.tolist(), zip(*map(_decode, batch.columns), strict=True), strict=True):
            yield number, dict(zip(names, values, strict=True))


def _any_within(only: npt.NDArray[np.int64] | None, low: int, high: int) -> bool:
    return only is None or bool(np.searchsorted(only, low) < np.searchsorted(only, high))


def _decode(column: pa.Array[Any]) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_decode_value(value) for value in column]


def _decode_value(value: pa.Scalar[Any]) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return INVALID


def read_jsonl(
    path: str,
    text_column: str,
    columns: list[str],
    check: Check,
    *,
    start_row: int = 0,
    only: npt.NDArray[np.int64] | None = None,
) -> Rows:
    """Rows of a file of JSON lines, plain, .gz or .zst. A row's number is its line's, from 0; blank lines are no rows."""
    absent = set(columns)
    lines = read_lines(path, start_row=start_row, only=only)
    yield from parse_lines(path, lines, text_column, check, absent)
    if start_row == 0 and only is None:
        require_present(path, text_column, absent)


def read_lines(
    path: str, *, start_row: int = 0, only: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their numbers, less the blank ones."""
    wanted = None if only is None else set(only.tolist())
    number = start_row
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines):
                if number >= start_row and (wanted is None or number in wanted) and line.strip():
                    yield number, line
    except (pa.ArrowException, OSError, EOFError) as e:
        raise UserError(
            f"source {path} can't be read at line {number + 1}: {first_line(e)}; check the file, or say its format"
        ) from e


def parse_lines(
    path: str, lines: Iterable[tuple[int, bytes]], text_column: str, check: Check | None, absent: set[str]
) -> Rows:
    """Rows of lines; takes out of `absent` the columns that they have. `check`: None where the lines aren't a file's first."""
    for number, line in lines:
        values = _parse(path, number, line)
        if values is None:
            yield number, {text_column: INVALID}
            continue
        if check is not None:
            # A line may lack what is optional, but a first line without text is a wrong column name.
            check([text_column], list(values))
            check = None
        absent.difference_update(values)
        yield number, values


def require_present(path: str, text_column: str, absent: Collection[str]) -> None:
    """Refuses a whole file that has lines, but never a column that is asked for."""
    if absent and text_column not in absent:
        raise UserError(
            f"source {path}: no line has the column {', '.join(sorted(absent))}; map it to another column, or leave it out"
        )


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        return io.BufferedReader(pa.input_stream(path, compression="zstd"))  # type: ignore[type-var]
    return open(path, "rb")


def _parse(path: str, number: int, line: bytes) -> dict[str, Any] | None:
    """One line; None where it isn't valid UTF-8."""
    try:
        values = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
    except UnicodeDecodeError:
        return None
    except (ValueError, RecursionError) as e:
        raise UserError(f"source {path}:{number + 1}: not JSON ({e}); mend or remove the line") from e
    if not isinstance(values, dict):
        raise UserError(
            f"source {path}:{number + 1}: a line must be one JSON object, this is {type(values).__name__}; mend the line"
        )
    return values


def read_datasets(
    name: str,
    subset: str | None,
    split: str,
    columns: list[str],
    check: Check,
    *,
    start_row: int = 0,
    only: npt.NDArray[np.int64] | None = None,
) -> Rows:
    """Rows of a data set of the Hugging Face hub, of a local folder of data files, or of one that `save_to_disk` wrote."""
    import datasets

    saved = any((Path(name) / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            stored = datasets.load_from_disk(name)
            if isinstance(stored, datasets.DatasetDict):
                if split not in stored:
                    raise UserError(f"source {name}: there is no split {split!r}; there are {', '.join(stored)}")
                stored = stored[split]
            data = stored.to_iterable_dataset()
        else:
            data = datasets.load_dataset(name, name=subset, split=split, streaming=True)
        if data.column_names is None:
            data = data._resolve_features()
        check(columns, data.column_names)
        data = data.select_columns(columns)
        wanted = None if only is None else set(only.tolist())
        for row, values in enumerate(data.skip(start_row) if start_row else data, start_row):
            if wanted is None or row in wanted:
                yield row, values
    except (datasets.exceptions.DatasetsError, FileNotFoundError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(
            f"source {name}, split {split}: {first_line(e)}; check the name, its subset and its split"
        ) from e
    except (OSError, pa.ArrowException) as e:
        raise Failure(f"source {name}, split {split}: {first_line(e)}; check the network and run it again") from e
