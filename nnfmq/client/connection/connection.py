"""The client's end of a control channel: calls, their replies, and the driver's death.

The watcher thread receives; each caller waits for the reply to its own call. When the driver dies (its socket hangs
up), every pending call fails with DeadObject and every burst is woken. A forked child closes its copies of all sockets.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from nnfmq.base import watcher
from nnfmq.base.channel import NO_WAIT, Channel, Frame, close_all
from nnfmq.base.ownership import Closable
from nnfmq.base.processes import command_name
from nnfmq.client.connection import open_connections, trace
from nnfmq.client.connection.defaults import INTERFACE, level_of
from nnfmq.client.connection.driver_start import DriverStart
from nnfmq.client.connection.garbage import ClosedWhenDropped, CloserUse, weak_call
from nnfmq.client.connection.late_sends import LateSends
from nnfmq.client.connection.page import ClientPage
from nnfmq.client.waiting import Future
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    ResourceExhaustedTransient,
    error_for_status,
    status_for_error,
)
from nnfmq.hal.types import Pool, SharedPool
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import ConnectionState, PeerRole

__all__ = [
    "Connection",
    "DroppedConnection",
    "MemoryProvider",
    "PendingCall",
    "ReplyKey",
    "ResultHandler",
    "memories_reply",
    "release_message",
]


# ----------------------------------------------------------------------------------------------------------------------
# Pending calls of a connection: handlers of replies, and release of objects whose reply came too late.


class MemoryProvider(Protocol):
    """A burst as the connection uses it: it resolves its slots, and it is woken when the driver dies."""

    peer: watcher.DeathRecipients

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`, which the burst keeps.

        Raises:
            InvalidArgument: If a slot is unknown.
        """
        ...


ResultT_contra = TypeVar("ResultT_contra", contravariant=True)


class ResultHandler(Protocol[ResultT_contra]):
    """Receives one result, or the error that replaces it: exactly one of the methods is called, once. A Future is one.

    Called on the watcher thread, on the thread that closes the connection, or on the fallback thread. Must not block.
    """

    def set_result(self, result: ResultT_contra, /) -> None:
        """Receive the result."""
        ...

    def set_exception(self, error: NnfmqError, /) -> None:
        """Receive the error."""
        ...


class ReplyKey(NamedTuple):
    """The id of a call, and the type of one of its replies: a call with a callback has two."""

    call: int
    reply_type: type[messages.Call]


class PendingCall(NamedTuple):
    """The handler of a reply that has not arrived, and the callbacks that run before it."""

    handler: ResultHandler[Any]
    on_reply: Callable[[Any], None] | None = None
    on_fds: Callable[[list[int]], None] | None = None
    is_late: bool = False
    """Whether the caller no longer waits: what the driver has created for it is released."""


_RELEASE_MESSAGES: dict[type[messages.Call], Callable[[int, Any], messages.Call]] = {
    messages.PreparedModelReady: lambda call, reply: messages.ReleaseModel(call, reply.model_id),
    messages.BurstConfigured: lambda call, reply: messages.CloseBurst(call, reply.burst_id),
    messages.FencedLaunched: lambda call, reply: messages.ReleaseCallback(call, reply.callback_id),
    messages.ExecutionCreated: lambda call, reply: messages.ReleaseExecution(call, reply.execution_id),
    messages.Allocated: lambda call, reply: messages.ReleaseBuffer(call, reply.buffer_id),
}


def release_message(next_call_id: Callable[[], int], reply: messages.Call) -> messages.Call | None:
    """Return the call that releases the object that a successful reply names, or None if it names none.

    Sent if the caller timed out before the reply arrived: the object that the driver created then has no owner.
    """
    release = _RELEASE_MESSAGES.get(type(reply))
    if release is None or not isinstance(reply, messages.StatusReply) or reply.status is not ErrorStatus.NONE:
        return None
    return release(next_call_id(), reply)


