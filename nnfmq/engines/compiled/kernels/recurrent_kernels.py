"""One step of recurrent cells with blocks of cells for units, and all steps of a sequence with its rows for units.

Both copy what a row begins with into scratch memory, which has room for whole blocks, and copy the results out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nnfmq.engines.compiled.arena import aligned
from nnfmq.engines.compiled.emission import Emitter, Value
from nnfmq.engines.compiled.kernels.recurrent_cells import GateGemv, LstmCellUpdate, RnnCell, RowPointers
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

    @property
    def units(self) -> int:
        """Blocks of cells, for all rows."""
        return self.sums.blocks

    @property
    def _state(self) -> int:
        return aligned(sum(self.sources) * 4)

    @property
    def _row(self) -> int:
        return self._state + aligned(self.sums.padded * 4) * (2 if self.update.has_state else 1)

    @property
    def _result(self) -> int:
        return self._row - aligned(self.sums.padded * 4)

    def scratch_bytes(self, target: Target) -> int:
        """What is multiplied, state and results of each row."""
        return self.batch * self._row

    def emit(self, e: Emitter) -> None:
        """Load, compute the blocks, store; without a block nothing."""
        with e.b.if_then(e.b.icmp_signed("<", e.begin, e.end)):
            self._load(e)
            self._compute(e)
            self._store(e)
        e.finish()

    def _load(self, e: Emitter) -> None:
        state = self.sums.cells if self.update.has_state else 0
        with e.loop(0, self.batch) as row:
            memory, offset = e.at(e.scratch, e.mul(row, self._row)), 0
            for number, length in enumerate(self.sources):
                e.copy(e.at(memory, offset), e.at(e.argument(number), e.mul(row, length * 4)), length * 4)
                offset += length * 4
            if state:
                source = e.at(e.argument(len(self.sources)), e.mul(row, state * 4))
                _load_cells(e, e.at(memory, self._state), source, self.sums)

    def _compute(self, e: Emitter) -> None:
        first = self._first_output + len(self.outputs)
        weights, starts = e.argument(first), e.argument(first + 1)
        constants = e.argument(first + 2) if self.update.has_state else starts
        with e.loop(e.begin, e.end) as block, e.loop(0, self.batch) as row:
            memory = e.at(e.scratch, e.mul(row, self._row))
            places = RowPointers(e.at(memory, self._state), e.at(memory, self._result), memory, constants)
            values = self.sums.emit(e, block, memory, weights, starts)
            self.update.emit_block(e, self.sums, values, block, places)

    @property
    def _first_output(self) -> int:
        return len(self.sources) + (1 if self.update.has_state else 0)

    def _store(self, e: Emitter) -> None:
        first = e.mul(e.begin, self.sums.width)
        last = e.intrinsic("llvm.smin", e.mul(e.end, self.sums.width), e.i64(self.sums.cells))
        size, offset = e.mul(e.b.sub(last, first), 4), e.mul(first, 4)
        with e.loop(0, self.batch) as row:
            memory = e.at(e.scratch, e.mul(row, self._row))
            for number, kind in enumerate(self.outputs):
                if kind != ZEROS:
                    source = e.at(memory, self._state if kind == STATE else self._result)
                    out = e.at(e.argument(self._first_output + number), e.mul(row, self.sums.cells * 4))
                    e.copy(e.at(out, offset), e.at(source, offset), size)
        zeros = [number for number, kind in enumerate(self.outputs) if kind == ZEROS]
        if zeros:
            with e.b.if_then(e.b.icmp_signed("==", e.begin, e.i64(0))):
                _zero_buffers(e, self.sums, e.i64(0), self.batch, [e.argument(self._first_output + n) for n in zeros])


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

    @property
    def units(self) -> int:
        """Rows."""
        return self.batch

    @property
    def _hidden(self) -> int:
        return self.sums.length

    @property
    def _offsets(self) -> tuple[int, int, int, int]:
        """Where states, results and sums are behind the hidden state, and where all ends."""
        hidden = max(self.sums.length, self.projection.padded if self.projection else 0)
        row = aligned(self.sums.padded * 4)
        state = aligned(hidden * 4)
        sums = state + 2 * row
        return state, state + row, sums, sums + (self.sums.gates * row if self.update.normalized else 0)

    def scratch_bytes(self, target: Target) -> int:
        """States, results and sums of a row."""
        return self._offsets[3]

    def emit(self, e: Emitter) -> None:
        """Take row by row through all steps."""
        state, result, sums, _ = self._offsets
        products, hidden_in = e.argument(0), e.argument(1)
        first = 2 + (1 if self.update.has_state else 0) + len(self.outputs)
        weights = e.argument(first)
        constants = e.argument(first + 1) if self.update.has_state else weights
        places = RowPointers(e.at(e.scratch, state), e.at(e.scratch, result), e.at(e.scratch, sums), constants)
        with e.loop(e.begin, e.end) as row:
            e.copy(e.scratch, e.at(hidden_in, e.mul(row, self._hidden * 4)), self._hidden * 4)
            if self.update.has_state:
                _load_cells(e, places.state, e.at(e.argument(2), e.mul(row, self.sums.cells * 4)), self.sums)
            with e.loop(0, self.time) as step:
                time = e.b.sub(e.i64(self.time - 1), step) if self.backward else step
                rows = (time, self.batch, row) if self.time_major else (row, self.time, time)
                number = e.add(e.mul(rows[0], rows[1]), rows[2])
                starts = e.at(products, e.mul(number, self.sums.gates * self.sums.padded * 4))
                self._emit_step(e, starts, weights, places)
                self._project(e, places, first + 2)
                self._store(e, STEPS, number, self._hidden, e.scratch)
            self._store(e, RESULT, row, self._hidden, e.scratch)
            self._store(e, STATE, row, self.sums.cells, places.state)
            _zero_buffers(e, self.sums, row, 1, self._outputs(e, ZEROS))
        e.finish()

    def _emit_step(self, e: Emitter, starts: Value, weights: Value, places: RowPointers) -> None:
        with e.loop(0, self.sums.blocks) as block:
            values = self.sums.emit(e, block, e.scratch, weights, starts)
            self.update.emit_block(e, self.sums, values, block, places)
        if isinstance(self.update, LstmCellUpdate) and self.update.normalized:
            self.update.emit_row(e, self.sums, places)

    def _project(self, e: Emitter, places: RowPointers, first: int) -> None:
        """Make the hidden state of the results."""
        if self.projection is None:
            e.copy(e.scratch, places.result, self._hidden * 4)
            return
        weights, biases = e.argument(first), e.argument(first + 1)
        into = RowPointers(places.state, e.scratch, places.sums, biases)
        with e.loop(0, self.projection.blocks) as block:
            values = self.projection.emit(e, block, places.result, weights, biases)
            RnnCell(0, self.projection_clip).emit_block(e, self.projection, values, block, into)

    def _outputs(self, e: Emitter, kind: str) -> list[Value]:
        first = 3 if self.update.has_state else 2
        return [e.argument(first + number) for number, found in enumerate(self.outputs) if found == kind]

    def _store(self, e: Emitter, kind: str, number: Value, length: int, source: Value) -> None:
        for out in self._outputs(e, kind):
            e.copy(e.at(out, e.mul(number, length * 4)), source, length * 4)


def _load_cells(e: Emitter, memory: Value, source: Value, sums: GateGemv) -> None:
    """Copy what cells have; those beside the last true one get 0."""
    e.copy(memory, source, sums.cells * 4)
    if sums.padded > sums.cells:
        e.fill(e.at(memory, sums.cells * 4), 0, (sums.padded - sums.cells) * 4)


def _zero_buffers(e: Emitter, sums: GateGemv, row: Value, count: int, outputs: Sequence[Value]) -> None:
    """Fill rows of buffers that hold a number for each gate and cell."""
    size = sums.gates * sums.cells * 4
    for out in outputs:
        e.fill(e.at(out, e.mul(row, size)), 0, count * size)
