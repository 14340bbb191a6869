"""RNN, LSTM, their sequences, and SVDF.

One step is cut into blocks of cells. Of a sequence all inputs are multiplied at once, and what remains goes row by row;
so does a step whose gates are normalized, since that needs all cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.engines.compiled.kernels.recurrent_cells import GateGemv, LstmCellUpdate, RnnCell, plan_gate_gemv
from nnfmq.engines.compiled.kernels.recurrent_kernels import RESULT, STATE, STEPS, ZEROS, CellKernel, SequenceKernel
from nnfmq.engines.compiled.kernels.svdf import plan_svdf
from nnfmq.engines.compiled.lowering import Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.lowering.conv_matmul_rules import gemm_of_rows
from nnfmq.engines.compiled.lowering.data_movement_rules import concatenation
from nnfmq.engines.compiled.lowering.elementwise_rules import arithmetic
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.lstm import AUX, one_cell, two_cells
from nnfmq.operations.lstm_cell import NO_GATES, Gates, LstmTensors
from nnfmq.operations.recurrent_sequences import time_major_shape
from nnfmq.operations.signature import Array, Shape, Tensor

__all__ = ["RULES"]

_FLOAT = np.dtype("<f4")
_INPUT, _HIDDEN, _STATE = range(3)


@dataclass(frozen=True, slots=True)
class _Projection:
    """What makes the hidden state of the results: weights (1, size, cells), biases (1, size), a clip."""

    weights: Array
    biases: Array
    clip: float


@dataclass(frozen=True, slots=True)
class _Cells:
    """Recurrent cells with their weights (gates, cells, length), and what else is (gates, cells)."""

    update: RnnCell | LstmCellUpdate
    inputs: Array
    recurrent: Array
    biases: Array
    norms: Array | None = None
    peepholes: Array | None = None
    projection: _Projection | None = None
    aux: Array | None = None

    @property
    def states(self) -> int:
        """How many arrays go from step to step."""
        return 2 if self.update.has_state else 1

    @property
    def size(self) -> int:
        """How long the hidden state of a row is."""
        return int(self.recurrent.shape[2])

    def sums(self, length: int, target: Target) -> GateGemv:
        """Return the products of vectors of `length`."""
        return plan_gate_gemv(self.update.gates, self.biases.shape[1], length, target)

    def starts(self, sums: GateGemv) -> Array:
        """Return what sums begin with, in their order."""
        return sums.ordered(self.biases if self.norms is None else np.zeros_like(self.biases)).reshape(-1)

    def constants(self, sums: GateGemv) -> tuple[bytes, ...]:
        """Return the constants of the update."""
        if isinstance(self.update, RnnCell):
            return ()
        return (self.update.constants(sums, self.peepholes, self.norms, self.biases),)


def _basic(weights: Tensor, recurrent: Tensor, bias: Tensor, activation: int, aux: Tensor | None = None) -> _Cells:
    inputs, hidden, biases = (tensor.array[np.newaxis] for tensor in (weights, recurrent, bias))
    more = None if aux is None else aux.array[np.newaxis]
    return _Cells(RnnCell(activation), inputs, hidden, biases, aux=more)


def _lstm_cells(cell: LstmTensors[Tensor], activation: int, cell_clip: float, projection_clip: float) -> _Cells:
    norms = None if cell.norm == NO_GATES else _stacked(cell.norm, cell.gates)
    peepholes = None if cell.peephole == NO_GATES else _stacked(cell.peephole, cell.gates)
    aux = None if cell.aux == NO_GATES else _stacked(cell.aux, cell.gates)
    update = LstmCellUpdate(len(cell.gates) == 3, peepholes is not None, norms is not None, activation, cell_clip)
    inputs, recurrent, biases = (_stacked(gates, cell.gates) for gates in (cell.input, cell.recurrent, cell.bias))
    projection = _projection(cell.projection, cell.projection_bias, projection_clip)
    return _Cells(update, inputs, recurrent, biases, norms, peepholes, projection, aux)


def _projection(weights: Tensor | None, bias: Tensor | None, clip: float) -> _Projection | None:
    if weights is None:
        return None
    biases = np.zeros(weights.shape[0], np.float32) if bias is None else bias.array
    return _Projection(weights.array[np.newaxis], biases[np.newaxis], clip)


def _stacked(tensors: Gates[Tensor], gates: Sequence[int]) -> Array:
    """Return the gates' values; 0 for a gate that has none."""
    like = next(tensor for tensor in tensors if tensor is not None)
    values = (tensors[gate] for gate in gates)
    return np.stack([np.zeros(like.shape, np.float32) if value is None else value.array for value in values])


# -- one step ---------------------------------------------------------------------------------------------------------


def rnn(
    input: Tensor,
    weights: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    hidden: Tensor,
    *,
    output: Sequence[Tensor],
    target: Target,
    activation: int,
) -> KernelLaunch | None:
    """RNN."""
    if input.dtype != _FLOAT:
        return None
    return _cells_step(_basic(weights, recurrent, bias, activation), input.shape[0], (RESULT, RESULT), target)


