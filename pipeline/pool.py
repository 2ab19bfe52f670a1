"""The job that writes tokenised documents into the pool of shards, and a view for each tier.

Shards are named by their content and never rewritten. Each holds documents of one tier and one kind (corpus, origin, generator, prompt, licence, access), in order of
their score: so a threshold that moves re-assigns whole shards, and so does a question or a policy about kinds. The text stays in its source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from manifests.catalog import Catalog
from manifests.editions import rights_of
from manifests.errors import Failure, UserError
from manifests.jobs import Job, Report, make_parted_job, report_nothing
from manifests.mds import CorruptShard, EncodedShard, decode_shard, encode_shard, index_json, object_path
from manifests.policy import rights_inputs, that_may_be_read
from manifests.schemas import TIERS
from manifests.store import Store
from pipeline.texts import read_texts
from pipeline.tokenizer import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

HOLDOUT = "holdout"
KIND = ("corpus", "origin", "generator", "prompt", "license", "access")
_BAND_DOCUMENTS = 50_000
_BATCH_DOCUMENTS = 1_000
_SHARD_OVERHEAD = 28
"""Bytes that a document takes in a shard beside its tokens: an offset, two sizes, its id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """What decides the shards' content."""

    tier_version: int | None = None
    """Tier version that views are written of; None: the newest."""
    shard_bytes: int = 1 << 20
    """Largest uncompressed size of a shard; a document that is larger alone gets a shard of its own."""
    zstd_level: int = 3
    tokenizer: str | None = None
    """Id of the store's tokenizer; None: the only one."""

    def __post_init__(self) -> None:
        if not 1 << 10 <= self.shard_bytes < 1 << 32:
            raise UserError(f"shard size {self.shard_bytes}: it must lie between 1 KiB and 4 GiB")


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Documents that are sharded together: one tier, one kind, neighbours in score."""

    tier: str
    kind: dict[str, Any]
    """What all of them share, by column of KIND."""
    doc_ids: pa.ChunkedArray[pa.BinaryScalar]
    scores: list[float | None]


def shard(store: Store, *, config: ShardConfig, report: Report = report_nothing) -> dict[str, Any]:
    """Tokenises the documents of a tier version and its holdout, writes the shards that are missing, and commits a view for each tier.

    Returns:
        The summary: tier_version, pool, shards, bytes, and tiers with documents and tokens; `already_done` where it was.

    Raises:
        UserError: no such tier version, or no tokenizer.
        Failure: a source has changed or gone.
    """
    catalog = Catalog(store, rights=rights_of(store, "job:shard"))
    tier_version = find_tier_version(catalog, config.tier_version)
    tokenizer = load_tokenizer(store, catalog, config.tokenizer)
    pool = pool_of(tokenizer)
    job = make_parted_job(
        store,
        "shard",
        config=asdict(config) | {"tier_version": tier_version, "tokenizer": tokenizer.id},
        inputs={
            "documents": [r["job"] for r in catalog.rows("SELECT job FROM jobs WHERE kind = 'ingest' ORDER BY job")],
            **rights_inputs(catalog.rights),
        },
    )
    done = job.summary()
    if done is not None:
        return done | {"already_done": True}
    require_no_views(catalog, tier_version, pool)
    bands = list(cut_bands(catalog, tier_version))
    if not bands:
        raise UserError(f"tier version {tier_version} has no documents to shard{that_may_be_read(catalog.rights)}")
    total = sum(len(band.scores) for band in bands)
    sharded = 0
    for part, band in enumerate(bands, start=1):
        if not job.has_part("shard_index", part):
            write_band(job, tokenizer, pool, band, tokenise(catalog, tokenizer, band.doc_ids), part=part, config=config)
        sharded += len(band.scores)
        report("documents sharded", sharded, total)
    tiers = write_views(job, tier_version, pool)
    if not catalog.rows("SELECT 1 FROM pools WHERE pool = ?", [pool]):
        row = {
            "pool": pool,
            "tokenizer": tokenizer.id,
            "token_dtype": np.dtype(tokenizer.token_dtype).name,
            "job": job.id,
        }
        job.append("pools", [row], part=1)
    summary = {
        "tier_version": tier_version,
        "pool": pool,
        "shards": sum(tier["shards"] for tier in tiers.values()),
        "documents": sum(tier["documents"] for tier in tiers.values()),
        "tokens": sum(tier["tokens"] for tier in tiers.values()),
        "zip_bytes": sum(tier["zip_bytes"] for tier in tiers.values()),
        "tiers": tiers,
    }
    job.commit(summary)
    return summary


def pool_of(tokenizer: LoadedTokenizer) -> str:
    """Name of the pool of a tokenizer's tokens."""
    return f"{tokenizer.id[:16]}-{np.dtype(tokenizer.token_dtype).name}"


