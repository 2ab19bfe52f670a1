"""Rows made by hand, and commits at times made by hand, for the tests of the tables."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from manifests.log import live_files, read_log
from manifests.schemas import TABLES
from manifests.store import Store
from manifests.tables import append, open_table
from manifests.upkeep import compact

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
"""When the stories of the tests begin."""


def event(**more: Any) -> dict[str, Any]:
    """A row of `events`."""
    return {"run": "r", "kind": "test", "detail": "{}"} | more


def checkpoint_id(number: int) -> bytes:
    """The id of a checkpoint by its number."""
    return number.to_bytes(16, "big")


def checkpoint(number: int, **more: Any) -> dict[str, Any]:
    """A row of `checkpoints`: an anchor of island 0, if not said otherwise."""
    return {
        "checkpoint": checkpoint_id(number), "run": "r", "island": 0, "incarnation": 0, "round": number, "step": number, "tokens": 0,
        "tokens_s": 0, "tokens_a": 0, "tokens_b": 0, "tokens_c": 0, "clock": [0], "parent": None, "merged": [], "object": "o", "hash": "h",
        "size_bytes": 1, "stream": "{}", "mixture": "{}", "anchor": True, "loss": 1.0, "holdout_loss": None,
    } | more  # fmt: skip


def span(number: int, **more: Any) -> dict[str, Any]:
    """A row of `consumption` that the checkpoint of this number closes."""
    return {
        "run": "r", "island": 0, "incarnation": 0, "step": number, "position": 0, "shard": "a", "shard_position": 0, "tier": "S",
        "origin": "real", "token_start": 0, "tokens": 10, "loss": 1.5, "checkpoint": checkpoint_id(number),
    } | more  # fmt: skip


def job(name: str, **more: Any) -> dict[str, Any]:
    """A row of `jobs`: a tier version, if not said otherwise."""
    return {
        "job": name, "kind": "tier", "command": "c", "config": "{}", "inputs": "{}", "summary": "{}", "code_version": "v", "started_at": START,
    } | more  # fmt: skip


def mixture(**more: Any) -> dict[str, Any]:
    """A row of `mixtures`."""
    return {
        "run": "r", "island": 0, "incarnation": 0, "round": 0, "strategy": "s", "weight_s": 1.0, "weight_a": 0.0, "weight_b": 0.0,
        "weight_c": 0.0, "reason": "r", "tier_version": 1, "query": "q", "parameters": "{}", "inputs": "{}",
    } | more  # fmt: skip


def run(name: str) -> dict[str, Any]:
    """A row of `runs`."""
    return {"run": name, "config": "{}", "command": "c", "code_version": "v"}


def date_commit(store: Store, name: str, moment: datetime, *, version: int | None = None) -> None:
    """Makes a commit of a local store's table, the newest if not said otherwise, one of another time; no file's own time tells of it."""
    number = open_table(store, name).version() if version is None else version
    path = store.root / "tables" / name / "_delta_log" / f"{number:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["timestamp"] = int(moment.timestamp() * 1000)
    path.write_text("\n".join(json.dumps(action) for action in actions) + "\n")


def date_creation(store: Store, moment: datetime) -> None:
    """Makes all that a new local store has as old as this."""
    for name in TABLES:
        for version in range(open_table(store, name).version() + 1):
            date_commit(store, name, moment, version=version)


class Story:
    """A local store in which things happen two hours after each other, from START on; its files are as old as the story says."""

    def __init__(self, store: Store, *, dated: bool = False) -> None:
        """Makes the store as old as START, if it isn't."""
        self.store = store
        self.now = START
        if not dated:
            date_creation(store, START)

    def add(
        self, name: str, *rows: dict[str, Any], writer: str | None = None, sequence: int | None = None
    ) -> datetime | None:
        """Appends rows; returns when, or None where this sequence number was there before."""
        self.now += timedelta(hours=2)
        written = {"written_at": self.now} if "written_at" in TABLES[name].schema.names else {}
        if not append(self.store, name, [row | written for row in rows], writer=writer, sequence=sequence):
            return None
        self._date(name)
        return self.now

    def compact(self, *names: str) -> None:
        """Compacts tables."""
        self.now += timedelta(hours=2)
        for name in names:
            before = open_table(self.store, name).version()
            compact(self.store, [name])
            if open_table(self.store, name).version() > before:
                self._date(name)

    def leave_file(self, name: str) -> Path | None:
        """Leaves a file as of an append that wrote it and got no further: a copy of one that the table has; None where it has none."""
        files = live_files(read_log(self.store, name))
        if not files:
            return None
        original = self.store.root / "tables" / name / next(iter(files))
        path = original.with_name(f"left-{uuid.uuid4()}.parquet")
        shutil.copy(original, path)
        self._date_files(name)
        return path

    def commit_file(self, name: str, path: Path) -> datetime:
        """Commits a file that was left, as the append would have that goes on after all."""
        rows = pq.read_metadata(path).num_rows
        action = AddAction(path.name, path.stat().st_size, {}, 0, True, json.dumps({"numRecords": rows}))
        table = open_table(self.store, name)
        table.create_write_transaction([action], mode="append", schema=table.schema(), partition_by=[])
        self._date(name)
        return self.now

    def _date(self, name: str) -> None:
        date_commit(self.store, name, self.now)
        self._date_files(name)

    def _date_files(self, name: str) -> None:
        for path in (self.store.root / "tables" / name).rglob("*.parquet"):
            if path.stat().st_mtime > self.now.timestamp():
                os.utime(path, (self.now.timestamp(), self.now.timestamp()))
