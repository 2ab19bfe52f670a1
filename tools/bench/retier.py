"""What a new tier version costs by re-tiering, beside sharding the same documents from their texts again.

A corpus of made-up texts with made-up scores, for neither matters to the cost. Two changes: the threshold of S moves, so that 2 % of the documents go from A to S; and the scores are
disturbed, so that 5 % of the documents change tier. Each time the version before is the same first one. The tier job itself, which both ways need, is left out.

A shard that holds a document of another tier can stay in no view, so it is rewritten, movers and stayers. How many shards that makes follows from the scores and the size of a shard
alone: beside what was written stands that share, for shards of this size and for smaller ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.catalog import Catalog
from manifests.jobs import make_job
from manifests.schemas import TABLES, TIERS
from manifests.store import Store
from manifests.tables import create_store
from pipeline.ingest import ingest
from pipeline.pool import ShardConfig, shard
from pipeline.retier import RetierConfig, retier
from pipeline.sources import SourceSpec
from pipeline.tokenizer import train_tokenizer
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.memory import write_corpus
from tools.output import STDERR

_BORDERS = (0.2, 0.5, 0.9)
"""Shares of the documents above which A, B and C begin."""
_MOVED_BORDERS = (0.22, 0.5, 0.9)
_FULL, _QUICK = (250_000, 1_000_000), (5_000,)
_MOVED = 0.05
_PART_ROWS = 500_000
"""Rows that a tier job appends at once."""
_SHARD_DOCUMENTS = (4_000, 400, 40, 4)
"""Documents of a shard, for the shares; of these documents, some 4,000 make a MiB."""
Scores = npt.NDArray[np.float64]


def measure(quick: bool) -> Mapping[str, Figure]:
    """Both changes, at each size; the last size gives the named ratios."""
    figures: dict[str, Figure] = {}
    sizes = _QUICK if quick else _FULL
    for num_documents in sizes:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            found = _one_size(Path(folder), num_documents)
        for name, (value, unit, meaning) in found.items():
            if num_documents == sizes[-1] and unit == "ratio":
                figures[name] = Figure(values=[value], unit=unit, meaning=f"{meaning}, {num_documents:,} documents")
            else:
                figures[f"{name}, {num_documents:,} documents"] = Figure(values=[value], unit=unit, meaning=meaning)
            STDERR.print(f"  {num_documents:,} documents: {name} {value:.4g} {unit}", markup=False)
    return dict(sorted(figures.items(), key=lambda item: item[1].unit != "ratio"))


def _one_size(folder: Path, num_documents: int) -> dict[str, tuple[float, str, str]]:
    store = create_store(str(folder / "store"))
    write_corpus(folder / "texts.parquet", num_documents)
    spec = SourceSpec(uri=str(folder / "texts.parquet"), format="parquet", corpus="made")
    ingest(store, [spec], holdout_share=0.0)
    train_tokenizer(store, Catalog(store), vocab_size=1024, max_bytes=1_000_000)
    ids = Catalog(store).query("SELECT doc_id FROM documents ORDER BY doc_id")["doc_id"].combine_chunks()
    scores = np.random.default_rng(0).normal(size=len(ids))
    disturbed = _disturbed(scores)
    _add_version(store, 1, ids, scores, _BORDERS)
    first_s, _ = _time_shard(store, 1)
    found = {"full_s": (first_s, "s", "`atoll shard` of the first version")}
    version = 1
    for change, changed, borders in (("threshold", scores, _MOVED_BORDERS), ("five_percent", disturbed, _BORDERS)):
        _add_version(store, version + 1, ids, changed, borders)
        _add_version(store, version + 2, ids, changed, borders)
        began = time.monotonic()
        summary = retier(store, config=RetierConfig(shards=ShardConfig(tier_version=version + 1), base=1))
        seconds = time.monotonic() - began
        full_s, full_bytes = _time_shard(store, version + 2)
        version += 2
        moved = sum(summary["documents"]["moved"].values()) / len(ids)
        told = f"{moved:.1%} of the documents move, {summary['shards']['rewritten']} of {_num_shards(summary)} shards are rewritten"
        found |= {
            f"{change}_time_ratio": (seconds / full_s, "ratio", f"time of `atoll retier` over that of `atoll shard`; {told}"),
            f"{change}_bytes_ratio": (summary["zip_bytes"]["written"] / full_bytes, "ratio", "bytes of the shards written, likewise"),
            f"{change}_s": (seconds, "s", "`atoll retier`"),
            f"{change}_full_s": (full_s, "s", "`atoll shard` of the same tiers"),
        }  # fmt: skip
    for num in _SHARD_DOCUMENTS:
        share = _share_with_movers(scores, disturbed, num)
        found[f"five_percent_least_ratio, {num:,} a shard"] = (
            share,
            "ratio",
            f"share of the documents in shards of {num:,} neighbours that hold a mover",
        )
    return found


def _share_with_movers(before: Scores, after: Scores, shard_documents: int) -> float:
    """Share of the documents that lie in a shard with a document that changes tier, where shards hold so many of one tier, in the order of their scores."""
    tiers = _tiers(before, _BORDERS)
    moves = tiers != _tiers(after, _BORDERS)
    num = 0
    for tier in range(len(TIERS)):
        members = np.flatnonzero(tiers == tier)
        ordered = moves[members[np.argsort(-before[members])]]
        starts = np.arange(0, len(ordered), shard_documents)
        sizes = np.diff(starts, append=len(ordered))
        num += int(sizes[np.add.reduceat(ordered.astype(np.int64), starts) > 0].sum())
    return num / len(before)


def _num_shards(summary: Mapping[str, Any]) -> int:
    shards = summary["shards"]
    return int(shards["untouched"] + shards["reassigned"] + shards["rewritten"])


def _disturbed(scores: Scores) -> Scores:
    """Scores with as much noise as moves _MOVED of the documents to another tier."""
    noise = np.random.default_rng(1).normal(size=len(scores))
    before = _tiers(scores, _BORDERS)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if (_tiers(scores + middle * noise, _BORDERS) != before).mean() < _MOVED:
            low = middle
        else:
            high = middle
    return scores + high * noise


def _tiers(scores: Scores, borders: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """The number of each document's tier."""
    return np.searchsorted(-np.quantile(scores, [1 - border for border in borders]), -scores)


