"""The outer step: torch's own Nesterov, and averages that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.outer import (
    Outer,
    Part,
    follow,
    merge_weight,
    merged_gradient,
    norm,
    outer_step,
    pairwise_cosines,
    radial_directional_mean,
    weighted_mean,
)


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.99)])
def test_the_outer_step_is_torchs_nesterov(lr: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"matrix": torch.randn(4, 3, generator=generator), "vector": torch.randn(5, generator=generator)}
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=lr, momentum=beta, nesterov=True)
    ours = Outer.at_start(start)
    for _ in range(6):
        gradient = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradient[name].clone()
        optimizer.step()
        ours, _ = outer_step(ours, gradient, lr=lr, beta=beta, wire="fp32", part=Part())
        for name in start:
            torch.testing.assert_close(ours.parameters[name], theirs[name].detach())


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
def test_who_follows_what_is_sent_has_the_global_parameters_to_the_bit_and_rounding_is_made_up_for(wire: str) -> None:
    generator = torch.Generator().manual_seed(1)
    start = {"w": torch.randn(40, 60, generator=generator), "b": torch.randn(7, generator=generator)}
    ours, exact, followed = Outer.at_start(start), Outer.at_start(start), dict(start)
    for _ in range(30):
        gradient = {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in start.items()}
        ours, parts = outer_step(ours, gradient, lr=0.7, beta=0.9, wire=wire, part=Part())
        exact, _ = outer_step(exact, gradient, lr=0.7, beta=0.9, wire="fp32", part=Part())
        followed = follow(followed, parts, wire=wire)
        assert all(torch.equal(followed[name], ours.parameters[name]) for name in start)
        for name in start:  # what is not sent yet is all that differs
            torch.testing.assert_close(
                ours.parameters[name] - ours.residual[name], exact.parameters[name], rtol=1e-4, atol=1e-5
            )


def test_islands_merged_one_by_one_move_the_global_parameters_as_far_as_islands_merged_together() -> None:
    islands = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}]
    together = {"w": torch.tensor([0.5, 1.0])}
    start = {"w": torch.zeros(2)}
    half = Part(islands=0.5, cycle=0.5)
    for beta, near in ((0.0, 1e-6), (0.5, 0.35), (0.9, 0.1)):
        whole, parted, naive = Outer.at_start(start), Outer.at_start(start), Outer.at_start(start)
        for _ in range(40):
            whole, _ = outer_step(whole, together, lr=0.7, beta=beta, wire="fp32", part=Part())
            for gradient in islands:
                parted, _ = outer_step(parted, gradient, lr=0.7, beta=beta, wire="fp32", part=half)
                naive, _ = outer_step(naive, gradient, lr=0.7, beta=beta, wire="fp32", part=Part())
        torch.testing.assert_close(parted.parameters["w"], whole.parameters["w"], rtol=near, atol=0)
        assert bool((naive.parameters["w"] < 1.7 * whole.parameters["w"]).all())  # both are negative


def test_a_part_of_a_step_worked_out_by_hand() -> None:
    outer = Outer(parameters={"w": torch.zeros(1)}, momentum={"w": torch.ones(1)}, residual={"w": torch.zeros(1)})
    after, _ = outer_step(
        outer, {"w": torch.full((1,), 2.0)}, lr=0.5, beta=0.25, wire="fp32", part=Part(islands=0.25, cycle=0.5)
    )
    assert after.momentum["w"].tolist() == [1.0]  # 0.25 ** 0.5 · 1 + 0.25 · 2
    assert after.parameters["w"].tolist() == [-0.3125]  # −0.5 · (0.25 · 2 + 0.5 · 0.25 · 1)


def test_the_outer_step_leaves_its_arguments_as_they_are() -> None:
    outer = Outer(
        parameters={"w": torch.full((2,), 1.0)},
        momentum={"w": torch.full((2,), 2.0)},
        residual={"w": torch.zeros(2)},
    )
    gradient = {"w": torch.full((2,), 3.0)}
    outer_step(outer, gradient, lr=0.5, beta=0.5, wire="fp32", part=Part())
    kept = (outer.parameters, outer.momentum, gradient)
    assert [t["w"].tolist() for t in kept] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_weighted_mean_worked_out_by_hand() -> None:
    gradients = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])]
    assert weighted_mean(gradients, [0.75, 0.25]).tolist() == [2.0, 1.0]


def test_a_radial_directional_mean_worked_out_by_hand() -> None:
    """Lengths 3 and 4, at right angles: length 3.5 along the diagonal; the plain mean would be 2.5 long."""
    east, north = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    expected = 3.5 / math.sqrt(2)
    torch.testing.assert_close(radial_directional_mean([east, north], [0.5, 0.5]), torch.tensor([expected, expected]))
    # Weights 3 to 1: the direction is (3, 1) / √10, the length .75 · 3 + .25 · 4.
    torch.testing.assert_close(
        radial_directional_mean([east, north], [0.75, 0.25]), torch.tensor([3.0, 1.0]) * (3.25 / math.sqrt(10))
    )


def test_opposite_gradients_and_empty_ones_have_a_mean() -> None:
    one = torch.tensor([1.0, -2.0])
    assert radial_directional_mean([one, -one], [0.5, 0.5]).tolist() == [0.0, 0.0]
    torch.testing.assert_close(radial_directional_mean([one, torch.zeros(2)], [0.5, 0.5]), one / 2)


@given(weights=st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=5), rda=st.booleans())
def test_the_mean_of_equal_gradients_is_that_gradient_whatever_the_weights(weights: list[float], rda: bool) -> None:
    gradient = {"w": torch.tensor([1.5, -2.0, 0.0])}
    torch.testing.assert_close(merged_gradient([gradient] * len(weights), weights, plain=() if rda else None), gradient)


def test_embeddings_are_averaged_plainly_beside_the_others() -> None:
    gradients = [{"e": torch.tensor([3.0, 0.0]), "w": torch.tensor([3.0, 0.0])}, {"e": torch.tensor([0.0, 4.0]), "w": torch.tensor([0.0, 4.0])}]  # fmt: skip
    merged = merged_gradient(gradients, [1.0, 1.0], plain={"e"})
    assert merged["e"].tolist() == [1.5, 2.0]
    assert norm(merged["w"]) == pytest.approx(3.5)


@given(st.integers(1, 5000))
def test_the_norm_has_the_same_bits_wherever_the_tensor_lies(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    shifted = torch.cat([torch.zeros(3), values])[3:]
    assert norm(values) == norm(shifted)
    assert norm(values) == pytest.approx(float(values.double().norm()))


def test_pairwise_cosines_worked_out_by_hand() -> None:
    gradients = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([-2.0, 0.0])}]
    cosines = pairwise_cosines(gradients)
    assert cosines[0] == pytest.approx([1.0, math.sqrt(0.5), -1.0])
    assert cosines[1] == pytest.approx([math.sqrt(0.5), 1.0, -math.sqrt(0.5)])


def test_a_gradient_weighs_its_tokens_times_its_tokens_in_a_step() -> None:
    assert merge_weight(tokens=1000, steps=10) == 100_000
    assert merge_weight(tokens=1000, steps=20) == 50_000
    assert merge_weight(tokens=0, steps=0) == 0
