"""BurstChannel: the two message queues of a burst in one driver, and the ids by which both name memories.

Packets carry no request id, so a late result would be taken for that of the next request. After a wait that ended
without a result, the next call first receives and discards the late one, within its own deadline and before it writes
any memory. A signal handler may raise between any two steps of a call, and a task may be cancelled at each `await`.
`in_flight` is therefore set before a request is sent and cleared after its result is counted; if it is still set, the
queues' counters decide what happened.

A deadline goes to the driver beside the packet (`serialize.packets`). A result packet has only a status: the
error's text is fetched over the control channel.

If the driver dies or the model moves, the burst makes another channel. A packet that has left is never sent again
(BUR-17): `is_packet_lost` records that one has.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from nnfmq.base import watcher
from nnfmq.base.deadlines import has_passed
from nnfmq.base.ownership import Closable
from nnfmq.client.connection import trace
from nnfmq.client.connection.connection import Connection, ResultHandler
from nnfmq.client.execution.requests import to_wire_descriptor
from nnfmq.client.model.handle import ModelHandle, ModelLocation
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    OutputInsufficientSize,
    error_for_status,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import Pool
from nnfmq.observe.recorder_core import BurstCalls, SendClock
from nnfmq.queue import MessageQueue, PeerDeathFlag
from nnfmq.serialize import messages
from nnfmq.serialize.execution_stats import StatsArea
from nnfmq.serialize.packets import DATUM_BYTES, DeadlineWord, ResultPacket

if TYPE_CHECKING:
    from nnfmq.client.waiting import BlockingWait
    from nnfmq.observe.recorder_core import Calls

__all__ = ["HAS_DEADLINE", "QUEUE_RECORDS", "BurstChannel", "SlotAllocator", "TokenAllocator", "close_in_driver"]


# ----------------------------------------------------------------------------------------------------------------------
# Ids by which a burst and its driver name memories: the slots of a HIDL burst, the tokens of an AIDL burst.
#
# An allocator does not keep a memory alive. If its owner has closed or dropped it, its id is `expired`, and the burst
# makes the driver forget the id. Freed slots are reused, last in, first out; tokens never are.


class SlotAllocator:
    """Slots 0, 1, 2, ... of the memories of one burst. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[int, weakref.ref[Pool]] = {}
        self._free: list[int] = []
        self._unused = itertools.count()

    def add(self, memory: Pool) -> int:
        """Return a new slot for `memory`. Keeps only a weak reference."""
        with self._lock:
            slot = self._free.pop() if self._free else next(self._unused)
            self._memories[slot] = weakref.ref(memory)
            return slot

    def find(self, memory: Pool) -> int | None:
        """Return the slot of `memory`, or None if it has none."""
        with self._lock:
            for slot, reference in self._memories.items():
                if reference() is memory:
                    return slot
            return None

    def find_or_add(self, memory: Pool) -> int:
        """Return the slot of `memory`, a new one if it has none."""
        slot = self.find(memory)
        return self.add(memory) if slot is None else slot

    def free(self, slot: int) -> None:
        """Free a slot for reuse. Idempotent."""
        with self._lock:
            if self._memories.pop(slot, None) is not None:
                self._make_reusable(slot)

    def _make_reusable(self, slot: int) -> None:
        self._free.append(slot)

    def expired(self) -> list[int]:
        """Return the slots whose memory was closed or garbage-collected, and that are not freed yet."""
        with self._lock:
            found = [(slot, reference()) for slot, reference in self._memories.items()]
        return [slot for slot, memory in found if memory is None or getattr(memory, "closed", False)]

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`.

        Raises:
            InvalidArgument: If a slot was never used or is free, or its memory was garbage-collected.
        """
        with self._lock:
            found = [self._memories[slot]() if slot in self._memories else None for slot in slots]
        for slot, memory in zip(slots, found, strict=True):
            if memory is None:
                raise InvalidArgument(f"slot {slot} has no memory in this burst")
        return [memory for memory in found if memory is not None]


class TokenAllocator(SlotAllocator):
    """Tokens, which are never reused: a driver that missed a release cannot mistake one memory for another."""

    def _make_reusable(self, _token: int) -> None:
        pass


# ----------------------------------------------------------------------------------------------------------------------
# BurstChannel: the two message queues of a burst in one driver.


QUEUE_RECORDS = 1024  # of each queue at least, as in NNAPI's ExecutionBurstController
_RANK_MAX = 16  # of a tensor whose rank is not known, if the model has so many that the queues have to be larger
HAS_DEADLINE = 2  # a summand of an index of a burst's cached requests
_TIMED_OUT = "the timeout passed before the driver replied"
_SEND_TIMEOUT_NS = 1_000_000_000  # as `Connection.post`
_CLOSE_TIMEOUT_NS = 5_000_000_000  # the driver finishes the execution in progress first


class BurstChannel(Closable):
    """Sends request packets to the driver that has a model, and receives the results. One burst at a time uses it.

    `connection` is that to the driver, `version` the version of the model there (0 = it has none), and `burst_id` is 0
    before `configure` and after `end`. `sent_ns` is when the last request was sent, 0 if it was not. `stats` describes
    the driver's last execution. `slots` are those of the burst, which keeps them when it makes another channel. `count`
    counts an execution that has ended, with its time from call to return, and that from sending the request to its
    result. `begin` returns the time, and tells the driver that the next request is sent then. `finish` returns the time
    to the result, of a request that was sent at a given time, and counts it if the call took no longer.
    """

    __slots__ = (
        "__weakref__", "_calls", "_deadline", "_received_bytes", "_resources", "_sent_bytes", "_slots", "_window_ns",
        "begin", "burst_id", "connection", "count", "finish", "in_flight", "is_packet_lost", "peer", "requests",
        "results", "sent_ns", "stats", "trace", "version",
    )  # fmt: skip

    def __init__(self, model: ModelHandle, slots: SlotAllocator, window_ns: int) -> None:
        self.connection, self.version, self.burst_id = model.connection, 0, 0
        self.trace: trace.BurstTrace = None
        self.in_flight = False  # from before a request is sent until its result is counted
        self.is_packet_lost = False
        self.sent_ns = 0
        self._sent_bytes = self._received_bytes = 0  # the queues' counters when no request is in flight
        self._slots, self._window_ns = slots, window_ns
        self._calls: Calls | None = None  # before `configure`
        self.count: Callable[[int, int], object] = _count_nothing
        self.finish: Callable[[int, bool], int] = _latency
        self._resources = ExitStack()
        peer_death = PeerDeathFlag()
        self.peer = watcher.DeathRecipients(peer_death)
        with ExitStack() as undo:
            undo.callback(self._resources.close)
            records = _queue_records((*model.inputs, *model.outputs))
            self.requests = self._create_queue("nnfmq-requests", records, peer_death)
            self.results = self._create_queue("nnfmq-results", records, peer_death)
            self.begin = self._send_clock()
            self._deadline = DeadlineWord(self.requests.stats_view)
            self._resources.callback(self._deadline.close)
            self.stats = StatsArea.over(self.results.stats_view)
            self._resources.callback(self.stats.close)
            undo.pop_all()

    def _send_clock(self) -> Callable[[], int]:
        words = self.requests.stats_view
        if words is None:
            return time.monotonic_ns
        clock = SendClock(memoryview(words))  # its own, because a queue that nobody has closed releases `words`
        self._resources.callback(clock.close)
        return clock.now

    def _create_queue(self, label: str, records: int, peer_death: PeerDeathFlag) -> MessageQueue:
        queue = MessageQueue.create(DATUM_BYTES, records, label=label, peer_death=peer_death)
        self._resources.callback(queue.close)
        return queue

    def configure(self, location: ModelLocation, deadline_ns: int | None) -> None:
        """Configure the burst in the driver that has the model (configureExecutionBurst); blocks.

        Raises:
            NnfmqError: The error of the driver's reply.
        """
        message, fds = self._configuration(location)
        self.connection.call(message, messages.BurstConfigured, fds, deadline_ns, on_reply=self.accept)
        self.version = location.version

    def start_configuring(self, location: ModelLocation, handler: ResultHandler[messages.BurstConfigured]) -> None:
        """As `configure`, but does not block: `handler` gets the reply, which it passes to `accept` if that succeeds.

        Raises:
            NnfmqError: If the call cannot be sent.
        """
        message, fds = self._configuration(location)
        self.version = location.version
        self.connection.start_call_nonblocking(message, messages.BurstConfigured, handler, fds)

    def _configuration(self, location: ModelLocation) -> tuple[messages.ConfigureBurst, list[int]]:
        """Return the call that configures the burst, and its fds; from now on the driver's death wakes the queues."""
        self.connection = connection = location.connection
        if location.calls is not None:
            calls, self._calls = BurstCalls(location.calls, self.stats.words), location.calls
            self._resources.callback(calls.close)
            self.count, self.finish = calls.add, calls.finish
        connection.add_peer(self.peer)
        self.peer.add(self.requests, self.results)
        message = messages.ConfigureBurst(
            connection.next_call_id(),
            location.require_id(),
            to_wire_descriptor(self.requests),
            to_wire_descriptor(self.results),
        )
        return message, [self.requests.memory.fileno(), self.results.memory.fileno()]

    def accept(self, reply: messages.BurstConfigured) -> None:
        """Use the burst that the driver has configured."""
        self.burst_id = reply.burst_id
        self.trace = trace.burst_trace(self.connection, reply.burst_id, self.stats.words)
        self.connection.add_burst(reply.burst_id, self)

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`, for the driver (IBurstCallback.getMemories). Raises InvalidArgument."""
        return self._slots.get_memories(slots)

    def require_open(self) -> None:
        """Raise BadState if the channel or its client is closed, DeadObject if the driver has exited."""
        self.connection.raise_if_closed()
        if not self.burst_id:
            raise BadState("this burst is closed")

    # ------------------------------------------------------------------------------------------------ packets

    def store_deadline(self, deadline_ns: int | None) -> int:
        """Store the deadline of the next request for the driver, and return HAS_DEADLINE; 0 if there is none.

        If the interface version has no deadlines, a timeout ends the wait alone, in every execution mode.
        """
        if deadline_ns is None or not self.connection.has_deadlines:
            return 0
        if self.in_flight:
            self.drain(deadline_ns)  # the driver may not have read the word yet
        self._deadline.store(deadline_ns)
        return HAS_DEADLINE

    def exchange(self, packet: bytes, deadline_ns: int | None, begin_ns: int) -> bytes | None:
        """Send a request and return the reply; blocks. Returns None if it could not be sent, and nothing has happened.

        `begin_ns` is the time. Whatever a signal handler interrupts here, `in_flight` is True unless both counters are
        up to date.

        Raises:
            MissedDeadlineTransient: If there is no reply before the deadline.
            DeadObject: If the driver exits.
        """
        self.in_flight, self.sent_ns = True, begin_ns
        if not self.requests.send(packet):
            self.in_flight, self.sent_ns = False, 0
            return None
        try:
            reply = self.results.receive(deadline_ns, self._window_ns)
        except DeadObject:
            reply = self._last_reply()
            if not reply:
                raise self.connection.exit_error() from None
        if reply is None:
            raise self._missed_deadline(begin_ns)
        self._sent_bytes += len(packet)
        self._received_bytes += len(reply)
        self.in_flight = False
        return reply

    async def exchange_in_task(
        self, packet: bytes, deadline_ns: int | None, begin_ns: int, blocking: BlockingWait | None
    ) -> bytes | None:
        """As `exchange`; other tasks run while this one waits, unless `blocking` lets it block the loop."""
        self.in_flight, self.sent_ns = True, begin_ns
        if not self.requests.send(packet):
            self.in_flight, self.sent_ns = False, 0
            return None
        try:
            reply = None if blocking is None else await self._receive_blocking(deadline_ns, blocking)
            if reply is None:
                reply = await self.results.receive_async(deadline_ns)
        except DeadObject:
            reply = self._last_reply()
            if not reply:
                raise self.connection.exit_error() from None
        if reply is None:
            raise self._missed_deadline(begin_ns)
        self._sent_bytes += len(packet)
        self._received_bytes += len(reply)
        self.in_flight = False
        return reply

    def _missed_deadline(self, begin_ns: int) -> MissedDeadlineTransient:
        """Count the wait for an execution whose deadline has passed, and return the error."""
        if self._calls is not None:
            self._calls.add(time.monotonic_ns() - begin_ns, -1)
        return MissedDeadlineTransient(_TIMED_OUT)

    async def _receive_blocking(self, deadline_ns: int | None, blocking: BlockingWait) -> bytes | None:
        """Return the reply if it arrives while this task may block the event loop, otherwise None."""
        limit_ns = await blocking.begin()
        if not limit_ns:
            return None
        reply = self.results.receive(limit_ns if deadline_ns is None else min(limit_ns, deadline_ns), self._window_ns)
        blocking.end(reply is not None)
        return reply

    def drain(self, deadline_ns: int | None) -> None:
        """Receive and discard the result of an abandoned execution (timeout or signal), if there is one; blocks.

        Raises:
            MissedDeadlineTransient: If the result does not arrive before `deadline_ns`.
        """
        if self._has_late_result() and self.results.receive(deadline_ns, self._window_ns) is None:
            raise MissedDeadlineTransient(_TIMED_OUT)
        self._count_late_result()

    async def drain_in_task(self, deadline_ns: int | None) -> None:
        """As `drain`; other tasks run while this one waits."""
        if self._has_late_result() and await self.results.receive_async(deadline_ns) is None:
            raise MissedDeadlineTransient(_TIMED_OUT)
        self._count_late_result()

    def _has_late_result(self) -> bool:
        """Return whether an abandoned request was sent, and its result was not received."""
        was_sent = self.requests.counters()[0] != self._sent_bytes
        was_received = self.results.counters()[1] != self._received_bytes
        if was_sent and not was_received:
            # The signal may have come after the request was published and before the driver was woken. `wake_all`
            # always wakes; an ordinary wake would find the event flag's bit set and omit the system call.
            self.requests.wake_all()
            return True
        return False

    def _count_late_result(self) -> None:
        # If interrupted in between, the next call sees the request as not sent, and does not wait. The other order
        # could make it see a sent request without a result, for which it would wait forever.
        self._sent_bytes = self.requests.counters()[0]
        self._received_bytes = self.results.counters()[1]
        self.in_flight = False

    # ------------------------------------------------------------------------------------------------ errors

    def raise_error(self, result: ResultPacket, deadline_ns: int | None) -> None:
        """Fetch the text of a failed execution's error, and raise it; without the text if the driver does not reply."""
        try:
            reply = self.connection.exchange(self._error_call(), messages.BurstError, (), _text_limit_ns(deadline_ns))
        except (MissedDeadlineTransient, BadState, DeadObject):
            raise self._ending_error(result) or _error_without_text(result, deadline_ns) from None
        raise self._ending_error(result) or _error_with_text(result, reply)

    async def raise_error_in_task(self, result: ResultPacket, deadline_ns: int | None) -> None:
        """As `raise_error`; other tasks run while this one waits."""
        import asyncio  # late: it costs more to import than this package

        from nnfmq.client.task_waiting import result_of  # as above

        reply: Future[messages.BurstError] = Future()
        try:
            self.connection.start_call_nonblocking(self._error_call(), messages.BurstError, reply)
            left_s = max(0, _text_limit_ns(deadline_ns) - time.monotonic_ns()) / 1e9
            async with asyncio.timeout(left_s):
                found = await result_of(reply)
        except (TimeoutError, BadState, DeadObject):
            raise self._ending_error(result) or _error_without_text(result, deadline_ns) from None
        raise self._ending_error(result) or _error_with_text(result, found)

    def _ending_error(self, result: ResultPacket) -> DeadObject | None:
        return self.connection.ending_error(result.status)

    def _last_reply(self) -> bytes | None:
        """Return the reply that the driver has sent before it exited; note that the request is lost if there is none.

        Raises:
            DriverEnding: If the driver has left the request in the queue when it ended: nobody has executed it.
        """
        if count := self.results.available_to_read():
            return self.results.read(count)
        connection = self.connection
        written, read = self.requests.counters()
        if connection.has_left and read < written:
            connection.raise_if_closed()
        self.is_packet_lost = True
        return None

    def _error_call(self) -> messages.GetBurstError:
        return messages.GetBurstError(self.connection.next_call_id(), self.burst_id)

    # ------------------------------------------------------------------------------------------------ memories, end

    def free_slots(self, slots: Sequence[int], deadline_ns: int | None) -> None:
        """Make the driver unmap the memories of `slots`, and free these; blocks if there are any."""
        if not slots:
            return
        for slot in slots:
            self.connection.send(messages.FreeMemory(self.burst_id, slot), deadline_ns)
        # Requests travel over the queue, which may overtake the control channel: reuse a slot only after the driver has
        # replied to a later call. FreeMemory itself has no reply.
        self.connection.exchange(self._error_call(), messages.BurstError, (), deadline_ns)
        for slot in slots:
            self._slots.free(slot)

    def forget_memories(self, memories: Sequence[Pool]) -> None:
        """Make the driver unmap memories that the burst does not use any more; does not wait for it.

        Their slots are not reused before `free_slots` frees them: see there. If the driver has exited, nothing is to be
        done.
        """
        for slot in [slot for memory in memories if (slot := self._slots.find(memory)) is not None]:
            with suppress(BadState, DeadObject, MissedDeadlineTransient):
                self.connection.send(messages.FreeMemory(self.burst_id, slot), time.monotonic_ns() + _SEND_TIMEOUT_NS)

    def end(self) -> None:
        """Close the burst in the driver, which ends the execution in progress first; blocks up to 5 s. Idempotent."""
        burst_id = self.burst_id
        try:
            close_in_driver(self.connection, burst_id)
        finally:
            self._forget(burst_id)

    def end_soon(self) -> None:
        """As `end`, but does not wait for the driver. Idempotent."""
        burst_id, connection = self.burst_id, self.connection
        if burst_id and connection.is_open:
            with suppress(BadState, DeadObject):
                message = messages.CloseBurst(connection.next_call_id(), burst_id)
                connection.start_call_nonblocking(message, messages.Reply, Future())
        self._forget(burst_id)

    def _forget(self, burst_id: int) -> None:
        self.burst_id = 0
        self.connection.discard_burst(burst_id, self.peer)
        self.peer.discard(self.requests, self.results)

    def close(self) -> None:
        """Release the queues after `end`, which wakes a thread that waits for a result. Idempotent."""
        self._resources.close()


