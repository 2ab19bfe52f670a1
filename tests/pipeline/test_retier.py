"""Re-tiering: the same documents in the same tiers as a full sharding, and no shard written that could stay."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import Job, make_job
from manifests.mds import decode_shard, read_index
from manifests.store import Store
from pipeline.forget import forget, plan_erasure
from pipeline.ingest import ingest
from pipeline.pool import ShardConfig, shard
from pipeline.retier import RetierConfig, plan_retier, retier
from pipeline.sources import SourceSpec
from tests.pipeline.test_pool import tiered_store
from tools.realtext import export_stdlib_code

SHARDS = ShardConfig(shard_bytes=8_000)
CONFIG = RetierConfig(shards=SHARDS)
Tiers = dict[bytes, tuple[str, float]]


@pytest.fixture
def sharded(tmp_path: Path) -> Store:
    """A store whose tier version 1 has views."""
    store = tiered_store(tmp_path)
    shard(store, config=SHARDS)
    return store


def tiers_of(store: Store, version: int) -> Tiers:
    rows = Catalog(store).rows("SELECT doc_id, tier, score FROM tiers WHERE tier_version = ?", [version])
    return {row["doc_id"]: (row["tier"], row["score"]) for row in rows}


def add_version(store: Store, tiers: Tiers) -> int:
    """A tier version made by hand."""
    version = int(Catalog(store).rows("SELECT max(tier_version) + 1 AS v FROM tier_versions")[0]["v"])
    job = make_job(store, "tier", config={"version": version}, inputs={})
    same = {"tier_version": version, "method": "m", "job": job.id}
    rows = [same | {"doc_id": doc_id, "tier": tier, "score": score} for doc_id, (tier, score) in sorted(tiers.items())]
    job.append("tiers", rows, part=1)
    job.append("tier_versions", [same | {"parameters": "{}", "thresholds": "{}"}], part=1)
    job.commit({})
    return version


def content(store: Store, version: int) -> dict[bytes, tuple[str, bytes]]:
    """Tier and tokens of every document that the version's views show; each is there once."""
    catalog = Catalog(store)
    found: dict[bytes, tuple[str, bytes]] = {}
    for view in catalog.rows("SELECT tier, object, documents, tokens FROM views WHERE tier_version = ?", [version]):
        documents = tokens = 0
        for entry in read_index(store.get(view["object"])):
            name = str(entry["zip_data"]["basename"])
            decoded = decode_shard(store.get(f"pool/{name}"), entry, token_dtype=np.dtype("<u2"))
            for position in range(decoded.num_documents):
                doc_id = decoded.doc_id(position)
                assert doc_id not in found
                found[doc_id] = (view["tier"], decoded.tokens(position).tobytes())
                documents, tokens = documents + 1, tokens + decoded.num_tokens(position)
        assert (documents, tokens) == (view["documents"], view["tokens"])
    return found


def shards_of(store: Store, version: int) -> dict[str, str]:
    """Tier of each shard of a version's views."""
    sql = "SELECT shard, tier FROM view_shards JOIN views USING (tier_version, pool, tier, job) WHERE tier_version = ?"
    return {row["shard"]: row["tier"] for row in Catalog(store).rows(sql, [version])}


def documents_in(store: Store, shard_name: str) -> list[bytes]:
    sql = "SELECT DISTINCT doc_id, position FROM shards WHERE shard = ? ORDER BY position"
    return [row["doc_id"] for row in Catalog(store).rows(sql, [shard_name])]


def moved_to(tiers: Mapping[bytes, tuple[str, float]], doc_ids: list[bytes], tier: str) -> Tiers:
    return dict(tiers) | {doc_id: (tier, tiers[doc_id][1]) for doc_id in doc_ids}


def test_a_threshold_that_falls_between_shards_moves_no_bytes(sharded: Store) -> None:
    before = shards_of(sharded, 1)
    whole = next(name for name, tier in before.items() if tier == "A")
    add_version(sharded, moved_to(tiers_of(sharded, 1), documents_in(sharded, whole), "S"))
    objects = sorted(info.path for info in sharded.list("pool"))
    plan = plan_retier(sharded, config=CONFIG).facts()
    assert plan["shards"] == {"untouched": len(before) - 1, "reassigned": 1, "rewritten": 0}
    summary = retier(sharded, config=CONFIG)
    assert summary["shards"]["written"] == summary["zip_bytes"]["written"] == 0
    assert shards_of(sharded, 2) == before | {whole: "S"}
    assert sorted(info.path for info in sharded.list("pool")) == objects


