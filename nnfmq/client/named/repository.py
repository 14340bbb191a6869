"""The client's end of a connection to a model repository.

The watcher thread receives; each caller waits for the reply to its own call. When the repository dies, every pending
call fails with DeadObject. That is not the death of the driver, so it has no effect on models that are open.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from nnfmq.base import watcher
from nnfmq.base.channel import NO_WAIT, Channel, Frame, close_all
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.ownership import Closable, Uncopyable
from nnfmq.client.connection import open_connections
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    ModelNotFound,
    NnfmqError,
    ProtocolError,
    ResourceExhaustedTransient,
    error_for_status,
)
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionPreference, Priority, Protection
from nnfmq.serialize.messages import MemoryData
from nnfmq.serialize.repository_protocol import (
    ListModels,
    ModelDescription,
    ModelEntry,
    ModelList,
    ModelOpened,
    OpenModel,
    RepositoryRole,
    VersionChanged,
    decode,
    encode,
)

__all__ = ["ReceivedModel", "RepositoryConnection", "check_description", "difference"]


# ----------------------------------------------------------------------------------------------------------------------
# Checks of a model's description: the repository is another process, whose data is not trusted.
#
# They cover what decides sizes and types of arrays in the client. Whether the description fits the model is checked by
# the driver with each request: it validates requests against the model that it has.


_DTYPES = frozenset(
    ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
)
_RANK_MAX, _DIMENSION_MAX = 64, 2**32 - 1


def check_description(description: ModelDescription, name: str, version: int) -> None:
    """Check that a description is one of this model and version (0 = any), and can be used.

    Raises:
        ProtocolError: If it is not.
    """
    is_version = description.version == version if version else description.version > 0
    if description.name != name or not is_version:
        wanted = f"version {version or 'any'} of {name!r}"
        raise ProtocolError(f"instead of {wanted} came version {description.version} of {description.name!r}")
    try:
        _check_options(description)
        for info in (*description.inputs, *description.outputs):
            _check_tensor(info)
        for state in description.states:
            _check_state(state)
    except InvalidArgument as error:
        raise ProtocolError(f"the description of {name!r} is invalid: {error}") from error


def _check_options(description: ModelDescription) -> None:
    if description.preference not in list(ExecutionPreference) or description.priority not in list(Priority):
        raise InvalidArgument(f"preference {description.preference} or priority {description.priority} is unknown")


def _check_tensor(info: TensorInfo) -> None:
    if info.dtype not in _DTYPES:
        raise InvalidArgument(f"{info.dtype!r} is no element type")
    if len(info.shape) > _RANK_MAX or not all(0 <= size <= _DIMENSION_MAX for size in info.shape):
        raise InvalidArgument(f"{info.shape} is no shape")


def _check_state(state: StateInfo) -> None:
    info = state.tensor
    _check_tensor(info)
    dtype = np.dtype(info.dtype)
    if state.initial and len(state.initial) != math.prod(info.shape) * dtype.itemsize:
        raise InvalidArgument(f"{len(state.initial)} bytes are not the initial values of {info!r}")
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= info.zero_point <= np.iinfo(dtype).max:
        raise InvalidArgument(f"no element of {info!r} can be its zero point")


def difference(old: ModelDescription, new: ModelDescription) -> str:
    """Return the difference of a newer version for an application, as text; empty if it can replace the old one."""
    for kind, before, after in (
        ("inputs", old.inputs, new.inputs),
        ("outputs", old.outputs, new.outputs),
        ("states", tuple(state.tensor for state in old.states), tuple(state.tensor for state in new.states)),
    ):
        if before != after:
            return f"its {kind} are {_texts(after)}, not {_texts(before)}"
    return "" if old.batch == new.batch else f"its batch is {new.batch}, not {old.batch}"


def _texts(infos: tuple[TensorInfo, ...]) -> str:
    return ", ".join(repr(info).removeprefix("<TensorInfo: ").removesuffix(">") for info in infos) or "none"


# ----------------------------------------------------------------------------------------------------------------------
# The client's end of a connection to a model repository.


_log = logging.getLogger("nnfmq.client")
_EXITED = "the model repository is gone"


class ReceivedModel(Closable):
    """A model as the repository has sent it, with the memories of its constants. Close it, or use `with`."""

    def __init__(self, description: ModelDescription, pools: tuple[FileMemory, ...]) -> None:
        self.description = description
        self.pools = pools

    def close(self) -> None:
        """Close the memories. Idempotent."""
        for pool in self.pools:
            pool.close()


_Reply: TypeAlias = ReceivedModel | ModelList


class _WaitingCall(NamedTuple):
    """A call that waits for its reply."""

    call: OpenModel | ListModels
    reply: Future[_Reply]


class RepositoryConnection(Uncopyable):
    """A connection to a model repository. Close it. Thread-safe.

    `on_change` is called on the watcher thread when the repository serves another version of a model that was opened,
    and `on_end` when the repository has died, or has violated the protocol; neither may block.
    """

    def __init__(
        self, channel: Channel, on_change: Callable[[VersionChanged], None], on_end: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._on_change, self._on_end = on_change, on_end
        self._lock = threading.Lock()  # held for a few assignments, never while blocking
        self._ids = itertools.count(1)
        self._pending: dict[int, _WaitingCall] = {}
        self._end_reason: str | None = None
        self._pid = os.getpid()
        self._watch: watcher.ReaderHandle | None = None

    @classmethod
    def start(cls, channel: Channel, on_change: Callable[[VersionChanged], None], on_end: Callable[[], None]) -> Self:
        """Return the connection over `channel`, of which it takes ownership, also if it raises."""
        connection = cls(channel, on_change, on_end)
        open_connections.add(connection)
        try:
            connection._watch = watcher.add_reader(
                channel.fileno(), connection._on_readable, connection._on_internal_error
            )
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """False once the repository has died, or the connection is closed."""
        return self._end_reason is None

    # ------------------------------------------------------------------------------------------------ calls

    def open_model(self, name: str, version: int, deadline_ns: int | None) -> ReceivedModel:
        """Return a version of a model, 0 = the current one; blocks. The caller closes it. Later versions are announced.

        Raises:
            ModelNotFound: If there is no such model or version.
            DeviceUnavailable: If no version of the model is served, or not yet.
            DeadObject: If the repository dies.
            ProtocolError: If it violates the protocol.
            MissedDeadlineTransient: If the deadline passes.
        """
        found = self._exchange(OpenModel(next(self._ids), name, version), deadline_ns)
        assert isinstance(found, ReceivedModel)  # `_reply_to` has checked it
        return found

    def list_models(self, deadline_ns: int | None) -> tuple[ModelEntry, ...]:
        """Return all models of the repository, by name; blocks. Raises as `open_model`."""
        found = self._exchange(ListModels(next(self._ids)), deadline_ns)
        assert isinstance(found, ModelList)
        return found.models

    def _exchange(self, message: OpenModel | ListModels, deadline_ns: int | None) -> _Reply:
        reply: Future[_Reply] = Future()
        with self._lock:
            if self._end_reason is not None:
                raise open_connections.closed_error(self._end_reason)
            self._pending[message.call] = _WaitingCall(message, reply)
        try:
            self._channel.send(encode(message), (), deadline_ns)
            return reply.result(deadline_ns)
        except MissedDeadlineTransient:
            if self._pending.pop(message.call, None) is not None:
                raise
            # The watcher thread has removed the call in the meantime, so it is about to set the reply.
            return reply.result(None)
        finally:
            self._pending.pop(message.call, None)

    # ------------------------------------------------------------------------------------------------ watcher thread

    def _on_readable(self) -> None:
        try:
            with self._channel.receive(NO_WAIT) as frame:
                self._on_frame(frame)
        except MissedDeadlineTransient:
            pass  # the data that woke the watcher has been received already
        except DeadObject:
            self._end(DeadObject(_EXITED))
        except NnfmqError as error:
            _log.warning("connection to the model repository closed: %s", error)
            self._end(error)

    def _on_internal_error(self, error: Exception) -> None:
        self._end(DeadObject(f"the connection to the model repository was closed after an internal error: {error!r}"))

    def _on_frame(self, frame: Frame) -> None:
        message = decode(frame.data, sender=RepositoryRole.REPOSITORY, fds=frame.fd_count)
        if isinstance(message, VersionChanged):
            self._on_change(message)
            return
        assert isinstance(message, ModelOpened | ModelList)  # `decode` has checked it
        pending = self._pending.pop(message.call, None)
        if pending is None:
            return  # the caller no longer waits
        try:
            pending.reply.set_result(_reply_to(pending.call, message, frame))
        except ProtocolError:
            self._pending[message.call] = pending  # which gets the error when the connection is closed
            raise
        except NnfmqError as error:
            pending.reply.set_exception(error)

    def _end(self, error: NnfmqError) -> None:
        """Mark the connection closed, and fail every call that waits. Idempotent."""
        with self._lock:
            is_first, self._end_reason = self._end_reason is None, self._end_reason or str(error)
            pending_calls, self._pending = self._pending, {}
            self._stop_reading()
        for pending in pending_calls.values():
            pending.reply.set_exception(error)
        if is_first:
            self._on_end()
        self._channel.close()
        open_connections.discard(self)

    def _stop_reading(self) -> None:
        """Remove the reader. Needs the lock, so that another thread cannot close the channel before that."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watcher.remove_reader(watch)

    # ------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """Hang up; pending calls of other threads fail with DeadObject. Idempotent. Does not call `on_end`."""
        self._on_end = _nothing
        with self._lock:
            self._stop_reading()
        if self._pid == os.getpid():
            self._channel.hang_up()  # also ends a send that blocks in another thread
        self._end(DeadObject(open_connections.CLOSED))

    def disown_in_child(self) -> None:
        """In a forked child, close this copy of the socket and make every call raise DeadObject."""
        self._lock = threading.Lock()  # a thread that does not exist in the child may have held the old one
        self._watch, self._pending = None, {}
        self._end_reason = f"this client belongs to process {os.getppid()}, which forked; connect again in the child"
        self._channel.close()


