"""The application's end of a control channel: calls and their answers, and what happens when the driver is gone.

The watcher's thread receives; callers wait for their own answer. The driver's death (the hang-up of its socket) fails
every open call with DEAD_OBJECT and wakes every burst. After fork(2) the child's copy of the socket is closed at once,
since a hang-up is seen only when no copy is left, and every call in the child raises. Long because whatever ends the
connection ends every kind of wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from nnfmq import watcher
from nnfmq.channel import NO_WAIT, Channel, Frame, close_all
from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
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
from nnfmq.runtime.future import Future
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.connection_state import ConnectionState
from nnfmq.serialize.control_protocol import PeerRole

INTERFACE = "AIDL v4"  # unless the application wants another
# Levels of `hal.feature_levels`, for which no application shall wait.
_LEVEL, _FIRST_AIDL, _FIRST_WITH_DEADLINES, _FIRST_WITH_REUSABLE = 8, 5, 4, 8
_GONE = "the driver process is gone"
_TELL_NS = 1_000_000_000  # for a driver that reads nothing, before it is left alone
_log = logging.getLogger("nnfmq.client")

AnswerT = TypeVar("AnswerT", bound=messages.StatusReply)
CallT = TypeVar("CallT", bound=messages.Call)


class MemoryProvider(Protocol):
    """A burst, as the connection needs it: it knows what its slots stand for, and it can be woken."""

    peer: watcher.DeathRecipients

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`; they stay the burst's. Raises InvalidArgument for an unknown slot."""
        ...


class _Key(NamedTuple):
    call: int
    kind: type[messages.Call]


class Taker(Protocol):
    """Who waits for an answer: it is given that, or the error that stands for it, exactly once."""

    def give(self, answer: Any) -> None:
        """Take it; on the watcher's thread, or on that of whoever closes the connection."""
        ...


class _Question(NamedTuple):
    answer: Taker
    on_answer: Callable[[Any], None] | None = None
    on_fds: Callable[[list[int]], None] | None = None


# What the driver made for somebody who has stopped waiting, and how it is undone.
_UNDONE: dict[type[messages.Call], Callable[[int, Any], messages.Call]] = {
    messages.PreparedModelReady: lambda call, answer: messages.ReleaseModel(call, answer.model_id),
    messages.BurstConfigured: lambda call, answer: messages.CloseBurst(call, answer.burst_id),
    messages.FencedLaunched: lambda call, answer: messages.ReleaseCallback(call, answer.callback_id),
    messages.ExecutionCreated: lambda call, answer: messages.ReleaseExecution(call, answer.execution_id),
    messages.Allocated: lambda call, answer: messages.ReleaseBuffer(call, answer.buffer_id),
}


