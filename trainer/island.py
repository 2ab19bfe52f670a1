"""An island: inner AdamW steps on its own stream, fragments sent and received through the store. It never waits for anyone.

A round is the inner steps from one fragment falling due to the next. It ends with a commit (consumption, then the checkpoint), and only then is the due fragment's
outer gradient sent: what others build on is always on record.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch

from manifests.catalog import Catalog
from manifests.consumption import append_consumption
from manifests.errors import AtollError, ObjectMissing, ObjectTaken
from manifests.jobs import canonical_json
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append
from trainer.checkpoints import (
    Mixture,
    Progress,
    checkpoint_id,
    give_up_superseded,
    is_anchor,
    last_checkpoint,
    load_island,
    save_island,
)
from trainer.feed import Feed, holdout_tokens
from trainer.feedback import summarise_cycle
from trainer.fragments import cut_fragments
from trainer.model import (
    build_model,
    holdout_loss,
    learning_rate,
    make_optimizer,
    parameters_of,
    pick_device,
    token_losses,
)
from trainer.online import OnlineInfluence
from trainer.recorder import SpanRecorder
from trainer.rights import island_rights
from trainer.run import Run, load_run
from trainer.strategies import TABLES_READ, Decision, decide
from trainer.stream import Sequence
from trainer.wire import pack, unpack

Emit = Callable[[dict[str, Any]], None]
"""Takes a status: island, state, step, loss, tokens per second, mix."""

_POLL_S = 0.2


class Receiver(threading.Thread):
    """Watches for merged fragments and fetches them, so that no step waits for the store."""

    def __init__(self, run: Run, clock: list[int]) -> None:
        super().__init__(name="receiver", daemon=True)
        self._run = run
        self._clock = list(clock)
        self.arrived: queue.SimpleQueue[tuple[int, int, dict[str, torch.Tensor]] | AtollError] = queue.SimpleQueue()
        self.stopping = threading.Event()

    def run(self) -> None:
        """Polls until told to stop; an error ends it and is handed over."""
        try:
            while not self.stopping.is_set():
                for fragment in range(len(self._clock)):
                    self._fetch_newest(fragment)
                self.stopping.wait(_POLL_S)
        except AtollError as e:
            self.arrived.put(e)

    def _fetch_newest(self, fragment: int) -> None:
        version = self._clock[fragment]
        while self._run.store.exists(self._run.global_path(fragment, version + 1)):
            version += 1
        if version > self._clock[fragment]:
            path = self._run.global_path(fragment, version)
            tensors, _ = unpack(self._run.store.get(path), name=path)
            self._clock[fragment] = version
            self.arrived.put((fragment, version, tensors))


class Island:
    """One island's life, from where it was left to the run's last step."""

    def __init__(self, run: Run, island: int, *, emit: Emit) -> None:
        """Takes the next incarnation's number and puts the last checkpoint, or the global state, in place.

        Raises:
            AtollError: the run's data can't be read, or the checkpoint is damaged.
        """
        self.run = run
        self.island = island
        self.emit = emit
        config = run.config
        catalog = Catalog(run.store)
        self.device = pick_device(config.device)
        self.model = build_model(config).to(self.device)
        self.optimizer = make_optimizer(self.model, config)
        self.parameters = parameters_of(self.model)
        self.fragments = cut_fragments({n: p.numel() for n, p in self.parameters.items()}, config.num_fragments)
        self.base: dict[str, torch.Tensor] = {}
        self.holdout = holdout_tokens(run, catalog).to(self.device)
        self.online = (
            OnlineInfluence(self.model, self.optimizer, self.holdout, config) if config.online_influence else None
        )

        self.rights = island_rights(config, catalog, island).both
        row = last_checkpoint(run, catalog, island)
        decision = None
        if row is None:
            self.mixture, decision = self._first_mixture(config.tier_version)
            num_fragments = len(self.fragments)
            self.progress = Progress(
                clock=[-1] * num_fragments, fragment_tokens=[0] * num_fragments, fragment_steps=[0] * num_fragments
            )
        else:
            self.mixture = Mixture.from_json(row["mixture"])
            self.progress = load_island(run.store, row, model=self.model, optimizer=self.optimizer)
            give_up_superseded(run, catalog, row)
        self.feed = Feed(
            run, catalog, island=island, weights=self.mixture.weights, state=row["stream"] if row else None
        )
        self._passes = self._finished_passes()
        self._exhausted = list(self.feed.stream.exhausted)
        self.incarnation = self._claim_incarnation()
        self._record_mixture("as checkpointed" if row is not None else "first assignment", decision)
        self._resume_fragments()
        self._event("island_joined", step=self.progress.step, pid=os.getpid(), host=socket.gethostname())

        self._spans = SpanRecorder()
        self._previous_path: str | None = row["object"] if row is not None and row["run"] == run.name else None
        self._previous_anchor = row is not None and row["anchor"]
        self._step_times: list[float] = []

    def train(self) -> None:
        """Takes the steps that are left, round by round, then says that it has finished.

        Raises:
            AtollError: the store is lost for longer than its retries, or another process runs this island.
        """
        config = self.run.config
        receiver = Receiver(self.run, self.progress.clock)
        receiver.start()
        try:
            while self.progress.round < config.num_rounds:
                self._take_new_data()
                losses = []
                for _ in range(config.round_steps):
                    self._receive(receiver)
                    losses.append(self._step())
                self._close_round(sum(losses) / len(losses))
        finally:
            receiver.stopping.set()
            self.feed.close()
        for fragment in range(len(self.fragments)):
            self._send(fragment)
        self.run.store.put_content(
            self.run.finished_path(self.island), json.dumps({"step": self.progress.step}).encode()
        )
        self._status("finished")

    def _step(self) -> float:
        began = time.monotonic()
        config = self.run.config
        sequences = [self._next_sequence() for _ in range(config.batch_size)]
        tokens_BL = torch.stack([torch.from_numpy(s.tokens.astype("int64")) for s in sequences]).to(self.device)
        lr = learning_rate(self.progress.step + 1, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.online is not None:
            self.online.prepare(self.progress.step)
        losses_BL = token_losses(self.model, tokens_BL)
        loss = losses_BL.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.gradient_clip)
        self.optimizer.step()
        contributions_BL = self.online.take(lr=lr, norm=norm) if self.online is not None else None

        progress = self.progress
        progress.step += 1
        num_tokens = tokens_BL.numel()
        for fragment in range(len(self.fragments)):
            progress.fragment_tokens[fragment] += num_tokens
            progress.fragment_steps[fragment] += 1
        self._record(sequences, losses_BL.detach().cpu(), contributions_BL)
        seconds = time.monotonic() - began
        self._step_times.append(seconds)
        mean_loss = float(loss.detach())
        self._status("training", loss=mean_loss, tokens_per_s=num_tokens / seconds)
        return mean_loss

    def _record(
        self, sequences: list[Sequence], losses_BL: torch.Tensor, contributions_BL: torch.Tensor | None
    ) -> None:
        """Notes every span of the step for the consumption table."""
        contributions = contributions_BL.cpu().numpy() if contributions_BL is not None else None
        self._spans.record(self.progress.step, sequences, losses_BL.float().numpy(), contributions)
        for sequence, loss in zip(sequences, losses_BL.mean(dim=1).tolist(), strict=True):
            for tier, tokens in zip(sequence.columns.tiers, sequence.columns.tokens.tolist(), strict=True):
                self.progress.tier_tokens[tier] += tokens
            if sequence.group in self.progress.cycle_losses:  # feedback speaks of tiers
                self.progress.cycle_losses[sequence.group].append(loss)

    def _next_sequence(self) -> Sequence:
        try:
            return self.feed.stream.next_sequence()
        except ObjectMissing:
            # A shard goes within a round only where its documents are forgotten: the views know the one in its place.
            self._take_new_data()
            return self.feed.stream.next_sequence()

    def _take_new_data(self) -> None:
        """Goes over to what is new in the store, and says so."""
        taken = self.feed.refresh()
        if taken is None:
            return
        self._event(
            "tier_version_taken", before=taken.before, after=taken.after, read_before=taken.read, begun=taken.begun
        )
        self._passes = self._finished_passes()
        decision = None
        if not self.run.config.group_by:
            # Without its feedback message, which has moved the weights already.
            decision = self._decide(self.mixture.strategy, previous=self.mixture.weights)
            self.mixture = Mixture(strategy=self.mixture.strategy, weights=decision.weights)
            self.feed.stream.set_weights(decision.weights)
        self._record_mixture(f"tier version {taken.after} in place of {taken.before}", decision)

    def _note_repeats(self) -> None:
        """Records that documents begin to come again, and that a group has run out."""
        passes = self._finished_passes()
        for group, finished in passes.items():
            if finished > self._passes.get(group, 0):
                self._event("pass_finished", group=group, passes=finished, step=self.progress.step)
        exhausted = [group for group in self.feed.stream.exhausted if group not in self._exhausted]
        for group in exhausted:
            self._event("exhausted", group=group, passes=passes[group], weights=self.feed.stream.weights)
        if exhausted:
            self._record_mixture(f"{', '.join(exhausted)} has come as often as max_repeats allows", None)
        self._passes, self._exhausted = passes, list(self.feed.stream.exhausted)

    def _finished_passes(self) -> dict[str, int]:
        return {name: group.passes for name, group in self.feed.stream.groups.items()}

    def _close_round(self, loss: float) -> None:
        """Commits what the round did, then sends the fragment that falls due."""
        progress = self.progress
        due = progress.round % len(self.fragments)
        progress.round += 1
        ends_cycle = is_anchor(self.run, progress.round)
        measured = holdout_loss(self.model, self.holdout) if ends_cycle else None
        if ends_cycle and measured is not None:
            self._end_cycle(loss, measured)
        identity = checkpoint_id(self.run.name, self.island, self.incarnation, progress.round)
        append_consumption(
            self.run.store,
            self._spans.take(run=self.run.name, island=self.island, incarnation=self.incarnation, checkpoint=identity),
            writer=f"consumption/{self.run.name}/{self.island}/{self.incarnation}",
            sequence=progress.round,
        )
        path = save_island(
            self.run,
            island=self.island,
            incarnation=self.incarnation,
            identity=identity,
            model=self.model,
            optimizer=self.optimizer,
            progress=progress,
            stream_state=self.feed.state(),
            mixture=self.mixture,
            loss=loss,
            holdout_loss=measured,
        )
        progress.parent = identity
        self._note_repeats()
        self._send(due)
        if self._previous_path is not None and not self._previous_anchor:
            self.run.store.delete(self._previous_path)
        self._previous_path, self._previous_anchor = path, ends_cycle

    def _end_cycle(self, loss: float, measured: float) -> None:
        """Sends the feedback of an outer cycle, and moves the mix at its edge."""
        progress = self.progress
        progress.sequence += 1
        message, tier_losses = summarise_cycle(
            loss=loss,
            holdout_loss=measured,
            losses_by_tier=progress.cycle_losses,
            previous_tier_losses=progress.tier_losses,
            step_times_s=self._step_times,
        )
        row = {"run": self.run.name, "island": self.island, "sequence": progress.sequence, "round": progress.round}
        append(
            self.run.store,
            "feedback",
            [row | message.to_row()],
            writer=f"feedback/{self.run.name}/{self.island}",
            sequence=progress.sequence,
        )
        progress.tier_losses = tier_losses
        progress.cycle_losses = {tier: [] for tier in TIERS}
        self._step_times = []
        self._move_mix()

    def _move_mix(self) -> None:
        """Asks for the mix anew: the feedback has moved it, or somebody has edited the strategy."""
        if self.run.config.group_by:
            return
        strategy = self.mixture.strategy
        decision = self._decide(strategy, sequence=self.progress.sequence, previous=self.mixture.weights)
        if decision.weights != dict(self.mixture.weights):
            self.mixture = Mixture(strategy=strategy, weights=decision.weights)
            self.feed.stream.set_weights(decision.weights)
            self._record_mixture(f"feedback {self.progress.sequence}, up to round {self.progress.round}", decision)

    def _first_mixture(self, tier_version: int) -> tuple[Mixture, Decision | None]:
        config = self.run.config
        weights = config.weights_of(self.island)
        if weights is not None:
            return Mixture(strategy=f"by {config.group_by}", weights=weights), None
        strategy = config.strategy_of(self.island)
        decision = self._decide(strategy, tier_version=tier_version)
        return Mixture(strategy=strategy, weights=decision.weights), decision

    def _decide(self, strategy: str, *, tier_version: int | None = None, **more: Any) -> Decision:
        config = self.run.config
        return decide(
            Catalog(self.run.store, tables=TABLES_READ, rights=self.rights),
            run=self.run.name,
            island=self.island,
            strategy=strategy,
            tier_version=tier_version if tier_version is not None else self.feed.tier_version,
            pool=config.pool,
            **more,
        )

    def _send(self, fragment: int) -> None:
        """Sends a fragment's outer gradient against the version that it started from; twice is as good as once."""
        progress = self.progress
        if progress.fragment_steps[fragment] == 0:
            return
        names = self.fragments[fragment]
        gradient = {name: self.base[name] - self.parameters[name] for name in names}
        assert progress.parent is not None
        description = {
            "run": self.run.name,
            "island": self.island,
            "round": progress.round,
            "fragment": fragment,
            "base_version": progress.clock[fragment],
            "checkpoint": progress.parent.hex(),
            "step": progress.step,
            "tokens": progress.fragment_tokens[fragment],
            "steps": progress.fragment_steps[fragment],
        }
        folder = self.run.outer_folder(fragment, progress.clock[fragment])
        self.run.store.put_content(
            f"{folder}/{self.island:04d}-{progress.round:06d}.safetensors", pack(gradient, description)
        )

    def _receive(self, receiver: Receiver) -> None:
        """Puts merged fragments that have arrived in place of the island's own (α = 0, Decoupled DiLoCo)."""
        while not receiver.arrived.empty():
            item = receiver.arrived.get()
            if isinstance(item, AtollError):
                raise item
            fragment, version, tensors = item
            self._install(fragment, version, tensors)

    def _install(self, fragment: int, version: int, tensors: dict[str, torch.Tensor]) -> None:
        for name in self.fragments[fragment]:
            self.base[name] = tensors[name].to(self.device)
            self.parameters[name].copy_(self.base[name])
        self.progress.clock[fragment] = version
        self.progress.fragment_tokens[fragment] = 0
        self.progress.fragment_steps[fragment] = 0

    def _resume_fragments(self) -> None:
        """Sends what a dead incarnation may not have sent, then takes the newest global fragments."""
        progress = self.progress
        newest = [self.run.newest_version(fragment) for fragment in range(len(self.fragments))]
        due = (progress.round - 1) % len(self.fragments)
        for fragment, version in enumerate(newest):
            path = self.run.global_path(fragment, version)
            tensors, _ = unpack(self.run.store.get(path), name=path)
            if version > progress.clock[fragment]:
                self._install(fragment, version, tensors)
                continue
            for name in self.fragments[fragment]:
                self.base[name] = tensors[name].to(self.device)
            if progress.round > 0 and fragment == due:
                self._send(fragment)

    def _claim_incarnation(self) -> int:
        incarnation = 0
        claim = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "nonce": uuid.uuid4().hex}).encode()
        while True:
            try:
                self.run.store.put_new(f"{self.run.island_folder(self.island)}/incarnations/{incarnation:03d}", claim)
                return incarnation
            except ObjectTaken:
                incarnation += 1

    def _record_mixture(self, reason: str, decision: Decision | None) -> None:
        weights = self.feed.stream.weights
        row = {
            "run": self.run.name,
            "island": self.island,
            "incarnation": self.incarnation,
            "round": self.progress.round,
            "strategy": self.mixture.strategy,
            # A mix of other groups than the tiers has no weight of a tier.
            **{f"weight_{tier.lower()}": weights.get(tier, math.nan) for tier in TIERS},
            "reason": reason,
            "tier_version": self.feed.tier_version,
            "query": decision.query if decision else "",
            "parameters": decision.parameters if decision else "{}",
            "inputs": decision.inputs if decision else "{}",
            "weights": canonical_json(weights),
        }
        append(self.run.store, "mixtures", [row])

    def _event(self, kind: str, **detail: Any) -> None:
        row = {
            "run": self.run.name,
            "kind": kind,
            "island": self.island,
            "round": self.progress.round,
            "detail": json.dumps(detail),
        }
        append(self.run.store, "events", [row])

    def _status(self, state: str, **more: Any) -> None:
        self.emit(
            {
                "island": self.island,
                "state": state,
                "incarnation": self.incarnation,
                "step": self.progress.step,
                "steps": self.run.config.steps,
                "strategy": self.mixture.strategy,
                "mix": {group: round(weight, 3) for group, weight in self.feed.stream.weights.items()},
                "tokens": self.progress.tokens,
                **more,
            }
        )


def run_island(store: Store, run_name: str, island: int, *, emit: Emit) -> None:
    """Runs one island of a run until its last step; starts where the island was left.

    Raises:
        AtollError: see Island.
    """
    Island(load_run(store, run_name), island, emit=emit).train()
