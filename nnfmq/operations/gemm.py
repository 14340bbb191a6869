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
from nnfmq.operations.quantization import (
    EXACT_FLOAT32,
    Finish,
    Multipliers,
    float_range,
    product_multipliers,
    requantizer,
    type_range,
)
from nnfmq.operations.signature import Array, Tensor


@dataclass(frozen=True, slots=True)
class Product:
    """A packed matrix (length, channels), what finishes its sums, and the dtype of the results."""

    matrix: Array
    finish: Finish
    dtype: np.dtype[Any]
    row: int

    def store(self, rows: Array, out: Array) -> None:
        """Multiply `rows` (positions, length) and fill `out`, contiguous, of positions · channels elements."""
        sums = np.matmul(rows.astype(self.matrix.dtype, copy=False), self.matrix)
        length = self.row * self.matrix.shape[1]
        self.finish(sums.reshape(-1, length), out.reshape(-1, length))


def float_finish(bias: Array, activation: int) -> Finish:
    """Return what adds `bias` (a row) and clamps."""
    low, high = float_range(activation)

    def finish(sums: Array, out: Array) -> None:
        np.add(sums, bias, out=out)
        if low > -np.inf:
            np.maximum(out, low, out=out)
        if high < np.inf:
            np.minimum(out, high, out=out)

    return finish


def float_product(matrix: Array, bias: Array, output: Tensor, activation: int, row: int = 1) -> Product:
    """Pack a float32 product whose results are stored `row` positions at a time."""
    packed = np.ascontiguousarray(matrix, dtype=np.float32)
    return Product(packed, float_finish(np.tile(bias, row), activation), output.dtype, row)


def quantized_product(
    matrix: Ints, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int = 1
) -> Product:
    """Pack an exact integer product; `matrix` is the filter less its zero point, (length, channels)."""
    bound, dtype = exact_sums(matrix, input)
    finish = quantized_finish(matrix, bound, input, filter, bias, output, activation, row)
    return Product(np.ascontiguousarray(matrix, dtype=dtype), finish, output.dtype, row)


def exact_sums(matrix: Ints, input: Tensor) -> tuple[int, type[np.floating[Any]]]:
    """Return a bound on |Σ x·w| over the columns of `matrix`, and the float type that holds it exactly."""
    return exact_products(matrix, max(map(abs, type_range(input))))


def exact_products(matrix: Ints, largest: int) -> tuple[int, type[np.floating[Any]]]:
    """Return a bound on |Σ x·w| for |x| ≤ `largest`, and the float type that holds it exactly."""
    bound = int(np.abs(matrix).sum(axis=0).max(initial=0)) * largest
    return bound, np.float32 if bound < EXACT_FLOAT32 else np.float64


def quantized_finish(
    matrix: Ints, bound: int, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> Finish:
    """Return what adds the bias and the zero point's part to raw sums, and requantizes them."""
    multipliers = Multipliers.of(product_multipliers(input, filter, bias, output)).rows(row)
    whole_bias = ints(bias.array) - input.zero_point * matrix.sum(axis=0)
    return requantizer(multipliers, np.tile(whole_bias, row), bound, output, activation)
