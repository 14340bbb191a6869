"""Tensors in JSON: the `data` of an input or output, flat or nested, in row-major order.

JSON has no infinity and no NaN, so a tensor that has one cannot be sent; neither can a number that is too large for the
datatype.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.datatypes import DType
from nnfmq.serving.inference_protocol.request_errors import quoted
from nnfmq.serving.inference_protocol.wire_tensors import element_count
from nnfmq.serving.inference_service import Array

__all__ = ["array_from_json", "json_values"]

PIECE_BYTES = 1 << 16  # takes some 0.2 to 1 ms

_OPENING = re.compile(rb"[\s\[]*")


def array_from_json(name: str, dtype: DType, shape: Sequence[int], data: msgspec.Raw) -> Array:
    """Return an input whose values are JSON: one flat array, or arrays in arrays as the shape says.

    Raises:
        InvalidArgument: If `data` is no such value, or does not have the shape.
    """
    count = element_count(name, shape)
    depth = _depth(data)
    if depth not in (1, len(shape)):
        raise InvalidArgument(f"input {quoted(name)} must have `data` that is flat, or nested {len(shape)} deep")
    try:
        with np.errstate(over="ignore"):
            array = _flat_array(dtype, data) if depth == 1 else np.array(_decoder(dtype, depth).decode(data), dtype)
    except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise InvalidArgument(f"input {quoted(name)} has `data` that is not {dtype}: {error}") from error
    if array.shape != ((count,) if depth == 1 else tuple(shape)):
        raise InvalidArgument(f"input {quoted(name)} has `data` of shape {list(array.shape)}, not {list(shape)}")
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgument(f"input {quoted(name)} has a number that is too large for {dtype}")
    return array.reshape(shape)


def _flat_array(dtype: DType, data: msgspec.Raw) -> Array:
    """Return the values of a flat array, decoded in pieces: msgspec has the GIL, which other threads get in between.

    A comma separates two values, or is inside one that is no number: then a piece is no JSON.
    """
    decoder, text, arrays, begin = _decoder(dtype, 1), bytes(data), list[Array](), 0
    while (end := text.find(b",", begin + PIECE_BYTES)) >= 0:
        arrays.append(np.array(decoder.decode((b"[" if begin else b"") + text[begin:end] + b"]"), dtype))
        begin = end + 1
    arrays.append(np.array(decoder.decode((b"[" if begin else b"") + text[begin:]), dtype))
    return np.concatenate(arrays)


def _depth(data: msgspec.Raw) -> int:
    """Return the number of brackets that a JSON value opens with."""
    opening = _OPENING.match(memoryview(data))
    return opening[0].count(b"[") if opening else 0


@cache
def _decoder(dtype: DType, depth: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder of `depth` nested lists of numbers of a dtype. There are at most MAX_RANK for each dtype."""
    wanted: Any = _element_type(dtype)
    for _ in range(depth):
        wanted = list.__class_getitem__(wanted)
    return msgspec.json.Decoder(wanted)


def _element_type(dtype: DType) -> Any:
    """Return the type of one value. msgspec has no limits beyond 64 bits with sign; NumPy checks those of 64 bits."""
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        return float
    limits = np.iinfo(dtype)
    if dtype.itemsize < 8:
        return Annotated[int, Meta(ge=int(limits.min), le=int(limits.max))]
    return int if dtype.kind == "i" else Annotated[int, Meta(ge=0)]


def json_values(name: str, array: Array) -> list[bool | int | float]:
    """Return an output's values as a flat list.

    Raises:
        InvalidArgument: If one is infinite or not a number.
    """
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgument(
            f"output {quoted(name)} has a value that is infinite or NaN, which JSON does not have;"
            " ask for binary data (`binary_data`)"
        )
    values: list[bool | int | float] = array.ravel().tolist()
    return values