def lstm(
    input: Tensor,
    *rest: Any,
    output: Sequence[Tensor],
    target: Target,
    activation: int,
    cell_clip: float,
    projection_clip: float,
) -> KernelLaunch | KernelSequence | None:
    """LSTM. Its outputs: a buffer, both states, and the hidden state again."""
    if input.dtype != _FLOAT:
        return None
    cells = _lstm_cells(one_cell(rest)[0], activation, cell_clip, projection_clip)
    batch = input.shape[0]
    if cells.norms is not None:
        return _sequence(cells, (1, batch), True, (ZEROS, RESULT, STATE, STEPS), target)
    if cells.projection is None:
        return _cells_step(cells, batch, (ZEROS, RESULT, STATE, RESULT), target)
    first = _cells_step(cells, batch, (RESULT, ZEROS, STATE), target)
    made = (batch, cells.biases.shape[1])
    stage = Intermediate(first, (_INPUT, _HIDDEN, _STATE), _FLOAT, made, outputs=(0, 2))
    return KernelSequence((stage,), _projecting_step(cells.projection, batch, target), (3,))


def _cells_step(cells: _Cells, batch: int, outputs: tuple[str, ...], target: Target) -> KernelLaunch:
    weights = np.concatenate([cells.inputs, cells.recurrent], axis=2)
    sums = cells.sums(weights.shape[2], target)
    kernel = CellKernel(sums, cells.update, batch, (cells.inputs.shape[2], cells.recurrent.shape[2]), outputs)
    constants = (sums.pack(weights), cells.starts(sums).tobytes(), *cells.constants(sums))
    return KernelLaunch(kernel, constants, _work(sums, batch))


def _projecting_step(projection: _Projection, batch: int, target: Target) -> KernelLaunch:
    """Return the kernel that makes the hidden state, twice, from the results of cells."""
    sums, packed = _projected(projection, target)
    kernel = CellKernel(sums, RnnCell(0, projection.clip), batch, (sums.length,), (RESULT, RESULT))
    return KernelLaunch(kernel, packed, _work(sums, batch))


def _projected(projection: _Projection, target: Target) -> tuple[GateGemv, tuple[bytes, ...]]:
    _, size, cells = projection.weights.shape
    sums = plan_gate_gemv(1, size, cells, target)
    return sums, (sums.pack(projection.weights), sums.ordered(projection.biases).tobytes())


def _work(sums: GateGemv, count: int) -> int:
    return sums.multiplications * count // 16


# -- sequences --------------------------------------------------------------------------------------------------------


def rnn_sequence(
    input: Tensor,
    weights: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    hidden: Tensor,
    *,
    output: Tensor | Sequence[Tensor],
    target: Target,
    activation: int,
    time_major: int,
) -> KernelSequence | None:
    """UNIDIRECTIONAL_SEQUENCE_RNN."""
    if input.dtype != _FLOAT:
        return None
    outputs = (STEPS,) if isinstance(output, Tensor) else (STEPS, RESULT)
    steps = time_major_shape(input.shape, bool(time_major))[:2]
    return _sequence(_basic(weights, recurrent, bias, activation), steps, bool(time_major), outputs, target)


def lstm_sequence(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    activation: int,
    cell_clip: float,
    projection_clip: float,
    time_major: bool,
) -> KernelSequence | None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM."""
    if input.dtype != _FLOAT:
        return None
    outputs = (STEPS,) if isinstance(output, Tensor) else (STEPS, RESULT, STATE)
    cells = _lstm_cells(one_cell(rest)[0], activation, cell_clip, projection_clip)
    return _sequence(cells, time_major_shape(input.shape, time_major)[:2], time_major, outputs, target)


def _sequence(
    cells: _Cells, steps: Sequence[int], time_major: bool, outputs: tuple[str, ...], target: Target
) -> KernelSequence:
    """Return the product of all inputs, and the kernel that goes through the steps (time, batch)."""
    sums = cells.sums(cells.size, target)
    stage = _products(cells.inputs, cells.starts(sums), sums, _INPUT, math.prod(steps), target)
    states = range(_HIDDEN, _HIDDEN + cells.states)
    return KernelSequence((stage,), _sweep(cells, sums, steps, time_major, outputs, target), (states.stop, *states))


def _products(inputs: Array, starts: Array, sums: GateGemv, source: int, count: int, target: Target) -> Intermediate:
    """Return the products of all inputs with all gates' weights, with what sums begin with added."""
    weights = sums.ordered(inputs).reshape(-1, inputs.shape[2])
    return Intermediate(gemm_of_rows(count, weights, starts, target), (source,), _FLOAT, (count, len(weights)))


def _sweep(
    cells: _Cells,
    sums: GateGemv,
    steps: Sequence[int],
    time_major: bool,
    outputs: tuple[str, ...],
    target: Target,
    backward: bool = False,
) -> KernelLaunch:
    time, batch = steps
    packed: tuple[bytes, ...] = (sums.pack(cells.recurrent), *cells.constants(sums))
    projection, clip = None, 0.0
    if cells.projection is not None:
        projection, more = _projected(cells.projection, target)
        packed, clip = packed + more, cells.projection.clip
    kernel = SequenceKernel(sums, cells.update, projection, clip, time, batch, time_major, outputs, backward)
    return KernelLaunch(kernel, packed, _work(sums, time * batch))


