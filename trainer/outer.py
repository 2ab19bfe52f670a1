"""The outer step: merging islands' outer gradients and moving the global fragment. Pure torch; no store, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]


def merge_weight(*, tokens: int, steps: int) -> float:
    """Weight of an island's outer gradient: tokens · (tokens / steps) (Decoupled DiLoCo, arXiv 2604.21428)."""
    return tokens * (tokens / steps) if steps else 0.0


def weighted_mean(gradients: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> Tensors:
    """Weighted mean, tensor by tensor, accumulated in float32."""
    total = sum(weights)
    assert total > 0, "no contribution has weight"
    merged: Tensors = {}
    for name in gradients[0]:
        merged[name] = sum(
            (gradient[name].float() * (weight / total) for gradient, weight in zip(gradients, weights, strict=True)),
            start=torch.zeros_like(gradients[0][name], dtype=torch.float32),
        )
    return merged


def nesterov_step(
    parameters: Mapping[str, torch.Tensor],
    momentum: Mapping[str, torch.Tensor],
    gradient: Mapping[str, torch.Tensor],
    *,
    lr: float,
    beta: float,
) -> tuple[Tensors, Tensors]:
    """SGD with Nesterov momentum, as torch.optim.SGD(nesterov=True): m ← β·m + g; θ ← θ − lr·(g + β·m).

    Returns:
        New parameters and new momentum; the arguments are left as they are.
    """
    new_momentum = {name: beta * momentum[name] + gradient[name] for name in parameters}
    new_parameters = {
        name: value - lr * (gradient[name] + beta * new_momentum[name]) for name, value in parameters.items()
    }
    return new_parameters, new_momentum
