"""RNN and LSTM cells: the matrix-vector product of all gates, fused with the update of the units.

Lanes are units. A block of units computes the pre-activations of all its gates before it updates their state, so these
stay in registers. Weights are packed in the order in which the kernel reads them, (blocks, K, vectors, gates, lanes).
States and constants are padded to whole blocks, so there are no remainders; padding units have weights of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, reduce_lanes
from nnfmq.engines.compiled.kernels.vector_math import clamp_float, fmuladd, logistic, tanh
from nnfmq.engines.compiled.target import Target

__all__ = ["GateGemv", "LstmCellUpdate", "RnnCell", "RowPointers", "apply_activation", "plan_gate_gemv"]

Array = npt.NDArray[Any]

_MAX_ACCUMULATORS = 8  # of a block, so that inputs and weights have registers, too
_K_UNROLL = 4
_VARIANCE_EPSILON = 1e-8

_ACTIVATIONS: Mapping[int, Callable[[KernelBuilder, Value], Value]] = {
    0: lambda kb, x: x,
    1: lambda kb, x: clamp_float(kb, x, 0.0, math.inf),
    2: lambda kb, x: clamp_float(kb, x, -1.0, 1.0),
    3: lambda kb, x: clamp_float(kb, x, 0.0, 6.0),
    4: tanh,
    6: logistic,
}


def apply_activation(kb: KernelBuilder, code: int, value: Value) -> Value:
    """Return a value through the activation with this code of the recurrent operations."""
    return _ACTIVATIONS[code](kb, value)


@dataclass(frozen=True, slots=True)
class GateGemv:
    """The products of a vector of `k` elements with the matrices (units, k) of all `gates`, in blocks of units.

    A block has `vectors` vectors of `lanes` units; all its accumulators, gates · vectors, are in registers.
    """

    gates: int
    units: int
    k: int
    vectors: int
    lanes: int

    @property
    def units_per_block(self) -> int:
        """Units of a block."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.ceil(self.units / self.units_per_block)

    @property
    def padded_units(self) -> int:
        """Units of all blocks, padding included."""
        return self.blocks * self.units_per_block

    @property
    def multiplications(self) -> int:
        """Multiplications for one vector, padding included."""
        return self.gates * self.padded_units * self.k

    def pack_rows(self, rows: Array) -> Array:
        """Return an array (gates, units, n) as (blocks, vectors, gates, lanes, n), with padding units of 0."""
        padded = np.zeros((self.gates, self.padded_units, *rows.shape[2:]), np.float32)
        padded[:, : self.units] = rows
        split = padded.reshape(self.gates, self.blocks, self.vectors, self.lanes, -1)
        return split.transpose(1, 2, 0, 3, 4)

    def pack_weights(self, weights: Array) -> bytes:
        """Return weights (gates, units, k) as the kernel reads them: (blocks, k, vectors, gates, lanes)."""
        return self.pack_rows(weights).transpose(0, 4, 1, 2, 3).tobytes()

    def emit(self, kb: KernelBuilder, block: Value, source: Value, weights: Value, bias: Value) -> Sequence[Value]:
        """Return a block's pre-activations, vector by vector and for each vector gate by gate.

        `bias` is the address of the initial accumulators, in the order of `pack_rows`.
        """
        count, kind = self.gates * self.vectors, vector(F32, self.lanes)
        step_bytes = count * self.lanes * 4
        panel, first_bias = (
            kb.at(base, kb.mul(block, block_bytes))
            for base, block_bytes in ((weights, step_bytes * self.k), (bias, step_bytes))
        )
        # Two sets of accumulators hide the latency of FMA, if both fit the registers.
        sets = 2 if count * 2 <= _MAX_ACCUMULATORS + _MAX_ACCUMULATORS // 2 and self.k > 1 else 1
        zeros = [kb.splat(F32, 0.0, self.lanes)] * (count * (sets - 1))
        accs: Sequence[Value] = [kb.load(kind, first_bias, n * self.lanes * 4) for n in range(count)] + zeros

        def accumulate(first: Value, steps: int, accs: Sequence[Value]) -> Sequence[Value]:
            inputs, matrix, result = (
                kb.at(source, kb.mul(first, 4)),
                kb.at(panel, kb.mul(first, step_bytes)),
                list(accs),
            )
            for k in range(steps):
                value = kb.broadcast(kb.load(F32, inputs, 4 * k), self.lanes)
                for n in range(count):
                    acc = n + k % sets * count
                    loaded = kb.load(kind, matrix, k * step_bytes + n * self.lanes * 4)
                    result[acc] = fmuladd(kb, loaded, value, result[acc])
            return result

        iterations, remainder = divmod(self.k, _K_UNROLL)
        if iterations:
            accs = kb.for_loop(iterations, accs, lambda k, a: accumulate(kb.mul(k, _K_UNROLL), _K_UNROLL, a))
        accs = accumulate(kb.i64(iterations * _K_UNROLL), remainder, accs)
        return accs if sets == 1 else [kb.ir.fadd(accs[n], accs[count + n]) for n in range(count)]


