"""Truth about influence, by training again: what a model's holdout loss becomes on another choice of documents.

A `Laboratory` is a small model, the documents that it may train on, and holdout documents in groups. It trains with the scoring model's own trainer
(pipeline/scoring_model.py); many trainings run side by side, one thread each, so that a result doesn't depend on how many there are at once.

Shapes: D documents, G groups of holdout documents, M halves of the documents, H holdout documents.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.scoring_model import Checkpoint

Tokens = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
_BATCH_DOCUMENTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Laboratory:
    """What all trainings of one experiment share."""

    model: Mapping[str, Any]
    """Config of the model, with `model_type`."""
    vocab_size: int
    documents: Sequence[Tokens]
    holdout: Sequence[Tokens]
    groups: Sequence[int]
    """The group of each holdout document, from 0."""
    batch_size: int
    seq_len: int
    learning_rate: float
    model_seed: int
    side_by_side: bool = True
    """Whether many trainings run in processes of their own, which take seconds to start."""

    @property
    def num_groups(self) -> int:
        """Groups of holdout documents."""
        return max(self.groups) + 1

    def num_tokens(self, chosen: Sequence[int] | None = None) -> int:
        """Tokens of some of the documents, or of all."""
        return sum(len(self.documents[i]) for i in (range(len(self.documents)) if chosen is None else chosen))

    def build(self) -> Any:
        """The model before its training, always the same."""
        import torch

        from pipeline.scoring_model import build_model

        return build_model(
            self.model,
            None,
            vocab_size=self.vocab_size,
            longest=self.seq_len,
            seed=self.model_seed,
            device=torch.device("cpu"),
        )

    def train(
        self, model: Any, chosen: Sequence[int], *, num_tokens: int, seed: int, num_checkpoints: int = 1
    ) -> list[Checkpoint]:
        """Checkpoints of a training on the chosen documents, each seen as often as the tokens last.

        Args:
            seed: of the documents' order.
        """
        from pipeline.scoring_model import pack, train

        stream = pack([self.documents[i] for i in chosen], num_tokens=num_tokens, seed=seed)
        return list(
            train(
                model,
                stream,
                batch_size=self.batch_size,
                seq_len=self.seq_len,
                learning_rate=self.learning_rate,
                num_checkpoints=num_checkpoints,
            )
        )

    def losses(self, model: Any, parameters: Mapping[str, Tensor]) -> Floats:
        """losses_H: each holdout document's mean loss, nats per token."""
        import torch

        from pipeline.gradients import batches_by_length, document_losses, pad

        losses_H = np.zeros(len(self.holdout))
        with torch.no_grad():
            for places in batches_by_length([len(tokens) for tokens in self.holdout], size=_BATCH_DOCUMENTS):
                batch = pad([self.holdout[place] for place in places])
                losses_H[places] = document_losses(model, parameters, *batch).numpy()
        return losses_H

    def by_group(self, losses_H: Floats) -> Floats:
        """losses_G: the mean over each group's documents."""
        groups = np.asarray(self.groups)
        return np.array([losses_H[groups == group].mean() for group in range(self.num_groups)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One training to be done."""

    chosen: tuple[int, ...]
    num_tokens: int
    seed: int


def train_all(laboratory: Laboratory, trainings: Sequence[Training]) -> list[Floats]:
    """losses_H after each training, in their order; as many at once as there are processors."""
    if not laboratory.side_by_side:
        return [_train_in(laboratory, training) for training in trainings]
    processes = min(len(os.sched_getaffinity(0)), len(trainings))
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_enter, initargs=(laboratory,)
    ) as pool:
        return list(pool.map(_train, trainings))


_laboratory: Laboratory | None = None


def _enter(laboratory: Laboratory) -> None:
    import torch

    global _laboratory
    _laboratory = laboratory
    torch.set_num_threads(1)


def _train(training: Training) -> Floats:
    assert _laboratory is not None
    return _train_in(_laboratory, training)


def _train_in(laboratory: Laboratory, training: Training) -> Floats:
    model = laboratory.build()
    (checkpoint,) = laboratory.train(model, training.chosen, num_tokens=training.num_tokens, seed=training.seed)
    return laboratory.losses(model, checkpoint.parameters)


def random_halves(num_documents: int, *, num_halves: int, seed: int) -> npt.NDArray[np.bool_]:
    """halves_MD: which documents belong to each half."""
    rng = np.random.default_rng(seed)
    halves_MD = np.zeros((num_halves, num_documents), dtype=bool)
    for half in halves_MD:
        half[rng.permutation(num_documents)[: num_documents // 2]] = True
    return halves_MD


def datamodeling_score(scores_DG: Floats, halves_MD: npt.NDArray[np.bool_], losses_MG: Floats) -> float:
    """The linear datamodeling score (TRAK, arXiv 2303.14186, section 2.2): the rank correlation over the halves between the summed scores of a half's documents and
    how low the loss after training on it is, averaged over the groups."""
    return mean_rank_correlation(halves_MD @ scores_DG, -losses_MG)


def mean_rank_correlation(one_MG: Floats, other_MG: Floats) -> float:
    """Spearman's correlation of each column, averaged."""
    columns = zip(one_MG.T, other_MG.T, strict=True)
    return float(np.mean([spearmanr(one, other).statistic for one, other in columns]))
