"""The run's tape: numbered merges, from which the global state after any of them follows to the bit.

A merge is one object, created once, that holds what the islands receive of it and says which outer gradients went in. A snapshot holds the whole state now and then,
so that nobody reads the tape from its start. An island follows the tape by the merges alone; a syncer that starts, a rollback and a replay make them again from
the outer gradients, since the outer momentum is in no merge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from manifests.errors import Failure, ObjectMissing
from trainer.fragments import cut_fragments
from trainer.gate import GateMemory
from trainer.model import build_model, embeddings_of, parameters_of
from trainer.outer import Outer, Part, follow, merged_gradient, outer_step
from trainer.quantise import Tensors, dequantise
from trainer.run import Run
from trainer.talk import Talk
from trainer.wire import CorruptObject, object_hash, pack, reread, unpack, unpack_parts

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """How the run's model is cut."""

    fragments: list[list[str]]
    """Names of the tensors of each."""
    shapes: Shapes
    embeddings: frozenset[str]
    """Tensors that are averaged plainly."""

    def shapes_of(self, fragment: int) -> Shapes:
        """Shapes of a fragment's tensors."""
        return {name: self.shapes[name] for name in self.fragments[fragment]}


def anatomy_of(run: Run, model: torch.nn.Module) -> Anatomy:
    """How a model is cut in this run; the same for everyone."""
    shapes = {name: tuple(value.shape) for name, value in parameters_of(model).items()}
    sizes = {name: value.numel() for name, value in parameters_of(model).items()}
    return Anatomy(
        fragments=cut_fragments(sizes, run.config.num_fragments),
        shapes=shapes,
        embeddings=frozenset(embeddings_of(model)) & frozenset(shapes),
    )


@dataclass(kw_only=True, slots=True)
class Fragment:
    """One global fragment as the syncer holds it."""

    version: int
    outer: Outer
    merged_rounds: dict[int, int] = field(default_factory=dict)
    """Island → round of its last outer gradient that was merged or dropped."""


@dataclass(kw_only=True, slots=True)
class GlobalState:
    """The whole global state after a merge."""

    merge: int
    fragments: list[Fragment]
    latest: dict[str, dict[str, Any]]
    """Island → its newest checkpoint that went in, with the step that it had."""
    gate: GateMemory
    talk: Talk = field(default_factory=Talk)

    @property
    def clock(self) -> list[int]:
        """Version of every fragment."""
        return [fragment.version for fragment in self.fragments]

    def parameters(self) -> Tensors:
        """The global parameters."""
        return {name: value for fragment in self.fragments for name, value in fragment.outer.parameters.items()}


@reread
def read_merge(run: Run, anatomy: Anatomy, merge: int) -> tuple[Tensors, dict[str, Any]]:
    """A merge's parts and description.

    Raises:
        ObjectMissing: there is none of this number yet.
        CorruptObject: damaged, or of another run or model.
    """
    path = run.merge_path(merge)
    data = run.store.get(path)
    _, description = unpack(data, name=path)
    fragment = description.get("fragment")
    if description.get("run") != run.name or description.get("merge") != merge or not isinstance(fragment, int):
        raise CorruptObject(f"{path} says that it's merge {description.get('merge')} of run {description.get('run')}")
    if not description["contributions"]:
        return {}, description  # all that came for it was dropped: nothing moves
    parts, description = unpack_parts(data, name=path, shapes=anatomy.shapes_of(fragment))
    return parts, description


@reread
def read_outer_gradient(run: Run, anatomy: Anatomy, said: Mapping[str, Any]) -> Tensors:
    """An outer gradient that a merge has named, as the syncer read it: the sum of what the island had sent for it."""
    shapes = anatomy.shapes_of(said["fragment"])
    gradients = []
    for path in said["paths"]:
        parts, description = unpack_parts(run.store.get(path), name=path, shapes=shapes)
        gradients.append(dequantise(parts, shapes, description["wire"]))
    return added(gradients)


def added(gradients: Sequence[Tensors]) -> Tensors:
    """Several outer gradients of one island as one, in the order in which they were sent."""
    total = gradients[0]
    for more in gradients[1:]:
        total = {name: value + more[name] for name, value in total.items()}
    return total


def merge_into(
    run: Run,
    anatomy: Anatomy,
    fragment: Fragment,
    gradients: Sequence[Tensors],
    weights: Sequence[float],
    part: Part,
) -> tuple[Outer, Tensors]:
    """What the next version of a fragment is, and the parts that islands are sent."""
    config = run.config
    if not gradients:
        return fragment.outer, {}
    plain: Collection[str] | None = anatomy.embeddings if config.merge == "rda" else None
    gradient = merged_gradient(gradients, weights, plain=plain)
    return outer_step(
        fragment.outer, gradient, lr=config.outer_lr, beta=config.outer_momentum, wire=config.wire, part=part
    )


