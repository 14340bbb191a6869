"""Bounds of the integers that a node returns: elements of int64 that certainly fit 32 bits are computed in 32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

__all__ = ["ARITHMETIC", "Bounds", "result_bounds"]

Bounds: TypeAlias = tuple[int, int]
"""The smallest and the largest integer that a tensor can have."""


def _sum(bounds: Sequence[Bounds], count: int) -> Bounds:
    (low, high), (other_low, other_high) = bounds
    return low + other_low, high + other_high


def _difference(bounds: Sequence[Bounds], count: int) -> Bounds:
    (low, high), (other_low, other_high) = bounds
    return low - other_high, high - other_low


def _product(bounds: Sequence[Bounds], count: int) -> Bounds:
    products = [one * other for one in bounds[0] for other in bounds[1]]
    return min(products), max(products)


def _total(bounds: Sequence[Bounds], count: int) -> Bounds:
    """Return the bounds of sums of any of the first input's elements, which are `count`; further inputs are axes."""
    low, high = bounds[0]
    return min(low * count, 0), max(high * count, 0)


def _negative(bounds: Sequence[Bounds], count: int) -> Bounds:
    low, high = bounds[0]
    return -high, -low


def _size(bounds: Sequence[Bounds], count: int) -> Bounds:
    low, high = bounds[0]
    return 0, max(-low, high, 0)


ARITHMETIC: Mapping[str, Callable[[Sequence[Bounds], int], Bounds]] = {
    "Abs": _size,
    "Add": _sum,
    "CumSum": _total,
    "Mul": _product,
    "Neg": _negative,
    "ReduceSum": _total,
    "Sub": _difference,
}
"""What bounds the results of operators, given the bounds of their inputs and the first input's number of elements."""
_SELECTIONS = frozenset(
    ("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min", "ReduceMax",
     "ReduceMin", "Reshape", "ReverseSequence", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where")
)  # fmt: skip


def result_bounds(operator: str, bounds: Sequence[Bounds], count: int) -> Bounds | None:
    """Return the bounds of an operator's results, given those of the inputs on which they depend; None if unknown."""
    if operator in ARITHMETIC:
        return ARITHMETIC[operator](bounds, count)
    if operator in _SELECTIONS and bounds:
        return min(low for low, _ in bounds), max(high for _, high in bounds)
    return None
