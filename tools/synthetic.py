"""Synthetic text in FinePhrase's shape, made from real documents by rules, with its quality planted.

Four kinds (faq, math, table, tutorial), each a pure function of a text and a random generator, and seven
qualities. The truth stands in `planted_quality`, which no scorer may read. As in FinePhrase, `text` is the
ORIGINAL document and the synthetic text is `rollout_results[0].text`. Where originals come from, and how they
are read: realtext.py.
"""

from __future__ import annotations

import argparse
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import AtollError, UserError
from tools.realtext import (
    COUNT,
    SMALL_NUMBERS,
    YEAR,
    clip,
    items_in,
    names_in,
    read_passage,
    split_sentences,
    write_parquet,
)


class Quality(StrEnum):
    """What was done to a text, from the most helpful to the most harmful."""

    FAITHFUL = "faithful"
    MILD = "mild"
    CONTRADICTED = "contradicted"
    BOILERPLATE = "boilerplate"
    SCRAMBLED = "scrambled"
    NOISY = "noisy"
    DEGENERATE = "degenerate"


SHARES = (0.40, 0.15, 0.10, 0.10, 0.10, 0.075, 0.075)
MIXTURE: Mapping[Quality, float] = MappingProxyType(dict(zip(Quality, SHARES, strict=True)))
"""The share of each quality in each kind."""
MIN_CHARS, MAX_CHARS = 150, 2500
MIN_PARENT_CHARS = 120
NOISE_SHARE = 0.3

_USAGE = pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")])
_ROLLOUT = pa.struct([("text", pa.string()), ("finish_reason", pa.string()), ("usage", _USAGE)])
_STRINGS = ("id", "text", "dump", "url", "date", "file_path", "language")
SCHEMA = pa.schema(
    [pa.field(name, pa.string()) for name in _STRINGS]
    + [pa.field(name, type_()) for name, type_ in (("language_score", pa.float64), ("token_count", pa.int64))]
    + [pa.field(name, type_()) for name, type_ in (("score", pa.float64), ("int_score", pa.int64))]
    + [pa.field("rollout_results", pa.list_(_ROLLOUT)), pa.field("planted_quality", pa.string())]
)

# --- the four kinds ---

_CUES = (
    (r"\b(located|situated|lies|borders?|coast)\b", "Where {be} {s} found?|What {be} the location of {s}?"),
    (
        r"\b(includ\w+|such as|consists?|contains?)\b",
        "What belongs to {s}?|Which examples help to explain {s}?",
    ),
    (r"\b(known|famous|noted) (for|as)\b", "What {be} {s} known for?|How {be} {s} known?"),
    (r"\b(uses?|used)\b", "What {be} {s} used for?|What should one know about the use of {s}?"),
    (
        r"\b(because|due to|caused?|led to)\b",
        "Which causes and effects belong to {s}?|Why does it matter to {s}?",
    ),
    (
        r"\b(founded|invented|originat\w+|born)\b",
        "How did it begin with {s}?|Where does the story of {s} start?",
    ),
)
_PERSON = re.compile(
    r"\b(?:was|is) (?:an?|the) [^.]{0,80}\b(?:writer|poet|king|queen|emperor|ruler|painter|composer|"
    r"philosopher|politician|singer|actor|actress|author|general|mathematician|musician|"
    r"physician|historian|leader|"
    r"theologian|engineer|inventor|explorer|footballer|president|artist|chemist|physicist|novelist|\w+ologist)\b"
)
_ABOUT = {
    "Year": "What does {item} mean for {s}?|What is said about {item}?|Why is {item} a date to remember?",
    "Figure": "Which number belongs to {s}?|What has the figure of {item} to do with {s}?",
    "Name": "How {be} {s} connected with {item}?|What part does {item} play?|Why is {item} mentioned?",
}
_MORE = "What else is worth knowing about {s}?|What more can be said about {s}?|Is there more to {s}?"
_FAQ_FORMS = ("**Q: {}**\nA: {}", "### {}\n{}", "Q: {}\nA: {}", "**{}**\n{}")
_FAQ_TITLES = ("# FAQ: {}", "## Frequently asked questions about {}", "Questions and answers: {}")
_TABLE_TITLES = ("Overview: {}", "At a glance: {}", "Key facts on {}")
_TABLE_HEADS = (("Item", "Type", "Detail"), ("Entry", "Kind", "What is said"), ("Aspect", "Information"))
_SEE_DEFINITION = "named in the definition"
_TABLE_QUESTIONS = (
    "What does the table say about {}?",
    "Which detail is given for {}?",
    "What is noted on {}?",
)
_TUTORIAL_TITLES = ("# Understanding {}, step by step", "# A short guide to {}", "# How to explain {}")
_GOALS = ("At the end you can say what {s} {be} in your own words.", "We take {s} one idea at a time.")
_AIMS = ("Place {} in the picture", "Note {}", "Connect it with {}")
_PLAIN_AIMS = ("Look closer", "Add a detail", "Read on")
_RECAPS = ("Recap: ", "To check yourself, explain this aloud: ", "In one line: ")
_PROBLEM_TITLES = ("**Problem {}.** ", "### Problem {}\n", "Exercise {}: ")
_SOLUTIONS = ("**Solution:**", "Solution, step by step:", "Let us work it out.")
_PERIODS = ((10, "decades"), (25, "generations of 25 years"), (4, "Olympic cycles of 4 years"))


