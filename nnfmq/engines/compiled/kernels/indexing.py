"""Kernels whose indices come with the request: gathers, scatters, updates at a position, reversed sequences.

An index decides an address, and may be in memory that another process changes. So a kernel loads it once and compares
the loaded value with the extent before it uses it. A run whose index is outside is left out, and the kernel reports it:
its last output, the *errors*, has an int32 for each work item and each number of an index vector, 0 or 1, of which a
call writes those of its work items. The executor raises the error that belongs to the first one that is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, F64, I32, I64, Constant, KernelBuilder, Value, size_of, vector
from nnfmq.engines.compiled.kernels import Kernel

__all__ = [
    "IndexAxis",
    "IndexComponent",
    "IndexedCopy",
    "IndexedUpdate",
    "ReverseSequence",
    "UpdateSlice",
    "coalesced",
]

_ELEMENT_TYPES = {"f4": F32, "f8": F64, "i4": I32, "i8": I64, "u4": I32, "u8": I64}


@dataclass(frozen=True, slots=True)
class IndexAxis:
    """A loop around runs: `extent` iterations, with strides in bytes.

    `array_stride` is that of the array whose parts the indices select, `index_stride` that of the indices. The other
    array, of gathered or of scattered runs, is contiguous.
    """

    extent: int
    array_stride: int
    index_stride: int


@dataclass(frozen=True, slots=True)
class IndexComponent:
    """A number of an index vector: it is in [0, extent), and a step of it is `stride` bytes of the array."""

    extent: int
    stride: int


def coalesced(axes: Sequence[IndexAxis]) -> tuple[IndexAxis, ...]:
    """Return as few loops as visit the same addresses in the same order, outermost first; at least one."""
    merged: list[IndexAxis] = []
    for axis in axes:
        if axis.extent == 1:
            continue
        last = merged[-1] if merged else None
        inner = axis.extent * axis.array_stride, axis.extent * axis.index_stride
        if last is not None and (last.array_stride, last.index_stride) == inner:
            merged[-1] = IndexAxis(last.extent * axis.extent, axis.array_stride, axis.index_stride)
        else:
            merged.append(axis)
    return tuple(merged) or (IndexAxis(1, 0, 0),)


_Move: TypeAlias = Callable[[Value, Value], None]
"""Emits what a run does, at byte offsets of the array and of the contiguous one."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Loops over runs of `run_bytes`, shared among work items along the outermost one."""

    axes: tuple[IndexAxis, ...]
    components: tuple[IndexComponent, ...]
    run_bytes: int
    work_items: int

    def emit(self, kb: KernelBuilder, indices: Value, errors: Value, move: _Move) -> None:
        """Emit `move` for each run whose index vector is inside; `indices` and `errors` are addresses."""
        width = 4 * len(self.components)
        with kb.loop(kb.mul(kb.begin, width), kb.mul(kb.end, width), 4) as offset:
            kb.store(Constant(I32, 0), errors, offset)
        own = kb.at(errors, kb.mul(kb.begin, width))

        def nest(number: int, array: Value, index: Value, run: Value) -> None:
            if number == len(self.axes):
                self._emit_checked(kb, kb.at(indices, index), own, array, lambda offset: move(offset, run))
                return
            axis, step = self.axes[number], self.run_bytes * math.prod(a.extent for a in self.axes[number + 1 :])
            begin, end = _share(kb, axis.extent, self.work_items) if number == 0 else (0, axis.extent)
            with kb.loop(begin, end) as i:
                offsets = (kb.mul(i, axis.array_stride), kb.mul(i, axis.index_stride), kb.mul(i, step))
                nest(number + 1, *map(kb.add, (array, index, run), offsets))

        nest(0, kb.i64(0), kb.i64(0), kb.i64(0))

    def _emit_checked(
        self, kb: KernelBuilder, indices: Value, errors: Value, array: Value, move: Callable[[Value], None]
    ) -> None:
        """Emit `move` at the place that an index vector selects, unless a number of it is outside."""
        are_inside = []
        for number, component in enumerate(self.components):
            index = kb.load_volatile(I32, indices, 4 * number)
            is_inside = kb.ir.icmp_unsigned("<", index, Constant(I32, component.extent))
            with kb.ir.if_then(kb.ir.not_(is_inside)):
                kb.store(Constant(I32, 1), errors, 4 * number)
            are_inside.append(is_inside)
            array = kb.add(array, kb.mul(kb.ir.zext(index, I64), component.stride))
        condition = are_inside[0]
        for other in are_inside[1:]:
            condition = kb.ir.and_(condition, other)
        with kb.ir.if_then(condition):
            move(array)


