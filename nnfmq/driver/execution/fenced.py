"""Driver's end of a fenced execution: it begins when all fences that it waits for are signaled, and signals another.

    waiting ── all signaled ──> queued ──> running ──> complete: its fence is SIGNALED, or ERROR
       └─── a fence fails, the deadline passes (also while queued), the client exits ──> complete: ERROR, immediately

Waiting needs no thread: the watcher polls the fences, and a timer of the watcher ends the wait at the deadline. When
the fence is signaled, the driver no longer touches anything that the request refers to, and the status is available
(FEN-8, FEN-9). If the driver dies, the kernel closes its end of the fence, which the client sees as ERROR. (FEN, TIM-7)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic_ns

from msgspec import Struct

from nnfmq.base import watcher
from nnfmq.base.channel import FenceSignaler
from nnfmq.base.deadlines import deadline_in
from nnfmq.base.fence import fence_state
from nnfmq.driver.execution.prepared_model import BoundExecution, execution_options, run_bound
from nnfmq.hal.errors import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ResourceExhaustedTransient,
    status_for_error,
)
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import ExecutionConfig, FenceState, MeasureTiming


class FencedRequest(Struct, frozen=True):
    """A bound request with its limits.

    `duration_ns` counts from the time at which the last fence is signaled; None means no limit.
    """

    bound: BoundExecution
    config: ExecutionConfig
    deadline_ns: int | None
    duration_ns: int | None
    received_ns: int


class FencedInfo(Struct, frozen=True):
    """Status and times of a fenced execution (`getExecutionInfo`).

    `launched` counts from the call, `fenced` from the time at which the last fence was signaled.
    """

    status: ErrorStatus
    message: str = ""
    launched: Timing = NO_TIMING
    fenced: Timing = NO_TIMING


_INCOMPLETE = FencedInfo(
    ErrorStatus.GENERAL_FAILURE, "the execution is not complete; its fence is signaled when it is (FEN-9)"
)


def check_fences(fds: Sequence[int]) -> list[int]:
    """Return those fences that are not signaled yet.

    Raises:
        InvalidArgument: If an fd is not a fence, or a fence is in the state ERROR (N-RQX-15).
    """
    states = [fence_state(fd) for fd in fds]
    for index, state in enumerate(states):
        if state is FenceState.UNKNOWN:
            raise InvalidArgument(f"fd {index} to wait for is no fence (N-RQX-15)")
        if state is FenceState.ERROR:
            raise InvalidArgument(f"fence {index} to wait for is in error (N-RQX-15)")
    return [fd for fd, state in zip(fds, states, strict=True) if state is FenceState.ACTIVE]


class DriverFencedExecution:
    """A fenced execution, from its launch (`IFencedExecutionCallback`). Thread-safe.

    Exactly one thread completes it: the one that gets the request from `_claim`.

    Args:
        request: What to execute.
        sender: The driver's end of the execution's fence.
        resources: The request's memory and the fences; closed before the execution's fence is signaled.
        submit: Runs a function on the session's thread pool.
        on_complete: Called when the execution is complete.

    Attributes:
        info: The status and times, a failure until the execution is complete.
        is_collected: Whether the client has asked for them.
    """

    def __init__(
        self,
        request: FencedRequest,
        sender: FenceSignaler,
        resources: ExitStack,
        submit: Callable[[Callable[[], None]], None],
        on_complete: Callable[[DriverFencedExecution], None],
    ) -> None:
        # None once claimed, so that its arrays do not keep the client's memory mapped.
        self._request: FencedRequest | None = request
        self._submit = submit
        self._on_complete = on_complete
        self._sender = sender
        self._resources = resources
        self._lock = threading.Lock()
        self._readers: dict[int, watcher.ReaderHandle] = {}
        self._unsignaled: set[int] = set()
        self._timer: watcher.TimerHandle | None = None
        self._fenced_ns = 0
        self._deadline_ns, self._duration_ns = request.deadline_ns, request.duration_ns
        self.info, self.is_collected = _INCOMPLETE, False

    def launch(self, fences: Sequence[int]) -> None:
        """Wait for `fences`, then submit `run`. Does not block."""
        try:
            with self._lock:
                if self._request is None:
                    return  # the client exited first
                self._unsignaled = set(fences)
                self._set_timer()
                for fd in fences:
                    on_event = partial(self._on_fence_event, fd)
                    self._readers[fd] = watcher.add_reader(fd, on_event, self._on_internal_error)
        except OSError as error:
            self.fail(ResourceExhaustedTransient(f"the fences cannot be watched: {error}"))
        if not fences:
            self._enqueue()

    def _on_fence_event(self, fd: int) -> None:
        """Handle a change of a fence. Runs on the watcher's thread."""
        state = fence_state(fd)
        if state is FenceState.ACTIVE:
            return
        if state is not FenceState.SIGNALED:
            self.fail(GeneralFailure("a fence that the execution waited for is in error"))
            return
        with self._lock:
            reader = self._readers.pop(fd, None)
            if reader is None:
                return
            watcher.remove_reader(reader)
            self._unsignaled.discard(fd)
            is_last = not self._unsignaled
        if is_last:
            self._enqueue()

    def _enqueue(self) -> None:
        """Submit `run`: all fences are signaled."""
        self._fenced_ns = monotonic_ns()
        with self._lock:
            if self._request is None:
                return
            if self._duration_ns is not None:
                end_ns = deadline_in(self._duration_ns)
                self._deadline_ns = end_ns if self._deadline_ns is None else min(self._deadline_ns, end_ns)
                self._set_timer()  # it may expire while `run` is queued
        self._submit(self.run)

    def _set_timer(self) -> None:
        """Let the deadline fail the execution. The caller holds the lock."""
        if self._timer is not None:
            watcher.cancel_timer(self._timer)
        self._timer = None if self._deadline_ns is None else watcher.call_at(self._deadline_ns, self._on_timeout)

    def _on_timeout(self) -> None:
        self.fail(MissedDeadlineTransient("the deadline passed before the execution began"))

    def _on_internal_error(self, error: Exception) -> None:
        self.fail(GeneralFailure(f"waiting for a fence failed: {error!r}"))

    def run(self) -> None:
        """Execute and signal the fence. Does nothing if the execution failed before. Runs on the thread pool."""
        request = self._claim()
        if request is None:
            return
        options = execution_options(request.config, self._deadline_ns)
        reply = run_bound(request.bound, request.config.measure, request.received_ns, options)
        launched = fenced = NO_TIMING
        if reply.status is ErrorStatus.NONE and request.config.measure is MeasureTiming.YES:
            end_ns, device_ns = monotonic_ns(), reply.timing.time_on_device_ns
            launched = Timing(device_ns, end_ns - request.received_ns)
            fenced = Timing(device_ns, end_ns - self._fenced_ns)
        self._complete(FencedInfo(reply.status, reply.message, launched, fenced))

    def fail(self, error: NnfmqError) -> None:
        """Put the fence into the state ERROR, unless the execution is running or complete."""
        request = self._claim()
        if request is not None:
            request.bound.recorder.add_failure()
            request.bound.abort()
            self._complete(FencedInfo(status_for_error(error), str(error)))

    def _claim(self) -> FencedRequest | None:
        """Return the request to the first caller, who must call `_complete`, and None to all others. Ends all waits."""
        with self._lock:
            request, self._request = self._request, None
            if request is None:
                return None
            for reader in self._readers.values():
                watcher.remove_reader(reader)
            self._readers = {}
            timer, self._timer = self._timer, None
        if timer is not None:
            watcher.cancel_timer(timer)
        return request

    def _complete(self, info: FencedInfo) -> None:
        self._resources.close()
        self._on_complete(self)
        self.info = info
        self._sender.send(FenceState.SIGNALED if info.status is ErrorStatus.NONE else FenceState.ERROR)
