"""Policies: what a text means, what is wrong with a wrong one, the condition in SQL, and the editions of a store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.catalog import Catalog
from manifests.editions import current_policy, policy_of, rights_of, set_policy
from manifests.errors import Failure, UserError
from manifests.policy import OWNER, Rights, Rule, joined, parse_policy, rights_inputs
from manifests.store import Store
from manifests.tables import append

POLICY = """
[default]
licenses = ["*"]
access = ["public"]

[[rule]]
readers = ["run:main/island:2", "sql:analysts"]
licenses = ["CC-BY-*", "odc-by", "!*-NC-*", "!unknown"]
access = ["public", "internal"]

[[rule]]
readers = ["run:main/*", "job:s*"]
licenses = ["*", "!unknown"]
access = ["*"]
"""
ALL = 'licenses = ["*"]\naccess = ["*"]\n'
LETTERS = "aAbB-*?%_\\'.ßİıK\n\0é🙂 "


def rights(reader: str, text: str = POLICY) -> Rights:
    return parse_policy(text, source="p.toml").rights(reader)


@pytest.mark.parametrize(
    ("reader", "license_", "access", "may"),
    [
        ("run:main/island:2", "CC-BY-SA-4.0", "public", True),
        ("run:main/island:2", "cc-by-sa-4.0", "Internal", True),
        ("run:main/island:2", "CC-BY-NC-4.0", "public", False),
        ("run:main/island:2", "unknown", "public", False),
        ("run:main/island:2", "CC-BY", "public", False),
        ("run:main/island:2", "ODC-By", "public", True),
        ("run:main/island:2", "ODC-By", "secret", False),
        ("run:main/island:1", "ODC-By", "secret", True),
        ("run:main/island:1", "Unknown", "secret", False),
        ("run:main/island:22", "Unknown", "public", False),
        ("run:other/island:2", "unknown", "public", True),
        ("run:other/island:2", "odc-by", "internal", False),
        ("job:score", "unknown", "public", False),
        ("job:tier", "unknown", "public", True),
        ("sql:analysts", "unknown", "public", False),
        ("sql:others", "x", "internal", False),
        (OWNER, "x", "internal", True),
    ],
)
def test_first_rule_that_names_a_reader_decides_alone(reader: str, license_: str, access: str, may: bool) -> None:
    assert rights(reader).allows(license_, access) is may


def test_owner_reads_everything_unless_a_rule_names_it() -> None:
    assert rights(OWNER).everything
    bound = POLICY + '[[rule]]\nreaders = ["sql:*"]\nlicenses = ["mit"]\naccess = ["*"]\n'
    assert not rights(OWNER, bound).allows("gpl", "public")


_GLOBS = st.text("aAb-*?%_\\'.ßé🙂", min_size=1, max_size=5)
_LISTS = st.tuples(_GLOBS, st.lists(_GLOBS, max_size=2), st.lists(_GLOBS, max_size=2)).map(
    lambda lists: (lists[0], *lists[1], *(f"!{glob}" for glob in lists[2]))
)
DUCKDB = duckdb.connect()


@settings(deadline=None)
@given(_LISTS, _LISTS, st.lists(st.tuples(st.text(LETTERS, max_size=6), st.text(LETTERS, max_size=6)), max_size=8))
def test_condition_in_sql_says_the_same_as_python(
    licenses: tuple[str, ...], access: tuple[str, ...], labels: list[tuple[str, str]]
) -> None:
    rule = Rule(name="r", readers=("*",), licenses=licenses, access=access)
    labels += [(p.strip("!").replace("*", "x").replace("?", "y"), q.strip("!")) for p in licenses for q in access]
    rows = pa.table({"n": range(len(labels)), "license": [a for a, _ in labels], "access": [b for _, b in labels]})
    DUCKDB.register("labels", rows)
    found = DUCKDB.execute(f"SELECT n FROM labels WHERE {rule.condition} ORDER BY n").fetchall()
    assert [n for (n,) in found] == [n for n, label in enumerate(labels) if rule.allows(*label)]


def test_condition_of_everything_is_true_and_adds_nothing_to_a_job() -> None:
    free = rights("job:tier", f"[default]\n{ALL}")
    assert (free.condition, free.everything, rights_inputs(free)) == ("true", True, {})
    assert rights_inputs(None) == {}
    assert rights_inputs(rights("job:score")) == {"rights": rights("job:score").condition}


def test_joined_rights_allow_what_all_of_them_do() -> None:
    both = joined("r", [rights("run:main/island:2"), None, rights("run:other/island:0")])
    assert both.allows("odc-by", "public")
    assert not both.allows("odc-by", "internal")
    assert not both.allows("unknown", "public")
    assert both.named.startswith("rule 1 of policy ")
    assert (
        both.condition.count(" AND ") == 3
    )  # of rule 1: allowed licences, forbidden ones, access; of [default]: access


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default", "p.toml is not TOML"),
        ("", r"p.toml has no \[default\]"),
        (f"[default]\n{ALL}[rules]\n", "unknown key `rules`"),
        (f"[default]\n{ALL}readers = ['*']\n", r"\[default\] has an unknown key `readers`"),
        ("default = 3", "is 3; it must be a table"),
        (f"[default]\n{ALL}[rule]\n{ALL}", r"\[\[rule\]\]"),
        (f"[default]\n{ALL}[[rule]]\n{ALL}", "rule 1 has no `readers`"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['sql:x']\naccess = ['*']\n", "rule 1 has no `licenses`"),
        (f"[default]\n{ALL}[[rule]]\nreaders = 'sql:x'\n{ALL}", "rule 1: `readers` is 'sql:x'"),
        ("[default]\nlicenses = ['*']\naccess = [1]\n", r"\[default\]: `access` is \[1\]"),
        ("[default]\nlicenses = []\naccess = ['*']\n", "`licenses` is empty"),
        ("[default]\nlicenses = ['']\naccess = ['*']\n", "`licenses` has ''"),
        ("[default]\nlicenses = ['!']\naccess = ['*']\n", "`licenses` has '!'"),
        ("[default]\nlicenses = [' mit']\naccess = ['*']\n", "no space at its ends"),
        ("[default]\nlicenses = ['mit[12]']\naccess = ['*']\n", "the glob 'mit"),
        ("[default]\nlicenses = ['!mit']\naccess = ['*']\n", "only forbids"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['island:2']\n{ALL}", "'island:2', which names no reader"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['run:main']\n{ALL}", "'run:main', which names no reader"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['run:ma?n']\n{ALL}", "names no reader"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['job:train']\n{ALL}", "names no reader"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['job:t?']\n{ALL}", "names no reader"),
        (f"[default]\n{ALL}[[rule]]\nreaders = ['!sql:x']\n{ALL}", "names no reader"),
        (
            f"[default]\n{ALL}[[rule]]\nreaders = ['run:*']\n{ALL}[[rule]]\nreaders = ['run:a/*']\n{ALL}",
            "rule 2 is never asked: rule 1",
        ),
    ],
)
def test_wrong_policy_is_refused_with_its_rule_and_key(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        parse_policy(text, source="p.toml")
    assert "p.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_reader_of_no_kind_is_refused() -> None:
    for reader in ("main", "run:main", "run:main/island:x", "job:ingest", "sql:"):
        with pytest.raises(UserError, match="readers are run:NAME/island:N"):
            rights(reader)


def test_store_without_a_policy_allows_everything(store: Store) -> None:
    assert rights_of(store, "job:score") is None
    assert current_policy(Catalog(store)) is None


def test_newest_edition_counts_and_the_older_ones_stay(store: Store) -> None:
    first, is_new = set_policy(store, POLICY, "a reason")
    assert is_new
    assert set_policy(store, POLICY, "the same again") == (first, False)
    second, _ = set_policy(store, f"[default]\n{ALL}", "free")
    catalog = Catalog(store)
    assert current_policy(catalog) == second
    assert policy_of(catalog, first.id) == first
    assert policy_of(catalog, "") is None
    assert set_policy(store, POLICY, "back again") == (first, True)
    found = rights_of(store, "job:score")
    assert found is not None
    assert not found.everything
    with pytest.raises(Failure, match="restore the table"):
        policy_of(catalog, "0" * 32)


def test_edition_counts_also_where_its_clock_lags(store: Store) -> None:
    ahead = {"policy": "0" * 32, "text": POLICY, "reason": "r", "written_at": datetime.now(UTC) + timedelta(days=1)}
    append(store, "policies", [ahead])
    policy, _ = set_policy(store, f"[default]\n{ALL}", "free")
    assert current_policy(Catalog(store)) == policy


def test_policy_without_a_reason_is_refused(store: Store) -> None:
    with pytest.raises(UserError, match="--reason"):
        set_policy(store, POLICY, " ")
