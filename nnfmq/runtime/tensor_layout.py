"""Layout of tensors in a memory pool, and array views of them.

Each argument starts at a multiple of 64 bytes (the HAL's default request alignment), and its range ends with its last
element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, Pool, RequestArgument

Array = NDArray[Any]
InputValue: TypeAlias = ArrayLike | Mapping[str, Any]
"""An array for an input, or all of an execution's inputs by name."""
ALIGNMENT = PADDING = 64


class MemoryPreference(NamedTuple):
    """The fastest placement of an argument.

    Its offset is a multiple of `alignment`, its length is padded to a multiple of `padding`, both in bytes.
    """

    alignment: int
    padding: int


def size_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor of the type of `info` and of `shape`, in bytes."""
    return math.prod(shape) * np.dtype(info.dtype).itemsize


def space_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's argument, in bytes: that of the tensor, or of an empty tensor's one element."""
    return size_bytes(info, () if info.is_empty else shape)


def callers_shape(info: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the caller's array, given the shape that the driver reports or () if it reports none.

    Rank 0 and empty tensors have operands of another shape, and are never of unknown shape.
    """
    return info.shape if info.is_scalar or info.is_empty else shape or info.shape


def layout(
    infos: Sequence[TensorInfo], shapes: Sequence[tuple[int, ...]], pool_index: int
) -> tuple[tuple[RequestArgument, ...], int]:
    """Return the request arguments of tensors placed one after the other in a pool, and the pool's size in bytes.

    A tensor of unknown size gets one byte: the driver then replies OUTPUT_INSUFFICIENT_SIZE with its shape.
    """
    arguments, end = [], 0
    for info, shape in zip(infos, shapes, strict=True):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        length = max(space_bytes(info, shape), 1)
        # Dimensions are sent only if they add to what the model specifies.
        dimensions = shape if shape != info.shape else ()
        arguments.append(RequestArgument(False, DataLocation(pool_index, offset, length), dimensions))
        end = offset + length
    return tuple(arguments), max(end, 1)


def view(memory: Pool, argument: RequestArgument, info: TensorInfo, shape: tuple[int, ...]) -> Array:
    """Return an array of `shape` over the location of `argument` in `memory`, without a copy.

    `shape` must fit the location's length.
    """
    location = argument.location
    data = memory.view[location.offset : location.offset + size_bytes(info, shape)]
    return np.frombuffer(data, info.dtype).reshape(shape)


def has_unknown_shape(info: TensorInfo) -> bool:
    """Return True if a dimension, or the rank, is unknown."""
    return info.has_unknown_shape


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape for error messages: `1x8x3`; `1 x any x 3` if a dimension is unknown."""
    sign = " x " if 0 in shape else "x"
    return sign.join("any" if extent == 0 else str(extent) for extent in shape) or "scalar or unknown rank"


def format_array_shape(shape: tuple[int, ...]) -> str:
    """Return the shape of an array for error messages: `1x0x3`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def format_tensor_shape(info: TensorInfo) -> str:
    """Return the shape of an input or output for error messages, as the functions above."""
    return (format_shape if info.has_unknown_shape else format_array_shape)(info.shape)
