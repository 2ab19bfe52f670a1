"""What breaks under a stream: the store, the network, the cache, the neighbours. It retries, within a bound, and then names the shard; it never ends early, hangs or mixes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import AtollError, ObjectMissing, StoreUnreachable, UserError
from manifests.mds import CorruptShard, object_path, read_index
from manifests.store import Store
from manifests.tables import create_store
from tiny import PLACES, U32, TinyShard, doc_id, put_shards
from tools.chaos.s3_proxy import Cut, S3Proxy
from trainer.cache import ShardCache
from trainer.stream import GroupStream

LENGTHS = (40, 7, 120, 3)
NUM_SHARDS = 20
TOTAL = NUM_SHARDS * sum(LENGTHS)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manifests.store._RETRY", {"max_retries": 1, "retry_timeout": timedelta(seconds=2)})
    monkeypatch.setattr("manifests.shards._PAUSE_S", 0.01)


class Pool:
    """A pool on S3, read through a proxy that spoils what it's told to."""

    def __init__(self, uri: str) -> None:
        store = create_store(uri)
        numbers = [range(n, n + len(LENGTHS)) for n in range(0, NUM_SHARDS * len(LENGTHS), len(LENGTHS))]
        self.index, self.shards = put_shards(store, [dict(zip(n, LENGTHS, strict=True)) for n in numbers])
        self.uri = uri
        self.spoil: dict[str, list[str]] = {}
        """Shard → what becomes of its next replies; the last one stays."""
        self.reads: Counter[str] = Counter()

    def on_read(self, path: str) -> Any:
        """How a reply passes."""
        for shard, replies in self.spoil.items():
            if shard in path:
                self.reads[shard] += 1
                reply = replies.pop(0) if len(replies) > 1 else replies[0]
                if reply == "dead":
                    raise Cut
                return reply
        return "pass"

    def open(self, **options: Any) -> GroupStream:
        """The stream over all shards."""
        return open_group(Store(self.uri), self.index, self.shards, **options)


def open_group(store: Store, index: bytes, shards: list[TinyShard], **options: Any) -> GroupStream:
    names = dict.fromkeys((shard.name for shard in shards), "S")
    return GroupStream(
        store, read_index(index), name="S", token_dtype=U32, key="k", origins=names, tiers=names, **options
    )


@pytest.fixture
def pool(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    pool = Pool(s3_environment)
    with S3Proxy(os.environ["AWS_ENDPOINT_URL"], on_read=pool.on_read) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield pool


def read_pass(stream: GroupStream) -> Counter[int]:
    """Documents of a whole pass, each with its tokens."""
    tokens = stream.take(TOTAL).tokens
    assert len(set(tokens.tolist())) == TOTAL
    return Counter(int(token) // PLACES for token in tokens)


@pytest.mark.parametrize("fault", ["unavailable", "broken", "corrupt"])
def test_a_fault_that_passes_is_not_noticed(pool: Pool, fault: str) -> None:
    pool.spoil = {pool.shards[3].name: [fault, "pass"], pool.shards[11].name: [fault, fault, "pass"]}
    stream = pool.open()
    read_pass(stream)
    stream.close()
    assert all(pool.reads[shard] >= 2 for shard in pool.spoil)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("unavailable", StoreUnreachable), ("broken", StoreUnreachable), ("corrupt", CorruptShard)],
)
def test_a_fault_that_stays_is_an_error_that_names_the_shard_and_the_stream_goes_on_once_it_is_mended(
    pool: Pool, fault: str, error: type[AtollError]
) -> None:
    bad = pool.shards[7].name
    pool.spoil = {bad: [fault]}
    stream = pool.open()
    tokens: list[int] = []
    began = time.monotonic()
    with pytest.raises(error, match=bad):  # noqa: PT012
        while True:
            tokens += stream.take(16).tokens.tolist()
    assert time.monotonic() - began < 30
    before = stream.state()
    with pytest.raises(error, match=bad):
        stream.take(TOTAL)
    assert stream.state() == before
    pool.spoil = {}
    tokens += stream.take(TOTAL - len(tokens)).tokens.tolist()
    assert len(set(tokens)) == TOTAL
    stream.close()


def test_a_store_that_dies_in_the_middle_is_an_error_and_no_end(pool: Pool) -> None:
    stream = pool.open()
    stream.take(16)
    pool.spoil = {"pool/": ["dead"]}
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match=r"shard [0-9a-f]{32}: .*tried 3 times"):
        stream.take(TOTAL)
    assert time.monotonic() - began < 40
    stream.close()


def test_a_shard_that_is_gone_is_an_error_that_names_it(pool: Pool) -> None:
    gone = pool.shards[5].name
    Store(pool.uri).delete(object_path(gone))
    stream = pool.open()
    with pytest.raises(ObjectMissing, match=gone):
        stream.take(TOTAL)
    stream.close()


