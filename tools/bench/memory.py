"""Whether memory stays flat as the corpus grows: the highest resident memory of `atoll ingest` and `atoll score` at 1, 4 and 16 times a corpus.

Each command runs as a process of its own, on a store of its own size. The documents are short, so what is held for each of them would show.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import Failure
from tools.output import STDERR

FACTORS = (1, 4, 16)
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


def measure(folder: Path, num_documents: int, *, with_score: bool) -> list[Measured]:
    """Ingests a corpus of so many documents, and scores it where that is wanted."""
    corpus, store = folder / f"{num_documents}.parquet", ("--store", str(folder / f"store-{num_documents}"))
    write_corpus(corpus, num_documents)
    runs = [_run(num_documents, "ingest", str(corpus), "--corpus", "short", *store)]
    if with_score:
        model = folder / "model.json"
        model.write_text(json.dumps(_MODEL))
        _run(num_documents, *_TOKENIZER, *store)
        runs.append(_run(num_documents, *_SCORE, "--model", str(model), *store))
    return runs


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


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.memory", description=__doc__)
    parser.add_argument("--base", type=int, default=5000, help="documents of the smallest corpus")
    parser.add_argument("--only-ingest", action="store_true", help="leave out the score")
    parser.add_argument("--json", action="store_true", help="print one JSON object of named figures as the last line")
    options = parser.parse_args()
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="atoll-memory-") as folder:
        for factor in FACTORS:
            runs += measure(Path(folder), options.base * factor, with_score=not options.only_ingest)
            STDERR.print(f"  {factor} × {options.base:,} documents measured")
    if options.json:
        named = {
            f"{run.command}_{run.documents // options.base}x_peak_mb": round(run.peak_bytes / 1e6, 1) for run in runs
        }
        print(json.dumps(named))
        return
    print("| command | documents | peak memory, MB | seconds |\n| --- | --- | --- | --- |")
    for run in sorted(runs, key=lambda run: (run.command, run.documents)):
        print(f"| {run.command} | {run.documents:,} | {run.peak_bytes / 1e6:,.0f} | {run.seconds:.1f} |")


if __name__ == "__main__":
    main()
