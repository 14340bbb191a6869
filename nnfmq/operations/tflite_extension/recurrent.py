"""Recurrent operations of TFLite in integers, with weights of 8 bits.

INTEGER_LSTM is one step or a sequence of steps of an LSTM with int16 gates and cell state. Its arithmetic is that of
the HAL's QUANTIZED_LSTM, except that as in TFLite the zero point of the hidden state is added, and the projection is
clipped with its zero point. INTEGER_SVDF shifts its memory before it appends the features of the input.

LSTM   C1 the input has rank 2 or 3       C2 to C9 and C13 are those of QUANTIZED_LSTM
       C10 peepholes with a projection have as many cells as outputs
SVDF   C11 shapes of input, weights, bias and state agree      C12 the rank divides the count of filters
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.int16_tables import tanh_table
from nnfmq.operations.lstm import GATES, TENSOR_COUNT, LstmTensors, cell_parameters, check_cell, gate_parameters
from nnfmq.operations.quantized_lstm import (
    Multiplier,
    PreparedQuantizedLstmCell,
    ScaledMatmul,
    cell_state_shift,
    float_multiplier,
    quantized_clip,
    quantized_gate,
    scale_quotient,
)
from nnfmq.operations.shapes import require
from nnfmq.operations.tflite_extension import declare

__all__ = ["DECLARATIONS", "lstm_shape", "plan_lstm", "plan_svdf", "svdf_shape"]

Shapes = tuple[Shape, ...]


def lstm_shape(
    input: Shape, *rest: Shape, cell_clip: float, projection_clip: float, time_major: bool, **_: Any
) -> Shapes:
    """Return the shapes of the output, the hidden state and the cell state."""
    require(len(input) in (2, 3), "C1", f"the input has shape {input}, required is (batch, size), or a sequence of it")
    require(cell_clip >= 0 and projection_clip >= 0, "C9", f"clips are {cell_clip} and {projection_clip}")
    hidden, state = rest[TENSOR_COUNT : TENSOR_COUNT + 2]
    batch = input[1 if len(input) == 3 and time_major else 0]
    cell = LstmTensors.of(rest[:TENSOR_COUNT], norm=rest[TENSOR_COUNT + 2 :])
    check_cell(cell, (batch, input[-1]), (hidden, state))
    equal = hidden == state or cell.peephole[3] is None
    require(equal, "C10", f"peepholes with {hidden[1]} outputs of {state[1]} cells")
    return (*input[:-1], hidden[1]), hidden, state


def plan_lstm(
    input: Tensor,
    *rest: Tensor,
    output: tuple[Tensor, ...],
    cell_clip: float,
    projection_clip: float,
    time_major: bool,
    hidden_state_zero_point: int,
    hidden_state_scale: float,
    **intermediate_scales: float,
) -> Run:
    """Plan all steps."""
    cell = LstmTensors.of(rest[:TENSOR_COUNT], norm=rest[TENSOR_COUNT + 2 :])
    previous, state = rest[TENSOR_COUNT : TENSOR_COUNT + 2]
    shift = cell_state_shift(state.scale)
    scales = tuple(intermediate_scales[f"{gate}_intermediate_scale"] for gate in GATES)
    packed = PreparedQuantizedLstmCell(
        tuple(quantized_gate(cell, gate, input, previous, shift, scales[gate]) for gate in cell.gates),
        shift,
        quantized_clip(cell_clip, state.scale, 32767),
        tanh_table(15 + shift),
        (float_multiplier(2.0**-30 / hidden_state_scale if hidden_state_scale else np.inf), -hidden_state_zero_point),
        _Projection.of(cell, previous, hidden_state_scale, hidden_state_zero_point, projection_clip),
    )
    is_sequence, shape = len(input.shape) == 3, output[0].shape

    def run(x: Array, hidden: Array, cells: Array) -> tuple[Array, ...]:
        steps = x if is_sequence and time_major else np.swapaxes(x, 0, 1) if is_sequence else x[np.newaxis]
        results = []
        for step in steps:
            hidden, cells, _ = packed.step(step, hidden, cells)
            results.append(hidden)
        stacked = np.stack(results)
        ordered = np.swapaxes(stacked, 0, 1) if is_sequence and not time_major else stacked
        return np.ascontiguousarray(ordered).reshape(shape), hidden, cells

    return run


class _Projection(Struct, frozen=True):
    """The projection of hidden values to outputs; none if `product` is None."""

    product: ScaledMatmul | None
    zero_point: int
    clip: int

    @classmethod
    def of(
        cls, cell: LstmTensors[Tensor], previous: Tensor, hidden_scale: float, hidden_zero_point: int, clip: float
    ) -> _Projection:
        weights = cell.projection
        if weights is None:
            return cls(None, 0, 0)
        multiplier = float_multiplier(scale_quotient(weights.scale, hidden_scale, by=previous.scale))
        product = ScaledMatmul.of(weights, hidden_zero_point, cell.projection_bias, multiplier)
        return cls(product, previous.zero_point, quantized_clip(clip, previous.scale, 127))

    def __call__(self, hidden: Ints) -> Ints:
        if self.product is None:
            return hidden
        outputs: Ints = np.clip(self.product.apply(hidden) + self.zero_point, -128, 127)
        return np.clip(outputs, -self.clip, self.clip) if self.clip > 0 else outputs


def svdf_shape(input: Shape, features: Shape, times: Shape, bias: Shape | None, state: Shape, *, rank: int) -> Shapes:
    """Return the shapes of the output and the state."""
    ranks = (len(input), len(features), len(times), len(state))
    require(ranks == (2, 2, 2, 2), "C11", f"input, weights and state have ranks {ranks}, required is 2")
    filters, memory = times
    require(rank > 0 and filters % rank == 0, "C12", f"rank {rank} of {filters} filters")
    units = filters // rank
    fits = features == (filters, input[1]) and state == (input[0], filters * memory) and bias in (None, (units,))
    require(fits, "C11", f"input {input}, weights {features} and {times}, bias {bias}, state {state}")
    return (input[0], units), state


def plan_svdf(
    input: Tensor,
    features: Tensor,
    times: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    output: tuple[Tensor, ...],
    rank: int,
) -> Run:
    """Plan one step."""
    of_features = ScaledMatmul.of(features, input.zero_point, None, _multiplier(input, features, state))
    weights, multiplier = ints(times.array), _multiplier(state, times, output[0])
    addend = 0 if bias is None else ints(bias.array)
    filters, memory = times.shape
    info = np.iinfo(state.dtype)

    def run(x: Array, memories: Array) -> tuple[Array, ...]:
        shifted = np.roll(memories.reshape(-1, filters, memory), -1, axis=2)
        newest = np.clip(of_features.apply(x), info.min, info.max) + state.zero_point
        shifted[:, :, -1] = newest.astype(state.dtype)
        sums = ((ints(shifted) - state.zero_point) * weights).sum(axis=2)
        units = sums.reshape(len(sums), -1, rank).sum(axis=2) + addend
        scaled = fixed_point.multiply(ints(units.astype(np.int32)), *multiplier) + output[0].zero_point
        return np.clip(scaled, -128, 127).astype(np.int8), shifted.reshape(memories.shape)

    return run


def _multiplier(first: Tensor, second: Tensor, result: Tensor) -> Multiplier:
    return float_multiplier(scale_quotient(first.scale, second.scale, by=result.scale))


DECLARATIONS = (
    declare(
        TfliteOperation.INTEGER_LSTM,
        op.data("input"),
        *cell_parameters(weights=op.Q8S, peepholes=op.Q16S, biases=op.I32),
        *(op.data("hidden_state"), op.data("cell_state", op.Q16S)),
        *gate_parameters("{}_layer_norm_weights", op.Q16S, optional=GATES),
        *(op.attribute("cell_clip", op.FLOAT32), op.attribute("projection_clip", op.FLOAT32)),
        op.attribute("time_major", op.BOOL),
        *(op.attribute(f"{gate}_intermediate_scale", op.FLOAT32) for gate in GATES),
        *(op.attribute("hidden_state_zero_point", op.INT32), op.attribute("hidden_state_scale", op.FLOAT32)),
        variants=(op.Variant({"T": op.Q8S}, op.V1_2, plan_lstm),),
        shape=lstm_shape,
        outputs=("T", "T", op.Q16S),
    ),
    declare(
        TfliteOperation.INTEGER_SVDF,
        *(
            op.data("input"),
            op.weight("features"),
            op.weight("times", "S"),
            op.weight("bias", op.I32, optional=True),
        ),
        *(op.data("state", "S"), op.attribute("rank")),
        variants=(
            op.Variant({"T": op.Q8S, "S": op.Q16S}, op.V1_2, plan_svdf),
            op.Variant({"T": op.Q8S, "S": op.Q8S}, op.V1_2, plan_svdf),
        ),
        shape=svdf_shape,
        outputs=("T", "S"),
    ),
)
