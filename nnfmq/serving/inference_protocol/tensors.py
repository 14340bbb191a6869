"""Tensors of a request, which a client describes and nobody trusts: shapes, sizes and bytes to arrays.

A client decides no allocation: a tensor is a view of the request's body, or a list of values that the body has, and its
shape must have exactly as many elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.errors import quoted
from nnfmq.serving.inference_service import Array

__all__ = [
    "BFLOAT16",
    "DATATYPES",
    "MAX_DIMENSION",
    "MAX_RANK",
    "MAX_TENSORS",
    "DType",
    "Parameters",
    "RequestLimits",
    "boolean",
    "datatype_of",
    "dtype_of",
    "element_count",
    "require_no_other_extension",
    "require_unique",
    "size",
    "tensor_bytes",
    "tensor_view",
    "timeout_s",
]


# ----------------------------------------------------------------------------------------------------------------------
# The datatypes of the Open Inference Protocol, with NumPy's dtype and gRPC's typed field of each.


DType: TypeAlias = np.dtype[Any]


class _Datatype(NamedTuple):
    dtype: DType
    typed_field: str
    """The field of InferTensorContents that has values of this datatype; empty if only raw bytes can."""


def _row(dtype: str, typed_field: str) -> _Datatype:
    """Return a row. Binary data is little-endian on every machine."""
    return _Datatype(np.dtype(dtype).newbyteorder("<"), typed_field)


BFLOAT16 = "BF16"
DATATYPES: Mapping[str, _Datatype] = MappingProxyType(
    {
        "BOOL": _row("bool", "bool_contents"),
        "UINT8": _row("uint8", "uint_contents"),
        "UINT16": _row("uint16", "uint_contents"),
        "UINT32": _row("uint32", "uint_contents"),
        "UINT64": _row("uint64", "uint64_contents"),
        "INT8": _row("int8", "int_contents"),
        "INT16": _row("int16", "int_contents"),
        "INT32": _row("int32", "int_contents"),
        "INT64": _row("int64", "int64_contents"),
        "FP16": _row("float16", ""),
        "FP32": _row("float32", "fp32_contents"),
        "FP64": _row("float64", "fp64_contents"),
        BFLOAT16: _row("uint16", ""),  # NumPy lacks it: its bits
    }
)
_NAMES: Mapping[DType, str] = {row.dtype.newbyteorder("="): name for name, row in DATATYPES.items() if name != BFLOAT16}
_UNSUPPORTED = {
    "BYTES": "models have no strings: decode images or text first, and send numbers",
}


def dtype_of(datatype: str) -> DType:
    """Return NumPy's dtype, little-endian, of a datatype of the protocol.

    Raises:
        InvalidArgument: If the protocol has no such datatype, or this server cannot receive it.
    """
    row = DATATYPES.get(datatype)
    if row is None:
        hint = _UNSUPPORTED.get(datatype, f"allowed are {', '.join(DATATYPES)}")
        raise InvalidArgument(f"datatype {quoted(datatype)} is not supported; {hint}")
    return row.dtype


def datatype_of(dtype: DType | str) -> str:
    """Return the protocol's name of a NumPy dtype, or of "bfloat16".

    Raises:
        InvalidArgument: If the protocol has none.
    """
    if dtype == "bfloat16":
        return BFLOAT16
    wanted = np.dtype(dtype).newbyteorder("=")
    name = _NAMES.get(wanted)
    if name is None:
        raise InvalidArgument(f"dtype {wanted} has no datatype in the Open Inference Protocol")
    return name


# ----------------------------------------------------------------------------------------------------------------------
# Tensors of a request, which a client describes and nobody trusts: shapes, sizes and bytes to arrays.


MAX_RANK = 32
"""NumPy's maximum in every release that nnfmq supports."""
MAX_TENSORS = 1024
"""The maximum number of inputs, and of wanted outputs, of one request."""
MAX_DIMENSION = 2**31 - 1
"""The largest dimension, and the largest number of elements."""


class RequestLimits(Struct, frozen=True):
    """The largest request that a server reads, and what all requests in progress may take.

    `max_body_bytes` limits all of it. `max_header_bytes` limits what is parsed: JSON, with tensors that are in it, or
    a gRPC message without its raw contents. Parsing takes up to about thirty times as much memory as the text.
    `max_total_bytes` limits the bodies of all requests of HTTP that a server's process has received, also in part, and
    not yet answered, and likewise the messages of gRPC, of which there are `max_calls` at a time. `max_upload_s` is how
    long a body of HTTP may take to arrive.
    """

    max_body_bytes: int = 256 << 20
    max_header_bytes: int = 16 << 20
    max_total_bytes: int = 1 << 30
    max_upload_s: float = 60.0
    max_calls: int = 64

    @property
    def max_message_bytes(self) -> int:
        """The largest message of gRPC: one of each call at a time must fit into `max_total_bytes`."""
        return min(self.max_body_bytes, self.max_total_bytes // self.max_calls)


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


# ----------------------------------------------------------------------------------------------------------------------
# The parameters of a request that this server knows; others are ignored, as the protocol allows.
#
# Parameters of extensions that the server does not have would change the result, so they are rejected instead.


Parameters: TypeAlias = dict[str, bool | int | float | str]

_OTHER_EXTENSIONS = {
    "sequence_id": "sequences; send the state of a model as an input",
    "shared_memory_region": "shared memory of a client; use binary data, or nnfmq itself on the same machine",
    "classification": "classification; take the largest scores of the output",
}
_LONGEST_US = 10_000_000_000_000
"""A limit of months, which fits the clock, in place of longer ones."""


def require_no_other_extension(parameters: Mapping[str, object]) -> None:
    """Raise InvalidArgument if a parameter belongs to an extension that this server does not have."""
    for name in parameters:
        if name in _OTHER_EXTENSIONS:
            raise InvalidArgument(f"parameter {name!r}: this server has no {_OTHER_EXTENSIONS[name]}")


def size(parameters: Parameters, name: str) -> int | None:
    """Return a parameter that is a number of bytes; None without it.

    Raises:
        InvalidArgument: If it is not an integer, or negative.
    """
    value = parameters.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"parameter {name!r} is {value!r}; a number of bytes is needed")
    return value


def boolean(parameters: Parameters, name: str) -> bool | None:
    """Return a parameter that is true or false; None without it.

    Raises:
        InvalidArgument: If it is something else.
    """
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"parameter {name!r} is {value!r}; true or false is needed")
    return value


def timeout_s(parameters: Parameters) -> float | None:
    """Return the parameter `timeout`, which is in microseconds, in seconds; None without it, or if it is 0.

    Raises:
        InvalidArgument: If it is not an integer, or negative.
    """
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"parameter 'timeout' is {value!r}; a number of microseconds is needed")
    return min(value, _LONGEST_US) / 1e6 or None