def faq(text: str, rng: random.Random) -> str:
    """Questions that the parent's sentences answer, in their order."""
    subject, be, sentences = read_passage(text)
    person = subject[0].isupper() and _PERSON.search(sentences[0])
    form = rng.choice(_FAQ_FORMS)
    parts, asked = [rng.choice(_FAQ_TITLES).format(subject)], set()
    for place, sentence in enumerate(sentences):
        fitting = [questions for cue, questions in _CUES if re.search(cue, sentence)]
        for item, type_ in items_in(sentence):
            fitting += [_ABOUT[type_].replace("{item}", item)] if item not in subject else []
        questions = "|".join(fitting or [_MORE]).replace("{be}", be).replace("{s}", subject).split("|")
        fresh = [question for question in questions if question not in asked]
        if place and not fresh:
            parts[-1] += " " + sentence
        else:
            question = rng.choice(fresh) if place else f"{'Who' if person else 'What'} {be} {subject}?"
            asked.add(question)
            parts.append(form.format(question, _without_pronoun(sentence, subject, be)))
    return "\n\n".join(parts)


def table(text: str, rng: random.Random) -> str:
    """A Markdown table of what the sentences date, count and name, and one question about it."""
    subject, _, sentences = read_passage(text.replace("|", "/"))
    rows = [(subject, "Definition", sentences[0])]
    for sentence in sentences:
        said: dict[tuple[str, str], list[str]] = {}
        for item, type_ in items_in(sentence):
            if item not in subject:
                said.setdefault((type_, _clause_with(sentence, item)), []).append(item)
        for (type_, clause), items in said.items():
            detail = _SEE_DEFINITION if clause.strip(".") == sentences[0].strip(".") else clause
            rows.append((", ".join(items), type_, detail))
        if not said and sentence != sentences[0]:
            rows.append((f"Note {len(rows)}", "Statement", sentence))
    item, _, detail = rng.choice(rows)
    head = rng.choice(_TABLE_HEADS)
    cells = rows if len(head) == 3 else [(f"{type_}: {item}", detail) for item, type_, detail in rows]
    lines = ["| " + " | ".join(cell) + " |" for cell in (head, ("---",) * len(head), *cells)]
    title = "**" + rng.choice(_TABLE_TITLES).format(subject) + "**"
    question = rng.choice(_TABLE_QUESTIONS).format(item)
    answer = sentences[0] if detail == _SEE_DEFINITION else detail
    return "\n".join([title, "", *lines, "", f"Question: {question}", f"Answer: {answer}"])


