"""`atoll tier`: one table on stdout in every format, the talk on stderr, and a line for each mistake."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime

import pytest

from manifests.catalog import Catalog
from manifests.jobs import make_job
from manifests.store import Store
from tools.cli import _run
from tools.commands.tier import parse_sizes

SCORES = [5.0, 3.0, 1.0, 1.0, -0.001, -1.0]


@pytest.fixture
def scored(store: Store) -> Store:
    """Six documents of two corpora, scored by one job."""
    ingest, score = make_job(store, "ingest", config={}, inputs={}), make_job(store, "score", config={}, inputs={})
    documents = [
        {
            "doc_id": bytes([n] * 16), "corpus": "odd" if n % 2 else "even", "origin": "real", "license": "l", "access": "public",
            "split": "train", "text_bytes": 100, "source_uri": "x", "source_row": n, "job": ingest.id,
        }
        for n in range(6)
    ]  # fmt: skip
    rows = [
        {
            "doc_id": bytes([n] * 16), "method": "m", "score": value, "stderr": 0.01, "checkpoint": "k", "probe": "p",
            "scored_at": datetime.now(UTC), "direct": True, "job": score.id,
        }
        for n, value in enumerate(SCORES)
    ]  # fmt: skip
    ingest.append("documents", documents, part=1)
    ingest.commit({})
    score.append("influence", rows, part=1)
    score.commit({})
    return store


def test_table_comes_by_tier_or_by_corpus_and_stays_one_table(
    scored: Store, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert _run(["tier", "--store", scored.uri, "--format", "json"]) == 0
    shown = capfdbinary.readouterr()
    assert [json.loads(line)["tier"] for line in shown.out.splitlines()] == ["S", "A", "B", "C"]
    err = " ".join(shown.err.decode().split())
    assert "S holds 33% of the documents and 80% of the positive influence" in err
    assert "corpus even: 33% of its 3 documents carry 80% of its positive influence" in err
    assert "since version" not in err

    assert _run(["tier", "--store", scored.uri, "--by", "corpus", "--format", "csv", "--size", "S=..0.2"]) == 0
    shown = capfdbinary.readouterr()
    rows = list(csv.DictReader(io.StringIO(shown.out.decode())))
    assert [(row["corpus"], row["tier"]) for row in rows][:3] == [("even", "S"), ("even", "A"), ("even", "B")]
    err = " ".join(shown.err.decode().split())
    assert "since version 1: 2 moved (1 from S to A, 1 from A to B), 4 stayed, 0 new, 0 gone" in err
    assert "more than S may have" in err


def test_named_score_jobs_are_combined(scored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = Catalog(scored).rows("SELECT job FROM jobs WHERE kind = 'score'")
    assert _run(["tier", "--store", scored.uri, "--score-job", row["job"], "--score-job", row["job"]]) == 0
    assert row["job"] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["--size", "S"], "TIER=MIN..MAX"),
        (["--size", "S=0.5"], "TIER=MIN..MAX"),
        (["--size", "S=.."], "TIER=MIN..MAX"),
        (["--size", "S=a..b"], "TIER=MIN..MAX"),
        (["--size", "X=..0.5"], "--size X=0..0.5: there is no tier 'X'"),
        (["--size", "S=..50"], "from 0 to 1"),
        (["--size", "S=0.5..0.2"], "above its maximum"),
        (["--size", "S=0.1..", "--size", "S=..0.2"], "has a size already"),
        (["--size", "A=0.7..", "--size", "B=0.7.."], "--size: the minima add up to 1.4"),
        (["--size", "S=..0.1", "--size", "A=..0.1", "--size", "B=..0.1"], "--size: S, A and B may hold"),
        (["--score-job", "nope"], "no score job 'nope'"),
        (["--by", "author"], "--by"),
        (["--confidence", "0.3"], "confidence"),
    ],
)
def test_mistakes_are_one_line_with_the_mend(
    arguments: list[str], mend: str, scored: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["tier", "--store", scored.uri, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    assert shown.err.startswith("error: ")
    assert mend in shown.err
    assert Catalog(scored).rows("SELECT * FROM raw.tiers") == []


def test_bounds_that_are_not_given_are_open() -> None:
    assert parse_sizes(["S=0.05..0.5", "C=..0.2", "A=0.1.."]) == {"S": (0.05, 0.5), "C": (0.0, 0.2), "A": (0.1, 1.0)}
    assert parse_sizes(["C=0..0"]) == {"C": (0.0, 0.0)}
