"""The report: numbers worked out by hand on a small store, a page that loads nothing, names of strangers that stay text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.consumption import append_consumption
from manifests.errors import UserError
from manifests.jobs import make_job
from manifests.store import Store
from manifests.tables import append, to_table
from tools.report import final_table, write_report

HOSTILE = '</script><img src=http://evil/x onerror=alert(1)>"&'
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CONFIG = {"num_islands": 2, "sync_every": 4, "num_fragments": 2, "tier_version": 1}


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def checkpoint(name: str, island: int, second: int, **more: Any) -> dict[str, Any]:
    plain = {
        "checkpoint": name.encode(), "run": "r", "island": island, "incarnation": 0, "round": 1, "step": 4, "tokens": 40,
        "tokens_s": 0, "tokens_a": 0, "tokens_b": 0, "tokens_c": 0, "clock": [1, 0], "merged": [], "object": "o", "hash": "h",
        "size_bytes": 1, "stream": "{}", "mixture": "{}", "anchor": True, "written_at": at(second),
    }  # fmt: skip
    return plain | more


def span(name: str, island: int, step: int, tier: str, tokens: int, loss: float | None) -> dict[str, Any]:
    return {
        "run": "r", "island": island, "incarnation": 0, "step": step, "position": 0, "shard": tier, "shard_position": 0, "tier": tier,
        "origin": "real", "token_start": 0, "tokens": tokens, "loss": loss, "checkpoint": name.encode(),
    }  # fmt: skip


def mixture(island: int, round_: int, strategy: str, weights: tuple[float, ...], second: int) -> dict[str, Any]:
    shares = dict(zip(("weight_s", "weight_a", "weight_b", "weight_c"), weights, strict=True))
    decision = {
        "run": "r",
        "island": island,
        "incarnation": 0,
        "round": round_,
        "strategy": strategy,
        "reason": HOSTILE,
    }
    made = {"query": "select", "parameters": "{}", "inputs": "{}"}
    return decision | shares | made | {"tier_version": 1, "written_at": at(second)}


def event(kind: str, second: int, island: int | None = None, **detail: Any) -> dict[str, Any]:
    row = {"run": "r", "kind": kind, "island": island, "detail": json.dumps(detail), "written_at": at(second)}
    return row | ({"fragment": 0, "version": detail["merge"]} if kind == "merge" else {})


def run_row(name: str, branch: Mapping[str, Any] | None = None) -> dict[str, Any]:
    parent = branch["parent_run"] if branch else None
    row = {"run": name, "parent_run": parent, "config": json.dumps(CONFIG), "command": "", "code_version": ""}
    return row | {"branch": json.dumps(branch) if branch else None}


def add_data(store: Store, corpus: str, label: str | None) -> None:
    job = make_job(store, "test", config={}, inputs={})
    documents = [
        {
            "doc_id": tier.encode(), "corpus": corpus, "origin": "real", "license": "unknown", "access": "open", "split": "train",
            "label": label, "text_bytes": 10, "source_uri": "u", "source_row": 0, "job": job.id,
        }
        for tier in "SABC"
    ]  # fmt: skip
    scores = {"S": 6.0, "A": 3.0, "B": 1.0, "C": -2.0}
    tiers = [
        {"tier_version": 1, "doc_id": t.encode(), "tier": t, "score": s, "method": "m", "job": job.id}
        for t, s in scores.items()
    ]
    shards = [
        {
            "pool": "p", "shard": tier, "tier": tier, "corpus": corpus, "origin": "real", "license": "unknown", "access": "open", "entry": "{}",
            "documents": 1, "tokens": 9, "raw_bytes": 1, "zip_bytes": 1, "score_low": 0.0, "score_high": 1.0, "job": job.id,
        }
        for tier in "SABC"
    ]  # fmt: skip
    job.append("documents", documents, part=1)
    job.append("shard_index", shards, part=1)
    job.append("tiers", tiers, part=1)
    job.commit({})


def add_run(store: Store) -> None:
    """Two islands of 40 tokens each in 4 steps; island 1 died once; merge 1 took from both, merge 2 from island 0."""
    append(store, "runs", [run_row("r")])
    spans = [
        span("i0", 0, 1, "S", 10, 4.0), span("i0", 0, 1, "A", 10, 2.0), span("i0", 0, 4, "S", 20, 1.0),
        span("i1", 1, 2, "B", 30, 3.0), span("i1", 1, 4, "C", 10, None), span("lost", 1, 9, "C", 10, 9.0),
    ]  # fmt: skip
    append_consumption(store, to_table("consumption", spans), writer="w", sequence=1)
    islands = [
        checkpoint("i0", 0, 10, tokens_s=30, tokens_a=10, loss=1.5, holdout_loss=2.5),
        checkpoint("i1", 1, 12, tokens_b=30, tokens_c=10, loss=3.5, holdout_loss=2.75),
    ]
    counted = {"step": 8, "tokens": 80, "tokens_s": 30, "tokens_a": 10, "tokens_b": 30, "tokens_c": 10}
    first = checkpoint("g1", -1, 20, **counted, merged=[b"i0", b"i1"], holdout_loss=2.25)
    append(
        store,
        "checkpoints",
        [*islands, first, first | {"checkpoint": b"g2", "written_at": at(21), "holdout_loss": 2.0}],
    )
    decisions = [
        mixture(0, 0, "aggressive", (0.4, 0.4, 0.2, 0.0), 0),
        mixture(1, 0, "adaptive", (0.2, 0.4, 0.3, 0.1), 0),
        mixture(1, 1, "adaptive", (0.1, 0.3, 0.455, 0.145), 5),
    ]
    append(store, "mixtures", decisions)
    both = [{"island": 0, "checkpoint": b"i0".hex()}, {"island": 1, "checkpoint": b"i1".hex()}]
    joined = [event("island_joined", s, i, incarnation=n) for s, i, n in ((0, 0, 0), (1, 1, 0), (4, 1, 1))]
    merges = [event("merge", 18, merge=1, contributions=both), event("merge", 19, merge=2, contributions=both[:1])]
    others = [event("island_died", 3, 1, how=HOSTILE), event(HOSTILE, 6, 0), event("finished", 22, merges=2)]
    append(store, "events", [*joined, *merges, *others])


class Tags(HTMLParser):
    """All tags of a page with their attributes, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] not in ("script", "style"):
            self.text += data


