"""EQUAL, GREATER, GREATER_EQUAL, LESS, LESS_EQUAL, NOT_EQUAL, LOGICAL_AND, LOGICAL_OR and LOGICAL_NOT.

Operands of any rank are broadcast; the result is TENSOR_BOOL8, 0 or 1. Quantized values are dequantized to float32, so
the operands may have different scales. Every byte of a TENSOR_BOOL8 except 0 is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import (
    B8,
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Run,
    Tensor,
    Variant,
    data,
    overload,
)
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.quantization import dequantized_values
from nnfmq.operations.shapes import broadcast_shapes, same_shape

COMPARISONS: Mapping[OperationType, np.ufunc] = {
    OperationType.EQUAL: np.equal,
    OperationType.GREATER: np.greater,
    OperationType.GREATER_EQUAL: np.greater_equal,
    OperationType.LESS: np.less,
    OperationType.LESS_EQUAL: np.less_equal,
    OperationType.NOT_EQUAL: np.not_equal,
}


def compare(ufunc: np.ufunc, first: Array, second: Array) -> Array:
    """Return `ufunc`'s results as bytes."""
    result: Array = ufunc(first, second).view(np.uint8)
    return result


def compare_truth(ufunc: np.ufunc, first: Array, second: Array) -> Array:
    """Return the comparison of two TENSOR_BOOL8 arrays."""
    return compare(ufunc, first != 0, second != 0)


def plan_quantized_comparison(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan the comparison of quantized values, with a dequantization table for each operand."""
    values, others = dequantized_values(first), dequantized_values(second)
    return lambda a, b: compare(ufunc, values.take(a.view(np.uint8)), others.take(b.view(np.uint8)))


def logical_not(input: Array) -> Array:
    """Return 1 if the input is 0, else 0, for each element."""
    result: Array = np.logical_not(input).view(np.uint8)
    return result


def _comparison(code: OperationType, ufunc: np.ufunc) -> Declaration:
    in_any_dtype = stateless(partial(compare, ufunc))
    in_quantized = partial(plan_quantized_comparison, ufunc)
    return Declaration(
        code,
        since=V1_2,
        overloads=(overload(data("first"), data("second"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, in_any_dtype),
            Variant({"T": F16}, V1_2, in_any_dtype),
            Variant({"T": I32}, V1_2, in_any_dtype),
            Variant({"T": B8}, V1_2, stateless(partial(compare_truth, ufunc))),
            Variant({"T": Q8}, V1_2, in_quantized),
            Variant({"T": Q8S}, V1_3, in_quantized),
        ),
        shape=broadcast_shapes,
        outputs=(B8,),
    )


def _logical(code: OperationType, ufunc: np.ufunc) -> Declaration:
    return Declaration(
        code,
        since=V1_2,
        overloads=(overload(data("first", B8), data("second", B8), level=V1_2),),
        variants=(Variant({}, V1_2, stateless(partial(compare, ufunc))),),
        shape=broadcast_shapes,
        outputs=(B8,),
    )


DECLARATIONS = (
    *(_comparison(code, ufunc) for code, ufunc in COMPARISONS.items()),
    _logical(OperationType.LOGICAL_AND, np.logical_and),
    _logical(OperationType.LOGICAL_OR, np.logical_or),
    Declaration(
        OperationType.LOGICAL_NOT,
        since=V1_2,
        overloads=(overload(data("input", B8), level=V1_2),),
        variants=(Variant({}, V1_2, stateless(logical_not)),),
        shape=same_shape,
        outputs=(B8,),
    ),
)
