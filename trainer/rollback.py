"""Rollback: from an SQL predicate over documents to a new branch of the run that never saw them.

The plan finds the islands, steps and merges that the documents touched, and the last state that is clean of them: the global fragments before the first
merge that they touched, and for each island its last kept checkpoint that had seen neither them nor a touched fragment. Applying it makes a
new run that starts there and leaves the documents out; nothing old is deleted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.predicates import documents_with_tiers
from manifests.store import Store
from trainer.config import RunConfig
from trainer.members import members
from trainer.run import GLOBAL, Branch, Run, create_run, load_run, read_excluded
from trainer.talk import Talk
from trainer.tape import first_state, replay, write_snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """One outer gradient of one merge."""

    number: int
    fragment: int
    version: int
    checkpoint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class IslandPlan:
    """What a rollback means for one island."""

    island: int
    first_step: int | None
    """First step that trained on one of the documents; None: it never did itself."""
    documents: int
    """Documents of the predicate that it trained on."""
    tokens: int
    """Tokens of them."""
    restart: bytes | None
    """Checkpoint that it starts from; None: from the clean global state, with its stream at the start."""
    restart_step: int
    redo_steps: int
    redo_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A replay from the last clean state, without the documents."""

    run: str
    predicate: str
    doc_ids: list[bytes]
    """All documents of the predicate, also those that no island has read yet."""
    islands: list[IslandPlan]
    clock: list[int]
    """Last clean version of every fragment."""
    merge: int
    """Last clean merge; 0: none."""
    merges_undone: int

    @property
    def new_run(self) -> str:
        """Name of the branch: the same plan always makes the same one."""
        text = f"{self.run}/{self.predicate}/{self.clock}/{len(self.doc_ids)}"
        return f"{self.run}-rollback-{xxhash.xxh3_64_hexdigest(text.encode())[:8]}"


def plan_rollback(store: Store, run_name: str, predicate: str) -> Plan:
    """What taking back the documents of a predicate means.

    Args:
        store: the store.
        run_name: the run, or a branch of one.
        predicate: SQL condition over the columns of `documents`, and `tier` and `score` in the run's tier version.

    Raises:
        UserError: no such run, SQL that DuckDB refuses, a predicate that matches nothing, everything, or nothing that was trained on.
    """
    catalog = Catalog(store)
    run = load_run(store, run_name, catalog=catalog)
    doc_ids = _matching(catalog, run.config, predicate)
    segments = {row["checkpoint"]: row for row in catalog.rows(_SEGMENTS, [doc_ids])}
    rows = {row["checkpoint"]: row for row in catalog.rows(_CHECKPOINTS)}
    chains = {island: _chain(rows, run, island) for island in _islands(run)}
    merges = _merges(catalog, run)
    seen = {row["checkpoint"] for chain in chains.values() for row in chain} | {m.checkpoint for m in merges}
    tainted = _tainted(rows, segments) & seen
    if not tainted:
        raise UserError(
            f"no checkpoint of run {run_name} has seen the {len(doc_ids)} documents WHERE {predicate}; there is nothing to undo"
        )
    first_tainted = min((m.number for m in merges if m.checkpoint in tainted), default=None)
    clean = [m for m in merges if first_tainted is None or m.number < first_tainted]
    versions = _versions(catalog, run)
    merge = max(versions, default=0) if first_tainted is None else first_tainted - 1
    num_fragments = len(chains[0][0]["clock"]) if chains[0] else run.config.num_fragments
    clock = [
        max((version for number, (at, version) in versions.items() if at == f and number <= merge), default=0)
        for f in range(num_fragments)
    ]
    return Plan(
        run=run_name,
        predicate=predicate,
        doc_ids=doc_ids,
        islands=[_plan_island(store, island, chain, segments, clock) for island, chain in chains.items()],
        clock=clock,
        merge=merge,
        merges_undone=len({m.number for m in merges} - {m.number for m in clean}),
    )


