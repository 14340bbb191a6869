"""Quantization as ONNX defines it, and of rows by their range as TFLite does it at run time.

QUANTIZE_LINEAR takes the place of the HAL's QUANTIZE: the quotient is rounded to the nearest integer, halves to the
even one, before the zero point is added. ONNX does not define the result for NaN: it is the lowest value, as in ONNX
Runtime on x86. Operators of ONNX Runtime's own domain add the zero point first, which decides halves if it is odd.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations.declaration import (
    BOOL,
    F16,
    F32,
    INT32,
    Q8,
    Q8S,
    V1_2,
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
from nnfmq.operations.quantization import all_quantized_values, dtype_range
from nnfmq.operations.shapes import broadcast_shapes, require
from nnfmq.operations.tflite_extension.declaration import conversions, function_of_one, own_code, variants_of
from nnfmq.operations.tflite_extension.sixteen_bits import rounded

__all__ = [
    "DECLARATIONS",
    "dynamic_quantize_shape",
    "plan_dynamic_quantize",
    "plan_qlinear_add",
    "plan_qlinear_mul",
    "plan_quantize_linear",
    "product_factor",
    "quantize_linearly",
    "quantize_rows",
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


def _binary(operation: TfliteOperation, plan: Plan) -> Declaration:
    return Declaration(
        own_code(operation),
        since=V1_2,
        overloads=(overload(data("first"), data("second"), level=V1_2),),
        variants=variants_of((Q8, Q8S), plan),
        shape=broadcast_shapes,
        zero_sized=True,
    )


_PAIRS: Any = [(given, result) for given in (F32, F16) for result in (Q8, Q8S)]

_LINEAR_QUANTIZATION_DECLARATIONS = (
    function_of_one(
        TfliteOperation.QUANTIZE_LINEAR, conversions(plan_quantize_linear, _PAIRS), attribute("adds_first", BOOL)
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


_LOWEST, _HIGHEST = -128, 127
_BYTE = 255


def quantize_rows(rows: Array, asymmetric: bool) -> Array:
    """Return the values of `rows` (..., length), in float32, as 8 bits can represent them."""
    if rows.size == 0:
        return rows.copy()
    scale, zero_point = _asymmetric_ranges(rows) if asymmetric else _symmetric_ranges(rows)
    steps = rounded(zero_point + rows * (np.float32(1) / scale if asymmetric else _inverse(rows)))
    lowest = _LOWEST if asymmetric else -_HIGHEST
    result: Array = (np.clip(steps, np.float32(lowest), np.float32(_HIGHEST)) - zero_point) * scale
    return result


def _symmetric_ranges(rows: Array) -> tuple[Array, Array]:
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return np.where(largest > 0, largest / np.float32(_HIGHEST), np.float32(1)), np.zeros_like(largest)


def _inverse(rows: Array) -> Array:
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    return np.float32(_HIGHEST) / np.where(largest > 0, largest, np.float32(1))


def _asymmetric_ranges(rows: Array) -> tuple[Array, Array]:
    """Return the scale of each row and its zero point, chosen for the end of the range with the smaller error."""
    low = np.minimum(rows.min(axis=-1, keepdims=True), 0).astype(np.float64)
    high = np.maximum(rows.max(axis=-1, keepdims=True), 0).astype(np.float64)
    scale = np.where(high > low, (high - low) / (_HIGHEST - _LOWEST), 1.0)
    from_low, from_high = _LOWEST - low / scale, _HIGHEST - high / scale
    is_low = -_LOWEST + np.abs(low / scale) < _HIGHEST + np.abs(high / scale)
    zero_point = np.clip(rounded(np.where(is_low, from_low, from_high)), _LOWEST, _HIGHEST)
    return scale.astype(np.float32), np.where(high > low, zero_point, 0).astype(np.float32)


def quantize_linearly(values: Array) -> Array:
    """Return the values, in float32, as the bytes of ONNX's DynamicQuantizeLinear represent them, with one scale."""
    if values.size == 0:
        return values.copy()
    low, high = np.minimum(values.min(), np.float32(0)), np.maximum(values.max(), np.float32(0))
    scale = (high - low) / np.float32(_BYTE) if high > low else np.float32(1)
    zero_point = np.rint(np.clip(-low / scale, 0, _BYTE))
    result: Array = (np.clip(np.rint(values / scale) + zero_point, 0, _BYTE) - zero_point) * scale
    return result


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
    Declaration(
        own_code(TfliteOperation.DYNAMIC_QUANTIZE),
        since=V1_2,
        overloads=(overload(data("input"), attribute("row_length", INT32), attribute("asymmetric", BOOL), level=V1_2),),
        variants=(Variant({"T": F32}, V1_2, plan_dynamic_quantize),),
        shape=dynamic_quantize_shape,
        zero_sized=True,
    ),
)

DECLARATIONS = (*_LINEAR_QUANTIZATION_DECLARATIONS, *_DYNAMIC_QUANTIZATION_DECLARATIONS)
