"""What an island is to read next, all things weighed: its strategy, what the islands have told, and what the others read. Whom it's told by is steering.py's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.catalog import Catalog
from manifests.jobs import canonical_json
from manifests.schemas import TIERS
from manifests.strategies import ADAPTIVE
from trainer.assignment import AUTO, BALANCED, HISTORY, reassign, trouble
from trainer.checkpoints import round_of_message
from trainer.diversity import kept_diverse
from trainer.feedback import Feedback
from trainer.messages import Key
from trainer.rights import island_rights
from trainer.run import Run
from trainer.strategies import TABLES_READ, decide
from trainer.talk import GivenMix

TABLES_WEIGHED = (*TABLES_READ, "mixtures", "runs", "policies")
"""Tables that a choice is made from."""
_ANCHORS = ("aggressive", "conservative")
"""Where mixes that are too much alike are moved to, island by island in turn: towards the best tiers, and towards the rest."""


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
        )
        for row in catalog.rows(sql, [run])
    }


def read_histories(catalog: Catalog, run: str) -> dict[int, list[Feedback]]:
    """What the islands have told of late, the newest last."""
    sql = (
        "SELECT * FROM feedback WHERE run = ? "
        f"QUALIFY row_number() OVER (PARTITION BY island ORDER BY sequence DESC) <= {HISTORY} ORDER BY island, sequence"
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
    after, why = _strategy(run, catalog, island, before)
    rights = island_rights(config, catalog, island).both
    decision = decide(
        catalog if rights.everything else Catalog(run.store, tables=TABLES_READ, rights=rights),
        run=run.name,
        island=island,
        strategy=after,
        tier_version=tier_version,
        pool=config.pool,
        sequence=key[1],
        previous=_previous(island, after, tier_version, (coming.get(island), recorded.get(island))),
    )
    reason = f"feedback {key[1]}, up to round {round_of_message(run, key[1])}"
    switch = Switch(before=before, after=after, why=why) if after != before else None
    if switch is not None:
        reason = f"{after} in place of {before}: {why}; {reason}"
    weights, parameters = decision.weights, decision.parameters
    if config.min_diversity > 0 and after == ADAPTIVE:
        others = {number: mix.weights for number, mix in known.items() if number != island}
        weights, moved = _kept_diverse(catalog, island, weights, others, config.min_diversity)
        if moved:
            reason += f"; towards {moved['anchor']}, since the islands' mixes are too much alike"
            parameters = canonical_json({**json.loads(parameters), "kept_diverse": moved})
    mix = GivenMix(
        key=key,
        strategy=after,
        tier_version=tier_version,
        weights=weights,
        parameters=parameters,
        inputs=decision.inputs,
        reason=reason,
    )
    return mix, switch


def _previous(
    island: int, strategy: str, tier_version: int, mixes: tuple[NewestMix | GivenMix | None, ...]
) -> Mapping[str, float] | None:
    """What the island reads by, or will at its next edge; None: by another strategy, or of another tier version, so that it begins anew."""
    for mix in mixes:
        if mix is not None and mix.tier_version == tier_version:
            return mix.weights if mix.strategy == strategy else None
    return None


def _strategy(run: Run, catalog: Catalog, island: int, before: str) -> tuple[str, str]:
    """What an island is to read by, and why where that's another than it does."""
    asked, why = run.config.strategies[island % len(run.config.strategies)], "it may go on"
    histories = read_histories(catalog, run.name)
    if asked == AUTO:
        asked, why = before, ""
        if found := reassign(island, before, histories):
            asked, why = found.strategy, found.why
    moves = catalog.rows("SELECT learning_rate > 0 AS moves FROM strategies WHERE strategy = ?", [asked])
    if moves and moves[0]["moves"] and (found_trouble := trouble(histories.get(island, ()))):
        return BALANCED, found_trouble
    return asked, why


def _kept_diverse(
    catalog: Catalog,
    island: int,
    weights: Mapping[str, float],
    others: Mapping[int, Mapping[str, float]],
    minimum: float,
) -> tuple[Mapping[str, float], dict[str, Any]]:
    """The mix, held apart from the others', and what that was worked out from; nothing where it stays."""
    name = _ANCHORS[island % len(_ANCHORS)]
    rows = catalog.rows("SELECT * FROM strategies WHERE strategy = ? AND weight_s IS NOT NULL", [name])
    if not rows or not others:
        return weights, {}
    asked = {tier: rows[0][f"weight_{tier.lower()}"] * (weights[tier] > 0) for tier in TIERS}
    total = sum(asked.values())
    if total == 0:
        return weights, {}
    anchor = {tier: weight / total for tier, weight in asked.items()}
    moved = kept_diverse(weights, list(others.values()), anchor, minimum)
    if moved == dict(weights):
        return weights, {}
    told = {"anchor": name, "mix": dict(weights), "others": {str(i): dict(mix) for i, mix in others.items()}}
    return moved, {**told, "minimum": minimum}
