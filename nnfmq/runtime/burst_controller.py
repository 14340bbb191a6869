"""The application's end of a burst: a series of quick executions of one prepared model over two queues (HAL 1.2).

    arrays → input memory → request packet → ring ═ driver ═ ring → result packet → output memory → arrays

The packet is the same each time, so it is made once. Packets carry no id: after a wait that ended without a result the
burst is *busy*, and the next call first takes the late result, within its own deadline, before it touches any memory.
An exception from a signal handler can come between any two steps, so what was sent and what was taken is then read from
the rings' counters, never from a flag beside them.
A packet that cannot be sent goes the ordinary way; once one was sent nothing is ever sent twice (BUR-17). A result
packet carries no text: what went wrong is asked for over the control channel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from nnfmq import watcher
from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    OutputInsufficientSize,
    error_for_status,
)
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import BufferToken, ExecutionConfig, MeasureTiming, Pool, Request, RequestArgument
from nnfmq.memory import Memory
from nnfmq.queue import MessageQueue, PeerDeathFlag, PollingWindow
from nnfmq.runtime import tensor_layout
from nnfmq.runtime.burst_slots import SlotAllocator
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.result_validation import validate_result
from nnfmq.runtime.tensor_layout import Array
from nnfmq.serialize import messages
from nnfmq.serialize.codec import Decoder, decode_result, encode_request
from nnfmq.serialize.datum import DATUM_BYTES
from nnfmq.serialize.execution_stats import StatsArea
from nnfmq.serialize.packets import ResultPacket

QUEUE_RECORDS = 1024  # each way, as the HAL's own client
_NONE = ErrorStatus.NONE  # an attribute of an enum costs more than a record through the ring
_CLOSE_NS = 5_000_000_000  # the driver ends a running execution first
_REQUESTS, _RESULTS, _INPUTS, _OUTPUTS = "nnfmq-requests", "nnfmq-results", "nnfmq-inputs", "nnfmq-outputs"


@dataclass(frozen=True, slots=True)
class ExecutionInfo:
    """Where the time of one burst execution went, in nanoseconds; 0 where the driver did not say.

    latency_ns = queue_ns (both queues, waking included) + driver_ns (decoding, memory, answering) + engine_ns.
    `timing` holds the HAL's two durations if `measure` was asked for.
    """

    latency_ns: int
    queue_ns: int
    driver_ns: int
    engine_ns: int
    timing: Timing = NO_TIMING


class Burst:
    """A burst. Close it, or use `with`. One execution at a time: a second thread is refused, not queued.

    `inputs` and `outputs` are arrays over the shared memory itself: write the former, call `execute()` without
    arguments, read the latter, and nothing is copied. They must not be written or believed while an execution runs,
    nor after a call that ended early, until the next has returned.
    """

    def __init__(self, connection: Connection, model: PreparedModel, window_ns: int) -> None:
        self._connection = connection
        self._model = model
        self._window_ns = window_ns
        self._resources = ExitStack()
        self._user: object = None  # the call that executes now
        self._is_settled = True  # False from before a request is sent until its result was taken
        self._sent_bytes = self._taken_bytes = 0  # the two rings' counters when it was settled last
        self._burst_id = 0
        self._packets: list[bytes] = []  # none where the burst has no memory of its own
        self._slots = SlotAllocator()
        self._decoder = Decoder(decode_result)
        self._places: tuple[RequestArgument, ...] = ()  # of its own outputs
        self._good: ResultPacket | None = None  # the last untimed result that is known to be true
        self._latency_ns = 0
        self._sequence = 0  # of that execution, as the driver counts
        self._timing = NO_TIMING
        self._info: ExecutionInfo | None = None  # of the last execution, once somebody asked
        self._peer_death = PeerDeathFlag()
        self.peer = watcher.DeathRecipients(self._peer_death)
        self._requests, self._results = self._queue(_REQUESTS), self._queue(_RESULTS)
        self.inputs: tuple[Array, ...] = ()
        self.outputs: tuple[Array, ...] = ()

    @classmethod
    def configure(
        cls,
        connection: Connection,
        model: PreparedModel,
        polling_window_us: float | None = None,
        deadline_ns: int | None = None,
        *,
        with_memory: bool = True,
    ) -> Self:
        """Create the queues and memories and configure the burst in the driver (configureExecutionBurst); blocks.

        Without memory of its own a burst only takes `execute_request`. Raises InvalidArgument where memory has to be
        made and a shape is not fully known, and what the driver answers.
        """
        burst = cls(connection, model, PollingWindow.controller(polling_window_us).ns)
        try:
            if with_memory:
                burst._make_memory()
            burst._open(deadline_ns)
        except BaseException:
            burst.close()
            raise
        return burst

    def _open(self, deadline_ns: int | None) -> None:
        self._stages = StatsArea.over(self._results.stats_view)
        self._resources.callback(self._stages.close)
        self._connection.add_peer(self.peer)
        self.peer.add(self._requests, self._results)
        message = messages.ConfigureBurst(
            self._connection.new_call(),
            self._model.model_id,
            to_wire_descriptor(self._requests),
            to_wire_descriptor(self._results),
        )
        fds = [self._requests.memory.fileno(), self._results.memory.fileno()]
        self._connection.call(message, messages.BurstConfigured, fds, deadline_ns, on_answer=self._configured)

    def _configured(self, answer: messages.BurstConfigured) -> None:
        self._burst_id = answer.burst_id
        self._connection.add_burst(answer.burst_id, self)

    def _queue(self, label: str) -> MessageQueue:
        queue = MessageQueue.create(DATUM_BYTES, QUEUE_RECORDS, label=label, peer_death=self._peer_death)
        self._resources.callback(queue.close)
        return queue

    def _make_memory(self) -> None:
        """Lay out one memory for the inputs, which the driver can only read, and one for the outputs."""
        tensor_layout.require_fixed_shapes("input", self._model.inputs)
        tensor_layout.require_fixed_shapes("output", self._model.outputs)
        input_shapes = [info.shape for info in self._model.inputs]
        output_shapes = [info.shape for info in self._model.outputs]
        inputs, input_bytes = tensor_layout.layout(self._model.inputs, input_shapes, 0)
        outputs, output_bytes = tensor_layout.layout(self._model.outputs, output_shapes, 1)
        self._places = outputs
        source = self._resources.enter_context(Memory.create(input_bytes, _INPUTS, one_writer=True))
        sink = self._resources.enter_context(Memory.create(output_bytes, _OUTPUTS))
        self._pools = (source, sink)
        self.inputs = _views(source, inputs, self._model.inputs)
        self.outputs = _views(sink, outputs, self._model.outputs)
        slots = [self._slots.add(memory) for memory in self._pools]
        self._packets = [encode_request(inputs, outputs, slots, measure) for measure in MeasureTiming]

    def get_memories(self, slots: Sequence[int]) -> list[Pool]:
        """Answer the driver's question (IBurstCallback.getMemories)."""
        return self._slots.get_memories(slots)

    # ------------------------------------------------------------------------------------------------ executing

    def execute(
        self,
        *inputs: ArrayLike,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array, ...]:
        """Run the model once and return its outputs; blocks.

        Takes one array per input, of its shape and dtype, or none at all where `inputs` were filled in place. Returns
        new arrays that the caller owns, or fills and returns those of `out` (which may be `burst.outputs`: no copy).
        `timeout` in seconds bounds the wait: None = no limit, 0 = do not wait.

        Raises InvalidArgument (shape, dtype, count, in use by another thread), MissedDeadlineTransient (the execution
        goes on; the next call waits for it first), DeadObject, or what the driver answered.
        """
        self._connection.raise_if_closed()  # first of all: in a forked child the memory is still the parent's
        if not self._burst_id:
            raise InvalidArgument("this burst is closed")
        me = object()
        try:
            # Plain assignments, and inside the try: a lock taken just before it stays taken if a signal comes between.
            if self._user is None:
                self._user = me
            if self._user is not me:
                raise InvalidArgument("this burst is executing in another thread; make one burst for each")
            return self._execute(inputs, out, bool(measure), timeout)
        finally:
            if self._user is me:
                self._user = None

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute one request as the HAL has it; its pools are nnfmq memories and stay the caller's. Blocks.

        Return the shapes that the driver reports, none where it reports none, and the timing. Pools get slots that they
        keep until `free_memory`, or until they are closed or dropped. What a packet cannot say (a loop timeout, hints,
        buffers of the driver's) goes the ordinary way (BUR-18). Raises as `execute`; what is wrong with the request,
        the driver says.
        """
        memories = [pool for pool in request.pools if not isinstance(pool, BufferToken)]
        says_more = replace(config, measure=MeasureTiming.NO) != ExecutionConfig()
        if says_more or len(memories) < len(request.pools):
            return self._model.execute_request(request, config, timeout=timeout)
        self._connection.raise_if_closed()
        with self._only_user():
            deadline_ns = deadline_after(timeout)
            if not self._is_settled:
                self._settle(deadline_ns)
            self._free(self._slots.gone(), deadline_ns)
            slots = [self._slots.number_of(pool) for pool in memories]
            result = self._exchange(encode_request(request.inputs, request.outputs, slots, config.measure), deadline_ns)
            if result is None:
                return self._model.execute_request(request, config, timeout=timeout)
            self._judge(result, request.outputs, config.measure is MeasureTiming.YES)
            if result.status is not _NONE:
                self._raise(result, deadline_ns)
            return ExecutionResult(result.output_shapes, result.timing)

    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Let the driver forget a memory that was a pool of `execute_request`; an unknown one is no error. Blocks."""
        with self._only_user():
            slot = self._slots.known(memory)
            if slot is not None:
                self._free([slot], deadline_after(timeout))

    def _free(self, slots: Sequence[int], deadline_ns: int | None) -> None:
        if not slots:
            return
        for slot in slots:
            self._connection.send(messages.FreeMemory(self._burst_id, slot), deadline_ns)
        # Requests travel another way: a slot may stand for something else only once the driver has answered this.
        message = messages.GetBurstError(self._connection.new_call(), self._burst_id)
        self._connection.ask(message, messages.BurstError, (), deadline_ns)
        for slot in slots:
            self._slots.free(slot)

    @contextmanager
    def _only_user(self) -> Iterator[None]:
        if not self._burst_id:
            raise InvalidArgument("this burst is closed")
        me = object()
        try:
            if self._user is None:
                self._user = me
            if self._user is not me:
                raise InvalidArgument("this burst is executing in another thread; make one burst for each")
            yield
        finally:
            if self._user is me:
                self._user = None

    def _execute(
        self, given: Sequence[ArrayLike], out: Sequence[Array] | None, measure: bool, timeout: float | None
    ) -> tuple[Array, ...]:
        inputs, outputs = self.inputs, self.outputs  # another thread may close the burst meanwhile
        deadline_ns = None if timeout is None else deadline_after(timeout)
        if out is not None and out is not outputs:
            tensor_layout.check_out(self._model.outputs, out)
        if not self._is_settled:
            self._settle(deadline_ns)
        if given:
            self._copy_in(given, inputs)
        self._run(measure, deadline_ns)
        return _copied_out(out, outputs)

    def _settle(self, deadline_ns: int | None) -> None:
        """Take the late result of an execution that was given up: it must not pass for the next one's."""
        was_sent = self._requests.counters()[0] != self._sent_bytes
        was_taken = self._results.counters()[1] != self._taken_bytes
        if was_sent and not was_taken:
            # The signal may have come between publishing the request and waking the driver. A plain wake would see
            # its bit set and leave out the system call.
            self._requests.wake_all()
            self._receive(deadline_ns)
        self._sent_bytes = self._requests.counters()[0]  # this one first: the other order could wait for ever
        self._taken_bytes = self._results.counters()[1]
        self._is_settled = True

    def _copy_in(self, given: Sequence[ArrayLike], inputs: Sequence[Array]) -> None:
        if len(given) != len(inputs):
            tensor_layout.check_count("input", self._model.inputs, len(given))
        for target, value in zip(inputs, given, strict=True):
            if type(value) is not np.ndarray or value.dtype != target.dtype or value.shape != target.shape:
                self._convert_in(given, inputs)
                return
            target[...] = value

    def _convert_in(self, given: Sequence[ArrayLike], inputs: Sequence[Array]) -> None:
        for target, info, value in zip(inputs, self._model.inputs, given, strict=True):
            np.copyto(target, tensor_layout.checked_array(info, value), casting="same_kind")

    def _run(self, measure: bool, deadline_ns: int | None) -> None:
        begin_ns = time.monotonic_ns()
        try:
            request = self._packets[measure]
        except IndexError:
            raise InvalidArgument("this burst has no memory of its own: it takes execute_request alone") from None
        self._is_settled = False
        if not self._requests.send(request):
            self._is_settled = True
            self._run_the_ordinary_way(measure, begin_ns, deadline_ns)
            return
        packet = self._receive(deadline_ns)
        self._sent_bytes += len(request)
        self._taken_bytes += len(packet)
        self._is_settled = True
        result = self._decoder.decode(packet)
        if result is not self._good:
            self._judge(result, self._places, measure)
        self._latency_ns, self._timing, self._info = time.monotonic_ns() - begin_ns, result.timing, None
        self._sequence = self._sent_bytes // len(request)  # both packets have the same length
        if result.status is not _NONE:
            self._raise(result, deadline_ns)

    def _exchange(self, request: bytes, deadline_ns: int | None) -> ResultPacket | None:
        """Return the result of `request`; None where it could not be sent, so that nothing has happened."""
        self._is_settled = False
        if not self._requests.send(request):
            self._is_settled = True
            return None
        packet = self._receive(deadline_ns)
        self._sent_bytes += len(request)
        self._taken_bytes += len(packet)
        self._is_settled = True
        return self._decoder.decode(packet)

    def _judge(self, result: ResultPacket, places: Sequence[RequestArgument], is_measured: bool) -> None:
        """Raise ProtocolError for a result that no honest driver gives."""
        validate_result(self._model.outputs, places, result.status, result.output_shapes, result.timing, is_measured)
        if places is self._places and result.timing == NO_TIMING:
            self._good = result

    def _receive(self, deadline_ns: int | None) -> bytes:
        packet = self._results.receive(deadline_ns, self._window_ns)
        if packet is None:
            raise MissedDeadlineTransient("the timeout passed before the driver answered; the execution goes on")
        return packet

    def _run_the_ordinary_way(self, measure: bool, begin_ns: int, deadline_ns: int | None) -> None:
        """The packet could not be sent, so nothing has happened yet: execute over the control channel (BUR-17).

        In memory of its own: an execution that outlives its deadline must not write into the burst's.
        """
        timeout = None if deadline_ns is None else max(0.0, (deadline_ns - begin_ns) / 1e9)
        self._model.execute(*self.inputs, out=self.outputs, measure=measure, timeout=timeout)
        latency_ns = time.monotonic_ns() - begin_ns
        self._info = ExecutionInfo(latency_ns, latency_ns, 0, 0, self._model.last_timing)

    def _raise(self, result: ResultPacket, deadline_ns: int | None) -> None:
        """Raise what the driver says of the failed execution; what the packet said is all we have if it is silent."""
        patience_ns = time.monotonic_ns() + _CLOSE_NS
        try:
            message = messages.GetBurstError(self._connection.new_call(), self._burst_id)
            deadline_ns = patience_ns if deadline_ns is None else min(patience_ns, deadline_ns)
            said = self._connection.ask(message, messages.BurstError, (), deadline_ns)
        except MissedDeadlineTransient:
            error = error_for_status(result.status, f"the driver answered {result.status.name}")
        else:
            error = error_for_status(said.status or result.status, said.message)
        if isinstance(error, OutputInsufficientSize):
            error.output_shapes = result.output_shapes
        raise error

    @property
    def last(self) -> ExecutionInfo:
        """Where the time of the last execution went. Raises GeneralFailure before the first."""
        if self._info is None:
            self._info = self._read_stages()
        return self._info

    def _read_stages(self) -> ExecutionInfo:
        latency_ns = self._latency_ns
        if not latency_ns:
            raise GeneralFailure("nothing was executed on this burst yet")
        stages = self._stages.read()
        if stages.sequence != self._sequence:  # a later execution's, of a call that ended early
            return ExecutionInfo(latency_ns, latency_ns, 0, 0, self._timing)
        in_driver = min(max(stages.driver_ns, 0), latency_ns)  # the driver wrote these: shown, never believed
        engine = min(max(stages.engine_ns, 0), in_driver)
        exact = stages.timing if self._timing != NO_TIMING else NO_TIMING
        return ExecutionInfo(latency_ns, latency_ns - in_driver, in_driver - engine, engine, exact)

    # ------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """End the burst on both sides; waits for a running execution, up to 5 seconds. Harmless when repeated."""
        burst_id = self._burst_id
        try:
            if burst_id and self._connection.is_open:
                message = messages.CloseBurst(self._connection.new_call(), burst_id)
                self._connection.ask(message, messages.Reply, (), time.monotonic_ns() + _CLOSE_NS)
        except NnfmqError:
            pass  # the driver is gone or stuck: closing our end is all that is left to do
        finally:
            self._burst_id = 0
            self._close_our_end(burst_id)

    def _close_our_end(self, burst_id: int) -> None:
        self._connection.discard_burst(burst_id, self.peer)
        self.peer.discard(self._requests, self._results)
        if self._latency_ns and self._info is None:
            self._info = self._read_stages()  # for whoever asks later
        self.inputs = self.outputs = ()
        self._resources.close()  # a thread that still waits here leaves

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _copied_out(out: Sequence[Array] | None, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
    if out is None:
        return tuple([output.copy() for output in outputs])
    return outputs if out is outputs else tensor_layout.copy_out(out, outputs)


def _views(memory: Memory, places: Sequence[RequestArgument], infos: Sequence[TensorInfo]) -> tuple[Array, ...]:
    pairs = zip(places, infos, strict=True)
    return tuple(tensor_layout.view(memory, place, info, info.shape) for place, info in pairs)


def to_wire_descriptor(queue: MessageQueue) -> messages.MQDescriptorData:
    """Return a queue's descriptor as it travels; its memory goes beside it."""
    described = queue.descriptor
    grantors = tuple(messages.GrantorData(g.fd_index, g.offset, g.extent) for g in described.grantors)
    return messages.MQDescriptorData(grantors, described.quantum, described.flags)
