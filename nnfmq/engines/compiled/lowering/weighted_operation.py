"""Operands and epilogues of convolutions and matrix products with constant weights: what their lowering rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.float32_multiplier import Float32Multiplier, float32_constants
from nnfmq.engines.compiled.kernels.requantize import (
    REQUANT_ROWS,
    FixedPointMultiplier,
    OutputQuantParams,
    RealMultiplier,
    Requantization,
    real_constants,
    requant_constants,
)
from nnfmq.engines.compiled.target import Target
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.quantization import (
    OutputMultipliers,
    quantized_activation_range,
    real_scales,
    requantization_scales,
)
from nnfmq.operations.shapes import WindowDimension, windows
from nnfmq.operations.signature import Array, Tensor

__all__ = [
    "Q8",
    "Epilogue",
    "WeightedOp",
    "Weights",
    "choose_epilogue",
    "image_and_windows",
    "is_float",
    "max_abs",
    "weight_range",
    "weight_zero_point_of",
    "with_folded_zero_point",
    "without_zero_point",
]

Weights: TypeAlias = Callable[[], Array]
"""Returns weights minus their zero point. Called only if needed: a cache may have them packed."""

Q8 = (np.dtype("u1"), np.dtype("i1"))
_FLOAT32 = np.dtype("<f4")


def image_and_windows(
    input: Tensor, filter: Tensor, conv_params: Mapping[str, int]
) -> tuple[int, int, int, int, WindowDimension, WindowDimension]:
    """Return batch, height, width and channels of the input, and the windows along its rows and columns.

    An image of one column is treated as one of one row, which has the same elements in the same order: kernels compute
    several pixels of a row at a time. Convolutions along time are often such images.
    """
    batch, height, width, channels = input.shape
    rows, columns = windows((height, width), filter.shape[1:3], **conv_params)
    if (width, columns.size, columns.padding_low, columns.count) == (1, 1, 0, 1):
        return batch, 1, height, channels, columns, rows
    return batch, height, width, channels, rows, columns


@dataclass(frozen=True, slots=True)
class WeightedOp:
    """The operands of a convolution or matrix product, and its GEMM `shape`; that is None for a depthwise convolution.

    `derived_weights`, if set, returns the weights in place of the filter's: (output channels, height, width, input
    channels per group), without the zero point. `rounds_once`: accumulators are multiplied by float64 numbers.
    """

    shape: ConvShape | None
    input: Tensor
    filter: Tensor
    bias: Tensor
    output: Tensor
    target: Target
    activation: int
    derived_weights: Weights | None = None
    rounds_once: bool = False

    @property
    def conv_shape(self) -> ConvShape:
        """The shape of a GEMM."""
        assert self.shape is not None, "only depthwise convolutions have none"
        return self.shape

    @property
    def is_signed(self) -> bool:
        """Whether the input is int8."""
        return self.input.dtype.kind == "i"

    def weights(self) -> Array:
        """Return the weights minus their zero point."""
        return without_zero_point(self.filter) if self.derived_weights is None else self.derived_weights()

    def weight_rows(self) -> Array:
        """Return the weights of each output channel as a row."""
        weights = self.weights()
        return weights.reshape(len(weights), -1)


def is_float(*tensors: Tensor) -> bool:
    """Return whether all tensors are float32."""
    return all(tensor.dtype == _FLOAT32 for tensor in tensors)


def without_zero_point(filter: Tensor) -> Array:
    """Return a filter's values: float32, or 8-bit values minus their zero point as int16."""
    if filter.dtype.kind == "f":
        return filter.array
    return filter.array.astype(np.int16) - np.int16(filter.zero_point)


def max_abs(tensor: Tensor) -> int:
    """Return the largest |value - zero point| of a tensor's type."""
    info = np.iinfo(tensor.dtype)
    return max(info.max - tensor.zero_point, tensor.zero_point - info.min)


def weight_range(filter: Tensor) -> tuple[int, int]:
    """Return minimum and maximum weight minus the zero point, of the filter and of the 0 that fills panels."""
    return min(int(filter.array.min()) - filter.zero_point, 0), max(int(filter.array.max()) - filter.zero_point, 0)


