"""Burst: fast executions of one prepared model over two message queues (HIDL 1.2).

    arrays → input memory → request packet → queue ═ driver ═ queue → result packet → output memory → arrays

`ModelBurst` is what the application sees, of a model on one device (`Burst`) or several (`CompoundBurst`): it claims
the burst for one call at a time. A `Burst` has the arrays, the encoded requests over them, and a `BurstChannel`, which
has the queues in one driver. If that driver has died before a packet was sent, and the model can be prepared again, the
burst makes another channel in the driver that has replaced it, and keeps its memory. The burst of a served model does
the same if the model has moved to a newer version: each request goes to one version. If the model is observed, the
burst has a `BurstObservation`, which reports its executions.

The burst encodes its own request once, and remembers the last reply that was valid: an equal reply needs no decoding.
A request that cannot be sent as a packet is executed over the control channel instead. Nothing is sent twice (BUR-17).
What the device fails to is executed on the CPU, if the model has a fallback, with the inputs that are in the burst's
memory; the next call tries the device again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

from msgspec.structs import replace

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.ownership import CLAIM, Claims, Closable, exclusive, release
from nnfmq.base.watcher import DeathRecipients
from nnfmq.client.burst.channel import BurstChannel, SlotAllocator
from nnfmq.client.burst.requests import IS_MEASURED, CachedRequest, LastRequests, cached_requests
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.execution.asynchronous import AsyncRequest, start_arrays
from nnfmq.client.execution.requests import make_execution_config, validate_result
from nnfmq.client.execution.synchronous import execute_arrays, execute_on_cpu, execute_request, model_on_cpu
from nnfmq.client.model import arrays as array_checks
from nnfmq.client.model.array_request import IN_PLACE, ArrayRequest, MappedArrays, with_prepared
from nnfmq.client.model.arrays import (
    Array,
    ExecutionInfo,
    ExecutionResult,
    InputValue,
    Outputs,
    check_out,
    no_inputs_error,
)
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.handle import HasState, ModelHandle, ModelLocation
from nnfmq.hal.errors import BadState, DeadObject, ErrorStatus, GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.summaries import clipped
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import (
    BufferToken,
    ExecutionConfig,
    MeasureTiming,
    Pool,
    Request,
    RequestArgument,
)
from nnfmq.queue import PollingWindow
from nnfmq.serialize.codec import decode_result
from nnfmq.serialize.packets import ResultPacket

if TYPE_CHECKING:
    from nnfmq.client.observation import BurstObservation
    from nnfmq.client.waiting import BlockingWait

__all__ = ["Burst", "Inputs", "ModelBurst", "Targets"]

Inputs: TypeAlias = Sequence[InputValue]
Targets: TypeAlias = Sequence[Array] | None
"""The arrays to fill with the outputs; None = new arrays."""


# ----------------------------------------------------------------------------------------------------------------------
# ModelBurst: what the bursts of a model on one device and of one on several have in common.


class ModelBurst(HasState, ClosedWhenDropped, Closable, ABC):
    """A burst. Close it, or use `with`. One execution at a time: a second thread's call is rejected, not queued.

    `inputs` and `outputs` are arrays over the shared memory itself: write the inputs, call `execute()` without
    arguments, and read the outputs, and nothing is copied. Do not write the inputs or use the outputs while an
    execution runs, nor after a call that ended early until the next call has returned. Without arguments `execute`
    needs inputs: from an earlier call, or because the application has accessed `inputs`. The states of a model with
    states are this burst's own; a call that raises does not change them.
    """

    __slots__ = (
        "__weakref__", "_arrays", "_claims", "_has_inputs", "_info", "_inputs", "_is_closed", "_latency_ns",
        "_observation", "_resources", "outputs",
    )  # fmt: skip

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._claims: Claims = {}
        self._arrays: MappedArrays | None = None
        self._state = None
        self._inputs: tuple[Array, ...] = ()
        self._has_inputs = False
        self._is_closed = True  # until the constructor has succeeded: there is nothing to close
        self.outputs = Outputs()
        self._latency_ns = 0  # of the last execution
        self._info: ExecutionInfo | None = None  # made of it by `last`
        self._observation: BurstObservation | None = None

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory; empty without own memory, and once closed."""
        self._has_inputs = True  # what the application does with the arrays cannot be seen from here
        return self._inputs

    def discard_inputs(self) -> None:
        """Require new inputs for the next `execute`, and begin it with the initial states. For a burst's next user."""
        self._has_inputs = False
        self.reset_state()

    def execute(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs; blocks.

        Args:
            inputs: One array for each input, of its shape and dtype; or none at all, if `self.inputs` were filled.
            out: Arrays to fill and return. With `burst.outputs` nothing is copied. None = return new arrays.
            measure: Whether to measure the HAL's times; see `last`. For one device only (TIM-1).
            timeout: In seconds; also the execution's deadline. None = no limit, 0 = has passed.

        Raises:
            InvalidArgument: If an array, a name or the number of arrays is wrong, there are no inputs yet, or `measure`
                is given and the model is on several devices.
            BadState: If another thread is executing, or the burst or its client is closed.
            MissedDeadline: If the timeout passes. The driver ends the execution at its next check; the next call
                first waits for that. If the interface version has no deadlines, the execution continues.
            DeadObject: If a driver exits.
            NnfmqError: The error that the driver replied.
        """
        claims, deadline_ns = self._claims, None
        claim: object = []  # made faster than an `object()`
        try:  # as `claimed` does it
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            if self._observation is not None:
                self._observation.begin(self.state)
            if timeout is not None:
                deadline_ns = deadline_after(timeout)
            return self._execute(inputs, out, measure, deadline_ns)
        except NnfmqError as error:
            if claims.get(CLAIM) is not claim or not self._note_failure(error, deadline_ns):
                raise
            return self._execute_after_failure(error, inputs, out, measure, deadline_ns)
        finally:
            try:
                if claims[CLAIM] is claim:
                    del claims[CLAIM]
            except KeyError:
                pass

    async def execute_async(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        blocking: BlockingWait | None = None,
    ) -> Outputs:
        """Run the model once and return its outputs; other tasks of the event loop run meanwhile.

        Arguments and errors as for `execute`. A task that is cancelled abandons the execution: the next call first
        waits for it to end, and discards its result. `blocking` decides when a wait may block the event loop, by
        default never.
        """
        claims, claim, deadline_ns = self._claims, object(), None
        try:
            if claims.setdefault(CLAIM, claim) is not claim:
                raise self._busy_error()
            if self._observation is not None:
                self._observation.begin(self.state)
            if timeout is not None:
                deadline_ns = deadline_after(timeout)
            return await self._execute_in_task(inputs, out, measure, deadline_ns, blocking)
        except NnfmqError as error:
            if claims.get(CLAIM) is not claim or not self._note_failure(error, deadline_ns):
                raise
            # No variable has the function: it would keep this frame, to which the error refers.
            return await self._on_fallback_thread(
                partial(self._execute_after_failure, error, inputs, out, measure, deadline_ns)
            )
        finally:
            try:
                if claims[CLAIM] is claim:
                    del claims[CLAIM]
            except KeyError:
                pass

    def _on_fallback_thread(self, function: Callable[[], Outputs]) -> Awaitable[Outputs]:
        """Let the fallback thread continue an execution. It has the burst until then, also if the task is cancelled."""
        from nnfmq.client.task_waiting import run_on_fallback_thread  # it imports asyncio

        self._claims[CLAIM] = claim = object()
        return run_on_fallback_thread(function, partial(release, self._claims, claim))

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
        (BUR-18). The driver validates the request; on several devices the client does, too. Raises as `execute`.
        """
        return self._execute_request(request, config, deadline_after(timeout))

    @abstractmethod
    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Make the drivers unmap a memory that was a pool of `execute_request`; blocks. Idempotent.

        Raises:
            BadState: If another thread is executing, or the burst is closed.
            MissedDeadlineTransient: If `timeout` (seconds; None = no limit) passes.
            DeadObject: If a driver exits.
        """

    @property
    def last(self) -> ExecutionInfo:
        """The durations of the last execution in any mode, `execute_request` included, that had a result.

        On one device an execution that the driver has failed has one; on several only one that has succeeded, and its
        driver's durations are sums over the steps: 0 if not all of them were executed by bursts, or a temporary has no
        fixed size. After a call that ended early the driver's durations of the execution before it may be 0.

        Raises:
            GeneralFailure: Before the first.
        """
        if self._info is None:
            if not self._latency_ns:
                raise GeneralFailure("nothing was executed on this burst yet")
            self._info = self._read_info()
        return self._info

    @abstractmethod
    def close(self) -> None:
        """Close the burst here and in its drivers; waits up to 5 s for an execution in progress. Idempotent."""

    def _is_left_open(self) -> bool:
        return not self._is_closed

    def _close_dropped(self) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ for both kinds

    @abstractmethod
    def _execute(self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None) -> Outputs:
        """Execute once, as the claimed burst; blocks."""

    @abstractmethod
    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> Outputs:
        """As `_execute`; other tasks run while this one waits."""

    @abstractmethod
    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        """Execute a HAL request, for which the method claims the burst; blocks."""

    def _note_failure(self, error: NnfmqError, deadline_ns: int | None) -> bool:
        """Note that an execution has failed with `error`; return whether `_execute_after_failure` may help."""
        return False

    def _execute_after_failure(
        self, error: NnfmqError, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None
    ) -> Outputs:
        """Execute elsewhere what the device has failed to with `error`; blocks. Raises `error` if nothing can."""
        raise error

    @abstractmethod
    def _read_info(self) -> ExecutionInfo:
        """Return the durations of the last execution, which took `_latency_ns`."""

    def _keep_info(self) -> None:
        """Keep the durations of the last execution for `last`, before what they are made of changes or goes."""
        if self._latency_ns and self._info is None:
            self._info = self._read_info()

    @abstractmethod
    def _require_open(self) -> None:
        """Raise BadState if the burst is closed."""

    def _busy_error(self) -> Exception:
        self._require_open()
        return BadState("this burst is executing in another thread; make one burst for each")  # BUR-16

    def _no_memory_error(self) -> Exception:
        """Return the error of a call that needs arrays: the burst is closed, or has none."""
        self._require_open()
        return InvalidArgument("this burst was configured without memory: it only has execute_request")

    def _checked_arrays(self, inputs: Inputs, out: Targets) -> MappedArrays:
        """Return the burst's arrays. Raises InvalidArgument if there are none, or no inputs, or `out` is wrong."""
        arrays = self._arrays
        if arrays is None:
            raise self._no_memory_error()
        if not inputs and not self._has_inputs and arrays.inputs:
            raise no_inputs_error(arrays.input_infos, "burst.execute")
        arrays.check_out(out)
        return arrays

    def _write_inputs(self, arrays: MappedArrays, inputs: Inputs) -> MappedArrays:
        """Write the inputs, none at all leaves them as they are, and the states; return the arrays that have them."""
        arrays = arrays.copy_in(inputs)
        self._has_inputs |= bool(inputs)
        if arrays.state is not None:
            arrays.state.begin()
        return arrays

    def _take_arrays(self, arrays: MappedArrays) -> None:
        self._arrays, self._inputs, self.outputs, self._state = arrays, arrays.inputs, arrays.outputs, arrays.state

    def _release(self) -> None:
        """Release what the burst owns, and keep nothing that would keep its memory mapped. Idempotent."""
        self._detach_state()
        self._inputs, self.outputs, self._arrays = (), Outputs(), None
        self._resources.close()


# ----------------------------------------------------------------------------------------------------------------------
# Burst: a burst of one device.


ResultT = TypeVar("ResultT")
_NO_CONFIG = ExecutionConfig()
_MAX_CACHED_BYTES = 4096  # larger replies are decoded each time


class Burst(ModelBurst):
    """A burst of one device; otherwise as `ModelBurst` says."""

    __slots__ = (
        "_ahead", "_begin_ns", "_called_ns", "_is_repeating", "_is_served", "_last_requests", "_model", "_slots",
        "_timing", "_window_ns", "channel",
    )  # fmt: skip

    def __init__(self, model: ModelHandle, window_ns: int) -> None:
        super().__init__()
        self._model, self._window_ns = model, window_ns
        self._is_served = bool(model.location.version)  # it may move to a newer version
        self._slots = SlotAllocator()
        self._ahead: list[tuple[ModelLocation, BurstChannel]] = []  # where the model will be; list.pop is atomic
        self._last_requests = LastRequests()  # of `execute_request`
        self._called_ns = 0  # when the call began that executes again, 0 if it executes for the first time
        self._is_repeating = False  # an execution whose outputs were larger than their memory
        self._begin_ns, self._timing = 0, NO_TIMING  # of the last execution
        self.channel = BurstChannel(model, self._slots, window_ns)
        self._is_closed = False

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
            InvalidArgument: If the burst needs memory, a shape is not fully known, and this is no `UnfixedBurst`.
            NnfmqError: The error of the driver's reply.
        """
        burst = cls(model, PollingWindow.controller(polling_window_us).ns)
        try:
            if model.observed is not None:
                from nnfmq.client.observation import BurstObservation  # few models are observed

                burst._observation = BurstObservation(model.observed)
            if with_memory:
                burst._use_memory(arrays)
            burst._open_if_alive(deadline_ns)
            model.add_burst(burst)
        except BaseException:
            burst.close()
            raise
        return burst

    def _use_memory(self, arrays: MappedArrays | None) -> None:
        arrays = arrays or MappedArrays.create(self._model, self._resources, "a burst")
        self._take_arrays(with_prepared(arrays, cached_requests(self._slots, arrays.request)))

    def __repr__(self) -> str:
        kind = "" if self._arrays is not None or self._is_closed else ", without memory"
        state = f", {self._state_text()}" if self._state_text() else ""
        return f"<Burst on {clipped(repr(self._model.device))}{kind}{state}: {self._model.signature}>"

    def _state_text(self) -> str:
        """Return the executor of now, such as the CPU, for `repr`; "" = the device."""
        connection = self.channel.connection
        if self._is_closed or connection.is_abandoned:
            return "closed"
        if connection.is_open:
            return "fallback of another device" if self._model.is_of_fallback else ""
        state = self._model.state
        if state == "closed":  # it cannot be prepared again
            return "driver has died"
        return state or "driver has died, configured in the next one at the next execution"

    @property
    def version(self) -> int:
        """The version of a served model that the last execution ran on, or that is configured; 0 for other models."""
        return self.channel.version

    @property
    def peer(self) -> DeathRecipients:
        """The waits that the death of the driver ends."""
        return self.channel.peer

    # ------------------------------------------------------------------------------------------------ the channel

    def _open_if_alive(self, deadline_ns: int | None) -> None:
        """Configure the channel; but if the driver has died and the model recovers in the background, a call does it.

        Blocks.
        """
        try:
            self.channel.configure(self._model.location, deadline_ns)
        except DeadObject as error:
            if not (self._model.can_recover(error) and self._model.recovers_in_background):
                raise
            self._model.request_recovery(error)

    def _can_reopen(self, error: NnfmqError) -> bool:
        """Return whether `_reopen` may help after `error`: the driver has died, and no packet of this call had left."""
        channel = self.channel
        was_lost, channel.is_packet_lost = channel.is_packet_lost, False
        return not was_lost and not self._is_closed and self._model.can_recover(error)

    def _reopen(self, execute: Callable[[], ResultT], deadline_ns: int | None) -> ResultT:
        """Configure the burst in the driver that the model has been prepared in again, and return `execute()`; blocks.

        Raises:
            MissedDeadline: If the deadline passes.
            NnfmqError: The error that the driver replied.
        """
        self._called_ns = monotonic_ns()
        try:
            self._replace_channel(deadline_ns)
            return execute()
        finally:
            self._called_ns = 0

    def _has_moved(self) -> bool:
        """Return whether the served model has another version now than the channel."""
        return self._model.location.version != self.channel.version

    def _move(self, deadline_ns: int | None) -> None:
        """Configure the burst for the version that the served model has now; blocks.

        A burst whose model is closed keeps its version. If this raises, the next execution tries it again.

        Raises:
            MissedDeadlineTransient: If the deadline passes, perhaps while an execution that was abandoned continues.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        location, channel = self._model.location, self.channel
        if self._is_closed or location.model_id is None:
            return
        location.connection.raise_if_closed()  # a forked child must not touch the queues, which the parent uses
        if channel.in_flight and channel.connection.is_open:
            channel.drain(deadline_ns)
        self._replace_channel(deadline_ns)

    def _replace_channel(self, deadline_ns: int | None) -> None:
        """Close the channel, and configure another one where the model is now; blocks."""
        self._close_channel()
        ahead = self._take_ahead()
        self.channel = channel = ahead or BurstChannel(self._model, self._slots, self._window_ns)
        try:
            if ahead is None:
                channel.configure(self._model.location, deadline_ns)
        finally:
            if self._is_closed:  # by another thread, which has closed the channel before
                self._close_channel()
        self._require_open()
        if self._observation is not None and self._model.observed is not None:
            self._observation.observed = self._model.observed  # for observers each version is a model of its own

    def configure_ahead(self, location: ModelLocation, deadline_ns: int | None) -> None:
        """Configure another channel where the model will be, which the first call there takes; blocks. On any thread.

        Raises:
            NnfmqError: The error that the driver replied.
        """
        channel = BurstChannel(self._model, self._slots, self._window_ns)
        try:
            channel.configure(location, deadline_ns)
        except BaseException:
            _drop(channel)
            raise
        self._ahead.append((location, channel))
        if self._is_closed:  # by another thread, which has not seen it
            self._take_ahead()

    def _take_ahead(self) -> BurstChannel | None:
        """Return the channel that was configured for the model's location, if there is one, and end all others."""
        location = None if self._is_closed else self._model.location
        taken = None
        while True:
            try:
                found, channel = self._ahead.pop()
            except IndexError:
                return taken
            if found is location and channel.connection.is_open and taken is None:
                taken = channel
            else:
                _drop(channel)

    def _close_channel(self) -> None:
        try:
            self.channel.end()
        finally:
            self._keep_info()  # the driver's words go with the queues
            self.channel.close()

    def _require_open(self) -> None:
        self.channel.require_open()

    # ------------------------------------------------------------------------------------------------ executing

    def _execute(self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None) -> Outputs:
        called_ns = self._called_ns  # 0 until something takes time before the request is sent
        if self._is_served and self._has_moved():
            called_ns = called_ns or monotonic_ns()
            self._move(deadline_ns)
        channel, trace = self.channel, self.channel.trace
        if channel.connection.close_reason is not None:  # asked here, because a call of a function takes time
            channel.connection.raise_if_closed()  # as in a forked child, because the parent uses the burst's memory
        if trace is not None:
            trace.begin()
        arrays = self._arrays
        if arrays is None:
            raise self._no_memory_error()
        if not inputs and not self._has_inputs and arrays.inputs:
            raise no_inputs_error(arrays.input_infos, "burst.execute")
        if out is not None and out is not IN_PLACE:
            if out is arrays.outputs:
                out = IN_PLACE
            else:
                check_out(arrays.output_infos, out)
        kind = IS_MEASURED if measure else 0
        if deadline_ns is not None:
            kind += channel.store_deadline(deadline_ns)
        if channel.in_flight:
            called_ns = called_ns or monotonic_ns()
            channel.drain(deadline_ns)
        if inputs:
            called_ns = called_ns or monotonic_ns()
            arrays = arrays.copy_in(inputs)
            self._has_inputs = True
        state = arrays.state
        if state is not None:
            state.begin()
        request, is_counted, begin_ns = arrays.prepared[kind], False, channel.begin()
        reply = channel.exchange(request.packet, deadline_ns, begin_ns)
        if reply is None:
            arrays = self._execute_synchronously(self._model, arrays, request.is_measured, begin_ns, deadline_ns)
            state, is_counted = arrays.state, True  # by the control channel
        elif reply == request.valid_reply:  # as in `_execute_in_task`: an equal reply needs no decoding
            is_counted = not called_ns and out is IN_PLACE
            self._latency_ns, self._begin_ns = channel.finish(begin_ns, is_counted), begin_ns
            self._timing, self._info = NO_TIMING, None
        else:
            result = self._accept(reply, request, begin_ns)
            if result.status is not ErrorStatus.NONE:
                if trace is not None:
                    trace.end(begin_ns, self._latency_ns)
                if self._grow(arrays, result):
                    return self._repeat(out, measure, deadline_ns, called_ns or begin_ns)
                channel.raise_error(result, deadline_ns)
            arrays = self._show(arrays, result)
        if state is not None:
            state.advance()
        outputs = arrays.outputs if out is IN_PLACE else arrays.copy_out(out)
        if not is_counted:
            channel.count(monotonic_ns() - (called_ns or begin_ns), self._latency_ns)
        if trace is not None and reply is not None:
            trace.end(begin_ns, self._latency_ns)
        if self._observation is not None:
            self._observation.finish(channel.sent_ns, deadline_ns, self._timing, arrays.inputs, arrays.all_outputs)
        return outputs

    async def _execute_in_task(
        self, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None, blocking: BlockingWait | None
    ) -> Outputs:
        called_ns = self._called_ns or monotonic_ns()
        if self._is_served and self._has_moved():
            from nnfmq.client.task_waiting import run_to_its_end  # it imports asyncio

            await run_to_its_end(partial(self._move, deadline_ns))
        channel = self.channel
        channel.connection.raise_if_closed()
        trace = channel.trace
        if trace is not None:
            trace.begin()
        arrays = self._checked_arrays(inputs, out)
        if out is arrays.outputs:
            out = IN_PLACE
        if channel.in_flight:
            await channel.drain_in_task(deadline_ns)
        kind = IS_MEASURED if measure else 0
        if deadline_ns is not None:
            kind += channel.store_deadline(deadline_ns)
        arrays = self._write_inputs(arrays, inputs)
        request, begin_ns = arrays.prepared[kind], channel.begin()
        reply = await channel.exchange_in_task(request.packet, deadline_ns, begin_ns, blocking)
        if reply is None:
            arrays = await self._execute_over_control_channel(arrays, request.is_measured, begin_ns, deadline_ns)
        elif reply == request.valid_reply:
            self._latency_ns, self._begin_ns = monotonic_ns() - begin_ns, begin_ns
            self._timing, self._info = NO_TIMING, None
        else:
            result = self._accept(reply, request, begin_ns)
            if result.status is not ErrorStatus.NONE:
                if trace is not None:
                    trace.end(begin_ns, self._latency_ns)
                if self._grow(arrays, result):
                    return await self._repeat_in_task(out, measure, deadline_ns, blocking, called_ns)
                await channel.raise_error_in_task(result, deadline_ns)
            arrays = self._show(arrays, result)
        if arrays.state is not None:
            arrays.state.advance()
        outputs = arrays.copy_out(out)
        if reply is not None:
            channel.count(monotonic_ns() - called_ns, self._latency_ns)
            if trace is not None:
                trace.end(begin_ns, self._latency_ns)
        if self._observation is not None:
            self._observation.finish(channel.sent_ns, deadline_ns, self._timing, arrays.inputs, arrays.all_outputs)
        return outputs

    def _accept(self, reply: bytes, request: CachedRequest, begin_ns: int) -> ResultPacket:
        """Return the validated result of the burst's own request, and note its times. Raises ProtocolError."""
        result = self._decode(reply, request.output_args, request.is_measured, begin_ns)
        is_repeatable = result.status is ErrorStatus.NONE and result.timing == NO_TIMING
        if is_repeatable and len(reply) <= _MAX_CACHED_BYTES:
            request.valid_reply, request.shapes = reply, result.output_shapes
        return result

    def _decode(
        self, reply: bytes, output_args: Sequence[RequestArgument], is_measured: bool, begin_ns: int
    ) -> ResultPacket:
        """Return the validated result of a request, and note what `last` needs to describe it. Raises ProtocolError."""
        result = decode_result(reply)
        validate_result(
            self._model.outputs, output_args, result.status, result.output_shapes, result.timing, is_measured
        )
        self._latency_ns, self._begin_ns = monotonic_ns() - begin_ns, begin_ns
        self._timing, self._info = result.timing, None
        return result

    def _grow(self, arrays: MappedArrays, result: ResultPacket) -> bool:
        """Return whether the outputs have more space now, because they were larger than their memory."""
        return False

    def _repeat(self, out: Targets, measure: bool, deadline_ns: int | None, called_ns: int) -> Outputs:
        """Execute again, once, with the inputs that are in the memory; blocks. The call began at `called_ns`."""
        self._is_repeating, self._called_ns = True, called_ns
        try:
            return self._execute((), out, measure, deadline_ns)
        finally:
            self._is_repeating, self._called_ns = False, 0

    async def _repeat_in_task(
        self, out: Targets, measure: bool, deadline_ns: int | None, blocking: BlockingWait | None, called_ns: int
    ) -> Outputs:
        """As `_repeat`; other tasks run while this one waits."""
        self._is_repeating, self._called_ns = True, called_ns
        try:
            return await self._execute_in_task((), out, measure, deadline_ns, blocking)
        finally:
            self._is_repeating, self._called_ns = False, 0

    def _show(self, arrays: MappedArrays, result: ResultPacket) -> MappedArrays:
        """Return the arrays with outputs of the shapes that a successful execution has reported."""
        return arrays

    def _execute_synchronously(
        self, model: ModelHandle, arrays: MappedArrays, is_measured: bool, begin_ns: int, deadline_ns: int | None
    ) -> MappedArrays:
        """Execute over a control channel: the packet could not be sent (BUR-17), or `model` is that of the CPU.

        Uses other memory: an execution that continues after its deadline must not write into the burst's memory.
        Returns the arrays with the outputs.
        """
        config = make_execution_config(is_measured, None)
        results, timing = execute_arrays(model, arrays.all_inputs, None, config, deadline_ns)
        self._keep_times(begin_ns, timing)
        return self._store(arrays, [result for result in results if not isinstance(result, Buffer)])

    async def _execute_over_control_channel(
        self, arrays: MappedArrays, is_measured: bool, begin_ns: int, deadline_ns: int | None
    ) -> MappedArrays:
        """As `_execute_synchronously`; other tasks run while this one waits."""
        timings: list[Timing] = []
        request = AsyncRequest(self._model, make_execution_config(is_measured, None), deadline_ns)
        results = await start_arrays(request, ArrayRequest.create(self._model, arrays.all_inputs), timings.append)
        self._keep_times(begin_ns, timings[-1])
        return self._store(arrays, results)

    def _store(self, arrays: MappedArrays, results: Sequence[Array]) -> MappedArrays:
        """Copy the outputs of an execution over a control channel; return the arrays that have them."""
        array_checks.copy_out(arrays.all_outputs, results)
        return arrays

    def _note_failure(self, error: NnfmqError, deadline_ns: int | None) -> bool:
        if self._observation is not None:
            arrays = self._arrays
            self._observation.fail(self.channel.sent_ns, deadline_ns, error, None if arrays is None else arrays.inputs)
        return self._can_execute_again(error, deadline_ns)

    def _can_execute_again(self, error: NnfmqError, deadline_ns: int | None) -> bool:
        return not self._is_closed and self._model.can_execute_again(error, deadline_ns)

    def _execute_after_failure(
        self, error: NnfmqError, inputs: Inputs, out: Targets, measure: bool, deadline_ns: int | None
    ) -> Outputs:
        try:
            if self._can_reopen(error):
                try:
                    execute = partial(self._execute, inputs, out, measure, deadline_ns)
                    return self._model.execute_again(error, deadline_ns, partial(self._reopen, execute, deadline_ns))
                except NnfmqError as failure:
                    self._note_failure(failure, deadline_ns)
                    error = failure
                    self.channel.is_packet_lost = False
            if self._arrays is None:
                raise error
            cpu, begin_ns = model_on_cpu(self._model, error, deadline_ns), monotonic_ns()
        finally:
            del error  # this frame, to which it refers, would keep it
        arrays = self._checked_arrays(inputs, out)
        if out is arrays.outputs:
            out = IN_PLACE
        arrays = self._write_inputs(arrays, inputs)
        arrays = self._execute_synchronously(cpu, arrays, measure, begin_ns, deadline_ns)
        if arrays.state is not None:
            arrays.state.advance()
        return arrays.copy_out(out)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        memories = [pool for pool in request.pools if not isinstance(pool, BufferToken)]
        needs_message = config != _NO_CONFIG and replace(config, measure=MeasureTiming.NO) != _NO_CONFIG
        begin_ns, result = monotonic_ns(), None
        if not needs_message and len(memories) == len(request.pools):
            try:
                if self._observation is None:
                    result = self._execute_packet(request, memories, config.measure, deadline_ns)
                else:
                    execute = partial(self._execute_packet, request, memories, config.measure, deadline_ns)
                    result = self._observation.execute_packet(request, deadline_ns, execute)
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
            send = partial(self._send_request, request, memories, measure, deadline_ns)
            return self._model.execute_again(error, deadline_ns, partial(self._reopen, send, deadline_ns))

    def _send_request(
        self, request: Request, memories: Sequence[Pool], measure: MeasureTiming, deadline_ns: int | None
    ) -> ExecutionResult | None:
        called_ns = self._called_ns or monotonic_ns()
        if self._is_served and self._has_moved():
            self._move(deadline_ns)
        channel = self.channel
        channel.require_open()
        if channel.in_flight:
            channel.drain(deadline_ns)
        channel.free_slots(self._slots.expired(), deadline_ns)
        slots = [self._slots.find_or_add(memory) for memory in memories]
        forms = self._last_requests.forms(request, slots)
        kind = IS_MEASURED if measure is MeasureTiming.YES else 0
        sent = forms[kind + channel.store_deadline(deadline_ns)]
        self._keep_info()  # the driver's words are about to change
        begin_ns = channel.begin()
        reply = channel.exchange(sent.packet, deadline_ns, begin_ns)
        if reply is None:
            return None
        if reply == sent.valid_reply:
            self._latency_ns, self._begin_ns = monotonic_ns() - begin_ns, begin_ns
            self._timing, self._info = NO_TIMING, None
            shapes = sent.shapes
        else:
            result = self._accept(reply, sent, begin_ns)
            if result.status is not ErrorStatus.NONE:
                channel.raise_error(result, deadline_ns)
            shapes = result.output_shapes
        channel.count(monotonic_ns() - called_ns, self._latency_ns)
        return ExecutionResult(shapes, self._timing)

    @exclusive
    def free_memory(self, memory: Pool, *, timeout: float | None = 10.0) -> None:
        """Make the driver unmap a memory that was a pool of `execute_request`. See `ModelBurst.free_memory`."""
        if not self.channel.burst_id:
            raise BadState("this burst is closed")
        slot = self._slots.find(memory)
        if slot is not None:
            self.channel.free_slots([slot], deadline_after(timeout))

    # ------------------------------------------------------------------------------------------------ durations, end

    def _read_info(self) -> ExecutionInfo:
        begin_ns, latency_ns, stats = self._begin_ns, self._latency_ns, self.channel.stats.read()
        if stats.request_received_ns < begin_ns or stats.result_sent_ns > begin_ns + latency_ns:
            # These are another execution's: a later one of a call that ended early.
            return ExecutionInfo(latency_ns, latency_ns, 0, 0, self._timing)
        timing = stats.timing if self._timing != NO_TIMING else NO_TIMING  # the packet's is rounded
        return ExecutionInfo.within(latency_ns, stats.driver_ns, stats.engine_ns, timing)

    def _keep_times(self, begin_ns: int, timing: Timing) -> None:
        """Keep the durations of an execution over a control channel for `last`."""
        latency_ns = monotonic_ns() - begin_ns
        self._info = ExecutionInfo(latency_ns, latency_ns, 0, 0, timing)

    def close(self) -> None:
        """Close the burst here and in the driver; waits up to 5 s for an execution in progress. Idempotent."""
        self._is_closed = True
        self._take_ahead()
        try:
            self._close_channel()
        finally:
            self._release()

    def _is_of_process(self) -> bool:
        return not self.channel.connection.is_abandoned  # closing the client is enough


def _drop(channel: BurstChannel) -> None:
    """End a channel that nobody uses. Does not block."""
    channel.end_soon()
    channel.close()
