"""A tiny store and tiny runs on it, made up for the tests: what `atoll ingest`, `tier` and `shard` would have left, without the work.

Document number n has the corpus `c<n>`, so that provenance by corpus is provenance by document.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from manifests.jobs import make_job
from manifests.mds import encode_shard, index_json, object_path
from manifests.schemas import TIERS
from manifests.store import Store
from trainer.config import RunConfig
from trainer.feedback import SCALES
from trainer.island import Island
from trainer.members import say_finished
from trainer.messages import Message, decode, from_text
from trainer.run import Run, create_run
from trainer.syncer import Syncer
from trainer.tape import first_state, prepare_run, read_merge
from trainer.wire import unpack

U32: np.dtype[Any] = np.dtype("<u4")
PLACES = 1_000
"""Token = document · PLACES + place, in the pools of `put_shards`."""
VOCABULARY = 64
MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def doc_id(number: int) -> bytes:
    """Id of document `number`."""
    return xxhash.xxh3_128_digest(f"document {number}".encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShard:
    """A shard that lies in the pool."""

    name: str
    entry: dict[str, Any]
    documents: dict[int, int]
    """Document number → tokens."""


def put_shard(store: Store, documents: Mapping[int, NDArray[Any]]) -> TinyShard:
    """Puts documents into the pool as one shard."""
    shard = encode_shard([doc_id(n) for n in documents], list(documents.values()))
    store.put_content(object_path(shard.name), shard.data)
    return TinyShard(name=shard.name, entry=shard.entry, documents={n: len(t) for n, t in documents.items()})


def put_shards(store: Store, shards: Iterable[Mapping[int, int]]) -> tuple[bytes, list[TinyShard]]:
    """Puts shards of documents (number → length) whose tokens say their document and place; returns the index, too."""
    put = [put_shard(store, {n: _telling_tokens(n, length) for n, length in shard.items()}) for shard in shards]
    return index_json([shard.entry for shard in put]), put


def _telling_tokens(number: int, length: int) -> NDArray[Any]:
    return (number * PLACES + np.arange(length)).astype(U32)


def fabricate(
    store: Store,
    *,
    per_tier: int = 24,
    per_shard: int = 6,
    empty_tiers: tuple[str, ...] = (),
    licenses: tuple[str, ...] = ("unknown",),
) -> None:
    """Fills every table that a run reads: documents, tiers, tokenizer, pool, shards and views, committed as one job.

    The shards of a tier have the licences in turn.
    """
    rng = np.random.default_rng(7)
    job = make_job(store, "fabricate", config={"per_tier": per_tier, "empty": empty_tiers}, inputs={})
    documents, tiers, places, index, views, view_shards = [], [], [], [], [], []
    number = 0
    for tier in (*(t for t in TIERS if t not in empty_tiers), "holdout"):
        shards = []
        for _ in range(per_tier // per_shard):
            tokens = {
                n: rng.integers(0, VOCABULARY, int(rng.integers(5, 30))).astype("<u2")
                for n in range(number, number + per_shard)
            }
            number += per_shard
            shard = put_shard(store, tokens)
            shards.append(shard)
            origin = "synthetic" if len(shards) % 2 else "real"
            license_ = licenses[(len(shards) - 1) % len(licenses)]
            for position, (n, length) in enumerate(shard.documents.items()):
                documents.append(_document(n, origin, license_, "holdout" if tier == "holdout" else "train", job.id))
                places.append({"pool": "p", "shard": shard.name, "position": position, "doc_id": doc_id(n), "tokens": length, "job": job.id})  # fmt: skip
                if tier != "holdout":
                    tiers.append({"tier_version": 1, "doc_id": doc_id(n), "tier": tier, "score": 1.0 / (n + 1), "method": "m", "job": job.id})  # fmt: skip
            index.append(
                {
                    "pool": "p", "shard": shard.name, "tier": tier, "corpus": "made up", "origin": origin, "license": license_, "access": "open", "entry": json.dumps(shard.entry),
                    "documents": per_shard, "tokens": sum(shard.documents.values()), "raw_bytes": 1, "zip_bytes": 1,
                    "score_low": 0.0, "score_high": 1.0, "job": job.id,
                }
            )  # fmt: skip
            view_shards.append({"tier_version": 1, "pool": "p", "tier": tier, "shard": shard.name, "position": len(shards) - 1, "documents": per_shard, "tokens": sum(shard.documents.values()), "job": job.id})  # fmt: skip
        path = f"views/000001/p/{tier}/index.json"
        store.put_content(path, index_json([shard.entry for shard in shards]))
        total = sum(length for shard in shards for length in shard.documents.values())
        views.append({"tier_version": 1, "pool": "p", "tier": tier, "object": path, "shards": len(shards), "documents": per_tier, "tokens": total, "job": job.id})  # fmt: skip
    tables: dict[str, list[dict[str, Any]]] = {
        "documents": documents,
        "tier_versions": [{"tier_version": 1, "method": "m", "parameters": "{}", "thresholds": "{}", "job": job.id}],
        "tiers": tiers,
        "tokenizers": [{"tokenizer": "t", "object": "t.json", "vocab_size": VOCABULARY, "eos_id": 0, "origin": "made up", "job": job.id}],
        "pools": [{"pool": "p", "tokenizer": "t", "token_dtype": "uint16", "job": job.id}],
        "shards": places,
        "shard_index": index,
        "view_shards": view_shards,
        "views": views,
    }  # fmt: skip
    for table, rows in tables.items():
        job.append(table, rows, part=1)
    job.commit({})


def _document(number: int, origin: str, license_: str, split: str, job: str) -> dict[str, Any]:
    return {
        "doc_id": doc_id(number), "corpus": f"c{number}", "origin": origin, "license": license_, "access": "open", "split": split,
        "text_bytes": 10, "source_uri": "made up", "source_row": number, "job": job,
    }  # fmt: skip


def tiny_config(run: str, **options: Any) -> RunConfig:
    """A run of a few seconds: two islands, two fragments, eight rounds of one step."""
    defaults: dict[str, Any] = {
        "tier_version": 1, "pool": "p", "token_dtype": "uint16", "vocab_size": VOCABULARY, "model": MODEL, "num_islands": 2,
        "strategies": ("balanced", "conservative"), "steps": 8, "batch_size": 2, "seq_len": 16, "warmup_steps": 2, "num_fragments": 2,
        "sync_every": 2, "quorum": 1, "holdout_sequences": 2, "device": "cpu",
    }  # fmt: skip
    return RunConfig(run=run, **(defaults | options))


def start_run(store: Store, name: str, **options: Any) -> Run:
    """A run whose first fragments lie in the store."""
    run = create_run(store, tiny_config(name, **options))
    prepare_run(run)
    return run


def copy_store(store: Store, folder: Path) -> Store:
    """A store on a folder as it is now, in another folder."""
    shutil.copytree(store.root, folder)
    return Store(str(folder))


def silent(status: dict[str, Any]) -> None:
    """An emit that nobody hears."""


def unhurried(status: dict[str, Any]) -> None:
    """An emit that holds an island's step long enough for merges to come back meanwhile."""
    if status["state"] == "training":
        time.sleep(0.03)


