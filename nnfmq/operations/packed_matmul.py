"""Matrix products with prepacked weights, bias and fused activation, for convolutions and FULLY_CONNECTED.

A quantized product is computed by a float32 BLAS product, which is exact while every partial sum is at most 2^24 in
magnitude. Σ|w|·max|x| bounds the sums of each output channel at preparation; beyond 2^24 the product is in float64
(exact to 2^53). The input's zero point is not subtracted from the data: Σ(x - z)·w = Σx·w - z·Σw, and the second term
is added to the bias.

Per-channel values are repeated to *rows* of several positions, because NumPy is slow on short inner loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Shape, Tensor
from nnfmq.operations.fixed_point import Ints, ints, multiply_wide, reduced_multiplier
from nnfmq.operations.preparation import cached_prepack, is_only_checked
from nnfmq.operations.quantization import (
    EXACT_FLOAT32,
    Epilogue,
    OutputMultipliers,
    dtype_range,
    float_activation_range,
    quantized_activation_range,
    real_scales,
    requantization_scales,
    requantizer,
)
from nnfmq.operations.shapes import require


class PackedMatmul(Struct, frozen=True):
    """A packed matrix (K, channels), its epilogue, the results' dtype, and the positions of a row."""

    matrix: Array
    epilogue: Epilogue
    dtype: np.dtype[Any]
    row: int

    def store(self, rows: Array, out: Array) -> None:
        """Multiply `rows` (positions, K) into `out`, contiguous, of positions · channels elements."""
        sums = np.matmul(rows.astype(self.matrix.dtype, copy=False), self.matrix)
        length = self.row * self.matrix.shape[1]
        self.epilogue(sums.reshape(-1, length), out.reshape(-1, length))


def float_epilogue(bias: Array, activation: int) -> Epilogue:
    """Return an epilogue that adds `bias` (one row) and clamps."""
    low, high = float_activation_range(activation)

    def epilogue(sums: Array, out: Array) -> None:
        np.add(sums, bias, out=out)
        if low > -np.inf:
            np.maximum(out, low, out=out)
        if high < np.inf:
            np.minimum(out, high, out=out)

    return epilogue


PackMatmul: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], PackedMatmul]
"""Packs a filter, whose first dimension is the output channels, for one arithmetic.

It takes input, filter, bias, output, activation, and the count of positions that the epilogue handles at a time.
"""


def float_matmul(
    input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> PackedMatmul:
    """Pack a filter for a product in float32."""
    matrix = filter.array.reshape(filter.shape[0], -1).T
    packed = _no_weights(matrix.shape) if is_only_checked() else np.ascontiguousarray(matrix, dtype=np.float32)
    return PackedMatmul(packed, float_epilogue(np.tile(bias.array, row), activation), output.dtype, row)


def quantized_matmul(
    input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> PackedMatmul:
    """Pack a filter for an exact integer product and its requantization."""
    matrix, sums, bound = pack_exact_matrix(filter.array.reshape(filter.shape[0], -1).T, filter.zero_point, input)
    epilogue = quantized_epilogue(sums, bound, input, filter, bias, output, activation, row)
    return PackedMatmul(matrix, epilogue, output.dtype, row)


def pack_exact_matrix(quantized: Array, zero_point: int, input: Tensor) -> tuple[Array, Ints, int]:
    """Return the weights (K, channels) minus zero point, their sum for each channel, and a bound on |Σ x·w|.

    The matrix has the float type that represents the sums exactly. Only the bound and the sums are prepacked: they take
    most of the time and little memory.
    """

    def sum_up() -> tuple[Array, ...]:
        # Of 8 bits they fit 16 bits, of which NumPy makes the sums in 64 bits.
        weights = np.subtract(quantized, zero_point, dtype=np.int16 if quantized.itemsize == 1 else np.int64)
        bound, _ = bound_accumulator(weights, max(map(abs, dtype_range(input))))
        return weights.sum(axis=0), np.array(bound)

    if is_only_checked():
        return _no_weights(quantized.shape), ints(np.zeros(quantized.shape[1])), 0
    sums, bound = cached_prepack(sum_up)
    matrix = np.subtract(quantized, zero_point, dtype=_exact_type(int(bound)), order="C")
    return matrix, ints(sums), int(bound)


def _no_weights(shape: Shape) -> Array:
    """Return zeros that take no memory, in place of a packed matrix that nothing reads."""
    return np.broadcast_to(np.float32(0), shape)


def _exact_type(bound: int) -> type[np.floating[Any]]:
    return np.float32 if bound < EXACT_FLOAT32 else np.float64


def bound_accumulator(matrix: Ints, largest: int) -> tuple[int, type[np.floating[Any]]]:
    """Return a bound on |Σ x·w| for |x| ≤ `largest`, and the float type that represents it exactly."""
    bound = int(np.abs(matrix).sum(axis=0).max(initial=0)) * largest
    return bound, _exact_type(bound)


def quantized_epilogue(
    sums: Ints, bound: int, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> Epilogue:
    """Return an epilogue that adds the zero-point-corrected bias to accumulators and requantizes them.

    `sums` are the sums of the filter minus zero point, one for each channel.
    """
    multipliers = OutputMultipliers.of(requantization_scales(input, filter, bias, output)).rows(row)
    corrected_bias = ints(bias.array) - input.zero_point * sums
    return requantizer(multipliers, np.tile(corrected_bias, row), bound, output, activation)


# ----------------------------------------------------------------------------------------------------------------------
# Sums of products of 16-bit tensors with 8-bit weights, as TFLite requantizes them.
#
# Sums of products are exact in float64. With a bias of INT32 they wrap at 32 bits and are requantized as those of 8-bit
# tensors; else they are requantized from 64 bits, by 16 bits of the multiplier. As in TFLite, the scales are multiplied
# in float64.
#
#     C7 weights and bias: the zero point is 0


_EXACT_SUM = 1 << 37  # times a reduced multiplier, and half of the divisor added, it is exact in float64


_LARGEST = 1 << 15  # magnitude of an input


def sixteen_bit_epilogue(
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
    """Return an epilogue that computes in float64, exactly: a sum times a reduced multiplier has at most 52 bits."""
    reduced, shift = reduced_multiplier(multipliers.multipliers), (15 - multipliers.shifts).astype(np.int32)
    factors = np.ldexp(reduced.astype(np.float64), -shift)
    offsets = np.ldexp((bias * reduced).astype(np.float64), -shift) + 0.5

    def epilogue(sums: Array, out: Array) -> None:
        scaled = np.multiply(sums, factors)
        np.add(scaled, offsets, out=scaled)
        np.clip(np.floor(scaled, out=scaled), low, high, out=scaled)
        np.copyto(out, scaled, casting="unsafe")

    return epilogue


def sixteen_bit_matmul(
    input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> PackedMatmul:
    """Pack a filter of 8 bits for a product with values of 16 bits, and its requantization."""
    matrix = filter.array.reshape(filter.shape[0], -1).T.astype(np.float64)
    epilogue = sixteen_bit_epilogue(matrix, input, filter, bias, output, activation, row)
    return PackedMatmul(np.ascontiguousarray(matrix), epilogue, output.dtype, row)
