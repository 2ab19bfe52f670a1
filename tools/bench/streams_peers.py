"""The sides of the streams' benchmark, each behind one function that opens it and gives token arrays: ours, a bare parse, and the loaders that others use.

A process reads for one side only, so that memory, start-up and what a library leaves behind are its own: `python -m tools.bench.streams_peers READING` prints what it
measured as JSON. So nothing that weighs is imported at the top, and the peers' processes import nothing of Atoll's.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Layout = Literal["documents", "packed sequences", "packed sequences in zstd"]
Tokens = npt.NDArray[Any]
"""One sequence, one document, or a batch of sequences."""
_BATCH = 64
"""Sequences in a batch, where a loader has batches."""
_BUFFER = 1000
"""Shuffle buffer, where a loader has one."""
_FIRST_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to read the tokens."""

    loader: str
    """A key of LOADERS."""
    layout: Layout = "documents"
    workers: int = 0
    """Processes of its DataLoader; 0: no DataLoader."""

    def __str__(self) -> str:
        return f"{self.loader}, {self.layout}, {self.workers} workers" if self.loader in PEERS else self.loader

    @property
    def packed(self) -> bool:
        """Whether it reads sequences that were packed when the data were written."""
        return self.layout != "documents"

    @property
    def in_zstd(self) -> bool:
        """Whether what it reads is compressed like our shards: it is our shards, or written so."""
        return self.reads_views or self.layout == "packed sequences in zstd"

    @property
    def reads_views(self) -> bool:
        """Whether it reads the pool itself."""
        return LOADERS[self.loader].open in (_open_atoll, _open_bare_parse, _open_streaming) and not self.packed

    @property
    def folder(self) -> str:
        """Where its data lie."""
        return f"{LOADERS[self.loader].package}-{self.layout}".replace(" ", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a process is to read."""

    side: Side
    store: str
    """Folder of the store that holds the pool."""
    run: str
    data: str
    """Folder of the peers' data; `views/TIER/index.json` lies there, too."""
    weights: dict[str, float]
    """Share of each tier that the pool has."""
    seq_len: int
    seed: int
    tokens: int
    """To be read at most; below one pass, so that nothing comes from memory a second time."""
    seconds: float
    """To be read for at most."""
    began: float
    """When the process was started, by time.monotonic."""

    def folder(self, tier: str) -> str:
        """The side's own data of a tier."""
        return str(Path(self.data, self.side.folder, tier))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a process measured."""

    start_up_s: float
    """From the start of the process to the first array, imports included."""
    first_batch_s: float
    """From the end of the imports to the eighth array."""
    tokens_per_s: float
    tokens: int
    peak_bytes: int
    """Highest resident memory."""


def _open_atoll(job: Reading) -> Iterator[Tokens]:
    from manifests.catalog import Catalog
    from manifests.store import Store
    from trainer.feed import open_stream
    from trainer.run import load_run

    store = Store(job.store)
    catalog = Catalog(store)
    # Another island reads in another order.
    stream = open_stream(load_run(store, job.run, catalog=catalog), catalog, island=job.seed, weights=job.weights)

    def sequences() -> Iterator[Tokens]:
        num_spans = 0
        while True:
            sequence = stream.next_sequence()
            num_spans += len(sequence.columns)
            yield sequence.tokens

    return sequences()


def _open_bare_parse(job: Reading) -> Iterator[Tokens]:
    """Every shard decompressed and its documents found, in the views' order: no hash, no mix, no packing."""
    import pyarrow as pa

    from manifests.mds import DecodedShard, object_path, read_index, shard_name

    codec = pa.Codec("zstd")
    for tier in job.weights:
        for entry in read_index(Path(job.data, "views", tier, "index.json").read_bytes()):
            data = Path(job.store, object_path(shard_name(entry))).read_bytes()
            raw = np.frombuffer(codec.decompress(data, decompressed_size=entry["raw_data"]["bytes"]), np.uint8)
            offsets = raw[4 : 8 + 4 * entry["samples"]].view("<u4").astype(np.int64)
            shard = DecodedShard(shard_name(entry), raw, offsets, np.dtype("<u2"))
            yield from (shard.tokens(position) for position in range(shard.num_documents))


def _open_streaming(job: Reading) -> Iterator[Tokens]:
    """A StreamingDataset: one over all tiers' shards, or one of a stream for each tier."""
    from streaming import Stream, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    mix = job.side.loader != PLAIN
    options: dict[str, Any] = {
        "shuffle": True,
        "shuffle_seed": job.seed,
        "batch_size": _BATCH if job.side.workers else 1,
    }
    views = ["all"] if not mix else list(job.weights)
    places = {view: {"local": job.folder(view)} for view in views}
    if not job.side.packed:
        shutil.rmtree(Path(job.data, job.side.folder), ignore_errors=True)
        for view in views:
            shutil.copytree(Path(job.data, "views", view), job.folder(view))
            places[view]["remote"] = f"{job.store}/pool"
    if mix:
        dataset = StreamingDataset(
            streams=[Stream(**places[tier], proportion=job.weights[tier]) for tier in views], **options
        )
    else:
        dataset = StreamingDataset(**places["all"], **options)
    samples = dataset if job.side.workers == 0 else _each(_loader(dataset, job))
    if job.side.packed:
        return (sample["tokens"] for sample in samples)
    return (np.frombuffer(sample["tokens"], "<u2") for sample in samples)


def _open_litdata(job: Reading) -> Iterator[Tokens]:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

    shutil.rmtree(f"{job.data}/decompressed", ignore_errors=True)
    tiers = []
    for tier in job.weights:
        folder = job.folder(tier)
        if job.side.layout == "packed sequences in zstd":
            # A chunk's file is replaced by the decompressed one, and the next reading is to find what this one found.
            folder = f"{job.data}/decompressed/{tier}"
            shutil.copytree(job.folder(tier), folder)
        loader = TokensLoader(block_size=job.seq_len) if job.side.packed else None
        tiers.append(StreamingDataset(folder, item_loader=loader, shuffle=True, seed=job.seed))
    weights = list(job.weights.values())
    dataset = CombinedStreamingDataset(tiers, weights=weights, iterate_over_all=False, seed=job.seed)
    if job.side.workers == 0:
        return iter(dataset)
    collate = np.stack if job.side.packed else list
    batches = StreamingDataLoader(dataset, batch_size=_BATCH, num_workers=job.side.workers, collate_fn=collate)
    return iter(batches) if job.side.packed else _each(batches)


def _open_datasets(job: Reading) -> Iterator[Tokens]:
    from datasets import interleave_datasets, load_from_disk

    tiers = [
        load_from_disk(job.folder(tier)).to_iterable_dataset(num_shards=8).shuffle(seed=job.seed, buffer_size=_BUFFER)
        for tier in job.weights
    ]
    mixed = interleave_datasets(tiers, probabilities=list(job.weights.values()), seed=job.seed).with_format("numpy")
    if job.side.workers == 0:
        batches = mixed.iter(batch_size=_BATCH)
    else:
        batches = _loader(mixed.batch(_BATCH), job, batch_size=None)
    arrays = (batch["tokens"] for batch in batches)
    return arrays if job.side.packed else _each(arrays)


def _open_datasets_by_number(job: Reading) -> Iterator[Tokens]:
    """Memory-mapped Arrow with a permutation over it: nothing streams, so all the data must lie on this machine."""
    from datasets import interleave_datasets, load_from_disk

    tiers = [load_from_disk(job.folder(tier)).shuffle(seed=job.seed) for tier in job.weights]
    mixed = interleave_datasets(tiers, probabilities=list(job.weights.values()), seed=job.seed).with_format("numpy")
    arrays = (batch["tokens"] for batch in mixed.iter(batch_size=_BATCH))
    return arrays if job.side.packed else _each(arrays)


def _open_webdataset(job: Reading) -> Iterator[Tokens]:
    import webdataset as wds

    tiers = []
    for tier in job.weights:
        tars = sorted(str(path) for path in Path(job.folder(tier)).glob("*.tar"))
        samples = wds.WebDataset(tars, shardshuffle=100, seed=job.seed, empty_check=False)
        tiers.append(samples.shuffle(_BUFFER, seed=job.seed).map(_tokens_of_record))
    mixed = wds.RandomMix(tiers, list(job.weights.values()))
    return iter(mixed) if job.side.workers == 0 else _each(_loader(mixed, job))


def _tokens_of_record(record: dict[str, Any]) -> Tokens:
    return np.frombuffer(record["bin"], "<u2")


def _each(batches: Iterable[Iterable[Tokens]]) -> Iterator[Tokens]:
    for batch in batches:
        yield from batch


def _loader(dataset: Any, job: Reading, *, batch_size: int | None = _BATCH) -> Iterable[Any]:
    """A DataLoader that leaves samples as they are."""
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset, batch_size=batch_size, num_workers=job.side.workers, collate_fn=list if batch_size else _same
    )


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """One of the loaders that a side can be of."""

    open: Callable[[Reading], Iterator[Tokens]]
    imports: tuple[str, ...]
    package: str
    """What pip calls it."""
    shuffling: str = ""
    settings: tuple[tuple[Layout, int], ...] = (("documents", 0),)
    """Layouts and workers that are tried; the best one counts."""


