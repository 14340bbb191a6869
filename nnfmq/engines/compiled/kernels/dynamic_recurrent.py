"""Recurrent kernels whose inputs and hidden states are quantized at run time.

Weights are bytes, packed as those of `GateGemv` in groups of four elements. Rows that have a scale of their own, as in
TFLite, are a `GateProduct` of `SequenceKernel`. In ONNX Runtime the hidden states of all batch rows have one scale and
zero point at each step: one work item of `DynamicSequenceKernel` takes all rows through time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, I8, I32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.dynamic_quantization import (
    Rule,
    emit_quantization,
    emit_quantized_row,
    emit_range,
    emit_steps,
)
from nnfmq.engines.compiled.kernels.micro_kernels import dot4
from nnfmq.engines.compiled.kernels.recurrent import GateGemv, LstmCellUpdate, OutputKind, RowPointers, load_units
from nnfmq.engines.compiled.memory_plan import align
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.declaration import Array

__all__ = ["DynamicGateGemv", "DynamicSequenceKernel", "QuantizedGates", "QuantizedRow"]

_KR = 4  # elements of a group
_SUMS, _FACTORS, _BIASES, _ROWS = range(4)


@dataclass(frozen=True, slots=True)
class QuantizedRow:
    """The address of a row's bytes, the sum of the bytes times the weights' residual zero point, scale, zero point."""

    bytes: Value
    correction: Value | None
    scale: Value
    zero_point: Value


@dataclass(frozen=True, slots=True)
class DynamicGateGemv:
    """The products of a row of bytes with the int8 matrices of all gates, which lack `weight_zero_point`."""

    gemv: GateGemv
    weight_zero_point: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, filled up with 0 to vectors of any length."""
        return align(self.gemv.k)

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
        self, kb: KernelBuilder, block: Value, row: QuantizedRow, weights: Value, constants: Value, addend: Value
    ) -> Sequence[Value]:
        """Return a block's pre-activations, vector by vector and for each vector gate by gate.

        `addend` is the address of the products of the inputs, in the order of `GateGemv.pack_rows`.
        """
        count, lanes = self.gemv.gates * self.gemv.vectors, self.gemv.lanes
        group_bytes = count * lanes * _KR
        panel = kb.at(weights, kb.mul(block, group_bytes * self._groups))
        kind = vector(I8, _KR * lanes)

        def multiply(group: Value, accs: Sequence[Value]) -> Sequence[Value]:
            four = kb.load(I32, row.bytes, kb.mul(group, _KR))
            elements, matrix = kb.ir.bitcast(kb.broadcast(four, lanes), kind), kb.at(panel, kb.mul(group, group_bytes))
            loaded = (kb.load(kind, matrix, number * lanes * _KR) for number in range(count))
            return [dot4(kb, acc, elements, w) for acc, w in zip(accs, loaded, strict=True)]

        initial = kb.splat(I32, 0, lanes) if row.correction is None else kb.broadcast(row.correction, lanes)
        accs = kb.for_loop(self._groups, [initial] * count, multiply)
        first = kb.mul(block, count * lanes * 4)
        rows = kb.at(constants, kb.mul(first, _ROWS))
        products = kb.at(addend, first)
        return [self._finished(kb, acc, row, kb.at(rows, number * lanes * 4 * _ROWS), products, number)
                for number, acc in enumerate(accs)]  # fmt: skip

    def _finished(
        self, kb: KernelBuilder, acc: Value, row: QuantizedRow, constants: Value, products: Value, number: int
    ) -> Value:
        """Return a vector of sums, times scales, plus the products of the inputs and the biases."""
        lanes = self.gemv.lanes
        kind, size = vector(F32, lanes), 4 * lanes
        sums = kb.load(vector(I32, lanes), constants, size * _SUMS)
        exact = kb.ir.sub(acc, kb.ir.mul(kb.broadcast(row.zero_point, lanes), sums))
        factors = kb.ir.fmul(kb.broadcast(row.scale, lanes), kb.load(kind, constants, size * _FACTORS))
        product = kb.ir.fmul(kb.ir.sitofp(exact, kind), factors)
        total = kb.ir.fadd(kb.load(kind, products, number * size), product)
        return kb.ir.fadd(total, kb.load(kind, constants, size * _BIASES))

    def quantize(
        self, kb: KernelBuilder, source: Value, target: Value, scale: Value, zero_point: Value
    ) -> QuantizedRow:
        """Store the bytes of a row of floats, after which `target` has zeros."""
        emit_steps(kb, source, target, kb.i64(self.gemv.k), scale, zero_point)
        return self.row(kb, target, scale, kb.ir.fptosi(zero_point, I32))

    def row(self, kb: KernelBuilder, source: Value, scale: Value, zero_point: Value) -> QuantizedRow:
        """Return a row of bytes, after which `source` has zeros."""
        return QuantizedRow(source, self._correction(kb, source), scale, zero_point)

    def _correction(self, kb: KernelBuilder, source: Value) -> Value | None:
        """Return the weight zero point times the sum of a row's bytes; None without a zero point."""
        if not self.weight_zero_point:
            return None
        lanes = kb.target.lanes
        kind, ones = vector(I8, _KR * lanes), kb.splat(I8, 1, _KR * lanes)

        def add(index: Value, accs: Sequence[Value]) -> Sequence[Value]:
            return [dot4(kb, accs[0], kb.load(kind, source, kb.mul(index, _KR * lanes)), ones)]

        (sums,) = kb.for_loop(self.row_bytes // (_KR * lanes), [kb.splat(I32, 0, lanes)], add)
        total = kb.ir.extract_element(sums, ir.Constant(I32, 0))
        for lane in range(1, lanes):
            total = kb.ir.add(total, kb.ir.extract_element(sums, ir.Constant(I32, lane)))
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

    def source(self, kb: KernelBuilder, row: Value, scratch: Value) -> QuantizedRow:
        """Return the row as bytes in `scratch`."""
        count = self.gemv.k
        kb.memset(kb.at(scratch, count), 0, self.scratch_bytes - count)
        return self.gates.row(kb, scratch, *emit_quantized_row(kb, row, scratch, kb.i64(count), self.rule))

    def emit(
        self, kb: KernelBuilder, block: Value, source: QuantizedRow, constants: Sequence[Value], addend: Value
    ) -> Sequence[Value]:
        """Return the sums, times their scales, plus the addend."""
        weights, rows = constants
        return self.gates.emit(kb, block, source, weights, rows, addend)


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
                kb.memset(quantized, 0, self.gates.row_bytes)
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
            hidden = kb.at(kb.scratch, kb.mul(row, size))
            state, output, quantized = self._row(kb, row)
            outer, extent, inner = (step, self.batch, row) if self.is_time_major else (row, self.time, step)
            position = kb.add(kb.mul(outer, extent), inner)
            products = kb.at(kb.argument(0), kb.mul(position, self._gemv.gates * self._gemv.padded_units * 4))
            source = self.gates.quantize(kb, hidden, quantized, scale, zero_point)
            pointers = RowPointers(state, output, state, constants)
            with kb.loop(0, self._gemv.blocks) as block:
                values = self.gates.emit(kb, block, source, weights, rows, products)
                self.cell.emit_block(kb, self._gemv, values, block, pointers)
            kb.memcpy(hidden, output, size)
            self._store(kb, OutputKind.ALL_OUTPUTS, position, size, hidden)

    def _store(self, kb: KernelBuilder, kind: OutputKind, position: Value, size: int, source: Value) -> None:
        for number, output in enumerate(self.outputs):
            if output is kind:
                kb.memcpy(kb.at(kb.argument(3 + number), kb.mul(position, size)), source, size)
