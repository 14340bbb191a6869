"""Binding of a request's arguments to mapped memory, to files and to managed buffers.

Arrays over mapped memory are created once and need nothing more (`input_array`, `output_buffer`); most burst requests
need only these. All other requests are staged: before each run every `InputBinding` supplies an array, and after it
every `OutputBinding` stores its result. File contents are copied through private memory. A managed buffer's storage is
used in place, after its state was checked for this run. (MEM-1, DOM-5..10, DOM-14)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from nnfmq.base.file_memory import FileMemory, FileRange
from nnfmq.base.memory import Memory, file_identity
from nnfmq.driver.memory.buffers import ManagedBuffer, ManagedBuffers, TensorStorage
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.driver.memory.quota import QuotaCharge
from nnfmq.driver.session.error_translation import errors_to_status
from nnfmq.engines.execution import DynamicOutput
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
from nnfmq.operations.declaration import NUMPY_TYPES
from nnfmq.operations.shapes import require_max_rank

__all__ = [
    "ConstantRange",
    "InputBinding",
    "OutputBinding",
    "RequestBinder",
    "argument_dimensions",
    "find_constant_ranges",
    "input_array",
    "needs_staging",
    "output_buffer",
    "require_no_constant_overlap",
]

Array = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]


class InputBinding(Protocol):
    """One input of a staged request."""

    def load(self, check: Callable[[], None]) -> Array | None:
        """Return the input's current value, or None if it is omitted. Blocks while a file is read.

        `check` is called between parts of a large file, and may raise to end the execution.

        Raises:
            NnfmqError: If the value cannot be read.
            Exception: Any error that `check` raises.
        """
        ...


class OutputBinding(Protocol):
    """One output of a staged request. After each `begin`, either `commit` or `abort` is called."""

    def begin(self) -> Any:
        """Return the buffer that the engine fills in this run: an array, bytes, a `DynamicOutput`; None if omitted."""
        ...

    def commit(self, shape: Shape) -> None:
        """Store the result of `shape` that the engine has produced.

        Raises:
            NnfmqError: If the result cannot be stored.
        """
        ...

    def abort(self) -> None:
        """Discard the output: the execution failed, or will not run."""
        ...


# -- mapped memory ----------------------------------------------------------------------------------------------------


def argument_dimensions(operand: Operand, argument: RequestArgument) -> Shape:
    """Return the request's dimensions, with the model's for those that the request leaves open.

    Raises:
        GeneralFailure: If the rank is larger than NumPy supports.
    """
    require_max_rank(argument.dimensions or operand.dimensions, "an argument")
    if not argument.dimensions or not operand.dimensions:
        return argument.dimensions or operand.dimensions
    return tuple(requested or known for requested, known in zip(argument.dimensions, operand.dimensions, strict=True))


def input_array(operand: Operand, argument: RequestArgument, pools: Sequence[Any]) -> Array | None:
    """Return an array over an input in mapped memory, or None if it is omitted.

    Raises:
        InvalidArgument: If the client does not allow reading this memory.
    """
    if argument.has_no_value:
        return None
    pool = pools[argument.location.pool_index]
    _require_readable(pool, argument)
    array = np.frombuffer(_bytes_at(pool, argument.location), NUMPY_TYPES[operand.type])
    return array.reshape(argument_dimensions(operand, argument))


def output_buffer(index: int, operand: Operand, argument: RequestArgument, pools: Sequence[Any]) -> Any:
    """Return the buffer of an output in mapped memory, or None if it is omitted.

    That is an array if the shape is known, which the engine fills in place; otherwise the bytes.

    Raises:
        InvalidArgument: If this memory is read-only.
    """
    if argument.has_no_value:
        return None
    data = _bytes_at(pools[argument.location.pool_index], argument.location)
    if data.readonly:
        raise InvalidArgument(
            f"output {index} is in pool {argument.location.pool_index}, which is read-only (N-RQX-12)"
        )
    return _array_if_shape_known(operand, argument, data)


def _bytes_at(pool: Pool, location: DataLocation) -> memoryview:
    return pool.view[location.offset : location.offset + location.length]


def _array_if_shape_known(operand: Operand, argument: RequestArgument, data: Any) -> Any:
    dimensions = argument_dimensions(operand, argument)
    if operand_bytes(operand, dimensions) != len(data) or not dimensions:
        return data
    return np.frombuffer(data, NUMPY_TYPES[operand.type]).reshape(dimensions)


def _require_readable(pool: Any, argument: RequestArgument) -> None:
    if not getattr(pool, "is_readable", True):  # private memory has no protection and is always readable
        raise InvalidArgument(f"pool {argument.location.pool_index} contains an input, but is write-only (N-RQX-12)")


class _MappedArgument(Struct):
    """Binding of an input or output in mapped memory, or of an omitted one."""

    value: Any

    def load(self, check: Callable[[], None]) -> Array | None:
        return self.value  # type: ignore[no-any-return]

    def begin(self) -> Any:
        return self.value

    def commit(self, shape: Shape) -> None:
        """Do nothing: the engine wrote into the client's memory."""

    def abort(self) -> None:
        """Do nothing: the contents of an output are unspecified after a failure."""


