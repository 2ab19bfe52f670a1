"""Compaction of one table: which files are merged, how, and the commit that puts the merged file in their place.

delta-rs's own `optimize` is not used. It doesn't see that another compaction has taken the same files away in the meantime (1.6.6), and then every
row of theirs is there twice. Here the entry of the next version is created if absent, as Delta's protocol asks; where somebody else was first, his
entry is looked at, and where he took away a file that we merged, our work is thrown away.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import Failure, ObjectMissing, ObjectTaken, StoreUnreachable
from manifests.jobs import code_version
from manifests.log import DataFile, live_files, open_parquet, read_commit, read_log, write_commit
from manifests.schemas import TABLES, TableSpec
from manifests.store import Store, first_line
from manifests.tables import ZSTD_LEVEL, open_table

_ATTEMPTS = 20
_BATCH_ROWS = 65_536
_ROW_GROUP_ROWS = 1 << 20


class _Overtaken(Exception):
    """Another commit took away files that were merged here, or changed the table's schema."""


def compact_table(store: Store, name: str, *, target_bytes: int) -> bool:
    """Merges a table's small files, a commit for each merged file.

    Returns:
        Whether there was anything to merge.

    Raises:
        Failure: a data file or the log is damaged.
        StoreUnreachable: the store failed, or others compacted the table all the time. Run it again: no row is lost or doubled.
    """
    merged_any = False
    for _ in range(_ATTEMPTS):
        commits = read_log(store, name)
        try:
            for files in choose_files(list(live_files(commits).values()), target_bytes):
                _replace(store, name, files, _merge(store, name, files), version=len(commits))
                merged_any = True
        except _Overtaken:
            continue
        return merged_any
    raise StoreUnreachable(
        f"compacting table {name} of {store.uri}: overtaken {_ATTEMPTS} times by others; run it again"
    )


def choose_files(files: Sequence[DataFile], target_bytes: int) -> list[list[DataFile]]:
    """Which files are merged with each other: small ones of one partition, in the order in which they came, up to the target size.

    A file of half the target size is left alone: merging it again and again would cost more than it brings.
    """
    chosen = []
    small = [file for file in files if file.size_bytes < target_bytes / 2]
    for _, of_partition in groupby(sorted(small, key=_partition), key=_partition):
        group: list[DataFile] = []
        for file in of_partition:
            if group and sum(item.size_bytes for item in group) + file.size_bytes > target_bytes:
                chosen.append(group)
                group = []
            group.append(file)
        chosen.append(group)
    return [group for group in chosen if len(group) > 1]


def _partition(file: DataFile) -> list[tuple[str, str]]:
    return sorted((column, value or "") for column, value in file.action["partitionValues"].items())


def _merge(store: Store, name: str, files: Sequence[DataFile]) -> dict[str, Any]:
    """Writes the rows of files, in order, into a new one beside them; returns the action that adds it."""
    spec = TABLES[name]
    present = {field.name for field in open_table(store, name).schema().fields}
    columns = [f for f in spec.schema if f.name in present and f.name not in spec.partition_by]
    schema = pa.schema(columns)
    # The folder is that of the partition, as the log spells it.
    url = str(PurePosixPath(files[0].action["path"]).with_name(f"part-{uuid.uuid4()}.zstd.parquet"))
    with TemporaryFile(prefix="atoll-compact-") as file:
        with _writer(spec, schema, file) as writer:
            for rows in _row_groups(store, name, files, schema):
                writer.write_table(rows)
        file.seek(0)
        data = file.read()
    store.put_new(f"tables/{name}/{unquote(url)}", data)
    return {
        "path": url,
        "partitionValues": files[0].action["partitionValues"],
        "size": len(data),
        "modificationTime": time.time_ns() // 1_000_000,
        "dataChange": False,
        "stats": json.dumps(merge_statistics([json.loads(f.action.get("stats") or "{}") for f in files])),
    }


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The log's statistics of a file that holds the rows of several; what one of them doesn't know is left out."""
    merged: dict[str, Any] = {}
    if all("numRecords" in part for part in parts):
        merged["numRecords"] = sum(part["numRecords"] for part in parts)
    choices: dict[str, Callable[[Iterable[Any]], Any]] = {"minValues": min, "maxValues": max, "nullCount": sum}
    for kind, choose in choices.items():
        known = [part.get(kind, {}) for part in parts]
        merged[kind] = {
            column: choose(one[column] for one in known) for column in known[0] if all(column in one for one in known)
        }
    return merged


def _writer(spec: TableSpec, schema: pa.Schema, file: IO[bytes]) -> pq.ParquetWriter:
    """Writes Parquet as an append does; see `writer_properties`."""
    plain = [column for column in schema.names if column not in spec.encodings]
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=plain if spec.encodings else True,
        column_encoding=dict(spec.encodings) or None,
        store_schema=False,
    )


def _row_groups(store: Store, name: str, files: Sequence[DataFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of files in order, some at a time."""
    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for batch in _batches(store, name, files, schema):
        waiting.append(batch)
        num_waiting += batch.num_rows
        if num_waiting >= _ROW_GROUP_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting, num_waiting = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _batches(store: Store, name: str, files: Sequence[DataFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for file in files:
        where = f"data file {store.uri}/tables/{name}/{file.path}"
        try:
            parquet = open_parquet(store, name, file)
            if file.rows not in (None, parquet.metadata.num_rows):
                raise Failure(
                    f"{where} has {parquet.metadata.num_rows} rows, the log says {file.rows}; restore it from a backup"
                )
            for batch in parquet.iter_batches(_BATCH_ROWS):
                yield _whole(batch, schema)
        except (OSError, pa.ArrowException, ObjectMissing) as e:
            raise Failure(f"{where} can't be read: {first_line(e)}; restore it from a backup") from e


def _whole(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns that came after its file."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _replace(store: Store, name: str, files: Sequence[DataFile], added: Mapping[str, Any], *, version: int) -> None:
    """Commits a merged file in the place of those that it was merged from; `version` is the first that wasn't known when these were chosen."""
    now = time.time_ns() // 1_000_000
    removed: list[dict[str, Any]] = [
        {
            "path": file.action["path"],
            "deletionTimestamp": now,
            "dataChange": False,
            "extendedFileMetadata": True,
            "partitionValues": file.action["partitionValues"],
            "size": file.size_bytes,
        }
        for file in files
    ]
    info = {
        "timestamp": now,
        "operation": "OPTIMIZE",
        "operationParameters": {},
        "engineInfo": f"atoll:{code_version()}",
    }
    actions: list[dict[str, Any]] = [{"commitInfo": info}, *({"remove": item} for item in removed), {"add": added}]
    ours = {file.path for file in files}
    while True:
        try:
            write_commit(store, name, version, actions)
            return
        except ObjectTaken:
            theirs = read_commit(store, name, version)
            if theirs.changes_schema or ours & set(theirs.removed):
                raise _Overtaken from None
            version += 1
