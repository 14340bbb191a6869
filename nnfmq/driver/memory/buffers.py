"""Buffers that the driver manages for a client: tensors that stay in the driver between executions (`IBuffer`).

A buffer has storage, the memory for a tensor, and content, which is that storage once it was written completely:

    uninitialized ── begin_write ─> storage, no content ── end_write ─> content = storage ── begin_write ─> ...

A write that fails between the two leaves the buffer uninitialized (DOM-7). After two concurrent writes its content is
that of the write which ended last. If the shape is fixed, the storage is allocated with the buffer and never changes,
so the engine writes in place; otherwise each new shape gets new storage (DOM-11).

An execution keeps references to the storage that it uses, so releasing a buffer or changing its shape does not affect
running executions (DOM-13). Two executions of one client that read and write a buffer concurrently get unspecified
data; the driver takes no decision from the contents.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from nnfmq.base.file_memory import FileMemory
from nnfmq.base.verbose_log import vlog
from nnfmq.driver.devices.configuration import ALWAYS_AVAILABLE
from nnfmq.driver.memory.quota import MemoryQuota, ReceivedMemory
from nnfmq.driver.session.error_translation import errors_to_status
from nnfmq.driver.session.handle_table import HandleTable
from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import BufferToken, Model, Operand, Request, is_scalar, merge_dimensions
from nnfmq.operations.declaration import NUMPY_TYPES
from nnfmq.validation.models import operand_size
from nnfmq.validation.values import validate_buffer

Shape: TypeAlias = tuple[int, ...]
RoleKey: TypeAlias = tuple[object, int, bool]
"""A prepared model's key, the index of an input or output, and whether it is an output."""

MAX_TOKEN = 2**31 - 1  # the HAL's token is an int32


class RoleOwner(Struct, frozen=True):
    """A prepared model for whose inputs and outputs a buffer is allocated.

    `key` names the model in roles; `status_byte` is that of the model's device (see `devices.configuration`).
    """

    model: Model
    key: object
    status_byte: memoryview


class TensorStorage:
    """Memory of one tensor, as bytes and as an array; charged to the client until the last reference is dropped."""

    __slots__ = ("_charge", "array", "raw")

    def __init__(self, shape: Shape, dtype: np.dtype[Any], quota: MemoryQuota) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._charge = quota.charge(size)
        with errors_to_status("allocating a buffer"):  # NumPy also raises if the rank is too large
            self.raw: NDArray[np.uint8] = np.empty(size, np.uint8)
            self.array: NDArray[Any] = self.raw.view(dtype).reshape(shape)

    @property
    def shape(self) -> Shape:
        """The tensor's shape."""
        return self.array.shape


