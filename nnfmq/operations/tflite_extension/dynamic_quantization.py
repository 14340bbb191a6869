"""DYNAMIC_QUANTIZE: floats rounded to the 8-bit values that TFLite's operators with quantized weights compute with.

TFLite quantizes the float input of such an operator at each execution: each row has a scale of its own, and a zero
point too if it is asymmetric. The result is the real numbers of the quantized values. Their products with dequantized
weights are sums of the same terms as TFLite's integer sums.

    C1 the count of elements is a multiple of the row's length, which is positive; 0 means all but the first dimension
"""

from __future__ import annotations

import math

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import (
    BOOL,
    F32,
    INT32,
    V1_2,
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
from nnfmq.operations.tflite_extension.declaring import own_code
from nnfmq.operations.tflite_extension.sixteen_bits import rounded

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


DECLARATIONS = (
    Declaration(
        own_code(TfliteOperation.DYNAMIC_QUANTIZE),
        since=V1_2,
        overloads=(overload(data("input"), attribute("row_length", INT32), attribute("asymmetric", BOOL), level=V1_2),),
        variants=(Variant({"T": F32}, V1_2, plan_dynamic_quantize),),
        shape=dynamic_quantize_shape,
        zero_sized=True,
    ),
)