def memories_reply(burst: MemoryProvider | None, call: messages.GetMemories) -> tuple[messages.Memories, list[int]]:
    """Return the reply to a call for a burst's memories, and fds to be sent with it, which the caller closes.

    `burst` is None if it is closed. Another thread may close it, and its memories, meanwhile.
    """
    with contextlib.ExitStack() as undo:
        fds: list[int] = []
        undo.callback(close_all, fds)
        try:
            if burst is None:
                raise InvalidArgument(f"burst {call.burst_id} is closed")
            memories = burst.get_memories(call.slots)
            data = tuple(map(messages.memory_to_data, memories))
            for memory in memories:
                _add_copy(fds, cast(SharedPool, memory))
        except NnfmqError as error:
            return messages.Memories(call.call, status_for_error(error), str(error), ()), []
        undo.pop_all()
    return messages.Memories(call.call, ErrorStatus.NONE, "", data), fds


def _add_copy(fds: list[int], memory: SharedPool) -> None:
    """Append a copy of a memory's fd, never of another file's. Raises BadState if the memory is closed."""
    fd = memory.fileno()
    try:
        fds.append(os.dup(fd))
    except OSError as error:
        if error.errno == errno.EBADF:
            raise BadState("this memory is closed") from None
        raise ResourceExhaustedTransient(f"a memory is not sent to the driver: {error.strerror}") from error
    memory.fileno()  # a memory forgets its fd before it closes it: it was the memory's when it was copied


# ----------------------------------------------------------------------------------------------------------------------
# DroppedConnection: the end of a connection that the application has dropped, and of its embedded driver.


class DroppedConnection(ClosedWhenDropped):
    """The base of Connection. `end_process` ends an embedded driver after a dropped connection is closed.

    It is told whether the driver has started.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.end_process: Callable[[bool], object] | None = None
        self._thread_use = CloserUse()

    @property
    @abstractmethod
    def has_started(self) -> bool:
        """Whether the driver has accepted this client."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. Idempotent."""

    def _is_left_open(self) -> bool:
        return self._channel.fileno() >= 0

    def _is_of_process(self) -> bool:
        return True

    def _leave_at_exit(self) -> None:
        if sys.is_finalizing():  # no other thread runs Python code any more
            self._channel.close()

    def _close_dropped(self) -> None:
        has_started = self.has_started
        self.close()
        self.end_driver(has_started)

    def end_driver(self, has_started: bool = True) -> None:
        """End the embedded driver, if it is one, after the connection is closed; blocks up to 2 s. Call it once."""
        if self.end_process is not None:
            self.end_process(has_started)


# ----------------------------------------------------------------------------------------------------------------------
# The client's end of a control channel: calls, their replies, and the driver's death.


# Feature levels of `hal.feature_levels`, which is not imported here: a driver would get the hello later.
_FIRST_WITH_BURSTS, _FIRST_WITH_DEADLINES, _FIRST_AIDL, _FIRST_WITH_REUSABLE = 3, 4, 5, 8
_DRIVER_EXITED = "the driver process is gone"
_POST_TIMEOUT_NS = 1_000_000_000
_REPLY_BYTES_MAX = 32 << 20  # of the largest one, a description of a file; decoding so much takes 0.3 s
_END_TIMEOUT_S = 1.0  # the watcher thread may be busy, but it never blocks
_log = logging.getLogger("nnfmq.client")

ReplyT = TypeVar("ReplyT", bound=messages.StatusReply)
CallT = TypeVar("CallT", bound=messages.Call)


