"""Asynchronous executions of a plan.

The callbacks arrive on the watcher thread, which must not block. It starts the next step and interprets IF and WHILE;
what may block, such as starting the CPU's driver, is done on the fallback thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Generic, TypeVar

from nnfmq.client import fallback_thread
from nnfmq.client.connection.connection import ResultHandler
from nnfmq.client.execution.asynchronous import AsyncRequest, PendingExecution
from nnfmq.client.model.arrays import ExecutionResult, InputValue, Outputs, checked_arrays
from nnfmq.client.model.handle import ModelHandle
from nnfmq.client.partitioned.executions import CompoundRun, PlanCall
from nnfmq.client.partitioned.handle import PlanHandle
from nnfmq.client.partitioned.memory import ArrayArguments
from nnfmq.client.waiting import Future
from nnfmq.hal.errors import NnfmqError, ResourceExhaustedTransient
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.validation.requests import validate_request

__all__ = ["AsyncRun", "new_run", "start_arrays", "start_request", "submit_fallback"]


ResultT = TypeVar("ResultT")


class AsyncRun(Generic[ResultT]):
    """One asynchronous execution of a plan. It is a user of the model from before its creation until its end.

    Args:
        handle: The model.
        run: The execution.
        collect: Converts the result, while the memory is still the execution's.
        release: Called at the end, with whether the execution has succeeded. Owns the memory.
        completion: Receives what `collect` returns, or the error.
    """

    def __init__(
        self,
        handle: PlanHandle,
        run: CompoundRun,
        collect: Callable[[ExecutionResult], ResultT],
        release: Callable[[bool], None],
        completion: ResultHandler[ResultT],
    ) -> None:
        self._handle = handle
        self.memory, self.config = run.memory, run.config
        self._run = run
        self._collect = collect
        self._releases = [release]  # taken out by whatever ends the execution; list.pop is atomic
        self._completion = completion

    def limit(self, deadline_ns: int | None) -> None:
        """Set the execution's deadline; call it before the execution is started."""
        self._run.deadline_ns = deadline_ns

    def start(self) -> None:
        """Start the first step. Does not block. Every error goes to the completion."""
        self._proceed()

    def start_on_cpu(self, error: NnfmqError) -> None:
        """Execute the whole model on the CPU, because steps that were started elsewhere have failed with `error`."""
        try:
            self._run.execute_whole_model(error)
        except NnfmqError as final:
            self.fail(final)
        else:
            self._proceed()

    def succeed(self) -> None:
        """End the execution with success: its steps were executed elsewhere."""
        try:
            self._succeed()
        except NnfmqError as error:
            self.fail(error)

    def _proceed(self) -> None:
        try:
            call = self._run.next_call()
            if call is None:
                self._succeed()
            elif call.is_on_cpu:
                submit_fallback(partial(self._execute_on_cpu, call))
            else:
                self._send(call, call.model())
        except NnfmqError as error:
            self.fail(error)

    def _send(self, call: PlanCall, model: ModelHandle) -> None:
        try:
            AsyncRequest(model, self.config, self._run.deadline_ns).start_nonblocking(call.request(model), self)
        except NnfmqError as error:
            self.set_exception(error)

    def _execute_on_cpu(self, call: PlanCall) -> None:
        try:
            model = call.model()
        except NnfmqError as error:
            self.set_exception(error)
        else:
            self._send(call, model)

    def set_result(self, result: ExecutionResult) -> None:
        """Receive the result of a step."""
        try:
            self._run.succeed(result.shapes)
        except NnfmqError as error:
            self.fail(error)
        else:
            self._proceed()

    def set_exception(self, error: NnfmqError) -> None:
        """Receive the error of a step."""
        try:
            self._run.fail(error)
        except NnfmqError as final:
            self.fail(final)
        else:
            self._proceed()

    def _succeed(self) -> None:
        collected = self._collect(self._run.result())
        if self._end(is_successful=True):
            self._completion.set_result(collected)

    def fail(self, error: NnfmqError) -> None:
        """End the execution with an error, unless it has ended."""
        if self._end(is_successful=False):
            self._run.observation.fail(error)
            self._completion.set_exception(error)

    def _end(self, *, is_successful: bool) -> bool:
        """Release memory and model; return False if the execution has ended before."""
        try:
            release = self._releases.pop()
        except IndexError:
            return False
        release(is_successful)
        self._handle.remove_user_nonblocking()
        return True


def submit_fallback(function: Callable[[], object]) -> None:
    """Run `function` on the fallback thread. Raises ResourceExhaustedTransient if no thread can be started."""
    try:
        fallback_thread.submit(function)
    except RuntimeError as error:
        raise ResourceExhaustedTransient(f"a step cannot be executed on the CPU: {error}") from error


def start_request(
    handle: PlanHandle, request: Request, config: ExecutionConfig, deadline_ns: int | None
) -> PendingExecution[ExecutionResult]:
    """Start to execute a request of the application. Borrows its pools until the execution is done.

    Raises:
        InvalidArgument: If the request is invalid, or the model is closed.
    """
    validate_request(handle.plan.model, request)
    return _start(handle, config, deadline_ns, lambda a: a.memory.bind(request), lambda _arguments, result: result)


def start_arrays(
    handle: PlanHandle, inputs: Sequence[InputValue], config: ExecutionConfig, deadline_ns: int | None
) -> PendingExecution[Outputs]:
    """Start to execute the model with arrays, which are copied.

    Raises:
        InvalidArgument: If an input's shape, dtype or number is wrong, or the model is closed.
    """
    checked = checked_arrays(handle.inputs, inputs)
    targets = [None] * len(handle.outputs)
    return _start(handle, config, deadline_ns, lambda a: a.write(checked, targets), lambda a, _result: a.arrays())


def _start(
    handle: PlanHandle,
    config: ExecutionConfig,
    deadline_ns: int | None,
    prepare: Callable[[ArrayArguments], None],
    collect: Callable[[ArrayArguments, ExecutionResult], ResultT],
) -> PendingExecution[ResultT]:
    future: Future[ResultT] = Future(handle)
    started = new_run(handle, config, prepare, collect, future)
    started.limit(deadline_ns)
    started.start()
    return PendingExecution(future)


def new_run(
    handle: PlanHandle,
    config: ExecutionConfig,
    prepare: Callable[[ArrayArguments], None],
    collect: Callable[[ArrayArguments, ExecutionResult], ResultT],
    completion: ResultHandler[ResultT],
    mode: HalExecutionMode = HalExecutionMode.ASYNCHRONOUS,
) -> AsyncRun[ResultT]:
    """Return an execution with arguments that `prepare` fills, and from which `collect` takes the result.

    Raises:
        BadState: If the model is closed.
        Exception: Any error that `prepare` raises.
    """
    with ExitStack() as undo:
        handle.add_user()
        undo.callback(handle.remove_user)
        arguments = handle.take_arguments()
        undo.callback(arguments.close)
        prepare(arguments)
        run = CompoundRun(handle, arguments.memory, config, mode)
        undo.pop_all()
    release = partial(_release, handle, arguments)
    return AsyncRun(handle, run, partial(collect, arguments), release, completion)


def _release(handle: PlanHandle, arguments: ArrayArguments, is_successful: bool) -> None:
    if is_successful:
        handle.return_arguments(arguments)
    else:
        arguments.close()
