"""Lowering rules of RNN, LSTM, their sequences, and SVDF.

A single step is one kernel, split into blocks of units. For a sequence, a GEMM multiplies the inputs of all time steps
with all gates' weights, then a kernel takes batch rows through time. A step with normalized gates is lowered as a
sequence of one step, because normalization needs all units of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.kernels.dynamic_quantization import Rule
from nnfmq.engines.compiled.kernels.dynamic_recurrent import DynamicSequenceKernel, QuantizedGates
from nnfmq.engines.compiled.kernels.recurrent import (
    CellKernel,
    FloatGates,
    GateGemv,
    GateProduct,
    LstmCellUpdate,
    OutputKind,
    RnnCell,
    SequenceKernel,
    plan_gate_gemv,
    rows_of_tile,
)
from nnfmq.engines.compiled.kernels.svdf import plan_svdf
from nnfmq.engines.compiled.lowering import (
    Constant,
    Intermediate,
    KernelLaunch,
    KernelSequence,
    LoweringRule,
    ViewOp,
    as_intermediates,
)
from nnfmq.engines.compiled.lowering.dynamic import (
    ByteGates,
    dynamic_gemm,
    quantized_input,
    quantized_product,
    rule_of,
)
from nnfmq.engines.compiled.lowering.elementwise import lower_arithmetic
from nnfmq.engines.compiled.lowering.movement import lower_concatenation
from nnfmq.engines.compiled.lowering.products import WeightedOp, gemm_of_rows, rows_shape
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import Scheme, extended_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Array, Shape, Tensor
from nnfmq.operations.lstm import AUX, NO_GATES, Gates, LstmTensors, one_cell, two_cells
from nnfmq.operations.recurrent_sequences import time_major_shape

__all__ = ["RULES"]

_FLOAT = np.dtype("<f4")
_INPUT, _HIDDEN, _STATE = range(3)  # numbers of the DATA inputs
_LSTM_INPUTS, _SVDF_INPUTS = 3, 2  # how many there are
_LAST_OUTPUT, _LAST_STATE, _ALL_OUTPUTS, _ZEROS = (
    OutputKind.LAST_OUTPUT,
    OutputKind.LAST_STATE,
    OutputKind.ALL_OUTPUTS,
    OutputKind.ZEROS,
)


class _GateWeights(Protocol):
    """Weights (gates, units, elements) by which rows are multiplied."""

    @property
    def shape(self) -> Shape:
        """Gates, units and elements."""
        ...

    def product(self, gemv: GateGemv) -> GateProduct:
        """Return the product with a row, for a kernel that takes rows through time."""
        ...

    def constants(self, gemv: GateGemv) -> tuple[Constant, ...]:
        """Return the constants of `product`."""
        ...

    def product_of_rows(self, gemv: GateGemv, bias: Array, count: int, target: Target) -> KernelLaunch | KernelSequence:
        """Return the product with `count` rows, plus `bias`, in the order of `GateGemv.pack_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class _FloatWeights:
    """Weights of float32."""

    values: Array

    @property
    def shape(self) -> Shape:
        return self.values.shape

    def product(self, gemv: GateGemv) -> FloatGates:
        return FloatGates(gemv)

    def constants(self, gemv: GateGemv) -> tuple[Constant, ...]:
        return (gemv.pack_weights(self.values),)

    def product_of_rows(self, gemv: GateGemv, bias: Array, count: int, target: Target) -> KernelLaunch:
        weights = gemv.pack_rows(self.values).reshape(-1, self.values.shape[2])
        return gemm_of_rows(count, weights, bias, target)


@dataclass(frozen=True, slots=True)
class _ByteWeights:
    """Weights of 8 bits; rows become bytes by a rule of TFLite."""

    gates: ByteGates
    rule: Rule

    @property
    def shape(self) -> Shape:
        return self.gates.shape

    def product(self, gemv: GateGemv) -> QuantizedGates:
        return QuantizedGates(self.gates.gemv(gemv), self.rule)

    def constants(self, gemv: GateGemv) -> tuple[Constant, ...]:
        return self.gates.constants(gemv, np.zeros_like(self.gates.factors))

    def product_of_rows(self, gemv: GateGemv, bias: Array, count: int, target: Target) -> KernelSequence:
        return self.gates.product_of_rows(gemv, bias, count, target, self.rule)


def _weights(tensors: Sequence[Tensor], rule: Rule | None) -> _GateWeights:
    """Return the weights (units, elements) of gates, for rows that become bytes by `rule` if there is one."""
    if rule is None:
        return _FloatWeights(np.stack([tensor.array for tensor in tensors]))
    gates = ByteGates.of(tensors)
    assert gates is not None, "the rules do not lower weights of float32 by which quantized rows are multiplied"
    return _ByteWeights(gates, rule)


@dataclass(frozen=True, slots=True)
class _Projection:
    """LSTM's projection from the cell's outputs to the hidden state: weights (1, size, units), biases (1, size)."""

    weights: _GateWeights
    biases: Array
    clip: float


@dataclass(frozen=True, slots=True)
class _CellWeights:
    """A cell with its weights (gates, units, k) and what else it has, (gates, units)."""

    cell: RnnCell | LstmCellUpdate
    inputs: _GateWeights
    recurrent: _GateWeights
    biases: Array
    norms: Array | None = None
    peepholes: Array | None = None
    projection: _Projection | None = None
    aux: _GateWeights | None = None

    @property
    def state_count(self) -> int:
        """Number of state arrays: the hidden state, and the cell state of an LSTM."""
        return 2 if self.cell.has_state else 1

    @property
    def hidden_size(self) -> int:
        """Elements of a row's hidden state."""
        return int(self.recurrent.shape[2])

    def plan_gemv(self, k: int, batch: int, target: Target) -> GateGemv:
        """Plan the product of the gates' weights with `batch` rows of `k` elements."""
        gates, units = self.cell.gates, self.biases.shape[1]
        return plan_gate_gemv(gates, units, k, target, rows_of_tile(gates, units, batch, target))

    def initial_accumulators(self, gemv: GateGemv) -> Array:
        """Return the biases as `GateGemv.emit` reads them; 0 if gates are normalized, whose biases are added later."""
        return gemv.pack_rows(self.biases if self.norms is None else np.zeros_like(self.biases)).reshape(-1)

    def constants(self, gemv: GateGemv) -> tuple[bytes, ...]:
        """Return the constants of the cell's update."""
        if isinstance(self.cell, RnnCell):
            return ()
        return (self.cell.constants(gemv, self.peepholes, self.norms, self.biases),)


def _rnn_weights(
    weights: Tensor, recurrent: Tensor, bias: Tensor, activation: int, rule: Rule | None, aux: Tensor | None = None
) -> _CellWeights:
    inputs, hidden = (_weights([tensor], rule) for tensor in (weights, recurrent))
    aux_weights = None if aux is None else _weights([aux], rule)
    return _CellWeights(RnnCell(activation), inputs, hidden, bias.array[np.newaxis], aux=aux_weights)


def _lstm_weights(
    tensors: LstmTensors[Tensor], rule: Rule | None, activation: int, cell_clip: float, projection_clip: float
) -> _CellWeights:
    norms, peepholes = (
        None if gates == NO_GATES else _stacked_gates(gates, tensors.gates)
        for gates in (tensors.norm, tensors.peephole)
    )
    is_cifg = len(tensors.gates) == 3
    cell = LstmCellUpdate(is_cifg, peepholes is not None, norms is not None, activation, cell_clip)
    inputs, recurrent, aux = (
        None if gates == NO_GATES else _weights(_given_gates(gates), rule)
        for gates in (tensors.input, tensors.recurrent, tensors.aux)
    )
    assert inputs is not None and recurrent is not None, "only auxiliary weights are optional"
    biases, projection = _stacked_gates(tensors.bias, tensors.gates), None
    if tensors.projection is not None:
        size = tensors.projection.shape[0]
        bias = np.zeros(size, np.float32) if tensors.projection_bias is None else tensors.projection_bias.array
        projection = _Projection(_weights([tensors.projection], rule), bias[np.newaxis], projection_clip)
    return _CellWeights(cell, inputs, recurrent, biases, norms, peepholes, projection, aux)


def _given_gates(tensors: Gates[Tensor]) -> list[Tensor]:
    """Return the tensors of the gates that have one."""
    return [tensor for tensor in tensors if tensor is not None]


def _stacked_gates(tensors: Gates[Tensor], gates: Sequence[int]) -> Array:
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
    rule: Rule | None = None,
) -> KernelLaunch | KernelSequence | None:
    """Lower RNN. Its outputs are the hidden state, twice. Rows become bytes by `rule`, if there is one."""
    if input.dtype != _FLOAT:
        return None
    found, outputs = _rnn_weights(weights, recurrent, bias, activation, rule), (_LAST_OUTPUT, _LAST_OUTPUT)
    if rule is not None:
        return _lower_sequence(found, (1, input.shape[0]), True, outputs, target)
    return _launch_step(found, input.shape[0], outputs, target)


def _lstm(
    input: Tensor,
    *rest: Any,
    output: Sequence[Tensor],
    target: Target,
    activation: int,
    cell_clip: float,
    projection_clip: float,
    rule: Rule | None = None,
) -> KernelLaunch | KernelSequence | None:
    """Lower LSTM. Its outputs are a scratch buffer, hidden and cell state, and the hidden state again."""
    if input.dtype != _FLOAT:
        return None
    weights = _lstm_weights(one_cell(rest)[0], rule, activation, cell_clip, projection_clip)
    batch = input.shape[0]
    if weights.norms is not None or rule is not None:
        outputs = (_ZEROS, _LAST_OUTPUT, _LAST_STATE, _ALL_OUTPUTS)
        return _lower_sequence(weights, (1, batch), True, outputs, target)
    if weights.projection is None:
        return _launch_step(weights, batch, (_ZEROS, _LAST_OUTPUT, _LAST_STATE, _LAST_OUTPUT), target)
    step = _launch_step(weights, batch, (_LAST_OUTPUT, _ZEROS, _LAST_STATE), target)
    cell_outputs = (batch, weights.biases.shape[1])
    intermediate = Intermediate(step, (_INPUT, _HIDDEN, _STATE), _FLOAT, cell_outputs, outputs=(0, 2))
    product, constants = _plan_projection(weights.projection, 1, target)
    gemv = product.gemv
    projection = CellKernel(
        gemv, RnnCell(0, weights.projection.clip), batch, (gemv.k,), outputs=(_LAST_OUTPUT, _LAST_OUTPUT)
    )
    return KernelSequence((intermediate,), KernelLaunch(projection, constants, _estimate_ns(gemv, batch)), (3,))


def _launch_step(weights: _CellWeights, batch: int, outputs: tuple[OutputKind, ...], target: Target) -> KernelLaunch:
    """Return the launch of one step of floats; inputs and hidden state are one vector, and so are their weights."""
    assert isinstance(weights.inputs, _FloatWeights) and isinstance(weights.recurrent, _FloatWeights), "rules check it"
    matrix = np.concatenate([weights.inputs.values, weights.recurrent.values], axis=2)
    gemv = weights.plan_gemv(matrix.shape[2], batch, target)
    source_sizes = weights.inputs.shape[2], weights.recurrent.shape[2]
    kernel = CellKernel(gemv, weights.cell, batch, source_sizes, outputs)
    bias = weights.initial_accumulators(gemv).tobytes()
    constants = (gemv.pack_weights(matrix), bias, *weights.constants(gemv))
    return KernelLaunch(kernel, constants, _estimate_ns(gemv, batch))


def _plan_projection(projection: _Projection, rows: int, target: Target) -> tuple[GateProduct, tuple[Constant, ...]]:
    """Plan the projection of cells that are computed `rows` at a time."""
    _, size, units = projection.weights.shape
    gemv, weights = plan_gate_gemv(1, size, units, target, rows), projection.weights
    return weights.product(gemv), (*weights.constants(gemv), gemv.pack_rows(projection.biases).tobytes())


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
    rule: Rule | None = None,
) -> KernelSequence | None:
    """Lower UNIDIRECTIONAL_SEQUENCE_RNN."""
    if input.dtype != _FLOAT:
        return None
    outputs = (_ALL_OUTPUTS,) if isinstance(output, Tensor) else (_ALL_OUTPUTS, _LAST_OUTPUT)
    cell_weights = _rnn_weights(weights, recurrent, bias, activation, rule)
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
    rule: Rule | None = None,
) -> KernelSequence | None:
    """Lower UNIDIRECTIONAL_SEQUENCE_LSTM."""
    if input.dtype != _FLOAT:
        return None
    outputs = (_ALL_OUTPUTS,) if isinstance(output, Tensor) else (_ALL_OUTPUTS, _LAST_OUTPUT, _LAST_STATE)
    weights = _lstm_weights(one_cell(rest)[0], rule, activation, cell_clip, projection_clip)
    return _lower_sequence(weights, time_major_shape(input.shape, time_major)[:2], time_major, outputs, target)


def _lower_sequence(
    weights: _CellWeights, steps: Sequence[int], is_time_major: bool, outputs: tuple[OutputKind, ...], target: Target
) -> KernelSequence:
    """Return the input product and the sequence kernel for `steps` = (time, batch)."""
    gemv = weights.plan_gemv(weights.hidden_size, steps[1], target)
    states = range(_HIDDEN, _HIDDEN + weights.state_count)
    bias = weights.initial_accumulators(gemv)
    products = _input_product(weights.inputs, bias, gemv, (_INPUT, states.stop), math.prod(steps), target)
    sequence = _launch_sequence(weights, gemv, steps, is_time_major, outputs, target)
    return KernelSequence(tuple(products), sequence, (states.stop + len(products) - 1, *states))


def _input_product(
    inputs: _GateWeights, bias: Array, gemv: GateGemv, numbers: tuple[int, int], count: int, target: Target
) -> list[Intermediate]:
    """Return the launches that multiply `count` input vectors by all gates' weights, and add `bias`.

    The last one writes the products in the order of `GateGemv.pack_rows`. `numbers` are those of the value with the
    inputs, and of the first intermediate.
    """
    product = inputs.product_of_rows(gemv, bias, count, target)
    return as_intermediates(product, *numbers, _FLOAT, (count, gemv.gates * gemv.padded_units))


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
    constants: tuple[Constant, ...] = (*weights.recurrent.constants(gemv), *weights.constants(gemv))
    projection, clip = None, 0.0
    if weights.projection is not None:
        projection, projection_constants = _plan_projection(weights.projection, gemv.rows, target)
        constants, clip = constants + projection_constants, weights.projection.clip
    gates = weights.recurrent.product(gemv)
    kernel = SequenceKernel(gates, weights.cell, projection, clip, time, batch, is_time_major, outputs, is_backward)
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
    rule: Rule | None = None,
) -> KernelSequence | None:
    """Lower BIDIRECTIONAL_SEQUENCE_RNN."""
    if input.dtype != _FLOAT:
        return None
    aux, *aux_weights = rest[8:]
    forward = _rnn_weights(rest[0], rest[1], rest[2], activation, rule, aux_weights[0])
    backward = _rnn_weights(rest[4], rest[5], rest[6], activation, rule, aux_weights[1])
    return _lower_bidirectional((forward, backward), input, aux, time_major, merge_outputs, output, target)


def _bidirectional_lstm(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    time_major: bool,
    merge_outputs: bool,
    rule: Rule | None = None,
    **attributes: Any,
) -> KernelSequence | None:
    """Lower BIDIRECTIONAL_SEQUENCE_LSTM."""
    if input.dtype != _FLOAT:
        return None
    both = tuple(_lstm_weights(tensors, rule, **attributes) for tensors in two_cells(rest))
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
        gemv = weights.plan_gemv(weights.hidden_size, steps[1], target)
        reads_aux = bool(number) and aux is not None and weights.aux is None
        sources = aux_input if reads_aux else _INPUT, aux_input
        intermediates += _products(weights, gemv, sources, input_count + len(intermediates), math.prod(steps), target)
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


def _products(
    weights: _CellWeights, gemv: GateGemv, sources: tuple[int, int], first: int, rows: int, target: Target
) -> list[Intermediate]:
    """Return the launches of a cell's products with its inputs, the last of which writes the sums of all gates.

    `sources` are the numbers of the input and of the auxiliary input, `first` that of the first launch's result.
    """
    bias = weights.initial_accumulators(gemv)
    found = [*_input_product(weights.inputs, bias, gemv, (sources[0], first), rows, target)]
    if weights.aux is not None:
        found += _add_aux_product(weights.aux, gemv, (sources[1], first + len(found)), found[-1].shape, target)
    return found


def _add_aux_product(
    weights: _GateWeights, gemv: GateGemv, numbers: tuple[int, int], shape: Shape, target: Target
) -> list[Intermediate]:
    """Return the product of the auxiliary input and its sum with the product of the input, the value before the first.

    `numbers` are as in `_input_product`.
    """
    zeros, product = np.zeros(shape[1], np.float32), Tensor(shape, _FLOAT)
    launches = _input_product(weights, zeros, gemv, numbers, shape[0], target)
    total = lower_arithmetic("add", product, product, output=product, target=target, activation=0)
    assert total is not None, "float32 is added by a kernel"
    _, first = numbers
    return [*launches, Intermediate(total, (first - 1, first + len(launches) - 1), _FLOAT, shape)]


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
    rule: Rule | None = None,
) -> KernelSequence | None:
    """Lower SVDF: a GEMM for the features, then the filters."""
    if input.dtype != _FLOAT:
        return None
    batch, (filters, memory_size) = input.shape[0], weights_time.shape
    units, zeros = filters // rank, np.zeros(filters, np.float32)
    if rule is None:
        product: KernelLaunch | KernelSequence = gemm_of_rows(batch, weights_feature.array, zeros, target)
    else:
        result, no_bias = Tensor((batch, filters), _FLOAT), Tensor((filters,), _FLOAT, value=zeros)
        shape = rows_shape(batch, input.shape[1], filters)
        op = WeightedOp(shape, input, weights_feature, no_bias, result, target, 0)
        product = quantized_product(op, rule)
    features = as_intermediates(product, _INPUT, _SVDF_INPUTS, _FLOAT, (batch, filters))
    kernel = plan_svdf(batch, units, rank, memory_size, activation)
    biases = np.zeros(units, np.float32) if bias is None else bias.array
    constants = (weights_time.array.tobytes(), biases.tobytes())
    estimated_ns = batch * filters * (memory_size + 8) // 4
    last = KernelLaunch(kernel, constants, estimated_ns)
    return KernelSequence(tuple(features), last, (_SVDF_INPUTS + len(features) - 1, 1))


# -- rows that are quantized at run time ------------------------------------------------------------------------------


def _dynamic_lstm_sequence(
    input: Tensor,
    *rest: Any,
    output: Tensor | Sequence[Tensor],
    target: Target,
    activation: int,
    cell_clip: float,
    projection_clip: float,
    time_major: bool,
) -> KernelSequence | None:
    """DYNAMIC_UNIDIRECTIONAL_SEQUENCE_LSTM with weights of 8 bits, without normalization and projection."""
    cell, _ = one_cell(rest)
    inputs, recurrent = (ByteGates.of(_given_gates(gates)) for gates in (cell.input, cell.recurrent))
    if inputs is None or recurrent is None or cell.norm != NO_GATES or cell.projection is not None or 0 in input.shape:
        return None
    time, batch, elements = time_major_shape(input.shape, bool(time_major))
    is_cifg, peepholes = len(cell.gates) == 3, None
    if cell.peephole != NO_GATES:
        peepholes = _stacked_gates(cell.peephole, cell.gates)
    update = LstmCellUpdate(is_cifg, peepholes is not None, False, activation, cell_clip)
    gates, units, hidden = recurrent.shape
    gemv = plan_gate_gemv(gates, units, hidden, target, rows_of_tile(gates, units, batch, target))
    biases = _stacked_gates(cell.bias, cell.gates)
    quantize = quantized_input(time * batch * elements, _INPUT, _LSTM_INPUTS)
    width = gemv.gates * gemv.padded_units
    op = inputs.rows_operation(gemv, np.zeros(width, np.float32), time * batch, target)
    product = Intermediate(dynamic_gemm(op, rounds_bias=False), (_LSTM_INPUTS + 1,), _FLOAT, (time * batch, width))
    kinds = (_ALL_OUTPUTS, _LAST_OUTPUT, _LAST_STATE)[: 1 if isinstance(output, Tensor) else len(output)]
    kernel = DynamicSequenceKernel(recurrent.gemv(gemv), update, time, batch, bool(time_major), kinds)
    constants = (*recurrent.constants(gemv, biases), update.constants(gemv, peepholes, None, biases))
    launch = KernelLaunch(kernel, constants, gemv.multiplications * time * batch // 64)
    return KernelSequence((*quantize, product), launch, (_LSTM_INPUTS + 2, _HIDDEN, _STATE))


def _hybrid(lower: LoweringRule) -> LoweringRule:
    """Return the rule of the operation with weights of 8 bits, from that of the operation on floats.

    The interpreter computes the same with weights of float32.
    """

    def lower_hybrid(*tensors: Tensor | None, asymmetric: bool, **others: Any) -> KernelLaunch | KernelSequence | None:
        has_bytes = any(tensor is not None and tensor.dtype.itemsize == 1 for tensor in tensors)
        lowered = lower(*tensors, rule=rule_of(asymmetric), **others) if has_bytes else None
        assert not isinstance(lowered, ViewOp), "a recurrent operation computes something"
        return lowered

    return lower_hybrid


_FLOAT_RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM: _bidirectional_lstm,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN: _bidirectional_rnn,
    OperationType.LSTM: _lstm,
    OperationType.RNN: _rnn,
    OperationType.SVDF: _svdf,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM: _lstm_sequence,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN: _rnn_sequence,
}
RULES: Mapping[OperationType, LoweringRule] = {
    **_FLOAT_RULES,
    **{extended_code(code, Scheme.HYBRID): _hybrid(rule) for code, rule in _FLOAT_RULES.items()},
    extended_code(OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM, Scheme.DYNAMIC): _dynamic_lstm_sequence,
}