def _nothing() -> None:
    """Ignore the end of a connection that this process has closed."""


def _reply_to(call: OpenModel | ListModels, message: ModelOpened | ModelList, frame: Frame) -> _Reply:
    """Return the reply for a caller. Takes the fds that it keeps out of `frame`.

    Raises:
        ProtocolError: If the message is no reply to this call, or not a valid one.
        NnfmqError: The error that the repository replied.
    """
    if isinstance(message, ModelList) and isinstance(call, ListModels):
        return message
    if not isinstance(message, ModelOpened) or not isinstance(call, OpenModel):
        raise ProtocolError(f"the model repository replied to a {type(call).__name__} with a {type(message).__name__}")
    if message.status is not ErrorStatus.NONE:
        raise _error_of(message)
    if frame.fds_truncated:
        raise ResourceExhaustedTransient("this process has no free fds for the model's memories (ulimit -n)")
    description = message.description
    if description is None:
        raise ProtocolError("the model repository replied without a model")
    check_description(description, call.name, call.version)
    return ReceivedModel(description, _adopt(frame.detach_fds(), description.pools))


def _error_of(message: ModelOpened) -> NnfmqError:
    if message.status is ErrorStatus.INVALID_ARGUMENT:
        return ModelNotFound(message.message)
    if message.status is ErrorStatus.DEAD_OBJECT:
        return ProtocolError("the model repository replied with the status DEAD_OBJECT, which no running process has")
    return error_for_status(message.status, message.message)


def _adopt(fds: list[int], pools: Sequence[MemoryData]) -> tuple[FileMemory, ...]:
    """Return the memories. Takes ownership of `fds`, also if it raises ProtocolError."""
    with ExitStack() as undo:
        undo.callback(lambda: close_all(fds))
        memories: list[FileMemory] = []
        for pool in pools:
            try:
                memories.append(FileMemory.adopt(fds.pop(0), pool.size_bytes, pool.offset, Protection.READ))
            except InvalidArgument as error:
                raise ProtocolError(f"the model repository sent an invalid memory: {error}") from error
            undo.callback(memories[-1].close)
        undo.pop_all()
    return tuple(memories)
