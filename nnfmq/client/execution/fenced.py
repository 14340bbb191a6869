"""Fenced executions (the HAL's executeFenced): they start when given fences are signaled, and signal a fence when done.

The driver waits for the fences, so a chain of fenced executions runs without the application. If the driver dies, the
kernel closes the fence's signaling end, and the fence is in error immediately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.fence import Fence, HasFileno
from nnfmq.base.ownership import Closable
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.execution.late_run import LateRun
from nnfmq.client.execution.requests import (
    RequestRun,
    count_call,
    fenced_times,
    memory_fds,
    raise_if_fenced_failed,
    to_wire_config,
)
from nnfmq.client.execution.synchronous import config_for_cpu, model_on_cpu
from nnfmq.client.model.handle import ModelHandle, ModelLocation
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, MissedDeadlineTransient, NnfmqError
from nnfmq.hal.timing import Timing, from_seconds, to_limit_field
from nnfmq.hal.types import BufferToken, ExecutionConfig, FenceState, HalExecutionMode, Request
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.client.observation import RequestObservation

ResultT = TypeVar("ResultT")
_INFO_TIMEOUT_S = 10.0


class FencedTiming(NamedTuple):
    """The times of a fenced execution, in ns: from its launch, and from the last fence."""

    launched: Timing
    fenced: Timing


class FenceLimits(NamedTuple):
    """The conditions of a fenced execution: fences (borrowed), and two limits in seconds; None = no limit."""

    wait_for: Sequence[HasFileno | int] = ()
    timeout: float | None = None
    """From the launch."""
    duration: float | None = None
    """From the last fence."""


class FencedExecution(ClosedWhenDropped, Closable, ABC, Generic[ResultT]):
    """A launched execution that waits for fences. Close it, or use `with`; if closed early, it continues.

    A task of asyncio awaits it, as `PendingExecution`, and closes it.
    """

    def __init__(self) -> None:
        self._resources = ExitStack()

    @property
    @abstractmethod
    def fence(self) -> Fence:
        """The fence: signaled when the execution is done; others can wait for it. This object owns and closes it."""

    def call_on_close(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the execution is closed."""
        self._resources.callback(callback)

    def done(self) -> bool:
        """Return True once the execution has succeeded or failed. Does not block.

        Raises:
            BadState: If this object is closed.
        """
        return self.fence.state is not FenceState.ACTIVE

    def wait(self, timeout: float | None = None) -> FenceState:
        """Block until the fence is not active, at most `timeout` seconds (None = no limit); return its state."""
        return self.fence.wait(timeout)

    def _wait_until_done(self, timeout: float | None) -> FenceState:
        """Return the state of the fence, which is not active; blocks. Raises as `result`."""
        state = self.wait(timeout)
        if state is FenceState.ACTIVE:
            raise MissedDeadlineTransient("the timeout passed before the execution was done; the execution continues")
        return state

    @abstractmethod
    def info(self) -> FencedTiming:
        """Return the execution's times, -1 if not measured (getExecutionInfo); blocks until the driver replies.

        Raises:
            GeneralFailure: If the execution is not done.
            ProtocolError: If the driver's reply is invalid.
            DeadObject: If the driver has exited.
            NnfmqError: The error with which the execution failed.
        """

    @abstractmethod
    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the fence and return the result; blocks up to `timeout` seconds (None = no limit).

        Raises:
            MissedDeadlineTransient: If the timeout passes first. The execution continues.
            DeadObject: If the driver has exited.
            NnfmqError: The error with which the execution failed.
        """

    @abstractmethod
    def __await__(self) -> Generator[Any, None, ResultT]:
        """Return the result when the fence is not active; other tasks of the event loop run meanwhile.

        If the task is cancelled, the execution continues. Raises as `result`.
        """

    def close(self) -> None:
        """Close the fence, and release the execution in its drivers. Idempotent."""
        self._resources.close()

    def _is_left_open(self) -> bool:
        return False

    def _close_dropped(self) -> None:
        self.close()


class DeviceFencedExecution(FencedExecution[ResultT]):
    """A fenced execution of one device; its driver has made the fence."""

    def __init__(
        self, location: ModelLocation, collect: Callable[[FencedTiming], ResultT], run: RequestRun | None = None
    ) -> None:
        super().__init__()
        self._location, self._launched_ns = location.without_id(), monotonic_ns()
        self._connection = location.connection
        self._collect = collect
        self._run = run
        self._observation: RequestObservation | None = None
        self._fence: Fence | None = None
        self._callback_id = 0
        self.keeps: object = None
        """What is not dropped before this: the model, or the execution that was launched."""

    @classmethod
    def launch(
        cls,
        location: ModelLocation,
        message: messages.ExecuteFenced | messages.RunExecutionFenced,
        fds: Sequence[int],
        deadline_ns: int | None,
        collect: Callable[[FencedTiming], ResultT],
        run: RequestRun | None = None,
        late: LateRun | None = None,
    ) -> Self:
        """Send a launch and block until the driver has replied. Borrows `fds`.

        Args:
            location: Where the model is.
            message: The call.
            fds: Sent with the call.
            deadline_ns: End of the wait for the reply.
            collect: Converts the times to the execution's result, when that is asked for.
            run: Validates the driver's replies. None = they are not validated.
            late: Is the execution if the driver launches it later, for a caller that uses the same memory again.
        """
        execution = cls(location, collect, run)
        try:
            if run is not None:
                execution._observation = run.begin(HalExecutionMode.FENCED, deadline_ns)
            reply = location.connection.exchange(
                message, messages.FencedLaunched, fds, deadline_ns,
                on_reply=execution._on_launched, on_fds=execution._on_fds,
                begin_late=None if late is None else late.begin,
            )  # fmt: skip
            raise_if_fenced_failed(reply)
            if run is not None:
                run.finish_launch()
        except BaseException as error:
            execution._observe_failure(error)
            execution.close()
            raise
        return execution

    def _observe_failure(self, error: BaseException) -> None:
        """Report the error to the observers of the model, unless it is one of the application."""
        if self._observation is not None and isinstance(error, NnfmqError):
            self._observation.fail(error)

    def _on_fds(self, fds: list[int]) -> None:
        for fd in fds:
            self._fence = Fence.adopt(fd)
            self._resources.callback(self._fence.close)

    def _on_launched(self, reply: messages.FencedLaunched) -> None:
        self._callback_id = reply.callback_id
        if reply.status is ErrorStatus.NONE and self._fence is None:  # done already (FEN-4)
            self._fence = self._resources.enter_context(Fence.create())
            self._fence.signal()

    @property
    def fence(self) -> Fence:
        """The fence. If the driver sent none, because the execution was done, it is one that is signaled (FEN-4)."""
        assert self._fence is not None  # `launch` has set it
        return self._fence

    def __await__(self) -> Generator[Any, None, ResultT]:
        """Return the result. See `FencedExecution.__await__`."""
        return self._result_for_task().__await__()

    async def _result_for_task(self) -> ResultT:
        from nnfmq.client.task_waiting import (  # late: asyncio costs more to import than this package
            readable,
            result_of,
        )

        await readable(self.fence.fileno())
        state = self.fence.state
        reply: Future[messages.FencedExecutionInfo] = Future()
        self._connection.start_call_nonblocking(self._info_call(), messages.FencedExecutionInfo, reply)
        return self._checked_result(state, self._times(await result_of(reply), is_done=True))

    def info(self) -> FencedTiming:
        """Return the execution's times; blocks until the driver replies. See `FencedExecution.info`."""
        is_done = self.done()
        limit_ns = deadline_after(_INFO_TIMEOUT_S)
        return self._times(
            self._connection.exchange(self._info_call(), messages.FencedExecutionInfo, (), limit_ns), is_done
        )

    def _info_call(self) -> messages.GetExecutionInfo:
        return messages.GetExecutionInfo(self._connection.next_call_id(), self._callback_id)

    def _times(self, reply: messages.FencedExecutionInfo, is_done: bool) -> FencedTiming:
        """Return the validated times of a reply. Raises as `info`."""
        try:
            if self._run is None:
                times = FencedTiming(*fenced_times(reply))
            else:
                times = FencedTiming(*self._run.finish_fenced(reply, is_done))
        except NnfmqError as error:
            if is_done:
                self._observe_failure(error)
            raise
        if is_done and self._launched_ns:
            count_call(self._location, self._launched_ns)
            self._launched_ns = 0  # once
        if self._observation is not None and is_done:
            self._observation.finish((), times.launched)
        return times

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the fence and return the result; blocks. See `FencedExecution.result`."""
        return self._checked_result(self._wait_until_done(timeout), self.info())

    def _checked_result(self, state: FenceState, times: FencedTiming) -> ResultT:
        if state is not FenceState.SIGNALED:
            raise GeneralFailure("the fence is in error, but the driver reports success")
        return self._collect(times)

    def close(self) -> None:
        """Release the execution's reference in the driver, and close the fence. Idempotent."""
        callback_id, self._callback_id = self._callback_id, 0
        self._resources.close()
        if callback_id:
            self._connection.post(messages.ReleaseCallback(self._connection.next_call_id(), callback_id))

    def _is_left_open(self) -> bool:
        return bool(self._callback_id) and self._connection.is_open

    def _is_of_process(self) -> bool:
        return True


