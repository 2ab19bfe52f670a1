"""`atoll policy` and `atoll audit`: clean where the policy was kept, and every planted violation found, with exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.consumption import append_consumption
from manifests.editions import set_policy
from manifests.jobs import make_job
from manifests.store import Store
from manifests.tables import append, to_table
from tools.audit import audit
from tools.cli import _run

POLICY = """
[default]
licenses = ["*"]
access = ["*"]

[[rule]]
readers = ["run:r/island:1"]
licenses = ["*", "!unknown"]
access = ["public"]
"""
STRICTER = POLICY.replace('"!unknown"', '"!unknown", "!gpl*"')
DOCS = {name: name.encode() * 16 for name in "abcdx"}
LABELS = {"a": ("MIT", "public"), "b": ("GPL-3.0", "public"), "c": ("unknown", "public"), "d": ("MIT", "internal")}
"""Labels of shards of one document each, by their names. Shard x stands in no index."""


def checkpoint_id(run: str, island: int, round_: int) -> bytes:
    return f"{run:>13}/{island}{round_}".encode()


def put_job(store: Store) -> None:
    """Documents, shards and their index."""
    job = make_job(store, "test", config={}, inputs={})
    common = {"corpus": "c", "origin": "real", "job": job.id}
    rows: dict[str, list[dict[str, Any]]] = {"documents": [], "shards": [], "shard_index": []}
    for name, (license_, access) in LABELS.items():
        labels = common | {"license": license_, "access": access}
        rows["documents"].append(labels | {"doc_id": DOCS[name], "split": "train", "text_bytes": 1, "source_uri": "u", "source_row": 0})  # fmt: skip
        rows["shards"].append({"pool": "p", "shard": name, "position": 0, "doc_id": DOCS[name], "tokens": 99, "job": job.id})  # fmt: skip
        rows["shard_index"].append(labels | {"pool": "p", "shard": name, "tier": "S", "entry": "{}", "documents": 1, "tokens": 99, "raw_bytes": 1, "zip_bytes": 1, "score_low": 0.0, "score_high": 1.0})  # fmt: skip
    for table, its_rows in rows.items():
        job.append(table, its_rows, part=1)
    job.commit({})


def put_run(store: Store, run: str, policy: str, *, parent: bytes | None = None) -> None:
    """A run; with a checkpoint of run r that its island 1 starts from, a branch."""
    config = json.dumps({"policy": policy, "num_islands": 2})
    branch = json.dumps({"merge": 0, "island_checkpoints": {"1": parent.hex()}}) if parent is not None else None
    parent_run = "r" if parent is not None else None
    row = {
        "run": run,
        "parent_run": parent_run,
        "config": config,
        "branch": branch,
        "command": "c",
        "code_version": "v",
    }
    append(store, "runs", [row])


def put_segment(store: Store, run: str, island: int, spans: dict[str, int], *, round_: int = 1, parent: bytes | None = None, total: int | None = None) -> bytes:  # fmt: skip
    """A committed segment that read so many tokens of each shard."""
    identity = checkpoint_id(run, island, round_)
    rows = [
        {
            "run": run, "island": island, "incarnation": 0, "step": round_, "position": 0, "shard": shard, "shard_position": 0, "tier": "S",
            "origin": "real", "token_start": 0, "tokens": tokens, "loss": 1.0, "checkpoint": identity,
        }
        for shard, tokens in spans.items()
    ]  # fmt: skip
    append_consumption(store, to_table("consumption", rows), writer=f"{run}/{island}", sequence=round_)
    checkpoint = {
        "checkpoint": identity, "run": run, "island": island, "incarnation": 0, "round": round_, "step": round_,
        "tokens": sum(spans.values()) if total is None else total, "tokens_s": 0, "tokens_a": 0, "tokens_b": 0, "tokens_c": 0,
        "clock": [0], "parent": parent, "merged": [], "object": "o", "hash": "h", "size_bytes": 1, "stream": "{}", "mixture": "{}", "anchor": True,
    }  # fmt: skip
    append(store, "checkpoints", [checkpoint])
    return identity


@pytest.fixture
def audited(store: Store) -> Store:
    """A run of two islands that kept the policy: island 0 may read all, island 1 neither what is unknown nor what isn't public."""
    put_job(store)
    policy, _ = set_policy(store, POLICY, "a test")
    put_run(store, "r", policy.id)
    put_segment(store, "r", 0, {"a": 10, "b": 20, "c": 30, "d": 40})
    first = put_segment(store, "r", 1, {"a": 1, "b": 2})
    put_segment(store, "r", 1, {"b": 4}, round_=2, parent=first, total=7)
    return store


