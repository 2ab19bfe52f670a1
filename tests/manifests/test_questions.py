"""The named questions on a small run and its branch, with answers worked out by hand; and what their files say of them."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.errors import UserError
from manifests.questions import Parameter, find_question, questions
from manifests.store import Store
from manifests.tables import append
from tests.manifests.small_run import A1, A2, B2, C2, D3, DOCS, GLOBAL, GLOBAL_B, NAMES, START, tell


@pytest.fixture(scope="module")
def catalog(new_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return tell(Store(str(shutil.copytree(new_store, tmp_path_factory.mktemp("small") / "store"))))


def _rows(catalog: Catalog, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """The answer's rows, ids by their short names."""
    short = NAMES | {doc_id: name for name, doc_id in DOCS.items()}
    answer = catalog.ask(name, **parameters).to_pylist()
    return [tuple(short.get(v, v) if isinstance(v, bytes) else v for v in row.values()) for row in answer]


def test_consumption_of_a_segment_that_was_never_committed_is_not_shown(catalog: Catalog) -> None:
    assert catalog.rows("SELECT sum(tokens)::BIGINT AS n FROM consumption") == [{"n": 228}]
    assert catalog.rows("SELECT sum(tokens)::BIGINT AS n FROM raw.consumption") == [{"n": 388}]


@pytest.mark.parametrize(
    ("checkpoint", "mix"),
    [
        (A1, [("x", "S", 1, 10)]),
        (A2, [("x", "S", 2, 30)]),
        # What had gone into the fragment that it had seen.
        (B2, [("y", "B", 2, 120), ("x", "S", 1, 10)]),
        (GLOBAL, [("x", "S", 1, 10)]),
        # On a branch, what the run before it had brought in.
        (GLOBAL_B, [("z", "A", 2, 11), ("x", "S", 1, 10)]),
        (D3, [("y", "B", 2, 80), ("x", "S", 2, 17), ("z", "A", 2, 11)]),
    ],
    ids=["A1", "A2", "B2", "GLOBAL", "GLOBAL_B", "D3"],
)
def test_checkpoint_is_made_of_its_own_segments_and_of_those_merged(
    catalog: Catalog, checkpoint: bytes, mix: list[Any]
) -> None:
    rows = catalog.ask("checkpoint_mix", checkpoint=checkpoint).to_pylist()
    assert [(row["corpus"], row["tier"], row["spans"], row["tokens"]) for row in rows] == mix


def test_merges_are_listed_by_outer_gradient(catalog: Catalog) -> None:
    rows = catalog.rows(
        "SELECT merge, fragment, version, island, checkpoint, tokens, weight FROM merges WHERE run = 'r'"
    )
    merge = {"merge": 1, "fragment": 0, "version": 1, "island": 0, "checkpoint": A1, "tokens": 10, "weight": 100.0}
    assert rows == [merge]


def test_document_checkpoints_are_those_that_trained_inherited_or_merged_it(catalog: Catalog) -> None:
    def saw(name: str) -> list[tuple[Any, ...]]:
        return [(row[2], row[5], row[6]) for row in _rows(catalog, "document_checkpoints", doc_id=DOCS[name])]

    assert saw("a") == [
        ("A1", "trained", 10),
        ("A2", "inherited", 0),
        ("B2", "merged", 0),
        ("GLOBAL", "merged", 0),
        # The branch's island 0 goes on from A1; its island 1 saw what was merged before the branch.
        ("C2", "inherited", 0),
        ("D2", "merged", 0),
        ("C3", "inherited", 0),
        ("D3", "trained", 7),
        ("GLOBAL_B", "merged", 0),
    ]
    assert saw("b") == [("A2", "trained", 20), ("C3", "trained", 20)]
    assert saw("c") == [("B1", "trained", 40), ("B2", "trained", 80), ("D2", "trained", 40), ("D3", "inherited", 0)]
    assert saw("d") == []
    assert saw("e") == [("C2", "trained", 11), ("C3", "inherited", 0), ("D3", "merged", 0), ("GLOBAL_B", "merged", 0)]


def test_document_checkpoints_say_where_and_when(catalog: Catalog) -> None:
    first = _rows(catalog, "document_checkpoints", doc_id=DOCS["a"])[0]
    assert first == ("r", 0, "A1", 1, 1, "trained", 10, START)


def test_ancestry_lists_the_segments_that_made_a_checkpoint(catalog: Catalog) -> None:
    rows = _rows(catalog, "ancestry", checkpoint=D3)
    assert [(run, island, checkpoint, tokens) for run, island, _, _, checkpoint, tokens, _ in rows] == [
        ("r", 0, "A1", 10),
        ("r", 1, "B1", 40),
        ("b", 0, "C2", 11),
        ("b", 1, "D2", 40),
        ("b", 1, "D3", 7),
    ]
    assert _rows(catalog, "ancestry", checkpoint=C2)[0] == ("r", 0, 1, 1, "A1", 10, START)


