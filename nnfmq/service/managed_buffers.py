"""Buffers that the driver manages for a client: a tensor that stays here between executions (IBuffer, memory domains).

A buffer has a room, the array that it was given, and a content, which is that room once it was written as a whole:

    uninitialized ── begin_write ─> room, no content ── end_write ─> content = room ── begin_write ─> ...

Whoever fails between the two leaves it uninitialized (DOM-7), and two that write at once leave it as the last of them
ends. Where the shape is known the room is there from the beginning and always the same, so results are made in place;
where it is not, each new shape gets a new one (DOM-11). Executions hold the rooms that they use, so a buffer that is
released, or that takes another shape, harms none of them (DOM-13). A buffer belongs to one client, whose mistake it is
to read it while something writes; nothing here depends on what it holds.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnfmq.file_memory import FileMemory
from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import BufferToken, Operand, Request, is_scalar, merge_dimensions
from nnfmq.operations.signature import NUMPY_TYPES
from nnfmq.service.device_status import ALWAYS
from nnfmq.service.error_translation import errors_to_status
from nnfmq.service.handle_table import HandleTable
from nnfmq.service.memory_quota import MemoryQuota, Received
from nnfmq.validation.buffer_desc import validate_buffer
from nnfmq.validation.model import operand_size

if TYPE_CHECKING:
    from nnfmq.service.driver_prepared_model import DriverPreparedModel

Shape: TypeAlias = tuple[int, ...]
RoleKey: TypeAlias = tuple[object, int, bool]
"""A prepared model's key, the index of an input or output, and whether it is an output."""
MAX_TOKEN = 2**31 - 1  # of the HAL's type


class TensorStorage:
    """Memory for one tensor, as its bytes and as an array, charged to the client while anybody refers to this."""

    __slots__ = ("_charge", "array", "raw")

    def __init__(self, shape: Shape, dtype: np.dtype[Any], quota: MemoryQuota) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._charge = quota.charge(size)
        with errors_to_status("allocating a buffer"):  # of more dimensions than arrays can have, too
            self.raw: NDArray[np.uint8] = np.empty(size, np.uint8)
            self.array: NDArray[Any] = self.raw.view(dtype).reshape(shape)

    @property
    def shape(self) -> Shape:
        """The tensor's shape."""
        return self.array.shape


class ManagedBuffer:
    """One buffer. Thread-safe; `begin_write` and `end_write` belong together, and who fails in between says `spoil`.

    `dimensions` are what all its shapes have in common: 0 for an extent, () for a rank that changes.
    """

    def __init__(
        self,
        operand: Operand,
        roles: frozenset[RoleKey],
        token: int,
        quota: MemoryQuota,
        status_byte: memoryview = ALWAYS,
    ) -> None:
        self.token = token
        self.status_byte = status_byte  # of the device that it belongs to
        self.dimensions = operand.dimensions
        self._dtype = NUMPY_TYPES[operand.type]
        self._is_scalar = is_scalar(operand.type)
        self._roles = roles
        self._quota = quota
        self._lock = threading.Lock()
        self._content: TensorStorage | None = None
        self._is_released = False
        self._room = TensorStorage(self.dimensions, self._dtype, quota) if self.is_known else None

    @property
    def is_known(self) -> bool:
        """Whether it takes one shape only."""
        return self._is_scalar or (bool(self.dimensions) and 0 not in self.dimensions)

    def check_role(self, key: object, index: int, is_output: bool) -> None:
        """Raise InvalidArgument unless it was allocated for this role (DOM-9)."""
        if (key, index, is_output) not in self._roles:
            kind = "output" if is_output else "input"
            raise InvalidArgument(f"DOM-9: buffer {self.token} was not allocated for {kind} {index} of this model")

    def content(self) -> TensorStorage:
        """Return what was written last. Raises GeneralFailure while it is uninitialized, InvalidArgument once freed."""
        with self._lock:
            self._require_live()
            if self._content is None:
                raise GeneralFailure(f"DOM-5: buffer {self.token} is uninitialized: nothing was written into it")
            return self._content

    def begin_write(self, shape: Shape) -> TensorStorage:
        """Return room for a tensor of `shape`, one that the buffer can take; it is uninitialized from now on.

        Raises InvalidArgument once freed, ResourceExhaustedTransient where there is no room.
        """
        with self._lock:
            self._require_live()
            self._content = None
            if self._room is None or self._room.shape != shape:
                self._room = None  # the old one first: nothing is held twice
                self._room = TensorStorage(shape, self._dtype, self._quota)
            return self._room

    def end_write(self, room: TensorStorage) -> None:
        """All of `room` was written: it is the buffer's content."""
        with self._lock:
            if not self._is_released:
                self._content = room

    def mark_uninitialized(self) -> None:
        """Something that should have written it failed: it is uninitialized (DOM-7)."""
        with self._lock:
            self._content = None

    def release(self) -> None:
        """Forget the memory. Executions that hold it finish; nothing begins with it any more."""
        with self._lock:
            self._is_released = True
            self._content = self._room = None

    def _require_live(self) -> None:
        if self._is_released:
            raise InvalidArgument(f"N-DXX-2: buffer {self.token} was freed")

    # -- copies -------------------------------------------------------------------------------------------------------

    def copy_from(self, memory: Received, dimensions: Shape) -> None:
        """Fill it from all of `memory`; () = the only shape that it takes. Raises InvalidArgument (DOM-12), and then
        it is uninitialized.
        """
        try:
            shape = self._copied_shape(dimensions)
            _require_size(memory, math.prod(shape) * self._dtype.itemsize, shape)
            room = self.begin_write(shape)
            _read(memory, room)
        except BaseException:
            self.mark_uninitialized()
            raise
        self.end_write(room)

    def copy_to(self, memory: Received) -> None:
        """Copy it into `memory`, which has just its size. Raises GeneralFailure while it is uninitialized,
        InvalidArgument for another size, or memory that may not be written.
        """
        room = self.content()
        _require_size(memory, room.raw.size, room.shape)
        if not memory.is_writable:
            raise InvalidArgument("N-RQX-12: the memory that a buffer should be copied to may not be written")
        if isinstance(memory, FileMemory):
            memory.range(0, memory.size_bytes).write_from(room.raw.data)
        else:
            np.frombuffer(memory.view, np.uint8)[:] = room.raw

    def _copied_shape(self, dimensions: Shape) -> Shape:
        if not dimensions and not self.is_known:
            raise InvalidArgument(f"N-DCP-4: the shape must be said: the buffer has the dimensions {self.dimensions}")
        shape = None if self._is_scalar and dimensions else merge_dimensions(self.dimensions, dimensions)
        if shape is None or 0 in dimensions:
            raise InvalidArgument(f"N-DCP-3: dimensions {dimensions}, the buffer has {self.dimensions}")
        return shape


