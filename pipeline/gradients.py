"""Gradients of single documents, layer by layer, from one forward and one backward pass of a batch.

The gradient of a linear layer's weight is a sum over tokens of (gradient at the output) ⊗ (input); cut at the borders of the documents it is every
document's own gradient. Hooks keep inputs and outputs, the backward pass stops at the outputs, and the gradients of one layer are gone before the next layer's
are made: memory is one layer's weight for each document of the batch, whatever the model's depth.

Shapes: D documents, T tokens, V vocabulary, I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Linear, Module
from torch.nn.functional import cross_entropy

Tokens = npt.NDArray[Any]
Tensors = dict[str, Tensor]
OnLayer = Callable[[str, Tensor, Tensor], None]
"""Called with a layer's name, its inputs_DTI and the loss's gradient at its outputs, outputs_DTO."""


def pad(sequences: Sequence[Tokens], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Token sequences as `tokens_DT`, padded with 0 on the right, and `mask_DT`, 1 where a token is real."""
    longest = max(len(sequence) for sequence in sequences)
    tokens_DT = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask_DT = torch.zeros(len(sequences), longest)
    for row, sequence in enumerate(sequences):
        tokens_DT[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        mask_DT[row, : len(sequence)] = 1
    return tokens_DT.to(device), mask_DT.to(device)


def window(tokens: Tokens, *, longest: int, at: float) -> Tokens:
    """A piece of at most `longest` tokens, from the beginning (`at` = 0) to the end (1) of a document; a short document whole."""
    start = round(max(0, len(tokens) - longest) * at)
    return tokens[start : start + longest]


def batches_by_length(lengths: Sequence[int], *, size: int) -> Iterator[list[int]]:
    """Places of the documents of two tokens or more, those of like length together."""
    order = sorted((place for place, length in enumerate(lengths) if length > 1), key=lambda place: lengths[place])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def linear_layers(model: Module, scope: str) -> list[str]:
    """Names of the linear layers whose gradients are compared.

    Args:
        scope: `blocks`: those of the transformer's blocks; `all`: the output head as well. Embeddings and norms are never among them.

    Raises:
        ValueError: there are none, as in a model whose layers are of a kind of their own.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    names = [n for n, m in model.named_modules() if _is_linear(m) and (scope == "all" or m is not head)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no linear layers that gradients could be compared at")
    return names


def weights_of(model: Module, layers: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensors:
    """What belongs to each layer's weight, as O × I, of tensors that go by the names of the model's parameters (a tied head goes by the embedding's)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: Tensors = {}
    for layer in layers:
        module = model.get_submodule(layer)
        tensor = tensors[names[id(module.weight)]]
        found[layer] = tensor if isinstance(module, Linear) else tensor.T  # Conv1D keeps inputs × outputs
    return found


def _is_linear(module: Module) -> bool:
    return isinstance(module, Linear) or type(module).__name__ == "Conv1D"


def next_token_logits(model: Module, parameters: Mapping[str, Tensor], tokens_DT: Tensor) -> Tensor:
    """logits_DTV for the tokens from the second on. The model is causal, so padding on the right needs no attention mask."""
    logits_DTV = functional_call(model, dict(parameters), (tokens_DT,), {"use_cache": False}).logits
    return logits_DTV[:, :-1].float()


def document_losses(
    model: Module,
    parameters: Mapping[str, Tensor],
    tokens_DT: Tensor,
    mask_DT: Tensor,
    labels_DT: Tensor | None = None,
) -> Tensor:
    """losses_D: the mean loss of each document's next-token predictions, in nats per token.

    Args:
        labels_DT: what is to be predicted from the second token on (one less than tokens_DT); None: the tokens themselves.
    """
    labels_DT = tokens_DT[:, 1:] if labels_DT is None else labels_DT
    logits_DTV = next_token_logits(model, parameters, tokens_DT)
    losses_DT = cross_entropy(logits_DTV.transpose(1, 2), labels_DT, reduction="none")
    mask_DT = mask_DT[:, 1:]
    return (losses_DT * mask_DT).sum(1) / mask_DT.sum(1)


def walk_layers(
    model: Module,
    parameters: Mapping[str, Tensor],
    layers: Sequence[str],
    tokens_DT: Tensor,
    mask_DT: Tensor,
    on_layer: OnLayer,
    *,
    labels_DT: Tensor | None = None,
) -> Tensor:
    """Hands every layer's inputs and output gradients to `on_layer`; returns losses_D.

    The loss is the sum of the documents' mean losses, so the gradient of document d's loss is outputs_DTO[d]ᵀ inputs_DTI[d].
    """
    tracked = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    with _kept(model, layers) as kept:
        losses_D = document_losses(model, tracked, tokens_DT, mask_DT, labels_DT)
    gradients = torch.autograd.grad(losses_D.sum(), [kept[name][1] for name in layers])
    for name, gradient in zip(layers, gradients, strict=True):
        on_layer(name, kept.pop(name)[0], gradient.float())
    return losses_D.detach()


@contextmanager
def _kept(model: Module, layers: Sequence[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inputs and outputs of the layers, filled while the model runs."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[[Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            kept[name] = (inputs[0].detach().float(), output)

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def document_gradients(inputs_DTI: Tensor, outputs_DTO: Tensor) -> Tensor:
    """gradients_DOI: the gradient of each document's loss with respect to one layer's weight."""
    return torch.bmm(outputs_DTO.transpose(1, 2), inputs_DTI)


def mean_gradient(
    model: Module,
    parameters: Mapping[str, Tensor],
    layers: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    weights: Sequence[Tensor] | None = None,
) -> tuple[Tensors, Tensor]:
    """The weighted mean of documents' gradients, layer by layer as O × I, over batches of (tokens_DT, mask_DT); and the documents' losses in order.

    Args:
        weights: weights_D of each batch; the mean is their weighted sum over the sum of their absolutes. None: each document counts the same.
    """
    sums: Tensors = {}
    losses: list[Tensor] = []
    total = 0.0
    for number, (tokens_DT, mask_DT) in enumerate(batches):
        weights_D = torch.ones(len(tokens_DT)) if weights is None else weights[number]
        weights_D = weights_D.to(tokens_DT.device)

        def add(name: str, inputs_DTI: Tensor, outputs_DTO: Tensor, weights_D: Tensor = weights_D) -> None:
            weighted_DTO = outputs_DTO * weights_D[:, None, None]
            gradient_OI = weighted_DTO.flatten(0, 1).T @ inputs_DTI.flatten(0, 1)
            sums[name] = sums[name] + gradient_OI if name in sums else gradient_OI

        losses.append(walk_layers(model, parameters, layers, tokens_DT, mask_DT, add))
        total += float(weights_D.abs().sum())
    return {name: tensor / total for name, tensor in sums.items()}, torch.cat(losses)
