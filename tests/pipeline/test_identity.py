"""Identity: which differences of two texts matter, and that the holdout is a pure function of the id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.identity import document_id, hash_text, in_holdout, normalise

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
lines = st.text(alphabet="aB \t\r\n\u0301e\u00e9\u2000")


@given(texts | lines)
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cafe\u0301", "caf\u00e9"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("one  \t\ntwo", "one\ntwo"),
        ("\n\n one \n", "one"),
    ],
)
def test_differences_without_meaning_give_the_same_document(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)
    assert document_id(one) == document_id(other)


@pytest.mark.parametrize(
    ("one", "other"), [("One", "one"), ("a  b", "a b"), ("if x:\n    y", "if x:\ny"), ("a\n\nb", "a\nb"), ("x²", "x2")]
)
def test_differences_with_meaning_give_another_document(one: str, other: str) -> None:
    assert document_id(one) != document_id(other)


def test_an_id_is_16_bytes_and_stays_the_same_for_ever() -> None:
    assert document_id("An atoll is a ring of islands.").hex() == "3efd18e3d7dbc5c08a3677da65ed06d6"
    assert hash_text(b"An atoll is a ring of islands.") == document_id(" An atoll is a ring of islands. ")


def test_text_that_is_no_unicode_has_no_id() -> None:
    with pytest.raises(UnicodeEncodeError):
        document_id("a\ud800b")


@given(st.binary(min_size=16, max_size=16), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_holdout_contains_the_smaller_one(doc_id: bytes, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert in_holdout(doc_id, large) or not in_holdout(doc_id, small)
    assert not in_holdout(doc_id, 0.0)
    assert in_holdout(doc_id, 1.0)


def test_the_holdout_has_about_the_asked_share() -> None:
    held = sum(in_holdout(document_id(f"document {i}"), 0.1) for i in range(10_000))
    assert 900 < held < 1100