class ManagedBuffer:
    """One buffer. Thread-safe.

    After a `begin_write`, call `end_write` or, on failure, `mark_uninitialized`.

    Attributes:
        token: The integer that names the buffer in requests.
        dimensions: The dimensions common to all shapes that the buffer can take: 0 for an unknown extent, () for an
            unknown rank.
        status_byte: That of the device on which the buffer was allocated.
    """

    def __init__(
        self,
        operand: Operand,
        roles: frozenset[RoleKey],
        token: int,
        quota: MemoryQuota,
        status_byte: memoryview = ALWAYS_AVAILABLE,
    ) -> None:
        self.token = token
        self.status_byte = status_byte
        self.dimensions = operand.dimensions
        self._dtype = NUMPY_TYPES[operand.type]
        self._is_scalar = is_scalar(operand.type)
        self._roles = roles
        self._quota = quota
        self._lock = threading.Lock()
        self._content: TensorStorage | None = None
        self._is_released = False
        self._storage = TensorStorage(self.dimensions, self._dtype, quota) if self.has_fixed_shape else None

    @property
    def has_fixed_shape(self) -> bool:
        """Whether the buffer can take only one shape."""
        return self._is_scalar or (bool(self.dimensions) and 0 not in self.dimensions)

    def check_role(self, model_key: object, index: int, is_output: bool) -> None:
        """Check that the buffer may be this input or output.

        Raises:
            InvalidArgument: If it was not allocated for this role.
        """
        if (model_key, index, is_output) not in self._roles:
            kind = "output" if is_output else "input"
            raise InvalidArgument(f"buffer {self.token} was not allocated for {kind} {index} of this model (DOM-9)")

    def content(self) -> TensorStorage:
        """Return the content that was written last.

        Raises:
            GeneralFailure: If the buffer is uninitialized.
            InvalidArgument: If the buffer was released.
        """
        with self._lock:
            self._require_live()
            if self._content is None:
                raise GeneralFailure(f"buffer {self.token} is uninitialized: nothing was written into it (DOM-5)")
            return self._content

    def begin_write(self, shape: Shape) -> TensorStorage:
        """Return storage for a tensor of `shape`; the buffer is uninitialized until `end_write`.

        Args:
            shape: A shape that is compatible with `dimensions`.

        Raises:
            InvalidArgument: If the buffer was released.
            ResourceExhaustedTransient: If there is not enough memory, or the client's quota is exhausted.
        """
        with self._lock:
            self._require_live()
            self._content = None
            if self._storage is None or self._storage.shape != shape:
                self._storage = None  # released first, so that the quota is not charged for both
                self._storage = TensorStorage(shape, self._dtype, self._quota)
            return self._storage

    def end_write(self, storage: TensorStorage) -> None:
        """Make `storage` the content; it has been written completely. Does nothing if the buffer was released."""
        with self._lock:
            if not self._is_released:
                self._content = storage

    def mark_uninitialized(self) -> None:
        """Discard the content, because an operation that should have written it failed (DOM-7)."""
        with self._lock:
            self._content = None

    def release(self) -> None:
        """Drop the memory. Running executions keep it and finish; no further execution can use the buffer."""
        with self._lock:
            self._is_released = True
            self._content = self._storage = None

    def _require_live(self) -> None:
        if self._is_released:
            raise InvalidArgument(f"buffer {self.token} was released (N-DXX-2)")

    # -- copies -------------------------------------------------------------------------------------------------------

    def copy_from(self, memory: ReceivedMemory, dimensions: Shape) -> None:
        """Fill the buffer from all of `memory`. If that fails, the buffer is uninitialized.

        Args:
            memory: The source. Borrowed.
            dimensions: The tensor's shape; () stands for the buffer's own, if that is fixed.

        Raises:
            InvalidArgument: If the shape is not one of the buffer's, or the memory has another size (DOM-12).
        """
        try:
            shape = self._copy_shape(dimensions)
            _require_size(memory, math.prod(shape) * self._dtype.itemsize, shape)
            storage = self.begin_write(shape)
            if not memory.is_readable:
                raise InvalidArgument("the memory from which a buffer should be filled is write-only (N-RQX-12)")
            if isinstance(memory, FileMemory):
                memory.range(0, memory.size_bytes).read_into(storage.raw.data)
            else:
                storage.raw[:] = np.frombuffer(memory.view, np.uint8)
        except BaseException:
            self.mark_uninitialized()
            raise
        self.end_write(storage)

    def copy_to(self, memory: ReceivedMemory) -> None:
        """Copy the content into `memory`, which is borrowed.

        Raises:
            GeneralFailure: If the buffer is uninitialized.
            InvalidArgument: If the memory has another size than the content, or is read-only.
        """
        storage = self.content()
        _require_size(memory, storage.raw.size, storage.shape)
        if not memory.is_writable:
            raise InvalidArgument("the memory to which a buffer should be copied is read-only (N-RQX-12)")
        if isinstance(memory, FileMemory):
            memory.range(0, memory.size_bytes).write_from(storage.raw.data)
        else:
            np.frombuffer(memory.view, np.uint8)[:] = storage.raw

    def _copy_shape(self, dimensions: Shape) -> Shape:
        if not dimensions and not self.has_fixed_shape:
            raise InvalidArgument(
                f"the copy must specify a shape: the buffer has the dimensions {self.dimensions} (N-DCP-4)"
            )
        shape = None if self._is_scalar and dimensions else merge_dimensions(self.dimensions, dimensions)
        if shape is None or 0 in dimensions:
            raise InvalidArgument(f"dimensions {dimensions}, the buffer has {self.dimensions} (N-DCP-3)")
        return shape


