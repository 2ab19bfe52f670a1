"""The configuration of a run: everything that an island or the syncer needs to know, saved whole in the `runs` table."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import UserError


def default_model(vocab_size: int) -> dict[str, Any]:
    """A small Llama-style model, as a Hugging Face configuration."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


_CHOICES = {
    "schedule": ("cosine", "wsd"),
    "parallel": ("ddp", "fsdp"),
    "wire": ("fp32", "bf16", "int8", "int4"),
    "merge": ("rda", "mean"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How a run trains. Steps are inner steps of one island."""

    run: str
    """Name of the run; letters, digits, dot, dash and underscore."""
    tier_version: int
    """Tier version that the islands begin with."""
    pool: str
    """Pool of shards that the views point into."""
    token_dtype: str
    """Type of the pool's tokens."""
    vocab_size: int
    """Tokens of the pool's tokenizer."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Hugging Face model configuration, or {"path": folder} for a model that lies on this machine; empty: a small Llama."""
    follow_tiers: bool = True
    """Whether the islands go over to newer tier versions of the pool as these appear, each at the edge of a round."""
    max_repeats: int = 4
    """How often a document may come again to an island; a tier that has run out leaves its weight to the next one. Up to 4 passes are nearly as
    good as new text (Muennighoff et al., Scaling Data-Constrained Language Models, 2023, section 6)."""
    group_by: str = ""
    """SQL expression over the columns of documents, tier and score, that names the group of each document; the mix is one of these groups. Empty: the tiers."""
    group_weights: tuple[Mapping[str, float], ...] = ()
    """Share of the sequences by group, for each island; taken round and round where there are more islands. Only with group_by."""
    num_islands: int = 4
    strategies: tuple[str, ...] = ("aggressive", "balanced", "conservative", "adaptive")
    """Strategy of each island; taken round and round where there are more islands."""
    steps: int = 160
    """Inner steps of each island."""
    batch_size: int = 8
    """Sequences in one inner step of one island."""
    seq_len: int = 128
    """Tokens in a sequence."""
    lr: float = 3e-3
    """Peak learning rate of the inner AdamW."""
    warmup_steps: int = 16
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    """Largest gradient norm of an inner step."""
    schedule: str = "cosine"
    """Course of the learning rate after its warm-up: "cosine" to a tenth of the peak, or "wsd": stays, and falls linearly to a tenth over the last fifth."""
    micro_batch: int = 0
    """Sequences that a rank's accelerator has at once; their gradients add up to the step's. 0: all."""
    parallel: str = "ddp"
    """How an island of several ranks (torchrun) shares the work: "ddp", each has the whole model, or "fsdp", each has a part of it (FSDP2)."""
    compile: bool = False
    """Whether the model goes through torch.compile."""
    num_fragments: int = 4
    """Fragments that the parameters are cut into (P)."""
    sync_every: int = 32
    """Inner steps between two syncs of the same fragment (H)."""
    overlap_steps: int = 0
    """Inner steps that a fragment may be under way, from its sending to its receipt, before the syncer stops waiting for more islands (τ). 0: half of sync_every."""
    keep: float = 1.0
    """Share of what an island has learned of a fragment since it sent it that stays when the merged one comes; the paper's α = 0 is 0 here."""
    wire: str = "int4"
    """How outer gradients and merges travel: fp32, bf16, int8, or int4 with error feedback."""
    merge: str = "rda"
    """How outer gradients become one: "rda", radial-directional average (embeddings plainly), or "mean"."""
    quorum: int = 1
    """Islands whose outer gradients a merge needs at least (K)."""
    grace: float = 0.8
    """Share of the slack (overlap less what quorum and merge take) that a merge waits for the other islands once it has its quorum (γ)."""
    max_staleness: int = 4
    """Versions that an outer gradient's base may lie behind the fragment that it is merged into; what is older is dropped, and said so."""
    max_distance: float = 1.0
    """How far an island may be from the global parameters, as a share of their norm, before it is brought back to them."""
    gate_norm: float = 8.0
    """An outer gradient is kept out of the merge where its norm is above so many times the usual; 0: never."""
    gate_cosine: float = -0.5
    """… where its cosine to the mean of the others is below; −1: never."""
    gate_holdout: float = 0.0
    """… where the holdout loss of the tentative merge rises with it by more, nats per token; 0: it isn't measured, which saves the syncer that work."""
    gate_strikes: int = 3
    """Times running that an island is kept out before it is in quarantine, and that it must pass to come out of it."""
    lease_s: float = 10.0
    """How long the syncer may show no sign of life before another process takes its place."""
    checkpoint_cycles: int = 1
    """Outer cycles (of sync_every steps) between two whole checkpoints of an island; what lies between is taken again at a restart."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step."""
    min_diversity: float = 0.01
    """Mean Jensen-Shannon divergence that adaptive islands are set apart by at least, nats; the less is known, the further: what no island tries, none learns. 0: they aren't."""
    feedback_rounds: int = 0
    """Rounds between two feedback messages, each with a measurement on the holdout; 0: an outer cycle, which is P."""
    feedback_bytes: int = 0
    """Room for the changes in a feedback message, bytes: what tells most goes first, and nothing waits for ever; but a full message, one in 32, is whole. 0: no bound."""
    feedback_epsilon: float = 0.0
    """Differential privacy of feedback: what all of an island's messages together may cost (ε), for one sequence of each message's rounds (privacy.py). 0: none."""
    feedback_delta: float = 1e-5
    """… and its δ."""
    feedback_clip: float = 1.0
    """… for which a sequence's loss counts up to so far from what is known of its tier, nats per token."""
    holdout_sequences: int = 64
    """Sequences of the holdout that a loss is measured on."""
    policy: str = ""
    """Edition of the policy that was in force when the run was made: its index holds what that allows. Empty: there was none."""
    online_influence: bool = False
    """Whether the islands measure what every span contributes to the descent of the holdout loss, as they train."""
    online_refresh: int = 64
    """Inner steps between two gradients of the holdout that contributions are measured against; at first they come sooner."""
    online_sequences: int = 16
    """Sequences of the holdout in one such gradient; the next ones each time, round and round."""
    online_layers: tuple[str, ...] = ()
    """Ends of the names of the linear layers that contributions are measured in; none: those that write to the residual stream."""
    seed: int = 0
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.run):
            raise UserError(f"run name {self.run!r}: use letters, digits, dot, dash and underscore, at most 100")
        for name in (
            "num_islands",
            "steps",
            "batch_size",
            "num_fragments",
            "sync_every",
            "quorum",
            "holdout_sequences",
            "online_refresh",
            "online_sequences",
            "checkpoint_cycles",
            "gate_strikes",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.seq_len < 2:
            raise UserError(f"seq_len is {self.seq_len}; a sequence needs at least 2 tokens")
        if self.sync_every % self.num_fragments:
            raise UserError(
                f"sync_every ({self.sync_every}) must be a multiple of num_fragments ({self.num_fragments}): "
                "one fragment falls due every sync_every / num_fragments steps"
            )
        if self.steps % self.round_steps:
            low = self.steps // self.round_steps * self.round_steps
            raise UserError(
                f"steps ({self.steps}) must be a multiple of a round's {self.round_steps} steps; "
                f"take {low or self.round_steps} or {low + self.round_steps}"
            )
        if self.quorum > self.num_islands:
            raise UserError(f"quorum ({self.quorum}) is above the number of islands ({self.num_islands})")
        if not self.strategies or not all(self.strategies):
            raise UserError("no strategy is named; `atoll strategies` lists them")
        if not 0 < self.lr < 1:
            raise UserError(f"lr is {self.lr}; it must lie between 0 and 1")
        if self.max_repeats < 0:
            raise UserError(f"max_repeats is {self.max_repeats}; it must be 0 or more")
        if bool(self.group_by) != bool(self.group_weights):
            raise UserError(
                "group_by and weights go together: an expression, and the share of each group that it names"
            )
        for weights in self.group_weights:
            bad = [name for name, weight in weights.items() if not 0 <= weight < math.inf]
            if bad:
                raise UserError(f"weight of group {bad[0]!r} is {weights[bad[0]]}; weights are numbers of 0 or more")
            if not sum(weights.values()) > 0:
                raise UserError(f"the weights {dict(weights)} sum to 0; one of them must be above")
        for name in (
            "max_staleness",
            "warmup_steps",
            "overlap_steps",
            "micro_batch",
            "gate_norm",
            "gate_holdout",
            "feedback_rounds",
            "feedback_bytes",
            "feedback_epsilon",
            "min_diversity",
        ):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name, low, high in (("grace", 0, 1), ("keep", 0, 1), ("gate_cosine", -1, 1)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} is {getattr(self, name)}; it must lie between {low} and {high}")
        if self.feedback_epsilon > 0 and self.online_influence:
            raise UserError(
                "online_influence tells what sequences contribute, without noise; a run with feedback_epsilon goes without"
            )
        if self.feedback_epsilon == math.inf:
            raise UserError("feedback_epsilon is inf; 0 is feedback without noise")
        if not 0 < self.feedback_delta < 1:
            raise UserError(f"feedback_delta is {self.feedback_delta}; it must lie between 0 and 1, both excluded")
        for name in ("max_distance", "lease_s", "feedback_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(known)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UserError(f"device is {self.device!r}; it is auto, cpu, cuda or cuda:N")
        if not 0 < self.outer_lr <= 2:
            raise UserError(f"outer_lr is {self.outer_lr}; it must lie above 0 and up to 2")
        if not 0 <= self.outer_momentum < 1:
            raise UserError(f"outer_momentum is {self.outer_momentum}; it must be at least 0 and below 1")
        if not all(self.online_layers):
            raise UserError(
                "online_layers has an empty name; leave it out for the layers that write to the residual stream"
            )

    @property
    def round_steps(self) -> int:
        """Inner steps of a round: from one fragment falling due to the next one (H / P)."""
        return self.sync_every // self.num_fragments

    @property
    def tau(self) -> int:
        """Steps that a fragment may be under way (τ)."""
        return self.overlap_steps or max(1, self.sync_every // 2)

    @property
    def told_rounds(self) -> int:
        """Rounds that a feedback message is of."""
        return self.feedback_rounds or self.num_fragments

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.steps // self.round_steps

    @property
    def num_messages(self) -> int:
        """Feedback messages that an island has to tell in the whole run; the last may be of fewer rounds."""
        return -(-self.num_rounds // self.told_rounds)

    def weights_of(self, island: int) -> Mapping[str, float] | None:
        """The share of each group of an island, where the mix isn't one of the tiers."""
        return self.group_weights[island % len(self.group_weights)] if self.group_weights else None

    def strategy_of(self, island: int) -> str:
        """The strategy that an island starts with."""
        asked = self.strategies[island % len(self.strategies)]
        return "balanced" if asked == "auto" else asked

    def to_json(self) -> str:
        """As the `runs` table keeps it."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> RunConfig:
        """What `to_json` wrote."""
        loaded = json.loads(text)
        for name in ("strategies", "online_layers", "group_weights"):
            loaded[name] = tuple(loaded.get(name, ()))
        return RunConfig(**loaded)
