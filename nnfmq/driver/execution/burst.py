"""Driver's end of a burst: a listener thread between two queues (HAL 1.2 `IBurstContext`, NNAPI's burst server).

    request queue → decode → fetch unknown slots from the client → bind → run → encode → result queue

A packet equal to one of the last eight skips everything but the run, as long as no slot has changed: the queues'
`Responder` answers it. A client that executes over several memories in turn, or batches of several sizes, sends these.

The listener survives whatever a client sends. It replies with GENERAL_FAILURE to a malformed packet and to invalid
counters of the request ring, with DEVICE_UNAVAILABLE to what is sent while its session drains, and with an error of
two records instead of a result that does not fit into the result ring. If the counters of the result ring are invalid,
no reply is possible: the server wakes the client, which then detects the corruption itself.

A packet carries no text and only the statuses that HIDL 1.2 has, so `last_failure` keeps what the packet could not
carry. The deadline of an execution comes beside its packet (`serialize.packets`). (BUR-1..14, BUR-18, TIM-6)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from time import monotonic_ns
from typing import Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base import watcher
from nnfmq.base.ownership import Closable
from nnfmq.base.threads import Thread
from nnfmq.base.verbose_log import vlog
from nnfmq.driver.execution.order import ClientOrder
from nnfmq.driver.execution.prepared_model import (
    BoundExecution,
    DriverPreparedModel,
    error_reply,
    raise_if_deadline_passed,
)
from nnfmq.driver.memory.quota import STACK_BYTES, ReceivedMemory, add_to_limit
from nnfmq.driver.process.trace import WORKER_TRACE
from nnfmq.driver.session.error_translation import RECOVERABLE_ERRORS, memory_shortage
from nnfmq.engines import memory as process_memory
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, RunOptions
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    QueueCorrupted,
    ResourceExhausted,
    ResourceExhaustedTransient,
)
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import MeasureTiming, OutputShape, Request
from nnfmq.observe.recorder_core import ModelRecorder
from nnfmq.observe.statistics_writer import BurstRow, unpublished_burst
from nnfmq.observe.trace_points import recorded
from nnfmq.queue import NOT_EMPTY, MessageQueue, PeerDeathFlag, PollingWindow
from nnfmq.queue.responder import RepeatedRequest
from nnfmq.serialize.codec import decode_request, encode_result
from nnfmq.serialize.execution_stats import StatsArea
from nnfmq.serialize.packets import DATUM_BYTES, DeadlineWord, RequestPacket, is_marked

__all__ = [
    "DRAINING",
    "BurstExecutor",
    "BurstServer",
    "CachingBurstExecutor",
    "DeadlineExecution",
    "GetMemories",
    "LastFailure",
]


# ----------------------------------------------------------------------------------------------------------------------
# Executor of a burst's requests: the burst's memory slots, and the binding of requests to their memory.
#
# The client chooses the slot ids and reuses them: after a slot was freed, the same id may name other memory. Therefore
# every change of a slot increments `version`, and what was derived from the slots is valid only for the version at
# which it was derived. A freed memory is closed immediately; an execution that still uses it keeps its mapping through
# the arrays (BUR-12, BUR-21).


CACHED_PACKET_BYTES_MAX = 4096
"""Larger packets are not cached, because the client chooses their size."""


class BurstExecutor(Protocol):
    """Binds a burst's requests and caches the memory of its slots (`IBurstExecutorWithCache`).

    `add_cache_entry` and `bind` are called by the listener thread, `remove_cache_entry` by any thread.
    """

    version: int
    """Incremented by each change of a slot."""

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        """Return the distinct ones of `slots` that have no cache entry, in ascending order."""
        ...

    def add_cache_entry(self, memory: ReceivedMemory, slot: int) -> None:
        """Make `memory` the memory of `slot`. Takes ownership of it."""
        ...

    def remove_cache_entry(self, slot: int) -> None:
        """Forget a slot and close its memory. Does nothing if the slot is unknown (N-REQ-4)."""
        ...

    def bind(self, request: RequestPacket) -> tuple[int, BoundExecution]:
        """Bind a request to the memory of its slots, and return the `version` of the slots that were used.

        Raises:
            InvalidArgument: If a slot is unknown or the request is invalid.
            NnfmqError: If the engine cannot bind the request.
        """
        ...

    def close(self) -> None:
        """Close all memory. Idempotent."""
        ...


class CachingBurstExecutor:
    """The `BurstExecutor` of a prepared model. Thread-safe."""

    def __init__(self, prepared: DriverPreparedModel) -> None:
        self._prepared = replace(prepared, wakes_next=False)  # the burst server does, after its reply
        self._lock = threading.Lock()
        self._memories: dict[int, ReceivedMemory] = {}
        self.version = 0

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        """See `BurstExecutor.unknown_slots`."""
        memories = self._memories  # without the lock: a dict lookup is atomic, and `bind` checks again
        return sorted({slot for slot in slots if slot not in memories})

    def add_cache_entry(self, memory: ReceivedMemory, slot: int) -> None:
        """See `BurstExecutor.add_cache_entry`. Closes the slot's previous memory."""
        with self._lock:
            previous = self._memories.pop(slot, None)
            self._memories[slot] = memory
            self.version += 1
        if previous is not None:
            previous.close()

    def remove_cache_entry(self, slot: int) -> None:
        """See `BurstExecutor.remove_cache_entry`."""
        with self._lock:
            memory = self._memories.pop(slot, None)
            self.version += 1
        if memory is not None:
            memory.close()

    def bind(self, request: RequestPacket) -> tuple[int, BoundExecution]:
        """See `BurstExecutor.bind`."""
        version, memories = self.memories(request.slots)
        return version, self._prepared.bind(Request(request.inputs, request.outputs, memories))

    def memories(self, slots: Sequence[int]) -> tuple[int, tuple[ReceivedMemory, ...]]:
        """Return the version, and the memories of `slots` at that version.

        Raises:
            InvalidArgument: If a slot is unknown.
        """
        with self._lock:
            for slot in slots:
                if slot not in self._memories:
                    raise InvalidArgument(f"memory slot {slot} is unknown: it was freed, or never given")
            return self.version, tuple(self._memories[slot] for slot in slots)

    def close(self) -> None:
        """See `BurstExecutor.close`."""
        with self._lock:
            memories, self._memories = self._memories, {}
            self.version += 1
        for memory in memories.values():
            memory.close()


