"""The mathematics of influence: how well a document's gradient agrees with the gradient of the holdout.

Pure functions of a model, parameters and token arrays; no store, no files. Which directions are compared is estimators.py's, single gradients are
gradients.py's, the job that scores a corpus is score.py's.

A document's loss is its mean cross-entropy per token, so that length is no influence. Let g_i be the gradient of document i's loss, v the holdout's, both
at one checkpoint, and M a positive matrix: the identity, Adam's inverse root of the second moments, or a damped inverse curvature. A step along -M g_i changes
the holdout loss by -η ⟨g_i, M v⟩ in first order: where the product is positive, training on the document lowers the holdout loss.

Every estimator writes M as a basis for each layer's inputs and outputs in which M is diagonal. So one code compares for all of them: gradients are made in that
basis (they are never turned into it afterwards), multiplied with M v, and measured by the diagonal.

Shapes: D documents, T tokens, I inputs and O outputs of a layer, N entries of a layer's gradient in its basis, K checkpoints, P probes, F folds, C = P · F
columns that a document is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import Module

from pipeline.gradients import Tensors, document_gradients, walk_layers

Form = Literal["cosine", "layer-cosine", "dot"]
FORMS: tuple[Form, ...] = ("cosine", "layer-cosine", "dot")
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """What documents' gradients are compared with at one checkpoint, layer by layer."""

    weight: float
    """Share of this checkpoint in the score, before normalisation: its learning rate."""
    targets: Tensors
    """C × N: M v of each column."""
    target_squares: Tensors
    """C: ⟨v, M v⟩ of each column."""
    scale: Tensors
    """N: the diagonal of M; none: ones."""
    bases: Mapping[str, tuple[Tensor, Tensor]]
    """Columns of the basis of the inputs (I × I') and of the outputs (O × O'); none: the layer's own coordinates."""

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        tensors = {"weight": torch.tensor([self.weight], dtype=torch.float64)}
        for kind, held in (("targets", self.targets), ("squares", self.target_squares), ("scale", self.scale)):
            tensors |= {f"{kind}/{layer}": tensor for layer, tensor in held.items()}
        for layer, (inputs, outputs) in self.bases.items():
            tensors |= {f"inputs/{layer}": inputs, f"outputs/{layer}": outputs}
        return safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})

    @staticmethod
    def from_bytes(data: bytes, *, device: torch.device | str = "cpu") -> Direction:
        """Back from `to_bytes`."""
        parts: dict[str, Tensors] = {
            kind: {} for kind in ("targets", "squares", "scale", "inputs", "outputs", "weight")
        }
        # In the order of their names: a file's own order differs from reading to reading, and with it the last bit of sums over the layers.
        for name, tensor in sorted(safetensors.torch.load(data).items()):
            kind, _, layer = name.partition("/")
            # A copy lies where the allocator aligns it. Within the file's bytes it lies anywhere, and sums differ in the last bit by alignment.
            parts[kind][layer] = tensor.clone().to(device)
        return Direction(
            weight=float(parts["weight"][""]),
            targets=parts["targets"],
            target_squares=parts["squares"],
            scale=parts["scale"],
            bases={layer: (inputs, parts["outputs"][layer]) for layer, inputs in parts["inputs"].items()},
        )


