"""What the interpreter saves of a compilation: the model, validated, and the constants that its plans have packed.

The model file has the model without its constants, and where everything lies in the data file: the model's own
constants, its pools, the packed arrays, each at a multiple of 64 bytes. Restoring binds the operations anew, which is
what takes the interpreter little time, and skips what takes much: validation, and packing weights. Both files arrive
here only as they were saved (`compilation_cache`), so they are decoded, and not judged again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from nnfmq.engines import interpreter
from nnfmq.hal.types import Model
from nnfmq.operations.signature import Array
from nnfmq.serialize.model import decode_model, encode_model
from nnfmq.service.compilation_cache import CacheContents
from nnfmq.service.wire import PrivatePool

__all__ = ["restore", "save"]

_ALIGNMENT = 64

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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)


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
        tuple(tuple(writer.add(array) for array in group) for group in groups),
    )
    return CacheContents((_encoder.encode(saved),), (writer.data,))


def restore(contents: CacheContents, prepare: Prepare = interpreter.prepare) -> tuple[Model, interpreter.Program]:
    """Return what was saved, made ready by `prepare`; its pools look at `contents`, and nothing else does."""
    saved = _decoder.decode(contents.model[0])
    data = memoryview(contents.data[0])
    pools = [PrivatePool(_array(data, place).data) for place in saved.pools]
    model = replace(decode_model(saved.model, pools), operand_values=_array(data, saved.values).tobytes())
    return model, prepare(model, list(_groups(data, saved)))


def _groups(data: memoryview, saved: _Saved) -> Iterator[tuple[Array, ...]]:
    for group in saved.groups:
        yield tuple(_array(data, place).copy() for place in group)  # a view would keep the whole file in memory


def _array(data: memoryview, place: _Place) -> np.ndarray[Any, Any]:
    dtype = np.dtype(place.dtype)
    count = int(np.prod(place.shape, dtype=np.int64))
    if count == 0:
        return np.empty(place.shape, dtype)  # frombuffer refuses to look at nothing
    return np.frombuffer(data, dtype, count, place.offset).reshape(place.shape)
