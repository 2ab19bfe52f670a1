"""The partitions of a source have its rows, each once and in order, from whichever row on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import UserError
from pipeline.partitions import count_rows, partitions, read_partition
from pipeline.sources import SourceSpec, read_rows


def _spec(path: Path, format: str, **fields: Any) -> SourceSpec:
    return SourceSpec(uri=str(path), format=format, corpus="c", **fields)


def _sources(folder: Path) -> dict[str, SourceSpec]:
    """One of each kind, of 100 rows."""
    texts = [f"text {i}" if i % 7 else None for i in range(100)]
    pq.write_table(pa.table({"text": texts}), folder / "x.parquet", row_group_size=15)
    lines = ['{"text": "one", "n": 1}\n' + "\n" * (i % 3) if i % 5 else '{"text": ""}\n' for i in range(100)]
    (folder / "x.jsonl").write_text("\n" + "".join(lines))
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n' * 50)
    return {
        "parquet": _spec(folder / "x.parquet", "parquet"),
        "jsonl": _spec(folder / "x.jsonl", "jsonl"),
        "datasets": _spec(folder / "data", "datasets"),
    }


@pytest.mark.parametrize("format", ["parquet", "jsonl", "datasets"])
def test_partitions_hold_every_row_once_and_travel(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.partitions._RANGE_ROWS", 20)
    monkeypatch.setattr("pipeline.partitions._CARRIED_ROWS", 20)
    spec = _sources(tmp_path)[format]
    whole = list(read_rows(spec))
    assert len(whole) == 100
    for start_row in (0, 1, 47, whole[-1].row, whole[-1].row + 1):
        parts = [pickle.loads(pickle.dumps(part)) for part in partitions(3, spec, start_row=start_row)]
        assert [row for part in parts for row in read_partition(part, set())] == [
            row for row in whole if row.row >= start_row
        ]
        assert start_row > 1 or len(parts) >= 4
        assert all(part.file == 3 for part in parts)


def test_large_rows_make_small_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.partitions._CARRIED_BYTES", 1000)
    (tmp_path / "x.jsonl").write_text(f'{{"text": "{"long " * 100}"}}\n' * 8)
    parts = list(partitions(0, _spec(tmp_path / "x.jsonl", "jsonl")))
    assert [(part.start_row, part.stop_row) for part in parts] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert str(parts[1]) == f"source {tmp_path / 'x.jsonl'}, rows 2 to 3"


def test_rows_are_counted_beforehand_where_the_files_tell(tmp_path: Path) -> None:
    sources = _sources(tmp_path)
    assert count_rows([sources["parquet"]]) == 100
    assert count_rows([sources["parquet"], sources["jsonl"]]) is None
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet")
    assert count_rows([_spec(tmp_path / "bad.parquet", "parquet")]) is None


def test_a_damaged_row_group_is_named_by_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"text": [f"text {i} " * 20 for i in range(100)]})
    pq.write_table(table, path, row_group_size=25, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.parquet, rows 50 to 74, can't be read as Parquet: .*check the file"):
        list(read_rows(_spec(path, "parquet")))
