"""The mathematics of influence, worked by hand and held against finite steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline.influence
from pipeline.gradients import linear_layers, mean_gradient, pad
from pipeline.influence import Direction, combine, compare, cosines, make_direction, turn
from pipeline.scoring_model import build_model
from tests.pipeline.test_gradients import DOCUMENTS, LLAMA, all_gradients, parameters_of


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(LLAMA, None, vocab_size=40, longest=16, seed=0, device=torch.device("cpu"))


def test_dot_predicts_what_a_small_step_does_to_the_holdout_loss() -> None:
    double = build_model(LLAMA, None, vocab_size=40, longest=16, seed=0, device=torch.device("cpu")).double()
    parameters, layers = parameters_of(double), linear_layers(double, "blocks")
    holdout = [pad(DOCUMENTS[2:])]
    target, before = mean_gradient(double, parameters, layers, holdout)
    direction = make_direction(1.0, [target])
    scores, _ = compare(double, parameters, direction, *pad(DOCUMENTS[:2]), form="dot")
    for row, score in enumerate(scores[:, 0].tolist()):
        own, _ = mean_gradient(double, parameters, layers, [pad(DOCUMENTS[row : row + 1])])
        stepped = {
            name: tensor - 1e-3 * own[layer] if (layer := name.removesuffix(".weight")) in own else tensor
            for name, tensor in parameters.items()
        }
        after = mean_gradient(double, stepped, layers, holdout)[1]
        assert float(before.mean() - after.mean()) / 1e-3 == pytest.approx(score, rel=0.02, abs=1e-5)


def by_hand(
    monkeypatch: pytest.MonkeyPatch, gradients: dict[str, list[list[float]]], direction: Direction, form: Any
) -> list[float]:
    """Scores of documents whose gradients are given, in place of a model's: N outputs, one input of 1."""
    num_documents = len(next(iter(gradients.values())))

    def walk(_: Any, __: Any, layers: list[str], ___: Any, ____: Any, on_layer: Any) -> Tensor:
        for layer in layers:
            on_layer(layer, torch.ones(num_documents, 1, 1), torch.tensor(gradients[layer])[:, None, :])
        return torch.zeros(num_documents)

    monkeypatch.setattr(pipeline.influence, "walk_layers", walk)
    scores, _ = compare(None, {}, direction, torch.zeros(num_documents, 1), torch.ones(num_documents, 1), form=form)  # type: ignore[arg-type]
    return scores[:, 0].tolist()  # type: ignore[no-any-return]


def test_agreement_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = {"a": [[3.0, 4.0], [0.0, -2.0]], "b": [[1.0], [2.0]]}
    holdout = {"a": torch.tensor([[1.0], [0.0]]), "b": torch.tensor([[2.0]])}
    scale = {"a": torch.tensor([[1.0], [4.0]]), "b": torch.tensor([[0.25]])}
    plain, scaled = make_direction(1.0, [holdout]), make_direction(1.0, [holdout], scale=scale)
    assert by_hand(monkeypatch, gradients, plain, "dot") == pytest.approx([5, 4])
    assert by_hand(monkeypatch, gradients, scaled, "dot") == pytest.approx([3.5, 1])
    # Document 0, by layer: 3 / (5 · 1) and 2 / (1 · 2).
    assert by_hand(monkeypatch, gradients, plain, "layer-cosine") == pytest.approx([(0.6 + 1) / 2, (0 + 1) / 2])
    # Together: 5 / (√26 · √5). With the metric: 3.5 / √((9 + 64 + 0.25)(1 + 1)).
    assert by_hand(monkeypatch, gradients, plain, "cosine")[0] == pytest.approx(5 / 130**0.5)
    assert by_hand(monkeypatch, gradients, scaled, "cosine")[0] == pytest.approx(3.5 / (73.25 * 2) ** 0.5)


