"""QUANTIZED_LSTM and QUANTIZED_16BIT_LSTM: one step of an LSTM cell in integers.

QUANTIZED_LSTM has int8 weights, int16 gates and state, and any scales. The cell's tensors, variants and constraints C2
to C9 are those of `lstm`. Each gate is accumulated in Q3.12, saturated to int16 after every addend. TFLite's kernel
departs from the operation's definition in four places; this follows the definition: peepholes of the input and forget
gates read the previous state (TFLite reads its output buffer before writing it), biases are added without layer
normalization too, the projection's clip is in the output's scale (not the weights'), and the minimum variance is at
least 1.

QUANTIZED_LSTM        C1 the input has rank 2                   C14 the hidden state's zero point fits int8
                      C13 the state's scale is 2^-15 to 2^-9    Q1 every effective scale is a requantization scale
QUANTIZED_16BIT_LSTM  C1 input and states: (batch, size)                 C4 all weights have one scale and zero point
                      C2 weights: (output size, input or output size)    C5 bias scale = weight scale / 128
                      C3 biases: (output size,)                          C6 the state's scale is 2^-11, in and out
                      Q6 input, previous output and output have scale 1/128 and zero point 128
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.fixed_point import IN_16_BITS, Ints, high_mul, ints, rounding_shift, saturated
from nnfmq.operations.int16_tables import ONE_Q0, logistic_table, lut16, tanh_table
from nnfmq.operations.lstm import GATES, TENSOR_COUNT, LstmTensors, cell_parameters, check_cell, gate_parameters
from nnfmq.operations.normalization import inverse_square_root
from nnfmq.operations.quantization import require_quantization
from nnfmq.operations.shapes import require

Shapes: TypeAlias = tuple[Shape, ...]
Tensors: TypeAlias = tuple[Tensor, ...]
Multiplier: TypeAlias = tuple[int, int]

_high_mul, _saturated = partial(high_mul, bits=IN_16_BITS), partial(saturated, bits=IN_16_BITS)


def quantized_lstm_shape(input: Shape, *rest: Shape, cell_clip: float, projection_clip: float, **_: Any) -> Shapes:
    """Return the shapes of the output state, the cell state and the output."""
    require(len(input) == 2, "C1", f"the input has shape {input}, required is (batch, input size)")
    require(cell_clip >= 0 and projection_clip >= 0, "C9", f"clips are {cell_clip} and {projection_clip}")
    hidden, state = rest[TENSOR_COUNT : TENSOR_COUNT + 2]
    check_cell(LstmTensors.of(rest[:TENSOR_COUNT], norm=rest[TENSOR_COUNT + 2 :]), input, (hidden, state))
    return hidden, state, hidden


# -- parts of a gate --------------------------------------------------------------------------------------------------


def float_multiplier(real: float) -> Multiplier:
    """Return multiplier and shift of a scale, which TFLite stores in float32."""
    return fixed_point.quantize_multiplier(float(np.float32(real)))


def scale_quotient(*factors: float, by: float) -> float:
    """Return the product of `factors` divided by `by`, in float32."""
    product = np.float32(1)
    for factor in factors:
        product = product * np.float32(factor)
    return float(product / np.float32(by))


class ScaledMatmul(Struct, frozen=True):
    """An exact product of quantized rows with a matrix, requantized."""

    matrix: Array
    bias: Array
    multiplier: Multiplier

    @classmethod
    def of(cls, weights: Tensor, zero_point: int, bias: Tensor | None, multiplier: Multiplier) -> ScaledMatmul:
        """Fold the input's zero point into the bias."""
        matrix = weights.array.astype(np.float64).T.copy()
        folded = -zero_point * matrix.sum(axis=0)
        return cls(matrix, folded if bias is None else folded + bias.array, multiplier)

    def apply(self, quantized: Array) -> Ints:
        """Return the requantized products of quantized rows."""
        sums = quantized.astype(np.float64) @ self.matrix + self.bias
        wrapped = ints(sums.astype(np.int64).astype(np.int32))  # the accumulator wraps
        return fixed_point.multiply(wrapped, *self.multiplier)


