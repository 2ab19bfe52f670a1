"""Island checkpoints: what is in one, how it's committed, and finding the one to start from.

Every round ends with a row in `checkpoints`. The consumption of the round is appended before, under its id, and counts with it: what is recorded as consumed and
what the parameters have seen never differ. Once in an outer cycle, or less often, the row names an object that holds all that the island is. A row between says
which merges came before which step: an island that starts again takes the whole checkpoint and makes the rounds since again from its stream and these,
to the bit on a CPU, so that what it had sent is neither lost nor sent twice.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from manifests.catalog import Catalog
from manifests.errors import Failure, SequenceTaken
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append, read
from trainer.drift import Drift, Sent
from trainer.engine import Engine
from trainer.feedback import TierLoss
from trainer.privacy import ToldLoss
from trainer.quantise import Tensors
from trainer.run import Run
from trainer.tape import Anatomy
from trainer.wire import CorruptObject, object_hash, pack, reread, unpack


@dataclass(kw_only=True, slots=True)
class Progress:
    """What an island counts as it goes; all of it is in its checkpoint."""

    round: int = 0
    """Rounds finished."""
    step: int = 0
    """Inner steps taken."""
    tier_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens trained on, by tier."""
    merge: int = 0
    """Last merge of the tape that has been received."""
    sequence: int = 0
    """Feedback messages made."""
    tier_losses: dict[str, TierLoss] = field(default_factory=dict)
    """Training loss by tier in the outer cycle before; what `adaptive` compares with."""
    centres: dict[str, float] = field(default_factory=dict)
    """What losses are clipped around, by tier, where feedback is private."""
    cycle_losses: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    """Loss of every sequence of the outer cycle so far, by tier: a cycle may outlive its process."""
    cycle_contributions: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    """Likewise, what every sequence has contributed to the descent of the holdout loss, where that is measured (online.py)."""

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return sum(self.tier_tokens.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What came to an island from outside in a round: with its stream it gives the round again, to the bit."""

    receipts: list[tuple[int, int]] = field(default_factory=list)
    """Step before which merges were put in place, and the last of them; of the island's first round also what it joined with."""
    sent: bool = True
    """Whether the fragment that was due went out; not where the one before it was still waiting for the link."""
    told: Mapping[str, ToldLoss] | None = None
    """What the round's feedback said of losses by tier, where that has noise: nobody draws it a second time, which would cost privacy again."""

    def to_json(self) -> str:
        """As the tables keep it."""
        told = {} if self.told is None else {"told": {tier: asdict(loss) for tier, loss in self.told.items()}}
        return json.dumps({"receipts": self.receipts, "sent": self.sent, **told})

    @staticmethod
    def from_json(text: str) -> Inputs:
        """What `to_json` wrote."""
        loaded = json.loads(text)
        told = loaded.get("told")
        return Inputs(
            receipts=[(step, merge) for step, merge in loaded["receipts"]],
            sent=loaded["sent"],
            told=None if told is None else {tier: ToldLoss(**loss) for tier, loss in told.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """An island's mix as it's asked for."""

    strategy: str
    weights: Mapping[str, float]

    def to_json(self) -> str:
        """As the tables keep it."""
        return json.dumps({"strategy": self.strategy, "weights": dict(self.weights)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Mixture:
        """What `to_json` wrote."""
        return Mixture(**json.loads(text))


def checkpoint_id(*parts: object) -> bytes:
    """Id of a checkpoint: the hash of what names it."""
    return xxhash.xxh3_128_digest("/".join(str(part) for part in parts).encode())


class Whole:
    """A checkpoint's object: all that an island is. Its bytes are made when somebody first asks for them: not in the thread that trains."""

    def __init__(self, *, path: str, tensors: Tensors, description: Mapping[str, Any], replaces: str | None) -> None:
        """
        Args:
            path: where it's to lie.
            tensors: nobody changes them any more.
            description: what is known of them, likewise.
            replaces: object that it makes superfluous.
        """
        self.path, self.replaces = path, replaces
        self._content: tuple[Tensors, Mapping[str, Any]] | None = (tensors, description)
        self._data = b""
        self._hash = ""
        self._lock = threading.Lock()

    @property
    def data(self) -> bytes:
        """The object's bytes."""
        with self._lock:
            if self._content is not None:
                self._data = pack(*self._content)
                self._hash = object_hash(self._data)
                self._content = None
            return self._data

    def to_columns(self) -> dict[str, Any]:
        """What a row of `checkpoints` says of it."""
        size = len(self.data)
        return {"object": self.path, "hash": self._hash, "size_bytes": size}


def pack_island(
    run: Run,
    *,
    island: int,
    incarnation: int,
    engine: Engine,
    drifts: Mapping[int, Drift],
    progress: Progress,
    replaces: str | None,
) -> Whole:
    """All that an island is now, as one object: parameters, moments, random state, counters, and how it stands to the global fragments."""
    tensors, steps = engine.state()
    standing = []
    for number, drift in sorted(drifts.items()):
        tensors |= {f"received/{name}": value for name, value in drift.received.items()}
        for round_, sent in drift.pending.items():
            tensors |= {f"pending/{number}/{round_}/{part}": value for part, value in sent.parts.items()}
        standing.append(
            {
                "version": drift.version,
                "tokens": drift.tokens,
                "steps": drift.steps,
                "pending": {str(round_): _lasting(sent.said) for round_, sent in drift.pending.items()},
            }
        )
    counters = {
        "round": progress.round,
        "step": progress.step,
        "tier_tokens": progress.tier_tokens,
        "merge": progress.merge,
        "sequence": progress.sequence,
        "tier_losses": {tier: [known.mean, known.error] for tier, known in progress.tier_losses.items()},
        "centres": progress.centres,
        "cycle_losses": progress.cycle_losses,
        "cycle_contributions": progress.cycle_contributions,
    }
    description = {
        "run": run.name,
        "island": island,
        "progress": counters,
        "fragments": standing,
        "optimizer_steps": steps,
    }
    path = f"{run.island_folder(island)}/checkpoint-{progress.round:06d}-{incarnation:03d}.safetensors"
    return Whole(path=path, tensors=tensors, description=copy.deepcopy(description), replaces=replaces)


def _lasting(said: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was measured by the clock, and told by this incarnation: rounds that are taken again make the same checkpoint, to the bit."""
    return {**{name: value for name, value in said.items() if name != "feedback"}, "step_time_s": 0.0}


@reread
def load_island(
    store: Store, row: Mapping[str, Any], *, engine: Engine, anatomy: Anatomy
) -> tuple[Progress, dict[int, Drift]]:
    """Puts a checkpoint's parameters, moments and random state in place.

    Raises:
        CorruptObject: the object isn't what was committed, or it's of another model.
        ObjectMissing: it's gone.
    """
    data = store.get(row["object"])
    if object_hash(data) != row["hash"]:
        raise CorruptObject(f"{store.uri}/{row['object']} is not what was committed; restore it, or roll the run back")
    tensors, description = unpack(data, name=row["object"])
    if len(description["fragments"]) != len(anatomy.fragments) or any(
        tuple(tensors[f"parameter/{name}"].shape) != shape if f"parameter/{name}" in tensors else True
        for name, shape in anatomy.shapes.items()
    ):
        raise CorruptObject(f"{store.uri}/{row['object']} is a checkpoint of another model")
    engine.load_state(tensors, description["optimizer_steps"])
    drifts = {}
    for number, standing in enumerate(description["fragments"]):
        shapes = anatomy.shapes_of(number)
        drift = Drift.at({name: tensors[f"received/{name}"] for name in shapes}, standing["version"])
        for round_, said in sorted(standing["pending"].items(), key=lambda item: int(item[0])):
            prefix = f"pending/{number}/{round_}/"
            parts = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            drift.put_pending(int(round_), Sent(parts=parts, said=said))
        drift.tokens, drift.steps = standing["tokens"], standing["steps"]
        drifts[number] = drift
    counters = description["progress"]
    # Before there were errors, a loss was a number.
    known = {t: x if isinstance(x, list) else [x, x] for t, x in counters["tier_losses"].items()}
    losses = {tier: TierLoss(mean=mean, error=error) for tier, (mean, error) in known.items()}
    return Progress(**(counters | {"tier_losses": losses})), drifts


def checkpoint_row(
    run: Run,
    *,
    island: int,
    incarnation: int,
    identity: bytes,
    parent: bytes | None,
    clock: list[int],
    progress: Progress,
    inputs: Inputs,
    is_whole: bool,
    stream_state: str,
    mixture: Mixture,
    loss: float,
    holdout_loss: float | None,
) -> dict[str, Any]:
    """A row of `checkpoints` for the end of an island's round; what it says of its whole object is still to be filled in."""
    return {
        "checkpoint": identity,
        "run": run.name,
        "island": island,
        "incarnation": incarnation,
        "round": progress.round,
        "step": progress.step,
        "tokens": progress.tokens,
        **{f"tokens_{tier.lower()}": progress.tier_tokens[tier] for tier in TIERS},
        "clock": clock,
        "parent": parent,
        "merged": [],
        "object": "",
        "hash": "",
        "size_bytes": 0,
        "stream": stream_state,
        "mixture": mixture.to_json(),
        "anchor": is_whole and is_anchor(run, progress.round),
        "loss": loss,
        "holdout_loss": holdout_loss,
        "inputs": inputs.to_json(),
    }


def commit_rounds(run: Run, island: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Commits rounds of an island, in their order.

    Raises:
        SequenceTaken: another incarnation of the island has committed one of them; this one must stop.
    """
    last = rows[-1]
    committed = append(run.store, "checkpoints", rows, writer=f"checkpoint/{run.name}/{island}", sequence=last["round"])
    if (
        not committed
        and last["checkpoint"] not in read(run.store, "checkpoints", columns=["checkpoint"])["checkpoint"].to_pylist()
    ):
        raise SequenceTaken(
            f"island {island} of run {run.name} is being run elsewhere: round {last['round']} is committed by another process; "
            "this one stops, nothing of it counts"
        )


def ends_cycle(run: Run, round_: int) -> bool:
    """Whether a round is the last that a feedback message is of, or of the run."""
    return round_ % run.config.told_rounds == 0 or round_ == run.config.num_rounds


def messages_told(run: Run, round_: int) -> int:
    """How many feedback messages an island has made after so many rounds."""
    cycles, rest = divmod(round_, run.config.told_rounds)
    return cycles + (rest > 0 and ends_cycle(run, round_))


def round_of_message(run: Run, sequence: int) -> int:
    """The round that a feedback message closes."""
    return min(sequence * run.config.told_rounds, run.config.num_rounds)


def is_anchor(run: Run, round_: int) -> bool:
    """Whether the checkpoint after so many rounds is whole, and kept for rollback."""
    return round_ % (run.config.num_fragments * run.config.checkpoint_cycles) == 0 or round_ == run.config.num_rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Where an island goes on."""

    whole: dict[str, Any] | None
    """The row of its last whole checkpoint; None: from the global state."""
    since: list[dict[str, Any]]
    """The rows after it, to be taken again."""


def last_checkpoint(run: Run, catalog: Catalog, island: int) -> Resumption:
    """Where an island goes on: by its own rows, else the checkpoint that the branch names, else the global state."""
    own = catalog.rows("SELECT * FROM checkpoints WHERE run = ? AND island = ? ORDER BY round", [run.name, island])
    for index in range(len(own) - 1, -1, -1):
        # A row may be there before its object: the death of the island came between, and the one before counts.
        if own[index]["object"] and run.store.exists(own[index]["object"]):
            return Resumption(whole=own[index], since=own[index + 1 :])
    named = run.branch.island_checkpoints.get(str(island)) if run.branch else None
    if named is None:
        return Resumption(whole=None, since=own)
    rows = catalog.rows("SELECT * FROM checkpoints WHERE checkpoint = ?", [bytes.fromhex(named)])
    if not rows:
        raise Failure(f"run {run.name} branches from checkpoint {named}, which the store doesn't have")
    return Resumption(whole=rows[0], since=own)


def give_up_superseded(run: Run, catalog: Catalog, row: Mapping[str, Any]) -> None:
    """Deletes the objects of the checkpoints before one, where they are none to be kept: an island may have died before it did."""
    sql = "SELECT object FROM checkpoints WHERE run = ? AND island = ? AND round < ? AND NOT anchor AND object <> ''"
    for before in catalog.rows(sql, [run.name, row["island"], row["round"]]):
        run.store.delete(before["object"])
