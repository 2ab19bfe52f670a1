"""Whether memory stays flat as the corpus grows: the highest resident memory of `atoll ingest` and `atoll score` at 1, 4 and 16 times a corpus.

Each command runs as a process of its own, on a store of its own size. The documents are short, so what is held for each of them would show.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import Failure
from tools.bench.frame import Benchmark, Figure, run_benchmark
from tools.output import STDERR

FACTORS = (1, 4, 16)
_BASES, _QUICK_BASES = {"ingest": 10_000, "score": 2_000}, {"ingest": 200, "score": 100}
"""Documents of the smallest corpus, by command."""
_ROW_GROUP = 1000
"""As data sets of the hub have it; a row group is the least that a reader takes at once."""
_MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_SCORE = ("score", "--steps", "4", "--checkpoints", "1", "--device", "cpu")
_TOKENIZER = ("tokenizer", "--vocab-size", "512")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One command on one corpus."""

    command: str
    documents: int
    peak_bytes: int
    """Highest resident memory."""
    seconds: float


def write_corpus(path: Path, num_documents: int) -> None:
    """Short documents of random words, all different."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(4000)]
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, num_documents, _ROW_GROUP):
            numbers = range(first, min(first + _ROW_GROUP, num_documents))
            texts = [f"{number} {' '.join(draw.choices(words, k=30))}." for number in numbers]
            writer.write_table(pa.table({"text": texts}, schema=schema))


def measure(quick: bool) -> Mapping[str, Figure]:
    """Peak memory of both commands at each size, and that of the largest corpus over that of the smallest."""
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="atoll-memory-") as folder:
        model = Path(folder) / "model.json"
        model.write_text(json.dumps(_MODEL))
        for command, base in (_QUICK_BASES if quick else _BASES).items():
            runs = [_one_size(Path(folder), command, factor * base, model) for factor in FACTORS]
            peaks = [run.peak_bytes for run in runs]
            figures[f"{command}_growth"] = Figure(
                values=[peaks[-1] / peaks[0]],
                unit="ratio",
                meaning=f"peak memory at {FACTORS[-1]} times the documents over that at once",
            )
            for run in runs:
                figures[f"{command}_peak_mb, {run.documents:,} documents"] = Figure(
                    values=[run.peak_bytes / 1e6], unit="MB", meaning=f"in {run.seconds:.0f} s"
                )
    return figures


def _one_size(folder: Path, command: str, num_documents: int, model: Path) -> Measured:
    """The command on a corpus of so many documents."""
    corpus, store = folder / f"{num_documents}.parquet", ("--store", str(folder / f"store-{command}-{num_documents}"))
    write_corpus(corpus, num_documents)
    run = _run(num_documents, "ingest", str(corpus), "--corpus", "short", *store)
    if command == "score":
        _run(num_documents, *_TOKENIZER, *store)
        run = _run(num_documents, *_SCORE, "--model", str(model), *store)
    STDERR.print(f"  {command}, {num_documents:,} documents: {run.peak_bytes / 1e6:,.0f} MB in {run.seconds:.0f} s")
    return run


def _run(num_documents: int, *command: str) -> Measured:
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", "tools.cli", *command], stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # so that nobody waits again
        if process.returncode:
            said.seek(0)
            raise Failure(f"{' '.join(command)}: exit code {process.returncode}: {said.read().decode()[-2000:]}")
    # Linux tells KiB, macOS bytes.
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Measured(
        command=command[0], documents=num_documents, peak_bytes=peak_bytes, seconds=time.monotonic() - began
    )


BENCHMARK = Benchmark(
    name="memory",
    question="Does the memory of `atoll ingest` and `atoll score` stay flat as the corpus grows?",
    measure=measure,
    notes=(
        "Documents of 30 made-up words; every command is a process of its own. The scoring model is tiny, so that what is held for each document would show.",
    ),
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
