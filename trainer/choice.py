"""What an island is to read next, all things weighed: its strategy, what the islands have told, and what the others read. Whom it's told by is steering.py's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manifests.catalog import Catalog
from manifests.jobs import canonical_json
from manifests.schemas import TIERS
from manifests.strategies import ADAPTIVE
from trainer.assignment import AUTO, BALANCED, reassign, trouble
from trainer.checkpoints import round_of_message
from trainer.config import RunConfig
from trainer.diversity import spread_share, towards_tier
from trainer.feedback import Feedback
from trainer.messages import Key
from trainer.rights import island_rights
from trainer.run import Run
from trainer.strategies import TABLES_READ, Decision, decide, is_python
from trainer.talk import GivenMix
from trainer.worth import MEMORY, Cycle, Worth, nothing_known, worth_by_regression, worth_by_telling

TABLES_WEIGHED = (*TABLES_READ, "checkpoints", "mixtures", "runs", "policies")
"""Tables that a choice is made from."""
_AT_FLOOR = 1.5
"""A weight of so many floors or less is taken to lie at the floor."""
_MOST_SPREAD = 4.0
"""Diversity of the mixes where nothing is known, as a multiple of what it is where all is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """An island goes over to another strategy."""

    before: str
    after: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestMix:
    """What an island has said last that it reads by."""

    strategy: str
    tier_version: int
    weights: Mapping[str, float]
    round: int
    reason: str
    parameters: str


def newest_mixes(catalog: Catalog, run: str) -> dict[int, NewestMix]:
    """By island."""
    sql = "SELECT * FROM mixtures WHERE run = ? QUALIFY row_number() OVER (PARTITION BY island ORDER BY written_at DESC) = 1"
    return {
        row["island"]: NewestMix(
            strategy=row["strategy"],
            tier_version=row["tier_version"],
            weights={tier: row[f"weight_{tier.lower()}"] for tier in TIERS},
            round=row["round"],
            reason=row["reason"],
            parameters=row["parameters"],
        )
        for row in catalog.rows(sql, [run])
    }


def read_histories(catalog: Catalog, run: str) -> dict[int, list[Feedback]]:
    """What the islands have told of late, the newest last."""
    sql = (
        "SELECT * FROM feedback WHERE run = ? "
        f"QUALIFY row_number() OVER (PARTITION BY island ORDER BY sequence DESC) <= {MEMORY} ORDER BY island, sequence"
    )
    histories: dict[int, list[Feedback]] = {}
    for row in catalog.rows(sql, [run]):
        histories.setdefault(row["island"], []).append(Feedback.from_row(row))
    return histories


def choose_mix(
    run: Run, catalog: Catalog, island: int, key: Key, tier_version: int, coming: Mapping[int, GivenMix]
) -> tuple[GivenMix, Switch | None]:
    """An island's next mix, and whether that is by another strategy than before.

    Args:
        run: the run; its mixes are of tiers.
        catalog: pins TABLES_WEIGHED, with the island's last message among them.
        island: its number.
        key: its last message.
        tier_version: tier version that it reads.
        coming: by island, mixes that it has been given or will be.

    Raises:
        UserError: its strategy isn't known, or leaves no tier to read.
    """
    config = run.config
    recorded = newest_mixes(catalog, run.name)
    known: Mapping[int, NewestMix | GivenMix] = {**recorded, **coming}
    present = known.get(island)
    before = present.strategy if present is not None else config.strategy_of(island)
    histories = read_histories(catalog, run.name)
    after, why = _strategy(run, catalog, island, before, histories)
    rights = island_rights(config, catalog, island).both
    worth = worth_now(run, catalog, tier_version, histories)
    decision = decide(
        catalog if rights.everything else Catalog(run.store, tables=TABLES_READ, rights=rights),
        run=run.name,
        island=island,
        strategy=after,
        tier_version=tier_version,
        pool=config.pool,
        sequence=key[1],
        previous=_previous(after, tier_version, (coming.get(island), recorded.get(island))),
        worth=worth,
        histories=histories,
    )
    reason = f"feedback {key[1]}, up to round {round_of_message(run, key[1])}"
    switch = Switch(before=before, after=after, why=why) if after != before else None
    if switch is not None:
        reason = f"{after} in place of {before}: {why}; {reason}"
    decision, towards = set_apart(config, catalog, island, after, decision, worth)
    if towards is not None:
        reason += f"; more {towards}, for islands to differ"
    mix = GivenMix(
        key=key,
        strategy=after,
        tier_version=tier_version,
        weights=decision.weights,
        parameters=decision.parameters,
        inputs=decision.inputs,
        reason=reason,
    )
    return mix, switch