def plan_gate_gemv(gates: int, units: int, k: int, target: Target) -> GateGemv:
    """Plan the product: as many vectors of a block as accumulators fit, distributed evenly over the blocks."""
    vectors = math.ceil(units / target.lanes)
    blocks = math.ceil(vectors / max(1, min(4, _MAX_ACCUMULATORS // gates)))
    return GateGemv(gates, units, k, math.ceil(vectors / blocks), target.lanes)


@dataclass(frozen=True, slots=True)
class RowPointers:
    """Addresses of a batch row's state, output and pre-activations, and of the cell's constants."""

    state: Value
    output: Value
    preactivations: Value
    constants: Value


@dataclass(frozen=True, slots=True)
class RnnCell:
    """A basic RNN cell or a projection: an activation, then a clip to [-clip, clip] if that is not 0. No constants."""

    activation: int = 0
    clip: float = 0.0

    gates = 1
    has_state = is_normalized = False

    def emit_block(
        self, kb: KernelBuilder, gemv: GateGemv, values: Sequence[Value], block: Value, row: RowPointers
    ) -> None:
        """Store a block's outputs for its pre-activations `values`."""
        first = kb.mul(block, gemv.units_per_block * 4)
        with kb.for_each_tile_row(values, 1) as (number, (value,)):
            result = _clip(kb, apply_activation(kb, self.activation, value), self.clip)
            kb.store(result, row.output, kb.add(first, kb.mul(number, gemv.lanes * 4)))


@dataclass(frozen=True, slots=True)
class LstmCellUpdate:
    """An LSTM cell. Gates: input (unless `is_cifg` couples it to the forget gate), forget, cell, output.

    Constants are rows of units: with peepholes a row of weights for each gate; if normalized then a row of weights and
    one of biases for each gate, and a row that is 1 for units and 0 for padding.
    """

    is_cifg: bool
    has_peephole: bool
    is_normalized: bool
    activation: int
    clip: float

    has_state = True

    @property
    def gates(self) -> int:
        """3 with CIFG, else 4."""
        return 3 if self.is_cifg else 4

    def constants(self, gemv: GateGemv, peepholes: Array | None, norms: Array | None, biases: Array) -> bytes:
        """Return the constants, from arrays (gates, units)."""
        rows: list[Array] = [] if peepholes is None else [*peepholes]
        if norms is not None:
            rows += [*norms, *biases, np.ones(gemv.units)]
        padded = np.zeros((len(rows), gemv.padded_units), np.float32)
        padded[:, : gemv.units] = np.reshape(rows, (len(rows), gemv.units))
        return padded.tobytes()

    def emit_block(
        self, kb: KernelBuilder, gemv: GateGemv, values: Sequence[Value], block: Value, row: RowPointers
    ) -> None:
        """Update a block's state and store its outputs.

        Normalization needs all units of a gate: normalized cells only store the pre-activations, for `emit_row`.
        """
        pitch = gemv.padded_units * 4
        with kb.for_each_tile_row(values, self.gates) as (number, gates):
            offset = kb.add(kb.mul(block, gemv.units_per_block * 4), kb.mul(number, gemv.lanes * 4))
            if self.is_normalized:
                for gate, value in enumerate(gates):
                    kb.store(value, row.preactivations, kb.add(offset, gate * pitch))
            else:
                self._emit_vector(kb, gates, offset, pitch, row)

    def _emit_vector(
        self, kb: KernelBuilder, gates: Sequence[Value], offset: Value, pitch: int, row: RowPointers
    ) -> None:
        def with_peephole(gate: int, state: Value) -> Value:
            """Return a gate's pre-activation plus its peephole; the cell gate has none."""
            if not self.has_peephole or gate == self.gates - 2:
                return gates[gate]
            weights = kb.load(state.type, row.constants, kb.add(offset, gate * pitch))
            return fmuladd(kb, weights, state, gates[gate])

        state = kb.load(gates[0].type, row.state, offset)
        state = self._next_state(kb, [with_peephole(gate, state) for gate in range(self.gates - 1)], state)
        kb.store(state, row.state, offset)
        # The output gate's peephole sees the new state.
        kb.store(self._output(kb, with_peephole(self.gates - 1, state), state), row.output, offset)

    def _next_state(self, kb: KernelBuilder, preactivations: Sequence[Value], state: Value) -> Value:
        *input_gates, forget, cell = preactivations
        keep = logistic(kb, forget)
        admit = logistic(kb, input_gates[0]) if input_gates else kb.ir.fsub(kb.splat(F32, 1.0, keep.type.count), keep)
        update = kb.ir.fmul(admit, apply_activation(kb, self.activation, cell))
        return _clip(kb, fmuladd(kb, keep, state, update), self.clip)

    def _output(self, kb: KernelBuilder, preactivation: Value, state: Value) -> Value:
        return kb.ir.fmul(logistic(kb, preactivation), apply_activation(kb, self.activation, state))

    def emit_row(self, kb: KernelBuilder, gemv: GateGemv, row: RowPointers) -> None:
        """Update a normalized cell's row, when the pre-activations of all units are stored."""
        pitch, kind = gemv.padded_units * 4, vector(F32, gemv.lanes)
        output_gate = (self.gates - 1) * pitch
        with kb.loop(0, self.gates - 1) as gate:
            self._normalize_gate(kb, gemv, kb.mul(gate, pitch), row)
        with kb.loop(0, pitch, gemv.lanes * 4) as offset:
            gates = [kb.load(kind, row.preactivations, kb.add(offset, gate * pitch)) for gate in range(self.gates - 1)]
            kb.store(self._next_state(kb, gates, kb.load(kind, row.state, offset)), row.state, offset)
        self._normalize_gate(kb, gemv, kb.i64(output_gate), row)  # after the update: its peephole sees the new state
        with kb.loop(0, pitch, gemv.lanes * 4) as offset:
            gate = kb.load(kind, row.preactivations, kb.add(offset, output_gate))
            kb.store(self._output(kb, gate, kb.load(kind, row.state, offset)), row.output, offset)

    def _normalize_gate(self, kb: KernelBuilder, gemv: GateGemv, offset: Value, row: RowPointers) -> None:
        """Add a gate's peephole, then normalize its pre-activations, in place.

        `offset` is the gate's offset in bytes in the pre-activations, and in each kind of constants.
        """
        kind, step, group = vector(F32, gemv.lanes), gemv.lanes * 4, self.gates * gemv.padded_units * 4
        values, peepholes = kb.at(row.preactivations, offset), kb.at(row.constants, offset)
        norms = kb.at(peepholes, group if self.has_peephole else 0)
        is_unit = kb.at(row.constants, (3 if self.has_peephole else 2) * group)

        def add_values(k: Value, accs: Sequence[Value]) -> Sequence[Value]:
            at = kb.mul(k, step)
            value = kb.load(kind, values, at)
            if self.has_peephole:
                value = fmuladd(kb, kb.load(kind, peepholes, at), kb.load(kind, row.state, at), value)
                kb.store(value, values, at)
            return [kb.ir.fadd(accs[0], value)]

        def add_squares(k: Value, accs: Sequence[Value]) -> Sequence[Value]:
            at = kb.mul(k, step)
            deviation = kb.ir.fmul(kb.ir.fsub(kb.load(kind, values, at), mean), kb.load(kind, is_unit, at))
            kb.store(deviation, values, at)
            return [fmuladd(kb, deviation, deviation, accs[0])]

        count, zeros, units = (
            gemv.padded_units // gemv.lanes,
            kb.splat(F32, 0.0, gemv.lanes),
            kb.splat(F32, float(gemv.units), gemv.lanes),
        )
        mean = kb.ir.fdiv(_sum_of_lanes(kb, *kb.for_loop(count, [zeros], add_values)), units)
        variance = kb.ir.fdiv(_sum_of_lanes(kb, *kb.for_loop(count, [zeros], add_squares)), units)
        epsilon = kb.splat(F32, float(np.float32(_VARIANCE_EPSILON)), gemv.lanes)
        deviation = kb.intrinsic("llvm.sqrt", kb.ir.fadd(variance, epsilon))
        with kb.loop(0, gemv.padded_units * 4, step) as at:
            scaled = kb.ir.fdiv(kb.load(kind, values, at), deviation)
            bias = kb.load(kind, kb.at(norms, group), at)
            kb.store(fmuladd(kb, scaled, kb.load(kind, norms, at), bias), values, at)


def _sum_of_lanes(kb: KernelBuilder, values: Value) -> Value:
    """Return the sum of all lanes, in each lane."""
    single = reduce_lanes(kb, FloatSumReducer(), values)
    return kb.broadcast(kb.ir.extract_element(single, kb.i64(0)), values.type.count)


def _clip(kb: KernelBuilder, value: Value, limit: float) -> Value:
    """Return a value clamped to [-limit, limit]; 0 is no limit."""
    limit = float(np.float32(limit))
    return clamp_float(kb, value, -limit, limit) if limit > 0 else value
