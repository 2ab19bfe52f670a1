"""Sources: what a source of text is, how its columns become ours, and how its rows are read, one after the other.

Opening the files is readers.py's, what becomes of a document is ingest.py's.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import numpy.typing as npt

from manifests.errors import UserError
from pipeline import readers

FORMATS = ("finephrase", "cosmopedia", "parquet", "jsonl", "datasets")
COLUMNS = ("text", "parent_text", "license", "generator", "prompt", "access", "label", "finish_reason", "tokens")
FINEPHRASE_PROMPTS = ("faq", "math", "table", "tutorial")
_JSON_ENDS = tuple(end + packed for end in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Preset:
    """What a format brings with it."""

    columns: Mapping[str, str]
    fixed: tuple[str, ...] = ()
    """Columns of ours that the format defines and nobody may map elsewhere."""
    origin: str | None = None
    generator: str | None = None
    license: str = "unknown"


# FinePhrase: `text` is the original web document; the synthetic text is the first rollout's (_flatten_rollout makes the dotted names).
_FINEPHRASE = _Preset(
    columns={
        "text": "rollout.text",
        "parent_text": "text",
        "finish_reason": "rollout.finish_reason",
        "tokens": "rollout.tokens",
    },
    fixed=("text", "parent_text", "finish_reason", "tokens"),
    origin="synthetic",
    generator="HuggingFaceTB/SmolLM2-1.7B-Instruct",
    license="odc-by",
)
_COSMOPEDIA = _Preset(
    columns={"text": "text", "prompt": "format", "tokens": "token_length"},
    origin="synthetic",
    generator="mistralai/Mixtral-8x7B-Instruct-v0.1",
    license="apache-2.0",
)
_PLAIN = _Preset(columns={"text": "text"})
_PRESETS = {"finephrase": _FINEPHRASE, "cosmopedia": _COSMOPEDIA}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One source as a user names it. What is None takes the format's own value at once, so that the fields say what will be done."""

    uri: str
    """A file, a folder, a glob; for `datasets` a name on the hub or a local folder."""
    format: str
    """One of FORMATS."""
    corpus: str
    """Name under which its documents are counted."""
    origin: str | None = None
    """`real` or `synthetic`, `real` where not said; FinePhrase and Cosmopedia are synthetic whatever is said."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of ours (COLUMNS) to column of the source."""
    license: str | None = None
    """Licence of rows that name none."""
    access: str = "public"
    """Policy label of rows that name none."""
    generator: str | None = None
    """Generator of rows that name none."""
    prompt: str | None = None
    """Kind of text of rows that name none; FinePhrase files show it in their name or folder."""
    split: str = "train"
    """Split of a `datasets` source."""
    subset: str | None = None
    """Configuration of a `datasets` source, such as `sample-10BT`."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"source {self.uri}: format {self.format!r} is not known; use one of {', '.join(FORMATS)}")
        preset = _PRESETS.get(self.format, _PLAIN)
        for name, column in self.columns.items():
            if name not in COLUMNS:
                raise UserError(f"source {self.uri}: {name!r} is not a column of ours; map one of {', '.join(COLUMNS)}")
            if name in preset.fixed and column != preset.columns[name]:
                raise UserError(
                    f"source {self.uri}: format {self.format} defines {name} itself; leave it out, or use format parquet"
                )
        if self.origin not in (None, "real", "synthetic"):
            raise UserError(f"source {self.uri}: origin {self.origin!r} is not known; use real or synthetic")
        origin = preset.origin or self.origin or "real"
        if origin == "real" and "parent_text" in self.columns:
            raise UserError(
                f"source {self.uri}: a text with a parent is synthetic; say origin synthetic, or leave parent_text out"
            )
        object.__setattr__(self, "origin", origin)
        object.__setattr__(self, "columns", {**preset.columns, **self.columns})
        object.__setattr__(self, "license", self.license or preset.license)
        object.__setattr__(self, "generator", self.generator or preset.generator)

    @property
    def source_uri(self) -> str:
        """What the tables call it; two splits of one data set are two sources."""
        if self.format != "datasets":
            return self.uri
        return f"{self.uri}?split={self.split}" + (f"&subset={self.subset}" if self.subset else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SourceSpec:
        return cls(**json.loads(text))


@dataclass(kw_only=True, slots=True)
class SourceDocument:
    """One row with usable text, as it stands in the source (not normalised)."""

    row: int
    text: str
    parent_text: str | None
    generator: str | None
    prompt: str | None
    license: str
    access: str
    label: str | None
    finish_reason: str | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """One row without usable text."""

    row: int
    reason: str


def expand(uri: str, format: str) -> list[str]:
    """The sources behind a file, a folder or a glob: absolute paths, sorted. A `datasets` name stays as it is.

    Raises:
        UserError: nothing is there.
    """
    path = Path(unquote(urlparse(uri).path) if uri.startswith("file://") else uri)
    if format == "datasets":
        return [str(path.absolute()) if path.exists() else uri]
    if path.is_file():
        return [str(path.absolute())]
    ends = {"parquet": (".parquet",), "jsonl": _JSON_ENDS}.get(format, (".parquet", *_JSON_ENDS))
    if path.is_dir():
        below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        found = [p for p in below if p.is_file() and p.name.endswith(ends)]
        if not found:
            raise UserError(
                f"source {uri}: the folder holds no file that ends in {' or '.join(ends)}; name the files by a glob"
            )
    else:
        found = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not found:
            raise UserError(f"source {uri}: there is no such file, folder or glob match; check the path")
    return sorted(str(p.absolute()) for p in found)


def read_rows(
    spec: SourceSpec, *, start_row: int = 0, only: npt.NDArray[np.int64] | None = None
) -> Iterator[SourceDocument | RejectedRow]:
    """Reads one source (as `expand` names it) row by row, in order.

    Args:
        start_row: first row to read.
        only: sorted row numbers; the others are passed over, without being decoded where the format allows it.

    Raises:
        UserError: the file is missing or isn't what the format says, a column is missing, or text isn't text. The message has the mend.
    """
    layout = Layout.of(spec)
    if spec.format == "datasets":
        rows = read_datasets(spec, start_row=start_row, only=only)
    elif is_jsonl(spec):
        rows = readers.read_jsonl(spec.uri, layout.text, layout.columns, layout.check, start_row=start_row, only=only)
    else:
        rows = readers.read_parquet(spec.uri, layout.columns, layout.check, start_row=start_row, only=only)
    map_row = mapper(spec)
    for row, values in rows:
        yield map_row(row, values)


def read_datasets(spec: SourceSpec, *, start_row: int = 0, only: npt.NDArray[np.int64] | None = None) -> readers.Rows:
    """Rows of a `datasets` source as they stand."""
    layout = Layout.of(spec)
    return readers.read_datasets(
        spec.uri, spec.subset, spec.split, layout.columns, layout.check, start_row=start_row, only=only
    )


def is_jsonl(spec: SourceSpec) -> bool:
    """Whether a source is a file of JSON lines; UserError where it's to be a file and there is none."""
    if spec.format == "datasets":
        return False
    if not Path(spec.uri).is_file():
        raise UserError(f"source {spec.uri}: the file doesn't exist; check the path")
    return spec.format == "jsonl" or (spec.format != "parquet" and spec.uri.endswith(_JSON_ENDS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What is read of a source's columns."""

    columns: list[str]
    """Must be there."""
    text: str
    """The one that holds the text."""
    check: readers.Check

    @classmethod
    def of(cls, spec: SourceSpec) -> Layout:
        columns = sorted({name for name in spec.columns.values() if not name.startswith("rollout.")})
        text, mend = spec.columns["text"], "map the column of ours to one of these"
        if spec.format == "finephrase":
            columns, text = sorted({*columns, "rollout_results"}), "rollout_results"
            mend = "FinePhrase has the original as text, the synthetic text in rollout_results; use format parquet or jsonl for a plain file"

        def check(needed: Sequence[str], there: Sequence[str]) -> None:
            if missing := [name for name in needed if name not in there]:
                raise UserError(
                    f"source {spec.uri} has no column {', '.join(missing)}; it has {', '.join(there)}; {mend}"
                )

        return cls(columns=columns, text=text, check=check)


def mapper(spec: SourceSpec) -> Callable[[int, Mapping[str, Any]], SourceDocument | RejectedRow]:
    """What makes a source's rows, as they stand, into ours."""
    columns = spec.columns
    kind = spec.prompt or (_prompt_of_path(spec.uri) if spec.format == "finephrase" else None)
    text_column, parent_column = columns["text"], columns.get("parent_text")
    assert spec.license is not None

    def string(name: str, values: Mapping[str, Any]) -> str | None:
        value = values.get(columns[name]) if name in columns else None
        return None if value is None or value == "" else str(value).encode(errors="replace").decode()

    def map_row(row: int, values: Mapping[str, Any]) -> SourceDocument | RejectedRow:
        if spec.format == "finephrase":
            values = _flatten_rollout(spec, row, values)
        text = values.get(text_column)
        if (fault := _fault_of(text)) is not None:
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"source {spec.uri}, row {row}: column {text_column} holds {type(text).__name__}, not text; map text to another column"
                )
            return RejectedRow(row, fault)
        parent = values.get(parent_column) if parent_column else None
        tokens = values.get(columns["tokens"]) if "tokens" in columns else None
        return SourceDocument(
            row=row,
            text=text,  # type: ignore[arg-type]
            parent_text=None if _fault_of(parent) else parent,
            generator=string("generator", values) or spec.generator,
            prompt=string("prompt", values) or kind,
            license=string("license", values) or spec.license,  # type: ignore[arg-type]
            access=string("access", values) or spec.access,
            label=string("label", values),
            finish_reason=string("finish_reason", values),
            tokens=int(tokens) if isinstance(tokens, int | float) and isfinite(tokens) else None,
        )

    return map_row


def _fault_of(text: object) -> str | None:
    """Why a value is no usable text; None where it is."""
    if not isinstance(text, str):
        return "no text"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "invalid Unicode"
    if "\0" in text:
        return "NUL character"
    return None if text.strip() else "empty text"


def _flatten_rollout(spec: SourceSpec, row: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
    rollouts = values.get("rollout_results")
    if rollouts == readers.INVALID:
        return {"rollout.text": readers.INVALID}
    if not rollouts:
        return {}
    if not isinstance(rollouts, list) or not isinstance(rollouts[0], dict):
        raise UserError(
            f"source {spec.uri}, row {row}: rollout_results is not a list of records; use format parquet or jsonl"
        )
    first = rollouts[0]
    return {
        **values,
        "rollout.text": first.get("text"),
        "rollout.finish_reason": first.get("finish_reason"),
        "rollout.tokens": usage.get("completion_tokens") if isinstance(usage := first.get("usage"), dict) else None,
    }


def _prompt_of_path(uri: str) -> str | None:
    path = Path(uri)
    for name in (re.split(r"[-_.]", path.name)[0], path.parent.name):
        if name.lower() in FINEPHRASE_PROMPTS:
            return name.lower()
    return None
