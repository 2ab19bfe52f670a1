"""The main job on a tiny scale, by the command line, for tests of the whole: real text, real processes, a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

import tools.cli
from manifests.store import Store
from tests import forks
from tools.realtext import export_stdlib_code
from tools.synthetic import make_synthetic

ROOT = Path(__file__).parent.parent
_UPLOADS = 16
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


def preload() -> None:
    """Has everything imported that commands need; before the first of them. Also what test_kills needs: a worker has one such process."""
    forks.preload("tests.kill_jobs", "tests.store_content", "tests.faults", "tests.main_job", "trainer.plan")


def atoll(*arguments: str, store: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a process of its own that is forked from one that has all imports done."""
    command = [*arguments, "--store", store]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = forks.call(_run_here, command, str(out), str(err), environment=dict(os.environ))
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _run_here(command: list[str], out: str, err: str) -> int:
    """Makes this process, a fresh one, the command's."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(ROOT)
    sys.argv = ["atoll", *command]  # jobs and runs keep the command line
    try:
        return tools.cli._run(command)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def start(*arguments: str, store: str) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own, from nothing, as a user's shell does."""
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
    holdout = ("--holdout-share", "0.2")
    code, finephrase = str(folder / "code.parquet"), str(folder / "finephrase")
    for command in (
        ("ingest", code, "--corpus", "python", "--column", "license=license", *holdout),
        ("ingest", finephrase, "--format", "finephrase", "--corpus", "finephrase", "--column", "label=planted_quality", *holdout),
        ("tokenizer", "--vocab-size", "512"),
        ("score", "--steps", "10", "--checkpoints", "2", *model_option(folder)),
        ("tier",),
        ("shard", "--shard-bytes", "20000"),
    ):  # fmt: skip
        succeed(*command, store=store)


def stop_group(process: subprocess.Popen[str], signal_: signal.Signals) -> None:
    """Sends a signal to the command alone, as a terminal's Ctrl-C reaches it, or as the kernel kills it."""
    os.kill(process.pid, signal_)


def upload(folder: Path, uri: str) -> None:
    """Puts a store that lies in a folder on S3."""
    store = Store(uri)
    files = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(lambda path: obstore.put(store.objects, str(path.relative_to(folder)), path.read_bytes()), files))
