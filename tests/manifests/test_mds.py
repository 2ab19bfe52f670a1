"""The MDS shard: ours and streaming's agree to the byte, and nothing wrong is read as right."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from manifests.mds import (
    CorruptShard,
    DecodedShard,
    EncodedShard,
    decode_shard,
    encode_shard,
    index_json,
    object_path,
    read_index,
)

U16: np.dtype[Any] = np.dtype("<u2")
U32: np.dtype[Any] = np.dtype("<u4")
Documents = tuple[list[bytes], list[NDArray[Any]]]


def make_documents(lengths: list[int], dtype: np.dtype[Any] = U16, *, seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 50_000, n).astype(dtype) for n in lengths]
    return [rng.bytes(16) for _ in lengths], tokens


def read_all(shard: DecodedShard) -> list[tuple[bytes, list[int]]]:
    return [(shard.doc_id(i), shard.tokens(i).tolist()) for i in range(shard.num_documents)]


def as_read(documents: Documents) -> list[tuple[bytes, list[int]]]:
    return [(doc_id, tokens.tolist()) for doc_id, tokens in zip(*documents, strict=True)]


def reseal(raw: bytes, entry: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Other raw bytes under an entry whose sizes and hashes are right for them: only the inside is wrong."""
    data = pa.Codec("zstd").compress(raw, asbytes=True)
    sealed = copy.deepcopy(dict(entry))
    for part, content in (("raw_data", raw), ("zip_data", data)):
        sealed[part]["bytes"] = len(content)
        sealed[part]["hashes"]["xxh3_64"] = xxhash.xxh3_64_hexdigest(content)
    return data, sealed


def raw_of(shard: EncodedShard) -> bytes:
    return bytes(pa.Codec("zstd").decompress(shard.data, decompressed_size=shard.raw_bytes, asbytes=True))


@st.composite
def documents_of_one_type(draw: st.DrawFn) -> tuple[Documents, np.dtype[Any]]:
    dtype: np.dtype[Any] = draw(st.sampled_from((U16, U32)))
    token = st.integers(0, int(np.iinfo(dtype).max))
    lists = draw(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.lists(token)), min_size=1))
    return ([doc_id for doc_id, _ in lists], [np.array(tokens, dtype) for _, tokens in lists]), dtype


@given(documents_of_one_type(), st.sampled_from([1, 3, 9]))
@settings(deadline=None)
def test_what_is_encoded_is_decoded(drawn: tuple[Documents, np.dtype[Any]], level: int) -> None:
    documents, dtype = drawn
    encoded = encode_shard(*documents, level=level)
    (entry,) = read_index(index_json([encoded.entry]))
    shard = decode_shard(encoded.data, entry, token_dtype=dtype)
    assert entry == encoded.entry
    assert shard.name == encoded.name
    assert read_all(shard) == as_read(documents)
    assert [shard.num_tokens(i) for i in range(shard.num_documents)] == [len(t) for t in documents[1]]
    assert all(shard.tokens(i).dtype == dtype for i in range(shard.num_documents))


def test_same_documents_give_the_same_shard_and_other_documents_another() -> None:
    documents = make_documents([3, 0, 500])
    assert encode_shard(*documents) == encode_shard(*documents)
    assert encode_shard(*documents).name == encode_shard(*documents, level=19).name
    ids, tokens = documents
    assert encode_shard(ids[::-1], tokens[::-1]).name != encode_shard(ids, tokens).name


def test_strided_tokens_are_written_as_their_values() -> None:
    ids, (tokens,) = make_documents([10])
    encoded = encode_shard(ids, [tokens[::2]])
    shard = decode_shard(encoded.data, encoded.entry, token_dtype=U16)
    assert shard.tokens(0).tolist() == tokens[::2].tolist()


def test_names_and_hashes_say_what_they_promise() -> None:
    encoded = encode_shard(*make_documents([3, 5]), level=5)
    raw = raw_of(encoded)
    xx, name = encoded.name[:2], encoded.name
    assert name == xxhash.xxh3_128_hexdigest(raw)
    assert object_path(name) == f"pool/{xx}/{name}.mds.zstd"
    assert encoded.entry == {
        "column_encodings": ["bytes", "bytes"],
        "column_names": ["doc_id", "tokens"],
        "column_sizes": [None, None],
        "compression": "zstd:5",
        "format": "mds",
        "hashes": ["xxh3_64"],
        "raw_data": {
            "basename": f"{xx}/{name}.mds",
            "bytes": len(raw),
            "hashes": {"xxh3_64": encoded.raw_hash},
        },
        "samples": 2,
        "size_limit": None,
        "version": 2,
        "zip_data": {
            "basename": f"{xx}/{name}.mds.zstd",
            "bytes": len(encoded.data),
            "hashes": {"xxh3_64": encoded.data_hash},
        },
    }


