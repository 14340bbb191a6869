"""Functions of one or two values, element by element, as TFLite and ONNX define them.

GELU of quantized values is a table. TFLite fills it in float32, with the reciprocal of the output's scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np

from nnfmq.hal.extensions import TENSOR_INT64, TENSOR_UINT32, TENSOR_UINT64, WIDE_TYPES, TfliteOperation
from nnfmq.hal.types import OperandType
from nnfmq.operations.declaration import (
    B8,
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
    Shape,
    Tensor,
    attribute,
    data,
    overload,
)
from nnfmq.operations.kernel_adapters import stateless, via_lut8
from nnfmq.operations.quantization import dtype_range
from nnfmq.operations.shapes import broadcast_shapes, require, same_shape
from nnfmq.operations.tflite_extension.declaration import (
    F64,
    WIDE_INTEGERS,
    conversions,
    float_variants,
    function_of_one,
    own_code,
    variants_of,
)
from nnfmq.operations.tflite_extension.sixteen_bits import LookupTable, saturated
from nnfmq.operations.unary import complementary_error_function

__all__ = [
    "DECLARATIONS",
    "erf",
    "erf_of_float64",
    "error_function",
    "fake_quant",
    "floor_mod",
    "gelu",
    "left_shift",
    "mish",
    "plan_bitcast",
    "plan_rounded",
    "plan_sixteen_bit_gelu",
    "right_shift",
    "rounded_shape",
    "saturate",
    "saturate_floats",
    "softplus",
    "truncated_div",
]

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


_UNARY_FUNCTIONS_DECLARATIONS = (
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


# ----------------------------------------------------------------------------------------------------------------------
# Trigonometric, hyperbolic and inverse functions, SOFTPLUS and MISH: functions of one float, as ONNX defines them.
#
# Each is within a few units in the last place over the whole range of its type. float16 is computed in float32.


def softplus(x: Array) -> Array:
    """Return log(1 + e^x)."""
    result: Array = np.logaddexp(x, x.dtype.type(0))
    return result


def mish(x: Array) -> Array:
    """Return x · tanh(softplus(x)), from the smaller one of e^x and e^-x."""
    one, two = x.dtype.type(1), x.dtype.type(2)
    power = np.exp(-np.abs(x))
    above = np.where(x < 0, power * (power + two), one + two * power)
    result: Array = x * (above / (above + two * np.where(x < 0, one, power * power)))
    return result


_FUNCTIONS: dict[TfliteOperation, Callable[..., Any]] = {
    TfliteOperation.TAN: np.tan,
    TfliteOperation.ASIN: np.arcsin,
    TfliteOperation.ACOS: np.arccos,
    TfliteOperation.ATAN: np.arctan,
    TfliteOperation.SINH: np.sinh,
    TfliteOperation.COSH: np.cosh,
    TfliteOperation.ASINH: np.arcsinh,
    TfliteOperation.ACOSH: np.arccosh,
    TfliteOperation.ATANH: np.arctanh,
    TfliteOperation.SOFTPLUS: softplus,
    TfliteOperation.MISH: mish,
}

_REAL_FUNCTIONS_DECLARATIONS = tuple(
    function_of_one(operation, (*float_variants(stateless(function)), *variants_of((F64,), stateless(function))))
    for operation, function in _FUNCTIONS.items()
)


# ----------------------------------------------------------------------------------------------------------------------
# ROUND_TO_FORMAT: floats rounded to those that a narrower format has.
#
# C1 the format has between 0 and 23 bits of fraction and an exponent of at least -149 C2 overflow, what larger numbers
# become, is 0 (the largest), 1 (infinity), 2 (NaN) or 3 (the largest, and 0 from NaN)


_FRACTION_BITS, _MIN_EXPONENT, _OVERFLOWS = 23, -149, 4
_WITHOUT_NAN = 3


def rounded_shape(input: Shape, *, fraction: int, exponent: int, largest: float, overflow: int) -> Shape:
    """Return the shape of the input."""
    fits = 0 <= fraction <= _FRACTION_BITS and _MIN_EXPONENT <= exponent <= -_MIN_EXPONENT
    require(fits, "C1", f"{fraction} bits of fraction, exponents from {exponent}")
    require(0 <= overflow < _OVERFLOWS, "C2", f"overflow is {overflow}")
    return input


def plan_rounded(input: Tensor, *, output: Tensor, fraction: int, exponent: int, largest: float, overflow: int) -> Run:
    """Plan the nearest numbers with `fraction` bits, the smallest normal `exponent`, and none above `largest`."""
    beyond = (largest, np.inf, np.nan, largest)[overflow]

    def run(array: Array) -> Array:
        wide = array.astype(np.float64)
        _, exponents = np.frexp(wide)
        unit = np.maximum(exponents - 1, exponent) - fraction
        found = np.ldexp(np.rint(np.ldexp(wide, -unit)), unit)
        found = np.where(np.abs(found) > largest, np.copysign(beyond, wide), found)
        if overflow == _WITHOUT_NAN:
            found = np.nan_to_num(found, nan=0.0)
        result: Array = found.astype(np.float32)
        return result

    return run


_NARROW_FLOATS_DECLARATIONS = (
    Declaration(
        own_code(TfliteOperation.ROUND_TO_FORMAT),
        since=V1_2,
        overloads=(
            overload(
                data("input"),
                attribute("fraction"),
                attribute("exponent"),
                attribute("largest", FLOAT32),
                attribute("overflow"),
                level=V1_2,
            ),
        ),
        variants=variants_of((F32,), plan_rounded),
        shape=rounded_shape,
        zero_sized=True,
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# FLOOR_MOD, TRUNCATED_DIV, BITWISE_AND, BITWISE_XOR, shifts and ATAN2: functions of two broadcast arrays; SATURATE.
#
# C1 no integer divisor is 0


def floor_mod(first: Array, second: Array) -> Array:
    """Return the remainder of the quotient that is rounded down."""
    _require_divisors(second)
    result: Array = np.mod(first, second)
    return result


def truncated_div(first: Array, second: Array) -> Array:
    """Return the quotient of integers, rounded towards zero; the minimum divided by -1 is the minimum."""
    _require_divisors(second)
    quotient, rest = np.divmod(first, second)
    result: Array = quotient + ((rest != 0) & ((first < 0) != (second < 0)))
    return result


def _require_divisors(second: Array) -> None:
    require(second.dtype.kind == "f" or bool(second.all()), "C1", "a divisor is 0")


def right_shift(first: Array, second: Array) -> Array:
    """Return `first` shifted by `second` bits, which is limited to 0 and the number of bits minus 1.

    An unsigned integer shifted by all its bits is 0.
    """
    bits = 8 * first.dtype.itemsize
    result: Array = first >> np.clip(second, 0, bits - 1).astype(first.dtype)
    return np.where(second < bits, result, result.dtype.type(0)) if first.dtype.kind == "u" else result


def left_shift(first: Array, second: Array) -> Array:
    """Return `first` shifted by `second` bits; 0 if these are negative, or as many as the type has."""
    bits = 8 * first.dtype.itemsize
    inside = (second >= 0) & (second < bits)
    result: Array = np.where(inside, first << np.where(inside, second, 0).astype(first.dtype), 0).astype(first.dtype)
    return result


def saturate(input: Array) -> Array:
    """Return integers as INT32; those beyond it become its limits."""
    limits = np.iinfo(np.int32)
    low = input if input.dtype.kind == "u" else np.maximum(input, limits.min)
    return np.minimum(low, limits.max).astype(np.int32)


def saturate_floats(input: Array) -> Array:
    """Return floats as INT64, rounded towards zero; those beyond it become its limits, and NaN becomes 0."""
    real, limits = input.astype(np.float64), np.iinfo(np.int64)
    is_high, is_low = real >= 2.0**63, real < -(2.0**63)
    inside = np.where(is_high | is_low | np.isnan(real), 0, real).astype(np.int64)
    return np.where(is_high, limits.max, np.where(is_low, limits.min, inside))


def _binary(operation: TfliteOperation, kernel: Callable[..., Array], types: Iterable[OperandType]) -> Declaration:
    return Declaration(
        own_code(operation),
        since=V1_2,
        overloads=(overload(data("first"), data("second"), level=V1_2),),
        variants=variants_of(types, stateless(kernel)),
        shape=broadcast_shapes,
        zero_sized=True,
    )


_INTEGERS = (I32, Q8, Q8S, Q16S, *WIDE_INTEGERS)

_INTEGER_FUNCTIONS_DECLARATIONS = (
    _binary(TfliteOperation.FLOOR_MOD, floor_mod, (F32, F64, *_INTEGERS)),
    _binary(TfliteOperation.TRUNCATED_DIV, truncated_div, (I32, *WIDE_INTEGERS)),
    _binary(TfliteOperation.BITWISE_XOR, np.bitwise_xor, (*_INTEGERS, B8)),
    _binary(TfliteOperation.BITWISE_AND, np.bitwise_and, (*_INTEGERS, B8)),
    _binary(TfliteOperation.LEFT_SHIFT, left_shift, _INTEGERS),
    _binary(TfliteOperation.RIGHT_SHIFT, right_shift, _INTEGERS),
    _binary(TfliteOperation.ATAN2, np.arctan2, (F32, F64)),
    function_of_one(
        TfliteOperation.SATURATE,
        (
            *conversions(stateless(saturate), ((kind, I32) for kind in WIDE_INTEGERS)),
            *conversions(stateless(saturate_floats), ((kind, TENSOR_INT64) for kind in (F32, F16))),
        ),
    ),
)

DECLARATIONS = (
    *_UNARY_FUNCTIONS_DECLARATIONS,
    *_REAL_FUNCTIONS_DECLARATIONS,
    *_NARROW_FLOATS_DECLARATIONS,
    *_INTEGER_FUNCTIONS_DECLARATIONS,
)
