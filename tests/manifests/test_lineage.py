"""Ancestors and descendants on random histories with branches of branches, held against a walk over every link."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from manifests.questions import MACROS, VIEWS
from manifests.schemas import TABLES

GLOBAL = -1


@dataclass(kw_only=True)
class Told:
    """A run as it stands: its checkpoints, and what merges came before each of its versions."""

    name: str
    parent: Told | None = None
    merge: int = 0
    """Last merge of the parent that it keeps."""
    starts: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    """Island → checkpoint that it goes on from."""
    clock: list[int]
    merges: list[dict[str, Any]] = field(default_factory=list)
    """merge, fragment, version, taken (checkpoints), latest (island → checkpoint), those of the parent that it keeps included."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)


class History:
    """Runs that train, merge and branch at random, by the rules of trainer/: a clock only grows, an island closes each round of a run once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._last_id = 0
        self.num_islands = self.random.randint(2, 4)
        self.num_fragments = self.random.randint(1, 3)
        self.runs = [Told(name="r", clock=[0] * self.num_fragments)]
        self._train(self.runs[0])
        for number in range(self.random.randint(0, 4)):
            branch = self._branch(f"b{number}", self.random.choice(self.runs))
            self._train(branch)
            self.runs.append(branch)
        self.by_id = {row["checkpoint"]: row for run in self.runs for row in run.checkpoints}

    def _train(self, run: Told) -> None:
        heads = {island: run.starts.get(island) for island in range(self.num_islands)}
        waiting: list[dict[str, Any]] = []
        for _ in range(self.num_islands * self.random.randint(2, 6)):
            chance = self.random.random()
            if chance < 0.55:
                island = self.random.randrange(self.num_islands)
                heads[island] = row = self._segment(run, island, heads[island])
                waiting.append(row)
            elif chance < 0.85 and waiting:
                self._merge(run, self.random.sample(waiting, self.random.randint(1, min(2, len(waiting)))))
                waiting = waiting[-4:]
            else:
                latest = run.merges[-1]["latest"].values() if run.merges else []
                merged = [row["checkpoint"] for row in latest]
                self._checkpoint(run, island=GLOBAL, round=len(run.merges), clock=list(run.clock), merged=merged)

    def _segment(self, run: Told, island: int, head: dict[str, Any] | None) -> dict[str, Any]:
        clock = list(head["clock"]) if head else [-1] * self.num_fragments
        for fragment, version in enumerate(run.clock):
            if clock[fragment] < 0 or self.random.random() < 0.5:
                clock[fragment] = max(clock[fragment], version)
        round_, parent = (head["round"] + 1, head["checkpoint"]) if head else (1, None)
        return self._checkpoint(run, island=island, round=round_, clock=clock, parent=parent)

    def _checkpoint(self, run: Told, **more: Any) -> dict[str, Any]:
        self._last_id += 1
        row = {
            "checkpoint": self._last_id.to_bytes(16, "big"),
            "run": run.name,
            "parent": None,
            "merged": [],
            "step": 0,
        } | more
        run.checkpoints.append(row)
        return row

    def _merge(self, run: Told, rows: list[dict[str, Any]]) -> None:
        fragment = self.random.randrange(self.num_fragments)
        run.clock[fragment] += 1
        last = run.merges[-1] if run.merges else {"merge": 0, "latest": {}}
        taken = {row["island"]: row for row in rows}
        run.merges.append(
            {
                "merge": last["merge"] + 1, "fragment": fragment, "version": run.clock[fragment],
                "taken": list(taken.values()), "latest": last["latest"] | taken, "run": run.name,
            }
        )  # fmt: skip

    def _branch(self, name: str, parent: Told) -> Told:
        kept = parent.merges[: self.random.randint(0, len(parent.merges))]
        clock = [max([0, *(m["version"] for m in kept if m["fragment"] == f)]) for f in range(self.num_fragments)]
        starts: dict[int, dict[str, Any] | None] = {}
        for island in range(self.num_islands):
            chain = [parent.starts.get(island), *(row for row in parent.checkpoints if row["island"] == island)]
            clean = [row for row in chain if row and all(a <= b for a, b in zip(row["clock"], clock, strict=True))]
            starts[island] = self.random.choice([None, *clean])
        merge = kept[-1]["merge"] if kept else 0
        return Told(name=name, parent=parent, merge=merge, starts=starts, clock=clock, merges=list(kept))

    def ancestors(self, checkpoint: bytes) -> set[bytes]:
        """Island checkpoints that made one, link by link."""
        runs = {run.name: run for run in self.runs}
        found: set[bytes] = set()
        waiting = [checkpoint]
        while waiting:
            identity = waiting.pop()
            if identity in found:
                continue
            found.add(identity)
            row = self.by_id[identity]
            seen = [m for m in runs[row["run"]].merges if m["version"] <= row["clock"][m["fragment"]]]
            waiting += [taken["checkpoint"] for m in seen for taken in m["taken"]] + row["merged"]
            waiting += [row["parent"]] if row["parent"] else []
        return {identity for identity in found if self.by_id[identity]["island"] != GLOBAL}

    def chain(self, checkpoint: bytes | None) -> set[bytes]:
        """A checkpoint and those that its island went through before."""
        found = set()
        while checkpoint is not None:
            found.add(checkpoint)
            checkpoint = self.by_id[checkpoint]["parent"]
        return found

    def database(self) -> duckdb.DuckDBPyConnection:
        """The tables that lineage rests on, and its views and macros."""
        connection = duckdb.connect()
        for name, rows in (
            ("checkpoints", list(self.by_id.values())),
            ("runs", [self._run_row(run) for run in self.runs]),
            ("events", [_event(merge) for run in self.runs for merge in run.merges if merge["run"] == run.name]),
        ):
            table = pa.Table.from_pylist(rows, schema=TABLES[name].schema)
            connection.register(f"{name}_rows", table)
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {name}_rows")
        for statement in (
            *(VIEWS[name] for name in ("merges", "branch_starts", "merged_segments")),
            *(
                MACROS[name]
                for name in ("ancestors_of", "ancestors", "run_ancestors", "island_segments", "descendants")
            ),
        ):
            connection.execute(statement)
        return connection

    def _run_row(self, run: Told) -> dict[str, Any]:
        if run.parent is None:
            return {"run": run.name}
        starts = {str(island): row and row["checkpoint"].hex() for island, row in run.starts.items()}
        branch = {"parent_run": run.parent.name, "merge": run.merge, "island_checkpoints": starts}
        return {"run": run.name, "parent_run": run.parent.name, "branch": json.dumps(branch)}


def _event(merge: dict[str, Any]) -> dict[str, Any]:
    contributions = [{"island": row["island"], "checkpoint": row["checkpoint"].hex()} for row in merge["taken"]]
    detail = json.dumps({"merge": merge["merge"], "contributions": contributions})
    place = {"fragment": merge["fragment"], "version": merge["version"]}
    return {"run": merge["run"], "kind": "merge", "detail": detail} | place


def _found(database: duckdb.DuckDBPyConnection, sql: str, parameter: Any) -> list[Any]:
    return [row[0] if len(row) == 1 else row for row in database.execute(sql, [parameter]).fetchall()]


def _some(history: History, ids: Iterable[bytes], number: int) -> list[bytes]:
    known = sorted(ids)
    return history.random.sample(known, min(number, len(known)))


@pytest.mark.parametrize("seed", range(15))
def test_lineage_agrees_with_a_walk_over_every_link(seed: int) -> None:
    history = History(seed)
    database = history.database()
    made_of = {identity: history.ancestors(identity) for identity in history.by_id}
    islands = [identity for identity, row in history.by_id.items() if row["island"] != GLOBAL]

    for identity in _some(history, history.by_id, 4):
        assert sorted(_found(database, "SELECT checkpoint FROM ancestors($1)", identity)) == sorted(made_of[identity])
    for run in history.runs:
        whole = set().union(*(made_of[row["checkpoint"]] for row in run.checkpoints))
        assert sorted(_found(database, "SELECT checkpoint FROM run_ancestors($1)", run.name)) == sorted(whole)
        own = set().union(*(history.chain(row["checkpoint"]) for row in run.checkpoints if row["island"] != GLOBAL))
        own |= set().union(*(history.chain(row["checkpoint"]) for row in run.starts.values() if row))
        assert sorted(_found(database, "SELECT checkpoint FROM island_segments($1)", run.name)) == sorted(own)
    for number in (1, 2, 3):
        sources = set(_some(history, islands, number))
        expected = {}
        for identity, row in history.by_id.items():
            if made_of[identity] & sources:
                inherited = row["island"] != GLOBAL and history.chain(identity) & sources
                expected[identity] = "trained" if identity in sources else "inherited" if inherited else "merged"
        answer = _found(database, "SELECT checkpoint, how FROM descendants($1::BLOB[])", list(sources))
        assert len(answer) == len(expected)
        assert dict(answer) == expected


def test_nothing_descends_from_nothing() -> None:
    database = History(0).database()
    assert _found(database, "SELECT checkpoint FROM descendants($1::BLOB[])", []) == []
    assert _found(database, "SELECT checkpoint FROM ancestors_of($1::BLOB[])", []) == []
    assert _found(database, "SELECT checkpoint FROM run_ancestors($1)", "no run") == []
