"""What the scores are good for: the holdout loss after training on the documents that they choose, all trainings seeing the same number of tokens.

Two questions. Does the better half of the tokens (by score) do as well as all of them, and the worse half clearly worse than a random one? And does tier S, the documents that carry
80 % of the positive influence, carry 80 % of what the corpus adds to real text alone?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.tiers import concentration_of
from tools.bench.retraining import Floats, Laboratory, Tokens, Training, train_all

SHARE_S = 0.8


def losses_by_choice(
    laboratory: Laboratory, scores: Floats, *, base: Sequence[Tokens], num_tokens: int, seed: int
) -> dict[str, float]:
    """Holdout loss of each choice, nats per token, and the share of the gain that tier S carries.

    Args:
        laboratory: its documents are the scored ones.
        base: real text to train on beside them, for the question about S.
        num_tokens: that every training sees, repeating its documents as often as they last.
    """
    lengths = np.array([len(tokens) for tokens in laboratory.documents])
    rng = np.random.default_rng(seed)
    best_first = np.argsort(-scores, kind="stable")
    num_s = round(len(scores) * concentration_of(scores, SHARE_S).documents_for_wanted_share)
    chance = rng.permutation(len(scores))
    own: dict[str, npt.NDArray[np.int64]] = {
        "all": np.arange(len(scores)),
        "top_half": half_of(best_first, lengths),
        "bottom_half": half_of(best_first[::-1], lengths),
        "random_half": half_of(chance, lengths),
    }
    with_base: dict[str, npt.NDArray[np.int64]] = {
        "base": np.zeros(0, dtype=np.int64),
        "base_and_all": own["all"],
        "base_and_s": best_first[:num_s],
        "base_and_random_s": chance[:num_s],
    }
    joined = replace(laboratory, documents=[*laboratory.documents, *base])
    base_places = tuple(range(len(scores), len(joined.documents)))
    trainings = {name: Training(chosen=tuple(chosen.tolist()), num_tokens=num_tokens, seed=seed) for name, chosen in own.items()} | {
        name: Training(chosen=(*chosen.tolist(), *base_places), num_tokens=num_tokens, seed=seed)
        for name, chosen in with_base.items()
    }  # fmt: skip
    losses = {
        name: float(found.mean())
        for name, found in zip(trainings, train_all(joined, list(trainings.values())), strict=True)
    }
    figures = {f"loss_{name}": loss for name, loss in losses.items()}
    figures["s_documents_share"] = num_s / len(scores)
    gain = losses["base"] - losses["base_and_all"]
    for name in ("s", "random_s"):
        figures[f"gain_share_{name}"] = (losses["base"] - losses[f"base_and_{name}"]) / gain
    return figures


def half_of(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first documents of an order that hold half of the tokens."""
    return order[: int(np.searchsorted(np.cumsum(lengths[order]), lengths.sum() / 2)) + 1]
