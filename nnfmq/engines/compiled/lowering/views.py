"""Views: how the elements of an array are reached in another order, as a shape and steps in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nnfmq.engines.compiled.kernels.strided_copy import CopyAxis, CopyRegion
from nnfmq.operations.signature import Shape, Tensor

__all__ = ["StridedView", "piece"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StridedView:
    """An offset, and for each axis an extent and a step, or in `tables` the place and offset of a table of steps."""

    offset: int
    shape: Shape
    steps: tuple[int, ...]
    tables: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> StridedView:
        """Return a tensor as it lies in memory."""
        return cls.contiguous(tensor.shape, tensor.dtype.itemsize)

    @classmethod
    def contiguous(cls, shape: Shape, size: int) -> StridedView:
        """Return elements of `size` bytes one after the other."""
        steps = tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(0, tuple(shape), steps, (None,) * len(shape))

    def permuted(self, order: Sequence[int]) -> StridedView:
        """Return the axes in another order."""
        return StridedView(
            self.offset,
            tuple(self.shape[axis] for axis in order),
            tuple(self.steps[axis] for axis in order),
            tuple(self.tables[axis] for axis in order),
        )

    def taken(self, axis: int, positions: range) -> StridedView:
        """Return the elements at `positions` along an axis."""
        offset = self.offset + (positions.start * self.steps[axis] if len(positions) else 0)
        return replace(
            self,
            offset=offset,
            shape=_with(self.shape, axis, len(positions)),
            steps=_with(self.steps, axis, self.steps[axis] * positions.step),
        )

    def boxed(self, starts: Sequence[int], shape: Shape) -> StridedView:
        """Return a box of `shape` from `starts` on."""
        offset = self.offset + sum(start * step for start, step in zip(starts, self.steps, strict=True))
        return replace(self, offset=offset, shape=tuple(shape))

    def split(self, axis: int, *extents: int) -> StridedView:
        """Return an axis as several, the last one the fastest."""
        assert math.prod(extents) == self.shape[axis]
        inner = StridedView.contiguous(extents, self.steps[axis])
        after = axis + 1
        return StridedView(
            self.offset,
            (*self.shape[:axis], *inner.shape, *self.shape[after:]),
            (*self.steps[:axis], *inner.steps, *self.steps[after:]),
            (*self.tables[:axis], *inner.tables, *self.tables[after:]),
        )

    def repeated(self, axis: int, times: int) -> StridedView:
        """Return the array with a new axis before `axis`, along which nothing changes."""
        return StridedView(
            self.offset,
            (*self.shape[:axis], times, *self.shape[axis:]),
            (*self.steps[:axis], 0, *self.steps[axis:]),
            (*self.tables[:axis], None, *self.tables[axis:]),
        )

    def tabled(self, axis: int, extent: int, place: int, offset: int = 0) -> StridedView:
        """Return an axis of `extent` whose steps are in the constant at `place` of the table of addresses."""
        return replace(
            self,
            shape=_with(self.shape, axis, extent),
            steps=_with(self.steps, axis, offset),
            tables=_with(self.tables, axis, (place, offset)),
        )


def _with(values: tuple[T, ...], axis: int, value: T) -> tuple[T, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def piece(
    source: StridedView | None, target: StridedView, size: int, places: tuple[int | None, int], **rest: Any
) -> CopyRegion:
    """Return what moves one view into another of the same shape, or fills it; `places` are those of their addresses."""
    read = source or target
    assert read.shape == target.shape, (read.shape, target.shape)
    axes = tuple(
        CopyAxis(extent, table[1] if table else step, into, table[0] if table else None)
        for extent, step, table, into in zip(read.shape, read.steps, read.tables, target.steps, strict=True)
    )
    return CopyRegion(places[0], places[1], source.offset if source else 0, target.offset, axes, size, **rest)
