"""Trigonometric, hyperbolic and inverse functions, SOFTPLUS and MISH: functions of one float, as ONNX defines them.

Each is within a few units in the last place over the whole range of its type. float16 is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.operations.signature import Array
from nnfmq.operations.tflite_extension.declaring import F64, float_variants, function_of_one, variants_of


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

DECLARATIONS = tuple(
    function_of_one(operation, (*float_variants(stateless(function)), *variants_of((F64,), stateless(function))))
    for operation, function in _FUNCTIONS.items()
)