def apply_rollback(store: Store, plan: Plan) -> Run:
    """Makes the branch that the plan describes. Its last act is the run's row: until then there is no branch, and it may be done again.

    Returns:
        The new run, ready to be trained to the old run's number of steps.
    """
    old = load_run(store, plan.run)
    config = dataclasses.replace(old.config, run=plan.new_run)
    excluded = b"".join(sorted(read_excluded(old) | set(plan.doc_ids)))
    excluded_object = f"runs/{plan.new_run}/excluded-{xxhash.xxh3_128_hexdigest(excluded)}.bin"
    store.put_content(excluded_object, excluded)
    anatomy = first_state(old)[1]
    state = replay(_with_merge(old, plan.merge), anatomy, end=plan.merge)
    state.talk = Talk()  # the branch's islands count their lives, and so what they tell, from one again
    write_snapshot(Run(store=store, config=config, branch=None), state)
    branch = Branch(
        parent_run=plan.run,
        predicate=plan.predicate,
        excluded_object=excluded_object,
        clock=plan.clock,
        merge=plan.merge,
        island_checkpoints={str(i.island): i.restart.hex() if i.restart else None for i in plan.islands},
    )
    return create_run(store, config, branch=branch)


def _with_merge(run: Run, merge: int) -> Run:
    """The run that made a merge: this one, or where it's older, one of those that it branches from."""
    while run.branch is not None and merge < run.branch.merge:
        run = load_run(run.store, run.branch.parent_run)
    return run


_CHECKPOINTS = f"""
SELECT checkpoint, parent, run, island, round, step, tokens, clock, anchor, object FROM checkpoints WHERE island <> {GLOBAL} ORDER BY step
"""
_SEGMENTS = """
WITH places AS MATERIALIZED (
    SELECT DISTINCT shard, position AS shard_position, doc_id AS id FROM shards WHERE doc_id IN (SELECT unnest(?::BLOB[]))
)
SELECT c.checkpoint, min(c.step) AS first_step, count(DISTINCT p.id) AS documents, sum(c.tokens)::BIGINT AS tokens, list(DISTINCT p.id) AS ids
FROM consumption AS c
JOIN places AS p USING (shard, shard_position)
-- Says nothing new, but lets the scan pass over the rows of all other shards.
WHERE c.shard IN (SELECT shard FROM places)
GROUP BY c.checkpoint
"""


def _matching(catalog: Catalog, config: RunConfig, predicate: str) -> list[bytes]:
    facts = f"{documents_with_tiers(config.tier_version)} WHERE d.split = 'train'"
    found = catalog.query(f"SELECT doc_id FROM ({facts}) WHERE (\n{predicate}\n)")
    total = catalog.rows("SELECT count(*) AS n FROM documents WHERE split = 'train'")[0]["n"]
    if found.num_rows == 0:
        raise UserError(f"no document matches {predicate!r}; try it with `atoll sql`")
    if found.num_rows == total:
        raise UserError(f"all {total} documents match {predicate!r}; nothing would be left to train on")
    return list(pa.chunked_array(found["doc_id"]).to_pylist())


def _tainted(rows: Mapping[bytes, dict[str, Any]], segments: Mapping[bytes, dict[str, Any]]) -> set[bytes]:
    """Checkpoints whose segment trained on one of the documents, and those that go on from one; `rows` by step, so that parents come first."""
    tainted: set[bytes] = set()
    for checkpoint, row in rows.items():
        if checkpoint in segments or row["parent"] in tainted:
            tainted.add(checkpoint)
    return tainted


def _islands(run: Run) -> list[int]:
    """Those that the run was planned for, and all that came besides, also to the runs that it branches from."""
    inherited = {int(island) for island in run.branch.island_checkpoints} if run.branch is not None else set()
    return sorted(members(run).keys() | inherited)


