"""Whether the ledger is exact: what it says was consumed is what the islands' counters say, each place of each step once, along one line of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manifests.catalog import Catalog
from manifests.schemas import TIERS
from tools.chaos.facts import Finding
from trainer.run import Run


def ledger_findings(catalog: Catalog, run: Run) -> list[Finding]:
    """What is wrong with the ledger of a run that is over, island by island."""
    config = run.config
    step_tokens = config.batch_size * config.seq_len
    findings: list[Finding] = []

    def wrong(island: int, what: str) -> None:
        findings.append(Finding(invariant="ledger", what=f"island {island}: {what}"))

    for island in range(config.num_islands):
        rows = catalog.rows(
            "SELECT * EXCLUDE (stream, mixture) FROM checkpoints WHERE run = ? AND island = ? ORDER BY round",
            [run.name, island],
        )
        if not rows:
            wrong(island, "no checkpoint is committed")
            continue
        last = rows[-1]
        if last["step"] != config.steps:
            wrong(island, f"its last checkpoint is of step {last['step']}, not of {config.steps}")
        chain = _chain(rows)
        if sorted(row["round"] for row in chain) != list(range(1, config.num_rounds + 1)) or len(chain) != len(rows):
            wrong(
                island,
                f"{len(rows)} checkpoints, of which {len(chain)} lead to the last one, for {config.num_rounds} rounds",
            )
        for what, count in _consumed(
            catalog, run.name, island, step_tokens, [row["checkpoint"] for row in chain]
        ).items():
            if what == "steps" and count != last["step"]:
                wrong(island, f"steps in the ledger: {count}, by its counter {last['step']}")
            if what != "steps" and count:
                wrong(island, f"{what}: {count}")
        recorded = {
            row["tier"]: row["tokens"]
            for row in catalog.rows(
                "SELECT tier, sum(tokens)::BIGINT AS tokens FROM consumption WHERE run = ? AND island = ? GROUP BY tier",
                [run.name, island],
            )
        }
        counted = {tier: last[f"tokens_{tier.lower()}"] for tier in TIERS}
        if {tier: recorded.get(tier, 0) for tier in TIERS} != counted or sum(counted.values()) != last[
            "step"
        ] * step_tokens:
            wrong(
                island,
                f"tokens in the ledger {recorded}, by its counters {counted}, by its steps {last['step'] * step_tokens}",
            )
    return findings


def _chain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last checkpoint, the one that it came from, and so on."""
    known = {row["checkpoint"]: row for row in rows}
    chain: list[dict[str, Any]] = []
    at: bytes | None = rows[-1]["checkpoint"]
    while at is not None and at in known:
        chain.append(known.pop(at))
        at = chain[-1]["parent"]
    return chain


def _consumed(catalog: Catalog, run: str, island: int, step_tokens: int, chain: list[bytes]) -> dict[str, int]:
    """Steps in the ledger, and how many spans and steps are not as they must be: the spans of a step lie end to end."""
    return catalog.rows(
        """
        WITH placed AS (
            SELECT *, coalesce(sum(tokens) OVER (PARTITION BY step ORDER BY position, token_start, shard, shard_position
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS expected
            FROM consumption WHERE run = $run AND island = $island
        ), steps AS (
            SELECT step, sum(tokens) AS tokens, count(DISTINCT incarnation) AS incarnations FROM placed GROUP BY step
        )
        SELECT
            (SELECT count(*) FROM steps WHERE step >= 1) AS steps,
            (SELECT count(*) FROM placed WHERE position <> expected) AS "spans that don't follow on the one before",
            (SELECT count(*) FROM steps WHERE tokens <> $step_tokens) AS "steps with too many or too few tokens",
            (SELECT count(*) FROM steps WHERE incarnations <> 1) AS "steps recorded by two processes",
            (SELECT count(*) FROM placed WHERE NOT list_contains($chain, checkpoint)) AS "spans of checkpoints that don't lead to the last one"
        """,
        {"run": run, "island": island, "step_tokens": step_tokens, "chain": chain},
    )[0]


def stream_of(catalog: Catalog, run: str) -> dict[tuple[int, int], str]:
    """What every island was given in every step, as a hash of its spans."""
    rows = catalog.rows(
        """
        SELECT island, step, md5(string_agg(concat_ws('/', position, hex(shard), shard_position, token_start, tokens, tier), ',' ORDER BY position)) AS spans
        FROM consumption WHERE run = $run GROUP BY island, step
        """,
        {"run": run},
    )
    return {(row["island"], row["step"]): row["spans"] for row in rows}


def compare_streams(stream: Mapping[tuple[int, int], str], alike: Mapping[tuple[int, int], str]) -> list[Finding]:
    """Whether every island was given the same tokens in the same places as in a run of the same seed that nothing happened to."""
    differing = sorted(at for at in stream.keys() | alike.keys() if stream.get(at) != alike.get(at))
    if not differing:
        return []
    island, step = differing[0]
    what = (
        f"{len(differing)} steps had other tokens than without faults, the first of them step {step} of island {island}"
    )
    return [Finding(invariant="stream", what=what)]
