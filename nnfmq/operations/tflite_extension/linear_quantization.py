"""QUANTIZE_LINEAR, QLINEAR_ADD and QLINEAR_MUL: quantization as ONNX and ONNX Runtime define it.

QUANTIZE_LINEAR takes the place of the HAL's QUANTIZE: the quotient is rounded to the nearest integer, halves to the
even one, before the zero point is added. ONNX does not define the result for NaN: it is the lowest value, as in ONNX
Runtime on x86. Operators of ONNX Runtime's own domain add the zero point first, which decides halves if it is odd.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations.quantization import all_quantized_values, dtype_range
from nnfmq.operations.shapes import broadcast_shapes
from nnfmq.operations.signature import (
    BOOL,
    F16,
    F32,
    Q8,
    Q8S,
    V1_2,
    Array,
    Declaration,
    Plan,
    Run,
    Tensor,
    attribute,
    data,
    overload,
)
from nnfmq.operations.tflite_extension.declaring import conversions, function_of_one, own_code, variants_of


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

DECLARATIONS = (
    function_of_one(
        TfliteOperation.QUANTIZE_LINEAR, conversions(plan_quantize_linear, _PAIRS), attribute("adds_first", BOOL)
    ),
    _binary(TfliteOperation.QLINEAR_ADD, plan_qlinear_add),
    _binary(TfliteOperation.QLINEAR_MUL, plan_qlinear_mul),
)
