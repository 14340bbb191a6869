"""Buffers that the driver manages, as the application sees them, and copies between all kinds of memory.

What an execution writes into a buffer another reads there: nothing of it travels. The shape of a buffer's content is
the driver's to know; this side remembers what it was told, by copies and by the answers to executions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.deadlines import deadline_after
from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, DataLocation, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime import tensor_layout
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.tensor_layout import Array
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.runtime.prepared_model import PreparedModel

LentMemory: TypeAlias = Memory | FileMemory
_RELEASE_NS = 1_000_000_000


class Buffer:
    """A tensor in the driver, for the roles that it was allocated for. Close it, or use `with`. Thread-safe.

    One that `nnfmq.allocate` made may lie in shared memory instead.

    Give it to `PreparedModel.execute` in place of an array, as an input or in `out`; or list `pool` in a Request, where
    an argument's location is then all zero but for the pool's index. `info` says what it holds: dtype, scale, zero
    point, and the shape, in which 0 is an extent that may change, and () a rank.
    """

    is_shared = False
    """Whether it lies in shared memory in place of the driver's."""

    def __init__(self, connection: Connection, info: TensorInfo) -> None:
        self._connection = connection
        self._buffer_id = 0
        self._dimensions: tuple[int, ...] | None = None
        self._writer: object = None  # who began to write it last
        self.info = info
        self.token = 0

    def take_answer(self, answer: messages.Allocated) -> None:
        """Note what the driver made; on the watcher's thread, so that nothing is lost by a signal."""
        self._buffer_id, self.token = answer.buffer_id, answer.token
        if answer.buffer_id:
            self._connection.buffers[answer.token] = self

    @property
    def pool(self) -> BufferToken:
        """What stands for it among a Request's pools. Raises InvalidArgument once closed."""
        self._number()
        return BufferToken(self.token)

    def pool_for(self, connection: Connection) -> BufferToken | Memory:
        """Return `pool` for a request over `connection`. Raises InvalidArgument where it is not the buffer's own."""
        if connection is not self._connection:  # there its token may stand for another buffer
            raise InvalidArgument(f"buffer {self.token} was allocated through another client")
        return self.pool

    def argument_in(self, pool_index: int) -> RequestArgument:
        """Return the argument that it is in a Request whose pool of that number is `pool`."""
        return RequestArgument(location=DataLocation(pool_index))

    def check_role(self, model: PreparedModel, index: int, is_output: bool, writer: object) -> None:
        """An execution is to use it: of its own buffers the driver judges that."""

    def end_role(self, writer: object) -> None:
        """That execution has gone well: whoever judges the driver's answer notes it."""

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The shape of what was written last, as far as this side was told; None where nothing was, or where it failed.

        That a fenced execution has failed is told by its `info` and `result`.
        """
        return self._dimensions

    def begin_write(self, writer: object) -> None:
        """`writer` is asked to fill it: until that has ended nobody knows what it holds."""
        self._writer, self._dimensions = writer, None

    def end_write(self, writer: object, dimensions: tuple[int, ...] | None) -> None:
        """`writer` has filled it with a tensor of this shape, or has failed: None; whoever began last is believed."""
        if self._writer is writer:
            self._dimensions = dimensions

    def copy_from(
        self, source: ArrayLike | LentMemory, dimensions: Sequence[int] = (), *, timeout: float | None = None
    ) -> None:
        """Fill it from an array of its dtype, or from all of a memory; blocks.

        `dimensions` is the shape of what is in a memory; () where the buffer takes one shape only. Raises
        InvalidArgument where shape or size do not fit (its content is then lost), MissedDeadline, DeadObject.
        """
        if isinstance(source, Memory | FileMemory):
            self._copy_from(source, tuple(dimensions), timeout)
            return
        array = np.asarray(tensor_layout.checked_array(self.info, source), self.info.dtype, order="C")
        with Memory.create(max(array.nbytes, 1), "nnfmq-copy", one_writer=True) as memory:
            memory.view[: array.nbytes] = array.reshape(-1).view(np.uint8).data
            self._copy_from(memory, array.shape, timeout)

    def _copy_from(self, source: LentMemory, dimensions: tuple[int, ...], timeout: float | None) -> None:
        lent = messages.memory_to_data(source)
        message = messages.CopyFrom(self._connection.new_call(), self._number(), lent, dimensions)
        self.begin_write(message)
        self._connection.call(message, messages.Reply, [source.fileno()], deadline_after(timeout))
        self.end_write(message, dimensions or self.info.shape)

    def copy_to(self, target: LentMemory, *, timeout: float | None = None) -> None:
        """Copy it into a memory of just its size; blocks.

        Raises GeneralFailure where nothing was written into it, InvalidArgument for another size, MissedDeadline,
        DeadObject.
        """
        message = messages.CopyTo(self._connection.new_call(), self._number(), messages.memory_to_data(target))
        self._connection.call(message, messages.Reply, [target.fileno()], deadline_after(timeout))

    def array(self, *, timeout: float | None = None) -> Array:
        """Return a copy of its content, which the caller owns; blocks. Raises as `copy_to`."""
        is_known = bool(self.info.shape) and 0 not in self.info.shape
        shape = self.info.shape if is_known else self._dimensions
        if shape is None:
            raise GeneralFailure(f"buffer {self.token} is uninitialized: nothing was written into it")
        size = tensor_layout.size_bytes(self.info, shape)
        with Memory.create(max(size, 1), "nnfmq-copy") as memory:
            self.copy_to(memory, timeout=timeout)
            return np.frombuffer(memory.view[:size], self.info.dtype).reshape(shape).copy()

    def _number(self) -> int:
        if not self._buffer_id:
            raise InvalidArgument("this buffer is closed")
        return self._buffer_id

    def close(self) -> None:
        """Free it in the driver; executions that use it finish. Harmless when repeated, or when the driver is gone."""
        number, self._buffer_id = self._buffer_id, 0
        if not number or not self._connection.is_open:
            return
        try:
            message = messages.ReleaseBuffer(self._connection.new_call(), number)
            self._connection.ask(message, messages.Reply, (), time.monotonic_ns() + _RELEASE_NS)
        except NnfmqError:
            pass  # the driver is gone, and the buffer with it

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def copy(source: LentMemory | Buffer, target: LentMemory | Buffer, *, timeout: float | None = None) -> None:
    """Copy between any two memories: shared memory, memory in a file, buffers of a driver; blocks.

    All of the source becomes all of the target, so their sizes are equal. What comes from a buffer keeps its shape;
    what comes from bytes has the shape that the target takes, which must be one only. Raises InvalidArgument where size
    or shape do not fit, GeneralFailure where nothing was written into the source, MissedDeadline, DeadObject.
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


def copy_bytes(source: LentMemory, target: LentMemory) -> None:
    """Copy all of a memory into all of another. Raises InvalidArgument for another size, or what may not be written."""
    if source.size_bytes != target.size_bytes:
        raise InvalidArgument(f"{source.size_bytes} bytes cannot be copied into {target.size_bytes}")
    if not target.is_writable:
        raise InvalidArgument("the memory to copy to may only be read")
    if isinstance(target, FileMemory):
        target.range(0, target.size_bytes).write_from(source.view)
    else:
        target.view[:] = source.view