# -- files ------------------------------------------------------------------------------------------------------------


class _FileCopy(Struct, frozen=True):
    """Private memory for an argument that is stored in a file, charged to the client."""

    range: FileRange
    raw: NDArray[np.uint8]
    charge: QuotaCharge | None


class _FileInput(Struct, frozen=True):
    copy: _FileCopy
    dtype: np.dtype[Any]
    dimensions: Shape

    def load(self, check: Callable[[], None]) -> Array:
        self.copy.range.read_into(self.copy.raw.data, check)
        return self.copy.raw.view(self.dtype).reshape(self.dimensions)


class _FileOutput(Struct, frozen=True):
    copy: _FileCopy
    value: Any
    item_bytes: int

    def begin(self) -> Any:
        return self.value

    def commit(self, shape: Shape) -> None:
        self.copy.range.write_from(self.copy.raw.data[: math.prod(shape) * self.item_bytes])

    def abort(self) -> None:
        """Do nothing: the file is unchanged."""


# -- managed buffers --------------------------------------------------------------------------------------------------


class _BufferInput(Struct):
    buffer: ManagedBuffer
    dimensions: Shape
    storage: TensorStorage | None = None  # keeps the memory of the array that `load` returned last

    def load(self, check: Callable[[], None]) -> Array:
        storage = self.storage = self.buffer.content()
        if merge_dimensions(self.dimensions, storage.shape) != storage.shape:
            raise InvalidArgument(
                f"buffer {self.buffer.token} has the shape {storage.shape}; the input has {self.dimensions} (DOM-8)"
            )
        return storage.array


class _BufferOutput(Struct):
    buffer: ManagedBuffer
    dimensions: Shape  # of the model, of the request and of the buffer
    is_fixed: bool  # the model specifies the shape, so the engine can fill the storage in place
    storage: TensorStorage | None = None

    def begin(self) -> Any:
        if self.is_fixed:
            return self._allocate(self.dimensions)
        self.storage = None
        self.buffer.mark_uninitialized()
        return DynamicOutput(self._allocate)

    def _allocate(self, shape: Shape) -> Array:
        if merge_dimensions(self.dimensions, shape) != shape:
            raise GeneralFailure(
                f"a result of shape {shape} for buffer {self.buffer.token}, which takes {self.dimensions} (DOM-14)"
            )
        self.storage = self.buffer.begin_write(shape)
        return self.storage.array

    def commit(self, shape: Shape) -> None:
        assert self.storage is not None  # the engine called `_allocate`
        self.buffer.end_write(self.storage)

    def abort(self) -> None:
        self.buffer.mark_uninitialized()


# -- all arguments of a request ---------------------------------------------------------------------------------------


def needs_staging(request: Request) -> bool:
    """Return whether any of a request's pools is a file or a managed buffer."""
    return any(isinstance(pool, FileMemory | BufferToken) for pool in request.pools)


