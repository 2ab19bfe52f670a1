"""The distilled scorer's mathematics: what it sees of a text, and the regression from there to the score. Pure: no store, no clock.

It sees hashed n-grams (words, pairs of words, strings of four bytes) and the text's shape (length, kinds of characters, repetition), and is linear in them: a score is a sum of
lookups. Everything is counted or summed document by document in a fixed order, so a prediction has the same bits whatever is predicted beside it. No zlib among
the measures of repetition: its versions differ in what they make of the same text, and so would the scores of two machines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
VERSION = 1
"""Of the features: goes up with every change of what is seen of a text, since a model only fits the features that it was fitted on."""
MAX_BYTES = 1 << 16
"""Of a longer text, only its beginning is looked at."""
SHAPE = (
    "log length", "mean word length", "share of letters", "share of digits", "share of capitals", "share of spaces", "share of punctuation", "share beyond ASCII",
    "distinct words among the first 200", "distinct triples of words", "distinct strings of 8 bytes", "distinct lines",
)  # fmt: skip
NUM_FOLDS = 5
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Of the ridge regression, to choose from."""
_VALIDATION = 4
"""One document in so many of a training part decides on the penalty."""
_WINSOR = (0.01, 0.99)
"""Quantiles that scores beyond are pulled in to: a few extreme ones would decide a least-squares fit."""
_STEPS = 64
"""Of Lanczos' iteration: more change nothing that can be seen."""
_BLOCKS = 3
_BITS = 17
"""Buckets of one block of n-grams are numbered by so many bits."""
_BUCKETS = _BLOCKS << _BITS
_BINS = 8
"""Each measure of shape also counts by which of so many equally frequent ranges it falls in: too much of it may be as bad as too little."""
_BATCH_DOCUMENTS, _BATCH_BYTES = 1 << 12, 1 << 22
"""Texts that are looked at together, so that memory stays flat. With _BLOCKS and _BITS, a document's number in it and a bucket fit in 32 bits."""
_COUNT_VALUES = np.concatenate([[0.0], 1.0 + np.log(np.arange(1, MAX_BYTES + 2))])
"""Value of a count before its block is brought to length 1."""

