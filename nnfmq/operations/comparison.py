"""EQUAL, GREATER, GREATER_EQUAL, LESS, LESS_EQUAL, NOT_EQUAL, LOGICAL_AND, LOGICAL_OR and LOGICAL_NOT.

Operands of any rank are broadcast; the result is TENSOR_BOOL8, 0 or 1. Quantized values are dequantized to float32, so
the operands may have different scales. Every byte of a TENSOR_BOOL8 except 0 is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Tensor
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import lut8, stateless
from nnfmq.operations.quantization import all_quantized_values, dequantized_values
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


# ----------------------------------------------------------------------------------------------------------------------
# TFLite's comparisons of 8 bits are between real values with 8 bits after the binary point, so that unequal ones may be
# equal. Of 16 bits they are exact.
#
#     Q2 the scales of comparisons of 8 bits are below 1


def plan_sixteen_bit_comparison(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan the comparison of real values, which float64 has exactly; of stored ones if the scales are equal."""
    if first.scale == second.scale:
        return lambda a, b: ufunc(a, b).view(np.uint8)
    scale, other = np.float64(first.scale), np.float64(second.scale)
    return lambda a, b: ufunc(a * scale, b * other).view(np.uint8)


_FRACTION_BITS = 8  # of compared values


def plan_tflite_comparison(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan the comparison of real values in fixed point, with a table for each operand."""
    values, others = _fixed_point_values(first), _fixed_point_values(second)
    return lambda a, b: compare(ufunc, lut8(values, a), lut8(others, b))


def _fixed_point_values(tensor: Tensor) -> Ints:
    """Return the real value of each stored one, indexed by its bits."""
    centered = ints(all_quantized_values(tensor)) - tensor.zero_point
    return fixed_point.multiply(centered << _FRACTION_BITS, *fixed_point.quantize_multiplier_below_one(tensor.scale))


def _comparison(code: OperationType, ufunc: np.ufunc) -> op.Declaration:
    in_any_dtype = stateless(partial(compare, ufunc))
    in_quantized = partial(plan_quantized_comparison, ufunc)
    return op.Declaration(
        code,
        since=op.V1_2,
        overloads=(op.overload(op.data("first"), op.data("second"), level=op.V1_2),),
        variants=(
            *op.types_since(op.V1_2, in_any_dtype, op.F32, op.F16, op.I32),
            op.Variant({"T": op.B8}, op.V1_2, stateless(partial(compare_truth, ufunc))),
            *op.types_since(op.V1_2, in_quantized, op.Q8, op.Q8S),
        ),
        shape=broadcast_shapes,
        outputs=(op.B8,),
        extended=(
            op.wider(*op.of_types(in_any_dtype, *op.WIDE)),
            op.tflite(*op.of_types(partial(plan_tflite_comparison, ufunc), op.Q8, op.Q8S)),
            op.sixteen_bits(*op.of_types(partial(plan_sixteen_bit_comparison, ufunc), op.Q16S)),
        ),
    )


def _logical(code: OperationType, ufunc: np.ufunc) -> op.Declaration:
    return op.Declaration(
        code,
        since=op.V1_2,
        overloads=(op.overload(op.data("first", op.B8), op.data("second", op.B8), level=op.V1_2),),
        variants=(op.Variant({}, op.V1_2, stateless(partial(compare, ufunc))),),
        shape=broadcast_shapes,
        outputs=(op.B8,),
    )


DECLARATIONS = (
    *(_comparison(code, ufunc) for code, ufunc in COMPARISONS.items()),
    _logical(OperationType.LOGICAL_AND, np.logical_and),
    _logical(OperationType.LOGICAL_OR, np.logical_or),
    op.Declaration(
        OperationType.LOGICAL_NOT,
        since=op.V1_2,
        overloads=(op.overload(op.data("input", op.B8), level=op.V1_2),),
        variants=(op.Variant({}, op.V1_2, stateless(logical_not)),),
        shape=same_shape,
        outputs=(op.B8,),
    ),
)
