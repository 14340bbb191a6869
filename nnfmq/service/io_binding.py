"""Binding of a request's arguments to mapped memory, to files and to managed buffers.

Arrays over mapped memory are created once and need nothing more (`input_array`, `output_buffer`); most burst requests
need only these. All other requests are staged: before each run every `InputBinding` supplies an array, and after it
every `OutputBinding` stores its result. File contents are copied through private memory. A managed buffer's storage is
used in place, after its state was checked for this run. (MEM-1, DOM-5..10, DOM-14)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnfmq.engines.execution import DynamicOutput
from nnfmq.file_memory import FileMemory, FileRange
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    Pool,
    Request,
    RequestArgument,
    merge_dimensions,
    operand_bytes,
)
from nnfmq.memory import Memory, file_identity
from nnfmq.operations.shapes import require_max_rank
from nnfmq.operations.signature import NUMPY_TYPES
from nnfmq.service.error_translation import errors_to_status
from nnfmq.service.managed_buffers import ManagedBuffer, ManagedBuffers, TensorStorage
from nnfmq.service.memory_quota import QuotaCharge
from nnfmq.service.private_memory import ConstantPool

Array = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]


class InputBinding(Protocol):
    """Where an input comes from."""

    def array(self) -> Array | None:
        """Return the input as it is now, None where it is omitted. Blocks for a file. Raises what is wrong with it."""
        ...


class OutputBinding(Protocol):
    """Where an output goes."""

    def begin(self) -> Any:
        """Return what the engine fills."""
        ...

    def end(self, shape: Shape) -> None:
        """The engine has filled it with a result of `shape`. Raises what keeps that from its place."""
        ...

    def fail(self) -> None:
        """The execution has failed."""
        ...


# -- mapped memory ----------------------------------------------------------------------------------------------------


def dimensions_of(operand: Operand, argument: RequestArgument) -> Shape:
    """Return the request's dimensions, with the model's where the request leaves them open.

    Raises GeneralFailure where they are more than an array can have.
    """
    require_max_rank(argument.dimensions or operand.dimensions, "an argument")
    if not argument.dimensions or not operand.dimensions:
        return argument.dimensions or operand.dimensions
    return tuple(given or known for given, known in zip(argument.dimensions, operand.dimensions, strict=True))


def _bytes_at(pool: Pool, location: DataLocation) -> memoryview:
    return pool.view[location.offset : location.offset + location.length]


def input_array(operand: Operand, argument: RequestArgument, pools: Sequence[Any]) -> Array | None:
    """Return an input in mapped memory. Raises InvalidArgument where the memory may not be read."""
    if argument.has_no_value:
        return None
    pool = pools[argument.location.pool_index]
    _require_readable(pool, argument)
    array = np.frombuffer(_bytes_at(pool, argument.location), NUMPY_TYPES[operand.type])
    return array.reshape(dimensions_of(operand, argument))


def output_buffer(index: int, operand: Operand, argument: RequestArgument, pools: Sequence[Any]) -> Any:
    """Return where an output goes: an array where its shape is known, which is the engine's short way; else bytes."""
    if argument.has_no_value:
        return None
    data = _bytes_at(pools[argument.location.pool_index], argument.location)
    if data.readonly:
        raise InvalidArgument(
            f"N-RQX-12: output {index} lies in pool {argument.location.pool_index}, which may only be read"
        )
    return _shaped(operand, argument, data)


def _shaped(operand: Operand, argument: RequestArgument, data: Any) -> Any:
    dimensions = dimensions_of(operand, argument)
    if operand_bytes(operand, dimensions) != len(data) or not dimensions:
        return data
    return np.frombuffer(data, NUMPY_TYPES[operand.type]).reshape(dimensions)


def _require_readable(pool: Any, argument: RequestArgument) -> None:
    if not getattr(pool, "is_readable", True):  # what is no shared memory is private, and always is
        raise InvalidArgument(f"N-RQX-12: pool {argument.location.pool_index} has an input, but may only be written")


