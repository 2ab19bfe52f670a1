"""Gradients of single documents, held against plain autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.gradients import (
    batches_by_length,
    document_gradients,
    document_losses,
    linear_layers,
    mean_gradient,
    pad,
    walk_layers,
    weights_of,
    window,
)
from pipeline.scoring_model import build_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
DOCUMENTS = [np.array(tokens, np.uint16) for tokens in ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9], [39, 0, 1])]


@pytest.fixture(scope="module", params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return build_model(request.param, None, vocab_size=40, longest=16, seed=0, device=torch.device("cpu"))


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_gradients(model: Any, layers: list[str]) -> list[dict[str, Tensor]]:
    """One backward pass for each document, alone and without padding; a tied head as a copy of its own."""
    found = []
    for tokens in DOCUMENTS:
        model.zero_grad()
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append(weights_of(model, layers, gradients))
    return found


def all_gradients(model: Any, layers: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    found: dict[str, Tensor] = {}
    losses_D = walk_layers(
        model,
        parameters_of(model),
        layers,
        *pad(DOCUMENTS),
        lambda layer, inputs, outputs: found.__setitem__(layer, document_gradients(inputs, outputs)),
    )
    return found, losses_D


def test_gradients_of_a_padded_batch_are_those_of_each_document_alone(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    gradients, losses_D = all_gradients(model, layers)
    for row, plain in enumerate(plain_gradients(model, layers)):
        for layer, gradient_OI in plain.items():
            torch.testing.assert_close(gradients[layer][row], gradient_OI, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses_D, document_losses(model, parameters_of(model), *pad(DOCUMENTS)))


def test_head_is_a_layer_only_where_asked_for(model: Any) -> None:
    assert set(linear_layers(model, "all")) - set(linear_layers(model, "blocks")) == {"lm_head"}
    assert len(linear_layers(model, "blocks")) in (7 * 2, 4)


def test_mean_gradient_counts_every_document_once_however_they_are_batched(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    gradient, losses = mean_gradient(model, parameters_of(model), layers, [pad(DOCUMENTS[:3]), pad(DOCUMENTS[3:])])
    plain = plain_gradients(model, layers)
    for layer, mean_OI in gradient.items():
        torch.testing.assert_close(mean_OI, torch.stack([g[layer] for g in plain]).mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, document_losses(model, parameters_of(model), *pad(DOCUMENTS)))


def test_weighted_mean_gradient_follows_the_weights(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    weights = [torch.tensor([0.0, 3.0, 0.0, 1.0])]
    gradient, _ = mean_gradient(model, parameters_of(model), layers, [pad(DOCUMENTS)], weights)
    plain = plain_gradients(model, layers)
    for layer, mean_OI in gradient.items():
        torch.testing.assert_close(mean_OI, (3 * plain[1][layer] + plain[3][layer]) / 4, rtol=1e-4, atol=1e-6)


def test_hooks_are_gone_afterwards_and_the_parameters_untouched(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in parameters_of(model).items()}
    all_gradients(model, linear_layers(model, "all"))
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters_of(model).items())


def test_windows_go_from_the_beginning_to_the_end() -> None:
    tokens = np.arange(10)
    assert [window(tokens, longest=4, at=at)[0] for at in (0.0, 0.5, 1.0)] == [0, 3, 6]
    assert len(window(tokens, longest=40, at=1.0)) == 10


def test_documents_too_short_to_predict_anything_are_in_no_batch() -> None:
    assert list(batches_by_length([5, 1, 2, 0, 9], size=2)) == [[2, 0], [4]]
