"""The four things that may be done about documents that did harm, each a new branch of the run that never reads them again.

continue: go on from the newest state. damp: the same, with what the documents' islands contributed taken away as far as the holdout bears it (damping.py). replay: go
back to the last clean state and take the steps again without the documents. restore: go back there, and let the work since be lost: the steps that it took count as taken.

A branch is made by its last act, the row in `runs`; until then it may be tried again, and the same plan makes the same branch. Nothing old is deleted. What the
documents touched is rollback.py's to say; what the remedies cost, outlook.py's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import torch
import xxhash

from manifests.catalog import Catalog
from manifests.errors import Failure, ObjectMissing, ObjectTaken, UserError
from manifests.store import Store
from trainer.config import RunConfig
from trainer.damping import Damping, damped, find_directions, search
from trainer.feed import holdout_tokens
from trainer.model import build_model, holdout_loss, parameters_of
from trainer.quantise import Tensors
from trainer.rollback import Cut, Plan, Start, run_of_merge
from trainer.run import Branch, Run, create_run, load_run, read_excluded
from trainer.talk import Talk
from trainer.tape import Anatomy, GlobalState, first_state, replay, snapshots, write_snapshot
from trainer.undo import require_not_undone
from trainer.wire import CorruptObject, object_hash, unpack

REMEDIES = ("continue", "damp", "replay", "restore")


def apply_rollback(store: Store, plan: Plan, remedy: str = "replay") -> Run:
    """Makes the branch that a remedy is. Its last act is the run's row: until then there is no branch, and it may be done again.

    Args:
        store: the store.
        plan: what the documents touched.
        remedy: one of REMEDIES.

    Returns:
        The new run, ready to be trained to its number of steps.

    Raises:
        UserError: there is no such remedy, it makes no sense here, or the branch was taken back.
        Failure: what the branch would start from is gone or damaged; the message names it.
    """
    if remedy not in REMEDIES:
        raise UserError(f"there is no plan {remedy!r}; there are {', '.join(REMEDIES)}")
    catalog = Catalog(store)
    old = load_run(store, plan.run, catalog=catalog)
    name = plan.branch_name(remedy)
    if catalog.rows("SELECT 1 FROM runs WHERE run = ?", [name]):
        require_not_undone(catalog, name)
        return load_run(store, name, catalog=catalog)
    cut = cut_of(plan, remedy)
    _require_sense(old, cut, remedy)
    require_data(store, catalog, old.config)
    anatomy = first_state(old)[1]
    _require_sound_snapshot(catalog, run_of_merge(old, cut.merge), cut.merge)
    for start in cut.starts:
        _require_sound(store, catalog, start, anatomy)
    config = dataclasses.replace(old.config, run=name, steps=steps_of(old.config, cut, remedy))
    excluded = b"".join(sorted(read_excluded(old) | set(plan.doc_ids)))
    excluded_object = f"runs/{name}/excluded-{xxhash.xxh3_128_hexdigest(excluded)}.bin"
    store.put_content(excluded_object, excluded)
    state = _damp(old, catalog, anatomy, plan, name) if remedy == "damp" else state_at(old, anatomy, cut.merge)
    state.talk = Talk()  # the branch's islands count their lives, and so what they tell, from one again
    write_snapshot(Run(store=store, config=config, branch=None), state)
    branch = Branch(
        parent_run=plan.run,
        predicate=plan.predicate,
        excluded_object=excluded_object,
        clock=state.clock,
        merge=cut.merge,
        island_checkpoints={str(s.island): s.checkpoint.hex() if s.checkpoint else None for s in cut.starts},
        plan=remedy,
        brought_back=plan.touched.late_islands if remedy == "damp" else [],
    )
    return create_run(store, config, branch=branch)


def cut_of(plan: Plan, remedy: str) -> Cut:
    """Where a remedy's branch starts."""
    return plan.newest if remedy in ("continue", "damp") else plan.clean


def steps_of(config: RunConfig, cut: Cut, remedy: str) -> int:
    """Inner steps of a remedy's branch. Those that `restore` loses count as taken: its islands take as many fewer, but for a round at least."""
    if remedy != "restore":
        return config.steps
    lost = max((start.redo_steps for start in cut.starts), default=0)
    least = max([config.round_steps, *(start.step for start in cut.starts)])
    return max(least, config.steps - lost)


def state_at(run: Run, anatomy: Anatomy, merge: int) -> GlobalState:
    """The global state after a merge of a run, or of one that it branches from.

    Raises:
        Failure: what it takes is gone or damaged; the message names it.
    """
    return replay(run_of_merge(run, merge), anatomy, end=merge)


def holdout_measure(run: Run, catalog: Catalog) -> Callable[[Tensors], float]:
    """A function from global parameters to their loss on the run's holdout, nats per token."""
    model = build_model(run.config)
    holdout = holdout_tokens(run, catalog)
    own = parameters_of(model)

    def loss_of(parameters: Tensors) -> float:
        for name, value in parameters.items():
            own[name].copy_(value)
        return holdout_loss(model, holdout)

    return loss_of


