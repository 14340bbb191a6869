"""Floats over the whole range of their type, what ONNX's functions of them are in float64, and the comparison.

A result of float32 is right within 2e-5 of itself, one of float16 within a unit in its last place. Numbers below 1e-36
may be 0: kernels take subnormal exponentials for 0, which are a factor of some functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from support.oracles import Array

__all__ = ["FUNCTIONS", "NEWER", "UNDEFINED", "assert_right", "every_half", "numbers", "range_of_floats"]

_NEARLY_0 = 1e-36
_ODD = 3.0, 7.0, 0.5, 1.5, 2.5, 88.72283, 88.7229, 89.0, 103.9, 8388607.5, 8388609.0, 16777217.0


def range_of_floats() -> Array:
    """Return float32 numbers of every exponent and sign, subnormal ones, halves, infinities and NaN."""
    exponents = np.arange(-149, 128)
    scaled = [np.ldexp(fraction, exponents) for fraction in (1.0, 1.37, 1.9999999)]
    near = [np.linspace(-120, 120, 1201), np.linspace(-12, 12, 1201), 1 + np.ldexp([1.0, -1.0], -20), _ODD]
    info = np.finfo(np.float32)
    found = np.concatenate([*scaled, *near, [0.0, math.inf, info.max, info.tiny]]).astype(np.float32)
    return np.concatenate([found, -found, [np.float32(math.nan)]])


def every_half() -> Array:
    """Return all 65,536 numbers of float16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def numbers(dtype: Any) -> Array:
    """Return the numbers of either type."""
    return every_half() if dtype == np.float16 else range_of_floats()


def assert_right(given: Array, found: Array, real: Array) -> None:
    """Require that results, for these arguments, are the rounded real numbers; `real` is float64."""
    dtype = found.dtype
    real = real.reshape(found.shape)
    if dtype.kind != "f":
        np.testing.assert_array_equal(found, real)
        return
    with np.errstate(all="ignore"):
        wanted, got = real.astype(dtype).astype(np.float64), found.astype(np.float64)
        allowed = 2e-5 * np.abs(real) + _NEARLY_0
        if dtype == np.float16:
            allowed = np.nan_to_num(np.spacing(np.abs(wanted.astype(dtype))).astype(np.float64))
        largest = float(np.finfo(dtype).max) * (1 - 2e-5)  # near it, one may be infinite and the other not
        is_beyond = (np.abs(got) >= largest) & (np.abs(real) >= largest) & (np.sign(got) == np.sign(real))
        is_right = (got == wanted) | (np.isnan(got) & np.isnan(wanted)) | (np.abs(got - real) <= allowed) | is_beyond
    wrong = np.flatnonzero(~is_right)
    shown = [(given.flat[at], found.flat[at], real.flat[at]) for at in wrong[:: max(1, len(wrong) // 5)]]
    assert not len(wrong), f"{len(wrong)} wrong, such as (given, found, real): {shown}"


def _logistic(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _elu(alpha: float, gamma: float = 1.0) -> Callable[[Array], Array]:
    return lambda x: gamma * np.where(x < 0, alpha * np.expm1(x), x)


def _mapped(function: Callable[[float], float]) -> Callable[[Array], Array]:
    return np.vectorize(function, otypes=[np.float64])


FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "Abs": np.abs, "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan,
    "Atanh": np.arctanh, "Ceil": np.ceil, "Celu": _elu(1.0), "Cos": np.cos, "Cosh": np.cosh, "Elu": _elu(1.0),
    "Erf": _mapped(math.erf), "Exp": np.exp, "Floor": np.floor,
    "Gelu": lambda x: x * 0.5 * _mapped(math.erfc)(x * -math.sqrt(0.5)),
    "HardSigmoid": lambda x: np.clip(float(np.float32(0.2)) * x + 0.5, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "Identity": lambda x: x,
    "IsInf": np.isinf, "IsNaN": np.isnan,
    "LeakyRelu": lambda x: np.where(x < 0, float(np.float32(0.01)) * x, x), "Log": np.log,
    "Mish": lambda x: x * np.tanh(_softplus(x)), "Neg": np.negative, "Relu": lambda x: np.maximum(x, 0),
    "Round": np.rint, "Selu": _elu(1.67326319217681884765625, 1.05070102214813232421875), "Sigmoid": _logistic,
    "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh, "Softplus": _softplus, "Softsign": lambda x: x / (1 + np.abs(x)),
    "Sqrt": np.sqrt, "Swish": lambda x: x * _logistic(x), "Tan": np.tan, "Tanh": np.tanh,
    "ThresholdedRelu": lambda x: np.where(x > 1, x, 0.0),
}  # fmt: skip
"""ONNX's functions of one number, with the default attributes."""

NEWER = {"Gelu": 20, "IsInf": 20, "IsNaN": 20, "Swish": 24}
"""The opsets of functions that are not in opset 18, or not of these types."""

UNDEFINED = {("Celu", np.float16)}
"""What ONNX does not define up to that opset."""