@pytest.mark.parametrize("form", ["cosine", "layer-cosine"])
def test_document_without_gradient_has_no_influence(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    direction = make_direction(1.0, [{"a": torch.ones(2, 1)}])
    assert by_hand(monkeypatch, {"a": [[0.0, 0.0]]}, direction, form) == [0.0]


@pytest.mark.parametrize("form", ["cosine", "layer-cosine"])
def test_cosine_of_the_holdout_with_itself_is_one_and_with_its_opposite_minus_one(model: Any, form: Any) -> None:
    gradients, _ = all_gradients(model, linear_layers(model, "all"))
    targets = [{layer: sign * tensor[0] for layer, tensor in gradients.items()} for sign in (1, -1)]
    scores, _ = compare(model, parameters_of(model), make_direction(1.0, targets), *pad(DOCUMENTS), form=form)
    assert scores[0].tolist() == pytest.approx([1, -1], abs=1e-5)
    assert (scores.abs() <= 1 + 1e-5).all()


def test_turned_basis_changes_no_product_and_no_cosine(model: Any) -> None:
    """An orthogonal basis on both sides of every layer."""
    layers = linear_layers(model, "blocks")
    gradients, _ = all_gradients(model, layers)
    target = {layer: tensor[2:].mean(0) for layer, tensor in gradients.items()}
    bases = {
        layer: tuple(torch.linalg.qr(torch.randn(size, size))[0] for size in reversed(target[layer].shape))
        for layer in layers
    }
    for form in ("dot", "cosine", "layer-cosine"):
        plain, turned = (
            compare(model, parameters_of(model), make_direction(1.0, [target], bases=b), *pad(DOCUMENTS), form=form)[0]  # type: ignore[arg-type]
            for b in (None, bases)
        )
        torch.testing.assert_close(turned, plain, rtol=1e-3, atol=1e-5)


def test_turn_is_outputs_transposed_gradient_inputs() -> None:
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    basis = (torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [2.0]]))  # first input, twice the second output
    assert turn(gradient, basis).tolist() == [[6.0]]
    assert turn(gradient, None) is gradient


def test_direction_survives_its_file() -> None:
    bases = {"a": (torch.eye(2), torch.ones(1, 1))}
    made = make_direction(0.3, [{"a": torch.ones(1, 2)}], scale={"a": torch.tensor([[1.0, 2.0]])}, bases=bases)
    read = Direction.from_bytes(made.to_bytes())
    assert read.weight == made.weight == 0.3
    assert read.targets["a"].tolist() == [[1.0, 2.0]]
    assert read.target_squares["a"].tolist() == [3.0]
    assert read.scale["a"].tolist() == [1.0, 2.0]
    assert torch.equal(read.bases["a"][0], torch.eye(2))


def test_score_and_error_worked_by_hand() -> None:
    # One document, two checkpoints at equal rates, one probe of two folds. Checkpoint means 2 and 6, fold means 3 and 5.
    scores = torch.tensor([[[[1.0, 3.0]], [[5.0, 7.0]]]])
    score, stderr = combine(scores, [0.1, 0.1], [1.0])
    # Variance of the mean: over checkpoints 8 / 2 = 4, over folds 2 / 2 = 1.
    assert (float(score), float(stderr)) == pytest.approx((4.0, 5**0.5))
    assert float(combine(scores, [0.1, 0.3], [1.0])[0]) == pytest.approx((2 + 3 * 6) / 4)


def test_probes_count_by_their_weights() -> None:
    scores = torch.tensor([[[[1.0, 3.0], [10.0, 30.0]]]])  # one checkpoint, two probes of two folds
    assert float(combine(scores, [0.1], [3.0, 1.0])[0]) == pytest.approx((3 * 2 + 20) / 4)
    assert float(combine(scores, [0.1], [0.0, 1.0])[0]) == pytest.approx(20.0)


def test_one_checkpoint_leaves_the_error_over_the_folds() -> None:
    _, stderr = combine(torch.tensor([[[[1.0, 3.0]]]]), [0.1], [1.0])
    assert float(stderr) == pytest.approx(1.0)


def test_cosines_of_gradients_worked_by_hand() -> None:
    gradients = [{"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([3.0, 0.0])}, {"a": torch.tensor([-6.0, -8.0])}]
    assert cosines(gradients) == [[1.0, 0.6, -1.0], [0.6, 1.0, -0.6], [-1.0, -0.6, 1.0]]
