"""Differences from LiteRT's reference kernels that are documented: docs/reference/model-formats.md lists them.

Operations that the HAL and TFLite define differently are another matter: an import that follows TFLite has LiteRT's
results then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from random_choices import Array, Part

__all__ = ["is_documented"]

_MAX = np.finfo(np.float32).max
_BEYOND_INT32 = 2.0**31
_LARGE = 1e10
_SUMS = (
    "BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "REDUCE_PROD", "SUM", "TRANSPOSE_CONV",
)  # fmt: skip


def is_documented(part: Part, found: Sequence[Array], is_close: Callable[[Array, Array], bool]) -> bool:
    """Return whether the results of one operator differ from LiteRT's in a documented way only.

    `is_close` compares a result with the expected one.
    """
    name, inputs = part.operators[0], [value.array for value in part.inputs]
    expected = [value.array for value in part.outputs]
    if any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return False
    if name in _NAN and any(array.dtype.kind == "f" and np.isnan(array).any() for array in (*inputs, *found)):
        return True
    if name == "QUANTIZE":
        return _quantizes_beyond_int32(part, found[0], expected[0])
    if name in _RULES and _RULES[name](inputs, found[0], expected[0]):
        return True
    pairs = [(_limited(a), _limited(b)) for a, b in zip(found, expected, strict=True)]
    if name in _SUMS and any(map(_may_overflow, inputs)):
        pairs = [_where_both_are_finite(a, b) for a, b in pairs]
    return all(is_close(a, b) for a, b in pairs)


def _limited(array: Array) -> Array:
    """Return floats with the largest in place of infinity."""
    return np.clip(array, -_MAX, _MAX) if array.dtype == np.float32 else array


def _may_overflow(array: Array) -> bool:
    return array.dtype == np.float32 and not bool(np.all(np.abs(array) < _LARGE))


def _where_both_are_finite(found: Array, expected: Array) -> tuple[Array, Array]:
    """Return the results with 0 where one is infinite or NaN: that depends on the order of the additions."""
    with np.errstate(all="ignore"):
        finite = (np.abs(found) < _MAX) & (np.abs(expected) < _MAX)
    return np.where(finite, found, 0).astype(found.dtype), np.where(finite, expected, 0).astype(expected.dtype)


def _quantizes_beyond_int32(part: Part, found: Array, expected: Array) -> bool:
    x, scale = part.inputs[0].array, part.outputs[0].scale
    if x.dtype != np.float32:
        return False
    with np.errstate(all="ignore"):
        inside = np.abs(x.astype(np.float64) / scale) < _BEYOND_INT32
    return bool(np.array_equal(found[inside], expected[inside]))


def _is_gelu(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    """Return whether the results are equal but for the digits that LiteRT loses: 1 + erf(x) has those of 1."""
    with np.errstate(all="ignore"):
        lost = np.abs(found - expected) <= 4 * np.finfo(np.float32).eps * np.abs(inputs[0])
    return bool(np.all(lost | (found == expected) | (np.isnan(found) & np.isnan(expected))))


def _is_power(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    """Return whether the integers differ only where the power is beyond 32 bits."""
    return bool(np.all((found == expected) | (expected == np.iinfo(np.int32).min)))


def _reduces_none(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    return not inputs[0].size


def _is_int8(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    return bool(inputs[0].dtype == np.int8)


_NAN = frozenset(
    ("ARG_MAX", "ARG_MIN", "CAST", "MAXIMUM", "MAX_POOL_2D", "MINIMUM", "REDUCE_MAX", "REDUCE_MIN", "TOPK_V2")
)
_RULES: Mapping[str, Callable[[Sequence[Array], Array, Array], bool]] = {
    "GELU": _is_gelu,
    "POW": _is_power,
    "REDUCE_MAX": _reduces_none,
    "REDUCE_MIN": _reduces_none,
    "SUM": _is_int8,
}
