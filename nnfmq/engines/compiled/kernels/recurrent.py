"""Recurrent kernels: one step of a cell, and a whole sequence.

`CellKernel` splits a step into blocks of units. `SequenceKernel` takes batch rows through all time steps, because rows
are independent and units are not. Both copy a row's inputs and states to scratch, padded to whole blocks, and
copy the results from there. Several rows are multiplied together, so that weights are read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.kernels.reduction import PARTIAL_RESULTS, FloatSumReducer, reduce_lanes
from nnfmq.engines.compiled.kernels.vector_math import clamp_float, fmuladd, logistic, tanh
from nnfmq.engines.compiled.memory_plan import align
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import FusedActivationFunc

__all__ = [
    "CellKernel",
    "FloatGates",
    "GateGemv",
    "GateProduct",
    "LstmCellUpdate",
    "OutputKind",
    "RnnCell",
    "RowPointers",
    "SequenceKernel",
    "apply_activation",
    "for_each_product",
    "load_units",
    "plan_gate_gemv",
    "rows_of_tile",
    "tiled",
]


# ----------------------------------------------------------------------------------------------------------------------
# RNN and LSTM cells: the matrix-vector product of all gates, fused with the update of the units.
#
# Lanes are units. A block of units computes the pre-activations of all its gates before it updates their state, so
# these stay in registers. Weights are packed in the order in which the kernel reads them, (blocks, K, vectors, gates,
# lanes). States and constants are padded to whole blocks, so there are no remainders; padding units have weights of 0.


Array = npt.NDArray[Any]

_MAX_ACCUMULATORS = 8  # of a block and one row, so that inputs and weights have registers, too
_MAX_ROWS = 4  # that are multiplied together
_MAX_STEPPED_ROWS = 16  # that take a time step together
_RESIDENT_BYTES = 1 << 20  # of weights that stay in the second-level cache from one time step to the next
_CACHE_LINE = 64
_K_UNROLL = 4
_MAX_UNITS_OF_TWO_SETS = 8  # of a cell with four gates: a vector of AVX2
_VARIANCE_EPSILON = 1e-8

_ACTIVATIONS: Mapping[int, Callable[[KernelBuilder, Value], Value]] = {
    **{function: partial(clamp_float, low=function.low, high=function.high) for function in FusedActivationFunc},
    4: tanh,
    6: logistic,
}


def apply_activation(kb: KernelBuilder, code: int, value: Value) -> Value:
    """Return a value through the activation with this code of the recurrent operations."""
    return _ACTIVATIONS[code](kb, value)


@dataclass(frozen=True, slots=True)
class GateGemv:
    """The products of rows of `k` elements with the matrices (units, k) of all `gates`, in blocks of units.

    A block has `vectors` vectors of `lanes` units. At most `rows` rows are multiplied together; all their accumulators
    of a block, rows · gates · vectors, are in registers.
    """

    gates: int
    units: int
    k: int
    vectors: int
    lanes: int
    rows: int = 1

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

    @property
    def _sets(self) -> int:
        """Sets of accumulators: two hide the latency of FMA. The same on all targets, for equal bits."""
        return _sets_of(self.gates, self.units) if self.k > 1 else 1

    def pack_rows(self, rows: Array) -> Array:
        """Return an array (gates, units, n) as (blocks, vectors, gates, lanes, n), with padding units of 0."""
        padded = np.zeros((self.gates, self.padded_units, *rows.shape[2:]), np.float32)
        padded[:, : self.units] = rows
        split = padded.reshape(self.gates, self.blocks, self.vectors, self.lanes, -1)
        return split.transpose(1, 2, 0, 3, 4)

    def pack_weights(self, weights: Array) -> bytes:
        """Return weights (gates, units, k) as the kernel reads them: (blocks, k, vectors, gates, lanes)."""
        return self.pack_rows(weights).transpose(0, 4, 1, 2, 3).tobytes()

    def emit(
        self,
        kb: KernelBuilder,
        block: Value,
        sources: Sequence[Value],
        weights: Value,
        biases: Sequence[Value],
        ahead: _Ahead | None = None,
    ) -> list[Sequence[Value]]:
        """Return a block's pre-activations of each row: vector by vector, and for each vector gate by gate.

        `sources` are the addresses of the rows, `biases` those of their initial accumulators, in the order of
        `pack_rows`. `ahead` is the part of the weights that is prefetched meanwhile.
        """
        count, kind = self.gates * self.vectors, vector(F32, self.lanes)
        step_bytes, sets = count * self.lanes * 4, self._sets
        panel = kb.at(weights, kb.mul(block, step_bytes * self.k))
        accs: list[Value] = []
        for address in biases:
            first = kb.at(address, kb.mul(block, step_bytes))
            accs += [kb.load(kind, first, n * self.lanes * 4) for n in range(count)]
            accs += [kb.splat(F32, 0.0, self.lanes)] * (count * (sets - 1))

        def accumulate(first: Value, steps: int, accs: Sequence[Value]) -> Sequence[Value]:
            if ahead is not None:
                ahead.emit(kb, first, steps)
            inputs = [kb.at(source, kb.mul(first, 4)) for source in sources]
            matrix, result = kb.at(panel, kb.mul(first, step_bytes)), list(accs)
            for k in range(steps):
                values = [kb.broadcast(kb.load(F32, row, 4 * k), self.lanes) for row in inputs]
                for n in range(count):
                    loaded = kb.load(kind, matrix, k * step_bytes + n * self.lanes * 4)
                    for row, value in enumerate(values):
                        acc = n + (row * sets + k % sets) * count
                        result[acc] = fmuladd(kb, loaded, value, result[acc])
            return result

        iterations, remainder = divmod(self.k, _K_UNROLL)
        sums: Sequence[Value] = accs
        if iterations:
            sums = kb.for_loop(iterations, sums, lambda k, a: accumulate(kb.mul(k, _K_UNROLL), _K_UNROLL, a))
        sums = accumulate(kb.i64(iterations * _K_UNROLL), remainder, sums)
        if sets == 2:
            pairs = [first + n for first in range(0, len(sums), 2 * count) for n in range(count)]
            sums = [kb.ir.fadd(sums[n], sums[count + n]) for n in pairs]
        return [sums[first : first + count] for first in range(0, len(sums), count)]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A part of the weights: of each element of a row `stride` bytes from address `begin` on."""

    begin: Value
    stride: int

    def emit(self, kb: KernelBuilder, first: Value, steps: int) -> None:
        """Prefetch what belongs to `steps` elements."""
        address = kb.at(self.begin, kb.mul(first, self.stride))
        for offset in range(0, steps * self.stride, _CACHE_LINE):
            kb.prefetch(kb.at(address, offset))