def test_tokens_are_read_only_views_into_the_shard() -> None:
    encoded = encode_shard(*make_documents([4, 4]))
    shard = decode_shard(encoded.data, encoded.entry, token_dtype=U16)
    first = shard.tokens(0)
    assert np.shares_memory(first, shard.tokens(0))
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        first.flags.writeable = True
    with pytest.raises(IndexError):
        shard.tokens(2)


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([], [], "needs documents"),
        ([b"x" * 16], [], "1 ids and 0 token arrays"),
        ([b"x" * 15], [np.zeros(1, U16)], "16 bytes"),
        ([b"x" * 16], [np.zeros(1, np.int64)], "int64"),
        ([b"x" * 16], [np.zeros(1, ">u2")], ">u2"),
        ([b"x" * 16] * 2, [np.zeros(1, U16), np.zeros(1, U32)], "uint16.*uint32"),
        ([b"x" * 16], [np.zeros((1, 1), U16)], "flat"),
        ([b"x" * 16], [np.broadcast_to(np.zeros(1, U16), 2**31)], "under 4 GiB"),
    ],
)
def test_what_cant_be_a_shard_is_refused(ids: list[bytes], tokens: list[NDArray[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_shard(ids, tokens)


@pytest.mark.parametrize("level", [0, 23, -1])
def test_levels_that_streaming_has_no_name_for_are_refused(level: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 22"):
        encode_shard(*make_documents([1]), level=level)


def test_tokens_of_another_type_than_the_formats_are_refused() -> None:
    encoded = encode_shard(*make_documents([1]))
    with pytest.raises(ValueError, match="int64"):
        decode_shard(encoded.data, encoded.entry, token_dtype=np.dtype(np.int64))


def test_every_flipped_byte_is_noticed() -> None:
    encoded = encode_shard(*make_documents([5, 0, 40]))
    for position in range(len(encoded.data)):
        flipped = bytearray(encoded.data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(CorruptShard, match=rf"{encoded.name}, compressed: xxh3_64 is"):
            decode_shard(bytes(flipped), encoded.entry, token_dtype=U16)


def test_every_truncation_is_noticed() -> None:
    encoded = encode_shard(*make_documents([5, 0, 40]))
    for size in range(len(encoded.data)):
        with pytest.raises(CorruptShard, match=rf"has {size} bytes, not {len(encoded.data)}"):
            decode_shard(encoded.data[:size], encoded.entry, token_dtype=U16)
    with pytest.raises(CorruptShard, match="compressed: has"):
        decode_shard(encoded.data + b"\0", encoded.entry, token_dtype=U16)


def test_other_documents_compressed_under_the_right_hash_are_noticed() -> None:
    """The second hash guards what the first can't: an entry whose two halves are of different shards."""
    mine, other = encode_shard(*make_documents([5], seed=1)), encode_shard(*make_documents([5], seed=2))
    mixed = copy.deepcopy(mine.entry)
    mixed["zip_data"] = other.entry["zip_data"] | {"basename": mine.entry["zip_data"]["basename"]}  # type: ignore
    with pytest.raises(CorruptShard, match=f"{mine.name}, decompressed: xxh3_64"):
        decode_shard(other.data, mixed, token_dtype=U16)


def test_data_that_is_no_zstd_is_noticed() -> None:
    encoded = encode_shard(*make_documents([5]))
    _, entry = reseal(raw_of(encoded), encoded.entry)
    junk = b"junk" * 8
    entry["zip_data"] |= {"bytes": len(junk), "hashes": {"xxh3_64": xxhash.xxh3_64_hexdigest(junk)}}
    with pytest.raises(CorruptShard, match="doesn't decompress"):
        decode_shard(junk, entry, token_dtype=U16)


@given(st.data())
@settings(deadline=None)
def test_a_shard_wrong_inside_is_noticed_or_read_within_its_bounds(data: st.DataObject) -> None:
    """Hashes that match wrong bytes: whatever stands in the tables, nothing but CorruptShard comes out."""
    documents = make_documents([5, 0, 3])
    encoded = encode_shard(*documents)
    raw = bytearray(raw_of(encoded))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    try:
        shard = decode_shard(*reseal(bytes(raw), encoded.entry), token_dtype=U16)
    except CorruptShard:
        return
    # The config may differ where it doesn't matter, and a document in its content, but never in its size.
    assert [shard.num_tokens(i) for i in range(shard.num_documents)] == [5, 0, 3]
    assert [len(shard.doc_id(i)) for i in range(3)] == [16] * 3


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_rubbish_under_right_hashes_is_noticed(rubbish: bytes) -> None:
    encoded = encode_shard(*make_documents([5]))
    with pytest.raises(CorruptShard, match=encoded.name):
        decode_shard(*reseal(rubbish or b"\0", encoded.entry), token_dtype=U16)


def u32(*values: int) -> bytes:
    return np.array(values, U32).tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw, at: u32(3) + raw[4:], "says 3 documents, not 2"),
        (lambda raw, at: raw[:13], "says 2 documents, not 2, in 13 bytes"),
        (lambda raw, at: raw[:4] + u32(8, at[1], at[2]) + raw[16:], "offsets 8 to .* don't fit"),
        (lambda raw, at: raw[:4] + u32(at[0], at[2] + 8, at[2]) + raw[16:], "don't fit"),
        (lambda raw, at: raw[:4] + u32(at[0], at[1], at[2] - 2) + raw[16:], "don't fit"),
        (lambda raw, at: raw[:4] + u32(at[0], at[2], at[2]) + raw[16:], "document 1 has only 0 bytes"),
        (lambda raw, at: raw[:4] + u32(at[0], at[1] + 2, at[2]) + raw[16:], "document 0 has 36 bytes, which"),
        (lambda raw, at: raw[:4] + u32(at[0] + 1, at[1], at[2]) + raw[16:], "config isn't JSON"),
        (lambda raw, at: raw[: at[0]] + u32(12) + raw[at[0] + 4 :], "can't be an id of 12 bytes"),
        (lambda raw, at: raw[: at[1] + 4] + u32(8) + raw[at[1] + 8 :], "document 1 .* 8 bytes of uint16"),
    ],
)
def test_inconsistent_tables_are_named(change: Any, message: str) -> None:
    encoded = encode_shard(*make_documents([5, 5]))
    raw = raw_of(encoded)
    changed = change(raw, np.frombuffer(raw, U32, 3, 4).tolist())
    with pytest.raises(CorruptShard, match=message):
        decode_shard(*reseal(changed, encoded.entry), token_dtype=U16)


def test_tokens_that_are_not_whole_are_named() -> None:
    encoded = encode_shard(*make_documents([2, 3]))
    with pytest.raises(CorruptShard, match=r"document 1 has 30 bytes, .* 6 bytes of uint32"):
        decode_shard(encoded.data, encoded.entry, token_dtype=U32)


def test_other_columns_are_named() -> None:
    encoded = encode_shard(*make_documents([5]))
    entry = encoded.entry | {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
    with pytest.raises(CorruptShard, match=rf"{encoded.name} has other columns .*text"):
        decode_shard(encoded.data, entry, token_dtype=U16)
    raw = raw_of(encoded).replace(b'"tokens"', b'"spoken"')
    with pytest.raises(CorruptShard, match=rf"{encoded.name} has other columns .*spoken"):
        decode_shard(*reseal(raw, encoded.entry), token_dtype=U16)


def test_an_index_is_the_same_bytes_whatever_the_order_of_keys() -> None:
    entries = [encode_shard(*make_documents([n])).entry for n in (1, 2)]
    reordered = [dict(reversed(entry.items())) for entry in entries]
    assert index_json(entries) == index_json(reordered) != index_json(entries[::-1])
    assert read_index(index_json(entries)) == entries
    assert read_index(index_json([])) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "isn't JSON"),
        (b"\xff\xfe\xfd", "isn't JSON"),
        (b"[" * 100_000, "isn't JSON"),
        (b"[]", "isn't a JSON object"),
        (b"{}", "isn't an MDS index"),
        (b'{"version": 1, "shards": []}', "isn't an MDS index"),
        (b'{"version": 2, "shards": {}}', "isn't an MDS index"),
        (b'{"version": 2, "shards": [3]}', "shard 0 isn't one of a compressed MDS shard"),
        (b'{"version": 2, "shards": [{}]}', "shard 0 .*raw_data"),
        (b'{"version": 2, "shards": [{"raw_data": null, "zip_data": null}]}', "shard 0 "),
    ],
)
def test_rubbish_is_no_index(data: bytes, message: str) -> None:
    with pytest.raises(CorruptShard, match=message):
        read_index(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "isn't one of the pool"),
        ({"format": "csv"}, "isn't one of the pool"),
        ({"compression": None}, "isn't one of the pool"),
        ({"compression": "gz:6"}, "isn't one of the pool"),
        ({"samples": 0}, "impossible counts"),
        ({"samples": "7"}, "impossible counts"),
        ({"column_sizes": [16, None]}, "other columns"),
        ({"zip_data": None}, "isn't one of a compressed"),
        ({"raw_data": {"basename": "../../etc/passwd", "bytes": 1, "hashes": {"xxh3_64": ""}}}, "etc/passwd"),
        ({"raw_data": {"basename": "x.mds", "bytes": 1, "hashes": {}}}, "xxh3_64"),
    ],
)
def test_an_entry_of_something_else_is_named_by_its_place(change: dict[str, Any], message: str) -> None:
    entries = [encode_shard(*make_documents([n])).entry for n in (1, 2)]
    with pytest.raises(CorruptShard, match=f"shard 1.*{message}"):
        read_index(index_json([entries[0], entries[1] | change]))


