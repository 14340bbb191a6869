"""Recurrent kernels whose inputs and hidden states are quantized at run time.

Weights are bytes, packed as those of `GateGemv` in groups of four elements. Rows that have a scale of their own, as in
TFLite, are a `GateProduct` of `SequenceKernel`. In ONNX Runtime the hidden states of all batch rows have one scale and
zero point at each step: one work item of `DynamicSequenceKernel` takes all rows through time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, I8, I32, Constant, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.dynamic_quantization import (
    Rule,
    emit_quantization,
    emit_quantized_row,
    emit_range,
    emit_steps,
)
from nnfmq.engines.compiled.kernels.micro_kernels import dot4
from nnfmq.engines.compiled.kernels.recurrent import (
    GateGemv,
    LstmCellUpdate,
    OutputKind,
    RowPointers,
    for_each_product,
    load_units,
    tiled,
)
from nnfmq.engines.compiled.memory_plan import align
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Array

__all__ = ["DynamicGateGemv", "DynamicSequenceKernel", "QuantizedGates"]

_KR = 4  # elements of a group
_SUMS, _FACTORS, _BIASES, _ROWS = range(4)
_HEADER_BYTES = 64
_SCALE, _ZERO_POINT, _CORRECTION = 0, 4, 8


@dataclass(frozen=True, slots=True)
class DynamicGateGemv:
    """The products of rows of bytes with the int8 matrices of all gates, which lack `weight_zero_point`.

    A row is a header with its scale, its zero point, and the sum of its bytes times the weights' residual zero point;
    then its bytes.
    """

    gemv: GateGemv
    weight_zero_point: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its header, filled up with 0 to vectors of any length."""
        return _HEADER_BYTES + align(self.gemv.k)

    @property
    def _groups(self) -> int:
        return math.ceil(self.gemv.k / _KR)

    def pack(self, weights: Array) -> bytes:
        """Return weights (gates, units, k), minus their zero point, as (blocks, k / 4, vectors, gates, lanes, 4)."""
        padded = np.zeros((*weights.shape[:2], self._groups * _KR), np.float32)
        padded[..., : weights.shape[2]] = weights - np.int16(self.weight_zero_point)
        rows = self.gemv.pack_rows(padded).astype(np.int8)
        return rows.reshape(*rows.shape[:4], self._groups, _KR).transpose(0, 4, 1, 2, 3, 5).tobytes()

    def constants(self, sums: Array, factors: Array, biases: Array) -> bytes:
        """Return the rows, from arrays (gates, units): sums of the weights, their scales, biases."""
        sums = self.gemv.pack_rows(sums).astype(np.int32).view(np.float32)  # exact: below 2^24 in magnitude
        rows = np.stack([sums, *(self.gemv.pack_rows(row) for row in (factors, biases))])
        return np.moveaxis(rows.reshape(_ROWS, -1, self.gemv.lanes), 0, 1).tobytes()

    def emit(
        self,
        kb: KernelBuilder,
        block: Value,
        rows: Sequence[Value],
        weights: Value,
        constants: Value,
        addends: Sequence[Value],
    ) -> list[Sequence[Value]]:
        """Return a block's pre-activations of each row: vector by vector, and for each vector gate by gate.

        `rows` and `addends` are the addresses of the rows, and of the products of their inputs in the order of
        `GateGemv.pack_rows`.
        """
        count, lanes = self.gemv.gates * self.gemv.vectors, self.gemv.lanes
        group_bytes = count * lanes * _KR
        panel = kb.at(weights, kb.mul(block, group_bytes * self._groups))
        kind = vector(I8, _KR * lanes)

        def multiply(group: Value, accs: Sequence[Value]) -> Sequence[Value]:
            fours = [kb.load(I32, row, kb.add(kb.mul(group, _KR), _HEADER_BYTES)) for row in rows]
            elements = [kb.ir.bitcast(kb.broadcast(four, lanes), kind) for four in fours]
            matrix, result = kb.at(panel, kb.mul(group, group_bytes)), list(accs)
            for number in range(count):
                loaded = kb.load(kind, matrix, number * lanes * _KR)
                for row, factors in enumerate(elements):
                    acc = row * count + number
                    result[acc] = dot4(kb, result[acc], factors, loaded)
            return result

        initial = [acc for row in rows for acc in [self._initial(kb, row)] * count]
        accs = kb.for_loop(self._groups, initial, multiply)
        first = kb.mul(block, count * lanes * 4)
        of_block = kb.at(constants, kb.mul(first, _ROWS))
        return [
            self._finished(kb, accs[number * count : (number + 1) * count], row, of_block, kb.at(addend, first))
            for number, (row, addend) in enumerate(zip(rows, addends, strict=True))
        ]

    def _initial(self, kb: KernelBuilder, row: Value) -> Value:
        lanes = self.gemv.lanes
        if not self.weight_zero_point:
            return kb.splat(I32, 0, lanes)
        return kb.broadcast(kb.load(I32, row, _CORRECTION), lanes)

    def _finished(
        self, kb: KernelBuilder, accs: Sequence[Value], row: Value, constants: Value, products: Value
    ) -> list[Value]:
        """Return the sums of a row, times scales, plus the products of the inputs and the biases."""
        lanes = self.gemv.lanes
        kind, size, finished = vector(F32, lanes), 4 * lanes, []
        scale, zero_point = (
            kb.broadcast(kb.load(*field), lanes) for field in ((F32, row, _SCALE), (I32, row, _ZERO_POINT))
        )
        for number, acc in enumerate(accs):
            own = kb.at(constants, number * size * _ROWS)
            sums = kb.load(vector(I32, lanes), own, size * _SUMS)
            exact = kb.ir.sub(acc, kb.ir.mul(zero_point, sums))
            factors = kb.ir.fmul(scale, kb.load(kind, own, size * _FACTORS))
            product = kb.ir.fmul(kb.ir.sitofp(exact, kind), factors)
            total = kb.ir.fadd(kb.load(kind, products, number * size), product)
            finished.append(kb.ir.fadd(total, kb.load(kind, own, size * _BIASES)))
        return finished

    def fill_up(self, kb: KernelBuilder, row: Value) -> None:
        """Store zeros after a row's bytes."""
        end = _HEADER_BYTES + self.gemv.k
        if end < self.row_bytes:
            kb.memset(kb.at(row, end), 0, self.row_bytes - end)

    def quantize(self, kb: KernelBuilder, source: Value, row: Value, scale: Value, zero_point: Value) -> None:
        """Store a row of floats as a row of bytes, which has been filled up."""
        emit_steps(kb, source, kb.at(row, _HEADER_BYTES), kb.i64(self.gemv.k), scale, zero_point)
        self.store_header(kb, row, scale, kb.ir.fptosi(zero_point, I32))

    def quantize_by_rule(self, kb: KernelBuilder, source: Value, row: Value, rule: Rule) -> None:
        """Store a row of floats as a row of bytes with a scale of its own; it has been filled up."""
        found = emit_quantized_row(kb, source, kb.at(row, _HEADER_BYTES), kb.i64(self.gemv.k), rule)
        self.store_header(kb, row, *found)

    def store_header(self, kb: KernelBuilder, row: Value, scale: Value, zero_point: Value) -> None:
        """Store the header of a row, whose bytes are there."""
        kb.store(scale, row, _SCALE)
        kb.store(zero_point, row, _ZERO_POINT)
        if self.weight_zero_point:
            kb.store(self._correction(kb, kb.at(row, _HEADER_BYTES)), row, _CORRECTION)

    def _correction(self, kb: KernelBuilder, source: Value) -> Value:
        """Return the weight zero point times the sum of a row's bytes."""
        lanes = kb.target.lanes
        kind, ones = vector(I8, _KR * lanes), kb.splat(I8, 1, _KR * lanes)

        def add(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
            return [dot4(kb, accs[0], kb.load(kind, source, kb.mul(index, _KR * lanes)), ones)]

        size = self.row_bytes - _HEADER_BYTES
        (sums,) = kb.for_loop(size // (_KR * lanes), [kb.splat(I32, 0, lanes)], add)
        total = kb.ir.extract_element(sums, Constant(I32, 0))
        for lane in range(1, lanes):
            total = kb.ir.add(total, kb.ir.extract_element(sums, Constant(I32, lane)))
        return kb.ir.mul(total, I32(self.weight_zero_point))


@dataclass(frozen=True, slots=True)
class QuantizedGates:
    """A `GateProduct` of rows that become bytes by a rule of TFLite. Its constants: weights, then their rows."""

    gates: DynamicGateGemv
    rule: Rule

    constant_count = 2

    @property
    def gemv(self) -> GateGemv:
        """The product."""
        return self.gates.gemv

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a row."""
        return self.gates.row_bytes

    def prepare(self, kb: KernelBuilder, row: Value, scratch: Value) -> None:
        """Store the row as bytes in `scratch`."""
        self.gates.fill_up(kb, scratch)
        self.gates.quantize_by_rule(kb, row, scratch, self.rule)

    def source(self, row: Value, scratch: Value) -> Value:
        """Return the address of the bytes."""
        return scratch

    def emit(
        self,
        kb: KernelBuilder,
        block: Value,
        sources: Sequence[Value],
        constants: Sequence[Value],
        addends: Sequence[Value],
        place: tuple[Value, int],
    ) -> list[Sequence[Value]]:
        """Return the sums, times their scales, plus the addends."""
        weights, rows = constants
        return self.gates.emit(kb, block, sources, weights, rows, addends)


@dataclass(frozen=True, slots=True)
class DynamicSequenceKernel(Kernel):
    """All time steps of an LSTM. Its one work item is all batch rows.

    Args: the products of the inputs, positions in the order of the sequence, each as `GateGemv.pack_rows`; the hidden
    state; the cell state; `outputs`; recurrent weights; their rows of constants; the cell's constants. Scratch: hidden
    states of all rows, then for each row state, outputs and bytes.
    """

    gates: DynamicGateGemv
    cell: LstmCellUpdate
    time: int
    batch: int
    is_time_major: bool
    outputs: tuple[OutputKind, ...]

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """One."""
        return 1

    @property
    def _gemv(self) -> GateGemv:
        return self.gates.gemv

    @property
    def _units_bytes(self) -> int:
        return align(self._gemv.padded_units * 4)

    @property
    def _row_bytes(self) -> int:
        return 2 * self._units_bytes + self.gates.row_bytes

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of all rows."""
        return align(self.batch * self._gemv.k * 4) + self.batch * self._row_bytes

    def _row(self, kb: KernelBuilder, row: Value) -> tuple[Value, Value, Value]:
        """Return the addresses of a row's state, outputs and bytes."""
        first = kb.at(kb.scratch, align(self.batch * self._gemv.k * 4))
        state = kb.at(first, kb.mul(row, self._row_bytes))
        return state, kb.at(state, self._units_bytes), kb.at(state, 2 * self._units_bytes)

    def emit(self, kb: KernelBuilder) -> None:
        """Take all rows through all time steps."""
        size = self._gemv.k * 4
        with kb.ir.if_then(kb.ir.icmp_signed("<", kb.begin, kb.end)):
            kb.memcpy(kb.scratch, kb.argument(1), self.batch * size)
            with kb.loop(0, self.batch) as row:
                state, _, quantized = self._row(kb, row)
                load_units(kb, state, kb.at(kb.argument(2), kb.mul(row, self._gemv.units * 4)), self._gemv)
                self.gates.fill_up(kb, quantized)
            with kb.loop(0, self.time) as step:
                self._emit_step(kb, step)
            with kb.loop(0, self.batch) as row:
                state, _, _ = self._row(kb, row)
                hidden = kb.at(kb.scratch, kb.mul(row, size))
                self._store(kb, OutputKind.LAST_OUTPUT, row, size, hidden)
                self._store(kb, OutputKind.LAST_STATE, row, self._gemv.units * 4, state)
        kb.return_void()

    def _emit_step(self, kb: KernelBuilder, step: Value) -> None:
        size = self._gemv.k * 4
        first = 3 + len(self.outputs)
        weights, rows, constants = (kb.argument(first + number) for number in range(3))
        low, high = emit_range(kb, kb.scratch, kb.i64(self.batch * self._gemv.k))
        scale, zero_point = emit_quantization(kb, low, high)
        with kb.loop(0, self.batch) as row:
            _, _, quantized = self._row(kb, row)
            self.gates.quantize(kb, kb.at(kb.scratch, kb.mul(row, size)), quantized, scale, zero_point)
        with kb.loop(0, self.batch, self._gemv.rows) as first_row:
            self._emit_tile(kb, step, first_row, weights, rows, constants)

    def _emit_tile(
        self, kb: KernelBuilder, step: Value, first: Value, weights: Value, rows: Value, constants: Value
    ) -> None:
        """Emit a step of the rows from `first` on that are multiplied together."""
        size, width = self._gemv.k * 4, self._gemv.gates * self._gemv.padded_units * 4
        count = kb.intrinsic("llvm.smin", kb.i64(self._gemv.rows), kb.ir.sub(kb.i64(self.batch), first))

        def position(row: Value) -> Value:
            row = kb.add(first, row)
            outer, extent, inner = (step, self.batch, row) if self.is_time_major else (row, self.time, step)
            return kb.add(kb.mul(outer, extent), inner)

        with kb.loop(0, self._gemv.blocks) as block:

            def products(tile: int) -> Sequence[Sequence[Value]]:
                sources = tiled(kb, tile, count, lambda row: self._row(kb, kb.add(first, row))[2])
                addends = tiled(kb, tile, count, lambda row: kb.at(kb.argument(0), kb.mul(position(row), width)))
                return self.gates.emit(kb, block, sources, weights, rows, addends)

            with for_each_product(kb, self._gemv, count, products) as (row, values):
                state, output, _ = self._row(kb, kb.add(first, row))
                self.cell.emit_block(kb, self._gemv, values, block, RowPointers(state, output, state, constants))
        with kb.loop(0, count) as row:
            number = kb.add(first, row)
            hidden = kb.at(kb.scratch, kb.mul(number, size))
            kb.memcpy(hidden, self._row(kb, number)[1], size)
            self._store(kb, OutputKind.ALL_OUTPUTS, position(row), size, hidden)

    def _store(self, kb: KernelBuilder, kind: OutputKind, position: Value, size: int, source: Value) -> None:
        for number, output in enumerate(self.outputs):
            if output is kind:
                kb.memcpy(kb.at(kb.argument(3 + number), kb.mul(position, size)), source, size)
