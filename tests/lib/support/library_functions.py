"""The C library's functions of floats, for emulators: computed in double precision and rounded once."""

from __future__ import annotations

import numpy as np

__all__ = ["FLOAT_FUNCTIONS", "float_result"]

_OF_ONE = {
    "acosf": np.arccos, "acoshf": np.arccosh, "asinf": np.arcsin, "asinhf": np.arcsinh, "atanf": np.arctan,
    "atanhf": np.arctanh, "cosf": np.cos, "coshf": np.cosh, "logf": np.log, "sinf": np.sin, "sinhf": np.sinh,
    "tanf": np.tan,
}  # fmt: skip
FLOAT_FUNCTIONS = {"powf": (np.power, 2), **{name: (function, 1) for name, function in _OF_ONE.items()}}
"""Functions of double precision, and how many arguments they take."""


def float_result(name: str, *arguments: int) -> int:
    """Return the bits of a function's result. Arguments are registers, with a float in their lowest 32 bits."""
    function, count = FLOAT_FUNCTIONS[name]
    bits = np.array([argument & 0xFFFF_FFFF for argument in arguments[:count]], np.uint32)
    with np.errstate(all="ignore"):  # infinities and NaN are results, as in C
        result = function(*bits.view(np.float32).astype(np.float64)).astype(np.float32)
    return int(result.view(np.uint32))
