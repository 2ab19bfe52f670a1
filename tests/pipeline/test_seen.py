"""The set of ids on disk says of each id once that it is new."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import Failure
from pipeline.seen import SeenIds


@given(st.lists(st.lists(st.integers(0, 30))))
def test_an_id_is_new_the_first_time_only(batches: list[list[int]]) -> None:
    known: set[bytes] = set()
    with SeenIds() as seen:
        for batch in batches:
            ids = [number.to_bytes(16) for number in batch]
            expected = []
            for doc_id in ids:
                expected.append(doc_id not in known)
                known.add(doc_id)
            assert seen.add(ids) == expected


def test_a_full_disk_is_a_failure_that_says_what_to_do() -> None:
    with SeenIds() as seen:
        seen._database.execute("PRAGMA max_page_count = 8")
        with pytest.raises(Failure, match="name a larger one by TMPDIR") as caught:
            seen.add([number.to_bytes(16) for number in range(10_000)])
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
