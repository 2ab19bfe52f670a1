"""Opening files of text: Parquet, JSON lines, `datasets`. A reader gives rows as they stand, with their number; what a column means is sources.py's.

Each streams, one batch at a time.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    path: str, columns: list[str], check: Check, *, start_row: int = 0, only: npt.NDArray[np.int64] | None = None
) -> Rows:
    """Rows of a Parquet file. `only`: sorted row numbers; batches without any of them aren't decoded."""
    try:
        with pq.ParquetFile(path) as file:
            check(columns, file.schema_arrow.names)
            row = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if row + num_rows > start_row and _any_within(only, row, row + num_rows):
                    yield from _row_group(file, group, row, columns, start_row, only)
                row += num_rows
    except (pa.ArrowException, OSError) as e:
        raise UserError(
            f"source {path} can't be read as Parquet: {first_line(e)}; check the file, or say its format"
        ) from e


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
    wanted = None if only is None else set(only.tolist())
    absent = set(columns)
    checked = False
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines):
                if number < start_row or (wanted is not None and number not in wanted) or not line.strip():
                    continue
                values = _parse(path, number, line)
                if values is None:
                    yield number, {text_column: INVALID}
                    continue
                if not checked:
                    # A line may lack what is optional, but a first line without text is a wrong column name.
                    check([text_column], list(values))
                    checked = True
                absent -= values.keys()
                yield number, values
    except (pa.ArrowException, OSError, EOFError) as e:
        raise UserError(f"source {path} can't be read: {first_line(e)}; check the file, or say its format") from e
    if checked and absent and start_row == 0 and only is None:
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
