"""ABS, EXP, FLOOR, LOG, NEG, RSQRT, SIN and SQRT: a function of one element, by numpy's own.

Functions that are exact in any type compute in it; the others take float16 through float32. INT32 wraps around: its
least value has no opposite. RSQRT of codes is a table; what has no real root becomes the largest code, as there is
no other code for infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations.kernel_adapters import direct, half, table
from nnfmq.operations.quantization import code_values, type_range
from nnfmq.operations.shapes import same, same_up_to_4
from nnfmq.operations.signature import (
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
    form,
)


def rsqrt(input: Array) -> Array:
    """Return 1 / √x."""
    result: Array = np.reciprocal(np.sqrt(input))
    return result


def _rsqrt_codes(codes: Array, input: Tensor, output: Tensor) -> Array:
    """RSQRT through float32; the quotient by the output's scale is rounded half away, then clamped."""
    low, high = type_range(output)
    quotients = (rsqrt(code_values(input)) / np.float32(output.scale)).astype(np.float64)
    rounded = np.floor(np.nan_to_num(quotients, nan=np.inf) + 0.5) + output.zero_point
    result: Array = np.clip(rounded, low, high).astype(output.dtype)
    return result


def _exact(code: OperationType, function: Callable[..., Any], int32_since: int) -> Declaration:
    return Declaration(
        code,
        since=V1_2,
        forms=(form(data("input"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, direct(function)),
            Variant({"T": F16}, V1_2, direct(function)),
            Variant({"T": I32}, int32_since, direct(function)),
        ),
        shape=same,
    )


def _rounded(code: OperationType, function: Callable[..., Any], codes: tuple[Variant, ...] = ()) -> Declaration:
    return Declaration(
        code,
        since=V1_2,
        forms=(form(data("input"), level=V1_2),),
        variants=(
            Variant({"T": F32}, V1_2, direct(function)),
            Variant({"T": F16}, V1_2, half(direct(function))),
            *codes,
        ),
        shape=same,
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
        (Variant({"T": Q8}, AIDL_V3, table(_rsqrt_codes)), Variant({"T": Q8S}, AIDL_V3, table(_rsqrt_codes))),
    ),
    Declaration(
        OperationType.FLOOR,
        since=V1_0,
        forms=(form(data("input")),),
        variants=(Variant({"T": F32}, V1_0, direct(np.floor)), Variant({"T": F16}, V1_2, direct(np.floor))),
        shape=same_up_to_4,
    ),
)
