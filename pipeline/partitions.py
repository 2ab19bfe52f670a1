"""Partitions: the rows of a source in pieces that engines can work on apart from each other.

A Parquet file is opened by whoever works on one of its ranges. JSON lines and data sets can only be read from their beginning, so their partitions
carry what is in them; parsing and what comes after it is the workers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from manifests.errors import UserError
from pipeline import readers
from pipeline.sources import (
    Layout,
    RejectedRow,
    SourceDocument,
    SourceSpec,
    is_jsonl,
    mapper,
    read_datasets,
)

_RANGE_ROWS = 16_384
_CARRIED_ROWS = 4096
_CARRIED_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Rows of one source that follow each other."""

    file: int
    """The caller's number of the source."""
    spec: SourceSpec
    start_row: int
    stop_row: int
    """The row after the last."""
    content: Sequence[tuple[int, Any]] | None = None
    """Lines, or rows as they stand, with their numbers; None: the worker reads them."""
    first: bool = False
    """Whether they are the first of the source."""

    def __str__(self) -> str:
        return f"source {self.spec.source_uri}, rows {self.start_row} to {self.stop_row - 1}"


def partitions(file: int, spec: SourceSpec, *, start_row: int = 0) -> Iterator[Partition]:
    """A source's partitions, in order, from a row on.

    Raises:
        UserError: the source can't be opened or, where its content is carried, read.
    """
    if spec.format == "datasets":
        yield from _carried(file, spec, start_row, read_datasets(spec, start_row=start_row))
    elif is_jsonl(spec):
        yield from _carried(file, spec, start_row, readers.read_lines(spec.uri, start_row=start_row))
    else:
        for start, stop in readers.parquet_ranges(spec.uri, _RANGE_ROWS):
            if stop > start_row:
                yield Partition(file=file, spec=spec, start_row=max(start, start_row), stop_row=stop)


def read_partition(partition: Partition, absent: set[str]) -> Iterator[SourceDocument | RejectedRow]:
    """The rows of a partition. Takes out of `absent` the columns that its lines of JSON have.

    Raises:
        UserError: as `read_rows`.
    """
    spec, layout = partition.spec, Layout.of(partition.spec)
    map_row = mapper(spec)
    if partition.content is None:
        rows = readers.read_parquet(
            spec.uri, layout.columns, layout.check, start_row=partition.start_row, stop_row=partition.stop_row
        )
    elif spec.format == "datasets":
        rows = iter(partition.content)
    else:
        check = layout.check if partition.first else None
        rows = readers.parse_lines(spec.uri, partition.content, layout.text, check, absent)
    for row, values in rows:
        yield map_row(row, values)


def count_rows(specs: Iterable[SourceSpec]) -> int | None:
    """Rows of all the sources together, where their files tell it at once: Parquet."""
    total = 0
    try:
        for spec in specs:
            if spec.format == "datasets" or is_jsonl(spec):
                return None
            total += max((end for _, end in readers.parquet_row_groups(spec.uri)), default=0)
    except UserError:
        return None  # said where its turn comes
    return total


def _carried(file: int, spec: SourceSpec, start_row: int, rows: Iterable[tuple[int, Any]]) -> Iterator[Partition]:
    first = start_row == 0
    content: list[tuple[int, Any]] = []
    size_bytes = 0
    for row in rows:
        content.append(row)
        size_bytes += _size(row[1])
        if len(content) == _CARRIED_ROWS or size_bytes >= _CARRIED_BYTES:
            yield _carrying(file, spec, content, first)
            first, content, size_bytes = False, [], 0
    if content:
        yield _carrying(file, spec, content, first)


def _carrying(file: int, spec: SourceSpec, content: Sequence[tuple[int, Any]], first: bool) -> Partition:
    start, stop = content[0][0], content[-1][0] + 1
    return Partition(file=file, spec=spec, start_row=start, stop_row=stop, content=content, first=first)


def _size(content: Any) -> int:
    """About its size in bytes: of a row, the texts that stand in it."""
    if isinstance(content, dict):
        return sum(map(_size, content.values()))
    if isinstance(content, list):
        return sum(map(_size, content))
    return len(content) if isinstance(content, str | bytes) else 8
