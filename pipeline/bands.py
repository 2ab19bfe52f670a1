"""Bands: what the jobs `shard` and `retier` cut the documents into, and what a worker makes of them: shards in the pool.

A part is what a worker gets at a time: a piece of a band, or several small bands. Parts are the same whatever the engine and however many workers it has, and so are the
shards. Which documents are cut into bands is said in pool.py and retier.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import dropwhile, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from manifests.catalog import Catalog
from manifests.errors import Failure
from manifests.jobs import Job, Report
from manifests.mds import CorruptShard, EncodedShard, decode_shard, encode_shard, object_path
from manifests.policy import Rights
from manifests.schemas import TABLES, TIERS
from manifests.shards import fetch_shard
from manifests.store import Store
from pipeline.engine import Engine
from pipeline.texts import read_texts
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer

HOLDOUT = "holdout"
KIND = ("corpus", "origin", "generator", "prompt", "license", "access")
_TIERS = (*TIERS, HOLDOUT)
_PART_DOCUMENTS = 50_000
_BATCH_DOCUMENTS = 1_000
_SHARD_OVERHEAD = 28
"""Bytes that a document takes in a shard beside its tokens: an offset, two sizes, its id."""
Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Documents that share shards: one tier, one kind, neighbours in score."""

    tier: str
    kind: Mapping[str, Any]
    """What all of them share, by column of KIND."""
    num_documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Bands that are worked on together. Can be pickled."""

    number: int
    """From 1; its rows are this part of the job's."""
    bands: Sequence[Band]
    documents: pa.Table
    """Of all bands, in their order: doc_id and score, highest first; and where tokens lie already: number of the shard and position, else null."""
    held_in: Mapping[int, Mapping[str, Any]]
    """Number of each of those shards → its entry in an index."""

    @property
    def name(self) -> str:
        """What it is called in an error."""
        band = self.bands[0]
        return f"part {self.number}, from tier {band.tier}, corpus {band.kind['corpus']}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all parts of one job share; small, and can be pickled."""

    store: str
    job: str
    pool: str
    tokenizer: str
    token_dtype: str
    rights: Rights | None
    shard_bytes: int
    zstd_level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The rows of a part's shards."""

    places: pa.Table
    """Of `shards`."""
    index: list[dict[str, Any]]
    """Of `shard_index`."""


def cut_parts(
    catalog: Catalog,
    documents: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    kinds: str = "documents",
    held_in: Sequence[Mapping[str, Any]] = (),
) -> list[Part]:
    """Documents in bands, and these in parts that memory holds at ease.

    Args:
        documents: SQL that gives doc_id, tier, score, the columns of KIND, shard and position; with its parameters.
        kinds: table that has all kinds.
        held_in: index entries of the shards, by their numbers.
    """
    columns = ", ".join(KIND)
    numbered = f"(SELECT row_number() OVER (ORDER BY {columns}) AS number, {columns} FROM (SELECT DISTINCT {columns} FROM {kinds}))"
    order = f"array_position({list(_TIERS)}, tier) - 1"
    same = " AND ".join(f"d.{column} IS NOT DISTINCT FROM k.{column}" for column in KIND)
    # Numbers stand for tier and kind, which as text would take more memory than all else.
    rows = catalog.query(
        f"""
        SELECT doc_id, score, shard, position, ({order})::TINYINT AS tier_number, k.number::INTEGER AS kind_number
        FROM ({documents}) AS d JOIN {numbered} AS k ON {same}
        ORDER BY tier_number, kind_number, score DESC, doc_id
        """,
        parameters,
    )
    kind_of = {row.pop("number"): row for row in catalog.rows(f"SELECT * FROM {numbered}")}
    tiers, numbers = rows["tier_number"].to_numpy(), rows["kind_number"].to_numpy()
    parts: list[Part] = []
    for pieces in _group(np.flatnonzero(np.diff(tiers, prepend=-1) | np.diff(numbers, prepend=0)).tolist(), len(rows)):
        # A copy: a slice is pickled with all that it was cut from.
        own = rows.take(pa.array(range(pieces[0].start, pieces[-1].stop)))
        held = own["shard"].unique().drop_null().to_pylist()
        parts.append(
            Part(
                number=len(parts) + 1,
                bands=[
                    Band(tier=_TIERS[tiers[p.start]], kind=kind_of[numbers[p.start]], num_documents=len(p))
                    for p in pieces
                ],
                documents=own.select(["doc_id", "score", "shard", "position"]),
                held_in={number: held_in[number] for number in held},
            )
        )
    return parts