def command(*arguments: str, store: Store, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, what went to stdout and to stderr."""
    code = _run([*arguments, "--store", store.uri])
    shown = capsys.readouterr()
    return code, shown.out, shown.err.replace("\n", " ")


def rows_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_run_that_kept_the_policy_is_clean(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, said = command("audit", store=audited, capsys=capsys)
    assert (code, out) == (0, "")
    assert said.strip() == "107 tokens of 4 documents in 3 segments, none forbidden"


def test_store_without_a_policy_is_clean_and_says_why(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    put_job(store)
    put_run(store, "r", "")
    put_segment(store, "r", 0, {"c": 5, "x": 5})
    code, _, said = command("audit", "--run", "r", store=store, capsys=capsys)
    assert (code, said.strip()) == (0, "10 tokens of 2 documents in 1 segments, none forbidden: no policy is set")


def test_planted_violations_are_found(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    parent = checkpoint_id("r", 1, 2)
    put_segment(audited, "r", 1, {"a": 1, "c": 5, "d": 6, "x": 7}, round_=3, parent=parent, total=26)
    code, out, said = command("audit", "--run", "r", "--format", "json", store=audited, capsys=capsys)
    assert code == 1
    found = {(row["license"], row["access"]): row for row in rows_of(out)}
    assert {labels: (row["documents"], row["tokens"], row["segments"], row["island"]) for labels, row in found.items()} == {
        ("unknown", "public"): (1, 5, 1, 1),
        ("MIT", "internal"): (1, 6, 1, 1),
        ("(unknown shard)", "(unknown shard)"): (1, 7, 1, 1),
    }  # fmt: skip
    assert found["unknown", "public"]["run_policy"] == found["unknown", "public"]["newest_policy"]
    assert found["unknown", "public"]["run_policy"].startswith("rule 1 of policy ")
    assert "18 of 126 tokens are forbidden: 18 by the policy that their run was made under, 18 by the newest" in said


def test_single_documents_are_listed(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    put_segment(audited, "r", 1, {"c": 5, "x": 7}, round_=3, parent=checkpoint_id("r", 1, 2), total=19)
    code, out, _ = command("audit", "--documents", "--format", "json", store=audited, capsys=capsys)
    assert code == 1
    listed = {row["shard"]: (row["doc_id"], row["license"], row["first_step"], row["tokens"]) for row in rows_of(out)}
    assert listed == {"c": (DOCS["c"].hex(), "unknown", 3, 5), "x": (None, "(unknown shard)", 3, 7)}


def test_what_a_stricter_edition_forbids_later_is_said_apart(
    audited: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    set_policy(audited, STRICTER, "no copyleft")
    code, out, said = command("audit", "--format", "json", store=audited, capsys=capsys)
    (row,) = rows_of(out)
    assert (code, row["license"], row["tokens"], row["segments"]) == (1, "GPL-3.0", 6, 2)
    assert row["run_policy"] is None
    assert row["newest_policy"].startswith("rule 1 of policy ")
    assert "0 by the policy that their run was made under, 6 by the newest" in said


def test_audit_of_an_earlier_cut_asks_the_policy_of_then(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    versions = "policies=" + str(Catalog(audited, tables=["policies"]).versions["policies"])
    set_policy(audited, STRICTER, "no copyleft")
    assert command("audit", "--at", versions, store=audited, capsys=capsys)[0] == 0


def test_text_under_two_licences_may_be_read_by_either(audited: Store) -> None:
    job = make_job(audited, "again", config={}, inputs={})
    index = Catalog(audited).rows("SELECT * FROM shard_index WHERE shard = 'c'")[0]
    job.append("shard_index", [index | {"license": "CC0-1.0", "job": job.id}], part=1)
    job.commit({})
    put_segment(audited, "r", 1, {"c": 5}, round_=3, parent=checkpoint_id("r", 1, 2), total=12)
    assert audit(Catalog(audited)).findings == []
    set_policy(audited, STRICTER.replace('"!gpl*"', '"!cc0*"'), "neither")
    (finding,) = [f for f in audit(Catalog(audited)).findings if "CC0" in f.labels]
    assert (finding.tokens, finding.run_rule) == (5, None)


def test_segment_that_was_never_committed_does_not_count(audited: Store) -> None:
    rows = [
        {
            "run": "r", "island": 1, "incarnation": 0, "step": 9, "position": 0, "shard": "c", "shard_position": 0, "tier": "S", "origin": "real",
            "token_start": 0, "tokens": 5, "loss": 1.0, "checkpoint": b"never committed!",
        }
    ]  # fmt: skip
    append_consumption(audited, to_table("consumption", rows), writer="dead", sequence=1)
    found = audit(Catalog(audited))
    assert (found.findings, found.tokens) == ([], 107)


def test_branch_answers_for_what_it_goes_on_from_by_the_rules_of_its_root(audited: Store) -> None:
    bad = put_segment(audited, "r", 1, {"c": 5}, round_=3, parent=checkpoint_id("r", 1, 2), total=12)
    good = checkpoint_id("r", 1, 2)
    edition = json.loads(Catalog(audited).rows("SELECT config FROM runs")[0]["config"])["policy"]
    for branch, parent, total in (("clean", good, 8), ("tainted", bad, 13)):
        put_run(audited, branch, edition, parent=parent)
        put_segment(audited, branch, 1, {"a": 1}, round_=4, parent=parent, total=total)
    assert audit(Catalog(audited), "clean").findings == []
    assert audit(Catalog(audited), "clean").tokens == 8
    (finding,) = audit(Catalog(audited), "tainted").findings
    assert (finding.run, finding.tokens) == ("r", 5)


def test_nothing_is_proved_where_the_records_disagree(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    append(audited, "consumption_rounds", Catalog(audited).query("SELECT * FROM consumption_rounds WHERE shard = 'c'"))
    code, _, said = command("audit", "--run", "r", store=audited, capsys=capsys)
    assert code == 1
    assert "nothing is proved: consumption_rounds disagrees with consumption in 1 sums, such as 60 tokens for 30" in said  # fmt: skip


def test_nothing_is_proved_where_consumption_lacks_what_an_island_counted(
    audited: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    put_segment(audited, "r", 0, {"a": 1}, round_=2, parent=checkpoint_id("r", 0, 1), total=110)
    code, _, said = command("audit", store=audited, capsys=capsys)
    assert code == 1
    assert "nothing is proved: consumption has 1 tokens of checkpoint" in said
    assert "counted 10" in said


def test_audit_of_an_unknown_run_names_those_that_there_are(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = command("audit", "--run", "nope", store=audited, capsys=capsys)
    assert (code, "there are: r" in said) == (2, True)


def test_policy_is_set_shown_and_checked(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_job(store)
    put_run(store, "r", "")
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    assert "no policy is set" in command("policy", "show", store=store, capsys=capsys)[2]
    code, out, _ = command("policy", "check", str(file), "--format", "json", store=store, capsys=capsys)
    assert code == 0
    assert {(row["readers"], row["license"], row["access"], row["documents"], row["tokens"], row["after"]) for row in rows_of(out)} == {
        ("run:r/island:1", "unknown", "public", 1, 99, "may not"),
        ("run:r/island:1", "MIT", "internal", 1, 99, "may not"),
    }  # fmt: skip
    assert "is in force" in command("policy", "set", str(file), "--reason", "why", store=store, capsys=capsys)[2]
    assert "nothing changed" in command("policy", "set", str(file), "--reason", "why", store=store, capsys=capsys)[2]
    assert "changes nothing" in command("policy", "check", str(file), store=store, capsys=capsys)[2]
    code, out, said = command("policy", "show", store=store, capsys=capsys)
    assert (code, out) == (0, POLICY)
    assert ": why" in said


def test_policy_show_says_what_a_reader_may_read(audited: Store, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("policy", "show", "--format", "json", "--reader")
    code, out, said = command(*arguments, "run:r/island:1", store=audited, capsys=capsys)
    assert code == 0
    assert {(row["license"], row["access"]): row["may_read"] for row in rows_of(out)} == {
        ("MIT", "public"): True,
        ("MIT", "internal"): False,
        ("GPL-3.0", "public"): True,
        ("unknown", "public"): False,
    }
    assert "rule 1 of policy" in said
    assert "LIKE" not in said
    assert "<> " not in said
    assert "NOT (translate(license" in said
    assert command(*arguments, "island:1", store=audited, capsys=capsys)[0] == 2


def test_wrong_policy_files_are_refused_in_one_line(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    for content, mend in ((b"x = 1", "unknown key `x`"), (b"\xff\xfe", "UTF-8"), (None, "No such file")):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        for arguments in (("policy", "check", str(file)), ("policy", "set", str(file), "--reason", "r")):
            assert _run([*arguments, "--store", store.uri]) == 2
            lines = capsys.readouterr().err.strip().splitlines()
            assert len(lines) == 1
            assert mend in lines[0]
            assert str(file) in lines[0]
