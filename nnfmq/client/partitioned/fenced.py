"""Fenced executions of a plan: a chain in which each step waits for the fence of the one before it (PART-11).

The drivers wait for each other's fences, without the application. The execution has a fence of its own, because a
fallback may follow a step that fails: the watcher thread signals it when the last step's fence is signaled. If a step
fails, the whole model is executed on the CPU as soon as no step and no fence of the application is active.

A plan with IF, WHILE or temporaries of unknown size is no chain: the runtime must read values between the steps. It is
executed asynchronously as soon as the application's fences are signaled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Generic, TypeVar

from nnfmq.base import watcher
from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.fence import Fence, fence_state
from nnfmq.base.ownership import Uncopyable
from nnfmq.client.connection.connection import ResultHandler
from nnfmq.client.execution.fenced import FencedExecution, FencedTiming, FenceLimits, fence_fds, launch_fenced
from nnfmq.client.model.arrays import InputValue, Outputs, checked_arrays, require_fixed_shapes
from nnfmq.client.partitioned.asynchronous import AsyncRun, new_run, submit_fallback
from nnfmq.client.partitioned.executions import require_time_left
from nnfmq.client.partitioned.handle import PlanHandle
from nnfmq.client.partitioned.plan import step_request
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ResourceExhaustedTransient,
)
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, FenceState, HalExecutionMode, Request
from nnfmq.validation.requests import validate_request

__all__ = ["CompoundFencedExecution", "FenceWait", "launch_arrays", "launch_compound_fenced", "launch_request"]


# ----------------------------------------------------------------------------------------------------------------------
# FenceWait: a call when several fences are no longer active, without a thread that waits for them.


class FenceWait(Uncopyable):
    """Calls `on_done` once, when none of the fences is active any more: on the watcher thread, or in `start`.

    Args:
        fds: The fences. Borrowed until this returns: it makes duplicates, which it closes.
        on_done: Must not block.

    Raises:
        ResourceExhaustedTransient: If no fd is left.
    """

    def __init__(self, fds: Sequence[int], on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._lock = threading.Lock()
        self._waits = 1 + len(fds)  # that of `start` is the first
        self._readers: dict[int, watcher.ReaderHandle] = {}
        self._fds: list[int] = []
        try:
            for fd in fds:
                self._fds.append(os.dup(fd))
        except OSError as error:
            self.cancel()
            raise ResourceExhaustedTransient(f"no file descriptor is left to wait for a fence: {error}") from error

    def start(self) -> None:
        """Begin to wait.

        Raises:
            ResourceExhaustedTransient: If the watcher cannot watch the fences; `on_done` is then not called.
        """
        try:
            for fd in self._fds:
                self._watch(fd)
        except (OSError, RuntimeError) as error:
            self.cancel()
            raise ResourceExhaustedTransient(f"the fences cannot be watched: {error}") from error
        self._count_down()

    def _watch(self, fd: int) -> None:
        with self._lock:
            self._readers[fd] = watcher.add_reader(fd, lambda: self._on_readable(fd))

    def _on_readable(self, fd: int) -> None:
        with self._lock:
            reader = self._readers.get(fd)
            if reader is None or fence_state(fd) is FenceState.ACTIVE:
                return
            del self._readers[fd]
        watcher.remove_reader(reader)
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._waits -= 1
            if self._waits:
                return
        self.cancel()
        self._on_done()

    def cancel(self) -> None:
        """Wait no longer: `on_done` is not called, unless it is being called by another thread. Idempotent."""
        with self._lock:
            readers, self._readers = self._readers, {}
            fds, self._fds = self._fds, []
        for reader in readers.values():
            watcher.remove_reader(reader)
        for fd in fds:
            with suppress(OSError):
                os.close(fd)


# ----------------------------------------------------------------------------------------------------------------------
# Fenced executions of a plan: a chain in which each step waits for the fence of the one before it (PART-11).


_MODE = HalExecutionMode.FENCED
ResultT = TypeVar("ResultT")
StepExecution = FencedExecution[FencedTiming]


class CompoundFencedExecution(FencedExecution[ResultT]):
    """A launched execution of a plan. This process signals its fence, when the execution is done."""

    def __init__(self, fence: Fence, future: Future[ResultT], steps: Sequence[StepExecution]) -> None:
        super().__init__()
        self._fence, self._future = fence, future
        for step in steps:
            self._resources.callback(step.close)

    @property
    def fence(self) -> Fence:
        """The fence. See `FencedExecution.fence`."""
        return self._fence

    def info(self) -> FencedTiming:
        """Return the execution's times, which are not available for several devices. See `FencedExecution.info`."""
        if not self.done():
            raise GeneralFailure("the execution is not done")
        self._future.result(None)
        return FencedTiming(NO_TIMING, NO_TIMING)

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the fence and return the result; blocks. See `FencedExecution.result`."""
        if not self._future.done():
            self._wait_until_done(timeout)
        return self._future.result(deadline_after(timeout))

    def __await__(self) -> Generator[Any, None, ResultT]:
        """Return the result. See `FencedExecution.__await__`."""
        from nnfmq.client.task_waiting import result_of  # late: asyncio costs more to import than this package

        return result_of(self._future).__await__()

    def close(self) -> None:
        """Close the fence, and release the steps in their drivers. Idempotent."""
        self._fence.close()
        super().close()


def launch_compound_fenced(
    handle: PlanHandle,
    limits: FenceLimits,
    new_run: Callable[[ResultHandler[ResultT]], AsyncRun[ResultT]],
) -> CompoundFencedExecution[ResultT]:
    """Launch an execution behind fences; blocks until it is launched. Borrows the fences.

    `new_run` returns the execution, which completes what it is given.

    Raises:
        InvalidArgument: If a fence is invalid or in error.
        MissedDeadline: If the timeout passes before the first step is launched.
        NnfmqError: If the first step cannot be launched, and there is no fallback.
    """
    deadline_ns = deadline_after(limits.timeout)
    deadline_after(limits.duration)  # check it
    fences = fence_fds(limits.wait_for)
    require_usable_fences(fences)
    launch = _Launch[ResultT](handle, fences, deadline_ns, limits.duration)
    with ExitStack() as undo:
        undo.callback(launch.close)
        user_fence = Fence.adopt(os.dup(launch.fence.fileno()))
        undo.callback(user_fence.close)
        launch.run = new_run(launch)
        undo.pop_all()
    try:
        launch.start()
    except BaseException as error:
        user_fence.close()
        launch.abandon(error)
        raise
    return CompoundFencedExecution(user_fence, launch.future, launch.steps)


def require_usable_fences(fds: Sequence[int]) -> None:
    """Raise InvalidArgument if one is no fence, or is in error (FEN-5)."""
    for fd in fds:
        state = fence_state(fd)
        if state in (FenceState.UNKNOWN, FenceState.ERROR):
            raise InvalidArgument(f"descriptor {fd} is {'no fence' if state is FenceState.UNKNOWN else 'in error'}")


class _Launch(Generic[ResultT]):
    """The launch and the end of one execution: completes `future` and `fence`."""

    run: AsyncRun[ResultT]

    def __init__(
        self, handle: PlanHandle, wait_for: Sequence[int], deadline_ns: int | None, duration: float | None
    ) -> None:
        self._handle = handle
        self._deadline_ns, self._duration = deadline_ns, duration
        self._timer: watcher.TimerHandle | None = None
        self._unclaimed = [True]  # taken out by whatever starts or ends the execution; list.pop is atomic
        self.future: Future[ResultT] = Future()
        self.fence = Fence.create()
        self.steps: list[StepExecution] = []
        self._step_fences: list[Fence] = []  # duplicates: the application may close the steps' own
        self._app_fences: list[Fence] = []
        try:
            for fd in wait_for:
                self._app_fences.append(Fence.adopt(os.dup(fd)))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Launch the chain, or wait for the given fences. Raises NnfmqError if nothing was launched."""
        require_time_left(self._deadline_ns, has_begun=False)
        self.run.limit(self._deadline_ns)
        if self._is_chain():
            self._launch_chain()
        else:
            self._when_signaled(self._execute_asynchronously)

    def _is_chain(self) -> bool:
        handle = self._handle
        if self._duration is not None:  # it begins with the last fence, which only this process sees for all steps
            return False
        has_fences = all(step.connection.has_deadlines for step in handle.steps)  # both are of HAL 1.3
        is_sequence = len(handle.bound.calls) == len(handle.bound.steps)
        return has_fences and is_sequence and not handle.has_dynamic_temporaries

    def _when_signaled(self, call: Callable[[], None]) -> None:
        """Wait for the application's fences, at most until the deadline, and call `call`, or end the execution."""

        def on_signaled() -> None:
            if self._claim() and not self._fail_if_a_fence_failed():
                call()

        def on_timeout() -> None:
            if self._claim():
                waiting.cancel()
                self.run.fail(MissedDeadlineTransient("the deadline passed before the fences were signaled"))

        waiting = self._when_inactive(self._app_fences, on_signaled)
        if self._deadline_ns is not None and self._unclaimed:
            self._timer = watcher.call_at(self._deadline_ns, on_timeout)
            if not self._unclaimed:
                self._cancel_timer()

    def _claim(self) -> bool:
        """Return whether the caller is the one that starts or ends the execution; it has no timer any more then."""
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        self._cancel_timer()
        return True

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            watcher.cancel_timer(timer)

    def _execute_asynchronously(self) -> None:
        end_ns = deadline_after(self._duration)
        if end_ns is not None:
            self.run.limit(end_ns if self._deadline_ns is None else min(end_ns, self._deadline_ns))
        self.run.start()

    def _fail_if_a_fence_failed(self) -> bool:
        """End the execution if a fence of the application is in error; return whether it is."""
        has_failed = any(fence.state is not FenceState.SIGNALED for fence in self._app_fences)
        if has_failed:
            self.run.fail(GeneralFailure("a fence that the execution waited for is in error"))
        return has_failed

    # ------------------------------------------------------------------------------------------------ the chain

    def _launch_chain(self) -> None:
        fences: Sequence[Fence] = self._app_fences
        for call in self._handle.bound.calls:
            model = self._handle.steps[call.index]
            infos = model.inputs, model.outputs
            request = step_request(self.run.memory.locations, call.inputs, call.outputs, infos)
            try:
                limits = FenceLimits(fences, remaining_s(self._deadline_ns))
                step = launch_fenced(model, request, self.run.config, limits, lambda times: times)
            except NnfmqError as error:
                if not self.steps and not self._has_fallback(error):
                    raise
                # The driver rejects a fence that is in error already; then the step before has the error.
                has_failed_before = any(fence.state is FenceState.ERROR for fence in self._step_fences)
                self._recover_after(None if has_failed_before else error)
                return
            self.steps.append(step)
            fences = [Fence.adopt(os.dup(step.fence.fileno()))]
            self._step_fences += fences
        self._when_inactive(fences, self._end_chain)

    def _has_fallback(self, error: NnfmqError) -> bool:
        fallback = self._handle.fallback
        return fallback is not None and fallback.applies_to(error, self._deadline_ns)

    def _end_chain(self) -> None:
        """Complete the execution, when the last step has succeeded or failed."""
        if self._step_fences[-1].state is FenceState.SIGNALED:
            self.run.succeed()
        else:
            self._recover_after(None)

    def _recover_after(self, error: NnfmqError | None) -> None:
        """Execute on the CPU when neither a step nor a given fence is active. `error` = None: a step has it."""
        self._when_inactive(
            self._step_fences, lambda: self._when_signaled(lambda: submit_fallback(lambda: self._recover(error)))
        )

    def _recover(self, error: NnfmqError | None) -> None:
        self.run.start_on_cpu(error or self._error_of_steps())

    def _error_of_steps(self) -> NnfmqError:
        for step in self.steps:
            try:
                step.info()
            except InvalidArgument as error:  # also if the application has closed the execution
                return GeneralFailure(str(error))
            except NnfmqError as error:
                return error
        return GeneralFailure("the fence of a step is in error")

    def _when_inactive(self, fences: Sequence[Fence], call: Callable[[], None]) -> FenceWait:
        def on_done() -> None:
            try:
                call()
            except NnfmqError as error:
                self.run.fail(error)

        waiting = FenceWait([fence.fileno() for fence in fences], on_done)
        waiting.start()
        return waiting

    # ------------------------------------------------------------------------------------------------ the end

    def set_result(self, result: ResultT) -> None:
        """Receive the result of the execution."""
        self.future.set_result(result)
        self.fence.signal()
        self.close()

    def set_exception(self, error: NnfmqError) -> None:
        """Receive the error of the execution."""
        self.future.set_exception(error)
        self.fence.fail()
        self.close()

    def abandon(self, error: BaseException) -> None:
        """End an execution that cannot be launched."""
        for step in self.steps:
            step.close()
        self.run.fail(error if isinstance(error, NnfmqError) else GeneralFailure("the launch was interrupted"))

    def close(self) -> None:
        """Close the fences. Idempotent."""
        self._cancel_timer()
        self.fence.close()
        for fence in (*self._app_fences, *self._step_fences):
            fence.close()


