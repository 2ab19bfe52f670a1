"""The audit: proves from the consumption tables that no island trained on what the policy keeps from it, or says on what it did.

Both editions are asked that an island obeys (trainer/rights.py): the one that its run was made under, and the newest. What a stricter edition forbids was
perhaps read before it was set: the two are said apart. Only committed segments count; the holdout, on which nobody trains, is not in consumption.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from manifests.catalog import Catalog
from manifests.editions import current_policy, policy_of
from manifests.errors import Failure, UserError
from manifests.policy import Policy
from trainer.rights import root_run

_UNKNOWN = "unknown shard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What an island trained on and shouldn't have, of one kind of labels."""

    run: str
    island: int
    labels: str
    """As in shard_labels."""
    segments: int
    tokens: int
    documents: int
    run_rule: str | None
    """The rule of the run's policy that forbids it; None: it doesn't."""
    newest_rule: str | None
    """The rule of the newest policy that forbids it; None: it doesn't."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was looked at, and what was found."""

    run: str | None
    inherited: list[bytes]
    """Checkpoints of other runs that the run, a branch, goes on from."""
    segments: int
    tokens: int
    documents: int
    findings: list[Finding]
    has_policy: bool

    @property
    def seen(self) -> str:
        """What was looked at, in words."""
        return f"{self.tokens:,} tokens of {self.documents:,} documents in {self.segments:,} segments"


def audit(catalog: Catalog, run: str | None = None) -> Audit:
    """Holds what was trained on against the policy.

    Args:
        catalog: the cut that is audited; its newest policy is the newest one.
        run: only this run and, where it's a branch, what it goes on from; None: every run.

    Raises:
        UserError: no such run.
        Failure: the records don't agree with each other, so that nothing can be proved.
    """
    configs = {row["run"]: json.loads(row["config"]) for row in catalog.rows("SELECT run, config FROM runs")}
    if run is not None and run not in configs:
        raise UserError(f"no run named {run!r} in {catalog.store.uri}; there are: {', '.join(sorted(configs))}")
    inherited = _inherited(catalog, run) if run is not None else []
    _require_records(catalog, run, inherited)
    newest = current_policy(catalog)
    policies = {identity: policy_of(catalog, identity) for identity in {c.get("policy", "") for c in configs.values()}}
    roots = {name: root_run(catalog, name) for name in configs}
    findings = []
    for row in catalog.ask("audit", run=run, inherited=inherited).to_pylist():
        reader = f"run:{roots[row['run']]}/island:{row['island']}"
        labels = json.loads(row["labels"])
        run_rule = _forbids(policies[configs[row["run"]].get("policy", "")], reader, labels)
        newest_rule = _forbids(newest, reader, labels)
        if run_rule is not None or newest_rule is not None:
            findings.append(Finding(**row, run_rule=run_rule, newest_rule=newest_rule))
    totals = catalog.ask("audit_totals", run=run, inherited=inherited).to_pylist()[0]
    has_policy = newest is not None or any(policies.values())
    return Audit(run=run, inherited=inherited, findings=findings, has_policy=has_policy, **totals)


def require_clean(found: Audit) -> None:
    """Raises a Failure that sums the findings up, where there are any."""
    if not found.findings:
        return
    tokens = sum(finding.tokens for finding in found.findings)
    by_run = sum(finding.tokens for finding in found.findings if finding.run_rule is not None)
    by_newest = sum(finding.tokens for finding in found.findings if finding.newest_rule is not None)
    raise Failure(
        f"{tokens:,} of {found.tokens:,} tokens are forbidden: {by_run:,} by the policy that their run was made under, {by_newest:,} by the newest one; "
        "`atoll audit --documents` lists them, `atoll rollback plan` says what taking them back costs"
    )


def findings_table(found: Audit) -> pa.Table:
    """The findings as rows."""
    rows = [
        {
            "run": finding.run,
            "island": finding.island,
            **_said(finding.labels),
            "documents": finding.documents,
            "tokens": finding.tokens,
            "segments": finding.segments,
            "run_policy": finding.run_rule,
            "newest_policy": finding.newest_rule,
        }
        for finding in found.findings
    ]
    return pa.Table.from_pylist(rows)


def documents_table(catalog: Catalog, found: Audit) -> pa.Table:
    """The forbidden documents one by one, by run and island in the order in which they were first read."""
    rows: list[dict[str, Any]] = []
    for run, island in dict.fromkeys((finding.run, finding.island) for finding in found.findings):
        labels = [finding.labels for finding in found.findings if (finding.run, finding.island) == (run, island)]
        documents = catalog.ask(
            "audit_documents", run=run, island=island, labels=labels, audited=found.run, inherited=found.inherited
        )
        for row in documents.to_pylist():
            texts = _said(row.pop("labels"))
            rows.append({"run": row.pop("run"), "island": row.pop("island"), "doc_id": row.pop("doc_id")} | texts | row)
    return pa.Table.from_pylist(rows)


def _forbids(policy: Policy | None, reader: str, labels: Sequence[dict[str, str]]) -> str | None:
    """The rule that forbids a text of these labels; None: it may be read, by one of them at least."""
    if policy is None:
        return None
    rights = policy.rights(reader)
    if any(rights.allows(label["license"], label["access"]) for label in labels):
        return None
    return rights.named if labels else _UNKNOWN


def _said(labels: str) -> dict[str, str]:
    """The labels as columns."""
    loaded = json.loads(labels)
    return {key: " or ".join(label[key] for label in loaded) or f"({_UNKNOWN})" for key in ("license", "access")}


def _inherited(catalog: Catalog, run: str) -> list[bytes]:
    """Checkpoints of other runs that a run goes on from."""
    rows = catalog.rows("SELECT checkpoint FROM run_ancestors($run) WHERE run <> $run", {"run": run})
    return [row["checkpoint"] for row in rows]


def _require_records(catalog: Catalog, run: str | None, inherited: Sequence[bytes]) -> None:
    """The proof rests on the sums, on the spans, and on the islands' own counters: they must agree."""
    audited = catalog.rows(
        "SELECT checkpoint, run FROM checkpoints WHERE $run::VARCHAR IS NULL OR run = $run OR list_contains($inherited::BLOB[], checkpoint)",
        {"run": run, "inherited": inherited},
    )
    runs = {row["checkpoint"]: row["run"] for row in audited}
    differing = [row for row in catalog.ask("rollup_differences").to_pylist() if row["checkpoint"] in runs]
    if differing:
        first = differing[0]
        raise Failure(
            f"nothing is proved: consumption_rounds disagrees with consumption in {len(differing):,} sums, such as {first['said_tokens']:,} tokens "
            f"for {first['tokens']:,} of shard {first['shard']} in checkpoint {first['checkpoint'].hex()} of run {runs[first['checkpoint']]}; "
            "restore the tables from a backup, or audit an earlier point with --at"
        )
    unrecorded = catalog.ask("audit_unrecorded", run=run, inherited=inherited).to_pylist()
    if unrecorded:
        first = unrecorded[0]
        raise Failure(
            f"nothing is proved: consumption has {first['recorded']:,} tokens of checkpoint {first['checkpoint'].hex()} of run {first['run']}, "
            f"island {first['island']} counted {first['counted']:,}; the same in {len(unrecorded):,} segments; restore the tables from a backup, "
            "or audit an earlier point with --at"
        )
