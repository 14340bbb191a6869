"""A model that the driver holds ready, as the application sees it, and the ways to execute it.

`execute` is the HAL's executeSynchronously over the control channel: any shapes, deadlines, any number of threads at
once, some hundred microseconds. `execute_async` returns at once; `execute_fenced` waits for fences in the driver;
`create_reusable_execution` has the driver check and bind a request once. `burst` makes what is fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError, OutputInsufficientSize
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import Timing, from_seconds, to_limit_field
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.runtime import tensor_layout
from nnfmq.runtime.array_request import ArrayRequest, checked_arguments
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult, make_execution_config, memory_fds, to_wire_deadline
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.result_validation import ResultValidator
from nnfmq.runtime.tensor_layout import Array
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.fence import HasFileno
    from nnfmq.runtime.aidl_burst_controller import AidlBurst
    from nnfmq.runtime.async_execution import AsyncRequest, PendingExecution
    from nnfmq.runtime.burst_controller import Burst
    from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming
    from nnfmq.runtime.reusable_execution import Execution, RequestExecution

ResultT = TypeVar("ResultT")


def execute_request(
    connection: Connection,
    model_id: int,
    described: Sequence[TensorInfo],
    request: Request,
    config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
    deadline_ns: int | None = None,
) -> ExecutionResult:
    """Execute a request, whose pools stay the caller's; blocks. `described` are the model's outputs.

    Raises the error that the status stands for, ProtocolError for an answer that no honest driver gives.
    """
    message = messages.Execute(
        connection.new_call(),
        model_id,
        messages.request_to_data(request),
        messages.config_to_data(config),
        to_wire_deadline(connection, deadline_ns),
    )
    return request_execution(connection, message, described, request, config, deadline_ns)


def request_execution(
    connection: Connection,
    message: messages.Call,
    described: Sequence[TensorInfo],
    request: Request,
    config: ExecutionConfig,
    deadline_ns: int | None,
) -> ExecutionResult:
    """Send a call that Executed answers, with the request's memories, and judge the answer; as `execute_request`."""
    judge, fds = ResultValidator(connection, described, request, config), memory_fds(request.pools)
    judge.begin()
    return judge.outcome(connection.ask(message, messages.Executed, fds, deadline_ns))


def _check_out(infos: Sequence[TensorInfo], out: Sequence[Array | Buffer]) -> None:
    given: Any = out  # whatever the application gave
    if not isinstance(given, Sequence) or not any(isinstance(target, Buffer) for target in given):
        tensor_layout.check_out(infos, given)
        return
    if len(given) != len(infos):
        raise InvalidArgument(f"the model has {len(infos)} outputs, `out` has {len(given)} arrays or buffers")
    arrays = [pair for pair in zip(infos, given, strict=True) if not isinstance(pair[1], Buffer)]
    tensor_layout.check_out([info for info, _ in arrays], [target for _, target in arrays])


def _copy_out(targets: Sequence[Array | Buffer], results: Sequence[Array | Buffer]) -> tuple[Array | Buffer, ...]:
    """Copy results into the caller's arrays, and return what the caller gave."""
    pairs = zip(targets, results, strict=True)
    arrays = [(t, r) for t, r in pairs if isinstance(t, np.ndarray) and isinstance(r, np.ndarray)]
    tensor_layout.copy_out([target for target, _ in arrays], [result for _, result in arrays])
    return tuple(targets)


