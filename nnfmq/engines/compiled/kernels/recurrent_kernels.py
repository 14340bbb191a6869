"""Recurrent kernels: one step of a cell, a whole sequence, and SVDF.

`CellKernel` splits a step into blocks of units. `SequenceKernel` takes batch rows through all time steps, because rows
are independent and units are not. Both copy a row's inputs and states to scratch, padded to whole blocks, and
copy the results from there. `SvdfKernel` computes SVDF from the features' matrix product on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nnfmq.engines.compiled.ir_builder import F32, KernelBuilder, Value, vector, vector_width_for
from nnfmq.engines.compiled.kernels.normalization_kernels import AxisLoop
from nnfmq.engines.compiled.kernels.recurrent_cells import (
    GateGemv,
    LstmCellUpdate,
    RnnCell,
    RowPointers,
    apply_activation,
)
from nnfmq.engines.compiled.kernels.reducers import FloatSumReducer, reduce_lanes
from nnfmq.engines.compiled.kernels.vector_math import fmuladd
from nnfmq.engines.compiled.memory_plan import align
from nnfmq.engines.compiled.target import Target

__all__ = ["CellKernel", "OutputKind", "SequenceKernel", "SvdfKernel", "plan_svdf"]


class OutputKind(Enum):
    """What an output of a recurrent kernel receives."""

    LAST_OUTPUT = "last output"
    LAST_STATE = "last state"
    ALL_OUTPUTS = "all outputs"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class CellKernel:
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
                _load_units(kb, kb.at(memory, self._state_offset), source, self.gemv)

    def _compute_blocks(self, kb: KernelBuilder) -> None:
        first = self._first_output_arg + len(self.outputs)
        weights, bias = kb.argument(first), kb.argument(first + 1)
        constants = kb.argument(first + 2) if self.cell.has_state else bias
        with kb.loop(kb.begin, kb.end) as block, kb.loop(0, self.batch) as row:
            memory = kb.at(kb.scratch, kb.mul(row, self._row_bytes))
            state, output = kb.at(memory, self._state_offset), kb.at(memory, self._output_offset)
            values = self.gemv.emit(kb, block, memory, weights, bias)
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
class SequenceKernel:
    """All time steps of a cell, `is_backward` in reverse order. A work item is a batch row.

    The inputs of all time steps are multiplied by a GEMM before; its results, with the biases added unless the cell is
    normalized, are the first argument: positions in the order of the sequence, each as `GateGemv.pack_rows`.

    Args: these; the hidden state; the state if the cell has one; `outputs`; recurrent weights; the cell's constants if
    it has a state; the projection's weights and biases if there is one. Scratch: hidden state, state, outputs of the
    cell, pre-activations if it is normalized.
    """

    gemv: GateGemv
    cell: RnnCell | LstmCellUpdate
    projection: GateGemv | None
    projection_clip: float
    time: int
    batch: int
    is_time_major: bool
    outputs: tuple[OutputKind, ...]
    is_backward: bool = False

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Batch rows."""
        return self.batch

    @property
    def _hidden_size(self) -> int:
        return self.gemv.k

    @property
    def _scratch_offsets(self) -> tuple[int, int, int, int]:
        """Offsets of the state, the outputs and the pre-activations, which follow the hidden state; and the end."""
        hidden = max(self.gemv.k, self.projection.padded_units if self.projection else 0)
        row = align(self.gemv.padded_units * 4)
        state = align(hidden * 4)
        preactivations = state + 2 * row
        end = preactivations + (self.gemv.gates * row if self.cell.is_normalized else 0)
        return state, state + row, preactivations, end

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a row's states, outputs and pre-activations."""
        return self._scratch_offsets[3]

    def emit(self, kb: KernelBuilder) -> None:
        """Take each row through all time steps."""
        state, output, preactivations, _ = self._scratch_offsets
        input_products, hidden_in = kb.argument(0), kb.argument(1)
        first = 2 + (1 if self.cell.has_state else 0) + len(self.outputs)
        weights = kb.argument(first)
        constants = kb.argument(first + 1) if self.cell.has_state else weights
        state, output, preactivations = (kb.at(kb.scratch, offset) for offset in (state, output, preactivations))
        pointers = RowPointers(state, output, preactivations, constants)
        with kb.loop(kb.begin, kb.end) as row:
            kb.memcpy(kb.scratch, kb.at(hidden_in, kb.mul(row, self._hidden_size * 4)), self._hidden_size * 4)
            if self.cell.has_state:
                source = kb.at(kb.argument(2), kb.mul(row, self.gemv.units * 4))
                _load_units(kb, pointers.state, source, self.gemv)
            with kb.loop(0, self.time) as step:
                time = kb.ir.sub(kb.i64(self.time - 1), step) if self.is_backward else step
                outer, extent, inner = (time, self.batch, row) if self.is_time_major else (row, self.time, time)
                position = kb.add(kb.mul(outer, extent), inner)
                bias = kb.at(input_products, kb.mul(position, self.gemv.gates * self.gemv.padded_units * 4))
                with kb.loop(0, self.gemv.blocks) as block:
                    values = self.gemv.emit(kb, block, kb.scratch, weights, bias)
                    self.cell.emit_block(kb, self.gemv, values, block, pointers)
                if isinstance(self.cell, LstmCellUpdate) and self.cell.is_normalized:
                    self.cell.emit_row(kb, self.gemv, pointers)
                self._project(kb, pointers, first + 2)
                self._store(kb, OutputKind.ALL_OUTPUTS, position, self._hidden_size, kb.scratch)
            self._store(kb, OutputKind.LAST_OUTPUT, row, self._hidden_size, kb.scratch)
            self._store(kb, OutputKind.LAST_STATE, row, self.gemv.units, pointers.state)
            _zero_gate_buffers(kb, self.gemv, row, 1, self._outputs(kb, OutputKind.ZEROS))
        kb.return_void()

    def _project(self, kb: KernelBuilder, pointers: RowPointers, first_arg: int) -> None:
        """Compute the hidden state from the cell's outputs: a projection, or a copy."""
        if self.projection is None:
            kb.memcpy(kb.scratch, pointers.output, self._hidden_size * 4)
            return
        weights, biases = kb.argument(first_arg), kb.argument(first_arg + 1)
        hidden = RowPointers(pointers.state, kb.scratch, pointers.preactivations, biases)
        with kb.loop(0, self.projection.blocks) as block:
            values = self.projection.emit(kb, block, pointers.output, weights, biases)
            RnnCell(0, self.projection_clip).emit_block(kb, self.projection, values, block, hidden)

    def _outputs(self, kb: KernelBuilder, wanted: OutputKind) -> list[Value]:
        first = 3 if self.cell.has_state else 2
        return [kb.argument(first + number) for number, kind in enumerate(self.outputs) if kind is wanted]

    def _store(self, kb: KernelBuilder, kind: OutputKind, position: Value, size: int, source: Value) -> None:
        for out in self._outputs(kb, kind):
            kb.memcpy(kb.at(out, kb.mul(position, size * 4)), source, size * 4)


