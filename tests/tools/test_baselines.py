"""The baselines: each sees what it is there for, on texts whose order is plain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tools.bench.baselines import (
    BASELINES,
    RULES,
    bullet_share,
    gopher,
    importance,
    mean_word_length,
    repeated_line_share,
    repeated_ngram_share,
    top_ngram_share,
)

HOLDOUT = [
    "The river flows to the sea and is crossed by a bridge of stone.",
    "The town lies on a river that is known for the bridge.",
]
ENGLISH = "The city lies by the sea, and a bridge of stone crosses the river that flows with it."
FRENCH = "La ville se trouve au bord de la mer, où un pont de pierre traverse le fleuve."
NOISE = "T9e c{ty l.es b@ t%e s!a, #nd a b|idg~ of ]tone cr^sses t$e ri*er t(at fl&ws."
LOOP = "The river flows to the sea. " * 12


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_gives_each_text_a_finite_score_and_the_same_again(name: str) -> None:
    texts = [ENGLISH, FRENCH, NOISE, LOOP, "", "x", "\n\n"]
    scores = BASELINES[name](texts, HOLDOUT, 3)
    assert scores.shape == (len(texts),)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores, BASELINES[name](texts, HOLDOUT, 3))


def test_random_scores_follow_the_seed() -> None:
    assert (
        BASELINES["random"]([ENGLISH] * 3, HOLDOUT, 1).tolist()
        != BASELINES["random"]([ENGLISH] * 3, HOLDOUT, 2).tolist()
    )


@pytest.mark.parametrize("name", ["dsir", "dsir_per_ngram"])
def test_importance_prefers_the_text_in_the_holdouts_words(name: str) -> None:
    english, french, noise = BASELINES[name]([ENGLISH, FRENCH, NOISE], HOLDOUT, 0)
    assert english > french
    assert english > noise


def test_importance_is_the_log_ratio_of_the_probabilities() -> None:
    # Raw: a, b, `a b`; target: a, a, `a a`. No two of them share a bucket.
    (total,) = importance(["a b"], ["a a"], 0, smoothing=1e-8)
    expected = math.log(2 / 3 / (1 / 3)) + 2 * math.log(1e-8 / (1 / 3))
    assert total == pytest.approx(expected, rel=1e-6)
    (mean,) = importance(["a b"], ["a a"], 0, smoothing=1e-8, per_ngram=True)
    assert mean == pytest.approx(expected / 3, rel=1e-6)


def test_importance_per_ngram_knows_no_length() -> None:
    once, twice = importance([ENGLISH, f"{ENGLISH} {ENGLISH}"], HOLDOUT, 0, per_ngram=True)
    assert once == pytest.approx(twice, rel=0.05)


def test_gopher_finds_no_fault_with_prose_and_much_with_damage() -> None:
    english, french, loop, symbols = gopher([ENGLISH, FRENCH, LOOP, "# ... # ..."], HOLDOUT, 0)
    assert english == 0
    assert max(french, loop, symbols) < 0


def test_measures_are_what_they_say() -> None:
    assert mean_word_length("ab abcd") == 3
    assert bullet_share("- a\n* b\nc\nd") == 0.5
    assert repeated_line_share("a\nb\na\na") == 0.5
    assert top_ngram_share("a b a b c d", n=2) == pytest.approx(4 / 6)
    assert top_ngram_share("a b c d", n=2) == 0
    assert repeated_ngram_share("a b c x a b c", n=3) == pytest.approx(6 / 7)
    assert repeated_ngram_share("a b a b a b", n=2) == 1


def test_rules_have_room_between_their_bounds() -> None:
    assert all(low < high for _, low, high in RULES)
