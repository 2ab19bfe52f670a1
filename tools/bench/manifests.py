"""Questions over the manifests of a long run: how long they take, how fast consumption is written, and how much of the disk it takes.

DuckDB has two threads and 2 GB. `cold` is a new catalog over files that the page cache doesn't hold: opening and pinning the tables are in it. `warm` is the same
question again in the same catalog.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manifests.catalog import Catalog
from manifests.errors import Failure
from manifests.store import Store
from manifests.tables import create_store
from manifests.upkeep import compact
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.bench.manifests_data import ISLANDS, KINDS, POOL, RARE_KIND, RARE_SHARDS, RUN, LongRun, Size
from tools.output import STDERR
from tools.progress import progress_report

FULL = Size(rows=100_000_000, documents=10_000_000, rounds=125)
QUICK = Size(rows=5_000_000, documents=500_000, rounds=10)
SEED = 0
_REPETITIONS = 5
_ALLOWED = sorted({kind[4] for number, kind in enumerate(KINDS) if number != RARE_KIND})

# The same answers from the rows themselves: what the sums by shard are held against, in time and in content.
_LINEAGE_ROWS = """
WITH summed AS (
    SELECT checkpoint, shard, tier, count(*) AS spans, sum(tokens) AS tokens
    FROM consumption
    GROUP BY ALL
)

SELECT k.corpus, k.origin, k.generator, k.prompt, k.license, s.tier, sum(s.spans)::BIGINT AS spans, sum(s.tokens)::BIGINT AS tokens
FROM summed AS s
INNER JOIN ancestors($checkpoint) AS a USING (checkpoint)
INNER JOIN shard_kinds AS k USING (shard)
GROUP BY ALL
"""


def measure(quick: bool) -> Mapping[str, Figure]:
    """Makes the store, then asks every question cold and warm."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="atoll-manifests-", dir=os.environ.get("ATOLL_BENCH_DIR")) as folder:
        store = create_store(str(Path(folder) / "store"))
        run = LongRun(store, size, seed=SEED)
        with progress_report() as report:
            run.write_pool(report)
            run.train(report)
        written = _disk_bytes(store, "consumption")
        compact(store, ["consumption", "consumption_rounds", "checkpoints", "events", "feedback"])
        figures = {
            "append_rows_per_s": Figure(
                values=run.append_rates,
                unit="rows/s",
                meaning=f"one writer, commits of {run.rows // len(run.append_rates):,} rows, their sums by shard included",
            ),
            "bytes_per_consumption_row": Figure(
                values=[written / run.rows],
                unit="bytes",
                meaning="Parquet files of consumption as appended, by its rows",
            ),
            "bytes_per_row_with_sums": Figure(
                values=[(written + _disk_bytes(store, "consumption_rounds")) / run.rows],
                unit="bytes",
                meaning="consumption_rounds counted in",
            ),
        }
        return figures | _ask_all(store, size)


def _ask_all(store: Store, size: Size) -> dict[str, Figure]:
    questions = _questions(store, size)
    cold: dict[str, list[float]] = {name: [] for name in questions}
    warm: dict[str, list[float]] = {name: [] for name in questions}
    for _ in range(_REPETITIONS):
        for name, (ask, _) in questions.items():
            _forget_pages(store)
            began = time.monotonic()
            catalog = _catalog(store)
            ask(catalog)
            cold[name].append(time.monotonic() - began)
            began = time.monotonic()
            ask(catalog)
            warm[name].append(time.monotonic() - began)
            STDERR.print(f"  {name}: cold {cold[name][-1]:.3f} s, warm {warm[name][-1]:.3f} s")
    from_rows_s = _ask_the_rows(store, size)
    figures = {
        "worst_warm_s": Figure(values=_worst(warm), unit="s", meaning="the slowest of the five questions, warm"),
        "worst_cold_s": Figure(values=_worst(cold), unit="s", meaning="the slowest of the five questions, cold"),
    }
    for name, (_, meaning) in questions.items():
        figures[f"{name}_warm_s"] = Figure(values=warm[name], unit="s", meaning=meaning)
        figures[f"{name}_cold_s"] = Figure(values=cold[name], unit="s", meaning="the same, cold")
    figures["lineage_from_rows_s"] = Figure(
        values=[from_rows_s], unit="s", meaning="baseline: the lineage from the rows of consumption, warm"
    )
    return figures


