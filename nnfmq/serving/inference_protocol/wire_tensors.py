"""Tensors of a request, which a client describes and nobody trusts: shapes, sizes and bytes to arrays.

A client decides no allocation: a tensor is a view of the request's body, or a list of values that the body has, and its
shape must have exactly as many elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.datatypes import DATATYPES, DType, datatype_of
from nnfmq.serving.inference_protocol.request_errors import quoted
from nnfmq.serving.inference_service import Array

__all__ = [
    "MAX_DIMENSION",
    "MAX_RANK",
    "MAX_TENSORS",
    "RequestLimits",
    "element_count",
    "require_unique",
    "tensor_bytes",
    "tensor_view",
]

MAX_RANK = 32
"""NumPy's maximum in every release that nnfmq supports."""
MAX_TENSORS = 1024
"""The maximum number of inputs, and of wanted outputs, of one request."""
MAX_DIMENSION = 2**31 - 1
"""The largest dimension, and the largest number of elements."""


class RequestLimits(Struct, frozen=True):
    """The largest request that a server reads.

    `max_body_bytes` limits all of it. `max_header_bytes` limits what is parsed: JSON, with tensors that are in it, or
    a gRPC message without its raw contents. Parsing takes up to about thirty times as much memory as the text.
    """

    max_body_bytes: int = 256 << 20
    max_header_bytes: int = 16 << 20


def element_count(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of an input.

    Raises:
        InvalidArgument: If a dimension is negative or over 2³¹ − 1, there are too many, or they are too large together.
    """
    if len(shape) > MAX_RANK:
        raise InvalidArgument(f"input {quoted(name)} has {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    for dimension in shape:
        if not 0 <= dimension <= MAX_DIMENSION:
            raise InvalidArgument(
                f"input {quoted(name)} has a dimension of {dimension}; allowed are 0 to {MAX_DIMENSION}"
            )
    # NumPy refuses an empty array whose other dimensions are too large together.
    if math.prod(filter(None, shape)) > MAX_DIMENSION:
        raise InvalidArgument(
            f"input {quoted(name)} of shape {list(shape)} has more than {MAX_DIMENSION} elements, 0 counted as 1"
        )
    return math.prod(shape)


def tensor_view(name: str, dtype: DType, shape: Sequence[int], data: memoryview) -> Array:
    """Return an input as a read-only array over `data`, the elements in row-major order.

    Raises:
        InvalidArgument: If the size is not that of the shape, or a BOOL is neither 0 nor 1.
    """
    wanted = element_count(name, shape) * dtype.itemsize
    if len(data) != wanted:
        raise InvalidArgument(
            f"input {quoted(name)} has {len(data)} bytes; {wanted} are needed for shape {list(shape)} of {dtype}"
        )
    if dtype == np.bool_:
        _require_booleans(name, np.frombuffer(data, np.uint8))
    view = np.frombuffer(data, dtype).reshape(shape)
    view.flags.writeable = False
    return view


def _require_booleans(name: str, values: Array) -> None:
    """Raise InvalidArgument unless all bytes are 0 or 1: to NumPy, another one is neither true nor false."""
    if values.size and values.max() > 1:
        raise InvalidArgument(f"input {quoted(name)} is BOOL, and has the byte {values.max()}; allowed are 0 and 1")


def tensor_bytes(array: Array) -> memoryview:
    """Return an output's elements in row-major order and little-endian; a view if they are so already."""
    ordered = np.ascontiguousarray(array, DATATYPES[datatype_of(array.dtype)].dtype)
    return ordered.reshape(-1).view(np.uint8).data


def require_unique(kind: str, names: Iterable[str]) -> None:
    """Raise InvalidArgument if a name occurs twice."""
    seen = set[str]()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{kind} {quoted(name)} is given twice")
        seen.add(name)
