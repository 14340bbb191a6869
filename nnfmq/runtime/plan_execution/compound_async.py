"""Asynchronous executions of a plan: each step is started when the callback of the one before it arrives.

The callbacks arrive on the watcher thread, which must not block. It starts the next step and interprets IF and WHILE;
what may block, such as starting the CPU's driver, is done in the background (`background_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from numpy.typing import ArrayLike

from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.runtime import background_calls
from nnfmq.runtime.array_checks import checked_arrays
from nnfmq.runtime.async_execution import AsyncRequest, PendingExecution
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.future import Future
from nnfmq.runtime.plan_execution.array_arguments import ArrayArguments
from nnfmq.runtime.plan_execution.compound_run import CompoundRun, StepCall
from nnfmq.runtime.plan_execution.plan_handle import PlanHandle
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.tensor_layout import Array

__all__ = ["AsyncRun", "start_arrays", "start_request"]

ResultT = TypeVar("ResultT")


class AsyncRun(Generic[ResultT]):
    """One asynchronous execution of a plan, which completes `future`. A user of the model, until then.

    Takes ownership of `arguments`; `collect` converts the result before their memory is used again.
    """

    def __init__(
        self,
        handle: PlanHandle,
        arguments: ArrayArguments,
        config: ExecutionConfig,
        collect: Callable[[ExecutionResult], ResultT],
        future: Future[ResultT],
    ) -> None:
        self._handle = handle
        self._arguments = [arguments]  # taken out by whatever ends the execution; list.pop is atomic
        self._run = CompoundRun(handle, arguments.memory, config)
        self._collect = collect
        self._future = future

    def start(self) -> None:
        """Start the first step. Blocks while its driver's socket is full. Every later error completes the future."""
        self._proceed()

    def _proceed(self) -> None:
        try:
            call = self._run.next_call()
            if call is None:
                self._succeed(self._run.result())
            elif call.is_on_cpu:
                background_calls.submit(partial(self._execute_on_cpu, call))
            else:
                self._send(call, call.model())
        except NnfmqError as error:
            self.fail(error)

    def _send(self, call: StepCall, model: PreparedModel) -> None:
        try:
            AsyncRequest(model.handle, self._run.config, None).start_nonblocking(call.request(model), self)
        except NnfmqError as error:
            self.set_exception(error)

    def _execute_on_cpu(self, call: StepCall) -> None:
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

    def _succeed(self, result: ExecutionResult) -> None:
        collected = self._collect(result)
        for arguments in self._take():
            self._handle.return_arguments(arguments)
            self._handle.remove_user_in_background()
            self._future.set_result(collected)

    def fail(self, error: NnfmqError) -> None:
        """End the execution with an error, unless it has ended."""
        for arguments in self._take():
            arguments.close()
            self._handle.remove_user_in_background()
            self._future.set_exception(error)

    def _take(self) -> list[ArrayArguments]:
        try:
            return [self._arguments.pop()]
        except IndexError:
            return []


def start_request(handle: PlanHandle, request: Request, config: ExecutionConfig) -> PendingExecution[ExecutionResult]:
    """Start to execute a request of the application. Borrows its pools until the execution is done.

    Raises:
        InvalidArgument: If the request is invalid, or the model is closed.
    """
    from nnfmq.validation.request import validate_request  # few applications make requests

    validate_request(handle.plan.model, request)
    return _start(handle, config, lambda arguments: arguments.memory.bind(request), lambda _arguments, result: result)


def start_arrays(
    handle: PlanHandle, inputs: Sequence[ArrayLike], config: ExecutionConfig
) -> PendingExecution[tuple[Array, ...]]:
    """Start to execute the model with arrays, which are copied.

    Raises:
        InvalidArgument: If an input's shape, dtype or number is wrong, or the model is closed.
    """
    checked = checked_arrays(handle.inputs, inputs)
    targets = [None] * len(handle.outputs)
    return _start(
        handle, config, lambda arguments: arguments.write(checked, targets), lambda arguments, _: arguments.arrays()
    )


def _start(
    handle: PlanHandle,
    config: ExecutionConfig,
    prepare: Callable[[ArrayArguments], None],
    collect: Callable[[ArrayArguments, ExecutionResult], ResultT],
) -> PendingExecution[ResultT]:
    future: Future[ResultT] = Future()
    handle.add_user()
    try:
        arguments = handle.take_arguments()
        try:
            prepare(arguments)
            run = AsyncRun(handle, arguments, config, partial(collect, arguments), future)
        except BaseException:
            arguments.close()
            raise
    except BaseException:
        handle.remove_user()
        raise
    run.start()
    return PendingExecution(future)
