"""`atoll demo`: the main job on real text, by the same public commands that a user would type, each printed before it runs.

The text is read from an installed package and from Python's own library, the synthetic part is made from it at planted qualities (synthetic.py), so that
there is a truth to hold the tiers against. In the middle of the training one island is killed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from manifests.catalog import Catalog, write_whole
from manifests.errors import Failure, UserError
from manifests.jobs import canonical_json, code_version
from manifests.tables import open_store
from tools.output import STDERR

RUN = "main"
ISLANDS = 4
STEPS = 192
KILLED_ISLAND = 2
HOLDOUT_SHARE = "0.1"
VOCAB_SIZE = 2048
# So short a run from scratch makes few outer steps: momentum would only lag behind them.
OUTER = ("--sync-every", "16", "--fragments", "2", "--outer-lr", "1", "--outer-momentum", "0")
TRAIN = ("--islands", str(ISLANDS), "--steps", str(STEPS), "--lr", "0.004", *OUTER)
NUM_WIKIPEDIA, NUM_CODE, NUM_PER_KIND = 2400, 600, 600
PREDICATE = (
    "label = 'scrambled' and doc_id in "
    f"(select doc_id from consumption where run = '{RUN}' group by doc_id having min(step) > {STEPS // 2})"
)
_POLL_S = 3.0


def run_demo(store: str, *, seed: int) -> None:
    """Runs all steps; a demo that was interrupted goes on where it stopped.

    Args:
        store: a folder, or an address such as s3://bucket/prefix.
        seed: of the text's choice, the scoring model and the training.

    Raises:
        UserError: the text package isn't installed, or the store holds the demo of another seed or version.
        Failure: a step failed; it has said why.
    """
    began = time.monotonic()
    text = Path(os.environ.get("ATOLL_DEMO_TEXT") or "demo-text").absolute()
    _prepare_text(text, seed=seed)
    at = ["--store", store]
    holdout = ["--holdout-share", HOLDOUT_SHARE]
    _say("1. Real text and FinePhrase-style synthetic text become documents")
    _atoll(
        "ingest", str(text / "wikipedia.parquet"), "--corpus", "wikipedia", "--column", "license=license", *holdout, *at
    )
    _atoll("ingest", str(text / "code.parquet"), "--corpus", "python", "--column", "license=license", *holdout, *at)
    _atoll(
        "ingest", str(text / "finephrase"), "--format", "finephrase", "--corpus", "finephrase",
        "--generator", "tools.synthetic", "--column", "label=planted_quality", *holdout, *at,
    )  # fmt: skip
    _atoll("tokenizer", "--vocab-size", str(VOCAB_SIZE), *at)
    _say("2. Every document's influence on the holdout loss")
    _atoll("score", "--seed", str(seed), *at)
    _say("3. Tiers, held against the planted qualities")
    _atoll("tier", *at)
    _say("4. Shards, and a view for each tier")
    _atoll("shard", *at)
    _say(f"5. A syncer and {ISLANDS} islands; island {KILLED_ISLAND} is killed in the middle and comes back by itself")
    _train_and_kill(store, ["train", "--run", RUN, *TRAIN, "--seed", str(seed), *at])
    _say("6. What made the last checkpoint")
    _atoll(
        "sql",
        "select tier, count(distinct doc_id) as documents, sum(tokens) as tokens from consumption group by tier order by tier",
        *at,
    )
    _atoll("made", "--run", RUN, *at)
    _say("7. Take back the scrambled documents that came in late: the plan, then a branch that never saw them")
    _atoll("rollback", "plan", "--run", RUN, "--where", PREDICATE, *at)
    _atoll("rollback", "apply", "--run", RUN, "--where", PREDICATE, *at)
    _say("8. The report")
    _atoll("report", "--run", RUN, "--out", "demo-report.html", *at)
    STDERR.print(
        f"\nThe demo took {(time.monotonic() - began) / 60:.1f} minutes. Look at demo-report.html, or ask the store:"
    )
    print(shlex.join(["atoll", "sql", "show tables", *at]))


def _say(text: str) -> None:
    STDERR.print(f"\n[bold]{text}[/bold]")


def _show(arguments: list[str]) -> None:
    STDERR.print(f"$ {' '.join(_quote(word) for word in ['atoll', *arguments])}", style="cyan", markup=False)


def _quote(word: str) -> str:
    """As a person would quote it: SQL is full of single quotes."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "tools.cli", *arguments]


