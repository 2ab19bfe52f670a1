"""What the influence benchmark measures with: the datamodeling score, halves, our side's scores."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pipeline.test_score import MODEL
from tools.bench.counterfactual import METHODS, score
from tools.bench.retraining import Laboratory, datamodeling_score, random_halves
from tools.bench.selection import half_of


@pytest.fixture(scope="module")
def laboratory() -> Laboratory:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 64, 24).astype(np.uint16) for _ in range(12)]
    return Laboratory(
        model=MODEL,
        vocab_size=64,
        documents=documents,
        holdout=[documents[0], documents[1]],
        groups=[0, 1],
        batch_size=2,
        seq_len=24,
        learning_rate=1e-2,
        model_seed=0,
    )


def test_datamodeling_score_is_one_where_losses_follow_the_summed_scores_and_chance_where_they_do_not() -> None:
    rng = np.random.default_rng(1)
    scores_DG = rng.normal(size=(40, 3))
    halves_MD = random_halves(40, num_halves=30, seed=2)
    assert halves_MD.sum(1).tolist() == [20] * 30
    losses_MG = 5 - np.exp(halves_MD @ scores_DG / 10)
    assert datamodeling_score(scores_DG, halves_MD, losses_MG) == pytest.approx(1)
    assert datamodeling_score(-scores_DG, halves_MD, losses_MG) == pytest.approx(-1)
    assert abs(datamodeling_score(rng.normal(size=(40, 3)), halves_MD, losses_MG)) < 0.5


def test_half_of_an_order_holds_half_of_the_tokens() -> None:
    lengths = np.array([10, 1, 1, 8, 10, 10])
    assert half_of(np.array([1, 2, 0, 3, 4, 5]), lengths).tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize(
    "method", ["trajectory, ekfac, dot, damping 0.01", "trajectory, adam, dot", "reverse, cosine, damping 0.1"]
)
def test_the_document_that_a_group_consists_of_has_the_highest_score_for_it(
    method: str, laboratory: Laboratory
) -> None:
    model = laboratory.build()
    checkpoints = laboratory.train(model, range(12), num_tokens=480, seed=0, num_checkpoints=2)
    scores_DG = score(laboratory, model, checkpoints, METHODS[method], seed=0)
    assert scores_DG.shape == (12, 2)
    assert scores_DG.argmax(0).tolist() == [0, 1]
