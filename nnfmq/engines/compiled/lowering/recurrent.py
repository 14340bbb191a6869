"""Lowering rules of RNN, LSTM, their sequences, and SVDF.

A single step is one kernel, split into blocks of units. For a sequence, a GEMM multiplies the inputs of all time steps
with all gates' weights, then a kernel takes batch rows through time. A step with normalized gates is lowered as a
sequence of one step, because normalization needs all units of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.kernels.recurrent import (
    CellKernel,
    GateGemv,
    LstmCellUpdate,
    OutputKind,
    RnnCell,
    SequenceKernel,
    plan_gate_gemv,
    plan_svdf,
)
from nnfmq.engines.compiled.lowering import Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.lowering.elementwise import lower_arithmetic
from nnfmq.engines.compiled.lowering.movement import lower_concatenation
from nnfmq.engines.compiled.lowering.products import gemm_of_rows
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Array, Shape, Tensor
from nnfmq.operations.lstm import AUX, NO_GATES, Gates, LstmTensors, one_cell, two_cells
from nnfmq.operations.recurrent_sequences import time_major_shape

__all__ = ["RULES", "stacked_gates"]

_FLOAT = np.dtype("<f4")
_INPUT, _HIDDEN, _STATE = range(3)  # numbers of the DATA inputs
_LAST_OUTPUT, _LAST_STATE, _ALL_OUTPUTS, _ZEROS = (
    OutputKind.LAST_OUTPUT,
    OutputKind.LAST_STATE,
    OutputKind.ALL_OUTPUTS,
    OutputKind.ZEROS,
)


@dataclass(frozen=True, slots=True)
class _Projection:
    """LSTM's projection from the cell's outputs to the hidden state: weights (1, size, units), biases (1, size)."""

    weights: Array
    biases: Array
    clip: float


@dataclass(frozen=True, slots=True)
class _CellWeights:
    """A cell with its weights (gates, units, k) and what else it has, (gates, units)."""

    cell: RnnCell | LstmCellUpdate
    inputs: Array
    recurrent: Array
    biases: Array
    norms: Array | None = None
    peepholes: Array | None = None
    projection: _Projection | None = None
    aux: Array | None = None

    @property
    def state_count(self) -> int:
        """Number of state arrays: the hidden state, and the cell state of an LSTM."""
        return 2 if self.cell.has_state else 1

    @property
    def hidden_size(self) -> int:
        """Elements of a row's hidden state."""
        return int(self.recurrent.shape[2])

    def plan_gemv(self, k: int, target: Target) -> GateGemv:
        """Plan the product of the gates' weights with vectors of `k` elements."""
        return plan_gate_gemv(self.cell.gates, self.biases.shape[1], k, target)

    def initial_accumulators(self, gemv: GateGemv) -> Array:
        """Return the biases as `GateGemv.emit` reads them; 0 if gates are normalized, whose biases are added later."""
        return gemv.pack_rows(self.biases if self.norms is None else np.zeros_like(self.biases)).reshape(-1)

    def constants(self, gemv: GateGemv) -> tuple[bytes, ...]:
        """Return the constants of the cell's update."""
        if isinstance(self.cell, RnnCell):
            return ()
        return (self.cell.constants(gemv, self.peepholes, self.norms, self.biases),)


def _rnn_weights(
    weights: Tensor, recurrent: Tensor, bias: Tensor, activation: int, aux: Tensor | None = None
) -> _CellWeights:
    inputs, hidden, biases = (tensor.array[np.newaxis] for tensor in (weights, recurrent, bias))
    aux_weights = None if aux is None else aux.array[np.newaxis]
    return _CellWeights(RnnCell(activation), inputs, hidden, biases, aux=aux_weights)


def _lstm_weights(
    tensors: LstmTensors[Tensor], activation: int, cell_clip: float, projection_clip: float
) -> _CellWeights:
    norms, peepholes, aux = (
        None if gates == NO_GATES else stacked_gates(gates, tensors.gates)
        for gates in (tensors.norm, tensors.peephole, tensors.aux)
    )
    is_cifg = len(tensors.gates) == 3
    cell = LstmCellUpdate(is_cifg, peepholes is not None, norms is not None, activation, cell_clip)
    inputs, recurrent, biases = (
        stacked_gates(gates, tensors.gates) for gates in (tensors.input, tensors.recurrent, tensors.bias)
    )
    projection = None
    if tensors.projection is not None:
        size = tensors.projection.shape[0]
        bias = np.zeros(size, np.float32) if tensors.projection_bias is None else tensors.projection_bias.array
        projection = _Projection(tensors.projection.array[np.newaxis], bias[np.newaxis], projection_clip)
    return _CellWeights(cell, inputs, recurrent, biases, norms, peepholes, projection, aux)


