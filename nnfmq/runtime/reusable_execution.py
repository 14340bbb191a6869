"""Executions as objects: a request that the driver has checked and bound once, and runs again and again.

`Execution` has arrays of its own in shared memory, as a burst has; `RequestExecution` is the HAL's, over the caller's
memory. Both run once at a time, and cost the control channel's round trip: where that is too much, take a burst.

An `Execution` that is computed once, and one over an interface that has no reusable executions (all before AIDL v4),
sends its request anew each time: the driver keeps nothing of it (RUX-5).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.deadlines import deadline_after
from nnfmq.fence import Fence, HasFileno
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import Timing, from_seconds, to_limit_field
from nnfmq.hal.types import ExecutionConfig, FenceState, Request, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime import tensor_layout
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult, memory_fds
from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming, fence_fds
from nnfmq.runtime.result_validation import ResultValidator
from nnfmq.runtime.tensor_layout import Array
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.runtime.prepared_model import PreparedModel

ResultT = TypeVar("ResultT")


class RequestExecution:
    """A request to be run any number of times, once at a time. Close it, or use `with`. It outlives its model."""

    def __init__(self, connection: Connection, judge: ResultValidator) -> None:
        self._connection = connection
        self._judge = judge
        self._execution_id: int | None = None

    @classmethod
    def create(
        cls,
        connection: Connection,
        model_id: int,
        described: Sequence[TensorInfo],
        request: Request,
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> Self:
        """Let the driver check a request, whose pools stay the caller's, and keep it; blocks.

        `described` are the model's outputs.
        """
        execution = cls(connection, ResultValidator(connection, described, request, config))
        message = messages.CreateExecution(
            connection.new_call(), model_id, messages.request_to_data(request), messages.config_to_data(config)
        )
        fds = memory_fds(request.pools)
        try:
            connection.call(message, messages.ExecutionCreated, fds, deadline_ns, on_answer=execution._created)
        except BaseException:
            execution._judge.begin()  # what is refused loses its outputs (DOM-7)
            execution.close()
            raise
        return execution

    def _created(self, answer: messages.ExecutionCreated) -> None:
        self._execution_id = answer.execution_id or None

    @property
    def _id(self) -> int:
        if self._execution_id is None:
            raise InvalidArgument("this execution is closed")
        return self._execution_id

    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        """Run it and return the shapes and times that the driver reports; blocks. `timeout` is the run's deadline.

        Raises what the driver answers (InvalidArgument while another run goes on), MissedDeadline, DeadObject,
        ProtocolError for what cannot be true.
        """
        deadline_ns = deadline_after(timeout)
        message = messages.RunExecution(self._connection.new_call(), self._id, to_limit_field(deadline_ns))
        self._judge.begin()
        return self._judge.outcome(self._connection.ask(message, messages.Executed, (), deadline_ns))

    def compute_fenced(
        self,
        wait_for: Sequence[HasFileno | int] = (),
        *,
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[FencedTiming]:
        """Run it when all fences of `wait_for` are signalled; blocks for the launch. The caller closes the result.

        `timeout` (seconds) is the deadline from now on, `duration` counts from the last fence on. Raises as `compute`,
        and InvalidArgument for what is no fence or in error already, or outputs that are not fully specified.
        """
        return self.launch(lambda times: times, wait_for, timeout, duration)

    def launch(
        self,
        collect: Callable[[FencedTiming], ResultT],
        wait_for: Sequence[HasFileno | int],
        timeout: float | None,
        duration: float | None,
    ) -> FencedExecution[ResultT]:
        """As `compute_fenced`, with another result: `collect` makes it of the times when it is asked for."""
        fds, deadline_ns = fence_fds(wait_for), deadline_after(timeout)
        message = messages.RunExecutionFenced(
            self._connection.new_call(),
            self._id,
            to_limit_field(deadline_ns),
            to_limit_field(from_seconds(duration)),
            len(fds),
        )
        return FencedExecution.launch(self._connection, message, fds, deadline_ns, collect, self._judge)

    def close(self) -> None:
        """Release it in the driver; a run that was begun goes on. Harmless when repeated."""
        execution_id, self._execution_id = self._execution_id, None
        if execution_id is not None:
            self._connection.tell(messages.ReleaseExecution(self._connection.new_call(), execution_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Runs(Protocol):
    """A request that can be run."""

    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        """Run it; blocks."""
        ...

    def launch(
        self,
        collect: Callable[[FencedTiming], ResultT],
        wait_for: Sequence[HasFileno | int],
        timeout: float | None,
        duration: float | None,
    ) -> FencedExecution[ResultT]:
        """Launch it behind fences; blocks for the launch."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class _SentAnew:
    """A request that is sent for each run: the driver keeps nothing of it, so that the model has to live."""

    def __init__(self, model: PreparedModel, request: Request, config: ExecutionConfig) -> None:
        self._model, self._request, self._config = model, request, config

    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        return self._model.execute_request(self._request, self._config, timeout=timeout)

    def launch(
        self,
        collect: Callable[[FencedTiming], ResultT],
        wait_for: Sequence[HasFileno | int],
        timeout: float | None,
        duration: float | None,
    ) -> FencedExecution[ResultT]:
        return self._model.launch_fenced(self._request, self._config, (wait_for, timeout, duration), collect)

    def close(self) -> None:
        """Nothing is to be released."""


