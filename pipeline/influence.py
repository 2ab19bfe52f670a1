"""The mathematics of influence: how well a document's gradient agrees with the gradient of the holdout.

Pure functions of a model, parameters and token arrays; no store, no files, no randomness. Training the scoring model is in
scoring_model.py, the job that scores a corpus in score.py.

A document's loss is its mean cross-entropy per token, so that length is no influence. Let g_i be the gradient of document i's
loss and v the mean gradient of the holdout documents, both at one checkpoint; P is a positive diagonal, the identity or Adam's inverse root of the
second moments. A small step along -P g_i changes the holdout loss by -η ⟨g_i, P v⟩ in first order: where the product is positive,
training on the document lowers the holdout loss.

Shapes: D documents, T tokens, V vocabulary, F folds of the holdout, N entries of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import Module
from torch.nn.functional import cross_entropy

Tokens = npt.NDArray[Any]
Tensors = dict[str, Tensor]
Form = Literal["cosine", "dot"]
_TINY = 1e-30


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


def document_losses(model: Module, parameters: Mapping[str, Tensor], tokens_DT: Tensor, mask_DT: Tensor) -> Tensor:
    """losses_D: the mean loss of each document's next-token predictions, in nats per token.

    The model is causal, so what is padded on the right changes nothing before it and needs no attention mask.
    """
    logits_DTV = functional_call(model, dict(parameters), (tokens_DT,), {"use_cache": False}).logits
    losses_DT = cross_entropy(logits_DTV[:, :-1].transpose(1, 2), tokens_DT[:, 1:], reduction="none")
    mask_DT = mask_DT[:, 1:]
    return (losses_DT * mask_DT).sum(1) / mask_DT.sum(1)


def document_gradients(
    model: Module, parameters: Mapping[str, Tensor], tokens_DT: Tensor, mask_DT: Tensor
) -> tuple[Tensors, Tensor]:
    """The gradient of each document's loss (every tensor with a leading D), and losses_D.

    Needs eager attention: vmap has no rule for the fused kernels.
    """

    def loss(p: Mapping[str, Tensor], tokens_T: Tensor, mask_T: Tensor) -> Tensor:
        return document_losses(model, p, tokens_T[None], mask_T[None])[0]

    gradients, losses_D = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(dict(parameters), tokens_DT, mask_DT)
    return gradients, losses_D


def mean_gradient(
    model: Module, parameters: Mapping[str, Tensor], batches: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensors, float]:
    """The mean of the documents' gradients, each document counting once, over batches of (tokens_DT, mask_DT); and their mean loss."""

    def loss(p: Mapping[str, Tensor], tokens_DT: Tensor, mask_DT: Tensor) -> tuple[Tensor, Tensor]:
        total = document_losses(model, p, tokens_DT, mask_DT).sum()
        return total, total.detach()

    sums: Tensors = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    num_documents, total_loss = 0, 0.0
    for tokens_DT, mask_DT in batches:
        gradients, total = grad(loss, has_aux=True)(dict(parameters), tokens_DT, mask_DT)
        for name, gradient in gradients.items():
            sums[name] += gradient
        num_documents += len(tokens_DT)
        total_loss += float(total)
    return {name: tensor / num_documents for name, tensor in sums.items()}, total_loss / num_documents


def adam_preconditioner(second_moments: Mapping[str, Tensor], *, epsilon: float = 1e-8) -> Tensors:
    """P = 1 / (√v̂ + ε), elementwise, of Adam's bias-corrected second moments v̂ (Kingma and Ba, arXiv 1412.6980, Algorithm 1)."""
    return {name: 1 / (moment.sqrt() + epsilon) for name, moment in second_moments.items()}


def agreement(
    gradients: Mapping[str, Tensor],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    form: Form,
    preconditioner: Mapping[str, Tensor] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
) -> Tensor:
    """How much each document's gradient agrees with each fold's holdout gradient, as scores_DF.

    dot:    Σ_G ⟨g_i, P v_f⟩_G                                    TracInCP's term of one checkpoint (arXiv 2002.08484, Eq. 1) for P = 1
    cosine: mean_G ⟨g_i, P v_f⟩_G / (‖P^½ g_i‖_G ‖P^½ v_f‖_G)     LESS's (arXiv 2402.04333, Eq. 2), with P applied on both sides alike

    LESS takes a cosine with Adam's whole update direction of the training example, momentum included; here P alone stands for Adam, as a metric.

    Args:
        groups: names of the tensors between which a cosine is taken, each group counting the same; None: all in one. Tensors in no group are left out.
            Groups keep one kind of parameter (the embedding) from drowning the others.
    """
    shares: list[Tensor] = []
    for names in groups if groups is not None else [list(gradients)]:
        first = gradients[names[0]]
        product_DF = first.new_zeros(len(first), len(targets))
        square_D = first.new_zeros(len(first))
        square_F = first.new_zeros(len(targets))
        for name in names:
            gradient_DN = gradients[name].flatten(1)
            target_NF = torch.stack([target[name].flatten() for target in targets], dim=1)
            scale_N = preconditioner[name].flatten() if preconditioner is not None else torch.ones_like(target_NF[:, 0])
            scaled_NF = target_NF * scale_N[:, None]
            product_DF += gradient_DN @ scaled_NF
            if form == "cosine":
                square_D += gradient_DN.square() @ scale_N
                square_F += (target_NF * scaled_NF).sum(0)
        if form == "cosine":
            product_DF /= (square_D[:, None] * square_F).sqrt().clamp_min(_TINY)
        shares.append(product_DF)
    total_DF = torch.stack(shares).sum(0)
    return total_DF / len(shares) if form == "cosine" else total_DF


def combine(scores_DKF: Tensor, learning_rates: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Each document's score and standard error, over K checkpoints and F folds.

    score = Σ_k η_k mean_f s_kf / Σ_k η_k   (TracInCP's sum over checkpoints weighted by the learning rate, as a mean)

    Folds at one checkpoint share the document's gradient, and checkpoints share the holdout, so the cells are no independent samples. The variance of the mean is
    taken as that of the checkpoint means over the checkpoints plus that of the fold means over the folds; what is neither is counted in both, so the error
    is rather too large. It says nothing of another scoring model, seed or holdout source.
    """
    scores_DKF = scores_DKF.double()
    weights_K = torch.tensor(learning_rates, dtype=torch.float64)
    weights_K = weights_K / weights_K.sum()
    by_checkpoint_DK = scores_DKF.mean(2)
    by_fold_DF = (scores_DKF * weights_K[None, :, None]).sum(1)
    score_D = by_fold_DF.mean(1)
    num_folds = scores_DKF.shape[2]
    variance_D = torch.zeros_like(score_D)
    if num_folds > 1:
        variance_D += by_fold_DF.var(1) / num_folds
    effective = float(1 / weights_K.square().sum())
    if len(learning_rates) > 1:
        spread_D = (weights_K * (by_checkpoint_DK - score_D[:, None]).square()).sum(1)
        variance_D += spread_D / max(effective - 1, 1.0)
    return score_D, variance_D.sqrt()
