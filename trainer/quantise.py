"""How the numbers of a fragment travel: as float32, bfloat16, or integers of 8 or 4 bits with a scale for each block. Pure torch.

What rounding leaves is not lost: whoever sends keeps the difference to what was sent and sends it with the next (error feedback; drift.py, outer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]

WIRES = ("fp32", "bf16", "int8", "int4")
BLOCK = 1024
"""Numbers that share a scale: at 4 bits its 2 bytes cost 0.4 %. A tensor begins a block of its own."""
_LEVELS = {"int8": 127, "int4": 7}


def quantise(tensors: Mapping[str, torch.Tensor], wire: str) -> Tensors:
    """A fragment's tensors as they travel, laid out one after the other in the order of their names.

    Args:
        tensors: the fragment, float32, finite, on the CPU.
        wire: one of WIRES.

    Returns:
        "values": the numbers, float32, bfloat16, int8, or two of 4 bits in each uint8; "scales" for integers: bfloat16, one for each block.
    """
    names = sorted(tensors)
    if wire in ("fp32", "bf16"):
        dtype = torch.float32 if wire == "fp32" else torch.bfloat16
        return {"values": torch.cat([tensors[name].flatten().to(dtype) for name in names])}
    levels = _LEVELS[wire]
    values, scales = zip(*(_to_levels(tensors[name].flatten(), levels) for name in names), strict=True)
    whole = torch.cat(values)
    return {"values": whole if wire == "int8" else _pack_nibbles(whole), "scales": torch.cat(scales)}


def dequantise(parts: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]], wire: str) -> Tensors:
    """What `quantise` was given, but for rounding: always the same bits for the same parts.

    Raises:
        ValueError: the parts are not those of such shapes.
    """
    counts = {name: _count(shapes[name]) for name in sorted(shapes)}
    total = sum(counts.values())
    integer = wire in _LEVELS
    num_blocks = sum(-(-count // BLOCK) for count in counts.values())
    expected = {"values": ((total + 1) // 2 if wire == "int4" else total, _VALUE_TYPES[wire])}
    if integer:
        expected["scales"] = (num_blocks, torch.bfloat16)
    found = {name: (part.numel(), part.dtype) for name, part in parts.items()}
    if found != expected:
        raise ValueError(f"it holds {found}; {wire} of {len(counts)} tensors takes {expected}")
    values = _unpack_nibbles(parts["values"], total) if wire == "int4" else parts["values"]
    tensors: Tensors = {}
    at = block = 0
    for name, count in counts.items():
        flat = values[at : at + count].float()
        if integer:
            blocks = -(-count // BLOCK)
            scales = parts["scales"][block : block + blocks].float()
            flat = flat * scales.repeat_interleave(BLOCK)[:count]
            block += blocks
        tensors[name] = flat.reshape(tuple(shapes[name])).clone()
        at += count
    return tensors


_VALUE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}


def _to_levels(flat: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = -(-flat.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: flat.numel()] = flat
    padded = padded.view(blocks, BLOCK)
    scales = (padded.abs().amax(dim=1) / levels).to(torch.bfloat16)
    divisors = scales.float()
    divisors[divisors == 0] = 1.0
    rounded = (padded / divisors[:, None]).round().clamp(-levels, levels)
    return rounded.to(torch.int8).flatten()[: flat.numel()], scales


def _pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Two 4-bit numbers to a byte, the first in the low half; each stands 8 above itself."""
    shifted = (values + 8).to(torch.uint8)
    if len(shifted) % 2:
        shifted = torch.cat([shifted, torch.full((1,), 8, dtype=torch.uint8)])
    return shifted[0::2] | (shifted[1::2] << 4)


def _unpack_nibbles(packed: torch.Tensor, total: int) -> torch.Tensor:
    halves = torch.stack([packed & 15, packed >> 4], dim=1).flatten()[:total]
    return halves.to(torch.int8) - 8


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
