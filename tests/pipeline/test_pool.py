"""The shard job: every document where the manifest says, a killed job mended by running it again, views that stock StreamingDataset reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import Job, make_job
from manifests.mds import decode_shard, object_path
from manifests.store import Store
from manifests.tables import create_store
from pipeline.bands import Part, Task, Written, write_shards
from pipeline.ingest import ingest
from pipeline.pool import ShardConfig, shard
from pipeline.sources import SourceSpec
from pipeline.texts import read_texts
from pipeline.tokenizer import load_tokenizer, train_tokenizer
from tools.realtext import export_stdlib_code

CONFIG = ShardConfig(shard_bytes=8_000)
_PLACES = "SELECT shard, position, doc_id, tokens FROM shards ORDER BY shard, position"


def tiered_store(folder: Path, uri: str | None = None) -> Store:
    """A store with real text in four tiers, in the folder or elsewhere; the scores are made up, the text and the tokenizer are not."""
    store = create_store(uri if uri is not None else str(folder / "store"))
    export_stdlib_code(folder / "code.parquet", num_documents=80, seed=1)
    ingest(store, [SourceSpec(uri=str(folder / "code.parquet"), format="parquet", corpus="python")], holdout_share=0.2)
    train_tokenizer(store, Catalog(store), vocab_size=400)
    job = make_job(store, "tier", config={}, inputs={})
    ids = [
        row["doc_id"]
        for row in Catalog(store).rows("SELECT doc_id FROM documents WHERE split = 'train' ORDER BY doc_id")
    ]
    rows = [
        {"tier_version": 1, "doc_id": doc_id, "tier": "SABC"[n % 4], "score": float(-n), "method": "m", "job": job.id}
        for n, doc_id in enumerate(ids)
    ]
    job.append("tiers", rows, part=1)
    job.append(
        "tier_versions",
        [{"tier_version": 1, "method": "m", "parameters": "{}", "thresholds": "{}", "job": job.id}],
        part=1,
    )
    job.commit({})
    return store


@pytest.fixture
def tiered(tmp_path: Path) -> Store:
    return tiered_store(tmp_path)


def test_every_document_lies_where_the_manifest_says_with_its_text_as_tokens(tiered: Store) -> None:
    summary = shard(tiered, config=CONFIG)
    catalog = Catalog(tiered)
    tokenizer = load_tokenizer(tiered, catalog)
    texts = dict(read_texts(catalog, where="true"))
    entries = {row["shard"]: json.loads(row["entry"]) for row in catalog.rows("SELECT shard, entry FROM shard_index")}
    shards = {
        name: decode_shard(tiered.get(object_path(name)), entry, token_dtype=np.dtype("<u2"))
        for name, entry in entries.items()
    }
    places = catalog.rows(_PLACES)
    assert sorted(place["doc_id"] for place in places) == sorted(texts)
    for place in places:
        tokens = shards[place["shard"]].tokens(place["position"])
        assert shards[place["shard"]].doc_id(place["position"]) == place["doc_id"]
        assert len(tokens) == place["tokens"]
        assert tokenizer.tokenizer.decode(tokens[:-1].tolist()) == texts[place["doc_id"]]
        assert tokens[-1] == tokenizer.eos_id
    assert summary["documents"] == len(texts)


def test_sharding_again_changes_nothing(tiered: Store) -> None:
    shard(tiered, config=CONFIG)
    before = sorted(info.path for info in tiered.list("pool"))
    assert shard(tiered, config=CONFIG)["already_done"]
    assert sorted(info.path for info in tiered.list("pool")) == before


@pytest.mark.parametrize("dies_at", ["shards", "shard_index", "views"])
def test_job_that_died_and_is_run_again_ends_like_one_that_did_not(
    dies_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.bands._PART_DOCUMENTS", 10)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = tiered_store(tmp_path / "whole"), tiered_store(tmp_path / "killed")
    shard(whole, config=CONFIG)
    really_append = Job.append

    def append_until(self: Job, table: str, rows: Any, *, part: int) -> bool:
        if table == dies_at and part == (1 if table == "views" else 3):
            raise KeyboardInterrupt
        return really_append(self, table, rows, part=part)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "append", append_until)
        with pytest.raises(KeyboardInterrupt):
            shard(killed, config=CONFIG)
    for table in ("shards", "shard_index", "views", "pools"):
        assert Catalog(killed).rows(f"SELECT count(*) AS n FROM {table}") == [{"n": 0}]
    worked_on: list[int] = []

    def tell_and_write(task: Task, part: Part) -> Written:
        worked_on.append(part.number)
        return write_shards(task, part)

    monkeypatch.setattr("pipeline.bands.write_shards", tell_and_write)
    shard(killed, config=CONFIG)
    assert worked_on == ([] if dies_at == "views" else [*range(3, 11)])
    assert Catalog(killed).rows(_PLACES) == Catalog(whole).rows(_PLACES)
    views = "SELECT tier, shards, documents, tokens FROM views ORDER BY tier"
    assert Catalog(killed).rows(views) == Catalog(whole).rows(views)


def test_shards_hold_one_tier_and_one_origin(tiered: Store) -> None:
    shard(tiered, config=CONFIG)
    mixed = "SELECT shard FROM shards JOIN tiers USING (doc_id) GROUP BY shard HAVING count(DISTINCT tier) > 1"
    assert Catalog(tiered).rows(mixed) == []
    assert (
        Catalog(tiered).rows("SELECT max(raw_bytes) AS n FROM shard_index WHERE documents > 1")[0]["n"] <= 8_000 + 300
    )


@pytest.mark.timeout(120)
def test_stock_streaming_dataset_reads_a_view(tiered: Store, tmp_path: Path) -> None:
    from streaming import StreamingDataset

    shard(tiered, config=CONFIG)
    catalog = Catalog(tiered)
    view = catalog.rows("SELECT object, documents FROM views WHERE tier = 'S'")[0]
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "index.json").write_bytes(tiered.get(view["object"]))
    dataset = StreamingDataset(
        local=str(tmp_path / "local"),
        remote=str(tiered.root / "pool"),
        shuffle=False,
        batch_size=1,
        validate_hash="xxh3_64",
    )
    read = {sample["doc_id"]: len(np.frombuffer(sample["tokens"], "<u2")) for sample in dataset}
    expected = catalog.rows(
        "SELECT doc_id, s.tokens FROM shards AS s JOIN tiers AS t USING (doc_id) WHERE t.tier = 'S'"
    )
    assert read == {row["doc_id"]: row["tokens"] for row in expected}
    assert len(read) == view["documents"]


def test_store_without_that_tier_version_names_those_that_it_has(tiered: Store) -> None:
    with pytest.raises(UserError, match="there are 1"):
        shard(tiered, config=ShardConfig(tier_version=7))


def test_shard_size_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="shard size"):
        ShardConfig(shard_bytes=10)
