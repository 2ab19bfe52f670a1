"""Policy: which licences and access labels a reader may read. Pure: no store; the editions in a store are editions.py's.

A policy is TOML:

    [default]                       # readers that no rule names
    licenses = ["*"]
    access = ["public"]

    [[rule]]
    readers = ["run:main/island:2", "job:score", "sql:analysts"]
    licenses = ["CC-BY-*", "odc-by", "!*-NC-*"]
    access = ["public", "internal"]

The first rule that names a reader decides alone; rules don't add up. A reader may read a document if its licence is in `licenses` and its label in
`access`. A list is of globs (`*` any characters, `?` one); a label is in it if it matches one of them and none that begins with `!`. Upper and lower
case of ASCII letters are the same in labels (SPDX identifiers are so), not in readers. A document without a licence has the licence `unknown`.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import xxhash

from manifests.errors import UserError

JOB_KINDS = ("score", "shard", "tier", "tokenizer")
"""Jobs that read documents."""
OWNER = "sql:owner"
"""Who asks SQL under no other name: reads everything, unless a rule names it; [default] doesn't bind it."""
_FORMS = f"run:NAME/island:N, job:KIND ({', '.join(JOB_KINDS)}) and sql:NAME"
_READER = re.compile(rf"run:[^/]+/island:(0|[1-9]\d*)|job:({'|'.join(JOB_KINDS)})|sql:.+")
_UPPER, _LOWER = string.ascii_uppercase, string.ascii_lowercase
_FOLDED = str.maketrans(_UPPER, _LOWER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What the readers that it names may read."""

    name: str
    """As messages call it."""
    readers: tuple[str, ...]
    licenses: tuple[str, ...]
    access: tuple[str, ...]

    def names(self, reader: str) -> bool:
        """Whether the rule is about this reader."""
        return any(_matches(pattern, reader) for pattern in self.readers)

    def allows(self, license_: str, access: str) -> bool:
        """Whether documents of these labels may be read."""
        return _is_in(self.licenses, license_) and _is_in(self.access, access)

    @property
    def condition(self) -> str:
        """The same as SQL over `license` and `access`; `true` where nothing is forbidden."""
        parts = [*_conditions("license", self.licenses), *_conditions("access", self.access)]
        return " AND ".join(parts) or "true"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """What one reader may read: what all of its rules allow."""

    reader: str
    rules: tuple[Rule, ...]

    def allows(self, license_: str, access: str) -> bool:
        """Whether documents of these labels may be read."""
        return all(rule.allows(license_, access) for rule in self.rules)

    @property
    def condition(self) -> str:
        """The same as SQL over `license` and `access`."""
        conditions = dict.fromkeys(rule.condition for rule in self.rules if rule.condition != "true")
        return " AND ".join(conditions) or "true"

    @property
    def everything(self) -> bool:
        """Whether nothing is kept from the reader."""
        return self.condition == "true"

    @property
    def named(self) -> str:
        """The rules, for a message."""
        return " and ".join(dict.fromkeys(rule.name for rule in self.rules))


def rights_inputs(rights: Rights | None) -> dict[str, str]:
    """What of a job's rights goes into its identity: another policy makes another job, if it changes what the job may read."""
    return {} if rights is None or rights.everything else {"rights": rights.condition}


def that_may_be_read(rights: Rights | None) -> str:
    """What a message says behind `no documents`, where a policy may be why; with a space before."""
    return "" if rights is None or rights.everything else f" that {rights.reader} may read by {rights.named}"


def joined(reader: str, rights: Iterable[Rights | None]) -> Rights:
    """What all of these rights allow; None allows everything."""
    return Rights(reader=reader, rules=tuple(rule for each in rights if each is not None for rule in each.rules))


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One edition of a policy."""

    id: str
    """xxh3-128 of its text, hex."""
    text: str
    rules: tuple[Rule, ...]
    """In the order in which they are asked."""
    default: Rule

    def rights(self, reader: str) -> Rights:
        """What a reader may read.

        Raises:
            UserError: there is no such kind of reader.
        """
        if not _READER.fullmatch(reader):
            raise UserError(f"reader {reader!r}: readers are {_FORMS}")
        for rule in self.rules:
            if rule.names(reader):
                return Rights(reader=reader, rules=(rule,))
        return Rights(reader=reader, rules=() if reader == OWNER else (self.default,))


def parse_policy(text: str, *, source: str) -> Policy:
    """Reads a policy.

    Args:
        text: the TOML.
        source: where it comes from, for messages.

    Raises:
        UserError: it isn't TOML, or not a policy; the message names the rule and the key.
    """
    try:
        loaded = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{source} is not TOML: {e}") from e
    _require_keys(loaded, required=[], optional=["default", "rule"], where=source)
    if "default" not in loaded:
        raise UserError(
            f'{source} has no [default]: say what readers that no rule names may read; licenses = ["*"], access = ["*"] is everything'
        )
    identity = xxhash.xxh3_128_hexdigest(text.encode())
    blocks = loaded.get("rule", [])
    if not isinstance(blocks, list):
        raise UserError(f"{source}: rules are written [[rule]], with two brackets on each side")
    rules: list[Rule] = []
    for number, block in enumerate(blocks, start=1):
        where = f"{source}: rule {number}"
        _require_keys(block, required=["readers", "licenses", "access"], where=where)
        readers = _globs(block, "readers", where)
        for pattern in readers:
            _require_reader(pattern, where)
        rules.append(
            Rule(
                name=f"rule {number} of policy {identity[:8]}",
                readers=readers,
                licenses=_labels(block, "licenses", where),
                access=_labels(block, "access", where),
            )
        )
        _require_reached(rules, where)
    where = f"{source}: [default]"
    _require_keys(loaded["default"], required=["licenses", "access"], where=where)
    default = Rule(
        name=f"[default] of policy {identity[:8]}",
        readers=("*",),
        licenses=_labels(loaded["default"], "licenses", where),
        access=_labels(loaded["default"], "access", where),
    )
    return Policy(id=identity, text=text, rules=tuple(rules), default=default)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = {"*": ".*", "?": "."}
    return re.compile("".join(parts.get(c, re.escape(c)) for c in pattern), re.DOTALL)


def _matches(pattern: str, text: str) -> bool:
    return _expression(pattern).fullmatch(text) is not None


def _is_in(patterns: tuple[str, ...], label: str) -> bool:
    folded = label.translate(_FOLDED)
    forbidden = any(_matches(p[1:].translate(_FOLDED), folded) for p in patterns if p.startswith("!"))
    return not forbidden and any(_matches(p.translate(_FOLDED), folded) for p in patterns if not p.startswith("!"))


def _conditions(column: str, patterns: tuple[str, ...]) -> list[str]:
    """What must hold of a column that is in a list of globs; nothing where every value is."""
    allowed = [p for p in patterns if not p.startswith("!")]
    forbidden = [p[1:] for p in patterns if p.startswith("!")]
    found = [] if "*" in allowed else [_any_of(column, allowed)]
    return [*found, f"NOT {_any_of(column, forbidden)}"] if forbidden else found


def _any_of(column: str, patterns: list[str]) -> str:
    # Not lower(): beyond ASCII, DuckDB's and Python's differ.
    folded = f"translate({column}, '{_UPPER}', '{_LOWER}')"
    return "(" + " OR ".join(f"{folded} {_comparison(p.translate(_FOLDED))}" for p in patterns) + ")"


def _comparison(pattern: str) -> str:
    if not set("*?") & set(pattern):
        return f"= {_quoted(pattern)}"
    like = re.sub(r"([\\%_])", r"\\\1", pattern).replace("*", "%").replace("?", "_")
    return rf"LIKE {_quoted(like)} ESCAPE '\'"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _require_keys(block: Any, *, required: list[str], where: str, optional: Iterable[str] = ()) -> None:
    if not isinstance(block, Mapping):
        raise UserError(f"{where} is {block!r}; it must be a table with the keys {', '.join(required)}")
    known = [*required, *optional]
    unknown = [key for key in block if key not in known]
    if unknown:
        raise UserError(f"{where} has an unknown key `{unknown[0]}`; there are {', '.join(known)}")
    missing = [key for key in required if key not in block]
    if missing:
        raise UserError(f'{where} has no `{missing[0]}`; write {missing[0]} = ["*"] for all of them')


def _globs(block: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    patterns = block[key]
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f'{where}: `{key}` is {patterns!r}; it must be a list of texts, such as ["*"]')
    if not patterns:
        raise UserError(f'{where}: `{key}` is empty; write ["*"] for all, or take the rule away')
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        if not glob or glob != glob.strip():
            raise UserError(f"{where}: `{key}` has {pattern!r}; a glob has no space at its ends and isn't empty")
        if set("[]!\0") & set(glob):
            raise UserError(
                f"{where}: `{key}` has the glob {pattern!r}; only * (any characters), ? (one) and a leading ! (not) are special, "
                "and [ ] ! can't stand elsewhere"
            )
    return tuple(patterns)


def _labels(block: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    patterns = _globs(block, key, where)
    if all(pattern.startswith("!") for pattern in patterns):
        raise UserError(f'{where}: `{key}` only forbids, so nothing is left; begin it with "*" to allow the others')
    return patterns


def _require_reader(pattern: str, where: str) -> None:
    """A glob that can't name a reader is a slip: the rule would silently never apply."""
    start = re.split(r"[*?]", pattern)[0]
    if start == pattern:
        fits = _READER.fullmatch(pattern) is not None
    elif pattern.startswith("job:"):
        fits = any(_matches(pattern, f"job:{kind}") for kind in JOB_KINDS)
    elif pattern.startswith("run:"):
        fits = "/island:" in pattern or "*" in pattern
    else:
        fits = pattern.startswith("sql:") or any(form.startswith(start) for form in ("run:", "job:", "sql:"))
    if not fits:
        raise UserError(
            f"{where}: `readers` has {pattern!r}, which names no reader; readers are {_FORMS}, or globs of these"
        )


def _require_reached(rules: list[Rule], where: str) -> None:
    """The last rule must not stand behind others that have all of its readers already."""
    earlier = [(p, number) for number, rule in enumerate(rules[:-1], 1) for p in rule.readers if "?" not in p]
    first = [next((number for p, number in earlier if _matches(p, reader)), None) for reader in rules[-1].readers]
    if None not in first:
        raise UserError(
            f"{where} is never asked: rule {first[0]} names its readers first; put the narrower rule before the wider one"
        )
