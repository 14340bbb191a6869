"""One step of recurrent cells with blocks of cells for units, and all steps of a sequence with its rows for units.

Both copy what a row begins with into scratch memory, which has room for whole blocks, and copy the results out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.ir_builder import KernelBuilder, Value
from nnfmq.engines.compiled.kernels.recurrent_cells import GateGemv, LstmCellUpdate, RnnCell, RowPointers
from nnfmq.engines.compiled.memory_plan import align
from nnfmq.engines.compiled.target import Target

__all__ = ["RESULT", "STATE", "STEPS", "ZEROS", "CellKernel", "SequenceKernel"]

RESULT, STATE, STEPS, ZEROS = "result", "state", "steps", "zeros"
"""What an output gets: a row's last results, its last state, the results of all steps, or nothing but 0."""


@dataclass(frozen=True, slots=True)
class CellKernel:
    """One step: the rows of several `sources`, of these lengths, side by side are what is multiplied.

    Table: the sources, the state if there is one, `outputs` (by what each gets), weights, starts of sums, constants.
    """

    sums: GateGemv
    update: RnnCell | LstmCellUpdate
    batch: int
    sources: tuple[int, ...]
    outputs: tuple[str, ...]

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Blocks of cells, for all rows."""
        return self.sums.blocks

    @property
    def _state(self) -> int:
        return align(sum(self.sources) * 4)

    @property
    def _row(self) -> int:
        return self._state + align(self.sums.padded * 4) * (2 if self.update.has_state else 1)

    @property
    def _result(self) -> int:
        return self._row - align(self.sums.padded * 4)

    def scratch_bytes(self, target: Target) -> int:
        """What is multiplied, state and results of each row."""
        return self.batch * self._row

    def emit(self, kb: KernelBuilder) -> None:
        """Load, compute the blocks, store; without a block nothing."""
        with kb.ir.if_then(kb.ir.icmp_signed("<", kb.begin, kb.end)):
            self._load(kb)
            self._compute(kb)
            self._store(kb)
        kb.return_void()

    def _load(self, kb: KernelBuilder) -> None:
        state = self.sums.cells if self.update.has_state else 0
        with kb.loop(0, self.batch) as row:
            memory, offset = kb.at(kb.scratch, kb.mul(row, self._row)), 0
            for number, length in enumerate(self.sources):
                kb.memcpy(kb.at(memory, offset), kb.at(kb.argument(number), kb.mul(row, length * 4)), length * 4)
                offset += length * 4
            if state:
                source = kb.at(kb.argument(len(self.sources)), kb.mul(row, state * 4))
                _load_cells(kb, kb.at(memory, self._state), source, self.sums)

    def _compute(self, kb: KernelBuilder) -> None:
        first = self._first_output + len(self.outputs)
        weights, starts = kb.argument(first), kb.argument(first + 1)
        constants = kb.argument(first + 2) if self.update.has_state else starts
        with kb.loop(kb.begin, kb.end) as block, kb.loop(0, self.batch) as row:
            memory = kb.at(kb.scratch, kb.mul(row, self._row))
            places = RowPointers(kb.at(memory, self._state), kb.at(memory, self._result), memory, constants)
            values = self.sums.emit(kb, block, memory, weights, starts)
            self.update.emit_block(kb, self.sums, values, block, places)

    @property
    def _first_output(self) -> int:
        return len(self.sources) + (1 if self.update.has_state else 0)

    def _store(self, kb: KernelBuilder) -> None:
        first = kb.mul(kb.begin, self.sums.width)
        last = kb.intrinsic("llvm.smin", kb.mul(kb.end, self.sums.width), kb.i64(self.sums.cells))
        size, offset = kb.mul(kb.ir.sub(last, first), 4), kb.mul(first, 4)
        with kb.loop(0, self.batch) as row:
            memory = kb.at(kb.scratch, kb.mul(row, self._row))
            for number, kind in enumerate(self.outputs):
                if kind != ZEROS:
                    source = kb.at(memory, self._state if kind == STATE else self._result)
                    out = kb.at(kb.argument(self._first_output + number), kb.mul(row, self.sums.cells * 4))
                    kb.memcpy(kb.at(out, offset), kb.at(source, offset), size)
        zeros = [number for number, kind in enumerate(self.outputs) if kind == ZEROS]
        if zeros:
            with kb.ir.if_then(kb.ir.icmp_signed("==", kb.begin, kb.i64(0))):
                _zero_buffers(
                    kb, self.sums, kb.i64(0), self.batch, [kb.argument(self._first_output + n) for n in zeros]
                )


@dataclass(frozen=True, slots=True)
class SequenceKernel:
    """All steps of a sequence, or in the order `backward`, over rows that do not see each other.

    Table: the input's products with all gates' weights, biases added (where they are not normalized), in the order of
    the sequence and in each as `GateSums.ordered`; the hidden state, the state if there is one; `outputs`, by what each
    gets; recurrent weights, constants if there is a state, the projection's weights and biases if there is one.
    """

    sums: GateGemv
    update: RnnCell | LstmCellUpdate
    projection: GateGemv | None
    projection_clip: float
    time: int
    batch: int
    time_major: bool
    outputs: tuple[str, ...]
    backward: bool = False

    compile_cost = 3

    @property
    def work_items(self) -> int:
        """Rows."""
        return self.batch

    @property
    def _hidden(self) -> int:
        return self.sums.length

    @property
    def _offsets(self) -> tuple[int, int, int, int]:
        """Where states, results and sums are behind the hidden state, and where all ends."""
        hidden = max(self.sums.length, self.projection.padded if self.projection else 0)
        row = align(self.sums.padded * 4)
        state = align(hidden * 4)
        sums = state + 2 * row
        return state, state + row, sums, sums + (self.sums.gates * row if self.update.normalized else 0)

    def scratch_bytes(self, target: Target) -> int:
        """States, results and sums of a row."""
        return self._offsets[3]

    def emit(self, kb: KernelBuilder) -> None:
        """Take row by row through all steps."""
        state, result, sums, _ = self._offsets
        products, hidden_in = kb.argument(0), kb.argument(1)
        first = 2 + (1 if self.update.has_state else 0) + len(self.outputs)
        weights = kb.argument(first)
        constants = kb.argument(first + 1) if self.update.has_state else weights
        places = RowPointers(kb.at(kb.scratch, state), kb.at(kb.scratch, result), kb.at(kb.scratch, sums), constants)
        with kb.loop(kb.begin, kb.end) as row:
            kb.memcpy(kb.scratch, kb.at(hidden_in, kb.mul(row, self._hidden * 4)), self._hidden * 4)
            if self.update.has_state:
                _load_cells(kb, places.state, kb.at(kb.argument(2), kb.mul(row, self.sums.cells * 4)), self.sums)
            with kb.loop(0, self.time) as step:
                time = kb.ir.sub(kb.i64(self.time - 1), step) if self.backward else step
                rows = (time, self.batch, row) if self.time_major else (row, self.time, time)
                number = kb.add(kb.mul(rows[0], rows[1]), rows[2])
                starts = kb.at(products, kb.mul(number, self.sums.gates * self.sums.padded * 4))
                self._emit_step(kb, starts, weights, places)
                self._project(kb, places, first + 2)
                self._store(kb, STEPS, number, self._hidden, kb.scratch)
            self._store(kb, RESULT, row, self._hidden, kb.scratch)
            self._store(kb, STATE, row, self.sums.cells, places.state)
            _zero_buffers(kb, self.sums, row, 1, self._outputs(kb, ZEROS))
        kb.return_void()

    def _emit_step(self, kb: KernelBuilder, starts: Value, weights: Value, places: RowPointers) -> None:
        with kb.loop(0, self.sums.blocks) as block:
            values = self.sums.emit(kb, block, kb.scratch, weights, starts)
            self.update.emit_block(kb, self.sums, values, block, places)
        if isinstance(self.update, LstmCellUpdate) and self.update.normalized:
            self.update.emit_row(kb, self.sums, places)

    def _project(self, kb: KernelBuilder, places: RowPointers, first: int) -> None:
        """Make the hidden state of the results."""
        if self.projection is None:
            kb.memcpy(kb.scratch, places.result, self._hidden * 4)
            return
        weights, biases = kb.argument(first), kb.argument(first + 1)
        into = RowPointers(places.state, kb.scratch, places.sums, biases)
        with kb.loop(0, self.projection.blocks) as block:
            values = self.projection.emit(kb, block, places.result, weights, biases)
            RnnCell(0, self.projection_clip).emit_block(kb, self.projection, values, block, into)

    def _outputs(self, kb: KernelBuilder, kind: str) -> list[Value]:
        first = 3 if self.update.has_state else 2
        return [kb.argument(first + number) for number, found in enumerate(self.outputs) if found == kind]

    def _store(self, kb: KernelBuilder, kind: str, number: Value, length: int, source: Value) -> None:
        for out in self._outputs(kb, kind):
            kb.memcpy(kb.at(out, kb.mul(number, length * 4)), source, length * 4)


def _load_cells(kb: KernelBuilder, memory: Value, source: Value, sums: GateGemv) -> None:
    """Copy what cells have; those beside the last true one get 0."""
    kb.memcpy(memory, source, sums.cells * 4)
    if sums.padded > sums.cells:
        kb.memset(kb.at(memory, sums.cells * 4), 0, (sums.padded - sums.cells) * 4)


def _zero_buffers(kb: KernelBuilder, sums: GateGemv, row: Value, count: int, outputs: Sequence[Value]) -> None:
    """Fill rows of buffers that hold a number for each gate and cell."""
    size = sums.gates * sums.cells * 4
    for out in outputs:
        kb.memset(kb.at(out, kb.mul(row, size)), 0, count * size)