def tutorial(text: str, rng: random.Random) -> str:
    """The parent's sentences as steps of an explanation, each under a heading of what it is for."""
    subject, be, sentences = read_passage(text)
    title, goal = rng.choice(_TUTORIAL_TITLES).format(subject), rng.choice(_GOALS).format(s=subject, be=be)
    parts, mark, size = [title, goal], rng.choice(("## ", "")), rng.choice((1, 2))
    for step, start in enumerate(range(0, len(sentences), size), 1):
        chunk = " ".join(sentences[start : start + size])
        items = [item for item, _ in items_in(chunk) if item not in subject]
        aim = rng.choice(_AIMS).format(rng.choice(items)) if items else rng.choice(_PLAIN_AIMS)
        parts.append(f"{mark}Step {step}: {aim if start else 'Start with what it is about'}\n{chunk}")
    return "\n\n".join([*parts, rng.choice(_RECAPS) + _clause_with(sentences[0], subject)])


def math(text: str, rng: random.Random) -> str:
    """One or two word problems on the text's years and counts, solved step by step."""
    sentences = read_passage(text).sentences
    years = [(int(year), sentence) for sentence in sentences for year in YEAR.findall(sentence)]
    problems = [(sentence, _jubilee(year, rng)) for year, sentence in years]
    for (one, first), (other, second) in pairwise(years):
        if one != other:
            context = " ".join(dict.fromkeys((first, second)))
            problems.append((context, _span(min(one, other), max(one, other), rng)))
    for sentence in sentences:
        for digits, unit in COUNT.findall(sentence):
            count = SMALL_NUMBERS.index(digits) if digits in SMALL_NUMBERS else int(digits.replace(",", ""))
            pose = rng.choice((_times, _share)) if count >= 20 else _times
            problems.append((sentence, pose(count, unit, rng)))
    quoted = " ".join(sentences[: rng.randint(2, 4)])
    chosen = rng.sample(problems, min(2, len(problems))) or [(quoted, _copying(len(quoted.split()), rng))]
    titled, solved = rng.choice(_PROBLEM_TITLES), rng.choice(_SOLUTIONS)
    parts = [] if sentences[0] in chosen[0][0] else [sentences[0]]
    for number, (context, (question, equations, answer)) in enumerate(chosen, 1):
        steps = [f"Step {place}: {equation}" for place, equation in enumerate(equations, 1)]
        posed = titled.format(number) + f"{context} {question}"
        parts.append("\n".join([posed, "", solved, *steps, f"Answer: {answer}"]))
    return "\n\n".join(parts)


Problem = tuple[str, list[str], str]
"""A question, the equations that solve it, and the answer in words."""


def _jubilee(year: int, rng: random.Random) -> Problem:
    every, times = rng.choice((20, 25, 40, 50)), rng.choice((2, 3, 4))
    later, word = every * times, ("second", "third", "fourth")[times - 2]
    question = f"If a jubilee is kept every {every} years from {year} on, in which year is the {word} one?"
    equations = [f"{every} × {times} = {later}", f"{year} + {later} = {year + later}"]
    return question, equations, f"in {year + later}."


def _span(first: int, second: int, rng: random.Random) -> Problem:
    length, name = rng.choice(_PERIODS)
    years, (whole, rest) = second - first, divmod(second - first, length)
    question = f"How many years lie between {first} and {second}, and how many full {name} is that?"
    equations = [f"{second} - {first} = {years}", f"{years} ÷ {length} = {whole} remainder {rest}"]
    return question, equations, f"{years} years: {whole} full {name}, and {rest} years over."


def _times(count: int, unit: str, rng: random.Random) -> Problem:
    times = rng.randint(3, 9)
    all_, more = count * times, count * (times - 1)
    question = f"How many are {times} times as many as these {count:,} {unit}, and how many more is that?"
    equations = [f"{count:,} × {times} = {all_:,}", f"{all_:,} - {count:,} = {more:,}"]
    return question, equations, f"{all_:,} {unit}, which is {more:,} more."


def _share(count: int, unit: str, rng: random.Random) -> Problem:
    group = rng.randint(2, 12)
    whole, rest = divmod(count, group)
    question = f"The number {count:,} ({unit}) is shared out on {group} equal lists. How much is on each?"
    equations = [
        f"{count:,} ÷ {group} = {whole:,} remainder {rest}",
        f"{whole:,} × {group} = {count - rest:,}",
    ]
    return question, equations, f"{whole:,} on each list, {count - rest:,} in all, and {rest} left over."


