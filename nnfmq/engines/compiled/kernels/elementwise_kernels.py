"""Functions of elements, broadcast: rows of the output, which is contiguous, along which each input moves or stays.

Neighbouring dimensions that all inputs cross alike are one; so inputs of one shape are a single row, cut into pieces.
Of short rows several are one as well, where what comes back with each of them can be repeated in scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from nnfmq.engines.compiled.ir_builder import (
    F32,
    I8,
    I32,
    KernelBuilder,
    Value,
    size_of,
    strided_offset,
    vector,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.signature import Shape

__all__ = ["ElementwiseKernel", "Function", "plan_elementwise"]

_CHUNK = 1 << 12
_LONG_ROW = 1 << 8
_KINDS = {"f4": F32, "i4": I32, "u1": I8, "i1": I8}


class Function(Protocol):
    """What is computed: the types of its inputs and of its result, by numpy's letters; how many constants it has, and
    how many vectors of 32 bits it takes at once.
    """

    @property
    def items(self) -> tuple[str, ...]:
        """Types of inputs."""
        ...

    @property
    def result(self) -> str:
        """Type of the output."""
        ...

    @property
    def constants(self) -> int:
        """How many constants follow."""
        ...

    @property
    def vectors(self) -> int:
        """How wide its vectors are, in those of the target."""
        ...

    def emit(self, kb: KernelBuilder, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return a vector of results for vectors of inputs."""
        ...


@dataclass(frozen=True, slots=True)
class ElementwiseKernel:
    """`extents` are those around a row of `length`; `strides` what each input moves for them, `steps` along the row.

    Inputs that are `repeated` have only the elements of one of `times` parts of a row.
    """

    function: Function
    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    length: int
    steps: tuple[int, ...]
    lanes: int
    pieces: int
    block: int
    times: int
    repeated: tuple[bool, ...]

    compile_cost = 1

    @property
    def _rows(self) -> int:
        return math.prod(self.extents)

    @property
    def work_items(self) -> int:
        """Pieces of rows, or blocks of them."""
        return self._rows * self.pieces if self.pieces > 1 else math.ceil(self._rows / self.block)

    def scratch_bytes(self, target: Target) -> int:
        """The repeated inputs, each with room for 4 bytes an element."""
        return 4 * self.length * sum(self.repeated)

    def emit(self, kb: KernelBuilder) -> None:
        """Table: inputs, output, constants."""
        count = len(self.steps)
        addresses = [kb.argument(number) for number in range(count + 1 + self.function.constants)]
        self._emit_repetition(kb, addresses)
        if self.pieces > 1:
            with kb.loop(kb.begin, kb.end) as unit:
                row, piece = kb.ir.udiv(unit, kb.i64(self.pieces)), kb.ir.urem(unit, kb.i64(self.pieces))
                begin, last = kb.mul(piece, _CHUNK), kb.ir.icmp_unsigned("==", piece, kb.i64(self.pieces - 1))
                end = kb.ir.select(last, kb.i64(self.length), kb.add(begin, _CHUNK))
                self._emit_row(kb, addresses, row, begin, end)
        else:
            end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.block), kb.i64(self._rows))
            with kb.loop(kb.mul(kb.begin, self.block), end) as row:
                self._emit_row(kb, addresses, row, 0, self.length)
        kb.return_void()

    def _emit_repetition(self, kb: KernelBuilder, addresses: list[Value]) -> None:
        """Repeat what comes back with each part of a row, and let its address be that."""
        part, place = self.length // self.times, kb.scratch
        for number, item in enumerate(self.function.items):
            if self.repeated[number]:
                kind, source, first = _KINDS[item], addresses[number], place
                with kb.loop(0, self.length) as element:
                    offset = kb.mul(kb.ir.urem(element, kb.i64(part)), size_of(kind))
                    kb.store(kb.load(kind, source, offset), first, kb.mul(element, size_of(kind)))
                addresses[number], place = first, kb.at(place, 4 * self.length)

    def _emit_row(self, kb: KernelBuilder, addresses: Sequence[Value], row: Value, begin: Any, end: Any) -> None:
        kinds = [_KINDS[item] for item in self.function.items]
        sources = [
            kb.at(address, kb.mul(strided_offset(kb, row, self.extents, strides), size_of(kind)))
            for address, strides, kind in zip(addresses, self.strides, kinds, strict=False)
        ]
        fixed = [
            None if step else kb.broadcast(kb.load(kind, source), self.lanes)
            for source, kind, step in zip(sources, kinds, self.steps, strict=True)
        ]
        size, count = size_of(_KINDS[self.function.result]), len(kinds)
        target = kb.at(addresses[count], kb.mul(row, self.length * size))
        with vector_loop(kb, self.length, self.lanes, begin, end) as place:
            values = [
                kb.load(vector(kind, self.lanes), source, kb.mul(place, size_of(kind))) if value is None else value
                for source, kind, value in zip(sources, kinds, fixed, strict=True)
            ]
            kb.store(self.function.emit(kb, values, addresses[count + 1 :]), target, kb.mul(place, size))


