"""The complementary error function, which NumPy does not have."""

from __future__ import annotations

import numpy as np

from nnfmq.operations.signature import Array

__all__ = ["ERFC_POLYNOMIAL", "complementary_error_function"]

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
