"""A fenced execution: it begins when all the fences that it waits for are signalled, and signals one of its own.

    waiting ── all signalled ──> queued ──> running ──> over: its fence is SIGNALED, or ERROR
       └─── one fails, the deadline passes (also in the queue), the client is gone ──> over: ERROR, at once

Waiting takes no thread: the watcher sees the fences, and an alarm the deadline. Nothing that the request refers to is
touched any more when the fence is signalled, and how it went is known by then (FEN-8, FEN-9). A fence of a driver that
dies is in error because its sender closes. (REQUIREMENTS FEN, TIM-7)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns

import numpy as np

from nnfmq import watcher
from nnfmq.channel import FenceSignaler
from nnfmq.deadlines import deadline_in
from nnfmq.fence import fence_state
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
from nnfmq.service.driver_prepared_model import BoundExecution, StagedExecution, execution_limits


@dataclass(frozen=True, slots=True)
class FencedRequest:
    """What is to be executed, and within which time; `duration_ns` counts from the last fence on, None = no limit."""

    bound: BoundExecution | StagedExecution
    config: ExecutionConfig
    deadline_ns: int | None
    duration_ns: int | None
    received_ns: int


@dataclass(frozen=True, slots=True)
class FencedInfo:
    """How it went, and the times from the call on and from the last fence on (getExecutionInfo)."""

    status: ErrorStatus
    message: str = ""
    launched: Timing = NO_TIMING
    fenced: Timing = NO_TIMING


_TOO_EARLY = FencedInfo(ErrorStatus.GENERAL_FAILURE, "the execution is not over; its fence says when it is (FEN-9)")


def check_fences(fds: Sequence[int]) -> list[int]:
    """Return those that are not signalled yet.

    Raises InvalidArgument for what is no fence, and for one that is in error already (N-RQX-15).
    """
    states = [fence_state(fd) for fd in fds]
    for number, state in enumerate(states):
        if state is FenceState.UNKNOWN:
            raise InvalidArgument(f"N-RQX-15: descriptor {number} to wait for is no fence")
        if state is FenceState.ERROR:
            raise InvalidArgument(f"N-RQX-15: fence {number} to wait for is in error already")
    return [fd for fd, state in zip(fds, states, strict=True) if state is FenceState.ACTIVE]


class DriverFencedExecution:
    """One of them, from its launch on (IFencedExecutionCallback). `info` is how it went; any thread may look."""

    def __init__(
        self,
        plan: FencedRequest,
        sender: FenceSignaler,
        held: ExitStack,
        submit: Callable[[Callable[[], None]], None],
        on_end: Callable[[DriverFencedExecution], None],
    ) -> None:
        self._plan: FencedRequest | None = plan  # None once it is over: arrays over a client's memory keep that alive
        self._submit = submit
        self._on_end = on_end
        self._sender = sender
        self._held = held  # what the request refers to, and the fences: given back before the fence is signalled
        self._lock = threading.Lock()
        self._watches: dict[int, watcher.ReaderHandle] = {}
        self._waiting: set[int] = set()
        self._alarm: watcher.TimerHandle | None = None
        self._fenced_ns = 0
        self._deadline_ns, self._duration_ns = plan.deadline_ns, plan.duration_ns
        self.info = _TOO_EARLY

    def launch(self, fences: Sequence[int]) -> None:
        """Wait for `fences`, then submit `run`; `on_end` is called when it is over. Never blocks."""
        try:
            self._watch(fences)
        except OSError as error:
            self.fail(ResourceExhaustedTransient(f"the fences cannot be watched: {error}"))
        if not fences:
            self._begin()

    def _watch(self, fences: Sequence[int]) -> None:
        with self._lock:
            if self._plan is None:
                return  # the client was gone before there was anything to wait for
            self._waiting = set(fences)
            self._set_alarm()
            for fd in fences:
                self._watches[fd] = watcher.add_reader(fd, partial(self._look, fd), self._on_bug)

    def _look(self, fd: int) -> None:
        """The watcher saw something of a fence."""
        state = fence_state(fd)
        if state is FenceState.ACTIVE:
            return
        if state is not FenceState.SIGNALED:
            self.fail(GeneralFailure("a fence that the execution waited for is in error"))
            return
        with self._lock:
            watch = self._watches.pop(fd, None)
            if watch is None:
                return
            watcher.remove_reader(watch)
            self._waiting.discard(fd)
            is_last = not self._waiting
        if is_last:
            self._begin()

    def _begin(self) -> None:
        """All fences are signalled."""
        self._fenced_ns = monotonic_ns()
        with self._lock:
            if self._plan is None:
                return
            if self._duration_ns is not None:
                end_ns = deadline_in(self._duration_ns)
                self._deadline_ns = end_ns if self._deadline_ns is None else min(self._deadline_ns, end_ns)
                self._set_alarm()  # it may have to wait for its turn
        self._submit(self.run)

    def _set_alarm(self) -> None:
        """Let the deadline end the wait; with the lock."""
        if self._alarm is not None:
            watcher.cancel_timer(self._alarm)
        self._alarm = None if self._deadline_ns is None else watcher.call_at(self._deadline_ns, self._expire)

    def _expire(self) -> None:
        self.fail(MissedDeadlineTransient("the deadline passed before the execution began"))

    def _on_bug(self, error: Exception) -> None:
        self.fail(GeneralFailure(f"waiting for a fence failed: {error!r}"))

    def run(self) -> None:
        """Execute and signal; does nothing where it is over already. On a thread of the pool."""
        plan = self._take()
        if plan is None:
            return
        limits = execution_limits(plan.config, self._deadline_ns)
        with np.errstate(all="ignore"):
            result = plan.bound.run(plan.config.measure, plan.received_ns, limits)
        launched = fenced = NO_TIMING
        if result.status is ErrorStatus.NONE and plan.config.measure is MeasureTiming.YES:
            end_ns, device_ns = monotonic_ns(), result.timing.time_on_device_ns
            launched = Timing(device_ns, end_ns - plan.received_ns)
            fenced = Timing(device_ns, end_ns - self._fenced_ns)
        self._end(FencedInfo(result.status, result.message, launched, fenced))

    def fail(self, error: NnfmqError) -> None:
        """Put the fence in error, unless it runs or is over. Any thread may call it."""
        plan = self._take()
        if plan is not None:
            plan.bound.fail()
            self._end(FencedInfo(status_for_error(error), str(error)))

    def _take(self) -> FencedRequest | None:
        """Return the plan to the one who may end it, None to all others; nothing is waited for any more."""
        with self._lock:
            plan, self._plan = self._plan, None
            if plan is None:
                return None
            for watch in self._watches.values():
                watcher.remove_reader(watch)
            self._watches = {}
            alarm, self._alarm = self._alarm, None
        if alarm is not None:
            watcher.cancel_timer(alarm)
        return plan

    def _end(self, info: FencedInfo) -> None:
        self._held.close()
        self._on_end(self)
        self.info = info
        self._sender.send(FenceState.SIGNALED if info.status is ErrorStatus.NONE else FenceState.ERROR)
