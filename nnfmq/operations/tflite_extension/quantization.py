"""Quantization as ONNX defines it, and of rows by their range as TFLite does it at run time.

QUANTIZE_LINEAR takes the place of the HAL's QUANTIZE: the quotient is rounded to the nearest integer, halves to the
even one, before the zero point is added. ONNX does not define the result for NaN: it is the lowest value, as in ONNX
Runtime on x86. Operators of ONNX Runtime's own domain add the zero point first, which decides halves if it is odd.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.quantization import all_quantized_values, dtype_range, linear_codes, quantize_rows, rescaling
from nnfmq.operations.shapes import broadcast_shapes, require
from nnfmq.operations.tflite_extension import declare, function_of_one

__all__ = [
    "DECLARATIONS",
    "dynamic_quantize_shape",
    "plan_dynamic_quantize",
    "plan_dynamic_quantize_linear",
    "plan_qlinear_add",
    "plan_qlinear_mul",
    "plan_quantize_linear",
    "plan_requantize",
    "product_factor",
    "sum_factors",
]


def plan_quantize_linear(input: Tensor, *, output: Tensor, adds_first: bool) -> Run:
    """Plan clamp(round half to even(value / scale) + zero point), or that of the sum if `adds_first`, in float32."""
    scale, zero_point = np.float32(output.scale), np.float32(output.zero_point)

    def run(values: Array) -> Array:
        quotients = values.astype(np.float32, copy=False) / scale
        steps = np.rint(quotients + zero_point) if adds_first else np.rint(quotients) + zero_point
        return _limited(steps, output)

    return run


def _limited(steps: Array, output: Tensor) -> Array:
    """Return integral floats limited to the output's range; NaN becomes the lowest value."""
    low, high = dtype_range(output)
    result: Array = np.clip(np.where(np.isnan(steps), np.float32(low), steps), low, high).astype(output.dtype)
    return result


def sum_factors(first: Tensor, second: Tensor, output: Tensor) -> tuple[np.float32, np.float32, np.float32]:
    """Return the factors of both quantized values, and what is added: sum = a · factor + (b · factor + offset)."""
    scales = np.float32(output.scale)
    factors = np.float32(first.scale) / scales, np.float32(second.scale) / scales
    offset = factors[0] * np.float32(first.zero_point) + factors[1] * np.float32(second.zero_point)
    return *factors, np.float32(output.zero_point) - offset