_BYTES = np.arange(256)
_DIGIT = (_BYTES >= 48) & (_BYTES <= 57)
_CAPITAL = (_BYTES >= 65) & (_BYTES <= 90)
_BEYOND = _BYTES >= 128
_LETTER = _CAPITAL | ((_BYTES >= 97) & (_BYTES <= 122)) | _BEYOND
_WORD = _LETTER | _DIGIT
_SPACE = np.isin(_BYTES, [9, 10, 11, 12, 13, 32])
_LOWER = np.where(_CAPITAL, _BYTES + 32, _BYTES).astype(np.uint8)
_ODD = np.uint64(0x9E3779B97F4A7C15)
_POWERS = np.cumprod(np.full(MAX_BYTES, 0x100000001B3, np.uint64), dtype=np.uint64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What is seen of some texts."""

    rows: npt.NDArray[np.int64]
    """Number of the text of each n-gram, rising."""
    buckets: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    shape: Floats
    """A row for each text, a column for each of SHAPE."""

    def __len__(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledModel:
    """A fitted scorer."""

    weights: Floats
    """One for each bucket."""
    shape_center: Floats
    shape_scale: Floats
    shape_edges: Floats
    """A row for each of SHAPE: where its ranges part."""
    shape_weights: Floats
    """A row for each of SHAPE: the weight of its value, then of its ranges."""
    intercept: float
    stderr: float
    """Standard error of a predicted score; see `fit`."""
    facts: dict[str, Any]
    """What the fit says of itself."""

    def predict(self, texts: Iterable[str]) -> Floats:
        """The score of each text. Its bits don't depend on the other texts."""
        parts = [self._predict(look_at(batch)) for batch in _batches(texts)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _predict(self, features: Features) -> Floats:
        # Sums in the order of the buckets, then of the measures: no matrix product, whose order of summation depends on the number of rows.
        terms = features.values * self.weights[features.buckets]
        score = np.bincount(features.rows, weights=terms, minlength=len(features)) + self.intercept
        values, ranges = _shape_columns(features.shape, self.shape_center, self.shape_scale, self.shape_edges)
        for k in range(len(SHAPE)):
            score += values[:, k] * self.shape_weights[k, 0]
            score += self.shape_weights[k, 1 + ranges[:, k]]
        return score

    def to_bytes(self) -> bytes:
        """The model as safetensors."""
        from safetensors.numpy import save

        tensors = {name: getattr(self, name) for name in _TENSORS} | {
            "scalars": np.array([self.intercept, self.stderr])
        }
        # One entry: safetensors writes several in no fixed order.
        return save(tensors, {"about": json.dumps({"facts": self.facts, "version": VERSION}, sort_keys=True)})

    @staticmethod
    def from_bytes(data: bytes) -> DistilledModel:
        """What `to_bytes` wrote."""
        from safetensors.numpy import load

        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        assert about["version"] == VERSION
        intercept, stderr = tensors.pop("scalars").tolist()
        return DistilledModel(**tensors, intercept=intercept, stderr=stderr, facts=about["facts"])


_TENSORS = ("weights", "shape_center", "shape_scale", "shape_edges", "shape_weights")


def features_of(texts: Iterable[str]) -> Features:
    """What is seen of all these texts; they are taken in a few at a time."""
    parts = [look_at(batch) for batch in _batches(texts)]
    starts = np.cumsum([0, *map(len, parts)])
    return Features(
        rows=np.concatenate([part.rows + start for part, start in zip(parts, starts, strict=False)]),
        buckets=np.concatenate([part.buckets for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        shape=np.concatenate([part.shape for part in parts]),
    )


def look_at(texts: Sequence[str]) -> Features:
    """What is seen of a few texts, _BATCH_DOCUMENTS at most."""
    data = [text[:MAX_BYTES].encode()[:MAX_BYTES] for text in texts]
    sizes = np.array([len(d) for d in data])
    # A zero byte ends each text, so that no string of bytes and no word goes on into the next one.
    buffer = np.frombuffer(b"".join(d + b"\0" for d in data), np.uint8)
    owner = np.repeat(np.arange(len(data), dtype=np.uint32), sizes + 1)
    lower = _LOWER[buffer]
    words = _find_words(lower, owner)
    strings = _strings_of_four(lower)
    whole = owner[3:] == owner[:-3]
    keys = [
        _keys(0, words.owner, words.hashes),
        _keys(1, words.owner[1:], _chain(words.hashes, 2))[words.owner[1:] == words.owner[:-1]],
        _keys(2, owner[:-3], strings.astype(np.uint64))[whole],
    ]
    rows, buckets, values = _weigh(np.concatenate(keys), num_texts=len(data))
    shape = _shape_of(texts, buffer, owner, sizes, words, strings)
    return Features(rows=rows, buckets=buckets, values=values, shape=shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    owner: npt.NDArray[np.uint32]
    """Number of the text that each word is in, rising."""
    hashes: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]


def _find_words(lower: npt.NDArray[np.uint8], owner: npt.NDArray[np.uint32]) -> _Words:
    """Runs of letters and digits, and their polynomial hash modulo 2^64."""
    inside = np.flatnonzero(_WORD[lower])
    first = np.ones(len(inside), bool)
    first[1:] = inside[1:] != inside[:-1] + 1
    starts = np.flatnonzero(first)
    lengths = np.diff(np.append(starts, len(inside)))
    place = np.arange(len(inside)) - np.repeat(starts, lengths)
    terms = (lower[inside].astype(np.uint64) + np.uint64(1)) * _POWERS[place]
    hashes = np.add.reduceat(terms, starts) if len(starts) else terms
    return _Words(owner=owner[inside[starts]], hashes=hashes, lengths=lengths)


def _strings_of_four(lower: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The four bytes from each place on, as one number."""
    if len(lower) < 4:
        return np.zeros(0, np.uint32)
    wide = lower.astype(np.uint32)
    return wide[:-3] | wide[1:-2] << np.uint32(8) | wide[2:-1] << np.uint32(16) | wide[3:] << np.uint32(24)


def _chain(hashes: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """One hash for every so many words in a row."""
    num = max(len(hashes) - length + 1, 0)
    found = hashes[:num]
    for k in range(1, length):
        found = (found ^ (found >> np.uint64(29))) * _ODD + hashes[k : k + num]
    return found


def _keys(block: int, owner: npt.NDArray[np.uint32], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Number of the text, of the block and of the bucket in one number."""
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _ODD
    bucket = (mixed >> np.uint64(64 - _BITS)).astype(np.uint32)
    return (owner << np.uint32(_BITS + 2)) | np.uint32(block << _BITS) | bucket


def _weigh(
    keys: npt.NDArray[np.uint32], *, num_texts: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Rows, buckets and values: counts, damped by the logarithm, each block of each text of length 1."""
    keys = np.sort(keys)
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else np.zeros(0, np.int64)
    values = _COUNT_VALUES[np.diff(np.append(starts, len(keys)))]
    keys = keys[starts].astype(np.int64)
    blocks = keys >> _BITS
    lengths = np.sqrt(np.bincount(blocks, weights=values * values, minlength=num_texts << 2))
    return keys >> (_BITS + 2), keys & ((4 << _BITS) - 1), (values / lengths[blocks]).astype(np.float32)


def _shape_of(
    texts: Sequence[str],
    buffer: npt.NDArray[np.uint8],
    owner: npt.NDArray[np.uint32],
    sizes: npt.NDArray[np.int64],
    words: _Words,
    strings: npt.NDArray[np.uint32],
) -> Floats:
    num_texts = len(texts)
    size = np.maximum(sizes, 1)
    punctuation = ~(_WORD | _SPACE)
    punctuation[0] = False  # ends a text
    shares = [
        np.bincount(owner[kind[buffer]], minlength=num_texts) / size
        for kind in (_LETTER, _DIGIT, _CAPITAL, _SPACE, punctuation, _BEYOND)
    ]
    num_words = np.bincount(words.owner, minlength=num_texts)
    word_bytes = np.bincount(words.owner, weights=words.lengths, minlength=num_texts)
    first_word = np.searchsorted(words.owner, np.arange(num_texts + 1))
    first_byte = np.append(0, np.cumsum(sizes + 1))
    triples = _chain(words.hashes, 3)
    long_strings = strings[:-4].astype(np.uint64) | strings[4:].astype(np.uint64) << np.uint64(32)
    repetition = np.ones((num_texts, 4))
    for n, text in enumerate(texts):
        begin, end = first_word[n], first_word[n + 1]
        lines = [line for line in text[:MAX_BYTES].splitlines() if line.strip()]
        repetition[n] = (
            _distinct(words.hashes[begin : min(end, begin + 200)]),
            _distinct(triples[begin : max(begin, end - 2)]),
            _distinct(long_strings[first_byte[n] : max(first_byte[n], first_byte[n + 1] - 8)]),
            len(set(lines)) / max(len(lines), 1),
        )
    length = np.array([math.log1p(len(text)) for text in texts])
    return np.column_stack([length, word_bytes / np.maximum(num_words, 1), *shares, repetition])


def _distinct(items: npt.NDArray[np.uint64]) -> float:
    """Share of the items that are the first of their kind."""
    if len(items) < 2:
        return 1.0
    items = np.sort(items)
    return (1 + int(np.count_nonzero(items[1:] != items[:-1]))) / len(items)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_bytes = 0
    for text in texts:
        batch.append(text)
        num_bytes += min(len(text), MAX_BYTES)
        if len(batch) == _BATCH_DOCUMENTS or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _shape_columns(shape: Floats, center: Floats, scale: Floats, edges: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Each measure's value, in standard deviations and cut off at four of them, and the number of its range."""
    values = np.clip((shape - center) / scale, -4.0, 4.0)
    ranges = [np.searchsorted(edges[k], shape[:, k], side="right") for k in range(shape.shape[1])]
    return values, np.column_stack(ranges)


def fit(
    features: Features,
    scores: Floats,
    stderrs: Floats,
    *,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> DistilledModel:
    """Fits a scorer and measures how well it orders documents that it hasn't seen.

    The measure is nested: each of NUM_FOLDS folds is predicted by a model whose penalty, too, was chosen without it, by the very procedure that makes the final model from all
    documents. The final one has seen a quarter more, so the measure is a little on the low side.

    The standard error of a predicted score is the root mean square of score less prediction over these folds. The scores' own noise is in it, so it is rather too large than
    too small for the distance to the true influence; it isn't taken off, since a noise that was overrated would make predictions look surer than they are.

    Args:
        features: of the documents.
        scores: measured, finite.
        stderrs: their standard errors.
        seed: of the folds.
        report: called with (models fitted, models in all).

    Returns:
        The model. Its facts: `rank_correlation`, Spearman's, mean over the folds, with its `spread` (standard deviation) and that of each of the `folds`; the `ceiling`, what the
        correlation would be if the true influence were predicted, as far as the standard errors tell (root of the reliability, 1 - mean stderr² / variance of the scores);
        `penalty`.
    """
    assert np.isfinite(scores).all()
    assert len(features) == len(scores) == len(stderrs) >= 2 * NUM_FOLDS
    noise = np.nan_to_num(stderrs) ** 2
    variance = float(np.var(scores))
    reliability = max(0.0, 1.0 - float(noise.mean()) / variance) if variance > 0 else 0.0
    # The standard errors are no weights: on a few folds of the holdout they are rough, and with them the order came out no better.
    center, scale = features.shape.mean(0), features.shape.std(0)
    scale[scale == 0] = 1.0
    edges = np.quantile(features.shape, np.arange(1, _BINS) / _BINS, axis=0).T.copy()
    problem = _Problem(_design(features, center, scale, edges), scores)

    rng = np.random.default_rng(seed)
    order = rng.permutation(len(scores))
    predicted = np.zeros(len(scores))
    correlations = []
    for k in range(NUM_FOLDS):
        report(k, NUM_FOLDS + 1)
        held_out = np.sort(order[k::NUM_FOLDS])
        solution, _ = problem.solve_best(np.setdiff1d(order, held_out), rng)
        predicted[held_out] = problem.predict(solution, held_out)
        correlations.append(rank_correlation(predicted[held_out], scores[held_out]))
    report(NUM_FOLDS, NUM_FOLDS + 1)
    (coefficients, intercept), penalty = problem.solve_best(np.arange(len(scores)), rng)
    report(NUM_FOLDS + 1, NUM_FOLDS + 1)
    return DistilledModel(
        weights=coefficients[:_BUCKETS],
        shape_center=center,
        shape_scale=scale,
        shape_edges=edges,
        shape_weights=coefficients[_BUCKETS:].reshape(len(SHAPE), 1 + _BINS),
        intercept=intercept,
        stderr=float(np.sqrt(np.mean((scores - predicted) ** 2))),
        facts={
            "rank_correlation": round(float(np.mean(correlations)), 4),
            "spread": round(float(np.std(correlations, ddof=1)), 4),
            "folds": [round(correlation, 4) for correlation in correlations],
            "ceiling": round(math.sqrt(reliability), 4),
            "penalty": penalty,
        },
    )


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, ties at their mean rank; 0 where either is constant."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    rank_a, rank_b = rankdata(a), rankdata(b)
    if np.ptp(rank_a) == 0 or np.ptp(rank_b) == 0:
        return 0.0
    return float(np.corrcoef(rank_a, rank_b)[0, 1])


Solution = tuple[Floats, float]
"""Coefficients and intercept."""


class _Problem:
    """Ridge regression on parts of the documents."""

    def __init__(self, design: Any, scores: Floats) -> None:
        self._design, self._scores = design, scores

    def solve_best(self, part: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Solution, float]:
        """The solution for a part, and its penalty: the one that predicts a random quarter of the part best from the rest of it."""
        order = rng.permutation(part)
        num = len(part) // _VALIDATION
        validation, rest = np.sort(order[:num]), np.sort(order[num:])
        truth = np.clip(self._scores[validation], *np.quantile(self._scores[rest], _WINSOR))
        solutions = self._solve(rest, PENALTIES)
        errors = [float(np.mean((self.predict(solution, validation) - truth) ** 2)) for solution in solutions]
        # Of equals, the strongest.
        best = PENALTIES[len(errors) - 1 - int(np.argmin(errors[::-1]))]
        return self._solve(part, [best])[0], best

    def predict(self, solution: Solution, part: npt.NDArray[np.int64]) -> Floats:
        """The scores of a part, as closely as a fit needs them."""
        coefficients, intercept = solution
        return np.asarray(self._design[part] @ coefficients.astype(np.float32), np.float64) + intercept

    def _solve(self, part: npt.NDArray[np.int64], penalties: Sequence[float]) -> list[Solution]:
        """Ridge regression with a free intercept, for every penalty at once.

        With A the centred rows: coefficients = Aᵀ (A Aᵀ + penalty)⁻¹ b. A few dozen Lanczos steps from b on make A Aᵀ a small tridiagonal matrix,
        which is solved for each penalty (the same numbers as conjugate gradients after so many steps).
        """
        rows = self._design[part]
        columns = rows.T
        scores = np.clip(self._scores[part], *np.quantile(self._scores[part], _WINSOR))
        center = float(scores.mean())
        middle = columns @ np.full(len(part), 1 / len(part), np.float32)

        def back(a: Floats) -> Any:
            narrow = a.astype(np.float32)
            return columns @ narrow - middle * narrow.sum()

        def there(coefficients: Any) -> Floats:
            return np.asarray(rows @ coefficients - middle @ coefficients, np.float64)

        basis, diagonal, beside, length = _lanczos(lambda a: there(back(a)), scores - center)
        small = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        first = np.zeros(len(diagonal))
        first[0] = length
        found = []
        for penalty in penalties:
            coefficients = back(basis.T @ np.linalg.solve(small + penalty * np.eye(len(small)), first))
            found.append((coefficients.astype(np.float64), center - float(middle @ coefficients)))
        return found


def _lanczos(matrix: Callable[[Floats], Floats], start: Floats) -> tuple[Floats, Floats, Floats, float]:
    """Orthonormal rows that span the Krylov space of a symmetric matrix, its diagonal and the one beside in that basis, and the start's length."""
    length = float(np.linalg.norm(start))
    basis = np.zeros((min(_STEPS, len(start)), len(start)))
    diagonal, beside = np.zeros(len(basis)), np.zeros(len(basis))
    if length == 0:
        return basis[:1], diagonal[:1], beside[:0], 0.0
    basis[0] = start / length
    for k in range(len(basis)):
        next_ = matrix(basis[k])
        diagonal[k] = basis[k] @ next_
        for _ in range(2):  # once leaves rounding errors that grow
            next_ -= basis[: k + 1].T @ (basis[: k + 1] @ next_)
        beside[k] = np.linalg.norm(next_)
        if k + 1 == len(basis) or beside[k] < 1e-6 * diagonal[0]:
            break
        basis[k + 1] = next_ / beside[k]
    return basis[: k + 1], diagonal[: k + 1], beside[:k], length


def _design(features: Features, center: Floats, scale: Floats, edges: Floats) -> Any:
    """The matrix of the regression: n-grams, then for each measure of shape its value and its ranges."""
    from scipy import sparse

    num = len(features)
    values, ranges = _shape_columns(features.shape, center, scale, edges)
    shape = np.zeros((num, len(SHAPE), 1 + _BINS), np.float32)
    shape[:, :, 0] = values
    np.put_along_axis(shape, 1 + ranges[:, :, None], 1.0, axis=2)
    starts = np.searchsorted(features.rows, np.arange(num + 1))
    grams = sparse.csr_array((features.values, features.buckets, starts), shape=(num, _BUCKETS))
    return sparse.csr_array(sparse.hstack([grams, sparse.csr_array(shape.reshape(num, -1))], format="csr"))
