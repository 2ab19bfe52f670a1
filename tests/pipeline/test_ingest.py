"""Ingest: what becomes a document, what is dropped, which split it falls in, and that a killed ingest ends like one that wasn't."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.store import Store
from manifests.tables import create_store, read
from pipeline.engine import InProcess
from pipeline.identity import document_id, in_holdout
from pipeline.ingest import ingest
from pipeline.sources import SourceSpec


def write_texts(path: Path, texts: Iterable[str | None], **columns: list[Any]) -> SourceSpec:
    pq.write_table(pa.table({"text": pa.array(list(texts), pa.string()), **columns}), path)
    return SourceSpec(uri=str(path), format="parquet", corpus=path.stem)


def documents(store: Store) -> list[dict[str, Any]]:
    return Catalog(store).rows("SELECT * FROM documents ORDER BY source_uri, source_row")


def test_documents_carry_what_their_source_says(store: Store, tmp_path: Path) -> None:
    spec = write_texts(tmp_path / "wiki.parquet", ["Caf\u00e9.  ", "Two."], rights=["mit", None], n=[3, None])
    spec = replace(spec, columns={"license": "rights", "tokens": "n"}, access="internal")
    summary = ingest(store, [spec], holdout_share=0.0)
    first, second = documents(store)
    assert first == {
        "doc_id": document_id("Caf\u00e9."),
        "corpus": "wiki",
        "origin": "real",
        "generator": None,
        "prompt": None,
        "parent_id": None,
        "license": "mit",
        "access": "internal",
        "split": "train",
        "label": None,
        "finish_reason": None,
        "text_bytes": 6,
        "tokens": 3,
        "source_uri": str(tmp_path / "wiki.parquet"),
        "source_row": 0,
        "job": summary["job"],
    }
    assert (second["license"], second["tokens"], second["source_row"]) == ("unknown", None, 1)


def test_the_summary_and_the_sources_table_count_every_row_once(store: Store, tmp_path: Path) -> None:
    one = write_texts(tmp_path / "one.parquet", ["a", "b", "a ", None, " ", "c"])
    two = write_texts(tmp_path / "two.parquet", ["b", "d"])
    summary = ingest(store, [one, two], holdout_share=0.0)
    counts = {"rows": 6, "documents": 3, "duplicates": 1, "rejected": 2, "holdout": 0, "holdout_derived": 0, "bytes": 3}
    assert summary["corpora"]["one"] == counts
    assert summary["corpora"]["two"] == counts | {"rows": 2, "documents": 1, "rejected": 0, "bytes": 1}
    assert (summary["rows"], summary["documents"], summary["already_done"]) == (8, 4, False)
    assert summary["rejected_because"] == {"empty text": 1, "no text": 1}
    rows = Catalog(store).rows("SELECT corpus, rows, documents, duplicates, rejected FROM sources ORDER BY corpus")
    assert [tuple(row.values()) for row in rows] == [("one", 6, 3, 1, 2), ("two", 2, 1, 1, 0)]


def test_a_folder_of_files_is_one_corpus(store: Store, tmp_path: Path) -> None:
    write_texts(tmp_path / "1.parquet", ["a", "b"])
    write_texts(tmp_path / "2.parquet", ["c"])
    spec = SourceSpec(uri=str(tmp_path / "*.parquet"), format="parquet", corpus="both")
    assert ingest(store, [spec], holdout_share=0.0)["corpora"]["both"]["documents"] == 3
    assert [Path(row["source_uri"]).name for row in documents(store)] == ["1.parquet", "1.parquet", "2.parquet"]


def test_texts_that_a_committed_job_brought_are_duplicates(store: Store, tmp_path: Path) -> None:
    ingest(store, [write_texts(tmp_path / "one.parquet", ["a", "b"])], holdout_share=0.0)
    summary = ingest(store, [write_texts(tmp_path / "two.parquet", ["b", "c"])], holdout_share=0.0)
    assert (summary["documents"], summary["duplicates"]) == (1, 1)
    assert len({row["doc_id"] for row in documents(store)}) == len(documents(store)) == 3


def test_the_same_ingest_again_changes_nothing(store: Store, tmp_path: Path) -> None:
    spec = write_texts(tmp_path / "one.parquet", ["a", "b"])
    first = ingest(store, [spec], holdout_share=0.0)
    versions = Catalog(store).versions
    assert ingest(store, [spec], holdout_share=0.0) == first | {"already_done": True}
    assert Catalog(store).versions == versions


def test_a_changed_file_is_another_ingest(store: Store, tmp_path: Path) -> None:
    spec = write_texts(tmp_path / "one.parquet", ["a", "b"])
    ingest(store, [spec], holdout_share=0.0)
    write_texts(tmp_path / "one.parquet", ["a", "b", "c", "d"])
    summary = ingest(store, [spec], holdout_share=0.0)
    assert (summary["already_done"], summary["documents"], summary["duplicates"]) == (False, 2, 2)


def test_real_documents_are_held_out_by_their_id(store: Store, tmp_path: Path) -> None:
    spec = write_texts(tmp_path / "wiki.parquet", [f"document {i}" for i in range(500)])
    summary = ingest(store, [spec], holdout_share=0.2)
    rows = documents(store)
    assert all(row["split"] == ("holdout" if in_holdout(row["doc_id"], 0.2) else "train") for row in rows)
    assert summary["holdout"] == sum(row["split"] == "holdout" for row in rows) > 50


def test_what_was_rephrased_from_a_held_out_text_is_kept_apart(store: Store, tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(300)]
    real = write_texts(tmp_path / "wiki.parquet", texts)
    # One parent column with spaces behind, as another copy of the web page may have them; and some without a parent.
    parents = [text + "  \n" for text in texts[:200]] + [None] * 100
    synthetic = write_texts(tmp_path / "new.parquet", [f"rephrased {i}" for i in range(300)], source=parents)
    synthetic = replace(synthetic, origin="synthetic", columns={"parent_text": "source"})
    summary = ingest(store, [synthetic, real], holdout_share=0.2)
    rows = documents(store)
    split = {row["doc_id"]: row["split"] for row in rows if row["corpus"] == "wiki"}
    derived = [row for row in rows if row["corpus"] == "new"]
    assert [row["parent_id"] is None for row in derived] == [False] * 200 + [True] * 100
    for row in derived:
        expected = "holdout_derived" if split.get(row["parent_id"]) == "holdout" else "train"
        assert row["split"] == expected
    assert summary["corpora"]["new"]["holdout_derived"] == sum(row["split"] != "train" for row in derived) > 10
    assert summary["corpora"]["new"]["holdout"] == 0


def test_another_holdout_share_is_refused(store: Store, tmp_path: Path) -> None:
    ingest(store, [write_texts(tmp_path / "one.parquet", ["a"])], holdout_share=0.1)
    other = write_texts(tmp_path / "two.parquet", ["b"])
    with pytest.raises(UserError, match=r"holds out a share of 0\.1, not 0\.2; give that share"):
        ingest(store, [other], holdout_share=0.2)
    with pytest.raises(UserError, match="holdout share 1 is not from 0 to below 1"):
        ingest(store, [other], holdout_share=1)


def test_an_ingest_that_fails_leaves_no_document(store: Store, tmp_path: Path) -> None:
    good = write_texts(tmp_path / "good.parquet", ["a", "b"])
    empty = write_texts(tmp_path / "empty.parquet", [None, " "])
    with pytest.raises(UserError, match=r"empty\.parquet has no usable document \(1 rows: .*; check the file"):
        ingest(store, [good, empty], holdout_share=0.0, rows_per_part=1)
    assert documents(store) == []
    with pytest.raises(UserError, match="is named twice"):
        ingest(store, [good, good], holdout_share=0.0)
    assert ingest(store, [good], holdout_share=0.0)["documents"] == 2


def test_a_file_that_changes_while_it_is_read_is_a_failure(store: Store, tmp_path: Path) -> None:
    spec = write_texts(tmp_path / "one.parquet", ["a", "b"])
    with pytest.raises(Failure, match="changed while it was read; run the ingest again"):
        ingest(store, [spec], holdout_share=0.0, report=lambda *_: os.utime(tmp_path / "one.parquet", (1, 1)))
    assert documents(store) == []


def _ingest_and_die_after(store: Path, specs: list[SourceSpec], num_parts: int) -> None:
    """Runs an ingest in a process of its own that SIGKILLs itself once so many parts lie in the store."""
    script = """