def launch_fenced(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    limits: FenceLimits,
    collect: Callable[[FencedTiming], ResultT],
    late: LateRun | None = None,
) -> FencedExecution[ResultT]:
    """Launch a request; blocks until the driver has replied. Borrows the request's pools and the fences.

    If the device does not launch it, the CPU device does, if the model has a fallback. A launched execution that fails
    is not repeated: others may have seen the error of its fence. `late` as for `DeviceFencedExecution.launch`.

    Raises:
        InvalidArgument: If an output's shape is unknown, or a fence is invalid or in error.
        MissedDeadline: If the timeout passes first.
        DeadObject: If the driver exits.
        NnfmqError: The error of the reply's status.
    """
    deadline_ns = deadline_after(limits.timeout)
    try:
        return _launch(model, request, config, limits, deadline_ns, collect, late)
    except NnfmqError as error:
        if not model.can_execute_again(error, deadline_ns):
            raise
        return launch_after_failure(model, request, config, limits, deadline_ns, collect, error, late)


def launch_after_failure(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    limits: FenceLimits,
    deadline_ns: int | None,
    collect: Callable[[FencedTiming], ResultT],
    error: NnfmqError,
    late: LateRun | None = None,
) -> FencedExecution[ResultT]:
    """Launch elsewhere what the device has failed to launch with `error`. Otherwise as `launch_fenced`.

    If the driver has died, that is the driver that has replaced it; otherwise, or if that fails, the CPU device. A
    request with managed buffers can be launched on neither.
    """
    try:
        if any(isinstance(pool, BufferToken) for pool in request.pools):
            raise error
        if model.can_recover(error):
            try:
                launch = partial(_launch, model, request, config, limits, deadline_ns, collect, late)
                return model.execute_again(error, deadline_ns, launch)
            except NnfmqError as failure:
                error = failure
        cpu = model_on_cpu(model, error, deadline_ns)
    finally:
        del error  # this frame, to which it refers, would keep it
    return _launch(cpu, request, config_for_cpu(config), limits, deadline_ns, collect, late)


def _launch(
    model: ModelHandle,
    request: Request,
    config: ExecutionConfig,
    limits: FenceLimits,
    deadline_ns: int | None,
    collect: Callable[[FencedTiming], ResultT],
    late: LateRun | None,
) -> FencedExecution[ResultT]:
    fences, location = fence_fds(limits.wait_for), model.location
    message = messages.ExecuteFenced(
        location.connection.next_call_id(),
        location.require_id(),
        messages.request_to_data(request),
        to_wire_config(model, config),
        to_limit_field(deadline_ns),
        to_limit_field(from_seconds(limits.duration)),
        len(fences),
    )
    fds = [*memory_fds(request.pools), *fences]
    run = RequestRun(model, request, config)
    launched = DeviceFencedExecution.launch(location, message, fds, deadline_ns, collect, run, late)
    launched.keeps = model
    return launched


def fence_fds(fences: Sequence[HasFileno | int]) -> list[int]:
    """Return the fds of `fences`. Borrows them."""
    return [fence if isinstance(fence, int) else fence.fileno() for fence in fences]
