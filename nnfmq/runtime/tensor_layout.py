"""Between an application's arrays and the byte ranges of a request: layout, checks, views.

Each argument starts at a multiple of 64 bytes (the HAL's default request alignment) and its range ends with its last
element. An array must have the shape and dtype of its operand; only a float64 for a float32 or the like is converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, RequestArgument
from nnfmq.memory import Memory

Array = NDArray[Any]
ALIGNMENT = PADDING = 64
_LENGTH_MAX = 2**32 - 1  # of a DataLocation


class MemoryPreference(NamedTuple):
    """Where an argument of a request lies best: it begins at a multiple of `alignment`, and its length is padded to a
    multiple of `padding`, both in bytes.
    """

    alignment: int
    padding: int


def size_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape`."""
    return math.prod(shape) * np.dtype(info.dtype).itemsize


def layout(
    infos: Sequence[TensorInfo], shapes: Sequence[tuple[int, ...]], pool_index: int
) -> tuple[tuple[RequestArgument, ...], int]:
    """Return the arguments of tensors that lie one after the other in a pool, and the size of that pool in bytes."""
    arguments, end = [], 0
    for info, shape in zip(infos, shapes, strict=True):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        length = max(size_bytes(info, shape), 1)  # an output of unknown size: the driver says what it needs
        # Dimensions travel only where they tell the driver something: the model has the others.
        dimensions = shape if shape != info.shape else ()
        arguments.append(RequestArgument(False, DataLocation(pool_index, offset, length), dimensions))
        end = offset + length
    return tuple(arguments), max(end, 1)


def view(memory: Memory, argument: RequestArgument, info: TensorInfo, shape: tuple[int, ...]) -> Array:
    """Return the array in `memory` that `argument` describes, without a copy; of `shape`, which fits its place."""
    where = argument.location
    data = memory.view[where.offset : where.offset + size_bytes(info, shape)]
    return np.frombuffer(data, info.dtype).reshape(shape)


def checked_shape(info: TensorInfo, given: tuple[int, ...]) -> tuple[int, ...]:
    """Return `given`, if it may stand for `info`: unknown extents (0) take any. Raises InvalidArgument."""
    wanted = info.shape
    fits = len(given) == len(wanted) and all(w in (0, g) for w, g in zip(wanted, given, strict=True))
    if not fits and (wanted or info.is_scalar):
        raise InvalidArgument(f"input {info.name!r} has shape {_shown(wanted)}; the given array has {_shown(given)}")
    return given


def checked_array(info: TensorInfo, value: ArrayLike) -> Array:
    """Return `value` as an array that may be copied into `info`'s place. Raises InvalidArgument that says why not."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged lists
        raise InvalidArgument(f"input {info.name!r} is no array: {error}") from error
    checked_shape(info, array.shape)
    if array.dtype != info.dtype and not np.can_cast(array.dtype, info.dtype, "same_kind"):
        raise InvalidArgument(f"input {info.name!r} holds {info.dtype}; the given array is {array.dtype}")
    return array


def check_count(kind: str, wanted: Sequence[TensorInfo], given: int) -> None:
    """Raise InvalidArgument unless as many arrays are given as the model has."""
    if given != len(wanted):
        names = ", ".join(repr(info.name) for info in wanted)
        raise InvalidArgument(f"the model has {len(wanted)} {kind}s ({names}); {given} were given")


def checked_arrays(infos: Sequence[TensorInfo], values: Sequence[ArrayLike]) -> list[Array]:
    """Return all inputs of an execution as arrays. Raises InvalidArgument that says why not."""
    check_count("input", infos, len(values))
    return [checked_array(info, value) for info, value in zip(infos, values, strict=True)]


def is_open(info: TensorInfo) -> bool:
    """Return True where extents, or even the rank, are unknown."""
    return 0 in info.shape or not (info.shape or info.is_scalar)


def require_fixed_shapes(kind: str, infos: Sequence[TensorInfo], who: str = "a burst") -> None:
    """Raise InvalidArgument where a shape is unknown: `who` lays its memory out once."""
    for info in infos:
        if is_open(info):
            raise InvalidArgument(
                f"{kind} {info.name!r} has the shape {_shown(info.shape)}, which is not fully known: "
                f"{who} needs fixed shapes; use PreparedModel.execute"
            )


def check_reported_shapes(infos: Sequence[TensorInfo], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ProtocolError where the shapes that the driver states cannot be those of `infos`."""
    if len(shapes) != len(infos):
        raise ProtocolError(f"the driver states the shapes of {len(shapes)} outputs, the model has {len(infos)}")
    for info, shape in zip(infos, shapes, strict=True):
        fits = len(shape) == len(info.shape) and all(w in (0, g) for w, g in zip(info.shape, shape, strict=True))
        if (info.shape and not fits) or size_bytes(info, shape) > _LENGTH_MAX:
            raise ProtocolError(
                f"the driver states the shape {_shown(shape)} for output {info.name!r} of shape {_shown(info.shape)}"
            )


def check_fits(
    infos: Sequence[TensorInfo], places: Sequence[RequestArgument], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise ProtocolError where the driver states a larger result than it was given room for."""
    for info, place, shape in zip(infos, places, shapes, strict=True):
        if size_bytes(info, shape) > place.location.length:
            given = place.location.length
            raise ProtocolError(f"the driver states {_shown(shape)} for output {info.name!r}, which had {given} bytes")


def check_out(infos: Sequence[TensorInfo], targets: Sequence[Array]) -> None:
    """Raise InvalidArgument where `out` cannot take the outputs; what has no known shape is checked by `copy_out`."""
    given: Any = targets  # whatever the application gave
    if not isinstance(given, Sequence) or not all(isinstance(target, np.ndarray) for target in given):
        raise InvalidArgument("`out` must be a sequence of numpy arrays, one for each output")
    if len(targets) != len(infos):
        raise InvalidArgument(f"the model has {len(infos)} outputs, `out` has {len(targets)} arrays")
    for info, target in zip(infos, targets, strict=True):
        is_known = bool(info.shape) and 0 not in info.shape
        if target.dtype != info.dtype or (is_known and target.shape != info.shape):
            raise InvalidArgument(
                f"output {info.name!r} is {info.dtype} of shape {_shown(info.shape)}, "
                f"`out` has {target.dtype} of shape {_shown(target.shape)}"
            )
        if not target.flags.writeable:
            raise InvalidArgument(f"the array in `out` for output {info.name!r} is read-only")


def copy_out(targets: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
    """Copy results into the caller's arrays and return those. Raises InvalidArgument where a shape differs."""
    for index, (target, result) in enumerate(zip(targets, results, strict=True)):
        if target.shape != result.shape:
            raise InvalidArgument(f"output {index} has shape {result.shape}, `out` has {target.shape}")
        np.copyto(target, result)
    return tuple(targets)


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join("?" if extent == 0 else str(extent) for extent in shape) or "scalar or unknown rank"
