"""ABS, EXP, FLOOR, LOG, NEG, RSQRT, SIN and SQRT, as NumPy's functions.

Functions that are exact in every type are computed in that type; the others compute float16 in float32. INT32 wraps
around: the negative of its minimum is its minimum. Quantized RSQRT is a table; inputs without a real root give the
maximum, because there is no quantized infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Plan, Run, Tensor
from nnfmq.operations.fixed_point import INT16_MAX, INT16_MIN, ints, to_int16
from nnfmq.operations.int16_tables import via_lut16
from nnfmq.operations.kernel_adapters import dequantize_array, float_variants, stateless, via_lut8
from nnfmq.operations.normalization import inverse_square_root
from nnfmq.operations.quantization import (
    clamped,
    dequantized_values,
    dtype_range,
    float_ratio,
    real_entries,
    rescaling,
    scaled,
)
from nnfmq.operations.shapes import same_shape, same_shape_up_to_rank_4

__all__ = ["ERFC_POLYNOMIAL", "complementary_error_function", "rsqrt"]


def rsqrt(input: Array) -> Array:
    """Return 1 / √x."""
    result: Array = np.reciprocal(np.sqrt(input))
    return result


def _rsqrt_lut(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """RSQRT through float32; the quotient by the output's scale is rounded half away, then clamped."""
    low, high = dtype_range(output)
    quotients = (rsqrt(dequantized_values(input)) / np.float32(output.scale)).astype(np.float64)
    rounded = np.floor(np.nan_to_num(quotients, nan=np.inf) + 0.5) + output.zero_point
    result: Array = np.clip(rounded, low, high).astype(output.dtype)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Functions of 8 and of 16 bits as TFLite defines them, which are tables but for ABS and NEG, and SQRT of 16 bits.
#
# Of 8 bits, ABS and RSQRT are computed in fixed point. LOG and EXP are computed in float32 and multiplied by the
# reciprocal of the output's scale, SQRT is divided by that scale and rounded toward zero. Where a function is not
# defined, LOG gives the lowest value, SQRT the zero point and RSQRT the highest value. Of 16 bits, RSQRT, LOG and EXP
# are a `LookupTable`.
#
#     C1 the functions of a LookupTable have a positive scale     Q1 range of the real multiplier


_FUNCTION_FRACTION_BITS = 20  # of an inverse square root


def abs_entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """Return the table of absolute values."""
    return clamped(scaled(np.abs(ints(quantized) - input.zero_point), float_ratio(input, output)), output)


def rsqrt_entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """Return the table of 1 / √x."""
    values = ints(quantized) - input.zero_point
    factor = float(np.sqrt(np.float32(input.scale)) * np.float32(output.scale))
    multiplier, shift = fixed_point.quantize_multiplier(1 / factor)
    inverses, right = inverse_square_root(values)
    fractions = fixed_point.multiply(np.ones_like(values), inverses, _FUNCTION_FRACTION_BITS - right)
    roots = fixed_point.multiply(fractions, multiplier, shift - _FUNCTION_FRACTION_BITS)
    return np.where(values > 0, clamped(roots, output), dtype_range(output)[1]).astype(output.dtype)


def sqrt_entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """Return the table of square roots, rounded toward zero."""
    roots = np.sqrt(np.maximum(dequantized_values(input), np.float32(0)))
    return clamped(ints(roots / np.float32(output.scale)), output)


def _total_log(x: Array) -> Array:
    return np.where(x > 0, np.log(x), -np.inf)


def _rounded_once(function: Callable[[Array], Array], x: Array) -> Array:
    """Return a function in float64, rounded to float32: NumPy's own in float32 are less exact."""
    with np.errstate(all="ignore"):
        return function(x.astype(np.float64)).astype(np.float32)


def plan_sixteen_bit_sqrt(input: Tensor, *, output: Tensor) -> Run:
    """Plan the square root, rounded toward zero as in TFLite; that of a negative value is 0."""

    def run(x: Array) -> Array:
        roots = np.sqrt(np.maximum(dequantize_array(x, input), np.float32(0)))
        return to_int16(ints(roots / np.float32(output.scale)))

    return run


def plan_sixteen_bit_abs(input: Tensor, *, output: Tensor) -> Run:
    """Plan the absolute value."""
    if input.scale == output.scale:
        return lambda x: to_int16(np.abs(ints(x)))
    rescale = rescaling(float_ratio(input, output))
    return lambda x: to_int16(rescale(np.abs(ints(x))))


