"""BATCH_MATMUL: matrix products of two batches; a flag for each side transposes its matrices first.

INT32 wraps around. Quantized values (int8 only) are accumulated exactly in float64 and requantized.

    R1 ranks are 2 to 4           C1 ranks are equal
    C2 the batches are equal      C3 columns of the left matrices = rows of the right ones
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import (
    AIDL_V2,
    BOOL,
    F16,
    F32,
    I32,
    Q8S,
    Array,
    Declaration,
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.kernel_adapters import fp16_via_fp32
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


DECLARATIONS = (
    Declaration(
        OperationType.BATCH_MATMUL,
        since=AIDL_V2,
        overloads=(
            overload(
                data("left"),
                data("right"),
                attribute("adjoint_left", BOOL),
                attribute("adjoint_right", BOOL),
                level=AIDL_V2,
            ),
        ),
        variants=(
            Variant({"T": F32}, AIDL_V2, plan_matmul),
            Variant({"T": F16}, AIDL_V2, fp16_via_fp32(plan_matmul)),
            Variant({"T": I32}, AIDL_V2, plan_matmul),
            Variant({"T": Q8S}, AIDL_V2, plan_quantized_matmul),
        ),
        shape=batch_matmul_shape,
    ),
)
