"""Planning a rollback: from an SQL predicate over documents to what they touched, and the states that a branch may start from.

There are two. The newest: the global fragments as they stand, and each island's last kept checkpoint. And the last clean one: the global fragments before the first
merge that the documents touched, and for each island its last kept checkpoint that had seen neither them nor a touched fragment. Where all islands can go back to
the same round, and to the merges that each had received then, a replay repeats to the bit what they did: such a cut is taken where it lies near.

What is done about it, and the making of a branch, is remedies.py's; losses and costs are outlook.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from trainer.run import GLOBAL, Run, load_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """One outer gradient of one merge."""

    number: int
    fragment: int
    version: int
    checkpoint: bytes
    island: int
    tokens: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an island of a branch starts."""

    island: int
    checkpoint: bytes | None
    """None: from the global state, with its stream at the start."""
    step: int
    redo_steps: int
    """From there to where it stands now."""
    redo_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A consistent state of a run: no island has seen a merge that the global state hasn't."""

    merge: int
    clock: list[int]
    """Version of every fragment."""
    starts: list[Start]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """An outer gradient that one of the documents went into."""

    merge: int
    island: int
    share: float
    """Of its tokens that are the documents'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """What the documents touched."""

    steps: int
    """Inner steps that had one of them, over all islands."""
    tokens: int
    """That were trained on, repetitions included."""
    share: float
    """Of all tokens that the islands have trained on."""
    contributions: list[Contribution]
    late_islands: list[int]
    """Islands that had one of them so lately that what they learned from it may not be merged yet."""

    @property
    def merges(self) -> int:
        """Merges that an outer gradient went into that was learned from them."""
        return len({c.merge for c in self.contributions})


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
    """What documents touched, and from where a branch without them may start."""

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

    is_exact: bool
    """The clean state is a point that the whole run had passed: with mixes that stay, a replay in turn comes out to the bit as if the documents had never come."""
    newest: Cut
    """Where a branch starts that keeps all."""
    touched: Touched

    @property
    def clean(self) -> Cut:
        """The last clean state."""
        starts = [
            Start(
                island=i.island,
                checkpoint=i.restart,
                step=i.restart_step,
                redo_steps=i.redo_steps,
                redo_tokens=i.redo_tokens,
            )
            for i in self.islands
        ]
        return Cut(merge=self.merge, clock=self.clock, starts=starts)

    @property
    def new_run(self) -> str:
        """Name of the replay's branch: the same plan always makes the same one."""
        return self.branch_name("replay")

    def branch_name(self, remedy: str) -> str:
        """Name of a branch: the same plan always makes the same one."""
        text = f"{self.run}/{self.predicate}/{self.clock}/{len(self.doc_ids)}"
        if remedy in ("continue", "damp"):
            text += f"/{self.newest.clock}"
        kind = "rollback" if remedy == "replay" else remedy
        return f"{self.run}-{kind}-{xxhash.xxh3_64_hexdigest(f'{text}/{remedy}'.encode() if remedy != 'replay' else text.encode())[:8]}"


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
    segments = {row["checkpoint"]: row for row in catalog.ask("rollback_segments", documents=doc_ids).to_pylist()}
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
    versions = _versions(catalog, run)
    newest_merge = max(versions, default=0)
    last_clean = newest_merge if first_tainted is None else first_tainted - 1
    num_fragments = next((len(chain[0]["clock"]) for chain in chains.values() if chain), run.config.num_fragments)

    def clock_at(merge: int) -> list[int]:
        known = [(f, version) for number, (f, version) in versions.items() if number <= merge]
        return [max((version for at, version in known if at == f), default=0) for f in range(num_fragments)]

    limits = {island: _first_touched(chain, segments) for island, chain in chains.items()}
    lineage = _Lineage(run, catalog, rows, merges)
    clean = _cut(store, chains, limits, last_clean, clock_at(last_clean))
    exact = _exact_cut(store, chains, limits, last_clean, lineage, clock_at)
    # To redo more than an anchor's distance for it would be dear.
    slack = run.config.sync_every * run.config.checkpoint_cycles * len(chains)
    is_exact = exact is not None and _redone(exact) <= _redone(clean) + slack
    if exact is not None and is_exact:
        clean = exact
    everything = {island: len(chain) for island, chain in chains.items()}
    return Plan(
        run=run_name,
        predicate=predicate,
        doc_ids=doc_ids,
        islands=[_plan_island(chains[start.island], segments, start) for start in clean.starts],
        clock=clean.clock,
        merge=clean.merge,
        merges_undone=len({m.number for m in merges if m.number > clean.merge}),
        is_exact=is_exact,
        newest=_cut(store, chains, everything, newest_merge, clock_at(newest_merge)),
        touched=_touched(run, chains, segments, merges),
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


def run_of_merge(run: Run, merge: int) -> Run:
    """The run that made a merge: this one, or where it's older, one of those that it branches from."""
    while run.branch is not None and merge < run.branch.merge:
        run = load_run(run.store, run.branch.parent_run)
    return run


_CHECKPOINTS = f"""
SELECT checkpoint, parent, run, island, round, step, tokens, clock, anchor, object, inputs FROM checkpoints WHERE island <> {GLOBAL} ORDER BY step
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
        for row in catalog.rows(
            "SELECT merge, fragment, version, checkpoint, island, tokens, steps FROM merges WHERE run = ?", [name]
        ):
            if until is None or row["merge"] <= until:
                found.append(
                    Merge(
                        number=row["merge"],
                        fragment=row["fragment"],
                        version=row["version"],
                        checkpoint=row["checkpoint"],
                        island=row["island"],
                        tokens=row["tokens"],
                        steps=row["steps"],
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


def _first_touched(chain: Sequence[dict[str, Any]], segments: Mapping[bytes, dict[str, Any]]) -> int:
    return next((i for i, row in enumerate(chain) if row["checkpoint"] in segments), len(chain))


def _redone(cut: Cut) -> int:
    return sum(start.redo_steps for start in cut.starts)


def _start(chain: Sequence[dict[str, Any]], island: int, row: dict[str, Any] | None) -> Start:
    head_step, head_tokens = (chain[-1]["step"], chain[-1]["tokens"]) if chain else (0, 0)
    step, tokens = (row["step"], row["tokens"]) if row else (0, 0)
    checkpoint = row["checkpoint"] if row else None
    return Start(
        island=island, checkpoint=checkpoint, step=step, redo_steps=head_step - step, redo_tokens=head_tokens - tokens
    )


def _cut(
    store: Store,
    chains: Mapping[int, Sequence[dict[str, Any]]],
    limits: Mapping[int, int],
    merge: int,
    clock: Sequence[int],
) -> Cut:
    """For each island its last whole checkpoint among the first `limits` of its chain that has seen nothing newer than `clock`."""
    starts = []
    for island, chain in chains.items():
        sound = [
            row
            for row in chain[: limits[island]]
            if row["anchor"] and all(seen <= limit for seen, limit in zip(row["clock"], clock, strict=True))
        ]
        # The object of the last one may not have come before the island died.
        row = next((row for row in reversed(sound) if store.exists(row["object"])), None)
        starts.append(_start(chain, island, row))
    return Cut(merge=merge, clock=list(clock), starts=starts)


class _Lineage:
    """What the islands of a run had received, and what of theirs was merged, at each of their rounds."""

    def __init__(
        self, run: Run, catalog: Catalog, rows: Mapping[bytes, dict[str, Any]], merges: Sequence[Merge]
    ) -> None:
        self._starts: dict[str, int] = {}
        at: Run | None = run
        while at is not None:
            self._starts[at.name] = at.branch.merge if at.branch is not None else 0
            at = load_run(at.store, at.branch.parent_run, catalog=catalog) if at.branch is not None else None
        self._merged = [(m.number, m.island, rows[m.checkpoint]["round"]) for m in merges if m.checkpoint in rows]

    def received(self, chain: Sequence[dict[str, Any]], count: int) -> int | None:
        """The last merge that an island had received before the first step after its `count`-th round; None: unknown."""
        step = chain[count - 1]["step"] if count else 0
        newest = 0
        for row in chain[: count + 1]:
            newest = max(newest, self._starts.get(row["run"], 0))
            if row["inputs"] is None:
                return None
            newest = max([newest, *(merge for at, merge in json.loads(row["inputs"])["receipts"] if at <= step)])
        return newest

    def merged_round(self, island: int, merge: int) -> int:
        """The island's last round that had gone in up to a merge."""
        return max((round_ for number, of, round_ in self._merged if of == island and number <= merge), default=0)


def _exact_cut(
    store: Store,
    chains: Mapping[int, Sequence[dict[str, Any]]],
    limits: Mapping[int, int],
    last_clean: int,
    lineage: _Lineage,
    clock_at: Callable[[int], list[int]],
) -> Cut | None:
    """The last clean point at which all islands stood at the end of the same round, with the same merges received."""
    rounds: set[int] = {0}
    for chain in chains.values():
        rounds |= {row["round"] for row in chain if row["anchor"]}
    for round_ in sorted(rounds, reverse=True):
        counts = {island: sum(row["round"] <= round_ for row in chain) for island, chain in chains.items()}
        if any(counts[island] > limits[island] for island in chains):
            continue
        rows = {island: chain[counts[island] - 1] if counts[island] else None for island, chain in chains.items()}
        if round_ and not all(
            row is not None and row["round"] == round_ and row["anchor"] and store.exists(row["object"])
            for row in rows.values()
        ):
            continue
        received = {lineage.received(chain, counts[island]) for island, chain in chains.items()}
        if len(received) != 1:
            continue
        merge = received.pop()
        if merge is None or merge > last_clean:
            continue
        if any(lineage.merged_round(island, merge) > round_ for island in chains):
            continue
        starts = [_start(chain, island, rows[island]) for island, chain in chains.items()]
        return Cut(merge=merge, clock=clock_at(merge), starts=starts)
    return None


def _touched(
    run: Run,
    chains: Mapping[int, Sequence[dict[str, Any]]],
    segments: Mapping[bytes, dict[str, Any]],
    merges: Sequence[Merge],
) -> Touched:
    rows = {row["checkpoint"]: (chain, place) for chain in chains.values() for place, row in enumerate(chain)}
    contributions = []
    for merge in merges:
        if merge.checkpoint not in rows:
            continue  # of rounds that the run has gone back behind
        chain, place = rows[merge.checkpoint]
        since = chain[place]["step"] - merge.steps
        learned_from = [row for row in chain[: place + 1] if row["step"] > since]
        tokens = sum(segments[r["checkpoint"]]["tokens"] for r in learned_from if r["checkpoint"] in segments)
        if tokens:
            share = min(1.0, tokens / merge.tokens)
            contributions.append(Contribution(merge=merge.number, island=merge.island, share=share))
    own = [segments[row["checkpoint"]] for chain in chains.values() for row in chain if row["checkpoint"] in segments]
    total = sum(chain[-1]["tokens"] for chain in chains.values() if chain)
    tokens = sum(row["tokens"] for row in own)
    late = [
        island
        for island, chain in chains.items()
        if any(row["checkpoint"] in segments for row in chain[-2 * run.config.num_fragments :])
    ]
    return Touched(
        steps=sum(row["steps"] for row in own),
        tokens=tokens,
        share=tokens / total if total else 0.0,
        contributions=contributions,
        late_islands=late,
    )


def _plan_island(chain: Sequence[dict[str, Any]], segments: Mapping[bytes, dict[str, Any]], start: Start) -> IslandPlan:
    touched = [segments[row["checkpoint"]] for row in chain if row["checkpoint"] in segments]
    return IslandPlan(
        island=start.island,
        first_step=min((row["first_step"] for row in touched), default=None),
        documents=len({doc for row in touched for doc in row["ids"]}),
        tokens=sum(row["tokens"] for row in touched),
        restart=start.checkpoint,
        restart_step=start.step,
        redo_steps=start.redo_steps,
        redo_tokens=start.redo_tokens,
    )