def stacked_gates(tensors: Gates[Tensor], gates: Sequence[int]) -> Array:
    """Return the tensors of `gates` as one array; a gate without a tensor gets 0."""
    like = next(tensor for tensor in tensors if tensor is not None)
    values = (tensors[gate] for gate in gates)
    return np.stack([np.zeros(like.shape, np.float32) if value is None else value.array for value in values])


# -- one step ---------------------------------------------------------------------------------------------------------


def _rnn(
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
    """Lower RNN. Its outputs are the hidden state, twice."""
    if input.dtype != _FLOAT:
        return None
    cell_weights = _rnn_weights(weights, recurrent, bias, activation)
    return _launch_step(cell_weights, input.shape[0], (_LAST_OUTPUT, _LAST_OUTPUT), target)


def _lstm(
    input: Tensor,
    *rest: Any,
    output: Sequence[Tensor],
    target: Target,
    activation: int,
    cell_clip: float,
    projection_clip: float,
) -> KernelLaunch | KernelSequence | None:
    """Lower LSTM. Its outputs are a scratch buffer, hidden and cell state, and the hidden state again."""
    if input.dtype != _FLOAT:
        return None
    weights = _lstm_weights(one_cell(rest)[0], activation, cell_clip, projection_clip)
    batch = input.shape[0]
    if weights.norms is not None:
        outputs = (_ZEROS, _LAST_OUTPUT, _LAST_STATE, _ALL_OUTPUTS)
        return _lower_sequence(weights, (1, batch), True, outputs, target)
    if weights.projection is None:
        return _launch_step(weights, batch, (_ZEROS, _LAST_OUTPUT, _LAST_STATE, _LAST_OUTPUT), target)
    step = _launch_step(weights, batch, (_LAST_OUTPUT, _ZEROS, _LAST_STATE), target)
    cell_outputs = (batch, weights.biases.shape[1])
    intermediate = Intermediate(step, (_INPUT, _HIDDEN, _STATE), _FLOAT, cell_outputs, outputs=(0, 2))
    gemv, constants = _plan_projection(weights.projection, target)
    projection = CellKernel(
        gemv, RnnCell(0, weights.projection.clip), batch, (gemv.k,), outputs=(_LAST_OUTPUT, _LAST_OUTPUT)
    )
    return KernelSequence((intermediate,), KernelLaunch(projection, constants, _estimate_ns(gemv, batch)), (3,))


def _launch_step(weights: _CellWeights, batch: int, outputs: tuple[OutputKind, ...], target: Target) -> KernelLaunch:
    """Return the launch of one step; inputs and hidden state are one vector, and so are their weights."""
    matrix = np.concatenate([weights.inputs, weights.recurrent], axis=2)
    gemv = weights.plan_gemv(matrix.shape[2], target)
    source_sizes = weights.inputs.shape[2], weights.recurrent.shape[2]
    kernel = CellKernel(gemv, weights.cell, batch, source_sizes, outputs)
    bias = weights.initial_accumulators(gemv).tobytes()
    constants = (gemv.pack_weights(matrix), bias, *weights.constants(gemv))
    return KernelLaunch(kernel, constants, _estimate_ns(gemv, batch))


def _plan_projection(projection: _Projection, target: Target) -> tuple[GateGemv, tuple[bytes, ...]]:
    _, size, units = projection.weights.shape
    gemv = plan_gate_gemv(1, size, units, target)
    return gemv, (gemv.pack_weights(projection.weights), gemv.pack_rows(projection.biases).tobytes())


def _estimate_ns(gemv: GateGemv, vectors: int) -> int:
    return gemv.multiplications * vectors // 16


# -- sequences --------------------------------------------------------------------------------------------------------


def _rnn_sequence(
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
    """Lower UNIDIRECTIONAL_SEQUENCE_RNN."""
    if input.dtype != _FLOAT:
        return None
    outputs = (_ALL_OUTPUTS,) if isinstance(output, Tensor) else (_ALL_OUTPUTS, _LAST_OUTPUT)
    cell_weights = _rnn_weights(weights, recurrent, bias, activation)
    steps = time_major_shape(input.shape, bool(time_major))[:2]
    return _lower_sequence(cell_weights, steps, bool(time_major), outputs, target)


def _lstm_sequence(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    activation: int,
    cell_clip: float,
    projection_clip: float,
    time_major: bool,
) -> KernelSequence | None:
    """Lower UNIDIRECTIONAL_SEQUENCE_LSTM."""
    if input.dtype != _FLOAT:
        return None
    outputs = (_ALL_OUTPUTS,) if isinstance(output, Tensor) else (_ALL_OUTPUTS, _LAST_OUTPUT, _LAST_STATE)
    weights = _lstm_weights(one_cell(rest)[0], activation, cell_clip, projection_clip)
    return _lower_sequence(weights, time_major_shape(input.shape, time_major)[:2], time_major, outputs, target)


def _lower_sequence(
    weights: _CellWeights, steps: Sequence[int], is_time_major: bool, outputs: tuple[OutputKind, ...], target: Target
) -> KernelSequence:
    """Return the input product and the sequence kernel for `steps` = (time, batch)."""
    gemv = weights.plan_gemv(weights.hidden_size, target)
    bias = weights.initial_accumulators(gemv)
    product = _input_product(weights.inputs, bias, gemv, _INPUT, math.prod(steps), target)
    states = range(_HIDDEN, _HIDDEN + weights.state_count)
    sequence = _launch_sequence(weights, gemv, steps, is_time_major, outputs, target)
    return KernelSequence((product,), sequence, (states.stop, *states))


def _input_product(inputs: Array, bias: Array, gemv: GateGemv, source: int, count: int, target: Target) -> Intermediate:
    """Return the GEMM of `count` input vectors with all gates' weights, plus `bias`, in `GateGemv.pack_rows` order."""
    weights = gemv.pack_rows(inputs).reshape(-1, inputs.shape[2])
    return Intermediate(gemm_of_rows(count, weights, bias, target), (source,), _FLOAT, (count, len(weights)))


def _launch_sequence(
    weights: _CellWeights,
    gemv: GateGemv,
    steps: Sequence[int],
    is_time_major: bool,
    outputs: tuple[OutputKind, ...],
    target: Target,
    is_backward: bool = False,
) -> KernelLaunch:
    time, batch = steps
    constants: tuple[bytes, ...] = (gemv.pack_weights(weights.recurrent), *weights.constants(gemv))
    projection, clip = None, 0.0
    if weights.projection is not None:
        projection, projection_constants = _plan_projection(weights.projection, target)
        constants, clip = constants + projection_constants, weights.projection.clip
    kernel = SequenceKernel(gemv, weights.cell, projection, clip, time, batch, is_time_major, outputs, is_backward)
    return KernelLaunch(kernel, constants, _estimate_ns(gemv, time * batch))


# -- bidirectional sequences ------------------------------------------------------------------------------------------


def _bidirectional_rnn(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    activation: int,
    time_major: bool,
    merge_outputs: bool,
) -> KernelSequence | None:
    """Lower BIDIRECTIONAL_SEQUENCE_RNN."""
    if input.dtype != _FLOAT:
        return None
    aux, *aux_weights = rest[8:]
    forward = _rnn_weights(rest[0], rest[1], rest[2], activation, aux_weights[0])
    backward = _rnn_weights(rest[4], rest[5], rest[6], activation, aux_weights[1])
    return _lower_bidirectional((forward, backward), input, aux, time_major, merge_outputs, output, target)


def _bidirectional_lstm(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    time_major: bool,
    merge_outputs: bool,
    **attributes: Any,
) -> KernelSequence | None:
    """Lower BIDIRECTIONAL_SEQUENCE_LSTM."""
    if input.dtype != _FLOAT:
        return None
    both = tuple(_lstm_weights(tensors, **attributes) for tensors in two_cells(rest))
    return _lower_bidirectional(both, input, rest[AUX], time_major, merge_outputs, output, target)


def _lower_bidirectional(
    both: Sequence[_CellWeights],
    input: Tensor,
    aux: Tensor | None,
    is_time_major: bool,
    merges_outputs: bool,
    output: Tensor | Sequence[Tensor],
    target: Target,
) -> KernelSequence | None:
    """Return the sequences of both directions and, if outputs are merged, their concatenation.

    DATA inputs: the input; the states of both cells; the auxiliary input, if there is one. With auxiliary weights its
    products are added to those of the input in both directions; without, it is the backward direction's input.
    """
    outputs = (output,) if isinstance(output, Tensor) else tuple(output)
    steps = time_major_shape(input.shape, is_time_major)[:2]
    result_count, state_count = 1 if merges_outputs else 2, both[0].state_count
    states = (_LAST_OUTPUT, _LAST_STATE)[:state_count] if len(outputs) > result_count else ()
    input_count = 1 + 2 * state_count + (aux is not None)
    aux_input = input_count - 1
    intermediates: list[Intermediate] = []
    results: list[int] = []  # numbers of the intermediates with all outputs of a direction
    for number, weights in enumerate(both):
        gemv = weights.plan_gemv(weights.hidden_size, target)
        reads_aux = bool(number) and aux is not None and weights.aux is None
        source, bias = aux_input if reads_aux else _INPUT, weights.initial_accumulators(gemv)
        intermediates.append(_input_product(weights.inputs, bias, gemv, source, math.prod(steps), target))
        if weights.aux is not None:
            last = input_count + len(intermediates) - 1
            intermediates += _add_aux_product(weights.aux, gemv, aux_input, last, intermediates[-1].shape, target)
        reads = (input_count + len(intermediates) - 1, *range(1 + number * state_count, 1 + (number + 1) * state_count))
        is_last = number == 1 and not merges_outputs
        output_kinds = (_ALL_OUTPUTS, *states) if merges_outputs or is_last else (_LAST_OUTPUT, _ALL_OUTPUTS, *states)
        sequence = _launch_sequence(weights, gemv, steps, is_time_major, output_kinds, target, is_backward=number == 1)
        if is_last:
            return KernelSequence(tuple(intermediates), sequence, reads)
        first_state = result_count + number * state_count
        written = (*(() if merges_outputs else (number,)), *range(first_state, first_state + len(states)))
        # A launch of a sequence writes an intermediate: the results to be merged, or else the last output, unused.
        size = weights.hidden_size
        shape = (*input.shape[:2], size) if merges_outputs else (steps[1], size)
        results.append(len(intermediates))
        intermediates.append(Intermediate(sequence, reads, _FLOAT, shape, written))
    parts = [Tensor(intermediates[number].shape, _FLOAT) for number in results]
    merged = lower_concatenation(*parts, output=outputs[0], target=target, axis=2)
    if merged is None:
        return None
    return KernelSequence(tuple(intermediates), merged, tuple(input_count + number for number in results))


def _add_aux_product(
    weights: Array, gemv: GateGemv, aux: int, input_product: int, shape: Shape, target: Target
) -> list[Intermediate]:
    """Return the product of the auxiliary input `aux`, and its sum with the value `input_product`, its predecessor."""
    zeros, product = np.zeros(shape[1], np.float32), Tensor(shape, _FLOAT)
    aux_product = _input_product(weights, zeros, gemv, aux, shape[0], target)
    total = lower_arithmetic("add", product, product, output=product, target=target, activation=0)
    assert total is not None, "float32 is added by a kernel"
    return [aux_product, Intermediate(total, (input_product, input_product + 1), _FLOAT, shape)]


# -- SVDF -------------------------------------------------------------------------------------------------------------


def _svdf(
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
    """Lower SVDF: a GEMM for the features, then the filters."""
    if input.dtype != _FLOAT:
        return None
    batch, (filters, memory_size) = input.shape[0], weights_time.shape
    units = filters // rank
    features = gemm_of_rows(batch, weights_feature.array, np.zeros(filters, np.float32), target)
    kernel = plan_svdf(batch, units, rank, memory_size, activation)
    biases = np.zeros(units, np.float32) if bias is None else bias.array
    intermediate = Intermediate(features, (_INPUT,), _FLOAT, (batch, filters))
    constants = (weights_time.array.tobytes(), biases.tobytes())
    estimated_ns = batch * filters * (memory_size + 8) // 4
    return KernelSequence((intermediate,), KernelLaunch(kernel, constants, estimated_ns), (2, 1))


RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM: _bidirectional_lstm,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN: _bidirectional_rnn,
    OperationType.LSTM: _lstm,
    OperationType.RNN: _rnn,
    OperationType.SVDF: _svdf,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM: _lstm_sequence,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN: _rnn_sequence,
}
