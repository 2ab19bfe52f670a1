"""The engine of an island: its model, its inner optimizer and its step, on one device. Several ranks together are one engine, too (ranks.py).

B sequences of L tokens.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.config import RunConfig
from trainer.model import (
    build_model,
    holdout_loss,
    make_optimizer,
    parameters_of,
    pick_device,
    token_losses,
)
from trainer.online import OnlineInfluence
from trainer.quantise import Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """What an inner step has given."""

    losses_BL: torch.Tensor
    """Loss of each predicted token, (batch, length − 1), float32, on the CPU."""
    contributions_BL: torch.Tensor | None
    """What each place contributed to the descent of the holdout loss, where that's measured."""


class Engine(Protocol):
    """What an island asks of its accelerators. All tensors go in and out whole, in float32, on the CPU."""

    model: torch.nn.Module
    """The model as one process has it: for its names and shapes."""

    def step(self, tokens_BL: torch.Tensor, *, lr: float, step: int) -> Stepped:
        """One inner step on a batch; `step` is its number, from 0."""

    def read(self, names: Collection[str]) -> Tensors:
        """Copies of parameters."""

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts parameters in place; the optimizer's moments stay."""

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Parameters, moments and random state, for a checkpoint, and the optimizer's step of each parameter."""

    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: Mapping[str, int]) -> None:
        """Puts a checkpoint's state in place."""

    def holdout_loss(self, tokens_NL: torch.Tensor) -> float:
        """Mean loss per token on holdout sequences, nats."""

    def close(self) -> None:
        """Lets go of other ranks, if there are any."""


class LocalEngine:
    """One process, one device."""

    def __init__(self, config: RunConfig, *, holdout_NL: torch.Tensor) -> None:
        """
        Args:
            config: the run's.
            holdout_NL: sequences that online influence is measured against.
        """
        self._config = config
        self.device = pick_device(config.device)
        self.model = build_model(config).to(self.device)
        self.optimizer = make_optimizer(self.model, config)
        self._parameters = parameters_of(self.model)
        self._forward = torch.compile(self.model) if config.compile else self.model
        self._online = (
            OnlineInfluence(self.model, self.optimizer, holdout_NL.to(self.device), config)
            if config.online_influence
            else None
        )

    def step(self, tokens_BL: torch.Tensor, *, lr: float, step: int) -> Stepped:
        """One inner step on a batch, in parts of `micro_batch` sequences."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._online is not None:
            self._online.prepare(step)
        self.optimizer.zero_grad(set_to_none=True)
        micro = self._config.micro_batch or len(tokens_BL)
        losses = []
        for part_BL in tokens_BL.split(micro):
            losses_BL = token_losses(self._forward, part_BL.to(self.device, non_blocking=True))
            loss = losses_BL.mean()
            if len(part_BL) < len(tokens_BL):
                loss = loss * (len(part_BL) / len(tokens_BL))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(losses_BL.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.gradient_clip)
        self.optimizer.step()
        contributions = self._online.take(lr=lr, norm=norm) if self._online is not None else None
        return Stepped(
            losses_BL=torch.cat(losses).float().cpu(),
            contributions_BL=contributions.cpu() if contributions is not None else None,
        )

    def read(self, names: Collection[str]) -> Tensors:
        """Copies of parameters."""
        return {name: self._parameters[name].detach().float().cpu().clone() for name in names}

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts parameters in place."""
        for name, value in tensors.items():
            self._parameters[name].copy_(value)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Parameters, moments and random state, and the optimizer's steps."""
        tensors: Tensors = {}
        steps: dict[str, int] = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach().cpu().clone()
            state = self.optimizer.state[parameter]
            if state:
                tensors[f"exp_avg/{name}"] = state["exp_avg"].cpu().clone()
                tensors[f"exp_avg_sq/{name}"] = state["exp_avg_sq"].cpu().clone()
                steps[name] = int(state["step"])
        tensors["rng/torch"] = torch.get_rng_state()
        return tensors, steps

    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: Mapping[str, int]) -> None:
        """Puts a checkpoint's state in place."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(tensors[f"parameter/{name}"])
            if name in steps:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(steps[name])),
                    "exp_avg": tensors[f"exp_avg/{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(parameter.device),
                }
        torch.set_rng_state(tensors["rng/torch"])

    def holdout_loss(self, tokens_NL: torch.Tensor) -> float:
        """Mean loss per token on holdout sequences, nats."""
        return holdout_loss(self.model, tokens_NL.to(self.device))

    def close(self) -> None:
        """Nothing to let go of."""


def started_by_torchrun() -> bool:
    """Whether this process is a rank of several (or of one, if torchrun says so)."""
    env = os.environ
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys() and (int(env["WORLD_SIZE"]) > 1 or "LOCAL_RANK" in env)


def make_engine(config: RunConfig, *, holdout_NL: torch.Tensor) -> Engine:
    """The engine for where this process stands: alone, or a rank of several (torchrun)."""
    if started_by_torchrun():
        from trainer.ranks import RanksEngine  # with FSDP's imports, which one rank doesn't need

        return RanksEngine(config)
    return LocalEngine(config, holdout_NL=holdout_NL)
