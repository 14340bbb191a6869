"""Convolutions and matrix products of 16-bit tensors with 8-bit weights, and BATCH_MATMUL of 16-bit tensors.

Sums of products are exact in float64. With a bias of INT32 they wrap at 32 bits and are requantized as those of 8-bit
tensors; else they are requantized from 64 bits, by 16 bits of the multiplier. As in TFLite, the scales are multiplied
in float64; FULLY_CONNECTED multiplies the sums by them in float64, and rounds once.

    C1 to C6 are those of the HAL's operations     C7 weights and bias: the zero point is 0
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.tflite_codes import TENSOR_INT64
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import batch_matmul, convolution, fixed_point, fully_connected, grouped_conv, transpose_conv
from nnfmq.operations.convolution import accumulate_taps, convolve, require_channel_dim
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.grouped_conv import convolve_groups
from nnfmq.operations.packed_matmul import PackedMatmul
from nnfmq.operations.quantization import Epilogue, OutputMultipliers, quantized_activation_range, real_scales
from nnfmq.operations.shapes import require, windows
from nnfmq.operations.signature import I32, PC, Q8S, V1_2, Array, Run, Tensor, attribute, data, overload, weight
from nnfmq.operations.tflite_extension.sixteen_bits import (
    find,
    multiply_wide,
    reduced_multiplier,
    rounded,
    saturated,
    sixteen_bit,
)
from nnfmq.operations.transpose_conv import scatter_taps, transposed_conv_dimensions

_EXACT_SUM = 1 << 37  # times a reduced multiplier, and half of the divisor added, it is exact in float64
_LARGEST = 1 << 15  # magnitude of an input


def plan_convolution(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: int
) -> Run:
    """Plan CONV_2D."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = _packed(input, filter, bias, output, activation, columns.count)
    return convolve(matmul, input, rows, columns, filter.shape[0], 0)


def plan_grouped(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, groups: int, activation: int, **conv_params: int
) -> Run:
    """Plan a convolution in groups."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = _packed(input, filter, bias, output, activation, columns.count)
    return convolve_groups(matmul, groups, output, rows, columns, 0)


def _packed(input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int) -> PackedMatmul:
    require_channel_dim(filter, 0)
    matrix = filter.array.reshape(filter.shape[0], -1).T.astype(np.float64)
    epilogue = _epilogue(matrix, input, filter, bias, output, activation, row)
    return PackedMatmul(np.ascontiguousarray(matrix), epilogue, output.dtype, row)


def plan_depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> Run:
    """Plan DEPTHWISE_CONV_2D."""
    require_channel_dim(filter, 3)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array[0].astype(np.float64)
    matrix = taps.reshape(-1, filter.shape[3])
    epilogue = _epilogue(matrix, input, filter, bias, output, activation, columns.count)
    return accumulate_taps(taps, epilogue, output, input, rows, columns, depth_multiplier, 0)


def plan_transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: Any
) -> Run:
    """Plan TRANSPOSE_CONV_2D."""
    require_channel_dim(filter, 0)
    rows, columns = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array.astype(np.float64).transpose(1, 2, 3, 0)
    epilogue = _epilogue(taps.reshape(-1, taps.shape[3]), input, filter, bias, output, activation, 1)
    return scatter_taps(np.ascontiguousarray(taps), epilogue, output, rows, columns, 0)


def plan_fully_connected(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan FULLY_CONNECTED, with one scale or one for each unit."""
    require_channel_dim(weights, 0)
    require(weights.zero_point == 0, "C7", f"the weights have the zero point {weights.zero_point}")
    matrix, addend = weights.array.T.astype(np.float64), bias.array.astype(np.float64)
    factors = np.array(real_scales(input, weights, output))
    low, high = quantized_activation_range(activation, output)

    def run(array: Array) -> Array:
        sums = np.matmul(array.reshape(-1, weights.shape[1]).astype(np.float64), matrix) + addend
        return np.clip(rounded(sums * factors), low, high).astype(np.int16)

    return run