def plan_qlinear_add(first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan a sum whose products are exact before each of both additions, as with ONNX Runtime's fused instructions."""
    (factor, other_factor, offset), others = sum_factors(first, second, output), _codes(second)
    terms = _codes(first) * float(factor)
    sums = (others * float(other_factor) + float(offset)).astype(np.float32)

    def run(a: Array, b: Array) -> Array:
        total = terms[a.view(np.uint8)] + sums[b.view(np.uint8)]
        return _limited(np.rint(total.astype(np.float32)), output)

    return run


def _codes(tensor: Tensor) -> Array:
    return all_quantized_values(tensor).astype(np.float64)


def product_factor(first: Tensor, second: Tensor, output: Tensor) -> np.float32:
    """Return the factor of a product of quantized values without their zero points."""
    return np.float32(np.float32(first.scale) * np.float32(second.scale) / np.float32(output.scale))


def plan_qlinear_mul(first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan a product, exact before it is multiplied by the ratio of the scales in float32."""
    factor, zero_point = product_factor(first, second, output), np.float32(output.zero_point)

    def run(a: Array, b: Array) -> Array:
        product = (a.astype(np.int32) - first.zero_point) * (b.astype(np.int32) - second.zero_point)
        return _limited(np.rint(product.astype(np.float32) * factor + zero_point), output)

    return run


def _binary(operation: TfliteOperation, plan: Plan) -> op.Declaration:
    return declare(
        operation,
        op.data("first"),
        op.data("second"),
        variants=op.of_types(plan, op.Q8, op.Q8S),
        shape=broadcast_shapes,
        zero_sized=True,
    )


_PAIRS: Any = [(given, result) for given in (op.F32, op.F16) for result in (op.Q8, op.Q8S)]

_LINEAR_QUANTIZATION_DECLARATIONS = (
    function_of_one(
        TfliteOperation.QUANTIZE_LINEAR,
        op.conversions(plan_quantize_linear, *_PAIRS),
        op.attribute("adds_first", op.BOOL),
    ),
    _binary(TfliteOperation.QLINEAR_ADD, plan_qlinear_add),
    _binary(TfliteOperation.QLINEAR_MUL, plan_qlinear_mul),
)


# ----------------------------------------------------------------------------------------------------------------------
# DYNAMIC_QUANTIZE: floats rounded to the 8-bit values that TFLite's operators with quantized weights compute with.
#
# TFLite quantizes the float input of such an operator at each execution: each row has a scale of its own, and a zero
# point too if it is asymmetric. The result is the real numbers of the quantized values. Their products with dequantized
# weights are sums of the same terms as TFLite's integer sums.
#
#     C1 the count of elements is a multiple of the row's length, which is positive; 0 means all but the first dimension


def dynamic_quantize_shape(input: Shape, *, row_length: int, asymmetric: bool) -> Shape:
    """Return the input's shape."""
    count = math.prod(input)
    fits = row_length >= 0 and (row_length == 0 or count % row_length == 0)
    require(fits, "C1", f"rows of {row_length} for an input of shape {input}")
    return input


def plan_dynamic_quantize(input: Tensor, *, output: Tensor, row_length: int, asymmetric: bool) -> Run:
    """Plan the quantization of rows."""
    length = row_length or math.prod(input.shape[1:])

    def run(array: Array) -> Array:
        return quantize_rows(array.reshape(-1, max(length, 1)), asymmetric).reshape(array.shape)

    return run


_DYNAMIC_QUANTIZATION_DECLARATIONS = (
    declare(
        TfliteOperation.DYNAMIC_QUANTIZE,
        op.data("input"),
        op.attribute("row_length", op.INT32),
        op.attribute("asymmetric", op.BOOL),
        variants=(op.Variant({"T": op.F32}, op.V1_2, plan_dynamic_quantize),),
        shape=dynamic_quantize_shape,
        zero_sized=True,
    ),
)

# ----------------------------------------------------------------------------------------------------------------------
# DYNAMIC_QUANTIZE_LINEAR: bytes of floats with the scale of their range, that scale and the zero point, as ONNX's
# DynamicQuantizeLinear.
#
#     C3 the scale of the bytes' operand is 1, and its zero point 0: they are what they are


def _linear_shape(input: Shape) -> tuple[Shape, Shape, Shape]:
    return input, (1,), (1,)


def plan_dynamic_quantize_linear(input: Tensor, *, output: tuple[Tensor, Tensor, Tensor]) -> Run:
    """Plan bytes, their scale and, as a float, their zero point."""
    codes = output[0]
    require((codes.scale, codes.zero_point) == (1, 0), "C3", f"scale {codes.scale}, zero point {codes.zero_point}")

    def run(values: Array) -> tuple[Array, Array, Array]:
        found, scale, zero_point = linear_codes(values)
        return found.astype(np.uint8), np.array([scale]), np.array([zero_point])

    return run


_DYNAMIC_LINEAR = declare(
    TfliteOperation.DYNAMIC_QUANTIZE_LINEAR,
    op.data("input"),
    variants=(op.Variant({"T": op.F32, "O": op.Q8}, op.V1_2, plan_dynamic_quantize_linear),),
    shape=_linear_shape,
    outputs=("O", "T", "T"),
    zero_sized=True,
)

# ----------------------------------------------------------------------------------------------------------------------
# REQUANTIZE: quantized values in another scale, zero point or type.
#
#     C2 the scales are positive


def plan_requantize(
    input: Tensor,
    *,
    output: Tensor,
    input_scale: float,
    input_zero_point: int,
    output_scale: float,
    output_zero_point: int,
) -> Run:
    """Plan quantized values in another scale, zero point or type.

    The scales and zero points are attributes, because operands of INT32 and INT16 do not have all of them.
    """
    require(min(input_scale, output_scale) > 0, "C2", f"the scales are {input_scale} and {output_scale}")
    info, rescale = np.iinfo(output.dtype), rescaling(input_scale / output_scale)

    def run(x: Array) -> Array:
        scaled = rescale(ints(x) - input_zero_point)
        return np.clip(scaled + output_zero_point, info.min, info.max).astype(output.dtype)

    return run


_REQUANTIZED = (op.Q8, op.Q8S, op.Q16S, op.I32)

_REQUANTIZE = function_of_one(
    TfliteOperation.REQUANTIZE,
    op.conversions(plan_requantize, *itertools.product(_REQUANTIZED, _REQUANTIZED)),
    *(op.attribute("input_scale", op.FLOAT32), op.attribute("input_zero_point")),
    *(op.attribute("output_scale", op.FLOAT32), op.attribute("output_zero_point")),
)

DECLARATIONS = (*_LINEAR_QUANTIZATION_DECLARATIONS, *_DYNAMIC_QUANTIZATION_DECLARATIONS, _DYNAMIC_LINEAR, _REQUANTIZE)
