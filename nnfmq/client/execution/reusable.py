"""Execution objects: a request that the driver validates and binds once, and executes many times (AIDL `IExecution`).

`Execution` has its own arrays in shared memory, as a burst has. `RequestExecution` is over the caller's memory. Each
executes once at a time, and takes a round trip over the control channel: a burst is faster.

An `Execution` that may be computed only once, or whose interface version is older than AIDL v4 and has no reusable
executions, sends its request each time. The driver then keeps nothing of it (RUX-5).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.fence import Fence, HasFileno
from nnfmq.base.ownership import Claims, Closable, exclusive
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.execution.fenced import (
    DeviceFencedExecution,
    FencedExecution,
    FencedTiming,
    FenceLimits,
    fence_fds,
    launch_after_failure,
    launch_fenced,
)
from nnfmq.client.execution.late_run import LateRun
from nnfmq.client.execution.requests import RequestRun, memory_fds, to_wire_config
from nnfmq.client.execution.synchronous import (
    exchange_execution,
    execute_after_failure,
    execute_on_device,
    execute_request,
)
from nnfmq.client.model.array_request import IN_PLACE, MappedArrays, has_unknown_shapes, with_prepared
from nnfmq.client.model.arrays import (
    Array,
    ExecutionResult,
    InputValue,
    Outputs,
    no_inputs_error,
)
from nnfmq.client.model.handle import CompiledHandle, HasState, MappedState, ModelHandle, require_no_state
from nnfmq.hal.errors import BadState, NnfmqError, OutputInsufficientSize, ProtocolError
from nnfmq.hal.summaries import signature
from nnfmq.hal.timing import Timing, from_seconds, to_limit_field
from nnfmq.hal.types import ExecutionConfig, FenceState, HalExecutionMode, OutputShape, Request
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.client.model.array_layouts import ArrayLayouts, LaidOutArrays, Shape

ResultT = TypeVar("ResultT")


class BoundRequest(ClosedWhenDropped, Closable, ABC):
    """A HAL request that can be executed any number of times, once at a time. Close it, or use `with`.

    After a call that ended early, at its deadline or by a signal handler, the next one first waits until the driver has
    ended that execution. `late` is such an execution; requests over the same memory share it.
    """

    def __init__(self) -> None:
        self.late = LateRun()

    @abstractmethod
    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        """Execute once and return the reported shapes and the timing; blocks.

        `timeout` (seconds; None = no limit) is also the execution's deadline.

        Raises:
            InvalidArgument: If another execution is in progress.
            BadState: If this object is closed.
            ProtocolError: If the driver's reply is invalid.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """

    def compute_fenced(
        self,
        wait_for: Sequence[HasFileno | int] = (),
        *,
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[FencedTiming]:
        """Execute once when all fences of `wait_for` are signaled; blocks until launched. The caller closes the result.

        `timeout` (seconds) counts from the launch, `duration` from the last fence; None = no limit.

        Raises:
            InvalidArgument: If a fence is invalid or in error, or an output's shape is unknown.
            NnfmqError: As `compute`.
        """
        return self.launch(FenceLimits(wait_for, timeout, duration), lambda times: times)

    @abstractmethod
    def launch(self, limits: FenceLimits, collect: Callable[[FencedTiming], ResultT]) -> FencedExecution[ResultT]:
        """As `compute_fenced`, but `collect` converts the times to the result when that is asked for."""

    @abstractmethod
    def close(self) -> None:
        """Release the request in its drivers; an execution in progress continues. Idempotent."""

    def _is_left_open(self) -> bool:
        return False

    def _close_dropped(self) -> None:
        self.close()


class RequestExecution(BoundRequest):
    """A request that one driver has validated and bound. It outlives its model."""

    def __init__(self, model: ModelHandle, request: Request, config: ExecutionConfig) -> None:
        super().__init__()
        self._model, self._request, self._config = model, request, config
        self._location = model.location.without_id()
        self._run = RequestRun(model, request, config)
        self._execution_id: int | None = None
        self._is_closed = False

    @classmethod
    def create(cls, model: ModelHandle, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> Self:
        """Make the driver validate and bind a request; blocks. Borrows the request's pools.

        If the driver fails, and others may execute the request, each computation tries the driver again.

        Raises:
            NnfmqError: The error that the driver replied.
        """
        execution = cls(model, request, config)
        try:
            execution._bind(deadline_ns)
        except BaseException as error:
            execution._run.discard_outputs()
            if isinstance(error, NnfmqError) and model.can_execute_again(error, deadline_ns):
                return execution
            execution.close()
            raise
        return execution

    def _bind(self, deadline_ns: int | None) -> None:
        """Make the driver that has the model validate and bind the request; blocks."""
        location = self._model.location
        message = messages.CreateExecution(
            location.connection.next_call_id(),
            location.require_id(),
            messages.request_to_data(self._request),
            to_wire_config(self._model, self._config),
        )
        fds, self._location = memory_fds(self._request.pools), location.without_id()
        location.connection.call(message, messages.ExecutionCreated, fds, deadline_ns, on_reply=self._on_created)

    def _on_created(self, reply: messages.ExecutionCreated) -> None:
        self._execution_id = reply.execution_id or None

    def _bound_id(self, deadline_ns: int | None) -> int:
        """Return the id of the request in the driver, which binds it if it has not done so; blocks."""
        if self._is_closed:
            raise BadState("this execution is closed")
        if self._execution_id is None or self._model.has_moved_from(self._location.connection):
            self._bind(deadline_ns)
        if self._execution_id is None:
            raise ProtocolError("the driver bound a request without an id for it")
        return self._execution_id

    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        """Execute once; blocks. See `BoundRequest.compute`."""
        return self.compute_until(deadline_after(timeout), self.late)

    def compute_until(self, deadline_ns: int | None, late: LateRun) -> ExecutionResult:
        """As `compute`, with a deadline in place of a timeout, and the late execution of the same memory."""
        late.wait(deadline_ns)
        try:
            execution_id, call_id = self._bound_id(deadline_ns), self._location.connection.next_call_id()
            message = messages.RunExecution(call_id, execution_id, to_limit_field(deadline_ns))
            mode = HalExecutionMode.REUSABLE
            return exchange_execution(self._location, message, self._run, (), deadline_ns, mode, late)
        except NnfmqError as error:
            if not self._model.can_execute_again(error, deadline_ns):
                raise
            return execute_after_failure(self._model, self._request, self._config, deadline_ns, error, late)

    def launch(self, limits: FenceLimits, collect: Callable[[FencedTiming], ResultT]) -> FencedExecution[ResultT]:
        """Launch once, behind fences; blocks until launched. See `BoundRequest.launch`."""
        fds, deadline_ns = fence_fds(limits.wait_for), deadline_after(limits.timeout)
        self.late.wait(deadline_ns)
        try:
            execution_id = self._bound_id(deadline_ns)
            message = messages.RunExecutionFenced(
                self._location.connection.next_call_id(),
                execution_id,
                to_limit_field(deadline_ns),
                to_limit_field(from_seconds(limits.duration)),
                len(fds),
            )
            launched = DeviceFencedExecution.launch(
                self._location, message, fds, deadline_ns, collect, self._run, self.late
            )
            launched.keeps = self
            return launched
        except NnfmqError as error:
            if not self._model.can_execute_again(error, deadline_ns):
                raise
            return launch_after_failure(
                self._model, self._request, self._config, limits, deadline_ns, collect, error, self.late
            )

    def close(self) -> None:
        """Release the execution in the driver; one in progress continues. Idempotent."""
        self._is_closed = True
        self.late.close()
        execution_id, self._execution_id = self._execution_id, None
        if execution_id is not None:
            connection = self._location.connection
            connection.post(messages.ReleaseExecution(connection.next_call_id(), execution_id))

    def _is_left_open(self) -> bool:
        return self._execution_id is not None and self._location.connection.is_open


class ResentRequest(BoundRequest):
    """A request that is sent for each execution. The driver keeps nothing of it, so the model must not be closed."""

    def __init__(self, model: ModelHandle, request: Request, config: ExecutionConfig) -> None:
        super().__init__()
        self._model, self._request, self._config = model, request, config

    def compute(self, *, timeout: float | None = None) -> ExecutionResult:
        """Execute once; blocks. See `BoundRequest.compute`."""
        deadline_ns, execute = deadline_after(timeout), partial(execute_on_device, late=self.late)
        self.late.wait(deadline_ns)
        return execute_request(self._model, self._request, self._config, deadline_ns, execute, self.late)

    def launch(self, limits: FenceLimits, collect: Callable[[FencedTiming], ResultT]) -> FencedExecution[ResultT]:
        """Launch once, behind fences; blocks until launched. See `BoundRequest.launch`."""
        deadline_ns = deadline_after(limits.timeout)
        self.late.wait(deadline_ns)
        limits = limits._replace(timeout=remaining_s(deadline_ns))
        return launch_fenced(self._model, self._request, self._config, limits, collect, self.late)

    def close(self) -> None:
        """Wait for no late execution; nothing else is to be released. Idempotent."""
        self.late.close()


class Execution(ClosedWhenDropped, Closable, HasState):
    """An execution with its own arrays. Close it, or use `with`. One computation at a time.

    If the model leaves shapes open, a computation whose inputs have other shapes than the last four combinations makes
    the driver bind another request. If an output is then larger than its memory, the driver computes twice.

    A reusable one computes any number of times and, with AIDL v4, outlives its model. Any other computes once, and its
    model must not be closed before.

    `inputs` and `outputs` are arrays over the shared memory itself: write the inputs, call `compute()` without
    arguments, and read the outputs, and nothing is copied. Do not write the inputs or use the outputs meanwhile, nor
    after a call that ended early until the next call has returned.
    `last_timing` is that of the last computation, if the execution was made with `measure`. The states of a model with
    states are this execution's own; a computation that raises does not change them.
    """

    def __init__(self, is_reusable: bool) -> None:
        self.is_reusable = is_reusable
        self._was_computed = False
        self._claims: Claims = {}
        self._resources = ExitStack()
        self._late = LateRun()  # of all requests, which may be over the same memory
        self._last_fence: Fence | None = None  # of the last fenced computation
        self._arrays: MappedArrays | None = None
        self._layouts: ArrayLayouts | None = None  # if the model leaves shapes open
        self._state = None
        self._has_inputs = False
        self.last_timing = Timing()

    @classmethod
    def create(cls, model: CompiledHandle, bind: Callable[[Request], BoundRequest], is_reusable: bool) -> Self:
        """Allocate the arrays, and bind a request over them with `bind`; blocks.

        Raises:
            InvalidArgument: If a shape is not fully known, and the model is on several devices.
            NnfmqError: The error that a driver replied.
        """
        execution = cls(is_reusable)

        def bind_here(request: Request) -> BoundRequest:
            bound = bind(request)
            bound.late = execution._late
            return bound

        try:
            if isinstance(model, ModelHandle) and has_unknown_shapes(model):
                from nnfmq.client.model.array_layouts import ArrayLayouts  # few models

                layouts = execution._layouts = ArrayLayouts(model, execution, bind_here, BoundRequest.close)
                execution._resources.callback(layouts.close)
                execution._take_layout(layouts.first())
            else:
                execution._arrays = MappedArrays.create(model, execution._resources, "a reusable execution")
                execution._state = execution._arrays.state
                request = bind_here(execution._arrays.request)
                execution._resources.callback(request.close)
                execution._arrays = with_prepared(execution._arrays, request)
        except BaseException:
            execution.close()
            raise
        return execution

    def __repr__(self) -> str:
        kind = "reusable" if self.is_reusable else "computable once"
        arrays = self._arrays
        model = "closed" if arrays is None else signature(arrays.input_infos, arrays.output_infos)
        return f"<Execution, {kind}: {model}>"

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory; empty once closed.

        Raises:
            InvalidArgument: Before the first computation, if the model leaves the shape of an input open.
        """
        if self._arrays is None:
            return ()
        self._arrays.require_laid_out()
        self._has_inputs = True  # what the application does with the arrays cannot be seen from here
        return self._arrays.inputs

    @property
    def outputs(self) -> Outputs:
        """The output arrays over the shared memory; empty once closed, and until there is a first of open shape."""
        return Outputs() if self._arrays is None else self._arrays.outputs

    def lay_out(self, shapes: tuple[Shape, ...]) -> LaidOutArrays:
        """Replace the arrays by those for inputs of these shapes, and return them; for `LaidOutArrays`."""
        assert self._layouts is not None
        arrays = self._layouts.lay_out(shapes, self._arrays)
        self._take_layout(arrays)
        return arrays

    def _take_layout(self, arrays: LaidOutArrays) -> None:
        assert self._layouts is not None
        self._arrays, self._state = arrays, arrays.state
        self._layouts.close_replaced()

    @exclusive
    def compute(self, *inputs: InputValue, out: Sequence[Array] | None = None, timeout: float | None = None) -> Outputs:
        """Compute once and return the outputs; blocks.

        Args:
            inputs: One array for each input, of its shape and dtype; or none at all, if `self.inputs` were filled.
            out: Arrays to fill and return. With the execution's own `outputs` nothing is copied. None = return new
                arrays.
            timeout: In seconds; also the computation's deadline. None = no limit.

        Raises:
            BadState: If a computation is in progress, or this one was computed and is not reusable.
            InvalidArgument: If an array's shape, dtype or number is wrong, or there are no inputs yet.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        deadline_ns = deadline_after(timeout)
        self._require_computable()
        self._open_arrays.check_out(out)
        if out is self._open_arrays.outputs:
            out = IN_PLACE
        self._late.wait(deadline_ns)
        self._copy_in(inputs)
        self._was_computed = True
        self._begin_states()
        self.last_timing = self._compute(deadline_ns).timing
        if isinstance(self._state, MappedState):
            self._state.advance()
        return self._open_arrays.copy_out(out)

    def _compute(self, deadline_ns: int | None) -> ExecutionResult:
        """Compute once, or twice if an output needs more memory; the arrays then show the outputs."""
        try:
            result = self._request.compute(timeout=remaining_s(deadline_ns))
        except OutputInsufficientSize as error:
            if not self._grow(error.output_shapes):
                raise
            result = None
        if result is None:
            result = self._request.compute(timeout=remaining_s(deadline_ns))
        if self._layouts is not None:
            self._take_layout(self._layouts.show(self._open_arrays, result.shapes, lambda request: request))
        return result

    def _grow(self, reported: Sequence[OutputShape]) -> bool:
        """Return whether the outputs have more space now."""
        if self._layouts is None:
            return False
        larger = self._layouts.grow(self._open_arrays, reported)
        if larger is not None:
            self._take_layout(larger)
            self._begin_states()
        return larger is not None

    @exclusive
    def compute_fenced(
        self,
        *inputs: InputValue,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[Outputs]:
        """Compute once when all fences of `wait_for` are signaled; blocks until launched. The caller closes the result.

        `inputs` as for `compute`; the other arguments as for `PreparedModel.execute_fenced`. The result's `result()`
        returns copies of the outputs; call it before the next computation starts. Raises as `compute`.
        """
        self._require_computable()
        require_no_state(self.states, "compute")
        deadline_ns = deadline_after(timeout)
        self._late.wait(deadline_ns)
        self._copy_in(inputs)
        self._was_computed = True
        limits = FenceLimits(wait_for, remaining_s(deadline_ns), duration)
        launched = self._request.launch(limits, lambda _times: self._open_arrays.copy_out(None))
        self._last_fence = Fence.adopt(os.dup(launched.fence.fileno()))
        return launched

    def _copy_in(self, inputs: Sequence[InputValue]) -> None:
        if not inputs and not self._has_inputs and self._open_arrays.input_infos:
            raise no_inputs_error(self._open_arrays.input_infos, "execution.compute")
        self._open_arrays.copy_in(inputs)
        self._has_inputs = True

    def _begin_states(self) -> None:
        if isinstance(self._state, MappedState):
            self._state.begin()

    @property
    def _request(self) -> BoundRequest:
        request: BoundRequest = self._open_arrays.prepared
        return request

    @property
    def _open_arrays(self) -> MappedArrays:
        # Not kept in local variables: frames of an exception's traceback would keep the memory mapped after `close`.
        if self._arrays is None:
            raise BadState("this execution is closed")
        return self._arrays

    def _busy_error(self) -> Exception:
        return BadState("this execution is running; one run at a time, or make one for each thread")

    def _require_computable(self) -> None:
        if self._is_fenced_run_active():
            raise self._busy_error()
        if self._was_computed and not self.is_reusable:
            raise BadState("this execution was computed and is not reusable; see create_reusable_execution")

    def _is_fenced_run_active(self) -> bool:
        """Return True while a fenced computation runs, even if the caller has closed its FencedExecution."""
        if self._last_fence is None:
            return False
        if self._last_fence.state is FenceState.ACTIVE:
            return True
        self._close_last_fence()
        return False

    def _close_last_fence(self) -> None:
        fence, self._last_fence = self._last_fence, None
        if fence is not None:
            fence.close()

    def close(self) -> None:
        """Release the execution here and in the driver; a computation in progress continues. Idempotent."""
        self._detach_state()
        self._arrays = None  # its arrays would keep the memory mapped
        self._close_last_fence()
        self._resources.close()

    def _is_left_open(self) -> bool:
        return self._arrays is not None

    def _is_of_process(self) -> bool:
        return True

    def _close_dropped(self) -> None:
        self.close()