def _add_version(store: Store, version: int, ids: Any, scores: Scores, borders: tuple[float, ...]) -> None:
    job = make_job(store, "tier", config={"bench": version}, inputs={})
    num = len(ids)
    columns = {
        "tier_version": pa.array(np.full(num, version, dtype=np.int32)),
        "doc_id": ids.cast(pa.binary()),
        "tier": pa.DictionaryArray.from_arrays(pa.array(_tiers(scores, borders).astype(np.int8)), pa.array(TIERS)).cast(
            pa.string()
        ),
        "score": pa.array(scores),
        "method": pa.repeat(pa.scalar("made", pa.string()), num),
        "job": pa.repeat(pa.scalar(job.id, pa.string()), num),
    }
    rows = pa.table(columns, schema=TABLES["tiers"].schema)
    for part, start in enumerate(range(0, num, _PART_ROWS), start=1):
        job.append("tiers", rows.slice(start, _PART_ROWS), part=part)
    row = {"tier_version": version, "method": "made", "parameters": "{}", "thresholds": "{}", "job": job.id}
    job.append("tier_versions", [row], part=1)
    job.commit({})


def _time_shard(store: Store, version: int) -> tuple[float, int]:
    """Seconds, and bytes of the shards."""
    began = time.monotonic()
    summary = shard(store, config=ShardConfig(tier_version=version))
    return time.monotonic() - began, int(summary["zip_bytes"])


BENCHMARK = Benchmark(
    name="retier",
    question="What does a new tier version cost by re-tiering, beside sharding the documents from their texts again?",
    measure=measure,
    notes=("Documents of 30 made-up words, one kind; shards of 1 MiB at most.",),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