def _queue_records(tensors: Sequence[TensorInfo]) -> int:
    """Return the size of a queue: a packet has each tensor, its dimensions and its memory, and three more records."""
    return max(QUEUE_RECORDS, 3 + sum(2 + (len(tensor.shape) or _RANK_MAX) for tensor in tensors))


def _count_nothing(_client_ns: int, _latency_ns: int) -> None:
    """Count nothing: there is no burst in the driver yet."""


def _latency(begin_ns: int, _is_counted: bool) -> int:
    return time.monotonic_ns() - begin_ns


def close_in_driver(connection: Connection, burst_id: int) -> None:
    """Close a burst in the driver; waits up to 5 s for its execution in progress. Nothing if `burst_id` is 0."""
    if not burst_id or not connection.is_open:
        return
    try:
        message = messages.CloseBurst(connection.next_call_id(), burst_id)
        connection.exchange(message, messages.Reply, (), time.monotonic_ns() + _CLOSE_TIMEOUT_NS)
    except NnfmqError:
        pass  # the driver has exited, which closed the burst, or does not reply


def _text_limit_ns(deadline_ns: int | None) -> int:
    """Return until when to wait for the text of an error."""
    limit_ns = time.monotonic_ns() + _CLOSE_TIMEOUT_NS
    return limit_ns if deadline_ns is None else min(limit_ns, deadline_ns)


def _error_without_text(result: ResultPacket, deadline_ns: int | None) -> NnfmqError:
    if result.status is ErrorStatus.GENERAL_FAILURE and has_passed(deadline_ns):
        return MissedDeadlineTransient(_TIMED_OUT)  # probably the driver's status, too
    return _with_shapes(error_for_status(result.status, f"the driver replied {result.status.name}"), result)


def _error_with_text(result: ResultPacket, reply: messages.BurstError) -> NnfmqError:
    return _with_shapes(error_for_status(reply.status or result.status, reply.message), result)


def _with_shapes(error: NnfmqError, result: ResultPacket) -> NnfmqError:
    if isinstance(error, OutputInsufficientSize):
        error.output_shapes = result.output_shapes
    return error