_SETTINGS: tuple[tuple[Layout, int], ...] = (
    ("packed sequences", 0),
    ("packed sequences", 2),
    ("documents", 0),
    ("documents", 2),
)
ATOLL, BARE_PARSE, PLAIN = "Atoll", "bare parse", "StreamingDataset"
PEERS = {
    "LitData": Loader(
        open=_open_litdata,
        imports=("litdata",),
        package="litdata",
        shuffling="its chunks, and items in blocks of a chunk",
        settings=(*_SETTINGS, ("packed sequences in zstd", 0), ("packed sequences in zstd", 2)),
    ),
    "HF datasets, streaming": Loader(
        open=_open_datasets,
        imports=("datasets",),
        package="datasets",
        shuffling=f"8 Arrow shards a tier, and a buffer of {_BUFFER} rows",
        settings=_SETTINGS,
    ),
    "HF datasets, by number": Loader(
        open=_open_datasets_by_number,
        imports=("datasets",),
        package="datasets",
        shuffling="a permutation of all rows",
        settings=(("packed sequences", 0), ("documents", 0)),
    ),
    "WebDataset": Loader(
        open=_open_webdataset,
        imports=("webdataset",),
        package="webdataset",
        shuffling=f"its tars, and a buffer of {_BUFFER} records",
        settings=_SETTINGS,
    ),
    "mosaicml-streaming": Loader(
        open=_open_streaming,
        imports=("streaming",),
        package="mosaicml-streaming",
        shuffling="py1e, its default",
        settings=_SETTINGS,
    ),
}
LOADERS = PEERS | {
    ATOLL: Loader(open=_open_atoll, imports=("manifests.catalog", "manifests.store", "trainer.feed"), package="atoll"),
    BARE_PARSE: Loader(open=_open_bare_parse, imports=("pyarrow", "manifests.mds"), package="atoll"),
    PLAIN: Loader(open=_open_streaming, imports=("streaming",), package="mosaicml-streaming"),
}


