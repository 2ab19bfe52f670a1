"""`atoll sql`, `atoll ask` and `atoll db`: forms of the answer, files, stdin, parameters; and what a fresh DuckDB finds in the file."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet
import pytest

from manifests.editions import set_policy
from manifests.errors import UserError
from manifests.store import Store
from manifests.tables import create_store
from tests.manifests.small_run import A1, DOCS, GLOBAL_B, tell
from tools.cli import _run
from tools.plotting import write_plot

ROOT = Path(__file__).parent.parent.parent
QUERY = (
    "select 'a,b' as kind, 2 as n, '\\x01\\xff'::blob as id, [1, 2] as l, ['\\x02'::blob] as ids, 'nan'::double as x, "
    "{'y': 'inf'::double} as s, sum(3) as total"
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with the small run."""
    return tell(create_store(str(tmp_path_factory.mktemp("told") / "store"))).store


def _atoll(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert _run(list(arguments)) == code
    shown = capfd.readouterr()
    return shown.out, shown.err


def _process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "tools.cli", *arguments], cwd=ROOT, capture_output=True, **options)


@pytest.mark.parametrize("where", ["stdout", "file"])
@pytest.mark.parametrize("format_", ["table", "csv", "json", "jsonl", "parquet"])
def test_answers_come_in_every_format(
    told: Store, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], format_: str, where: str
) -> None:
    out = tmp_path / "answer"
    more = ["--out", str(out)] if where == "file" else []
    assert _run(["sql", QUERY, "--store", told.uri, "--format", format_, *more]) == 0
    shown = capfdbinary.readouterr().out
    if where == "file":
        assert shown == b""
        assert list(tmp_path.iterdir()) == [out]
    data = out.read_bytes() if where == "file" else shown
    if format_ == "parquet":
        row = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()[0]
        assert (row["kind"], row["id"], row["l"], row["total"]) == ("a,b", b"\x01\xff", [1, 2], 3)
    elif format_ == "csv":
        head, row = csv.reader(io.StringIO(data.decode()))
        assert head == ["kind", "n", "id", "l", "ids", "x", "s", "total"]
        assert row == ["a,b", "2", "01ff", "[1, 2]", '["02"]', "nan", '{"y": null}', "3"]
    elif format_ == "table":
        assert "01ff" in data.decode()
    else:
        row = json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        expected = {"kind": "a,b", "n": 2, "id": "01ff", "l": [1, 2], "ids": ["02"], "x": None, "s": {"y": None}}
        assert row == expected | {"total": 3}


