"""Conversion of an application's values to the bytes of a constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import clipped

__all__ = ["OperandValue", "value_bytes"]

OperandValue: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any] | Sequence[Any] | float"
"""The bytes of a value, an array with the operand's dtype and shape, or Python numbers."""
_NUMBER_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # kinds of Python numbers that fit a kind of elements


def value_bytes(value: OperandValue, dtype: str | None, shape: tuple[int, ...], where: str) -> memoryview:
    """Return the bytes of a constant (format "B"): a view of bytes or of a contiguous array, otherwise a copy.

    Args:
        value: Bytes are taken as they are. An array must have `dtype` and `shape`. Python numbers are converted.
        dtype: NumPy's name of the operand's elements; None if it has none, then only bytes are allowed.
        shape: The operand's dimensions.
        where: Begins the messages of errors.

    Raises:
        InvalidArgument: If an array has another dtype or shape, or numbers do not fit.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _as_bytes(value, where)
    if dtype is None:
        raise InvalidArgument(f"{where}: only bytes can be its value, not {_shown(value)} (N-API-3)")
    array = value if isinstance(value, np.ndarray) else _from_numbers(value, np.dtype(dtype), where)
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        received = f"{array.dtype} {array.shape}"
        raise InvalidArgument(f"{where}: the value is an array of {received}, it must be {dtype} {shape} (N-API-3)")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _as_bytes(value: bytes | bytearray | memoryview, where: str) -> memoryview:
    try:
        return memoryview(value).cast("B")
    except TypeError as error:
        raise InvalidArgument(f"{where}: the value is a memoryview that is not contiguous (N-API-3)") from error


def _from_numbers(value: Sequence[Any] | float, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """Return Python numbers as an array of `dtype`; integers are not rounded, nor cut."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgument(f"{where}: the value {_shown(value)} has rows of different lengths (N-API-3)") from error
    if array.dtype.kind not in _NUMBER_KINDS.get(dtype.kind, ""):
        raise InvalidArgument(f"{where}: the value {_shown(value)} does not fit {dtype} (N-API-3)")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    is_equal = converted == array if dtype.kind in "iu" else np.isfinite(converted) == np.isfinite(array)
    if not np.all(is_equal):
        raise InvalidArgument(f"{where}: the value {_shown(value)} is out of the range of {dtype} (N-API-3)")
    return converted


def _shown(value: object) -> str:
    return clipped(repr(value), 60)
