"""From scores to tiers, and what the scores say of how concentrated influence is. Pure functions of arrays: no store, no randomness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import UserError
from manifests.schemas import TIERS

Scores = npt.NDArray[np.float64]
Sizes = Mapping[str, tuple[float, float]]
"""Tier → its smallest and largest share of the documents; a tier that isn't named may have any."""
DEFAULT_SIZES: Sizes = {"S": (0.0, 0.5)}
LORENZ_POINTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
"""Shares of the documents, the most influential first, at which the concentration of influence is told."""
_MANY = 0.5
"""Where more than this share of the documents carries the influence, they aren't a few."""
_ROUNDING = 1e-9
S, A, B, C = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Concentration:
    """How few documents carry how much of the positive influence. The harmful ones count as documents without any."""

    documents_for_wanted_share: float
    """Share of the documents that it takes to carry the share wanted; 0 where nothing has positive influence."""
    gini: float
    """Gini coefficient of the positive influence: 0 where all documents are alike, near 1 where one has it all."""
    lorenz: list[tuple[float, float]]
    """Share of the documents, the most influential first → share of the positive influence that they carry, at LORENZ_POINTS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiering:
    """Tiers of some documents."""

    tiers: npt.NDArray[np.int8]
    """Tier of each document, in the scores' order, by its number in TIERS."""
    thresholds: dict[str, float | None]
    """Lowest score of S and of A, None where the tier is empty; documents below A's and not in C are in B."""
    share_wanted: float
    """Share of the positive influence that S was to carry."""
    share_carried: float
    """Share that it carries."""
    concentration: Concentration
    notes: list[str]
    """Where the sizes decided and not the scores."""

    def facts(self) -> dict[str, Any]:
        """What came out of the scores, for the record."""
        return self.thresholds | {
            "s_share_wanted": self.share_wanted,
            "s_share_carried": self.share_carried,
            "s_share_of_documents": self.counts()["S"] / len(self.tiers),
            "documents_for_wanted_share": self.concentration.documents_for_wanted_share,
            "gini": self.concentration.gini,
            "lorenz": self.concentration.lorenz,
        }

    def counts(self) -> dict[str, int]:
        """Documents of each tier."""
        return dict(zip(TIERS, np.bincount(self.tiers, minlength=len(TIERS)).tolist(), strict=True))


def require_sizes(sizes: Sizes) -> None:
    """Raises a UserError, which names the option, where no tiers could have these sizes."""
    for tier, (least, most) in sizes.items():
        shown = f"--size {tier}={least:g}..{most:g}"
        if tier not in TIERS:
            raise UserError(f"{shown}: there is no tier {tier!r}; there are {', '.join(TIERS)}")
        if not (0 <= least <= 1 and 0 <= most <= 1):
            raise UserError(f"{shown}: sizes are shares of the documents, from 0 to 1")
        if least > most:
            raise UserError(f"{shown}: its minimum is above its maximum; exchange them")
    least, most = (math.fsum(sizes.get(tier, (0.0, 1.0))[side] for tier in TIERS) for side in (0, 1))
    if least > 1 + _ROUNDING:
        raise UserError(f"--size: the minima add up to {least:.3g}, more than all documents; lower one")
    if most < 1 - _ROUNDING:
        raise UserError(f"--size: the maxima add up to {most:.3g}, less than all documents; raise one")


