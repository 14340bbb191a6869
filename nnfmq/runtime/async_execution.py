"""Executions that go on while their caller does something else: executeAsynchronously and its callback.

The callback comes on the watcher's thread, exactly once: with what the driver says, or with DEAD_OBJECT when it dies.
It turns the answer into a result there and then, so that nothing is left to be closed by whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import MissedDeadlineTransient, NnfmqError, OutputInsufficientSize
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.runtime.array_request import ArrayRequest
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult, memory_fds, to_wire_deadline
from nnfmq.runtime.future import Future
from nnfmq.runtime.result_validation import ResultValidator
from nnfmq.runtime.tensor_layout import Array
from nnfmq.serialize import messages

ResultT = TypeVar("ResultT")
Give: TypeAlias = Callable[[ResultT | NnfmqError], None]


class PendingExecution(Generic[ResultT]):
    """An execution that was begun. Any thread may wait for it, and any number of times; nothing has to be closed."""

    def __init__(self) -> None:
        self._answer: Future[ResultT] = Future()

    def done(self) -> bool:
        """Return True once it is over, well or not. Never blocks."""
        return self._answer.is_given

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over and return True, or False after `timeout` seconds (None = no limit)."""
        try:
            self._answer.wait(deadline_after(timeout))
        except NnfmqError:
            return self.done()
        return True

    def result(self, timeout: float | None = None) -> ResultT:
        """Return the result; blocks up to `timeout` seconds (None = no limit).

        Raises MissedDeadlineTransient where the wait ends first (the execution goes on), or why the execution failed:
        what the driver answered, DeadObject where it died.
        """
        deadline_ns = deadline_after(timeout)
        try:
            return self._answer.wait(deadline_ns)
        except MissedDeadlineTransient:
            if self.done():
                raise
            raise MissedDeadlineTransient("the timeout passed before the execution was over; it goes on") from None


class AsyncRequest:
    """What every asynchronous execution of one model is begun with."""

    def __init__(
        self,
        connection: Connection,
        model_id: int,
        described: Sequence[TensorInfo],
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> None:
        self._connection = connection
        self._model_id = model_id
        self._described = described  # the model's outputs
        self._config = config
        self._deadline_ns = deadline_ns

    def begin(self, request: Request, give: Give[ExecutionResult], patience_ns: int | None) -> None:
        """Send a request, whose pools stay the caller's; `patience_ns` bounds the sending alone.

        `give` gets the outcome once it was judged, or the error that stands for it.
        """
        message, taker, fds = self._prepared(request, give)
        self._connection.begin(message, messages.ExecutionFinished, taker, fds, patience_ns)

    def begin_again(self, request: Request, give: Give[ExecutionResult]) -> None:
        """As `begin`, on the watcher's thread, where nothing may block."""
        message, taker, fds = self._prepared(request, give)
        self._connection.begin_nonblocking(message, messages.ExecutionFinished, taker, fds)

    def _prepared(
        self, request: Request, give: Give[ExecutionResult]
    ) -> tuple[messages.ExecuteAsynchronously, _Judged, list[int]]:
        message = messages.ExecuteAsynchronously(
            self._connection.new_call(),
            self._model_id,
            messages.request_to_data(request),
            messages.config_to_data(self._config),
            to_wire_deadline(self._connection, self._deadline_ns),
        )
        judge = ResultValidator(self._connection, self._described, request, self._config)
        judge.begin()
        return message, _Judged(judge, give), memory_fds(request.pools)

    @property
    def deadline_ns(self) -> int | None:
        """When the execution is to be over."""
        return self._deadline_ns


class _Judged:
    """Turns the driver's answer into an outcome, and gives it on."""

    def __init__(self, judge: ResultValidator, give: Give[ExecutionResult]) -> None:
        self._judge = judge
        self._give = give

    def give(self, answer: messages.ExecutionFinished | NnfmqError) -> None:
        self._give(answer if isinstance(answer, NnfmqError) else self._judged(answer))

    def _judged(self, answer: messages.ExecutionFinished) -> ExecutionResult | NnfmqError:
        try:
            return self._judge.outcome(answer)
        except NnfmqError as error:
            return error


class _ArraysTaker:
    """Turns an outcome into arrays, and asks again where an output needed more room than the model says."""

    def __init__(
        self,
        pending: PendingExecution[tuple[Array, ...]],
        launch: AsyncRequest,
        workspace: ArrayRequest,
        note_timing: Callable[[Timing], None],
    ) -> None:
        self._pending = pending
        self._launch = launch
        self._workspace = workspace
        self._note_timing = note_timing
        self._may_grow = True

    def give(self, outcome: ExecutionResult | NnfmqError) -> None:
        try:
            results = self._results(outcome)
        except NnfmqError as error:
            self._workspace.close()
            self._pending._answer.give(error)
            return
        if results is not None:
            self._workspace.close()
            self._pending._answer.give(results)

    def _results(self, outcome: ExecutionResult | NnfmqError) -> tuple[Array, ...] | None:
        """Return the outputs, None where they were asked for anew."""
        if isinstance(outcome, OutputInsufficientSize) and self._may_grow:
            self._may_grow = False
            self._workspace.grow(outcome)
            self._launch.begin_again(self._workspace.request, self.give)
            return None
        if isinstance(outcome, NnfmqError):
            raise outcome
        self._note_timing(outcome.timing)
        return self._workspace.arrays(outcome.shapes)


def begin_request(launch: AsyncRequest, request: Request) -> PendingExecution[ExecutionResult]:
    """Begin an execution as the HAL has it."""
    pending: PendingExecution[ExecutionResult] = PendingExecution()
    launch.begin(request, pending._answer.give, launch.deadline_ns)
    return pending


def begin_arrays(
    launch: AsyncRequest, workspace: ArrayRequest, note_timing: Callable[[Timing], None]
) -> PendingExecution[tuple[Array, ...]]:
    """Begin an execution over a workspace, which it takes over."""
    pending: PendingExecution[tuple[Array, ...]] = PendingExecution()
    try:
        taker = _ArraysTaker(pending, launch, workspace, note_timing)
        launch.begin(workspace.request, taker.give, launch.deadline_ns)
    except BaseException:
        workspace.close()
        raise
    return pending
