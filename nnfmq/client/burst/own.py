"""OwnBurst: the burst that a prepared model keeps for `execute` and `execute_async` while they are called often.

A message over the control channel costs a wake-up of four threads, two new memories, and the binding of the request in
the driver. So from the third call in quick succession on, the model sends packets over queues and memory that it keeps.
It is the same call otherwise: whatever a packet cannot carry or report exactly (buffers, a loop timeout, times), calls
beside another one, and arrays of other shapes go over the control channel, and so does a call while the driver may have
others in its queue, which go by priority: a burst has a thread of its own. An execution that fails ends the
burst, and goes on as one over the control channel does. So do two seconds without a call, after which the driver may
trim its memory (EXE-13).

An asynchronous execution is that of a thread, which ends with the burst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from time import monotonic_ns
from typing import TYPE_CHECKING, Self

import numpy as np

from nnfmq.base import watcher
from nnfmq.base.deadlines import has_passed
from nnfmq.base.ownership import CLAIM, Claims, Closable, claimed, release
from nnfmq.base.threads import start_daemon
from nnfmq.client.burst.channel import BurstChannel, SlotAllocator
from nnfmq.client.burst.requests import CachedRequest, cached_requests
from nnfmq.client.connection.garbage import ClosedWhenDropped, weak_call
from nnfmq.client.execution.asynchronous import PendingExecution
from nnfmq.client.execution.requests import RequestRun, validate_result
from nnfmq.client.execution.synchronous import execute_on_device, execute_request
from nnfmq.client.model.array_request import ArrayRequest
from nnfmq.client.model.arrays import Array, ExecutionResult, Outputs
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.handle import ModelHandle
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, NnfmqError, OutputInsufficientSize
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.queue import PollingWindow
from nnfmq.serialize import messages
from nnfmq.serialize.codec import decode_result

if TYPE_CHECKING:
    import threading

__all__ = ["OwnBurst"]

_IDLE_NS = 2_000_000_000  # as long as a driver keeps its memory
_QUEUED_CALLS_MIN = 4  # a driver has as many threads for a client's calls: with fewer calls none waits for a thread
_NO_CONFIG = ExecutionConfig()


class OwnBurst(ClosedWhenDropped, Closable):
    """A burst, and a request with its arrays, of one model at one place. Thread-safe. Its model closes it.

    `is_closed`: it takes no calls any more. `has_failed`: because an execution has failed, or the driver refused it.
    """

    def __init__(
        self, model: ModelHandle, request: ArrayRequest, shapes: Sequence[tuple[int, ...]], slots: SlotAllocator,
        channel: BurstChannel,
    ) -> None:  # fmt: skip
        self._model, self._location, self._shapes = model, model.location, list(shapes)
        self._array_request, self._request, self._channel = request, request.request, channel
        self._packets: tuple[CachedRequest, ...] = cached_requests(slots, self._request)
        self._run = RequestRun(model, self._request, _NO_CONFIG)
        self._claims: Claims = {}
        self._is_configured = False
        self._valid_result = ExecutionResult((), NO_TIMING)  # that of the packets' valid reply
        self._used_ns, self._latency_ns = monotonic_ns(), 0  # when the last packet was sent; until the reply
        self._timer: watcher.TimerHandle | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_closed = self.has_failed = False  # last: what a signal handler interrupts here is not closed

    @classmethod
    def start(cls, model: ModelHandle, inputs: Sequence[Array]) -> Self:
        """Return a burst for inputs of these shapes, which can be used once the driver has configured it.

        Does not block.

        Raises:
            NnfmqError: If the driver has exited, or this process has no memory or descriptors for it.
        """
        shapes = [value.shape for value in inputs]
        with ExitStack() as undo:
            request = undo.enter_context(ArrayRequest.create(model, inputs))
            slots = SlotAllocator()
            window_ns = PollingWindow.controller(None).ns
            channel = undo.enter_context(BurstChannel(model, slots, window_ns))
            burst = cls(model, request, shapes, slots, channel)
            undo.callback(burst.close)
            model.connection.add_own_burst(burst)
            burst._call_when_idle()
            burst._channel.start_configuring(burst._location, burst)
            undo.pop_all()  # last: from now on the burst's finalizer closes what a signal handler leaves here
        return burst

    def set_result(self, reply: messages.BurstConfigured) -> None:
        """Begin to take calls, if the driver has configured the burst."""
        if reply.status is not ErrorStatus.NONE:
            self._fail()
            self.close()
            return
        self._channel.accept(reply)
        self._is_configured = True
        self._release_if_closed()  # meanwhile

    def set_exception(self, _error: NnfmqError) -> None:
        """Close the burst: there is none in the driver."""
        self._fail()
        self.close()

    # ------------------------------------------------------------------------------------------------ executing

    def execute(self, inputs: Sequence[Array | Buffer], deadline_ns: int | None) -> tuple[Outputs, Timing] | None:
        """Execute inputs that were checked, and return new outputs; None if nothing is sent. Blocks.

        Raises as `execute_request`.
        """
        try:
            return claimed(self._claims, object(), partial(self._execute, inputs, deadline_ns), _nothing)
        finally:
            self._release_if_closed()

    def _execute(self, inputs: Sequence[Array | Buffer], deadline_ns: int | None) -> tuple[Outputs, Timing] | None:
        if not self._can_take(inputs, deadline_ns):
            return None
        return self._finish(inputs, deadline_ns, HalExecutionMode.SYNCHRONOUS)

    def execute_async(
        self, inputs: Sequence[Array], deadline_ns: int | None, note_timing: Callable[[Timing], None]
    ) -> PendingExecution[Outputs] | None:
        """Start to execute inputs that were checked; None if nothing is sent. `note_timing` gets the timing."""
        claims, claim, is_started = self._claims, object(), False
        try:
            if claims.setdefault(CLAIM, claim) is not claim or not self._can_take(inputs, deadline_ns):
                return None
            if self._thread is None:
                self._thread = start_daemon(partial(_run_jobs, self._jobs), "nnfmq-own-burst")
            self._array_request.write(inputs)
            future: Future[Outputs] = Future(self._model)
            is_started = True  # before the job may end
            self._jobs.put(partial(self._run_job, claim, deadline_ns, note_timing, future))
            return PendingExecution(future)
        except RuntimeError:  # no thread can be started
            return None
        finally:
            if not is_started:
                release(claims, claim)
                self._release_if_closed()

    def _run_job(
        self, claim: object, deadline_ns: int | None, note_timing: Callable[[Timing], None], future: Future[Outputs]
    ) -> None:
        error: NnfmqError = GeneralFailure("internal error in an asynchronous execution")
        found = None
        try:
            found = self._finish(None, deadline_ns, HalExecutionMode.ASYNCHRONOUS)
        except NnfmqError as failure:
            error = failure
        except BaseException:
            self._fail()  # a bug in nnfmq, which ends the thread
            raise
        finally:
            release(self._claims, claim)  # first: who gets the result may call again
            self._release_if_closed()
            if found is None:
                future.set_exception(error)
            else:
                note_timing(found[1])
                future.set_result(found[0])
            del error  # this frame, to which it may refer, would keep it

    def _can_take(self, inputs: Sequence[Array | Buffer], deadline_ns: int | None) -> bool:
        """Return whether the burst may execute a call with these inputs now."""
        if self.is_closed or not self._is_configured:
            return False
        if self._model.location is not self._location:
            self.is_closed = True
            return False
        connection = self._channel.connection
        if not connection.is_open or connection.open_calls >= _QUEUED_CALLS_MIN or has_passed(deadline_ns):
            return False
        return [value.shape if isinstance(value, np.ndarray) else None for value in inputs] == self._shapes

    def _finish(
        self, inputs: Sequence[Array | Buffer] | None, deadline_ns: int | None, mode: HalExecutionMode
    ) -> tuple[Outputs, Timing]:
        """Execute these inputs, or those that are in the memory; blocks."""
        called_ns = monotonic_ns()
        request, trace, execute = self._array_request, self._channel.trace, partial(self._exchange, mode)
        if trace is not None:
            trace.begin()
        if inputs is not None:
            request.write(inputs)
        try:
            result = execute_request(self._model, self._request, _NO_CONFIG, deadline_ns, execute)
        except OutputInsufficientSize as error:
            request.grow(error)
            result = execute_request(self._model, request.request, _NO_CONFIG, deadline_ns)
        outputs = request.arrays(result.shapes)
        if not self.has_failed:  # else it was executed over the control channel
            self._channel.count(monotonic_ns() - called_ns, self._latency_ns)
        if trace is not None and not self.is_closed:
            trace.end(self._used_ns, self._latency_ns)
        return outputs, result.timing

    def _exchange(
        self, mode: HalExecutionMode, model: ModelHandle, request: Request, config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> ExecutionResult:  # fmt: skip
        """As `execute_on_device`, with a packet. If it raises, the burst takes no other call."""
        observation = None
        try:
            observation = self._run.begin(mode, deadline_ns)
            result = self._exchange_packet(mode, deadline_ns)
            if result is None:
                self._fail()
                return execute_on_device(model, request, config, deadline_ns)
        except BaseException as error:
            self._fail()
            if observation is not None and isinstance(error, NnfmqError):
                observation.fail(error)
            raise
        if observation is not None:
            observation.finish(result.shapes, result.timing)
        return result

    def _exchange_packet(self, mode: HalExecutionMode, deadline_ns: int | None) -> ExecutionResult | None:
        """Send a packet and return the validated result; None if it could not be sent. Blocks."""
        channel = self._channel
        channel.connection.raise_if_closed()
        request = self._packets[channel.store_deadline(deadline_ns)]
        # Nobody's wait for an asynchronous execution ends at its deadline, only the execution does.
        limit_ns = deadline_ns if mode is HalExecutionMode.SYNCHRONOUS else None
        self._used_ns = begin_ns = channel.begin()
        reply = channel.exchange(request.packet, limit_ns, begin_ns)
        if reply is None:
            return None
        self._latency_ns = monotonic_ns() - begin_ns
        if reply == request.valid_reply:
            return self._valid_result
        found = decode_result(reply)
        validate_result(
            self._model.outputs, request.output_args, found.status, found.output_shapes, found.timing, False
        )  # fmt: skip
        if found.status is not ErrorStatus.NONE:
            channel.raise_error(found, deadline_ns)
        result = ExecutionResult(found.output_shapes, found.timing)
        if found.timing == NO_TIMING:
            for packet in self._packets:
                packet.valid_reply = reply
            self._valid_result = result
        return result

    # ------------------------------------------------------------------------------------------------ the end

    def _call_when_idle(self) -> None:
        self._timer = watcher.call_at(self._used_ns + _IDLE_NS, weak_call(self._close_if_idle))
        self._release_if_closed()  # by another thread, which has not seen this timer

    def _close_if_idle(self) -> None:
        """Close the burst if it was not used for two seconds; else look again later. On the watcher thread."""
        if self.is_closed or self._used_ns + _IDLE_NS <= monotonic_ns():
            self.close()
        else:
            self._call_when_idle()

    def _fail(self) -> None:
        """Take no other call, because an execution has failed, or the driver has refused the burst."""
        self.is_closed = self.has_failed = True

    def close(self) -> None:
        """Take no other call, and release everything when the one in progress ends. Idempotent. Does not block."""
        self.is_closed = True
        self._release_if_closed()

    def _release_if_closed(self) -> None:
        while self.is_closed and claimed(self._claims, object(), self._release, _nothing):
            if not self._channel.burst_id:  # else the driver has configured it meanwhile
                break

    def _release(self) -> bool:
        timer, self._timer = self._timer, None
        if timer is not None:
            watcher.cancel_timer(timer)
        self._jobs.put(None)
        self._channel.end_soon()
        self._channel.close()
        self._array_request.close()
        return True

    def _is_left_open(self) -> bool:
        return not self.is_closed

    def _close_dropped(self) -> None:
        self.close()


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run jobs until there is None. Keeps no burst while it waits."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _nothing(_claim: object) -> None:
    """Return None: another call has the burst."""