def move(state: GlobalState, description: Mapping[str, Any], outer: Outer) -> None:
    """Takes a merge into the state."""
    fragment = state.fragments[description["fragment"]]
    fragment.version = description["version"]
    fragment.outer = outer
    for island, round_ in description["rounds"].items():
        fragment.merged_rounds[int(island)] = round_
    state.merge = description["merge"]
    state.latest = dict(description["latest"])
    state.gate = GateMemory.from_json(description["gate"])
    state.talk = state.talk.after(description)


def snapshots(run: Run) -> list[int]:
    """Merges that there's a whole snapshot after, ascending."""
    found = []
    for info in run.store.list(f"{run.folder}/snapshots"):
        path = PurePosixPath(info.path)
        if path.suffix == ".json":
            found.append(int(path.stem))
    return sorted(found)


def write_snapshot(run: Run, state: GlobalState) -> tuple[str, bytes]:
    """Puts the whole state in the store; it counts when its description is there, which comes last. Safe to repeat.

    Returns:
        Path and content of the description.
    """
    folder = run.snapshot_path(state.merge).removesuffix(".json")
    fragments = []
    for number, fragment in enumerate(state.fragments):
        outer = fragment.outer
        known = {"run": run.name, "merge": state.merge, "fragment": number, "version": fragment.version}
        kept = {f"momentum/{name}": value for name, value in outer.momentum.items()}
        kept |= {f"residual/{name}": value for name, value in outer.residual.items()}
        objects = {"parameters": pack(outer.parameters, known), "outer": pack(kept, known)}
        entry: dict[str, Any] = {"version": fragment.version, "rounds": fragment.merged_rounds}
        for kind, data in objects.items():
            path = f"{folder}/{number:04d}-{kind}-{object_hash(data)[:16]}.safetensors"
            run.store.put_content(path, data)
            entry[kind] = {"path": path, "hash": object_hash(data)}
        fragments.append(entry)
    data = json.dumps(
        {
            "run": run.name,
            "merge": state.merge,
            "latest": state.latest,
            "gate": state.gate.to_json(),
            "talk": state.talk.to_json(),
            "fragments": fragments,
        },
        sort_keys=True,
    ).encode()
    path = run.snapshot_path(state.merge)
    run.store.put_content(path, data)
    return path, data


def read_snapshot(run: Run, merge: int) -> GlobalState:
    """The state that a snapshot holds.

    Raises:
        CorruptObject: one of its objects isn't what was written.
    """
    loaded = _read_description(run, merge)
    fragments = []
    for entry in loaded["fragments"]:
        kept = _read_part(run, entry["outer"])
        outer = Outer(
            parameters=_read_part(run, entry["parameters"]),
            momentum={n.removeprefix("momentum/"): v for n, v in kept.items() if n.startswith("momentum/")},
            residual={n.removeprefix("residual/"): v for n, v in kept.items() if n.startswith("residual/")},
        )
        rounds = {int(island): round_ for island, round_ in entry["rounds"].items()}
        fragments.append(Fragment(version=entry["version"], outer=outer, merged_rounds=rounds))
    return GlobalState(
        merge=merge,
        fragments=fragments,
        latest=loaded["latest"],
        gate=GateMemory.from_json(loaded["gate"]),
        talk=_talk_of(loaded),
    )


def _talk_of(loaded: Mapping[str, Any]) -> Talk:
    return Talk.from_json(loaded.get("talk", {}))  # none in a snapshot from before islands told anything here


@reread
def _read_description(run: Run, merge: int) -> dict[str, Any]:
    path = run.snapshot_path(merge)
    try:
        loaded: dict[str, Any] = json.loads(run.store.get(path))
        if loaded["merge"] == merge and loaded["run"] == run.name:
            return loaded
    except (ValueError, KeyError, TypeError) as e:
        raise CorruptObject(f"{path} is not a snapshot of Atoll's, or damaged: {e}") from e
    raise CorruptObject(f"{path} is a snapshot of run {loaded['run']} after merge {loaded['merge']}")


@reread
def _read_part(run: Run, entry: Mapping[str, str]) -> Tensors:
    data = run.store.get(entry["path"])
    if object_hash(data) != entry["hash"]:
        raise CorruptObject(
            f"{run.store.uri}/{entry['path']} is not what was written; restore it from a copy of the store"
        )
    return unpack(data, name=entry["path"])[0]


@dataclass(kw_only=True, slots=True)
class Followed:
    """The global parameters as an island follows them: fragment by fragment."""

    merge: int
    parameters: list[Tensors]
    versions: list[int]
    merged_rounds: list[dict[int, int]]
    talk: Talk


