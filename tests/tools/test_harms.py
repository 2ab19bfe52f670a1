"""The planted corpus: its lengths, its parents, its determinism; each harm is what it promises."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from importlib.util import find_spec

import pytest

from manifests.errors import UserError
from tools.bench.harms import GROSS, Harm, Planted, Rephrased, Texts, planted_corpus, wikipedia_texts
from tools.realtext import MIN_LEAD_CHARS, WIKIPEDIA_PACKAGE

WORDS = [
    "river",
    "and",
    "city",
    "which",
    "many",
    "large",
    "such",
    "as",
    "the",
    "of",
    "known",
    "as",
    "stone",
    "first",
    "used",
    "bridge",
    "with",
    "people",
    "also",
    "during",
]
NAMES = ["Orla", "Sarn", "Berg", "Lublin", "Kowalski", "Bergen", "Norway", "Poland"]
NUM_CLEAN, NUM_PER_HARM, NUM_HOLDOUT = 120, 20, 15


def _sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(8, 14))
    return f"{rng.choice(NAMES)} is {' '.join(words)} {rng.choice(NAMES)} {rng.randint(1500, 1999)}."


def _texts(num_leads: int = 400) -> Texts:
    rng = random.Random(7)
    leads = [" ".join(_sentence(rng) for _ in range(rng.randint(2, 10))) for _ in range(num_leads)]
    foreign = [f"Le numéro {n}. " + "Où est la rivière? " * rng.randint(5, 40) for n in range(200)]
    rephrased = [Rephrased(text=f"Q: What is lead {n}? A: A lead.", parent=n * 3) for n in range(30)]
    return Texts(leads=leads, foreign=foreign, rephrased=rephrased)


def _corpus(texts: Texts, seed: int = 0) -> tuple[list[Planted], list[str]]:
    return planted_corpus(texts, num_clean=NUM_CLEAN, num_per_harm=NUM_PER_HARM, num_holdout=NUM_HOLDOUT, seed=seed)


def test_corpus_has_the_asked_number_of_each_harm() -> None:
    corpus, holdout = _corpus(_texts())
    expected = {harm: NUM_CLEAN if harm is Harm.CLEAN else NUM_PER_HARM for harm in Harm}
    assert Counter(planted.harm for planted in corpus) == expected
    assert len(holdout) == NUM_HOLDOUT
    assert expected.keys() > GROSS


def test_same_seed_gives_the_same_corpus_and_another_seed_another() -> None:
    assert _corpus(_texts()) == _corpus(_texts())
    assert _corpus(_texts()) != _corpus(_texts(), seed=1)


def test_no_lead_has_two_uses_save_near_duplicates_of_clean_ones() -> None:
    texts = _texts()
    corpus, holdout = _corpus(texts)
    clean = {planted.parent for planted in corpus if planted.harm is Harm.CLEAN}
    copied = [planted.parent for planted in corpus if planted.harm is Harm.NEAR_DUPLICATE]
    once = [planted.parent for planted in corpus if planted.harm is not Harm.NEAR_DUPLICATE]
    assert len(once) == len(set(once))
    assert set(copied) < clean
    kept_out = {texts.leads.index(lead) for lead in holdout}
    assert not kept_out & set(once)
    assert not {made.parent for made in texts.rephrased} & (kept_out | clean)


def test_length_does_not_give_a_harm_away() -> None:
    corpus, _ = _corpus(_texts())
    clean = statistics.mean(len(planted.text) for planted in corpus if planted.harm is Harm.CLEAN)
    for harm in set(Harm) - {Harm.MODEL_MADE}:
        mean = statistics.mean(len(planted.text) for planted in corpus if planted.harm is harm)
        assert mean == pytest.approx(clean, rel=0.25), harm


def test_each_harm_is_what_it_promises() -> None:
    texts = _texts()
    for planted in _corpus(texts)[0]:
        if planted.harm in (Harm.WRONG_LANGUAGE, Harm.MODEL_MADE):
            continue
        lead = texts.leads[planted.parent]
        assert (planted.text == lead) is (planted.harm is Harm.CLEAN)
        match planted.harm:
            case Harm.SCRAMBLED:
                assert sorted(planted.text.split()) == sorted(lead.split())
            case Harm.TOKEN_NOISE:
                changed = sum(one != other for one, other in zip(planted.text, lead, strict=True))
                assert changed == round(len(lead) * 0.3)
            case Harm.DEGENERATE:
                assert planted.text[:20] == lead[:20]
                assert planted.text[-12:] in planted.text[:-12]
            case Harm.NEAR_DUPLICATE:
                kept = Counter(lead.split()) & Counter(planted.text.split())
                assert kept.total() >= len(lead.split()) - 6
            case _:
                pass


def test_foreign_documents_are_whole_foreign_leads() -> None:
    texts = _texts()
    foreign = [planted for planted in _corpus(texts)[0] if planted.harm is Harm.WRONG_LANGUAGE]
    assert [planted.text for planted in foreign] == [texts.foreign[p.parent - len(texts.leads)] for p in foreign]


def test_without_rephrasings_there_are_no_model_made_documents() -> None:
    texts = _texts()
    corpus, _ = _corpus(Texts(leads=texts.leads, foreign=texts.foreign))
    assert Harm.MODEL_MADE not in {planted.harm for planted in corpus}


@pytest.mark.parametrize(
    ("num_clean", "num_per_harm", "complaint"),
    [(390, 20, "ask for fewer"), (10, 20, "need as many clean"), (50, 31, "31 documents; make more")],
)
def test_asking_for_more_than_there_is_names_what_is_short(num_clean: int, num_per_harm: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        planted_corpus(_texts(), num_clean=num_clean, num_per_harm=num_per_harm, num_holdout=5, seed=0)


@pytest.mark.skipif(
    find_spec(WIKIPEDIA_PACKAGE.replace("-", "_")) is None, reason="its carrier package isn't installed"
)
def test_wikipedia_carries_a_corpus_of_hundreds_of_each_harm() -> None:
    texts = wikipedia_texts()
    assert min(map(len, [*texts.leads, *texts.foreign])) >= MIN_LEAD_CHARS
    corpus, _ = planted_corpus(texts, num_clean=1000, num_per_harm=300, num_holdout=300, seed=0)
    lengths = {harm: statistics.median(len(one.text) for one in corpus if one.harm is harm) for harm in Harm}
    for harm, median in lengths.items():
        assert median == pytest.approx(lengths[Harm.CLEAN], rel=0.2), harm
