"""Files as model inputs: .npy arrays, photos (`nnfmq.media.images`), recordings (`nnfmq.media.audio`), or elements.

Files with other suffixes have little-endian elements.

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
from nnfmq.client.model.arrays import with_batch_dimension
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.media import audio
from nnfmq.media.images import SUFFIXES, Normalization, read_image, read_photo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnfmq.hal.tensor_info import TensorInfo

Array = np.ndarray[Any, Any]


def read_inputs(
    paths: Sequence[Path], tensors: Sequence[TensorInfo], normalizations: Sequence[Normalization] = ()
) -> list[Array]:
    """Return one array for each input of the model; the first inputs have `normalizations`, which photos get.

    Raises:
        InvalidArgument: If the number of files, or a file's content, does not match the inputs.
        OSError: If a file cannot be read.
    """
    if len(paths) != len(tensors):
        expected = f"{counted(len(tensors), 'input')}: {', '.join(tensor.name for tensor in tensors)}"
        raise InvalidArgument(f"--input was given {counted(len(paths), 'time')}; the model has {expected}")
    given = zip_longest(paths, tensors, normalizations[: len(paths)])
    return [_read(path, tensor, normalization) for path, tensor, normalization in given]


def _read(path: Path, tensor: TensorInfo, normalization: Normalization) -> Array:
    suffix = path.suffix.lower()
    if suffix in SUFFIXES and normalization is not None:
        mean, std = normalization
        return read_photo(path, tensor, mean=mean, std=std)
    if suffix in audio.SUFFIXES:
        return audio.read_audio(path, tensor)
    if tensor.has_unknown_shape:
        return _read_open(path, tensor)
    return read_input(path, tensor.shape, np.dtype(tensor.dtype))


def _read_open(path: Path, tensor: TensorInfo) -> Array:
    """Return the array of a .npy file for an input with open sizes."""
    if path.suffix.lower() != ".npy":
        raise InvalidArgument(
            f"{path}: the model leaves sizes of input {tensor.name!r} open: give a .npy file, or --shape"
        )
    array = _read_array(path)
    known = [size in (0, given) for size, given in zip(tensor.shape, array.shape, strict=False)]
    if tensor.shape and not (len(tensor.shape) == array.ndim and all(known)):
        return _checked(path, array, tensor.shape, np.dtype(tensor.dtype))
    return _checked(path, array, array.shape, np.dtype(tensor.dtype))


def read_steps(
    paths: Sequence[Path],
    tensors: Sequence[TensorInfo],
    normalizations: Sequence[Normalization] = (),
    *,
    has_states: bool,
) -> list[list[Array]]:
    """Return the inputs of each execution: one, or with states as many as there are files for.

    Raises:
        InvalidArgument: If the number of files, or a file's content, does not match the inputs.
        OSError: If a file cannot be read.
    """
    size = len(tensors)
    if not has_states or not size or len(paths) % size:
        return [read_inputs(paths, tensors, normalizations)]
    return [read_inputs(paths[at : at + size], tensors, normalizations) for at in range(0, len(paths), size)]


def read_input(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return the content of `path` as an array of `shape` and `dtype`."""
    if path.suffix.lower() in SUFFIXES:
        return read_image(path, shape, dtype)
    if path.suffix.lower() == ".npy":
        return _read_npy(path, tuple(shape), dtype)
    return _read_raw(path, tuple(shape), dtype)


def _read_npy(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return _checked(path, _read_array(path), shape, dtype)


def _read_array(path: Path) -> Array:
    with path.open("rb") as file:
        try:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, MemoryError) as bad:
            raise InvalidArgument(f"{path} is not a complete .npy array: {bad}") from bad
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _checked(path: Path, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array for an input of this shape, where 0 is an open size, and dtype."""
    if array.dtype == np.float64 and dtype == np.float32:
        array = array.astype(np.float32)
    array = with_batch_dimension(array, shape)
    if array.dtype != dtype or array.shape != shape:
        actual, expected = (
            f"{shape_text(array.shape)} {array.dtype}",
            f"{shape_text(size or '?' for size in shape)} {dtype}",
        )
        raise InvalidArgument(f"{path} is an array of {actual}; the input needs {expected}")
    return np.asarray(array, order="C")  # keeps rank 0, which ascontiguousarray does not


def _read_raw(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    content = path.read_bytes()
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        needed = f"{expected} ({shape_text(shape)} {dtype})"
        raise InvalidArgument(f"{path} has {len(content)} bytes of raw elements; the input needs {needed}")
    return np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
