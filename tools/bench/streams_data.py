"""A pool of made-up tokens for the streams' benchmark: shards, views and tables as `atoll shard` leaves them, without a tokenizer's work; and the same in the peers' formats.

Lengths are log-normal and tokens follow Zipf's law, so that packing and zstd have about the work that texts give them. Everything follows from a seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.errors import Failure
from manifests.jobs import Job, make_job
from manifests.mds import decode_shard, encode_shard, index_json, object_path, read_index, shard_name
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import create_store
from tools.bench.manifests_data import as_table, random_ids, repeated
from tools.bench.streams_peers import Layout, Side, Tokens
from trainer.config import RunConfig
from trainer.run import create_run

POOL = "bench-uint16"
RUN = "bench"
SEQ_LEN = 2048
VOCABULARY = 32_000
WEIGHTS = {"S": 0.4, "A": 0.3, "B": 0.2, "C": 0.1}
_DTYPE: np.dtype[Any] = np.dtype("<u2")
_SPREAD = 0.8
"""Of the lengths' logarithm."""
_LEAST, _MOST = 16, 30_000
_DRAWN = 1 << 24
"""Tokens that are drawn. A larger pool repeats them, cut in other places and under other ids, so all its shards differ."""
_CHUNK_BYTES = 8 << 20
"""Of the files that are written for the peers; larger ones aren't read faster, and a tier should have several."""
_WRITE_LIMIT_S = 300
_KIND = {"corpus": "made up", "origin": "real", "license": "unknown", "access": "open"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """How much of everything."""

    documents: Mapping[str, int]
    """By tier."""
    median_tokens: int = 400
    """Of a document."""
    shard_bytes: int = 1 << 20
    """A shard is closed before it has more; as `atoll shard` does."""
    shard_documents: int | None = None
    """Likewise; None: as many as there is room for."""
    zstd_level: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """What was made."""

    store: Path
    documents: int
    tokens: int
    shards: int
    raw_bytes: int
    zip_bytes: int

    def __str__(self) -> str:
        return f"{self.documents:,} documents, {self.tokens / 1e6:.1f} M tokens in {self.shards:,} shards"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tier:
    """One tier's shards, and the documents of all of them in their order."""

    name: str
    entries: list[dict[str, Any]]
    """The shards, as the view's index.json lists them."""
    shard_lengths: list[npt.NDArray[np.int64]]
    """Tokens of each document, by shard."""
    doc_ids: pa.Array[Any]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.concatenate(self.shard_lengths)


def mixed(num_documents: int) -> PoolSize:
    """A pool whose tiers are as large as the mix asks of them, so that all of them end a pass at about the same time."""
    return PoolSize(documents={tier: round(weight * num_documents) for tier, weight in WEIGHTS.items()})


def make_pool(folder: Path, size: PoolSize, *, seed: int) -> Pool:
    """Makes a store with this pool, tier version 1 and a run that reads it."""
    store = create_store(str(folder))
    rng = np.random.default_rng(seed)
    drawn = _zipf_tokens(rng)
    job = make_job(store, "bench", config={"size": str(size), "seed": seed}, inputs={})
    tiers = [_make_tier(store, name, count, size, drawn, rng) for name, count in size.documents.items()]
    for part, tier in enumerate(tiers, start=1):
        _append_documents(job, tier, part)
        _append_shards(job, tier, part)
    rows: dict[str, dict[str, Any]] = {
        "tier_versions": {"tier_version": 1, "method": "made up", "parameters": "{}", "thresholds": "{}"},
        "tokenizers": {"tokenizer": "t", "object": "t", "vocab_size": VOCABULARY, "eos_id": 0, "origin": "made up"},
        "pools": {"pool": POOL, "tokenizer": "t", "token_dtype": "uint16"},
    }
    for table, row in rows.items():
        job.append(table, [row | {"job": job.id}], part=1)
    job.commit({})
    config = RunConfig(
        run=RUN, tier_version=1, pool=POOL, token_dtype="uint16", vocab_size=VOCABULARY, seq_len=SEQ_LEN, seed=seed
    )
    create_run(store, config)
    entries = [entry for tier in tiers for entry in tier.entries]
    return Pool(
        store=folder,
        documents=sum(len(tier.doc_ids) for tier in tiers),
        tokens=sum(int(tier.lengths.sum()) for tier in tiers),
        shards=len(entries),
        raw_bytes=sum(entry["raw_data"]["bytes"] for entry in entries),
        zip_bytes=sum(entry["zip_data"]["bytes"] for entry in entries),
    )


def view_path(tier: str) -> str:
    """Object of a tier's index.json."""
    return f"views/000001/{POOL}/{tier}/index.json"


def read_documents(store: Store, tier: str) -> Iterator[Tokens]:
    """Tokens of every document of a tier, in the order of its view."""
    for entry in read_index(store.get(view_path(tier))):
        shard = decode_shard(store.get(object_path(shard_name(entry))), entry, token_dtype=_DTYPE)
        yield from (shard.tokens(position) for position in range(shard.num_documents))


def read_blocks(store: Store, tier: str) -> Iterator[Tokens]:
    """The same tokens one after the other, cut into sequences; what is left at the end is dropped."""
    tokens = np.concatenate(list(read_documents(store, tier)))
    yield from tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)