def _sets_of(gates: int, units: int) -> int:
    """Return how many sets of accumulators hide the latency of FMA, with more than one element of a row."""
    return 2 if gates < 4 or units <= _MAX_UNITS_OF_TWO_SETS else 1


def rows_of_tile(gates: int, units: int, batch: int, target: Target) -> int:
    """Return how many of `batch` rows are multiplied together, a power of two: accumulators take half the registers."""
    fits = target.registers // 2 // (gates * _sets_of(gates, units))
    wanted = 1 << (batch - 1).bit_length()
    return max(1, min(_MAX_ROWS, wanted, 1 << (fits.bit_length() - 1) if fits else 1))


def plan_gate_gemv(gates: int, units: int, k: int, target: Target, rows: int = 1) -> GateGemv:
    """Plan the product: as many vectors of a block as accumulators fit, distributed evenly over the blocks."""
    vectors, most = math.ceil(units / target.lanes), _MAX_ACCUMULATORS // gates
    if rows > 1:
        most = target.registers // 2 // (rows * gates * _sets_of(gates, units))
    blocks = math.ceil(vectors / max(1, min(4, most)))
    return GateGemv(gates, units, k, math.ceil(vectors / blocks), target.lanes, rows)


@contextmanager
def for_each_product(
    kb: KernelBuilder, gemv: GateGemv, count: Value, emit: Callable[[int], Sequence[Sequence[Value]]]
) -> Iterator[tuple[Value, Sequence[Value]]]:
    """Emit the products of `count` rows, 1 to `gemv.rows`, and a loop over them; yield a row's number and its products.

    `emit` emits those of so many rows together, 1, 2, 4 ... up to `gemv.rows`; what it returns for a row that is not
    there is not used.
    """
    if gemv.rows == 1:
        (values,) = emit(1)
        yield kb.i64(0), values
        return
    kind, vectors = vector(F32, gemv.lanes), gemv.gates * gemv.vectors
    size = gemv.lanes * 4
    memory = kb.on_stack(kind, gemv.rows * vectors)

    def store(rows: int) -> None:
        for number, value in enumerate(value for values in emit(rows) for value in values):
            kb.ir.store(value, kb.at(memory, number * size), align=size)

    def emit_at_least(rows: int) -> None:
        if rows == gemv.rows:
            store(rows)
            return
        with kb.ir.if_else(kb.ir.icmp_signed("<=", count, kb.i64(rows))) as (these, more):
            with these:
                store(rows)
            with more:
                emit_at_least(2 * rows)

    emit_at_least(1)
    with kb.loop(0, count) as row:
        first = kb.at(memory, kb.mul(row, vectors * size))
        yield row, [kb.ir.load(kind, kb.at(first, number * size), align=size) for number in range(vectors)]


