"""ROUND_TO_FORMAT: floats rounded to those that a narrower format has.

C1 the format has between 0 and 23 bits of fraction and an exponent of at least -149
C2 overflow, what larger numbers become, is 0 (the largest), 1 (infinity), 2 (NaN) or 3 (the largest, and 0 from NaN)
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import (
    F32,
    FLOAT32,
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
from nnfmq.operations.tflite_extension.declaring import own_code, variants_of

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


DECLARATIONS = (
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