class QuantizedLayerNorm(Struct, frozen=True):
    """Layer normalization of int16 values, with the mean in Q10 and the inverse deviation as multiplier and shift."""

    weights: Ints
    bias: Ints
    multiplier: Multiplier
    min_variance: int

    @classmethod
    def of(cls, weights: Tensor, bias: Tensor) -> QuantizedLayerNorm:
        """Prepare the weights, their scale and the gate's bias, whose scale has 10 more bits."""
        multiplier, shift = float_multiplier(weights.scale)
        guard = max(1, int(np.float32(10000) * np.float32(weights.scale)))
        return cls(ints(weights.array), ints(bias.array), (multiplier, shift + 12), guard)

    def apply(self, values: Ints) -> Ints:
        """Normalize each row, multiply by the weights and add the bias."""
        count = values.shape[1]
        mean = _toward_zero(values.sum(axis=1, keepdims=True) * 1024, count)
        squares = np.square(values).sum(axis=1, keepdims=True)
        variance = _toward_zero(squares * ((1 << 20) // count) - mean * mean, 1 << 20)
        inverse, shift = inverse_square_root(np.where(variance < 1, self.min_variance, variance))
        rescaled = fixed_point.multiply(1024 * values - mean, inverse, -shift)
        weighted = rescaled * self.weights + self.bias
        rounded = _toward_zero(weighted + np.where(weighted > 0, 512, -512), 1024)
        return _saturated(fixed_point.multiply(rounded, *self.multiplier))


def _toward_zero(values: Ints, divisor: int) -> Ints:
    result: Ints = np.sign(values) * (np.abs(values) // divisor)
    return result


class QuantizedGate(Struct, frozen=True):
    """The products, peephole, layer norm and activation table of one gate."""

    input: ScaledMatmul
    recurrent: ScaledMatmul
    peephole: tuple[Ints, Multiplier] | None
    norm: QuantizedLayerNorm | None
    table: Ints

    def apply(self, quantized: Array, hidden: Array, state: Ints) -> Ints:
        """Return the activated gate in Q0."""
        sums = _saturated(self.input.apply(quantized))
        sums = _saturated(sums + self.recurrent.apply(hidden))
        if self.peephole is not None:
            weights, multiplier = self.peephole
            sums = _saturated(sums + fixed_point.multiply(weights * state, *multiplier))
        return lut16(self.table, sums if self.norm is None else self.norm.apply(sums))


# -- the cell ---------------------------------------------------------------------------------------------------------


class PreparedQuantizedLstmCell(Struct, frozen=True):
    """A cell with packed weights; `gates` are input, forget, cell and output, without the first if it is coupled."""

    gates: tuple[QuantizedGate, ...]
    shift: int
    clip: int
    tanh: Ints
    hidden: tuple[Multiplier, int]
    project: Callable[[Ints], Ints]

    def step(self, quantized: Array, hidden: Array, state: Array) -> tuple[Array, ...]:
        """Return the output state, the cell state and the output."""
        old = ints(state)
        *entry, forget, candidate = [gate.apply(quantized, hidden, old) for gate in self.gates[:-1]]
        entrance = entry[0] if entry else ONE_Q0 - forget
        new = _saturated(rounding_shift(forget * old, 15) + rounding_shift(entrance * candidate, 30 + self.shift))
        if self.clip > 0:
            new = np.clip(new, -self.clip, self.clip)
        opened = self.gates[-1].apply(quantized, hidden, new)
        multiplier, zero_point = self.hidden
        scaled = fixed_point.multiply(opened * lut16(self.tanh, new), *multiplier) - zero_point
        output = self.project(_int8(scaled)).astype(np.int8)
        return output, new.astype(np.int16), output


def _int8(values: Ints) -> Ints:
    result: Ints = np.clip(values, -128, 127)
    return result


def plan_quantized_lstm(
    input: Tensor,
    *rest: Tensor,
    output: Tensors,
    cell_clip: float,
    projection_clip: float,
    hidden_state_zero_point: int,
    hidden_state_scale: float,
    **intermediate_scales: float,
) -> Run:
    """Plan one step."""
    cell = LstmTensors.of(rest[:TENSOR_COUNT], norm=rest[TENSOR_COUNT + 2 :])
    previous, state = rest[TENSOR_COUNT : TENSOR_COUNT + 2]
    shift = cell_state_shift(state.scale)
    require(
        -128 <= hidden_state_zero_point <= 127,
        "C14",
        f"hidden state's zero point {hidden_state_zero_point}, -128 to 127 is required",
    )
    scales = tuple(intermediate_scales[f"{gate}_intermediate_scale"] for gate in GATES)
    packed = PreparedQuantizedLstmCell(
        tuple(quantized_gate(cell, gate, input, previous, shift, scales[gate]) for gate in cell.gates),
        shift,
        quantized_clip(cell_clip, state.scale, 32767),
        tanh_table(15 + shift),
        (float_multiplier(2.0**-30 / hidden_state_scale if hidden_state_scale else np.inf), hidden_state_zero_point),
        _projection(cell, previous, hidden_state_scale, hidden_state_zero_point, projection_clip),
    )
    return packed.step


def quantized_clip(clip: float, scale: float, maximum: int) -> int:
    """Return a clip in quantized values, at most `maximum`."""
    return int(min(float(np.float32(clip) / np.float32(scale)), maximum))


def cell_state_shift(scale: float) -> int:
    """Return log2 of the cell state's scale (C13)."""
    exact = math.log2(scale)
    shift = round(exact)
    valid = abs(exact - shift) < 1e-3 and -15 <= shift <= -9
    require(valid, "C13", f"the cell state has scale {scale}, a power of 2 from 2^-15 to 2^-9 is required")
    return shift


def quantized_gate(
    cell: LstmTensors[Tensor], gate: int, input: Tensor, previous: Tensor, shift: int, scale: float
) -> QuantizedGate:
    """Return a gate with packed weights; `scale` is that of its sum, `shift` log2 of the cell state's."""
    weights, recurrent, bias = cell.input[gate], cell.recurrent[gate], cell.bias[gate]
    peephole, norm = cell.peephole[gate], cell.norm[gate]
    assert weights is not None and recurrent is not None and bias is not None, "check_cell requires them"
    of_input = float_multiplier(scale_quotient(weights.scale, input.scale, by=scale))
    of_previous = float_multiplier(scale_quotient(recurrent.scale, previous.scale, by=scale))
    looked_at = None
    if peephole is not None:
        looked_at = (ints(peephole.array), float_multiplier(scale_quotient(2.0**shift, peephole.scale, by=scale)))
    return QuantizedGate(
        ScaledMatmul.of(weights, input.zero_point, bias if norm is None else None, of_input),
        ScaledMatmul.of(recurrent, previous.zero_point, None, of_previous),
        looked_at,
        None if norm is None else QuantizedLayerNorm.of(norm, bias),
        tanh_table(3) if gate == 2 else logistic_table(),
    )


def _projection(
    cell: LstmTensors[Tensor], previous: Tensor, hidden_scale: float, hidden_zero_point: int, clip: float
) -> Callable[[Ints], Ints]:
    """Return the projection of hidden values to outputs.

    `PreparedQuantizedLstmCell.step` subtracts the hidden zero point instead of adding it, hence the negative sign.
    """
    if cell.projection is None:
        return lambda hidden: hidden
    multiplier = float_multiplier(scale_quotient(cell.projection.scale, hidden_scale, by=previous.scale))
    product = ScaledMatmul.of(cell.projection, -hidden_zero_point, cell.projection_bias, multiplier)
    limit = quantized_clip(clip, previous.scale, 255) if clip > 0 else 255

    def project(hidden: Ints) -> Ints:
        return _int8(np.clip(product.apply(hidden), -limit, limit) + previous.zero_point)

    return project


# ----------------------------------------------------------------------------------------------------------------------
# QUANTIZED_16BIT_LSTM: one step of uint8 values with fixed scales.
#
# Gates are accumulated in Q3.12, the state is in Q4.11, logistic and tanh are int16 tables. Android's kernel
# concatenates recurrent weights before input weights, but the input before the previous output, so that weights are
# multiplied by other values than in the HAL's formulas. The HAL's test vectors have its results, so this does the same.


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
        gates = _saturated(fixed_point.multiply(sums, multiplier, shift))
        new_state, activations = _step(gates, ints(state))
        return new_state.astype(np.int16), activations.astype(np.uint8)

    return run


def _step(gates: Ints, state: Ints) -> tuple[Ints, Ints]:
    """Return the new state in Q4.11 and the quantized output, from gates in Q3.12."""
    entrance, modulation, forget, opened = np.split(gates, 4, axis=1)
    tanh, logistic = tanh_table(3), logistic_table()
    entered = _high_mul(lut16(logistic, entrance), lut16(tanh, modulation))
    kept = _high_mul(lut16(logistic, forget), state)
    state = _saturated(rounding_shift(entered, _STATE_BITS) + kept)
    activated = lut16(tanh, _saturated(state << (_STATE_BITS - 3)))
    result = rounding_shift(_high_mul(lut16(logistic, opened), activated), 8)
    return state, np.clip(result, -128, 127) + 128


DECLARATIONS = (
    op.Declaration(
        OperationType.QUANTIZED_LSTM,
        since=op.V1_3,
        overloads=(
            op.overload(
                op.data("input"),
                *cell_parameters(weights=op.S8, peepholes=op.Q16S, biases=op.I32),
                *(op.data("output_state_in"), op.data("cell_state_in", op.Q16S)),
                *gate_parameters("{}_layer_norm_weights", op.Q16S, optional=GATES),
                *(op.attribute("cell_clip", op.FLOAT32), op.attribute("projection_clip", op.FLOAT32)),
                *(op.attribute(f"{gate}_intermediate_scale", op.FLOAT32) for gate in GATES),
                *(op.attribute("hidden_state_zero_point", op.INT32), op.attribute("hidden_state_scale", op.FLOAT32)),
                level=op.V1_3,
            ),
        ),
        variants=(op.Variant({"T": op.Q8S}, op.V1_3, plan_quantized_lstm),),
        shape=quantized_lstm_shape,
        outputs=("T", op.Q16S, "T"),
    ),
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