def launch_arrays(
    handle: PlanHandle, inputs: Sequence[InputValue], config: ExecutionConfig, limits: FenceLimits
) -> CompoundFencedExecution[Outputs]:
    """Launch an execution with arrays, which are copied; blocks until it is launched.

    Raises:
        InvalidArgument: If an output's shape is unknown, an input is invalid, or as `launch_compound_fenced`.
        NnfmqError: As `launch_compound_fenced`.
    """
    checked, targets = checked_arrays(handle.inputs, inputs), [None] * len(handle.outputs)
    require_fixed_shapes("output", handle.outputs, "a fenced execution")

    def prepared(completion: ResultHandler[Outputs]) -> AsyncRun[Outputs]:
        return new_run(handle, config, lambda a: a.write(checked, targets), lambda a, _: a.arrays(), completion, _MODE)

    return launch_compound_fenced(handle, limits, prepared)


def launch_request(
    handle: PlanHandle, request: Request, config: ExecutionConfig, limits: FenceLimits
) -> CompoundFencedExecution[FencedTiming]:
    """Launch a request of the application; blocks until it is launched. Borrows the request's pools.

    Raises:
        InvalidArgument: If the request is invalid, or as `launch_compound_fenced`.
        NnfmqError: As `launch_compound_fenced`.
    """
    validate_request(handle.plan.model, request, allow_unspecified_output=False)
    times = FencedTiming(NO_TIMING, NO_TIMING)

    def prepared(completion: ResultHandler[FencedTiming]) -> AsyncRun[FencedTiming]:
        return new_run(handle, config, lambda a: a.memory.bind(request), lambda _a, _r: times, completion, _MODE)

    return launch_compound_fenced(handle, limits, prepared)
