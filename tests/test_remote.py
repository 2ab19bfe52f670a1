"""The way of a corpus on S3, over a line that loses, breaks and spoils replies: ingest, shard, train, re-tier under the run, resume."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from manifests.catalog import Catalog
from manifests.store import Store
from pipeline.pool import ShardConfig, shard
from pipeline.retier import RetierConfig, retier
from tests.pipeline.test_pool import tiered_store
from tests.pipeline.test_retier import add_version, tiers_of
from tools.chaos.s3_proxy import S3Proxy
from trainer.island import Island
from trainer.plan import configure_run
from trainer.run import create_run, load_run
from trainer.tape import prepare_run

SHARDS = ShardConfig(shard_bytes=8_000)
MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


class Killed(Exception):
    """What ends an island half-way."""


class Line:
    """Spoils replies at fixed intervals: any read can be refused, and what's read of the pool comes broken or damaged, too."""

    def __init__(self) -> None:
        self.spoilt: Counter[str] = Counter()
        self._reads = self._pool_reads = 0

    def on_read(self, path: str) -> Literal["pass", "unavailable", "broken", "corrupt"]:
        """How the next reply passes."""
        self._reads += 1
        how: Literal["pass", "unavailable", "broken", "corrupt"] = "unavailable" if self._reads % 23 == 0 else "pass"
        if "/pool/" in path:
            self._pool_reads += 1
            if self._pool_reads % 5 == 0:
                how = "broken" if self._pool_reads % 10 else "corrupt"
        self.spoilt[how] += 1
        return how


def _island_dies_at(run: Any, step: int) -> None:
    def emit(status: dict[str, Any]) -> None:
        if status["state"] == "training" and status["step"] == step:
            raise Killed

    with pytest.raises(Killed):
        Island(run, 0, emit=emit).train()


def test_a_corpus_goes_its_way_on_s3_over_a_bad_line(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("manifests.shards._PAUSE_S", 0.01)
    line = Line()
    with S3Proxy(os.environ["AWS_ENDPOINT_URL"], on_read=line.on_read) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = tiered_store(tmp_path, s3_environment)
        shard(store, config=SHARDS)
        config = configure_run(
            store, run="r", tier_version=None, num_islands=1, strategies=("uniform",), steps=16, batch_size=2, seq_len=64, quorum=1,
            num_fragments=2, sync_every=4, holdout_sequences=2, warmup_steps=2, model=MODEL, device="cpu",
        )  # fmt: skip
        run = create_run(store, config)
        prepare_run(run)
        _island_dies_at(run, 7)
        moved = {doc_id: (tier if n % 3 else "B", score) for n, (doc_id, (tier, score)) in enumerate(sorted(tiers_of(store, 1).items()))}  # fmt: skip
        add_version(store, moved)
        retier(store, config=RetierConfig(shards=SHARDS))
        Island(load_run(Store(s3_environment), "r"), 0, emit=lambda _: None).train()
        catalog = Catalog(store)
        rows = catalog.rows("SELECT step, doc_id, tier, token_start, tokens FROM consumption WHERE run = 'r'")
        taken = catalog.rows("SELECT round FROM events WHERE run = 'r' AND kind = 'tier_version_taken'")
    assert all(line.spoilt[how] for how in ("unavailable", "broken", "corrupt"))
    read = Counter(
        (r["doc_id"], place) for r in rows for place in range(r["token_start"], r["token_start"] + r["tokens"])
    )
    assert sum(read.values()) == 16 * 2 * 64
    assert max(read.values()) == 1
    [at] = [row["round"] for row in taken]
    assert (
        1 <= at <= 3
    )  # records are left to the background: how many of the three rounds the island has lived to commit
    assert all(row["tier"] == moved[row["doc_id"]][0] for row in rows if row["step"] > 2 * at)
