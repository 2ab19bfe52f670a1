"""The command line: help that helps, one-line errors that name the mend, no traceback for a user's mistake."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from manifests.store import Store
from manifests.tables import append
from tools.cli import _run, app


def _commands() -> list[list[str]]:
    import typer.main

    found = []

    def walk(command: Any, path: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*path, name])
        if not hasattr(command, "commands"):
            found.append(path)

    walk(typer.main.get_command(app), [])
    return found


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_every_command_has_help_and_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: atoll {' '.join(command)}" in shown


def test_help_groups_commands_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("Data: from text") < shown.index("Training: islands") < shown.index("Asking: SQL")


@pytest.mark.parametrize(
    ("arguments", "code", "mend"),
    [
        (["sql", "select 1", "--store", "{missing}"], 2, "atoll ingest"),
        (["sql", "select nope from events", "--store", "{store}"], 2, "nope"),
        (["sql", "drop view events", "--store", "{store}"], 2, "read-only"),
        (["sql", "select 1", "--store", "ftp://x"], 2, "s3://"),
        (["sql", "", "--store", "{store}"], 2, "query"),
        (["sql", "select 1", "--formt", "csv"], 2, "--format"),
        (["nonsense"], 2, "atoll --help"),
        (["ingest", "{missing}.parquet", "--corpus", "x", "--store", "{store}"], 2, "{missing}.parquet"),
        (["ingest", "{text}", "--corpus", "x", "--store", "{store}"], 2, "{text}"),
        (["ingest", "{text}", "--corpus", "x", "--format", "xml", "--store", "{store}"], 2, "jsonl"),
        (["ingest", "{text}", "--corpus", "x", "--column", "text", "--store", "{store}"], 2, "NAME=COLUMN"),
        (["ingest", "{empty}", "--corpus", "x", "--format", "jsonl", "--store", "{store}"], 2, "no "),
        (["tokenizer", "--store", "{store}"], 2, "atoll ingest"),
        (["score", "--store", "{store}"], 2, "atoll"),
        (["score", "--steps", "0", "--store", "{store}"], 2, "steps"),
        (["tier", "--store", "{store}"], 2, "atoll score"),
        (["tier", "--share", "7", "--store", "{store}"], 2, "share"),
        (["shard", "--store", "{store}"], 2, "atoll tier"),
        (["view", "S", "{missing}", "--store", "{store}"], 2, "atoll shard"),
        (["train", "--store", "{store}"], 2, "atoll shard"),
        (["island", "--run", "r", "--island", "0", "--store", "{store}"], 2, "atoll train"),
        (["made", "--run", "r", "--store", "{store}"], 2, "no global checkpoint"),
        (["report", "--run", "r", "--store", "{store}"], 2, "no "),
        (["rollback", "plan", "--run", "r", "--where", "true", "--store", "{store}"], 2, "atoll train"),
    ],
)
def test_user_errors_are_one_line_with_the_mend(
    arguments: list[str], code: int, mend: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("this is not Parquet")
    (tmp_path / "empty.jsonl").write_text("")
    places = {
        "{store}": store.uri,
        "{missing}": str(tmp_path / "nowhere"),
        "{text}": str(tmp_path / "text.txt"),
        "{empty}": str(tmp_path / "empty.jsonl"),
    }
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
        mend = mend.replace(name, place)
    assert _run(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    assert shown.err.startswith("error: ")
    assert mend in shown.err


@pytest.mark.parametrize("format_", ["table", "csv", "json"])
def test_answers_come_in_every_format(format_: str, store: Store, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    append(store, "events", [{"run": "r", "kind": "a,b", "detail": "{}"}])
    query = "select kind, 2 as n, '\\x01\\xff'::blob as id, [1, 2] as l from events"
    assert _run(["sql", query, "--store", store.uri, "--format", format_]) == 0
    out = capfdbinary.readouterr().out.decode()
    if format_ == "json":
        assert json.loads(out) == {"kind": "a,b", "n": 2, "id": "01ff", "l": [1, 2]}
    elif format_ == "csv":
        assert list(csv.reader(io.StringIO(out)))[1][:3] == ["a,b", "2", "01ff"]
    else:
        assert "a,b" in out
        assert "01ff" in out