def find_tier_version(catalog: Catalog, wanted: int | None) -> int:
    """The version wanted, or the newest.

    Raises:
        UserError: there is none.
    """
    versions = [row["tier_version"] for row in catalog.rows("SELECT tier_version FROM tier_versions ORDER BY 1")]
    if not versions:
        raise UserError(f"{catalog.store.uri} has no tiers; run `atoll score`, then `atoll tier`")
    if wanted is not None and wanted not in versions:
        raise UserError(f"no tier version {wanted}; there are {', '.join(map(str, versions))}")
    return wanted if wanted is not None else versions[-1]


def require_no_views(catalog: Catalog, tier_version: int, pool: str) -> None:
    """Views are written once: a run that reads them would lose its place in others."""
    if catalog.rows("SELECT 1 FROM views WHERE tier_version = ? AND pool = ?", [tier_version, pool]):
        raise UserError(
            f"tier version {tier_version} has been sharded into pool {pool} with other options or documents; `atoll tier` makes a new version of the tiers"
        )


def cut_bands(
    catalog: Catalog, tier_version: int, *, only: str = "true", parameters: Sequence[Any] = ()
) -> Iterator[Band]:
    """The tier version's documents and the holdout's, highest score first, cut into pieces that memory holds at ease.

    Args:
        only: SQL condition over `doc_id`, with its parameters.
    """
    columns = ", ".join(KIND)
    numbered = f"""
        SELECT *, dense_rank() OVER (ORDER BY array_position(['{"', '".join((*TIERS, HOLDOUT))}'], tier), {columns}) AS number
        FROM (
            SELECT t.tier, doc_id, t.score, {columns} FROM tiers AS t JOIN documents USING (doc_id) WHERE tier_version = {tier_version}
            UNION ALL SELECT '{HOLDOUT}', doc_id, NULL, {columns} FROM documents WHERE split = '{HOLDOUT}'
        )
        WHERE {only}
    """
    rows = catalog.query(
        f"SELECT doc_id, score, number FROM ({numbered}) ORDER BY number, score DESC, doc_id", list(parameters)
    )
    start = 0
    counted = f"SELECT tier, {columns}, count(*) AS count FROM ({numbered}) GROUP BY ALL ORDER BY any_value(number)"
    for kind in catalog.rows(counted, list(parameters)):
        tier, count = kind.pop("tier"), kind.pop("count")
        for first in range(start, start + count, _BAND_DOCUMENTS):
            piece = rows.slice(first, min(_BAND_DOCUMENTS, start + count - first))
            yield Band(tier=tier, kind=kind, doc_ids=piece["doc_id"], scores=piece["score"].to_pylist())
        start += count


