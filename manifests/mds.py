"""The MDS shard: documents as bytes, bytes as documents, and the `index.json` that lists shards.

Pure functions over bytes; fetching, caching and writing live with their callers. The format is that of
mosaicml-streaming 0.13, byte for byte, so its `StreamingDataset` reads our shards; it isn't imported here.

A raw shard, all integers little-endian u32:

    num_documents | offsets[num_documents + 1], from the shard's start | config, JSON | samples
    a sample:  16 | size of the tokens in bytes | doc_id | tokens, u16 or u32

The shard's name is a hash of its raw bytes. They say neither the compression level nor the width of a token:
both are the pool's to keep. Nothing is padded, so a decoded shard's tokens are often unaligned in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from manifests.errors import Failure

DOC_ID_BYTES = 16
MAX_SHARD_BYTES = 2**32 - 1
"""Largest raw shard: offsets are u32."""
ZSTD_LEVELS = range(1, 23)
"""The levels that streaming has names for."""

_DType: TypeAlias = np.dtype[Any]
_HASH = "xxh3_64"
_SAMPLE_HEAD_BYTES = 4 + 4 + DOC_ID_BYTES
_U32 = np.dtype("<u4")
_TOKEN_DTYPES = (np.dtype("<u2"), _U32)
_COLUMNS: dict[str, Any] = {
    "column_names": ["doc_id", "tokens"],
    "column_encodings": ["bytes", "bytes"],
    "column_sizes": [None, None],
}
_SETTINGS = {"compression": None, "format": "mds", "hashes": [_HASH], "size_limit": None, "version": 2}
_CONFIG_JSON = json.dumps(_COLUMNS | _SETTINGS, sort_keys=True).encode()
_BASENAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{30})\.mds")


class CorruptShard(Failure):
    """The bytes aren't the shard or index that they should be. Use none of it; another copy may be whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedShard:
    """A shard, ready to be put into the pool."""

    name: str
    """xxh3-128 of the raw shard, hex."""
    raw_bytes: int
    """Size of the raw shard."""
    raw_hash: str
    """xxh3-64 of the raw shard, hex."""
    data: bytes
    """The compressed shard: the content of the object at `object_path(name)`."""
    data_hash: str
    """xxh3-64 of `data`, hex."""
    entry: dict[str, object]
    """The shard's entry in an `index.json`."""


