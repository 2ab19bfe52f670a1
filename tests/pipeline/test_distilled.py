"""The distilled scorer's mathematics: what it sees, that its measure is honest, that a prediction has the same bits in any company."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.distilled import MAX_BYTES, SHAPE, DistilledModel, features_of, fit, look_at, rank_correlation

WORDS = ["tide", "reef", "coral", "lagoon", "island", "current", "sand", "shell", "wave", "palm", "anchor", "harbour"]


def noisy_texts(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Texts with a share of words replaced by noise, and that share."""
    rng = np.random.default_rng(seed)
    shares = rng.uniform(0, 0.6, count)
    texts = []
    for share in shares:
        words = rng.choice(WORDS, rng.integers(20, 60)).tolist()
        for place in np.flatnonzero(rng.random(len(words)) < share):
            words[place] = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz0123456789#%"), 6))
        texts.append(" ".join(words))
    return texts, shares


@pytest.fixture(scope="module")
def fitted() -> tuple[DistilledModel, float]:
    """A scorer of texts whose score falls with their share of noise, and the noise of the scores."""
    texts, shares = noisy_texts(400, seed=0)
    noise = 0.05
    scores = -shares + np.random.default_rng(1).normal(0, noise, len(shares))
    return fit(features_of(texts), scores, np.full(len(scores), noise), seed=0), noise


def test_what_it_says_of_itself_holds_for_documents_that_come_later(fitted: tuple[DistilledModel, float]) -> None:
    model, noise = fitted
    texts, shares = noisy_texts(400, seed=2)
    scores = -shares + np.random.default_rng(3).normal(0, noise, len(shares))
    predicted = model.predict(texts)
    said = model.facts["rank_correlation"]
    assert said > 0.8
    assert abs(rank_correlation(predicted, scores) - said) < 0.08
    assert np.sqrt(np.mean((predicted - scores) ** 2)) == pytest.approx(model.stderr, rel=0.25)
    assert len(model.facts["folds"]) == 5
    assert np.mean(model.facts["folds"]) == pytest.approx(said, abs=1e-3)
    variance = np.var(-shares) + noise**2
    assert model.facts["ceiling"] == pytest.approx(np.sqrt(1 - noise**2 / variance), abs=0.02)
    assert said <= model.facts["ceiling"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scores_that_have_nothing_to_do_with_the_text_are_not_predicted(seed: int) -> None:
    texts, shares = noisy_texts(300, seed=seed)
    shuffled = np.random.default_rng(seed + 10).permutation(-shares)
    model = fit(features_of(texts), shuffled, np.full(300, 0.05), seed=seed)
    assert abs(model.facts["rank_correlation"]) < 0.2
    assert model.stderr == pytest.approx(np.std(shuffled), rel=0.15)


def test_scores_that_are_all_alike_are_predicted_as_that() -> None:
    texts, _ = noisy_texts(60, seed=0)
    model = fit(features_of(texts), np.full(60, 0.25), np.full(60, 0.1), seed=0)
    assert model.facts["rank_correlation"] == 0
    assert model.predict(texts[:3]) == pytest.approx(0.25)


def test_few_extreme_scores_do_not_decide() -> None:
    texts, shares = noisy_texts(400, seed=0)
    scores = -shares
    scores[:3] = 1e6
    model = fit(features_of(texts), scores, np.full(400, 0.05), seed=0)
    assert model.facts["rank_correlation"] > 0.8


def test_same_seed_same_scorer_and_the_unit_of_the_scores_does_not_matter() -> None:
    texts, shares = noisy_texts(100, seed=0)
    features, stderrs = features_of(texts), np.full(100, 0.1)
    model = fit(features, -shares, stderrs, seed=0)
    assert model.to_bytes() == fit(features, -shares, stderrs, seed=0).to_bytes()
    small = fit(features, -shares * 1e-9, stderrs * 1e-9, seed=0)
    assert small.predict(texts) * 1e9 == pytest.approx(model.predict(texts), abs=1e-3)
    assert small.facts["folds"] == pytest.approx(model.facts["folds"], abs=0.01)


def test_scorer_comes_back_from_its_bytes_whole(fitted: tuple[DistilledModel, float]) -> None:
    model, _ = fitted
    back = DistilledModel.from_bytes(model.to_bytes())
    for field in fields(DistilledModel):
        assert np.array_equal(getattr(back, field.name), getattr(model, field.name)), field.name


STRANGE = ["", "a", "ab", "  \n\t ", "\0\0\0\0\0", "é" * 50, "鸟在树上唱歌", "x" * (MAX_BYTES + 10), "É" * MAX_BYTES, "one\ntwo\none\ntwo\n", "!?" * 40]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.one_of(st.sampled_from(STRANGE), st.text(max_size=80)), min_size=1, max_size=12), data=st.data()
)
def test_prediction_has_the_same_bits_in_any_company(
    fitted: tuple[DistilledModel, float], texts: list[str], data: st.DataObject
) -> None:
    model, _ = fitted
    together = model.predict(texts)
    assert np.isfinite(together).all()
    cut = data.draw(st.integers(0, len(texts)))
    apart = np.concatenate([model.predict(texts[:cut]), model.predict(texts[cut:])])
    assert together.tobytes() == apart.tobytes()
    alone = np.concatenate([model.predict([text]) for text in texts])
    assert together.tobytes() == alone.tobytes()