def test_importing_the_format_imports_neither_streaming_nor_torch() -> None:
    code = "import sys, manifests.mds; print({'streaming', 'torch', 'transformers'} & sys.modules.keys())"
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# The tests below import streaming (some seconds, once) and have the real thing as their judge.


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", [U16, U32])
def test_raw_shard_is_the_one_that_streaming_writes(dtype: np.dtype[Any], tmp_path: Path) -> None:
    from streaming import MDSWriter

    documents = make_documents([7, 0, 1, 1000], dtype)
    encoded = encode_shard(*documents)
    columns = {"tokens": "bytes", "doc_id": "bytes"}
    with MDSWriter(out=str(tmp_path / "raw"), columns=columns, hashes=["xxh3_64"], size_limit=None) as writer:
        for doc_id, tokens in zip(*documents, strict=True):
            writer.write({"doc_id": doc_id, "tokens": tokens.tobytes()})
    assert raw_of(encoded) == (tmp_path / "raw" / "shard.00000.mds").read_bytes()

    theirs = json.loads((tmp_path / "raw" / "index.json").read_bytes())["shards"][0]
    ours: dict[str, Any] = encoded.entry
    places = {"basename": None}
    assert theirs["raw_data"] | places == ours["raw_data"] | places
    different = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    assert different == {"compression", "raw_data", "zip_data"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("level", [1, 3, 22])
def test_streaming_decompresses_by_our_names_of_levels(level: int) -> None:
    from streaming.base.compression import decompress, is_compression

    encoded = encode_shard(*make_documents([100]), level=level)
    assert is_compression(encoded.entry["compression"])
    assert decompress(encoded.entry["compression"], encoded.data) == raw_of(encoded)


@pytest.mark.timeout(60)
def test_stock_streaming_dataset_reads_a_view_of_the_pool(tmp_path: Path) -> None:
    from streaming import StreamingDataset

    first, second = make_documents([3, 0, 900], seed=1), make_documents([40, 1], seed=2)
    shards = [encode_shard(*first), encode_shard(*second)]
    assert shards[0].name[:2] != shards[1].name[:2]
    for shard in shards:
        path = tmp_path / object_path(shard.name)
        path.parent.mkdir(parents=True)
        path.write_bytes(shard.data)
    local = tmp_path / "view"
    local.mkdir()
    (local / "index.json").write_bytes(index_json([shard.entry for shard in shards]))

    dataset = StreamingDataset(
        local=str(local),
        remote=str(tmp_path / "pool"),
        shuffle=False,
        batch_size=1,
        validate_hash="xxh3_64",
    )
    read = [(s["doc_id"], np.frombuffer(s["tokens"], U16).tolist()) for s in dataset]
    assert read == as_read(first) + as_read(second)
