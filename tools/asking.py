"""Putting questions to a catalog: statements one after the other, named questions with parameters given as text; Ctrl-C stops a query."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.errors import AtollError, UserError
from manifests.questions import find_question, questions
from manifests.statements import split_statements
from tools.output import Format, print_answer
from tools.provenance import find_checkpoint, require_run

T = TypeVar("T")
_POLL_S = 0.1


def run_statements(catalog: Catalog, text: str, format_: Format, *, out: Path | None = None) -> None:
    """Answers the statements of a text one after the other, up to the first that fails.

    Raises:
        UserError: one is refused, there is none, or there are several for one file.
    """
    statements = split_statements(catalog.connection, text)
    if not statements:
        raise UserError('no query; as in `atoll sql "select * from runs"`, or `atoll sql -f FILE`')
    if len(statements) > 1 and (out is not None or format_ is Format.parquet):
        raise UserError(f"one answer makes one file, these are {len(statements)} statements; run them one by one")
    for number, statement in enumerate(statements, 1):
        try:
            answer = interruptibly(catalog, partial(catalog.query, statement))
        except AtollError as e:
            if len(statements) == 1:
                raise
            raise type(e)(f"statement {number} of {len(statements)}: {e}") from e
        print_answer(answer, format_, out=out)


def ask_question(catalog: Catalog, name: str, pairs: Iterable[str]) -> pa.Table:
    """Answers a named question.

    Args:
        catalog: where it's put.
        name: of the question.
        pairs: its parameters, as NAME=VALUE.

    Raises:
        UserError: no such question, parameter, run or checkpoint, or a value of another type.
    """
    question = find_question(name)
    texts = {}
    for pair in pairs:
        parameter, sign, text = pair.partition("=")
        if not sign:
            raise UserError(f"parameter {pair!r}: write NAME=VALUE, as in --param run=first")
        texts[parameter.strip()] = text
    question.complete(texts)
    values: dict[str, Any] = {}
    for known in question.parameters:
        if known.name not in texts:
            continue
        text = texts[known.name]
        if known.name == "checkpoint":
            values[known.name] = find_checkpoint(catalog, text)
        else:
            values[known.name] = known.value(text)
        if known.name == "run" and values["run"] is not None:
            require_run(catalog, values["run"])
    return interruptibly(catalog, lambda: catalog.ask(name, **values))


def question_table() -> pa.Table:
    """The named questions and their parameters."""
    rows = [
        {"question": q.name, "asks": q.summary, "parameters": ", ".join(str(p) for p in q.parameters)}
        for q in questions()
    ]
    return pa.Table.from_pylist(rows)


def interruptibly(catalog: Catalog, work: Callable[[], T]) -> T:
    """Does something with a catalog in another thread, since DuckDB doesn't look for Ctrl-C: then the query is stopped, and KeyboardInterrupt raised."""
    with ThreadPoolExecutor(1) as pool:
        future: Future[T] = pool.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.done():
                catalog.connection.interrupt()
                wait([future], timeout=_POLL_S)
            raise
