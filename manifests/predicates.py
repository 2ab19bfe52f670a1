"""What a user's condition on documents is about: their columns, with `tier` and `score` in one tier version."""

from __future__ import annotations

NEWEST = "(SELECT max(tier_version) FROM tier_versions)"
"""As a tier version, in SQL."""


def documents_with_tiers(tier_version: int | str) -> str:
    """A query for every document with its tier and score; null where it is in no tier of the version.

    Args:
        tier_version: its number, or SQL that gives it.
    """
    return (
        "SELECT d.*, t.tier, t.score FROM documents AS d LEFT JOIN tiers AS t "
        f"ON t.doc_id = d.doc_id AND t.tier_version = {tier_version}"
    )
