"""A corpus with planted harm: real leads, some of them damaged in a known way, and the leads of a holdout.

The damage itself is done by synthetic.py (tools/) and, for model-made text, by rephrase.py. Here it is decided which lead
becomes what, so that nothing but the harm tells a harmed document from a clean one: parents are disjoint, and lengths follow
the clean documents'. Where they can't, `Harm` says so.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from manifests.errors import UserError
from tools import synthetic
from tools.bench.rephrase import read_rephrasings
from tools.realtext import MIN_LEAD_CHARS, clip, names_in, wikipedia_leads


class Harm(StrEnum):
    """What was done to a lead."""

    CLEAN = "clean"
    TOKEN_NOISE = "token_noise"
    """30 % of the characters are other ones."""
    DEGENERATE = "degenerate"
    """A good beginning (at most a third), then a few of its words on and on."""
    WRONG_LANGUAGE = "wrong_language"
    """A French or Spanish lead, whole."""
    SCRAMBLED = "scrambled"
    """All words of the lead in a random order."""
    BOILERPLATE = "boilerplate"
    """Phrases of web pages over and over, one real sentence among them."""
    CONTRADICTED = "contradicted"
    """Wrong numbers, and names out of another lead."""
    NEAR_DUPLICATE = "near_duplicate"
    """A clean document of the same corpus with three words edited."""
    MILD = "mild"
    """The lead with 40 % of its sentences left out, three words edited: hardly a harm."""
    MODEL_MADE = "model_made"
    """A small model's rephrasing: fluent, often false, sometimes nearly the lead (data/README.md). 60 to 120 tokens long: fewer extremes than clean."""


GROSS = frozenset({Harm.TOKEN_NOISE, Harm.DEGENERATE, Harm.WRONG_LANGUAGE})
"""What any score should see."""
STRETCH = {Harm.MILD: 1.7, Harm.BOILERPLATE: 1.1}
"""How much longer these harms' parents are, so that what is left has a clean document's length."""
NUM_EDITS = 3
"""Words edited in a near-duplicate, and in a mild document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rephrased:
    """A model's rephrasing of a lead."""

    text: str
    parent: int
    """The number of the lead it was made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """What a planted corpus is made from."""

    leads: Sequence[str]
    foreign: Sequence[str]
    """Leads in other languages."""
    rephrased: Sequence[Rephrased] = ()
    """Without any, a corpus has no model-made documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """One document of the corpus, and the truth about it."""

    text: str
    harm: Harm
    parent: int
    """The number of the lead it was made from; foreign leads are counted on from the last of `leads`."""


def wikipedia_texts() -> Texts:
    """The leads of English Wikipedia, those of the Spanish and the French one, and the committed rephrasings."""
    leads = wikipedia_leads()
    numbers = {lead.id: number for number, lead in enumerate(leads)}
    rephrased = [
        Rephrased(text=made.text, parent=numbers[made.parent])
        for made in read_rephrasings()
        if len(made.text) >= MIN_LEAD_CHARS
    ]
    foreign = [lead.text for language in ("es", "fr") for lead in wikipedia_leads(language)]
    return Texts(leads=[lead.text for lead in leads], foreign=foreign, rephrased=rephrased)


def planted_corpus(
    texts: Texts, *, num_clean: int, num_per_harm: int, num_holdout: int, seed: int
) -> tuple[list[Planted], list[str]]:
    """The documents to train on, in random order, and the leads of the holdout.

    No lead has two uses, save that near-duplicates copy clean documents. The leads behind rephrasings are never clean or holdout.
    """
    rng = random.Random(f"harms/{seed}")
    reserved = {rephrased.parent for rephrased in texts.rephrased}
    free = [number for number in range(len(texts.leads)) if number not in reserved]
    rng.shuffle(free)
    holdout, clean = free[:num_holdout], free[num_holdout : num_holdout + num_clean]
    rest = free[num_holdout + num_clean :]
    _check_supply(texts, num_rest=len(rest), num_clean=num_clean, num_per_harm=num_per_harm)
    corpus = [Planted(text=texts.leads[parent], harm=Harm.CLEAN, parent=parent) for parent in clean]

    pool = _Pool(texts.leads, rest)
    for harm, damage in _DAMAGES.items():
        for _ in range(num_per_harm):
            parent = pool.take(len(texts.leads[rng.choice(clean)]) * STRETCH.get(harm, 1))
            other = max((texts.leads[rng.choice(rest)] for _ in range(3)), key=lambda lead: len(names_in(lead)))
            corpus.append(Planted(text=damage(texts.leads[parent], other, rng), harm=harm, parent=parent))

    foreign = _Pool(texts.foreign, rng.sample(range(len(texts.foreign)), len(texts.foreign)))
    for _ in range(num_per_harm):
        place = foreign.take(len(texts.leads[rng.choice(clean)]))
        parent = len(texts.leads) + place
        corpus.append(Planted(text=texts.foreign[place], harm=Harm.WRONG_LANGUAGE, parent=parent))

    for parent in rng.sample(clean, num_per_harm):
        text = edit(texts.leads[parent], rng)
        corpus.append(Planted(text=text, harm=Harm.NEAR_DUPLICATE, parent=parent))
    for made in rng.sample(texts.rephrased, min(num_per_harm, len(texts.rephrased))):
        corpus.append(Planted(text=made.text, harm=Harm.MODEL_MADE, parent=made.parent))
    rng.shuffle(corpus)
    return corpus, [texts.leads[number] for number in holdout]