def plan_matmul(left: Tensor, right: Tensor, *, output: Tensor, adjoint_left: bool, adjoint_right: bool) -> Run:
    """Plan BATCH_MATMUL."""
    real = float(np.float32(left.scale) * np.float32(right.scale) / np.float32(output.scale))
    multiplier = fixed_point.quantize_multiplier(real)

    def run(a: Array, b: Array) -> Array:
        rows, columns = a.astype(np.float64), b.astype(np.float64)
        rows = np.swapaxes(rows, -1, -2) if adjoint_left else rows
        columns = np.swapaxes(columns, -1, -2) if adjoint_right else columns
        return saturated(multiply_wide(ints(np.matmul(rows, columns)), *multiplier))

    return run


def _epilogue(
    matrix: Array, input: Tensor, weights: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> Epilogue:
    """Return an epilogue that adds the bias to sums of products with `matrix` (K, channels) and requantizes them."""
    require(weights.zero_point == bias.zero_point == 0, "C7", f"weights have the zero point {weights.zero_point}")
    multipliers = OutputMultipliers.of(real_scales(input, weights, output)).rows(row)
    low, high = quantized_activation_range(activation, output)
    addend = np.tile(ints(bias.array), row)
    if bias.dtype == np.int32:
        return _narrow_epilogue(multipliers, addend, low, high)
    largest = int(np.abs(matrix).sum(axis=0).max(initial=0)) * _LARGEST + int(np.abs(addend).max(initial=0))
    if largest < _EXACT_SUM:
        return _affine_epilogue(multipliers, addend, low, high)
    return _wide_epilogue(multipliers, addend, low, high)


def _narrow_epilogue(multipliers: OutputMultipliers, bias: Ints, low: int, high: int) -> Epilogue:
    def epilogue(sums: Array, out: Array) -> None:
        wrapped = ints((ints(sums) + bias).astype(np.int32))
        scaled = fixed_point.multiply(wrapped, multipliers.multipliers, multipliers.shifts)
        np.copyto(out, np.clip(scaled, low, high), casting="unsafe")

    return epilogue


def _wide_epilogue(multipliers: OutputMultipliers, bias: Ints, low: int, high: int) -> Epilogue:
    def epilogue(sums: Array, out: Array) -> None:
        scaled = multiply_wide(ints(sums) + bias, multipliers.multipliers, multipliers.shifts)
        np.copyto(out, np.clip(scaled, low, high), casting="unsafe")

    return epilogue


def _affine_epilogue(multipliers: OutputMultipliers, bias: Ints, low: int, high: int) -> Epilogue:
    """Return the same in float64, which is exact: a sum times a reduced multiplier has at most 52 bits."""
    reduced, shift = reduced_multiplier(multipliers.multipliers), (15 - multipliers.shifts).astype(np.int32)
    factors = np.ldexp(reduced.astype(np.float64), -shift)
    offsets = np.ldexp((bias * reduced).astype(np.float64), -shift) + 0.5

    def epilogue(sums: Array, out: Array) -> None:
        scaled = np.multiply(sums, factors)
        np.add(scaled, offsets, out=scaled)
        np.clip(np.floor(scaled, out=scaled), low, high, out=scaled)
        np.copyto(out, scaled, casting="unsafe")

    return epilogue


_WEIGHTS = tuple({"F": weights, "B": bias} for weights in (Q8S, PC) for bias in (I32, TENSOR_INT64))

DECLARATIONS = (
    sixteen_bit(find(convolution.DECLARATIONS, Op.CONV_2D), plan_convolution, _WEIGHTS),
    sixteen_bit(find(convolution.DECLARATIONS, Op.DEPTHWISE_CONV_2D), plan_depthwise, _WEIGHTS),
    sixteen_bit(find(grouped_conv.DECLARATIONS, Op.GROUPED_CONV_2D), plan_grouped, _WEIGHTS),
    sixteen_bit(find(transpose_conv.DECLARATIONS, Op.TRANSPOSE_CONV_2D), plan_transposed, _WEIGHTS),
    replace(
        sixteen_bit(find(fully_connected.DECLARATIONS, Op.FULLY_CONNECTED), plan_fully_connected, _WEIGHTS),
        overloads=(
            overload(data("input"), weight("weights", "F"), weight("bias", "B"), attribute("activation"), level=V1_2),
        ),
    ),
    sixteen_bit(find(batch_matmul.DECLARATIONS, Op.BATCH_MATMUL), plan_matmul),
)