def page_of(store: Store, tmp_path: Path, run: str = "r") -> str:
    write_report(Catalog(store), run, tmp_path / "out" / "report.html")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    return (tmp_path / "out" / "report.html").read_text()


def test_the_final_table_has_a_row_for_each_island_and_one_for_the_global_state(store: Store) -> None:
    add_data(store, "c", None)
    add_run(store)
    names = ["island", "strategy", "mix", "steps", "tokens", "train_loss", "holdout_loss", "starts", "merges"]
    table = final_table(Catalog(store), "r")
    assert table.column_names == names
    assert [list(row.values()) for row in table.to_pylist()] == [
        ["0", "aggressive", ".40/.40/.20/.00", 4, 40, 1.5, 2.5, 1, 2],
        ["1", "adaptive", ".10/.30/.46/.14", 4, 40, 3.5, 2.75, 2, 1],
        ["global", None, None, 8, 80, None, 2.0, None, 2],
    ]


def test_losses_are_weighted_by_tokens_and_leave_out_what_does_not_count(store: Store) -> None:
    add_run(store)
    catalog = Catalog(store)
    # Island 0, step 1: (10 · 4 + 10 · 2) / 20. Step 9 of island 1 has no checkpoint, its step 4 no loss.
    assert [tuple(r.values()) for r in catalog.ask("report_losses", run="r", points=400).to_pylist()] == [
        (0, 1, 3.0), (0, 4, 1.0), (1, 2, 3.0)
    ]  # fmt: skip
    # One point for all: (10 · 4 + 10 · 2 + 20 · 1) / 40.
    assert catalog.ask("report_losses", run="r", points=1).to_pylist()[0] == {"island": 0, "step": 4, "loss": 2.0}
    holdout = [tuple(r.values()) for r in catalog.ask("report_holdout", run="r").to_pylist()]
    assert holdout == [(0, 4, 2.5), (1, 4, 2.75), (-1, 4, 2.25), (-1, 4, 2.0)]


def test_mixes_are_what_was_trained_on_and_what_was_asked(store: Store) -> None:
    add_run(store)
    catalog = Catalog(store)
    realised = catalog.ask("report_realised", run="r", cycle_steps=2, bars=60).to_pylist()
    assert [tuple(row.values()) for row in realised] == [
        (0, 1.0, 1, 0.5, 0.5, 0.0, 0.0), (0, 4.0, 1, 1.0, 0.0, 0.0, 0.0), (1, 2.0, 1, 0.0, 0.0, 1.0, 0.0), (1, 4.0, 1, 0.0, 0.0, 0.0, 1.0)
    ]  # fmt: skip
    whole = catalog.ask("report_realised", run="r", cycle_steps=2, bars=1).to_pylist()
    assert tuple(whole[0].values()) == (0, 2.5, 4, 0.75, 0.25, 0.0, 0.0)
    asked = catalog.ask("report_asked", run="r", round_steps=2).to_pylist()
    assert [(row["island"], row["step"], row["s"]) for row in asked] == [
        (0, 0.5, 0.4), (0, 4.5, 0.4), (1, 0.5, 0.2), (1, 2.5, 0.1), (1, 4.5, 0.1)
    ]  # fmt: skip
    assert asked[0]["sab"] == pytest.approx(1.0)