def assign_tiers(
    scores: Scores, z: Scores, *, share: float, confidence: float, sizes: Sizes = DEFAULT_SIZES
) -> Tiering:
    """Sorts documents into tiers. Of equal documents the earlier one has the better tier, so hand them in in the order of their ids.

    C: influence below zero with confidence: score < 0 and z below the one-sided normal quantile. S: the smallest set, highest scores first, that carries `share` of
    the positive influence. A and B: the rest, cut at its median.

    Sizes come before that. Each is a whole number of documents, rounded down, and what the rounding leaves is B's. Where C is too large, the least sure documents go to B, and so does
    what has lower scores than they have. Where C is too small it takes the next surest, but never a document whose score isn't below zero: a tier of harm that holds good
    documents would be a lie, so C then stays smaller than its minimum, and a note says so. The minima of S, A and B come before C.

    Args:
        scores: influence of each document, finite.
        z: in calibrated standard errors; NaN where nothing is known of the error: such a document is harmful only where C must be filled.
        share: of the positive influence that S is to carry, in (0, 1].
        confidence: one-sided confidence that a document of C is harmful, in [0.5, 1).
        sizes: that `require_sizes` lets through.

    Raises:
        UserError: S, A and B are to be so small that documents would be left which have no negative influence.
    """
    assert np.isfinite(scores).all()
    num = len(scores)
    assert num == len(z) > 0
    least, most = _bounds(sizes, num)
    negative = scores < 0
    num_negative = int(negative.sum())
    sure = negative & (z < -NormalDist().inv_cdf(confidence))
    num_sure = int(sure.sum())
    left_over = num - most[S] - most[A] - most[B]
    if left_over > num_negative:
        raise UserError(
            f"--size: S, A and B may hold {1 - left_over / num:.0%} of the documents, and C only those with negative influence, {num_negative / num:.0%}; raise a maximum"
        )
    num_c = min(
        max(num_sure, min(max(least[C], left_over), num_negative)), most[C], num - least[S] - least[A] - least[B]
    )
    tiers = np.full(num, B, np.int8)
    candidates = np.flatnonzero(negative)
    surest = candidates[np.argsort(z[candidates], kind="stable")]  # NaN last
    tiers[surest[:num_c]] = C
    kept_out = sure & (tiers != C)

    order = np.argsort(-scores, kind="stable")
    order = order[tiers[order] != C]
    gains = np.maximum(scores[order], 0.0)
    running = np.cumsum(gains)
    total = float(running[-1]) if len(order) else 0.0
    wanted = _num_for(running, share)
    num_s = _within(wanted, least[S], most[S], least[A] + least[B], most[A] + most[B], len(order))
    rest = order[num_s:]
    barred = np.flatnonzero(kept_out[rest])
    num_a = min((len(rest) + 1) // 2, int(barred[0]) if len(barred) else num)
    num_a = _within(num_a, least[A], most[A], least[B], most[B], len(rest))
    tiers[order[:num_s]] = S
    tiers[rest[:num_a]] = A
    return Tiering(
        tiers=tiers,
        thresholds={
            "S": float(scores[order[num_s - 1]]) if num_s else None,
            "A": float(scores[rest[num_a - 1]]) if num_a else None,
        },
        share_wanted=share,
        share_carried=float(running[num_s - 1] / total) if num_s and total > 0 else 0.0,
        concentration=concentration_of(scores, share),
        notes=_notes(num_s, wanted, least[S], num_c, num_sure, least[C]),
    )


def concentration_of(scores: Scores, share: float) -> Concentration:
    """How few documents carry `share`, and how much few of them carry."""
    num = len(scores)
    gains = np.sort(np.maximum(scores, 0.0))[::-1]
    running = np.cumsum(gains)
    total = float(running[-1])
    if total <= 0:
        return Concentration(documents_for_wanted_share=0.0, gini=0.0, lorenz=[(at, 0.0) for at in LORENZ_POINTS])
    # Twice the area between the curve and the diagonal; the curve is straight between documents.
    gini = (num + 1) / num - 2 * float(np.dot(np.arange(1, num + 1), gains)) / (num * total)
    carried = np.interp(np.array(LORENZ_POINTS) * num, np.arange(num + 1), np.append(0.0, running / total))
    return Concentration(
        documents_for_wanted_share=_num_for(running, share) / num,
        # Where all are alike it is 0, but for rounding.
        gini=max(gini, 0.0),
        lorenz=[(at, float(value)) for at, value in zip(LORENZ_POINTS, carried, strict=True)],
    )


def concentration_by_group(
    scores: Scores, groups: npt.NDArray[np.integer[Any]], names: Sequence[str], share: float
) -> dict[str, dict[str, float]]:
    """For each group: how many `documents` it has, the share of them that it takes to carry `share` of its own positive influence, and its Gini coefficient."""
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=len(names)))
    found = {}
    for name, members in zip(names, np.split(order, ends[:-1]), strict=True):
        if len(members):
            facts = concentration_of(scores[members], share)
            found[name] = {
                "documents": len(members),
                "documents_for_wanted_share": facts.documents_for_wanted_share,
                "gini": facts.gini,
            }
    return dict(sorted(found.items()))


