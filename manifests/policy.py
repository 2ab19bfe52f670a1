"""Policy: which labels an island or a job may read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """What one reader may read."""

    condition: str
    """SQL condition over `license` and `access`."""

    @property
    def everything(self) -> bool:
        """Whether nothing is kept from the reader."""
        return self.condition == "true"
