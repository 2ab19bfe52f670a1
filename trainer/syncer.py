"""The syncer: merges the islands' outer gradients into the global fragments. A role on a CPU; all that it knows lies in the store.

A fragment's next version is an object that is created once: two syncers that race can't both win, and the loser reads the winner's. So a syncer may
die at any moment, and another one goes on from the objects. Every version says which outer gradients went into it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn

from manifests.catalog import Catalog
from manifests.errors import ObjectTaken
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append, open_table
from trainer.checkpoints import checkpoint_id
from trainer.feed import holdout_tokens
from trainer.fragments import cut_fragments
from trainer.model import build_model, holdout_loss, parameters_of, pick_device
from trainer.outer import Tensors, merge_weight, nesterov_step, weighted_mean
from trainer.run import GLOBAL, Run, load_run
from trainer.wire import CorruptObject, object_hash, pack, unpack

_POLL_S = 0.1
_GRADIENT_NAME = re.compile(r"(\d+)-(\d+)\.safetensors")


@dataclass(kw_only=True, slots=True)
class Fragment:
    """One global fragment as the syncer holds it."""

    names: list[str]
    version: int
    parameters: Tensors
    momentum: Tensors
    merged_rounds: dict[int, int] = field(default_factory=dict)
    """Island → round of its last outer gradient that was merged: that one, and what it had sent before, isn't merged again."""
    quorum_since: float | None = None
    """When the next merge had its quorum, by this process' monotonic clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """One island's outer gradient, as it lies in the store."""

    path: str
    island: int
    round: int


def initial_fragments(run: Run) -> list[tuple[list[str], Tensors]]:
    """The run's fragments with the parameters that the model starts from."""
    parameters = parameters_of(build_model(run.config))
    cut = cut_fragments({name: p.numel() for name, p in parameters.items()}, run.config.num_fragments)
    return [(names, {name: parameters[name] for name in names}) for names in cut]


