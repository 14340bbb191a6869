"""The content of the interpreter's cache files: the validated model, and the constants that preparation packed.

The model file contains the model without its constants, and the position of each array in the data file. The data file
contains the model's own constants, its memory pools and the packed constants, each aligned to 64 bytes. Loading binds
the operations again, which is quick for the interpreter; it skips validation and packing, which are not.

Packed constants without a model are a single file (`encode_constants`). Files have been verified when they are decoded
here (`compilation_cache`), so decoding does not check them again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from nnfmq.engines import interpreter
from nnfmq.hal.types import Model
from nnfmq.operations.extensions import uses_plugins
from nnfmq.operations.signature import Array
from nnfmq.serialize.model_codec import decode_model, encode_model
from nnfmq.service.caching.compilation_cache import CacheContents
from nnfmq.service.private_memory import ConstantPool

__all__ = ["PackedConstants", "decode_constants", "decode_program", "encode_constants", "encode_program"]

_ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype
_LARGE_BYTES = 1 << 16

PackedConstants: TypeAlias = Sequence[tuple[Array, ...]]
"""`Program.prepacked`: the groups of arrays that preparation packed, in order; of a compiled program also its code."""
Prepare: TypeAlias = Callable[[Model, PackedConstants], interpreter.Program]


class _ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """The position of an array in the data file, in bytes, and its type."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


_PackedLocations: TypeAlias = tuple[tuple[_ArrayLocation, ...], ...]


class _ModelFile(msgspec.Struct, frozen=True, array_like=True):
    """The model file: the encoded model, and the locations of its constants, its pools and the packed constants."""

    model: bytes
    operand_values: _ArrayLocation
    pools: tuple[_ArrayLocation, ...]
    packed: _PackedLocations


_encoder = msgspec.msgpack.Encoder()
_model_file_decoder = msgspec.msgpack.Decoder(_ModelFile)
_locations_decoder = msgspec.msgpack.Decoder(_PackedLocations)
_LENGTH = struct.Struct("<Q")


class _DataFile:
    """A data file under construction."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, array: Array) -> _ArrayLocation:
        """Append an array, aligned, and return its location."""
        self.data += bytes(-len(self.data) % _ALIGNMENT)
        location = _ArrayLocation(len(self.data), array.dtype.str, array.shape)
        self.data += np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return location

    def add_packed(self, packed: PackedConstants) -> _PackedLocations:
        """Append all arrays, and return their locations."""
        return tuple(tuple(self.add(array) for array in arrays) for arrays in packed)


def encode_program(model: Model, packed: PackedConstants) -> CacheContents | None:
    """Return the two files of a model and its packed constants, or None for a model with extensions of plug-ins.

    What a plug-in's operation packs may change with the plug-in, whose version the caches do not record.
    """
    if uses_plugins(model):
        return None
    data, pools = encode_model(replace(model, operand_values=b""))
    file = _DataFile()
    header = _ModelFile(
        data,
        file.add(np.frombuffer(model.operand_values, np.uint8)),
        tuple(file.add(np.frombuffer(pool.view, np.uint8)) for pool in pools),
        file.add_packed(packed),
    )
    return CacheContents((_encoder.encode(header),), (file.data,))


def encode_constants(packed: PackedConstants) -> CacheContents:
    """Return one file of packed constants: the arrays, their encoded locations, and the length of the latter."""
    file = _DataFile()
    locations = _encoder.encode(file.add_packed(packed))
    file.data += locations + _LENGTH.pack(len(locations))
    return CacheContents((file.data,))


def decode_constants(contents: CacheContents) -> PackedConstants:
    """Return the arrays that `encode_constants` wrote. Large ones are views of `contents`."""
    data = memoryview(contents.model[0])
    (length,) = _LENGTH.unpack(data[-_LENGTH.size :])
    end = len(data) - _LENGTH.size
    return list(_packed(data, _locations_decoder.decode(data[end - length : end])))


def decode_program(
    contents: CacheContents, prepare: Prepare = interpreter.prepare
) -> tuple[Model, interpreter.Program]:
    """Return the model that `encode_program` wrote, and its program, prepared by `prepare`.

    Pools and large constants are views of `contents`.
    """
    header = _model_file_decoder.decode(contents.model[0])
    data = memoryview(contents.data[0])
    pools = [ConstantPool(_array(data, location).data) for location in header.pools]
    operand_values = _array(data, header.operand_values).tobytes()
    model = replace(decode_model(header.model, pools), operand_values=operand_values)
    return model, prepare(model, list(_packed(data, header.packed)))


def _packed(data: memoryview, locations: _PackedLocations) -> Iterator[tuple[Array, ...]]:
    """Yield each group of arrays. Small ones are copied, because a view keeps the whole file in memory."""
    for group in locations:
        arrays = (_array(data, location) for location in group)
        yield tuple(array if array.nbytes >= _LARGE_BYTES else array.copy() for array in arrays)


def _array(data: memoryview, location: _ArrayLocation) -> np.ndarray[Any, Any]:
    dtype = np.dtype(location.dtype)
    count = int(np.prod(location.shape, dtype=np.int64))
    if count == 0:
        return np.empty(location.shape, dtype)  # numpy.frombuffer rejects a count of 0
    return np.frombuffer(data, dtype, count, location.offset).reshape(location.shape)
