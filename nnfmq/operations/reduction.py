"""MEAN, REDUCE_ALL, REDUCE_ANY, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD, REDUCE_SUM, ARGMAX and ARGMIN.

A shape without remaining dimensions becomes (1,). ARGMAX and ARGMIN return the first of equal elements, or the first
NaN, which the HAL leaves undefined. Quantized values keep scale and zero point.

    C1 axes are a vector
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.declaration import (
    B8,
    BOOL,
    F16,
    F32,
    I32,
    INT32,
    Q8,
    Q8S,
    V1_1,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Plan,
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.shapes import normalize_axis, require, require_rank

Axes: TypeAlias = tuple[int, ...]
Kernel: TypeAlias = Callable[[Array, Axes], Any]  # reduces over the axes; the plan reshapes the result


def reduced_axes(axes: Array, rank: int) -> Axes:
    """Return the axes as sorted non-negative indexes without duplicates."""
    require(axes.ndim == 1, "C1", f"axes have shape {axes.shape}, a vector is required")
    return tuple(sorted({normalize_axis(int(axis), rank) for axis in axes}))


def reduction_shape(input: Shape, *, axes: Array, keep_dimensions: int) -> Shape:
    """Return the input's shape without the axes, or with 1 in their place if dimensions are kept; at least (1,)."""
    require_rank(input, range(1, 5), "input")
    return reduced(input, axes=axes, keep_dimensions=keep_dimensions)


def reduced(input: Shape, *, axes: Array, keep_dimensions: int) -> Shape:
    """Return the same as `reduction_shape` for any rank of the input."""
    gone = reduced_axes(axes, len(input))
    if keep_dimensions > 0:
        return tuple(1 if axis in gone else dimension for axis, dimension in enumerate(input))
    return tuple(dimension for axis, dimension in enumerate(input) if axis not in gone) or (1,)


def index_shape(input: Shape, *, axis: int) -> Shape:
    """Return the input's shape without the axis; (1,) if no dimension remains."""
    axis = normalize_axis(axis, len(input))
    return input[:axis] + input[axis + 1 :] or (1,)


def mean(input: Array, axes: Axes) -> Any:
    """Return the mean of floats."""
    return np.mean(input, axis=axes, dtype=input.dtype)


def quantized_mean(input: Array, axes: Axes) -> Any:
    """Return the sum of quantized values divided by their count, rounded down.

    For uint8 that truncates, as TFLite does; int8 results are equal to uint8 results - 128.
    """
    count = math.prod(input.shape[axis] for axis in axes)
    return (np.sum(input, axis=axes, dtype=np.int64) // count).astype(input.dtype)


def reduce_all(input: Array, axes: Axes) -> Any:
    """Return 1 if no byte is 0, else 0."""
    return np.all(input, axis=axes).astype(np.uint8)


def reduce_any(input: Array, axes: Axes) -> Any:
    """Return 1 if any byte is not 0, else 0."""
    return np.any(input, axis=axes).astype(np.uint8)


def reduce_max(input: Array, axes: Axes) -> Any:
    """Return the maximum."""
    return np.maximum.reduce(input, axis=axes)


def reduce_min(input: Array, axes: Axes) -> Any:
    """Return the minimum."""
    return np.minimum.reduce(input, axis=axes)


def reduce_sum(input: Array, axes: Axes) -> Any:
    """Return the sum of floats."""
    return np.add.reduce(input, axis=axes, dtype=input.dtype)


def reduce_prod(input: Array, axes: Axes) -> Any:
    """Return the product of floats, as if no product of some of them overflowed or vanished; 0 · infinity is NaN."""
    result = np.multiply.reduce(input, axis=axes, dtype=np.float64)
    if np.isnan(result).any():  # float64 overflows, too, if there are many large factors before a 0
        vanishes = np.any(input == 0, axis=axes) & np.all(np.isfinite(input), axis=axes)
        result = np.where(vanishes, 0.0, result)
    return result.astype(input.dtype)


def reduction_plan(kernel: Kernel) -> Plan:
    """Return the plan of a reduction by `kernel`."""

    def plan(input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
        reduced, shape = reduced_axes(axes, len(input.shape)), output.shape
        return lambda array: kernel(array, reduced).reshape(shape)

    return plan


def arg_index_plan(function: Callable[..., Any]) -> Plan:
    """Return the plan of ARGMAX or ARGMIN."""

    def plan(input: Tensor, *, output: Tensor, axis: int) -> Run:
        shape = output.shape
        return lambda array: function(array, axis=axis).astype(np.int32).reshape(shape)

    return plan


def _reduction(
    code: OperationType, variants: tuple[Variant, ...], *, since: int = V1_2, keeps: OperandType = BOOL
) -> Declaration:
    return Declaration(
        code,
        since=since,
        overloads=(overload(data("input"), attribute("axes", I32), attribute("keep_dimensions", keeps), level=since),),
        variants=variants,
        shape=reduction_shape,
        same_quantization=True,
    )


def _float_variants(kernel: Kernel) -> tuple[Variant, ...]:
    return Variant({"T": F32}, V1_2, reduction_plan(kernel)), Variant(
        {"T": F16}, V1_2, fp16_via_fp32(reduction_plan(kernel))
    )


def _min_max_variants(kernel: Kernel) -> tuple[Variant, ...]:
    levels = ((F32, V1_2), (F16, V1_2), (Q8, V1_2), (Q8S, V1_3))
    return tuple(Variant({"T": type}, level, reduction_plan(kernel)) for type, level in levels)


def _index(code: OperationType, function: Callable[..., Any]) -> Declaration:
    levels = ((F32, V1_2), (F16, V1_2), (I32, V1_2), (Q8, V1_2), (Q8S, V1_3))
    return Declaration(
        code,
        since=V1_2,
        overloads=(overload(data("input"), attribute("axis"), level=V1_2),),
        variants=tuple(Variant({"T": type}, level, arg_index_plan(function)) for type, level in levels),
        shape=index_shape,
        outputs=(I32,),
    )


_MEANS = (
    Variant({"T": F32}, V1_1, reduction_plan(mean)),
    Variant({"T": Q8}, V1_1, reduction_plan(quantized_mean)),
    Variant({"T": F16}, V1_2, fp16_via_fp32(reduction_plan(mean))),
    Variant({"T": Q8S}, V1_3, reduction_plan(quantized_mean)),
)

DECLARATIONS = (
    _reduction(OperationType.MEAN, _MEANS, since=V1_1, keeps=INT32),
    _reduction(OperationType.REDUCE_ALL, (Variant({"T": B8}, V1_2, reduction_plan(reduce_all)),)),
    _reduction(OperationType.REDUCE_ANY, (Variant({"T": B8}, V1_2, reduction_plan(reduce_any)),)),
    _reduction(OperationType.REDUCE_MAX, _min_max_variants(reduce_max)),
    _reduction(OperationType.REDUCE_MIN, _min_max_variants(reduce_min)),
    _reduction(OperationType.REDUCE_PROD, _float_variants(reduce_prod)),
    _reduction(OperationType.REDUCE_SUM, _float_variants(reduce_sum)),
    _index(OperationType.ARGMAX, np.argmax),
    _index(OperationType.ARGMIN, np.argmin),
)
