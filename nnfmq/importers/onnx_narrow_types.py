"""Element types narrower than those of the HAL: which numbers they have.

Their elements are INT32 or FLOAT32 in the HAL model, and results are wrapped or rounded to what the type has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["FLOAT_FORMATS", "FloatFormat", "integer_limits"]

_LIMITS = {"int2": (-2, 1), "uint2": (0, 3), "int4": (-8, 7), "uint4": (0, 15)}


class FloatFormat(NamedTuple):
    """A floating-point type; `overflow` says what larger numbers become: 0 or 3 the largest, 1 infinity, 2 NaN.

    With 3, for types without NaN, NaN becomes 0.
    """

    fraction: int
    exponent: int
    largest: float
    overflow: int


FLOAT_FORMATS = {
    "bfloat16": FloatFormat(7, -126, 3.3895313892515355e38, 1),
    "float8_e4m3fn": FloatFormat(3, -6, 448.0, 2),
    "float8_e4m3fnuz": FloatFormat(3, -7, 240.0, 2),
    "float8_e5m2": FloatFormat(2, -14, 57344.0, 1),
    "float8_e5m2fnuz": FloatFormat(2, -15, 57344.0, 2),
    "float4_e2m1fn": FloatFormat(1, 0, 6.0, 3),
}


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the smallest and the largest integer of a type; None if it has no integers."""
    if dtype.name in _LIMITS:
        return _LIMITS[dtype.name]
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if dtype.kind in "iu" else None
