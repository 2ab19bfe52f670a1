"""The prompt of `atoll sql`, typed at through a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from manifests.catalog import Catalog
from manifests.store import Store
from manifests.tables import append, create_store
from tools.shell import SqlCompleter, is_whole

ROOT = Path(__file__).parent.parent.parent
_WAIT_S = 30.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


def _take_terminal() -> None:
    """In the process before it begins: makes stdin the terminal that Ctrl-C comes from."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        # Without cursor reports, which this terminal doesn't send.
        more = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "150", "LINES": "50"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.cli", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=os.environ | more | environment, start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def answer(self, text: str) -> str:
        """What is shown after this line, up to the next prompt and with it."""
        self.type(text + "\r")
        # The prompt shows the line once more, without the cursor behind it.
        return self.wait_for("\natoll") + self.wait_for(">")

    def wait_for(self, text: str) -> str:
        """What was shown since the last wait, up to this text and with it."""
        deadline = time.monotonic() + _WAIT_S
        while text not in self._seen:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self._seen!r}"
            try:
                self._seen += _ESCAPES.sub("", os.read(self._ours, 65536).decode(errors="replace"))
            except OSError as e:
                raise AssertionError(f"it ended before {text!r}, after {self._seen!r}") from e
        end = self._seen.index(text) + len(text)
        shown, self._seen = self._seen[:end], self._seen[end:]
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(store: Store, tmp_path: Path) -> Iterator[Terminal]:
    append(store, "events", [{"run": "r", "kind": "first", "detail": "{}"}])
    terminal = Terminal(["sql", "--store", store.uri, "--format", "csv"], {"XDG_STATE_HOME": str(tmp_path / "state")})
    terminal.wait_for("atoll>")
    yield terminal
    terminal.close()


def test_a_session_from_the_first_query_to_ctrl_d(terminal: Terminal, store: Store, tmp_path: Path) -> None:
    assert '42,"a;"' in terminal.answer("select 40 + 2 as n,\r'a;' as t;")
    assert "error: SQL: Binder Error" in terminal.answer("select nothing from events;")
    assert "error: SQL: DROP is not a query" in terminal.answer("drop view events;")

    terminal.type("select count(*) as rows_then from tombs\t")
    terminal.wait_for("tombstones")
    assert '"rows_then"\n0\n' in terminal.answer(";")

    append(store, "events", [{"run": "r", "kind": "second", "detail": "{}"}])
    assert '"still"\n1\n' in terminal.answer("select count(*) as still from events;")
    terminal.answer(".refresh")
    assert '"now"\n2\n' in terminal.answer("select count(*) as now from events;")
    assert "atoll at events=1>" in terminal.answer(".at events=1")
    assert '"then"\n1\n' in terminal.answer("select count(*) as then from events;")
    assert "atoll>" in terminal.answer(".at now")

    assert "nats per token" in terminal.answer(".schema consumption")
    assert '"base_version","INTEGER"' in terminal.answer(".schema merges")
    assert "one span of one document in one step" in terminal.answer(".tables")
    assert "error: no run named 'nobody'" in terminal.answer(".ask loss_by_tier run=nobody")
    assert "error: .nonsense: no such command" in terminal.answer(".nonsense")

    # Ctrl-C drops what is typed, then stops what runs.
    terminal.type("select this is\r dropped")
    terminal.wait_for("dropped")
    terminal.type("\x03")
    terminal.wait_for("atoll>")
    terminal.type("select count(*) from range(10000000) a, range(10000000) b;\r")
    time.sleep(1.0)
    terminal.type("\x03")
    terminal.wait_for("stopped")
    terminal.wait_for("atoll>")
    assert '"it"\n"goes on"' in terminal.answer("select 'goes on' as it;")

    terminal.type("\x04")
    assert terminal.process.wait(timeout=_WAIT_S) == 0
    assert "+select 40 + 2 as n,\n+'a;' as t;" in (tmp_path / "state" / "atoll" / "sql-history").read_text()


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("select 1;", True),
        ("select 1", False),
        ("select 1; -- that's it", True),
        ("select ';", False),
        ("select ';'", False),
        ("select $$;$$", False),
        ("select 1 /* ;", False),
        ('select "a;" from t\n;\n', True),
        (".tables", True),
        ("  ", True),
    ],
)
def test_input_is_whole_at_a_semicolon_outside_of_texts(text: str, whole: bool) -> None:
    assert is_whole(text) is whole


@pytest.fixture(scope="module")
def completer(tmp_path_factory: pytest.TempPathFactory) -> SqlCompleter:
    return SqlCompleter(Catalog(create_store(str(tmp_path_factory.mktemp("completed") / "store"))))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("select * from consumption_r", {"consumption_rounds"}),
        ("select c.loss_s", {"loss_sum"}),
        ("SELECT island FROM merged_s", {"merged_segments"}),
        ("SELEC", {"SELECT"}),
        (".sch", {".schema"}),
        (".schema polic", {"policies"}),
        (".ask repeated_documents ", {"run=", "times="}),
        (".ask loss_", {"loss_by_tier"}),
        (".at ", set()),
    ],
)
def test_words_are_completed_by_where_they_stand(completer: SqlCompleter, typed: str, expected: set[str]) -> None:
    found = completer.get_completions(Document(typed), CompleteEvent())
    assert {completion.text for completion in found} == expected
