"""The made-up long run has the form of a real one: spans tile the batches, lie within their documents, and add up to their sums."""

from __future__ import annotations

import pytest

from manifests.catalog import Catalog
from manifests.jobs import report_nothing
from manifests.tables import create_store
from tools.bench.manifests_data import ISLANDS, SEQ_LEN, LongRun, Size


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    store = create_store(str(tmp_path_factory.mktemp("long") / "store"))
    run = LongRun(store, Size(rows=8_000, documents=1_200, rounds=3, documents_per_shard=50), seed=0)
    run.write_pool(report_nothing)
    run.train(report_nothing)
    return Catalog(store)


def test_spans_of_a_step_tile_its_batch(catalog: Catalog) -> None:
    gaps = catalog.rows(
        "SELECT count(*) AS n FROM (SELECT position, tokens, lead(position) OVER (PARTITION BY island, step ORDER BY position) AS next FROM consumption) "
        "WHERE next IS NOT NULL AND next <> position + tokens"
    )
    assert gaps == [{"n": 0}]
    sizes = catalog.rows(
        "SELECT DISTINCT sum(tokens)::BIGINT AS n, min(position) AS first FROM consumption GROUP BY island, step"
    )
    assert sizes == [{"n": 256 * SEQ_LEN, "first": 0}]


def test_spans_lie_within_their_documents_and_follow_each_other(catalog: Catalog) -> None:
    beyond = "SELECT count(*) AS n FROM consumption AS c JOIN shards AS s ON s.shard = c.shard AND s.position = c.shard_position WHERE token_start + c.tokens > s.tokens"
    assert catalog.rows(beyond) == [{"n": 0}]
    read = catalog.rows(
        "SELECT island, c.tier, sum(c.tokens)::BIGINT AS tokens, count(*) FILTER (WHERE token_start = 0) AS begun FROM consumption AS c GROUP BY ALL"
    )
    assert len(read) == ISLANDS * 4 - 1  # the first island leaves tier C out
    # A document is read on where it was left: no start other than 0 without the span before it.
    torn = """
        SELECT count(*) AS n FROM consumption AS a
        WHERE token_start > 0 AND NOT EXISTS (
            SELECT 1 FROM consumption AS b
            WHERE b.island = a.island AND b.shard = a.shard AND b.shard_position = a.shard_position AND b.token_start + b.tokens = a.token_start
        )
    """
    assert catalog.rows(torn) == [{"n": 0}]


def test_sums_by_shard_are_those_of_the_spans(catalog: Catalog) -> None:
    by = "SELECT checkpoint, shard, tier, {}::BIGINT AS spans, sum(tokens)::BIGINT AS tokens FROM {} GROUP BY ALL ORDER BY ALL"
    rows = catalog.rows(by.format("count(*)", "consumption"))
    assert catalog.rows(by.format("sum(spans)", "consumption_rounds")) == rows
    assert len(rows) > 100
