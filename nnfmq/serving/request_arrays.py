"""RequestArrays: the arrays of a model's requests, checked against its inputs and outputs, and the metadata of both.

A server is strict: an input has exactly the model's name, dtype and shape, so that a client's mistake is an error
instead of another result. Of a model that computes batches, the first dimension is the number of rows, from 1 to the
batch, and the same in all inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import clipped
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.serving.inference_service import Array, InferenceTensorMetadata

__all__ = ["RequestArrays"]


class RequestArrays:
    """Checks the requests to one model of the given inputs and outputs. `batch` is its number of independent rows."""

    def __init__(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], batch: int) -> None:
        self._inputs, self._outputs, self._batch = tuple(inputs), tuple(outputs), batch
        self._expected = [(info.name, np.dtype(info.dtype), info.shape) for info in inputs]
        self._output_indexes = {info.name: index for index, info in enumerate(outputs)}

    def ordered(self, inputs: Mapping[str, Any]) -> Sequence[Array]:
        """Return the arrays of a request in the order of the model's inputs.

        Raises:
            InvalidArgument: If an input is missing, unknown, no array, or of another shape or dtype.
        """
        arrays = list[Array]()
        for name, dtype, shape in self._expected:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                break  # perhaps another number of rows, or of a subclass
            arrays.append(array)
        if len(arrays) == len(inputs) == len(self._expected):
            return arrays
        return _ordered_arrays(self._inputs, inputs, self._batch)

    def output_indexes(self, wanted: Sequence[str]) -> Mapping[str, int]:
        """Return the indexes of the outputs of a request by name, in the order that it asks for; all if it names none.

        Raises:
            InvalidArgument: If there is no such output.
        """
        if not wanted:
            return self._output_indexes
        unknown = [name for name in wanted if name not in self._output_indexes]
        if unknown:
            raise InvalidArgument(
                f"the model has the outputs {_names(self._outputs)}; asked for were {_quoted(unknown)}"
            )
        return {name: self._output_indexes[name] for name in wanted}

    def metadata(self) -> tuple[tuple[InferenceTensorMetadata, ...], tuple[InferenceTensorMetadata, ...]]:
        """Return the metadata of the inputs and of the outputs."""
        inputs = tuple(_tensor_metadata(info, self._batch) for info in self._inputs)
        return inputs, tuple(_tensor_metadata(info, self._batch) for info in self._outputs)


def _ordered_arrays(infos: Sequence[TensorInfo], inputs: Mapping[str, Any], batch: int) -> tuple[Array, ...]:
    """As `RequestArrays.ordered`, with all that a request may have."""
    if len(inputs) != len(infos) or any(info.name not in inputs for info in infos):
        raise InvalidArgument(f"the model has the inputs {_names(infos)}; given were {_quoted(inputs)}")
    arrays = tuple(_checked(info, inputs[info.name], batch) for info in infos)
    if batch > 1 and len({len(array) for array in arrays}) > 1:
        rows = ", ".join(f"{info.name!r} {len(array)}" for info, array in zip(infos, arrays, strict=True))
        raise InvalidArgument(f"all inputs must have the same number of rows: {rows}")
    return arrays


def _checked(info: TensorInfo, array: Any, batch: int) -> Array:
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"input {info.name!r} must be a NumPy array, not {type(array).__name__}")
    if array.dtype != info.dtype:
        raise InvalidArgument(f"input {info.name!r} holds {info.dtype}; the given array is {array.dtype}")
    if batch > 1:
        fits = array.ndim == len(info.shape) and 1 <= len(array) <= batch and array.shape[1:] == info.shape[1:]
        wanted = f"1 to {batch} rows of shape {list(info.shape[1:])}"
    else:
        fits, wanted = array.shape == info.shape or _is_case(array.shape, info), f"the shape {_served_shape(info)}"
    if not fits:
        raise InvalidArgument(f"input {info.name!r} has {wanted}; the given array has {list(array.shape)}")
    return array


def _is_case(shape: tuple[int, ...], info: TensorInfo) -> bool:
    """Return whether a shape is that of a tensor of open sizes, or of open rank."""
    if not info.has_unknown_shape:
        return False
    pairs = zip(shape, info.shape, strict=False)
    return not info.shape or (len(shape) == len(info.shape) and all(known in (0, size) for size, known in pairs))


def _served_shape(info: TensorInfo) -> list[int]:
    """Return a shape with -1 for a size that each request decides; [-1] for any rank."""
    if not info.has_unknown_shape:
        return list(info.shape)
    return [size or -1 for size in info.shape] or [-1]


def _tensor_metadata(info: TensorInfo, batch: int) -> InferenceTensorMetadata:
    """Return the metadata of an input or output. Its first dimension is -1 if the model computes batches."""
    shape = _served_shape(info) if batch == 1 else [-1, *info.shape[1:]]
    quantization = {"scale": info.scale, "zero_point": info.zero_point} if info.scale else {}
    dtype = "bfloat16" if info.is_bfloat16 else info.dtype
    return InferenceTensorMetadata(info.name, dtype, tuple(shape), quantization)


def _names(infos: Sequence[TensorInfo]) -> str:
    return clipped(", ".join(repr(info.name) for info in infos), 500)


def _quoted(names: Any) -> str:
    return clipped(", ".join(map(repr, names)) or "none", 500)