def _group(begins: Sequence[int], end: int) -> list[list[range]]:
    """Bands, of which is told where they begin, cut where they are too large for a part and put together where they are small."""
    groups: list[list[range]] = []
    for begin, stop in pairwise([*begins, end]):
        for start in range(begin, stop, _PART_DOCUMENTS):
            piece = range(start, min(start + _PART_DOCUMENTS, stop))
            if groups and piece.stop - groups[-1][0].start <= _PART_DOCUMENTS:
                groups[-1].append(piece)
            else:
                groups.append([piece])
    return groups


def write_parts(job: Job, task: Task, parts: Sequence[Part], engine: Engine, report: Report) -> list[dict[str, Any]]:
    """Has all parts worked on that an earlier attempt hasn't finished, and appends their rows, in order.

    Returns:
        The rows of `shard_index` of all parts.

    Raises:
        Failure: a source has changed or gone, or a shard is damaged.
    """
    missing = list(dropwhile(lambda part: job.has_part("shard_index", part.number), parts))
    index: list[dict[str, Any]] = []
    if len(missing) < len(parts):
        index = Catalog(job.store, tables=["shard_index"]).rows("SELECT * FROM raw.shard_index WHERE job = ?", [job.id])
    total = sum(len(part.documents) for part in parts)
    done = total - sum(len(part.documents) for part in missing)
    try:
        results = engine.map(partial(write_shards, task), missing, name=lambda part: part.name)
        for part, written in zip(missing, results, strict=True):
            job.append("shards", written.places, part=part.number)
            job.append("shard_index", written.index, part=part.number)
            index += written.index
            done += len(part.documents)
            report("documents sharded", done, total)
    finally:
        _opened.cache_clear()
    return index


def write_shards(task: Task, part: Part) -> Written:
    """What a worker does: puts a part's shards into the pool. Their rows are for the job to append."""
    store, token_dtype = Store(task.store), np.dtype(task.token_dtype)
    doc_ids = part.documents["doc_id"].to_pylist()
    scores = part.documents["score"].to_numpy()
    tokens = _tokens(store, task, part)
    counts = np.array([len(each) for each in tokens])
    names: list[str] = []
    positions: list[npt.NDArray[Any]] = []
    index: list[dict[str, Any]] = []
    for band, start, stop in _cut_shards(part.bands, counts * token_dtype.itemsize + _SHARD_OVERHEAD, task.shard_bytes):
        encoded = encode_shard(doc_ids[start:stop], tokens[start:stop], level=task.zstd_level)
        entry, zip_bytes = put_shard(store, encoded, token_dtype)
        known = scores[start:stop][~np.isnan(scores[start:stop])].tolist()
        names += [encoded.name] * (stop - start)
        positions.append(np.arange(stop - start))
        row = {
            "pool": task.pool,
            "shard": encoded.name,
            "tier": band.tier,
            "entry": json.dumps(entry, sort_keys=True),
            "documents": stop - start,
            "tokens": int(counts[start:stop].sum()),
            "raw_bytes": encoded.raw_bytes,
            "zip_bytes": zip_bytes,
            "score_low": min(known, default=0.0),
            "score_high": max(known, default=0.0),
            "job": task.job,
        }
        index.append({**row, **band.kind})
    columns = {
        "pool": pa.repeat(task.pool, len(doc_ids)),
        "shard": names,
        "position": np.concatenate(positions),
        "doc_id": part.documents["doc_id"],
        "tokens": counts,
        "job": pa.repeat(task.job, len(doc_ids)),
    }
    schema = TABLES["shards"].schema
    return Written(places=pa.table(columns).select(schema.names).cast(schema), index=index)