def _load_units(kb: KernelBuilder, memory: Value, source: Value, gemv: GateGemv) -> None:
    """Copy a row of units to scratch; padding units get 0."""
    kb.memcpy(memory, source, gemv.units * 4)
    if gemv.padded_units > gemv.units:
        kb.memset(kb.at(memory, gemv.units * 4), 0, (gemv.padded_units - gemv.units) * 4)


def _zero_gate_buffers(kb: KernelBuilder, gemv: GateGemv, row: Value, count: int, outputs: Sequence[Value]) -> None:
    """Fill `count` rows of LSTM's scratch outputs, which have an element for each gate and unit, with 0."""
    size = gemv.gates * gemv.units * 4
    for out in outputs:
        kb.memset(kb.at(out, kb.mul(row, size)), 0, count * size)


# -- SVDF -------------------------------------------------------------------------------------------------------------

_UNITS_PER_ITEM = 32


@dataclass(frozen=True, slots=True)
class SvdfKernel:
    """SVDF after the feature product: each filter's memory is weighed and shifted, and each unit sums its filters.

    A unit has `rank` filters, each with a memory of `memory_size` features, the newest last. A work item is a block of
    units of a batch row.

    Args: features, memories, new memories, outputs, time weights (in the order of a row's memories), biases.
    """

    batch: int
    units: int
    rank: int
    memory_size: int
    activation: int
    lanes: int

    compile_cost = 1

    @property
    def work_items(self) -> int:
        """Blocks of units of all rows."""
        return self.batch * self._blocks

    @property
    def _blocks(self) -> int:
        return math.ceil(self.units / _UNITS_PER_ITEM)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a block's sums."""
        return _UNITS_PER_ITEM * 4

    def emit(self, kb: KernelBuilder) -> None:
        """Compute block by block."""
        out, biases = kb.argument(3), kb.argument(5)
        with kb.loop(kb.begin, kb.end) as work_item:
            row, block = kb.ir.udiv(work_item, kb.i64(self._blocks)), kb.ir.urem(work_item, kb.i64(self._blocks))
            first = kb.mul(block, _UNITS_PER_ITEM)
            count = kb.intrinsic("llvm.smin", kb.i64(_UNITS_PER_ITEM), kb.ir.sub(kb.i64(self.units), first))
            with kb.loop(0, count) as number:
                unit = kb.add(first, number)
                filters = kb.add(kb.mul(row, self.units * self.rank), kb.mul(unit, self.rank))
                bias = kb.load(F32, biases, kb.mul(unit, 4))
                (total,) = kb.for_loop(
                    self.rank, [bias], lambda r, accs: [self._emit_filter(kb, filters, unit, r, accs[0])]
                )
                kb.store(total, kb.scratch, kb.mul(number, 4))
            with kb.loop(0, count, kb.target.lanes) as number:
                values = kb.load(vector(F32, kb.target.lanes), kb.scratch, kb.mul(number, 4))
                kb.store(apply_activation(kb, self.activation, values), kb.scratch, kb.mul(number, 4))
            results = kb.at(out, kb.mul(kb.add(kb.mul(row, self.units), first), 4))
            kb.memcpy(results, kb.scratch, kb.mul(count, 4))
        kb.return_void()

    def _emit_filter(self, kb: KernelBuilder, filters: Value, unit: Value, number: Value, total: Value) -> Value:
        """Shift the memory of a unit's filter `number`, and return `total` plus the weighed memory.

        The new memory is the old one without its oldest feature, then the new feature, then 0: the place of the next
        one. The weighed sum is over the old memory, with the new feature in the last place.
        """
        position, pitch = kb.add(filters, number), self.memory_size * 4
        old, new = (kb.at(kb.argument(n), kb.mul(position, pitch)) for n in (1, 2))
        weights = kb.at(kb.argument(4), kb.mul(kb.add(kb.mul(unit, self.rank), number), pitch))
        feature, newest = kb.load(F32, kb.argument(0), kb.mul(position, 4)), pitch - 4
        if self.memory_size > 2:
            kb.memcpy(new, kb.at(old, 4), pitch - 8)
        if self.memory_size > 1:
            kb.store(feature, new, pitch - 8)
            total = kb.ir.fadd(total, self._weigh_old(kb, old, weights))
        kb.store(F32(0.0), new, newest)
        return fmuladd(kb, feature, kb.load(F32, weights, newest), total)

    def _weigh_old(self, kb: KernelBuilder, old: Value, weights: Value) -> Value:
        """Return the weighed sum of all features but the newest."""
        loop, kind = AxisLoop(1, self.memory_size - 1, 1, self.lanes, 1), vector(F32, self.lanes)
        zeros = kb.splat(F32, 0.0, self.lanes)

        def add_products(k: Value, accs: Sequence[Value]) -> Sequence[Value]:
            offset = kb.mul(loop.offset(kb, k), 4)
            product = kb.ir.fmul(kb.load(kind, old, offset), kb.load(kind, weights, offset))
            return [kb.ir.fadd(accs[0], loop.mask_seen(kb, k, product, zeros))]

        (acc,) = kb.for_loop(loop.iterations, [zeros], add_products)
        return kb.ir.extract_element(reduce_lanes(kb, FloatSumReducer(), acc), kb.i64(0))


def plan_svdf(batch: int, units: int, rank: int, memory_size: int, activation: int, target: Target) -> SvdfKernel:
    """Plan the kernel: choose the vector width along a memory."""
    lanes = vector_width_for(max(1, memory_size - 1), target.lanes)
    return SvdfKernel(batch, units, rank, memory_size, activation, lanes)
