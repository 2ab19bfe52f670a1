"""Objects of tensors: what was packed comes back, and nothing else ever does."""

from __future__ import annotations

import json
import random

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.wire import CorruptObject, object_hash, pack, unpack

DESCRIPTION = {"run": "r", "island": 1, "tokens": 640, "path": "ä/ö", "contributions": [{"round": 3}], "none": None}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(3, 4, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(2, 3, generator=generator).T,
    }


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_what_is_packed_comes_back() -> None:
    tensors, description = unpack(pack(_tensors(), DESCRIPTION), name="o")
    assert _same(tensors, _tensors())
    assert description == DESCRIPTION


def test_not_a_number_and_infinity_come_back_too() -> None:
    tensors, _ = unpack(pack({"w": torch.tensor([float("nan"), float("inf"), -0.0])}, {}), name="o")
    assert str(tensors["w"].tolist()) == "[nan, inf, -0.0]"


def test_equal_content_is_equal_bytes_and_has_an_equal_hash() -> None:
    one, other = pack(_tensors(), DESCRIPTION), pack(dict(reversed(_tensors().items())), DESCRIPTION)
    assert object_hash(one) == object_hash(other)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_anywhere_is_noticed(bit: int) -> None:
    data = pack(_tensors(), DESCRIPTION)
    missed = []
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << bit
        try:
            tensors, description = unpack(bytes(damaged), name="the object")
        except CorruptObject:
            continue
        # Only padding may change: then nothing that is read has.
        missed.append(place)
        assert _same(tensors, _tensors())
        assert description == DESCRIPTION
    assert len(missed) <= 8


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(), num_bytes=st.integers(1, 40))
def test_overwritten_bytes_never_give_other_content(seed: int, num_bytes: int) -> None:
    data = bytearray(pack(_tensors(), DESCRIPTION))
    rng = random.Random(seed)
    for _ in range(num_bytes):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        tensors, description = unpack(bytes(data), name="o")
    except CorruptObject:
        return
    assert _same(tensors, _tensors())
    assert description == DESCRIPTION


def test_a_truncated_object_is_refused_wherever_it_ends() -> None:
    data = pack(_tensors(), DESCRIPTION)
    for size in range(len(data)):
        with pytest.raises(CorruptObject):
            unpack(data[:size], name="o")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptObject):
        unpack(data, name="o")


@pytest.mark.parametrize(
    "data",
    [
        safetensors.torch.save({"w": torch.ones(2)}),
        safetensors.torch.save({"w": torch.ones(2)}, {"format": "pt"}),
        safetensors.torch.save({"w": torch.ones(2)}, {"atoll": "{}"}),
        safetensors.torch.save({"w": torch.ones(2)}, {"atoll": "0" * 32 + " {}"}),
        safetensors.torch.save({"w": torch.ones(2)}, {"atoll": "no JSON"}),
        b"PK\x03\x04 a zip file",
        (2).to_bytes(8, "little") + b"[]",
        (len(b'{"__metadata__": null}')).to_bytes(8, "little") + b'{"__metadata__": null}',
        (len(b'{"__metadata__": {"atoll": 1}}')).to_bytes(8, "little") + b'{"__metadata__": {"atoll": 1}}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        json.dumps({"__metadata__": {}}).encode(),
    ],
)
def test_objects_of_other_programs_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptObject, match="the object"):
        unpack(data, name="the object")
