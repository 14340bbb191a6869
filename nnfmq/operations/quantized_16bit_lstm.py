"""QUANTIZED_16BIT_LSTM: one LSTM step of uint8 values with fixed scales.

Gates are accumulated in Q3.12, the state is in Q4.11, logistic and tanh are int16 tables (`fixed_point16`). Android's
kernel concatenates recurrent weights before input weights, but the input before the previous output, so that weights
are multiplied by other values than in the HAL's formulas. The HAL's test vectors have its results, so this does the
same.

    C1 input and states: (batch, size)                 C4 all weights have one scale and zero point
    C2 weights: (output size, input or output size)    C5 bias scale = weight scale / 128
    C3 biases: (output size,)                          C6 the state's scale is 2^-11, in and out
    Q6 input, previous output and output have scale 1/128 and zero point 128
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.fixed_point import Ints, ints, rounding_shift
from nnfmq.operations.fixed_point16 import high_mul, logistic_table, lut16, saturated, tanh_table
from nnfmq.operations.lstm_cell import gate_parameters
from nnfmq.operations.quantization import require_quantization
from nnfmq.operations.shapes import require

_ROWS = (0, 2, 1, 3)  # the gates' order in the matrix: input, cell, forget, output
_STATE_BITS = 4


def quantized_16bit_lstm_shape(input: Shape, *rest: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of the state and the output."""
    weights, biases, (state, previous) = rest[:8], rest[8:12], rest[12:]
    matched = len(input) == 2 and len(previous) == 2 and previous[0] == input[0] and state == previous
    require(matched, "C1", f"input, state and previous output have shapes {(input, state, previous)}")
    size = previous[1]
    wanted = ((size, input[1]),) * 4 + ((size, size),) * 4
    require(weights == wanted, "C2", f"weights have shapes {weights}, required are {wanted}")
    require(biases == ((size,),) * 4, "C3", f"biases have shapes {biases}, required is ({size},)")
    return state, previous


def check_quantization(input: Tensor, rest: Sequence[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Check C4-C6 and Q6."""
    first, (state, previous) = rest[0], rest[12:]
    for tensor in (input, previous, output[1]):
        require_quantization(tensor, 1 / 128, 128)
    for tensor in rest[1:8]:
        same = (tensor.scale, tensor.zero_point) == (first.scale, first.zero_point)
        require(same, "C4", f"weights have scales and zero points {tensor.scale, tensor.zero_point}, not the first's")
    for tensor in rest[8:12]:
        require(tensor.scale == first.scale / 128, "C5", f"bias scale {tensor.scale}, required is {first.scale / 128}")
    for tensor in (state, output[0]):
        fits = abs(math.log2(tensor.scale) + 15 - _STATE_BITS) < 1e-3
        require(fits, "C6", f"the state has scale {tensor.scale}, required is {2.0 ** (_STATE_BITS - 15)}")


def plan_quantized_16bit_lstm(input: Tensor, *rest: Tensor, output: tuple[Tensor, Tensor]) -> Run:
    """Plan one step."""
    check_quantization(input, rest, output)
    # All gates' weights as exact float64 (input and output sizes, 4 · output size), and their biases.
    rows = [np.concatenate([rest[4 + gate].array, rest[gate].array], axis=1) for gate in _ROWS]
    matrix = np.ascontiguousarray((np.concatenate(rows).astype(np.float64) - rest[0].zero_point).T)
    bias = np.concatenate([rest[8 + gate].array for gate in _ROWS]).astype(np.float64)
    multiplier, shift = fixed_point.quantize_multiplier(4096 * rest[8].scale)

    def run(input: Array, state: Array, previous: Array) -> tuple[Array, Array]:
        quantized = np.concatenate([input, previous], axis=1).astype(np.float64) - 128
        sums = ints((quantized @ matrix + bias).astype(np.int64).astype(np.int32))  # the accumulator wraps
        gates = saturated(fixed_point.multiply(sums, multiplier, shift))
        new_state, activations = _step(gates, ints(state))
        return new_state.astype(np.int16), activations.astype(np.uint8)

    return run


def _step(gates: Ints, state: Ints) -> tuple[Ints, Ints]:
    """Return the new state in Q4.11 and the quantized output, from gates in Q3.12."""
    entrance, modulation, forget, opened = np.split(gates, 4, axis=1)
    tanh, logistic = tanh_table(3), logistic_table()
    entered = high_mul(lut16(logistic, entrance), lut16(tanh, modulation))
    kept = high_mul(lut16(logistic, forget), state)
    state = saturated(rounding_shift(entered, _STATE_BITS) + kept)
    activated = lut16(tanh, saturated(state << (_STATE_BITS - 3)))
    result = rounding_shift(high_mul(lut16(logistic, opened), activated), 8)
    return state, np.clip(result, -128, 127) + 128


DECLARATIONS = (
    op.Declaration(
        OperationType.QUANTIZED_16BIT_LSTM,
        since=op.V1_2,
        overloads=(
            op.overload(
                op.data("input"),
                *gate_parameters("input_to_{}_weights", optional=()),
                *gate_parameters("recurrent_to_{}_weights", optional=()),
                *gate_parameters("{}_gate_bias", "B", optional=()),
                op.data("prev_cell_state", op.Q16S),
                op.data("prev_output"),
                level=op.V1_2,
            ),
        ),
        variants=(op.Variant({"T": op.Q8, "B": op.I32}, op.V1_2, plan_quantized_16bit_lstm),),
        shape=quantized_16bit_lstm_shape,
        outputs=(op.Q16S, "T"),
    ),
)
