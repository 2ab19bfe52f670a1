"""An island: inner AdamW steps on its own stream, fragments sent and received through the store. It never waits for anyone.

A round is the inner steps from one fragment falling due to the next. It ends with a record (consumption, then the checkpoint's row), and only then is the due
fragment's outer gradient sent: what others build on is always on record. Records, sendings and checkpoints' objects are left to the background; a link that's too
slow for a sending keeps its fragment's steps for the next one.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from manifests.catalog import Catalog
from manifests.errors import ObjectMissing, StoreUnreachable
from manifests.jobs import canonical_json
from manifests.questions import question
from manifests.schemas import TIERS
from manifests.tables import append
from trainer.checkpoints import (
    Inputs,
    Mixture,
    Progress,
    Resumption,
    Whole,
    checkpoint_id,
    checkpoint_row,
    ends_cycle,
    give_up_superseded,
    is_anchor,
    last_checkpoint,
    load_island,
    messages_told,
    pack_island,
)
from trainer.choice import set_apart
from trainer.drift import Drift, Sent, relative_distance
from trainer.engine import make_engine
from trainer.errands import Inline, Lane, Patience
from trainer.feed import Feed, holdout_tokens, start_catalog
from trainer.feedback import SCALES, Feedback, summarise_cycle, summarise_told
from trainer.members import claim_incarnation, is_told_to_leave, say_finished
from trainer.messages import Teller, to_text
from trainer.metrics import Metrics
from trainer.model import learning_rate
from trainer.privacy import ToldLoss, feedback_budget, tell_losses
from trainer.receiver import Follower, Receipt, Receiver
from trainer.recorder import SpanRecorder
from trainer.records import RecordKeeper, Round, Sending
from trainer.rights import island_rights
from trainer.run import Run
from trainer.strategies import TABLES_READ, Decision, decide
from trainer.stream import Sequence
from trainer.talk import GivenMix
from trainer.tape import anatomy_of, read_global
from trainer.wire import object_hash

_MOST_UNTOLD = 8
"""Feedback messages that wait for an outer gradient to go with; older ones are given up."""
_SAME_WEIGHT = 1e-9
"""Weights that differ by less are the same: the stream scales them, and rounds."""
Emit = Callable[[dict[str, Any]], None]
"""Takes a status: island, state, step, loss, tokens per second, mix."""


class Island:
    """One island's life, from where it was left to the run's last step."""

    def __init__(
        self, run: Run, island: int, *, emit: Emit, metrics: Metrics | None = None, in_background: bool = True
    ) -> None:
        """Takes the next incarnation's number and puts the last checkpoint, or the global state, in place.

        Args:
            run: the run.
            island: its number.
            emit: told every step.
            metrics: told every step and round.
            in_background: False: the store is waited for, and looked at once a round; for what must come out the same every time.

        Raises:
            AtollError: the run's data can't be read, the checkpoint is damaged, or the run needs what isn't installed.
        """
        self.run = run
        self.island = island
        self.emit = emit
        self.metrics = metrics
        config = run.config
        catalog = start_catalog(run.store)
        self.holdout = holdout_tokens(run, catalog)
        self.engine = make_engine(config, holdout_NL=self.holdout)
        self.anatomy = anatomy_of(run, self.engine.model)
        self.rights = island_rights(config, catalog, island).both
        self.incarnation = claim_incarnation(run, island)
        self._in_background = in_background
        self._keeper = RecordKeeper(run, island, incarnation=self.incarnation, in_background=in_background)
        self._bulk: Lane | Inline = Lane(f"checkpoints of island {island}") if in_background else Inline()
        self._teller = Teller(
            scales=SCALES, island=island, incarnation=self.incarnation, budget_bytes=config.feedback_bytes
        )
        self._budget = feedback_budget(config)
        self._told: Mapping[str, ToldLoss] | None = None
        self._untold: deque[tuple[int, Feedback]] = deque(maxlen=_MOST_UNTOLD)
        self._given: GivenMix | None = None
        self._receiver: Receiver | None = None
        self._spans = SpanRecorder()
        self._step_times: list[float] = []
        self._replaceable: str | None = None
        self._data_changed = False
        self._parent: bytes | None = None
        self._receipts: list[tuple[int, int]] = []

        resumption = last_checkpoint(run, catalog, island)
        decision = self._begin(resumption, catalog)
        self._passes = self._finished_passes()
        self._exhausted = list(self.feed.stream.exhausted)
        self._record_mixture("first assignment" if decision is not None else "as checkpointed", decision)
        self._event("island_joined", step=self.progress.step, pid=os.getpid(), host=socket.gethostname())
        self._note("state", state="joined", step=self.progress.step)

    def train(self) -> None:
        """Takes the steps that are left, round by round, then says that it has finished; stops at a round's edge where it is told to leave.

        Raises:
            AtollError: the store is lost for longer than its retries, or another process runs this island.
        """
        self.begin()
        try:
            while self.progress.round < self.run.config.num_rounds and not self.is_leaving:
                self.train_round()
            if self.is_leaving:
                self.leave()
            else:
                self.finish()
        finally:
            self.close()

    def begin(self) -> None:
        """Starts to look for merges in the background."""
        if self._in_background:
            self._receiver = Receiver(
                self._follower,
                has_news=self.feed.has_news,
                is_told_to_leave=lambda: is_told_to_leave(self.run, self.island, self.incarnation),
            )
            self._receiver.start()

    def train_round(self) -> None:
        """The steps of one round, and its record."""
        losses = []
        for _ in range(self.run.config.round_steps):
            self._receive()
            losses.append(self._step())
        self._close_round(sum(losses) / len(losses))

    def finish(self) -> None:
        """Sends what is left of every fragment, waits until all is in the store, and says so."""
        progress = self.progress
        self._keeper.drain()
        assert self._parent is not None, "a run has rounds"
        for number in range(len(self.anatomy.fragments)):
            sending = self._sending(number, round_=progress.round + 1, identity=self._parent)
            if sending is not None:
                self._keeper.send(sending)
        self._drain()
        say_finished(self.run, self.island, step=progress.step)
        self._note("state", state="finished", step=progress.step)
        self._status("finished")

    @property
    def is_leaving(self) -> bool:
        """Whether somebody has told it to leave before its last step."""
        return (
            self._receiver is not None
            and self._receiver.leaving.is_set()
            and self.progress.round < self.run.config.num_rounds
        )

    def leave(self) -> None:
        """Waits until all that the rounds so far have left to the background is in the store. What isn't sent yet comes with it if it comes again."""
        self._event("island_left", step=self.progress.step)
        self._drain()
        self._note("state", state="left", step=self.progress.step)
        self._status("left")

    def _drain(self) -> None:
        self._keeper.drain()
        self._bulk.drain()

    def close(self) -> None:
        """Stops all that runs in the background."""
        if self._receiver is not None:
            self._receiver.stopping.set()
        self._keeper.close()
        self._bulk.close()
        self.feed.close()
        self.engine.close()

    # Beginning: from a whole checkpoint and the rounds since, or from the global state.

    def _begin(self, resumption: Resumption, catalog: Catalog) -> Decision | None:
        whole = resumption.whole
        decision = None
        if whole is None:
            self.progress = Progress()
            first = Inputs.from_json(resumption.since[0]["inputs"]).receipts[0] if resumption.since else None
            followed = read_global(self.run, self.anatomy, merge=first[1] if first else None)
            self.drifts = {
                number: Drift.at(parameters, followed.versions[number])
                for number, parameters in enumerate(followed.parameters)
            }
            for parameters in followed.parameters:
                self.engine.write(parameters)
            self.progress.merge = followed.merge
            if resumption.since:
                self.mixture = Mixture.from_json(resumption.since[0]["mixture"])
            else:
                self.mixture, decision = self._first_mixture(self.run.config.tier_version)
        else:
            self.mixture = Mixture.from_json(whole["mixture"])
            self.progress, self.drifts = load_island(self.run.store, whole, engine=self.engine, anatomy=self.anatomy)
            followed = read_global(self.run, self.anatomy, merge=max(self.progress.merge, self._first_merge()))
            self._parent = whole["checkpoint"]
            if whole["run"] == self.run.name:
                self._replaceable = whole["object"] if not whole["anchor"] else None
                give_up_superseded(self.run, catalog, whole)
        self._follower = Follower(self.run, self.anatomy, self.island, followed)
        self.feed = Feed(
            self.run,
            catalog,
            island=self.island,
            weights=self.mixture.weights,
            state=whole["stream"] if whole else None,
            as_it_was=resumption.since[0]["stream"] if resumption.since else None,
        )
        # A branch begins at a merge that its parent's island may not have seen.
        self._install([r for r in self._follower.all_receipts() if r.version != self.drifts[r.fragment].version])
        self._receipts = [(0, followed.merge)] if whole is None else []
        branch = self.run.branch
        if (
            whole is not None
            and branch is not None
            and whole["run"] != self.run.name
            and self.island in branch.brought_back
        ):
            for drift in self.drifts.values():
                self.engine.write(drift.bring_back())
        self._resend()
        self._take_again(resumption.since)
        if self.progress.round > 0 and self.feed.has_news():
            self._take_new_data()
        return decision

    def _first_merge(self) -> int:
        """The merge that the run's tape begins after."""
        return self.run.branch.merge if self.run.branch is not None else 0

    def _resend(self) -> None:
        """Sends again what a dead incarnation may not have sent; what is there stays as it is."""
        for number, drift in self.drifts.items():
            for round_, sent in drift.pending.items():
                # A branch's island may have sent it in the run before: to its syncer it's this run's.
                own = Sent(parts=sent.parts, said={**sent.said, "run": self.run.name})
                self._keeper.send(
                    Sending(fragment=number, round=round_, sent=own, shapes=self.anatomy.shapes_of(number))
                )

    def _take_again(self, rows: list[dict[str, Any]]) -> None:
        """Takes the rounds again that were recorded after the whole checkpoint: same data, same merges at the same steps."""
        for row in rows:
            inputs = Inputs.from_json(row["inputs"])
            receipts = [receipt for receipt in inputs.receipts if receipt[1] > self.progress.merge]
            try:
                losses = []
                for _ in range(self.run.config.round_steps):
                    while receipts and receipts[0][0] <= self.progress.step:
                        self._install(self._follower.up_to(receipts.pop(0)[1]))
                    losses.append(self._step())
            except ObjectMissing as e:
                # A shard of these rounds was erased since. What they taught and wasn't sent is lost; no document comes twice.
                self._event("rounds_lost", rounds=[r["round"] for r in rows], why=str(e))
                self._skip_to(rows[-1])
                return
            self._spans.take(run=self.run.name, island=self.island, incarnation=self.incarnation, checkpoint=b"")
            self.progress.round += 1
            self._told = inputs.told
            self._end_round(sum(losses) / len(losses), again=Mixture.from_json(row["mixture"]))
            if inputs.sent:
                sending, _ = self._send_due(row["checkpoint"])
                if sending is not None:
                    self._keeper.send(sending)
            self._parent = row["checkpoint"]
            self._receipts, self._told = [], None
            self._complete(row)

    def _complete(self, row: dict[str, Any]) -> None:
        """Puts the object of a row in the store that an incarnation had no time to put there, if it comes out as it was."""
        if not row["object"] or self.run.store.exists(row["object"]):
            return
        whole = pack_island(
            self.run,
            island=self.island,
            incarnation=row["incarnation"],
            engine=self.engine,
            drifts=self.drifts,
            progress=self.progress,
            replaces=None,
        )
        if whole.path == row["object"] and object_hash(whole.data) == row["hash"]:
            self._bulk.add(lambda: self._store_whole(whole))

    def _skip_to(self, row: dict[str, Any]) -> None:
        progress = self.progress
        progress.round, progress.step = row["round"], row["step"]
        progress.sequence = messages_told(self.run, progress.round)
        # They're told of already, or not whole.
        progress.cycle_losses = {tier: [] for tier in TIERS}
        progress.cycle_contributions = {tier: [] for tier in TIERS}
        progress.tier_tokens = {tier: row[f"tokens_{tier.lower()}"] for tier in TIERS}
        self.mixture = Mixture.from_json(row["mixture"])
        self.feed.close()
        self.feed = Feed(
            self.run, Catalog(self.run.store), island=self.island, weights=self.mixture.weights, state=row["stream"]
        )
        self._spans = SpanRecorder()
        self._parent = row["checkpoint"]

    # A step.

    def _step(self) -> float:
        began = time.monotonic()
        config = self.run.config
        sequences = [self._next_sequence() for _ in range(config.batch_size)]
        tokens_BL = torch.stack([torch.from_numpy(s.tokens.astype("int64")) for s in sequences])
        progress = self.progress
        lr = learning_rate(progress.step + 1, config)
        stepped = self.engine.step(tokens_BL, lr=lr, step=progress.step)
        progress.step += 1
        num_tokens = tokens_BL.numel()
        for drift in self.drifts.values():
            drift.tokens += num_tokens
            drift.steps += 1
        contributions = stepped.contributions_BL.numpy() if stepped.contributions_BL is not None else None
        self._spans.record(progress.step, sequences, stepped.losses_BL.numpy(), contributions)
        sums = contributions.sum(axis=1).tolist() if contributions is not None else [None] * len(sequences)
        for sequence, loss, contributed in zip(sequences, stepped.losses_BL.mean(dim=1).tolist(), sums, strict=True):
            for tier, tokens in zip(sequence.columns.tiers, sequence.columns.tokens.tolist(), strict=True):
                progress.tier_tokens[tier] += tokens
            if sequence.group in progress.cycle_losses:  # feedback speaks of tiers
                progress.cycle_losses[sequence.group].append(loss)
                if contributed is not None:
                    progress.cycle_contributions[sequence.group].append(contributed)
        mean_loss = float(stepped.losses_BL.mean())
        seconds = time.monotonic() - began
        self._step_times.append(seconds)
        self._status("training", loss=mean_loss, tokens_per_s=num_tokens / seconds)
        if self.metrics is not None:
            self.metrics.note_step(step=progress.step, loss=mean_loss, lr=lr, tokens=num_tokens, seconds=seconds)
        return mean_loss

    def _next_sequence(self) -> Sequence:
        patience, has_refreshed = Patience(), False
        while True:
            try:
                return self.feed.stream.next_sequence()
            except StoreUnreachable as e:
                patience.bear(e)  # without data there is no step; the stream stays where it was
            except ObjectMissing:
                # A shard goes within a round only where its documents are forgotten: the views know the one in its place.
                if self.feed.is_as_it_was or has_refreshed:
                    raise
                self._take_new_data()
                has_refreshed = True

    def _receive(self) -> None:
        """Puts merged fragments that have arrived under what the island has learned since (drift.py)."""
        if self._receiver is None:
            return
        self._keeper.check()
        self._bulk.check()
        self._install(self._receiver.take())

    def receive_now(self) -> None:
        """Looks for merges at once and puts them in place."""
        receipts: dict[int, Receipt] = {}
        while arrived := self._follower.next_receipts():
            receipts |= {receipt.fragment: receipt for receipt in arrived}
        self._install([receipts[number] for number in sorted(receipts)])

    def _install(self, receipts: list[Receipt]) -> None:
        if not receipts:
            return
        for receipt in receipts:
            drift = self.drifts[receipt.fragment]
            parameters = drift.receive(
                receipt.parameters,
                receipt.version,
                self.engine.read(self.anatomy.fragments[receipt.fragment]),
                merged_round=receipt.merged_round,
                keep=self.run.config.keep,
            )
            self.engine.write(parameters)
        newest = max(receipts, key=lambda receipt: receipt.merge)
        self.progress.merge = newest.merge
        self._teller.acknowledge(newest.acknowledged)
        self._given = newest.mix
        self._receipts.append((self.progress.step, self.progress.merge))

    # The end of a round.

    def _close_round(self, loss: float) -> None:
        """Leaves the record of the round to the background, and the fragment that falls due."""
        progress = self.progress
        progress.round += 1
        if self._has_news():
            self._take_new_data()
        measured = self._end_round(loss, again=None)
        identity = checkpoint_id(self.run.name, self.island, self.incarnation, progress.round)
        sending, sent = self._send_due(identity)
        whole = self._pack_if_due()
        row = checkpoint_row(
            self.run,
            island=self.island,
            incarnation=self.incarnation,
            identity=identity,
            parent=self._parent,
            clock=[drift.version for _, drift in sorted(self.drifts.items())],
            progress=progress,
            inputs=Inputs(receipts=self._receipts, sent=sent, told=self._told),
            is_whole=whole is not None,
            stream_state=self.feed.state(),
            mixture=self.mixture,
            loss=loss,
            holdout_loss=measured,
        )
        spans = self._spans.take(
            run=self.run.name, island=self.island, incarnation=self.incarnation, checkpoint=identity
        )
        self._keeper.record(Round(row=row, spans=spans, sending=sending, whole=whole))
        if whole is not None:
            self._bulk.add(lambda: self._store_whole(whole))
            self._replaceable = whole.path if not row["anchor"] else None
        self._parent = identity
        self._receipts, self._told = [], None
        self._note_repeats()
        self._note(
            "round",
            round=progress.round,
            step=progress.step,
            strategy=self.mixture.strategy,
            mix=dict(self.feed.stream.weights),
            backlog=self._keeper.backlog,
            bytes_up=self._keeper.bytes_up,
            bytes_down=self._follower.bytes_down,
            merge=progress.merge,
            checkpoint=whole is not None,
        )

    def _end_round(self, loss: float, *, again: Mixture | None) -> float | None:
        """At the end of an outer cycle measures, and sends the feedback; moves the mix.

        Args:
            loss: mean training loss of the round, nats per token.
            again: the mix after the round, where it's on record already.

        Returns:
            The holdout loss, where it was measured.
        """
        measured = None
        if ends_cycle(self.run, self.progress.round):
            measured = self.engine.holdout_loss(self.holdout)
            self._end_cycle(loss, measured)
            self._hold_near()
        if again is None:
            self._move_mix()
        elif again != self.mixture:
            self._set_mix(again)
        return measured

    def _pack_if_due(self) -> Whole | None:
        """All that the island is, where the round ends with a whole checkpoint."""
        if self._data_changed:
            self._bulk.drain()  # the round can't be taken again from the checkpoint before
        elif not is_anchor(self.run, self.progress.round):
            return None
        elif self._bulk.backlog > 0 and self.progress.round < self.run.config.num_rounds:
            return None  # the link hasn't carried the last one yet
        self._data_changed = False
        return pack_island(
            self.run,
            island=self.island,
            incarnation=self.incarnation,
            engine=self.engine,
            drifts=self.drifts,
            progress=self.progress,
            replaces=self._replaceable,
        )

    def _store_whole(self, whole: Whole) -> None:
        self.run.store.put_new(whole.path, whole.data)
        if whole.replaces is not None:
            self.run.store.delete(whole.replaces)

    def _send_due(self, identity: bytes) -> tuple[Sending | None, bool]:
        """The sending of the fragment that is due, and whether there was one to make; a fragment waits whose last sending hasn't left yet."""
        due = (self.progress.round - 1) % self.run.config.num_fragments
        if due >= len(self.anatomy.fragments):
            return None, True
        if self._keeper.is_unsent(due):
            return None, False
        return self._sending(due, round_=self.progress.round, identity=identity), True

    def _take_told(self) -> list[str]:
        """The messages that haven't gone out yet, as they travel."""
        told = [to_text(self._teller.tell(sequence, message.to_values())) for sequence, message in self._untold]
        self._untold.clear()
        return told

    def _sending(self, number: int, *, round_: int, identity: bytes) -> Sending | None:
        drift = self.drifts[number]
        if drift.steps == 0:
            return None
        parameters = self.engine.read(self.anatomy.fragments[number])
        if not all(bool(torch.isfinite(value).all()) for value in parameters.values()):
            self._bring_back("its parameters are not finite")
            return None
        said = {
            "run": self.run.name,
            "island": self.island,
            "round": round_,
            "fragment": number,
            "base_version": drift.version,
            "checkpoint": identity.hex(),
            "step": self.progress.step,
            "tokens": drift.tokens,
            "steps": drift.steps,
            "step_time_s": round(statistics.median(self._step_times[-32:]), 6) if self._step_times else 0.0,
            "tier_version": self.feed.tier_version,
            "feedback": self._take_told(),
        }
        sent = drift.send(parameters, round_=round_, wire=self.run.config.wire, said=said)
        return Sending(fragment=number, round=round_, sent=sent, shapes=self.anatomy.shapes_of(number))

    def _hold_near(self) -> None:
        """Brings the island back to the global parameters where it has gone too far from them."""
        parameters = self.engine.read(list(self.anatomy.shapes))
        distance = relative_distance(self.drifts, parameters)
        if not distance <= self.run.config.max_distance:
            self._bring_back(f"its distance from the global parameters is {distance:.3f} of their norm")

    def _bring_back(self, why: str) -> None:
        for drift in self.drifts.values():
            self.engine.write(drift.bring_back())
        self._event("brought_back", step=self.progress.step, why=why)
        self._note("state", state="brought_back", step=self.progress.step)

    # New data, repeats.

    def _has_news(self) -> bool:
        return self._receiver.news.is_set() if self._receiver is not None else self.feed.has_news()

    def _take_new_data(self) -> None:
        """Goes over to what is new in the store, and says so."""
        if self._receiver is not None:
            self._receiver.news.clear()
        taken = self.feed.refresh()
        self._data_changed = True
        if taken is None:
            return
        self._event(
            "tier_version_taken", before=taken.before, after=taken.after, read_before=taken.read, begun=taken.begun
        )
        self._passes = self._finished_passes()
        decision = None
        if not self.run.config.group_by:
            # Without a feedback message: those move the weights as the syncer is told of them.
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

    # The mix.

    def _end_cycle(self, loss: float, measured: float) -> None:
        """Makes the feedback message of an outer cycle, which goes out with the next outer gradient."""
        progress = self.progress
        progress.sequence += 1
        losses, progress.cycle_losses = progress.cycle_losses, {tier: [] for tier in TIERS}
        contributions, progress.cycle_contributions = progress.cycle_contributions, {tier: [] for tier in TIERS}
        known: dict[str, Any] = {
            "holdout_loss": measured,
            "previous": progress.tier_losses,
            "step_times_s": self._step_times,
            "upload_bps": self._keeper.take_upload_bps(),
            "latency_s": self._follower.latency_s,
        }
        self._step_times = []
        if self._budget is None:
            message, progress.tier_losses = summarise_cycle(
                loss=loss, losses_by_tier=losses, contributions_by_tier=contributions, **known
            )
        elif progress.sequence <= self._budget.messages:
            message, progress.tier_losses = summarise_told(self._tell(losses, measured), **known)
        else:
            if progress.sequence == self._budget.messages + 1:
                self._event("feedback_spent", epsilon=self._budget.epsilon, messages=self._budget.messages)
            return
        self._untold.append((progress.sequence, message))
        self._note("feedback", sequence=progress.sequence, **message.to_row())

    def _tell(self, losses: Mapping[str, list[float]], measured: float) -> Mapping[str, ToldLoss]:
        """What may be told of a cycle's losses: what is on record of it, else with noise that is drawn now, and recorded before it leaves."""
        assert self._budget is not None
        if self._told is None:
            self._told = tell_losses(
                losses,
                centres=self.progress.centres,
                first_centre=measured if math.isfinite(measured) else math.log(self.run.config.vocab_size),
                budget=self._budget,
                gauss=random.SystemRandom().gauss,
            )
        self.progress.centres |= {tier: loss.centre for tier, loss in self._told.items()}
        return self._told

    def _move_mix(self) -> None:
        """Takes the newest mix that the island has been given, unless it's of a tier version that the island has left."""
        given = self._given
        if given is None or given.tier_version != self.feed.tier_version or self.run.config.group_by:
            return
        weights = self.mixture.weights
        moved = any(abs(weight - weights[tier]) > _SAME_WEIGHT for tier, weight in given.weights.items())
        if moved or given.strategy != self.mixture.strategy:
            self._set_mix(Mixture(strategy=given.strategy, weights=given.weights))
            self._record_mixture(
                given.reason,
                Decision(
                    weights=given.weights,
                    query=question("mixture"),
                    parameters=given.parameters,
                    inputs=given.inputs,
                ),
            )
        self._given = None

    def _set_mix(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.feed.stream.set_weights(mixture.weights)

    def _first_mixture(self, tier_version: int) -> tuple[Mixture, Decision | None]:
        config = self.run.config
        weights = config.weights_of(self.island)
        if weights is not None:
            return Mixture(strategy=f"by {config.group_by}", weights=weights), None
        strategy = config.strategy_of(self.island)
        decision = self._decide(strategy, tier_version=tier_version)
        decision, _ = set_apart(config, Catalog(self.run.store, tables=TABLES_READ), self.island, strategy, decision)
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

    # What is said of it.

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
        self._keeper.add(lambda: append(self.run.store, "mixtures", [row]))

    def _event(self, kind: str, **detail: Any) -> None:
        row = {
            "run": self.run.name,
            "kind": kind,
            "island": self.island,
            "round": self.progress.round,
            "detail": json.dumps(detail),
        }
        self._keeper.add(lambda: append(self.run.store, "events", [row]))

    def _note(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.note(kind, **values)

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