def test_parquet_is_not_sent_to_a_terminal(
    told: Store, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out, error = _atoll(capfd, "sql", "select 1", "--format", "parquet", "--store", told.uri, code=2)
    assert (out, "--out FILE" in error) == ("", True)


def test_values_of_strangers_neither_mark_up_nor_steer_the_terminal(
    told: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    out, _ = _atoll(capfd, "sql", "select '[/x] :smile:' as t, chr(27) || '[2J' as e, 1 as e", "--store", told.uri)
    assert "[/x] :smile:" in out
    assert "\x1b" not in out


def test_long_tables_are_cut_and_say_so(told: Store, capfd: pytest.CaptureFixture[str]) -> None:
    out, error = _atoll(capfd, "sql", "from range(1500)", "--store", told.uri)
    assert len(out.splitlines()) < 1100
    assert "the first 1,000 of 1,500 rows" in error
    out, _ = _atoll(capfd, "sql", "from range(1500)", "--store", told.uri, "--format", "csv")
    assert len(out.splitlines()) == 1501


def test_file_holds_several_statements(told: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.sql"
    file.write_text("-- one; two\nselect count(*) as n from runs;\nselect 'a;b' as t;\n-- the end\n")
    out, _ = _atoll(capfd, "sql", "-f", str(file), "--store", told.uri, "--format", "csv")
    assert out == '"n"\n2\n"t"\n"a;b"\n'
    _, error = _atoll(capfd, "sql", "-f", str(file), "--out", str(tmp_path / "o"), "--store", told.uri, code=2)
    assert "these are 2 statements" in error
    file.write_text("select 1 as n; select nothing; select 2 as n")
    out, error = _atoll(capfd, "sql", "-f", str(file), "--store", told.uri, "--format", "csv", code=2)
    assert out == '"n"\n1\n'
    assert "statement 2 of 3: SQL: " in error


def test_statements_come_in_by_stdin(told: Store) -> None:
    done = _process(
        "sql", "--store", told.uri, "--format", "jsonl", input=b"select run from runs order by run;\nselect 1"
    )
    assert done.stdout == b'{"run": "b"}\n{"run": "r"}\n{"1": 1}\n'
    assert _process("sql", "--store", told.uri, input=b"").returncode == 2


def test_ctrl_c_stops_a_query(told: Store) -> None:
    query = "select 'begun' as b; select count(*) from range(10000000) a, range(10000000) b"
    command = [sys.executable, "-m", "tools.cli", "sql", query, "--store", told.uri, "--format", "csv"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() + process.stdout.readline() == b'"b"\n"begun"\n'
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.startswith(b"error: interrupted")


def test_looks_from_a_point(told: Store, capfd: pytest.CaptureFixture[str]) -> None:
    count = ("select count(*) as n from checkpoints", "--store", told.uri, "--format", "csv")
    assert _atoll(capfd, "sql", *count, "--at", "checkpoints=0")[0] == '"n"\n0\n'


def test_ask_alone_lists_the_questions(capfd: pytest.CaptureFixture[str]) -> None:
    listed = [json.loads(line) for line in _atoll(capfd, "ask", "--format", "jsonl")[0].splitlines()]
    rows = {row["question"]: row for row in listed}
    assert rows["document_checkpoints"]["asks"] == "Which checkpoints saw a document?"
    assert rows["repeated_documents"]["parameters"] == "run VARCHAR, times INTEGER = 3"


@pytest.mark.parametrize("named", [GLOBAL_B.hex(), GLOBAL_B.hex()[:6].upper(), "last:b"])
def test_checkpoint_is_named_by_its_id_its_beginning_or_its_run(
    told: Store, capfd: pytest.CaptureFixture[str], named: str
) -> None:
    asked = ("ask", "ancestry", "--param", f"checkpoint={named}", "--store", told.uri, "--format", "jsonl")
    rows = [json.loads(line) for line in _atoll(capfd, *asked)[0].splitlines()]
    assert [(row["run"], row["checkpoint"]) for row in rows] == [("r", A1.hex()), ("b", "06" * 16)]


def test_ask_takes_parameters_of_every_kind(told: Store, capfd: pytest.CaptureFixture[str]) -> None:
    def answer(*arguments: str) -> list[dict[str, Any]]:
        out, _ = _atoll(capfd, "ask", *arguments, "--store", told.uri, "--format", "jsonl")
        return [json.loads(line) for line in out.splitlines()]

    assert len(answer("document_checkpoints", "-p", f"doc_id={DOCS['e'].hex()}")) == 4
    assert [row["times"] for row in answer("repeated_documents", "-p", "run=b", "-p", "times=1")] == [2, 2]
    assert [row["license"] for row in answer("license_violations", "-p", "allowed=l, x")] == ["closed"]


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["nothing"], "checkpoint_mix"),
        (["ancestry"], "needs checkpoint"),
        (["ancestry", "-p", "checkpoint=abc"], "the first 6 digits"),
        (["ancestry", "-p", "checkpoint=abcdef"], "no checkpoint abcdef"),
        (["ancestry", "-p", "checkpoint=last:nobody"], "there are: r, b"),
        (["loss_by_tier", "-p", "run=nobody"], "there are: r, b"),
        (["loss_by_tier", "-p", "run=r", "-p", "bin=many"], "not a whole number"),
        (["loss_by_tier", "-p", "run=r", "-p", "bim=3"], "has no parameter 'bim'; it takes run"),
        (["loss_by_tier", "-p", "run"], "NAME=VALUE"),
        (["-p", "run=r"], "name of a question"),
        (["ancestry", "--format", "xml"], "table, csv, jsonl, parquet"),
    ],
)
def test_wrong_questions_are_told_in_one_line_with_the_mend(
    told: Store, capfd: pytest.CaptureFixture[str], arguments: list[str], mend: str
) -> None:
    out, error = _atoll(capfd, "ask", *arguments, "--store", told.uri, code=2)
    assert out == ""
    assert len(error.strip().splitlines()) == 1
    assert mend in error


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["select 1", "-f", "{here}/x.sql"], "one of them"),
        (["-f", "{here}/x.sql"], "No such file"),
        (["select 1", "--out", "{here}/no/folder"], "name a file in a folder"),
        (["select 1; select 2", "--format", "parquet"], "these are 2 statements"),
        (["select interval 1 day", "--format", "parquet", "--out", "{here}/o"], "cast the column"),
        (["/* nothing */"], "no query"),
    ],
)
def test_wrong_uses_of_sql_leave_nothing_behind(
    told: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], mend: str
) -> None:
    given = [argument.replace("{here}", str(tmp_path)) for argument in arguments]
    out, error = _atoll(capfd, "sql", *given, "--store", told.uri, code=2)
    assert out == ""
    assert mend in error
    assert list(tmp_path.iterdir()) == []


