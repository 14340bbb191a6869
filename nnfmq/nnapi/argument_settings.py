"""ArgumentSetting: an input or output of an execution as the application has set it, and the checks of what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import merge_dimensions
from nnfmq.nnapi.device_memory import DeviceMemory
from nnfmq.runtime.managed_buffer import AnyMemory
from nnfmq.runtime.tensor_layout import Array, format_shape

__all__ = ["ApplicationBuffer", "ArgumentSetting", "array_setting", "device_setting", "memory_setting"]

ApplicationBuffer: TypeAlias = Array | bytes | bytearray | memoryview
"""The application's own memory: a contiguous array, or bytes."""
_SIZE_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentSetting:
    """An argument: omitted, or in exactly one of `array`, `memory` and `device_memory`.

    `dimensions` are those that the application has given, () if none. `length` are the bytes of the data, followed by
    `padding` bytes that belong to the argument, too.
    """

    dimensions: tuple[int, ...] = ()
    length: int = 0
    padding: int = 0
    array: Array | None = None
    """The application's array or bytes, flat, as bytes."""
    memory: AnyMemory | None = None
    offset: int = 0
    device_memory: DeviceMemory | None = None

    @property
    def has_no_value(self) -> bool:
        """Whether the argument is omitted."""
        return self.array is None and self.memory is None and self.device_memory is None


def array_setting(
    info: TensorInfo, buffer: ApplicationBuffer | None, dimensions: Sequence[int] | None, is_output: bool, padded: bool
) -> ArgumentSetting:
    """Return the setting of an argument in the application's array or bytes; None omits it.

    Raises:
        InvalidArgument: If its size, element type or dimensions do not fit `info`, or it cannot be accessed as bytes.
    """
    requested = _checked_dimensions(info, dimensions, may_be_unknown=is_output or buffer is None)
    if buffer is None:
        return ArgumentSetting()
    array = _as_bytes(info, buffer, is_output)
    length = _data_length(info, requested, array.nbytes, padded)
    return ArgumentSetting(requested, length, array.nbytes - length, array=array)


def memory_setting(
    info: TensorInfo,
    memory: AnyMemory,
    span: tuple[int, int],
    dimensions: Sequence[int] | None,
    is_output: bool,
    padded: bool,
) -> ArgumentSetting:
    """Return the setting of an argument in a part of a memory; `span` is its offset and its length with padding.

    Raises:
        InvalidArgument: If the part is not inside the memory, or its size or the dimensions do not fit `info`.
    """
    memory.fileno()  # raises if the memory is closed
    requested = _checked_dimensions(info, dimensions, may_be_unknown=is_output)
    offset, space = span
    if space <= 0 or offset < 0 or offset + space > memory.size_bytes:
        raise InvalidArgument(
            f"{info.name!r}: {space} bytes from byte {offset} on of a memory of {memory.size_bytes}; "
            "a part has 1 byte or more, and is inside the memory"
        )
    length = _data_length(info, requested, space, padded)
    return ArgumentSetting(requested, length, space - length, memory=memory, offset=offset)


def device_setting(
    info: TensorInfo,
    memory: DeviceMemory,
    span: tuple[int, int],
    dimensions: Sequence[int] | None,
) -> ArgumentSetting:
    """Return the setting of an argument that is a device memory, of which it is all: `span` is (0, 0).

    Raises:
        InvalidArgument: If another span is given, or the dimensions do not fit `info` or the memory.
    """
    if span != (0, 0):
        raise InvalidArgument(
            f"{info.name!r}: an argument is a whole device memory, with offset 0 and length 0; got {span}"
        )
    requested = _checked_dimensions(info, dimensions, may_be_unknown=True)
    if merge_dimensions(requested, memory.info.shape) is None:
        shapes = f"dimensions {format_shape(requested)}; the device memory has {format_shape(memory.info.shape)}"
        raise InvalidArgument(f"{info.name!r}: {shapes}")
    return ArgumentSetting(requested, device_memory=memory)


def _checked_dimensions(info: TensorInfo, dimensions: Sequence[int] | None, may_be_unknown: bool) -> tuple[int, ...]:
    """Return the dimensions to send: () if none are given. Raise InvalidArgument if they do not fit."""
    requested = () if dimensions is None else tuple(dimensions)
    if requested and (info.is_scalar or not all(0 <= extent <= _SIZE_MAX for extent in requested)):
        rule = "a scalar has none" if info.is_scalar else "each is 0 to 2^32 - 1"
        raise InvalidArgument(f"{info.name!r}: dimensions {requested}; {rule}")
    merged = merge_dimensions(info.shape, requested)
    if merged is None:
        raise InvalidArgument(f"{info.name!r}: dimensions {requested}; the model has {format_shape(info.shape)}")
    if prod(merged) * np.dtype(info.dtype).itemsize > _SIZE_MAX:
        raise InvalidArgument(f"{info.name!r}: a tensor of {format_shape(merged)} has more than 2^32 - 1 bytes")
    if not may_be_unknown and not info.is_scalar and (not merged or 0 in merged):
        raise InvalidArgument(
            f"{info.name!r} has the shape {format_shape(merged)}, which is not fully known: pass its `dimensions`"
        )
    return requested


def _data_length(info: TensorInfo, requested: tuple[int, ...], space: int, padded: bool) -> int:
    """Return how many bytes of an argument's space are its data. Raise InvalidArgument if they do not fit."""
    shape = merge_dimensions(info.shape, requested) or ()
    if 0 in shape or not (shape or info.is_scalar):
        return space  # an output of unknown shape
    needed = prod(shape) * np.dtype(info.dtype).itemsize
    if space < needed or (space > needed and not padded):
        hint = "" if space < needed else "; enable_input_and_output_padding(True) allows more"
        raise InvalidArgument(f"{info.name!r}: {space} bytes given, {needed} are required{hint}")
    return needed


def _as_bytes(info: TensorInfo, buffer: ApplicationBuffer, is_output: bool) -> Array:
    """Return a flat array of bytes over the application's array or bytes, without a copy."""
    if not isinstance(buffer, np.ndarray):
        try:
            buffer = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{info.name!r} is neither an array nor contiguous bytes: {error}") from error
    elif buffer.dtype not in (np.dtype(info.dtype), np.uint8):
        raise InvalidArgument(f"{info.name!r} holds {info.dtype}, or bytes (uint8); the given array is {buffer.dtype}")
    if not buffer.flags.c_contiguous:
        raise InvalidArgument(f"{info.name!r}: the array is not contiguous; see numpy.ascontiguousarray")
    if is_output and not buffer.flags.writeable:
        raise InvalidArgument(f"{info.name!r} is an output: the array must be writable")
    if not buffer.nbytes:
        raise InvalidArgument(f"{info.name!r}: the array has no elements; None omits an argument")
    return buffer.reshape(-1).view(np.uint8)