class PreparedModel:
    """A prepared model. Close it, or use `with`; closing the client closes it too. Thread-safe.

    `inputs` and `outputs` describe the arrays that it takes and gives: name, shape, dtype, scale, zero point.
    `device` is the name of the one that prepared it. `last_timing` is that of the execution that ended last, in
    whichever thread.
    """

    def __init__(
        self,
        connection: Connection,
        model_id: int | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        device: str = "",
    ) -> None:
        self._connection = connection
        self.device = device
        self._model_id = model_id
        self.inputs = inputs
        self.outputs = outputs
        self.last_timing = Timing()

    @property
    def connection(self) -> Connection:
        """The way to the driver that has it."""
        return self._connection

    @property
    def model_id(self) -> int:
        """The driver's number for this model. Raises InvalidArgument once closed."""
        if self._model_id is None:
            raise InvalidArgument("this prepared model is closed")
        return self._model_id

    def memory_preference(self, kind: Literal["input", "output"], index: int) -> tensor_layout.MemoryPreference:
        """Return where in a memory of the application's one input or output lies best (MEM-6).

        Padding counts nothing where a result is too large, and nothing is written there. Raises InvalidArgument where
        there is no such input or output.
        """
        count = len(self.inputs if kind == "input" else self.outputs)
        if not 0 <= index < count:
            raise InvalidArgument(f"the model has {count} {kind}s, there is no {kind} {index}")
        return tensor_layout.MemoryPreference(tensor_layout.ALIGNMENT, tensor_layout.PADDING)

    def take_answer(self, answer: messages.PreparedModelReady) -> None:
        """Note what the driver made; for a model that is created before its number is known."""
        if answer.status is ErrorStatus.NONE:
            self._model_id = answer.model_id

    @overload
    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> tuple[Array, ...]: ...

    @overload
    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array | Buffer],
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> tuple[Array | Buffer, ...]: ...

    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array | Buffer] | None = None,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> tuple[Array | Buffer, ...]:
        """Run the model once over the control channel and return its outputs; blocks.

        Takes one array per input, in order, of the input's shape and dtype, or a Buffer that holds it. Returns new
        arrays that the caller owns, or fills and returns those of `out`, among which may be Buffers, too. With
        `measure`, `last_timing` then holds the times in ns. `timeout` is in seconds and becomes the execution's
        deadline: None = no limit, 0 = has passed. `loop_timeout` bounds each WHILE, in seconds: by default 2, at most
        15.

        Raises InvalidArgument (shape, dtype, count, closed), MissedDeadline, DeadObject, ProtocolError where the driver
        states impossible shapes, or what the driver answered.
        """
        model_id, config = self.model_id, make_execution_config(measure, loop_timeout)
        given = checked_arguments(self.inputs, inputs)
        if out is not None:
            _check_out(self.outputs, out)
        targets = out if out is not None else [None] * len(self.outputs)
        deadline_ns, writer = deadline_after(timeout), object()
        self._begin_roles(given, targets, writer)
        with ArrayRequest.create(self.inputs, self.outputs, given, targets, self._connection) as workspace:
            asked = self._connection, model_id, self.outputs
            try:
                outcome = execute_request(*asked, workspace.request, config, deadline_ns)
            except OutputInsufficientSize as error:
                workspace.grow(error)  # outputs of unknown shape: the driver has now said what they need
                outcome = execute_request(*asked, workspace.request, config, deadline_ns)
            self.last_timing = outcome.timing
            results = workspace.results(outcome.shapes)
        for target in targets:
            if isinstance(target, Buffer):
                target.end_role(writer)
        return results if out is None else _copy_out(out, results)

    def _begin_roles(self, given: Sequence[object], targets: Sequence[object], writer: object) -> None:
        """Tell the buffers among the arguments of an execution what they are to be."""
        for values, is_output in ((given, False), (targets, True)):
            for index, value in enumerate(values):
                if isinstance(value, Buffer):
                    value.check_role(self, index, is_output, writer)

    def execute_async(
        self,
        *inputs: ArrayLike,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> PendingExecution[tuple[Array, ...]]:
        """Begin to run the model and return at once with what will have its outputs.

        Arguments as for `execute`; they are copied before this returns. Raises InvalidArgument for what is wrong with
        the arrays, DeadObject; everything else comes with the result.
        """
        from nnfmq.runtime.async_execution import begin_arrays

        launch = self._launch(make_execution_config(measure, loop_timeout), timeout)
        given = tensor_layout.checked_arrays(self.inputs, inputs)
        return begin_arrays(launch, ArrayRequest.create(self.inputs, self.outputs, given), self._note_timing)

    def execute_fenced(
        self,
        *inputs: ArrayLike,
        wait_for: Sequence[HasFileno | int] = (),
        measure: bool = False,
        timeout: float | None = None,
        duration: float | None = None,
        loop_timeout: float | None = None,
    ) -> FencedExecution[tuple[Array, ...]]:
        """Run the model once all fences of `wait_for` are signalled; returns when that was launched.

        Fences are nnfmq's own, those of other executions among them, eventfds or sync_files; they stay the caller's.
        `timeout` (seconds) is the deadline from now on, `duration` counts from the last fence on. The other arguments
        as for `execute`; inputs are copied before this returns. The caller closes the result.

        Raises InvalidArgument (also for outputs of unknown shape, for what is no fence and for a fence in error),
        MissedDeadline, DeadObject, or what the driver answered.
        """
        given = tensor_layout.checked_arrays(self.inputs, inputs)
        workspace = ArrayRequest.create(self.inputs, self.outputs, given)
        try:
            launched = self.launch_fenced(
                workspace.request,
                make_execution_config(measure, loop_timeout),
                (wait_for, timeout, duration),
                lambda _times: workspace.arrays(()),
            )
        except BaseException:
            workspace.close()
            raise
        launched.keep(workspace.close)
        return launched

    def create_reusable_execution(
        self, *, measure: bool = False, loop_timeout: float | None = None, timeout: float | None = 10.0
    ) -> Execution:
        """Have the driver make memory-bound arrays into an execution that runs again and again; blocks.

        Shapes must be fully known. The caller closes it; it outlives this model, unless the interface is older than
        AIDL v4: then each run sends the request anew. `loop_timeout` as for `execute`; `timeout` (seconds) bounds the
        making alone. Raises InvalidArgument, DeadObject.
        """
        from nnfmq.runtime.reusable_execution import Execution

        config, deadline_ns = make_execution_config(measure, loop_timeout), deadline_after(timeout)
        return Execution.create(self, config, deadline_ns, reusable=True)

    def create_execution(self, *, measure: bool = False, loop_timeout: float | None = None) -> Execution:
        """Make an execution that is computed once: a second time is BadState. This model has to live until then.

        As `create_reusable_execution`, but the driver is told nothing before it is computed.
        """
        from nnfmq.runtime.reusable_execution import Execution

        return Execution.create(self, make_execution_config(measure, loop_timeout), None, reusable=False)

    def _launch(self, config: ExecutionConfig, timeout: float | None) -> AsyncRequest:
        from nnfmq.runtime.async_execution import AsyncRequest

        return AsyncRequest(self._connection, self.model_id, self.outputs, config, deadline_after(timeout))

    def launch_fenced(
        self,
        request: Request,
        config: ExecutionConfig,
        limits: tuple[Sequence[HasFileno | int], float | None, float | None],
        collect: Callable[[FencedTiming], ResultT],
    ) -> FencedExecution[ResultT]:
        """Launch a request behind `limits`: the fences, the timeout and the duration."""
        from nnfmq.runtime.fenced_execution import FencedExecution, fence_fds

        fences, deadline_ns = fence_fds(limits[0]), deadline_after(limits[1])
        message = messages.ExecuteFenced(
            self._connection.new_call(),
            self.model_id,
            messages.request_to_data(request),
            messages.config_to_data(config),
            to_limit_field(deadline_ns),
            to_limit_field(from_seconds(limits[2])),
            len(fences),
        )
        fds = [*memory_fds(request.pools), *fences]
        judge = ResultValidator(self._connection, self.outputs, request, config)
        return FencedExecution.launch(self._connection, message, fds, deadline_ns, collect, judge)

    def _note_timing(self, timing: Timing) -> None:
        self.last_timing = timing

    # ------------------------------------------------------------------------------------------------ as the HAL has it

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute one request as the HAL has it; its pools are nnfmq memories and stay the caller's. Blocks.

        Return the shapes that the driver reports, none where it reports none, and the timing. What is wrong with the
        request, the driver says. Raises what it answers, MissedDeadline, DeadObject, ProtocolError for what cannot be
        true.
        """
        asked = self._connection, self.model_id, self.outputs, request, config, deadline_after(timeout)
        return execute_request(*asked)

    def execute_request_async(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> PendingExecution[ExecutionResult]:
        """Begin to execute one request as the HAL has it, and return at once. Its pools must not be closed before.

        Raises DeadObject, InvalidArgument for what cannot be sent; all else comes with the result.
        """
        from nnfmq.runtime.async_execution import begin_request

        return begin_request(self._launch(config, timeout), request)

    def execute_request_fenced(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[FencedTiming]:
        """Execute one request as the HAL has it, once all fences are signalled; as `execute_fenced` otherwise."""
        return self.launch_fenced(request, config, (wait_for, timeout, duration), lambda times: times)

    def create_reusable_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = 10.0,
    ) -> RequestExecution:
        """Have the driver check one request as the HAL has it and keep it, to be run often. The caller closes it."""
        from nnfmq.runtime.reusable_execution import RequestExecution

        asked = self._connection, self.model_id, self.outputs
        return RequestExecution.create(*asked, request, config, deadline_after(timeout))

    def request_burst(self, *, timeout: float | None = 10.0) -> Burst:
        """Configure a burst for `execute_request` alone: it has no memory of its own, so shapes may be unknown.

        Blocks up to `timeout` seconds. The caller closes the burst.
        """
        from nnfmq.runtime.burst_controller import Burst

        return Burst.configure(self._connection, self, None, deadline_after(timeout), with_memory=False)

    def aidl_burst(self, *, timeout: float | None = 10.0) -> AidlBurst:
        """Configure a burst as AIDL has it: without queues, over the control channel, with tokens for memories.

        Blocks up to `timeout` seconds. The caller closes the burst.
        """
        from nnfmq.runtime.aidl_burst_controller import AidlBurst

        return AidlBurst.configure(self._connection, self, deadline_after(timeout))

    def burst(self, *, polling_window_us: float | None = None, timeout: float | None = 10.0) -> Burst:
        """Configure a burst: two queues and a memory for each direction, kept for a series of quick executions.

        `polling_window_us`: how long a call polls before it sleeps (0 = sleep at once); the default is
        $NNFMQ_BURST_CONTROLLER_POLLING_WINDOW or 50. Blocks up to `timeout` seconds. The caller closes the burst.
        """
        from nnfmq.runtime.burst_controller import Burst

        return Burst.configure(self._connection, self, polling_window_us, deadline_after(timeout))

    def close(self) -> None:
        """Release the model in the driver; its bursts live on. Harmless when repeated, or when the driver is gone."""
        model_id, self._model_id = self._model_id, None
        if model_id is None or not self._connection.is_open:
            return
        try:
            message = messages.ReleaseModel(self._connection.new_call(), model_id)
            self._connection.ask(message, messages.Reply, (), time.monotonic_ns() + 1_000_000_000)
        except NnfmqError:
            pass  # the driver is gone, and the model with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
