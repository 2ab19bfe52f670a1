"""What an island reads changes while it runs: newer tiers, flags, groups, and documents that run out. Nothing comes twice, nothing is lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.flags import matching, set_flags
from manifests.jobs import Job, make_job
from manifests.mds import DecodedShard, decode_shard, index_json, object_path, read_index, shard_name
from manifests.schemas import TIERS
from manifests.store import Store
from tiny import doc_id, fabricate, put_shard, silent, start_run
from trainer.feed import Feed, check_groups, open_stream
from trainer.island import Island
from trainer.run import Run, load_run

U16 = np.dtype("<u2")
EVEN = dict.fromkeys(TIERS, 0.25)
OPTIONS: dict[str, Any] = {"num_islands": 1, "strategies": ("uniform",), "steps": 24, "sync_every": 2}


def index_of(store: Store, version: int, tier: str) -> list[dict[str, Any]]:
    sql = "SELECT object FROM views WHERE tier_version = ? AND tier = ?"
    return read_index(store.get(Catalog(store).rows(sql, [version, tier])[0]["object"]))


def add_version(store: Store, version: int = 2) -> None:
    """A tier version in which the first shard of S is in B, a shard of A and one of C are mixed anew into A and S, and the last one of C is gone."""
    old = {tier: index_of(store, version - 1, tier) for tier in (*TIERS, "holdout")}
    job = make_job(store, "retier", config={"version": version}, inputs={})
    loose = [documents_of(store, old[tier].pop()) for tier in ("A", "C")]
    numbers = sorted(number for shard in loose for number in shard)
    tokens = {number: shard[number] for shard in loose for number in shard}
    old["C"].pop()
    old["B"].append(old["S"].pop(0))
    for tier, members in (("S", numbers[1::2]), ("A", numbers[::2])):
        old[tier].append(new_shard(job, version, tier, {number: tokens[number] for number in members}))
    write_views(job, version, old)


def documents_of(store: Store, entry: dict[str, Any]) -> dict[int, Any]:
    shard: DecodedShard = decode_shard(store.get(object_path(shard_name(entry))), entry, token_dtype=U16)
    numbers = {doc_id(n): n for n in range(200)}
    return {numbers[shard.doc_id(p)]: np.array(shard.tokens(p)) for p in range(shard.num_documents)}


def new_shard(job: Job, version: int, tier: str, documents: dict[int, Any]) -> dict[str, Any]:
    shard = put_shard(job.store, documents)
    common = {"pool": "p", "shard": shard.name, "job": job.id}
    places = [
        common | {"position": p, "doc_id": doc_id(n), "tokens": size}
        for p, (n, size) in enumerate(shard.documents.items())
    ]
    job.append("shards", places, part=1 + TIERS.index(tier))
    row = common | {
        "tier": tier, "corpus": "made up", "origin": "real", "license": "unknown", "access": "open", "entry": json.dumps(shard.entry),
        "documents": len(documents), "tokens": sum(shard.documents.values()), "raw_bytes": 1, "zip_bytes": 1, "score_low": 0.0, "score_high": 1.0,
    }  # fmt: skip
    job.append("shard_index", [row], part=1 + TIERS.index(tier))
    return shard.entry


def write_views(job: Job, version: int, index: dict[str, list[dict[str, Any]]]) -> None:
    views, members, tiers = [], [], []
    for tier, entries in index.items():
        path = f"views/{version:06d}/p/{tier}-{job.id}/index.json"
        job.store.put_content(path, index_json(entries))
        same = {"tier_version": version, "pool": "p", "tier": tier, "job": job.id}
        documents = [documents_of(job.store, entry) for entry in entries]
        sizes = [(len(shard), sum(len(tokens) for tokens in shard.values())) for shard in documents]
        views.append(
            same | {"object": path, "shards": len(entries), "documents": sum(n for n, _ in sizes), "tokens": sum(t for _, t in sizes)}
        )  # fmt: skip
        for position, (entry, (number, total)) in enumerate(zip(entries, sizes, strict=True)):
            members.append(
                same | {"shard": shard_name(entry), "position": position, "documents": number, "tokens": total}
            )
        if tier != "holdout":
            tiers += [
                {"tier_version": version, "doc_id": doc_id(n), "tier": tier, "score": 0.0, "method": "m", "job": job.id}
                for shard in documents for n in shard
            ]  # fmt: skip
    job.append("tiers", tiers, part=1)
    job.append("tier_versions", [{"tier_version": version, "method": "m", "parameters": "{}", "thresholds": "{}", "job": job.id}], part=1)  # fmt: skip
    job.append("view_shards", members, part=1)
    job.append("views", views, part=1)
    job.commit({})


def at_step(step: int, act: Callable[[], None]) -> Callable[[dict[str, Any]], None]:
    """An emit that acts once, in the middle of a round."""
    done: list[int] = []

    def emit(status: dict[str, Any]) -> None:
        if status["state"] == "training" and status["step"] == step and not done:
            done.append(step)
            act()

    return emit


def spans(run: Run) -> list[dict[str, Any]]:
    sql = "SELECT step, position, doc_id, tier, token_start, tokens FROM consumption WHERE run = ? ORDER BY step, position"
    return Catalog(run.store).rows(sql, [run.name])


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    sql = "SELECT round, detail FROM events WHERE run = ? AND kind = ? ORDER BY written_at"
    return [row | {"detail": json.loads(row["detail"])} for row in Catalog(run.store).rows(sql, [run.name, kind])]


def check_no_token_twice(run: Run) -> None:
    read = Counter(
        (row["doc_id"], place)
        for row in spans(run)
        for place in range(row["token_start"], row["token_start"] + row["tokens"])
    )
    assert max(read.values()) == 1


class Killed(Exception):
    """What a test's fault raises."""


