"""The estimators: metrics, projections and curvature, held against what they approximate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.estimators import adam_scale, curved_direction, fit_curvature, random_bases, trajectory_direction
from pipeline.gradients import linear_layers, pad, weights_of
from pipeline.influence import compare
from pipeline.scoring_model import build_model
from tests.pipeline.test_gradients import DOCUMENTS, LLAMA, all_gradients, parameters_of


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(LLAMA, None, vocab_size=40, longest=16, seed=0, device=torch.device("cpu"))


def mean_of(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {layer: tensor.mean(0) for layer, tensor in gradients.items()}


def test_adam_scale_is_the_inverse_root_of_the_second_moments(model: Any) -> None:
    moments = {name: torch.full_like(p, 4.0) for name, p in model.named_parameters()}
    scale = adam_scale(model, ["lm_head"], moments)["lm_head"]
    assert scale.shape == (40, 16)
    assert float(scale[0, 0]) == pytest.approx(0.5, rel=1e-6)


def test_trajectory_in_adams_metric_is_the_scaled_product(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    gradients, _ = all_gradients(model, layers)
    moments = {name: torch.rand_like(p) + 0.1 for name, p in model.named_parameters()}
    direction = trajectory_direction(
        model, [mean_of(gradients)], learning_rate=0.1, second_moments=moments, rank=None, seed=0
    )
    found, _ = compare(model, parameters_of(model), direction, *pad(DOCUMENTS), form="dot")
    scale = weights_of(model, layers, moments)
    for row, score in enumerate(found[:, 0].tolist()):
        wanted = sum(
            float((gradients[layer][row] * mean_of(gradients)[layer] / (scale[layer].sqrt() + 1e-8)).sum())
            for layer in layers
        )
        assert score == pytest.approx(wanted, rel=1e-4)


def test_random_projection_keeps_products_on_average(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    gradients, _ = all_gradients(model, layers)
    exact = None
    found = []
    for seed in range(60):
        for rank in (None, 8):
            direction = trajectory_direction(
                model, [mean_of(gradients)], learning_rate=1.0, second_moments=None, rank=rank, seed=seed
            )
            scores, _ = compare(model, parameters_of(model), direction, *pad(DOCUMENTS), form="dot")
            if rank is None:
                exact = scores[:, 0].numpy()
            else:
                assert all(target.shape[1] <= 64 for target in direction.targets.values())
                found.append(scores[:, 0].numpy())
    error = np.std(found, axis=0) / len(found) ** 0.5
    assert (np.abs(np.mean(found, axis=0) - exact) < 4 * error).all()


def test_short_sides_are_not_projected(model: Any) -> None:
    layer = linear_layers(model, "blocks")[0]
    inputs, outputs = random_bases(model, [layer], rank=16, seed=0)[layer]
    assert torch.equal(inputs, torch.eye(16))
    assert torch.equal(outputs, torch.eye(16))


def curvature_of(model: Any, layers: list[str], *, rank: int | None = None, seed: int = 0) -> Any:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 40, 3 + n % 9) for n in range(48)]
    batches = [pad(documents[start : start + 16]) for start in range(0, 48, 16)]
    return fit_curvature(model, parameters_of(model), layers, batches, rank=rank, seed=seed)


def test_eigenbases_are_orthonormal_and_eigenvalues_nonnegative(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    curvature = curvature_of(model, layers)
    for layer in layers:
        for basis in curvature.bases[layer]:
            torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]), atol=1e-4, rtol=0)
        assert (curvature.eigenvalues[layer] >= 0).all()
        # The largest first on both sides.
        corner, opposite = curvature.eigenvalues[layer][0, 0], curvature.eigenvalues[layer][-1, -1]
        assert corner > opposite


def test_strong_damping_makes_reverse_the_plain_product(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    gradients, _ = all_gradients(model, layers)
    target = [mean_of(gradients)]
    damped = curved_direction(1.0, target, curvature_of(model, layers), damping=1e6)
    plain = trajectory_direction(model, target, learning_rate=1.0, second_moments=None, rank=None, seed=0)
    scores = [
        compare(model, parameters_of(model), d, *pad(DOCUMENTS), form="layer-cosine")[0][:, 0] for d in (damped, plain)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-3, atol=1e-4)


def test_curvature_holds_back_directions_in_which_gradients_are_large(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    inverse = curvature_of(model, layers).inverse(0.1)
    for layer, values in curvature_of(model, layers).eigenvalues.items():
        order = values.flatten().argsort()
        assert (inverse[layer].flatten()[order].diff() <= 1e-3 * inverse[layer].max()).all()


def test_rank_keeps_the_largest_eigenvectors(model: Any) -> None:
    layers = linear_layers(model, "blocks")
    whole, cut = curvature_of(model, layers), curvature_of(model, layers, rank=5)
    for layer in layers:
        for side in (0, 1):
            torch.testing.assert_close(cut.bases[layer][side], whole.bases[layer][side][:, :5])
        torch.testing.assert_close(cut.eigenvalues[layer], whole.eigenvalues[layer][:5, :5], rtol=1e-4, atol=1e-10)


def test_curvature_is_a_function_of_its_seed(model: Any) -> None:
    layer = linear_layers(model, "blocks")[0]
    first, again, other = (curvature_of(model, [layer], seed=seed).eigenvalues[layer] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