@contextmanager
def _each_row(kb: KernelBuilder, most: int, count: Value) -> Iterator[Value]:
    """Emit a loop over `count` rows, at most `most`, and yield a row's number; no loop if there is only one."""
    if most == 1:
        yield kb.i64(0)
        return
    with kb.loop(0, count) as row:
        yield row


def tiled(kb: KernelBuilder, rows: int, count: Value, place: Callable[[Value], Value]) -> list[Value]:
    """Return the places of `rows` rows; in place of those that are not among the `count` that are there, the last."""
    if rows == 1:
        return [place(kb.i64(0))]
    last = kb.ir.sub(count, kb.i64(1))
    return [place(kb.intrinsic("llvm.smin", kb.i64(row), last)) for row in range(rows)]


class GateProduct(Protocol):
    """The products of rows with the matrices of all gates, in a kernel that takes rows through time."""

    constant_count: int

    @property
    def gemv(self) -> GateGemv:
        """The shapes of the product."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of a row."""
        ...

    def prepare(self, kb: KernelBuilder, row: Value, scratch: Value) -> None:
        """Store in `scratch` what is multiplied in place of a row of floats."""
        ...

    def source(self, row: Value, scratch: Value) -> Value:
        """Return the address of what is multiplied: that of a row, or of its scratch memory."""
        ...

    def emit(
        self,
        kb: KernelBuilder,
        block: Value,
        sources: Sequence[Value],
        constants: Sequence[Value],
        addends: Sequence[Value],
        place: tuple[Value, int],
    ) -> list[Sequence[Value]]:
        """Return a block's sums of each row plus those at its addend, both in the order of `GateGemv.pack_rows`.

        `place` is the number of the tile and how many tiles are multiplied with a block, one after the other.
        """
        ...