def _check_supply(texts: Texts, *, num_rest: int, num_clean: int, num_per_harm: int) -> None:
    needed = len(_DAMAGES) * num_per_harm
    if num_rest < needed or len(texts.foreign) < num_per_harm:
        raise UserError(
            f"{len(texts.leads)} leads leave {num_rest} for the harms, which need {needed}, and {len(texts.foreign)} "
            f"foreign ones for {num_per_harm} documents; ask for fewer documents"
        )
    if not num_per_harm <= num_clean:
        raise UserError(f"{num_per_harm} near-duplicates need as many clean documents, not {num_clean}")
    if texts.rephrased and len(texts.rephrased) < num_per_harm:
        raise UserError(f"{len(texts.rephrased)} rephrasings for {num_per_harm} documents; make more with rephrase.py")


class _Pool:
    """Unused texts, given out by their length."""

    def __init__(self, texts: Sequence[str], numbers: Sequence[int]) -> None:
        self._unused = sorted((len(texts[number]), place, number) for place, number in enumerate(numbers))

    def take(self, length: float) -> int:
        """The number of the unused text that is nearest in length."""
        after = bisect_left(self._unused, (length,))
        near = self._unused[max(after - 1, 0) : after + 1]
        best = min(near, key=lambda entry: abs(entry[0] - length))
        self._unused.remove(best)
        return best[-1]


# --- the damages: of a lead, with another lead at hand ---


def _scramble(lead: str, _: str, rng: random.Random) -> str:
    return synthetic.scramble(lead, rng)


def _add_noise(lead: str, _: str, rng: random.Random) -> str:
    return synthetic.add_noise(lead, rng)


def _degenerate(lead: str, _: str, rng: random.Random) -> str:
    return synthetic.degenerate(lead[: len(lead) // 3], rng)[: len(lead)]


def _boilerplate(lead: str, _: str, rng: random.Random) -> str:
    lines = synthetic.boilerplate(lead, rng)
    while len(lines) < len(lead):
        lines += "\n" + synthetic.boilerplate(lead, rng)
    return clip(lines, len(lead))


def _mild(lead: str, _: str, rng: random.Random) -> str:
    return edit(synthetic.drop_sentences(lead, rng), rng)


_DAMAGES: dict[Harm, Callable[[str, str, random.Random], str]] = {
    Harm.TOKEN_NOISE: _add_noise,
    Harm.DEGENERATE: _degenerate,
    Harm.SCRAMBLED: _scramble,
    Harm.BOILERPLATE: _boilerplate,
    Harm.CONTRADICTED: synthetic.contradict,
    Harm.MILD: _mild,
}


def edit(text: str, rng: random.Random) -> str:
    """Leave out a word, and twist NUM_EDITS - 1 others: two letters change places, or the word and the next.

    No word of ours comes in: an n-gram score would know the copies by it.
    """
    parts = re.split(r"(\s+)", text)
    places = range(2, len(parts), 2)
    for number, place in enumerate(rng.sample(places, min(NUM_EDITS, len(places)))):
        word = parts[place]
        uneven = [at for at in range(1, len(word) - 1) if word[at] != word[at + 1]]
        if number == 0 or not word:
            parts[place - 1 : place + 1] = ["", ""]
        elif uneven and rng.random() < 0.5:
            at = rng.choice(uneven)
            parts[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        else:
            parts[place], parts[place - 2] = parts[place - 2], word
    return "".join(parts)
