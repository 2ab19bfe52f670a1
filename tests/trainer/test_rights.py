"""Islands under a policy: none reads what it may not, a stricter policy bites at the next start, and the order of the rest stays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from manifests.catalog import Catalog
from manifests.editions import current_policy, set_policy
from manifests.errors import UserError
from manifests.mds import shard_name
from manifests.schemas import TIERS
from manifests.store import Store
from manifests.strategies import UNIFORM
from tiny import fabricate, start_run, tiny_config, train_alone
from tools.audit import audit
from trainer.feed import holdout_tokens, open_stream
from trainer.island import Island
from trainer.mixer import MixedStream
from trainer.plan import configure_run
from trainer.remedies import apply_rollback
from trainer.rights import ReadableShards, island_rights, root_run
from trainer.rollback import plan_rollback
from trainer.run import Run, create_run

LICENSES = ("MIT", "GPL-3.0", "unknown", "CC-BY-4.0")
WEIGHTS = dict.fromkeys(TIERS, 0.25)


def policy(**rules: Sequence[str]) -> str:
    """A policy with a rule for the licences of each reader, `i0` for island 0 of run r; others may read everything."""
    readers = {"i0": "run:r/island:0", "i1": "run:r/island:1", "all": "run:r/*"}
    blocks = [
        f'[[rule]]\nreaders = ["{readers[name]}"]\nlicenses = {list(globs)}\naccess = ["*"]\n'
        for name, globs in rules.items()
    ]
    return '[default]\nlicenses = ["*"]\naccess = ["*"]\n' + "".join(blocks)


@pytest.fixture
def licensed_store(store: Store) -> Store:
    """A tiny store whose shards have four licences, the same in every tier and in the holdout."""
    fabricate(store, licenses=LICENSES)
    return store


def run_under(store: Store, text: str | None, name: str = "r", **options: Any) -> Run:
    """A run that is made after a policy was set."""
    if text is not None:
        set_policy(store, text, "a test")
    edition = current_policy(Catalog(store))
    return start_run(store, name, policy=edition.id if edition is not None else "", **options)


def licenses_read(store: Store, run: str, island: int) -> set[str]:
    sql = "SELECT DISTINCT d.license FROM consumption JOIN documents AS d USING (doc_id) WHERE run = ? AND island = ?"
    return {row["license"] for row in Catalog(store).rows(sql, [run, island])}


def stream_of(run: Run, island: int = 0, *, weights: Mapping[str, float] = WEIGHTS) -> MixedStream:
    return open_stream(run, Catalog(run.store), island=island, weights=weights)


def documents_in(stream: MixedStream, count: int) -> list[bytes]:
    """Ids of the documents of the next sequences, each once where it goes on."""
    spans = [span for _ in range(count) for span in stream.next_sequence().spans]
    return [span.doc_id for span in spans if span.start == 0]


def license_by_document(store: Store) -> dict[bytes, str]:
    return {row["doc_id"]: row["license"] for row in Catalog(store).rows("SELECT doc_id, license FROM documents")}


def test_islands_of_one_run_read_each_what_they_may(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(i0=["*", "!unknown", "!GPL*"], i1=["gpl-3.0", "mit"]))
    for island in range(run.config.num_islands):
        train_alone(run, island)
    assert licenses_read(licensed_store, "r", 0) == {"MIT", "CC-BY-4.0"}
    assert licenses_read(licensed_store, "r", 1) == {"MIT", "GPL-3.0"}
    assert audit(Catalog(licensed_store), "r").findings == []


def test_run_without_a_policy_reads_everything(licensed_store: Store) -> None:
    train_alone(run_under(licensed_store, None), 0)
    assert licenses_read(licensed_store, "r", 0) == set(LICENSES)


def test_stricter_policy_bites_at_the_next_start_and_keeps_the_order_of_the_rest(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(all=["*", "!GPL*"]))
    whole = stream_of(run)
    state_in_the_middle = (documents_in(whole, 10), whole.state())[1]
    set_policy(licensed_store, policy(all=["*", "!GPL*", "!unknown"]), "stricter")
    stream = stream_of(run)
    stream.load_state(state_in_the_middle)
    licenses = license_by_document(licensed_store)
    for tier in TIERS:  # tier by tier: what is left out moves the others to earlier sequences
        only = {t: float(t == tier) for t in TIERS}
        fresh = stream_of(run, weights=only)
        fresh.load_state(state_in_the_middle)
        strict = documents_in(fresh, 12)
        run_before = start_again(run, policy(all=["*", "!GPL*"]), only, state_in_the_middle)
        free = [d for d in run_before if licenses[d] != "unknown"]
        assert strict[: len(free)] == free[: len(strict)]
        assert len(free) > 4
        assert {licenses[d] for d in strict} <= {"MIT", "CC-BY-4.0"}


def start_again(run: Run, text: str, weights: Mapping[str, float], state: str) -> list[bytes]:
    """What an island reads from a state on while another policy is in force; the policy before is put back."""
    before = current_policy(Catalog(run.store))
    assert before is not None
    set_policy(run.store, text, "for a moment")
    stream = stream_of(run, weights=weights)
    stream.load_state(state)
    documents = documents_in(stream, 12)
    set_policy(run.store, before.text, "back")
    return documents


def test_island_that_starts_again_leaves_out_what_was_forbidden_meanwhile(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(all=["*"]))
    island = Island(run, 0, emit=stop_after(3), in_background=False)
    with pytest.raises(Stopped):
        island.train()
    rounds = Catalog(licensed_store).rows("SELECT max(round) AS n FROM checkpoints WHERE run = 'r'")[0]["n"]
    assert 0 < rounds < run.config.num_rounds
    set_policy(licensed_store, policy(i0=["*", "!unknown"]), "stricter")
    train_alone(run, 0)
    sql = """
        SELECT DISTINCT d.license FROM consumption JOIN documents AS d USING (doc_id) JOIN checkpoints AS c USING (checkpoint)
        WHERE c.run = 'r' AND c.round > ?
    """
    after = {row["license"] for row in Catalog(licensed_store).rows(sql, [rounds])}
    assert after == {"MIT", "GPL-3.0", "CC-BY-4.0"}
    found = audit(Catalog(licensed_store), "r").findings
    assert {(f.run_rule, f.newest_rule is None) for f in found} == {(None, False)}


class Stopped(Exception):
    """An island that a test stops."""


def stop_after(steps: int) -> Any:
    """An emit that kills the island after so many steps."""

    def emit(status: dict[str, Any]) -> None:
        if status["state"] == "training" and status["step"] > steps:
            raise Stopped

    return emit


def test_laxer_policy_gives_nothing_to_a_run_that_exists(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(all=["MIT"]))
    before = documents_in(stream_of(run), 20)
    set_policy(licensed_store, policy(all=["*"]), "laxer")
    assert documents_in(stream_of(run), 20) == before
    new = run_under(licensed_store, None, name="new")
    licenses = license_by_document(licensed_store)
    assert {licenses[d] for d in documents_in(stream_of(new), 40)} == set(LICENSES)


def test_run_made_before_any_policy_obeys_the_one_that_comes(licensed_store: Store) -> None:
    run = run_under(licensed_store, None)
    set_policy(licensed_store, policy(all=["MIT"]), "the first")
    licenses = license_by_document(licensed_store)
    assert {licenses[d] for d in documents_in(stream_of(run), 20)} == {"MIT"}


def test_tier_that_was_left_out_for_a_while_goes_on_where_it_was(store: Store) -> None:
    fabricate(store)
    run = run_under(store, None)
    stream = stream_of(run)
    documents_in(stream, 12)
    state = stream.state()
    only = MixedStream({"S": stream.groups["S"]}, names=TIERS, seq_len=16, weights=WEIGHTS)
    only.load_state(state)
    again = stream_of(run)
    kept = json.loads(only.state())
    again.load_state(json.dumps(kept | {"fingerprint": json.loads(state)["fingerprint"]}))
    assert again.state() == state


def test_tier_without_readable_documents_leaves_its_share_to_the_next(store: Store) -> None:
    fabricate(store, licenses=("MIT",))
    label_tier(store, "A", "secret")
    run = run_under(store, policy(all=["MIT"]))
    assert stream_of(run).weights == {"S": 0.25, "A": 0.0, "B": 0.5, "C": 0.25}


def label_tier(store: Store, tier: str, license_: str) -> None:
    """Gives all shards of a tier another licence, in the files of a local store."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from deltalake import write_deltalake

    from manifests.tables import open_table, read

    rows = read(store, "shard_index")
    changed = pc.if_else(pc.equal(rows["tier"], tier), pa.scalar(license_), rows["license"])
    rows = rows.set_column(rows.schema.get_field_index("license"), rows.schema.field("license"), changed)
    write_deltalake(open_table(store, "shard_index"), rows, mode="overwrite")