def weight_zero_point_of(filter: Tensor) -> int:
    """Return the smallest constant to subtract from weights so that int8 holds them, and the 0 that fills panels."""
    low, high = weight_range(filter)
    return max(high - 127, 0) + min(low + 128, 0)


# -- epilogues ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epilogue:
    """How accumulators become output values: rows of constants and a bias for each packed channel."""

    requantization: Requantization
    rows: Array
    bias: Ints
    quant: OutputQuantParams

    def constant(self, target: Target) -> bytes:
        """Return the constant that the kernel loads."""
        return self.requantization.constants(self.rows, self.bias, self.quant, target.lanes)


def choose_epilogue(
    op: WeightedOp, channel_map: Array, k: int, weight_rows: Weights, can_prescale: bool = True
) -> Epilogue | None:
    """Return the epilogue for the packed channels `channel_map`, or None if an accumulator may overflow int32.

    |acc| is bounded by K * max|w| * max|x|; if that is too large, by sum|w| * max|x| per channel, which needs the
    weights. `can_prescale`: weights may be packed doubled.
    """
    bias = ints(op.bias.array)[channel_map % len(op.bias.array)]
    output_min, output_max = quantized_activation_range(op.activation, op.output)
    quant = OutputQuantParams(op.output.zero_point, output_min, output_max, op.input.zero_point)
    multiplication = _real_multiplication if op.rounds_once else _fixed_point_multiplication
    any_weights = ints(np.full(len(channel_map), k * max_abs(op.filter) * max_abs(op.input)))
    found = multiplication(op, channel_map, bias, any_weights, quant, can_prescale)
    if found is None:
        sums = np.abs(weight_rows().astype(np.int32)).sum(axis=1, dtype=np.int64)
        found = multiplication(op, channel_map, bias, sums[channel_map] * max_abs(op.input), quant, can_prescale)
    if found is None:
        return None
    multiplier, rows = found
    return Epilogue(Requantization(multiplier), rows, bias, quant)


_Multiplication: TypeAlias = tuple[FixedPointMultiplier | Float32Multiplier | RealMultiplier, Array]
"""A multiplication of accumulators, and the rows of constants of the packed channels that it loads."""


def _real_multiplication(
    op: WeightedOp, channel_map: Array, bias: Ints, max_abs_acc: Ints, quant: OutputQuantParams, can_prescale: bool
) -> _Multiplication | None:
    found = RealMultiplier.of(bias, max_abs_acc)
    if found is None:
        return None
    factors = np.array(real_scales(op.input, op.filter, op.output))
    return found, real_constants(factors[channel_map % len(factors)])


def _fixed_point_multiplication(
    op: WeightedOp, channel_map: Array, bias: Ints, max_abs_acc: Ints, quant: OutputQuantParams, can_prescale: bool
) -> _Multiplication | None:
    """Return the fastest two-rounding multiplication, or None if one in int32 may overflow.

    The model may have one scale for all channels.
    """
    multipliers = OutputMultipliers.of(requantization_scales(op.input, op.filter, op.bias, op.output))
    multipliers = multipliers.of_channels(channel_map % len(multipliers.multipliers))
    fixed_point = FixedPointMultiplier.of(multipliers, bias, max_abs_acc, can_prescale)
    if fixed_point is None:
        return None
    results = (quant.output_min - quant.output_zero_point, quant.output_max - quant.output_zero_point)
    float32 = Float32Multiplier.of(multipliers, np.abs(bias) + max_abs_acc, results, op.target)
    if float32 is not None:
        return float32, float32_constants(multipliers, REQUANT_ROWS)
    return fixed_point, requant_constants(multipliers)


def with_folded_zero_point(op: WeightedOp, epilogue: Epilogue, weight_sums: Ints, lhs_is_signed: bool) -> bytes:
    """Return the constant of an epilogue whose accumulators contain input zero point * sum of the weights.

    The zero point is that of inputs as int8 if `lhs_is_signed`, else as uint8.
    """
    zero_point = op.input.zero_point + 128 * (op.is_signed - lhs_is_signed)
    quant = replace(epilogue.quant, input_zero_point=zero_point)
    return replace(epilogue, bias=epilogue.bias - zero_point * weight_sums, quant=quant).constant(op.target)