import json, os, signal, sys
from manifests.tables import create_store
from pipeline.ingest import ingest
from pipeline.sources import SourceSpec
left = int(sys.argv[3])
def report(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
ingest(create_store(sys.argv[1]), [SourceSpec.from_json(s) for s in json.loads(sys.argv[2])],
       holdout_share=0.1, rows_per_part=100, report=report)
"""
    arguments = [str(store), json.dumps([spec.to_json() for spec in specs]), str(num_parts)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def _table(store: Store, name: str) -> list[dict[str, Any]]:
    order = {"documents": [("source_uri", "ascending"), ("source_row", "ascending")]}.get(name, [("job", "ascending")])
    return read(store, name).sort_by(order).to_pylist()


@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_killed_ingest_run_again_ends_like_one_that_was_not_killed(tmp_path: Path, num_parts: int) -> None:
    # Duplicates within and across files, a file that is all duplicates (parts without documents), and rejected rows.
    one = write_texts(tmp_path / "one.parquet", [f"document {i % 220}" if i % 7 else None for i in range(300)])
    two = write_texts(tmp_path / "two.parquet", [f"document {i % 200}" for i in range(250)])
    three = write_texts(tmp_path / "three.parquet", [f"other {i}" for i in range(250)])
    specs = [one, two, three]
    killed, whole = create_store(str(tmp_path / "killed")), create_store(str(tmp_path / "whole"))
    _ingest_and_die_after(tmp_path / "killed", specs, num_parts)
    left = read(killed, "documents").num_rows
    assert left > 0
    assert documents(killed) == []
    summary = ingest(killed, specs, holdout_share=0.1, rows_per_part=100)
    assert summary == ingest(whole, specs, holdout_share=0.1, rows_per_part=100)
    assert left < summary["documents"] == len(documents(killed))
    for name in ("documents", "sources"):
        assert _table(killed, name) == _table(whole, name)


def test_what_another_job_brought_between_two_attempts_loses_no_document(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))
    spec = write_texts(tmp_path / "one.parquet", [f"document {i}" for i in range(300)])
    _ingest_and_die_after(tmp_path / "store", [spec], 1)
    other = write_texts(tmp_path / "two.parquet", [f"document {i}" for i in range(50, 250)])
    ingest(store, [other], holdout_share=0.1)
    summary = ingest(store, [spec], holdout_share=0.1, rows_per_part=100)
    own = [row for row in documents(store) if row["source_uri"] == spec.uri]
    assert summary["documents"] == len(own) == 150  # the 100 of the first attempt, and what nobody has of the others
    assert summary["duplicates"] == 150
    assert {row["doc_id"] for row in documents(store)} == {document_id(f"document {i}") for i in range(300)}


class _Recording(InProcess):
    """Notes the rows that it's given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int, int]] = []

    def map(self, work: Any, items: Any, *, name: Any = str) -> Any:
        def noted() -> Iterator[Any]:
            for item in items:
                self.given.append((Path(item.spec.uri).name, item.start_row, item.stop_row))
                yield item

        return super().map(work, noted(), name=name)


def test_a_restart_reads_no_finished_part_again(tmp_path: Path) -> None:
    one = write_texts(tmp_path / "one.parquet", [f"document {i}" if i % 7 else None for i in range(300)])
    # Blank lines, which are no rows, and a column that only a line of a finished part has.
    lines = [
        json.dumps({"text": f"line {i % 120}"} | ({"kind": "k"} if i == 3 else {})) + "\n" * (i % 3) for i in range(250)
    ]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    two = SourceSpec(uri=str(tmp_path / "two.jsonl"), format="jsonl", corpus="two", columns={"label": "kind"})
    whole = create_store(str(tmp_path / "whole"))
    expected = ingest(whole, [one, two], holdout_share=0.1, rows_per_part=100)
    for num_parts, first in ((2, ("one.parquet", 200, 300)), (4, ("two.jsonl", 199, 499))):
        killed = create_store(str(tmp_path / f"killed after {num_parts}"))
        _ingest_and_die_after(killed.root, [one, two], num_parts)
        assert len(list(killed.list("ingests"))) == 1
        engine = _Recording()
        assert ingest(killed, [one, two], holdout_share=0.1, rows_per_part=100, engine=engine) == expected
        assert engine.given[0] == first
        assert _table(killed, "documents") == _table(whole, "documents")
        assert list(killed.list("ingests")) == []


def test_a_column_that_no_line_of_a_whole_file_has_is_an_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.partitions._CARRIED_ROWS", 2)
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n{"text": "d", "kind": "k"}\n{"body": "e"}\n')
    spec = SourceSpec(uri=str(path), format="jsonl", corpus="x", columns={"label": "kind"})
    with pytest.raises(UserError, match="no line has the column sort; map it"):
        ingest(store, [replace(spec, columns={"label": "sort"})], holdout_share=0.0)
    assert ingest(store, [spec], holdout_share=0.0)["documents"] == 4
