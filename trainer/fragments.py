"""Cutting the parameters into fragments of about equal size. Pure functions of names and sizes."""

from __future__ import annotations

from collections.abc import Mapping


def cut_fragments(sizes: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    """Balanced greedy bin-packing: the largest tensor first, each into the lightest fragment.

    The heaviest fragment is at most 4/3 of the optimum (Graham's longest-processing-time bound; Decoupled DiLoCo, arXiv 2604.21428, uses it).

    Args:
        sizes: elements of each tensor, by name.
        num_fragments: fragments wanted; fewer come out where there are fewer tensors.

    Returns:
        Tensor names of each fragment, sorted; the same for the same sizes.
    """
    num_fragments = min(num_fragments, len(sizes))
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        lightest = min(range(num_fragments), key=lambda i: (loads[i], i))
        fragments[lightest].append(name)
        loads[lightest] += sizes[name]
    return [sorted(names) for names in fragments]
