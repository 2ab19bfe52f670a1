"""What an island has learned and the others haven't seen yet, fragment by fragment. Pure functions of tensors.

An island's parameters are always

    the global fragment that it has received  −  what it has sent and is not merged in that yet  +  what it has learned since it sent

The first two together are its `reference`. A sending takes the third part, rounds it and moves the reference by exactly what was sent, so the error of
rounding stays in the third part and goes with the next sending: error feedback without memory of its own. A receipt moves the reference and leaves the third
part on top, so that no step waits for a merge and none is lost by it, however long the store takes. (Decoupled DiLoCo, arXiv 2604.21428, overwrites it: α = 0. `keep` is 1 − that loss.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.quantise import Tensors, dequantise, quantise


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """An outer gradient on its way."""

    parts: Tensors
    """As it travels (quantise.py)."""
    said: Mapping[str, Any]
    """What is known of it; its wire format among it."""


@dataclass(kw_only=True, slots=True)
class Drift:
    """One fragment as an island stands to it."""

    received: Tensors
    """The global fragment of `version`."""
    version: int
    reference: Tensors
    """`received`, less what was sent and is not merged in it; float32."""
    pending: dict[int, Sent] = field(default_factory=dict)
    """Round → outer gradient that was sent in it, while it's neither merged nor dropped."""
    tokens: int = 0
    """Tokens that the third part was learned from."""
    steps: int = 0
    """Inner steps of it."""

    @staticmethod
    def at(parameters: Tensors, version: int) -> Drift:
        """Of an island that stands on the global fragment and has learned nothing yet."""
        return Drift(received=parameters, version=version, reference=dict(parameters))

    def outer_gradient(self, parameters: Mapping[str, torch.Tensor]) -> Tensors:
        """What has been learned since the last sending, with its sign turned, as gradients have it: reference − parameters."""
        return {name: value - parameters[name] for name, value in self.reference.items()}

    def send(self, parameters: Mapping[str, torch.Tensor], *, round_: int, wire: str, said: Mapping[str, Any]) -> Sent:
        """Takes what has been learned since the last sending, as sent from here on.

        Args:
            parameters: the island's own, float32.
            round_: the round that ends with it; its name at the syncer.
            wire: how it travels.
            said: what is known of it.
        """
        sent = Sent(parts=quantise(self.outer_gradient(parameters), wire), said={**said, "wire": wire})
        self.put_pending(round_, sent)
        self.tokens = self.steps = 0
        return sent

    def put_pending(self, round_: int, sent: Sent) -> None:
        """Counts an outer gradient as sent."""
        self.pending[round_] = sent
        self.reference = self._less(self.reference, sent)

    @staticmethod
    def _less(reference: Tensors, sent: Sent) -> Tensors:
        shapes = {name: tuple(value.shape) for name, value in reference.items()}
        gradient = dequantise(sent.parts, shapes, sent.said["wire"])
        return {name: value - gradient[name] for name, value in reference.items()}

    def receive(
        self,
        global_parameters: Tensors,
        version: int,
        parameters: Mapping[str, torch.Tensor],
        *,
        merged_round: int,
        keep: float,
    ) -> Tensors:
        """Goes over to a newer global fragment.

        Args:
            global_parameters: the fragment's global parameters.
            version: their version.
            parameters: the island's own.
            merged_round: what the island sent in this round or before is in it, or was dropped.
            keep: share of what was learned since the last sending that stays.

        Returns:
            The island's parameters from here on.
        """
        self.pending = {round_: sent for round_, sent in self.pending.items() if round_ > merged_round}
        reference = dict(global_parameters)
        for _, sent in sorted(self.pending.items()):
            reference = self._less(reference, sent)
        # In float64: where the reference comes back as it was, the parameters do so to the bit.
        new = {
            name: (value.double() + keep * (parameters[name].double() - self.reference[name].double())).float()
            for name, value in reference.items()
        }
        self.received, self.version, self.reference = global_parameters, version, reference
        if keep == 0:
            self.tokens = self.steps = 0
        return new

    def bring_back(self) -> Tensors:
        """Gives up all that the global fragment doesn't hold; returns the parameters from here on."""
        self.pending = {}
        self.reference = dict(self.received)
        self.tokens = self.steps = 0
        return dict(self.received)


def relative_distance(drifts: Mapping[int, Drift], parameters: Mapping[str, torch.Tensor]) -> float:
    """How far an island's parameters are from the global ones that it has received: norm of the difference over the norm of the global."""
    apart = whole = 0.0
    for drift in drifts.values():
        for name, value in drift.received.items():
            apart += float(torch.linalg.vector_norm(parameters[name] - value)) ** 2
            whole += float(torch.linalg.vector_norm(value)) ** 2
    return (apart / whole) ** 0.5 if whole > 0 else 0.0
