"""From what a user asks of a run and what the store holds to the run's configuration."""

from __future__ import annotations

from typing import Any

from manifests.catalog import Catalog
from manifests.editions import current_edition
from manifests.errors import UserError
from manifests.store import Store
from trainer.assignment import AUTO
from trainer.config import RunConfig
from trainer.feed import check_groups
from trainer.privacy import feedback_budget
from trainer.strategies import is_python, known_strategies, load_strategy


def configure_run(store: Store, *, run: str, tier_version: int | None, **options: Any) -> RunConfig:
    """A run's configuration on the newest views of the store, or on a named tier version. A run that exists keeps the views and the policy that it
    has.

    Raises:
        UserError: the store has no tiers or no views, an option is out of range, or needs what isn't installed.
    """
    catalog = Catalog(store)
    existing = catalog.rows("SELECT config FROM runs WHERE run = ?", [run])
    if existing:
        begun = RunConfig.from_json(existing[0]["config"])
        tier_version, policy = begun.tier_version if tier_version is None else tier_version, begun.policy
    else:
        edition = current_edition(catalog)
        policy = "" if edition is None else edition["policy"]
    rows = catalog.rows(
        """
        SELECT v.tier_version, v.pool, p.token_dtype, t.vocab_size
        FROM views AS v JOIN pools AS p USING (pool) JOIN tokenizers AS t USING (tokenizer)
        WHERE v.tier_version = ? OR ? IS NULL
        ORDER BY v.tier_version DESC, v.pool LIMIT 1
        """,
        [tier_version, tier_version],
    )
    if not rows:
        which = "no tier version has" if tier_version is None else f"tier version {tier_version} has not"
        raise UserError(f"{store.uri}: {which} been sharded; run `atoll tier`, then `atoll shard`")
    config = RunConfig(run=run, policy=policy, **rows[0], **options)
    feedback_budget(config)
    if config.group_by:
        check_groups(store, catalog, config)
    known = {row["strategy"] for row in catalog.rows("SELECT strategy FROM strategies")}
    for name in filter(is_python, config.strategies):
        load_strategy(name)
    unknown = sorted(name for name in set(config.strategies) - known - {AUTO} if not is_python(name))
    if unknown:
        raise UserError(f"strategy {', '.join(unknown)} is not known; {known_strategies(catalog)}")
    return config