def find_damping(run: Run, catalog: Catalog, anatomy: Anatomy, plan: Plan) -> tuple[Damping, GlobalState]:
    """How far the suspects' contributions are best taken away, and the state after that.

    Raises:
        Failure: a merge or an outer gradient is gone or damaged.
    """
    contributions = plan.touched.contributions
    directions = find_directions(run, anatomy, end=plan.newest.merge, contributions=contributions)
    damping = search(directions, holdout_measure(run, catalog))
    return damping, damped(directions, damping)


def require_data(store: Store, catalog: Catalog, config: RunConfig) -> None:
    """Sees to it that what the islands will read is there.

    Raises:
        UserError: the run's tier version has no views any more, or the index of one is gone.
    """
    sql = "SELECT tier, object FROM views WHERE tier_version = ? AND pool = ? ORDER BY tier"
    views = catalog.rows(sql, [config.tier_version, config.pool])
    mend = f"`atoll shard --tier-version {config.tier_version}` writes them anew"
    if not views:
        raise UserError(f"run {config.run} reads tier version {config.tier_version}, which has no views; {mend}")
    for row in views:
        if not store.exists(row["object"]):
            raise UserError(
                f"{store.uri}/{row['object']}, the view of tier {row['tier']} in tier version {config.tier_version}, is gone; {mend}"
            )


def _damp(run: Run, catalog: Catalog, anatomy: Anatomy, plan: Plan, name: str) -> GlobalState:
    """The damped state; of two who measure at once, the first one's factor counts."""
    contributions = plan.touched.contributions
    directions = find_directions(run, anatomy, end=plan.newest.merge, contributions=contributions)
    path = f"runs/{name}/damping.json"
    try:
        kept = run.store.get(path)
    except ObjectMissing:
        kept = json.dumps(dataclasses.asdict(search(directions, holdout_measure(run, catalog)))).encode()
        try:
            run.store.put_new(path, kept)
        except ObjectTaken:
            kept = run.store.get(path)
    try:
        damping = Damping(**json.loads(kept))
    except (ValueError, TypeError) as e:
        raise Failure(f"{run.store.uri}/{path} is damaged: {e}; delete it, and apply the plan again") from e
    return damped(directions, damping)


def _require_sound_snapshot(catalog: Catalog, run: Run, merge: int) -> None:
    """Holds the snapshot that a state is made from against its row; the run's first, and a branch's, have none."""
    at = max((number for number in snapshots(run) if number <= merge), default=None)
    if at is None:
        return  # the replay says so
    path = run.snapshot_path(at)
    for row in catalog.rows("SELECT hash FROM checkpoints WHERE run = ? AND object = ?", [run.name, path]):
        if object_hash(run.store.get(path)) != row["hash"]:
            raise Failure(
                f"{run.store.uri}/{path} is not what was committed; restore it from a copy of the store, or delete it: the state is then made from the one before"
            )


def _require_sense(run: Run, cut: Cut, remedy: str) -> None:
    if remedy == "continue" and all(start.step >= run.config.steps for start in cut.starts):
        raise UserError(
            f"run {run.name} has taken all its {run.config.steps} steps: there is nothing left to continue; take damp, replay or restore"
        )


def _require_sound(store: Store, catalog: Catalog, start: Start, anatomy: Anatomy) -> None:
    """Reads an island's checkpoint as it will be read.

    Raises:
        Failure: it's gone, damaged, or of another run, island or model.
    """
    if start.checkpoint is None:
        return
    row = catalog.rows("SELECT run, island, object, hash FROM checkpoints WHERE checkpoint = ?", [start.checkpoint])[0]
    path = f"{store.uri}/{row['object']}, the checkpoint of island {start.island} after step {start.step},"
    mend = "restore it from a copy of the store, or delete it: the plan then starts from the one before"
    try:
        data = store.get(row["object"])
    except ObjectMissing as e:
        raise Failure(
            f"{path} is gone; restore it from a copy of the store, or plan again: then from the one before"
        ) from e
    if object_hash(data) != row["hash"]:
        raise Failure(f"{path} is not what was committed; {mend}")
    try:
        tensors, description = unpack(data, name=row["object"])
    except CorruptObject as e:
        raise Failure(f"{path} is damaged; {mend}") from e
    said = (description.get("run"), description.get("island"))
    if said != (row["run"], row["island"]):
        raise Failure(
            f"{path} is of island {said[1]} of run {said[0]}, not of island {row['island']} of run {row['run']}; {mend}"
        )
    other = torch.empty(0)
    if any(tuple(tensors.get(f"parameter/{name}", other).shape) != shape for name, shape in anatomy.shapes.items()):
        raise Failure(f"{path} is of another model than run {row['run']}'s; {mend}")
