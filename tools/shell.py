"""The prompt of `atoll sql`: input over several lines, history, completion. What it runs is in asking.py."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent

from manifests.catalog import Catalog
from manifests.cut import parse_at
from manifests.editions import rights_of
from manifests.errors import AtollError, UserError
from manifests.questions import ANSWERS, MACROS, VIEWS, questions
from manifests.schemas import TABLES
from manifests.store import Store
from tools.asking import ask_question, question_table, run_statements
from tools.output import STDERR, Format, print_answer

_HELP = """A statement ends with a semicolon and may go over several lines. Tab completes; Ctrl-C stops; Ctrl-D leaves. And:
  .tables                  the tables, views and table macros, and what they hold
  .schema TABLE            its columns: type, unit, meaning
  .ask [NAME [NAME=VALUE]] a named question, or the list of them
  .at POINT                look from a time, a checkpoint or TABLE=VERSION,…; .at now: from now
  .refresh                 look again, at what has been written since
  .quit                    leave"""
_COMMANDS = (".ask", ".at", ".help", ".quit", ".refresh", ".schema", ".tables")
_LAST_WORD = re.compile(r"\w*$")
_COMMAND = re.compile(r"\.\w*")
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|\$(\w*)\$.*?\$\1\$""", re.S)


def is_whole(text: str) -> bool:
    """Whether Enter sends the input off: a command, nothing at all, or SQL up to a semicolon that isn't in a text or a comment."""
    bare = _QUOTED.sub("", text).strip()
    if not bare or text.lstrip().startswith("."):
        return True
    return bare.endswith(";") and not re.search(r"""['"]|/\*""", bare)


def history_path() -> Path:
    """Where the inputs of earlier prompts are kept."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "atoll" / "sql-history"


class Shell:
    """A prompt over one store. An error is one line, and the prompt goes on."""

    def __init__(self, store: Store, *, at: str | None, reader: str, format_: Format) -> None:
        """
        Args:
            store: the store.
            at: the point to look from, as `--at` takes it; None: now.
            reader: who asks, as `--as` takes it.
            format_: how answers are printed.

        Raises:
            UserError: the store has nothing at this point.
        """
        self._store = store
        self._reader = reader
        self._format = format_
        self._look_from(at)

    def run(self) -> None:
        """Reads and answers until Ctrl-D or `.quit`."""
        session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=SqlCompleter(self._catalog),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation="   ..> ",
        )
        STDERR.print(f"{self._store.uri}, read-only; .help says what can be typed here", markup=False)
        while True:
            try:
                text = session.prompt("atoll> " if self._at is None else f"atoll at {self._at}> ").strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if text in (".quit", ".exit"):
                return
            self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            if text.startswith("."):
                self._command(text)
            elif _QUOTED.sub("", text).strip(" \n;"):
                run_statements(self._catalog, text, self._format)
        except AtollError as e:
            print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)

    def _command(self, text: str) -> None:
        try:
            name, *words = shlex.split(text.rstrip("; "))
        except ValueError as e:
            raise UserError(f"{text}: {e}") from e
        if name == ".tables":
            rows = [{"name": table, "holds": f"a row is {spec.row}"} for table, spec in TABLES.items()]
            rows += [{"name": f"{n}(…)" if n in MACROS else n, "holds": asked} for n, asked in ANSWERS.items()]
            print_answer(pa.Table.from_pylist(rows), self._format)
        elif name == ".schema":
            self._show_schema(" ".join(words))
        elif name == ".ask" and words:
            print_answer(ask_question(self._catalog, words[0], words[1:]), self._format)
        elif name == ".ask":
            print_answer(question_table(), self._format)
        elif name == ".at" and words:
            self._look_from(None if words == ["now"] else " ".join(words))
        elif name == ".refresh":
            self._look_from(self._at)
        elif name == ".help":
            print(_HELP)
        else:
            raise UserError(f"{text}: no such command, or it lacks a word; .help lists them")

    def _show_schema(self, name: str) -> None:
        if name in VIEWS:
            print_answer(self._catalog.query(f"SELECT column_name, column_type FROM (DESCRIBE {name})"), self._format)
            return
        from tools.commands.keep import schema

        schema(name, self._format)

    def _look_from(self, at: str | None) -> None:
        rights = rights_of(self._store, f"sql:{self._reader}")
        self._catalog = Catalog(self._store, at=parse_at(at) if at is not None else None, rights=rights)
        self._at = at


class SqlCompleter(Completer):
    """Completes commands, their arguments, and in SQL the names of tables, columns, views and macros, and key words."""

    def __init__(self, catalog: Catalog) -> None:
        listed = catalog.connection.execute("SELECT keyword_name FROM duckdb_keywords()").fetchall()
        columns = {column for spec in TABLES.values() for column in spec.schema.names}
        self._tables = sorted({*TABLES, *VIEWS})
        words = [*self._tables, *sorted(MACROS), *sorted(columns), *sorted(word for (word,) in listed)]
        self._words = list(dict.fromkeys(words))

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What the word before the cursor may become."""
        before = document.text_before_cursor.lstrip()
        word = before if _COMMAND.fullmatch(before) else _LAST_WORD.findall(before)[0]
        for candidate in self._candidates(before):
            if candidate.startswith(word.lower()):
                shown = candidate.upper() if word.isupper() else candidate
                yield Completion(shown, start_position=-len(word))

    def _candidates(self, before: str) -> list[str]:
        if not before.startswith("."):
            return self._words
        if _COMMAND.fullmatch(before):
            return list(_COMMANDS)
        words = before.split()
        if words[0] == ".schema":
            return self._tables
        if words[0] != ".ask":
            return []
        named = [q for q in questions() if len(words) > 1 and q.name == words[1]]
        return [f"{p.name}=" for p in named[0].parameters] if named else [q.name for q in questions()]


def _history() -> History:
    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as e:
        STDERR.print(f"{path} can't be written: {e.strerror}; what is typed here is forgotten", markup=False)
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_whole(event.current_buffer.text):
            event.current_buffer.validate_and_handle()
        else:
            event.current_buffer.newline(copy_margin=False)

    return keys