class DecodedShard:
    """The documents of one shard, in memory, at positions from 0. `decode_shard` checks and makes it."""

    __slots__ = ("_dtype", "_raw", "_starts", "_stops", "name", "raw")
    ID_BYTES = DOC_ID_BYTES
    """A document's id lies in so many bytes right before its tokens."""

    def __init__(self, name: str, raw: NDArray[np.uint8], offsets: NDArray[np.int64], dtype: _DType) -> None:
        """Takes the raw shard and its table of offsets."""
        self.name = name
        self.raw = raw.data
        """The raw shard, for slices at `byte_ranges`."""
        self._raw = raw
        self._dtype = dtype
        self._starts = offsets[:-1] + _SAMPLE_HEAD_BYTES  # of the tokens, in bytes
        self._stops = offsets[1:]

    @property
    def num_documents(self) -> int:
        """How many documents the shard holds."""
        return self._starts.size

    def doc_id(self, position: int) -> bytes:
        """The document's id."""
        start = int(self._starts[position])
        return self._raw[start - DOC_ID_BYTES : start].tobytes()

    def tokens(self, position: int) -> NDArray[Any]:
        """The document's tokens: a read-only view, which keeps the whole shard in memory while it lives."""
        return self._raw[self._starts[position] : self._stops[position]].view(self._dtype)

    def byte_ranges(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the tokens of the documents at these positions begin and end in `raw`."""
        return self._starts[positions], self._stops[positions]

    def num_tokens(self, position: int) -> int:
        """How many tokens the document has."""
        return int(self._stops[position] - self._starts[position]) // self._dtype.itemsize


def object_path(name: str) -> str:
    """Where the compressed shard lies in the store."""
    return f"pool/{name[:2]}/{name}.mds.zstd"


def shard_name(entry: Mapping[str, Any]) -> str:
    """The shard's content hash, from its index entry."""
    return str(entry["raw_data"]["basename"]).rpartition("/")[2].partition(".")[0]


def encode_shard(doc_ids: Sequence[bytes], tokens: Sequence[NDArray[Any]], *, level: int = 3) -> EncodedShard:
    """Writes documents as one shard. The same documents give the same raw bytes, and so the same name.

    Args:
        doc_ids: 16 bytes each.
        tokens: an array for each id, which may be empty; all of little-endian uint16, or all of uint32.
        level: zstd level, 1 to 22. It isn't part of the name.

    Raises:
        ValueError: the documents can't be a shard: none, unequal in number or type, or 4 GiB and more.
    """
    raw = _raw_shard(doc_ids, tokens)
    if level not in ZSTD_LEVELS:
        raise ValueError(f"zstd level {level} is not between 1 and 22")
    data = pa.Codec("zstd", compression_level=level).compress(raw, asbytes=True)
    name = xxhash.xxh3_128_hexdigest(raw)
    raw_hash, data_hash = xxhash.xxh3_64_hexdigest(raw), xxhash.xxh3_64_hexdigest(data)
    basename = f"{name[:2]}/{name}.mds"
    entry: dict[str, object] = {
        **json.loads(_CONFIG_JSON),
        "compression": f"zstd:{level}",
        "raw_data": {"basename": basename, "bytes": len(raw), "hashes": {_HASH: raw_hash}},
        "zip_data": {"basename": f"{basename}.zstd", "bytes": len(data), "hashes": {_HASH: data_hash}},
        "samples": len(doc_ids),
    }
    return EncodedShard(
        name=name,
        raw_bytes=len(raw),
        raw_hash=raw_hash,
        data=data,
        data_hash=data_hash,
        entry=entry,
    )


def _raw_shard(doc_ids: Sequence[bytes], tokens: Sequence[NDArray[Any]]) -> bytes:
    if not doc_ids or len(doc_ids) != len(tokens):
        raise ValueError(f"a shard needs documents: got {len(doc_ids)} ids and {len(tokens)} token arrays")
    dtypes = {array.dtype for array in tokens}
    if len(dtypes) > 1 or not dtypes.issubset(_TOKEN_DTYPES) or any(array.ndim != 1 for array in tokens):
        raise ValueError(f"tokens must be flat, all uint16 or all uint32; got {sorted(map(str, dtypes))}")
    if any(len(doc_id) != DOC_ID_BYTES for doc_id in doc_ids):
        raise ValueError(f"a doc_id must be {DOC_ID_BYTES} bytes")

    num_documents = len(doc_ids)
    token_bytes = np.fromiter((array.nbytes for array in tokens), np.int64, num_documents)
    offsets = np.zeros(num_documents + 1, np.int64)
    np.cumsum(token_bytes + _SAMPLE_HEAD_BYTES, out=offsets[1:])
    offsets += 4 + 4 * offsets.size + len(_CONFIG_JSON)
    if offsets[-1] > MAX_SHARD_BYTES:
        raise ValueError(f"a shard must be under 4 GiB; {num_documents} documents are {offsets[-1]} bytes")

    sizes = np.full((num_documents, 2), DOC_ID_BYTES, _U32)
    sizes[:, 1] = token_bytes
    heads = memoryview(sizes.tobytes())
    parts: list[Any] = [num_documents.to_bytes(4, "little"), offsets.astype(_U32), _CONFIG_JSON]
    for i, (doc_id, array) in enumerate(zip(doc_ids, tokens, strict=True)):
        parts += (heads[8 * i : 8 * i + 8], doc_id, np.ascontiguousarray(array))
    return b"".join(parts)


def decode_shard(data: bytes, entry: Mapping[str, Any], *, token_dtype: _DType) -> DecodedShard:
    """Reads a compressed shard, checking both hashes and every size.

    Args:
        data: the content of the shard's object.
        entry: its entry in an `index.json`.
        token_dtype: the pool's: little-endian uint16 or uint32.

    Raises:
        CorruptShard: `data` isn't what `entry` promises; it names the shard and what differs.
    """
    if token_dtype not in _TOKEN_DTYPES:
        raise ValueError(f"tokens are uint16 or uint32, little-endian; got {token_dtype}")
    promised = _check_entry(entry)
    shard = f"shard {promised.name}"
    _check_bytes(f"{shard}, compressed", data, promised.data_bytes, promised.data_hash)
    try:
        buffer = pa.Codec("zstd").decompress(data, decompressed_size=promised.raw_bytes)
    except OSError as e:
        raise CorruptShard(f"{shard} doesn't decompress to its {promised.raw_bytes} bytes: {e}") from e
    view = memoryview(buffer).toreadonly()
    _check_bytes(f"{shard}, decompressed", view, promised.raw_bytes, promised.raw_hash)

    raw = np.frombuffer(view, np.uint8)
    samples_at = 4 + 4 * (promised.num_documents + 1)
    num_documents = int.from_bytes(view[:4], "little")
    if num_documents != promised.num_documents or samples_at > raw.size:
        counts = f"{num_documents} documents, not {promised.num_documents}"
        raise CorruptShard(f"{shard} says {counts}, in {raw.size} bytes")
    offsets = raw[4:samples_at].view(_U32).astype(np.int64)
    sizes = np.diff(offsets)
    if offsets[0] < samples_at or offsets[-1] != raw.size or (sizes < 0).any():
        raise CorruptShard(f"{shard}: offsets {offsets[0]} to {offsets[-1]} don't fit its {raw.size} bytes")
    _check_columns(shard, _parse_json(f"{shard}: config", bytes(view[samples_at : offsets[0]])))
    if (sizes < _SAMPLE_HEAD_BYTES).any():
        raise CorruptShard(f"{shard}: document {np.argmin(sizes)} has only {sizes.min()} bytes")
    heads = raw[offsets[:-1, None] + np.arange(8)].view(_U32).astype(np.int64)
    id_bytes, token_bytes = heads[:, 0], heads[:, 1]
    whole = (id_bytes == DOC_ID_BYTES) & (token_bytes == sizes - _SAMPLE_HEAD_BYTES)
    whole &= token_bytes % token_dtype.itemsize == 0
    if not whole.all():
        i = int(np.argmin(whole))
        found = f"an id of {id_bytes[i]} bytes and {token_bytes[i]} bytes of {token_dtype} tokens"
        raise CorruptShard(f"{shard}: document {i} has {sizes[i]} bytes, which can't be {found}")
    return DecodedShard(promised.name, raw, offsets, token_dtype)


def index_json(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """The `index.json` that lists these shards, in this order; the same entries give the same bytes."""
    index = {"version": 2, "shards": [dict(entry) for entry in entries]}
    return json.dumps(index, sort_keys=True, separators=(",", ":")).encode()


def read_index(data: bytes) -> list[dict[str, Any]]:
    """The entries of an `index.json`, each of them one that `decode_shard` takes.

    Raises:
        CorruptShard: it isn't an index of our shards; it says where.
    """
    index = _parse_json("index.json", data)
    if index.get("version") != 2 or not isinstance(index.get("shards"), list):
        raise CorruptShard("index.json isn't an MDS index: no version 2, or no list of shards")
    for i, entry in enumerate(index["shards"]):
        _check_entry(entry, where=f"index.json, shard {i}")
    return list(index["shards"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    """What an index entry says of a shard."""

    name: str
    num_documents: int
    raw_bytes: int
    raw_hash: str
    data_bytes: int
    data_hash: str


def _check_entry(entry: Any, *, where: str = "index entry") -> _Promise:
    try:
        raw, data = entry["raw_data"], entry["zip_data"]
        basename = _BASENAME.fullmatch(raw["basename"])
        promise = _Promise(
            name=basename[2] if basename else "",
            num_documents=entry["samples"],
            raw_bytes=raw["bytes"],
            raw_hash=raw["hashes"][_HASH],
            data_bytes=data["bytes"],
            data_hash=data["hashes"][_HASH],
        )
        kind = (entry["version"], entry["format"], str(entry["compression"]).partition(":")[0])
    except (KeyError, TypeError) as e:
        raise CorruptShard(f"{where} isn't one of a compressed MDS shard: {type(e).__name__}: {e}") from e
    if basename is None or data["basename"] != raw["basename"] + ".zstd" or kind != (2, "mds", "zstd"):
        raise CorruptShard(f"{where} isn't one of the pool: {raw['basename']}, {kind}")
    counts = (promise.num_documents, promise.raw_bytes, promise.data_bytes)
    if not all(isinstance(count, int) and 0 < count <= MAX_SHARD_BYTES for count in counts):
        raise CorruptShard(f"{where}: shard {promise.name}: impossible counts of documents, bytes: {counts}")
    _check_columns(f"{where}: shard {promise.name}", entry)
    return promise


def _check_columns(where: str, config: Mapping[str, Any]) -> None:
    found = {key: config.get(key) for key in _COLUMNS}
    if found != _COLUMNS:
        raise CorruptShard(f"{where} has other columns than doc_id and tokens: {found}")


def _check_bytes(what: str, data: bytes | memoryview, num_bytes: int, hexdigest: str) -> None:
    if len(data) != num_bytes:
        raise CorruptShard(f"{what}: has {len(data)} bytes, not {num_bytes}")
    found = xxhash.xxh3_64_hexdigest(data)
    if found != hexdigest:
        raise CorruptShard(f"{what}: {_HASH} is {found}, not {hexdigest}")


def _parse_json(what: str, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CorruptShard(f"{what} isn't JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise CorruptShard(f"{what} isn't a JSON object")
    return parsed
