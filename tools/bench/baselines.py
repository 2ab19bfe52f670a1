"""What a user would try before influence: scores of texts that need no model, higher = keep.

Every baseline is called with the texts, the holdout's texts and a seed, and returns a score for each text. A perplexity filter needs a model's
losses and so isn't here: it is the negative mean loss per token, which the benchmark has anyway.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Baseline = Callable[[Sequence[str], Sequence[str], int], Scores]

NUM_BUCKETS = 10_000
DSIR_SMOOTHING = 1e-8
"""What data-selection 1.0.3 adds to a probability before its logarithm: n-grams that the target lacks weigh much."""

_WORD_OR_SIGNS = re.compile(r"\w+|[^\w\s]+")
_WORD = re.compile(r"\S+")


def random_scores(texts: Sequence[str], _holdout: Sequence[str], seed: int) -> Scores:
    """Uniform noise."""
    rng = random.Random(seed)
    return np.array([rng.random() for _ in texts])


def length(texts: Sequence[str], _holdout: Sequence[str], _seed: int) -> Scores:
    """The number of characters. It should tell nothing: where it tells something, the corpus gives harm away by its length."""
    return np.array([float(len(text)) for text in texts])


# --- hashed n-gram importance ---


def importance(
    texts: Sequence[str],
    holdout: Sequence[str],
    _seed: int,
    *,
    smoothing: float = DSIR_SMOOTHING,
    per_ngram: bool = False,
) -> Scores:
    """DSIR: log p_target/p_raw of a text's hashed words and pairs of words (arXiv 2302.03169, section 3).

    The sum over the text's n-grams, as published; `per_ngram` gives the mean, which knows no length. The Gumbel noise that turns the paper's
    choice into sampling is left out. p_raw is fitted on `texts` themselves, as there.
    """
    buckets = [_buckets(text) for text in texts]
    target = _distribution(map(_buckets, holdout), smoothing)
    log_ratio = np.log(target) - np.log(_distribution(buckets, smoothing))
    totals = np.array([log_ratio[places].sum() for places in buckets])
    if not per_ngram:
        return totals
    return totals / np.array([max(len(places), 1) for places in buckets])


def _buckets(text: str) -> NDArray[np.int64]:
    """The bucket of each word and pair of words. CRC-32 does for the SHA-256 of data-selection: any even spread will do."""
    words = _WORD_OR_SIGNS.findall(text.lower())
    ngrams = [*words, *(f"{one} {other}" for one, other in pairwise(words))]
    return np.array([zlib.crc32(ngram.encode()) % NUM_BUCKETS for ngram in ngrams], dtype=np.int64)


def _distribution(documents: Iterable[NDArray[np.int64]], smoothing: float) -> Scores:
    counts = np.zeros(NUM_BUCKETS)
    for places in documents:
        np.add.at(counts, places, 1)
    return counts / counts.sum() + smoothing


# --- heuristics ---

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
"""The eight that Gopher counts."""
Share = Callable[[str], float]


def gopher(texts: Sequence[str], _holdout: Sequence[str], _seed: int) -> Scores:
    """Minus the number of rules broken, each by how far: 0 is within a rule's bounds, 1 or more is beyond by its whole width.

    The rules are those of Gopher (arXiv 2112.11446, tables A1 and section A1.1) that don't depend on a document's length, with its bounds.
    Among texts that break none, ties are left.
    """
    return np.array([-sum(_breach(rule(text), low, high) for rule, low, high in RULES) for text in texts])


def _breach(value: float, low: float, high: float) -> float:
    return max(low - value, value - high, 0.0) / (high - low)


def mean_word_length(text: str) -> float:
    """Characters per word."""
    words = _WORD.findall(text)
    return sum(map(len, words)) / max(len(words), 1)


def symbol_share(text: str) -> float:
    """`#` and `...` per word."""
    return len(re.findall(r"#|\.\.\.|…", text)) / max(len(_WORD.findall(text)), 1)


def alphabetic_share(text: str) -> float:
    """The share of words that hold a letter."""
    words = _WORD.findall(text)
    return sum(any(map(str.isalpha, word)) for word in words) / max(len(words), 1)


def num_stop_words(text: str) -> float:
    """How many of the eight stop words occur: Gopher asks for two."""
    return float(len(_STOP_WORDS & set(re.findall(r"\w+", text.lower()))))


def bullet_share(text: str) -> float:
    """The share of lines that begin with a bullet."""
    lines = text.splitlines() or [""]
    return sum(line.lstrip().startswith(("•", "-", "*")) for line in lines) / len(lines)


def ellipsis_share(text: str) -> float:
    """The share of lines that end with an ellipsis."""
    lines = text.splitlines() or [""]
    return sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)


def repeated_line_share(text: str) -> float:
    """The share of lines that were there before."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / max(len(lines), 1)


def top_ngram_share(text: str, *, n: int) -> float:
    """The share of characters that stand in the most frequent n-gram of words, if it occurs twice."""
    found = _ngrams(text, n)
    if not found:
        return 0.0
    ngram, times = max(found.items(), key=lambda item: (item[1], sum(map(len, item[0]))))
    return sum(map(len, ngram)) * times / _num_word_chars(text) if times > 1 else 0.0


def repeated_ngram_share(text: str, *, n: int) -> float:
    """The share of characters that stand in an n-gram of words that occurs more than once, each character counted once."""
    words = _WORD.findall(text)
    found = _ngrams(text, n)
    repeated = [False] * len(words)
    for start in range(len(words) - n + 1):
        if found[tuple(words[start : start + n])] > 1:
            repeated[start : start + n] = [True] * n
    return sum(len(word) for word, again in zip(words, repeated, strict=True) if again) / _num_word_chars(text)


def _ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = _WORD.findall(text)
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _num_word_chars(text: str) -> int:
    return max(sum(map(len, _WORD.findall(text))), 1)


RULES: Sequence[tuple[Share, float, float]] = (
    (mean_word_length, 3, 10),
    (symbol_share, 0, 0.1),
    (alphabetic_share, 0.8, 1),
    (num_stop_words, 2, len(_STOP_WORDS)),
    (bullet_share, 0, 0.9),
    (ellipsis_share, 0, 0.3),
    (repeated_line_share, 0, 0.3),
    *((partial(top_ngram_share, n=n), 0, share) for n, share in ((2, 0.20), (3, 0.18), (4, 0.16))),
    *(
        (partial(repeated_ngram_share, n=n), 0, share)
        for n, share in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    ),
)
"""A measure of a text, its lowest and its highest allowed value."""

BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "random": random_scores,
        "length": length,
        "dsir": importance,
        "dsir_per_ngram": partial(importance, smoothing=1 / NUM_BUCKETS, per_ngram=True),
        "gopher": gopher,
    }
)
"""Every baseline by its name. `dsir` is as published; `dsir_per_ngram` is steadier with a small holdout."""
