"""The main job on a tiny scale, by the command line, for tests of the whole: real text, real processes, a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tools.realtext import export_stdlib_code
from tools.synthetic import make_synthetic

ROOT = Path(__file__).parent.parent
TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TRAIN = (
    "--islands", "2", "--steps", "32", "--sync-every", "8", "--fragments", "2", "--batch-size", "2", "--seq-len", "64", "--quorum", "1",
)  # fmt: skip


def atoll(*arguments: str, store: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments, "--store", store],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=170,
    )


def start(*arguments: str, store: str) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools.cli", *arguments, "--store", store],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip


def succeed(*arguments: str, store: str) -> str:
    """Runs a command that must succeed; returns its stdout."""
    done = atoll(*arguments, store=store)
    assert done.returncode == 0, f"atoll {' '.join(arguments)}: {done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def query(sql: str, *, store: str) -> list[dict[str, object]]:
    """Rows of `atoll sql`."""
    return [json.loads(line) for line in succeed("sql", sql, "--format", "json", store=store).splitlines()]


def model_option(folder: Path) -> list[str]:
    """The option that names the tiny model."""
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY_MODEL))
    return ["--model", str(path)]


def prepare(folder: Path, store: str) -> None:
    """From text to shards, by the public commands."""
    export_stdlib_code(folder / "code.parquet", num_documents=150, seed=0)
    make_synthetic(folder / "code.parquet", folder / "finephrase", num_per_kind=30, seed=0)
    holdout = ["--holdout-share", "0.2"]
    succeed(
        "ingest",
        str(folder / "code.parquet"),
        "--corpus",
        "python",
        "--column",
        "license=license",
        *holdout,
        store=store,
    )
    succeed(
        "ingest", str(folder / "finephrase"), "--format", "finephrase", "--corpus", "finephrase",
        "--column", "label=planted_quality", *holdout, store=store,
    )  # fmt: skip
    succeed("tokenizer", "--vocab-size", "512", store=store)
    succeed("score", "--steps", "10", "--checkpoints", "2", *model_option(folder), store=store)
    succeed("tier", store=store)
    succeed("shard", "--shard-bytes", "20000", store=store)


def stop_group(process: subprocess.Popen[str], signal_: signal.Signals) -> None:
    """Sends a signal to the command alone, as a terminal's Ctrl-C reaches it, or as the kernel kills it."""
    os.kill(process.pid, signal_)
