"""Broadcasting elementwise kernels, and elementwise operators in the epilogue of others.

Adjacent dimensions with compatible strides in all inputs are coalesced, as in NumPy's nditer; inputs of one shape
become a single row. A row of whole vectors is a `FlatElementwiseKernel`, whose code is that of any length. Another one
is cut into chunks. Short rows are batched into a longer one, if the inputs that recur with each row can be tiled in
scratch. The output is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from enum import Enum
from typing import Any, Protocol, TypeAlias

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import (
    F16,
    F32,
    I8,
    I32,
    I64,
    KernelBuilder,
    Value,
    size_of,
    strided_offset,
    vector,
    vector_loop,
    vector_width_for,
)
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Shape

__all__ = [
    "ELEMENT_TYPES",
    "RESULT",
    "ElementwiseKernel",
    "ElementwiseOperator",
    "EmitOperator",
    "EpilogueInput",
    "EpilogueOperator",
    "FlatElementwiseKernel",
    "FusedOperator",
    "operator_count",
    "plan_elementwise",
]

_CHUNK = 1 << 12  # elements of a work item
_MAX_BATCHED_ROW = 1 << 8
ELEMENT_TYPES = {"f4": F32, "f2": F16, "i8": I64, "i4": I32, "u1": I8, "i1": I8}
"""LLVM's types of NumPy's letters."""


class ElementwiseOperator(Protocol):
    """Base of the functions that an `ElementwiseKernel` applies. Types are NumPy's: f4, f2, i8, i4, u1, i1."""

    __slots__ = ()

    @property
    def input_types(self) -> tuple[str, ...]:
        """Element types of the inputs."""
        ...

    @property
    def output_type(self) -> str:
        """Element type of the output."""
        ...

    @property
    def constant_count(self) -> int:
        """Number of constants after the output in the argument array; none by default."""
        return 0

    @property
    def vectors(self) -> int:
        """Maximum elements of a step, in vectors of 32-bit lanes of the target."""
        return 2

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the vector of results for vectors of inputs; `constants` are addresses."""
        ...


@dataclass(frozen=True, slots=True)
class FlatElementwiseKernel(Kernel):
    """A loop over inputs of the output's shape and single elements. A work item is a vector of `lanes` elements.

    `are_arrays`: which inputs are no single elements. `vectors` only sizes the work.
    """

    operator: ElementwiseOperator
    are_arrays: tuple[bool, ...]
    lanes: int
    vectors: int = field(repr=False)

    @property
    def work_items(self) -> int:
        """Vectors of the output."""
        return self.vectors

    def emit(self, kb: KernelBuilder) -> None:
        """Args: inputs, output, constants."""
        kinds = [ELEMENT_TYPES[input_type] for input_type in self.operator.input_types]
        count, size = len(kinds), size_of(ELEMENT_TYPES[self.operator.output_type])
        addresses = [kb.argument(number) for number in range(count + 1 + self.operator.constant_count)]
        splats = [
            None if is_array else kb.broadcast(kb.load(kind, address), self.lanes)
            for address, kind, is_array in zip(addresses, kinds, self.are_arrays, strict=False)
        ]
        with kb.loop(kb.mul(kb.begin, self.lanes), kb.mul(kb.end, self.lanes), self.lanes) as index:
            values = [
                kb.load(vector(kind, self.lanes), address, kb.mul(index, size_of(kind))) if splat is None else splat
                for address, kind, splat in zip(addresses, kinds, splats, strict=False)
            ]
            results = self.operator.emit(kb, values, addresses[count + 1 :])
            kb.store(results, addresses[count], kb.mul(index, size))
        kb.return_void()


@dataclass(frozen=True, slots=True)
class ElementwiseKernel(Kernel):
    """A planned broadcasting loop. Strides are in elements.

    `outer_extents` are the dimensions around a row, outermost first, and `outer_strides` each input's strides along
    them. A row has `row_length` elements; an input's inner stride is 1, or 0 if it is constant along the row. A work
    item is one of `chunks` of a row, or `rows_per_item` rows if a row is one chunk. A row is `row_batch` rows of the
    operation; inputs for which `tiled_inputs` is True recur with each of these and are repeated in scratch.
    """

    operator: ElementwiseOperator
    outer_extents: tuple[int, ...]
    outer_strides: tuple[tuple[int, ...], ...]
    row_length: int
    inner_strides: tuple[int, ...]
    lanes: int
    chunks: int
    rows_per_item: int
    row_batch: int
    tiled_inputs: tuple[bool, ...]

    @property
    def _rows(self) -> int:
        return math.prod(self.outer_extents)

    @property
    def work_items(self) -> int:
        """Chunks of rows, or groups of rows."""
        return self._rows * self.chunks if self.chunks > 1 else math.ceil(self._rows / self.rows_per_item)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of the tiled inputs, with 4 bytes for each element."""
        return 4 * self.row_length * sum(self.tiled_inputs)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: inputs, output, constants."""
        count = len(self.inner_strides)
        addresses = [kb.argument(number) for number in range(count + 1 + self.operator.constant_count)]
        self._tile_inputs(kb, addresses)
        if self.chunks > 1:
            with kb.loop(kb.begin, kb.end) as item:
                row, chunk = kb.ir.udiv(item, kb.i64(self.chunks)), kb.ir.urem(item, kb.i64(self.chunks))
                begin, is_last = kb.mul(chunk, _CHUNK), kb.ir.icmp_unsigned("==", chunk, kb.i64(self.chunks - 1))
                end = kb.ir.select(is_last, kb.i64(self.row_length), kb.add(begin, _CHUNK))
                self._emit_row(kb, addresses, row, begin, end)
        else:
            end = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.rows_per_item), kb.i64(self._rows))
            with kb.loop(kb.mul(kb.begin, self.rows_per_item), end) as row:
                self._emit_row(kb, addresses, row, 0, self.row_length)
        kb.return_void()

    def _tile_inputs(self, kb: KernelBuilder, addresses: list[Value]) -> None:
        """Repeat the tiled inputs in scratch, and replace their addresses by those of the copies."""
        period, free = self.row_length // self.row_batch, kb.scratch
        for number, input_type in enumerate(self.operator.input_types):
            if self.tiled_inputs[number]:
                kind, source, tiled = ELEMENT_TYPES[input_type], addresses[number], free
                with kb.loop(0, self.row_length) as element:
                    offset = kb.mul(kb.ir.urem(element, kb.i64(period)), size_of(kind))
                    kb.store(kb.load(kind, source, offset), tiled, kb.mul(element, size_of(kind)))
                addresses[number], free = tiled, kb.at(free, 4 * self.row_length)

    def _emit_row(self, kb: KernelBuilder, addresses: Sequence[Value], row: Value, begin: Any, end: Any) -> None:
        """Compute the elements from `begin` to before `end` of a row."""
        kinds = [ELEMENT_TYPES[input_type] for input_type in self.operator.input_types]
        sources = [
            kb.at(address, kb.mul(strided_offset(kb, row, self.outer_extents, strides), size_of(kind)))
            for address, strides, kind in zip(addresses, self.outer_strides, kinds, strict=False)
        ]
        splats = [
            None if stride else kb.broadcast(kb.load(kind, source), self.lanes)
            for source, kind, stride in zip(sources, kinds, self.inner_strides, strict=True)
        ]
        size, count = size_of(ELEMENT_TYPES[self.operator.output_type]), len(kinds)
        target = kb.at(addresses[count], kb.mul(row, self.row_length * size))
        with vector_loop(kb, self.row_length, self.lanes, begin, end) as index:
            values = [
                kb.load(vector(kind, self.lanes), source, kb.mul(index, size_of(kind))) if splat is None else splat
                for source, kind, splat in zip(sources, kinds, splats, strict=True)
            ]
            kb.store(self.operator.emit(kb, values, addresses[count + 1 :]), target, kb.mul(index, size))


def plan_elementwise(
    operator: ElementwiseOperator, output: Shape, inputs: Sequence[Shape], target: Target
) -> ElementwiseKernel | FlatElementwiseKernel:
    """Plan the loop for inputs that are broadcast to shape `output`: coalesce dimensions, choose lanes and chunks."""
    max_lanes = operator.vectors * target.lanes
    dimensions = _coalesced(output, inputs)
    if len(dimensions) == 1 and dimensions[0][0] % max_lanes == 0:
        length, *strides = dimensions[0]
        return FlatElementwiseKernel(operator, tuple(map(bool, strides)), max_lanes, length // max_lanes)
    tiled_inputs, row_batch = _row_batch(dimensions, max_lanes)
    if row_batch > 1:
        (length, *inner), (count, *outer) = dimensions[:2]
        strides = [0 if tiled else stride * row_batch for stride, tiled in zip(outer, tiled_inputs, strict=True)]
        dimensions = [(length * row_batch, *inner), (count // row_batch, *strides), *dimensions[2:]]
    length, *inner_strides = dimensions[0]
    outer_dimensions = dimensions[:0:-1]
    outer_strides = tuple(tuple(row[1 + number] for row in outer_dimensions) for number in range(len(inputs)))
    chunks = length // _CHUNK if length >= 2 * _CHUNK else 1
    return ElementwiseKernel(
        operator,
        tuple(row[0] for row in outer_dimensions),
        outer_strides,
        length,
        tuple(inner_strides),
        vector_width_for(length, max_lanes),
        chunks,
        max(1, _CHUNK // length),
        row_batch,
        tiled_inputs,
    )


_Dimension: TypeAlias = "tuple[int, ...]"  # extent, then each input's stride


def _coalesced(output: Shape, inputs: Sequence[Shape]) -> list[_Dimension]:
    """Return the dimensions that cannot be merged with their neighbours, innermost first; at least one."""
    merged: list[_Dimension] = []
    next_strides = [1] * len(inputs)
    for axis in range(1, len(output) + 1):
        extents = [shape[-axis] if axis <= len(shape) else 1 for shape in inputs]
        strides = [stride if extent > 1 else 0 for extent, stride in zip(extents, next_strides, strict=True)]
        next_strides = [stride * extent for stride, extent in zip(next_strides, extents, strict=True)]
        if output[-axis] == 1:
            continue
        count, *inner = merged[-1] if merged else (0, *strides)
        if merged and all(s == count * i for s, i in zip(strides, inner, strict=True)):
            merged[-1] = (count * output[-axis], *inner)
        else:
            merged.append((output[-axis], *strides))
    return merged or [(1, *[0] * len(inputs))]


def _row_batch(dimensions: Sequence[_Dimension], max_lanes: int) -> tuple[tuple[bool, ...], int]:
    """Return which inputs recur with each row, and how many short rows become one (1: rows stay as they are).

    Rows are batched if each input recurs, continues contiguously in the next row, or is constant over all rows.
    """
    (length, *inner_strides), *outer = dimensions
    no_batch = (False,) * len(inner_strides), 1
    if not outer or length >= 4 * max_lanes:
        return no_batch
    inputs = [(stride, [row[1 + number] for row in outer]) for number, stride in enumerate(inner_strides)]
    recurs = tuple(stride == 1 and not any(strides) for stride, strides in inputs)
    continues = (
        (stride == 1 and strides[0] == length) or (not stride and not any(strides)) for stride, strides in inputs
    )
    if not all(either or other for either, other in zip(recurs, continues, strict=True)):
        return no_batch
    batch = max(n for n in range(1, max(2, _MAX_BATCHED_ROW // length + 1)) if outer[0][0] % n == 0)
    return (recurs, batch) if batch > 1 else no_batch


# ----------------------------------------------------------------------------------------------------------------------
# An elementwise operator in the epilogue of a matrix product: applied to results before they are stored.


EmitOperator: TypeAlias = Callable[[Sequence[Value], Value], "Sequence[Value]"]
"""Emits the operator: (adjacent vectors of results, the address to which they are stored) -> final results."""


class EpilogueInput(Enum):
    """An input of the operator: the results themselves, an array of the output's shape, or one element for all."""

    RESULT = "result"
    ARRAY = "array"
    ELEMENT = "element"


