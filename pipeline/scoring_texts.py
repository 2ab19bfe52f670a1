"""The texts that scoring reads, as tokens: the documents of a split, the holdout in folds, a sample to train the scoring model on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import UserError
from pipeline.texts import read_texts
from pipeline.tokenizer import LoadedTokenizer

Tokens = npt.NDArray[Any]


def documents_of(catalog: Catalog, split: str) -> pa.Table:
    """The documents of a split, each once, in the order in which their texts lie; doc_id, corpus, text_bytes."""
    return catalog.query(
        """
        SELECT doc_id, corpus, text_bytes FROM documents WHERE split = ?
        QUALIFY row_number() OVER (PARTITION BY doc_id ORDER BY source_uri, source_row) = 1
        ORDER BY source_uri, source_row
        """,
        [split],
    )


def holdout_folds(
    catalog: Catalog, tokenizer: LoadedTokenizer, *, num_folds: int, max_documents: int
) -> list[list[Tokens]]:
    """The holdout's documents in folds, every corpus spread evenly over them; of more than the configured number, those of the lowest ids."""
    documents = documents_of(catalog, "holdout").sort_by("doc_id").slice(0, max_documents)
    ids = documents.sort_by([("corpus", "ascending"), ("doc_id", "ascending")])["doc_id"]
    encoded = encode_documents(catalog, tokenizer, ids) if len(ids) else {}
    usable = [encoded[doc_id] for doc_id in ids.to_pylist() if len(encoded[doc_id]) > 1]
    if len(usable) < num_folds:
        raise UserError(
            f"{catalog.store.uri} has {len(usable)} holdout documents, {num_folds} folds need as many; "
            "ingest more real text, or with a larger holdout share, or choose fewer folds"
        )
    return [usable[fold::num_folds] for fold in range(num_folds)]


def draw_sample(documents: pa.Table, *, num_bytes: int, seed: int) -> Any:
    """Ids of documents drawn without preference, in all at least so many bytes of text, or all there are."""
    order = np.random.default_rng(seed).permutation(len(documents))
    so_far = np.cumsum(documents["text_bytes"].to_numpy()[order])
    return documents["doc_id"].take(order[: int(np.searchsorted(so_far, num_bytes)) + 1])


def encode_documents(catalog: Catalog, tokenizer: LoadedTokenizer, doc_ids: Any) -> dict[bytes, Tokens]:
    """The tokens of documents, in the order of their ids as given."""
    texts = list(read_texts(catalog, doc_ids=doc_ids))
    tokens = tokenizer.encode_batch([text for _, text in texts])
    found = {doc_id: tokens_ for (doc_id, _), tokens_ in zip(texts, tokens, strict=True)}
    return {doc_id: found[doc_id] for doc_id in doc_ids.to_pylist()}
