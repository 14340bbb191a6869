"""Matrix products with a bias and a fused activation: the inner part of convolutions and FULLY_CONNECTED.

A quantized product is summed by a float32 BLAS product, which is exact while every partial sum stays within 2^24;
Σ|w|·max|x| bounds them, known per output channel at preparation. Otherwise the product is in float64 (2^53).
The input's zero point is not subtracted from the data: Σ(x - z)·w = Σx·w - z·Σw, and the second term joins the bias.

Per-channel values are repeated to *rows* of several positions, since numpy is slow on short inner loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.prepacked import cached_prepack
from nnfmq.operations.quantization import (
    EXACT_FLOAT32,
    Epilogue,
    OutputMultipliers,
    dtype_range,
    float_activation_range,
    requantization_scales,
    requantizer,
)
from nnfmq.operations.signature import Array, Tensor


@dataclass(frozen=True, slots=True)
class PackedMatmul:
    """A packed matrix (length, channels), what finishes its sums, and the dtype of the results."""

    matrix: Array
    epilogue: Epilogue
    dtype: np.dtype[Any]
    row: int

    def store(self, rows: Array, out: Array) -> None:
        """Multiply `rows` (positions, length) and fill `out`, contiguous, of positions · channels elements."""
        sums = np.matmul(rows.astype(self.matrix.dtype, copy=False), self.matrix)
        length = self.row * self.matrix.shape[1]
        self.epilogue(sums.reshape(-1, length), out.reshape(-1, length))


def float_epilogue(bias: Array, activation: int) -> Epilogue:
    """Return what adds `bias` (a row) and clamps."""
    low, high = float_activation_range(activation)

    def epilogue(sums: Array, out: Array) -> None:
        np.add(sums, bias, out=out)
        if low > -np.inf:
            np.maximum(out, low, out=out)
        if high < np.inf:
            np.minimum(out, high, out=out)

    return epilogue


def float_matmul(matrix: Array, bias: Array, output: Tensor, activation: int, row: int = 1) -> PackedMatmul:
    """Pack a float32 product whose results are stored `row` positions at a time."""
    packed = np.ascontiguousarray(matrix, dtype=np.float32)
    return PackedMatmul(packed, float_epilogue(np.tile(bias, row), activation), output.dtype, row)


def quantized_matmul(
    input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int = 1
) -> PackedMatmul:
    """Pack an exact integer product with `filter`, whose first dimension are the channels."""
    matrix, sums, bound = pack_exact_matrix(filter.array.reshape(filter.shape[0], -1).T, filter.zero_point, input)
    epilogue = quantized_epilogue(sums, bound, input, filter, bias, output, activation, row)
    return PackedMatmul(matrix, epilogue, output.dtype, row)


def pack_exact_matrix(codes: Array, zero_point: int, input: Tensor) -> tuple[Array, Ints, int]:
    """Return codes (length, channels) less their zero point, the sum of each channel, and a bound on |Σ x·w|.

    The matrix is of the float type that holds the sums exactly. The bound and the sums take longer than the rest, and
    little room in a cache.
    """

    def sum_up() -> tuple[Array, ...]:
        weights = codes.astype(np.int64) - zero_point
        bound, _ = bound_accumulator(weights, max(map(abs, dtype_range(input))))
        return weights.sum(axis=0), np.array(bound)

    sums, bound = cached_prepack(sum_up)
    matrix = np.subtract(codes, zero_point, dtype=_exact_type(int(bound)), order="C")
    return matrix, ints(sums), int(bound)


def _exact_type(bound: int) -> type[np.floating[Any]]:
    return np.float32 if bound < EXACT_FLOAT32 else np.float64


def bound_accumulator(matrix: Ints, largest: int) -> tuple[int, type[np.floating[Any]]]:
    """Return a bound on |Σ x·w| for |x| ≤ `largest`, and the float type that holds it exactly."""
    bound = int(np.abs(matrix).sum(axis=0).max(initial=0)) * largest
    return bound, _exact_type(bound)


def quantized_epilogue(
    sums: Ints, bound: int, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> Epilogue:
    """Return what adds the bias and the zero point's part to raw sums, and requantizes them.

    `sums` are the filter's, less its zero point, of each channel.
    """
    multipliers = OutputMultipliers.of(requantization_scales(input, filter, bias, output)).rows(row)
    whole_bias = ints(bias.array) - input.zero_point * sums
    return requantizer(multipliers, np.tile(whole_bias, row), bound, output, activation)