def train_alone(run: Run, island: int) -> None:
    """Runs one island to its end, the same way every time; nobody merges meanwhile."""
    Island(run, island, emit=silent, in_background=False).train()


def tape_of(run: Run) -> list[dict[str, Any]]:
    """What the run's merges say, in their order."""
    anatomy = first_state(run)[1]
    merges: list[dict[str, Any]] = []
    while run.store.exists(run.merge_path(len(merges) + 1)):
        merges.append(read_merge(run, anatomy, len(merges) + 1)[1])
    return merges


def messages_of(run: Run, island: int) -> list[Message]:
    """The feedback that an island has sent, in its order."""
    infos = sorted(run.store.list(run.outer_folder(island)), key=lambda info: info.path)
    texts = [text for info in infos for text in unpack(run.store.get(info.path), name=info.path)[1]["feedback"]]
    return [decode(from_text(text), SCALES) for text in texts]


def train_together(run: Run) -> float:
    """Runs all islands and a syncer at once, each in a thread; returns the syncer's holdout loss."""
    # Made one after the other: building a model seeds torch's one generator.
    islands = [Island(run, number, emit=unhurried) for number in range(run.config.num_islands)]
    syncer = Syncer(run, emit=silent)
    errors: list[BaseException] = []

    def live(island: Island) -> None:
        try:
            island.train()
        except BaseException as e:
            errors.append(e)
            say_finished(run, island.island, step=0)  # or the syncer would wait for ever

    threads = [threading.Thread(target=live, args=(island,)) for island in islands]
    for thread in threads:
        thread.start()
    loss = syncer.serve()
    assert loss is not None
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return loss