@dataclass(frozen=True, slots=True)
class FloatGates:
    """Products with weights of float32. Its constant: the weights."""

    gemv: GateGemv

    constant_count = 1
    scratch_bytes = 0

    def prepare(self, kb: KernelBuilder, row: Value, scratch: Value) -> None:
        """Do nothing: rows are multiplied as they are."""

    def source(self, row: Value, scratch: Value) -> Value:
        """Return the row."""
        return row

    def emit(
        self,
        kb: KernelBuilder,
        block: Value,
        sources: Sequence[Value],
        constants: Sequence[Value],
        addends: Sequence[Value],
        place: tuple[Value, int],
    ) -> list[Sequence[Value]]:
        """Return the sums; `addends` are what the accumulators begin with.

        Each tile prefetches its share of the next block's weights if no cache keeps all blocks for the next time step.
        """
        weights, gemv, (tile, tiles) = constants[0], self.gemv, place
        if tiles == 1 or 4 * gemv.multiplications <= _RESIDENT_BYTES:
            return gemv.emit(kb, block, sources, weights, addends)
        step_bytes = gemv.gates * gemv.units_per_block * 4
        stride, following = step_bytes // tiles, kb.ir.urem(kb.add(block, 1), kb.i64(gemv.blocks))
        begin = kb.at(weights, kb.ir.add(kb.mul(following, step_bytes * gemv.k), kb.mul(tile, stride * gemv.k)))
        return gemv.emit(kb, block, sources, weights, addends, _Ahead(begin, stride))


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

        def add_value(at: Value, acc: Value) -> Value:
            value = kb.load(kind, values, at)
            if self.has_peephole:
                value = fmuladd(kb, kb.load(kind, peepholes, at), kb.load(kind, row.state, at), value)
                kb.store(value, values, at)
            return kb.ir.fadd(acc, value)

        def add_square(at: Value, acc: Value) -> Value:
            deviation = kb.ir.fmul(kb.ir.fsub(kb.load(kind, values, at), mean), kb.load(kind, is_unit, at))
            kb.store(deviation, values, at)
            return fmuladd(kb, deviation, deviation, acc)

        units = kb.splat(F32, float(gemv.units), gemv.lanes)
        mean = kb.ir.fdiv(_sum_over_units(kb, gemv, add_value), units)
        variance = kb.ir.fdiv(_sum_over_units(kb, gemv, add_square), units)
        epsilon = kb.splat(F32, float(np.float32(_VARIANCE_EPSILON)), gemv.lanes)
        deviation = kb.intrinsic("llvm.sqrt", kb.ir.fadd(variance, epsilon))
        with kb.loop(0, gemv.padded_units * 4, step) as at:
            scaled = kb.ir.fdiv(kb.load(kind, values, at), deviation)
            bias = kb.load(kind, kb.at(norms, group), at)
            kb.store(fmuladd(kb, scaled, kb.load(kind, norms, at), bias), values, at)