def follow_merge(followed: Followed, parts: Tensors, description: Mapping[str, Any]) -> int:
    """Takes the next merge in; returns its fragment."""
    number = int(description["fragment"])
    assert description["merge"] == followed.merge + 1, "merges are followed in order"
    if parts:
        followed.parameters[number] = follow(followed.parameters[number], parts, wire=description["wire"])
    followed.versions[number] = description["version"]
    followed.merged_rounds[number] |= {int(island): round_ for island, round_ in description["rounds"].items()}
    followed.merge = description["merge"]
    followed.talk = followed.talk.after(description)
    return number


def read_global(run: Run, anatomy: Anatomy, *, merge: int | None = None) -> Followed:
    """The global parameters after a merge, by the nearest snapshot before it and the merges since.

    Args:
        run: the run.
        anatomy: how its model is cut.
        merge: number of the merge; None: the newest.

    Raises:
        Failure: the run hasn't got so far, or what it takes is gone.
    """
    at = [number for number in snapshots(run) if merge is None or number <= merge]
    if not at:
        raise Failure(f"run {run.name} has no snapshot {'' if merge is None else f'up to merge {merge} '}to start from")
    loaded = _read_description(run, at[-1])
    followed = Followed(
        merge=at[-1],
        parameters=[_read_part(run, entry["parameters"]) for entry in loaded["fragments"]],
        versions=[entry["version"] for entry in loaded["fragments"]],
        merged_rounds=[{int(i): r for i, r in entry["rounds"].items()} for entry in loaded["fragments"]],
        talk=_talk_of(loaded),
    )
    while merge is None or followed.merge < merge:
        try:
            parts, description = read_merge(run, anatomy, followed.merge + 1)
        except ObjectMissing:
            if merge is None:
                break
            raise Failure(
                f"run {run.name} has no merge {followed.merge + 1} on its tape; merge {merge} was asked for"
            ) from None
        follow_merge(followed, parts, description)
    return followed


def replay(
    run: Run,
    anatomy: Anatomy,
    *,
    start: int | None = None,
    end: int | None = None,
    on_merge: Callable[[int], None] | None = None,
) -> GlobalState:
    """Makes the merges of the tape again from the outer gradients, from a snapshot on, and holds each against the one on the tape.

    Args:
        run: the run.
        anatomy: how its model is cut.
        start: snapshot to start from; None: the last one up to `end`.
        end: last merge; None: the newest.
        on_merge: told every merge that came out as it was.

    Returns:
        The global state after the last one.

    Raises:
        Failure: a merge comes out otherwise than it stands on the tape, or an outer gradient is gone.
    """
    known = [number for number in snapshots(run) if end is None or number <= end]
    if start is not None and start not in known:
        raise Failure(f"run {run.name} has no snapshot after merge {start}; it has {', '.join(map(str, known))}")
    if not known:
        raise Failure(f"run {run.name} has no snapshot to start from; `atoll train --run {run.name}` makes the first")
    state = read_snapshot(run, known[-1] if start is None else start)
    while end is None or state.merge < end:
        try:
            parts, description = read_merge(run, anatomy, state.merge + 1)
        except ObjectMissing:
            if end is None:
                break
            raise Failure(
                f"run {run.name} has no merge {state.merge + 1} on its tape; merge {end} was asked for"
            ) from None
        taken = description["contributions"]
        try:
            gradients = [read_outer_gradient(run, anatomy, said) for said in taken]
        except ObjectMissing as e:
            raise Failure(f"merge {description['merge']} of run {run.name} can't be made again: {e}") from e
        outer, made = merge_into(
            run,
            anatomy,
            state.fragments[description["fragment"]],
            gradients,
            [said["weight"] for said in taken],
            Part(**description["part"]),
        )
        if made.keys() != parts.keys() or any(not torch.equal(made[name], parts[name]) for name in made):
            raise Failure(
                f"merge {description['merge']} of run {run.name} comes out otherwise than it stands on the tape: the outer gradients or the snapshot before aren't what they "
                "were, or this machine computes otherwise (merges are bit-identical on one kind of processor)"
            )
        move(state, description, outer)
        if on_merge is not None:
            on_merge(state.merge)
    return state


def first_state(run: Run) -> tuple[GlobalState, Anatomy]:
    """The state that the run begins with, from its seed or its model's folder."""
    model = build_model(run.config)
    anatomy = anatomy_of(run, model)
    parameters = {name: value.clone() for name, value in parameters_of(model).items()}
    fragments = [
        Fragment(version=0, outer=Outer.at_start({name: parameters[name] for name in names}))
        for names in anatomy.fragments
    ]
    return GlobalState(merge=0, fragments=fragments, latest={}, gate=GateMemory()), anatomy


def prepare_run(run: Run) -> None:
    """Puts the state that the run begins with in the store; safe to repeat. A branch has its own from its parent."""
    if not snapshots(run):
        write_snapshot(run, first_state(run)[0])