def _require_size(memory: Received, size: int, shape: Shape) -> None:
    if memory.size_bytes != size:
        # Without `size`, which a client can make too long for a text.
        raise InvalidArgument(f"DOM-12: a memory of {memory.size_bytes} bytes is not what the shape {shape} has")


def _read(memory: Received, room: TensorStorage) -> None:
    if not memory.is_readable:
        raise InvalidArgument("N-RQX-12: the memory that a buffer should be filled from may not be read")
    if isinstance(memory, FileMemory):
        memory.range(0, memory.size_bytes).read_into(room.raw.data)
    else:
        room.raw[:] = np.frombuffer(memory.view, np.uint8)


class ManagedBuffers:
    """The buffers of one client, by number for its calls and by token for its requests. Thread-safe."""

    def __init__(self, quota: MemoryQuota, numbers: Iterator[int] | None = None) -> None:
        self.quota = quota
        self._handles: HandleTable[ManagedBuffer] = HandleTable("buffer", numbers)
        self._by_token: dict[int, ManagedBuffer] = {}
        self._tokens = (number % MAX_TOKEN + 1 for number in itertools.count())
        self._lock = threading.Lock()

    def allocate(
        self,
        desc: BufferDesc,
        models: Sequence[DriverPreparedModel],
        inputs: Sequence[BufferRole],
        outputs: Sequence[BufferRole],
    ) -> tuple[int, int]:
        """Make a buffer for some roles and return its number and its token.

        Raises InvalidArgument for roles that are wrong or disagree, GeneralFailure for a type that has no arrays,
        ResourceExhaustedTransient beyond the client's limit.
        """
        self._handles.require_capacity()
        operand = validate_buffer(desc, [model.model for model in models], inputs, outputs)
        keys = [(models[role.model_index].key, role.io_index, False) for role in inputs]
        keys += [(models[role.model_index].key, role.io_index, True) for role in outputs]
        if len(set(keys)) != len(keys):  # one model, listed under two indexes
            raise InvalidArgument("N-DOM-7: a role is given twice")
        if operand.type not in NUMPY_TYPES:
            raise GeneralFailure(f"DOM-4: there are no buffers of type {operand.type.name}")
        operand_size(operand.type, operand.dimensions, "buffer")
        with self._lock:
            token = next(token for token in self._tokens if token not in self._by_token)
            status_byte = models[0].status_byte
            buffer = self._by_token[token] = ManagedBuffer(operand, frozenset(keys), token, self.quota, status_byte)
        return self._handles.add(buffer), token

    def find(self, number: int) -> ManagedBuffer:
        """Return a buffer by its number. Raises InvalidArgument where there is none."""
        return self._handles.find(number)

    def of(self, token: BufferToken) -> ManagedBuffer:
        """Return the buffer that a token stands for. Raises InvalidArgument where there is none."""
        found = self._by_token.get(token.token)
        if found is None:
            raise InvalidArgument(f"N-RQX-9: token {token.token} stands for no buffer; it was freed, or never given")
        return found

    def release(self, number: int) -> None:
        """Free a buffer: its token is worth nothing any more. Raises InvalidArgument where there is none."""
        buffer = self._handles.take(number)
        with self._lock:
            del self._by_token[buffer.token]
        buffer.release()

    def mark_outputs_uninitialized(self, request: Request) -> None:
        """An execution of `request` failed before it began: what should have been its outputs is uninitialized."""
        for argument in request.outputs:
            index = argument.location.pool_index
            pool = request.pools[index] if not argument.has_no_value and index < len(request.pools) else None
            buffer = self._by_token.get(pool.token) if isinstance(pool, BufferToken) else None
            if buffer is not None:
                buffer.mark_uninitialized()