@dataclass(frozen=True, slots=True)
class EpilogueOperator:
    """The operator, and what its inputs are. Elements of results and of arrays have one size."""

    operator: ElementwiseOperator
    inputs: tuple[EpilogueInput, ...]

    @property
    def operand_count(self) -> int:
        """Operands beside the results; they come after the kernel's other inputs in the argument array."""
        return len(self.inputs) - 1

    @property
    def reads_arrays(self) -> bool:
        """Whether whole vectors of another operand are read, which must not be partial ones at the end of a row."""
        return EpilogueInput.ARRAY in self.inputs

    def bind(self, kb: KernelBuilder, out: Value, first_operand: int, first_constant: int) -> EmitOperator:
        """Return the function that emits it. Operands and constants are arguments from these numbers on."""
        operands = [kb.argument(first_operand + number) for number in range(self.operand_count)]
        constants = [kb.argument(first_constant + number) for number in range(self.operator.constant_count)]

        def emit_operator(results: Sequence[Value], address: Value) -> Sequence[Value]:
            offset, finished = _distance(kb, out, address), []
            for result in results:
                finished.append(self.operator.emit(kb, self._values(kb, result, operands, offset), constants))
                offset = kb.add(offset, result.type.count * size_of(result.type.element))
            return finished

        return emit_operator

    def _values(self, kb: KernelBuilder, result: Value, operands: Sequence[Value], offset: Value) -> list[Value]:
        """Return the operator's inputs for one vector of results, `offset` bytes after the output's begin."""
        values, unread, lanes = [], iter(operands), result.type.count
        for kind, element_type in zip(self.inputs, self.operator.input_types, strict=True):
            if kind is EpilogueInput.RESULT:
                values.append(result)
            elif kind is EpilogueInput.ARRAY:
                values.append(kb.load(vector(ELEMENT_TYPES[element_type], lanes), next(unread), offset))
            else:
                values.append(kb.broadcast(kb.load(ELEMENT_TYPES[element_type], next(unread)), lanes))
        return values


