"""How fragments travel: what comes out differs from what went in by rounding only, and what is damaged is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.quantise import BLOCK, dequantise, quantise
from trainer.wire import CorruptObject, pack_parts, unpack_parts

SHAPES = {"matrix": (37, 61), "odd": (5,), "scalar": (), "long": (3 * BLOCK + 1,)}


def fragment(seed: int, scale: float = 1e-3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
    wire=st.sampled_from(["bf16", "int8", "int4"]),
)
def test_an_error_is_at_most_half_a_level(seed: int, scale: float, wire: str) -> None:
    tensors = fragment(seed, scale)
    back = dequantise(quantise(tensors, wire), SHAPES, wire)
    levels = {"bf16": 256, "int8": 127, "int4": 7}[wire]
    for name, value in tensors.items():
        assert back[name].shape == value.shape
        assert float((back[name] - value).abs().max()) <= float(value.abs().max()) * (0.52 / levels + 0.005)


def test_single_precision_travels_as_it_is() -> None:
    back = dequantise(quantise(fragment(0), "fp32"), SHAPES, "fp32")
    assert all(torch.equal(back[name], value) for name, value in fragment(0).items())


def test_four_bits_worked_out_by_hand() -> None:
    parts = quantise({"w": torch.tensor([7.0, -7.0, 3.4, 0.0, -0.6])}, "int4")
    assert parts["scales"].tolist() == [1.0]
    assert dequantise(parts, {"w": (5,)}, "int4")["w"].tolist() == [7.0, -7.0, 3.0, 0.0, -1.0]
    assert parts["values"].tolist() == [15 | 1 << 4, 11 | 8 << 4, 7 | 8 << 4]


def test_four_bits_cost_half_a_byte_and_little_more() -> None:
    count = 1 << 20
    data = pack_parts(quantise({"w": torch.randn(count)}, "int4"), {"w": (count,)}, "int4", {})
    assert len(data) / count / 24 <= 0.021


@pytest.mark.parametrize("damage", ["shapes", "wire", "short", "not finite"])
def test_what_is_of_another_model_or_damaged_is_refused_by_name(damage: str) -> None:
    parts, wire = quantise(fragment(0), "int4"), "int4"
    shapes: dict[str, tuple[int, ...]] = dict(SHAPES)
    if damage == "not finite":
        parts["scales"][0] = torch.nan
    if damage == "short":
        parts["values"] = parts["values"][:-1].clone()
        with pytest.raises(ValueError, match="it holds"):
            dequantise(parts, SHAPES, "int4")
        return
    data = pack_parts(parts, shapes, "int3" if damage == "wire" else wire, {"run": "r"})
    if damage == "shapes":
        shapes["odd"] = (6,)
    with pytest.raises(CorruptObject, match=r"runs/r/outer/1 "):
        unpack_parts(data, name="runs/r/outer/1", shapes=shapes)
