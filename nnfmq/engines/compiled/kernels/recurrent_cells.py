"""Gates of recurrent cells: the products of a vector with all gates' weights, and what these sums do to the cells.

The lanes of a vector are cells. A block of cells has the sums of all its gates at once, so that its state is updated
while they are in registers; the weights are packed in the order in which they are read, once. Everything else that
belongs to cells, states and constants, is as long as whole blocks are: there are no tails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels.float_ops import clamp_float, fmuladd, logistic, tanh
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, reduce_lanes
from nnfmq.engines.compiled.target import Target

__all__ = ["GateGemv", "LstmCellUpdate", "RnnCell", "RowPointers", "apply_activation", "plan_gate_gemv"]

Array = npt.NDArray[Any]

_SUMS = 8  # in registers, beside what is multiplied
_UNROLLED = 4
_EPSILON = 1e-8

_ACTIVATIONS: Mapping[int, Callable[[KernelBuilder, Value], Value]] = {
    0: lambda kb, x: x,
    1: lambda kb, x: clamp_float(kb, x, 0.0, math.inf),
    2: lambda kb, x: clamp_float(kb, x, -1.0, 1.0),
    3: lambda kb, x: clamp_float(kb, x, 0.0, 6.0),
    4: tanh,
    6: logistic,
}


def apply_activation(kb: KernelBuilder, code: int, value: Value) -> Value:
    """Return a value through an activation, by the code that recurrent operations have for it."""
    return _ACTIVATIONS[code](kb, value)


@dataclass(frozen=True, slots=True)
class GateGemv:
    """Products of matrices (cells, length), one for each gate, with a vector; `vectors` of cells are a block."""

    gates: int
    cells: int
    length: int
    vectors: int
    lanes: int

    @property
    def width(self) -> int:
        """Cells of a block."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> int:
        """How many there are."""
        return math.ceil(self.cells / self.width)

    @property
    def padded(self) -> int:
        """Cells of all blocks; those beside the last true one have weights of 0."""
        return self.blocks * self.width

    @property
    def multiplications(self) -> int:
        """How many a vector takes."""
        return self.gates * self.padded * self.length

    def ordered(self, rows: Array) -> Array:
        """Return what cells have (gates, cells, each) in the order of sums: (blocks, vectors, gates, lanes, each)."""
        filled = np.zeros((self.gates, self.padded, *rows.shape[2:]), np.float32)
        filled[:, : self.cells] = rows
        split = filled.reshape(self.gates, self.blocks, self.vectors, self.lanes, -1)
        return split.transpose(1, 2, 0, 3, 4)

    def pack(self, weights: Array) -> bytes:
        """Return weights (gates, cells, length) in the order in which they are read."""
        return self.ordered(weights).transpose(0, 4, 1, 2, 3).tobytes()

    def emit(self, kb: KernelBuilder, block: Value, source: Value, weights: Value, starts: Value) -> Sequence[Value]:
        """Return a block's sums, vector by vector and in each gate by gate.

        `starts` has what sums begin with, as `ordered`.
        """
        count, kind = self.gates * self.vectors, vector(F32, self.lanes)
        size = count * self.lanes * 4
        matrix, begin = (
            kb.at(base, kb.mul(block, bytes)) for base, bytes in ((weights, size * self.length), (starts, size))
        )
        copies = 2 if count * 2 <= _SUMS + _SUMS // 2 and self.length > 1 else 1
        zeros = [kb.splat(F32, 0.0, self.lanes)] * (count * (copies - 1))
        sums: Sequence[Value] = [kb.load(kind, begin, n * self.lanes * 4) for n in range(count)] + zeros

        def products(first: Value, rounds: int, sums: Sequence[Value]) -> Sequence[Value]:
            cells, panel, result = kb.at(source, kb.mul(first, 4)), kb.at(matrix, kb.mul(first, size)), list(sums)
            for k in range(rounds):
                cell = kb.broadcast(kb.load(F32, cells, 4 * k), self.lanes)
                for n in range(count):
                    to = n + k % copies * count
                    loaded = kb.load(kind, panel, k * size + n * self.lanes * 4)
                    result[to] = fmuladd(kb, loaded, cell, result[to])
            return result

        whole, rest = divmod(self.length, _UNROLLED)
        if whole:
            sums = kb.for_loop(whole, sums, lambda k, s: products(kb.mul(k, _UNROLLED), _UNROLLED, s))
        sums = products(kb.i64(whole * _UNROLLED), rest, sums)
        return sums if copies == 1 else [kb.ir.fadd(sums[n], sums[count + n]) for n in range(count)]