class Connection:
    """A connection to a driver. Any thread may call. Made by `open`; the owner closes it."""

    def __init__(self, channel: Channel, level: int = _LEVEL) -> None:
        self.level = level  # the feature level of the interface that is spoken here
        self.is_aidl = level >= _FIRST_AIDL
        self.has_deadlines = level >= _FIRST_WITH_DEADLINES
        self.keeps_executions = level >= _FIRST_WITH_REUSABLE
        self._channel = channel
        self._connection_state = ConnectionState()
        self._lock = threading.Lock()  # held for a few assignments, never while blocking
        self._waiting: dict[_Key, _Question] = {}
        self._greeting: Future[messages.HelloReply] = Future()
        self._bursts: dict[int, MemoryProvider] = {}
        self._peers: list[watcher.DeathRecipients] = []
        self.buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by token
        self._end: str | None = None
        self._pid = os.getpid()
        self._watches: list[watcher.ReaderHandle] = []
        self._pidfd = -1
        self.driver: messages.HelloReply | None = None

    @classmethod
    def open(
        cls,
        channel: Channel,
        deadline_ns: int | None,
        process: int | None = None,
        interface: str = INTERFACE,
    ) -> Connection:
        """Greet the driver over `channel`, which the connection owns from now on; blocks until it answers.

        `process` is the pid of a driver that is our own child: its end is then seen even where a copy of its socket
        lives on in another process. `interface` is the HAL's, from "HIDL 1.0" to "AIDL v4".

        Raises InvalidArgument for an unknown interface, DeviceUnavailable where the driver ends, the error of the
        status where it refuses (a driver with too many clients: ResourceExhaustedTransient), MissedDeadlineTransient at
        the deadline.
        """
        try:
            connection = cls(channel, _level_of(interface))
        except BaseException:
            channel.close()
            raise
        _open_connections.add(connection)
        try:
            connection._watch_driver(process)
            name = f"pid {os.getpid()}"
            with contextlib.suppress(DeadObject, ProtocolError):  # refused already: the greeting's answer says why
                connection.send(messages.Hello(control_protocol.PROTOCOL, interface, name), deadline_ns)
            connection.driver = connection._greeting.wait(deadline_ns)
        except DeadObject as error:
            connection.close()
            raise DeviceUnavailable(f"the driver ended before it answered: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _watch_driver(self, process: int | None) -> None:
        self._watches.append(watcher.add_reader(self._channel.fileno(), self._on_ready, self._on_bug))
        if process is not None:
            self._pidfd = os.pidfd_open(process)
            self._watches.append(watcher.add_reader(self._pidfd, lambda: self._finish(_GONE)))

    @property
    def greeting(self) -> messages.HelloReply:
        """What the driver said of itself when the connection was opened."""
        assert self.driver is not None  # `open` returns none that was not greeted
        return self.driver

    @property
    def is_open(self) -> bool:
        """False once the driver is gone, the connection is closed, or this is a forked child."""
        return self._end is None

    def call(
        self,
        message: messages.Call,
        answer: type[AnswerT],
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
        *,
        on_answer: Callable[[AnswerT], None] | None = None,
        on_fds: Callable[[list[int]], None] | None = None,
        on_notice: Callable[[Any], None] = lambda _notice: None,
    ) -> AnswerT:
        """Send a call (its number from `new_call`) and return its answer; blocks. The fds stay the caller's.

        `on_answer` runs on the watcher's thread before this returns, so that what the driver made for us is known even
        where a signal interrupts the very return; `on_fds` before it, and takes over the descriptors that came with the
        answer. `on_notice` runs on this thread with each notice that comes before the answer, and may raise. Raises the
        error that the answer's status stands for, DeadObject, MissedDeadlineTransient.
        """
        result = self.ask(message, answer, fds, deadline_ns, on_answer=on_answer, on_fds=on_fds, on_notice=on_notice)
        if result.status is not ErrorStatus.NONE:
            raise error_for_status(result.status, result.message)
        return result

    def ask(
        self,
        message: messages.Call,
        answer: type[CallT],
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
        *,
        on_answer: Callable[[CallT], None] | None = None,
        on_fds: Callable[[list[int]], None] | None = None,
        on_notice: Callable[[Any], None] = lambda _notice: None,
    ) -> CallT:
        """As `call`, but return the answer whatever its status says."""
        key = _Key(message.call, answer)
        given: Future[CallT] = Future()
        self._expect(key, _Question(given, on_answer, on_fds))
        try:
            self._send(message, fds, deadline_ns)
            result = given.wait(deadline_ns, on_notice)
        except MissedDeadlineTransient:
            if self._waiting.pop(key, None) is not None:
                raise  # a late answer finds nobody, and is undone
            result = given.wait(None)  # it came just now
        finally:
            self._waiting.pop(key, None)
        assert isinstance(result, answer)
        return result

    def launch(
        self,
        message: messages.Call,
        callback: type[CallT],
        taker: Future[CallT],
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
    ) -> messages.Reply:
        """Send a call that has a callback and return its Reply; blocks. The fds stay the caller's.

        `taker` is given the callback's answer, or the error that stands for it, unless this raises: DeadObject,
        MissedDeadlineTransient.
        """
        key = _Key(message.call, callback)
        self._expect(key, _Question(taker))
        try:
            return self.ask(message, messages.Reply, fds, deadline_ns)
        except BaseException:
            self._waiting.pop(key, None)
            raise

    def begin(
        self,
        message: messages.Call,
        answer: type[messages.Call],
        taker: Taker,
        fds: Sequence[int] = (),
        deadline_ns: int | None = None,
    ) -> None:
        """Send a call whose answer `taker` will be given: exactly once, unless this raises. The fds stay the caller's.

        Raises DeadObject, MissedDeadlineTransient where it cannot be sent in time.
        """
        self._begin(_Key(message.call, answer), taker, partial(self._send, message, fds, deadline_ns))

    def begin_nonblocking(
        self, message: messages.Call, answer: type[messages.Call], taker: Taker, fds: Sequence[int] = ()
    ) -> None:
        """As `begin`, for the watcher's thread, which never blocks here. Raises DeadObject."""
        self._begin(_Key(message.call, answer), taker, partial(self._send_unblocked, message, fds))

    def _begin(self, key: _Key, taker: Taker, send: Callable[[], None]) -> None:
        self._expect(key, _Question(taker))
        try:
            send()
        except NnfmqError:
            if self._waiting.pop(key, None) is not None:
                raise
            # Else the driver died just now, and the taker knows.
        except BaseException:
            self._waiting.pop(key, None)
            raise

    def send(self, message: messages.Message, deadline_ns: int | None = None) -> None:
        """Send a message that has no answer. Raises DeadObject, MissedDeadlineTransient."""
        self._send(message, (), deadline_ns)

    def tell(self, message: messages.Call) -> None:
        """Send a call whose answer nobody needs, if the driver is still there."""
        with contextlib.suppress(DeadObject, MissedDeadlineTransient):
            self._send(message, (), time.monotonic_ns() + _TELL_NS)

    def _expect(self, key: _Key, question: _Question) -> None:
        with self._lock:
            self.raise_if_closed()
            self._waiting[key] = question

    def new_call(self) -> int:
        """Return a number for a new call."""
        return self._connection_state.next_call_id(PeerRole.CLIENT)

    def add_peer(self, peer: watcher.DeathRecipients) -> None:
        """Register what must be woken when the driver dies. Raises DeadObject if it already has."""
        with self._lock:
            self.raise_if_closed()
            self._peers.append(peer)

    def add_burst(self, burst_id: int, burst: MemoryProvider) -> None:
        """Let the driver ask `burst` for memories."""
        with self._lock:
            self._bursts[burst_id] = burst

    def discard_burst(self, burst_id: int, peer: watcher.DeathRecipients) -> None:
        """Forget a burst that is closed."""
        with self._lock:
            self._bursts.pop(burst_id, None)
            self._peers = [other for other in self._peers if other is not peer]

    def raise_if_closed(self) -> None:
        """Raise DeadObject with the reason once `is_open` is False."""
        if self._end is not None:
            raise DeadObject(self._end)

    def _send(self, message: messages.Message, fds: Sequence[int], deadline_ns: int | None) -> None:
        """Send from any thread: a frame goes whole, and the order of different threads' messages means nothing."""
        data = self._noted(message)
        try:
            self._channel.send(data, fds, deadline_ns)
        except (NnfmqError, OSError):  # not sent; what a signal handler raises may come after it was
            if isinstance(message, messages.Call):
                self._connection_state.cancel_call(message, PeerRole.CLIENT)
            raise

    def _noted(self, message: messages.Message) -> bytes:
        """Return the bytes of a message that is to be sent now. Raises DeadObject where nothing is sent any more."""
        data = control_protocol.encode(message)
        self.raise_if_closed()
        try:
            self._connection_state.process_message(message, PeerRole.CLIENT)
        except ProtocolError:
            self.raise_if_closed()  # another thread ended it just now
            raise
        return data

    def _send_unblocked(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send from the watcher's thread, which is not there to wait: where a driver does not read, another does."""
        data = self._noted(message)
        try:
            self._channel.send(data, fds, NO_WAIT)
        except MissedDeadlineTransient:
            copies = [os.dup(fd) for fd in fds]  # the caller may close his
            threading.Thread(target=self._send_late, args=(data, copies), name="nnfmq-late", daemon=True).start()

    def _send_late(self, data: bytes, fds: Sequence[int]) -> None:
        try:
            self._channel.send(data, fds)  # ends with the connection at the latest
        except (NnfmqError, OSError) as error:
            self._give_up(error)
        finally:
            close_all(fds)

    # ------------------------------------------------------------------------------------------------ receiving

    def _on_ready(self) -> None:
        try:
            frame = self._channel.receive(NO_WAIT)
        except MissedDeadlineTransient:
            return  # nothing there: what woke the watcher was taken already
        except NnfmqError as error:
            self._give_up(error)
            return
        with frame:
            try:
                self._on_frame(frame)
            except NnfmqError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, DeadObject):
            self._finish(_GONE)
            return
        _log.warning("connection to the driver closed: %s", error)
        self._finish(f"the connection to the driver was given up: {error}")

    def _on_bug(self, error: Exception) -> None:
        self._finish(f"the connection to the driver was given up after an internal error: {error!r}")

    def _on_frame(self, frame: Frame) -> None:
        count = None if frame.fds_truncated else len(frame.fds)
        message = control_protocol.decode(frame.data, sender=PeerRole.DRIVER, fds=count)
        self._connection_state.process_message(message, PeerRole.DRIVER)
        if isinstance(message, messages.HelloReply):
            self._greeting.give(message)
        elif isinstance(message, messages.Refused):
            status = message.status or ErrorStatus.GENERAL_FAILURE
            self._greeting.give(error_for_status(status, f"the driver refused: {message.message}"))
        elif isinstance(message, messages.GetMemories):
            self._give_memories(message)
        elif isinstance(message, messages.PreparationProgress):
            self._on_notice(message)
        else:
            assert isinstance(message, messages.Call)
            self._on_answer(message, frame)

    def _on_answer(self, answer: messages.Call, frame: Frame) -> None:
        _require_status(getattr(answer, "status", ErrorStatus.NONE))
        key = _Key(answer.call, type(answer))
        question = self._waiting.pop(key, None)
        if question is not None and frame.fds_truncated:
            text = "this process has no room for more descriptors (ulimit -n)"
            question.answer.give(ResourceExhaustedTransient(text))
        elif question is not None:
            try:
                if question.on_fds is not None:
                    question.on_fds(frame.detach_fds())
                if question.on_answer is not None:
                    question.on_answer(answer)
                question.answer.give(answer)
            except Exception:
                self._waiting[key] = question  # a bug, which ends the connection: whoever waits will be told so
                raise
            return
        # Whoever asked has stopped waiting, or cannot be given it.
        undone = _UNDONE.get(type(answer))
        if undone is not None and isinstance(answer, messages.StatusReply) and answer.status is ErrorStatus.NONE:
            self._send_unblocked(undone(self.new_call(), answer))

    def _on_notice(self, notice: messages.PreparationProgress) -> None:
        question = self._waiting.get(_Key(notice.call, control_protocol.NOTIFICATIONS[type(notice)]))
        if question is not None and isinstance(question.answer, Future):  # else whoever asked has stopped waiting
            question.answer.tell(notice)

    def _give_memories(self, question: messages.GetMemories) -> None:
        burst = self._bursts.get(question.burst_id)
        try:
            if burst is None:
                raise InvalidArgument(f"burst {question.burst_id} is closed")
            memories = burst.get_memories(question.slots)
            lent = tuple(map(messages.memory_to_data, memories))
            fds = [cast(SharedPool, memory).fileno() for memory in memories]
        except NnfmqError as error:
            self._send_unblocked(messages.Memories(question.call, status_for_error(error), str(error), ()))
            return
        self._send_unblocked(messages.Memories(question.call, ErrorStatus.NONE, "", lent), fds)

    # ------------------------------------------------------------------------------------------------ the end

    def _finish(self, reason: str) -> None:
        """The driver is gone, or given up: everything that waits for it learns so now."""
        with self._lock:
            if self._end is None:
                self._end = reason
            waiting, self._waiting = self._waiting, {}
            peers, self._peers = self._peers, []
            watches, self._watches = self._watches, []
            self._bursts = {}
        for watch in watches:
            watcher.remove_reader(watch)
        for peer in peers:
            watcher.notify_peer_death(peer)
        error = DeadObject(self._end)
        self._greeting.give(error)
        for question in waiting.values():
            question.answer.give(error)

    def close(self) -> None:
        """Say goodbye and hang up; open calls of other threads end with DeadObject. Harmless when repeated."""
        with self._lock:
            was_open, self._end = self._end is None, self._end or "this client is closed"
            watches, self._watches = self._watches, []
        for watch in watches:
            watcher.remove_reader(watch)  # before the driver can hang up in answer: that is no death
        if was_open and self.driver is not None:
            with contextlib.suppress(NnfmqError, OSError):  # the hang-up that follows says the same
                self._channel.send(control_protocol.encode(messages.Goodbye()), (), NO_WAIT)
        self._finish(self._end)
        if self._pid == os.getpid():
            self._channel.hang_up()  # and end the call of a thread that could not be sent
        self._channel.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        _open_connections.discard(self)

    def abandon(self) -> None:
        """In a forked child: close this copy of the socket and make every call raise."""
        # Another thread may have held the old ones. It does not exist here, and neither do those that wait.
        self._lock, self._connection_state = threading.Lock(), ConnectionState()
        self._watches, self._bursts = [], {}
        self._end = f"this client belongs to process {os.getppid()}, which forked; connect anew in the child"
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.flag.set()
        self._channel.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _level_of(interface: str) -> int:
    if interface == INTERFACE:
        return _LEVEL
    from nnfmq.hal.feature_levels import interface_level

    return interface_level(interface)


def _require_status(status: ErrorStatus) -> None:
    """Refuse a status that is in no version of the interface: only who lost a driver says DEAD_OBJECT (VAL-4)."""
    if status is ErrorStatus.DEAD_OBJECT:
        raise ProtocolError("the driver answers DEAD_OBJECT, which it cannot be")


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _abandon_all() -> None:
    for connection in list(_open_connections):
        connection.abandon()


os.register_at_fork(after_in_child=_abandon_all)
