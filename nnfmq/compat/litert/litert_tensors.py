"""LiteRT's view of a file's tensors: NumPy types, detail dictionaries, and the checks of values that are set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from nnfmq.importers.tflite_interface import FileTensor

__all__ = ["Array", "as_tensor_value", "constant_value", "element_type", "stored_dtype", "tensor_details"]

Array: TypeAlias = npt.NDArray[Any]

_ELEMENT_TYPES: dict[str, Any] = {
    "FLOAT32": np.float32,
    "FLOAT16": np.float16,
    "INT32": np.int32,
    "UINT8": np.uint8,
    "INT64": np.int64,
    "STRING": np.bytes_,
    "BOOL": np.bool_,
    "INT16": np.int16,
    "COMPLEX64": np.complex64,
    "INT8": np.int8,
    "FLOAT64": np.float64,
    "COMPLEX128": np.complex128,
    "UINT64": np.uint64,
    "RESOURCE": np.void,
    "VARIANT": np.void,
    "UINT32": np.uint32,
    "UINT16": np.uint16,
    "INT4": np.int8,
}
_TYPE_NAMES = {np.dtype(kind).str: name for name, kind in _ELEMENT_TYPES.items() if name not in ("INT4", "VARIANT")}


def element_type(tensor: FileTensor) -> Any:
    """Return the NumPy type that LiteRT gives as `dtype`; None if it has none."""
    return _ELEMENT_TYPES.get(tensor.type)


def stored_dtype(tensor: FileTensor) -> np.dtype[Any]:
    """Return the dtype of a tensor's elements. Raises ValueError if they are no numbers."""
    kind = element_type(tensor)
    if kind is None or kind in (np.bytes_, np.void):
        raise ValueError(f"tensor {tensor.name!r} has elements of type {tensor.type}, which are no numbers")
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


def constant_value(tensor: FileTensor) -> Array | None:
    """Return a view of the tensor's value in the file; None if it has none, or one that is not stored plainly."""
    if tensor.data is None or tensor.type == "INT4":
        return None
    dtype = stored_dtype(tensor)
    if len(tensor.data) % dtype.itemsize or len(tensor.data) // dtype.itemsize != int(np.prod(tensor.shape)):
        return None
    return np.frombuffer(tensor.data, dtype.newbyteorder("<")).reshape(tensor.shape)


def tensor_details(tensor: FileTensor, index: int, shape: Sequence[int]) -> dict[str, Any]:
    """Return the dictionary with which LiteRT describes a tensor; `shape` is its shape now.

    Raises:
        ValueError: If the tensor's type is unknown.
    """
    kind = element_type(tensor)
    if kind is None:
        raise ValueError(f"tensor {index} has the unknown type {tensor.type}")
    return {
        "name": tensor.name,
        "index": index,
        "shape": np.array(shape, np.int32),
        "shape_signature": np.array(tensor.shape_signature or shape, np.int32),
        "dtype": kind,
        "quantization": _one_scale(tensor),
        "quantization_parameters": {
            "scales": np.array(tensor.scales, np.float32),
            "zero_points": np.array(tensor.zero_points, np.int32),
            "quantized_dimension": tensor.quantized_dimension,
            "block_size": 0,
        },
        "sparsity_parameters": {},
    }


def _one_scale(tensor: FileTensor) -> tuple[float, int]:
    if len(tensor.scales) != 1 or len(tensor.zero_points) != 1:
        return 0.0, 0
    return tensor.scales[0], tensor.zero_points[0]


def as_tensor_value(value: Any, index: int, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return `value` as an array with the type and shape of a tensor.

    Raises:
        ValueError: If it has another type or shape.
    """
    array = np.asarray(value)
    if array.dtype.newbyteorder("=") != dtype:
        given, wanted = _type_name(array.dtype), _type_name(dtype)
        raise ValueError(
            f"Cannot set tensor: Got value of type {given} but expected type {wanted} for input {index}, name: {name} "
        )
    if array.ndim != len(shape):
        raise ValueError(
            f"Cannot set tensor: Dimension mismatch. Got {array.ndim} but expected {len(shape)} for input {index}."
        )
    for axis, (found, expected) in enumerate(zip(array.shape, shape, strict=True)):
        if found != expected:
            raise ValueError(
                f"Cannot set tensor: Dimension mismatch. Got {found} but expected {expected} for dimension {axis} "
                f"of input {index}."
            )
    return array


def _type_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "USO":
        return "STRING"
    return _TYPE_NAMES.get(dtype.newbyteorder("=").str, "NOTYPE")