# -- two directions ---------------------------------------------------------------------------------------------------


def rnn_directions(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    activation: int,
    time_major: bool,
    merge_outputs: bool,
) -> KernelSequence | None:
    """BIDIRECTIONAL_SEQUENCE_RNN."""
    if input.dtype != _FLOAT:
        return None
    aux, *weights = rest[8:]
    forward = _basic(rest[0], rest[1], rest[2], activation, weights[0])
    backward = _basic(rest[4], rest[5], rest[6], activation, weights[1])
    return _directions((forward, backward), input, aux, time_major, merge_outputs, output, target)


def lstm_directions(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    time_major: bool,
    merge_outputs: bool,
    **attributes: Any,
) -> KernelSequence | None:
    """BIDIRECTIONAL_SEQUENCE_LSTM."""
    if input.dtype != _FLOAT:
        return None
    both = tuple(_lstm_cells(cell, **attributes) for cell in two_cells(rest))
    return _directions(both, input, rest[AUX], time_major, merge_outputs, output, target)


def _directions(
    both: Sequence[_Cells],
    input: Tensor,
    aux: Tensor | None,
    time_major: bool,
    merged: bool,
    output: Tensor | Sequence[Tensor],
    target: Target,
) -> KernelSequence | None:
    """Return both sequences, and what joins them, if they are merged.

    An auxiliary input is added to both, or without weights for it what the backward one reads.
    """
    outputs = (output,) if isinstance(output, Tensor) else tuple(output)
    steps = time_major_shape(input.shape, time_major)[:2]
    results, count = 1 if merged else 2, both[0].states
    states = (RESULT, STATE)[:count] if len(outputs) > results else ()
    known = 1 + 2 * count + (aux is not None)
    stages: list[Intermediate] = []
    halves: list[int] = []
    for number, cells in enumerate(both):
        sums = cells.sums(cells.size, target)
        is_linked = bool(number) and aux is not None and cells.aux is None
        source = known - 1 if is_linked else _INPUT
        stages.append(_products(cells.inputs, cells.starts(sums), sums, source, math.prod(steps), target))
        if cells.aux is not None:
            stages += _added(cells.aux, sums, known - 1, known + len(stages) - 1, stages[-1].shape, target)
        reads = (known + len(stages) - 1, *range(1 + number * count, 1 + (number + 1) * count))
        is_last = number == 1 and not merged
        kinds = (STEPS, *states) if merged or is_last else (RESULT, STEPS, *states)
        sweep = _sweep(cells, sums, steps, time_major, kinds, target, backward=number == 1)
        if is_last:
            return KernelSequence(tuple(stages), sweep, reads)
        first = results + number * count
        places = (*(() if merged else (number,)), *range(first, first + len(states)))
        shape = (*input.shape[:2], cells.size) if merged else (steps[1], cells.size)
        halves.append(len(stages))
        stages.append(Intermediate(sweep, reads, _FLOAT, shape, places))
    parts = [Tensor(stages[place].shape, _FLOAT) for place in halves]
    joined = concatenation(*parts, output=outputs[0], target=target, axis=2)
    return None if joined is None else KernelSequence(tuple(stages), joined, tuple(known + place for place in halves))


def _added(weights: Array, sums: GateGemv, aux: int, products: int, shape: Shape, target: Target) -> list[Intermediate]:
    """Return what adds the products of an auxiliary input to those of the input."""
    zeros, made = np.zeros(shape[1], np.float32), Tensor(shape, _FLOAT)
    more = _products(weights, zeros, sums, aux, shape[0], target)
    total = arithmetic("add", made, made, output=made, target=target, activation=0)
    assert total is not None, "floats are added"
    return [more, Intermediate(total, (products, products + 1), _FLOAT, shape)]


# -- SVDF -------------------------------------------------------------------------------------------------------------


def svdf(
    input: Tensor,
    weights_feature: Tensor,
    weights_time: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    output: Sequence[Tensor],
    target: Target,
    rank: int,
    activation: int,
) -> KernelSequence | None:
    """SVDF: the features are a product."""
    if input.dtype != _FLOAT:
        return None
    batch, (filters, memory) = input.shape[0], weights_time.shape
    features = gemm_of_rows(batch, weights_feature.array, np.zeros(filters, np.float32), target)
    kernel = plan_svdf(batch, filters // rank, rank, memory, activation, target)
    biases = np.zeros(filters // rank, np.float32) if bias is None else bias.array
    stage = Intermediate(features, (_INPUT,), _FLOAT, (batch, filters))
    constants = (weights_time.array.tobytes(), biases.tobytes())
    return KernelSequence((stage,), KernelLaunch(kernel, constants, batch * filters * (memory + 8) // 4), (2, 1))


RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM: lstm_directions,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN: rnn_directions,
    OperationType.LSTM: lstm,
    OperationType.RNN: rnn,
    OperationType.SVDF: svdf,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM: lstm_sequence,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN: rnn_sequence,
}
