"""The client's end of a burst: fast executions of one prepared model over two message queues (HIDL 1.2).

    arrays → input memory → request packet → queue ═ driver ═ queue → result packet → output memory → arrays

The burst encodes its own request once, and remembers the last reply that was valid: an equal reply needs no decoding.

A request that cannot be sent as a packet is executed over the control channel instead. Nothing is sent twice (BUR-17).
What the device fails to is executed on the CPU, if the model has a fallback, with the inputs that are in the burst's
memory; the next call tries the device again. If the driver has died before a packet was sent, and the model can be
prepared again, the burst gets new queues in the driver that has replaced it, and keeps its memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.ownership import CLAIM, exclusive
from nnfmq.client.burst.channel import QUEUE_RECORDS, BurstChannel
from nnfmq.client.burst.model_burst import ModelBurst
from nnfmq.client.execution.requests import make_execution_config, validate_result
from nnfmq.client.execution.synchronous import execute_arrays, execute_on_cpu, execute_request, model_on_cpu
from nnfmq.client.model import arrays as array_checks
from nnfmq.client.model.array_request import ArrayRequest, MappedArrays
from nnfmq.client.model.arrays import (
    Array,
    ExecutionInfo,
    ExecutionResult,
    InputValue,
    Outputs,
    check_out,
    no_inputs_error,
)
from nnfmq.client.model.handle import ModelHandle
from nnfmq.hal.errors import DeadObject, ErrorStatus, GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.summaries import clipped
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import BufferToken, ExecutionConfig, MeasureTiming, Pool, Request, RequestArgument
from nnfmq.queue import PollingWindow
from nnfmq.serialize.codec import decode_result, encode_request
from nnfmq.serialize.packets import ResultPacket, marked

if TYPE_CHECKING:
    from nnfmq.client.waiting import BlockingWait

__all__ = ["QUEUE_RECORDS", "Burst", "CachedRequest", "Inputs", "Targets"]

_MAX_CACHED_BYTES = 4096  # larger replies are decoded each time
Inputs: TypeAlias = Sequence[InputValue]
Targets: TypeAlias = Sequence[Array] | None
"""The arrays to fill with the outputs; None = new arrays."""
_IS_MEASURED = 1  # as HAS_DEADLINE, a summand of an index of a burst's cached requests


class CachedRequest(Struct):
    """The burst's request over its own memory, encoded once for each combination of `measure` and "has a deadline"."""

    packet: bytes
    output_args: tuple[RequestArgument, ...]
    is_measured: bool
    valid_reply: bytes = b""
    """The last reply that was decoded, validated, successful and without times. No reply is empty."""


