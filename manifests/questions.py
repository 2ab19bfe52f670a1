"""The SQL that stands in files: named questions, the views and macros that they share.

`sql/questions/` holds what `atoll ask` offers, `sql/` itself what our own commands ask; `sql/views/` and `sql/macros/` are made in every catalog.
"""

from __future__ import annotations

from pathlib import Path

from manifests.errors import UserError

_FOLDER = Path(__file__).parent / "sql"


def _files(folder: str) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted((_FOLDER / folder).glob("*.sql"))}


VIEWS = _files("views")
"""View by name → the statement that makes it."""
MACROS = _files("macros")
"""Table macro by name → the statement that makes it."""


def question(name: str) -> str:
    """The SQL of a named question.

    Raises:
        UserError: there is none of this name.
    """
    for folder in ("questions", "."):
        path = _FOLDER / folder / f"{name}.sql"
        if path.is_file():
            return path.read_text()
    known = ", ".join(sorted(p.stem for p in (_FOLDER / "questions").glob("*.sql")))
    raise UserError(f"no question named {name!r}; there are: {known}")