def prepare_run(run: Run) -> None:
    """Puts version 0 of every fragment in the store, from the run's seed; safe to repeat. A branch has its fragments from its parent."""
    for number, (_, tensors) in enumerate(initial_fragments(run)):
        if run.newest_version(number) < 0:
            momentum = pack({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, {"run": run.name})
            path = run.momentum_path(number, 0, object_hash(momentum))
            run.store.put_content(path, momentum)
            description = {
                "run": run.name,
                "fragment": number,
                "version": 0,
                "merge": 0,
                "momentum": path,
                "contributions": [],
                "latest": {},
            }
            run.store.put_content(run.global_path(number, 0), pack(tensors, description))


class Syncer:
    """The syncer's life: from what lies in the store to the run's end."""

    def __init__(self, run: Run, *, emit: Callable[[dict[str, Any]], None]) -> None:
        self.run = run
        self.emit = emit
        catalog = Catalog(run.store)
        self.device = pick_device("cpu")
        self.model: nn.Module = build_model(run.config)
        self.holdout = holdout_tokens(run, catalog)
        self.merge = 0
        """Number of the last merge of any fragment, from 1."""
        self.latest: dict[str, dict[str, Any]] = {}
        """Island → its newest checkpoint that went into the global state, with the counters that it had."""
        self._finished: set[int] = set()
        self._refused: set[str] = set()
        self.fragments = [
            self._load_fragment(number, names) for number, (names, _) in enumerate(initial_fragments(run))
        ]
        self._complete_tape()
        self._complete_checkpoint()

    def serve(self) -> float:
        """Merges until every island has finished and all that they sent is in.

        Returns:
            Holdout loss of the final global parameters, nats per token.
        """
        while True:
            # The order matters: what an island sent before it finished is seen by the sweep after.
            self._note_finished()
            everyone = len(self._finished) == self.run.config.num_islands
            merged = sum(self._consider(number, flush=everyone) for number in range(len(self.fragments))) > 0
            if everyone and not merged:
                break
            if not merged:
                time.sleep(_POLL_S)
        loss = self._checkpoint(final=True)
        self._append_event("finished", sequence=self.merge + 1, detail={"holdout_loss": loss, "merges": self.merge})
        return loss

    def _consider(self, number: int, *, flush: bool) -> bool:
        """Merges a fragment if it has its quorum and has waited its grace; `flush`: whatever there is."""
        fragment = self.fragments[number]
        ready = self._contributions(number)
        num_live = self.run.config.num_islands - len(self._finished)
        quorum = 1 if flush else max(1, min(self.run.config.quorum, num_live))
        if len(ready) < quorum:
            fragment.quorum_since = None
            return False
        now = time.monotonic()
        if fragment.quorum_since is None:
            fragment.quorum_since = now
        everyone_is_in = len(ready) >= self.run.config.num_islands
        if not (flush or everyone_is_in or now - fragment.quorum_since >= self.run.config.grace_s):
            return False
        fragment.quorum_since = None
        return self._merge(number, ready)

    def _contributions(self, number: int) -> list[Contribution]:
        """Outer gradients that may go into the fragment's next version: each island's newest, by island."""
        fragment = self.fragments[number]
        newest: dict[int, Contribution] = {}
        oldest_base = max(0, fragment.version - self.run.config.max_staleness)
        for base in range(oldest_base, fragment.version + 1):
            for info in self.run.store.list(self.run.outer_folder(number, base)):
                name = _GRADIENT_NAME.fullmatch(PurePosixPath(info.path).name)
                if name is None or info.path in self._refused:
                    continue
                island, round_ = int(name[1]), int(name[2])
                if round_ <= fragment.merged_rounds.get(island, -1):
                    continue
                known = newest.get(island)
                if known is None or known.round <= round_:
                    newest[island] = Contribution(path=info.path, island=island, round=round_)
        return [newest[island] for island in sorted(newest)]

    def _merge(self, number: int, ready: list[Contribution]) -> bool:
        fragment = self.fragments[number]
        config = self.run.config
        gradients: list[Tensors] = []
        weights: list[float] = []
        taken: list[dict[str, Any]] = []
        for contribution in ready:
            try:
                tensors, description = unpack(self.run.store.get(contribution.path), name=contribution.path)
                self._check(fragment, tensors, contribution.path)
                self._check_description(number, description, contribution)
                tensors, description = self._newer_part(number, contribution, tensors, description)
            except CorruptObject as e:
                self._refused.add(contribution.path)
                self._append_event("refused", island=contribution.island, fragment=number, detail={"why": str(e)})
                continue
            weight = merge_weight(tokens=description["tokens"], steps=description["steps"])
            gradients.append(tensors)
            weights.append(weight)
            taken.append({**description, "path": contribution.path, "weight": weight})
        if not gradients:
            return False
        parameters, momentum = nesterov_step(
            fragment.parameters,
            fragment.momentum,
            weighted_mean(gradients, weights),
            lr=config.outer_lr,
            beta=config.outer_momentum,
        )
        latest = dict(self.latest)
        for item in taken:
            known = latest.get(str(item["island"]))
            if known is None or known["step"] < item["step"]:
                latest[str(item["island"])] = {"checkpoint": item["checkpoint"], "step": item["step"]}
        version = fragment.version + 1
        packed = pack(momentum, {"run": self.run.name, "fragment": number, "version": version})
        momentum_path = self.run.momentum_path(number, version, object_hash(packed))
        self.run.store.put_content(momentum_path, packed)
        description = {
            "run": self.run.name,
            "fragment": number,
            "version": version,
            "merge": self.merge + 1,
            "momentum": momentum_path,
            "contributions": taken,
            "latest": latest,
        }
        try:
            self.run.store.put_new(self.run.global_path(number, version), pack(parameters, description))
        except ObjectTaken:
            # Another syncer was faster: what it made is the truth.
            self.fragments[number] = self._load_fragment(number, fragment.names)
            return True
        fragment.version, fragment.parameters, fragment.momentum = version, parameters, momentum
        fragment.merged_rounds |= {item["island"]: item["round"] for item in taken}
        self.merge += 1
        self.latest = latest
        self._append_merge(description)
        self.emit({"state": "merged", "merge": self.merge, "fragment": number, "islands": [c["island"] for c in taken]})
        if self.merge % len(self.fragments) == 0:
            self._checkpoint(final=False)
        return True

    def _newer_part(
        self, number: int, contribution: Contribution, tensors: Tensors, description: dict[str, Any]
    ) -> tuple[Tensors, dict[str, Any]]:
        """An outer gradient is all that its island did since its base: takes away what an earlier one against the same base has brought in
        already, which happens when the island hadn't received that merge before it sent again."""
        earlier = self.fragments[number].merged_rounds.get(contribution.island)
        if earlier is None:
            return tensors, description
        path = f"{PurePosixPath(contribution.path).parent}/{contribution.island:04d}-{earlier:06d}.safetensors"
        if not self.run.store.exists(path):
            return tensors, description
        merged, said = unpack(self.run.store.get(path), name=path)
        counters = {name: description[name] - said[name] for name in ("tokens", "steps")}
        return {name: tensors[name] - merged[name] for name in tensors}, description | counters

    def _check(self, fragment: Fragment, tensors: Tensors, path: str) -> None:
        if set(tensors) != set(fragment.names) or any(
            tensors[name].shape != fragment.parameters[name].shape for name in fragment.names
        ):
            raise CorruptObject(f"{path} holds other tensors than the fragment; it's of another model or run")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise CorruptObject(f"{path} holds numbers that are not finite; the island has diverged")

    def _check_description(self, number: int, description: dict[str, Any], contribution: Contribution) -> None:
        expected = {
            "run": self.run.name,
            "fragment": number,
            "island": contribution.island,
            "round": contribution.round,
        }
        found = {name: description.get(name) for name in expected}
        if found != expected:
            raise CorruptObject(f"{contribution.path} says that it's of {found}, not of {expected}")
        if not (description.get("tokens", 0) > 0 and description.get("steps", 0) > 0):
            raise CorruptObject(f"{contribution.path} says that no step was taken for it")

    def _load_fragment(self, number: int, names: list[str]) -> Fragment:
        version = self.run.newest_version(number)
        path = self.run.global_path(number, version)
        parameters, description = unpack(self.run.store.get(path), name=path)
        momentum, _ = unpack(self.run.store.get(description["momentum"]), name=description["momentum"])
        if description["merge"] >= self.merge:
            self.merge = description["merge"]
            self.latest = description["latest"]
        return Fragment(
            names=names,
            version=version,
            parameters=parameters,
            momentum=momentum,
            merged_rounds=self._merged_rounds(number, description),
        )

    def _merged_rounds(self, number: int, description: dict[str, Any]) -> dict[int, int]:
        """Rounds that went into a fragment's last versions, as far back as an outer gradient may reach."""
        rounds: dict[int, int] = {}
        for _ in range(max(1, self.run.config.max_staleness)):
            if description["run"] != self.run.name:
                break  # a branch's islands take the rounds after its start anew
            for item in description["contributions"]:
                rounds[item["island"]] = max(item["round"], rounds.get(item["island"], -1))
            path = self.run.global_path(number, description["version"] - 1)
            if not self.run.store.exists(path):
                break
            _, description = unpack(self.run.store.get(path), name=path)
        return rounds

    def _complete_tape(self) -> None:
        """Writes the events of merges that a dead syncer made and didn't live to record."""
        recorded = open_table(self.run.store, "events").transaction_version(self._tape) or 0
        missing = []
        for number, fragment in enumerate(self.fragments):
            for version in range(fragment.version, 0, -1):
                path = self.run.global_path(number, version)
                if not self.run.store.exists(path):
                    break  # a branch begins at its parent's versions
                _, description = unpack(self.run.store.get(path), name=path)
                if description["merge"] <= recorded or description["run"] != self.run.name:
                    break
                missing.append(description)
        for description in sorted(missing, key=lambda d: d["merge"]):
            self._append_merge(description)

    def _complete_checkpoint(self) -> None:
        """Commits the global checkpoint that a dead syncer owed after its last merge."""
        recorded = open_table(self.run.store, "checkpoints").transaction_version(self._checkpoints) or 0
        inherited = self.run.branch.merge if self.run.branch is not None else 0
        if self.merge > max(recorded, inherited) and self.merge % len(self.fragments) == 0:
            self._checkpoint(final=False)

    @property
    def _checkpoints(self) -> str:
        return f"checkpoint/{self.run.name}/global"

    @property
    def _tape(self) -> str:
        return f"merge/{self.run.name}"

    def _append_merge(self, description: dict[str, Any]) -> None:
        self._append_event(
            "merge",
            sequence=description["merge"],
            fragment=description["fragment"],
            version=description["version"],
            detail={
                "merge": description["merge"],
                "contributions": description["contributions"],
            },
        )

    def _append_event(
        self,
        kind: str,
        *,
        detail: dict[str, Any],
        sequence: int | None = None,
        island: int | None = None,
        fragment: int | None = None,
        version: int | None = None,
    ) -> None:
        row = {
            "run": self.run.name,
            "kind": kind,
            "island": island,
            "fragment": fragment,
            "version": version,
            "detail": json.dumps(detail),
        }
        append(self.run.store, "events", [row], writer=self._tape if sequence is not None else None, sequence=sequence)

    def _note_finished(self) -> None:
        for island in range(self.run.config.num_islands):
            if island not in self._finished and self.run.store.exists(self.run.finished_path(island)):
                self._finished.add(island)

    def _checkpoint(self, *, final: bool) -> float:
        """Commits a global checkpoint: the fragments' versions, and the island checkpoints that went into them."""
        parameters = parameters_of(self.model)
        for fragment in self.fragments:
            for name in fragment.names:
                parameters[name].copy_(fragment.parameters[name])
        loss = holdout_loss(self.model, self.holdout)
        clock = [fragment.version for fragment in self.fragments]
        objects = [self.run.global_path(number, version) for number, version in enumerate(clock)]
        data = json.dumps({"run": self.run.name, "clock": clock, "fragments": objects}, sort_keys=True).encode()
        path = f"runs/{self.run.name}/global/checkpoint-{self.merge:08d}.json"
        self.run.store.put_content(path, data)
        merged = [bytes.fromhex(item["checkpoint"]) for _, item in sorted(self.latest.items())]
        counters = self._merged_counters(merged)
        row = {
            "checkpoint": checkpoint_id(self.run.name, GLOBAL, self.merge),
            "run": self.run.name,
            "island": GLOBAL,
            "incarnation": 0,
            "round": self.merge // len(self.fragments),
            "clock": clock,
            "parent": None,
            "merged": merged,
            "object": path,
            "hash": object_hash(data),
            "size_bytes": len(data),
            "stream": "{}",
            "mixture": "{}",
            "anchor": True,
            "loss": None,
            "holdout_loss": loss,
            **counters,
        }
        # The last checkpoint may fall on a merge that has one already: its sequence number is taken, and that's right.
        append(self.run.store, "checkpoints", [row], writer=self._checkpoints, sequence=self.merge)
        self.emit({"state": "finished" if final else "checkpointed", "merge": self.merge, "holdout_loss": loss})
        return loss

    def _merged_counters(self, merged: list[bytes]) -> dict[str, int]:
        names = ["step", "tokens", *(f"tokens_{tier.lower()}" for tier in TIERS)]
        catalog = Catalog(self.run.store)
        sums = ", ".join(f"coalesce(sum({name}), 0)::BIGINT AS {name}" for name in names)
        rows = catalog.rows(f"SELECT {sums} FROM checkpoints WHERE list_contains(?, checkpoint)", [merged])
        return {name: int(rows[0][name]) for name in names}


def run_syncer(store: Store, run_name: str, *, emit: Callable[[dict[str, Any]], None]) -> float:
    """Holds the syncer's role of a run until its end; see Syncer."""
    return Syncer(load_run(store, run_name), emit=emit).serve()