def test_uniform_mix_counts_only_what_the_island_may_read(store: Store) -> None:
    fabricate(store, licenses=("MIT", "unknown", "unknown", "unknown"))
    label_tier(store, "S", "MIT")
    run = run_under(store, policy(i0=["MIT"]), strategies=(UNIFORM,))
    sizes = "SELECT tier, sum(tokens)::BIGINT AS n FROM shard_index WHERE license = 'MIT' AND tier <> 'holdout' GROUP BY tier"
    tokens = {row["tier"]: row["n"] for row in Catalog(store).rows(sizes)}
    weights = Island(run, 0, emit=lambda status: None).mixture.weights
    assert weights == pytest.approx({tier: tokens[tier] / sum(tokens.values()) for tier in TIERS})


def test_island_with_nothing_to_read_is_told_which_rule_forbids_it(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(i1=["AGPL*"]))
    for strategy in ("balanced", UNIFORM):
        other = start_run(licensed_store, f"r-{strategy}", policy=run.config.policy, strategies=(strategy,))
        Island(other, 1, emit=lambda status: None)  # a reader of another name
    with pytest.raises(UserError, match=r"run:r/island:1 may read no document .* by rule 1 of policy"):
        stream_of(run, 1)
    set_policy(licensed_store, policy(all=["AGPL*"]), "nothing at all")
    with pytest.raises(UserError, match="rule 1 of policy"):
        Island(run, 0, emit=lambda status: None)


