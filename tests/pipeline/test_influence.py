"""The mathematics of influence, held against plain autograd, and worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.influence import (
    adam_preconditioner,
    agreement,
    batches_by_length,
    combine,
    document_gradients,
    document_losses,
    mean_gradient,
    pad,
    window,
)
from pipeline.scoring_model import build_model, parameter_groups

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
DOCUMENTS = [np.array(tokens, np.uint16) for tokens in ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9], [39, 0, 1])]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(CONFIG, None, vocab_size=40, longest=16, seed=0, device=torch.device("cpu"))


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_gradients(model: Any) -> list[dict[str, Tensor]]:
    """One backward pass for each document, alone and without padding."""
    found = []
    for tokens in DOCUMENTS:
        model.zero_grad()
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return found


def test_gradients_of_a_padded_batch_are_those_of_each_document_alone(model: Any) -> None:
    gradients, losses = document_gradients(model, parameters_of(model), *pad(DOCUMENTS))
    for row, plain in enumerate(plain_gradients(model)):
        for name, gradient in plain.items():
            torch.testing.assert_close(gradients[name][row], gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, document_losses(model, parameters_of(model), *pad(DOCUMENTS)))


def test_mean_gradient_counts_every_document_once_however_they_are_batched(model: Any) -> None:
    batches = [pad(DOCUMENTS[:3]), pad(DOCUMENTS[3:])]
    gradient, loss = mean_gradient(model, parameters_of(model), batches)
    plain = plain_gradients(model)
    for name, mean in gradient.items():
        torch.testing.assert_close(mean, torch.stack([g[name] for g in plain]).mean(0), rtol=1e-5, atol=1e-6)
    losses = document_losses(model, parameters_of(model), *pad(DOCUMENTS))
    assert loss == pytest.approx(float(losses.mean()), rel=1e-6)


def test_dot_predicts_what_a_small_step_does_to_the_holdout_loss(model: Any) -> None:
    parameters = {name: tensor.double() for name, tensor in parameters_of(model).items()}
    double = build_model(CONFIG, None, vocab_size=40, longest=16, seed=0, device=torch.device("cpu")).double()
    holdout = pad(DOCUMENTS[2:])
    gradients, _ = document_gradients(double, parameters, *pad(DOCUMENTS[:2]))
    target, before = mean_gradient(double, parameters, [holdout])
    scores = agreement(gradients, [target], form="dot")[:, 0]
    for row, score in enumerate(scores.tolist()):
        stepped = {name: tensor - 1e-5 * gradients[name][row] for name, tensor in parameters.items()}
        after = mean_gradient(double, stepped, [holdout])[1]
        assert (before - after) / 1e-5 == pytest.approx(score, rel=0.02, abs=1e-6)


def test_agreement_worked_by_hand() -> None:
    gradients = {"a": torch.tensor([[3.0, 4.0], [0.0, -2.0]]), "b": torch.tensor([[1.0], [2.0]])}
    targets = [{"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}]
    preconditioner = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([0.25])}
    assert agreement(gradients, targets, form="dot").flatten().tolist() == pytest.approx([5, 4])
    assert agreement(gradients, targets, form="dot", preconditioner=preconditioner).flatten().tolist() == pytest.approx(
        [3.5, 1]
    )
    # Document 0, in the groups a and b: 3 / (5 · 1) and 2 / (1 · 2).
    grouped = agreement(gradients, targets, form="cosine", groups=[["a"], ["b"]])
    assert grouped.flatten().tolist() == pytest.approx([(0.6 + 1) / 2, (0 + 1) / 2])
    # Together: 5 / (√26 · √5). With P: 3.5 / √((9 + 64 + 0.25)(1 + 1)).
    assert float(agreement(gradients, targets, form="cosine")[0, 0]) == pytest.approx(5 / 130**0.5)
    scaled = agreement(gradients, targets, form="cosine", preconditioner=preconditioner)
    assert float(scaled[0, 0]) == pytest.approx(3.5 / (73.25 * 2) ** 0.5)


def test_cosine_of_the_holdout_with_itself_is_one_and_with_its_opposite_minus_one(model: Any) -> None:
    gradients, _ = document_gradients(model, parameters_of(model), *pad(DOCUMENTS))
    targets = [{name: sign * tensor[0] for name, tensor in gradients.items()} for sign in (1, -1)]
    names = list(gradients)
    scores = agreement(gradients, targets, form="cosine", groups=parameter_groups(names, model))
    assert scores[0].tolist() == pytest.approx([1, -1], abs=1e-5)
    assert (scores.abs() <= 1 + 1e-5).all()


def test_document_without_gradient_has_no_influence() -> None:
    gradients = {"a": torch.zeros(1, 2)}
    assert agreement(gradients, [{"a": torch.ones(2)}], form="cosine").tolist() == [[0.0]]


def test_preconditioner_is_adams() -> None:
    scale = adam_preconditioner({"a": torch.tensor([4.0, 0.25])}, epsilon=0.0)
    assert scale["a"].tolist() == [0.5, 2.0]


def test_groups_are_the_embeddings_and_all_the_rest(model: Any) -> None:
    names = [name for name, _ in model.named_parameters()]
    edge, inner = parameter_groups(names, model)
    assert edge == ["model.embed_tokens.weight"]
    assert sorted(edge + inner) == sorted(names)


def test_score_and_error_worked_by_hand() -> None:
    # One document, two checkpoints at equal rates, two folds. Checkpoint means 2 and 6, fold means 3 and 5.
    scores = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])
    score, stderr = combine(scores, [0.1, 0.1])
    # Variance of the mean: over checkpoints 8 / 2 = 4, over folds 2 / 2 = 1.
    assert (float(score), float(stderr)) == pytest.approx((4.0, 5**0.5))
    assert float(combine(scores, [0.1, 0.3])[0]) == pytest.approx((2 + 3 * 6) / 4)


def test_one_checkpoint_leaves_the_error_over_the_folds() -> None:
    _, stderr = combine(torch.tensor([[[1.0, 3.0]]]), [0.1])
    assert float(stderr) == pytest.approx(1.0)


def test_windows_go_from_the_beginning_to_the_end() -> None:
    tokens = np.arange(10)
    assert [window(tokens, longest=4, at=at)[0] for at in (0.0, 0.5, 1.0)] == [0, 3, 6]
    assert len(window(tokens, longest=40, at=1.0)) == 10


def test_documents_too_short_to_predict_anything_are_in_no_batch() -> None:
    assert list(batches_by_length([5, 1, 2, 0, 9], size=2)) == [[2, 0], [4]]
