"""Objects that hold tensors: safetensors bytes with a JSON description and a hash, checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
import xxhash

from manifests.errors import Failure


class CorruptObject(Failure):
    """An object's bytes are not what was written, or not of this kind. It must not be used."""


def pack(tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> bytes:
    """Tensors and what is known of them, as one object's bytes."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"atoll": json.dumps(dict(description), sort_keys=True), "hash": _tensors_hash(ready)}
    return safetensors.torch.save(ready, metadata)


def unpack(data: bytes, *, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the description.

    Args:
        data: the object's bytes.
        name: the object's name, for the error.

    Raises:
        CorruptObject: truncated, flipped, or not written by `pack`.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        description = json.loads(metadata["atoll"])
        tensors = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as e:
        raise CorruptObject(f"{name} is not an object of Atoll's, or damaged: {e}") from e
    if _tensors_hash(tensors) != metadata["hash"]:
        raise CorruptObject(f"{name} is damaged: its tensors don't have the hash that was written with them")
    return tensors, description


def object_hash(data: bytes) -> str:
    """xxh3-128 of an object's bytes, hex."""
    return xxhash.xxh3_128_hexdigest(data)


def _tensors_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
