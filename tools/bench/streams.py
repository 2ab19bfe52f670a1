"""How fast tokens reach a model: our mixer beside the stock reader of the same shards, and beside other libraries' loaders on the same tokens; resuming and starting.

Every reading is a process of its own and reads at most 0.8 of a pass, so that each shard is fetched and decompressed within it. Files lie in the page cache: what is
measured is the loaders, not the disk. A peer's settings are tried once; its best one is then measured in turn with ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from manifests.catalog import Catalog
from manifests.errors import Failure
from manifests.mds import index_json, read_index
from manifests.store import Store
from tools.bench.frame import Benchmark, Figure, interleave, run_benchmark
from tools.bench.streams_data import RUN, SEQ_LEN, WEIGHTS, Pool, PoolSize, make_pool, mixed, view_path, write_for
from tools.bench.streams_peers import ATOLL, BARE_PARSE, LOADERS, PEERS, PLAIN, Measured, Reading, Side
from tools.output import STDERR
from trainer.feed import open_stream
from trainer.mixer import MixedStream
from trainer.run import load_run

_READ_LIMIT_S = 180
_SHARE_OF_PASS = 0.8
_LARGE_DISK_BYTES = 20e9
"""Free disk that the large pool wants; what the stock reader decompresses is half of it."""
_OURS, _PARSE, _PLAIN = Side(loader=ATOLL), Side(loader=BARE_PARSE), Side(loader=PLAIN)
_QUICK_SIDES = (
    Side(loader="LitData", layout="packed sequences"),
    Side(loader="HF datasets, by number", layout="documents"),
    Side(loader="WebDataset", layout="packed sequences"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    documents: int
    repetitions: int
    seconds: float
    """Of one reading at most; only slow loaders need as long."""
    shards: tuple[int, ...]
    """Of the views whose first batch is waited for."""
    large_documents: int
    """Of the pool that memory is measured on; 0: none."""


_FULL = Scale(documents=60_000, repetitions=5, seconds=5, shards=(10, 1_000, 10_000), large_documents=1_250_000)
_QUICK = Scale(documents=30_000, repetitions=1, seconds=2, shards=(10, 10_000), large_documents=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A pool, and where the peers' data lie beside it."""

    pool: Pool
    data: Path
    seconds: float

    def read(self, side: Side, seed: int) -> Measured:
        """One reading, in a new process."""
        job = Reading(
            side=side,
            store=str(self.pool.store),
            run=RUN,
            data=str(self.data),
            weights={tier: weight for tier, weight in WEIGHTS.items() if (self.data / "views" / tier).is_dir()},
            seq_len=SEQ_LEN,
            seed=seed,
            tokens=int(_SHARE_OF_PASS * self.pool.tokens),
            seconds=self.seconds,
            began=time.monotonic(),
        )
        command = [sys.executable, "-m", "tools.bench.streams_peers", json.dumps(asdict(job))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(self.data / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_READ_LIMIT_S, env=environment)
        if done.returncode:
            raise Failure(f"{side} can't read: {done.stderr[-1000:]}")
        return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(quick: bool) -> Mapping[str, Figure | str]:
    """All of it."""
    scale = _QUICK if quick else _FULL
    with _bench(mixed(scale.documents), seconds=scale.seconds) as bench:
        figures = _throughput(bench, _sides(quick), scale.repetitions)
        figures |= _resume(bench.pool, "large", scale.repetitions)
    with _bench(PoolSize(documents=dict.fromkeys(WEIGHTS, 500)), seconds=scale.seconds) as bench:
        figures |= _resume(bench.pool, "small", scale.repetitions)
    for num_shards in scale.shards:
        figures |= _first_batch(num_shards, scale.repetitions)
    if scale.large_documents:
        figures |= _memory(scale.large_documents)
    return figures


@contextmanager
def _bench(size: PoolSize, *, seconds: float) -> Iterator[Bench]:
    """A pool in a folder of its own, and the views' indexes where the stock reader looks for them: by tier, and of all tiers together."""
    with tempfile.TemporaryDirectory(prefix="atoll-streams-", dir=os.environ.get("ATOLL_BENCH_DIR")) as folder:
        began = time.monotonic()
        pool = make_pool(Path(folder) / "store", size, seed=0)
        STDERR.print(f"  pool of {pool}, {pool.raw_bytes / 1e6:.0f} MB, in {time.monotonic() - began:.0f} s")
        store, data = Store(str(pool.store)), Path(folder) / "data"
        indexes = {tier: store.get(view_path(tier)) for tier in size.documents}
        indexes["all"] = index_json([entry for index in indexes.values() for entry in read_index(index)])
        for view, index in indexes.items():
            path = data / "views" / view / "index.json"
            path.parent.mkdir(parents=True)
            path.write_bytes(index)
        yield Bench(pool=pool, data=data, seconds=seconds)


def _sides(quick: bool) -> list[Side]:
    """The peers' settings that are tried."""
    missing = sorted({loader.package for loader in PEERS.values() if find_spec(loader.imports[0]) is None})
    if missing:
        STDERR.print(
            f"  left out, not installed: {', '.join(missing)}; pip install 'atoll\\[bench]'", style="bold", markup=True
        )
    sides = _QUICK_SIDES if quick else [
        Side(loader=name, layout=layout, workers=workers) for name, loader in PEERS.items() for layout, workers in loader.settings
    ]  # fmt: skip
    return [side for side in sides if LOADERS[side.loader].package not in missing]


def _throughput(bench: Bench, sides: Sequence[Side], repetitions: int) -> dict[str, Figure | str]:
    able = _written(bench, sides)
    only_settings = len({side.loader for side in able}) == len(able)
    tried = {} if only_settings else _try(bench, able)
    chosen = able if only_settings else _chosen(tried)
    measured: dict[Side, list[Measured]] = {side: [] for side in (_OURS, _PARSE, _PLAIN, *chosen)}

    def tokens_per_s(side: Side, seed: int) -> float:
        measured[side].append(bench.read(side, seed))
        return measured[side][-1].tokens_per_s

    interleave({str(side): partial(tokens_per_s, side) for side in measured}, repetitions=range(repetitions))
    rates = {side: [one.tokens_per_s for one in found] for side, found in measured.items()}
    ours = rates[_OURS]

    def ratio(side: Side, meaning: str) -> Figure:
        return Figure(values=[a / b for a, b in zip(ours, rates[side], strict=True)], unit="ratio", meaning=meaning)

    told = f"our mixer's tokens/s over those of %s; {bench.pool}, sequences of {SEQ_LEN}, seed 0"
    figures: dict[str, Figure | str] = {
        "mixer_vs_plain": ratio(_PLAIN, told % "one StreamingDataset that only iterates over the same shards"),
        "share_of_bare_parse": ratio(_PARSE, told % "decompressing and parsing the same shards without hash, mix or packing"),
    }  # fmt: skip
    best = {side: float(np.median(rates[side])) for side in chosen}
    for name, among in {
        "peer": chosen,
        "peer_of_documents": [side for side in chosen if not side.packed],
        "peer_of_zstd": [side for side in chosen if side.in_zstd],
    }.items():
        if among:
            winner = max(among, key=lambda side: best[side])
            figures[f"vs_best_{name}"] = ratio(winner, told % f"{winner}, the fastest")
            figures[f"best_{name}"] = str(winner)
    for side, values in rates.items():
        figures[f"mtokens_per_s: {side}"] = Figure(
            values=[value / 1e6 for value in values], unit="M tokens/s", meaning=_about(side)
        )
    for side, rate in tried.items():
        if side not in rates:
            figures[f"mtokens_per_s: {side}"] = Figure(
                values=[rate / 1e6], unit="M tokens/s", meaning="tried once, not its best"
            )
    for name, side in (("ours", _OURS), ("stock", _PLAIN)):
        figures |= _costs(name, measured[side], bench.pool)
    return figures


def _written(bench: Bench, sides: Sequence[Side]) -> list[Side]:
    """Writes the tokens in the peers' formats; gives the sides that can read now."""
    able = []
    for side in sides:
        try:
            if not side.reads_views and not (bench.data / side.folder).exists():
                write_for(side, bench.pool, bench.data)
        except (Failure, subprocess.TimeoutExpired) as e:
            STDERR.print(f"  left out: {side}: {e}", markup=False)
        else:
            able.append(side)
    return able


def _try(bench: Bench, sides: Sequence[Side]) -> dict[Side, float]:
    """Tokens/s of one reading with each setting; what fails is said, and left out."""
    tried: dict[Side, float] = {}
    for side in sides:
        try:
            tried[side] = bench.read(side, seed=0).tokens_per_s
        except (Failure, subprocess.TimeoutExpired) as e:
            STDERR.print(f"  left out: {side}: {e}", markup=False)
        else:
            STDERR.print(f"  tried {side}: {tried[side]:.4g} tokens/s", markup=False)
    return tried


def _chosen(tried: Mapping[Side, float]) -> list[Side]:
    """The fastest setting of every peer, and the fastest of those that read documents and of those that read zstd."""
    by_rate = sorted(tried, key=lambda side: -tried[side])
    best: dict[str, Side] = {}
    for side in by_rate:
        best.setdefault(side.loader, side)
        if not side.packed:
            best.setdefault("documents", side)
        if side.in_zstd:
            best.setdefault("zstd", side)
    return list(dict.fromkeys(best.values()))


def _about(side: Side) -> str:
    loader = LOADERS[side.loader]
    if side == _OURS:
        return "mixed, packed with spans, both hashes of every shard checked, one process; opening left out"
    if side in (_PARSE, _PLAIN):
        return "documents, unmixed" + (
            "" if side == _PARSE else f"; {loader.package} {version(loader.package)}, shuffled"
        )
    return f"{loader.package} {version(loader.package)}; shuffles {loader.shuffling}"


def _costs(name: str, found: Sequence[Measured], pool: Pool) -> dict[str, Figure]:
    return {
        f"start_up_s_{name}": Figure(
            values=[one.start_up_s for one in found],
            unit="s",
            meaning=f"a new process until its first sequence or sample, imports included; {pool}",
        ),
        f"peak_mb_{name}": Figure(
            values=[one.peak_bytes / 1e6 for one in found],
            unit="MB",
            meaning=f"highest resident memory, after {max(one.tokens for one in found) / 1e6:.1f} M tokens",
        ),
    }


def _resume(pool: Pool, name: str, repetitions: int) -> dict[str, Figure]:
    store = Store(str(pool.store))
    rng = np.random.default_rng(0)
    times_ms, sizes = [], []
    for island in range(repetitions):
        stream = _open(store, island)
        for _ in range(int(rng.integers(1, pool.tokens // SEQ_LEN))):
            stream.next_sequence()
        state = stream.state()
        expected = stream.next_sequence()
        stream.close()
        resumed = _open(store, island)
        began = time.perf_counter()
        resumed.load_state(state)
        found = resumed.next_sequence()
        times_ms.append((time.perf_counter() - began) * 1e3)
        resumed.close()
        if not np.array_equal(found.tokens, expected.tokens) or found.spans != expected.spans:
            raise Failure(f"the stream goes on elsewhere than it stopped, at {state}")
        sizes.append(len(state.encode()))
    return {
        f"resume_ms_{name}": Figure(
            values=times_ms,
            unit="ms",
            meaning=f"load_state to the next sequence, at a random place within a pass; {pool}",
        ),
        f"state_bytes_{name}": Figure(values=sizes, unit="bytes", meaning="of that state"),
    }


def _open(store: Store, island: int) -> MixedStream:
    catalog = Catalog(store)
    return open_stream(load_run(store, RUN, catalog=catalog), catalog, island=island, weights=WEIGHTS)


def _first_batch(num_shards: int, repetitions: int) -> dict[str, Figure]:
    size = PoolSize(documents={"S": 8 * num_shards}, shard_documents=8)
    with _bench(size, seconds=0.5) as bench:
        sides = {"": _OURS, "_stock": _PLAIN}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for seed in range(repetitions):
            for name, side in sides.items():
                found[name].append(bench.read(side, seed).first_batch_s)
    return {
        f"first_batch_s_{num_shards}_shards{name}": Figure(
            values=values,
            unit="s",
            meaning=f"{'8 sequences, from the catalog' if not name else '8 samples of one StreamingDataset'} on, without imports; {bench.pool}, one view",
        )
        for name, values in found.items()
    }


def _memory(num_documents: int) -> dict[str, Figure]:
    free_bytes = shutil.disk_usage(os.environ.get("ATOLL_BENCH_DIR") or tempfile.gettempdir()).free
    if free_bytes < _LARGE_DISK_BYTES:
        STDERR.print(
            f"  no large pool: {free_bytes / 1e9:.0f} GB of disk are free, {_LARGE_DISK_BYTES / 1e9:.0f} wanted"
        )
        return {}
    size = PoolSize(documents=mixed(num_documents).documents, median_tokens=3_000, zstd_level=1)
    figures: dict[str, Figure] = {}
    with _bench(size, seconds=10) as bench:
        for name, side in (("ours", _OURS), ("stock", _PLAIN)):
            one = bench.read(side, 0)
            figures[f"peak_mb_{name}_large_pool"] = Figure(
                values=[one.peak_bytes / 1e6],
                unit="MB",
                meaning=f"highest resident memory after {one.tokens / 1e6:.1f} M tokens of a pool of {bench.pool.raw_bytes / 1e9:.1f} GB raw: {bench.pool}",
            )
    return figures


BENCHMARK = Benchmark(
    name="streams",
    question="How fast do tokens reach the model, beside the stock reader of the same shards and beside other loaders on the same tokens?",
    measure=measure,
    notes=(
        f"The mix is {', '.join(f'{weight} of {tier}' for tier, weight in WEIGHTS.items())}, for all. Documents have log-normal lengths (median 400 tokens), tokens of 16 bits by Zipf's law over 32,000.",
        "`packed sequences`: cut into 2048 tokens when the data were written, each tier by itself, and stored uncompressed unless it says zstd: what such a loader gives can't be traced to documents, "
        "and none of it checks a hash. `documents`: whole documents, which nobody packs: their tokens are counted as they come. Only ours packs while reading and says which document every token is from.",
        "Rates are of one process that reads at most 0.8 of a pass. Ours runs from the call for the first sequence; the peers' from the coming of their first array, so their start-up isn't held against them. "
        "One element of each sequence is added up. Every loader reads local files that lie in the page cache.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