def test_many_texts_are_looked_at_a_few_at_a_time_with_the_same_bits(
    fitted: tuple[DistilledModel, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = fitted
    texts, _ = noisy_texts(50, seed=4)
    whole, seen = model.predict(texts), features_of(texts)
    monkeypatch.setattr("pipeline.distilled._BATCH_BYTES", 700)
    assert model.predict(texts).tobytes() == whole.tobytes()
    again = features_of(texts)
    for field in fields(again):
        assert np.array_equal(getattr(again, field.name), getattr(seen, field.name))


def test_ngrams_are_those_of_the_text_whatever_the_case_and_never_of_two_texts() -> None:
    def buckets(*texts: str) -> list[set[int]]:
        features = look_at(texts)
        return [set(features.buckets[features.rows == n].tolist()) for n in range(len(texts))]

    one, other, both = buckets("the reef", "THE reef", "the reef the reef")
    assert one == other
    assert one < both  # and `reef the`, over which strings of bytes go too
    assert buckets("the reef", "palm")[1] == buckets("palm")[0]
    # Two words, one pair of them, and six strings of four bytes, the one that ends the text among them.
    assert len(one) == 2 + 1 + 6


def test_blocks_of_ngrams_weigh_the_same_in_long_and_short_texts() -> None:
    features = look_at(["tide reef", " ".join(WORDS * 50)])
    for n in range(2):
        assert np.sum(features.values[features.rows == n] ** 2) == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "measure", "value"),
    [
        ("abcd", "share of letters", 1.0),
        ("ab12", "share of digits", 0.5),
        ("AB c", "share of capitals", 0.5),
        ("a b\n", "share of spaces", 0.5),
        ("a,.b", "share of punctuation", 0.5),
        ("éa", "share beyond ASCII", 2 / 3),
        ("ab cdef", "mean word length", 3.0),
        ("a b a b", "distinct words among the first 200", 0.5),
        ("a b c a b c", "distinct triples of words", 0.75),
        ("a\nb\na\n\n", "distinct lines", 2 / 3),
        ("abcdefgh" * 2, "distinct strings of 8 bytes", 8 / 9),
        ("x" * 99, "log length", np.log(100)),
    ],
)
def test_shape_of_a_text_is_worked_out_by_hand(text: str, measure: str, value: float) -> None:
    assert look_at(["other", text]).shape[1, SHAPE.index(measure)] == pytest.approx(value)


def test_rank_correlation_sees_order_only() -> None:
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([0.0, 100, 101])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert rank_correlation(np.array([1.0, 1, 1]), np.array([3.0, 2, 1])) == 0
