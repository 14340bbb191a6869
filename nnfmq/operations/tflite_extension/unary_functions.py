"""GELU, COS, ERF, ROUND, SIGN, FAKE_QUANT and BITCAST: functions of one value.

GELU of quantized values is a table. TFLite fills it in float32, with the reciprocal of the output's scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np

from nnfmq.hal.tflite_codes import TENSOR_INT64, TENSOR_UINT32, TENSOR_UINT64, WIDE_TYPES, TfliteOperation
from nnfmq.operations.complementary_error import complementary_error_function
from nnfmq.operations.kernel_adapters import stateless, via_lut8
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.shapes import same_shape
from nnfmq.operations.signature import (
    BOOL,
    F16,
    F32,
    FLOAT32,
    I32,
    Q8,
    Q8S,
    Q16S,
    V1_2,
    Array,
    Declaration,
    Run,
    Tensor,
    attribute,
    data,
    overload,
)
from nnfmq.operations.tflite_extension.declaring import (
    F64,
    conversions,
    float_variants,
    function_of_one,
    own_code,
    variants_of,
)
from nnfmq.operations.tflite_extension.sixteen_bits import LookupTable, saturated

_TABLE_STEPS = 64  # of the error function's table for each unit: cubic interpolation is then exact to 2e-10
_TABLE_END = 6  # the error function is 1 from here on, as a float32


def gelu(x: Array, approximate: bool) -> Array:
    """Return x · Φ(x), Φ being the normal distribution; with the approximation of Φ by tanh if `approximate`."""
    wide = x.astype(np.float64)
    if approximate:
        # 1 + tanh(u) is 2 / (1 + e^-2u), which has no cancellation where Φ is small.
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        result: Array = wide / (1 + np.exp(-2 * inner))
        return result.astype(x.dtype)
    outside = 0.5 * complementary_error_function(np.abs(wide) * math.sqrt(0.5))
    return (wide * np.where(x < 0, outside, 1 - outside)).astype(x.dtype)


def erf(x: Array) -> Array:
    """Return the error function of floats."""
    result: Array = error_function(x.astype(np.float64)).astype(x.dtype)
    return result


def erf_of_float64(x: Array) -> Array:
    """Return the error function to the precision of float64."""
    result: Array = np.vectorize(math.erf, otypes=[np.float64])(x)
    return result


def error_function(x: Array) -> Array:
    """Return erf of float64 values, to 2e-10: a cubic between the entries of a table, from values and slopes."""
    values, slopes = _erf_table()
    position = np.clip(np.nan_to_num(np.abs(x)) * _TABLE_STEPS, 0, len(values) - 2)
    index = position.astype(np.intp)
    t = np.minimum(position - index, 1)
    low, high = values[index], values[index + 1]
    rise, start, end = high - low, slopes[index], slopes[index + 1]
    cubic = low + t * (start + t * (3 * rise - 2 * start - end + t * (start + end - 2 * rise)))
    return np.where(np.isnan(x), x, np.copysign(cubic, x))


@cache
def _erf_table() -> tuple[Array, Array]:
    """Return the values of erf at the steps, and its slopes there for each step."""
    points = [index / _TABLE_STEPS for index in range(_TABLE_STEPS * _TABLE_END + 2)]
    values = np.array([math.erf(point) for point in points])
    return values, np.array([2 / math.sqrt(math.pi) * math.exp(-point * point) / _TABLE_STEPS for point in points])


def _gelu_table(quantized: Array, input: Tensor, output: Tensor, approximate: bool) -> Array:
    function = _gelu_approximation if approximate else _gelu_of_one
    real = np.float32(input.scale) * (quantized.astype(np.int32) - input.zero_point).astype(np.float32)
    results = np.array([function(value) for value in real], np.float32) * (np.float32(1) / np.float32(output.scale))
    rounded = np.copysign(np.floor(np.abs(results) + np.float32(0.5)), results)
    low, high = dtype_range(output)
    table: Array = np.clip(rounded + np.float32(output.zero_point), low, high).astype(output.dtype)
    return table


def _gelu_of_one(x: np.float32) -> np.float32:
    return np.float32(0.5) * x * np.float32(math.erfc(x * np.float32(-math.sqrt(0.5))))


def _gelu_approximation(x: np.float32) -> np.float32:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.float32(math.tanh(inner)))


def plan_sixteen_bit_gelu(input: Tensor, *, output: Tensor, approximate: bool) -> Run:
    """Plan GELU of 16-bit tensors."""
    table = LookupTable.of(partial(gelu, approximate=bool(approximate)), input, output)
    return lambda x: saturated(table(x))


def fake_quant(x: Array, *, low: float, high: float, step: float) -> Array:
    """Return values in [low, high], rounded to `low` plus a multiple of `step`; halves go up, and NaN gives `low`."""
    above = np.fmin(np.fmax(x, np.float32(low)), np.float32(high)) - np.float32(low)
    steps = np.floor(above * (np.float32(1) / np.float32(step)) + np.float32(0.5))
    result: Array = steps * np.float32(step) + np.float32(low)
    return result


def plan_bitcast(input: Tensor, *, output: Tensor) -> Run:
    """Plan the same bytes as elements of another type of the same size."""
    return lambda array: np.ascontiguousarray(array).view(output.dtype)


_FOUR_BYTES, _EIGHT_BYTES = (F32, I32, TENSOR_UINT32), (F64, TENSOR_INT64, TENSOR_UINT64)
_SAME_SIZE = [pair for kinds in (_FOUR_BYTES, _EIGHT_BYTES, (Q8, Q8S)) for pair in itertools.permutations(kinds, 2)]


def _function_of_floats(
    operation: TfliteOperation, function: Callable[..., Array], of_float64: Callable[..., Array]
) -> Declaration:
    variants = (*float_variants(stateless(function)), *variants_of((F64,), stateless(of_float64)))
    return function_of_one(operation, variants)


DECLARATIONS = (
    function_of_one(
        TfliteOperation.GELU,
        (
            *float_variants(stateless(gelu)),
            *variants_of((Q8, Q8S), via_lut8(_gelu_table)),
            *variants_of((Q16S,), plan_sixteen_bit_gelu),
        ),
        attribute("approximate", BOOL),
    ),
    _function_of_floats(TfliteOperation.COS, np.cos, np.cos),
    function_of_one(TfliteOperation.BITCAST, conversions(plan_bitcast, _SAME_SIZE)),
    Declaration(
        own_code(TfliteOperation.FAKE_QUANT),
        since=V1_2,
        overloads=(overload(data("x"), *(attribute(name, FLOAT32) for name in ("low", "high", "step")), level=V1_2),),
        variants=variants_of((F32,), stateless(fake_quant)),
        shape=same_shape,
        zero_sized=True,
    ),
    _function_of_floats(TfliteOperation.ERF, erf, erf_of_float64),
    _function_of_floats(TfliteOperation.ROUND, np.rint, np.rint),
    function_of_one(TfliteOperation.SIGN, variants_of((F32, F16, I32, *WIDE_TYPES), stateless(np.sign))),
)