def measure(job: Reading) -> Measured:
    """Reads, and counts what came."""
    loader = LOADERS[job.side.loader]
    for module in loader.imports:
        importlib.import_module(module)
    imported = time.monotonic()
    arrays = loader.open(job)
    # Our clock runs from the call for the first array, the peers' from its coming: their start-up isn't held against their rate.
    clock = time.monotonic()
    first = next(arrays)
    start_up_s = time.monotonic() - job.began
    tokens = first.size
    if job.side.loader not in (ATOLL, BARE_PARSE):
        clock, tokens = time.monotonic(), 0
    first_batch_s = 0.0
    num_arrays, check, seconds = 1, 0, 0.0
    for array in arrays:
        tokens += array.size
        check += int(array[0] if array.ndim == 1 else array[:, 0].sum())
        num_arrays += 1
        now = time.monotonic()
        if num_arrays == _FIRST_BATCH:
            first_batch_s = now - imported
        seconds = now - clock
        if tokens >= job.tokens or seconds >= job.seconds:
            break
    return Measured(
        start_up_s=start_up_s,
        first_batch_s=first_batch_s,
        tokens_per_s=tokens / seconds,
        tokens=tokens,
        peak_bytes=_peak_bytes(),
    )


def _peak_bytes() -> int:
    """Highest resident memory of this process; getrusage would count the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    """Reads what the argument says, as JSON, and prints what was measured."""
    job = json.loads(sys.argv[1])
    measured = measure(Reading(side=Side(**job.pop("side")), **job))
    print(json.dumps(asdict(measured)), flush=True)
    # Worker processes and threads that are in the midst of a batch aren't worth waiting for.
    os._exit(0)


if __name__ == "__main__":
    main()
