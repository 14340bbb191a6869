"""BATCH_MATMUL: matrix products of two batches; a flag for each side transposes its matrices first.

INT32 wraps around. Quantized values (int8 only) are accumulated exactly in float64 and requantized.

    R1 ranks are 2 to 4           C1 ranks are equal
    C2 the batches are equal      C3 columns of the left matrices = rows of the right ones
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.fixed_point import ints, multiply_wide, to_int16
from nnfmq.operations.kernel_adapters import float_variants
from nnfmq.operations.quantization import OutputMultipliers, requantizer
from nnfmq.operations.shapes import require, require_rank


def batch_matmul_shape(left: Shape, right: Shape, *, adjoint_left: bool, adjoint_right: bool) -> Shape:
    """Return the batch dimensions, the rows of the left matrices and the columns of the right ones."""
    require_rank(left, range(2, 5), "left")
    require(len(left) == len(right), "C1", f"shapes {left} and {right} have different ranks")
    require(left[:-2] == right[:-2], "C2", f"batches {left[:-2]} and {right[:-2]} differ")
    rows, length = left[:-3:-1] if adjoint_left else left[-2:]
    length_right, columns = right[:-3:-1] if adjoint_right else right[-2:]
    require(length == length_right, "C3", f"{length} columns of the left and {length_right} rows of the right matrices")
    return *left[:-2], rows, columns


def _maybe_transposed(matrices: Array, adjoint: bool) -> Array:
    return np.swapaxes(matrices, -1, -2) if adjoint else matrices


def plan_matmul(left: Tensor, right: Tensor, *, output: Tensor, adjoint_left: bool, adjoint_right: bool) -> Run:
    """Plan products in the type of the matrices."""

    def run(a: Array, b: Array) -> Array:
        product: Array = np.matmul(_maybe_transposed(a, adjoint_left), _maybe_transposed(b, adjoint_right))
        return product

    return run


def plan_quantized_matmul(
    left: Tensor, right: Tensor, *, output: Tensor, adjoint_left: bool, adjoint_right: bool
) -> Run:
    """Plan exact integer products and their requantization."""
    length = left.shape[-2 if adjoint_left else -1]
    real = float(np.float32(left.scale) * np.float32(right.scale)) / float(np.float32(output.scale))
    epilogue = requantizer(OutputMultipliers.of([real]), ints([0]), length << 16, output, 0)

    def run(a: Array, b: Array) -> Array:
        rows = np.subtract(_maybe_transposed(a, adjoint_left), left.zero_point, dtype=np.float64)
        columns = np.subtract(_maybe_transposed(b, adjoint_right), right.zero_point, dtype=np.float64)
        out = np.empty(output.shape, output.dtype)
        epilogue(np.matmul(rows, columns), out)
        return out

    return run


def plan_sixteen_bit_matmul(
    left: Tensor, right: Tensor, *, output: Tensor, adjoint_left: bool, adjoint_right: bool
) -> Run:
    """Plan products of 16 bits."""
    real = float(np.float32(left.scale) * np.float32(right.scale) / np.float32(output.scale))
    multiplier = fixed_point.quantize_multiplier(real)

    def run(a: Array, b: Array) -> Array:
        rows, columns = a.astype(np.float64), b.astype(np.float64)
        rows = np.swapaxes(rows, -1, -2) if adjoint_left else rows
        columns = np.swapaxes(columns, -1, -2) if adjoint_right else columns
        return to_int16(multiply_wide(ints(np.matmul(rows, columns)), *multiplier))

    return run


DECLARATIONS = (
    op.Declaration(
        OperationType.BATCH_MATMUL,
        since=op.AIDL_V2,
        overloads=(
            op.overload(
                op.data("left"),
                op.data("right"),
                op.attribute("adjoint_left", op.BOOL),
                op.attribute("adjoint_right", op.BOOL),
                level=op.AIDL_V2,
            ),
        ),
        variants=(
            *float_variants(plan_matmul, level=op.AIDL_V2),
            op.Variant({"T": op.I32}, op.AIDL_V2, plan_matmul),
            op.Variant({"T": op.Q8S}, op.AIDL_V2, plan_quantized_matmul),
        ),
        shape=batch_matmul_shape,
        extended=(
            op.wider(*op.of_types(plan_matmul, *op.WIDE)),
            op.sixteen_bits(*op.of_types(plan_sixteen_bit_matmul, op.Q16S)),
        ),
    ),
)
