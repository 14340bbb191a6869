"""Between an application's arrays and the byte ranges of a request: layout, checks, views.

Each argument starts at a multiple of 64 bytes (the HAL's default request alignment) and its range ends with its last
element. An array must have the shape and dtype of its operand; only a float64 for a float32 or the like is converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, RequestArgument
from nnfmq.memory import Memory

Array = NDArray[Any]
ALIGNMENT = 64


def size_bytes(info: TensorInfo, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape`."""
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize


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
    """Return the array in `memory` that `argument` describes, without a copy."""
    where = argument.location
    data = memory.view[where.offset : where.offset + where.length]
    return np.frombuffer(data, info.dtype).reshape(shape)


def checked_shape(info: TensorInfo, given: tuple[int, ...]) -> tuple[int, ...]:
    """Return `given`, if it may stand for `info`: unknown extents (0) take any. Raises InvalidArgument."""
    wanted = info.shape
    fits = len(given) == len(wanted) and all(w in (0, g) for w, g in zip(wanted, given, strict=True))
    if not fits and wanted:
        raise InvalidArgument(f"input {info.name!r} has shape {_shown(wanted)}; the given array has {_shown(given)}")
    return given


def checked_array(info: TensorInfo, value: ArrayLike) -> Array:
    """Return `value` as an array that may be copied into `info`'s place. Raises InvalidArgument that says why not."""
    array = np.asarray(value)
    checked_shape(info, array.shape)
    if array.dtype != info.dtype and not np.can_cast(array.dtype, info.dtype, "same_kind"):
        raise InvalidArgument(f"input {info.name!r} holds {info.dtype}; the given array is {array.dtype}")
    return array


def check_count(kind: str, wanted: Sequence[TensorInfo], given: int) -> None:
    """Raise InvalidArgument unless as many arrays are given as the model has."""
    if given != len(wanted):
        names = ", ".join(repr(info.name) for info in wanted)
        raise InvalidArgument(f"the model has {len(wanted)} {kind}s ({names}); {given} were given")


def require_known(kind: str, infos: Sequence[TensorInfo]) -> None:
    """Raise InvalidArgument where a shape is unknown: a burst lays its memory out once."""
    for info in infos:
        if 0 in info.shape or not info.shape:
            raise InvalidArgument(
                f"{kind} {info.name!r} has the shape {_shown(info.shape)}, which is not fully known: "
                "a burst needs fixed shapes; use PreparedModel.execute"
            )


def check_out(infos: Sequence[TensorInfo], targets: Sequence[Array]) -> None:
    """Raise InvalidArgument where `out` cannot take the outputs; what has no known shape is checked by `copy_out`."""
    if len(targets) != len(infos):
        raise InvalidArgument(f"the model has {len(infos)} outputs, `out` has {len(targets)} arrays")
    for info, target in zip(infos, targets, strict=True):
        is_known = bool(info.shape) and 0 not in info.shape
        if target.dtype != info.dtype or (is_known and target.shape != info.shape):
            raise InvalidArgument(
                f"output {info.name!r} is {info.dtype} of shape {_shown(info.shape)}, "
                f"`out` has {target.dtype} of shape {_shown(target.shape)}"
            )


def copy_out(targets: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
    """Copy results into the caller's arrays and return those. Raises InvalidArgument where a shape differs."""
    for index, (target, result) in enumerate(zip(targets, results, strict=True)):
        if target.shape != result.shape:
            raise InvalidArgument(f"output {index} has shape {result.shape}, `out` has {target.shape}")
        np.copyto(target, result)
    return tuple(targets)


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join("?" if extent == 0 else str(extent) for extent in shape) or "scalar or unknown rank"