def _sum_over_units(kb: KernelBuilder, gemv: GateGemv, add: Callable[[Value, Value], Value]) -> Value:
    """Return a sum over all units, in each lane, from `PARTIAL_RESULTS` of every so manieth unit.

    `add(at, acc)` returns an accumulator plus the summands of the vector of units that begins `at` so many bytes.
    """
    lanes, vectors = gemv.lanes, gemv.padded_units // gemv.lanes
    every = max(1, PARTIAL_RESULTS // lanes)
    zeros, size = kb.splat(F32, 0.0, lanes), 4 * lanes

    def add_vectors(first: Value, count: int, accs: Sequence[Value]) -> list[Value]:
        added = [add(kb.mul(kb.add(first, n), size), acc) for n, acc in enumerate(accs[:count])]
        return [*added, *accs[count:]]

    iterations, remainder = divmod(vectors, every)
    accs: Sequence[Value] = [zeros] * every
    if iterations:
        accs = kb.for_loop(iterations, accs, lambda k, a: add_vectors(kb.mul(k, every), every, a))
    accs = add_vectors(kb.i64(iterations * every), remainder, accs)
    while len(accs) > 1:
        accs = [kb.concat(*pair) for pair in zip(accs[::2], accs[1::2], strict=True)]
    single = reduce_lanes(kb, FloatSumReducer(), accs[0])
    return kb.broadcast(kb.ir.extract_element(single, kb.i64(0)), lanes)


def _clip(kb: KernelBuilder, value: Value, limit: float) -> Value:
    """Return a value clamped to [-limit, limit]; 0 is no limit."""
    limit = float(np.float32(limit))
    return clamp_float(kb, value, -limit, limit) if limit > 0 else value


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent kernels: one step of a cell, and a whole sequence.


class OutputKind(Enum):
    """The values that an output of a recurrent kernel receives."""

    LAST_OUTPUT = "last output"
    LAST_STATE = "last state"
    ALL_OUTPUTS = "all outputs"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class CellKernel(Kernel):
    """One step of a cell for `batch` rows. The GEMV's input is the concatenation of `source_sizes` elements each.

    Args: sources; the state if the cell has one; `outputs`; weights, bias, the cell's constants if it has a state.
    A row in scratch: sources, state (if any), outputs. A work item is a block of units.
    """

    gemv: GateGemv
    cell: RnnCell | LstmCellUpdate
    batch: int
    source_sizes: tuple[int, ...]
    outputs: tuple[OutputKind, ...]

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Blocks of units."""
        return self.gemv.blocks

    @property
    def _state_offset(self) -> int:
        return align(sum(self.source_sizes) * 4)

    @property
    def _row_bytes(self) -> int:
        return self._state_offset + align(self.gemv.padded_units * 4) * (2 if self.cell.has_state else 1)

    @property
    def _output_offset(self) -> int:
        return self._row_bytes - align(self.gemv.padded_units * 4)

    @property
    def _first_output_arg(self) -> int:
        return len(self.source_sizes) + (1 if self.cell.has_state else 0)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of all rows."""
        return self.batch * self._row_bytes

    def emit(self, kb: KernelBuilder) -> None:
        """Load all rows, compute the call's blocks, store their results. Without a block, do nothing."""
        with kb.ir.if_then(kb.ir.icmp_signed("<", kb.begin, kb.end)):
            self._load_rows(kb)
            self._compute_blocks(kb)
            self._store_rows(kb)
        kb.return_void()

    def _load_rows(self, kb: KernelBuilder) -> None:
        state_units = self.gemv.units if self.cell.has_state else 0
        with kb.loop(0, self.batch) as row:
            memory, offset = kb.at(kb.scratch, kb.mul(row, self._row_bytes)), 0
            for number, size in enumerate(self.source_sizes):
                kb.memcpy(kb.at(memory, offset), kb.at(kb.argument(number), kb.mul(row, size * 4)), size * 4)
                offset += size * 4
            if state_units:
                source = kb.at(kb.argument(len(self.source_sizes)), kb.mul(row, state_units * 4))
                load_units(kb, kb.at(memory, self._state_offset), source, self.gemv)

    def _compute_blocks(self, kb: KernelBuilder) -> None:
        first = self._first_output_arg + len(self.outputs)
        weights, bias = kb.argument(first), kb.argument(first + 1)
        constants = kb.argument(first + 2) if self.cell.has_state else bias
        with kb.loop(kb.begin, kb.end) as block, kb.loop(0, self.batch, self.gemv.rows) as first_row:
            count = kb.intrinsic("llvm.smin", kb.i64(self.gemv.rows), kb.ir.sub(kb.i64(self.batch), first_row))
            rows = kb.at(kb.scratch, kb.mul(first_row, self._row_bytes))

            def place(row: Value, rows: Value = rows) -> Value:
                return kb.at(rows, kb.mul(row, self._row_bytes))

            def products(size: int, block: Value = block, count: Value = count) -> Sequence[Sequence[Value]]:
                return self.gemv.emit(kb, block, tiled(kb, size, count, place), weights, [bias] * size)

            with for_each_product(kb, self.gemv, count, products) as (row, values):
                memory = place(row)
                state, output = kb.at(memory, self._state_offset), kb.at(memory, self._output_offset)
                # Cells of one step are not normalized, so there are no pre-activations in memory.
                self.cell.emit_block(kb, self.gemv, values, block, RowPointers(state, output, memory, constants))

    def _store_rows(self, kb: KernelBuilder) -> None:
        """Copy the blocks' units of each row to the outputs."""
        first = kb.mul(kb.begin, self.gemv.units_per_block)
        last = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.gemv.units_per_block), kb.i64(self.gemv.units))
        size, offset = kb.mul(kb.ir.sub(last, first), 4), kb.mul(first, 4)
        with kb.loop(0, self.batch) as row:
            memory = kb.at(kb.scratch, kb.mul(row, self._row_bytes))
            for number, kind in enumerate(self.outputs):
                if kind is not OutputKind.ZEROS:
                    is_state = kind is OutputKind.LAST_STATE
                    source = kb.at(memory, self._state_offset if is_state else self._output_offset)
                    out = kb.at(kb.argument(self._first_output_arg + number), kb.mul(row, self.gemv.units * 4))
                    kb.memcpy(kb.at(out, offset), kb.at(source, offset), size)
        zeros = [number for number, kind in enumerate(self.outputs) if kind is OutputKind.ZEROS]
        if zeros:
            with kb.ir.if_then(kb.ir.icmp_signed("==", kb.begin, kb.i64(0))):
                outputs = [kb.argument(self._first_output_arg + number) for number in zeros]
                _zero_gate_buffers(kb, self.gemv, kb.i64(0), self.batch, outputs)