class Connection(DroppedConnection):
    """A connection to a driver, made by `start`; the owner closes it. Thread-safe.

    One that is dropped with all that uses it is closed, too: the watcher thread keeps no connection.

    The driver of a connection made by `start` may not have replied to Hello yet: the first call waits for its reply.
    """

    def __init__(self, channel: Channel, deadline_ns: int | None, interface: str) -> None:
        self.interface = interface
        self.level = level = level_of(interface)  # the feature level of this connection's interface version
        self.is_aidl = level >= _FIRST_AIDL
        self.has_bursts = level >= _FIRST_WITH_BURSTS
        self.has_deadlines = level >= _FIRST_WITH_DEADLINES
        self.has_reusable_executions = level >= _FIRST_WITH_REUSABLE
        super().__init__(channel)
        self._connection_state = ConnectionState()
        self._lock = threading.Lock()  # held for a few assignments, never while blocking
        self._pending_calls: dict[ReplyKey, PendingCall] = {}
        self._driver_start = DriverStart(deadline_ns)
        self._bursts: weakref.WeakValueDictionary[int, MemoryProvider] = weakref.WeakValueDictionary()
        self._peers: list[watcher.DeathRecipients] = []
        self._own_bursts: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The managed buffers of this connection by token."""
        self._open_buffers = set[object]()  # a key for each, also for those that are being allocated
        self.moves = False
        """Whether the client connects to the driver's successor when the driver asks it to leave."""
        self.is_replaced = False
        """Whether the driver serves this client until that has moved to the successor, which listens."""
        self._on_replaced: Callable[[], None] | None = None
        self.has_left = False
        """Whether it has done so: this connection takes no new calls, and ends when those in progress have ended."""
        self._last_words = ""
        self.close_reason: str | None = None
        """Why `raise_if_closed` raises; None while it does not."""
        self._ended, self.ended_ns = threading.Event(), 0  # at the end of `_end`
        self._is_abandoned, self._pid, self._pidfd = False, os.getpid(), -1
        self._watches: list[watcher.ReaderHandle] = []
        self._late_sends = LateSends(weak_call(self._on_channel_error))
        self.page = ClientPage()
        """What this client counts, and the class that it was given."""

    @classmethod
    def start(
        cls,
        channel: Channel,
        deadline_ns: int | None,
        interface: str = INTERFACE,
        client_class: ClientClass | None = None,
        is_monitor: bool = False,
    ) -> Connection:
        """Send Hello over `channel` and return, while the driver may still start. Takes ownership of `channel`.

        Nothing is received before `watch`, which the caller calls next.

        Args:
            channel: A connected control channel.
            deadline_ns: End of every wait for the driver's reply, on the monotonic clock; None = no limit.
            interface: An interface version, from "HIDL 1.0" to "AIDL v4".
            client_class: The class that the client asks for; None = the driver decides.
            is_monitor: Whether the client only looks at the driver.

        Raises:
            InvalidArgument: If the interface version is unknown.
            MissedDeadlineTransient: If the deadline passes before Hello is sent.
        """
        try:
            connection = cls(channel, deadline_ns, interface)
        except BaseException:
            channel.close()
            raise
        open_connections.add(connection)
        try:
            name = command_name(os.getpid())
            hello = messages.Hello(control_protocol.PROTOCOL, interface, name, client_class, is_monitor)
            # Sending fails if the driver has rejected the client already; its reply then contains the reason.
            with contextlib.suppress(DeadObject, ProtocolError):
                connection._send(hello, (), deadline_ns)
        except BaseException:
            connection.close()
            raise
        return connection

    def watch(self, process: int | None = None) -> None:
        """Receive what the driver sends, and notice its exit, from now on. May block as `Channel.close_first_at_exit`.

        `process`: an embedded driver's pid; its exit is noticed even if another process has a copy of its socket.
        """
        self._channel.close_first_at_exit()
        on_readable, on_error = weak_call(self._on_readable), weak_call(self._on_internal_error)
        self._watches.append(watcher.add_reader(self._channel.fileno(), on_readable, on_error))
        if process is not None:
            self._pidfd = os.pidfd_open(process)
            self._watches.append(watcher.add_reader(self._pidfd, weak_call(self._on_exit)))

    def wait_until_ready(self, deadline_ns: int | None = None) -> messages.HelloReply:
        """Return the driver's reply to Hello: its pids, its core and the interface version; block until it arrives.

        Raises:
            DeviceUnavailable: If the driver exits before it replies.
            MissedDeadlineTransient: If this deadline passes, or that of `start`.
            BadState: If this connection is closed before.
            NnfmqError: If the driver rejects the client, for example because it has too many.
        """
        return self._driver_start.wait(deadline_ns)

    @property
    def start_deadline_ns(self) -> int | None:
        """The end of every wait for the driver's reply to Hello."""
        return self._driver_start.deadline_ns

    def __repr__(self) -> str:
        kind, reply = "driver" if self.end_process is None else "embedded driver", self._driver_start.reply
        return f"<Client of {kind}>" if reply is None else f"<Client {reply.worker_pid} of {kind} {reply.driver_pid}>"

    @property
    def has_started(self) -> bool:
        """Whether the driver has accepted this client. Does not block."""
        return self._driver_start.reply is not None

    @property
    def was_not_accepted(self) -> bool:
        """Whether the driver has ended before it has read this client's Hello: its successor may serve the client."""
        return self._driver_start.was_not_accepted

    @property
    def is_open(self) -> bool:
        """False once the driver has exited or has been left, the connection is closed, or in a forked child."""
        return self.close_reason is None

    @property
    def has_hung_up(self) -> bool:
        """Whether the driver has exited, or the connection is closed, and nothing is in progress any more."""
        return self._ended.is_set()

    @property
    def is_abandoned(self) -> bool:
        """True if this process has closed the connection while the driver ran, and in a forked child."""
        return self._is_abandoned or self._pid != os.getpid()

    def raise_if_closed(self) -> None:
        """Raise BadState if this process has closed the connection, DeadObject if `is_open` is False otherwise.

        The DeadObject is a DriverEnding if the driver has asked the client to leave.
        """
        if self.close_reason is not None:
            if self.has_left and not self.is_abandoned:
                raise open_connections.DriverEnding(self.close_reason)
            raise open_connections.closed_error(self.close_reason)

    def _raise_if_hung_up(self) -> None:
        """Raise as `raise_if_closed`, unless calls may still be in progress: the driver may ask for what they need."""
        if not self.has_left or self._ended.is_set():
            self.raise_if_closed()

    def next_call_id(self) -> int:
        """Return an id for a new call."""
        return self._connection_state.next_call_id(PeerRole.CLIENT)

    def call(
        self,
        message: messages.Call,
        reply_type: type[ReplyT],
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
        *,
        on_reply: Callable[[ReplyT], None] | None = None,
        on_fds: Callable[[list[int]], None] | None = None,
        on_notification: Callable[[Any], None] = lambda _notification: None,
    ) -> ReplyT:
        """As `exchange`, but raise the error of the reply's status unless that is NONE."""
        reply = self.exchange(
            message, reply_type, fds, deadline_ns, on_reply=on_reply, on_fds=on_fds, on_notification=on_notification
        )
        if reply.status is not ErrorStatus.NONE:
            raise error_for_status(reply.status, reply.message)
        return reply

    def exchange(
        self,
        message: messages.Call,
        reply_type: type[CallT],
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
        *,
        on_reply: Callable[[CallT], None] | None = None,
        on_fds: Callable[[list[int]], None] | None = None,
        on_notification: Callable[[Any], None] = lambda _notification: None,
        begin_late: Callable[[], PendingCall] | None = None,
    ) -> CallT:
        """Send a call and block until its reply arrives; return the reply whatever its status.

        Args:
            message: The call, with an id from `next_call_id`.
            reply_type: The type of the reply.
            fds: Sent with the call. Borrowed.
            deadline_ns: End of the wait on the monotonic clock; None = no limit.
            on_reply: Runs on the watcher thread with the reply before this returns, so that the id of an object that
                the driver created is stored even if a signal handler raises while this returns.
            on_fds: Runs before `on_reply` and takes ownership of the fds that came with the reply.
            on_notification: Runs on this thread with each notification that arrives before the reply. An exception
                that it raises ends the call.
            begin_late: Returns what receives the reply if this raises although the driver may have the call.

        Raises:
            DeadObject: If the driver exits, or the connection is closed meanwhile; before the call it is BadState.
            MissedDeadlineTransient: If the deadline passes. A late reply is dropped, and what it created released.
        """
        self.wait_until_ready(deadline_ns)
        key = ReplyKey(message.call, reply_type)
        future: Future[CallT] = Future()
        begin_ns, was_sent = time.monotonic_ns(), False
        self._register(key, PendingCall(future, on_reply, on_fds))
        try:
            self._send(message, fds, deadline_ns)
            was_sent = True
            reply = future.result(deadline_ns, on_notification)
        except MissedDeadlineTransient:
            if self._abandon(key, begin_late if was_sent else None):
                raise
            # The watcher thread has removed the call in the meantime, so it is about to set the reply.
            reply = future.result(None)
        except BaseException:
            self._abandon(key, begin_late if was_sent else None)
            raise
        finally:
            trace.record_call(self, message, begin_ns)
        assert isinstance(reply, reply_type)
        return reply

    def _abandon(self, key: ReplyKey, begin_late: Callable[[], PendingCall] | None) -> bool:
        """Wait no longer for a reply, which what `begin_late` returns receives; return False if it has arrived."""
        with self._lock:
            is_pending = self._pending_calls.pop(key, None) is not None
            if is_pending and begin_late is not None:
                self._pending_calls[key] = begin_late()
        return is_pending

    def call_with_callback(
        self,
        message: messages.Call,
        callback_type: type[CallT],
        future: Future[CallT],
        fds: Sequence[int] = (),
    ) -> messages.Reply:
        """Send a call that the driver acknowledges with Reply and completes with a callback; return the Reply.

        Blocks until the Reply arrives, and raises as `exchange`. Borrows `fds`. `future` gets the callback message, or
        the error that replaces it, unless this raises.
        """
        key = ReplyKey(message.call, callback_type)
        self._register(key, PendingCall(future))
        try:
            return self.exchange(message, messages.Reply, fds)
        except BaseException:
            self._pending_calls.pop(key, None)
            raise

    def start_call(
        self,
        message: messages.Call,
        reply_type: type[messages.Call],
        handler: ResultHandler[Any],
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
    ) -> None:
        """Send a call and return; `handler` is called once with the reply, unless this raises. Borrows `fds`.

        Blocks while the socket is full.

        Raises:
            DeadObject: If the driver exits, or the connection is closed meanwhile; before the call it is BadState.
            MissedDeadlineTransient: If the call cannot be sent before the deadline.
        """
        self.wait_until_ready(deadline_ns)
        self._start_call(ReplyKey(message.call, reply_type), handler, partial(self._send, message, fds, deadline_ns))

    def start_call_nonblocking(
        self,
        message: messages.Call,
        reply_type: type[messages.Call],
        handler: ResultHandler[Any],
        fds: Sequence[int] = (),
    ) -> None:
        """As `start_call`, for the watcher thread. Does not block. Raises as `start_call`."""
        self._start_call(ReplyKey(message.call, reply_type), handler, partial(self._send_nonblocking, message, fds))

    def _start_call(self, key: ReplyKey, handler: ResultHandler[Any], send: Callable[[], None]) -> None:
        self._register(key, PendingCall(handler))
        try:
            send()
        except NnfmqError:
            # If the call is no longer pending, the driver has just exited and `_end` has called the handler.
            if self._pending_calls.pop(key, None) is not None:
                raise
        except BaseException:
            self._pending_calls.pop(key, None)
            raise

    def send(self, message: messages.Message, deadline_ns: int | None = None) -> None:
        """Send a message that has no reply. Blocks while the socket is full. Raises as `start_call`."""
        self._send(message, (), deadline_ns)

    def post(self, message: messages.Call) -> None:
        """Send a call and ignore its reply. Blocks up to 1 s. Does nothing if the driver has exited."""
        with contextlib.suppress(BadState, DeadObject, MissedDeadlineTransient):
            self._send(message, (), time.monotonic_ns() + _POST_TIMEOUT_NS)

    def _register(self, key: ReplyKey, pending: PendingCall) -> None:
        with self._lock:
            if key.reply_type is messages.FencedExecutionInfo:  # of an execution in progress
                self._raise_if_hung_up()
            else:
                self.raise_if_closed()
            self._pending_calls[key] = pending

    def add_peer(self, peer: watcher.DeathRecipients) -> None:
        """Register queues to be woken when the driver dies. Raises as `raise_if_closed`."""
        with self._lock:
            self.raise_if_closed()
            self._peers.append(peer)

    @property
    def open_calls(self) -> int:
        """The number of replies and callbacks of this connection's calls that have not arrived."""
        return len(self._pending_calls)

    def add_own_burst(self, burst: Closable) -> None:
        """Close a burst that a model keeps for `execute` when the connection ends. Raises as `raise_if_closed`."""
        with self._lock:
            self.raise_if_closed()
            self._own_bursts.add(burst)

    def close_own_bursts(self) -> bool:
        """Close the bursts that models keep for `execute`; return whether there were any. Does not block."""
        with self._lock:
            bursts = list(self._own_bursts)
            self._own_bursts.clear()
        for burst in bursts:
            burst.close()
        return bool(bursts)

    def add_burst(self, burst_id: int, burst: MemoryProvider) -> None:
        """Register the burst that serves the driver's GetMemories calls for `burst_id`."""
        with self._lock:
            self._bursts[burst_id] = burst

    def discard_burst(self, burst_id: int, peer: watcher.DeathRecipients) -> None:
        """Unregister a closed burst and its queues. Idempotent."""
        with self._lock:
            self._bursts.pop(burst_id, None)
            self._peers = [other for other in self._peers if other is not peer]

    def _send(self, message: messages.Message, fds: Sequence[int], deadline_ns: int | None) -> None:
        """Send from any thread. A frame is sent whole, and no order is defined between different threads' messages."""
        data = self._encode(message)
        try:
            self._channel.send(data, fds, deadline_ns)
        except (NnfmqError, OSError) as error:
            # Only these mean that it was not sent: an exception of a signal handler may be raised after sending.
            if isinstance(message, messages.Call):
                self._connection_state.cancel_call(message, PeerRole.CLIENT)
            if isinstance(error, DeadObject):
                self._wait_for_end()
            raise

    def _wait_for_end(self) -> None:
        """After a send to a dead driver, block until the watcher thread has noticed its end: `is_open` is False then.

        It first handles what the driver sent before it died.
        """
        if self._watches and watcher.thread() is not threading.current_thread():
            self._ended.wait(_END_TIMEOUT_S)

    def _encode(self, message: messages.Message) -> bytes:
        """Return the bytes of a message that is sent next, and record it in the connection's state."""
        data = control_protocol.encode(message)
        self._raise_if_hung_up()
        try:
            self._connection_state.process_message(message, PeerRole.CLIENT)
        except ProtocolError:
            self._raise_if_hung_up()  # another thread may have closed the connection since the check above
            raise
        return data

    def _send_nonblocking(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send from the watcher thread, which must not block. If the socket is full, a new thread sends the message."""
        self._late_sends.send(self._channel, self._encode(message), fds)

    def _on_readable(self) -> bool:
        """Handle a message; return whether there was one.

        The reply to Hello has no body in a file, and no reply has a large one: while a message is decoded, no thread of
        the application runs, and no deadline ends a wait.
        """
        try:
            frame = self._channel.receive(NO_WAIT, body_bytes_max=_REPLY_BYTES_MAX if self.has_started else 0)
        except MissedDeadlineTransient:
            return False  # the data that woke the watcher has been received already
        except NnfmqError as error:
            self._on_channel_error(error)
            return False
        with frame:
            try:
                self._on_frame(frame)
            except NnfmqError as error:
                self._on_channel_error(error)
        return True

    def _on_channel_error(self, error: Exception) -> None:
        if isinstance(error, DeadObject):
            self._end(_DRIVER_EXITED)
            return
        _log.warning("connection to the driver closed: %s", error)
        self._end(f"the connection to the driver was closed: {error}")

    def _on_exit(self) -> None:
        while not self._ended.is_set() and self._on_readable():
            pass  # what the driver sent before it exited: replies, and that it ends
        self._end(_DRIVER_EXITED)

    def _on_internal_error(self, error: Exception) -> None:
        self._end(f"the connection to the driver was closed after an internal error: {error!r}")

    def _on_frame(self, frame: Frame) -> None:
        message = control_protocol.decode(frame.data, sender=PeerRole.DRIVER, fds=frame.fd_count)
        self._connection_state.process_message(message, PeerRole.DRIVER)
        if isinstance(message, messages.HelloReply):
            self.page.map(frame.detach_fds())
            trace.trace_worker(self, message.worker_pid)
            self._driver_start.set_reply(message)
        elif isinstance(message, messages.Refused):
            status = message.status or ErrorStatus.GENERAL_FAILURE
            self._driver_start.fail(error_for_status(status, f"the driver rejected the client: {message.message}"))
        elif isinstance(message, messages.GoAway):
            self._on_go_away(message)
        elif isinstance(message, messages.GetMemories):
            reply, fds = memories_reply(self._bursts.get(message.burst_id), message)
            try:
                self._send_nonblocking(reply, fds)
            finally:
                close_all(fds)
        elif isinstance(message, messages.PreparationProgress):
            reply_type = control_protocol.NOTIFICATIONS[type(message)]
            pending = self._pending_calls.get(ReplyKey(message.call, reply_type))
            if pending is not None and isinstance(pending.handler, Future):  # else the caller no longer waits
                pending.handler.notify(message)
        else:
            assert isinstance(message, messages.Call)
            self._on_reply(message, frame)

    def _on_go_away(self, message: messages.GoAway) -> None:
        """Take no new calls, if the client moves; but if the driver was replaced, the client prepares the move first.

        A client that does not move goes on until the driver has exited; if the driver ends, it rejects what is new.
        """
        self._last_words = message.message
        if not self.moves:
            return
        if not message.is_replaced:
            self.depart()
            return
        self.is_replaced = True
        self._call_if_replaced()

    def call_when_replaced(self, function: Callable[[], None]) -> None:
        """Call a function when another driver has replaced this one, now if it has, and when no buffer is left then.

        It must not block, and has the connection `depart`, or `depart_without_buffers`.
        """
        self._on_replaced = function
        self._call_if_replaced()  # perhaps it was before the function was set

    def _call_if_replaced(self) -> None:
        if self.is_replaced and self._on_replaced is not None:
            self._on_replaced()

    def depart(self) -> None:
        """Take no new calls: the next one raises DriverEnding, and the client connects to the successor. Idempotent."""
        with self._lock:
            self._depart()

    def _depart(self) -> None:
        if self.close_reason is None:
            self.close_reason, self.has_left = self._last_words, True

    def depart_without_buffers(self) -> bool:
        """Depart unless there are managed buffers, whose contents stay with the driver; return whether it has."""
        with self._lock:
            if self._open_buffers:
                return False
            self._depart()
            return True

    @property
    def has_buffers(self) -> bool:
        """Whether there are managed buffers, also such that are being allocated."""
        return bool(self._open_buffers)

    def has_buffer(self, key: object) -> bool:
        """Return whether a managed buffer was added and not removed. Takes no lock."""
        return key in self._open_buffers

    def add_buffer(self, key: object) -> None:
        """Note that there is a managed buffer from now on. Raises as `raise_if_closed`."""
        with self._lock:
            self.raise_if_closed()
            self._open_buffers.add(key)

    def remove_buffer(self, key: object) -> None:
        """Note that there is a managed buffer no longer. Idempotent. Does not block."""
        with self._lock:
            is_last = key in self._open_buffers and len(self._open_buffers) == 1
            self._open_buffers.discard(key)
        if is_last:
            self._call_if_replaced()

    def leave(self) -> None:
        """Let the driver end the connection when it has replied to what is in progress. Does not block.

        The connection closes itself then, or the caller closes it before.
        """
        with contextlib.suppress(NnfmqError, OSError):  # the driver has exited, or exits
            self._channel.send(control_protocol.encode(messages.Leave()), (), NO_WAIT)

    def ending_error(self, status: ErrorStatus) -> DeadObject | None:
        """Return the error of a request that the driver has rejected because it ends; None for another reason.

        None also if the client does not move.
        """
        if status is ErrorStatus.DEVICE_UNAVAILABLE and self.has_left:
            return open_connections.DriverEnding(self.close_reason or "")
        return None

    def exit_error(self) -> DeadObject:
        """Return the error of a wait that the driver's exit has ended, with the reason if the driver has told one.

        It is the same whether the kernel has told the waiting thread or the watcher thread first.
        """
        text = open_connections.CLOSED if self.close_reason == open_connections.CLOSED else _DRIVER_EXITED
        return DeadObject(f"{text}: {self._last_words}" if self._last_words else text)

    def _on_reply(self, reply: messages.Call, frame: Frame) -> None:
        if getattr(reply, "status", ErrorStatus.NONE) is ErrorStatus.DEAD_OBJECT:
            # Only the transport reports DEAD_OBJECT, to a client whose driver has exited (VAL-4).
            raise ProtocolError("the driver replied with the status DEAD_OBJECT, which no running driver has")
        key = ReplyKey(reply.call, type(reply))
        with self._lock:  # `_abandon` replaces it
            pending = self._pending_calls.pop(key, None)
        ending = self.ending_error(getattr(reply, "status", ErrorStatus.NONE))
        if pending is None:
            self._release_orphan(reply)
        elif ending is not None:
            pending.handler.set_exception(ending)
        elif frame.fds_truncated:
            pending.handler.set_exception(
                ResourceExhaustedTransient("this process has no free fds for the driver's reply (ulimit -n)")
            )
            self._release_orphan(reply)
        else:
            try:
                if pending.on_fds is not None:
                    pending.on_fds(frame.detach_fds())
                if pending.on_reply is not None:
                    pending.on_reply(reply)
                pending.handler.set_result(reply)
                if pending.is_late:
                    self._release_orphan(reply)
            except Exception:
                # A bug in nnfmq. It ends the connection, and then `_end` passes the reason to the handler.
                self._pending_calls[key] = pending
                raise

    def _release_orphan(self, reply: messages.Call) -> None:
        """Release what the driver created for a caller that no longer waits."""
        release = release_message(self.next_call_id, reply)
        if release is not None:
            self._send_nonblocking(release)

    def _unwatch(self) -> None:
        """Watch the files no more. The caller has the lock, so that another thread closes them only after this."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watcher.remove_reader(watch)

    def _end(self, reason: str) -> None:
        """Mark the connection closed and fail everything that waits for the driver. Idempotent."""
        if reason == _DRIVER_EXITED and self._last_words:
            reason = f"{reason}: {self._last_words}"
        with self._lock:
            if self.close_reason is None:
                self.close_reason = reason
            self.ended_ns = self.ended_ns or time.monotonic_ns()
            pending_calls, self._pending_calls = self._pending_calls, {}
            peers, self._peers = self._peers, []
            self._unwatch()
            self._bursts.clear()
        self.page.close()
        for peer in peers:
            watcher.notify_peer_death(peer)
        self.close_own_bursts()
        self._driver_start.fail_with_exit(
            self.close_reason, has_successor=self._channel.left_unread and self.end_process is None
        )
        error = DeadObject(self.close_reason)
        for pending in pending_calls.values():
            pending.handler.set_exception(error)
        self._ended.set()
        if self.has_left:
            self._close_files()

    def close(self) -> None:
        """Send Goodbye and hang up; pending calls of other threads fail with DeadObject. Idempotent."""
        self._driver_start.fail(BadState(open_connections.CLOSED))
        with self._lock:
            was_open = self.close_reason is None or self.has_left
            self.close_reason = self.close_reason or open_connections.CLOSED
            self._unwatch()  # before Goodbye: the driver's hang-up in response is not a peer death
            self._is_abandoned |= was_open
        if was_open and self.has_started:
            with contextlib.suppress(NnfmqError, OSError):  # the hang-up below has the same effect
                self._channel.send(control_protocol.encode(messages.Goodbye()), (), NO_WAIT)
        self._end(self.close_reason)
        self._close_files()

    def _close_files(self) -> None:
        if self._pid == os.getpid():
            self._channel.hang_up()  # also ends a send that blocks in another thread
        self._channel.close()
        self._close_pidfd()
        self.page.close()
        open_connections.discard(self)
        self._thread_use.end()

    def _close_pidfd(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def disown_in_child(self) -> None:
        """In a forked child, close this copy of the socket and make every call raise DeadObject."""
        # A thread that does not exist in the child may have held the old locks. Nobody waits in the child either.
        self._lock, self._connection_state = threading.Lock(), ConnectionState()
        self._watches, self._bursts = [], weakref.WeakValueDictionary()
        self.close_reason = f"this client belongs to process {os.getppid()}, which forked; connect again in the child"
        self._driver_start.fail(DeadObject(self.close_reason))
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.flag.set()
        self._channel.close()
        self._close_pidfd()
        self.page.close()
