"""GivenInitializers: tensors of the application in place of the initializers of a file.

`add_initializer` replaces an initializer that the file has; `add_external_initializers` and
`add_external_initializers_from_files_in_memory` those whose data the file has elsewhere, which are then not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from nnfmq.compat.onnxruntime.errors import ort_error
from nnfmq.compat.onnxruntime.values import OrtValue

__all__ = ["GivenInitializers"]

_RAW, _EXTERNAL = 0, 1  # TensorProto.DataLocation
_VALUES = (
    "raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data", "external_data",
)  # fmt: skip


class GivenInitializers:
    """Values by the names of initializers, and contents of files by their names. They are read by each new session."""

    def __init__(self) -> None:
        self._values: dict[str, OrtValue] = {}
        self._external: dict[str, OrtValue] = {}
        self._files: dict[str, memoryview] = {}

    def add(self, name: str, value: OrtValue) -> None:
        """Give an initializer another value. Raises RuntimeError if it has one already, or this is no OrtValue."""
        _require_value(value)
        if name in self._values:
            raise RuntimeError(f"An OrtValue for this name has already been added: {name}")
        self._values[name] = value

    def add_external(self, names: Sequence[str], values: Sequence[OrtValue]) -> None:
        """Give initializers that are in other files values. Raises RuntimeError as `add`."""
        if len(names) != len(values):
            raise RuntimeError("Expecting names and ort_values lists to have equal length")
        for name, value in zip(names, values, strict=True):
            _require_value(value)
            self._external[name] = value

    def add_files(self, names: Sequence[str], buffers: Sequence[Any], lengths: Sequence[int]) -> None:
        """Give files that have initializers contents. Raises RuntimeError if there are not as many of each."""
        if not len(names) == len(buffers) == len(lengths):
            raise RuntimeError("Expecting names, buffers and lengths lists to have equal length")
        for name, buffer, length in zip(names, buffers, lengths, strict=True):
            self._files[str(name)] = memoryview(buffer).cast("B")[:length]

    def require_none(self) -> None:
        """Raise NotImplemented if there are any: replacing them needs the package `onnx`."""
        if self._values or self._external or self._files:
            raise ort_error(
                "NotImplemented", "replacing initializers needs the package onnx: pip install 'nnfmq[onnx]'"
            )

    def replace_in(self, proto: Any) -> bool:
        """Put the values into an onnx.ModelProto; return whether it has changed.

        Raises:
            Exception: Fail, as ONNX Runtime, if an external initializer does not exist, is not external, or has another
                type or shape; InvalidArgument if that of `add` has, with which ONNX Runtime's results are undefined.
        """
        tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
        has_changed = False
        for name, value in self._external.items():
            _require_external(name, tensors.get(name))
            _set(tensors[name], value, "Fail")
            has_changed = True
        for tensor in tensors.values():
            place = {entry.key: entry.value for entry in tensor.external_data}
            if tensor.data_location == _EXTERNAL and place.get("location") in self._files:
                _set_bytes(tensor, _part(tensor.name, self._files[place["location"]], place))
                has_changed = True
        for name, value in self._values.items():
            if name in tensors:
                _set(tensors[name], value, "InvalidArgument")
                has_changed = True
        return has_changed


def _require_value(value: Any) -> None:
    if not isinstance(value, OrtValue):
        raise RuntimeError("The provided Python object must be an OrtValue")


def _require_external(name: str, tensor: Any) -> None:
    if tensor is None:
        _fail(f"Failed to find existing initializer with name {name}.")
    if tensor.data_location != _EXTERNAL:
        _fail("Trying to replace non-external initializer with external data")


def _set(tensor: Any, value: OrtValue, error: str) -> None:
    if list(tensor.dims) != value.shape():
        raise ort_error(error, "Replacement tensor's dimensions do not match.")
    if tensor.data_type != value.element_type():
        raise ort_error(error, "Replacement tensor's data type does not match.")
    elements = value.elements
    little = elements if elements.dtype.names else elements.astype(elements.dtype.newbyteorder("<"), copy=False)
    _set_bytes(tensor, np.ascontiguousarray(little).tobytes())


def _set_bytes(tensor: Any, data: bytes | memoryview) -> None:
    for name in _VALUES:
        tensor.ClearField(name)
    tensor.data_location = _RAW
    tensor.raw_data = bytes(data)


def _part(name: str, data: memoryview, place: Mapping[str, str]) -> memoryview:
    """Return the bytes of a tensor in a file."""
    try:
        offset = int(place.get("offset", "0"))
        length = int(place.get("length", str(len(data) - offset)))
    except ValueError:
        _fail(f"External initializer: {name} has no valid offset or length.")
    if not 0 <= offset <= offset + length <= len(data):
        _fail(
            f"External initializer: {name} offset: {offset} size to read: {length} given file_length: {len(data)} are"
            " out of bounds or can not be read in full."
        )
    return data[offset : offset + length]


def _fail(text: str) -> NoReturn:
    raise ort_error("Fail", text)
