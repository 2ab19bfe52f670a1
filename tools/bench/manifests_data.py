"""A store of the size of a long run, made up: documents in shards, tiers, and what four islands consumed, in the order that streams really read.

Nothing is trained and there is no text; every row has the form, the order and the spread of values that a run's rows have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from manifests.consumption import append_consumption
from manifests.jobs import Job, Report, make_job
from manifests.schemas import TABLES, TIERS
from manifests.store import Store
from manifests.tables import append
from trainer.order import TierOrder

POOL = "bench-uint32"
RUN = "long"
ISLANDS = 4
FRAGMENTS = 4
SEQ_LEN = 2048
MIXES = ((0.4, 0.4, 0.2, 0.0), (0.2, 0.4, 0.3, 0.1), (0.1, 0.3, 0.4, 0.2), (0.2, 0.4, 0.3, 0.1))
# corpus, origin, generator, prompt, license, access
KINDS = (
    ("web", "real", None, None, "odc-by", "public"),
    ("wikipedia", "real", None, None, "CC-BY-SA-4.0", "public"),
    ("code", "real", None, None, "MIT", "public"),
    ("code", "real", None, None, "GPL-3.0", "internal"),
    ("forum", "real", None, None, "CC-BY-4.0", "public"),
    ("finephrase", "synthetic", "SmolLM2-1.7B-Instruct", "faq", "odc-by", "public"),
    ("finephrase", "synthetic", "SmolLM2-1.7B-Instruct", "math", "odc-by", "public"),
    ("finephrase", "synthetic", "SmolLM2-1.7B-Instruct", "table", "odc-by", "public"),
    ("finephrase", "synthetic", "SmolLM2-1.7B-Instruct", "tutorial", "odc-by", "public"),
)
RARE_KIND, RARE_SHARDS = 3, 4
"""What slipped in and shouldn't have: a licence that few shards carry."""
_KIND = ("corpus", "origin", "generator", "prompt", "license", "access")
_PART_SHARDS = 250
_STEP_SEQUENCES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    rows: int
    """Consumption rows, about."""
    documents: int
    rounds: int
    """Rounds of each island; each is one commit."""
    documents_per_shard: int = 2_000

    @property
    def shards(self) -> int:
        """Shards in the pool."""
        return self.documents // self.documents_per_shard