def say_concentration(tiering: Tiering) -> str:
    """Whether the scores carry the claim that a few documents carry most of the influence, in a sentence."""
    facts, wanted = tiering.concentration, f"{tiering.share_wanted:.0%}"
    needed = facts.documents_for_wanted_share
    if not needed:
        return "no document has positive influence: these scores don't carry the claim that a few documents matter most"
    first = dict(facts.lorenz)[0.1]
    sentence = (
        f"S holds {tiering.counts()['S'] / len(tiering.tiers):.0%} of the documents and {tiering.share_carried:.0%} of the positive influence "
        f"(Gini {facts.gini:.2f}; the first 10% of the documents carry {first:.0%})"
    )
    if tiering.share_carried < tiering.share_wanted - 0.005:
        sentence += f"; the {wanted} asked for would take {needed:.0%} of the documents, more than S may have"
    elif needed > _MANY:
        sentence += f"; it takes {needed:.0%} of the documents to carry {wanted}"
    if needed > _MANY:
        sentence += ": these scores don't carry the claim that a few documents matter most"
    elif needed >= documents_by_chance(tiering.share_wanted):
        sentence += (
            f"; scores that are nothing but normal noise around zero would take {documents_by_chance(tiering.share_wanted):.0%} of the documents to carry {wanted}, "
            "and these take no fewer: they don't carry the claim that a few documents matter most"
        )
    return sentence


def documents_by_chance(share: float) -> float:
    """Share of the documents that carries `share` of the positive influence where scores are normal noise around zero.

    Those above c carry φ(c) / φ(0) of the positive part, so c = √(-2 ln share).
    """
    return NormalDist().cdf(-math.sqrt(-2 * math.log(share)))


def _bounds(sizes: Sizes, num: int) -> tuple[list[int], list[int]]:
    """Smallest and largest number of documents of each tier."""
    shares = [sizes.get(tier, (0.0, 1.0)) for tier in TIERS]
    least = [math.floor(low * num + _ROUNDING) for low, _ in shares]
    most = [math.floor(high * num + _ROUNDING) for _, high in shares]
    most[B] += max(0, num - sum(most))
    return least, most


def _within(wanted: int, least: int, most: int, least_others: int, most_others: int, num: int) -> int:
    """How many of `num` documents a tier takes, the others taking what is left."""
    return min(max(wanted, least, num - most_others), most, num - least_others)


def _num_for(running: Scores, share: float) -> int:
    """How many of the highest gains carry `share` of them all; 0 where there are none."""
    if not len(running) or running[-1] <= 0:
        return 0
    return min(int(np.searchsorted(running, share * running[-1] * (1 - 1e-12))) + 1, len(running))


def _notes(num_s: int, wanted: int, least_s: int, num_c: int, num_sure: int, least_c: int) -> list[str]:
    notes = []
    if num_s > wanted:
        why = "its minimum asks for more" if num_s == least_s else "the other tiers may hold no more"
        notes.append(f"S holds {num_s} documents where {wanted} carry its share: {why}")
    if num_c < num_sure:
        notes.append(f"{num_sure - num_c} documents that are harmful with confidence are not in C: there is no room")
    if num_c > num_sure:
        notes.append(f"{num_c - num_sure} documents of C are not harmful with confidence: its size asks for them")
    if num_c < least_c and num_c >= num_sure:
        notes.append(
            f"C holds {num_c} documents, fewer than its minimum of {least_c}: no others have negative influence"
        )
    return notes