def _share(kb: KernelBuilder, extent: int, work_items: int) -> tuple[Value, Value]:
    """Return the range of `extent` iterations that belongs to the call's work items."""
    begin, end = (kb.ir.udiv(kb.mul(bound, extent), kb.i64(work_items)) for bound in (kb.begin, kb.end))
    return begin, end


@dataclass(frozen=True, slots=True)
class IndexedCopy(Kernel):
    """Runs of an array at indices, one after the other."""

    axes: tuple[IndexAxis, ...]
    components: tuple[IndexComponent, ...]
    run_bytes: int
    items: int

    @property
    def work_items(self) -> int:
        """Shares of the outermost loop."""
        return self.items

    def emit(self, kb: KernelBuilder) -> None:
        """Args: array, indices (int32), runs, errors."""
        array, indices, runs, errors = map(kb.argument, range(4))
        _Runs(self.axes, self.components, self.run_bytes, self.items).emit(
            kb, indices, errors, lambda offset, run: kb.memcpy(kb.at(runs, run), kb.at(array, offset), self.run_bytes)
        )
        kb.return_void()


@dataclass(frozen=True, slots=True)
class IndexedUpdate(Kernel):
    """A copy of an array whose runs at indices are replaced by others, or combined with them in their order.

    `kind` is NumPy's letter of an element of four or eight bytes. `reduction` is 0 to replace, 1 to add, 2 to multiply,
    3 for the maximum, 4 for the minimum, in which NaN wins. Without `has_array` the array is all zeros.
    """

    axes: tuple[IndexAxis, ...]
    components: tuple[IndexComponent, ...]
    run_bytes: int
    array_bytes: int
    kind: str
    reduction: int
    has_array: bool

    @property
    def work_items(self) -> int:
        """One: several indices may be equal."""
        return 1

    def emit(self, kb: KernelBuilder) -> None:
        """Args: array if it has one, indices (int32), updates, result, errors."""
        addresses = [kb.argument(number) for number in range(4 + self.has_array)]
        indices, updates, result, errors = addresses[-4:]
        if self.has_array:
            kb.memcpy(result, addresses[0], self.array_bytes)
        else:
            kb.memset(result, 0, self.array_bytes)

        def move(offset: Value, run: Value) -> None:
            target, update = kb.at(result, offset), kb.at(updates, run)
            if self.reduction == 0:
                kb.memcpy(target, update, self.run_bytes)
            else:
                self._emit_combined(kb, target, update)

        _Runs(self.axes, self.components, self.run_bytes, 1).emit(kb, indices, errors, move)
        kb.return_void()

    def _emit_combined(self, kb: KernelBuilder, target: Value, update: Value) -> None:
        """Combine a run with its update: whole vectors, then single elements, each of them once."""
        element = _ELEMENT_TYPES[self.kind]
        size = size_of(element)
        lanes = 4 * kb.target.lanes // size
        aligned_bytes = self.run_bytes // size // lanes * lanes * size
        for kind, begin, end, step in (
            (vector(element, lanes), 0, aligned_bytes, lanes * size),
            (element, aligned_bytes, self.run_bytes, size),
        ):
            if begin < end:
                with kb.loop(begin, end, step) as offset:
                    pair = kb.load(kind, target, offset), kb.load(kind, update, offset)
                    kb.store(self._combined(kb, *pair), target, offset)

    def _combined(self, kb: KernelBuilder, present: Value, update: Value) -> Value:
        is_float, is_max = self.kind[0] == "f", self.reduction == 3
        if self.reduction < 3:
            name = ("f" if is_float else "") + ("add" if self.reduction == 1 else "mul")
            return getattr(kb.ir, name)(present, update)
        if not is_float:
            name = f"llvm.{'s' if self.kind[0] == 'i' else 'u'}{'max' if is_max else 'min'}"
            return kb.intrinsic(name, present, update)
        stays = kb.ir.fcmp_ordered(">=" if is_max else "<=", present, update)
        return kb.ir.select(kb.ir.or_(stays, kb.ir.fcmp_unordered("uno", present, present)), present, update)


