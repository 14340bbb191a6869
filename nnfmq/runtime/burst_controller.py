"""The client's end of a burst: fast executions of one prepared model over two message queues (HIDL 1.2).

    arrays → input memory → request packet → queue ═ driver ═ queue → result packet → output memory → arrays

The burst encodes its own request once, and remembers the last reply that was valid: an equal reply needs no decoding.

Packets carry no request id, so a late result would be taken for that of the next request. After a wait that ended
without a result, the next call first receives and discards the late one, within its own deadline and before it writes
any memory. A signal handler may raise between any two steps of a call. The flag `_in_flight` is therefore set before a
request is sent and cleared after its result is counted; if it is still set, the queues' counters decide what happened.

A request that cannot be sent as a packet is executed over the control channel instead. Nothing is sent twice (BUR-17).
A deadline goes to the driver beside the packet (`serialize.burst_deadline`). A result packet has only a status: the
error's text is fetched over the control channel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from numpy.typing import ArrayLike

from nnfmq import watcher
from nnfmq.deadlines import deadline_after, has_passed
from nnfmq.hal.errors import (
    BadState,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    OutputInsufficientSize,
    error_for_status,
)
from nnfmq.hal.summaries import clipped
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import BufferToken, ExecutionConfig, MeasureTiming, Pool, Request, RequestArgument
from nnfmq.queue import MessageQueue, PeerDeathFlag, PollingWindow
from nnfmq.runtime import client_trace
from nnfmq.runtime.array_checks import check_out, no_inputs_error
from nnfmq.runtime.burst_slots import SlotAllocator
from nnfmq.runtime.exclusive_use import CLAIM, exclusive
from nnfmq.runtime.execution_result import ExecutionInfo, ExecutionResult
from nnfmq.runtime.mapped_arrays import MappedArrays
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.runtime.model_state import HasState
from nnfmq.runtime.result_validation import validate_result
from nnfmq.runtime.sync_execution import execute_arrays, execute_request
from nnfmq.runtime.tensor_layout import Array
from nnfmq.runtime.wire_values import make_execution_config, to_wire_descriptor
from nnfmq.serialize import messages
from nnfmq.serialize.burst_deadline import DeadlineWord, marked
from nnfmq.serialize.codec import decode_result, encode_request
from nnfmq.serialize.datum import DATUM_BYTES
from nnfmq.serialize.execution_stats import StatsArea
from nnfmq.serialize.packets import ResultPacket
from nnfmq.uncopyable import Uncopyable

QUEUE_RECORDS = 1024  # of each queue, as in NNAPI's ExecutionBurstController
_MAX_CACHED_BYTES = 4096  # larger replies are decoded each time
_TIMED_OUT = "the timeout passed before the driver replied"
_CLOSE_TIMEOUT_NS = 5_000_000_000  # the driver finishes the execution in progress first
_IS_MEASURED, _HAS_DEADLINE = 1, 2  # summands of an index of a burst's cached requests


@dataclass(slots=True)
class CachedRequest:
    """The burst's request over its own memory, encoded once for each combination of `measure` and "has a deadline"."""

    packet: bytes
    output_args: tuple[RequestArgument, ...]
    is_measured: bool
    valid_reply: bytes = b""
    """The last reply that was decoded, validated, successful and without times. No reply is empty."""