def make_direction(
    weight: float,
    gradients: Sequence[Mapping[str, Tensor]],
    *,
    scale: Mapping[str, Tensor] | None = None,
    bases: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Direction:
    """A direction from the holdout gradients of the columns, O × I by layer.

    Args:
        scale: the diagonal of M in the basis, O' × I' by layer.
    """
    targets: Tensors = {}
    squares: Tensors = {}
    for layer in gradients[0]:
        columns = torch.stack([turn(gradient[layer], (bases or {}).get(layer)) for gradient in gradients]).flatten(1)
        targets[layer] = columns * scale[layer].flatten() if scale is not None else columns
        squares[layer] = (columns * targets[layer]).sum(1)
    return Direction(
        weight=weight,
        targets=targets,
        target_squares=squares,
        scale={layer: tensor.flatten() for layer, tensor in (scale or {}).items()},
        bases=bases or {},
    )


def turn(gradient_OI: Tensor, basis: tuple[Tensor, Tensor] | None) -> Tensor:
    """A gradient in a basis: outputsᵀ · gradient · inputs."""
    return gradient_OI if basis is None else basis[1].T @ gradient_OI @ basis[0]


def compare(
    model: Module,
    parameters: Mapping[str, Tensor],
    direction: Direction,
    tokens_DT: Tensor,
    mask_DT: Tensor,
    *,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """How much each document's gradient agrees with each column, as scores_DC; and losses_D.

    dot:          Σ_layers ⟨g_i, M v⟩                        TracInCP's term of one checkpoint for M = 1 (arXiv 2002.08484, Eq. 1)
    cosine:       Σ_layers ⟨g_i, M v⟩ / (‖M^½ g_i‖ ‖M^½ v‖)  LESS's (arXiv 2402.04333, Eq. 2), with M on both sides alike
    layer-cosine: the mean over the layers of each layer's own cosine, so that no layer drowns the others

    LESS takes a cosine with Adam's whole update direction of the training example, momentum included; here M alone stands for Adam, as a metric.
    """
    num_columns = len(next(iter(direction.target_squares.values())))
    total_DC = torch.zeros(len(tokens_DT), num_columns, device=tokens_DT.device)
    square_D = torch.zeros(len(tokens_DT), device=tokens_DT.device)

    def take(layer: str, inputs_DTI: Tensor, outputs_DTO: Tensor) -> None:
        if (basis := direction.bases.get(layer)) is not None:
            inputs_DTI, outputs_DTO = inputs_DTI @ basis[0], outputs_DTO @ basis[1]
        gradients_DN = document_gradients(inputs_DTI, outputs_DTO).flatten(1)
        product_DC = gradients_DN @ direction.targets[layer].T
        if form != "dot":
            scale_N = direction.scale.get(layer)
            gradients_DN.square_()
            own_D = gradients_DN.sum(1) if scale_N is None else gradients_DN @ scale_N
            if form == "layer-cosine":
                product_DC /= (own_D[:, None] * direction.target_squares[layer]).sqrt().clamp_min(_TINY)
            else:
                square_D.add_(own_D)
        total_DC.add_(product_DC)

    layers = list(direction.targets)
    losses_D = walk_layers(model, parameters, layers, tokens_DT, mask_DT, take)
    if form == "layer-cosine":
        total_DC /= len(layers)
    elif form == "cosine":
        square_C = torch.stack(list(direction.target_squares.values())).sum(0)
        total_DC /= (square_D[:, None] * square_C).sqrt().clamp_min(_TINY)
    return total_DC, losses_D


def combine(
    scores_DKPF: Tensor, checkpoint_weights: Sequence[float], probe_weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Each document's score and standard error, over K checkpoints, P probes and F folds of each probe.

    score = Σ_k η_k Σ_p w_p mean_f s_kpf / Σ_k η_k, w summing to 1   (TracInCP's sum over checkpoints weighted by the learning rate, as a mean)

    Folds at one checkpoint share the document's gradient, and checkpoints share the holdout, so the cells are no independent samples. The variance of the mean is
    taken as that of the checkpoint means over the checkpoints plus that of the fold means over the folds; what is neither is counted in both, so the error
    is rather too large. It says nothing of another scoring model, seed or holdout source. tiers.py calibrates it.
    """
    weights_P = torch.tensor(probe_weights, dtype=torch.float64)
    scores_DKF = torch.einsum("dkpf,p->dkf", scores_DKPF.double(), weights_P / weights_P.sum())
    weights_K = torch.tensor(checkpoint_weights, dtype=torch.float64)
    weights_K = weights_K / weights_K.sum()
    by_checkpoint_DK = scores_DKF.mean(2)
    by_fold_DF = (scores_DKF * weights_K[None, :, None]).sum(1)
    score_D = by_fold_DF.mean(1)
    num_folds = scores_DKF.shape[2]
    variance_D = torch.zeros_like(score_D)
    if num_folds > 1:
        variance_D += by_fold_DF.var(1) / num_folds
    effective = float(1 / weights_K.square().sum())
    if len(checkpoint_weights) > 1:
        spread_D = (weights_K * (by_checkpoint_DK - score_D[:, None]).square()).sum(1)
        variance_D += spread_D / max(effective - 1, 1.0)
    return score_D, variance_D.sqrt()


def cosines(gradients: Sequence[Mapping[str, Tensor]]) -> list[list[float]]:
    """Cosine of each pair of gradients, all layers together: how far data sources pull a model into the same direction, which Nexus
    (arXiv 2604.09258) holds to decide how close the minima of the sources lie."""
    flat = torch.stack([torch.cat([tensor.flatten() for tensor in gradient.values()]) for gradient in gradients])
    unit = flat / flat.norm(dim=1, keepdim=True).clamp_min(_TINY)
    return [[round(value, 4) for value in row] for row in (unit @ unit.T).tolist()]