def test_a_shard_that_was_replaced_is_never_mixed_in(pool: Pool) -> None:
    store, (old, other) = Store(pool.uri), (pool.shards[2].name, pool.shards[4].name)
    store.delete(object_path(old))
    store.put_content(object_path(old), store.get(object_path(other)))
    stream = pool.open()
    with pytest.raises(CorruptShard, match=old):
        stream.take(TOTAL)
    stream.close()


def test_wrong_credentials_are_the_users_to_mend(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stream = pool.open()
    with pytest.raises(UserError, match="access denied; check the credentials"):
        stream.take(16)
    stream.close()


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "pool").rglob("*.zstd"))


@pytest.mark.parametrize("room_for", [0.5, 1.5, 7])
def test_a_cache_below_the_pools_size_keeps_its_limit_and_everything_still_comes(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room_for: float
) -> None:
    size = max(len(Store(pool.uri).get(object_path(shard.name))) for shard in pool.shards)
    limit = int(room_for * size)
    monkeypatch.setenv("ATOLL_CACHE_BYTES", str(limit))
    stream = pool.open()
    for _ in range(2):
        read_pass(stream)
    stream.close()
    for thread in threading.enumerate():  # what they were at when the stream was closed still goes through the cache
        if thread.name.startswith("shard-reader"):
            thread.join(30)
    files = cached(tmp_path)
    assert sum(file.stat().st_size for file in files) <= limit
    assert bool(files) == (room_for > 1)
    # The cache never holds the only copy.
    assert all(Store(pool.uri).exists(object_path(shard.name)) for shard in pool.shards)


def test_a_cache_limit_that_is_no_number_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE_BYTES", "1GB")
    with pytest.raises(UserError, match="ATOLL_CACHE_BYTES is '1GB'"):
        pool.open()


def test_the_files_that_were_not_read_for_longest_go_first(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, limit_bytes=1_000)
    for number in range(3):
        cache.put(f"{number}.zstd", bytes(300))
        os.utime(tmp_path / f"{number}.zstd", (number, number))
    assert cache.get("0.zstd") == bytes(300)
    cache.put("3.zstd", bytes(300))
    assert sorted(path.name for path in tmp_path.glob("*.zstd")) == ["0.zstd", "2.zstd", "3.zstd"]


def run_reader(pool: Pool, code: str, **options: Any) -> subprocess.Popen[str]:
    """A process that reads the pool: `stream` and `resource` are at hand."""
    script = f"""
import resource, signal, sys
from manifests.store import Store
from tests.trainer import test_stream_faults as t
names = {[shard.name for shard in pool.shards]!r}
shards = [t.TinyShard(name=name, entry={{}}, documents={{}}) for name in names]
stream = t.open_group(Store({pool.uri!r}), {pool.index!r}, shards)
{code}
"""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / folder) for folder in ("", "tests", "tests/trainer"))
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, env=os.environ | {"PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_many_islands_of_a_host_share_a_cache(pool: Pool, tmp_path: Path) -> None:
    readers = [run_reader(pool, "t.read_pass(stream); print('whole')") for _ in range(3)]
    for reader in readers:
        out, error = reader.communicate(timeout=60)
        assert (out, reader.returncode) == ("whole\n", 0), error
    assert len(cached(tmp_path)) == NUM_SHARDS
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_killed_reader_leaves_nothing_that_harms_the_next(pool: Pool) -> None:
    reader = run_reader(pool, "print('begun', flush=True)\nwhile True: t.read_pass(stream)")
    assert reader.stdout is not None
    assert reader.stdout.readline() == "begun\n"
    reader.kill()
    reader.communicate()
    stream = pool.open()
    read_pass(stream)
    stream.close()


def test_a_disk_that_takes_no_more_costs_a_warning_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    # A limit on the size of files: writing ends half-way, as on a full disk.
    full = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))\n"
    out, error = run_reader(pool, full + "t.read_pass(stream); print('whole')").communicate(timeout=60)
    assert out == "whole\n", error
    assert error.count("takes no more shards") == 1
    assert "ATOLL_CACHE" in error
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]


def test_an_index_of_ten_thousand_shards_opens_at_once_and_resumes_anywhere(store: Store) -> None:
    index, shards = put_shards(store, [{n: 8, n + 1: 4} for n in range(0, 20, 2)])
    entries = read_index(index) * 1_000
    names = dict.fromkeys((shard.name for shard in shards), "S")

    def opened() -> GroupStream:
        return GroupStream(store, entries, name="S", token_dtype=U32, key="k", origins=names, tiers=names)

    began = time.monotonic()
    stream = opened()
    stream.load_state({"pass": 3, "index": 19_990, "offset": 2})
    first = stream.take(100)
    assert time.monotonic() - began < 5
    again = opened()
    again.load_state({"pass": 3, "index": 19_990, "offset": 2})
    assert again.take(100).tokens.tolist() == first.tokens.tolist()
    assert stream.passes == 4
    stream.close()
    again.close()


def test_document_ids_are_those_of_the_documents(pool: Pool) -> None:
    stream = pool.open()
    for span in stream.take(TOTAL).spans:
        assert span.doc_id in {doc_id(n) for n in range(NUM_SHARDS * len(LENGTHS))}
    stream.close()