def _require_size(memory: ReceivedMemory, size: int, shape: Shape) -> None:
    if memory.size_bytes != size:
        # The message omits `size`, and the shape comes last: the client may send thousands of dimensions, the control
        # protocol truncates long messages.
        raise InvalidArgument(f"a memory of {memory.size_bytes} bytes does not fit (DOM-12) the shape {shape}")


class ManagedBuffers:
    """The buffers of one client, by id for its calls and by token for its requests. Thread-safe."""

    def __init__(self, quota: MemoryQuota, ids: Iterator[int] | None = None) -> None:
        self.quota = quota
        self._handles: HandleTable[ManagedBuffer] = HandleTable("buffer", ids)
        self._by_token: dict[int, ManagedBuffer] = {}
        self._tokens = (number % MAX_TOKEN + 1 for number in itertools.count())
        self._lock = threading.Lock()

    def allocate(
        self,
        desc: BufferDesc,
        owners: Sequence[RoleOwner],
        inputs: Sequence[BufferRole],
        outputs: Sequence[BufferRole],
    ) -> tuple[int, int]:
        """Allocate a buffer and return its id and its token.

        Args:
            desc: The dimensions that the client requests.
            owners: The prepared models to which the roles refer, all of one device.
            inputs: The inputs for which the buffer will be used.
            outputs: The outputs for which it will be used.

        Raises:
            InvalidArgument: If the roles are invalid or contradict each other.
            GeneralFailure: If the roles' operand type has no NumPy type.
            ResourceExhausted: If the client's quota is exhausted.
        """
        self._handles.require_capacity()
        operand = validate_buffer(desc, [owner.model for owner in owners], inputs, outputs)
        keys = [(owners[role.model_index].key, role.io_index, False) for role in inputs]
        keys += [(owners[role.model_index].key, role.io_index, True) for role in outputs]
        if len(set(keys)) != len(keys):  # possible if the client lists one model twice
            raise InvalidArgument("a role is listed twice (N-DOM-7)")
        if operand.type not in NUMPY_TYPES:
            raise GeneralFailure(f"buffers of type {operand.type.name} are not supported (DOM-4)")
        operand_size(operand.type, operand.dimensions, "buffer")
        with self._lock:
            token = next(token for token in self._tokens if token not in self._by_token)
            status_byte = owners[0].status_byte
            buffer = self._by_token[token] = ManagedBuffer(operand, frozenset(keys), token, self.quota, status_byte)
        vlog("memory", "buffer with token %d: %r", token, operand)
        return self._handles.insert(buffer), token

    def lookup(self, buffer_id: int) -> ManagedBuffer:
        """Return a buffer by its id.

        Raises:
            InvalidArgument: If the id is unknown.
        """
        return self._handles.lookup(buffer_id)

    def lookup_token(self, token: BufferToken) -> ManagedBuffer:
        """Return a buffer by its token.

        Raises:
            InvalidArgument: If the token is unknown.
        """
        found = self._by_token.get(token.token)
        if found is None:
            raise InvalidArgument(
                f"there is no buffer with token {token.token}; it was released, or never allocated (N-RQX-9)"
            )
        return found

    def release(self, buffer_id: int) -> None:
        """Release a buffer and its token.

        Raises:
            InvalidArgument: If the id is unknown.
        """
        buffer = self._handles.pop(buffer_id)
        with self._lock:
            del self._by_token[buffer.token]
        buffer.release()

    def mark_outputs_uninitialized(self, request: Request) -> None:
        """Discard the content of all buffers that are outputs of `request`, whose execution failed before it began."""
        for argument in request.outputs:
            index = argument.location.pool_index
            pool = request.pools[index] if not argument.has_no_value and index < len(request.pools) else None
            buffer = self._by_token.get(pool.token) if isinstance(pool, BufferToken) else None
            if buffer is not None:
                buffer.mark_uninitialized()