def _distance(kb: KernelBuilder, begin: Value, end: Value) -> Value:
    """Return the bytes between two addresses."""
    return kb.ir.sub(kb.ir.ptrtoint(end, I64), kb.ir.ptrtoint(begin, I64))


# ----------------------------------------------------------------------------------------------------------------------
# Elementwise operators of several operations, whose results between them stay in registers.


RESULT = -1
"""In `FusedOperator.second_inputs`: the first operator's result."""


@dataclass(frozen=True, slots=True)
class FusedOperator(ElementwiseOperator):
    """An operator applied to the result of another one. The inputs of both are numbered together, each once.

    Constants: the first operator's, then the second one's.
    """

    first: ElementwiseOperator
    first_inputs: tuple[int, ...]
    second: ElementwiseOperator
    second_inputs: tuple[int, ...]

    @property
    def input_types(self) -> tuple[str, ...]:
        """Element types of the inputs."""
        numbered = dict(zip(self.first_inputs, self.first.input_types, strict=True))
        numbered |= dict(zip(self.second_inputs, self.second.input_types, strict=True))
        return tuple(numbered[number] for number in sorted(numbered) if number != RESULT)

    @property
    def output_type(self) -> str:
        """Element type of the output."""
        return self.second.output_type

    @property
    def constant_count(self) -> int:
        """Constants of both operators."""
        return self.first.constant_count + self.second.constant_count

    @property
    def vectors(self) -> int:
        """Vectors of the operator that takes fewer of them."""
        return min(self.first.vectors, self.second.vectors)

    def emit(self, kb: KernelBuilder, inputs: Sequence[Value], constants: Sequence[Value]) -> Value:
        """Return the results."""
        count = self.first.constant_count
        result = self.first.emit(kb, [inputs[number] for number in self.first_inputs], constants[:count])
        others = [result if number == RESULT else inputs[number] for number in self.second_inputs]
        return self.second.emit(kb, others, constants[count:])


def operator_count(operator: ElementwiseOperator) -> int:
    """Return the number of operations that an operator computes."""
    if isinstance(operator, FusedOperator):
        return operator_count(operator.first) + operator_count(operator.second)
    return 1