def _copying(words: int, rng: random.Random) -> Problem:
    each = rng.randint(2, 5)
    minutes, seconds = divmod(words * each, 60)
    question = f"A learner copies these {words} words, {each} seconds for each. How long does it take?"
    total = words * each
    equations = [f"{words} × {each} = {total}", f"{total} ÷ 60 = {minutes} remainder {seconds}"]
    return question, equations, f"{minutes} minutes and {seconds} seconds."


def _without_pronoun(sentence: str, subject: str, be: str) -> str:
    """An answer should stand alone: `It is the capital` becomes `Timbuktu is the capital`."""
    if subject == "this topic" or re.match(r"It (?:is|was|has been|can be) \w+ed\b", sentence):
        return sentence
    pronouns = "They" if be in ("are", "were") else "It|He|She"
    return re.sub(rf"^(?:{pronouns})(?= [a-z])", lambda _: subject[0].upper() + subject[1:], sentence)


def _clause_with(sentence: str, item: str) -> str:
    """The part of the sentence that speaks of `item`, where it is long enough to say something."""
    parts = re.split(r"[;:]\s|,\s(?=\w+ing\b|and\b|but\b|which\b|who\b)", sentence)
    return next((part.strip(" .") for part in parts if item in part and len(part) > 40), sentence)


Render = Callable[[str, random.Random], str]
KINDS: Mapping[str, Render] = {"faq": faq, "math": math, "table": table, "tutorial": tutorial}

# --- the qualities ---

_BEFORE = ("Welcome back, readers!", "Sure! Here is what you asked for.", "Thank you for visiting our page.")
_AFTER = (
    "I hope this helps!",
    "Share this with a friend who may like it.",
    "Subscribe for more articles like this.",
)
_BOILERPLATE = (
    "Looking for the best information about {}? You have come to the right place! Click here to learn more.",
    "All rights reserved. No part of this page about {} may be reproduced without prior written permission.",
    "By continuing to use this site you agree to our Terms of Service, Privacy Policy and Cookie Policy.",
    "We use cookies to give you the best {} experience. Accept all cookies | Manage preferences | Reject",
    "Top 10 {} tips | best {} 2024 | cheap {} near me | {} reviews | buy {} online",
    "Sign up for our free newsletter and never miss an update on {}! Unsubscribe at any time.",
    "Disclaimer: the content of this website is provided as is, without warranty of any kind.",
    "Home > Blog > Articles > {} | Share | Tweet | Pin | Print | Email this page",
    "This page may contain affiliate links. We may earn a commission at no extra cost to you.",
    "Read more: everything you need to know about {} in our ultimate guide to {}.",
)
_NOISE = string.ascii_letters + string.digits + string.punctuation + " "
_NUMBER = re.compile(
    rf"(?<![\w.])(?:(\d{{1,3}}(?:,\d{{3}})+|\d+)(\.\d+)?(st|nd|rd|th|s)?|({'|'.join(SMALL_NUMBERS[2:])}))\b"
)