def _questions(store: Store, size: Size) -> dict[str, tuple[Callable[[Catalog], Any], str]]:
    last = _last_global(store)
    document = _catalog(store).rows("SELECT doc_id FROM consumption LIMIT 1 OFFSET 1000")[0]["doc_id"]
    mixture = {
        "run": RUN, "island": ISLANDS - 1, "sequence": size.rounds, "strategy": "adaptive", "tier_version": 1, "pool": POOL,
        "previous": [0.2, 0.4, 0.3, 0.1],
    }  # fmt: skip
    return {
        "lineage": (
            lambda catalog: catalog.ask("checkpoint_mix", checkpoint=last),
            "corpora, tiers, licences and generators of the last global checkpoint",
        ),
        "document": (
            lambda catalog: catalog.ask("document_checkpoints", doc_id=document),
            "all checkpoints that saw a document",
        ),
        "loss_by_tier": (
            lambda catalog: catalog.ask("loss_by_tier", run=RUN, bin=100),
            "loss by tier and corpus over the run",
        ),
        "mixture": (lambda catalog: catalog.ask("mixture", **mixture), "an island's next mix"),
        "license_audit": (
            lambda catalog: catalog.ask("license_violations", allowed=_ALLOWED, run=RUN),
            "documents trained on with a licence that isn't allowed",
        ),
    }


def _last_global(store: Store) -> bytes:
    return bytes(_catalog(store).ask("last_checkpoint", run=RUN).to_pylist()[0]["checkpoint"])


def _ask_the_rows(store: Store, size: Size) -> float:
    """Seconds that the lineage takes from the rows; the sums must give the same answer, or the benchmark fails."""
    catalog, last = _catalog(store), _last_global(store)
    columns = ("corpus", "origin", "generator", "prompt", "license", "tier", "spans", "tokens")

    def answer(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(str([row[column] for column in columns]) for row in rows)

    sums = answer(catalog.ask("checkpoint_mix", checkpoint=last).to_pylist())
    began = time.monotonic()
    rows = answer(catalog.rows(_LINEAGE_ROWS, {"checkpoint": last}))
    seconds = time.monotonic() - began
    STDERR.print(f"  lineage from the rows: {seconds:.3f} s")
    if sums != rows:
        raise Failure(f"consumption_rounds and consumption differ on checkpoint {last.hex()} of {size}")
    return seconds


def _worst(seconds: Mapping[str, list[float]]) -> list[float]:
    """The slowest question of each repetition."""
    return [max(values[n] for values in seconds.values()) for n in range(_REPETITIONS)]


def _catalog(store: Store) -> Catalog:
    return Catalog(store, threads=2, memory_limit="2GB")


def _disk_bytes(store: Store, table: str) -> int:
    catalog = Catalog(store, tables=[table])
    return sum(os.path.getsize(path) for path in catalog.files(table))


def _forget_pages(store: Store) -> None:
    """Takes the store's files out of the page cache; needs no privilege, since they are written out and clean."""
    os.sync()
    for path in (store.root / "tables").rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


BENCHMARK = Benchmark(
    name="manifests",
    question="How long do questions about a long run take, how fast is consumption written, and how much disk does it take?",
    measure=measure,
    notes=(
        f"Full size: {FULL.rows:,} rows of consumption in {FULL.rounds * ISLANDS} commits of {ISLANDS} islands, {FULL.documents:,} documents in "
        f"{FULL.shards:,} shards; `--quick`: {QUICK.rows:,} and {QUICK.documents:,}. Spans come in the order in which an island's stream really reads, and "
        "lengths of documents are spread like real ones (log-normal, median 540 tokens, sequences of 2,048). The tables that grow by commits are compacted once before "
        "the questions, as `atoll tables compact` does.",
        f"The licence that isn't allowed stands on {RARE_SHARDS} of the shards, and `license_audit` lists each of their documents that was read. It takes longer the more there "
        "are: the time is that of the rows found.",
        "The answer of `lineage` from the sums is compared with the one from the rows; the benchmark fails where they differ.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
