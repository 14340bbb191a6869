"""A file as a model's input: .npy, a photo (`cli.images`), or else raw little-endian elements.

The answer always has the input's own shape and type, so that what is wrong is said here, with what was given and what
was expected, and not by the driver. A leading 1 may be missing; float64 becomes float32, nothing else is converted.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnfmq.cli.images import SUFFIXES, read_image
from nnfmq.cli.output import shape_text
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnfmq.hal.tensor_info import TensorInfo

Array = np.ndarray[Any, Any]


def read_inputs(paths: Sequence[Path], tensors: Sequence[TensorInfo]) -> list[Array]:
    """Read one file per input of the model; states, which are the last, may all be left out and then start afresh.

    Raises InvalidArgument, or OSError for what cannot be opened.
    """
    plain = [tensor for tensor in tensors if not tensor.is_state]
    if len(paths) not in (len(plain), len(tensors)):
        raise InvalidArgument(f"{len(paths)} --input given; the model takes {_wanted(plain, tensors)}")
    given = [read_input(path, t.shape, np.dtype(t.dtype)) for path, t in zip(paths, tensors, strict=False)]
    return given + [np.full(t.shape, t.zero_point, t.dtype) for t in tensors[len(paths) :]]


def _wanted(plain: Sequence[TensorInfo], tensors: Sequence[TensorInfo]) -> str:
    names = f"{len(plain)}: {', '.join(tensor.name for tensor in plain)}"
    states = [tensor.name for tensor in tensors if tensor.is_state]
    return names + (f"; or {len(tensors)}, with its states: {', '.join(states)}" if states else "")


def read_input(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Read `path` as an array of `shape` and `dtype`."""
    if path.suffix.lower() in SUFFIXES:
        return read_image(path, shape, dtype)
    if path.suffix.lower() == ".npy":
        return _fitted(path, _load_npy(path), tuple(shape), dtype)
    return _read_raw(path, tuple(shape), dtype)


def _load_npy(path: Path) -> Array:
    with path.open("rb") as file:
        try:
            loaded: Array = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, MemoryError) as bad:
            raise InvalidArgument(f"{path}: not a whole .npy array: {bad}") from bad
    return loaded.astype(loaded.dtype.newbyteorder("="), copy=False)


def _fitted(path: Path, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if array.dtype == np.float64 and dtype == np.float32:
        array = array.astype(np.float32)
    if array.dtype != dtype or (array.shape != shape and (1, *array.shape) != shape):
        given, expected = f"{shape_text(array.shape)} {array.dtype}", f"{shape_text(shape)} {dtype}"
        raise InvalidArgument(f"{path}: an array of {given}; the model takes {expected}")
    return np.ascontiguousarray(array.reshape(shape))


def _read_raw(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    content = path.read_bytes()
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        takes = f"{expected} ({shape_text(shape)} {dtype})"
        raise InvalidArgument(f"{path}: {len(content)} bytes of raw elements; the model takes {takes}")
    return np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
