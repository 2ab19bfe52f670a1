"""Every job that writes a store, as small as it gets and the same in every attempt: what `test_kills` kills at each of its writes.

A job stands on the store that those before it have left. Each is called in a process of its own (forks.py), so it may set what it likes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers.models.llama.modeling_llama  # noqa: F401  as below: else imported in every process anew

import pipeline.bands
import pipeline.forget
import pipeline.ingest
import pipeline.pool
import pipeline.retier
import pipeline.scoring_model
import pipeline.tier
import tools.cli  # noqa: F401  all commands of the app
import trainer.syncer
from manifests.catalog import Catalog
from manifests.tables import create_store, open_store
from manifests.upkeep import compact, vacuum
from pipeline.score import score
from pipeline.score_config import ScoreConfig
from pipeline.sources import SourceSpec
from pipeline.tokenizer import train_tokenizer
from tools.app import app
from trainer.config import RunConfig
from trainer.island import Island
from trainer.remedies import apply_rollback
from trainer.rollback import plan_rollback
from trainer.run import create_run
from trainer.syncer import Syncer
from trainer.tape import prepare_run

RUN = "r"
_MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_WORDS = ["tide", "reef", "coral", "lagoon", "island", "current", "sand", "shell", "wave", "palm", "anchor", "harbour"]
_SOURCE, _POLICY = "reef.parquet", "policy.toml"


def write_sources(folder: Path) -> None:
    """The text that is ingested, and a policy."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(_WORDS, 3 + n % 20).tolist()) + f" {n}" for n in range(48)]
    pq.write_table(pa.table({"text": texts}), folder / _SOURCE)
    (folder / _POLICY).write_text('[default]\nlicenses = ["*", "!*-NC-*"]\naccess = ["public"]\n')


def run_job(name: str, uri: str, sources: str) -> None:
    """Runs a job on a store."""
    sys.argv = ["atoll", name]  # jobs and runs keep the command line
    torch.set_num_threads(1)
    JOBS[name](uri, Path(sources))


def _create(uri: str, sources: Path) -> None:
    create_store(uri)


def _ingest(uri: str, sources: Path) -> None:
    spec = SourceSpec(uri=str(sources / _SOURCE), format="parquet", corpus="reef")
    pipeline.ingest.ingest(create_store(uri), [spec], holdout_share=0.3, rows_per_part=30)


def _tokenizer(uri: str, sources: Path) -> None:
    store = open_store(uri)
    train_tokenizer(store, Catalog(store), vocab_size=300)


def _score(uri: str, sources: Path) -> None:
    config = ScoreConfig(
        model=_MODEL, steps=6, batch_size=4, seq_len=16, num_checkpoints=2, max_document_tokens=12, num_folds=2,
        max_holdout_documents=8, learning_rate=1e-2, device="cpu",
    )  # fmt: skip
    # Two partitions, of so few documents.
    object.__setattr__(config, "partition_size", 20)
    score(open_store(uri), config=config)


def _tier(uri: str, sources: Path) -> None:
    pipeline.tier._PART_ROWS = 20
    pipeline.tier.tier(open_store(uri), config=pipeline.tier.TierConfig())


def _shard(uri: str, sources: Path) -> None:
    pipeline.bands._PART_DOCUMENTS = 12
    pipeline.pool.shard(open_store(uri), config=pipeline.pool.ShardConfig(shard_bytes=1024))


class _Stepped(Island):
    """An island with its syncer in the same thread: whatever there is to merge is merged and received before the next step, in every attempt."""

    syncer: Syncer | None = None

    def _receive(self) -> None:
        if self.syncer is not None:
            self.syncer.sweep()
            self.receive_now()


def _train(uri: str, sources: Path) -> None:
    trainer.syncer._MEMBERS_EVERY_S = 0.0
    store = open_store(uri)
    pool = Catalog(store).rows("SELECT pool, token_dtype FROM pools")[0]
    config = RunConfig(
        run=RUN, tier_version=1, **pool, vocab_size=300, model=_MODEL, num_islands=1, strategies=("adaptive",), steps=3,
        batch_size=8, seq_len=16, warmup_steps=2, num_fragments=2, sync_every=2, quorum=1, grace=0.0, holdout_sequences=2, device="cpu",
    )  # fmt: skip
    run = create_run(store, config)
    prepare_run(run)
    syncer = Syncer(run, emit=lambda status: None, in_background=False)
    island = _Stepped(run, 0, emit=lambda status: None, in_background=False)
    island.syncer = syncer
    island.train()
    syncer.serve()


def _rollback(uri: str, sources: Path) -> None:
    store = open_store(uri)
    # The documents that came last: so that some merges stay and some go.
    late = """
        SELECT source_row FROM consumption JOIN documents USING (doc_id) WHERE run = ?
        GROUP BY ALL HAVING min(step) = 2 ORDER BY source_row
    """
    rows = [row["source_row"] for row in Catalog(store).rows(late, [RUN])]
    apply_rollback(store, plan_rollback(store, RUN, f"source_row IN ({', '.join(map(str, rows))})"))


def _strategy(uri: str, sources: Path) -> None:
    _command("strategies", "set", "careful", "--weights", "S=.1,A=.5,B=.4", "--reason", "a test", "--store", uri)


def _policy(uri: str, sources: Path) -> None:
    _command("policy", "set", str(sources / _POLICY), "--reason", "a test", "--store", uri)


def _forget(uri: str, sources: Path) -> None:
    pipeline.forget._PART_SHARDS = 2
    plan = pipeline.forget.plan_erasure(open_store(uri), "source_row % 16 = 3", reason="asked to")
    pipeline.forget.forget(plan)


def _retier(uri: str, sources: Path) -> None:
    pipeline.tier._PART_ROWS = 20
    pipeline.bands._PART_DOCUMENTS = 6
    pipeline.tier.tier(open_store(uri), config=pipeline.tier.TierConfig(share=0.3))
    shards = pipeline.pool.ShardConfig(shard_bytes=1024)
    pipeline.retier.retier(open_store(uri), config=pipeline.retier.RetierConfig(shards=shards))


def _compact(uri: str, sources: Path) -> None:
    compact(open_store(uri))


def _vacuum(uri: str, sources: Path) -> None:
    store = open_store(uri)
    for number in range(3):
        store.put_content(f"tables/events/part-{number}.parquet", b"what a killed append leaves")
    # As if long after the last write: nothing is kept for being new.
    vacuum(store, dry_run=False, now=datetime.now(UTC) + timedelta(days=365))


def _command(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


JOBS: dict[str, Callable[[str, Path], None]] = {
    "create": _create,
    "ingest": _ingest,
    "tokenizer": _tokenizer,
    "score": _score,
    "tier": _tier,
    "shard": _shard,
    "train": _train,
    "rollback": _rollback,
    "strategy": _strategy,
    "policy": _policy,
    "forget": _forget,
    "retier": _retier,
    "compact": _compact,
    "vacuum": _vacuum,
}
"""In the order in which they follow each other."""