def test_repeated_documents_are_counted_by_their_beginnings(catalog: Catalog) -> None:
    assert _rows(catalog, "repeated_documents", run="r", times=1) == [("c", "y", "B", 2, 120, 99)]
    # On the branch, with what the run before it brought in. Document e was cut in two, but begun once.
    assert _rows(catalog, "repeated_documents", run="b", times=1) == [
        ("c", "y", "B", 2, 80, 99),
        ("a", "x", "S", 2, 17, 99),
    ]
    assert ("e", "z", "A", 1, 11, 99) in _rows(catalog, "repeated_documents", run="b", times=0)
    assert _rows(catalog, "repeated_documents", run="r") == []


def test_loss_by_tier_is_a_mean_over_tokens(catalog: Catalog) -> None:
    assert _rows(catalog, "loss_by_tier", run="r", bin=1) == [
        ("S", "x", 1, 10, 4.0),
        ("S", "x", 2, 20, 3.0),
        ("B", "y", 1, 40, 5.0),
        ("B", "y", 2, 80, 2.0),
    ]
    whole = [("S", "x", 2, 30, pytest.approx(100 / 30)), ("B", "y", 2, 120, pytest.approx(3.0))]
    assert _rows(catalog, "loss_by_tier", run="r") == whole


def test_loss_by_tier_of_a_branch_begins_in_the_run_before(catalog: Catalog) -> None:
    assert _rows(catalog, "loss_by_tier", run="b", bin=1) == [
        ("S", "x", 1, 10, 4.0),
        # Both islands: 20 tokens at 2.0, 7 at 1.0.
        ("S", "x", 3, 27, pytest.approx(47 / 27)),
        # The second span's loss was not measured.
        ("A", "z", 2, 11, 6.0),
        ("B", "y", 1, 40, 5.0),
        ("B", "y", 2, 40, 4.0),
    ]


def test_tier_changes_count_what_moved(catalog: Catalog) -> None:
    assert sorted(_rows(catalog, "tier_changes", before=1, after=2), key=str) == [
        ("B", "A", "y", 1),
        ("C", None, None, 1),
        ("S", "A", "x", 1),
        (None, "C", "z", 1),
    ]
    assert _rows(catalog, "tier_changes", before=2, after=2) == []


def test_only_island_is_about_what_islands_read_themselves(catalog: Catalog) -> None:
    assert _rows(catalog, "only_island", run="r", island=0, other=1) == [("a", "x", "S", 10, 1), ("b", "x", "S", 20, 2)]
    assert _rows(catalog, "only_island", run="r", island=1, other=0) == [("c", "y", "B", 120, 1)]
    # On the branch both have read a: island 0 in the run before.
    assert _rows(catalog, "only_island", run="b", island=0, other=1) == [("e", "z", "A", 11, 2), ("b", "x", "S", 20, 3)]
    assert _rows(catalog, "only_island", run="b", island=1, other=0) == [("c", "y", "B", 80, 1)]


def test_license_violations_name_the_documents(catalog: Catalog) -> None:
    violation = ("b", 0, "z", "closed", "e", "e", 11, 2)
    assert _rows(catalog, "license_violations", allowed=["l"]) == [violation]
    assert _rows(catalog, "license_violations", allowed=["l"], run="b") == [violation]
    assert _rows(catalog, "license_violations", allowed=["l"], run="r") == []
    assert _rows(catalog, "license_violations", allowed=["l", "closed"]) == []


def test_license_violations_of_a_branch_hold_what_the_run_before_brought_in(catalog: Catalog) -> None:
    rows = _rows(catalog, "license_violations", allowed=["closed"], run="b")
    assert [(run, island, doc, tokens, step) for run, island, _, _, _, doc, tokens, step in rows] == [
        ("b", 0, "b", 20, 3),
        ("b", 1, "c", 40, 2),
        ("b", 1, "a", 7, 3),
        ("r", 0, "a", 10, 1),
        ("r", 1, "c", 40, 1),
    ]


def test_corpus_effect_is_split_where_the_island_first_read_the_corpus(catalog: Catalog) -> None:
    assert _rows(catalog, "corpus_effect", run="b", corpus="z") == [
        (0, "S", 2, 10, 4.0, 20, 2.0, 2.0, 1.25),
        # Island 1 never read it: 40 tokens at 5.0 and 40 at 4.0, all before.
        (1, "S", None, 7, 1.0, 0, None, 2.5, None),
        (1, "B", None, 80, 4.5, 0, None, 2.5, None),
    ]
    assert _rows(catalog, "corpus_effect", run="r", corpus="y") == [
        (0, "S", None, 30, pytest.approx(100 / 30), 0, None, 1.5, None)
    ]


