"""From scores to tiers. Pure functions of arrays: no store, no randomness."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiering:
    """Tiers of some documents, and what the scores say of how concentrated influence is."""

    tiers: npt.NDArray[Any]
    """Tier of each document, in the scores' order: S, A, B or C."""
    thresholds: dict[str, float | None]
    """Lowest score of S and of A, None where the tier is empty; documents below A's and not in C are in B."""
    concentration: dict[str, float]
    """`s_share_wanted`: share of the positive influence that S was to carry; `s_share_carried`: that it carries; `s_share_of_documents`: what it takes
    for that; `documents_for_wanted_share`: share of the documents that the wanted share would take, whatever the cap."""


def assign_tiers(scores: Scores, stderrs: Scores, *, share: float, confidence: float, max_s: float) -> Tiering:
    """Sorts documents into tiers.

    C: influence below zero with confidence, score + z · stderr < 0, z the one-sided normal quantile. S: the smallest set, highest scores first, that
    carries `share` of the positive influence of all documents outside C, but never more than `max_s` of the documents. A and B: the rest, cut at its median.

    Args:
        scores: influence of each document, finite.
        stderrs: standard error of each.
        share: of the positive influence that S is to carry, in (0, 1].
        confidence: one-sided confidence that a document of C is harmful, in [0.5, 1).
        max_s: largest share of the documents in S, in (0, 1].
    """
    assert np.isfinite(scores).all()
    assert len(scores) == len(stderrs) > 0
    harmful = scores + NormalDist().inv_cdf(confidence) * np.nan_to_num(stderrs) < 0
    tiers = np.full(len(scores), "B", dtype="<U1")
    tiers[harmful] = "C"
    # Highest first; equal scores keep their order, so that the outcome depends on nothing else.
    order = np.argsort(-scores, kind="stable")
    order = order[~harmful[order]]
    gains = np.maximum(scores[order], 0.0)
    total = float(gains.sum())
    wanted = int(np.searchsorted(np.cumsum(gains), share * total * (1 - 1e-12))) + 1 if total > 0 else 0
    num_s = min(wanted, int(max_s * len(scores)), len(order))
    rest = order[num_s:]
    num_a = (len(rest) + 1) // 2
    tiers[order[:num_s]] = "S"
    tiers[rest[:num_a]] = "A"
    return Tiering(
        tiers=tiers,
        thresholds={
            "S": float(scores[order[num_s - 1]]) if num_s else None,
            "A": float(scores[rest[num_a - 1]]) if num_a else None,
        },
        concentration={
            "s_share_wanted": share,
            "s_share_carried": float(gains[:num_s].sum() / total) if total > 0 else 0.0,
            "s_share_of_documents": num_s / len(scores),
            "documents_for_wanted_share": wanted / len(scores),
        },
    )


def say_concentration(tiering: Tiering) -> str:
    """Whether the scores carry the claim that a few documents carry most of the influence, in a sentence."""
    facts = tiering.concentration
    sentence = f"S holds {facts['s_share_of_documents']:.0%} of the documents and {facts['s_share_carried']:.0%} of the positive influence"
    if facts["s_share_carried"] < facts["s_share_wanted"] - 0.005:
        sentence += (
            f"; the {facts['s_share_wanted']:.0%} asked for would take {facts['documents_for_wanted_share']:.0%} of the documents, "
            "more than the cap lets in: these scores don't carry the claim that a few documents matter most"
        )
    return sentence
