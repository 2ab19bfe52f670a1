"""Jobs under a policy: what a job may not read isn't there for it, and another policy makes another job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manifests.catalog import Catalog
from manifests.editions import rights_of, set_policy
from manifests.errors import UserError
from manifests.jobs import make_job
from manifests.store import Store
from pipeline.ingest import ingest
from pipeline.pool import ShardConfig, shard
from pipeline.retier import RetierConfig, retier
from pipeline.score import score
from pipeline.score_config import ScoreConfig
from pipeline.sources import SourceSpec
from pipeline.tier import TierConfig, tier
from pipeline.tokenizer import train_tokenizer
from pipeline.verify import verify

LICENSES = ("MIT", "GPL-3.0", None)
"""In turn; a document that names none has the licence `unknown`."""


def policy(*licenses: str, readers: str = "job:*") -> str:
    """What jobs may read, and nobody else."""
    everything = '[default]\nlicenses = ["*"]\naccess = ["*"]\n'
    return f'{everything}[[rule]]\nreaders = ["{readers}"]\nlicenses = {json.dumps(licenses)}\naccess = ["*"]\n'


@pytest.fixture
def scored(store: Store, tmp_path: Path) -> Store:
    """A store with documents of three licences, a tokenizer, and scores made by hand."""
    source = tmp_path / "texts.jsonl"
    lines = [{"text": f"text number {n} " * 3, "license": LICENSES[n % 3]} for n in range(30)]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    spec = SourceSpec(uri=str(source), format="jsonl", corpus="c", columns={"license": "license"})
    ingest(store, [spec], holdout_share=0.2)
    train_tokenizer(store, Catalog(store), vocab_size=300)
    job = make_job(store, "score", config={}, inputs={})
    rows = [
        row | {"method": "m", "stderr": 0.1, "checkpoint": "k", "probe": "p", "scored_at": 0, "direct": True, "job": job.id}
        for row in Catalog(store).rows("SELECT doc_id, source_row::DOUBLE AS score FROM documents WHERE split = 'train'")
    ]  # fmt: skip
    job.append("influence", rows, part=1)
    job.commit({})
    return store


def test_document_without_a_licence_is_unknown_and_is_kept_out_where_the_policy_says_so(scored: Store) -> None:
    tier(scored, config=TierConfig())
    set_policy(scored, policy("*", "!unknown"), "a test")
    summary = shard(scored, config=ShardConfig())
    catalog = Catalog(scored)
    assert {row["license"] for row in catalog.rows("SELECT DISTINCT license FROM documents")} == {"MIT", "GPL-3.0", "unknown"}  # fmt: skip
    assert {row["license"] for row in catalog.rows("SELECT license FROM shard_index")} == {"MIT", "GPL-3.0"}
    assert catalog.rows("SELECT sum(documents)::BIGINT AS n FROM views") == [{"n": summary["documents"]}]
    assert catalog.rows("SELECT count(*) AS n FROM documents WHERE license <> 'unknown'") == [{"n": summary["documents"]}]  # fmt: skip


def test_changed_policy_makes_a_new_job_and_one_that_changes_nothing_for_it_does_not(scored: Store) -> None:
    assert tier(scored, config=TierConfig())["tier_version"] == 1
    shard(scored, config=ShardConfig())
    set_policy(scored, policy("*", readers="job:*"), "everything, as before")
    assert tier(scored, config=TierConfig())["already_done"]
    assert shard(scored, config=ShardConfig())["already_done"]
    set_policy(scored, policy("mit"), "less")
    assert tier(scored, config=TierConfig())["tier_version"] == 2
    tiered = Catalog(scored).rows(
        "SELECT DISTINCT license FROM tiers JOIN documents USING (doc_id) WHERE tier_version = 2"
    )
    assert tiered == [{"license": "MIT"}]
    assert not shard(scored, config=ShardConfig()).get("already_done")
    set_policy(scored, policy("gpl*"), "something else")
    # The numbers of versions whose documents it can't see are taken all the same.
    assert tier(scored, config=TierConfig())["tier_version"] == 3


def test_retiering_takes_over_what_the_policy_allows_and_nothing_else(scored: Store) -> None:
    tier(scored, config=TierConfig())
    shard(scored, config=ShardConfig())
    for version, licenses, share in ((2, ("mit", "gpl*"), 0.4), (3, ("mit", "unknown"), 0.2), (4, ("*",), 0.6)):
        set_policy(scored, policy(*licenses), "another")
        assert tier(scored, config=TierConfig(share=share))["tier_version"] == version
        summary = retier(scored, config=RetierConfig(shards=ShardConfig()))
        assert (summary["shards"]["rewritten"] > 0, summary["documents"]["new"] > 0) == (version != 3, version != 2)
        catalog = Catalog(scored, rights=rights_of(scored, "job:shard"))
        said = catalog.rows("SELECT count(*) AS n FROM documents WHERE split = 'holdout' OR doc_id IN (SELECT doc_id FROM tiers WHERE tier_version = ?)", [version])  # fmt: skip
        shown = Catalog(scored).rows("SELECT sum(documents)::BIGINT AS n FROM views WHERE tier_version = ?", [version])
        assert said == shown
        assert verify(scored).findings == []


def test_job_with_nothing_to_read_names_the_rule(scored: Store) -> None:
    set_policy(scored, policy("apache*"), "nothing")
    with pytest.raises(UserError, match="no documents to score that job:score may read by rule 1 of policy"):
        score(scored, config=ScoreConfig())
    with pytest.raises(UserError, match="no documents that job:tier may read by rule 1"):
        tier(scored, config=TierConfig())
    catalog = Catalog(scored, rights=rights_of(scored, "job:tokenizer"))
    with pytest.raises(UserError, match="that job:tokenizer may read by rule 1"):
        train_tokenizer(scored, catalog, vocab_size=300)
