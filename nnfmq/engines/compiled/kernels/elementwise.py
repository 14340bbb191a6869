"""Functions of elements, broadcast: rows of the output, which is contiguous, along which each input moves or stays.

Neighbouring dimensions that all inputs cross alike are one; so inputs of one shape are a single row, cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nnfmq.engines.compiled.emission import F32, I8, I32, Emitter, Value, size_of, vector
from nnfmq.engines.compiled.kernels.spans import fitting_lanes, offset_of, spans
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.signature import Shape

__all__ = ["Elementwise", "Function", "plan_elementwise"]

_CHUNK = 1 << 12
_KINDS = {"f4": F32, "i4": I32, "u1": I8, "i1": I8}


class Function(Protocol):
    """What is computed: the types of its inputs and of its result, by numpy's letters; how many constants it has, and
    how many vectors of 32 bits it takes at once."""

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

    def emit(self, e: Emitter, values: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return a vector of results for vectors of inputs."""
        ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """`extents` are those around a row of `length`; `strides` what each input moves for them, `steps` along the row."""

    function: Function
    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    length: int
    steps: tuple[int, ...]
    lanes: int
    pieces: int
    block: int

    @property
    def _rows(self) -> int:
        return math.prod(self.extents)

    @property
    def units(self) -> int:
        """Pieces of rows, or blocks of them."""
        return self._rows * self.pieces if self.pieces > 1 else math.ceil(self._rows / self.block)

    def scratch_bytes(self, target: Target) -> int:
        """Nothing."""
        return 0

    def emit(self, e: Emitter) -> None:
        """Table: inputs, output, constants."""
        count = len(self.steps)
        addresses = [e.argument(number) for number in range(count + 1 + self.function.constants)]
        if self.pieces > 1:
            with e.loop(e.begin, e.end) as unit:
                row, piece = e.b.udiv(unit, e.i64(self.pieces)), e.b.urem(unit, e.i64(self.pieces))
                begin, last = e.mul(piece, _CHUNK), e.b.icmp_unsigned("==", piece, e.i64(self.pieces - 1))
                end = e.b.select(last, e.i64(self.length), e.add(begin, _CHUNK))
                self._emit_row(e, addresses, row, begin, end)
        else:
            end = e.intrinsic("llvm.smin", e.mul(e.end, self.block), e.i64(self._rows))
            with e.loop(e.mul(e.begin, self.block), end) as row:
                self._emit_row(e, addresses, row, 0, self.length)
        e.finish()

    def _emit_row(self, e: Emitter, addresses: Sequence[Value], row: Value, begin: Any, end: Any) -> None:
        kinds = [_KINDS[item] for item in self.function.items]
        sources = [
            e.at(address, e.mul(offset_of(e, row, self.extents, strides), size_of(kind)))
            for address, strides, kind in zip(addresses, self.strides, kinds, strict=False)
        ]
        fixed = [
            None if step else e.broadcast(e.load(kind, source), self.lanes)
            for source, kind, step in zip(sources, kinds, self.steps, strict=True)
        ]
        size, count = size_of(_KINDS[self.function.result]), len(kinds)
        target = e.at(addresses[count], e.mul(row, self.length * size))
        with spans(e, self.length, self.lanes, begin, end) as place:
            values = [
                e.load(vector(kind, self.lanes), source, e.mul(place, size_of(kind))) if value is None else value
                for source, kind, value in zip(sources, kinds, fixed, strict=True)
            ]
            e.store(self.function.emit(e, values, addresses[count + 1 :]), target, e.mul(place, size))


def plan_elementwise(function: Function, output: Shape, inputs: Sequence[Shape], target: Target) -> Elementwise:
    """Merge dimensions, choose lanes and the pieces."""
    merged: list[list[int]] = []  # extent and each input's stride, from the innermost outward
    steps = [1] * len(inputs)
    for axis in range(1, len(output) + 1):
        extent = output[-axis]
        strides = [
            step if axis <= len(shape) and shape[-axis] > 1 else 0 for shape, step in zip(inputs, steps, strict=True)
        ]
        steps = [step * (shape[-axis] if axis <= len(shape) else 1) for shape, step in zip(inputs, steps, strict=True)]
        if extent == 1:
            continue
        if merged and all(s == inner * merged[-1][0] for s, inner in zip(strides, merged[-1][1:], strict=True)):
            merged[-1][0] *= extent
        else:
            merged.append([extent, *strides])
    length, *along = merged[0] if merged else [1, *[0] * len(inputs)]
    outer = merged[:0:-1]
    extents, strides_of = tuple(one[0] for one in outer), [one[1:] for one in outer]
    strides_by_input = tuple(tuple(row[number] for row in strides_of) for number in range(len(inputs)))
    lanes = fitting_lanes(length, function.vectors * target.lanes)
    pieces = length // _CHUNK if length >= 2 * _CHUNK else 1
    block = max(1, _CHUNK // length)
    return Elementwise(function, extents, strides_by_input, length, tuple(along), lanes, pieces, block)
