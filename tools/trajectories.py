"""The course of runs as data: what the islands mixed, what they told, what came of it; Parquet files with a data card. No document and no parameter is in it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.catalog import Catalog, write_whole
from manifests.errors import UserError
from manifests.schemas import TABLES
from manifests.store import Store

_QUESTIONS = {
    "runs": (
        "a run and all of its options",
        "SELECT run, parent_run, config, code_version, written_at FROM runs WHERE run IN (SELECT unnest(?))",
    ),
    "mixtures": (
        "a mix that an island read by from that round on, and why",
        "SELECT run, island, round, strategy, weight_s, weight_a, weight_b, weight_c, weights, reason, tier_version, parameters, written_at "
        "FROM mixtures WHERE run IN (SELECT unnest(?)) ORDER BY run, island, round, written_at",
    ),
    "feedback": (
        "what an island told of an outer cycle, as the syncer understood it",
        "SELECT * FROM feedback WHERE run IN (SELECT unnest(?)) ORDER BY run, island, sequence",
    ),
    "losses": (
        "an island (or, as island −1, the global parameters) at the end of a round: what it had read by then, its training and holdout loss",
        "SELECT run, island, incarnation, round, step, tokens, tokens_s, tokens_a, tokens_b, tokens_c, clock, loss, holdout_loss, written_at "
        "FROM checkpoints WHERE run IN (SELECT unnest(?)) ORDER BY run, island, round",
    ),
    "events": (
        "what happened in a run: merges with their participants and cosines, switches of strategy, tier versions taken, …",
        "SELECT run, kind, island, fragment, version, detail, written_at FROM events WHERE run IN (SELECT unnest(?)) ORDER BY run, written_at",
    ),
}
"""File → what a row is, and the SQL that it holds the answer of."""
_TABLE_OF = {"losses": "checkpoints"}


def export_trajectories(store: Store, runs: Sequence[str], out: Path, *, about: str = "") -> dict[str, int]:
    """Writes the course of runs into a new folder.

    Args:
        store: the store.
        runs: their names.
        out: the folder; it must not exist.
        about: where they come from, for the data card.

    Returns:
        Rows of each file.

    Raises:
        UserError: the folder exists, or there is no such run.
    """
    if out.exists():
        raise UserError(f"{out} exists; name a new folder")
    catalog = Catalog(store)
    known = {row["run"] for row in catalog.rows("SELECT run FROM runs")}
    if missing := [run for run in runs if run not in known]:
        raise UserError(
            f"no run {missing[0]} in {store.uri}; `atoll ask runs` lists them"
            if known
            else f"{store.uri} has no run yet"
        )
    tables = {name: catalog.query(sql, [list(runs)]) for name, (_, sql) in _QUESTIONS.items()}
    out.mkdir(parents=True)
    for name, table in tables.items():
        pq.write_table(table, out / f"{name}.parquet", compression="zstd")
    write_whole(out / "README.md", _card(tables, runs, about).encode())
    return {name: table.num_rows for name, table in tables.items()}


def _card(tables: dict[str, pa.Table], runs: Sequence[str], about: str) -> str:
    """The data card: what is in it, what the columns are, how it came about, what it's not fit for."""
    parts = [
        "# Trajectories of mixes",
        f"{about}\n" if about else "",
        f"The course of {len(runs)} runs of Atoll {version('atoll')}, exported {datetime.now(UTC):%Y-%m-%d}: {', '.join(runs)}.",
        "Which mix of tiers every island read and why, what it told, and the losses that came of it. No document, token or parameter is in these files; "
        "the names and options of the runs are.",
        "Losses are means in nats per token; holdout losses are over the run's first holdout sequences, which adaptive mixes steer by. Islands that were killed tell some rounds "
        "of their own clock anew: step times and link rates aren't repeatable, all else is for a run in turn.",
    ]
    for name, table in tables.items():
        described = {field.name: field for field in TABLES[_TABLE_OF.get(name, name)].schema}
        parts.append(f"## {name}.parquet ({table.num_rows:,} rows)\n\nA row is {_QUESTIONS[name][0]}.\n")
        lines = ["| column | type | meaning |", "| --- | --- | --- |"]
        for column in table.schema:
            metadata = described[column.name].metadata
            meaning = ", ".join(metadata[key].decode() for key in (b"meaning", b"unit") if key in metadata)
            lines.append(f"| `{column.name}` | {column.type} | {meaning} |")
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"
