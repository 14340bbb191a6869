"""PreparedModel: a model that the driver has prepared, with one method for each execution mode.

`execute` is synchronous, over the control channel: any shapes, deadlines and number of threads, some hundred µs.
`execute_async` returns immediately; `execute_fenced` waits for fences in the driver; `create_reusable_execution` makes
the driver validate and bind a request once; `burst` is the fastest. Each mode also exists for HAL requests over the
caller's memory. The modules of the modes are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.summaries import clipped, html_tables
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, Model, Request
from nnfmq.runtime import sync_execution
from nnfmq.runtime.array_checks import check_count, checked_arrays
from nnfmq.runtime.array_request import ArrayRequest
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.exclusive_use import exclusive
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.model_handle import ModelFallback, ModelHandle
from nnfmq.runtime.model_state import HasState, StateValues, require_no_state
from nnfmq.runtime.tensor_layout import ALIGNMENT, PADDING, Array, MemoryPreference
from nnfmq.runtime.wire_values import make_execution_config
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.execution_plan.plan import ExecutionPlan
    from nnfmq.fence import HasFileno
    from nnfmq.runtime.aidl_burst_controller import AidlBurst
    from nnfmq.runtime.async_execution import PendingExecution
    from nnfmq.runtime.burst_controller import Burst
    from nnfmq.runtime.burst_pool import BurstPool
    from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming
    from nnfmq.runtime.reusable_execution import Execution, RequestExecution


class PreparedModel(Uncopyable, HasState):
    """A prepared model. Close it, or use `with`; closing the client closes it too. Thread-safe.

    `inputs` and `outputs` describe its arrays: name, shape, dtype, scale, zero point. `device` is the name of the
    device that prepared it. `last_timing` is that of the last execution to end, in any thread.

    If the model has states, those of `execute` are its own, and one thread executes at a time. Each burst and each
    execution has its own. HAL requests contain the states as inputs and outputs, after all others.
    """

    def __init__(
        self,
        connection: Connection,
        model_id: int | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        device: str = "",
        extensions: frozenset[str] = frozenset(),
        states: tuple[StateInfo, ...] = (),
    ) -> None:
        self.handle = ModelHandle(connection, model_id, inputs, outputs, device, extensions, states)
        """The model as the execution modes use it."""
        self.inputs = inputs
        self.outputs = outputs
        self.device = device
        self.last_timing = Timing()
        self._state = StateValues(states) if states else None
        self._claims: dict[int, object] = {}  # see `exclusive_use`
        self.planned_model: Model | None = None
        self._plan: ExecutionPlan | None = None
        self.is_synchronous = False
        """Whether asynchronous executions are done when the call returns: $NNFMQ_SYNC_EXEC_RUNTIME."""

    def __repr__(self) -> str:
        return f"<PreparedModel on {self._place()}: {self.handle.signature}>"

    def _place(self) -> str:
        return f"{clipped(repr(self.device))}{'' if self.handle.is_open else ', closed'}"

    def _repr_html_(self) -> str:
        """Return a table of inputs and outputs, for notebooks."""
        return html_tables(f"PreparedModel on {self._place()}", self.inputs, self.outputs)

    @property
    def connection(self) -> Connection:
        """The connection to the driver that has the model."""
        return self.handle.connection

    @property
    def model_id(self) -> int:
        """The model's id in the driver. Raises InvalidArgument once closed."""
        return self.handle.model_id

    @property
    def plan(self) -> ExecutionPlan | None:
        """The plan, which has one step; None if the application chose the device."""
        if self._plan is None and self.planned_model is not None:
            from nnfmq.runtime.compilation.simple_plan import simple_plan  # few applications need it

            self._plan = simple_plan(self.planned_model, self.device)
        return self._plan

    @plan.setter
    def plan(self, plan: ExecutionPlan) -> None:
        self._plan = plan

    @property
    def fallback(self) -> ModelFallback | None:
        """What executes the model if its device fails; None = the device's error is raised. `close` closes it too."""
        return self.handle.fallback

    @fallback.setter
    def fallback(self, fallback: ModelFallback | None) -> None:
        self.handle.fallback = fallback

    def memory_preference(self, kind: Literal["input", "output"], index: int) -> MemoryPreference:
        """Return the placement of one input or output in the application's memory that is fastest (MEM-6).

        The driver may read the padding of an input. It never writes that of an output. HIDL requests cannot state a
        padding: with its interface versions it is 1.

        Raises:
            InvalidArgument: If there is no such input or output.
        """
        count = len(self.inputs if kind == "input" else self.outputs)
        if not 0 <= index < count:
            raise InvalidArgument(f"the model has {count} {kind}s, there is no {kind} {index}")
        return MemoryPreference(ALIGNMENT, PADDING if self.connection.is_aidl else 1)

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

        Args:
            inputs: For each input, in order, an array of its shape and dtype, or a Buffer.
            out: For each output, an array to fill or a Buffer; returned. None = return new arrays.
            measure: Whether to measure the times in ns; see `last_timing`.
            timeout: In seconds; also the execution's deadline. None = no limit, 0 = has passed.
            loop_timeout: Limit of each WHILE loop, in seconds: 2 by default, at most 15.

        Raises:
            InvalidArgument: If an argument's shape, dtype or number is wrong, or the model is closed.
            BadState: If the model has states, and another thread is executing.
            MissedDeadline: If a limit passes.
            ProtocolError: If the driver's reply is invalid.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        self.handle.require_open()
        config, deadline_ns = make_execution_config(measure, loop_timeout), deadline_after(timeout)
        if self.handle.states:
            return self._execute_with_state(inputs, out, config, deadline_ns)
        outputs, self.last_timing = sync_execution.execute_arrays(self.handle, inputs, out, config, deadline_ns)
        return outputs

    @exclusive
    def _execute_with_state(
        self,
        inputs: Sequence[ArrayLike | Buffer],
        out: Sequence[Array | Buffer] | None,
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> tuple[Array | Buffer, ...]:
        assert isinstance(self._state, StateValues)
        check_count("input", self.inputs, len(inputs))
        if out is not None:
            sync_execution.check_out(self.outputs, out)
        before = self._state.get()
        all_out = None if out is None else [*out, *map(np.empty_like, before)]
        results, self.last_timing = sync_execution.execute_arrays(
            self.handle, (*inputs, *before), all_out, config, deadline_ns
        )
        outputs = results[: len(self.outputs)]
        self._state.set([result for result in results[len(outputs) :] if not isinstance(result, Buffer)])
        return outputs

    def _busy_error(self) -> Exception:
        return BadState("another thread executes this model, which has states; make a burst for each thread")

    def execute_async(
        self,
        *inputs: ArrayLike,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> PendingExecution[tuple[Array, ...]]:
        """Start to run the model and return the pending execution immediately.

        Arguments as for `execute`; the inputs are copied before this returns.

        Raises:
            InvalidArgument: If an input's shape, dtype or number is wrong, or the model is closed.
            DeadObject: If the driver has exited. `PendingExecution.result` raises all other errors.
        """
        from nnfmq.runtime.async_execution import AsyncRequest, start_arrays, started

        config = make_execution_config(measure, loop_timeout)
        async_request = AsyncRequest(self.handle, config, deadline_after(timeout))
        require_no_state(self.states, "execute")
        array_request = ArrayRequest.create(self.handle, checked_arrays(self.inputs, inputs))
        pending = start_arrays(async_request, array_request, self._set_last_timing)
        return started(pending, self.is_synchronous)

    def _set_last_timing(self, timing: Timing) -> None:
        self.last_timing = timing

    def execute_fenced(
        self,
        *inputs: ArrayLike,
        wait_for: Sequence[HasFileno | int] = (),
        measure: bool = False,
        timeout: float | None = None,
        duration: float | None = None,
        loop_timeout: float | None = None,
    ) -> FencedExecution[tuple[Array, ...]]:
        """Run the model once when all fences of `wait_for` are signaled; blocks until it is launched.

        The caller closes the result.

        Args:
            inputs: As for `execute`; copied before this returns.
            wait_for: Fences of nnfmq (for example of other executions), eventfds or sync_files. Borrowed.
            measure: Whether to measure the times in ns; see `FencedExecution.info`.
            timeout: In seconds from the launch; None = no limit.
            duration: In seconds from the last fence; None = no limit.
            loop_timeout: As for `execute`.

        Raises:
            InvalidArgument: If an input is invalid, a fence is invalid or in error, an output's shape is unknown, or
                the model is closed.
            MissedDeadline: If the timeout passes before the launch.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        from nnfmq.runtime.fenced_execution import FenceLimits, launch_fenced

        require_no_state(self.states, "execute")
        array_request = ArrayRequest.create(self.handle, checked_arrays(self.inputs, inputs))
        try:
            config = make_execution_config(measure, loop_timeout)
            limits = FenceLimits(wait_for, timeout, duration)
            request = array_request.request
            launched = launch_fenced(self.handle, request, config, limits, lambda _times: array_request.arrays(()))
        except BaseException:
            array_request.close()
            raise
        launched.call_on_close(array_request.close)
        return launched

    def create_reusable_execution(
        self, *, measure: bool = False, loop_timeout: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> Execution:
        """Return an execution with its own arrays that can be computed many times; blocks. The caller closes it.

        All shapes must be known. It outlives this model, unless the interface version is older than AIDL v4: each
        computation then sends the request. `loop_timeout` as for `execute`. `timeout` (seconds; None = no limit) bounds
        only the creation.

        Raises:
            InvalidArgument: If a shape is not fully known, or the model is closed.
            DeadObject: If the driver exits.
        """
        from nnfmq.runtime.reusable_execution import Execution

        config, deadline_ns = make_execution_config(measure, loop_timeout), deadline_after(timeout)
        return Execution.create(self.handle, config, deadline_ns, reusable=True)

    def create_execution(self, *, measure: bool = False, loop_timeout: float | None = None) -> Execution:
        """Return an execution that can be computed once; a second time raises BadState. The caller closes it.

        As `create_reusable_execution`, but nothing is sent to the driver before the computation, and this model must
        not be closed until then.
        """
        from nnfmq.runtime.reusable_execution import Execution

        return Execution.create(self.handle, make_execution_config(measure, loop_timeout), None, reusable=False)

    def burst(self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S) -> Burst:
        """Configure a burst: two queues and memory for the arrays, for a series of fast executions. Blocks.

        The caller closes it.

        Args:
            polling_window_us: How long a call polls before it sleeps, in µs; 0 = sleep immediately. The default is
                $NNFMQ_BURST_CONTROLLER_POLLING_WINDOW or 50.
            timeout: In seconds; None = no limit.
        """
        from nnfmq.runtime.burst_configuration import configure_burst

        return configure_burst(self.handle, polling_window_us, deadline_after(timeout))

    def burst_pool(
        self, count: int, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> BurstPool:
        """Configure `count` bursts that threads share; blocks. The caller closes the pool.

        Each burst has a thread in the driver. Arguments as for `burst`.

        Raises:
            InvalidArgument: If `count` is less than 1, or as `burst`.
        """
        from nnfmq.runtime.burst_configuration import configure_burst
        from nnfmq.runtime.burst_pool import BurstPool

        configure = partial(configure_burst, self.handle, polling_window_us, deadline_after(timeout))
        return BurstPool.configure(self.handle, count, configure)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request and return the reported shapes and the timing; blocks. Borrows the request's pools.

        The pools are nnfmq memories. The driver validates the request. Raises as `execute`.
        """
        return sync_execution.execute_request(self.handle, request, config, deadline_after(timeout))

    def execute_request_async(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> PendingExecution[ExecutionResult]:
        """Start to execute a HAL request and return the pending execution immediately.

        The request's pools must not be closed before it is done.

        Raises:
            DeadObject: If the driver has exited.
            InvalidArgument: If no message can carry the request. `PendingExecution.result` raises all other errors.
        """
        from nnfmq.runtime.async_execution import AsyncRequest, start_request, started

        pending = start_request(AsyncRequest(self.handle, config, deadline_after(timeout)), request)
        return started(pending, self.is_synchronous)

    def execute_request_fenced(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[FencedTiming]:
        """Execute a HAL request when all fences of `wait_for` are signaled; otherwise as `execute_fenced`."""
        from nnfmq.runtime.fenced_execution import FenceLimits, launch_fenced

        limits = FenceLimits(wait_for, timeout, duration)
        return launch_fenced(self.handle, request, config, limits, lambda times: times)

    def create_reusable_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> RequestExecution:
        """Return a HAL request that the driver has validated and bound, to be executed many times; blocks.

        The caller closes it. Borrows the request's pools.
        """
        from nnfmq.runtime.reusable_execution import RequestExecution

        return RequestExecution.create(self.handle, request, config, deadline_after(timeout))

    def request_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Burst:
        """Configure a burst that only has `execute_request`: without its own memory, so shapes may be unknown.

        Blocks up to `timeout` seconds (None = no limit). The caller closes the burst.
        """
        from nnfmq.runtime.burst_configuration import configure_burst

        return configure_burst(self.handle, None, deadline_after(timeout), with_memory=False)

    def aidl_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> AidlBurst:
        """Configure an AIDL burst: without queues, over the control channel, with tokens for memories.

        Blocks up to `timeout` seconds (None = no limit). The caller closes the burst.
        """
        from nnfmq.runtime.aidl_burst_controller import AidlBurst

        return AidlBurst.configure(self.handle, deadline_after(timeout))

    def close(self) -> None:
        """Release the model in the driver; its bursts remain usable. Idempotent. Blocks up to 1 s.

        Its fallback is closed, too: if the device of a burst fails afterwards, the error is raised.
        """
        self.handle.release()
        if self.fallback is not None:
            self.fallback.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