class DeadlineExecution:
    """A `BoundExecution` of a request with a deadline, which the client stores in `word` before each run (BUR-18)."""

    __slots__ = ("_bound", "_options", "_word")

    def __init__(self, bound: BoundExecution, word: DeadlineWord) -> None:
        self._bound = bound
        self._word = word
        self._options = RunOptions()  # one object: creating one for each run costs more than a small model

    @property
    def recorder(self) -> ModelRecorder:
        """See `BoundExecution`."""
        return self._bound.recorder

    @property
    def engine_begin_ns(self) -> int:
        """See `BoundExecution`."""
        return self._bound.engine_begin_ns

    @property
    def engine_end_ns(self) -> int:
        """See `BoundExecution`."""
        return self._bound.engine_end_ns

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """See `BoundExecution.run`. The options are those of the deadline.

        Raises:
            MissedDeadlinePersistent: If the deadline has passed already.
            MissedDeadlineTransient: If it passes meanwhile.
        """
        deadline_ns = self._word.load()
        raise_if_deadline_passed(deadline_ns)
        self._options.deadline_ns = deadline_ns
        return self._bound.run(self._options)

    def abort(self) -> None:
        """See `BoundExecution.abort`."""
        self._bound.abort()


# ----------------------------------------------------------------------------------------------------------------------
# Driver's end of a burst: a listener thread between two queues (HAL 1.2 `IBurstContext`, NNAPI's burst server).


RING_BYTES_MAX = 1 << 20  # limits what is copied and decoded: a packet can fill the ring
_NONE = ErrorStatus.NONE  # an enum's attribute costs more than a record through the ring
_KEPT_MAX = 8  # buffers of a camera, or layouts of a client's burst: each may have intermediate results of its own
_DO_NOT_BLOCK = 0  # a deadline in the past
DRAINING = "this driver ends, and takes no new work: connect to the next one"
_log = logging.getLogger("nnfmq.burst")


GetMemories: TypeAlias = Callable[[Sequence[int]], list[ReceivedMemory]]
"""Asks the client for the memory of slots (`IBurstCallback.getMemories`). Blocks.

It returns one memory for each slot, in order; the caller owns them. It raises DeadObject if the client has exited,
or the burst is being closed, else the NnfmqError that the client replied.
"""


class LastFailure(Struct, frozen=True):
    """Text and exact status of the last failed execution; `sequence` is the number of its packet, 0 if none failed."""

    status: ErrorStatus = ErrorStatus.NONE
    message: str = ""
    sequence: int = 0


