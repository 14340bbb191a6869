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

from nnfmq.hal.extensions import TENSOR_INT64, TENSOR_UINT32, TENSOR_UINT64, TfliteOperation
from nnfmq.hal.types import OperandType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.fixed_point import ints, rounded, to_int16
from nnfmq.operations.int16_tables import LookupTable
from nnfmq.operations.kernel_adapters import by_pairs, float_variants, stateless, via_lut8
from nnfmq.operations.quantization import clamped, dtype_range, float_ratio, quantized_range, rescaling, scaled
from nnfmq.operations.shapes import broadcast_shapes, require, same_shape
from nnfmq.operations.tflite_extension import declare, function_of_one
from nnfmq.operations.unary import complementary_error_function

__all__ = [
    "DECLARATIONS",
    "clamp_entries",
    "erf",
    "erf_of_float64",
    "error_function",
    "fake_quant",
    "floor_mod",
    "gelu",
    "leaky_relu_entries",
    "left_shift",
    "mish",
    "plan_bitcast",
    "plan_rounded",
    "plan_sixteen_bit_gelu",
    "plan_sixteen_bit_leaky_relu",
    "plan_squared_difference",
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
    steps = rounded(results) + np.float32(output.zero_point)
    table: Array = np.clip(steps, *dtype_range(output)).astype(output.dtype)
    return table


def _gelu_of_one(x: np.float32) -> np.float32:
    return np.float32(0.5) * x * np.float32(math.erfc(x * np.float32(-math.sqrt(0.5))))


def _gelu_approximation(x: np.float32) -> np.float32:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.float32(math.tanh(inner)))


def plan_sixteen_bit_gelu(input: Tensor, *, output: Tensor, approximate: bool) -> Run:
    """Plan GELU of 16-bit tensors."""
    table = LookupTable.of(partial(gelu, approximate=bool(approximate)), input, output)
    return lambda x: to_int16(table(x))


def fake_quant(x: Array, *, low: float, high: float, step: float) -> Array:
    """Return values in [low, high], rounded to `low` plus a multiple of `step`; halves go up, and NaN gives `low`."""
    above = np.fmin(np.fmax(x, np.float32(low)), np.float32(high)) - np.float32(low)
    steps = np.floor(above * (np.float32(1) / np.float32(step)) + np.float32(0.5))
    result: Array = steps * np.float32(step) + np.float32(low)
    return result


def plan_bitcast(input: Tensor, *, output: Tensor) -> Run:
    """Plan the same bytes as elements of another type of the same size."""
    return lambda array: np.ascontiguousarray(array).view(output.dtype)


_FOUR_BYTES, _EIGHT_BYTES = (op.F32, op.I32, TENSOR_UINT32), (op.F64, TENSOR_INT64, TENSOR_UINT64)
_SAME_SIZE = [
    pair for kinds in (_FOUR_BYTES, _EIGHT_BYTES, (op.Q8, op.Q8S)) for pair in itertools.permutations(kinds, 2)
]


def _function_of_floats(
    operation: TfliteOperation, function: Callable[..., Array], of_float64: Callable[..., Array]
) -> op.Declaration:
    variants = (*float_variants(stateless(function)), *op.of_types(stateless(of_float64), op.F64))
    return function_of_one(operation, variants)


