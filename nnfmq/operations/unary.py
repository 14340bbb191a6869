"""ABS, EXP, FLOOR, LOG, NEG, RSQRT, SIN and SQRT, as NumPy's functions.

Functions that are exact in every type are computed in that type; the others compute float16 in float32. INT32 wraps
around: the negative of its minimum is its minimum. Quantized RSQRT is a table; inputs without a real root give the
maximum, because there is no quantized infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import (
    AIDL_V3,
    F16,
    F32,
    I32,
    Q8,
    Q8S,
    V1_0,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Tensor,
    Variant,
    data,
    overload,
)
from nnfmq.operations.kernel_adapters import fp16_via_fp32, stateless, via_lut8
from nnfmq.operations.quantization import dequantized_values, dtype_range
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


def _exact(code: OperationType, function: Callable[..., Any], int32_since: int) -> Declaration:
    return Declaration(
        code,
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, stateless(function)),
            Variant({"T": F16}, V1_2, stateless(function)),
            Variant({"T": I32}, int32_since, stateless(function)),
        ),
        shape=same_shape,
    )


def _rounded(code: OperationType, function: Callable[..., Any], quantized: tuple[Variant, ...] = ()) -> Declaration:
    return Declaration(
        code,
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, stateless(function)),
            Variant({"T": F16}, V1_2, fp16_via_fp32(stateless(function))),
            *quantized,
        ),
        shape=same_shape,
    )


DECLARATIONS = (
    _exact(OperationType.ABS, np.abs, V1_3),
    _exact(OperationType.NEG, np.negative, V1_2),
    _rounded(OperationType.EXP, np.exp),
    _rounded(OperationType.LOG, np.log),
    _rounded(OperationType.SIN, np.sin),
    _rounded(OperationType.SQRT, np.sqrt),
    _rounded(
        OperationType.RSQRT,
        rsqrt,
        (Variant({"T": Q8}, AIDL_V3, via_lut8(_rsqrt_lut)), Variant({"T": Q8S}, AIDL_V3, via_lut8(_rsqrt_lut))),
    ),
    Declaration(
        OperationType.FLOOR,
        since=V1_0,
        overloads=(overload(data("input")),),
        variants=(Variant({"T": F32}, V1_0, stateless(np.floor)), Variant({"T": F16}, V1_2, stateless(np.floor))),
        shape=same_shape_up_to_rank_4,
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
