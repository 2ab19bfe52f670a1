"""Verifying shards: nothing is found in what is whole, and everything that is wrong is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import make_job
from manifests.mds import object_path
from manifests.store import Store
from pipeline.bands import tokenise
from pipeline.forget import forget, plan_erasure
from pipeline.pool import ShardConfig, shard
from pipeline.retier import RetierConfig, retier
from pipeline.verify import verify
from tests.pipeline.test_pool import tiered_store
from tests.pipeline.test_retier import add_version, documents_in, moved_to, shards_of, tiers_of
from tools import cli

SHARDS = ShardConfig(shard_bytes=8_000)


@pytest.fixture
def sharded(tmp_path: Path) -> Store:
    store = tiered_store(tmp_path)
    shard(store, config=SHARDS)
    return store


def _some_shard(store: Store) -> str:
    return next(name for name, tier in sorted(shards_of(store, 1).items()) if tier == "A")


def _overwrite(store: Store, name: str, data: bytes) -> None:
    assert store.root is not None
    (store.root / object_path(name)).write_bytes(data)


def test_nothing_is_found_in_what_was_just_written_also_after_an_erasure_and_a_new_tier_version(sharded: Store) -> None:
    verified = verify(sharded)
    assert (verified.findings, verified.shards) == ([], len(shards_of(sharded, 1)))
    assert verified.compared == verified.documents > 50
    tiers = tiers_of(sharded, 1)
    forgotten = min(tiers)
    forget(plan_erasure(sharded, f"doc_id = from_hex('{forgotten.hex()}')", reason="asked for"))
    after = verify(sharded, tier_version=1)
    assert (after.findings, after.compared) == ([], verified.compared - 1)
    del tiers[forgotten]
    add_version(sharded, moved_to(tiers, sorted(tiers)[:5], "B"))
    retier(sharded, config=RetierConfig(shards=SHARDS))
    assert verify(sharded).findings == []
    assert 0 < verify(sharded, sample=20).compared < 45


def test_a_damaged_and_a_missing_shard_are_named(sharded: Store) -> None:
    damaged, missing = sorted(shards_of(sharded, 1))[:2]
    data = bytearray(sharded.get(object_path(damaged)))
    data[len(data) // 2] ^= 1
    _overwrite(sharded, damaged, bytes(data))
    sharded.delete(object_path(missing))
    found = {finding.shard: finding.finding for finding in verify(sharded).findings}
    assert found.keys() == {damaged, missing}
    assert "hash" in found[damaged] or "xxh3" in found[damaged]
    assert "missing" in found[missing]


def test_tokens_that_are_not_those_of_the_text_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tiered_store(tmp_path)
    spoiled = min(tiers_of(store, 1))

    def spoiling(*arguments: Any) -> dict[bytes, Any]:
        tokens = tokenise(*arguments)
        if spoiled in tokens:
            tokens[spoiled] = tokens[spoiled][::-1].copy()
        return tokens

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.bands.tokenise", spoiling)
        shard(store, config=SHARDS)
    (finding,) = verify(store).findings
    assert finding.finding == f"the tokens of document {spoiled.hex()} aren't those of its text"
    assert documents_in(store, finding.shard)[finding.position or 0] == spoiled


def test_more_documents_in_the_table_than_in_the_shard_are_named(sharded: Store) -> None:
    name = _some_shard(sharded)
    place = Catalog(sharded).rows("SELECT max(position) + 1 AS position FROM shards WHERE shard = ?", [name])[0]
    job = make_job(sharded, "shard", config={"doubled": True}, inputs={})
    row = place | {"pool": "p", "shard": name, "doc_id": b"0" * 16, "tokens": 1, "job": job.id}
    job.append("shards", [row], part=1)
    job.commit({})
    findings = verify(sharded).findings
    assert any(f.shard == name and "documents, the table shards says" in f.finding for f in findings)


def test_a_document_in_the_wrong_view_is_named(sharded: Store) -> None:
    mover = documents_in(sharded, _some_shard(sharded))[0]
    job = make_job(sharded, "tier", config={"again": True}, inputs={})
    same = {"tier_version": 1, "method": "m", "job": job.id, "score": 0.0, "tier": "C"}
    job.append("tiers", [same | {"doc_id": mover}], part=1)
    job.commit({})
    (finding,) = verify(sharded).findings
    assert finding.finding == f"1 documents of tier C stand in no view, such as {mover.hex()}"


def test_the_command_says_what_was_looked_at_and_fails_on_a_finding(
    sharded: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["atoll"])
    assert cli._run(["shard", "--verify", "--sample", "10", "--store", sharded.uri]) == 0
    assert "nothing is wrong" in capsys.readouterr().err
    sharded.delete(object_path(_some_shard(sharded)))
    assert cli._run(["shard", "--verify", "--store", sharded.uri]) == 1
    out, err = capsys.readouterr()
    assert "the object is missing" in out
    assert "findings in the shards" in err
    assert cli._run(["shard", "--sample", "10", "--store", sharded.uri]) == 2


def test_a_version_without_views_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no views in pool"):
        verify(tiered_store(tmp_path))
