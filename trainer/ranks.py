"""An island of several ranks, as torchrun starts them: together they are one engine (engine.py). Knows no store.

Rank 0 runs the island's code: streams, store, fragments. The others only obey: rank 0 sends out an order, a method's name and small arguments, and all ranks carry
it out together. Orders, tokens and losses go over gloo between CPUs; gradients and parameters over NCCL where there are GPUs.

Two ways to share the work (`parallel`): with "ddp" each rank has the whole model, with "fsdp" (FSDP2) a part of every tensor. Either way rank r takes the r-th part
of a batch, and the gradient is the mean over the whole batch. A checkpoint is laid out as one process lays it out, so it goes on with any number of ranks.

A rank that dies takes the island with it: torchrun ends the others, and even without it they end by themselves as soon as they want something of the dead one, since
its connections are closed. Only for a machine that is gone without a word they wait, ATOLL_RANKS_TIMEOUT_S seconds (environment; 1800); so rank 0 may not be busy
with other things for longer than that, either.

B sequences of L tokens, N holdout sequences; b and n: a rank's own.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from manifests.errors import Failure, UserError
from trainer.config import RunConfig
from trainer.engine import Stepped
from trainer.model import build_model, make_optimizer, pick_device, token_losses
from trainer.quantise import Tensors

_CPU = torch.device("cpu")
_HOLDOUT_BATCH = 32
"""Holdout sequences that a rank has at once."""


def serve_rank(config: RunConfig) -> None:
    """What a rank other than 0 runs in place of an island, until rank 0 closes its engine.

    Raises:
        UserError: the configuration doesn't go with several ranks.
        Failure: rank 0 is gone.
    """
    _Rank(config).follow()


class RanksEngine:
    """All ranks as one engine, held by rank 0. The others run `serve_rank` with the same configuration."""

    def __init__(self, config: RunConfig) -> None:
        """Waits for the other ranks.

        `micro_batch` counts a rank's own sequences. A `device` of cuda is the GPU of LOCAL_RANK, whatever its index.

        Raises:
            UserError: the configuration doesn't go with so many ranks.
        """
        self._rank = _Rank(config)
        self.model = self._rank.skeleton
        self._is_together = True

    def step(self, tokens_BL: torch.Tensor, *, lr: float, step: int) -> Stepped:
        """One inner step on a batch; every rank takes its part of it, in parts of `micro_batch` sequences."""
        losses_BL = self._order("step", tuple(tokens_BL.shape), lr, step, tokens_BL=tokens_BL)
        return Stepped(losses_BL=losses_BL, contributions_BL=None)

    def read(self, names: Collection[str]) -> Tensors:
        """Copies of parameters."""
        tensors: Tensors = self._order("read", tuple(names))
        return tensors

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts parameters in place."""
        self._order("write", tuple(tensors), tensors=tensors)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Parameters, moments and rank 0's random state, and the optimizer's steps."""
        tensors, steps = self._order("state")
        return {**tensors, "rng/torch": torch.get_rng_state()}, steps

    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: Mapping[str, int]) -> None:
        """Puts a checkpoint's state in place."""
        self._order("load_state", dict(steps), tensors=tensors)
        torch.set_rng_state(tensors["rng/torch"])

    def holdout_loss(self, tokens_NL: torch.Tensor) -> float:
        """Mean loss per token on holdout sequences, nats."""
        loss: float = self._order("holdout_loss", tuple(tokens_NL.shape), tokens_NL=tokens_NL)
        return loss

    def close(self) -> None:
        """Lets the other ranks go."""
        if self._is_together:
            self._order("close")
            self._is_together = False

    def _order(self, name: str, *arguments: Any, **own: Any) -> Any:
        """Has all ranks carry out a method; `own` are arguments that only rank 0 has."""
        is_together, self._is_together = self._is_together, False
        assert is_together, "an order failed, or the engine is closed; the other ranks are who knows where"
        dist.broadcast_object_list([(name, arguments)], src=0, device=_CPU)
        result = getattr(self._rank, name)(*arguments, **own)
        self._is_together = True
        return result


