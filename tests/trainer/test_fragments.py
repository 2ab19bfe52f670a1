"""Cutting parameters into fragments: everything in one of them, none much heavier than the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.fragments import cut_fragments

_SIZES = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(1, 10_000), min_size=1, max_size=30)


@given(sizes=_SIZES, num_fragments=st.integers(1, 8))
def test_every_tensor_is_in_one_fragment_and_no_fragment_is_empty(sizes: dict[str, int], num_fragments: int) -> None:
    fragments = cut_fragments(sizes, num_fragments)
    assert sorted(name for names in fragments for name in names) == sorted(sizes)
    assert len(fragments) == min(num_fragments, len(sizes))
    assert all(fragments)


@given(sizes=_SIZES, num_fragments=st.integers(1, 8))
def test_the_heaviest_fragment_is_no_heavier_than_its_bound(sizes: dict[str, int], num_fragments: int) -> None:
    loads = [sum(sizes[name] for name in names) for names in cut_fragments(sizes, num_fragments)]
    # Of any greedy list scheduling (Graham): the mean load and one more tensor.
    assert max(loads) <= sum(sizes.values()) / len(loads) + max(sizes.values())
    if len(loads) > 1:
        heaviest = max(range(len(loads)), key=loads.__getitem__)
        smallest = min(sizes[name] for name in cut_fragments(sizes, num_fragments)[heaviest])
        assert loads[heaviest] - smallest <= min(loads)


@given(sizes=_SIZES, num_fragments=st.integers(1, 8), order=st.randoms())
def test_the_cut_does_not_depend_on_the_order_of_the_tensors(sizes: dict[str, int], num_fragments: int, order) -> None:  # type: ignore[no-untyped-def]
    names = list(sizes)
    order.shuffle(names)
    assert cut_fragments({name: sizes[name] for name in names}, num_fragments) == cut_fragments(sizes, num_fragments)


def test_a_cut_worked_out_by_hand() -> None:
    assert cut_fragments({"a": 5, "b": 4, "c": 3, "d": 3, "e": 3}, 2) == [["a", "d"], ["b", "c", "e"]]