def plan_elementwise(function: Function, output: Shape, inputs: Sequence[Shape], target: Target) -> ElementwiseKernel:
    """Merge dimensions, choose lanes and the pieces."""
    most = function.vectors * target.lanes
    dimensions = _merged(output, inputs)
    repeated, times = _repetition(dimensions, most)
    if times > 1:
        (length, *along), (count, *outward) = dimensions[:2]
        moved = [0 if again else stride * times for stride, again in zip(outward, repeated, strict=True)]
        dimensions = [(length * times, *along), (count // times, *moved), *dimensions[2:]]
    length, *steps = dimensions[0]
    outer = dimensions[:0:-1]
    strides = tuple(tuple(row[1 + number] for row in outer) for number in range(len(inputs)))
    pieces = length // _CHUNK if length >= 2 * _CHUNK else 1
    return ElementwiseKernel(
        function,
        tuple(row[0] for row in outer),
        strides,
        length,
        tuple(steps),
        vector_width_for(length, most),
        pieces,
        max(1, _CHUNK // length),
        times,
        repeated,
    )


_Dimension: TypeAlias = "tuple[int, ...]"  # extent and each input's stride


def _merged(output: Shape, inputs: Sequence[Shape]) -> list[_Dimension]:
    """Return the dimensions that must be told apart, from the innermost outward; at least one."""
    merged: list[_Dimension] = []
    steps = [1] * len(inputs)
    for axis in range(1, len(output) + 1):
        extents = [shape[-axis] if axis <= len(shape) else 1 for shape in inputs]
        strides = [step if extent > 1 else 0 for extent, step in zip(extents, steps, strict=True)]
        steps = [step * extent for step, extent in zip(steps, extents, strict=True)]
        if output[-axis] == 1:
            continue
        count, *inner = merged[-1] if merged else (0, *strides)
        if merged and all(s == count * i for s, i in zip(strides, inner, strict=True)):
            merged[-1] = (count * output[-axis], *inner)
        else:
            merged.append((output[-axis], *strides))
    return merged or [(1, *[0] * len(inputs))]


def _repetition(dimensions: Sequence[_Dimension], most_lanes: int) -> tuple[tuple[bool, ...], int]:
    """Return which inputs come back with each row, and how many short rows may be one."""
    (length, *steps), *outer = dimensions
    nothing = (False,) * len(steps), 1
    if not outer or length >= 4 * most_lanes:
        return nothing
    inputs = [(step, [row[1 + number] for row in outer]) for number, step in enumerate(steps)]
    repeated = tuple(step == 1 and not any(strides) for step, strides in inputs)
    goes_on = ((step == 1 and strides[0] == length) or (not step and not any(strides)) for step, strides in inputs)
    if not all(again or on for again, on in zip(repeated, goes_on, strict=True)):
        return nothing
    times = max(t for t in range(1, max(2, _LONG_ROW // length + 1)) if outer[0][0] % t == 0)
    return (repeated, times) if times > 1 else nothing
