"""FLOOR_MOD, TRUNCATED_DIV, BITWISE_AND, BITWISE_XOR, shifts and ATAN2: functions of two broadcast arrays; SATURATE.

C1 no integer divisor is 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from nnfmq.hal.tflite_codes import TENSOR_INT64, TfliteOperation
from nnfmq.hal.types import OperandType
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.shapes import broadcast_shapes, require
from nnfmq.operations.signature import B8, F16, F32, I32, Q8, Q8S, Q16S, V1_2, Array, Declaration, data, overload
from nnfmq.operations.tflite_extension.declaring import (
    F64,
    WIDE_INTEGERS,
    conversions,
    function_of_one,
    own_code,
    variants_of,
)


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

DECLARATIONS = (
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
