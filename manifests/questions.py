"""The SQL that stands in files: named questions with their parameters, and the views and macros that they share.

`sql/questions/` holds what `atoll ask` offers, `sql/` itself what our own commands ask; `sql/views/` and `sql/macros/` are made in every catalog.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from manifests.errors import UserError

_FOLDER = Path(__file__).parent / "sql"
_PARAMETER = re.compile(
    r"Parameter: (?P<name>\w+) (?P<type>[A-Z]+(?:\[\])?)(?: = (?P<default>[^,]+))?, (?P<meaning>.+)\."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a named question."""

    name: str
    type: str
    """One of DuckDB's types that `value` knows."""
    default: str | None
    """Its text, `NULL` for the null value; None: a value must be given."""
    meaning: str

    def value(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            UserError: it stands for none of this type.
        """
        if text == self.default == "NULL":
            return None
        read, form = _TYPES[self.type]
        try:
            return read(text.strip())
        except ValueError as e:
            raise UserError(f"{self.name}={text!r} is not {form}; {self.name} is {self.meaning}") from e

    def __str__(self) -> str:
        return f"{self.name} {self.type}" + (f" = {self.default}" if self.default is not None else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A named question: what its file says of it, and its SQL."""

    name: str
    summary: str
    """The question, in one line."""
    parameters: tuple[Parameter, ...]
    sql: str
    """The file's text, comments included."""

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A value for every parameter: the one given, or its default.

        Raises:
            UserError: one is missing, or there is none of a name that was given; the message names those that there are.
        """
        unknown = sorted(set(given) - {p.name for p in self.parameters})
        missing = [p.name for p in self.parameters if p.default is None and p.name not in given]
        if unknown or missing:
            wrong = f"has no parameter {unknown[0]!r}" if unknown else f"needs {' and '.join(missing)}"
            takes = "; ".join(f"{p} ({p.meaning})" for p in self.parameters)
            raise UserError(f"question {self.name} {wrong}; it takes {takes}")
        defaults = {p.name: p.value(p.default) for p in self.parameters if p.default is not None}
        return {p.name: given[p.name] if p.name in given else defaults[p.name] for p in self.parameters}


def questions() -> list[Question]:
    """All named questions, by name."""
    return [_parsed(path) for path in sorted((_FOLDER / "questions").glob("*.sql"))]


def find_question(name: str) -> Question:
    """The named question of this name.

    Raises:
        UserError: there is none of this name; the message names those that there are.
    """
    path = _FOLDER / "questions" / f"{name}.sql"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        raise UserError(f"no question named {name!r}; there are: {', '.join(q.name for q in questions())}")
    return _parsed(path)


def question(name: str) -> str:
    """The text of a named question, or of one that our own commands ask.

    Raises:
        UserError: there is none of this name.
    """
    own = _FOLDER / f"{name}.sql"
    return own.read_text() if own.is_file() else find_question(name).sql


def statement(name: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """SQL to run and all its parameters, for a named question or one that our own commands ask.

    Raises:
        UserError: there is none of this name, or a parameter is missing or unknown.
    """
    if (_FOLDER / f"{name}.sql").is_file():
        return without_comments(question(name)), dict(given)
    asked = find_question(name)
    return without_comments(asked.sql), asked.complete(given)


def without_comments(text: str) -> str:
    """The statement of one of our files, without its lines of comment: their words would name tables that it doesn't read."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))


def _parsed(path: Path) -> Question:
    """Reads the header: lines of comment with the question, then its parameters, then `Columns: …`; what comes after is free."""
    text = path.read_text()
    summary, *lines = [
        line.removeprefix("-- ") for line in takewhile(lambda line: line.startswith("-- "), text.splitlines())
    ]
    parameters = []
    for line in takewhile(lambda line: not line.startswith("Columns: "), lines):
        match = _PARAMETER.fullmatch(line)
        assert match is not None, f"{path}: {line!r} is not of the form `Parameter: name TYPE = default, meaning.`"
        assert match["type"] in _TYPES, f"{path}: no parameter can be a {match['type']}"
        parameters.append(Parameter(**match.groupdict()))
    assert len(parameters) < len(lines), f"{path} doesn't say what its columns are"
    return Question(name=path.stem, summary=summary, parameters=tuple(parameters), sql=text)


def _integer(text: str, bits: int) -> int:
    number = int(text)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError(f"{number} doesn't fit into {bits} bits")
    return number


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("neither true nor false")
    return text.lower() == "true"


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "BLOB": (bytes.fromhex, "hex digits, two for each byte"),
    "BOOLEAN": (_boolean, "true or false"),
    "BIGINT": (lambda text: _integer(text, 64), "a whole number"),
    "DOUBLE": (float, "a number"),
    "INTEGER": (lambda text: _integer(text, 32), "a whole number of at most 32 bits"),
    "TIMESTAMP": (_moment, "a time such as 2026-01-31T12:00:00"),
    "VARCHAR": (str, "a text"),
    "VARCHAR[]": (lambda text: [item.strip() for item in text.split(",") if item.strip()], "a list a,b,…"),
}

_TEXTS = {
    folder: {path.stem: path.read_text() for path in sorted((_FOLDER / folder).glob("*.sql"))}
    for folder in ("views", "macros")
}
VIEWS = {name: without_comments(text) for name, text in _TEXTS["views"].items()}
"""View by name → the statement that makes it."""
MACROS = {name: without_comments(text) for name, text in _TEXTS["macros"].items()}
"""Table macro by name → the statement that makes it."""
ANSWERS = {
    name: text.split("\n", 1)[0].removeprefix("-- ") for texts in _TEXTS.values() for name, text in texts.items()
}
"""View or table macro by name → the question that it answers."""
