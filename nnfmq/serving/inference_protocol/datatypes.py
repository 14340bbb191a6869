"""The datatypes of the Open Inference Protocol, with NumPy's dtype and gRPC's typed field of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.request_errors import quoted

__all__ = ["DATATYPES", "DType", "datatype_of", "dtype_of"]

DType: TypeAlias = np.dtype[Any]


class _Datatype(NamedTuple):
    dtype: DType
    typed_field: str
    """The field of InferTensorContents that has values of this datatype; empty if only raw bytes can."""


def _row(dtype: str, typed_field: str) -> _Datatype:
    """Return a row. Binary data is little-endian on every machine."""
    return _Datatype(np.dtype(dtype).newbyteorder("<"), typed_field)


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
    }
)
_NAMES: Mapping[DType, str] = {row.dtype.newbyteorder("="): name for name, row in DATATYPES.items()}
_UNSUPPORTED = {
    "BYTES": "models have no strings: decode images or text first, and send numbers",
    "BF16": "NumPy has no such type: send FP32",
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
    """Return the protocol's name of a NumPy dtype.

    Raises:
        InvalidArgument: If the protocol has none.
    """
    wanted = np.dtype(dtype).newbyteorder("=")
    name = _NAMES.get(wanted)
    if name is None:
        raise InvalidArgument(f"dtype {wanted} has no datatype in the Open Inference Protocol")
    return name
