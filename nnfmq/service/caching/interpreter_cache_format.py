"""What the interpreter saves of a compilation: the model, validated, and the constants that its plans have packed.

The model file has the model without its constants, and where everything lies in the data file: the model's own
constants, its pools, the packed arrays, each at a multiple of 64 bytes. Restoring binds the operations anew, which is
what takes the interpreter little time, and skips what takes much: validation, and packing weights. Packed arrays alone,
without the model, are one file (`save_groups`). Files arrive here only as they were saved (`compilation_cache`), so
they are decoded, and not judged again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from nnfmq.engines import interpreter
from nnfmq.hal.types import Model
from nnfmq.operations.signature import Array
from nnfmq.serialize.model_codec import decode_model, encode_model
from nnfmq.service.caching.compilation_cache import CacheContents
from nnfmq.service.private_memory import ConstantPool

__all__ = ["Groups", "restore", "restore_groups", "save", "save_groups"]

_ALIGNMENT = 64
_LARGE_BYTES = 1 << 16

Groups: TypeAlias = Sequence[tuple[Array, ...]]
Prepare: TypeAlias = Callable[[Model, Groups], interpreter.Program]


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """An array in the data file."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """The model file: the model's bytes, and the places of its constants, of its pools, and of the packed groups."""

    model: bytes
    values: _Place
    pools: tuple[_Place, ...]
    groups: tuple[tuple[_Place, ...], ...]


_Places: TypeAlias = tuple[tuple[_Place, ...], ...]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)
_places_decoder = msgspec.msgpack.Decoder(_Places)
_LENGTH = struct.Struct("<Q")


class _Writer:
    """The data file while it grows."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, array: Array) -> _Place:
        """Append an array, and return its place."""
        self.data += bytes(-len(self.data) % _ALIGNMENT)
        place = _Place(len(self.data), array.dtype.str, array.shape)
        self.data += np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return place

    def add_groups(self, groups: Groups) -> _Places:
        """Append all of them, and return their places."""
        return tuple(tuple(self.add(array) for array in group) for group in groups)


def save(model: Model, groups: Groups) -> CacheContents | None:
    """Return the two files of a model and its packed constants; None for one with extensions.

    What a plug-in's operation packs may change with the plug-in, of whose version the caches know nothing.
    """
    if model.extensions:
        return None
    data, pools = encode_model(replace(model, operand_values=b""))
    writer = _Writer()
    saved = _Saved(
        data,
        writer.add(np.frombuffer(model.operand_values, np.uint8)),
        tuple(writer.add(np.frombuffer(pool.view, np.uint8)) for pool in pools),
        writer.add_groups(groups),
    )
    return CacheContents((_encoder.encode(saved),), (writer.data,))


def save_groups(groups: Groups) -> CacheContents:
    """Return one file of packed constants: the arrays, their places, and how long these are."""
    writer = _Writer()
    places = _encoder.encode(writer.add_groups(groups))
    writer.data += places + _LENGTH.pack(len(places))
    return CacheContents((writer.data,))


def restore_groups(contents: CacheContents) -> Groups:
    """Return what `save_groups` was given; large arrays look at `contents`."""
    data = memoryview(contents.model[0])
    (length,) = _LENGTH.unpack(data[-_LENGTH.size :])
    end = len(data) - _LENGTH.size
    return list(_groups(data, _places_decoder.decode(data[end - length : end])))


def restore(contents: CacheContents, prepare: Prepare = interpreter.prepare) -> tuple[Model, interpreter.Program]:
    """Return what was saved, made ready by `prepare`; its pools look at `contents`, and nothing else does."""
    saved = _decoder.decode(contents.model[0])
    data = memoryview(contents.data[0])
    pools = [ConstantPool(_array(data, place).data) for place in saved.pools]
    model = replace(decode_model(saved.model, pools), operand_values=_array(data, saved.values).tobytes())
    return model, prepare(model, list(_groups(data, saved.groups)))


def _groups(data: memoryview, groups: _Places) -> Iterator[tuple[Array, ...]]:
    for group in groups:
        yield tuple(_kept(_array(data, place)) for place in group)


def _kept(array: Array) -> Array:
    """Return a copy of a small array: a view keeps the whole file in memory. A large one is most of it."""
    return array if array.nbytes >= _LARGE_BYTES else array.copy()


def _array(data: memoryview, place: _Place) -> np.ndarray[Any, Any]:
    dtype = np.dtype(place.dtype)
    count = int(np.prod(place.shape, dtype=np.int64))
    if count == 0:
        return np.empty(place.shape, dtype)  # frombuffer refuses to look at nothing
    return np.frombuffer(data, dtype, count, place.offset).reshape(place.shape)
