"""Buffer: a tensor that the driver allocates for given roles (NNAPI: managed buffer, HAL: IBuffer).

A tensor that one execution writes into a buffer and another reads from it never leaves the driver. Only the driver
knows the shape of a buffer's content; the client keeps the shape that copies and execution replies reported.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Closable
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.model.arrays import Array, checked_array, size_bytes, space_bytes
from nnfmq.hal.errors import BadState, GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.summaries import tensor_text
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, DataLocation, Request, RequestArgument
from nnfmq.serialize import messages

__all__ = ["Buffer", "OutputBuffers", "SharedBuffer", "copy", "copy_bytes"]

AnyMemory: TypeAlias = Memory | FileMemory
Role: TypeAlias = tuple[object, int, bool]
"""A model's handle, the index of one of its inputs or outputs, and whether it is an output."""
_RELEASE_TIMEOUT_NS = 1_000_000_000


class Buffer(ClosedWhenDropped, Closable):
    """A tensor in the driver, for the roles that it was allocated for. Close it, or use `with`. Thread-safe.

    `nnfmq.allocate` may return one in shared memory instead; `is_shared` is then True.

    Pass it to `PreparedModel.execute` in place of an array, as an input or in `out`; or list `pool` among a Request's
    pools, with an argument whose location is zero except for the pool's index. `info` has the dtype, scale, zero point
    and shape; in the shape, 0 is a dimension that may change, and () an unknown rank.
    """

    is_shared = False
    """True if the buffer is in shared memory instead of the driver's memory."""

    def __init__(self, connection: Connection, info: TensorInfo) -> None:
        self._connection = connection
        self._buffer_id = 0
        self._dimensions: tuple[int, ...] | None = None
        self._last_writer: object = None
        self.info = info
        self.token = 0
        self._key = object()  # has no reference to the buffer
        connection.add_buffer(self._key)

    def __repr__(self) -> str:
        place = "in shared memory" if self.is_shared else f"in the driver, token {self.token}"
        return f"<Buffer: {tensor_text(self.info.dtype, self.info.shape)}, {place}>"

    def on_allocated(self, reply: messages.Allocated) -> None:
        """Store the id and the token that the driver returned.

        Runs on the watcher thread, so that the buffer can be released even if a signal handler interrupts the caller.
        """
        self._buffer_id, self.token = reply.buffer_id, reply.token
        if reply.buffer_id:
            self._connection.buffers[reply.token] = self

    @property
    def pool(self) -> BufferToken:
        """The buffer's entry among a Request's pools. Raises InvalidArgument once closed."""
        self._require_id()
        return BufferToken(self.token)

    def pool_for(self, connection: Connection) -> BufferToken | Memory:
        """Return `pool` for a request over `connection`.

        Raises:
            InvalidArgument: If the buffer belongs to another connection, where its token may name another buffer.
        """
        if connection is not self._connection:
            raise InvalidArgument(f"buffer {self.token} was allocated through another client")
        return self.pool

    def argument_in(self, pool_index: int) -> RequestArgument:
        """Return the request argument for this buffer if `pool` is the request's pool `pool_index`."""
        return RequestArgument(location=DataLocation(pool_index))

    def check_role(self, role: Role, writer: object) -> None:
        """Check that an execution may use the buffer in `role`. Does nothing here: the driver checks its buffers.

        `writer` identifies the execution if the role is an output.
        """

    def mark_written(self, writer: object) -> None:
        """Record that the execution has succeeded. Does nothing here: `OutputBuffers` records it."""

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The shape that was last written, as the driver reported it; None if nothing was written, or writing failed.

        The failure of a fenced execution is reported by its `info` and `result`.
        """
        return self._dimensions

    def begin_write(self, writer: object) -> None:
        """Mark the content unknown until `writer` calls `end_write`."""
        self._last_writer, self._dimensions = writer, None

    def end_write(self, writer: object, dimensions: tuple[int, ...] | None) -> None:
        """Record the result of a write: `dimensions` on success, None on failure.

        Ignored unless `writer` is the one most recently passed to `begin_write` (last writer wins).
        """
        if self._last_writer is writer:
            self._dimensions = dimensions

    def copy_from(
        self, source: ArrayLike | AnyMemory, dimensions: Sequence[int] = (), *, timeout: float | None = None
    ) -> None:
        """Fill the buffer from an array of its dtype, or from a whole memory; blocks.

        Args:
            source: An array, or a memory of exactly the tensor's size. Borrowed.
            dimensions: The shape of a memory's content; () if the buffer has a fixed shape.
            timeout: In seconds; None = no limit.

        Raises:
            InvalidArgument: If the shape or the size does not fit. The buffer's content is then lost.
            MissedDeadline: If `timeout` passes first.
            DeadObject: If the driver exits.
        """
        if isinstance(source, Memory | FileMemory):
            self._copy_from_memory(source, tuple(dimensions), timeout)
            return
        array = np.asarray(checked_array(self.info, source), self.info.dtype, order="C")
        with Memory.create(max(space_bytes(self.info, array.shape), 1), "nnfmq-copy", one_writer=True) as memory:
            memory.view[: array.nbytes] = array.reshape(-1).view(np.uint8).data
            self._copy_from_memory(memory, () if self.info.is_empty else array.shape, timeout)

    def _copy_from_memory(self, source: AnyMemory, dimensions: tuple[int, ...], timeout: float | None) -> None:
        data = messages.memory_to_data(source)
        message = messages.CopyFrom(self._connection.next_call_id(), self._require_id(), data, dimensions)
        self.begin_write(message)
        self._connection.call(message, messages.Reply, [source.fileno()], deadline_after(timeout))
        self.end_write(message, dimensions or self.info.shape)

    def copy_to(self, target: AnyMemory, *, timeout: float | None = None) -> None:
        """Copy the content into a memory of exactly its size; blocks.

        Raises:
            GeneralFailure: If the buffer is uninitialized.
            InvalidArgument: If the memory has another size.
            MissedDeadline: If `timeout` (seconds; None = no limit) passes first.
            DeadObject: If the driver exits.
        """
        data = messages.memory_to_data(target)
        message = messages.CopyTo(self._connection.next_call_id(), self._require_id(), data)
        self._connection.call(message, messages.Reply, [target.fileno()], deadline_after(timeout))

    def array(self, *, timeout: float | None = None) -> Array:
        """Return a copy of the content, which the caller owns; blocks. Raises as `copy_to`."""
        shape = self._dimensions if self.info.has_unknown_shape else self.info.shape
        if shape is None:
            raise GeneralFailure(f"buffer {self.token} is uninitialized: nothing was written into it")
        size = size_bytes(self.info, shape)
        with Memory.create(max(space_bytes(self.info, shape), 1), "nnfmq-copy") as memory:
            self.copy_to(memory, timeout=timeout)
            return np.frombuffer(memory.view[:size], self.info.dtype).reshape(shape).copy()

    def _require_id(self) -> int:
        if not self._buffer_id:
            raise BadState("this buffer is closed")
        return self._buffer_id

    def close(self) -> None:
        """Release the buffer in the driver, which frees it after the executions that use it. Idempotent.

        Blocks up to 1 s. Does nothing if the driver has exited.
        """
        buffer_id, self._buffer_id = self._buffer_id, 0
        try:
            if buffer_id and self._connection.is_open:
                message = messages.ReleaseBuffer(self._connection.next_call_id(), buffer_id)
                self._connection.exchange(message, messages.Reply, (), time.monotonic_ns() + _RELEASE_TIMEOUT_NS)
        except NnfmqError:
            pass  # the driver has exited, which freed the buffer
        finally:
            self._connection.remove_buffer(self._key)

    def _is_left_open(self) -> bool:
        return self._connection.has_buffer(self._key) and self._connection.is_open

    def _close_dropped(self) -> None:
        self.close()


class SharedBuffer(Buffer):
    """A buffer in shared memory: for roles of several devices' models, or if no device can hold the tensor (DOM-15).

    Used as any other buffer. The client makes the checks here that the driver makes for its own buffers. In a Request
    of the application, `pool` is an ordinary memory, and `dimensions` does not record that such a request writes it.
    """

    is_shared = True

    def __init__(self, info: TensorInfo, roles: Collection[Role]) -> None:
        self.info = info
        self.token = 0
        self._roles = frozenset(roles)
        self._dimensions = None
        self._last_writer = None
        self._size_bytes = space_bytes(info, info.shape)
        is_input_only = not any(is_output for _, _, is_output in roles)
        self._memory = Memory.create(max(self._size_bytes, 1), "nnfmq-shared", one_writer=is_input_only)

    @property
    def pool(self) -> Memory:  # type: ignore[override]
        """The memory. Raises InvalidArgument once closed."""
        if self._memory.closed:
            raise BadState("this buffer is closed")
        return self._memory

    def pool_for(self, _connection: Connection) -> BufferToken | Memory:
        """Return the memory, which any driver can map."""
        return self.pool

    def argument_in(self, pool_index: int) -> RequestArgument:
        """Return a request argument that covers the whole memory."""
        return RequestArgument(location=DataLocation(pool_index, 0, max(self._size_bytes, 1)))

    def check_role(self, role: Role, writer: object) -> None:
        """Make the driver's checks (DOM-5, DOM-9), and record the writer of an output.

        Raises:
            InvalidArgument: If the buffer was not allocated for this role.
            GeneralFailure: If it is an input and uninitialized.
        """
        _, index, is_output = role
        if role not in self._roles:
            kind = "output" if is_output else "input"
            raise InvalidArgument(f"this buffer was not allocated for {kind} {index} of this model (DOM-9)")
        if is_output:
            self.begin_write(writer)
        else:
            self._require_content()

    def mark_written(self, writer: object) -> None:
        """Record that the execution `writer` has written the buffer."""
        self.end_write(writer, self.info.shape)

    def _require_content(self) -> None:
        if self._dimensions is None:
            raise GeneralFailure("this buffer is uninitialized: nothing was written into it (DOM-5)")

    def _copy_from_memory(self, source: AnyMemory, dimensions: tuple[int, ...], timeout: float | None) -> None:
        writer = object()
        pool = self.pool
        self.begin_write(writer)
        if dimensions not in ((), self.info.shape) or source.size_bytes != pool.size_bytes:
            got = f"{source.size_bytes} bytes of shape {dimensions}"
            raise InvalidArgument(f"{got} do not fit a buffer of shape {self.info.shape} (DOM-12)")
        copy_bytes(source, pool)
        self.mark_written(writer)

    def copy_to(self, target: AnyMemory, *, timeout: float | None = None) -> None:
        """Copy the content into a memory of exactly its size. Raises as `Buffer.copy_to`; `timeout` has no effect."""
        pool = self.pool
        self._require_content()
        copy_bytes(pool, target)

    def close(self) -> None:
        """Close the memory. A driver that still uses it has its own mapping. Idempotent."""
        self._dimensions = None
        self._memory.close()


class OutputBuffers:
    """The managed buffers among a request's outputs, whose recorded shapes follow the request's executions.

    Keeps no reference to the request's memory pools.
    """

    def __init__(self, connection: Connection, request: Request) -> None:
        self._buffers: list[tuple[int, Buffer]] = []
        for index, argument in enumerate(request.outputs):
            pool_index = argument.location.pool_index
            has_pool = not argument.has_no_value and pool_index < len(request.pools)
            pool = request.pools[pool_index] if has_pool else None
            buffer = connection.buffers.get(pool.token) if isinstance(pool, BufferToken) else None
            if buffer is not None:
                self._buffers.append((index, buffer))

    def begin_write(self) -> None:
        """Mark their content unknown: an execution is about to start."""
        for _, buffer in self._buffers:
            buffer.begin_write(self)

    def end_write(self, shapes: Sequence[tuple[int, ...]] | None) -> None:
        """Record the shapes of all outputs after a success, or None after a failure."""
        for index, buffer in self._buffers:
            buffer.end_write(self, None if shapes is None else shapes[index])


def copy_bytes(source: AnyMemory, target: AnyMemory) -> None:
    """Copy a whole memory into another.

    Raises:
        InvalidArgument: If the sizes differ, or the target is read-only.
    """
    if source.size_bytes != target.size_bytes:
        raise InvalidArgument(f"{source.size_bytes} bytes cannot be copied into {target.size_bytes}")
    if not target.is_writable:
        raise InvalidArgument("the memory to copy to is read-only")
    if isinstance(target, FileMemory):
        target.range(0, target.size_bytes).write_from(source.view)
    else:
        target.view[:] = source.view


# ----------------------------------------------------------------------------------------------------------------------
# copy: between shared memory, memory in files and managed buffers.


def copy(source: AnyMemory | Buffer, target: AnyMemory | Buffer, *, timeout: float | None = None) -> None:
    """Copy all of `source` to all of `target`, which has the same size; blocks.

    Either is shared memory, memory in a file, or a managed buffer. A copy from a buffer keeps its shape. A copy from a
    memory into a buffer needs a buffer of fixed shape; otherwise use `Buffer.copy_from`.

    Raises:
        InvalidArgument: If the size, shape or dtype does not fit.
        GeneralFailure: If the source is an uninitialized buffer.
        MissedDeadline: If `timeout` (seconds; None = no limit) passes first.
        DeadObject: If the driver exits.
    """
    if isinstance(source, Buffer) and isinstance(target, Buffer):
        array = source.array(timeout=timeout)
        if array.dtype != np.dtype(target.info.dtype):
            raise InvalidArgument(f"a buffer of {array.dtype} cannot be copied into one of {target.info.dtype}")
        target.copy_from(array, timeout=timeout)
    elif isinstance(source, Buffer):
        source.copy_to(target, timeout=timeout)  # type: ignore[arg-type]
    elif isinstance(target, Buffer):
        target.copy_from(source, timeout=timeout)
    else:
        copy_bytes(source, target)
