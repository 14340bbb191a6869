"""Asynchronous executions: the HAL's executeAsynchronously and its callback.

The callback arrives on the watcher thread, exactly once: with the driver's result, or with DEAD_OBJECT when the driver
dies. That thread also converts it to arrays and closes the request's memory, so the application has nothing to close.
If the execution falls back to the CPU, the fallback thread does all that.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.ownership import Uncopyable
from nnfmq.client import fallback_thread
from nnfmq.client.connection.connection import Connection, ResultHandler
from nnfmq.client.execution.requests import RequestRun, count_call, memory_fds, to_wire_config, to_wire_deadline
from nnfmq.client.execution.synchronous import execute_after_failure
from nnfmq.client.model.array_request import ArrayRequest
from nnfmq.client.model.arrays import ExecutionResult, Outputs
from nnfmq.client.model.handle import ModelHandle, ModelLocation
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError, OutputInsufficientSize
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.client.observation import RequestObservation

ResultT = TypeVar("ResultT")


class PendingExecution(Uncopyable, Coroutine[Any, Any, ResultT], Generic[ResultT]):
    """An execution in progress. Any thread may wait for it, any number of times. Nothing has to be closed.

    A task of asyncio awaits it: `scores, = await model.execute_async(image)`. So may several tasks, of several event
    loops. If a task is cancelled, or its `asyncio.timeout` passes, the execution continues, and its result is discarded
    unless somebody else waits for it. It can also be made a task, as a coroutine: `asyncio.create_task(pending)`.
    """

    def __init__(self, future: Future[ResultT]) -> None:
        self._future = future
        self._waits: dict[object, Generator[Any, None, ResultT]] = {}  # of tasks that run this as their coroutine

    def done(self) -> bool:
        """Return True once the execution has succeeded or failed. Does not block."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until done, at most `timeout` seconds (None = no limit); return `done()`."""
        try:
            self._future.result(deadline_after(timeout))
        except NnfmqError:
            return self.done()
        return True

    def result(self, timeout: float | None = None) -> ResultT:
        """Return the result; blocks up to `timeout` seconds (None = no limit).

        Raises:
            MissedDeadlineTransient: If the timeout passes first. The execution continues.
            DeadObject: If the driver has exited.
            NnfmqError: The error that the driver replied.
        """
        deadline_ns = deadline_after(timeout)
        try:
            return self._future.result(deadline_ns)
        except MissedDeadlineTransient:
            if self.done():  # then the driver's own error, not the wait's
                raise
            raise MissedDeadlineTransient(
                "the timeout passed before the execution was done; the execution continues"
            ) from None

    def __await__(self) -> Generator[Any, None, ResultT]:
        """Return the result when there is one; other tasks of the event loop run meanwhile.

        Raises:
            DeadObject: If the driver has exited.
            NnfmqError: The error that the driver replied.
        """
        from nnfmq.client.task_waiting import result_of  # late, because asyncio costs more to import than this package

        return result_of(self._future).__await__()

    def send(self, value: None, /) -> Any:
        """Continue the wait of the task that is running; for asyncio."""
        return self._step(lambda wait: wait.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise an error, such as a cancellation, in the wait of the task that is running; for asyncio."""
        return self._step(lambda wait: wait.throw(*error))

    def close(self) -> None:
        """Do nothing: the execution continues. For asyncio."""

    def _step(self, step: Callable[[Generator[Any, None, ResultT]], Any]) -> Any:
        from asyncio import current_task  # late, as above

        task = current_task()
        wait = self._waits.get(task) or self._waits.setdefault(task, self.__await__())
        try:
            return step(wait)
        except BaseException:  # the result, too, is passed as one: StopIteration
            del self._waits[task]
            raise


class AsyncRequest:
    """Starts asynchronous executions of one model with one configuration and deadline."""

    def __init__(self, model: ModelHandle, config: ExecutionConfig, deadline_ns: int | None) -> None:
        self.model = model
        model.require_open()
        self._config = config
        self._deadline_ns = deadline_ns

    def start(self, request: Request, handler: ResultHandler[ExecutionResult]) -> None:
        """Send a request; `handler` is called on the watcher thread. Borrows the request's pools until then.

        Blocks while the socket is full, at most until the deadline. If the device fails and the request is executed
        elsewhere, `handler` is called on the fallback thread.

        Raises:
            DeadObject: If the driver has exited.
            MissedDeadlineTransient: If the deadline passes before the request is sent.
        """
        connection, message, validator, fds = self._prepare(request, handler)
        with validator.raising_or_executing_again():
            connection.start_call(message, messages.ExecutionFinished, validator, fds, self._deadline_ns)

    def start_nonblocking(self, request: Request, handler: ResultHandler[ExecutionResult]) -> None:
        """As `start`, for the watcher thread. Does not block."""
        connection, message, validator, fds = self._prepare(request, handler)
        with validator.raising_or_executing_again():
            connection.start_call_nonblocking(message, messages.ExecutionFinished, validator, fds)

    def _prepare(
        self, request: Request, handler: ResultHandler[ExecutionResult]
    ) -> tuple[Connection, messages.ExecuteAsynchronously, _ValidatingHandler, list[int]]:
        location = self.model.location
        connection, model_id = location.connection, location.require_id()
        message = messages.ExecuteAsynchronously(
            connection.next_call_id(),
            model_id,
            messages.request_to_data(request),
            to_wire_config(self.model, self._config),
            to_wire_deadline(connection, self._deadline_ns),
        )
        run = RequestRun(self.model, request, self._config)
        fds = memory_fds(request.pools)
        observation = run.begin(HalExecutionMode.ASYNCHRONOUS, self._deadline_ns)
        rescue = _Rescue(self.model, location, request, self._config, self._deadline_ns)
        return connection, message, _ValidatingHandler(run, handler, observation, rescue), fds


class _Rescue(NamedTuple):
    """An execution of a request elsewhere after an error of the device; it keeps the location that the request has."""

    model: ModelHandle
    location: ModelLocation
    request: Request
    config: ExecutionConfig
    deadline_ns: int | None

    def submit(self, error: NnfmqError, handler: ResultHandler[ExecutionResult]) -> bool:
        """Let the fallback thread execute the request and call `handler`; return False if nothing can execute it.

        Does not block.
        """
        if not self.model.can_execute_again(error, self.deadline_ns):
            return False
        try:
            fallback_thread.submit(partial(self._run, error, handler))
        except RuntimeError:  # no thread can be started
            return False
        return True

    def _run(self, error: NnfmqError, handler: ResultHandler[ExecutionResult]) -> None:
        try:
            result = execute_after_failure(self.model, self.request, self.config, self.deadline_ns, error)
        except NnfmqError as failure:
            handler.set_exception(failure)
        except BaseException:
            handler.set_exception(error)
            raise
        else:
            handler.set_result(result)
        finally:
            del error  # this frame, to which it may refer, would keep it


class _ValidatingHandler:
    """Validates the driver's callback and passes the result on."""

    def __init__(
        self,
        run: RequestRun,
        handler: ResultHandler[ExecutionResult],
        observation: RequestObservation | None,
        rescue: _Rescue,
    ) -> None:
        self._run = run
        self._handler = handler
        self._observation = observation
        self._rescue = rescue
        self._begin_ns = monotonic_ns()

    def set_result(self, reply: messages.ExecutionFinished) -> None:
        try:
            result = self._run.finish(reply)
        except NnfmqError as error:
            self.set_exception(error)
        else:
            count_call(self._rescue.location, self._begin_ns, reply.driver_ns)
            if self._observation is not None:
                self._observation.finish(result.shapes, result.timing)  # before the handler closes the memory
            self._handler.set_result(result)

    def set_exception(self, error: NnfmqError) -> None:
        self._observe_failure(error)
        if not self._rescue.submit(error, self._handler):
            self._handler.set_exception(error)

    @contextmanager
    def raising_or_executing_again(self) -> Iterator[None]:
        """Handle an error of the block, which sends the request: raise it, unless the request is executed elsewhere."""
        try:
            yield
        except NnfmqError as error:
            self._observe_failure(error)
            if not self._rescue.submit(error, self._handler):
                raise

    def _observe_failure(self, error: NnfmqError) -> None:
        """Report the error to the observers of the model."""
        if self._observation is not None:
            self._observation.fail(error)


class _ArrayHandler:
    """Completes a future with output arrays. Executes once more if an output was larger than its space."""

    def __init__(
        self,
        future: Future[Outputs],
        async_request: AsyncRequest,
        array_request: ArrayRequest,
        note_timing: Callable[[Timing], None],
    ) -> None:
        self._future = future
        self._async_request = async_request
        self._array_request = array_request
        self._note_timing = note_timing
        self._may_grow = True

    def set_result(self, result: ExecutionResult) -> None:
        self._note_timing(result.timing)
        try:
            arrays = self._array_request.arrays(result.shapes)
        except NnfmqError as error:
            self._fail(error)
            return
        self._array_request.close()
        self._future.set_result(arrays)

    def set_exception(self, error: NnfmqError) -> None:
        if not isinstance(error, OutputInsufficientSize) or not self._may_grow:
            self._fail(error)
            return
        self._may_grow = False
        try:
            self._array_request.grow(error)
            self._async_request.start_nonblocking(self._array_request.request, self)
        except NnfmqError as failure:
            self._fail(failure)

    def _fail(self, error: NnfmqError) -> None:
        self._array_request.close()
        self._future.set_exception(error)


def start_request(async_request: AsyncRequest, request: Request) -> PendingExecution[ExecutionResult]:
    """Start an execution of a HAL request. Borrows its pools until the execution is done. Raises as `start`."""
    future: Future[ExecutionResult] = Future(async_request.model)
    async_request.start(request, future)
    return PendingExecution(future)


def started(pending: PendingExecution[ResultT], is_synchronous: bool) -> PendingExecution[ResultT]:
    """Return a pending execution: immediately, or when it is done if the settings want executions to be synchronous."""
    if is_synchronous:
        pending.wait()
    return pending


def start_arrays(
    async_request: AsyncRequest, array_request: ArrayRequest, note_timing: Callable[[Timing], None]
) -> PendingExecution[Outputs]:
    """Start an execution with arrays. Takes ownership of `array_request`. Raises as `AsyncRequest.start`.

    `note_timing` gets the execution's timing, on the watcher thread.
    """
    future: Future[Outputs] = Future(async_request.model)
    try:
        async_request.start(array_request.request, _ArrayHandler(future, async_request, array_request, note_timing))
    except BaseException:
        array_request.close()
        raise
    return PendingExecution(future)