def synthesize(kind: str, quality: Quality, text: str, other: str, rng: random.Random) -> str:
    """A rephrasing of `text` with the given quality; `other` is the document that wrong names come from."""
    text = clip(text, MAX_CHARS * 2 // 3)
    if quality is Quality.CONTRADICTED:
        text = contradict(text, other, rng)
    elif quality is Quality.MILD:
        text = drop_sentences(text, rng)
    made = boilerplate(text, rng) if quality is Quality.BOILERPLATE else KINDS[kind](text, rng)
    if quality is Quality.MILD:
        made = f"{rng.choice(_BEFORE)}\n\n{made}\n\n{rng.choice(_AFTER)}"
    while len(made) < MIN_CHARS:
        made += f"\n\nAs the source says: {text}"
    made = clip(made, MAX_CHARS)
    if quality is Quality.SCRAMBLED:
        return scramble(made, rng)
    if quality is Quality.NOISY:
        return add_noise(made, rng)
    return degenerate(made, rng) if quality is Quality.DEGENERATE else made


def drop_sentences(text: str, rng: random.Random) -> str:
    """The first sentence, and about 60 % of the others."""
    first, *others = split_sentences(text)
    kept = sorted(rng.sample(range(len(others)), len(others) * 6 // 10))
    return " ".join([first, *(others[place] for place in kept)])


def contradict(text: str, other: str, rng: random.Random) -> str:
    """Make each sentence wrong: other numbers, names and subject out of another document, or else a `not`."""
    sentences = split_sentences(text)
    foreign = [name for sentence in split_sentences(other) for name in names_in(sentence) if name not in text]
    names = sorted({name for sentence in sentences for name in names_in(sentence)})
    wrong = {name: rng.choice(foreign) for name in names if foreign}
    mine, theirs = _bare_subject(text), _bare_subject(other)
    if theirs.lower() not in text.lower() and theirs != "this topic":
        wrong |= {mine: theirs, mine[0].upper() + mine[1:]: theirs[0].upper() + theirs[1:]}
    longest_first = sorted(wrong, key=len, reverse=True)
    right = re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})\b")
    changed = []
    for sentence in sentences:
        new = _NUMBER.sub(lambda number: _other_number(number, text, rng), sentence)
        new = right.sub(lambda name: wrong[name[0]], new)
        if new == sentence:
            new = re.sub(r"\b(is|are|was|were|can|may|will|has|have)\b", r"\1 not", sentence, count=1)
        changed.append(new if new != sentence else f"This is untrue: {sentence}")
    return " ".join(changed)


def _bare_subject(text: str) -> str:
    return re.sub(r"^(?:an?|the) ", "", read_passage(text).subject)


def _other_number(number: re.Match[str], text: str, rng: random.Random) -> str:
    """A number of the same form that the text doesn't hold."""
    digits, decimals, suffix, word = number.groups(default="")
    if word:
        return rng.choice([other for other in SMALL_NUMBERS[2:] if other != word])
    value, new, wider = int(digits.replace(",", "")), digits, 0
    while new in text:
        low, high = (value - 97, value + 97) if 1000 <= value < 2100 else (value // 3 + 1, value * 3 + 9)
        new = format(rng.randint(low, high + wider), "," if "," in digits else "")
        new += f".{rng.randint(1, 9)}" if decimals else ""
        wider += 5
    return new + ("th" if suffix in ("st", "nd", "rd") else suffix)


def boilerplate(text: str, rng: random.Random) -> str:
    """Search-engine and legal phrases over and over, with one real sentence lost among them."""
    lines = [line.replace("{}", _bare_subject(text)) for line in rng.sample(_BOILERPLATE, rng.randint(3, 5))]
    repeated = lines * rng.randint(2, 4)
    repeated.insert(rng.randint(1, len(lines)), clip(rng.choice(split_sentences(text)), MIN_CHARS))
    return "\n".join(repeated)


def scramble(text: str, rng: random.Random) -> str:
    """All words in a random order; the white space, and so the layout, stays."""
    parts = re.split(r"(\s+)", text)
    parts[::2] = rng.sample(parts[::2], len(parts[::2]))
    return "".join(parts)


def add_noise(text: str, rng: random.Random) -> str:
    """NOISE_SHARE of the characters become other ones."""
    characters = list(text)
    for place in rng.sample(range(len(text)), round(len(text) * NOISE_SHARE)):
        characters[place] = rng.choice(_NOISE.replace(characters[place], ""))
    return "".join(characters)


def degenerate(text: str, rng: random.Random) -> str:
    """A good beginning, then a few words of it on and on, until the length runs out."""
    ends = [word.end() for word in re.finditer(r"\S+", text[: MAX_CHARS // 4])]
    last, num_words = rng.randint(min(10, len(ends) - 1), len(ends) - 1), rng.randint(3, 7)
    start = ends[last - num_words] if last >= num_words else 0
    phrase = text[start : ends[last]] + rng.choice(("", ",", "."))
    return (text[: ends[last]] + phrase * MAX_CHARS)[: rng.randint(MAX_CHARS * 2 // 5, MAX_CHARS)]


# --- the files ---


def make_synthetic(parents: Path, out: Path, *, num_per_kind: int, seed: int) -> dict[str, int]:
    """Write `<kind>.parquet` for each kind under `out`; return how many documents have each quality, in all.

    `parents` is Parquet with `id` and `text`; they are used again where there are fewer than `num_per_kind`.
    """
    if num_per_kind < 1:
        raise UserError(f"num_per_kind is {num_per_kind}; ask for at least 1")
    documents = _read_parents(parents)
    counted = Counter({quality.value: 0 for quality in Quality})
    for kind in KINDS:
        rng = random.Random(f"{seed}/{kind}")
        order, qualities = rng.sample(documents, len(documents)), apportion(num_per_kind)
        if kind == "math":  # texts with numbers first: they make the better problems
            order.sort(key=lambda document: not (YEAR.search(document[1]) or COUNT.search(document[1])))
        rng.shuffle(qualities)
        rows = []
        for number, quality in enumerate(qualities):
            id_, text = order[number % len(order)]
            own = random.Random(f"{seed}/{kind}/{number}")
            other = max((own.choice(order)[1] for _ in range(3)), key=_num_capitals)  # it should hold names
            made = synthesize(kind, quality, text, other, own)
            rows.append(_row(id_, text, made, quality, file_path=parents.name))
        write_parquet(pa.Table.from_pylist(rows, schema=SCHEMA), out / f"{kind}.parquet")
        counted.update(quality.value for quality in qualities)
    return dict(counted)


def _num_capitals(text: str) -> int:
    return sum(map(str.isupper, text))


def apportion(num_documents: int) -> list[Quality]:
    """MIXTURE in whole documents, by largest remainder."""
    exact = {quality: share * num_documents for quality, share in MIXTURE.items()}
    missing = num_documents - sum(int(number) for number in exact.values())
    extra = sorted(MIXTURE, key=lambda quality: int(exact[quality]) - exact[quality])[:missing]
    return [quality for quality in MIXTURE for _ in range(int(exact[quality]) + (quality in extra))]


def _read_parents(parents: Path) -> list[tuple[str, str]]:
    try:
        rows = pq.read_table(parents, columns=["id", "text"]).to_pylist()
        documents = [(row["id"], row["text"]) for row in rows]
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"no parents in {parents} ({reason}); give Parquet with `id` and `text`") from error
    usable = [(id_, text) for id_, text in documents if len(text.strip()) >= MIN_PARENT_CHARS]
    if not usable:
        raise UserError(f"{parents} has no text of {MIN_PARENT_CHARS} characters; give longer documents")
    return usable


def _row(id_: str, text: str, made: str, quality: Quality, *, file_path: str) -> dict[str, Any]:
    """One row in FinePhrase's columns. The scores are the parent's, and so say nothing of the quality."""
    parent = random.Random(id_)
    score, prompt, completion = round(parent.uniform(2.5, 4.8), 4), len(text) // 4 + 60, len(made) // 4
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    finish_reason = "length" if quality is Quality.DEGENERATE else "stop"
    return {
        "id": id_,
        "text": text,
        "dump": "atoll-demo",
        "url": id_ if id_.startswith("http") else f"urn:atoll:parent:{id_}",
        "date": "2024-01-01T00:00:00Z",
        "file_path": file_path,
        "language": "en",
        "language_score": round(parent.uniform(0.9, 0.99), 4),
        "token_count": len(text) // 4,
        "score": score,
        "int_score": round(score),
        "rollout_results": [{"text": made, "finish_reason": finish_reason, "usage": usage}],
        "planted_quality": quality.value,
    }


def main(arguments: list[str] | None = None) -> None:
    """`python -m tools.synthetic`: counts go to stdout, complaints to stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.synthetic", description=make_synthetic.__doc__)
    parser.add_argument("--parents", type=Path, required=True, help="Parquet with `id` and `text`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the four files, <kind>.parquet")
    parser.add_argument("--num-per-kind", type=int, required=True, help="documents in each of the four files")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default 0)")
    asked = parser.parse_args(arguments)
    try:
        counts = make_synthetic(asked.parents, asked.out, num_per_kind=asked.num_per_kind, seed=asked.seed)
    except AtollError as error:
        parser.exit(error.exit_code, f"synthetic: {error}\n")
    print("\n".join(f"{quality}\t{count}" for quality, count in counts.items()))


if __name__ == "__main__":
    main()