def _chain(rows: Mapping[bytes, dict[str, Any]], run: Run, island: int) -> list[dict[str, Any]]:
    """Checkpoints of an island from its first to its last, those of the runs that it branches from included."""
    own = [row for row in rows.values() if row["run"] == run.name and row["island"] == island]
    head: bytes | None = max(own, key=lambda row: row["round"])["checkpoint"] if own else None
    if head is None and run.branch is not None:
        named = run.branch.island_checkpoints.get(str(island))
        head = bytes.fromhex(named) if named else None
    chain = []
    while head is not None:
        chain.append(rows[head])
        head = rows[head]["parent"]
    return chain[::-1]


def _merges(catalog: Catalog, run: Run) -> list[Merge]:
    """Outer gradients of all merges that led to the run's global state, its parents' included."""
    found: list[Merge] = []
    name, branch, until = run.name, run.branch, None
    while True:
        for row in catalog.rows("SELECT merge, fragment, version, checkpoint FROM merges WHERE run = ?", [name]):
            if until is None or row["merge"] <= until:
                found.append(
                    Merge(
                        number=row["merge"],
                        fragment=row["fragment"],
                        version=row["version"],
                        checkpoint=row["checkpoint"],
                    )
                )
        if branch is None:
            return found
        name, until = branch.parent_run, branch.merge if until is None else min(until, branch.merge)
        branch = load_run(run.store, name, catalog=catalog).branch


def _versions(catalog: Catalog, run: Run) -> dict[int, tuple[int, int]]:
    """Fragment and version of every merge that led to the run's global state, also of those that all was kept out of."""
    sql = (
        "SELECT (detail ->> 'merge')::INTEGER AS merge, fragment, version FROM events WHERE kind = 'merge' AND run = ?"
    )
    found: dict[int, tuple[int, int]] = {}
    until: int | None = None
    while True:
        for row in catalog.rows(sql, [run.name]):
            if until is None or row["merge"] <= until:
                found[row["merge"]] = (row["fragment"], row["version"])
        if run.branch is None:
            return found
        until = run.branch.merge if until is None else min(until, run.branch.merge)
        run = load_run(run.store, run.branch.parent_run, catalog=catalog)


def _first_touched(chain: Sequence[dict[str, Any]], segments: dict[bytes, dict[str, Any]]) -> int:
    return next((i for i, row in enumerate(chain) if row["checkpoint"] in segments), len(chain))


def _plan_island(
    store: Store,
    island: int,
    chain: Sequence[dict[str, Any]],
    segments: dict[bytes, dict[str, Any]],
    clock: Sequence[int],
) -> IslandPlan:
    touched = [segments[row["checkpoint"]] for row in chain if row["checkpoint"] in segments]
    clean = [
        row
        for row in chain[: _first_touched(chain, segments)]
        if row["anchor"] and all(seen <= limit for seen, limit in zip(row["clock"], clock, strict=True))
    ]
    # The object of the last one may not have come before the island died.
    restart = next((row for row in reversed(clean) if store.exists(row["object"])), None)
    head = chain[-1] if chain else None
    head_step, head_tokens = (head["step"], head["tokens"]) if head else (0, 0)
    step, tokens = (restart["step"], restart["tokens"]) if restart else (0, 0)
    return IslandPlan(
        island=island,
        first_step=min((row["first_step"] for row in touched), default=None),
        documents=len({doc for row in touched for doc in row["ids"]}),
        tokens=sum(row["tokens"] for row in touched),
        restart=restart["checkpoint"] if restart else None,
        restart_step=step,
        redo_steps=head_step - step,
        redo_tokens=head_tokens - tokens,
    )


def plan_table(plan: Plan) -> pa.Table:
    """The plan as rows, one for each island."""
    return pa.table(
        {
            "island": [i.island for i in plan.islands],
            "documents": [i.documents for i in plan.islands],
            "tokens": [i.tokens for i in plan.islands],
            "first_step": pa.array([i.first_step for i in plan.islands], pa.int64()),
            "restart_step": [i.restart_step for i in plan.islands],
            "redo_steps": [i.redo_steps for i in plan.islands],
            "redo_tokens": [i.redo_tokens for i in plan.islands],
        }
    )
