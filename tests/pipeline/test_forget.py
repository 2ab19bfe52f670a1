"""Erasure: the documents' tokens are gone from every shard and view, everything else stays in its place, and a death is mended by doing it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pool import CONFIG, tiered_store

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.jobs import Job
from manifests.mds import decode_shard, object_path, read_index, shard_name
from manifests.store import Store
from manifests.tables import open_store
from pipeline.forget import forget, plan_erasure
from pipeline.ingest import ingest
from pipeline.pool import shard
from pipeline.sources import SourceSpec
from trainer.stream import GroupStream

WHERE = "source_row % 7 = 3"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A pool of real text; tests work on copies."""
    store = tiered_store(tmp_path_factory.mktemp("forget"))
    shard(store, config=CONFIG)
    return store


@pytest.fixture
def pool(sharded: Store, tmp_path: Path) -> Store:
    shutil.copytree(sharded.root, tmp_path / "copy")
    return open_store(str(tmp_path / "copy"))


def _matching(store: Store) -> set[bytes]:
    return {row["doc_id"] for row in Catalog(store).rows(f"SELECT doc_id FROM documents WHERE {WHERE}")}


def _tokens(store: Store) -> dict[tuple[str, int], dict[bytes, list[int]]]:
    """What every current view holds: (tier, place of the shard) → tokens by document."""
    held = {}
    for view in Catalog(store).rows("SELECT tier, object FROM views"):
        for number, entry in enumerate(read_index(store.get(view["object"]))):
            data = store.get(object_path(shard_name(entry)))
            documents = decode_shard(data, entry, token_dtype=np.dtype("<u2"))
            places = range(documents.num_documents)
            held[view["tier"], number] = {documents.doc_id(i): documents.tokens(i).tolist() for i in places}
    return held


def test_tokens_are_gone_and_all_else_keeps_its_place(pool: Store) -> None:
    forgotten, before = _matching(pool), _tokens(pool)
    summary = forget(plan_erasure(pool, WHERE, reason="asked to"))
    assert summary["documents"] == len(forgotten) > 5
    expected = {
        place: {i: ([] if i in forgotten else tokens) for i, tokens in documents.items()}
        for place, documents in before.items()
    }
    assert _tokens(pool) == expected
    after = _tokens(pool)
    assert {place: list(documents) for place, documents in after.items()} == {p: list(d) for p, d in expected.items()}
    # No object of the pool that isn't in a view is left.
    names = {
        shard_name(e) for v in Catalog(pool).rows("SELECT object FROM views") for e in read_index(pool.get(v["object"]))
    }
    assert {info.path for info in pool.list("pool")} == {object_path(name) for name in names}


def test_views_count_what_is_left(pool: Store) -> None:
    before = {row["tier"]: row for row in Catalog(pool).rows("SELECT tier, documents, tokens FROM views")}
    lost = Catalog(pool).rows(
        f"SELECT coalesce(t.tier, 'holdout') AS tier, count(*) AS documents, sum(s.tokens)::BIGINT AS tokens FROM documents "
        f"JOIN shards AS s USING (doc_id) LEFT JOIN tiers AS t USING (doc_id) WHERE {WHERE} GROUP BY ALL"
    )
    forget(plan_erasure(pool, WHERE, reason="asked to"))
    after = {row["tier"]: row for row in Catalog(pool).rows("SELECT tier, documents, tokens FROM views")}
    for row in lost:
        before[row["tier"]]["documents"] -= row["documents"]
        before[row["tier"]]["tokens"] -= row["tokens"]
    assert after == before
    sums = "SELECT tier, sum(documents)::BIGINT AS documents, sum(tokens)::BIGINT AS tokens FROM view_shards JOIN views USING (tier_version, pool, tier, job) GROUP BY tier"
    renamed = sums.replace("sum(documents)", "sum(view_shards.documents)").replace(
        "sum(tokens)", "sum(view_shards.tokens)"
    )
    assert {row["tier"]: row for row in Catalog(pool).rows(renamed)} == after


def test_tombstones_say_why_and_the_documents_stay_away(pool: Store, tmp_path: Path) -> None:
    forgotten = _matching(pool)
    forget(plan_erasure(pool, WHERE, reason="asked to"))
    catalog = Catalog(pool)
    stones = catalog.rows("SELECT doc_id, reason, predicate FROM tombstones")
    assert {row["doc_id"] for row in stones} == forgotten
    assert {(row["reason"], row["predicate"]) for row in stones} == {("asked to", WHERE)}
    assert not _matching(pool)
    source = catalog.rows("SELECT DISTINCT source_uri FROM sources")[0]["source_uri"]
    copy = tmp_path / "again.parquet"
    shutil.copy(source, copy)
    ingest(pool, [SourceSpec(uri=str(copy), format="parquet", corpus="again")], holdout_share=0.2)
    assert Catalog(pool).rows("SELECT * FROM documents WHERE corpus = 'again'") == []