@dataclass(slots=True)
class _InPlace:
    """An argument that lies in mapped memory, or is omitted."""

    value: Any

    def array(self) -> Array | None:
        return self.value  # type: ignore[no-any-return]

    def begin(self) -> Any:
        return self.value

    def end(self, shape: Shape) -> None:
        """Do nothing: it is where it should be."""

    def fail(self) -> None:
        """Do nothing."""


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FileCopy:
    """Private memory for an argument that lies in a file."""

    range: FileRange
    raw: NDArray[np.uint8]
    charge: QuotaCharge | None


@dataclass(frozen=True, slots=True)
class _FromFile:
    copy: _FileCopy
    dtype: np.dtype[Any]
    dimensions: Shape

    def array(self) -> Array:
        self.copy.range.read_into(self.copy.raw.data)
        return self.copy.raw.view(self.dtype).reshape(self.dimensions)


@dataclass(frozen=True, slots=True)
class _ToFile:
    copy: _FileCopy
    value: Any
    item_bytes: int

    def begin(self) -> Any:
        return self.value

    def end(self, shape: Shape) -> None:
        self.copy.range.write_from(self.copy.raw.data[: math.prod(shape) * self.item_bytes])

    def fail(self) -> None:
        """Do nothing: the file is as it was."""


# -- buffers ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _FromBuffer:
    buffer: ManagedBuffer
    dimensions: Shape
    room: TensorStorage | None = None  # held for as long as its array may be used

    def array(self) -> Array:
        room = self.room = self.buffer.content()
        if merge_dimensions(self.dimensions, room.shape) != room.shape:
            raise InvalidArgument(
                f"DOM-8: buffer {self.buffer.token} holds the shape {room.shape}; the input has {self.dimensions}"
            )
        return room.array


@dataclass(slots=True)
class _ToBuffer:
    buffer: ManagedBuffer
    dimensions: Shape  # of the model, of the request and of the buffer
    is_fixed: bool  # by the model: the engine then makes nothing else, and may fill the room in place
    room: TensorStorage | None = None

    def begin(self) -> Any:
        if self.is_fixed:
            return self._room_for(self.dimensions)
        self.room = None
        self.buffer.mark_uninitialized()
        return DynamicOutput(self._room_for)

    def _room_for(self, shape: Shape) -> Array:
        if merge_dimensions(self.dimensions, shape) != shape:
            raise GeneralFailure(
                f"DOM-14: a result of shape {shape} for buffer {self.buffer.token}, which takes {self.dimensions}"
            )
        self.room = self.buffer.begin_write(shape)
        return self.room.array

    def end(self, shape: Shape) -> None:
        assert self.room is not None  # the engine has asked for it
        self.buffer.end_write(self.room)

    def fail(self) -> None:
        self.buffer.mark_uninitialized()


# -- all of a request -------------------------------------------------------------------------------------------------


def needs_staging(request: Request) -> bool:
    """Return whether some of a request's pools are no mapped memory."""
    return any(isinstance(pool, FileMemory | BufferToken) for pool in request.pools)


