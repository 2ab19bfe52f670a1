"""The syncer: merges the islands' outer gradients into the global fragments. A role on a CPU; all that it knows lies in the store.

Merges are numbered, and each is an object that is created once: two syncers that race can't both make one, and the loser reads the winner's. So a syncer may die, or
be taken for dead, at any moment, and another goes on from the tape. The lease only keeps two from doing the same work.
"""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from torch import nn

from manifests.catalog import Catalog
from manifests.errors import AtollError, ObjectMissing, ObjectTaken, StoreUnreachable
from manifests.schemas import TIERS
from manifests.tables import append, open_table
from trainer.checkpoints import checkpoint_id
from trainer.errands import Inline, Lane, Patience
from trainer.feed import holdout_tokens, start_catalog
from trainer.feedback import SCALES
from trainer.gate import GateRules, Judged, cosines_to_others, decide
from trainer.lease import Lease
from trainer.members import members
from trainer.messages import CorruptMessage, decode, from_text
from trainer.metrics import Metrics
from trainer.model import build_model, holdout_loss, parameters_of
from trainer.outer import Part, merge_weight, norm, pairwise_cosines
from trainer.quantise import Tensors, dequantise
from trainer.run import GLOBAL, Run
from trainer.steering import Steering
from trainer.tape import (
    GlobalState,
    added,
    anatomy_of,
    merge_into,
    move,
    read_merge,
    replay,
    snapshots,
    write_snapshot,
)
from trainer.wire import CorruptObject, object_hash, pack, pack_parts, reread, unpack_parts

_POLL_S = 0.05
_MEMBERS_EVERY_S = 1.0
_PACE = 0.5
"""A fragment isn't merged again before this share of its H inner steps has passed, unless everyone is in: or H would shrink on a fast link."""
_AWAY_CYCLES = 3.0
"""An island that was not heard of for so many outer cycles isn't waited for."""
_NAME = re.compile(r"(\d+)-(\d+)\.safetensors")

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """An outer gradient as it was read."""

    path: str
    gradient: Tensors
    said: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Inbox:
    """What has come for one fragment and is not merged yet."""

    waiting: dict[int, dict[int, Future[Arrived | CorruptObject]]] = field(default_factory=dict)
    """Island → round → the object, as it's fetched."""
    first_at: float | None = None
    """When the first of the next merge came, by this process' clock."""
    quorum_at: float | None = None
    merged_at: float | None = None


@dataclass(kw_only=True, slots=True)
class Averages:
    """What the grace window goes by: exponential moving averages (Decoupled DiLoCo, arXiv 2604.21428)."""

    quorum_s: float = 0.0
    sync_s: float = 0.0

    def note(self, *, quorum_s: float, sync_s: float) -> None:
        """Takes a merge's times in."""
        self.quorum_s += 0.2 * (quorum_s - self.quorum_s)
        self.sync_s += 0.2 * (sync_s - self.sync_s)


def grace_window(*, share: float, overlap_s: float, averages: Averages) -> float:
    """How long a merge waits for more islands once it has its quorum, seconds: γ · (τ·ξ_step − ξ_quorum − ξ_sync), at least 0 (Decoupled DiLoCo, arXiv 2604.21428)."""
    return share * max(0.0, overlap_s - averages.quorum_s - averages.sync_s)