def test_holdout_is_what_every_island_may_read(licensed_store: Store) -> None:
    catalog = Catalog(licensed_store)
    everything = holdout_tokens(run_under(licensed_store, None, name="free", holdout_sequences=99), catalog)
    run = run_under(licensed_store, policy(i0=["MIT", "CC-BY*"], i1=["MIT", "GPL*"]), holdout_sequences=99)
    catalog = Catalog(licensed_store)
    held = holdout_tokens(run, catalog)
    sql = "SELECT sum(tokens)::BIGINT AS n FROM shard_index WHERE tier = 'holdout' AND license = 'MIT'"
    assert len(held) == catalog.rows(sql)[0]["n"] // run.config.seq_len < len(everything)
    none = run_under(licensed_store, policy(i0=["MIT"], i1=["GPL*"]), name="none")
    set_policy(licensed_store, policy(all=["none"]).replace("run:r/*", "run:none/*"), "nothing")
    with pytest.raises(UserError, match="every island of run none may read by"):
        holdout_tokens(none, Catalog(licensed_store))


def test_shard_that_stands_in_no_index_is_not_read(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(all=["MIT"]))
    catalog = Catalog(licensed_store)
    readable = ReadableShards(run.config, catalog, island_rights(run.config, catalog, 0))
    entries = [json.loads(row["entry"]) for row in catalog.rows("SELECT entry FROM shard_index")]
    stray = json.loads(json.dumps(entries[0]).replace(shard_name(entries[0]), "0" * 32))
    index, forbidden = readable.select([*entries, stray])
    kinds = {row["shard"]: row["license"] for row in catalog.rows("SELECT shard, license FROM shard_kinds")}
    assert (Counter(kinds[shard_name(entry)] for entry in index), forbidden) == ({"MIT": 5}, frozenset())


def test_run_keeps_the_edition_that_it_was_made_under(licensed_store: Store) -> None:
    first, _ = set_policy(licensed_store, policy(all=["MIT"]), "first")
    options = {"model": tiny_config("r").model, "num_islands": 1, "quorum": 1}
    config = configure_run(licensed_store, run="r", tier_version=None, **options)
    assert config.policy == first.id
    create_run(licensed_store, config)
    second, _ = set_policy(licensed_store, policy(all=["*"]), "second")
    again = configure_run(licensed_store, run="r", tier_version=1, **options)
    assert again == config
    create_run(licensed_store, again)
    assert configure_run(licensed_store, run="other", tier_version=None, **options).policy == second.id


def test_branch_reads_as_the_run_that_it_branches_from(licensed_store: Store) -> None:
    run = run_under(licensed_store, policy(all=["*", "!unknown"]))
    for island in range(run.config.num_islands):
        train_alone(run, island)
    plan = plan_rollback(licensed_store, "r", "license = 'GPL-3.0'")
    branch = apply_rollback(licensed_store, plan)
    catalog = Catalog(licensed_store)
    assert root_run(catalog, branch.name) == "r"
    licenses = license_by_document(licensed_store)
    assert {licenses[d] for d in documents_in(stream_of(branch), 40)} == {"MIT", "CC-BY-4.0"}
