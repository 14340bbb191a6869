"""Comparison of an output with the recorded one: integers exactly, floats within a tolerance.

Two floats are equal if both are NaN, or the same infinity. Otherwise they differ by some absolute amount, which a
relative tolerance measures in parts of the largest finite magnitude of the recorded output, and by some number of
representable values between them (ULP, units in the last place).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nnfmq.hal.errors import InvalidArgument

__all__ = ["DEFAULT_TOLERANCE", "OutputDifference", "Tolerance", "compare_output", "parse_tolerance"]

Array = NDArray[Any]


class Tolerance(NamedTuple):
    """How much a float may differ: in parts of the largest magnitude, or in ULP if `is_ulp`. 0 = bit for bit."""

    limit: float
    is_ulp: bool = False


DEFAULT_TOLERANCE = Tolerance(1e-5)


class OutputDifference(NamedTuple):
    """The difference of one output from the recorded one; `reason` is empty if it is within the tolerance.

    `relative` and `ulp` are the largest ones of its elements, 0 for integers; `elements` is the number of those beyond
    the tolerance.
    """

    reason: str
    relative: float = 0.0
    ulp: int = 0
    elements: int = 0


def parse_tolerance(text: str) -> Tolerance:
    """Return the tolerance that a text gives: `1e-5`, relative; `4ulp`; or `exact`.

    Raises:
        InvalidArgument: If it gives none.
    """
    if text == "exact":
        return Tolerance(0.0)
    ulp = re.fullmatch(r"(\d{1,9})\s*ulp", text)
    if ulp:
        return Tolerance(float(ulp[1]), is_ulp=True)
    if re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) and 0 <= float(text) < 1:
        return Tolerance(float(text))
    raise InvalidArgument(f"tolerance {text!r}: give a relative one from 0 to below 1 (1e-5), `4ulp`, or `exact`")


def compare_output(recorded: Array, output: Array, tolerance: Tolerance) -> OutputDifference:
    """Return the difference of `output` from `recorded`. Integers and booleans have to be equal."""
    if recorded.shape != output.shape or recorded.dtype != output.dtype:
        return OutputDifference(f"{output.dtype} {output.shape} instead of {recorded.dtype} {recorded.shape}")
    if recorded.tobytes() == output.tobytes():
        return OutputDifference("")
    if recorded.dtype.kind == "c":
        recorded, output = (array.view(array.real.dtype) for array in (_flat(recorded), _flat(output)))
    if recorded.dtype.kind != "f":
        elements = int(np.count_nonzero(recorded != output))
        return OutputDifference(f"{elements} of {recorded.size} elements differ" if elements else "", elements=elements)
    return _compare_floats(_flat(recorded), _flat(output), tolerance)


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


def _compare_floats(recorded: Array, output: Array, tolerance: Tolerance) -> OutputDifference:
    same = (recorded == output) | (np.isnan(recorded) & np.isnan(output))
    finite = np.isfinite(recorded) & np.isfinite(output)
    beyond = ~same & ~finite
    a, b = recorded[finite].astype(np.float64), output[finite].astype(np.float64)
    magnitudes = np.abs(recorded[np.isfinite(recorded)].astype(np.float64))
    largest = float(magnitudes.max()) if magnitudes.size else 0.0
    with np.errstate(over="ignore"):
        parts = np.abs(a - b) / (largest or 1.0)
    steps = _steps(recorded[finite], output[finite])
    measured = steps if tolerance.is_ulp else parts
    elements = int(np.count_nonzero(beyond)) + int(np.count_nonzero(measured > tolerance.limit))
    reason = f"{elements} of {recorded.size} elements differ{_tolerance_text(tolerance)}"
    relative = float(parts.max()) if parts.size else 0.0
    return OutputDifference(reason if elements else "", relative, int(steps.max()) if steps.size else 0, elements)


def _tolerance_text(tolerance: Tolerance) -> str:
    if not tolerance.limit:
        return ""
    return f" by more than {tolerance.limit:g}{' ULP' if tolerance.is_ulp else ' of the largest'}"


def _steps(first: Array, second: Array) -> NDArray[np.float64]:
    """Return the number of representable values from each element of one array to that of the other."""
    return np.abs(_ordinals(first) - _ordinals(second))


def _ordinals(values: Array) -> NDArray[np.float64]:
    """Return the position of each float among all floats in order; both zeros have position 0.

    Positions of float64 values exceed what a float64 can count exactly: their differences are then approximate.
    """
    integers = values.view(np.dtype(f"i{values.dtype.itemsize}"))
    magnitudes = (integers & np.iinfo(integers.dtype).max).astype(np.float64)
    return np.where(integers < 0, -magnitudes, magnitudes)