_UNARY_FUNCTIONS_DECLARATIONS = (
    function_of_one(
        TfliteOperation.GELU,
        (
            *float_variants(stateless(gelu)),
            *op.of_types(via_lut8(_gelu_table), op.Q8, op.Q8S),
            *op.of_types(plan_sixteen_bit_gelu, op.Q16S),
        ),
        op.attribute("approximate", op.BOOL),
    ),
    _function_of_floats(TfliteOperation.COS, np.cos, np.cos),
    function_of_one(TfliteOperation.BITCAST, op.conversions(plan_bitcast, *_SAME_SIZE)),
    declare(
        TfliteOperation.FAKE_QUANT,
        op.data("x"),
        *(op.attribute(name, op.FLOAT32) for name in ("low", "high", "step")),
        variants=op.of_types(stateless(fake_quant), op.F32),
        shape=same_shape,
        zero_sized=True,
    ),
    _function_of_floats(TfliteOperation.ERF, erf, erf_of_float64),
    _function_of_floats(TfliteOperation.ROUND, np.rint, np.rint),
    function_of_one(TfliteOperation.SIGN, op.of_types(stateless(np.sign), op.F32, op.F16, op.I32, *op.WIDE)),
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
    function_of_one(operation, (*float_variants(stateless(function)), *op.of_types(stateless(function), op.F64)))
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
    declare(
        TfliteOperation.ROUND_TO_FORMAT,
        op.data("input"),
        op.attribute("fraction"),
        op.attribute("exponent"),
        op.attribute("largest", op.FLOAT32),
        op.attribute("overflow"),
        variants=op.of_types(plan_rounded, op.F32),
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


def _binary(operation: TfliteOperation, kernel: Callable[..., Array], types: Iterable[OperandType]) -> op.Declaration:
    return declare(
        operation,
        op.data("first"),
        op.data("second"),
        variants=op.of_types(stateless(kernel), *types),
        shape=broadcast_shapes,
        zero_sized=True,
    )


_INTEGERS = (op.I32, op.Q8, op.Q8S, op.Q16S, *op.WIDE_INTEGERS)

_INTEGER_FUNCTIONS_DECLARATIONS = (
    _binary(TfliteOperation.FLOOR_MOD, floor_mod, (op.F32, op.F64, *_INTEGERS)),
    _binary(TfliteOperation.TRUNCATED_DIV, truncated_div, (op.I32, *op.WIDE_INTEGERS)),
    _binary(TfliteOperation.BITWISE_XOR, np.bitwise_xor, (*_INTEGERS, op.B8)),
    _binary(TfliteOperation.BITWISE_AND, np.bitwise_and, (*_INTEGERS, op.B8)),
    _binary(TfliteOperation.LEFT_SHIFT, left_shift, _INTEGERS),
    _binary(TfliteOperation.RIGHT_SHIFT, right_shift, _INTEGERS),
    _binary(TfliteOperation.ATAN2, np.arctan2, (op.F32, op.F64)),
    function_of_one(
        TfliteOperation.SATURATE,
        (
            *op.conversions(stateless(saturate), *((kind, op.I32) for kind in op.WIDE_INTEGERS)),
            *op.conversions(stateless(saturate_floats), *((kind, TENSOR_INT64) for kind in (op.F32, op.F16))),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# Functions of quantized values that the HAL does not have, as TFLite defines them, in fixed point.
#
#     Q1 range of the real multiplier


def clamp_entries(quantized: Array, input: Tensor, output: Tensor, *, low: float, high: float) -> Array:
    """Return the table of the real values limited to `low` and `high`, which may be infinite."""
    values = scaled(ints(quantized) - input.zero_point, float_ratio(input, output))
    return np.clip(values + output.zero_point, *quantized_range(low, high, output)).astype(output.dtype)


def leaky_relu_entries(quantized: Array, input: Tensor, output: Tensor, *, alpha: float) -> Array:
    """Return the table of x if it is not negative, else alpha · x; the slope is rounded to float32."""
    values, slope = ints(quantized) - input.zero_point, np.float32(input.scale) * np.float32(alpha)
    below = scaled(values, abs(float(slope / np.float32(output.scale)))) * (-1 if alpha < 0 else 1)
    return clamped(np.where(values >= 0, scaled(values, float_ratio(input, output)), below), output)


_EXTRA_BITS = 7  # of the common scale of a difference


def plan_squared_difference(first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan (first - second)²; TFLite multiplies the common scale by itself in float64."""
    common = 2.0 * max(first.scale, second.scale)
    one, other = (fixed_point.quantize_multiplier_below_one(tensor.scale / common) for tensor in (first, second))
    real = common * common / float(np.float32(1 << 2 * _EXTRA_BITS) * np.float32(output.scale))
    total = fixed_point.quantize_multiplier_below_one(real)

    def run(a: Array, b: Array) -> Array:
        minuend = fixed_point.multiply((ints(a) - first.zero_point) << _EXTRA_BITS, *one)
        subtrahend = fixed_point.multiply((ints(b) - second.zero_point) << _EXTRA_BITS, *other)
        return clamped(fixed_point.multiply(np.square(minuend - subtrahend), *total), output)

    return by_pairs(run, first, second, output)


def plan_sixteen_bit_leaky_relu(input: Tensor, *, output: Tensor, alpha: float) -> Run:
    """Plan x if it is not negative, else alpha · x, with a constant alpha."""
    slope = np.float32(input.scale) * np.float32(alpha) / np.float32(output.scale)
    multiplier, shift = fixed_point.quantize_multiplier(float(abs(slope)))
    sign = -1 if alpha < 0 else 1
    rescale = rescaling(float_ratio(input, output))

    def run(x: Array) -> Array:
        scaled = sign * fixed_point.multiply(ints(x), multiplier, shift)
        return to_int16(np.where(x >= 0, rescale(x), scaled))

    return run


def _of_bytes(operation: TfliteOperation, plan: Plan, *attributes: op.Parameter) -> op.Declaration:
    return function_of_one(operation, op.of_types(plan, op.Q8, op.Q8S), *attributes)


_ALPHA = op.attribute("alpha", op.FLOAT32)

_QUANTIZED_FUNCTIONS_DECLARATIONS = (
    _of_bytes(
        TfliteOperation.Q8_CLAMP,
        via_lut8(clamp_entries),
        op.attribute("low", op.FLOAT32),
        op.attribute("high", op.FLOAT32),
    ),
    _of_bytes(TfliteOperation.Q8_LEAKY_RELU, via_lut8(leaky_relu_entries), _ALPHA),
    function_of_one(TfliteOperation.Q16_LEAKY_RELU, op.of_types(plan_sixteen_bit_leaky_relu, op.Q16S), _ALPHA),
    declare(
        TfliteOperation.Q8_SQUARED_DIFFERENCE,
        op.data("first"),
        op.data("second"),
        variants=op.of_types(plan_squared_difference, op.Q8, op.Q8S),
        shape=broadcast_shapes,
        zero_sized=True,
    ),
)

DECLARATIONS = (
    *_UNARY_FUNCTIONS_DECLARATIONS,
    *_REAL_FUNCTIONS_DECLARATIONS,
    *_NARROW_FLOATS_DECLARATIONS,
    *_INTEGER_FUNCTIONS_DECLARATIONS,
    *_QUANTIZED_FUNCTIONS_DECLARATIONS,
)