class LongRun:
    """The made-up pool, and the streams of its islands."""

    def __init__(self, store: Store, size: Size, *, seed: int) -> None:
        self.store = store
        self.size = size
        self.rng = np.random.default_rng(seed)
        self.names = [xxhash.xxh3_128_hexdigest(f"{seed}/{n}".encode()) for n in range(size.shards)]
        self.tier_of = np.arange(size.shards) * len(TIERS) // size.shards
        self.kind_of = self.rng.choice(len(KINDS), size.shards, p=_kind_shares())
        self.kind_of[self.rng.choice(size.shards, RARE_SHARDS, replace=False)] = RARE_KIND
        lengths = self.rng.lognormal(6.3, 0.8, (size.shards, size.documents_per_shard))
        self.lengths = np.clip(lengths, 16, 30_000).astype(np.int32)
        self.append_rates: list[float] = []
        """Rows a second of every append of consumption, its sums included."""
        self.rows = 0

    def write_pool(self, report: Report) -> None:
        """Documents, tiers, places and views, as `atoll ingest`, `tier` and `shard` would leave them."""
        job = make_job(self.store, "bench", config={"size": str(self.size)}, inputs={})
        size = self.size
        for part, first in enumerate(range(0, size.shards, _PART_SHARDS), start=1):
            shards = np.arange(first, min(first + _PART_SHARDS, size.shards))
            self._write_documents(job, shards, part)
            report("documents", int(shards[-1] + 1) * size.documents_per_shard, size.documents)
        job.append("shard_index", [self._index_row(n, job.id) for n in range(size.shards)], part=1)
        for table, rows in self._view_rows(job.id).items():
            job.append(table, rows, part=1)
        versions = {"tier_version": 1, "method": "made up", "parameters": "{}", "thresholds": "{}", "job": job.id}
        job.append("tier_versions", [versions], part=1)
        job.commit({})

    def train(self, report: Report) -> None:
        """Consumption, checkpoints, merges and feedback of all islands, round by round."""
        append(self.store, "runs", [{"run": RUN, "config": "{}", "command": "bench", "code_version": "0"}])
        streams = [_IslandStream(self, island) for island in range(ISLANDS)]
        per_commit = self.size.rows // (self.size.rounds * ISLANDS)
        for round_ in range(1, self.size.rounds + 1):
            for island, stream in enumerate(streams):
                self._close_round(island, round_, stream.take(per_commit, round_=round_))
            self._merge(round_, streams)
            report("consumption rows", self.rows, self.size.rows)

    def _write_documents(self, job: Job, shards: npt.NDArray[np.int64], part: int) -> None:
        per_shard = self.size.documents_per_shard
        count = len(shards) * per_shard
        ids = random_ids(self.rng, count)
        numbers = np.repeat(shards, per_shard)
        tokens = self.lengths[shards].reshape(-1)
        common: dict[str, Any] = {"doc_id": ids, "job": repeated(job.id, count)}
        kinds = {name: chosen([kind[i] for kind in KINDS], self.kind_of[numbers]) for i, name in enumerate(_KIND)}
        documents = kinds | {
            "parent_id": pa.nulls(count, pa.binary()),
            "split": repeated("train", count),
            "label": pa.nulls(count, pa.string()),
            "finish_reason": pa.nulls(count, pa.string()),
            "text_bytes": pa.array(tokens.astype(np.int64) * 4),
            "tokens": pa.array(tokens.astype(np.int64)),
            "source_uri": repeated(f"s3://corpora/part-{part:05d}.parquet", count),
            "source_row": pa.array(np.arange(count)),
        }
        tier = chosen(list(TIERS), self.tier_of[numbers])
        tiers = {
            "tier_version": pa.array(np.ones(count, dtype=np.int32)),
            "tier": tier,
            "score": pa.array(self.rng.standard_normal(count)),
            "method": repeated("made up", count),
        }
        places = {
            "pool": repeated(POOL, count),
            "shard": chosen(self.names, numbers),
            "position": pa.array(np.tile(np.arange(per_shard, dtype=np.int32), len(shards))),
            "tokens": pa.array(tokens),
        }
        for table, columns in (("documents", documents), ("tiers", tiers), ("shards", places)):
            job.append(table, as_table(table, common | columns), part=part)

    def _index_row(self, shard: int, job: str) -> dict[str, Any]:
        tokens = int(self.lengths[shard].sum())
        return dict(zip(_KIND, KINDS[self.kind_of[shard]], strict=True)) | {
            "pool": POOL,
            "shard": self.names[shard],
            "tier": TIERS[self.tier_of[shard]],
            "entry": "{}",
            "documents": self.size.documents_per_shard,
            "tokens": tokens,
            "raw_bytes": tokens * 4,
            "zip_bytes": tokens * 2,
            "score_low": 0.0,
            "score_high": 1.0,
            "job": job,
        }

    def _view_rows(self, job: str) -> dict[str, list[dict[str, Any]]]:
        views, shards = [], []
        for number, tier in enumerate(TIERS):
            members = np.flatnonzero(self.tier_of == number)
            view = {"tier_version": 1, "pool": POOL, "tier": tier, "job": job}
            sums = {
                "documents": len(members) * self.size.documents_per_shard,
                "tokens": int(self.lengths[members].sum()),
            }
            views.append(view | sums | {"object": f"views/{tier}/index.json", "shards": len(members)})
            shards += [
                view
                | {
                    "shard": self.names[shard],
                    "position": position,
                    "documents": self.size.documents_per_shard,
                    "tokens": int(self.lengths[shard].sum()),
                }
                for position, shard in enumerate(members)
            ]
        return {"view_shards": shards, "views": views}

    def _close_round(self, island: int, round_: int, spans: pa.Table) -> None:
        began = time.monotonic()
        append_consumption(self.store, spans, writer=f"consumption/{RUN}/{island}/0", sequence=round_)
        self.append_rates.append(spans.num_rows / (time.monotonic() - began))
        self.rows += spans.num_rows

    def _merge(self, round_: int, streams: list[_IslandStream]) -> None:
        """The islands' checkpoints of a round, a merge of one fragment from all of them, and the global checkpoint after it."""
        fragment = (round_ - 1) % FRAGMENTS
        version = (round_ - 1) // FRAGMENTS + 1
        seen = [(round_ - 1 + FRAGMENTS - 1 - f) // FRAGMENTS for f in range(FRAGMENTS)]
        rows = [_checkpoint(island, round_, seen, step=stream.step) for island, stream in enumerate(streams)]
        merged = [row["checkpoint"] for row in rows]
        seen[fragment] = version
        rows.append(
            _checkpoint(-1, round_, seen, step=sum(s.step for s in streams)) | {"merged": merged, "parent": None}
        )
        append(self.store, "checkpoints", rows)
        contributions = [
            {"island": i, "checkpoint": c.hex(), "base_version": version - 1, "tokens": 1, "steps": 1, "weight": 1.0}
            for i, c in enumerate(merged)
        ]
        detail = json.dumps({"merge": round_, "contributions": contributions})
        append(
            self.store,
            "events",
            [{"run": RUN, "kind": "merge", "fragment": fragment, "version": version, "detail": detail}],
        )
        told = {"loss_trend": -0.01, "convergence_rate": -1e-4, "generalization_gap": 0.1, "step_time_s": 1.0}
        effects = {
            f"effectiveness_{tier.lower()}": float(e)
            for tier, e in zip(TIERS, self.rng.normal(0, 0.02, 4), strict=True)
        }
        feedback = [
            {"run": RUN, "island": i, "sequence": round_, "round": round_, **told, **effects} for i in range(ISLANDS)
        ]
        append(self.store, "feedback", feedback)


class _IslandStream:
    """Spans of one island, in the order in which it reads."""

    def __init__(self, run: LongRun, island: int) -> None:
        self.step = 0
        self._run = run
        self._island = island
        self._rng = np.random.default_rng((7, island))
        self._tiers = [_documents(run, island, tier) for tier in range(len(TIERS))]
        self._left: list[npt.NDArray[np.int64]] = [np.empty((4, 0), dtype=np.int64) for _ in TIERS]

    def take(self, num_rows: int, *, round_: int) -> pa.Table:
        """About so many spans, as rows of `consumption` that count with the island's checkpoint of a round."""
        rows_per_sequence = 1 + SEQ_LEN / float(self._run.lengths.mean())
        steps = max(1, round(num_rows / rows_per_sequence / _STEP_SEQUENCES))
        num_sequences = steps * _STEP_SEQUENCES
        borders = np.round(np.cumsum((0.0, *MIXES[self._island])) * num_sequences).astype(int)
        counts = np.diff(borders)
        slots = np.empty(num_sequences, dtype=np.int64)
        slots[np.argsort(np.concatenate([_spread(count) for count in counts]), kind="stable")] = np.arange(
            num_sequences
        )
        parts = []
        for tier in np.flatnonzero(counts):
            shard, position, start, tokens, offset = self._cut(tier, int(counts[tier]) * SEQ_LEN)
            place = slots[borders[tier] + offset // SEQ_LEN] * SEQ_LEN + offset % SEQ_LEN
            parts.append(np.stack([place, shard, position, start, tokens, np.full(len(shard), tier)]))
        spans = np.concatenate(parts, axis=1)
        spans = spans[:, np.argsort(spans[0], kind="stable")]
        table = self._rows(spans, round_)
        self.step += steps
        return table

    def _cut(self, tier: int, num_tokens: int) -> tuple[npt.NDArray[np.int64], ...]:
        """The tier's next tokens as spans: shard, position, start in the document, tokens, offset in the taken tokens."""
        taken = [self._left[tier]]
        while sum(int(piece[3].sum()) for piece in taken) < num_tokens:
            taken.append(next(self._tiers[tier]))
        shard, position, start, tokens = np.concatenate(taken, axis=1)
        ends = np.cumsum(tokens)
        used = int(np.searchsorted(ends, num_tokens)) + 1
        rest = np.stack([shard[used - 1 :], position[used - 1 :], start[used - 1 :], tokens[used - 1 :]])
        cut = int(ends[used - 1]) - num_tokens  # what is left of the last document used
        rest[2, 0] += rest[3, 0] - cut
        rest[3, 0] = cut
        self._left[tier] = rest if cut else rest[:, 1:]
        begins = ends[:used] - tokens[:used]
        offsets = np.union1d(begins, np.arange(0, num_tokens, SEQ_LEN))
        owner = np.searchsorted(begins, offsets, side="right") - 1
        lengths = np.diff(np.append(offsets, num_tokens))
        return shard[owner], position[owner], start[owner] + offsets - begins[owner], lengths, offsets

    def _rows(self, spans: npt.NDArray[np.int64], round_: int) -> pa.Table:
        place, shard, position, start, tokens, tier = spans
        count = len(place)
        batch = _STEP_SEQUENCES * SEQ_LEN
        origins = np.asarray([KINDS[k][1] == "synthetic" for k in self._run.kind_of])[shard].astype(np.int64)
        loss = 2.0 + 3.0 / np.sqrt(1 + self.step) + 0.1 * tier + 0.5 * self._rng.standard_normal(count)
        columns: dict[str, Any] = {
            "run": repeated(RUN, count),
            "island": pa.array(np.full(count, self._island, dtype=np.int32)),
            "incarnation": pa.array(np.zeros(count, dtype=np.int32)),
            "step": pa.array(self.step + 1 + place // batch),
            "position": pa.array((place % batch).astype(np.int32)),
            "shard": chosen(self._run.names, shard),
            "shard_position": pa.array(position.astype(np.int32)),
            "tier": chosen(list(TIERS), tier),
            "origin": chosen(["real", "synthetic"], origins),
            "token_start": pa.array(start.astype(np.int32)),
            "tokens": pa.array(tokens.astype(np.int32)),
            "loss": pa.array(loss.astype(np.float32)),
            "checkpoint": repeated(checkpoint_of(self._island, round_), count),
            "contribution": pa.nulls(count, pa.float32()),
        }
        return as_table("consumption", columns)


def _documents(run: LongRun, island: int, tier: int) -> Iterator[npt.NDArray[np.int64]]:
    """A tier's documents (shard, position, 0, tokens) in an island's order, a window at a time, pass after pass."""
    members = np.flatnonzero(run.tier_of == tier)
    number = 0
    while True:
        order = TierOrder([run.size.documents_per_shard] * len(members), key=f"bench/{island}/{tier}/{number}")
        first = 0
        while first < order.num_documents:
            _, local, position = order.window(first)
            first += len(local)
            shard = members[local]
            yield np.stack([shard, position, np.zeros_like(shard), run.lengths[shard, position].astype(np.int64)])
        number += 1


def checkpoint_of(island: int, round_: int) -> bytes:
    """Id of a checkpoint of the made-up run."""
    return xxhash.xxh3_128_digest(f"{RUN}/{island}/{round_}".encode())


def _checkpoint(island: int, round_: int, clock: list[int], *, step: int) -> dict[str, Any]:
    counters = {f"tokens_{tier.lower()}": 0 for tier in TIERS}
    return {
        "checkpoint": checkpoint_of(island, round_), "run": RUN, "island": island, "incarnation": 0, "round": round_, "step": step,
        "tokens": step * _STEP_SEQUENCES * SEQ_LEN, **counters, "clock": list(clock),
        "parent": checkpoint_of(island, round_ - 1) if round_ > 1 else None, "merged": [], "object": "o", "hash": "h", "size_bytes": 1,
        "stream": "{}", "mixture": "{}", "anchor": True, "loss": 2.0, "holdout_loss": 2.0,
    }  # fmt: skip


def _kind_shares() -> npt.NDArray[np.float64]:
    shares = np.asarray([6, 1, 1, 0, 0.5, 1, 1, 1, 1])
    return shares / shares.sum()


def _spread(count: int) -> npt.NDArray[np.float64]:
    """Even places in [0, 1) for the sequences of one tier."""
    return (np.arange(count) + 0.5) / max(count, 1)


def random_ids(rng: np.random.Generator, count: int) -> pa.Array[Any]:
    """Ids like hashes."""
    offsets = pa.py_buffer(np.arange(0, 16 * count + 1, 16, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(rng.bytes(16 * count))])


def repeated(value: Any, count: int) -> pa.Array[Any]:
    """One value for all rows."""
    return pa.repeat(pa.scalar(value), count)


def chosen(values: list[Any], which: npt.NDArray[np.int64]) -> pa.Array[Any]:
    """A column by number of its values."""
    return pa.array(values, pa.string()).take(pa.array(which))


def as_table(name: str, columns: dict[str, Any]) -> pa.Table:
    """Columns as rows of a table."""
    schema = TABLES[name].schema
    return pa.table([columns[column].cast(schema.field(column).type) for column in schema.names], schema=schema)