class RequestBinder:
    """Creates the bindings of one request, which has been validated against its model.

    Args:
        model_key: The prepared model's `key`, which names it in the roles of managed buffers.
        request: The request.
        buffers: The client's managed buffers, or None if there are none.
    """

    def __init__(self, model_key: object, request: Request, buffers: ManagedBuffers | None) -> None:
        self._model_key = model_key
        self._request = request
        self._buffers = buffers
        self._used_tokens: set[int] = set()

    def bind_inputs(self, operands: Iterable[Operand]) -> list[InputBinding]:
        """Return the bindings of all inputs. Call this before `bind_outputs`, which checks that no buffer is both.

        Raises:
            InvalidArgument: If an argument cannot be bound; the message names it.
        """
        return [self._input(i, *pair) for i, pair in enumerate(zip(operands, self._request.inputs, strict=True))]

    def bind_outputs(self, operands: Iterable[Operand]) -> list[OutputBinding]:
        """Return the bindings of all outputs.

        Raises:
            InvalidArgument: If an argument cannot be bound; the message names it.
        """
        return [self._output(i, *pair) for i, pair in enumerate(zip(operands, self._request.outputs, strict=True))]

    def _input(self, index: int, operand: Operand, argument: RequestArgument) -> InputBinding:
        pool = self._pool_of(argument)
        if isinstance(pool, BufferToken):
            buffer = self._buffer(pool)
            buffer.check_role(self._model_key, index, is_output=False)
            self._used_tokens.add(buffer.token)
            return _BufferInput(buffer, self._merged_dimensions(operand, argument, buffer))
        if isinstance(pool, FileMemory):
            _require_readable(pool, argument)
            dimensions = argument_dimensions(operand, argument)
            return _FileInput(self._file_copy(pool, argument), NUMPY_TYPES[operand.type], dimensions)
        return _MappedArgument(input_array(operand, argument, self._request.pools))

    def _output(self, index: int, operand: Operand, argument: RequestArgument) -> OutputBinding:
        pool = self._pool_of(argument)
        if isinstance(pool, BufferToken):
            buffer = self._buffer(pool)
            buffer.check_role(self._model_key, index, is_output=True)
            if buffer.token in self._used_tokens:
                raise InvalidArgument(f"output {index} is buffer {buffer.token}, which another argument uses (N-DEX-6)")
            self._used_tokens.add(buffer.token)
            dimensions = self._merged_dimensions(operand, argument, buffer)
            return _BufferOutput(buffer, dimensions, is_fixed=buffer.has_fixed_shape and operand_bytes(operand) > 0)
        if isinstance(pool, FileMemory):
            if not pool.is_writable:
                raise InvalidArgument(f"output {index} is in a file that is read-only (N-RQX-12)")
            copy = self._file_copy(pool, argument)
            value = _array_if_shape_known(operand, argument, copy.raw.data)
            return _FileOutput(copy, value, NUMPY_TYPES[operand.type].itemsize)
        return _MappedArgument(output_buffer(index, operand, argument, self._request.pools))

    def _pool_of(self, argument: RequestArgument) -> Any:
        return None if argument.has_no_value else self._request.pools[argument.location.pool_index]

    def _buffer(self, token: BufferToken) -> ManagedBuffer:
        if self._buffers is None:
            raise InvalidArgument(f"there is no buffer with token {token.token} (N-RQX-9)")
        return self._buffers.lookup_token(token)

    def _merged_dimensions(self, operand: Operand, argument: RequestArgument, buffer: ManagedBuffer) -> Shape:
        dimensions = merge_dimensions(argument_dimensions(operand, argument), buffer.dimensions)
        if dimensions is None:
            raise InvalidArgument(
                f"an argument of the dimensions {argument.dimensions} in buffer {buffer.token}, "
                f"which has {buffer.dimensions} (N-DEX-7)"
            )
        return dimensions

    def _file_copy(self, pool: FileMemory, argument: RequestArgument) -> _FileCopy:
        location = argument.location
        charge = None if self._buffers is None else self._buffers.quota.charge(location.length)
        with errors_to_status("copying memory in a file"):
            return _FileCopy(pool.range(location.offset, location.length), np.empty(location.length, np.uint8), charge)


# ----------------------------------------------------------------------------------------------------------------------
# Rejection of requests whose outputs overlap memory that a model's constants came from (EXE-10).
#
# The driver executes with private copies of the constants, so such an output would do no harm; the HAL forbids it.


class ConstantRange(Struct, frozen=True):
    """Bytes `begin` to `end` of a client's file, from which the driver copied one constant."""

    identity: tuple[int, int]
    begin: int
    end: int


def find_constant_ranges(model: Model) -> tuple[ConstantRange, ...]:
    """Return the ranges of client memory from which the model's constants were copied.

    Constants in pools whose file cannot be identified are left out (see `memory.file_identity`).
    """
    found = []
    for operand in (operand for graph in (model.main, *model.referenced) for operand in graph.operands):
        if operand.lifetime is LifeTime.CONSTANT_REFERENCE:
            location = operand.location
            pool = model.pools[location.pool_index]
            if isinstance(pool, ConstantPool) and pool.identity is not None:
                begin = pool.offset + location.offset
                found.append(ConstantRange(pool.identity, begin, begin + location.length))
    return tuple(found)


def require_no_constant_overlap(constants: Sequence[ConstantRange], request: Request) -> None:
    """Check the outputs of a valid request.

    Raises:
        InvalidArgument: If an output overlaps one of `constants`.
    """
    for index, argument in enumerate(request.outputs):
        pool = None if argument.has_no_value else request.pools[argument.location.pool_index]
        if not isinstance(pool, Memory | FileMemory):
            continue
        identity, begin = file_identity(pool.fileno()), pool.offset + argument.location.offset
        end = begin + argument.location.length
        if any(c.identity == identity and begin < c.end and c.begin < end for c in constants):
            raise InvalidArgument(f"output {index} overlaps a constant of the model (N-RQX-13)")