class _Rank:
    """One rank's share of the model and of the work. All ranks call the same methods in the same order; what rank 0 alone has is None elsewhere."""

    def __init__(self, config: RunConfig) -> None:
        _check(config, int(os.environ["WORLD_SIZE"]))
        self._config = config
        self.device = _device_of_rank(config)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            timeout = datetime.timedelta(seconds=float(os.environ.get("ATOLL_RANKS_TIMEOUT_S", "1800")))
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timeout)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

        model = build_model(config)
        self.skeleton = _skeleton(model)
        blocks = _blocks(model)
        if config.compile:  # by block, so that the gradients of one travel while the next one's are made
            for block in blocks:
                block.compile()
        self.model = _shard(model, blocks, self.device) if config.parallel == "fsdp" else model.to(self.device)
        self._forward: nn.Module = self.model
        if config.parallel == "ddp":
            indices = [self.device.index] if self.device.type == "cuda" else None
            self._forward = DistributedDataParallel(
                model, device_ids=indices, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self._parameters = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.model, config)
        if config.parallel == "fsdp":  # torch doesn't choose it by itself for sharded tensors
            for group in self.optimizer.param_groups:
                group["foreach"] = True

    def follow(self) -> None:
        """Carries out rank 0's orders until it closes."""
        name = ""
        while name != "close":
            order: list[Any] = [None]
            try:
                dist.broadcast_object_list(order, src=0, device=_CPU)
            except RuntimeError as e:
                raise Failure(f"rank 0 of this island is gone, so rank {self.rank} ends: {e}") from e
            name, arguments = order[0]
            getattr(self, name)(*arguments)

    def step(
        self, shape: tuple[int, int], lr: float, step: int, tokens_BL: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """One inner step; the losses of the whole batch in its order at rank 0."""
        if self.rank:
            # Where a model draws (dropout), its other ranks draw by the step's number: so only rank 0's generator is a checkpoint's to keep.
            torch.manual_seed(self._config.seed + step * self.num_ranks + self.rank)
        tokens_bL = self._hand_out(tokens_BL, shape).chunk(self.num_ranks)[self.rank]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        parts = tokens_bL.split(self._config.micro_batch or len(tokens_bL))
        losses = []
        for number, part in enumerate(parts, 1):
            with self._without_sync() if number < len(parts) else contextlib.nullcontext():
                part_losses = token_losses(self._forward, part.to(self.device, non_blocking=True))
                (part_losses.mean() / len(parts)).backward()  # type: ignore[no-untyped-call]
            losses.append(part_losses.detach())
        is_sharded = self._config.parallel == "fsdp"
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._config.gradient_clip, foreach=True if is_sharded else None
        )
        self.optimizer.step()
        losses_bL = torch.cat(losses).float().cpu()
        gathered = [torch.empty_like(losses_bL) for _ in range(self.num_ranks)] if self.rank == 0 else None
        dist.gather(losses_bL, gathered, dst=0)
        return torch.cat(gathered) if gathered is not None else None

    def read(self, names: Sequence[str]) -> Tensors:
        """Parameters whole, on the CPU."""
        return {name: _whole(self._parameters[name]) for name in names}

    def write(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Puts parameters in place."""
        for name in names:
            _put(self._parameters[name], tensors[name] if tensors is not None else None)

    def state(self) -> tuple[Tensors, dict[str, int]]:
        """Parameters and moments whole, on the CPU, and the optimizer's steps."""
        tensors: Tensors = {}
        steps: dict[str, int] = {}
        for name, parameter in self._parameters.items():
            tensors[f"parameter/{name}"] = _whole(parameter)
            state = self.optimizer.state.get(parameter)
            if state:
                tensors[f"exp_avg/{name}"] = _whole(state["exp_avg"])
                tensors[f"exp_avg_sq/{name}"] = _whole(state["exp_avg_sq"])
                steps[name] = int(state["step"])
        return tensors, steps

    def load_state(self, steps: Mapping[str, int], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Puts parameters and moments in place."""
        for name, parameter in self._parameters.items():
            _put(parameter, tensors[f"parameter/{name}"] if tensors is not None else None)
            if name in steps:
                state = {"step": torch.tensor(float(steps[name]))}
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = torch.zeros_like(parameter, requires_grad=False)
                    _put(state[moment], tensors[f"{moment}/{name}"] if tensors is not None else None)
                self.optimizer.state[parameter] = state

    @torch.no_grad()
    def holdout_loss(self, shape: tuple[int, int], tokens_NL: torch.Tensor | None = None) -> float:
        """Mean loss per token."""
        num_sequences, length = shape
        # All ranks go through the model as often as each other (FSDP gathers its tensors in step), so some go over sequences again, uncounted.
        share = -(-num_sequences // self.num_ranks)
        places = torch.arange(self.rank * share, (self.rank + 1) * share)
        own_nL = self._hand_out(tokens_NL, shape)[places % num_sequences]
        was_training = self.model.training
        self.model.eval()
        losses = [
            token_losses(self.model, batch.to(self.device)).sum(dim=1).cpu() for batch in own_nL.split(_HOLDOUT_BATCH)
        ]
        self.model.train(was_training)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # the root stays whole after a forward pass, and wouldn't see what is written next
        total = torch.cat(losses).double()[places < num_sequences].sum()
        dist.all_reduce(total)
        return float(total) / (num_sequences * (length - 1))

    def close(self) -> None:
        """Leaves the group of the ranks."""
        if self._owns_group:
            dist.destroy_process_group()

    def _hand_out(self, tokens: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor:
        """Rank 0's tokens, to all ranks."""
        tokens = tokens.contiguous() if tokens is not None else torch.empty(shape, dtype=torch.int64)
        dist.broadcast(tokens, src=0)
        return tokens

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients stay with the rank that has them. Not with FSDP: its ranks would hold the whole model's."""
        if isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return contextlib.nullcontext()


def _check(config: RunConfig, num_ranks: int) -> None:
    """Raises a UserError where a configuration doesn't go with so many ranks."""
    if config.online_influence:
        raise UserError(
            "online influence is measured in islands of one process; leave it out, or start the island without torchrun"
        )
    parts = num_ranks * (config.micro_batch or 1)
    if config.batch_size % parts:
        each = f"{num_ranks} ranks" + (f" × micro_batch {config.micro_batch}" if config.micro_batch else "")
        raise UserError(
            f"batch_size is {config.batch_size}, which can't be shared evenly among {each}; take a multiple of {parts}"
        )


def _device_of_rank(config: RunConfig) -> torch.device:
    device = pick_device(config.device)
    if device.type != "cuda":
        return device
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise UserError(
            f"there is no GPU for local rank {index}: torch sees {torch.cuda.device_count()} here; start no more ranks than GPUs"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: the elements of the module list that holds the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(p.numel() for p in blocks.parameters()) for blocks in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def _shard(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> nn.Module:
    """Leaves this rank its part of every tensor. What stands outside of the blocks, embeddings tied or not, is the root's group."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy()
    if device.type == "cuda":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return model


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model without its numbers; what is tied stays tied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, put together from all ranks' parts."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(_CPU, copy=True)


@torch.no_grad()
def _put(target: torch.Tensor, whole: torch.Tensor | None) -> None:
    """Copies rank 0's tensor into a tensor of all ranks, or into each one's part of it."""
    if isinstance(target, DTensor):
        source = torch.empty(target.shape, device=target.device, dtype=target.dtype)
        if whole is not None:
            source.copy_(whole)
        target.copy_(distribute_tensor(source, target.device_mesh, target.placements))
    else:
        if whole is not None:
            target.copy_(whole)
        dist.broadcast(target, src=0)