def write_band(
    job: Job,
    tokenizer: LoadedTokenizer,
    pool: str,
    band: Band,
    tokens: Mapping[bytes, npt.NDArray[Any]],
    *,
    part: int,
    config: ShardConfig,
) -> None:
    """Writes a band's shards and appends their rows."""
    doc_ids: list[bytes] = band.doc_ids.to_pylist()
    scores = dict(zip(doc_ids, band.scores, strict=True))
    places: list[dict[str, Any]] = []
    index: list[dict[str, Any]] = []
    for ids in _fill_shards(doc_ids, tokens, config.shard_bytes):
        encoded = encode_shard(ids, [tokens[i] for i in ids], level=config.zstd_level)
        entry, zip_bytes = put_shard(job.store, encoded, tokenizer.token_dtype)
        counts = [len(tokens[i]) for i in ids]
        known = [score for i in ids if (score := scores[i]) is not None]
        common = {"pool": pool, "shard": encoded.name, "job": job.id}
        places += [
            common | {"position": position, "doc_id": doc_id, "tokens": count}
            for position, (doc_id, count) in enumerate(zip(ids, counts, strict=True))
        ]
        index.append(
            common
            | band.kind
            | {
                "entry": json.dumps(entry, sort_keys=True),
                "documents": len(ids),
                "tokens": sum(counts),
                "raw_bytes": encoded.raw_bytes,
                "zip_bytes": zip_bytes,
                "score_low": min(known, default=0.0),
                "score_high": max(known, default=0.0),
                "tier": band.tier,
            }
        )
    job.append("shards", places, part=part)
    job.append("shard_index", index, part=part)


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


def tokenise(
    catalog: Catalog, tokenizer: LoadedTokenizer, doc_ids: pa.Array[Any] | pa.ChunkedArray[Any]
) -> dict[bytes, npt.NDArray[Any]]:
    """Tokens of documents, the end-of-document token included."""
    tokens: dict[bytes, npt.NDArray[Any]] = {}
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


def _fill_shards(
    doc_ids: Sequence[bytes], tokens: Mapping[bytes, npt.NDArray[Any]], shard_bytes: int
) -> Iterator[list[bytes]]:
    shard: list[bytes] = []
    size = 0
    for doc_id in doc_ids:
        added = tokens[doc_id].nbytes + _SHARD_OVERHEAD
        if shard and size + added > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(doc_id)
        size += added
    if shard:
        yield shard


def write_views(
    job: Job, tier_version: int, pool: str, kept: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, int]]:
    """Writes each tier's index.json and its row; a tier without documents gets none.

    Args:
        kept: shards that the views have beside the job's own, with the columns that are asked for here.
    """
    written: list[Mapping[str, Any]] = list(
        Catalog(job.store).rows(
            "SELECT tier, shard, entry, documents, tokens, zip_bytes, score_high FROM raw.shard_index WHERE job = ?",
            [job.id],
        )
    )
    written += kept
    written.sort(key=lambda row: (-row["score_high"], row["shard"]))
    tiers: dict[str, dict[str, int]] = {}
    rows, shard_rows = [], []
    for tier in (*TIERS, HOLDOUT):
        shards = [row for row in written if row["tier"] == tier]
        sums = {name: sum(row[name] for row in shards) for name in ("documents", "tokens", "zip_bytes")}
        tiers[tier] = {"shards": len(shards)} | sums
        if not shards:
            continue
        index = index_json([json.loads(row["entry"]) for row in shards])
        path = f"views/{tier_version:06d}/{pool}/{tier}-{xxhash.xxh3_128_hexdigest(index)}/index.json"
        job.store.put_content(path, index)
        rows.append(
            {
                "tier_version": tier_version,
                "pool": pool,
                "tier": tier,
                "object": path,
                "shards": len(shards),
                "documents": sums["documents"],
                "tokens": sums["tokens"],
                "job": job.id,
            }
        )
        view = {"tier_version": tier_version, "pool": pool, "tier": tier, "job": job.id}
        shard_rows += [
            view | {"position": position} | {name: row[name] for name in ("shard", "documents", "tokens")}
            for position, row in enumerate(shards)
        ]
    job.append("view_shards", shard_rows, part=1)
    job.append("views", rows, part=1)
    return tiers
