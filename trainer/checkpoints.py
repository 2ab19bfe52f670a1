"""Island checkpoints: what is in one, how it's committed, and finding the one to start from.

A checkpoint counts once its row stands in `checkpoints`. The consumption of its segment is appended before, under its id, and counts with it:
what is recorded as consumed and what the parameters have seen never differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn

from manifests.catalog import Catalog
from manifests.errors import Failure, SequenceTaken
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.tables import append, read
from trainer.model import parameters_of
from trainer.run import Run
from trainer.wire import CorruptObject, object_hash, pack, unpack


@dataclass(kw_only=True, slots=True)
class Progress:
    """What an island counts as it goes; all of it is in its checkpoint."""

    round: int = 0
    """Rounds finished."""
    step: int = 0
    """Inner steps taken."""
    tier_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens trained on, by tier."""
    clock: list[int] = field(default_factory=list)
    """Version seen of every fragment."""
    fragment_tokens: list[int] = field(default_factory=list)
    """Tokens since the last receipt of every fragment."""
    fragment_steps: list[int] = field(default_factory=list)
    """Steps since the last receipt of every fragment."""
    parent: bytes | None = None
    """Id of the checkpoint that this one follows."""
    sequence: int = 0
    """Feedback messages sent."""
    tier_losses: dict[str, float] = field(default_factory=dict)
    """Mean training loss by tier in the outer cycle before; what `adaptive` compares with."""
    cycle_losses: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    """Loss of every sequence of the outer cycle so far, by tier: a cycle may outlive its process."""

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return sum(self.tier_tokens.values())


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


def save_island(
    run: Run,
    *,
    island: int,
    incarnation: int,
    identity: bytes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    stream_state: str,
    mixture: Mixture,
    loss: float,
    holdout_loss: float | None,
) -> str:
    """Writes the object, then commits the row.

    Returns:
        The object's path.

    Raises:
        SequenceTaken: another incarnation of the island has committed this round; this one must stop.
    """
    tensors = {f"parameter/{name}": value for name, value in parameters_of(model).items()}
    steps = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors[f"exp_avg/{name}"] = state["exp_avg"]
        tensors[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
        steps[name] = int(state["step"])
    tensors["rng/torch"] = torch.get_rng_state()
    counters = {
        "round": progress.round,
        "step": progress.step,
        "tier_tokens": progress.tier_tokens,
        "clock": progress.clock,
        "fragment_tokens": progress.fragment_tokens,
        "fragment_steps": progress.fragment_steps,
        "sequence": progress.sequence,
        "tier_losses": progress.tier_losses,
        "cycle_losses": progress.cycle_losses,
        "optimizer_steps": steps,
    }
    data = pack(tensors, {"run": run.name, "island": island, "progress": counters})
    path = f"{run.island_folder(island)}/checkpoint-{progress.round:06d}-{incarnation:03d}.safetensors"
    run.store.put_new(path, data)
    row = {
        "checkpoint": identity,
        "run": run.name,
        "island": island,
        "incarnation": incarnation,
        "round": progress.round,
        "step": progress.step,
        "tokens": progress.tokens,
        **{f"tokens_{tier.lower()}": progress.tier_tokens[tier] for tier in TIERS},
        "clock": progress.clock,
        "parent": progress.parent,
        "merged": [],
        "object": path,
        "hash": object_hash(data),
        "size_bytes": len(data),
        "stream": stream_state,
        "mixture": mixture.to_json(),
        "anchor": is_anchor(run, progress.round),
        "loss": loss,
        "holdout_loss": holdout_loss,
    }
    committed = append(
        run.store, "checkpoints", [row], writer=f"checkpoint/{run.name}/{island}", sequence=progress.round
    )
    if (
        not committed
        and identity not in read(run.store, "checkpoints", columns=["checkpoint"])["checkpoint"].to_pylist()
    ):
        raise SequenceTaken(
            f"island {island} of run {run.name} is being run elsewhere: round {progress.round} is committed by another process; "
            "this one stops, nothing of it counts"
        )
    return path


def is_anchor(run: Run, round_: int) -> bool:
    """Whether the checkpoint after so many rounds is kept for rollback: one in each outer cycle, and the last."""
    return round_ % run.config.num_fragments == 0 or round_ == run.config.num_rounds


def last_checkpoint(run: Run, catalog: Catalog, island: int) -> dict[str, Any] | None:
    """The row that an island starts from: its own last one, else the one that the branch names; None: it starts from the global state."""
    own = catalog.rows(
        "SELECT * FROM checkpoints WHERE run = ? AND island = ? ORDER BY round DESC LIMIT 1", [run.name, island]
    )
    if own:
        return own[0]
    named = run.branch.island_checkpoints.get(str(island)) if run.branch else None
    if named is None:
        return None
    rows = catalog.rows("SELECT * FROM checkpoints WHERE checkpoint = ?", [bytes.fromhex(named)])
    if not rows:
        raise Failure(f"run {run.name} branches from checkpoint {named}, which the store doesn't have")
    return rows[0]


def give_up_superseded(run: Run, catalog: Catalog, row: Mapping[str, Any]) -> None:
    """Deletes the object of the checkpoint before one, where it is none to be kept: an island may have died before it did."""
    for before in catalog.rows(
        "SELECT object FROM checkpoints WHERE checkpoint = ? AND run = ? AND NOT anchor", [row["parent"], run.name]
    ):
        run.store.delete(before["object"])


def load_island(
    store: Store, row: Mapping[str, Any], *, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Puts a checkpoint's parameters, optimizer state and RNG in place.

    Raises:
        CorruptObject: the object isn't what was committed.
        ObjectMissing: it's gone.
    """
    data = store.get(row["object"])
    if object_hash(data) != row["hash"]:
        raise CorruptObject(f"{store.uri}/{row['object']} is not what was committed; restore it, or roll the run back")
    tensors, description = unpack(data, name=row["object"])
    counters = description["progress"]
    steps = counters.pop("optimizer_steps")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"parameter/{name}"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps[name])),
            "exp_avg": tensors[f"exp_avg/{name}"].to(parameter.device),
            "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(parameter.device),
        }
    torch.set_rng_state(tensors["rng/torch"])
    return Progress(**counters, parent=row["checkpoint"])
