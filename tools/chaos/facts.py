"""What the store says of a run that is over, and what is wrong with it. Plain data that goes from the process that looks (checks.py) to the one that reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An invariant that doesn't hold."""

    invariant: str
    """ledger, stream, global state, tape, orphans or tables."""
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """An island's part in a merge."""

    merge: int
    island: int
    steps: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the store says of a run that is over."""

    holdout_loss: float
    merges: int
    fragments: int
    contributions: Sequence[Contribution]
    dropped: Sequence[str]
    """Why an outer gradient stayed out of a merge, for each that did."""
    refused: int
    """Damaged objects that the syncer found."""
    tokens: int
    """In the ledger."""
    leftovers: int
    """Objects of killed incarnations that nobody may delete, since nobody can know that they're dead."""