def _function(
    code: OperationType, variants: tuple[op.Variant, ...], *extended: op.Extended, since: int = op.V1_2
) -> op.Declaration:
    return op.Declaration(
        code,
        since=since,
        overloads=(op.overload(op.data("input"), level=since),),
        variants=variants,
        shape=same_shape,
        extended=extended,
    )


def _exact(function: Callable[..., Any], int32_since: int) -> tuple[op.Variant, ...]:
    """Return the variants of a function that is exact in every type."""
    plan = stateless(function)
    return (*op.types_since(op.V1_2, plan, op.F32, op.F16), *op.types_since(int32_since, plan, op.I32))


def _in_bytes(plan: Plan) -> op.Extended:
    return op.tflite(*op.of_types(plan, op.Q8, op.Q8S), zero_sized=True)


def _in_sixteen_bits(plan: Plan) -> op.Extended:
    return op.sixteen_bits(*op.of_types(plan, op.Q16S), zero_sized=True)


def _wider(function: Callable[..., Any], *types: OperandType) -> op.Extended:
    return op.wider(*op.of_types(stateless(function), *types))


_QUANTIZED_RSQRT = op.types_since(op.AIDL_V3, via_lut8(_rsqrt_lut), op.Q8, op.Q8S)

DECLARATIONS = (
    _function(
        OperationType.ABS,
        _exact(np.abs, op.V1_3),
        _wider(np.abs, *op.WIDE),
        _in_bytes(via_lut8(abs_entries)),
        _in_sixteen_bits(plan_sixteen_bit_abs),
    ),
    _function(
        OperationType.NEG,
        _exact(np.negative, op.V1_2),
        _wider(np.negative, *op.WIDE),
        _in_bytes(stateless(np.negative)),
        _in_sixteen_bits(stateless(np.negative)),
    ),
    _function(
        OperationType.EXP,
        float_variants(stateless(np.exp)),
        _wider(np.exp, op.F64),
        _in_bytes(via_lut8(real_entries(np.exp))),
        _in_sixteen_bits(via_lut16(partial(_rounded_once, np.exp))),
    ),
    _function(
        OperationType.LOG,
        float_variants(stateless(np.log)),
        _wider(np.log, op.F64),
        _in_bytes(via_lut8(real_entries(_total_log))),
        _in_sixteen_bits(via_lut16(partial(_rounded_once, np.log), INT16_MIN)),
    ),
    _function(OperationType.SIN, float_variants(stateless(np.sin)), _wider(np.sin, op.F64)),
    _function(
        OperationType.SQRT,
        float_variants(stateless(np.sqrt)),
        _wider(np.sqrt, op.F64),
        _in_bytes(via_lut8(sqrt_entries)),
        _in_sixteen_bits(plan_sixteen_bit_sqrt),
    ),
    _function(
        OperationType.RSQRT,
        (*float_variants(stateless(rsqrt)), *_QUANTIZED_RSQRT),
        _wider(rsqrt, op.F64),
        _in_bytes(via_lut8(rsqrt_entries)),
        _in_sixteen_bits(via_lut16(rsqrt, INT16_MAX)),
    ),
    op.Declaration(
        OperationType.FLOOR,
        since=op.V1_0,
        overloads=(op.overload(op.data("input")),),
        variants=op.types_since(op.V1_0, stateless(np.floor), op.F32, op.F16),
        shape=same_shape_up_to_rank_4,
        extended=(op.wider(*op.of_types(stateless(np.floor), op.F64), shape=same_shape),),
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# The complementary error function, which NumPy does not have.


ERFC_POLYNOMIAL = (
    -1.26551223, 1.00002368, 0.37409196, 0.0967841895, -0.186288062, 0.278868084, -1.135204, 1.48851589, -0.822152234,
    0.170872778,
)  # fmt: skip
"""Coefficients of log(erfc(x) / t) + x² in t = 1 / (1 + x / 2), lowest power first: a Chebyshev fit on [0, 1]."""


def complementary_error_function(x: Array) -> Array:
    """Return 1 - erf(x) of float64 values from 0 up, to 1.2e-7 of itself: e to a polynomial of 1 / (1 + x / 2)."""
    t = 1 / (1 + 0.5 * x)
    exponent = np.polynomial.polynomial.polyval(t, ERFC_POLYNOMIAL)
    result: Array = t * np.exp(exponent - x * x)
    return result