def _zipf_tokens(rng: np.random.Generator) -> Tokens:
    shares = 1 / np.arange(1, VOCABULARY + 1)
    table = np.repeat(np.arange(VOCABULARY), np.ceil(shares / shares.sum() * (1 << 18)).astype(np.int64))
    return table.astype(_DTYPE)[rng.integers(0, len(table), _DRAWN)]


def _make_tier(store: Store, name: str, count: int, size: PoolSize, drawn: Tokens, rng: np.random.Generator) -> _Tier:
    lengths = np.clip(rng.lognormal(np.log(size.median_tokens), _SPREAD, count), _LEAST, _MOST).astype(np.int64)
    doc_ids = random_ids(rng, count)
    entries: list[dict[str, Any]] = []
    shard_lengths = []
    first = 0
    for stop in _cuts(lengths, size.shard_bytes // _DTYPE.itemsize, size.shard_documents or count):
        some = lengths[first:stop]
        start = int(rng.integers(0, len(drawn)))
        tokens = np.take(drawn, np.arange(start, start + int(some.sum())), mode="wrap")
        documents = np.split(tokens, np.cumsum(some)[:-1])
        shard = encode_shard(doc_ids[first:stop].to_pylist(), documents, level=size.zstd_level)
        store.put_content(object_path(shard.name), shard.data)
        entries.append(shard.entry)
        shard_lengths.append(some)
        first = stop
    store.put_content(view_path(name), index_json(entries))
    return _Tier(name=name, entries=entries, shard_lengths=shard_lengths, doc_ids=doc_ids)


def _cuts(lengths: npt.NDArray[np.int64], most_tokens: int, most_documents: int) -> Iterator[int]:
    """Where shards end; a document that is too long alone gets a shard of its own."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, before + most_tokens, side="right"))
        first = min(max(first + 1, fitting), first + most_documents)
        yield first


def _append_documents(job: Job, tier: _Tier, part: int) -> None:
    count, lengths = len(tier.doc_ids), tier.lengths
    documents = {name: repeated(value, count) for name, value in _KIND.items()} | {
        "split": repeated("train", count),
        "text_bytes": pa.array(lengths * 4),
        "source_uri": repeated(f"made up/{tier.name}", count),
        "source_row": pa.array(np.arange(count)),
    }
    tiers = {
        "tier_version": repeated(1, count),
        "tier": repeated(tier.name, count),
        "score": repeated(0.0, count),
        "method": repeated("made up", count),
    }
    counts = [len(some) for some in tier.shard_lengths]
    places = {
        "pool": repeated(POOL, count),
        "shard": pa.array([shard_name(entry) for entry in tier.entries]).take(pa.array(np.repeat(np.arange(len(counts)), counts))),
        "position": pa.array(np.concatenate([np.arange(number) for number in counts])),
        "tokens": pa.array(lengths),
    }  # fmt: skip
    for table, columns in (("documents", documents), ("tiers", tiers), ("shards", places)):
        nulls = {name: pa.nulls(count) for name in TABLES[table].schema.names}
        common = {"doc_id": tier.doc_ids, "job": repeated(job.id, count)}
        job.append(table, as_table(table, nulls | common | columns), part=part)


def _append_shards(job: Job, tier: _Tier, part: int) -> None:
    view = {"tier_version": 1, "pool": POOL, "tier": tier.name, "job": job.id}
    sums = [
        {"documents": len(some), "tokens": int(some.sum()), "shard": shard_name(entry)}
        for entry, some in zip(tier.entries, tier.shard_lengths, strict=True)
    ]
    index = [
        _KIND | counted | {
            "pool": POOL, "tier": tier.name, "entry": json.dumps(entry), "raw_bytes": entry["raw_data"]["bytes"],
            "zip_bytes": entry["zip_data"]["bytes"], "score_low": 0.0, "score_high": 1.0, "job": job.id,
        }
        for entry, counted in zip(tier.entries, sums, strict=True)
    ]  # fmt: skip
    job.append("shard_index", index, part=part)
    job.append("view_shards", [view | counted | {"position": n} for n, counted in enumerate(sums)], part=part)
    total = {"shards": len(sums), "documents": len(tier.doc_ids), "tokens": int(tier.lengths.sum())}
    job.append("views", [view | total | {"object": view_path(tier.name)}], part=part)


def write_for(side: Side, pool: Pool, data: Path) -> None:
    """Writes the pool's tokens in a peer's own format, in a process of its own."""
    job = {"side": asdict(side), "store": str(pool.store), "data": str(data)}
    command = [sys.executable, "-m", "tools.bench.streams_data", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WRITE_LIMIT_S)
    if done.returncode:
        raise Failure(f"the data for {side} can't be written: {done.stderr[-1000:]}")


def _write(side: Side, store: Store, data: Path) -> None:
    for tier in WEIGHTS:
        arrays = list((read_blocks if side.packed else read_documents)(store, tier))
        folder = str(data / side.folder / tier)
        if side.loader == "LitData":
            _write_litdata(folder, arrays, side.layout)
        elif side.loader.startswith("HF datasets"):
            _write_datasets(folder, arrays, packed=side.packed)
        elif side.loader == "WebDataset":
            _write_webdataset(folder, arrays)
        else:
            _write_mds(folder, arrays)


def _write_mds(folder: str, arrays: Sequence[Tokens]) -> None:
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN}"}
    with MDSWriter(out=folder, columns=columns, size_limit=_CHUNK_BYTES) as writer:
        for array in arrays:
            writer.write({"tokens": array})


def _write_litdata(folder: str, arrays: Sequence[Tokens], layout: Layout) -> None:
    from litdata import TokensLoader, optimize

    zstd = layout == "packed sequences in zstd"
    parts = [list(arrays[first : first + 5000]) for first in range(0, len(arrays), 5000)]
    optimize(
        fn=_each_of_part,
        inputs=parts,
        output_dir=folder,
        chunk_bytes=_CHUNK_BYTES,
        num_workers=1,
        start_method="fork",  # or every tier's writer would import torch again
        item_loader=None if layout == "documents" else TokensLoader(block_size=SEQ_LEN),
        compression="zstd" if zstd else None,
        compression_level="chunk" if zstd else None,
        verbose=False,
    )


def _each_of_part(part: Sequence[Tokens]) -> Iterator[Tokens]:
    yield from part


def _write_datasets(folder: str, arrays: Sequence[Tokens], *, packed: bool) -> None:
    import pyarrow as pa
    from datasets import Dataset

    tokens = pa.array(np.concatenate(arrays))
    if packed:
        column: Any = pa.FixedSizeListArray.from_arrays(tokens, len(arrays[0]))
    else:
        column = pa.ListArray.from_arrays(
            pa.array(np.cumsum([0, *(len(array) for array in arrays)]), pa.int32()), tokens
        )
    Dataset(pa.table({"tokens": column})).save_to_disk(folder, max_shard_size=_CHUNK_BYTES)


def _write_webdataset(folder: str, arrays: Sequence[Tokens]) -> None:
    from webdataset import ShardWriter

    Path(folder).mkdir(parents=True)
    with ShardWriter(f"{folder}/%06d.tar", maxsize=_CHUNK_BYTES, verbose=0) as writer:
        for number, array in enumerate(arrays):
            writer.write({"__key__": f"{number:08d}", "bin": array.tobytes()})


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    _write(Side(**job["side"]), Store(job["store"]), Path(job["data"]))