class Execution:
    """An execution with arrays of its own. Close it, or use `with`. One run at a time.

    A reusable one runs as often as one likes and, over AIDL v4, outlives its model; any other runs once, and its model
    has to live until then. What may not be computed now is BadState.

    `inputs` and `outputs` are arrays over the shared memory itself: write the former, call `compute()` without
    arguments, read the latter, and nothing is copied. They must not be written or believed while it runs.
    `last_timing` is that of the run that ended last, if the execution was made to measure.
    """

    def __init__(self, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], is_reusable: bool) -> None:
        self.is_reusable = is_reusable
        self._was_computed = False
        self._infos = inputs, outputs
        self._resources = ExitStack()
        self._user: object = None  # the call that runs it now
        self._last_fence: Fence | None = None  # of the last fenced run
        self._runs: _Runs
        self.inputs: tuple[Array, ...] = ()
        self.outputs: tuple[Array, ...] = ()
        self.last_timing = Timing()

    @classmethod
    def create(
        cls,
        model: PreparedModel,
        config: ExecutionConfig,
        deadline_ns: int | None,
        reusable: bool,
    ) -> Self:
        """Make the memory and, for a reusable one, let the driver bind it.

        Raises InvalidArgument where a shape is not fully known.
        """
        connection, model_id, execution = model.connection, model.model_id, cls(model.inputs, model.outputs, reusable)
        try:
            request = execution._make_memory()
            if reusable and connection.keeps_executions:
                execution._runs = RequestExecution.create(
                    connection, model_id, model.outputs, request, config, deadline_ns
                )
            else:
                execution._runs = _SentAnew(model, request, config)
            execution._resources.callback(execution._runs.close)
        except BaseException:
            execution.close()
            raise
        return execution

    def _make_memory(self) -> Request:
        inputs, source, self.inputs = self._laid_out("input", self._infos[0], 0)
        outputs, sink, self.outputs = self._laid_out("output", self._infos[1], 1)
        return Request(inputs, outputs, (source, sink))

    def _laid_out(
        self, kind: str, infos: Sequence[TensorInfo], pool_index: int
    ) -> tuple[tuple[RequestArgument, ...], Memory, tuple[Array, ...]]:
        """Make memory for arrays of one kind; return their places, the memory, and the arrays over it."""
        tensor_layout.require_fixed_shapes(kind, infos, "a reusable execution")
        places, size_bytes = tensor_layout.layout(infos, [info.shape for info in infos], pool_index)
        memory = Memory.create(size_bytes, f"nnfmq-{kind}s", one_writer=kind == "input")
        self._resources.callback(memory.close)
        pairs = zip(places, infos, strict=True)
        return places, memory, tuple(tensor_layout.view(memory, place, info, info.shape) for place, info in pairs)

    def compute(
        self, *inputs: ArrayLike, out: Sequence[Array] | None = None, timeout: float | None = None
    ) -> tuple[Array, ...]:
        """Run it once and return the outputs; blocks.

        Takes one array per input, of its shape and dtype, or none at all where `inputs` were filled in place. Returns
        new arrays that the caller owns, or fills and returns those of `out`, which may be the `outputs` of this: then
        nothing is copied. `timeout` in seconds becomes the run's deadline: None = no limit.

        Raises BadState (another run goes on, or it was computed and is not reusable), InvalidArgument (shape, dtype,
        count), MissedDeadline, DeadObject, or what the driver answered.
        """
        if out is not None and out is not self.outputs:
            tensor_layout.check_out(self._infos[1], out)
        with self._only_run():
            self._copy_in(inputs)
            self._was_computed = True
            self.last_timing = self._runs.compute(timeout=timeout).timing
            if out is self.outputs:
                return self.outputs
            return self._results() if out is None else tensor_layout.copy_out(out, self.outputs)

    def compute_fenced(
        self,
        *inputs: ArrayLike,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[tuple[Array, ...]]:
        """Run it when all fences of `wait_for` are signalled; blocks for the launch. The caller closes the result.

        Arguments as for `compute`, `wait_for`, `timeout` and `duration` as for `PreparedModel.execute_fenced`. The
        result's `result()` returns copies of the outputs; ask before the next run begins.
        """
        with self._only_run():
            self._copy_in(inputs)
            self._was_computed = True
            launched = self._runs.launch(lambda _times: self._results(), wait_for, timeout, duration)
            self._last_fence = Fence.adopt(os.dup(launched.fence.fileno()))
            return launched

    @contextmanager
    def _only_run(self) -> Iterator[None]:
        me = object()
        try:
            # Plain assignments, and inside the try: a lock taken just before it stays taken if a signal comes between.
            if self._user is None:
                self._user = me
            if self._user is not me or self._is_under_way():
                raise BadState("this execution is running; one run at a time, or make one for each thread")
            if self._was_computed and not self.is_reusable:
                raise BadState("this execution was computed and is not reusable; see create_reusable_execution")
            yield
        finally:
            if self._user is me:
                self._user = None

    def _is_under_way(self) -> bool:
        """Return True while a fenced run goes on, whoever still holds its fence."""
        if self._last_fence is None:
            return False
        if self._last_fence.state is FenceState.ACTIVE:
            return True
        self._forget_fence()
        return False

    def _forget_fence(self) -> None:
        fence, self._last_fence = self._last_fence, None
        if fence is not None:
            fence.close()

    def _copy_in(self, given: Sequence[ArrayLike]) -> None:
        if given:
            for target, array in zip(self.inputs, tensor_layout.checked_arrays(self._infos[0], given), strict=True):
                np.copyto(target, array, casting="same_kind")

    def _results(self) -> tuple[Array, ...]:
        return tuple(output.copy() for output in self.outputs)

    def close(self) -> None:
        """Release it on both sides; a run that was begun goes on. Harmless when repeated."""
        self.inputs = self.outputs = ()
        self._forget_fence()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
