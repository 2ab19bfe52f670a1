"""The texts that scoring reads, as tokens: the documents of the train split, the holdout by probe and fold, samples of the documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import xxhash

from manifests.catalog import Catalog
from manifests.errors import UserError
from pipeline.texts import read_texts
from pipeline.tokenizer import LoadedTokenizer

Tokens = npt.NDArray[Any]
Probes = dict[str, list[list[Tokens]]]
"""The holdout: documents of each fold of each probe."""

_EACH_ONCE = """
    SELECT doc_id, corpus, text_bytes, source_uri, source_row FROM documents WHERE split = ?
    QUALIFY row_number() OVER (PARTITION BY doc_id ORDER BY source_uri, source_row) = 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Documents that are scored together, in the order in which their texts lie."""

    number: int
    """From 1."""
    ids: Any
    """doc_id of each, an Arrow array of binary."""
    name: str
    """Which they are, for errors."""


def count_documents(catalog: Catalog, split: str) -> int:
    """Different documents of a split."""
    return int(catalog.rows("SELECT count(DISTINCT doc_id) AS n FROM documents WHERE split = ?", [split])[0]["n"])


def partitions(catalog: Catalog, *, size: int, sample: int | None, seed: int) -> Iterator[Partition]:
    """The documents of the train split, each once, cut into partitions; streamed, so that no more than a few are held at a time.

    Args:
        sample: only so many, drawn evenly by the seed; a larger sample holds the smaller one.
    """
    sql = f"{_EACH_ONCE} ORDER BY source_uri, source_row"
    parameters: list[str | bytes] = ["train"]
    if sample is not None:
        drawn = f"SELECT * FROM ({_EACH_ONCE}) ORDER BY doc_id < ?, doc_id LIMIT {int(sample)}"
        sql = f"SELECT * FROM ({drawn}) ORDER BY source_uri, source_row"
        parameters.append(_pivot("score", seed))
    for number, batch in enumerate(catalog.stream(sql, parameters, num_rows=size), start=1):
        yield _partition(number, pa.Table.from_batches([batch]))


def _partition(number: int, rows: pa.Table) -> Partition:
    first, last = (rows.slice(place, 1).to_pylist()[0] for place in (0, rows.num_rows - 1))
    name = f"{first['source_uri']} row {first['source_row']} to {last['source_uri']} row {last['source_row']}"
    return Partition(number=number, ids=rows["doc_id"].combine_chunks(), name=name)


def draw_sample(catalog: Catalog, *, num_bytes: int, seed: int) -> Any:
    """Ids of documents of the train split, drawn evenly by the seed until they have so many bytes of text, or all there are."""
    sql = f"""
        SELECT doc_id FROM (
            SELECT doc_id, sum(text_bytes) OVER (ORDER BY doc_id < ?, doc_id ROWS UNBOUNDED PRECEDING) - text_bytes AS bytes_before
            FROM ({_EACH_ONCE})
        ) WHERE bytes_before < {int(num_bytes)} ORDER BY doc_id
    """
    return catalog.query(sql, [_pivot("train", seed), "train"])["doc_id"]


def draw_by_corpus(catalog: Catalog, *, num_each: int, max_corpora: int, seed: int) -> dict[str, Any]:
    """Ids of up to so many documents of each of the largest corpora of the train split, drawn evenly by the seed."""
    sql = f"""
        WITH once AS ({_EACH_ONCE}),
             largest AS (SELECT corpus FROM once GROUP BY corpus ORDER BY count(*) DESC, corpus LIMIT {int(max_corpora)})
        SELECT corpus, doc_id FROM once WHERE corpus IN (SELECT corpus FROM largest)
        QUALIFY row_number() OVER (PARTITION BY corpus ORDER BY doc_id < ?, doc_id) <= {int(num_each)}
        ORDER BY corpus, doc_id
    """
    rows = catalog.query(sql, ["train", _pivot("source", seed)])
    corpora = sorted(set(rows["corpus"].to_pylist()))
    return {corpus: rows.filter(pa.compute.equal(rows["corpus"], corpus))["doc_id"] for corpus in corpora}


def _pivot(purpose: str, seed: int) -> bytes:
    """Where the draw begins. Ids are hashes of texts, so those that follow any id are an even draw."""
    return xxhash.xxh3_128_digest(f"{purpose}/{seed}")


def holdout_probes(
    catalog: Catalog, tokenizer: LoadedTokenizer, *, num_folds: int, max_documents: int
) -> tuple[Probes, list[str]]:
    """The holdout's documents by corpus, each a probe, in folds; of more than the configured number, those of the lowest ids.

    Returns:
        The probes, by name, and the corpora left out since they have fewer documents than there are folds.
    """
    sql = f"SELECT doc_id, corpus FROM ({_EACH_ONCE}) ORDER BY doc_id LIMIT {int(max_documents)}"
    documents = catalog.query(sql, ["holdout"])
    encoded = encode_documents(catalog, tokenizer, documents["doc_id"]) if len(documents) else {}
    by_corpus: dict[str, list[Tokens]] = defaultdict(list)
    for row in documents.to_pylist():
        if len(encoded[row["doc_id"]]) > 1:
            by_corpus[row["corpus"]].append(encoded[row["doc_id"]])
    small = sorted(corpus for corpus, found in by_corpus.items() if len(found) < num_folds)
    if len(small) == len(by_corpus):
        raise UserError(
            f"{catalog.store.uri} has {sum(map(len, by_corpus.values()))} holdout documents, {num_folds} folds of one corpus need as many; "
            "ingest more real text, or with a larger holdout share, or choose fewer folds"
        )
    probes = {
        corpus: [found[fold::num_folds] for fold in range(num_folds)]
        for corpus, found in sorted(by_corpus.items())
        if corpus not in small
    }
    return probes, small


def encode_documents(catalog: Catalog, tokenizer: LoadedTokenizer, doc_ids: Any) -> dict[bytes, Tokens]:
    """The tokens of documents, in the order of their ids as given."""
    texts = list(read_texts(catalog, doc_ids=doc_ids))
    tokens = tokenizer.encode_batch([text for _, text in texts])
    found = {doc_id: tokens_ for (doc_id, _), tokens_ in zip(texts, tokens, strict=True)}
    return {doc_id: found[doc_id] for doc_id in doc_ids.to_pylist()}