def _atoll(*arguments: str) -> None:
    _show(list(arguments))
    code = subprocess.run(_command(list(arguments))).returncode
    _check(code, arguments[0])


def _check(code: int, what: str) -> None:
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise Failure(
            f"`atoll {what}` ended with exit code {code}; mend what it says, then run the demo again: it goes on from there"
        )


def _prepare_text(folder: Path, *, seed: int) -> None:
    """Writes the demo's text as Parquet files, once for a seed and version."""
    from tools.realtext import export_stdlib_code, export_wikipedia
    from tools.synthetic import make_synthetic

    recipe = canonical_json(
        {"seed": seed, "version": code_version(), "wikipedia": 4000, "code": 1200, "per_kind": 1000}
    )
    marker = folder / "recipe.json"
    if marker.exists() and marker.read_text() == recipe:
        return
    folder.mkdir(parents=True, exist_ok=True)
    counts = {
        "wikipedia": export_wikipedia(folder / "wikipedia.parquet", num_documents=NUM_WIKIPEDIA, seed=seed),
        "python": export_stdlib_code(folder / "code.parquet", num_documents=NUM_CODE, seed=seed),
    }
    planted = make_synthetic(folder / "wikipedia.parquet", folder / "finephrase", num_per_kind=NUM_PER_KIND, seed=seed)
    write_whole(marker, recipe.encode())
    STDERR.print(f"text in {folder}: {counts}, synthetic by planted quality: {planted}", markup=False)


def _train_and_kill(store: str, arguments: list[str]) -> None:
    """Runs the training, and kills one island's process once it is half-way."""
    _show(arguments)
    process = subprocess.Popen(_command(arguments))
    killed = False
    try:
        while process.poll() is None:
            if not killed:
                killed = _kill_half_way(store)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        process.wait()
        raise
    _check(process.returncode, arguments[0])


def _kill_half_way(store: str) -> bool:
    """Kills the island if it has done half of its steps; True once that's done, in this attempt or an earlier one."""
    try:
        catalog = Catalog(open_store(store))
    except (UserError, Failure):
        return False
    rows: list[dict[str, Any]] = catalog.rows(
        """
        SELECT json_extract(detail::JSON, 'pid')::INTEGER AS pid, (SELECT count(*) FROM events WHERE run = $run AND kind = 'island_died') AS died,
               coalesce((SELECT max(step) FROM checkpoints WHERE run = $run AND island = $island), 0) AS step
        FROM events WHERE run = $run AND kind = 'island_joined' AND island = $island ORDER BY written_at DESC LIMIT 1
        """,
        {"run": RUN, "island": KILLED_ISLAND},
    )
    if not rows or rows[0]["step"] < STEPS // 2:
        return False
    if rows[0]["died"] or rows[0]["step"] >= STEPS:
        return True
    if not _is_our_island(rows[0]["pid"]):
        return False
    STDERR.print(f"the demo sends SIGKILL to island {KILLED_ISLAND} (pid {rows[0]['pid']}) at step {rows[0]['step']}")
    os.kill(rows[0]["pid"], signal.SIGKILL)
    return True


def _is_our_island(pid: int) -> bool:
    """Whether this process is the island that we mean: the number may be an earlier attempt's, and somebody else's by now."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return {b"island", b"--run", RUN.encode(), str(KILLED_ISLAND).encode()} <= set(arguments)