class Burst(BurstChannel, ModelBurst):
    """A burst of one device; otherwise as `ModelBurst` says."""

    def __init__(self, model: ModelHandle, window_ns: int) -> None:
        super().__init__(model, window_ns)
        self._arrays: MappedArrays | None = None
        self._cached_requests: tuple[CachedRequest, ...] = ()  # see `HAS_DEADLINE`; empty without own memory
        self._latency_ns = 0  # of the last execution
        self._sent_bytes_then = 0  # `_sent_bytes` after it
        self._timing = NO_TIMING
        self._info: ExecutionInfo | None = None  # made of these by `last`
        self._inputs: tuple[Array, ...] = ()
        self._has_inputs = False
        self.outputs = Outputs()

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

        Without memory a burst only has `execute_request`. That of `arrays` remains the caller's. If the driver has
        died, and the CPU executes until the model is prepared again, the burst is configured then.

        Raises:
            InvalidArgument: If the burst needs memory, and a shape is not fully known.
            NnfmqError: The error of the driver's reply.
        """
        burst = cls(model, PollingWindow.controller(polling_window_us).ns)
        try:
            if with_memory:
                burst._use_memory(arrays or MappedArrays.create(model, burst._resources, "a burst"))
            burst._open_if_alive(deadline_ns)
        except BaseException:
            burst.close()
            raise
        return burst

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

    def __repr__(self) -> str:
        kind = "" if self._arrays is not None or self._is_closed else ", without memory"
        state = f", {self._state_text()}" if self._state_text() else ""
        return f"<Burst on {clipped(repr(self._model.device))}{kind}{state}: {self._model.signature}>"

    def _state_text(self) -> str:
        """Return what executes now; "" = the device."""
        if self._is_closed or self._connection.is_abandoned:
            return "closed"
        if self._connection.is_open:
            return "fallback of another device" if self._model.is_of_fallback else ""
        state = self._model.state
        if state == "closed":  # it cannot be prepared again
            return "driver has died"
        return state or "driver has died, configured in the next one at the next execution"

    # ------------------------------------------------------------------------------------------------ executing

    def execute(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs; blocks. See `ModelBurst.execute`."""
        # As `exclusive` does it, spelled out: forwarding the arguments takes a tenth of a null model's round trip.
        claims, claim = self._claims, object()
        deadline_ns = None if timeout is None else deadline_after(timeout)
        kind = _IS_MEASURED if measure else 0
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            return self._execute(inputs, out, kind, deadline_ns)
        except NnfmqError as error:
            if claims.get(CLAIM) is not claim or not self._can_execute_again(error, deadline_ns):
                raise
            return self._execute_after_failure(error, inputs, out, kind, deadline_ns)
        finally:
            try:
                if claims[CLAIM] is claim:
                    del claims[CLAIM]
            except KeyError:
                pass

    def _execute(self, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None) -> Outputs:
        self._connection.raise_if_closed()  # in a forked child the burst looks open, but the parent uses its memory
        if self._trace is not None:
            self._trace.begin()
        arrays = self._arrays
        if arrays is None:
            raise self._no_memory_error()
        if not inputs and not self._has_inputs and arrays.inputs:
            raise no_inputs_error(arrays.input_infos, "burst.execute")
        if out is not None and out is not arrays.outputs:
            check_out(arrays.output_infos, out)
        if deadline_ns is not None:
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
            self._execute_synchronously(self._model, arrays, request.is_measured, begin_ns, deadline_ns)
        elif reply == request.valid_reply:  # as in `_execute_in_task`: an equal reply needs no decoding
            self._latency_ns, self._info = time.monotonic_ns() - begin_ns, None
            self._timing, self._sent_bytes_then = NO_TIMING, self._sent_bytes
        else:
            result = self._accept(reply, request, begin_ns)
            if result.status is not ErrorStatus.NONE:
                self._record_failure(begin_ns)
                self._raise_error(result, deadline_ns)
        if state is not None:
            state.advance()
        outputs = arrays.outputs if out is arrays.outputs else arrays.copy_out(out)
        if self._trace is not None and reply is not None:
            self._trace.end(begin_ns, self._latency_ns)
        return outputs

    def _accept(self, reply: bytes, request: CachedRequest, begin_ns: int) -> ResultPacket:
        """Return the validated result of the burst's own request, and keep its times. Raises ProtocolError."""
        result = self._decode(reply, request.output_args, request.is_measured)
        self._note_times(result, begin_ns)
        is_repeatable = result.status is ErrorStatus.NONE and result.timing == NO_TIMING
        if is_repeatable and len(reply) <= _MAX_CACHED_BYTES:
            request.valid_reply = reply
        return result

    def _record_failure(self, begin_ns: int) -> None:
        if self._trace is not None:
            self._trace.end(begin_ns, self._latency_ns)

    def _no_memory_error(self) -> Exception:
        self._require_open()
        return InvalidArgument("this burst was configured without memory: it only has execute_request")

    def _execute_after_failure(
        self, error: NnfmqError, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None
    ) -> Outputs:
        """Execute elsewhere what the device has failed to with `error`; blocks. Raises `error` if nothing can."""
        try:
            if self._can_reopen(error):
                try:
                    self._reopen(error, deadline_ns)
                    return self._execute(inputs, out, kind, deadline_ns)
                except NnfmqError as failure:
                    error = failure
                    self._is_packet_lost = False
            if self._arrays is None:
                raise error
            cpu, begin_ns = model_on_cpu(self._model, error, deadline_ns), time.monotonic_ns()
        finally:
            del error  # this frame, to which it refers, would keep it
        arrays = self._checked_arrays(inputs, out)
        self._write_inputs(arrays, inputs)
        self._execute_synchronously(cpu, arrays, bool(kind & _IS_MEASURED), begin_ns, deadline_ns)
        if arrays.state is not None:
            arrays.state.advance()
        return arrays.copy_out(out)

    # ------------------------------------------------------------------------------------------------ tasks of asyncio

    async def execute_async(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        blocking: BlockingWait | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs. See `ModelBurst.execute_async`.

        `blocking` decides when the wait may block the event loop, by default never.
        """
        claims, claim = self._claims, object()
        deadline_ns = None if timeout is None else deadline_after(timeout)
        kind = _IS_MEASURED if measure else 0
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            return await self._execute_in_task(inputs, out, kind, deadline_ns, blocking)
        except NnfmqError as error:
            if claims.get(CLAIM) is not claim or not self._can_execute_again(error, deadline_ns):
                raise
            from nnfmq.client.task_waiting import run_on_fallback_thread

            claims[CLAIM] = other = object()  # of the fallback thread, which continues if this task is cancelled
            return await run_on_fallback_thread(  # no variable has the function: it would keep this frame by the error
                partial(self._execute_after_failure, error, inputs, out, kind, deadline_ns),
                partial(self._release_claim, other),
            )
        finally:
            try:
                if claims[CLAIM] is claim:
                    del claims[CLAIM]
            except KeyError:
                pass

    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, kind: int, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> Outputs:
        self._connection.raise_if_closed()
        if self._trace is not None:
            self._trace.begin()
        arrays = self._checked_arrays(inputs, out)
        if self._in_flight:
            await self.drain_in_task(deadline_ns)
        if deadline_ns is not None:
            kind += self._store_deadline(deadline_ns)
        self._write_inputs(arrays, inputs)
        request, begin_ns = self._cached_requests[kind], time.monotonic_ns()
        reply = await self._exchange_in_task(request.packet, deadline_ns, blocking)
        if reply is None:
            await self._execute_over_channel(arrays, request.is_measured, begin_ns, deadline_ns)
        elif reply == request.valid_reply:
            self._latency_ns, self._info = time.monotonic_ns() - begin_ns, None
            self._timing, self._sent_bytes_then = NO_TIMING, self._sent_bytes
        else:
            result = self._accept(reply, request, begin_ns)
            if result.status is not ErrorStatus.NONE:
                self._record_failure(begin_ns)
                await self._raise_error_in_task(result, deadline_ns)
        if arrays.state is not None:
            arrays.state.advance()
        outputs = arrays.copy_out(out)
        if self._trace is not None and reply is not None:
            self._trace.end(begin_ns, self._latency_ns)
        return outputs

    async def _execute_over_channel(
        self, arrays: MappedArrays, is_measured: bool, begin_ns: int, deadline_ns: int | None
    ) -> None:
        """As `_execute_synchronously`; other tasks run while this one waits."""
        from nnfmq.client.execution.asynchronous import AsyncRequest, start_arrays

        timings: list[Timing] = []
        request = AsyncRequest(self._model, make_execution_config(is_measured, None), deadline_ns)
        results = await start_arrays(request, ArrayRequest.create(self._model, arrays.all_inputs), timings.append)
        array_checks.copy_out(arrays.all_outputs, results)
        self._keep_times(begin_ns, timings[-1])

    def _can_execute_again(self, error: NnfmqError, deadline_ns: int | None) -> bool:
        return not self._is_closed and self._model.can_execute_again(error, deadline_ns)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request; blocks. See `ModelBurst.execute_request`."""
        memories = [pool for pool in request.pools if not isinstance(pool, BufferToken)]
        needs_message = replace(config, measure=MeasureTiming.NO) != ExecutionConfig()
        deadline_ns, begin_ns, result = deadline_after(timeout), time.monotonic_ns(), None
        if not needs_message and len(memories) == len(request.pools):
            try:
                result = self._execute_packet(request, memories, config.measure, deadline_ns)
            except NnfmqError as error:
                if not self._can_execute_again(error, deadline_ns):
                    raise
                result = execute_on_cpu(self._model, request, config, deadline_ns, error)
                self._keep_times(begin_ns, result.timing)
        if result is None:
            result = execute_request(self._model, request, config, deadline_ns)
            self._keep_times(begin_ns, result.timing)
        return result

    @exclusive
    def _execute_packet(
        self, request: Request, memories: Sequence[Pool], measure: MeasureTiming, deadline_ns: int | None
    ) -> ExecutionResult | None:
        """Execute a request over the queues. Returns None if it could not be sent."""
        try:
            return self._send_request(request, memories, measure, deadline_ns)
        except DeadObject as error:
            if not self._can_reopen(error):
                raise
            self._reopen(error, deadline_ns)
        return self._send_request(request, memories, measure, deadline_ns)

    def _send_request(
        self, request: Request, memories: Sequence[Pool], measure: MeasureTiming, deadline_ns: int | None
    ) -> ExecutionResult | None:
        self._require_open()
        if self._in_flight:
            self.drain_late_result(deadline_ns)
        self._free_slots(self._slots.expired(), deadline_ns)
        slots = [self._slots.find_or_add(memory) for memory in memories]
        packet = encode_request(request.inputs, request.outputs, slots, measure)
        if self._store_deadline(deadline_ns):
            packet = marked(packet)
        self._keep_info()
        begin_ns, bytes_before = time.monotonic_ns(), self._requests.counters()[0]
        try:
            reply = self._exchange(packet, deadline_ns)
        finally:  # also after a wait that ended early, but not once another thread has closed the burst
            sent_bytes = self._requests.counters()[0] - bytes_before if self._burst_id else 0
            if sent_bytes:
                self._stats.count_other_packet(sent_bytes)
        if reply is None:
            return None
        result = self._decode(reply, request.outputs, measure is MeasureTiming.YES)
        self._note_times(result, begin_ns)
        if result.status is not ErrorStatus.NONE:
            self._raise_error(result, deadline_ns)
        return ExecutionResult(result.output_shapes, result.timing)

    def _note_times(self, result: ResultPacket, begin_ns: int) -> None:
        """Note what `last` needs to describe the execution whose result was received last."""
        self._latency_ns, self._info = time.monotonic_ns() - begin_ns, None
        self._timing, self._sent_bytes_then = result.timing, self._sent_bytes

    def _decode(self, reply: bytes, output_args: Sequence[RequestArgument], is_measured: bool) -> ResultPacket:
        """Return the validated result. Raises ProtocolError."""
        result = decode_result(reply)
        validate_result(
            self._model.outputs, output_args, result.status, result.output_shapes, result.timing, is_measured
        )
        return result

    def _execute_synchronously(
        self, model: ModelHandle, arrays: MappedArrays, is_measured: bool, begin_ns: int, deadline_ns: int | None
    ) -> None:
        """Execute over a control channel: the packet could not be sent (BUR-17), or `model` is that of the CPU.

        Uses other memory: an execution that continues after its deadline must not write into the burst's memory.
        """
        config = make_execution_config(is_measured, None)
        _, timing = execute_arrays(model, arrays.all_inputs, arrays.all_outputs, config, deadline_ns)
        self._keep_times(begin_ns, timing)

    def _keep_times(self, begin_ns: int, timing: Timing) -> None:
        latency_ns = time.monotonic_ns() - begin_ns
        self._info = ExecutionInfo(latency_ns, latency_ns, 0, 0, timing)

    # ------------------------------------------------------------------------------------------------ durations, end

    @property
    def last(self) -> ExecutionInfo:
        """The durations of the last execution, as `ModelBurst.last`."""
        if self._info is None:
            self._info = self._read_stats()
        return self._info

    def _read_stats(self) -> ExecutionInfo:
        latency_ns = self._latency_ns
        if not latency_ns:
            raise GeneralFailure("nothing was executed on this burst yet")
        stats = self._stats.read()
        # All cached packets have the same length.
        packet_size = len(self._cached_requests[0].packet) if self._cached_requests else 1
        if stats.sequence != self._stats.sequence_after(self._sent_bytes_then, packet_size):
            # These are another execution's: a later one of a call that ended early.
            return ExecutionInfo(latency_ns, latency_ns, 0, 0, self._timing)
        timing = stats.timing if self._timing != NO_TIMING else NO_TIMING  # the packet's is rounded
        return ExecutionInfo.within(latency_ns, stats.driver_ns, stats.engine_ns, timing)

    def close(self) -> None:
        """Close the burst here and in the driver; waits up to 5 s for an execution in progress. Idempotent."""
        self._is_closed = True
        try:
            self._close_queues()
        finally:
            self._inputs, self.outputs = (), Outputs()
            self._detach_state()
            self._arrays = None  # its arrays would keep the memory mapped
            self._resources.close()

    def _is_left_open(self) -> bool:
        return not self._is_closed

    def _is_of_process(self) -> bool:
        return not self._connection.is_abandoned  # closing the client is enough

    def _close_dropped(self) -> None:
        self.close()

    def _before_release(self) -> None:
        self._keep_info()

    def _keep_info(self) -> None:
        """Keep the durations of the last execution for `last`: the driver's words are about to change, or to go."""
        if self._latency_ns and self._info is None:
            self._info = self._read_stats()