def test_duckdb_file_shows_the_store_to_a_fresh_duckdb(
    told: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "store.duckdb"
    for _ in range(2):  # the second one replaces the first
        out, _ = _atoll(capfd, "db", str(file), "--store", told.uri, "--format", "csv")
    printed = {name: int(version) for name, version in list(csv.reader(io.StringIO(out)))[1:]}
    code = (
        "import duckdb, json, sys\n"
        "c = duckdb.connect(sys.argv[1], read_only=True)\n"
        "rows = lambda sql: c.execute(sql).fetchall()\n"
        "print(json.dumps([rows('select sum(tokens)::bigint from consumption'), rows('select sum(tokens)::bigint from raw.consumption'),\n"
        "    rows(f\"select run, island, round from ancestors(from_hex('{sys.argv[2]}')) order by all\"),\n"
        "    rows('select \"table\", version from atoll_versions where store = \\'' + sys.argv[3] + '\\'')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), GLOBAL_B.hex(), told.uri], capture_output=True, check=True, cwd=tmp_path
    )
    committed, all_, ancestors, versions = json.loads(done.stdout)
    assert (committed, all_) == ([[228]], [[388]])
    assert ancestors == [["b", 0, 2], ["r", 0, 1]]
    assert dict(versions) == printed
    assert printed["checkpoints"] == 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("other", ["text", "database", "folder"])
def test_duckdb_file_replaces_nothing_of_another_kind(
    told: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str], other: str
) -> None:
    file = tmp_path / "mine"
    if other == "text":
        file.write_text("mine")
    elif other == "folder":
        file.mkdir()
    else:
        duckdb.connect(str(file)).execute("CREATE TABLE mine AS SELECT 1").close()
    before = file.read_bytes() if file.is_file() else b""
    _, error = _atoll(capfd, "db", str(file), "--store", told.uri, code=2)
    assert "wasn't written by `atoll db`" in error
    assert (file.read_bytes() if file.is_file() else b"") == before
    assert list(tmp_path.iterdir()) == [file]


def test_who_asks_under_a_name_sees_what_the_policy_lets_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tell(create_store(str(tmp_path / "store"))).store
    policy = '[default]\nlicenses = ["*"]\naccess = ["*"]\n[[rule]]\nreaders = ["sql:guest"]\nlicenses = ["none-such"]\naccess = ["*"]\n'
    set_policy(store, policy, "try it")
    for table in ("documents", "raw.documents", "consumption"):
        query = ["sql", f"select count(*) as n from {table}", "--store", store.uri, "--format", "jsonl"]
        out, _ = _atoll(capfd, *query)
        assert json.loads(out)["n"] > 0
        out, _ = _atoll(capfd, *query, "--as", "guest")
        assert json.loads(out)["n"] == 0
    _, err = _atoll(capfd, "db", str(tmp_path / "x.duckdb"), "--store", store.uri, "--as", "guest", code=2)
    assert "sql:guest" in err
    assert not (tmp_path / "x.duckdb").exists()


def test_an_answer_is_drawn(told: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plot.html"
    asked = ["ask", "loss_by_tier", "-p", "run=r", "--store", told.uri, "--plot", str(page), "--format", "csv"]
    out, error = _atoll(capfd, *asked)
    assert out.startswith('"')
    assert str(page) in error.replace("\n", "")
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert 'src="http' not in text


def test_what_cannot_be_drawn_is_said(told: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plot.html"
    _, error = _atoll(capfd, "ask", "closeness", "-p", "run=r", "--store", told.uri, "--plot", str(page), code=2)
    assert "nothing to draw" in error
    _, error = _atoll(capfd, "ask", "--store", told.uri, "--plot", str(page), code=2)
    assert "--plot needs the name of a question" in error
    with pytest.raises(UserError, match="that is no number"):
        write_plot(pa.table({"a": [1], "b": ["y"]}), page, title="t")
    many = pa.table({"a": range(100), "b": [str(n) for n in range(100)], "c": range(100)})
    with pytest.raises(UserError, match="64 can be told apart"):
        write_plot(many, page, title="t")
    assert not page.exists()


def test_lines_are_told_by_texts_and_a_single_number_makes_bars(tmp_path: Path) -> None:
    page = tmp_path / "plot.html"
    write_plot(pa.table({"a": ["<u>", "y", "y"], "n": [1, 1, 2], "c": [1.0, 2.0, 3.0]}), page, title="t")
    text = page.read_text()
    assert text.count('"mode":"lines+markers"') == 2
    assert '"x":[1,2],"y":[2.0,3.0]' in text
    assert '"name":"<u>"' not in text
    write_plot(pa.table({"a": ["x", "y"], "c": [1.0, 2.0]}), page, title="t")
    assert '"type":"bar"' in page.read_text()
