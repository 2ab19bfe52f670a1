"""Texts: reads documents' text back from the sources where it stayed, and checks that it is still the text that was ingested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from pipeline.identity import hash_text, normalise
from pipeline.sources import SourceDocument, SourceSpec, read_rows

_MEND = "put the file back as it was, or ingest it again from where it lies now"


Ids: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any]"


class Text(NamedTuple):
    """One document's normalised text."""

    doc_id: bytes
    text: str


def read_texts(catalog: Catalog, *, where: str | None = None, doc_ids: Ids | None = None) -> Iterator[Text]:
    """Streams the texts of documents, each once, in the order of (source_uri, source_row).

    A text that no longer stands in its row is looked for in the rest of its source and in the sources that repeat documents, and comes last.

    Args:
        where: SQL condition over `documents`; may ask other tables: `doc_id IN (SELECT doc_id FROM tiers WHERE …)`.
            None: `split = 'train'` without `doc_ids`, any document with them.
        doc_ids: only these documents (binary); order and repetition don't matter.

    Raises:
        UserError: the condition isn't SQL, or no document has one of the `doc_ids`.
        Failure: a source has vanished or changed, and the text is nowhere else.
    """
    wanted = _wanted(catalog, where or ("split = 'train'" if doc_ids is None else "true"), doc_ids)
    if doc_ids is not None and where is None and (num_unknown := pc.count_distinct(doc_ids).as_py() - len(wanted)):
        raise UserError(
            f"{num_unknown} of the documents asked for are not in {catalog.store.uri}; open the catalog anew, or check the ids"
        )
    # In the order of the numbers that _wanted gives.
    sources = catalog.rows("SELECT source_uri, options, duplicates FROM sources ORDER BY source_uri, job")
    specs = [SourceSpec.from_json(source["options"]) for source in sources]
    lost: dict[bytes, tuple[int, int]] = {}
    numbers = wanted["number"].to_numpy()
    for number in np.unique(numbers).tolist():
        first, end = np.searchsorted(numbers, [number, number + 1]).tolist()
        yield from _from_source(specs[number], number, wanted.slice(first, end - first), lost)
    if lost:
        behind = {number for number, _ in lost.values()}
        elsewhere = [i for i, source in enumerate(sources) if i in behind or source["duplicates"]]
        yield from _search([specs[i] for i in elsewhere], lost)
    if lost:
        number, row = min(lost.values())
        source = specs[number].source_uri
        what = (
            f"row {row} doesn't hold its document: the source has changed since it was ingested"
            if _is_there(specs[number])
            else "the file has vanished"
        )
        raise Failure(f"source {source}: {what} ({len(lost)} documents lost in all); {_MEND}")


def _wanted(catalog: Catalog, where: str, doc_ids: Ids | None) -> pa.Table:
    """doc_id, number of the source by (source_uri, job), row; sorted by the last two."""
    only = ""
    if doc_ids is not None:
        catalog.connection.register("_asked", pa.table({"doc_id": doc_ids.cast(pa.binary())}))
        only = "AND doc_id IN (SELECT doc_id FROM _asked)"
    sql = f"""
        WITH numbered AS (SELECT source_uri, job, row_number() OVER (ORDER BY source_uri, job) - 1 AS number FROM sources),
             chosen AS (SELECT doc_id, source_uri, source_row, job FROM documents WHERE ({where}) {only})
        SELECT doc_id, number, source_row
        FROM chosen JOIN numbered USING (source_uri, job)
        QUALIFY row_number() OVER (PARTITION BY doc_id ORDER BY number, source_row) = 1
        ORDER BY number, source_row
    """
    try:
        found = catalog.query(sql)
    finally:
        if doc_ids is not None:
            catalog.connection.unregister("_asked")
    return found


def _from_source(spec: SourceSpec, number: int, wanted: pa.Table, lost: dict[bytes, tuple[int, int]]) -> Iterator[Text]:
    """Texts that still stand in their row; the others go to `lost`."""
    rows: npt.NDArray[np.int64] = wanted["source_row"].to_numpy()
    ids = dict(zip(rows.tolist(), wanted["doc_id"].to_pylist(), strict=True))
    # A source that can't be read any more has changed, too: its texts are lost here, and said so if they are nowhere else.
    with suppress(UserError):
        for document in read_rows(spec, start_row=int(rows[0]), only=rows):
            if isinstance(document, SourceDocument):
                doc_id, text = _identify(document)
                if doc_id == ids[document.row]:
                    del ids[document.row]
                    yield Text(doc_id, text)
            if document.row == rows[-1]:
                break
    lost.update({doc_id: (number, row) for row, doc_id in ids.items()})


def _search(specs: list[SourceSpec], lost: dict[bytes, tuple[int, int]]) -> Iterator[Text]:
    """Looks for lost texts by their hash, and takes those found out of `lost`."""
    for spec in specs:
        with suppress(UserError):
            for document in read_rows(spec):
                if isinstance(document, SourceDocument):
                    doc_id, text = _identify(document)
                    if lost.pop(doc_id, None) is not None:
                        yield Text(doc_id, text)
                if not lost:
                    return


def _identify(document: SourceDocument) -> tuple[bytes, str]:
    text = normalise(document.text)
    return hash_text(text.encode()), text


def _is_there(spec: SourceSpec) -> bool:
    return spec.format == "datasets" or Path(spec.uri).exists()