def test_only_shards_with_movers_are_written_anew_and_the_old_version_stays(sharded: Store) -> None:
    before, old = shards_of(sharded, 1), content(sharded, 1)
    split = next(name for name, tier in before.items() if tier == "A" and len(documents_in(sharded, name)) > 1)
    mover = documents_in(sharded, split)[0]
    add_version(sharded, moved_to(tiers_of(sharded, 1), [mover], "C"))
    summary = retier(sharded, config=CONFIG)
    assert summary["documents"] == {"moved": {"A to C": 1}, "new": 0, "gone": 0}
    assert summary["shards"]["rewritten"] == 1
    assert {name: tier for name, tier in before.items() if name != split}.items() <= shards_of(sharded, 2).items()
    assert split not in shards_of(sharded, 2)
    assert content(sharded, 2) == old | {mover: ("C", old[mover][1])}
    assert content(sharded, 1) == old


@pytest.mark.parametrize("seed", range(3))
def test_any_change_ends_as_a_full_sharding_does(seed: int, sharded: Store, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tiers = tiers_of(sharded, 1)
    changed: Tiers = {
        doc_id: (draw.choice("SABC") if draw.random() < 0.3 else tier, draw.random())
        for doc_id, (tier, _) in tiers.items()
        if draw.random() > 0.1  # the others have no score any more
    }
    export_stdlib_code(tmp_path / "more.parquet", num_documents=30, seed=2)
    ingest(
        sharded, [SourceSpec(uri=str(tmp_path / "more.parquet"), format="parquet", corpus="more")], holdout_share=0.2
    )
    known = {row["doc_id"] for row in Catalog(sharded).rows("SELECT doc_id FROM documents WHERE corpus <> 'more'")}
    for row in Catalog(sharded).rows("SELECT doc_id FROM documents WHERE split = 'train' ORDER BY doc_id"):
        if row["doc_id"] not in known:
            changed[row["doc_id"]] = (draw.choice("SABC"), draw.random())
    for _ in range(2):
        add_version(sharded, changed)
    summary = retier(sharded, config=RetierConfig(shards=ShardConfig(shard_bytes=8_000, tier_version=2)))
    shard(sharded, config=ShardConfig(shard_bytes=8_000, tier_version=3))
    assert content(sharded, 2) == content(sharded, 3)
    assert summary["documents"]["gone"] == len(tiers.keys() - changed.keys()) > 0
    assert summary["documents"]["new"] > 0
    one_kind = """
        SELECT shard FROM shards JOIN documents USING (doc_id)
        GROUP BY shard HAVING count(DISTINCT corpus) > 1
    """
    assert Catalog(sharded).rows(one_kind) == []


def test_what_was_forgotten_is_in_no_view_of_the_new_version(sharded: Store) -> None:
    tiers = tiers_of(sharded, 1)
    forgotten = next(doc_id for doc_id, (tier, _) in sorted(tiers.items()) if tier == "S")
    forget(plan_erasure(sharded, f"doc_id = from_hex('{forgotten.hex()}')", reason="asked for"))
    del tiers[forgotten]
    add_version(sharded, tiers)
    retier(sharded, config=CONFIG)
    assert forgotten not in content(sharded, 2)
    assert content(sharded, 2).keys() >= tiers.keys()


@pytest.mark.parametrize("dies_at", ["shards", "shard_index", "view_shards", "views"])
def test_attempt_that_died_is_finished_by_the_next(
    dies_at: str, sharded: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = content(sharded, 1)
    movers = [documents_in(sharded, name)[0] for name, tier in shards_of(sharded, 1).items() if tier in "AB"]
    add_version(sharded, moved_to(tiers_of(sharded, 1), movers, "S"))
    really_append = Job.append

    def append_until(self: Job, table: str, rows: Any, *, part: int) -> bool:
        if table == dies_at:
            raise KeyboardInterrupt
        return really_append(self, table, rows, part=part)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "append", append_until)
        with pytest.raises(KeyboardInterrupt):
            retier(sharded, config=CONFIG)
    assert shards_of(sharded, 2) == {}
    retier(sharded, config=CONFIG)
    assert content(sharded, 2) == old | {doc_id: ("S", old[doc_id][1]) for doc_id in movers}
    assert retier(sharded, config=CONFIG)["already_done"]


def test_what_cannot_be_retiered_is_named(tmp_path: Path) -> None:
    store = tiered_store(tmp_path)
    with pytest.raises(UserError, match="no earlier tier version has views"):
        retier(store, config=CONFIG)
    shard(store, config=SHARDS)
    with pytest.raises(UserError, match="tier version 1 has been sharded"):
        retier(store, config=CONFIG)
    add_version(store, tiers_of(store, 1))
    with pytest.raises(UserError, match=r"tier version 7 has no views in pool .*; there are 1"):
        retier(store, config=RetierConfig(shards=SHARDS, base=7))
    shard(store, config=SHARDS)
    with pytest.raises(UserError, match="tier version 2 has been sharded"):
        plan_retier(store, config=CONFIG)