class BurstServer(Closable):
    """A running burst. Owns its listener thread, both queues and the executor. Close it, or use `with`."""

    def __init__(
        self,
        get_memories: GetMemories,
        requests: MessageQueue,
        results: MessageQueue,
        executor: BurstExecutor,
        window_ns: int,
        order: ClientOrder | None,
        statistics: BurstRow,
    ) -> None:
        self._get_memories = get_memories
        self._requests = requests
        self._results = results
        self._executor = executor
        self._window_ns = window_ns
        self._stats = StatsArea.over(results.stats_view)
        self._deadline = DeadlineWord(requests.stats_view)
        self._order = order
        self._recorder = statistics.recorder
        requests.count_waits(statistics.waits)
        self._responder = requests.responder(results, self._stats.words, executor, self, self._recorder.add)
        self._drained_from: int | None = None  # the request ring's write counter when the session began to drain
        self._handled = 0  # packets that are replied to
        self.last_failure = LastFailure()
        self.trace_base = 0  # of the ids of its requests in traces
        self._peer_death = PeerDeathFlag()
        self.peer = watcher.DeathRecipients(self._peer_death)
        self._thread = Thread(target=self._listen, name="nnfmq-burst", daemon=True)
        self._is_closed = False

    @classmethod
    def create(
        cls,
        get_memories: GetMemories,
        requests: MessageQueue,
        results: MessageQueue,
        executor: BurstExecutor | DriverPreparedModel,
        *,
        polling_window_us: float | None = None,
        statistics: BurstRow | None = None,
    ) -> BurstServer:
        """Start a listener thread that serves `requests` until `close`, or until the peer dies.

        Takes ownership of the queues and the executor, unless it raises.

        Args:
            get_memories: Gets the client's memory of slots.
            requests: The queue of request packets.
            results: The queue of result packets.
            executor: A prepared model, or an object that executes the requests in its place (BUR-13).
            polling_window_us: How long the listener polls before it sleeps; by default
                $NNFMQ_BURST_SERVER_POLLING_WINDOW.
            statistics: What counts the burst's executions and waits; by default nobody reads the counts.

        Raises:
            GeneralFailure: If a queue does not have the quantum, the event flag or the size of a burst's queue.
            ResourceExhaustedTransient: If no thread can be started.
        """
        for queue in (requests, results):
            if queue.quantum != DATUM_BYTES:
                raise GeneralFailure(f"a burst's records have {DATUM_BYTES} bytes, not {queue.quantum}")
            if queue.event_flag is None:
                raise GeneralFailure("a burst's queues need an event flag word, without which nobody can wait (BUR-6)")
            if queue.count * queue.quantum > RING_BYTES_MAX:
                raise GeneralFailure(
                    f"a burst's queue has a ring of {RING_BYTES_MAX} bytes at most; this one has "
                    f"{queue.count * queue.quantum}"
                )
        order, statistics = None, statistics or unpublished_burst()
        if isinstance(executor, DriverPreparedModel):
            order, executor = executor.order, CachingBurstExecutor(executor)
        window_ns = PollingWindow.server(polling_window_us).ns
        server = cls(get_memories, requests, results, executor, window_ns, order, statistics)
        requests.peer_death = results.peer_death = server._peer_death
        server.peer.add(requests, results)
        server._start_thread()
        return server

    def _start_thread(self) -> None:
        add_to_limit(STACK_BYTES)
        try:
            self._thread.start()
        except RuntimeError as error:
            add_to_limit(-STACK_BYTES)
            self.peer.discard(self._requests, self._results)
            raise ResourceExhaustedTransient(f"no thread could be started for the burst: {error}") from error

    def free_memory(self, slot: int) -> None:
        """Forget a slot (`IBurstContext.freeMemory`). Does nothing if it is unknown. Thread-safe."""
        self._executor.remove_cache_entry(slot)
        self._forget_executions()  # after the version was incremented; see `_keep`

    @property
    def request_count(self) -> int:
        """The number of packets that were received so far, malformed ones included."""
        return self._responder.received

    def drain(self) -> None:
        """Reject all requests that are sent from now on; those that were sent before get their results. Thread-safe.

        Idempotent. Does not block.
        """
        if self._drained_from is None:
            with suppress(BadState, QueueCorrupted):  # it is being closed; nothing can be received
                self._drained_from = self._requests.counters()[0]
                self._forget_executions()  # afterwards; see `_keep`

    @property
    def is_drained(self) -> bool:
        """Whether every request that was sent is replied to. A guess: the listener may just have received one.

        `end_listening` waits for that one.
        """
        try:
            written, read = self._requests.counters()
        except (BadState, QueueCorrupted):
            return True
        return written == read and self._handled == self._responder.received

    def end_listening(self, timeout_s: float | None = None) -> None:
        """End the listener thread; a request that it has received gets its reply first. Blocks until then. Idempotent.

        What is left in the ring is executed by nobody, and the client sends it to the next driver.
        """
        watcher.notify_peer_death(self.peer)
        self._thread.join(timeout_s)

    def close(self) -> None:
        """End the listener thread and release everything. Blocks until a running execution has ended. Idempotent."""
        self.end_listening()
        if not self._is_closed:
            self._is_closed = True
            add_to_limit(-STACK_BYTES)
        self.peer.discard(self._requests, self._results)
        self._forget_executions()
        self._executor.close()
        self._responder.close()
        self._stats.close()
        self._deadline.close()
        self._requests.close()
        self._results.close()

    # -- the listener thread ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            with np.errstate(all="ignore"):  # once for the thread: it costs more than a small model's execution
                while True:
                    self._receive_and_handle()
        except DeadObject:
            _log.debug("burst ended: the client has exited, or has closed it")

    def _receive_and_handle(self) -> None:
        # A separate function, so that while the next `serve` blocks no local variable keeps a freed slot mapped.
        try:
            packet = self._responder.serve(self._window_ns)
            if packet is not None:
                self._handle(packet)
            if WORKER_TRACE.switch[0]:  # after the reply
                responder = self._responder
                responder.notes_sent = WORKER_TRACE.note_request(self.trace_base, self._stats.words, responder.sent_ns)
        except QueueCorrupted as error:  # of the request ring: all others are replied to
            self._reply_to_corrupted_ring(error)
        finally:
            self._handled = self._responder.received
            if self._order is not None and self._order.has_chosen:
                self._order.wake_next()

    def _handle(self, packet: bytes) -> None:
        """Execute a request that equals none of those that are kept, and send its reply.

        Raises:
            DeadObject: If the client does not send its memory because it has exited, or the burst is being closed.
        """
        memory_ready_ns = 0  # in the statistics: not reached
        try:
            self._require_service()
            request = self._decode(packet)
            memory_ready_ns = monotonic_ns()
            execution = self._bind(packet, request)
        except Exception as error:  # noqa: BLE001  `fail` raises what has no reply
            self.fail(error, memory_ready_ns)
        else:
            self._stats.set_timing(NO_TIMING)
            self._responder.answer(execution, memory_ready_ns)

    def _require_service(self) -> None:
        """Raise DeviceUnavailable if the request was sent after the session began to drain."""
        if self._drained_from is not None and self._requests.counters()[1] > self._drained_from:
            raise DeviceUnavailable(DRAINING)

    # -- what the responder calls -------------------------------------------------------------------------------------

    def encode(self, request: RepeatedRequest, shapes: tuple[OutputShape, ...]) -> bytes:
        """Return the result packet of an execution that has succeeded."""
        timing = NO_TIMING
        if request.is_measured:
            bound = request.execution
            in_driver_ns = monotonic_ns() - self._responder.received_ns
            timing = Timing(bound.engine_end_ns - bound.engine_begin_ns, in_driver_ns)
        self._stats.set_timing(timing)
        return encode_result(_NONE, shapes, timing)

    def fail(self, error: Exception, memory_ready_ns: int) -> None:
        """Reply with the error of a request that has failed.

        Raises:
            DeadObject: `error`, if it is one: only `get_memories` raises it, since `bind` and `run` translate that of a
                plug-in.
            Exception: `error`, if it is none that an executor may raise.
        """
        if isinstance(error, DeadObject):
            raise error
        if isinstance(error, NnfmqError):
            failure = error
        elif isinstance(error, MemoryError):
            failure = memory_shortage(f"the execution failed{f': {error}' if str(error) else ''}")
        elif isinstance(error, RECOVERABLE_ERRORS):
            _log.error("an executor failed", exc_info=error)
            failure = GeneralFailure(f"the executor failed: {error!r}")
        else:
            raise error
        self._reply_with_error(failure, memory_ready_ns)

    def send_again(self, reply: bytes, memory_ready_ns: int) -> bool:
        """Send a reply that the result ring has not taken, or an error in its place; return whether it was the reply.

        It is also lost, and counts as sent, if the ring's counters are invalid.
        """
        if self._send(reply):
            return True
        self._recorder.add_failure()
        self._stats.count_failure()
        self._reply_too_large(reply, memory_ready_ns)
        return False

    def _decode(self, packet: bytes) -> RequestPacket:
        """Decode a packet and fetch its unknown slots from the client, all with one call.

        Raises:
            ProtocolError: If the packet is malformed.
            GeneralFailure: If the client does not return one memory for each slot; none is cached then (N-BUX-5).
            NnfmqError: What the client replied.
        """
        request = decode_request(packet)
        slots = self._executor.unknown_slots(request.slots)
        if not slots:
            return request
        memories = self._get_memories(slots)
        with ExitStack() as unused:
            for memory in memories:
                unused.callback(memory.close)
            if len(memories) != len(slots):
                raise GeneralFailure(f"the driver asked for {len(slots)} memories, the client gave {len(memories)}")
            unused.pop_all()
        for slot, memory in zip(slots, memories, strict=True):
            self._executor.add_cache_entry(memory, slot)
        return request

    def _bind(self, packet: bytes, request: RequestPacket) -> RepeatedRequest:
        with recorded("[NN_LD_PIO]bind", self.trace_base | self._responder.received % (1 << 24)):
            version, bound = self._executor.bind(request)
        if is_marked(packet):
            bound = DeadlineExecution(bound, self._deadline)
        execution = self._responder.bind(packet, version, bound, request.measure is MeasureTiming.YES)
        if len(packet) <= CACHED_PACKET_BYTES_MAX:
            self._keep(execution)
        return execution

    def _keep(self, execution: RepeatedRequest) -> None:
        """Keep an execution for packets that are equal to its own; of the others the last ones, if memory allows."""
        kept = self._responder.kept
        if process_memory.is_scarce():
            kept.clear()  # the new execution may need their memory
        kept.pop(execution.packet, None)
        for oldest in list(kept)[: 1 - _KEPT_MAX]:  # a copy: `free_memory` may clear it meanwhile
            kept.pop(oldest, None)
        kept[execution.packet] = self._responder.last = execution
        # `free_memory` in another thread increments the version, then forgets the executions. If it did that before
        # the stores, the new version is visible here; so no freed memory stays mapped (BUR-12). `drain` likewise.
        if execution.version != self._executor.version or self._drained_from is not None:
            self._forget_executions()

    def _forget_executions(self) -> None:
        self._responder.last = None
        self._responder.kept.clear()

    def _reply_with_error(self, error: NnfmqError, memory_ready_ns: int) -> None:
        if isinstance(error, ResourceExhausted):
            self._forget_executions()  # the next attempt may have their memory
        reply = error_reply(error)
        self._recorder.add_failure()
        self._note_failure(reply.status, reply.message)
        self._stats.count_failure()
        packet = encode_result(reply.status, reply.output_shapes, NO_TIMING)
        self._describe_failure(memory_ready_ns)
        if not self._send(packet):
            self._reply_too_large(packet, memory_ready_ns)

    def _reply_too_large(self, packet: bytes, memory_ready_ns: int) -> None:
        """Send an error of two records instead of `packet`. If the client reads no results, that is lost, too."""
        records = len(packet) // DATUM_BYTES
        self._note_failure(
            ErrorStatus.GENERAL_FAILURE,
            f"the result of {records} records does not fit into the result queue of {self._results.count}",
        )
        self._describe_failure(memory_ready_ns)
        self._send(encode_result(ErrorStatus.GENERAL_FAILURE, ()))

    def _describe_failure(self, memory_ready_ns: int) -> None:
        responder = self._responder
        self._stats.record(responder.received, responder.received_ns, memory_ready_ns, 0, 0)

    def _reply_to_corrupted_ring(self, error: QueueCorrupted) -> None:
        """Reply to a request that cannot be read because the ring's counters are invalid, and wait for the next one.

        The client may restore the counters. Until then every wake-up of the request ring counts as a request.
        """
        _log.info("request rejected: %s", error)
        event_flag = self._requests.event_flag
        assert event_flag is not None  # checked by `create`
        event_flag.wait(NOT_EMPTY, _DO_NOT_BLOCK)  # consume the wake-up that is being handled
        self._responder.received += 1
        self._note_failure(ErrorStatus.GENERAL_FAILURE, str(error))
        self._send(encode_result(ErrorStatus.GENERAL_FAILURE, ()))
        event_flag.wait(NOT_EMPTY)

    def _send(self, packet: bytes) -> bool:
        """Send a result packet. Return False if there is not enough space in the ring. Does not block.

        If the ring's counters are invalid, the packet is lost; the client is woken, because its wait cannot end
        otherwise.
        """
        try:
            return self._results.send(packet)
        except QueueCorrupted as error:
            _log.info("a result is lost: %s", error)
            self._note_failure(ErrorStatus.GENERAL_FAILURE, str(error))
            self._results.wake_all()
            return True

    def _note_failure(self, status: ErrorStatus, message: str) -> None:
        vlog("driver", "request %d of a burst failed: %s", self._responder.received, message)
        self.last_failure = LastFailure(status, message, self._responder.received)