def test_the_concentration_curve_sums_up_positive_influence_from_the_top(store: Store) -> None:
    add_data(store, "c", None)
    curve = Catalog(store).ask("report_concentration", tier_version=1, points=400).to_pylist()
    expected = [(0.25, 0.6, "S"), (0.5, 0.9, "A"), (0.75, 1.0, "B"), (1.0, 1.0, "C")]
    assert [(row["documents"], pytest.approx(row["influence"]), row["tier"]) for row in curve] == expected


def test_a_merge_is_an_event_of_every_island_that_it_took_something_from(store: Store) -> None:
    add_run(store)
    catalog = Catalog(store)
    rows = catalog.ask("report_events", run="r", points=400).to_pylist()
    assert [(row["island"], row["detail"][:8]) for row in rows if row["kind"] == "merge"] == [
        (0, "merge 1:"), (1, "merge 1:"), (0, "merge 2:")
    ]  # fmt: skip
    assert [row["island"] for row in rows if row["kind"] == "finished"] == [-1]
    thinned = catalog.ask("report_events", run="r", points=1).to_pylist()
    assert [row["detail"][:8] for row in thinned if row["kind"] == "merge"] == ["merge 2:"]


def test_the_page_holds_all_parts_and_loads_nothing(store: Store, tmp_path: Path) -> None:
    add_data(store, "books", "good")
    add_run(store)
    page = page_of(store, tmp_path)
    tags = Tags(page)
    assert not [
        tag for tag, attributes in tags.found if tag in ("link", "img", "iframe") or {"src", "href"} & attributes.keys()
    ]
    assert page.count("Plotly.newPlot(") >= 8
    plots = {attributes.get("id") for tag, attributes in tags.found if tag == "div"}
    assert plots >= {"train", "holdout", "mix0", "mix1", "tiers", "concentration", "made", "events"}
    assert "the ledger agrees with the islands' own counters: 80 tokens" in tags.text
    assert "label: good" in page
    assert "books" in tags.text


def test_names_from_the_store_stay_text(store: Store, tmp_path: Path) -> None:
    add_data(store, HOSTILE, HOSTILE)
    add_run(store)
    branch = {"parent_run": "r", "predicate": f"corpus = '{HOSTILE}'", "merge": 1, "island_checkpoints": {}}
    append(store, "runs", [run_row(HOSTILE, branch)])
    page = page_of(store, tmp_path)
    assert "<img" not in page
    assert HOSTILE not in page
    assert f"corpus = '{HOSTILE}'" in Tags(page).text


def test_a_branch_says_what_it_took_back_and_where_idle_islands_start(store: Store, tmp_path: Path) -> None:
    add_data(store, "c", None)
    add_run(store)
    branch = {
        "parent_run": "r",
        "predicate": "tier < 'B'",
        "merge": 1,
        "island_checkpoints": {"0": b"i0".hex(), "1": None},
    }
    append(store, "runs", [run_row("b", branch)])
    counted = {"tokens_s": 30, "tokens_a": 10, "holdout_loss": 1.75}
    append(store, "checkpoints", [checkpoint("gb", -1, 30, run="b", merged=[b"i0"], **counted)])
    assert "WHERE tier < 'B'" in Tags(page_of(store, tmp_path, "b")).text
    assert [row["tokens"] for row in final_table(Catalog(store), "b").to_pylist()] == [40, None, 40]
    assert Catalog(store).ask("report_branches", run="r").to_pylist() == [
        {"run": "b", "took_back": "tier < 'B'", "kept_merges": 1, "tokens": 40, "holdout_loss": 1.75}
    ]
    assert "1.7500" in Tags(page_of(store, tmp_path, "r")).text


def test_a_run_with_a_first_checkpoint_only_has_a_page(store: Store, tmp_path: Path) -> None:
    append(store, "runs", [run_row("r")])
    append(store, "checkpoints", [checkpoint("g", -1, 0, tokens=0)])
    assert "not measured" in Tags(page_of(store, tmp_path)).text


def test_a_ledger_that_disagrees_is_said_on_the_page(store: Store, tmp_path: Path) -> None:
    add_run(store)
    append(store, "checkpoints", [checkpoint("g3", -1, 40, tokens_s=31, merged=[b"i0"])])
    assert "the islands counted" in Tags(page_of(store, tmp_path)).text


def test_a_run_without_a_global_checkpoint_is_refused(store: Store, tmp_path: Path) -> None:
    append(store, "runs", [run_row("r")])
    with pytest.raises(UserError, match="no global checkpoint yet"):
        final_table(Catalog(store), "r")
    with pytest.raises(UserError, match="no global checkpoint yet"):
        write_report(Catalog(store), "r", tmp_path / "report.html")
