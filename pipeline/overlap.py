"""Documents that repeat the holdout. Their influence on it is spurious, and training on them would spoil it: they get no score."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
NGRAM = 16
"""Tokens that must agree in a row; about the 13 words of GPT-3's decontamination (arXiv 2005.14165, appendix C)."""
SHARE = 0.5
"""Share of a document's n-grams in the holdout from which it counts as a repetition."""
_BASE = np.uint64(0x9E3779B97F4A7C15)


def ngram_hashes(tokens: Tokens, *, length: int = NGRAM) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of every run of `length` tokens; of a shorter document, of the whole."""
    length = min(length, len(tokens))
    if not length:
        return np.empty(0, np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    powers = np.cumprod(np.full(length, _BASE), dtype=np.uint64)
    hashes = np.lib.stride_tricks.sliding_window_view(values, length) @ powers
    # The polynomial's low bits mix badly.
    return hashes ^ (hashes >> np.uint64(29)) * _BASE


def holdout_hashes(documents: Iterable[Tokens]) -> npt.NDArray[np.uint64]:
    """The n-grams of the holdout, sorted, each once."""
    hashes = [ngram_hashes(tokens) for tokens in documents]
    return np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)


def repeats_holdout(tokens: Tokens, holdout: npt.NDArray[np.uint64]) -> bool:
    """Whether at least SHARE of a document's n-grams stand in the holdout."""
    hashes = ngram_hashes(tokens)
    if not len(hashes) or not len(holdout):
        return False
    places = np.minimum(np.searchsorted(holdout, hashes), len(holdout) - 1)
    return bool((holdout[places] == hashes).mean() >= SHARE)


def ngrams_path(job: str) -> str:
    """Where the holdout's n-grams lie in the store."""
    return f"scoring/{job}/holdout-ngrams.safetensors"
