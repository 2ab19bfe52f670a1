"""Plain training, in one process and with nothing around it: what the benchmarks hold islands against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from trainer.config import RunConfig
    from trainer.mixer import MixedStream


def train_plainly(
    model: nn.Module,
    config: RunConfig,
    streams: Sequence[MixedStream],
    *,
    batch_size: int,
    lr: Callable[[int], float],
) -> None:
    """Takes all steps of a run's configuration, and closes the streams.

    Args:
        model: it learns where it is.
        config: steps, weight decay and gradient clip are taken from it.
        streams: each step's batch is made of them in turn.
        batch_size: sequences of each stream in a step.
        lr: learning rate of a step, from 1.
    """
    import torch

    from trainer.model import make_optimizer, token_losses

    device = next(model.parameters()).device
    optimizer = make_optimizer(model, config)
    for step in range(1, config.steps + 1):
        sequences = [s.next_sequence().tokens.astype("int64") for s in streams for _ in range(batch_size)]
        tokens_BL = torch.stack([torch.from_numpy(tokens) for tokens in sequences]).to(device)
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.zero_grad(set_to_none=True)
        token_losses(model, tokens_BL).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
        optimizer.step()
    for stream in streams:
        stream.close()