class Syncer:
    """One holder of the role: from what lies in the store to the run's end, or until another one holds it."""

    def __init__(
        self,
        run: Run,
        *,
        emit: Emit,
        metrics: Metrics | None = None,
        in_background: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the merges since the last snapshot again, and completes what a dead syncer left undone.

        Args:
            run: the run.
            emit: told of every merge.
            metrics: told of every merge and checkpoint.
            in_background: False: events, snapshots and downloads are waited for; for what must come out the same every time.
            clock: this process' own, seconds.
        """
        self.run = run
        self.emit = emit
        self.metrics = metrics
        self._clock = clock
        config = run.config
        self.model: nn.Module = build_model(config)
        self._model_lock = threading.Lock()
        self.anatomy = anatomy_of(run, self.model)
        self.holdout = holdout_tokens(run, start_catalog(run.store))
        self.state: GlobalState = replay(run, self.anatomy)
        self._inboxes = [Inbox() for _ in self.anatomy.fragments]
        self._cursors: dict[int, str] = {}
        self._members = members(run)
        self._members_at = -_MEMBERS_EVERY_S
        self._heard_at = {island: self._clock() for island, known in self._members.items() if known.incarnations}
        self._step_times: dict[int, float] = {}
        self._averages = Averages()
        self._rules = GateRules(
            norm=config.gate_norm, cosine=config.gate_cosine, holdout=config.gate_holdout, strikes=config.gate_strikes
        )
        self._pool = ThreadPoolExecutor(8, "fetch") if in_background else None
        self._events: Lane | Inline = Lane("events") if in_background else Inline()
        self._bulk: Lane | Inline = Lane("snapshots") if in_background else Inline()
        self.holdout_loss: float | None = None
        self._steering = Steering(run, self.state.talk, in_background=in_background)
        self._complete_tape()
        self._complete_checkpoint()

    @property
    def merge(self) -> int:
        """Number of the last merge."""
        return self.state.merge

    def serve(self, *, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Merges until every island has finished and all that they sent is in.

        Args:
            stop: asked now and then; True: the role is given up.

        Returns:
            Holdout loss of the final global parameters, nats per token; None: given up before.
        """
        while not stop():
            merged, over = self.sweep()
            if over:
                return self._end()
            if not merged:
                time.sleep(_POLL_S)
        return None

    def sweep(self) -> tuple[bool, bool]:
        """Looks through the store once and merges what is ready.

        Returns:
            Whether there was a merge, and whether the run is over: every island had finished or left before, and nothing of theirs is left.
        """
        self._events.check()
        self._bulk.check()
        self._steering.check()
        while self._steering.troubles:
            island, why = self._steering.troubles.pop(0)
            self._say("mix_stays", island=island, detail={"why": why})
        while self._steering.switches:
            island, switch = self._steering.switches.pop(0)
            self._say("strategy_switched", island=island, detail=asdict(switch))
            self.emit({"state": "switched", "of": island, **asdict(switch)})
        # The order matters: what an island sent before it finished is seen by the look after.
        everyone = self._look_for_members()
        self._look_for_gradients()
        merged = sum(self._consider(number, flush=everyone) for number in range(len(self._inboxes))) > 0
        waiting = any(rounds for inbox in self._inboxes for rounds in inbox.waiting.values())
        return merged, everyone and not merged and not waiting

    # What has come.

    def _look_for_members(self) -> bool:
        now = self._clock()
        if now - self._members_at >= _MEMBERS_EVERY_S or not any(m.is_awaited for m in self._members.values()):
            before, self._members, self._members_at = self._members, members(self.run), now
            for island, member in self._members.items():
                known = before[island].incarnations if island in before else 0
                if member.incarnations > known:
                    self._heard_at[island] = now  # it has come, or come back
        return not any(member.is_awaited for member in self._members.values())

    def _look_for_gradients(self) -> None:
        for island, member in self._members.items():
            if member.incarnations == 0:
                continue
            for info in sorted(
                self.run.store.list(self.run.outer_folder(island), after=self._cursors.get(island)),
                key=lambda info: info.path,
            ):
                name = _NAME.fullmatch(PurePosixPath(info.path).name)
                if name is None or int(name[2]) >= len(self._inboxes) or int(name[1]) > self.run.config.num_rounds + 1:
                    continue  # no island's: what these send comes before it, and must not be taken for seen
                self._cursors[island] = info.path
                round_, number = int(name[1]), int(name[2])
                if round_ <= self.state.fragments[number].merged_rounds.get(island, -1):
                    continue
                self._heard_at[island] = self._clock()
                inbox = self._inboxes[number]
                if inbox.first_at is None:
                    inbox.first_at = self._clock()
                inbox.waiting.setdefault(island, {})[round_] = self._fetch(number, island, round_, info.path)

    def _fetch(self, number: int, island: int, round_: int, path: str) -> Future[Arrived | CorruptObject]:
        if self._pool is not None:
            return self._pool.submit(self._read, number, island, round_, path)
        done: Future[Arrived | CorruptObject] = Future()
        done.set_result(self._read(number, island, round_, path))
        return done

    def _read(self, number: int, island: int, round_: int, path: str) -> Arrived | CorruptObject:
        try:
            return self._read_sound(number, island, round_, path)
        except CorruptObject as e:
            return e

    @reread
    def _read_sound(self, number: int, island: int, round_: int, path: str) -> Arrived:
        shapes = self.anatomy.shapes_of(number)
        try:
            parts, said = unpack_parts(self.run.store.get(path), name=path, shapes=shapes)
            expected = {"run": self.run.name, "fragment": number, "island": island, "round": round_}
            found = {name: said.get(name) for name in expected}
            if found != expected:
                raise CorruptObject(f"{path} says that it's of {found}, not of {expected}")
            if not (said.get("tokens", 0) > 0 and said.get("steps", 0) > 0):
                raise CorruptObject(f"{path} says that no step was taken for it")
            return Arrived(path=path, gradient=dequantise(parts, shapes, said["wire"]), said=said)
        except (ValueError, KeyError) as e:
            raise CorruptObject(f"{path} is not an outer gradient of this fragment: {e}") from e

    # Whether it's time.

    def _consider(self, number: int, *, flush: bool) -> bool:
        """Merges a fragment if it has its quorum and has waited its grace; `flush`: whatever there is."""
        inbox = self._inboxes[number]
        ready = [
            island for island, rounds in inbox.waiting.items() if rounds and all(f.done() for f in rounds.values())
        ]
        if flush and any(inbox.waiting.values()) and len(ready) < sum(1 for r in inbox.waiting.values() if r):
            return False  # still on their way from the store
        live = self._live()
        quorum = 1 if flush else max(1, min(self.run.config.quorum, len(live)))
        if len(ready) < quorum:
            inbox.quorum_at = None
            return False
        now = self._clock()
        if inbox.quorum_at is None:
            inbox.quorum_at = now
        if not (flush or live <= set(ready)):
            step_s = statistics.median(self._step_times.values()) if self._step_times else 0.0
            grace_s = grace_window(
                share=self.run.config.grace, overlap_s=self.run.config.tau * step_s, averages=self._averages
            )
            pace_s = _PACE * self.run.config.sync_every * step_s
            since = now - inbox.merged_at if inbox.merged_at is not None else float("inf")
            if now - inbox.quorum_at < grace_s or since < pace_s:
                return False
        return self._merge(number, sorted(ready))

    def _live(self) -> set[int]:
        """Islands that a merge waits for: neither finished nor gone, and heard of lately."""
        now = self._clock()
        step_s = statistics.median(self._step_times.values()) if self._step_times else 0.0
        patience_s = max(_AWAY_CYCLES * self.run.config.sync_every * step_s, 10 * _POLL_S)
        awaited = {island for island, member in self._members.items() if member.is_awaited and member.incarnations}
        if not self._step_times:
            return awaited
        return {island for island in awaited if now - self._heard_at.get(island, -float("inf")) <= patience_s}

    # The merge.

    def _merge(self, number: int, islands: list[int]) -> bool:
        began = self._clock()
        inbox, fragment, config = self._inboxes[number], self.state.fragments[number], self.run.config
        gradients: list[Tensors] = []
        taken: list[dict[str, Any]] = []
        rounds: dict[int, int] = {}
        dropped: list[dict[str, Any]] = []
        feedback: dict[str, list[str]] = {}
        tier_versions: dict[int, int] = {}
        for island in islands:
            arrived = [inbox.waiting[island][round_].result() for round_ in sorted(inbox.waiting[island])]
            rounds[island] = max(inbox.waiting[island])
            sound = []
            for one in arrived:
                if isinstance(one, CorruptObject):
                    self._say("refused", island=island, fragment=number, detail={"why": str(one)})
                    continue
                # What an island tells counts, whatever becomes of its outer gradient.
                if told := self._told(one, number):
                    feedback.setdefault(str(island), []).extend(told)
                    tier_versions[island] = one.said["tier_version"]
                if fragment.version - one.said["base_version"] > config.max_staleness:
                    dropped.append({"island": island, "round": one.said["round"], "why": "stale"})
                else:
                    sound.append(one)
            if sound:
                gradients.append(added([one.gradient for one in sound]))
                taken.append(_told_together(sound))
        kept_out, changes, cosines = self._gate(number, gradients, taken)
        for island, why in kept_out.items():
            dropped.append({"island": island, "round": rounds[island], "why": why})
        passed = [i for i, said in enumerate(taken) if said["island"] not in kept_out]
        live = self._live() | set(islands)
        part = self._part_of([taken[i] for i in passed], live - set(islands) - set(self.state.gate.quarantined))
        said = {
            "part": asdict(part),
            "islands": [sent["island"] for sent in taken],
            "cosines": cosines,
            "dropped": dropped,
            "live": len(live),
            "feedback": feedback,
            "mixes": {str(island): mix.to_json() for island, mix in self._steering.decided().items()},
        }
        description = self._describe(number, [taken[i] for i in passed], rounds) | said
        outer, parts = merge_into(
            self.run,
            self.anatomy,
            fragment,
            [gradients[i] for i in passed],
            [taken[i]["weight"] for i in passed],
            part,
        )
        if not self._put(description, parts):
            return True
        for island in islands:
            inbox.waiting.pop(island, None)
        now = self._clock()
        self._averages.note(quorum_s=(inbox.quorum_at or now) - (inbox.first_at or now), sync_s=now - began)
        inbox.first_at = now if any(inbox.waiting.values()) else None
        inbox.quorum_at, inbox.merged_at = None, now
        for sent in taken:
            if sent["step_time_s"] > 0:
                self._step_times[sent["island"]] = sent["step_time_s"]
        move(self.state, description, outer)
        self._steering.given(self.state.talk.mixes)
        self._steering.hear(self.state.talk, tier_versions)
        self._append_merge(description)
        for island, change in changes:
            self._say(
                change,
                island=island,
                fragment=number,
                detail={"merge": self.merge, "why": kept_out.get(island, "it passes the gate again")},
            )
        participants = [sent["island"] for sent in description["contributions"]]
        self.emit({"state": "merged", "merge": self.merge, "fragment": number, "islands": participants})
        self._note(
            "merge",
            merge=self.merge,
            fragment=number,
            version=description["version"],
            islands=participants,
            live=len(live),
            quarantined=list(self.state.gate.quarantined),
            seconds=round(now - began, 4),
        )
        if self.merge % len(self._inboxes) == 0:
            self._checkpoint()
        return True

    def _told(self, arrived: Arrived, number: int) -> list[str]:
        """The feedback that came with an outer gradient, as it goes on the tape."""
        texts: list[str] = arrived.said.get("feedback", [])
        if texts == []:
            return []
        try:
            if not isinstance(texts, list) or not isinstance(arrived.said.get("tier_version"), int):
                raise CorruptMessage("no list of feedback messages, or no tier version")
            for text in texts:
                message = decode(from_text(text), SCALES)
                if message.island != arrived.said["island"]:
                    raise CorruptMessage(f"a feedback message of island {message.island}")
        except CorruptMessage as e:
            why = f"{arrived.path} brings {e}; its outer gradient counts, its feedback doesn't"
            self._say("refused", island=arrived.said["island"], fragment=number, detail={"why": why})
            return []
        return texts

    def _part_of(self, taken: list[dict[str, Any]], others: set[int]) -> Part:
        """How much of a whole outer step a merge is whose outer gradients are `taken`, while `others` have theirs still to come."""
        cycle = self.run.config.sync_every
        if not others:
            return Part(cycle=sum(said["steps"] for said in taken) / (cycle * len(taken)) if taken else 0.0)
        times = self._step_times | {said["island"]: said["step_time_s"] for said in taken if said["step_time_s"] > 0}
        usual = statistics.median(times.values()) if times else 1.0
        speed = {island: 1 / times.get(island, usual) for island in {said["island"] for said in taken} | others}
        total = sum(speed.values())
        return Part(
            islands=round(sum(speed[said["island"]] for said in taken) / total, 4),
            cycle=round(sum(speed[said["island"]] * said["steps"] for said in taken) / (total * cycle), 4),
        )

    def _gate(
        self, number: int, gradients: list[Tensors], taken: list[dict[str, Any]]
    ) -> tuple[dict[int, str], list[tuple[int, str]], list[list[float]]]:
        """Who is kept out, who goes into quarantine or comes out of it, and the cosines of each with those after it; moves the gate's memory."""
        if not gradients:
            return {}, [], []
        cosines = pairwise_cosines(gradients)
        norms = [sum(norm(value) ** 2 for value in gradient.values()) ** 0.5 for gradient in gradients]
        weights = [said["weight"] for said in taken]
        along = cosines_to_others(cosines, [n * w for n, w in zip(norms, weights, strict=True)])
        rises = self._rises(number, gradients, weights)
        judged = [
            Judged(island=said["island"], norm_per_step=n / said["steps"], cosine=cosine, rise=rise)
            for said, n, cosine, rise in zip(taken, norms, along, rises, strict=True)
        ]
        kept_out, changes = decide(self.state.gate, number, judged, self._rules)
        return kept_out, changes, [[round(value, 4) for value in row[i + 1 :]] for i, row in enumerate(cosines)]

    def _rises(self, number: int, gradients: list[Tensors], weights: list[float]) -> list[float | None]:
        """How much each outer gradient's being in the merge raises the holdout loss; alone, against no merge."""
        if self._rules.holdout == 0:
            return [None] * len(gradients)
        fragment = self.state.fragments[number]
        everyone = range(len(gradients))

        def loss_with(chosen: list[int]) -> float:
            chosen_gradients, chosen_weights = [gradients[i] for i in chosen], [weights[i] for i in chosen]
            outer, _ = merge_into(self.run, self.anatomy, fragment, chosen_gradients, chosen_weights, Part())
            return self._loss_of(self.state.parameters() | outer.parameters)

        whole = loss_with(list(everyone))
        return [whole - loss_with([j for j in everyone if j != i]) for i in everyone]

    def _describe(self, number: int, contributions: list[dict[str, Any]], rounds: dict[int, int]) -> dict[str, Any]:
        latest = dict(self.state.latest)
        for said in contributions:
            known = latest.get(str(said["island"]))
            if known is None or known["step"] < said["step"]:
                latest[str(said["island"])] = {"checkpoint": said["checkpoint"], "step": said["step"]}
        return {
            "run": self.run.name,
            "merge": self.merge + 1,
            "fragment": number,
            "version": self.state.fragments[number].version + 1,
            "contributions": contributions,
            "rounds": {str(island): round_ for island, round_ in rounds.items()},
            "latest": latest,
            "gate": self.state.gate.to_json(),
        }

    def _put(self, description: dict[str, Any], parts: Tensors) -> bool:
        """Puts the merge on the tape; False: another syncer was faster, and what it made is the truth."""
        path = self.run.merge_path(description["merge"])
        shapes = self.anatomy.shapes_of(description["fragment"])
        data = pack_parts(parts, shapes, self.run.config.wire, description) if parts else pack({}, description)
        try:
            self.run.store.put_new(path, data)
        except ObjectTaken:
            self.state = replay(self.run, self.anatomy)
            for number, inbox in enumerate(self._inboxes):
                merged = self.state.fragments[number].merged_rounds
                for island, waiting in inbox.waiting.items():
                    inbox.waiting[island] = {r: f for r, f in waiting.items() if r > merged.get(island, -1)}
            return False
        return True

    # What is recorded.

    def _append_merge(self, description: dict[str, Any]) -> None:
        detail = {
            "merge": description["merge"],
            "contributions": [
                {k: v for k, v in c.items() if k not in ("paths", "step_time_s")} for c in description["contributions"]
            ],
            **{name: description[name] for name in ("part", "islands", "cosines", "dropped", "live")},
        }
        self._say(
            "merge",
            sequence=description["merge"],
            fragment=description["fragment"],
            version=description["version"],
            detail=detail,
        )

    def _say(
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
        writer = self._tape if sequence is not None else None
        self._events.add(lambda: append(self.run.store, "events", [row], writer=writer, sequence=sequence))

    def _note(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.note(kind, **values)

    def _complete_tape(self) -> None:
        """Writes the events of merges that a dead syncer made and didn't live to record."""
        recorded = open_table(self.run.store, "events").transaction_version(self._tape) or 0
        inherited = self.run.branch.merge if self.run.branch is not None else 0
        for merge in range(max(recorded, inherited) + 1, self.merge + 1):
            _, description = read_merge(self.run, self.anatomy, merge)
            self._append_merge(description)

    def _complete_checkpoint(self) -> None:
        """Commits the global checkpoint that a dead syncer owed after its last merge."""
        recorded = open_table(self.run.store, "checkpoints").transaction_version(self._checkpoints) or 0
        inherited = self.run.branch.merge if self.run.branch is not None else 0
        if self.merge > max(recorded, inherited) and self.merge % len(self._inboxes) == 0:
            self._checkpoint()

    @property
    def _checkpoints(self) -> str:
        return f"checkpoint/{self.run.name}/global"

    @property
    def _tape(self) -> str:
        return f"merge/{self.run.name}"

    def _checkpoint(self) -> None:
        """Leaves a snapshot and its row to the background; where the last one isn't done yet, the next cycle's will do."""
        if self._bulk.backlog == 0:
            state = copy.copy(self.state)
            state.fragments = [copy.copy(fragment) for fragment in state.fragments]
            for fragment in state.fragments:
                fragment.merged_rounds = dict(fragment.merged_rounds)
            state.gate = copy.deepcopy(state.gate)
            self._bulk.add(lambda: self._commit_checkpoint(state))

    def _commit_checkpoint(self, state: GlobalState) -> None:
        """Commits a global checkpoint: the snapshot, and the island checkpoints that went into it."""
        path, data = write_snapshot(self.run, state)
        self.holdout_loss = loss = self._loss_of(state.parameters())
        merged = [bytes.fromhex(item["checkpoint"]) for _, item in sorted(state.latest.items())]
        row = {
            "checkpoint": checkpoint_id(self.run.name, GLOBAL, state.merge),
            "run": self.run.name,
            "island": GLOBAL,
            "incarnation": 0,
            "round": state.merge // len(self._inboxes),
            "clock": state.clock,
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
            "inputs": None,
            **self._merged_counters(merged),
        }
        # The last checkpoint may fall on a merge that has one already: its sequence number is taken, and that's right.
        append(self.run.store, "checkpoints", [row], writer=self._checkpoints, sequence=state.merge)
        self.emit({"state": "checkpointed", "merge": state.merge, "holdout_loss": loss})
        self._note("checkpoint", merge=state.merge, holdout_loss=loss)

    def _merged_counters(self, merged: list[bytes]) -> dict[str, int]:
        names = ["step", "tokens", *(f"tokens_{tier.lower()}" for tier in TIERS)]
        catalog = Catalog(self.run.store, tables=("checkpoints",))
        sums = ", ".join(f"coalesce(sum({name}), 0)::BIGINT AS {name}" for name in names)
        rows = catalog.rows(f"SELECT {sums} FROM checkpoints WHERE list_contains(?, checkpoint)", [merged])
        return {name: int(rows[0][name]) for name in names}

    def _loss_of(self, parameters: Tensors) -> float:
        with self._model_lock:
            own = parameters_of(self.model)
            for name, value in parameters.items():
                own[name].copy_(value)
            return holdout_loss(self.model, self.holdout)

    def _end(self) -> float:
        self._bulk.drain()
        if self.holdout_loss is None or max(snapshots(self.run)) < self.merge:
            self._commit_checkpoint(self.state)
        loss = self.holdout_loss
        assert loss is not None
        self._steering.drain()
        self._say("finished", sequence=self.merge + 1, detail={"holdout_loss": loss, "merges": self.merge})
        self._events.drain()
        self.run.store.put_content(
            self.run.finished_run_path, json.dumps({"holdout_loss": loss, "merges": self.merge}).encode()
        )
        self.emit({"state": "finished", "merge": self.merge, "holdout_loss": loss})
        return loss

    def close(self) -> None:
        """Lets what is under way go out, and ends the threads."""
        self._events.close()
        self._bulk.close()
        self._steering.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _told_together(arrived: list[Arrived]) -> dict[str, Any]:
    """What is known of an island's outer gradients that go into a merge as one."""
    last = arrived[-1].said
    tokens = sum(one.said["tokens"] for one in arrived)
    steps = sum(one.said["steps"] for one in arrived)
    return {
        "island": last["island"],
        "round": last["round"],
        "fragment": last["fragment"],
        "base_version": last["base_version"],
        "checkpoint": last["checkpoint"],
        "step": last["step"],
        "step_time_s": last["step_time_s"],
        "tokens": tokens,
        "steps": steps,
        "weight": merge_weight(tokens=tokens, steps=steps),
        "paths": [one.path for one in arrived],
    }


def finished_loss(run: Run) -> float | None:
    """The run's last holdout loss, nats per token; None: it isn't over."""
    try:
        return float(json.loads(run.store.get(run.finished_run_path))["holdout_loss"])
    except ObjectMissing:
        return None


class Steward:
    """A candidate for the syncer's role: takes it whenever it's free, until the run is over."""

    def __init__(
        self,
        run: Run,
        *,
        emit: Emit,
        name: str,
        patience_s: float = 0.0,
        metrics_of: Callable[[int], Metrics] | None = None,
    ) -> None:
        """
        Args:
            run: the run.
            emit: told of the role and of every merge.
            name: of this process, as people read it.
            patience_s: how long it leaves the role to others at first.
            metrics_of: makes, for a term of the lease, what is told of every merge.
        """
        self.run, self.emit, self.name, self._metrics_of = run, emit, name, metrics_of
        holder = f"{name} on {socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}"
        self._lease = Lease(run.store, run.lease_folder, holder=holder, lapse_s=run.config.lease_s)
        self._not_before = time.monotonic() + patience_s
        self.stopping = threading.Event()

    @property
    def holds_role(self) -> bool:
        """Whether the role is this one's."""
        return self._lease.term is not None

    @property
    def another_leads(self) -> bool:
        """Whether another one holds the role and lives."""
        return self._lease.another_lives

    def serve(self) -> float | None:
        """Stands by and holds the role whenever it's free. Cut off from the store, it gives the role up and stands by again.

        Returns:
            Holdout loss of the final global parameters, nats per token; None: told to stop before.

        Raises:
            AtollError: the store is lost for longer than is borne (errands.py), or the tape is damaged.
        """
        patience = Patience()
        while True:
            try:
                return self._stand_by()
            except StoreUnreachable as e:
                self.emit({"state": "cut off"})
                patience.bear(e, stopping=self.stopping)

    def _stand_by(self) -> float | None:
        told: str | None = None
        while not self.stopping.is_set():
            loss = finished_loss(self.run)
            if loss is not None:
                self.emit({"state": "finished", "holdout_loss": loss})
                return loss
            if time.monotonic() >= self._not_before and self._lease.take():
                loss = self._lead()
                if loss is not None:
                    return loss
                continue
            holder = self._lease.holder()
            if holder != told and holder is not None:
                self.emit({"state": "standing by", "holder": holder})
                told = holder
            self.stopping.wait(min(0.5, self.run.config.lease_s / 8))
        return None

    def _lead(self) -> float | None:
        term = self._lease.term
        assert term is not None
        self.emit({"state": "leading", "term": term})
        metrics = self._metrics_of(term) if self._metrics_of is not None else None
        if metrics is not None:
            metrics.note("lease", holder=self.name, term=term)
        over, deposed = threading.Event(), threading.Event()

        def beat() -> None:
            while not over.wait(self.run.config.lease_s / 8):
                try:
                    if not self._lease.renew():
                        deposed.set()
                        return
                except AtollError:
                    continue  # it's tried again; if the store stays away, the merges' own errors say so

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            syncer = Syncer(self.run, emit=self.emit, metrics=metrics)
            try:
                return syncer.serve(stop=lambda: deposed.is_set() or self.stopping.is_set())
            finally:
                syncer.close()
        finally:
            over.set()
            thread.join()
            with suppress(StoreUnreachable):
                self._lease.release()
            if metrics is not None:
                metrics.close()
