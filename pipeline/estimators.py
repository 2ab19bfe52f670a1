"""The estimators: each turns a checkpoint of a model and gradients of the holdout into the direction that documents are compared with.

trajectory  agreement along the training, in the curvature's metric, Adam's or the plain one (TracIn, arXiv 2002.08484; LESS, arXiv 2402.04333): for pretraining
reverse     influence at a trained model, by its curvature (EK-FAC: arXiv 1806.03884, for language models arXiv 2308.03296): for fine-tuning

The third, online, is made while a run trains (trainer/online.py, online.py). The mathematics that they share is influence.py's.

Shapes: D documents, T tokens, I inputs and O outputs of a layer, R columns kept of a basis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from pipeline.gradients import OnLayer, Tensors, document_gradients, next_token_logits, walk_layers, weights_of
from pipeline.influence import Direction, make_direction

ADAM_EPSILON = 1e-8


def adam_scale(model: Module, layers: Sequence[str], second_moments: Mapping[str, Tensor]) -> Tensors:
    """The diagonal 1 / (√v̂ + ε) of Adam's bias-corrected second moments v̂, O × I by layer (Kingma and Ba, arXiv 1412.6980, Algorithm 1)."""
    moments = weights_of(model, layers, second_moments)
    return {layer: 1 / (moment.sqrt() + ADAM_EPSILON) for layer, moment in moments.items()}


def random_bases(model: Module, layers: Sequence[str], *, rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Random columns for each layer's inputs and outputs, so that a gradient takes rank² entries and products of gradients keep their
    expectation (the Kronecker-shaped projection of LoGra, arXiv 2405.13954, section 3.1). A side that is no longer than `rank` stays as it is."""
    bases = {}
    for number, (layer, weight_OI) in enumerate(weights_of(model, layers, dict(model.named_parameters())).items()):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        sides = [
            torch.eye(size) if size <= rank else torch.randn(size, rank, generator=generator) / rank**0.5
            for size in (weight_OI.shape[1], weight_OI.shape[0])
        ]
        bases[layer] = (sides[0].to(weight_OI.device), sides[1].to(weight_OI.device))
    return bases


@dataclass(frozen=True, kw_only=True, slots=True)
class Curvature:
    """The Fisher matrix of a model in EK-FAC's form: diagonal in the Kronecker product of two eigenbases."""

    bases: Mapping[str, tuple[Tensor, Tensor]]
    """Eigenvectors of the inputs' (I × R) and of the output gradients' (O × R) second moments, the largest first."""
    eigenvalues: Tensors
    """O' × I': second moments of documents' gradients in that basis."""

    def inverse(self, damping: float) -> Tensors:
        """The diagonal of (F + λ)⁻¹, with λ a share of each layer's mean eigenvalue (arXiv 2308.03296, section 2.2 and appendix)."""
        return {layer: 1 / (values + damping * values.mean()) for layer, values in self.eigenvalues.items()}


def fit_curvature(
    model: Module,
    parameters: Mapping[str, Tensor],
    layers: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    rank: int | None,
    seed: int,
) -> Curvature:
    """EK-FAC of the documents' mean losses, over batches of (tokens_DT, mask_DT). The labels are drawn from the model, as the Fisher matrix asks (one draw
    for each token, by the seed).

    Args:
        rank: eigenvectors kept on each side; what lies outside counts as zero. None keeps all.
    """
    labels = [
        _draw_labels(model, parameters, tokens_DT, seed=seed + number) for number, (tokens_DT, _) in enumerate(batches)
    ]
    moments: dict[str, tuple[Tensor, Tensor]] = {}

    def add_moments(layer: str, inputs_DTI: Tensor, outputs_DTO: Tensor) -> None:
        # A padded position has no gradient at its output; its input must not count either.
        real_DT = (outputs_DTO != 0).any(2)
        found = tuple(tensor[real_DT].T @ tensor[real_DT] for tensor in (inputs_DTI, outputs_DTO))
        before = moments.get(layer)
        moments[layer] = (found[0], found[1]) if before is None else (before[0] + found[0], before[1] + found[1])

    _walk(model, parameters, layers, batches, labels, add_moments)
    bases = {layer: (_eigenvectors(a, rank), _eigenvectors(b, rank)) for layer, (a, b) in moments.items()}
    sums: Tensors = {}

    def add_squares(layer: str, inputs_DTI: Tensor, outputs_DTO: Tensor) -> None:
        inputs, outputs = bases[layer]
        squares = document_gradients(inputs_DTI @ inputs, outputs_DTO @ outputs).square().sum(0)
        sums[layer] = sums[layer] + squares if layer in sums else squares

    _walk(model, parameters, layers, batches, labels, add_squares)
    num_documents = sum(len(tokens_DT) for tokens_DT, _ in batches)
    return Curvature(bases=bases, eigenvalues={layer: total / num_documents for layer, total in sums.items()})


def trajectory_direction(
    model: Module,
    gradients: Sequence[Mapping[str, Tensor]],
    *,
    learning_rate: float,
    second_moments: Mapping[str, Tensor] | None,
    rank: int | None,
    seed: int,
) -> Direction:
    """Direction at one checkpoint of a training.

    Args:
        gradients: holdout gradients of the columns, O × I by layer.
        second_moments: Adam's, by parameter: compares in its metric; None: in the plain one.
        rank: entries kept of each side by random projection, to save memory; not with Adam's metric, whose diagonal no projection keeps.
    """
    assert rank is None or second_moments is None
    layers = list(gradients[0])
    return make_direction(
        learning_rate,
        gradients,
        scale=adam_scale(model, layers, second_moments) if second_moments is not None else None,
        bases=random_bases(model, layers, rank=rank, seed=seed) if rank is not None else None,
    )


def curved_direction(
    weight: float, gradients: Sequence[Mapping[str, Tensor]], curvature: Curvature, *, damping: float
) -> Direction:
    """Direction in the metric of the damped inverse curvature; by dot product, influence functions at a trained model (arXiv 2308.03296, Eq. 5)."""
    return make_direction(weight, gradients, scale=curvature.inverse(damping), bases=curvature.bases)


def _walk(
    model: Module,
    parameters: Mapping[str, Tensor],
    layers: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    labels: Sequence[Tensor],
    on_layer: OnLayer,
) -> None:
    for (tokens_DT, mask_DT), labels_DT in zip(batches, labels, strict=True):
        walk_layers(model, parameters, layers, tokens_DT, mask_DT, on_layer, labels_DT=labels_DT)


@torch.no_grad()
def _draw_labels(model: Module, parameters: Mapping[str, Tensor], tokens_DT: Tensor, *, seed: int) -> Tensor:
    chances_DTV = next_token_logits(model, parameters, tokens_DT).softmax(-1)
    generator = torch.Generator(device=chances_DTV.device).manual_seed(seed)
    drawn = torch.multinomial(chances_DTV.flatten(0, 1), 1, generator=generator)
    return drawn.reshape(chances_DTV.shape[:2])


def _eigenvectors(moment: Tensor, rank: int | None) -> Tensor:
    _, vectors = torch.linalg.eigh(moment.double())
    return vectors.flip(1)[:, :rank].float().contiguous()