def test_a_stream_goes_on_as_if_the_documents_had_been_left_out(pool: Store, sharded: Store) -> None:
    forgotten = frozenset(_matching(pool))
    forget(plan_erasure(pool, WHERE, reason="asked to"))

    def stream(store: Store, excluded: frozenset[bytes]) -> GroupStream:
        catalog = Catalog(store)
        view = catalog.rows("SELECT object FROM views WHERE tier = 'A'")[0]["object"]
        origins = {
            row["shard"]: row["origin"] for row in catalog.rows("SELECT DISTINCT shard, origin FROM shard_index")
        }
        return GroupStream(
            store,
            read_index(store.get(view)),
            name="A",
            token_dtype=np.dtype("<u2"),
            key="k",
            origins=origins,
            tiers=dict.fromkeys(origins, "A"),
            excluded=excluded,
        )

    left_out, erased = stream(sharded, forgotten), stream(pool, frozenset())
    for _ in range(200):
        expected, found = left_out.take(64), erased.take(64)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert [s.doc_id for s in found.spans] == [s.doc_id for s in expected.spans]
        assert found.spans
        assert not {s.doc_id for s in found.spans} & forgotten
    assert erased.state() == left_out.state()


def test_doing_it_again_says_so(pool: Store) -> None:
    forget(plan_erasure(pool, WHERE, reason="asked to"))
    assert forget(plan_erasure(pool, WHERE, reason="asked to"))["already_done"]


def test_a_plan_changes_nothing(pool: Store) -> None:
    before = sorted((info.path, info.size_bytes) for info in pool.list(""))
    plan = plan_erasure(pool, WHERE, reason="asked to")
    assert plan.shards
    assert plan.seen.num_rows == 0
    assert sorted((info.path, info.size_bytes) for info in pool.list("")) == before


@pytest.mark.parametrize("where", ["corpus = 'nobody'", "no_such_column = 1", "1 = 1; DROP TABLE documents"])
def test_a_condition_that_names_no_document_is_refused(pool: Store, where: str) -> None:
    with pytest.raises(UserError):
        plan_erasure(pool, where, reason="asked to")


@pytest.mark.parametrize("dies_at", ["tombstones", "shards", "shard_index", "view_shards", "views", "commit", "delete"])
def test_an_erasure_that_died_and_is_done_again_ends_like_one_that_did_not(
    dies_at: str, pool: Store, sharded: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sharded.root, tmp_path / "whole")
    whole = open_store(str(tmp_path / "whole"))
    forget(plan_erasure(whole, WHERE, reason="asked to"))
    really_append, really_commit, really_delete = Job.append, Job.commit, Store.delete
    deleted: list[str] = []

    def append_until(self: Job, table: str, rows: Any, *, part: int) -> bool:
        done = really_append(self, table, rows, part=part)
        if table == dies_at:
            raise KeyboardInterrupt
        return done

    def commit_until(self: Job, summary: Any) -> None:
        really_commit(self, summary)
        if dies_at == "commit":
            raise KeyboardInterrupt

    def delete_until(self: Store, path: str) -> None:
        really_delete(self, path)
        deleted.append(path)
        if dies_at == "delete" and len(deleted) == 2:
            raise KeyboardInterrupt

    before = _tokens(pool)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "append", append_until)
        patch.setattr(Job, "commit", commit_until)
        patch.setattr(Store, "delete", delete_until)
        with pytest.raises(KeyboardInterrupt):
            forget(plan_erasure(pool, WHERE, reason="asked to"))
    if dies_at not in ("commit", "delete"):
        assert _tokens(pool) == before
    forget(plan_erasure(pool, WHERE, reason="asked to"))
    assert _tokens(pool) == _tokens(whole)
    assert {i.path for i in pool.list("pool")} == {i.path for i in whole.list("pool")}
    for table in ("tombstones", "shards", "shard_index", "views", "view_shards"):
        columns = "* EXCLUDE (written_at)" if table in ("tombstones", "views") else "*"
        ordered = f"SELECT {columns} FROM {table} ORDER BY ALL"
        assert Catalog(pool).rows(ordered) == Catalog(whole).rows(ordered), table


def test_the_index_of_a_rewritten_view_keeps_to_the_format(pool: Store) -> None:
    forget(plan_erasure(pool, WHERE, reason="asked to"))
    for view in Catalog(pool).rows("SELECT object FROM views"):
        index = json.loads(pool.get(view["object"]))
        assert index["version"] == 2
        assert all(entry["format"] == "mds" for entry in index["shards"])