class Staging:
    """Makes the sources and sinks of one request, which fits its model. `key` is the prepared model's."""

    def __init__(self, key: object, request: Request, buffers: ManagedBuffers | None) -> None:
        self._key = key
        self._request = request
        self._buffers = buffers
        self._used: set[int] = set()  # tokens

    def sources(self, operands: Iterable[Operand]) -> list[InputBinding]:
        """Return where the inputs come from; call it before `sinks`. Raises InvalidArgument that names the argument."""
        return [self._source(i, *pair) for i, pair in enumerate(zip(operands, self._request.inputs, strict=True))]

    def sinks(self, operands: Iterable[Operand]) -> list[OutputBinding]:
        """Return where the outputs go. Raises as `sources`."""
        return [self._sink(i, *pair) for i, pair in enumerate(zip(operands, self._request.outputs, strict=True))]

    def _pool(self, argument: RequestArgument) -> Any:
        return None if argument.has_no_value else self._request.pools[argument.location.pool_index]

    def _source(self, index: int, operand: Operand, argument: RequestArgument) -> InputBinding:
        pool = self._pool(argument)
        if isinstance(pool, BufferToken):
            buffer = self._buffer(pool)
            buffer.check_role(self._key, index, is_output=False)
            self._used.add(buffer.token)
            return _FromBuffer(buffer, self._joined(operand, argument, buffer))
        if isinstance(pool, FileMemory):
            _require_readable(pool, argument)
            return _FromFile(self._copy_of(pool, argument), NUMPY_TYPES[operand.type], dimensions_of(operand, argument))
        return _InPlace(input_array(operand, argument, self._request.pools))

    def _sink(self, index: int, operand: Operand, argument: RequestArgument) -> OutputBinding:
        pool = self._pool(argument)
        if isinstance(pool, BufferToken):
            return self._to_buffer(index, operand, argument, self._buffer(pool))
        if isinstance(pool, FileMemory):
            if not pool.is_writable:
                raise InvalidArgument(f"N-RQX-12: output {index} lies in a file that may only be read")
            copy = self._copy_of(pool, argument)
            return _ToFile(copy, _shaped(operand, argument, copy.raw.data), NUMPY_TYPES[operand.type].itemsize)
        return _InPlace(output_buffer(index, operand, argument, self._request.pools))

    def _to_buffer(
        self, index: int, operand: Operand, argument: RequestArgument, buffer: ManagedBuffer
    ) -> OutputBinding:
        buffer.check_role(self._key, index, is_output=True)
        if buffer.token in self._used:
            raise InvalidArgument(f"N-DEX-6: output {index} is buffer {buffer.token}, which has another argument")
        self._used.add(buffer.token)
        dimensions = self._joined(operand, argument, buffer)
        is_fixed = buffer.is_known and operand_bytes(operand) > 0
        return _ToBuffer(buffer, dimensions, is_fixed)

    def _joined(self, operand: Operand, argument: RequestArgument, buffer: ManagedBuffer) -> Shape:
        dimensions = merge_dimensions(dimensions_of(operand, argument), buffer.dimensions)
        if dimensions is None:
            raise InvalidArgument(
                f"N-DEX-7: an argument of the dimensions {argument.dimensions} in buffer {buffer.token}, "
                f"which has {buffer.dimensions}"
            )
        return dimensions

    def _buffer(self, token: BufferToken) -> ManagedBuffer:
        if self._buffers is None:
            raise InvalidArgument(f"N-RQX-9: token {token.token} stands for no buffer")
        return self._buffers.of(token)

    def _copy_of(self, pool: FileMemory, argument: RequestArgument) -> _FileCopy:
        place = argument.location
        charge = None if self._buffers is None else self._buffers.quota.charge(place.length)
        with errors_to_status("copying memory in a file"):
            return _FileCopy(pool.range(place.offset, place.length), np.empty(place.length, np.uint8), charge)


# -- constants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConstantRange:
    """Bytes of a client's memfd that were a model's constant."""

    identity: tuple[int, int]
    begin: int
    end: int


def find_constant_ranges(model: Model) -> tuple[ConstantRange, ...]:
    """Return where the model's constants came from, as far as that can be told from other memory."""
    found = []
    for operand in (operand for graph in (model.main, *model.referenced) for operand in graph.operands):
        if operand.lifetime is LifeTime.CONSTANT_REFERENCE:
            pool, place = model.pools[operand.location.pool_index], operand.location
            if isinstance(pool, ConstantPool) and pool.identity is not None:
                begin = pool.offset + place.offset
                found.append(ConstantRange(pool.identity, begin, begin + place.length))
    return tuple(found)


def require_no_constant_overlap(constants: Sequence[ConstantRange], request: Request) -> None:
    """Raise InvalidArgument where an output lies over one of the model's constants (EXE-10)."""
    for index, argument in enumerate(request.outputs):
        pool = None if argument.has_no_value else request.pools[argument.location.pool_index]
        if not isinstance(pool, Memory | FileMemory):
            continue
        identity, begin = file_identity(pool.fileno()), pool.offset + argument.location.offset
        end = begin + argument.location.length
        if any(c.identity == identity and begin < c.end and c.begin < end for c in constants):
            raise InvalidArgument(f"N-RQX-13: output {index} lies over a constant of the model")