def kill() -> None:
    raise Killed


def test_an_island_takes_a_new_tier_version_at_a_rounds_edge_and_reads_nothing_twice(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", **OPTIONS)
    Island(run, 0, emit=at_step(9, lambda: add_version(tiny_store)), in_background=False).train()
    check_no_token_twice(run)
    (taken,) = events(run, "tier_version_taken")
    assert (taken["detail"]["before"], taken["detail"]["after"], taken["round"]) == (1, 2, 9)
    now = {row["doc_id"]: row["tier"] for row in Catalog(tiny_store).rows("SELECT * FROM tiers WHERE tier_version = 2")}
    for row in spans(run):
        if row["step"] > 9:
            assert row["tier"] == now[row["doc_id"]]
    versions = Catalog(tiny_store).rows("SELECT tier_version, reason FROM mixtures WHERE run = 'r' ORDER BY written_at")
    assert [row["tier_version"] for row in versions][-1] == 2
    assert "tier version 2 in place of 1" in {row["reason"] for row in versions}


def test_every_document_comes_before_any_comes_again_across_a_new_tier_version(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1)
    feed = Feed(run, Catalog(tiny_store), island=0, weights=EVEN)
    read: Counter[bytes] = Counter()

    def take(count: int) -> None:
        for _ in range(count):
            for span in feed.stream.next_sequence().spans:
                read.update([span.doc_id] * span.tokens)

    take(40)
    add_version(tiny_store)
    taken = feed.refresh()
    assert taken is not None
    assert taken.read > 0
    assert feed.refresh() is None
    lengths = {
        row["doc_id"]: row["tokens"]
        for row in Catalog(tiny_store).rows(
            "SELECT DISTINCT doc_id, tokens FROM shards JOIN tiers USING (doc_id) WHERE tier_version = 2"
        )
    }
    while min(group.passes for group in feed.stream.groups.values()) == 0:
        take(1)
    assert all(read[doc] >= length for doc, length in lengths.items())
    feed.close()


@pytest.mark.parametrize("dies_at", [13])
def test_an_island_that_died_after_the_change_goes_on_as_if_it_had_not(tiny_store: Store, dies_at: int) -> None:
    ran = start_run(tiny_store, "ran", **OPTIONS)
    died = start_run(tiny_store, "died", **OPTIONS)
    with pytest.raises(Killed):
        Island(died, 0, emit=at_step(9, kill), in_background=False).train()
    Island(ran, 0, emit=at_step(9, lambda: add_version(tiny_store)), in_background=False).train()
    # It comes back in a store that has the new version, and takes it at the same edge: nothing after round 8 had been committed.
    with pytest.raises(Killed):
        Island(load_run(tiny_store, "died"), 0, emit=at_step(dies_at, kill), in_background=False).train()
    Island(load_run(tiny_store, "died"), 0, emit=silent, in_background=False).train()
    check_no_token_twice(died)
    assert {event["round"] for event in events(died, "tier_version_taken")} == {8}
    assert (
        max(row["tier_version"] for row in Catalog(tiny_store).rows("SELECT * FROM mixtures WHERE run = 'died'")) == 2
    )
    whole = Counter(row["doc_id"] for row in spans(ran) if row["step"] <= 8)
    assert whole == Counter(row["doc_id"] for row in spans(died) if row["step"] <= 8)
    assert sum(row["tokens"] for row in spans(died)) == sum(row["tokens"] for row in spans(ran))


def test_the_state_after_a_change_is_small_and_gives_the_very_next_sequences(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1)
    feed = Feed(run, Catalog(tiny_store), island=0, weights=EVEN)
    for _ in range(37):
        feed.stream.next_sequence()
    add_version(tiny_store)
    feed.refresh()
    for _ in range(50):
        state = feed.state()
        assert len(state.encode()) < 10_000
        expected = feed.stream.next_sequence()
        again = Feed(run, Catalog(tiny_store), island=0, weights=EVEN, state=state)
        found = again.stream.next_sequence()
        assert again.tier_version == 2
        assert (found.tokens.tolist(), found.spans) == (expected.tokens.tolist(), expected.spans)
        again.close()
    feed.close()


def test_a_run_that_stays_does_not_take_a_new_tier_version(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", follow_tiers=False, **OPTIONS)
    Island(run, 0, emit=at_step(9, lambda: add_version(tiny_store)), in_background=False).train()
    assert events(run, "tier_version_taken") == []


def test_a_flagged_document_stops_flowing_at_the_next_round_and_may_come_back(tiny_store: Store) -> None:
    # Four steps a round.
    run = start_run(tiny_store, "r", **(OPTIONS | {"sync_every": 8}))

    def flag() -> None:
        doc_ids = matching(Catalog(tiny_store), "tier = 'S'", flagged=False)
        set_flags(tiny_store, doc_ids, flagged=True, predicate="tier = 'S'", reason="harmful")

    Island(run, 0, emit=at_step(6, flag), in_background=False).train()
    steps = {row["step"] for row in spans(run) if row["tier"] == "S"}
    assert steps
    assert max(steps) <= 8
    flagged = matching(Catalog(tiny_store), "true", flagged=True)
    assert len(flagged) == 24
    set_flags(tiny_store, flagged, flagged=False, predicate="true", reason="was right")
    stream = open_stream(run, Catalog(tiny_store), island=0, weights={"S": 1.0})
    assert stream.next_sequence().group == "S"


def test_a_flag_without_a_reason_is_refused(tiny_store: Store) -> None:
    with pytest.raises(UserError, match="reason"):
        set_flags(tiny_store, [doc_id(1)], flagged=True, predicate="true", reason=" ")


def test_a_resume_over_other_shards_of_the_same_version_is_refused(tiny_store: Store) -> None:
    run = start_run(tiny_store, "r", num_islands=1)
    feed = Feed(run, Catalog(tiny_store), island=0, weights=EVEN)
    feed.stream.next_sequence()
    state = feed.state()
    index = {tier: index_of(tiny_store, 1, tier) for tier in (*TIERS, "holdout")}
    index["A"].append(index["S"].pop())
    write_views(make_job(tiny_store, "shard", config={"foul": True}, inputs={}), 1, index)
    with pytest.raises(Failure, match=r"has changed since the checkpoint \(places of documents"):
        Feed(run, Catalog(tiny_store), island=0, weights=EVEN, state=state)


def test_a_tier_that_runs_out_leaves_its_weight_to_the_next_and_that_is_recorded(store: Store) -> None:
    fabricate(store, per_tier=12)
    run = start_run(store, "r", max_repeats=0, **(OPTIONS | {"strategies": ("aggressive",)}))
    Island(run, 0, emit=silent, in_background=False).train()
    check_repeats(run, most=1)
    (first, *_) = events(run, "exhausted")
    assert first["detail"]["group"] in ("S", "A")
    weights = first["detail"]["weights"]
    assert weights[first["detail"]["group"]] == 0
    assert weights["C"] == 0
    assert sum(weights.values()) == pytest.approx(1)
    assert {event["detail"]["group"] for event in events(run, "pass_finished")} >= {first["detail"]["group"]}
    reasons = Catalog(store).rows("SELECT reason FROM mixtures WHERE run = 'r'")
    assert any("max_repeats" in row["reason"] for row in reasons)


def check_repeats(run: Run, *, most: int) -> None:
    """No tier gives more than its passes, and the rest of the sequence in which the last one ends."""
    sizes = {r["tier"]: r["tokens"] for r in Catalog(run.store).rows("SELECT tier, tokens FROM views")}
    read: Counter[str] = Counter()
    for row in spans(run):
        read[row["tier"]] += row["tokens"]
    for tier, tokens in read.items():
        assert tokens < most * sizes[tier] + run.config.seq_len


def test_a_run_that_has_read_all_it_may_says_so(store: Store) -> None:
    fabricate(store, per_tier=6, per_shard=6)
    run = start_run(store, "r", max_repeats=1, **(OPTIONS | {"steps": 60}))
    with pytest.raises(Failure, match=r"every document has come 2 times .*--max-repeats"):
        Island(run, 0, emit=silent, in_background=False).train()


def grouped(store: Store, expression: str, **weights: float) -> Run:
    return start_run(store, "g", num_islands=1, group_by=expression, group_weights=(weights,), steps=8)


def test_groups_of_whole_shards_are_mixed_as_asked(tiny_store: Store) -> None:
    run = grouped(tiny_store, "origin", real=1, synthetic=3)
    Island(run, 0, emit=silent, in_background=False).train()
    total = Counter[str]()
    for row in Catalog(tiny_store).rows("SELECT origin, tokens, tier FROM consumption WHERE run = 'g'"):
        total[row["origin"]] += row["tokens"]
    assert total == {"real": 64, "synthetic": 192}
    (mixture,) = Catalog(tiny_store).rows("SELECT * FROM mixtures WHERE run = 'g'")
    assert json.loads(mixture["weights"]) == {"real": 0.25, "synthetic": 0.75}
    assert np.isnan(mixture["weight_s"])
    assert mixture["strategy"] == "by origin"


def test_groups_may_part_the_documents_of_a_shard(tiny_store: Store) -> None:
    expression = "CASE WHEN tier = 'C' THEN NULL WHEN source_row % 3 = 0 THEN 'third' ELSE 'rest' END"
    run = grouped(tiny_store, expression, third=1, rest=1, none=2)
    stream = open_stream(run, Catalog(tiny_store), island=0, weights={"third": 1, "rest": 1, "none": 2})
    rows = Catalog(tiny_store).rows(
        f"SELECT doc_id, coalesce({expression}, 'none') AS g FROM documents JOIN tiers USING (doc_id)"
    )
    group_of = {row["doc_id"]: row["g"] for row in rows}
    met: Counter[str] = Counter()
    while min((group.passes for group in stream.groups.values()), default=0) == 0:
        sequence = stream.next_sequence()
        met[sequence.group] += 1
        assert {group_of[span.doc_id] for span in sequence.spans} == {sequence.group}
        assert abs(met["none"] - sum(met.values()) / 2) <= 1
    assert {name: group.num_documents for name, group in stream.groups.items()} == Counter(group_of.values())
    stream.close()


@pytest.mark.parametrize(
    ("expression", "weights", "message"),
    [
        ("origin", {"reel": 1.0}, r"no group 'reel'; there are real, synthetic"),
        ("no_such_column", {"a": 1.0}, "must be an SQL expression over the columns of documents"),
        ("source_row", {"1": 1.0}, "makes 96 groups, and at most 64"),
        ("origin; DROP TABLE documents", {"a": 1.0}, "must be an SQL expression"),
    ],
)
def test_groups_that_cannot_be_mixed_are_refused(
    tiny_store: Store, expression: str, weights: dict[str, float], message: str
) -> None:
    run = grouped(tiny_store, expression, **weights)
    with pytest.raises(UserError, match=message):
        check_groups(tiny_store, Catalog(tiny_store), run.config)


def test_a_group_of_weight_zero_never_comes(tiny_store: Store) -> None:
    run = grouped(tiny_store, "origin", real=0, synthetic=1)
    Island(run, 0, emit=silent, in_background=False).train()
    rows = Catalog(tiny_store).rows("SELECT DISTINCT origin FROM consumption WHERE run = 'g'")
    assert [row["origin"] for row in rows] == ["synthetic"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_by": "origin"}, "go together"),
        ({"group_weights": ({"a": 1.0},)}, "go together"),
        ({"group_by": "origin", "group_weights": ({"a": -1.0},)}, "weight of group 'a'"),
        ({"group_by": "origin", "group_weights": ({"a": 0.0},)}, "sum to 0"),
        ({"max_repeats": -1}, "max_repeats"),
    ],
)
def test_options_that_make_no_mix_are_refused(tiny_store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        start_run(tiny_store, "r", **options)
