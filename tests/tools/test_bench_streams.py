"""The streams' benchmark: its pool is what it says, our side of it delivers what it counts, and whoever isn't installed is named. The peers' loaders aren't tried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from manifests.catalog import Catalog
from manifests.mds import read_index
from manifests.store import Store
from tools.bench import streams
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.streams_data import (
    SEQ_LEN,
    VOCABULARY,
    WEIGHTS,
    Pool,
    PoolSize,
    make_pool,
    mixed,
    read_blocks,
    read_documents,
    view_path,
)
from tools.bench.streams_peers import ATOLL, BARE_PARSE, Reading, Side
from tools.bench.streams_peers import measure as read_here


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[streams.Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_BENCH_DIR", str(tmp_path_factory.mktemp("bench")))
        with streams._bench(mixed(400), seconds=5) as made:
            yield made


def read(bench: streams.Bench, loader: str, *, tokens: int) -> int:
    job = Reading(
        side=Side(loader=loader), store=str(bench.pool.store), run="bench", data=str(bench.data), weights=WEIGHTS, seq_len=SEQ_LEN,
        seed=0, tokens=tokens, seconds=60, began=time.monotonic(),
    )  # fmt: skip
    return read_here(job).tokens


def test_pool_has_the_documents_and_tokens_that_it_says(bench: streams.Bench) -> None:
    store = Store(str(bench.pool.store))
    documents = {tier: list(read_documents(store, tier)) for tier in WEIGHTS}
    assert {tier: len(some) for tier, some in documents.items()} == {"S": 160, "A": 120, "B": 80, "C": 40}
    lengths = [len(document) for some in documents.values() for document in some]
    assert sum(lengths) == bench.pool.tokens
    assert 300 < np.median(lengths) < 500
    assert all(document.max() < VOCABULARY for some in documents.values() for document in some)
    shards, raw_bytes = 0, 0
    for tier in WEIGHTS:
        entries = read_index(store.get(view_path(tier)))
        shards += len(entries)
        raw_bytes += sum(entry["raw_data"]["bytes"] for entry in entries)
    assert (shards, raw_bytes) == (bench.pool.shards, bench.pool.raw_bytes)


def test_tables_agree_with_the_shards(bench: streams.Bench) -> None:
    catalog = Catalog(Store(str(bench.pool.store)))
    for table in ("shards", "view_shards", "views"):
        rows = catalog.rows(f"SELECT sum(tokens)::BIGINT AS tokens FROM {table}")
        assert rows[0]["tokens"] == bench.pool.tokens, table
    assert catalog.rows("SELECT count(DISTINCT doc_id) AS n FROM documents")[0]["n"] == bench.pool.documents


def test_blocks_are_the_documents_one_after_the_other(bench: streams.Bench) -> None:
    store = Store(str(bench.pool.store))
    blocks = np.concatenate(list(read_blocks(store, "C")))
    documents = np.concatenate(list(read_documents(store, "C")))
    assert len(documents) - len(blocks) < SEQ_LEN
    assert np.array_equal(blocks, documents[: len(blocks)])


def test_same_seed_makes_the_same_pool_and_another_seed_another(tmp_path: Path) -> None:
    def names(pool: Pool) -> bytes:
        return Store(str(pool.store)).get(view_path("S"))

    size = PoolSize(documents={"S": 40}, shard_documents=8)
    first, second, other = (make_pool(tmp_path / f"{n}", size, seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert names(first) == names(second) != names(other)
    assert first.shards == 5


def test_our_side_delivers_whole_sequences_and_counts_them(bench: streams.Bench) -> None:
    assert read(bench, ATOLL, tokens=10 * SEQ_LEN - 1) == 10 * SEQ_LEN


def test_bare_parse_comes_to_every_token(bench: streams.Bench) -> None:
    assert read(bench, BARE_PARSE, tokens=bench.pool.tokens) == bench.pool.tokens


def test_our_side_reads_in_a_process_of_its_own(bench: streams.Bench) -> None:
    measured = bench.read(Side(loader=ATOLL), seed=1)
    assert 0 <= measured.tokens - int(0.8 * bench.pool.tokens) < SEQ_LEN
    assert measured.tokens_per_s > 0
    assert measured.start_up_s > 0
    assert measured.first_batch_s > 0
    assert measured.peak_bytes > 1e7


def test_resumed_stream_goes_on_where_it_stopped(bench: streams.Bench) -> None:
    figures = streams._resume(bench.pool, "tiny", repetitions=2)
    assert len(figures["resume_ms_tiny"].values) == 2
    assert 0 < figures["state_bytes_tiny"].median < 10_000


def test_missing_peers_are_named_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "find_spec", lambda name: None if name == "litdata" else object())
    assert all(side.loader != "LitData" for side in streams._sides(quick=False))
    told = capsys.readouterr().err
    assert "litdata" in told
    assert "webdataset" not in told
    assert "pip install 'atoll[bench]'" in told


def test_best_setting_of_every_peer_is_chosen_and_the_best_of_documents_and_of_zstd() -> None:
    packed = Side(loader="LitData", layout="packed sequences")
    documents = Side(loader="LitData", layout="documents", workers=2)
    zstd = Side(loader="LitData", layout="packed sequences in zstd")
    tars, slow = Side(loader="WebDataset", workers=2), Side(loader="WebDataset")
    tried = {packed: 9.0, zstd: 4.0, documents: 5.0, tars: 3.0, slow: 1.0}
    assert set(streams._chosen(tried)) == {packed, zstd, documents, tars}


def test_a_text_is_a_result_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"best": "LitData", "ratio": Figure(values=[2.0], unit="ratio", meaning="of it")}
    monkeypatch.setattr("sys.argv", ["sample"])
    run_benchmark(Benchmark(name="sample", question="Which?", measure=lambda quick: found))
    assert "| `best` | LitData | | | | |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["sample", "--json"])
    run_benchmark(Benchmark(name="sample", question="Which?", measure=lambda quick: found))
    assert capsys.readouterr().out.splitlines()[-1] == '{"best": "LitData", "ratio": 2.0}'