@dataclass(frozen=True, slots=True)
class UpdateSlice(Kernel):
    """A copy of an array with a smaller one at a position, which is moved so that all of it is inside.

    `axes` has the loops around runs of the smaller array, `starts` the last position and the stride of each dimension.
    """

    axes: tuple[IndexAxis, ...]
    starts: tuple[IndexComponent, ...]
    run_bytes: int
    array_bytes: int

    @property
    def work_items(self) -> int:
        """One."""
        return 1

    def emit(self, kb: KernelBuilder) -> None:
        """Args: array, smaller array, position (int32), result."""
        array, update, position, result = map(kb.argument, range(4))
        kb.memcpy(result, array, self.array_bytes)
        offset = kb.i64(0)
        for number, start in enumerate(self.starts):
            first = kb.clamp(
                kb.ir.sext(kb.load_volatile(I32, position, 4 * number), I64), kb.i64(0), kb.i64(start.extent - 1)
            )
            offset = kb.add(offset, kb.mul(first, start.stride))
        self._emit_axis(kb, 0, kb.at(result, offset), update)
        kb.return_void()

    def _emit_axis(self, kb: KernelBuilder, number: int, target: Value, update: Value) -> None:
        if number == len(self.axes):
            kb.memcpy(target, update, self.run_bytes)
            return
        axis = self.axes[number]
        with kb.loop(0, axis.extent) as i:
            addresses = kb.at(target, kb.mul(i, axis.array_stride)), kb.at(update, kb.mul(i, axis.index_stride))
            self._emit_axis(kb, number + 1, *addresses)


@dataclass(frozen=True, slots=True)
class ReverseSequence(Kernel):
    """An array whose runs along one axis are reversed up to a length, which each position along another one has.

    `shape` is (outer, first axis, between, second axis); `sequence` is 1 or 3, the number of the reversed one. A work
    item is an outer index.
    """

    shape: tuple[int, int, int, int]
    sequence: int
    run_bytes: int

    @property
    def work_items(self) -> int:
        """Outer indices."""
        return self.shape[0]

    def emit(self, kb: KernelBuilder) -> None:
        """Args: array, lengths (int32), result, errors."""
        array, lengths, result, errors = map(kb.argument, range(4))
        with kb.loop(kb.begin, kb.end) as outer:
            error = kb.at(errors, kb.mul(outer, 4))
            kb.store(Constant(I32, 0), error)
            with (
                kb.loop(0, self.shape[1]) as first,
                kb.loop(0, self.shape[2]) as between,
                kb.loop(0, self.shape[3]) as second,
            ):
                coordinates = [outer, first, between, second]
                length = kb.load_volatile(I32, lengths, kb.mul(coordinates[4 - self.sequence], 4))
                fits = kb.ir.icmp_unsigned("<=", length, Constant(I32, self.shape[self.sequence]))
                with kb.ir.if_else(fits) as (inside, outside):
                    with inside:
                        target = kb.at(result, self._offset(kb, coordinates))
                        kb.memcpy(target, kb.at(array, self._source(kb, coordinates, length)), self.run_bytes)
                    with outside:
                        kb.store(Constant(I32, 1), error)
        kb.return_void()

    def _source(self, kb: KernelBuilder, coordinates: Sequence[Value], length: Value) -> Value:
        """Return the offset of the run that comes to the place `coordinates`."""
        step, end = coordinates[self.sequence], kb.ir.zext(length, I64)
        mirrored = kb.ir.sub(kb.ir.sub(end, kb.i64(1)), step)
        source = list(coordinates)
        source[self.sequence] = kb.ir.select(kb.ir.icmp_signed("<", step, end), mirrored, step)
        return self._offset(kb, source)

    def _offset(self, kb: KernelBuilder, coordinates: Sequence[Value]) -> Value:
        """Return the offset of a run in bytes."""
        offset = kb.i64(0)
        for position, coordinate in enumerate(coordinates):
            offset = kb.add(offset, kb.mul(coordinate, self.run_bytes * math.prod(self.shape[position + 1 :])))
        return offset
