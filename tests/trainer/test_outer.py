"""The outer step: torch's own Nesterov, and a weighted mean that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.outer import merge_weight, nesterov_step, weighted_mean


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.99)])
def test_the_outer_step_is_torchs_nesterov(lr: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"matrix": torch.randn(4, 3, generator=generator), "vector": torch.randn(5, generator=generator)}
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=lr, momentum=beta, nesterov=True)
    ours, momentum = start, {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for _ in range(6):
        gradient = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradient[name].clone()
        optimizer.step()
        ours, momentum = nesterov_step(ours, momentum, gradient, lr=lr, beta=beta)
        for name in start:
            torch.testing.assert_close(ours[name], theirs[name].detach())


def test_the_outer_step_leaves_its_arguments_as_they_are() -> None:
    parameters, momentum, gradient = ({"w": torch.full((2,), value)} for value in (1.0, 2.0, 3.0))
    nesterov_step(parameters, momentum, gradient, lr=0.5, beta=0.5)
    assert [t["w"].tolist() for t in (parameters, momentum, gradient)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_weighted_mean_worked_out_by_hand() -> None:
    gradients = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, -2.0])}]
    assert weighted_mean(gradients, [3.0, 1.0])["w"].tolist() == [2.0, 1.0]


@given(weights=st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=5))
def test_the_mean_of_equal_gradients_is_that_gradient_whatever_the_weights(weights: list[float]) -> None:
    gradient = {"w": torch.tensor([1.5, -2.0, 0.0])}
    torch.testing.assert_close(weighted_mean([gradient] * len(weights), weights), gradient)


def test_a_mean_of_half_precision_gradients_is_taken_in_single_precision() -> None:
    gradients = [
        {"w": torch.tensor([1.0], dtype=torch.bfloat16)},
        {"w": torch.tensor([1.0078125], dtype=torch.bfloat16)},
    ]
    mean = weighted_mean(gradients, [1.0, 1.0])["w"]
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(1.00390625)


def test_a_gradient_weighs_its_tokens_times_its_tokens_in_a_step() -> None:
    assert merge_weight(tokens=1000, steps=10) == 100_000
    assert merge_weight(tokens=1000, steps=20) == 50_000
    assert merge_weight(tokens=0, steps=0) == 0