class Burst(Uncopyable, HasState):
    """A burst. Close it, or use `with`. One execution at a time: a second thread's call is rejected, not queued.

    `inputs` and `outputs` are arrays over the shared memory itself: write the inputs, call `execute()` without
    arguments, and read the outputs, and nothing is copied. Do not write the inputs or use the outputs while an
    execution runs, nor after a call that ended early until the next call has returned. Without arguments `execute`
    needs inputs: from an earlier call, or because the application has accessed `inputs`. The states of a model with
    states are this burst's own; a call that raises does not change them.
    """

    def __init__(self, model: ModelHandle, window_ns: int) -> None:
        self._model, self._connection = model, model.connection
        self._window_ns = window_ns
        self._resources = ExitStack()
        self._claims: dict[int, object] = {}  # see `exclusive_use`
        self._in_flight = False  # from before a request is sent until its result is counted
        self._sent_bytes = self._received_bytes = 0  # the queues' counters when no request is in flight
        self._burst_id = 0
        self._arrays: MappedArrays | None = None
        self._cached_requests: tuple[CachedRequest, ...] = ()  # see `_HAS_DEADLINE`; empty without own memory
        self._slots = SlotAllocator()
        self._latency_ns = 0  # of the last execution
        self._sent_bytes_then = 0  # `_sent_bytes` after it
        self._timing = NO_TIMING
        self._info: ExecutionInfo | None = None  # made of these by `last`
        self._trace: client_trace.BurstTrace = None
        self._peer_death = PeerDeathFlag()
        self.peer = watcher.DeathRecipients(self._peer_death)
        self._requests, self._results = self._create_queue("nnfmq-requests"), self._create_queue("nnfmq-results")
        self._deadline = DeadlineWord(self._requests.stats_view)
        self._resources.callback(self._deadline.close)
        self._inputs: tuple[Array, ...] = ()
        self._has_inputs = False
        self.outputs: tuple[Array, ...] = ()

    @classmethod
    def configure(
        cls,
        model: ModelHandle,
        polling_window_us: float | None = None,
        deadline_ns: int | None = None,
        *,
        with_memory: bool = True,
        arrays: MappedArrays | None = None,
    ) -> Self:
        """Create the queues and memories, and configure the burst in the driver (configureExecutionBurst); blocks.

        Without memory a burst only has `execute_request`. That of `arrays` remains the caller's.

        Raises:
            InvalidArgument: If the burst needs memory, and a shape is not fully known.
            NnfmqError: The error of the driver's reply.
        """
        burst = cls(model, PollingWindow.controller(polling_window_us).ns)
        try:
            if with_memory:
                burst._use_memory(arrays or MappedArrays.create(model, burst._resources, "a burst"))
            burst._open(deadline_ns)
        except BaseException:
            burst.close()
            raise
        return burst

    def _create_queue(self, label: str) -> MessageQueue:
        queue = MessageQueue.create(DATUM_BYTES, QUEUE_RECORDS, label=label, peer_death=self._peer_death)
        self._resources.callback(queue.close)
        return queue

    def _use_memory(self, arrays: MappedArrays) -> None:
        self._arrays, self._inputs, self.outputs, self._state = arrays, arrays.inputs, arrays.outputs, arrays.state
        slots = [self._slots.add(memory) for memory in arrays.memories]
        inputs, outputs = arrays.request.inputs, arrays.request.outputs
        packets = [encode_request(inputs, outputs, slots, measure) for measure in (MeasureTiming.NO, MeasureTiming.YES)]
        packets += [marked(packet) for packet in packets]
        self._cached_requests = tuple(
            CachedRequest(packet, outputs, is_measured)
            for packet, is_measured in zip(packets, (False, True, False, True), strict=True)
        )

    def _open(self, deadline_ns: int | None) -> None:
        self._stats = StatsArea.over(self._results.stats_view)
        self._resources.callback(self._stats.close)
        self._connection.add_peer(self.peer)
        self.peer.add(self._requests, self._results)
        message = messages.ConfigureBurst(
            self._connection.next_call_id(),
            self._model.model_id,
            to_wire_descriptor(self._requests),
            to_wire_descriptor(self._results),
        )
        fds = [self._requests.memory.fileno(), self._results.memory.fileno()]
        self._connection.call(message, messages.BurstConfigured, fds, deadline_ns, on_reply=self._on_configured)

    def _on_configured(self, reply: messages.BurstConfigured) -> None:
        self._burst_id = reply.burst_id
        self._trace = client_trace.burst_trace(self._connection, reply.burst_id, self._stats.words)
        self._connection.add_burst(reply.burst_id, self)

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Return the memories of `slots`, for the driver (IBurstCallback.getMemories). Raises InvalidArgument."""
        return self._slots.get_memories(slots)

    def __repr__(self) -> str:
        is_open = self._burst_id and self._connection.is_open
        state = ", closed" if not is_open else "" if self._arrays is not None else ", without memory"
        return f"<Burst on {clipped(repr(self._model.device))}{state}: {self._model.signature}>"

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory; empty without own memory, and once closed."""
        self._has_inputs = True  # what the application does with the arrays cannot be seen from here
        return self._inputs

    def discard_inputs(self) -> None:
        """Require new inputs for the next `execute`, and begin it with the initial states. For a burst's next user."""
        self._has_inputs = False
        self.reset_state()

    # ------------------------------------------------------------------------------------------------ executing

    def execute(
        self,
        *inputs: ArrayLike,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array, ...]:
        """Run the model once and return its outputs; blocks.

        Args:
            inputs: One array for each input, of its shape and dtype; or none at all, if `self.inputs` were filled.
            out: Arrays to fill and return. With `burst.outputs` nothing is copied. None = return new arrays.
            measure: Whether to measure the HAL's times; see `last`.
            timeout: In seconds; also the execution's deadline. None = no limit, 0 = has passed.

        Raises:
            InvalidArgument: If an array or their number is wrong, there are no inputs yet, or the burst is closed.
            BadState: If another thread is executing.
            MissedDeadline: If the timeout passes. The driver ends the execution at its next check; the next call
                first waits for that. If the interface version has no deadlines, the execution continues.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        # As `exclusive` does it, spelled out: forwarding the arguments takes a tenth of a null model's round trip.
        claims, claim = self._claims, object()
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            return self._execute(inputs, out, _IS_MEASURED if measure else 0, timeout)
        finally:
            if self._trace is not None:
                self._trace.end()
            try:
                if claims[CLAIM] is claim:
                    del claims[CLAIM]
            except KeyError:
                pass

    def _execute(
        self, inputs: Sequence[ArrayLike], out: Sequence[Array] | None, kind: int, timeout: float | None
    ) -> tuple[Array, ...]:
        self._connection.raise_if_closed()  # in a forked child the burst looks open, but the parent uses its memory
        if self._trace is not None:
            self._trace.begin()
        arrays = self._arrays
        if arrays is None:
            self._require_open()
            raise InvalidArgument("this burst was configured without memory: it only has execute_request")
        if not inputs and not self._has_inputs and arrays.inputs:
            raise no_inputs_error(arrays.input_infos, "burst.execute")
        if out is not None and out is not arrays.outputs:
            check_out(arrays.output_infos, out)
        deadline_ns = None
        if timeout is not None:
            deadline_ns = deadline_after(timeout)
            kind += self._store_deadline(deadline_ns)
        if self._in_flight:
            self.drain_late_result(deadline_ns)
        if inputs:
            arrays.copy_in(inputs)
            self._has_inputs = True
        state = arrays.state
        if state is not None:
            state.begin()
        request, begin_ns = self._cached_requests[kind], time.monotonic_ns()
        reply = self._exchange(request.packet, deadline_ns)
        if reply is None:
            self._fall_back_to_sync(arrays, request, begin_ns, deadline_ns)
        elif reply == request.valid_reply:  # the only comparison of a reply with an earlier one
            self._latency_ns, self._info = time.monotonic_ns() - begin_ns, None
            self._timing, self._sent_bytes_then = NO_TIMING, self._sent_bytes
        else:
            result = self._decode(reply, request.output_args, request.is_measured)
            self._latency_ns, self._info = time.monotonic_ns() - begin_ns, None
            self._timing, self._sent_bytes_then = result.timing, self._sent_bytes
            if result.status is not ErrorStatus.NONE:
                self._raise_error(result, deadline_ns)
            if result.timing == NO_TIMING and len(reply) <= _MAX_CACHED_BYTES:
                request.valid_reply = reply
        if state is not None:
            state.advance()
        return arrays.outputs if out is arrays.outputs else arrays.copy_out(out)

    def _store_deadline(self, deadline_ns: int | None) -> int:
        """Store the deadline of the next request for the driver, and return _HAS_DEADLINE; 0 if there is none.

        If the interface version has no deadlines, a timeout ends the wait alone, in every execution mode.
        """
        if deadline_ns is None or not self._connection.has_deadlines:
            return 0
        if self._in_flight:
            self.drain_late_result(deadline_ns)  # the driver may not have read the word yet
        self._deadline.store(deadline_ns)
        return _HAS_DEADLINE

    def _require_open(self) -> None:
        self._connection.raise_if_closed()
        if not self._burst_id:
            raise InvalidArgument("this burst is closed")

    def _busy_error(self) -> Exception:
        self._require_open()
        return BadState("this burst is executing in another thread; make one burst for each")  # BUR-16

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request and return the reported shapes and the timing; blocks. Borrows the request's pools.

        A pool gets a slot, which it keeps until `free_memory`, or until it is closed or garbage-collected. A request
        that a packet cannot carry (a loop timeout, hints, managed buffers) is executed over the control channel
        (BUR-18). The driver validates the request. Raises as `execute`.
        """
        memories = [pool for pool in request.pools if not isinstance(pool, BufferToken)]
        needs_message = replace(config, measure=MeasureTiming.NO) != ExecutionConfig()
        deadline_ns, result = deadline_after(timeout), None
        if not needs_message and len(memories) == len(request.pools):
            result = self._execute_packet(request, memories, config.measure, deadline_ns)
        if result is None:
            result = execute_request(self._model, request, config, deadline_ns)
        return result

    @exclusive
    def _execute_packet(
        self, request: Request, memories: Sequence[Pool], measure: MeasureTiming, deadline_ns: int | None
    ) -> ExecutionResult | None:
        """Execute a request over the queues. Returns None if it could not be sent."""
        self._require_open()
        if self._in_flight:
            self.drain_late_result(deadline_ns)
        self._free_slots(self._slots.expired(), deadline_ns)
        slots = [self._slots.find_or_add(memory) for memory in memories]
        packet = encode_request(request.inputs, request.outputs, slots, measure)
        if self._store_deadline(deadline_ns):
            packet = marked(packet)
        reply = self._exchange(packet, deadline_ns)
        if reply is None:
            return None
        result = self._decode(reply, request.outputs, measure is MeasureTiming.YES)
        if result.status is not ErrorStatus.NONE:
            self._raise_error(result, deadline_ns)
        return ExecutionResult(result.output_shapes, result.timing)

    def _exchange(self, packet: bytes, deadline_ns: int | None) -> bytes | None:
        """Send a request and return the reply. Returns None if it could not be sent, and nothing has happened.

        Whatever a signal handler interrupts here, `_in_flight` is True unless both counters are up to date.
        """
        self._in_flight = True
        if not self._requests.send(packet):
            self._in_flight = False
            return None
        if self._trace is not None:
            self._trace.sent()
        reply = self._results.receive(deadline_ns, self._window_ns)
        if reply is None:
            raise MissedDeadlineTransient(_TIMED_OUT)
        if self._trace is not None:
            self._trace.received()
        self._sent_bytes += len(packet)
        self._received_bytes += len(reply)
        self._in_flight = False
        return reply

    def drain_late_result(self, deadline_ns: int | None) -> None:
        """Receive and discard the result of an abandoned execution (timeout or signal), if there is one; blocks.

        Raises:
            MissedDeadlineTransient: If the result does not arrive before `deadline_ns`.
        """
        was_sent = self._requests.counters()[0] != self._sent_bytes
        was_received = self._results.counters()[1] != self._received_bytes
        if was_sent and not was_received:
            # The signal may have come after the request was published and before the driver was woken. `wake_all`
            # always wakes; an ordinary wake would find the event flag's bit set and omit the system call.
            self._requests.wake_all()
            if self._results.receive(deadline_ns, self._window_ns) is None:
                raise MissedDeadlineTransient(_TIMED_OUT)
        # If interrupted in between, the next call sees the request as not sent, and does not wait. The other order
        # could make it see a sent request without a result, for which it would wait forever.
        self._sent_bytes = self._requests.counters()[0]
        self._received_bytes = self._results.counters()[1]
        self._in_flight = False

    def _decode(self, reply: bytes, output_args: Sequence[RequestArgument], is_measured: bool) -> ResultPacket:
        """Return the validated result. Raises ProtocolError."""
        result = decode_result(reply)
        validate_result(
            self._model.outputs, output_args, result.status, result.output_shapes, result.timing, is_measured
        )
        return result

    def _fall_back_to_sync(
        self, arrays: MappedArrays, request: CachedRequest, begin_ns: int, deadline_ns: int | None
    ) -> None:
        """Execute over the control channel, because the packet could not be sent (BUR-17).

        Uses other memory: an execution that continues after its deadline must not write into the burst's memory.
        """
        config = make_execution_config(request.is_measured, None)
        _, timing = execute_arrays(self._model, arrays.all_inputs, arrays.all_outputs, config, deadline_ns)
        latency_ns = time.monotonic_ns() - begin_ns
        self._info = ExecutionInfo(latency_ns, latency_ns, 0, 0, timing)

    def _raise_error(self, result: ResultPacket, deadline_ns: int | None) -> None:
        """Fetch the text of a failed execution's error, and raise it; without the text if the driver does not reply."""
        limit_ns = time.monotonic_ns() + _CLOSE_TIMEOUT_NS
        try:
            message = messages.GetBurstError(self._connection.next_call_id(), self._burst_id)
            limit_ns = limit_ns if deadline_ns is None else min(limit_ns, deadline_ns)
            reply = self._connection.exchange(message, messages.BurstError, (), limit_ns)
        except MissedDeadlineTransient:
            if result.status is ErrorStatus.GENERAL_FAILURE and has_passed(deadline_ns):
                raise MissedDeadlineTransient(_TIMED_OUT) from None  # probably the driver's status, too
            error = error_for_status(result.status, f"the driver replied {result.status.name}")
        else:
            error = error_for_status(reply.status or result.status, reply.message)
        if isinstance(error, OutputInsufficientSize):
            error.output_shapes = result.output_shapes
        raise error

    @exclusive
    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Make the driver unmap a memory that was a pool of `execute_request`; blocks. Idempotent.

        Raises:
            BadState: If another thread is executing.
            InvalidArgument: If the burst is closed.
            MissedDeadlineTransient: If `timeout` (seconds; None = no limit) passes.
            DeadObject: If the driver exits.
        """
        if not self._burst_id:
            raise InvalidArgument("this burst is closed")
        slot = self._slots.find(memory)
        if slot is not None:
            self._free_slots([slot], deadline_after(timeout))

    def _free_slots(self, slots: Sequence[int], deadline_ns: int | None) -> None:
        if not slots:
            return
        for slot in slots:
            self._connection.send(messages.FreeMemory(self._burst_id, slot), deadline_ns)
        # Requests travel over the queue, which may overtake the control channel: reuse a slot only after the driver has
        # replied to a later call. FreeMemory itself has no reply.
        message = messages.GetBurstError(self._connection.next_call_id(), self._burst_id)
        self._connection.exchange(message, messages.BurstError, (), deadline_ns)
        for slot in slots:
            self._slots.free(slot)

    # ------------------------------------------------------------------------------------------------ durations, end

    @property
    def last(self) -> ExecutionInfo:
        """The durations of the last `execute`. Raises GeneralFailure before the first."""
        if self._info is None:
            self._info = self._read_stats()
        return self._info

    def _read_stats(self) -> ExecutionInfo:
        latency_ns = self._latency_ns
        if not latency_ns:
            raise GeneralFailure("nothing was executed on this burst yet")
        stats = self._stats.read()
        # Both cached packets have the same length, so this is the number of requests.
        if stats.sequence != self._sent_bytes_then // len(self._cached_requests[0].packet):
            # These are another execution's: a later one of a call that ended early.
            return ExecutionInfo(latency_ns, latency_ns, 0, 0, self._timing)
        timing = stats.timing if self._timing != NO_TIMING else NO_TIMING  # the packet's is rounded
        return ExecutionInfo.within(latency_ns, stats.driver_ns, stats.engine_ns, timing)

    def close(self) -> None:
        """Close the burst here and in the driver; waits up to 5 s for an execution in progress. Idempotent."""
        burst_id = self._burst_id
        try:
            if burst_id and self._connection.is_open:
                message = messages.CloseBurst(self._connection.next_call_id(), burst_id)
                self._connection.exchange(message, messages.Reply, (), time.monotonic_ns() + _CLOSE_TIMEOUT_NS)
        except NnfmqError:
            pass  # the driver has exited or does not reply
        finally:
            self._burst_id = 0
            self._connection.discard_burst(burst_id, self.peer)
            self.peer.discard(self._requests, self._results)
            if self._latency_ns and self._info is None:
                self._info = self._read_stats()  # for `last` after closing
            self._inputs = self.outputs = ()
            self._detach_state()
            self._arrays = None  # its arrays would keep the memory mapped
            self._resources.close()  # wakes a thread that waits here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