@dataclass(frozen=True, slots=True)
class SequenceKernel(Kernel):
    """All time steps of a cell, `is_backward` in reverse order. A work item is a batch row, or several.

    The inputs of all time steps are multiplied by a GEMM before; its results, with the biases added unless the cell is
    normalized, are the first argument: positions in the order of the sequence, each as `GateGemv.pack_rows`.

    Args: these; the hidden state; the state if the cell has one; `outputs`; the constants of the recurrent weights; the
    cell's constants if it has a state; the projection's constants and biases if there is one. Scratch, for each row
    that takes a step together: hidden state, state, outputs of the cell, pre-activations if it is normalized, what the
    products need.
    """

    gates: GateProduct
    cell: RnnCell | LstmCellUpdate
    projection: GateProduct | None
    projection_clip: float
    time: int
    batch: int
    is_time_major: bool
    outputs: tuple[OutputKind, ...]
    is_backward: bool = False

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Groups of batch rows."""
        return math.ceil(self.batch / self._rows_per_item)

    @property
    def _rows_per_item(self) -> int:
        """Rows of a work item: so many that a thread multiplies several together, so few that each thread has one."""
        return min(self._gemv.rows, 4 if self.batch >= 16 else 2 if self.batch >= 4 else 1)

    @property
    def _stepped_rows(self) -> int:
        """Rows that take a time step together: a block's weights are read from the cache's next level once for all."""
        tiles = math.ceil(min(self.batch, _MAX_STEPPED_ROWS) / self._gemv.rows)
        return tiles * self._gemv.rows

    @property
    def _gemv(self) -> GateGemv:
        return self.gates.gemv

    @property
    def _hidden_size(self) -> int:
        return self._gemv.k

    @property
    def _scratch_offsets(self) -> tuple[int, int, int, int, int]:
        """Offsets of a row's state, outputs, pre-activations and memory of the products; and the end."""
        hidden = max(self._gemv.k, self.projection.gemv.padded_units if self.projection else 0)
        row = align(self._gemv.padded_units * 4)
        state = align(hidden * 4)
        preactivations = state + 2 * row
        products = preactivations + (self._gemv.gates * row if self.cell.is_normalized else 0)
        size = max(self.gates.scratch_bytes, self.projection.scratch_bytes if self.projection else 0)
        return state, state + row, preactivations, products, products + align(size)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of the states, outputs and pre-activations of rows, and of what the products need."""
        return self._stepped_rows * self._scratch_offsets[-1]

    def _constants(self, kb: KernelBuilder) -> tuple[list[Value], Value, list[Value]]:
        """Return the constants of the gates, of the cell (any address if it has none), and of the projection."""
        first = 2 + (1 if self.cell.has_state else 0) + len(self.outputs)
        of_cell = first + self.gates.constant_count
        after = of_cell + (1 if self.cell.has_state else 0)
        count = 0 if self.projection is None else self.projection.constant_count + 1
        gates, projection = (
            list(map(kb.argument, part)) for part in (range(first, of_cell), range(after, after + count))
        )
        return gates, kb.argument(of_cell) if self.cell.has_state else gates[0], projection

    def emit(self, kb: KernelBuilder) -> None:
        """Take the rows through all time steps, so many together as there is scratch memory for."""
        size, together = self._rows_per_item, self._stepped_rows
        end = kb.intrinsic("llvm.smin", kb.mul(kb.end, size), kb.i64(self.batch))
        constants = self._constants(kb)
        with kb.loop(kb.mul(kb.begin, size), end, together) as first:
            count = kb.intrinsic("llvm.smin", kb.i64(together), kb.ir.sub(end, first))
            _SequenceOfRows(self, kb, first, count, *constants).emit()
        kb.return_void()


class _SequenceOfRows:
    """Emits the time steps of `count` rows from `first` on, which take each step together."""

    def __init__(
        self,
        kernel: SequenceKernel,
        kb: KernelBuilder,
        first: Value,
        count: Value,
        gates: Sequence[Value],
        constants: Value,
        projection: Sequence[Value],
    ) -> None:
        self.kernel, self.kb, self.first, self.count = kernel, kb, first, count
        self.gates, self.constants, self.projection = gates, constants, projection
        self.gemv, self.cell, self.hidden_bytes = kernel._gemv, kernel.cell, kernel._hidden_size * 4
        self.offsets = kernel._scratch_offsets

    def _each(self) -> AbstractContextManager[Value]:
        return _each_row(self.kb, self.kernel._stepped_rows, self.count)

    def _hidden(self, row: Value) -> Value:
        """Return the address of a row's scratch memory, which begins with the hidden state."""
        return self.kb.at(self.kb.scratch, self.kb.mul(row, self.offsets[-1]))

    def _products(self, row: Value) -> Value:
        """Return the address of a row's memory for products."""
        return self.kb.at(self._hidden(row), self.offsets[3])

    def _pointers(self, row: Value) -> RowPointers:
        hidden = self._hidden(row)
        state, output, preactivations = (self.kb.at(hidden, offset) for offset in self.offsets[:3])
        return RowPointers(state, output, preactivations, self.constants)

    def _position(self, row: Value, time: Value) -> Value:
        """Return a row's position in the sequence."""
        kernel, kb, row = self.kernel, self.kb, self.kb.add(self.first, row)
        outer, extent, inner = (time, kernel.batch, row) if kernel.is_time_major else (row, kernel.time, time)
        return kb.add(kb.mul(outer, extent), inner)

    def emit(self) -> None:
        """Load the rows' states, take them through time, and store the last ones."""
        kb, kernel = self.kb, self.kernel
        with self._each() as row:
            number = kb.add(self.first, row)
            kb.memcpy(self._hidden(row), kb.at(kb.argument(1), kb.mul(number, self.hidden_bytes)), self.hidden_bytes)
            if self.cell.has_state:
                source = kb.at(kb.argument(2), kb.mul(number, self.gemv.units * 4))
                load_units(kb, self._pointers(row).state, source, self.gemv)
        with kb.loop(0, kernel.time) as step:
            self._emit_step(kb.ir.sub(kb.i64(kernel.time - 1), step) if kernel.is_backward else step)
        with self._each() as row:
            number = kb.add(self.first, row)
            self._store(OutputKind.LAST_OUTPUT, number, self.hidden_bytes, self._hidden(row))
            self._store(OutputKind.LAST_STATE, number, self.gemv.units * 4, self._pointers(row).state)
            _zero_gate_buffers(kb, self.gemv, number, 1, self._outputs(OutputKind.ZEROS))

    def _emit_step(self, time: Value) -> None:
        kb, cell = self.kb, self.cell

        def addend(row: Value) -> Value:
            size = self.gemv.gates * self.gemv.padded_units * 4
            return kb.at(kb.argument(0), kb.mul(self._position(row, time), size))

        with self._product(self.kernel.gates, self._hidden, self.gates, addend) as (row, block, values):
            cell.emit_block(kb, self.gemv, values, block, self._pointers(row))
        if isinstance(cell, LstmCellUpdate) and cell.is_normalized:
            with self._each() as row:
                cell.emit_row(kb, self.gemv, self._pointers(row))
        self._project()
        with self._each() as row:
            self._store(OutputKind.ALL_OUTPUTS, self._position(row, time), self.hidden_bytes, self._hidden(row))

    def _project(self) -> None:
        """Compute the hidden state from the cell's outputs: a projection, or a copy."""
        kb, projection = self.kb, self.kernel.projection
        if projection is None:
            with self._each() as row:
                kb.memcpy(self._hidden(row), self._pointers(row).output, self.hidden_bytes)
            return
        *weights, biases = self.projection

        def output(row: Value) -> Value:
            return self._pointers(row).output

        with self._product(projection, output, weights, lambda row: biases) as (row, block, values):
            pointers = self._pointers(row)
            hidden = RowPointers(pointers.state, self._hidden(row), pointers.preactivations, biases)
            RnnCell(0, self.kernel.projection_clip).emit_block(kb, projection.gemv, values, block, hidden)

    @contextmanager
    def _product(
        self,
        product: GateProduct,
        source: Callable[[Value], Value],
        constants: Sequence[Value],
        addend: Callable[[Value], Value],
    ) -> Iterator[tuple[Value, Value, Sequence[Value]]]:
        """Emit a product of all rows in blocks of units, and loops over both; yield row, block and the row's sums.

        `source` and `addend` return addresses that belong to a row.
        """
        kb = self.kb
        if product.scratch_bytes:
            with self._each() as row:
                product.prepare(kb, source(row), self._products(row))
        with kb.loop(0, product.gemv.blocks) as block, self._each_tile() as (first, count):

            def of_products(size: int, place: Callable[[Value], Value]) -> list[Value]:
                return tiled(kb, size, count, lambda row: place(kb.ir.add(first, row)))

            def emit(size: int) -> Sequence[Sequence[Value]]:
                sources = of_products(size, lambda row: product.source(source(row), self._products(row)))
                place = kb.ir.udiv(first, kb.i64(self.gemv.rows)), self.kernel._stepped_rows // self.gemv.rows
                return product.emit(kb, block, sources, constants, of_products(size, addend), place)

            with for_each_product(kb, product.gemv, count, emit) as (row, values):
                yield kb.ir.add(first, row), block, values

    @contextmanager
    def _each_tile(self) -> Iterator[tuple[Value, Value]]:
        """Emit a loop over the rows that are multiplied together, and yield the first one and how many they are."""
        kb, rows = self.kb, self.gemv.rows
        if self.kernel._stepped_rows == rows:
            yield kb.i64(0), self.count
            return
        with kb.loop(0, self.count, rows) as first:
            yield first, kb.intrinsic("llvm.smin", kb.i64(rows), kb.ir.sub(self.count, first))

    def _outputs(self, wanted: OutputKind) -> list[Value]:
        first = 3 if self.cell.has_state else 2
        return [self.kb.argument(first + number) for number, kind in enumerate(self.kernel.outputs) if kind is wanted]

    def _store(self, kind: OutputKind, position: Value, size: int, source: Value) -> None:
        for out in self._outputs(kind):
            self.kb.memcpy(self.kb.at(out, self.kb.mul(position, size)), source, size)


def load_units(kb: KernelBuilder, memory: Value, source: Value, gemv: GateGemv) -> None:
    """Copy a row of units to scratch; padding units get 0."""
    kb.memcpy(memory, source, gemv.units * 4)
    if gemv.padded_units > gemv.units:
        kb.memset(kb.at(memory, gemv.units * 4), 0, (gemv.padded_units - gemv.units) * 4)


def _zero_gate_buffers(kb: KernelBuilder, gemv: GateGemv, row: Value, count: int, outputs: Sequence[Value]) -> None:
    """Fill `count` rows of LSTM's scratch outputs, which have an element for each gate and unit, with 0."""
    size = gemv.gates * gemv.units * 4
    for out in outputs:
        kb.memset(kb.at(out, kb.mul(row, size)), 0, count * size)
