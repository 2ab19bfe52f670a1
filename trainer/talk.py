"""What the tape says beside tensors: what the islands have told, and the mixes that they have been given. Whoever has read the same merges has the same of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.feedback import SCALES
from trainer.messages import Heard, Key, Levels, decode, encode, from_text, to_text


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenMix:
    """A mix that the syncer has decided on for an island."""

    key: Key
    """The feedback message that it was decided by: incarnation and sequence number."""
    strategy: str
    tier_version: int
    weights: Mapping[str, float]
    """Share of the sequences, by tier."""
    parameters: str
    """What the SQL was asked with, JSON."""
    inputs: str
    """Versions of the tables that it read, JSON."""
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As the tape keeps it."""
        return asdict(self) | {"weights": dict(self.weights)}

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> GivenMix:
        """What `to_json` gave."""
        return GivenMix(**{**given, "key": (given["key"][0], given["key"][1])})


@dataclass(frozen=True, slots=True)
class Talk:
    """What has been said up to a merge."""

    heard: Mapping[int, Heard] = field(default_factory=dict)
    """By island."""
    mixes: Mapping[int, GivenMix] = field(default_factory=dict)
    """By island, the newest."""

    def after(self, description: Mapping[str, Any]) -> Talk:
        """After one more merge.

        Raises:
            CorruptMessage: what it says is of another version of Atoll.
        """
        heard, mixes = dict(self.heard), dict(self.mixes)
        # A merge from before islands told anything here has neither.
        for island, texts in description.get("feedback", {}).items():
            for text in texts:
                heard[int(island)] = heard.get(int(island), Heard()).joined(Heard.of(decode(from_text(text), SCALES)))
        for island, given in description.get("mixes", {}).items():
            mixes[int(island)] = GivenMix.from_json(given)
        return Talk(heard, mixes)

    def states(self, island: int) -> dict[Key, Levels]:
        """What is known of an island, by message, the oldest first."""
        return self.heard[island].states(len(SCALES)) if island in self.heard else {}

    def to_json(self) -> dict[str, Any]:
        """As snapshots keep it."""
        return {
            "feedback": {
                str(island): [to_text(encode(message)) for message in heard.messages.values()]
                for island, heard in self.heard.items()
            },
            "mixes": {str(island): mix.to_json() for island, mix in self.mixes.items()},
        }

    @staticmethod
    def from_json(kept: Mapping[str, Any]) -> Talk:
        """What `to_json` gave."""
        return Talk().after(kept)
