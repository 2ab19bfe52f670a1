"""The outer step: merging islands' outer gradients and moving the global fragment. Pure torch; no store, no clock.

The same inputs give the same bits on any CPU, whatever the number of threads and wherever a tensor lies in memory: a run's tape is replayed by this code.
So every sum over a tensor's elements is made pairwise in a fixed order here, not by torch's reductions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.quantise import Tensors, dequantise, quantise

_CHUNK = 1 << 20


def merge_weight(*, tokens: int, steps: int) -> float:
    """Weight of an island's outer gradient: tokens · (tokens / steps) (Decoupled DiLoCo, arXiv 2604.21428)."""
    return tokens * (tokens / steps) if steps else 0.0


def norm(tensor: torch.Tensor) -> float:
    """Euclidean norm, in float64, the same bits anywhere."""
    values = tensor.flatten().double()
    return math.sqrt(_sum(values * values))


def merged_gradient(
    gradients: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float], *, plain: Collection[str] | None
) -> Tensors:
    """The islands' outer gradients as one, tensor by tensor.

    Args:
        gradients: of each island.
        weights: of each island, above 0.
        plain: tensors that are averaged plainly, the embeddings; all others by `radial_directional_mean`. None: all plainly.
    """
    total = math.fsum(weights)
    assert total > 0, "no contribution has weight"
    shares = [weight / total for weight in weights]
    return {
        name: (weighted_mean if plain is None or name in plain else radial_directional_mean)(
            [gradient[name] for gradient in gradients], shares
        )
        for name in gradients[0]
    }


def weighted_mean(tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Σ share · tensor, accumulated in float64, as float32. Of one tensor: itself, to the bit."""
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += tensor.double() * share
    return total.float()


def radial_directional_mean(tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Weighted mean of the norms, in the direction of the weighted mean of the unit vectors (RDA; Decoupled DiLoCo, arXiv 2604.21428).

    Outer gradients of different islands are nearly orthogonal: their plain mean is shorter than each by about the root of their number. Of one tensor: itself, to the bit.
    """
    if len(tensors) == 1:
        return tensors[0].float().clone()
    norms = [norm(tensor) for tensor in tensors]
    direction = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, size, share in zip(tensors, norms, shares, strict=True):
        if size > 0:
            direction += tensor.double() * (share / size)
    length = norm(direction)
    if length == 0:
        return torch.zeros(tensors[0].shape)
    radius = math.fsum(share * size for share, size in zip(shares, norms, strict=True))
    return (direction * (radius / length)).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """A global fragment with what its outer optimizer keeps."""

    parameters: Tensors
    momentum: Tensors
    residual: Tensors
    """What rounding has kept back from the islands so far; it goes with the next step."""

    @staticmethod
    def at_start(parameters: Tensors) -> Outer:
        """The fragment before its first outer step."""
        momentum, residual = ({name: torch.zeros_like(value) for name, value in parameters.items()} for _ in range(2))
        return Outer(parameters=parameters, momentum=momentum, residual=residual)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How much of a whole outer step a merge is. A whole one has an outer gradient of every island, each of H steps."""

    islands: float = 1.0
    """Share of the islands that it speaks for, by their speed, 0 to 1."""
    cycle: float = 1.0
    """Share of an outer cycle's inner steps that went into it; above 1 where an island's came together."""


def outer_step(
    outer: Outer, gradient: Mapping[str, torch.Tensor], *, lr: float, beta: float, wire: str, part: Part
) -> tuple[Outer, Tensors]:
    """Nesterov momentum as torch.optim.SGD(nesterov=True): m ← β·m + g; the step is lr·(g + β·m). What the islands are sent is rounded as the wire asks, and the
    global parameters move by exactly that: everyone has the same ones, to the bit.

    A merge that speaks for a part of the islands is that part of a step: m ← β^c·m + a·g and lr·(a·g + c·β·m), for the part `a` of the islands and `c` of a cycle.
    Else M islands that are merged one by one would move the global parameters M times as far as islands that are merged together, and momentum would
    be taken M times over (what goes wrong then: Liu et al., Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135, section 5).

    Returns:
        The fragment after the step, and the parts that are sent (see `follow`).
    """
    decay, ahead = beta**part.cycle, part.cycle * beta
    gradient = {name: part.islands * value for name, value in gradient.items()}
    momentum = {name: decay * outer.momentum[name] + gradient[name] for name in outer.parameters}
    step = {name: lr * (gradient[name] + ahead * momentum[name]) + outer.residual[name] for name in outer.parameters}
    if wire == "fp32":
        # The parameters themselves: in float64 so that an island's own step, taken back and added again, comes out as it was.
        new = {name: (value.double() - step[name].double()).float() for name, value in outer.parameters.items()}
        residual = {name: torch.zeros_like(value) for name, value in new.items()}
        return Outer(parameters=new, momentum=momentum, residual=residual), quantise(new, wire)
    parts = quantise(step, wire)
    sent = dequantise(parts, {name: tuple(value.shape) for name, value in step.items()}, wire)
    new = {name: value - sent[name] for name, value in outer.parameters.items()}
    residual = {name: step[name] - sent[name] for name in step}
    return Outer(parameters=new, momentum=momentum, residual=residual), parts


def follow(parameters: Tensors, parts: Mapping[str, torch.Tensor], *, wire: str) -> Tensors:
    """The global parameters after an outer step, from those before it and what `outer_step` sent.

    Raises:
        ValueError: the parts are of another fragment.
    """
    sent = dequantise(parts, {name: tuple(value.shape) for name, value in parameters.items()}, wire)
    if wire == "fp32":
        return sent
    return {name: value - sent[name] for name, value in parameters.items()}


def pairwise_cosines(gradients: Sequence[Mapping[str, torch.Tensor]]) -> list[list[float]]:
    """Cosine of every two islands' outer gradients, over all tensors of the fragment: Nexus' closeness of sources (arXiv 2604.09258), where the islands are on
    different mixes. Not for decisions that are made again in a replay: a matrix product's last bits may differ."""
    names = sorted(gradients[0])
    flat = torch.stack([torch.cat([gradient[name].flatten() for name in names]) for gradient in gradients])
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for part in flat.split(_CHUNK, dim=1):
        products += (part @ part.T).double()
    sizes = products.diagonal().clamp_min(0).sqrt()
    outer = sizes[:, None] * sizes[None, :]
    cosines = torch.where(outer > 0, products / outer.clamp_min(1e-300), torch.zeros_like(products))
    return [[float(value) for value in row] for row in cosines.clamp(-1, 1)]


def _sum(values: torch.Tensor) -> float:
    """Sum of a float64 vector by halves: only elementwise additions, so its order is always the same."""
    count = values.numel()
    if count == 0:
        return 0.0
    while count > 1:
        half = count // 2
        folded = values[:half] + values[half : 2 * half]
        if count % 2:
            folded[0] += values[count - 1]
        values, count = folded, half
    return float(values[0])
