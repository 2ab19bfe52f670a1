"""Texts: they come back as they were ingested, in order, or it is said which source has lost them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.store import Store
from pipeline.identity import document_id
from pipeline.ingest import ingest
from pipeline.sources import SourceSpec
from pipeline.texts import read_texts

TEXTS = [f"Document  {i}\nof many." for i in range(100)]


def write_texts(path: Path, texts: list[str]) -> SourceSpec:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=30)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return SourceSpec(uri=str(path), format=path.suffix[1:], corpus=path.stem)


def texts_of(store: Store, **which: object) -> list[str]:
    return [text for _, text in read_texts(Catalog(store), **which)]  # type: ignore[arg-type]


def test_train_texts_come_back_normalised_in_source_order(store: Store, tmp_path: Path) -> None:
    specs = [
        write_texts(tmp_path / "b.parquet", [text + "  \r\n" for text in TEXTS[:50]]),
        write_texts(tmp_path / "a.jsonl", TEXTS[50:]),
    ]
    ingest(store, specs, holdout_share=0.2)
    catalog = Catalog(store)
    found = list(read_texts(catalog))
    rows = catalog.rows("SELECT doc_id FROM documents WHERE split = 'train' ORDER BY source_uri, source_row")
    assert [doc_id for doc_id, _ in found] == [row["doc_id"] for row in rows]
    assert all(document_id(text) == doc_id and text in TEXTS for doc_id, text in found)
    assert len(found) < len(TEXTS) == len(texts_of(store, where="true"))
    assert sorted(texts_of(store, where="split = 'holdout'") + [text for _, text in found]) == sorted(TEXTS)


def test_texts_are_chosen_by_a_condition_or_by_ids(store: Store, tmp_path: Path) -> None:
    ingest(store, [write_texts(tmp_path / "a.parquet", TEXTS)], holdout_share=0.2)
    assert texts_of(store, where="source_row IN (3, 40, 99)") == [TEXTS[3], TEXTS[40], TEXTS[99]]
    ids = pa.array([document_id(TEXTS[i]) for i in (70, 2, 70)])
    assert texts_of(store, doc_ids=ids) == [TEXTS[2], TEXTS[70]]
    assert texts_of(store, doc_ids=pa.chunked_array([ids]), where="source_row < 50") == [TEXTS[2]]
    assert texts_of(store, where="false") == []
    with pytest.raises(UserError, match="1 of the documents asked for are not in"):
        texts_of(store, doc_ids=pa.array([document_id(TEXTS[0]), b"0" * 16]))
    with pytest.raises(UserError, match="SQL: "):
        texts_of(store, where="no_such_column = 1")


def test_synthetic_texts_come_back_from_their_rollouts(store: Store, tmp_path: Path) -> None:
    rows = [{"text": "Original.", "rollout_results": [{"text": text}]} for text in TEXTS[:5]]
    (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest(store, [SourceSpec(uri=str(tmp_path / "faq.jsonl"), format="finephrase", corpus="f")], holdout_share=0.0)
    assert texts_of(store) == TEXTS[:5]


def test_a_changed_source_is_a_failure_that_names_source_row_and_mend(store: Store, tmp_path: Path) -> None:
    ingest(store, [write_texts(tmp_path / "a.parquet", TEXTS)], holdout_share=0.0)
    write_texts(tmp_path / "a.parquet", [*TEXTS[:30], "Changed.", *TEXTS[31:]])
    found = []
    with pytest.raises(
        Failure, match=r"a\.parquet: row 30 doesn't hold its document.*\(1 documents lost.*ingest it again"
    ):
        found.extend(read_texts(Catalog(store)))
    assert [text for _, text in found] == [*TEXTS[:30], *TEXTS[31:]]
    (tmp_path / "a.parquet").write_bytes(b"broken")
    with pytest.raises(Failure, match="row 0 doesn't hold its document"):
        texts_of(store)


def test_rows_that_moved_within_their_source_are_found(store: Store, tmp_path: Path) -> None:
    ingest(store, [write_texts(tmp_path / "a.jsonl", TEXTS)], holdout_share=0.0)
    write_texts(tmp_path / "a.jsonl", ["New first line.", *TEXTS])
    assert sorted(texts_of(store)) == sorted(TEXTS)


def test_a_vanished_source_is_a_failure_until_it_is_ingested_from_where_it_lies_now(
    store: Store, tmp_path: Path
) -> None:
    ingest(store, [write_texts(tmp_path / "old" / "a.parquet", TEXTS)], holdout_share=0.0)
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(Failure, match=r"old/a\.parquet: the file has vanished \(100 documents lost.*ingest it again"):
        texts_of(store)
    moved = SourceSpec(uri=str(tmp_path / "new" / "a.parquet"), format="parquet", corpus="a")
    assert ingest(store, [moved], holdout_share=0.0)["duplicates"] == 100
    assert sorted(texts_of(store)) == sorted(TEXTS)