def plan_gate_gemv(gates: int, cells: int, length: int, target: Target) -> GateGemv:
    """Choose the blocks."""
    vectors = math.ceil(cells / target.lanes)
    blocks = math.ceil(vectors / max(1, min(4, _SUMS // gates)))
    return GateGemv(gates, cells, length, math.ceil(vectors / blocks), target.lanes)


@dataclass(frozen=True, slots=True)
class RowPointers:
    """Where a row of cells has its states, its results, and the sums of all gates, and where the constants are."""

    state: Value
    result: Value
    sums: Value
    constants: Value


@dataclass(frozen=True, slots=True)
class RnnCell:
    """One sum for each cell: an activation, then a clip, where that is not 0. No constants."""

    activation: int = 0
    clip: float = 0.0

    gates = 1
    has_state = normalized = False

    def emit_block(
        self, kb: KernelBuilder, sums: GateGemv, values: Sequence[Value], block: Value, places: RowPointers
    ) -> None:
        """Put the results to their place."""
        first = kb.mul(block, sums.width * 4)
        with kb.for_each_tile_row(values, 1) as (number, (value,)):
            result = _clipped(kb, apply_activation(kb, self.activation, value), self.clip)
            kb.store(result, places.result, kb.add(first, kb.mul(number, sums.lanes * 4)))


@dataclass(frozen=True, slots=True)
class LstmCellUpdate:
    """The gates of an LSTM: input (not where `coupled` to the forget gate), forget, cell, output.

    With peepholes the constants have a row of weights for each gate; normalized ones then have a row of weights and one
    of biases for each gate, and one that is 1 for true cells.
    """

    coupled: bool
    peephole: bool
    normalized: bool
    activation: int
    clip: float

    has_state = True

    @property
    def gates(self) -> int:
        """Three or four."""
        return 3 if self.coupled else 4

    def constants(self, sums: GateGemv, peepholes: Array | None, norms: Array | None, biases: Array) -> bytes:
        """Return the rows of constants, made of rows (gates, cells)."""
        rows: list[Array] = [] if peepholes is None else [*peepholes]
        if norms is not None:
            rows += [*norms, *biases, np.ones(sums.cells)]
        filled = np.zeros((len(rows), sums.padded), np.float32)
        filled[:, : sums.cells] = np.reshape(rows, (len(rows), sums.cells))
        return filled.tobytes()

    def emit_block(
        self, kb: KernelBuilder, sums: GateGemv, values: Sequence[Value], block: Value, places: RowPointers
    ) -> None:
        """Update the cells' state and put their results to their place; normalized gates wait for `emit_row`."""
        pitch = sums.padded * 4
        with kb.for_each_tile_row(values, self.gates) as (number, row):
            place = kb.add(kb.mul(block, sums.width * 4), kb.mul(number, sums.lanes * 4))
            if self.normalized:
                for gate, value in enumerate(row):
                    kb.store(value, places.sums, kb.add(place, gate * pitch))
            else:
                self._emit_vector(kb, row, place, pitch, places)

    def _emit_vector(
        self, kb: KernelBuilder, row: Sequence[Value], place: Value, pitch: int, places: RowPointers
    ) -> None:
        def seen(gate: int, state: Value) -> Value:
            """Add what the gate sees of the state; the cell gate sees nothing."""
            if not self.peephole or gate == self.gates - 2:
                return row[gate]
            weights = kb.load(state.type, places.constants, kb.add(place, gate * pitch))
            return fmuladd(kb, weights, state, row[gate])

        state = kb.load(row[0].type, places.state, place)
        state = self._next_state(kb, [seen(gate, state) for gate in range(self.gates - 1)], state)
        kb.store(state, places.state, place)
        kb.store(self._result(kb, seen(self.gates - 1, state), state), places.result, place)

    def _next_state(self, kb: KernelBuilder, sums: Sequence[Value], state: Value) -> Value:
        *entrance, forget, cell = sums
        kept = logistic(kb, forget)
        let_in = logistic(kb, entrance[0]) if entrance else kb.ir.fsub(kb.splat(F32, 1.0, kept.type.count), kept)
        entering = kb.ir.fmul(let_in, apply_activation(kb, self.activation, cell))
        return _clipped(kb, fmuladd(kb, kept, state, entering), self.clip)

    def _result(self, kb: KernelBuilder, sums: Value, state: Value) -> Value:
        return kb.ir.fmul(logistic(kb, sums), apply_activation(kb, self.activation, state))

    def emit_row(self, kb: KernelBuilder, sums: GateGemv, places: RowPointers) -> None:
        """Do the rest for normalized gates, when all cells' sums are there; the output gate sees the new state."""
        pitch, kind = sums.padded * 4, vector(F32, sums.lanes)
        output = (self.gates - 1) * pitch
        with kb.loop(0, self.gates - 1) as gate:
            self._normalize(kb, sums, kb.mul(gate, pitch), places)
        with kb.loop(0, pitch, sums.lanes * 4) as place:
            row = [kb.load(kind, places.sums, kb.add(place, gate * pitch)) for gate in range(self.gates - 1)]
            kb.store(self._next_state(kb, row, kb.load(kind, places.state, place)), places.state, place)
        self._normalize(kb, sums, kb.i64(output), places)
        with kb.loop(0, pitch, sums.lanes * 4) as place:
            opened = kb.load(kind, places.sums, kb.add(place, output))
            kb.store(self._result(kb, opened, kb.load(kind, places.state, place)), places.result, place)

    def _normalize(self, kb: KernelBuilder, sums: GateGemv, offset: Value, places: RowPointers) -> None:
        """Normalize the row of sums at `offset`, in bytes, where the gate's row of each kind of constants is, too."""
        kind, step, rows = vector(F32, sums.lanes), sums.lanes * 4, self.gates * sums.padded * 4
        gate, seen = kb.at(places.sums, offset), kb.at(places.constants, offset)
        norms = kb.at(seen, rows if self.peephole else 0)
        inside = kb.at(places.constants, (3 if self.peephole else 2) * rows)

        def total(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            place = kb.mul(k, step)
            value = kb.load(kind, gate, place)
            if self.peephole:
                value = fmuladd(kb, kb.load(kind, seen, place), kb.load(kind, places.state, place), value)
                kb.store(value, gate, place)
            return [kb.ir.fadd(values[0], value)]

        def squares(k: Value, values: Sequence[Value]) -> Sequence[Value]:
            place = kb.mul(k, step)
            centred = kb.ir.fmul(kb.ir.fsub(kb.load(kind, gate, place), mean), kb.load(kind, inside, place))
            kb.store(centred, gate, place)
            return [fmuladd(kb, centred, centred, values[0])]

        count, zeros, cells = (
            sums.padded // sums.lanes,
            kb.splat(F32, 0.0, sums.lanes),
            kb.splat(F32, float(sums.cells), sums.lanes),
        )
        mean = kb.ir.fdiv(_in_all(kb, *kb.for_loop(count, [zeros], total)), cells)
        variance = kb.ir.fdiv(_in_all(kb, *kb.for_loop(count, [zeros], squares)), cells)
        root = kb.intrinsic("llvm.sqrt", kb.ir.fadd(variance, kb.splat(F32, float(np.float32(_EPSILON)), sums.lanes)))
        with kb.loop(0, sums.padded * 4, step) as place:
            scaled = kb.ir.fdiv(kb.load(kind, gate, place), root)
            bias = kb.load(kind, kb.at(norms, rows), place)
            kb.store(fmuladd(kb, scaled, kb.load(kind, norms, place), bias), gate, place)


def _in_all(kb: KernelBuilder, values: Value) -> Value:
    """Return the sum of all lanes, in each."""
    single = reduce_lanes(kb, FloatSumReducer(), values)
    return kb.broadcast(kb.ir.extract_element(single, kb.i64(0)), values.type.count)


def _clipped(kb: KernelBuilder, value: Value, limit: float) -> Value:
    """Return a value held within [-limit, limit], if that is not 0."""
    limit = float(np.float32(limit))
    return clamp_float(kb, value, -limit, limit) if limit > 0 else value
