"""Objects that hold tensors: safetensors bytes with a JSON description and a hash, checked when read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import safetensors
import safetensors.torch
import torch
import xxhash

from manifests.errors import Failure
from trainer.quantise import WIRES

P = ParamSpec("P")
R = TypeVar("R")
_READS = 4


class CorruptObject(Failure):
    """An object's bytes are not what was written, or not of this kind. It must not be used."""


def reread(read: Callable[P, R]) -> Callable[P, R]:
    """Of a function that reads an object: reads it again where it comes damaged, since that may have happened on the way and not in the store."""

    @functools.wraps(read)
    def again(*arguments: P.args, **more: P.kwargs) -> R:
        for _ in range(_READS - 1):
            with suppress(CorruptObject):
                return read(*arguments, **more)
        return read(*arguments, **more)

    return again


def pack(tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> bytes:
    """Tensors and what is known of them, as one object's bytes."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(description), sort_keys=True)
    # One entry: safetensors writes several in no fixed order, and equal content shall be equal bytes.
    return safetensors.torch.save(ready, {"atoll": f"{_content_hash(ready, text)} {text}"})


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
        promised, text = json.loads(data[8 : 8 + size])["__metadata__"]["atoll"].split(" ", 1)
        description = json.loads(text)
        tensors = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError) as e:
        raise CorruptObject(f"{name} is not an object of Atoll's, or damaged: {e}") from e
    if _content_hash(tensors, text) != promised:
        raise CorruptObject(f"{name} is damaged: its content doesn't have the hash that was written with it")
    return tensors, description


def object_hash(data: bytes) -> str:
    """xxh3-128 of an object's bytes, hex."""
    return xxhash.xxh3_128_hexdigest(data)


def _content_hash(tensors: Mapping[str, torch.Tensor], description: str) -> str:
    digest = xxhash.xxh3_128(description.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack_parts(
    parts: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]], wire: str, description: Mapping[str, Any]
) -> bytes:
    """A fragment as it travels (quantise.py), with what is known of it."""
    return pack(parts, {**description, "wire": wire, "shapes": {name: list(shapes[name]) for name in sorted(shapes)}})


def unpack_parts(
    data: bytes, *, name: str, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A fragment's parts and description, checked to be of such a fragment and finite.

    Raises:
        CorruptObject: damaged, or of another model or run.
    """
    parts, description = unpack(data, name=name)
    if description.get("shapes") != {key: list(shapes[key]) for key in sorted(shapes)}:
        raise CorruptObject(f"{name} holds other tensors than the fragment; it's of another model or run")
    if description.get("wire") not in WIRES:
        raise CorruptObject(
            f"{name} is of wire format {description.get('wire')!r}; this version knows {', '.join(WIRES)}"
        )
    numbers = [part for part in parts.values() if part.is_floating_point()]
    if not all(bool(torch.isfinite(part).all()) for part in numbers):
        raise CorruptObject(f"{name} holds numbers that are not finite; the island has diverged")
    return parts, description