def _previous(
    strategy: str, tier_version: int, mixes: tuple[NewestMix | GivenMix | None, ...]
) -> Mapping[str, float] | None:
    """What the island reads by, or will at its next edge, but for what sets it apart from the others; None: by another strategy, or of another tier version, so
    that it begins anew."""
    for mix in mixes:
        if mix is not None and mix.tier_version == tier_version:
            spread: Mapping[str, Any] = json.loads(mix.parameters).get("spread", {})
            return spread.get("mix", mix.weights) if mix.strategy == strategy else None
    return None


def worth_now(
    run: Run, catalog: Catalog, tier_version: int, histories: Mapping[int, Sequence[Feedback]]
) -> Worth | None:
    """What the tiers are worth by all that the islands have gone through; None: there is nothing to compare an island with, so that it goes by its own message.

    Args:
        run: the run.
        catalog: pins TABLES_WEIGHED.
        tier_version: the tiers that it's asked of.
        histories: what `read_histories` gave.
    """
    if run.config.online_influence:
        return worth_by_telling(histories)
    if run.config.feedback_epsilon > 0:
        return worth_by_telling(histories)  # what the tables know of holdout losses is hidden under no noise
    overlap = catalog.ask("tier_overlap", tier_version=tier_version, pool=run.config.pool).to_pylist()
    kept = {row["tier_version"]: row["kept"] for row in overlap}
    cycles = [Cycle.from_row(row, kept) for row in catalog.ask("cycle_losses", run=run.name).to_pylist()]
    if len({cycle.island for cycle in cycles}) < 2 and run.config.num_islands < 2:
        return None
    return worth_by_regression(cycles) or nothing_known(len(cycles))


def _strategy(
    run: Run, catalog: Catalog, island: int, before: str, histories: Mapping[int, Sequence[Feedback]]
) -> tuple[str, str]:
    """What an island is to read by, and why where that's another than it does."""
    asked, why = run.config.strategies[island % len(run.config.strategies)], "it may go on"
    if asked == AUTO:
        asked, why = before, ""
        if found := reassign(island, before, histories):
            asked, why = found.strategy, found.why
    moves = catalog.rows("SELECT learning_rate > 0 AS moves FROM strategies WHERE strategy = ?", [asked])
    moves_itself = is_python(asked) or (moves and moves[0]["moves"])
    if moves_itself and (found_trouble := trouble(histories.get(island, ()))):
        return BALANCED, found_trouble
    return asked, why


def set_apart(
    config: RunConfig, catalog: Catalog, island: int, strategy: str, decision: Decision, worth: Worth | None = None
) -> tuple[Decision, str | None]:
    """A decision on an adaptive mix, set apart from the other islands', and the tier that the island reads more of; where it stays as it is, none.

    Each island reads more of a tier of its own, in turn, so that their mixes differ in every direction in which something is left to learn; tiers at their floor are known
    to be bad, and left there. The less is known, the further they're apart. The record of the decision tells what it would be without.

    Args:
        config: of the run.
        catalog: pins `strategies`.
        island: its number.
        strategy: that it reads by.
        decision: on its mix.
        worth: what is known of the tiers; None: nothing.
    """
    if strategy != ADAPTIVE or config.min_diversity == 0 or config.num_islands < 2:
        return decision, None
    rows = catalog.rows("SELECT weight_floor AS floor FROM strategies WHERE strategy = ?", [ADAPTIVE])
    floor = rows[0]["floor"] if rows else 0.0
    tried = [tier for tier in TIERS if decision.weights[tier] > _AT_FLOOR * floor]
    if len(tried) < 2:
        return decision, None
    own = [tried[number % len(tried)] for number in range(config.num_islands)]
    unknown = worth.unknown_share if worth is not None else 1.0
    share = spread_share(decision.weights, own, config.min_diversity * (1 + (_MOST_SPREAD - 1) * unknown))
    towards = own[island % len(own)]
    spread = {"towards": towards, "share": share, "mix": dict(decision.weights)}
    parameters = canonical_json({**json.loads(decision.parameters), "spread": spread})
    weights = towards_tier(decision.weights, towards, share)
    return replace(decision, weights=weights, parameters=parameters), towards
