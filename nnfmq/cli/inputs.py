"""Files as model inputs: .npy arrays, photos (`cli.images`), or raw little-endian elements.

Shape and dtype are checked here, before a driver is contacted, so that messages name the file. A batch dimension of 1
may be missing; float64 is converted to float32; nothing else is converted.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnfmq.cli.console import shape_text
from nnfmq.cli.images import SUFFIXES, Normalization, read_image, read_photo
from nnfmq.hal.errors import InvalidArgument
from nnfmq.runtime.array_checks import with_batch_dimension

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnfmq.hal.tensor_info import TensorInfo

Array = np.ndarray[Any, Any]


def read_inputs(
    paths: Sequence[Path], tensors: Sequence[TensorInfo], normalizations: Sequence[Normalization] = ()
) -> list[Array]:
    """Return one array for each input of the model; the first inputs have `normalizations`, which photos get.

    The states of a recurrent model, its last inputs, may be omitted together; they then begin at their zero point.

    Raises:
        InvalidArgument: If the number of files, or a file's content, does not match the inputs.
        OSError: If a file cannot be read.
    """
    plain = [tensor for tensor in tensors if not tensor.is_state]
    if len(paths) not in (len(plain), len(tensors)):
        expected = f"{len(plain)} inputs: {', '.join(tensor.name for tensor in plain)}"
        if len(tensors) > len(plain):
            states = [tensor.name for tensor in tensors if tensor.is_state]
            expected += f"; or {len(tensors)} with its states: {', '.join(states)}"
        raise InvalidArgument(f"--input was given {len(paths)} times; the model has {expected}")
    given = zip_longest(paths, tensors[: len(paths)], normalizations[: len(paths)])
    arrays = [
        read_photo(path, tensor, normalization)
        if normalization is not None and path.suffix.lower() in SUFFIXES
        else read_input(path, tensor.shape, np.dtype(tensor.dtype))
        for path, tensor, normalization in given
    ]
    return arrays + [np.full(t.shape, t.zero_point, t.dtype) for t in tensors[len(paths) :]]


def read_input(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return the content of `path` as an array of `shape` and `dtype`."""
    if path.suffix.lower() in SUFFIXES:
        return read_image(path, shape, dtype)
    if path.suffix.lower() == ".npy":
        return _read_npy(path, tuple(shape), dtype)
    return _read_raw(path, tuple(shape), dtype)


def _read_npy(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    with path.open("rb") as file:
        try:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, MemoryError) as bad:
            raise InvalidArgument(f"{path} is not a complete .npy array: {bad}") from bad
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype == np.float64 and dtype == np.float32:
        array = array.astype(np.float32)
    array = with_batch_dimension(array, shape)
    if array.dtype != dtype or array.shape != shape:
        actual, expected = f"{shape_text(array.shape)} {array.dtype}", f"{shape_text(shape)} {dtype}"
        raise InvalidArgument(f"{path} is an array of {actual}; the input needs {expected}")
    return np.ascontiguousarray(array)


def _read_raw(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    content = path.read_bytes()
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        needed = f"{expected} ({shape_text(shape)} {dtype})"
        raise InvalidArgument(f"{path} has {len(content)} bytes of raw elements; the input needs {needed}")
    return np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