def _cut_shards(
    bands: Sequence[Band], sizes: npt.NDArray[np.int64], shard_bytes: int
) -> Iterator[tuple[Band, int, int]]:
    """Each shard's band, its first document, and the one behind its last; a document larger than a shard gets one of its own."""
    ends = np.cumsum(sizes)
    start = end = 0
    for band in bands:
        end += band.num_documents
        while start < end:
            limit = ends[start] - sizes[start] + shard_bytes
            stop = min(end, max(start + 1, int(np.searchsorted(ends, limit, side="right"))))
            yield band, start, stop
            start = stop


def put_shard(store: Store, encoded: EncodedShard, token_dtype: np.dtype[Any]) -> tuple[dict[str, Any], int]:
    """Writes a shard, or takes the one that lies there.

    Returns:
        The index entry and the compressed size. The name stands for the raw bytes; another libzstd or level may have compressed them otherwise,
        so the entry of a shard that lies there already is made from what lies there.
    """
    path = object_path(encoded.name)
    entry: dict[str, Any] = dict(encoded.entry)
    if store.put_content(path, encoded.data):
        return entry, len(encoded.data)
    existing = store.get(path)
    if existing != encoded.data:
        hashes = {"xxh3_64": xxhash.xxh3_64_hexdigest(existing)}
        entry["zip_data"] = dict(entry["zip_data"]) | {"bytes": len(existing), "hashes": hashes}
        try:
            decode_shard(existing, entry, token_dtype=token_dtype)
        except CorruptShard as e:
            raise Failure(f"{store.uri}/{path} is damaged: {e}; delete the object, then run `atoll shard` again") from e
    return entry, len(existing)


def _tokens(store: Store, task: Task, part: Part) -> list[Tokens]:
    """Tokens of a part's documents, in its order: from the shards that hold them, else from their texts."""
    tokens: list[Any] = [None] * len(part.documents)
    positions = part.documents["position"].fill_null(-1).to_numpy()
    shards = part.documents["shard"].fill_null(-1).to_numpy()
    order = np.argsort(shards, kind="stable")
    numbers, begins = np.unique(shards[order], return_index=True)
    for number, places in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
        if number < 0:
            doc_ids = part.documents["doc_id"].take(pa.array(places))
            found = tokenise(*_opened(task), doc_ids)
            for place, doc_id in zip(places.tolist(), doc_ids.to_pylist(), strict=True):
                tokens[place] = found[doc_id]
            continue
        entry = part.held_in[number]
        decoded, _ = fetch_shard(store, entry, token_dtype=np.dtype(task.token_dtype))
        for place, position in zip(places.tolist(), positions[places].tolist(), strict=True):
            # A copy: a view would hold the whole shard in memory.
            tokens[place] = np.array(decoded.tokens(position))
    return tokens


@lru_cache(maxsize=1)
def _opened(task: Task) -> tuple[Catalog, LoadedTokenizer]:
    """What a worker needs to tokenise texts."""
    store = Store(task.store)
    catalog = Catalog(store, tables=["documents", "sources", "tokenizers"], rights=task.rights)
    return catalog, load_tokenizer(store, catalog, task.tokenizer)


def tokenise(
    catalog: Catalog, tokenizer: LoadedTokenizer, doc_ids: pa.Array[Any] | pa.ChunkedArray[Any]
) -> dict[bytes, Tokens]:
    """Tokens of documents, the end-of-document token included."""
    tokens: dict[bytes, Tokens] = {}
    batch: list[tuple[bytes, str]] = []

    def encode() -> None:
        ids, texts = [i for i, _ in batch], [text for _, text in batch]
        tokens.update(zip(ids, tokenizer.encode_batch(texts), strict=True))
        batch.clear()

    for doc_id, text in read_texts(catalog, doc_ids=doc_ids):
        batch.append((doc_id, text))
        if len(batch) == _BATCH_DOCUMENTS:
            encode()
    if batch:
        encode()
    return tokens