def test_online_influence_adds_up_what_was_measured(catalog: Catalog) -> None:
    assert _rows(catalog, "online_influence", run="r") == [
        ("S", "x", "real", 30, 20, 0.5, pytest.approx(25_000.0), 0.0),
        ("B", "y", "real", 120, 80, -0.25, pytest.approx(-3125.0), 1.0),
    ]
    # The branch's island 0 goes on from A1, so that A2 is none of its own.
    assert _rows(catalog, "online_influence", run="b") == [
        ("S", "x", "real", 37, 20, 1.0, pytest.approx(50_000.0), 0.0),
        ("A", "z", "real", 11, 5, 0.25, pytest.approx(50_000.0), 0.0),
        ("B", "y", "real", 80, 0, None, None, None),
    ]


def test_closeness_lists_every_pair_of_a_merge_once(new_store: Path, tmp_path: Path) -> None:
    store = Store(str(shutil.copytree(new_store, tmp_path / "store")))
    kind = {"config": "{}", "command": "c", "code_version": "v"}
    append(store, "runs", [kind | {"run": "r"}])
    details = [
        {"merge": 1, "contributions": [], "islands": [0, 2, 5], "cosines": [[0.5, -0.25], [0.125], []]},
        {"merge": 2, "contributions": [], "islands": [3], "cosines": [[]]},
        {"merge": 3, "contributions": [], "islands": [], "cosines": []},
    ]
    append(
        store,
        "events",
        [{"run": "r", "kind": "merge", "fragment": 1, "version": 1, "detail": json.dumps(d)} for d in details],
    )
    catalog = Catalog(store)
    rows = [tuple(row.values()) for row in catalog.ask("closeness", run="r").to_pylist()]
    assert rows == [
        (1, "0 and 2", 0, 2, 1, 0.5),
        (1, "0 and 5", 0, 5, 1, -0.25),
        (1, "2 and 5", 2, 5, 1, 0.125),
    ]
    of_island = catalog.ask("closeness", run="r", island=2).to_pylist()
    assert [row["pair"] for row in of_island] == ["0 and 2", "2 and 5"]


def test_unknown_question_names_those_that_there_are(catalog: Catalog) -> None:
    with pytest.raises(UserError, match="checkpoint_mix"):
        catalog.ask("nothing")
    with pytest.raises(UserError, match="no question named"):
        find_question("../ledger")


def test_wrong_parameters_are_told_with_those_that_there_are(catalog: Catalog) -> None:
    with pytest.raises(UserError, match=r"needs run; it takes run VARCHAR \(.+\); times INTEGER = 3"):
        catalog.ask("repeated_documents")
    with pytest.raises(UserError, match=r"has no parameter 'time'; it takes run"):
        catalog.ask("repeated_documents", run="r", time=3)


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.name)
def test_question_declares_the_parameters_that_it_uses(question: Any) -> None:
    assert question.summary.endswith("?")
    used = set(re.findall(r"\$(\w+)", question.sql))
    assert used == {parameter.name for parameter in question.parameters}
    assert question.complete({p.name: None for p in question.parameters if p.default is None}).keys() == used


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        ("BLOB", "01FF", b"\x01\xff"),
        ("INTEGER", " 7", 7),
        ("BIGINT", "-5000000000", -5_000_000_000),
        ("DOUBLE", "1e-3", 0.001),
        ("BOOLEAN", "True", True),
        ("VARCHAR", "a b", "a b"),
        ("VARCHAR[]", "odc-by, MIT,", ["odc-by", "MIT"]),
        ("TIMESTAMP", "2026-01-31T12:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    ],
)
def test_texts_become_values(type_: str, text: str, value: Any) -> None:
    assert Parameter(name="n", type=type_, default=None, meaning="m").value(text) == value


@pytest.mark.parametrize(
    ("type_", "text"),
    [("BLOB", "xyz"), ("INTEGER", "3000000000"), ("DOUBLE", "much"), ("BOOLEAN", "1"), ("TIMESTAMP", "yesterday")],
)
def test_text_of_another_type_is_refused_with_the_meaning(type_: str, text: str) -> None:
    with pytest.raises(UserError, match=f"n='{text}' is not .*; n is the meaning"):
        Parameter(name="n", type=type_, default=None, meaning="the meaning").value(text)
