"""PreparedModel: a model that one device of a driver has prepared, with one method for each execution mode."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

import numpy as np

from nnfmq.base.deadlines import deadline_after
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import DEFAULT_TIMEOUT_S
from nnfmq.client.execution import synchronous
from nnfmq.client.model.array_request import ArrayRequest, CallArguments
from nnfmq.client.model.arrays import (
    PADDING,
    Array,
    ExecutionResult,
    InputValue,
    Outputs,
    checked_arrays,
    size_bytes,
)
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.handle import ModelFallback, ModelHandle
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, Model, Request

if TYPE_CHECKING:
    from nnfmq.client.burst.aidl import AidlBurst
    from nnfmq.client.burst.burst import Burst
    from nnfmq.client.burst.own import OwnBurst
    from nnfmq.client.execution.asynchronous import PendingExecution
    from nnfmq.client.execution.fenced import FencedExecution, FencedTiming, FenceLimits
    from nnfmq.client.execution.reusable import BoundRequest
    from nnfmq.planning.plan import ExecutionPlan

__all__ = ["PreparedModel"]

_QUICK_NS, _QUICK_CALLS = 100_000_000, 2  # calls that begin so soon after the one before, in a row
_CALLS_AFTER_FAILURE = 100  # before a burst is started again after one that has failed
_OWN_BURST_BYTES_MAX = 16 << 20  # of the arrays: to copy more takes longer than a message
_NO_CONFIG = ExecutionConfig()


class PreparedModel(CompiledModel):
    """A model on one device, whose name is `device`. Close it, or use `with`. Thread-safe."""

    handle: ModelHandle

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
        super().__init__(inputs, outputs, device, states)
        self.handle = ModelHandle(connection, model_id, inputs, outputs, device, extensions, states)
        self.planned_model: Model | None = None
        self._plan: ExecutionPlan | None = None
        self._own_burst: dict[int, OwnBurst] = {}  # one, as the item 0
        self._quick_calls = self._last_call_ns = 0

    @property
    def connection(self) -> Connection:
        """The connection to the driver that has the model."""
        return self.handle.connection

    @property
    def model_id(self) -> int:
        """The model's id in the driver. Raises InvalidArgument once closed."""
        return self.handle.model_id

    @property
    def program(self) -> ProgramKind:
        """The program that executes the model: machine code, from a cache or compiled now, or the interpreter."""
        return self.handle.program

    @property
    def compiled_operations(self) -> int:
        """The number of operations of the model's main subgraph that machine code executes."""
        return self.handle.compiled_operations

    @property
    def plan(self) -> ExecutionPlan | None:
        """The plan, which has one step; None if the application chose the device."""
        if self._plan is None and self.planned_model is not None:
            from nnfmq.planning.plan import simple_plan  # few applications ask for it

            self._plan = simple_plan(self.planned_model, self.device)
        return self._plan

    @plan.setter
    def plan(self, plan: ExecutionPlan) -> None:
        self._plan = plan

    @property
    def fallback(self) -> ModelFallback | None:
        """The CPU device, for what the model's device fails to; None = the device's error is raised.

        `close` closes it too.
        """
        return self.handle.fallback

    @fallback.setter
    def fallback(self, fallback: ModelFallback | None) -> None:
        self.handle.fallback = fallback

    @property
    def _padding(self) -> int:
        return PADDING if self.connection.is_aidl else 1

    def _check_config(self, config: ExecutionConfig) -> None:
        """Accept each configuration: the driver checks it."""

    # ------------------------------------------------------------------------------------------------ arrays

    def _execute_arrays(
        self,
        inputs: Sequence[InputValue | Buffer],
        out: Sequence[Array | Buffer] | None,
        config: ExecutionConfig,
        deadline_ns: int | None,
    ) -> tuple[Array | Buffer, ...]:
        call = CallArguments(self.handle, inputs, out)
        burst = self._own_burst_for(call.inputs, call.targets, config)
        found = None if burst is None else burst.execute(call.inputs, deadline_ns)
        outputs, self.last_timing = found or synchronous.execute_call(self.handle, call, config, deadline_ns)
        return call.finish(outputs)

    def _start_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[Outputs]:
        values = checked_arrays(self.inputs, inputs)
        burst = self._own_burst_for(values, (), config)
        pending = None if burst is None else burst.execute_async(values, deadline_ns, self._set_last_timing)
        if pending is not None:
            return pending
        from nnfmq.client.execution.asynchronous import AsyncRequest, start_arrays  # at the first such call

        async_request = AsyncRequest(self.handle, config, deadline_ns)
        array_request = ArrayRequest.create(self.handle, values)
        return start_arrays(async_request, array_request, self._set_last_timing)

    def _own_burst_for(
        self, inputs: Sequence[Array | Buffer], targets: Sequence[object], config: ExecutionConfig
    ) -> OwnBurst | None:
        """Return the model's own burst for a call with these arguments; None if there is none, or it cannot take it.

        Calls in quick succession make it start one. That is for the calls after the driver's reply.
        """
        begin_ns, last_ns = monotonic_ns(), self._last_call_ns
        self._last_call_ns = begin_ns
        if config != _NO_CONFIG or any(isinstance(value, Buffer) for value in (*inputs, *targets)):
            return None
        burst = self._own_burst.get(0)
        if burst is None:
            self._quick_calls = self._quick_calls + 1 if begin_ns - last_ns < _QUICK_NS else 0
            if self._quick_calls >= _QUICK_CALLS:
                self._start_own_burst(inputs)
        elif burst.is_closed:
            self._own_burst.pop(0, None)
            self._quick_calls = -_CALLS_AFTER_FAILURE if burst.has_failed else 0
            return None
        return burst

    def _start_own_burst(self, inputs: Sequence[Array | Buffer]) -> None:
        """Start a burst for inputs of these shapes, unless the model has none. Does not block."""
        from nnfmq.client.burst.own import OwnBurst  # with the queues' core, as below

        location = self.handle.location
        arrays = [value for value in inputs if isinstance(value, np.ndarray)]
        self._quick_calls = 0
        # A version of a served model is released when a newer one has replaced it, so no burst may keep it.
        if location.version or not location.connection.has_bursts or not self.handle.is_open:
            return
        outputs = self.handle.outputs
        sizes = [array.nbytes for array in arrays] + [size_bytes(info, info.shape) for info in outputs]
        if sum(sizes) > _OWN_BURST_BYTES_MAX or any(info.has_unknown_shape for info in outputs):
            return
        try:
            burst = OwnBurst.start(self.handle, arrays)
        except (NnfmqError, OSError):
            self._quick_calls = -_CALLS_AFTER_FAILURE
            return
        if self._own_burst.setdefault(0, burst) is not burst or not self.handle.is_open:  # by another thread
            burst.close()

    def _set_last_timing(self, timing: Timing) -> None:
        self.last_timing = timing

    def _launch_arrays(
        self, inputs: Sequence[InputValue], config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[Outputs]:
        from nnfmq.client.execution.fenced import launch_fenced  # at the first such call

        array_request = ArrayRequest.create(self.handle, checked_arrays(self.inputs, inputs))
        try:
            request = array_request.request
            launched = launch_fenced(self.handle, request, config, limits, lambda _times: array_request.arrays(()))
        except BaseException:
            array_request.close()
            raise
        launched.call_on_close(array_request.close)
        return launched

    def burst(self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S) -> Burst:
        """Configure a burst, as `CompiledModel.burst`: two queues, and memory for the arrays. Blocks."""
        return self._configure_burst(polling_window_us, deadline_after(timeout))

    def _configure_burst(
        self, polling_window_us: float | None, deadline_ns: int | None, *, with_memory: bool = True
    ) -> Burst:
        from nnfmq.client.burst.configuration import configure_burst  # with the queues' core, when it is first used

        return configure_burst(self.handle, polling_window_us, deadline_ns, with_memory=with_memory)

    # ------------------------------------------------------------------------------------------------ HAL requests

    def _execute_request(self, request: Request, config: ExecutionConfig, deadline_ns: int | None) -> ExecutionResult:
        return synchronous.execute_request(self.handle, request, config, deadline_ns)

    def _start_request(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None
    ) -> PendingExecution[ExecutionResult]:
        from nnfmq.client.execution.asynchronous import AsyncRequest, start_request  # as above

        return start_request(AsyncRequest(self.handle, config, deadline_ns), request)

    def _launch_request(
        self, request: Request, config: ExecutionConfig, limits: FenceLimits
    ) -> FencedExecution[FencedTiming]:
        from nnfmq.client.execution.fenced import launch_fenced  # as above

        return launch_fenced(self.handle, request, config, limits, lambda times: times)

    def _bind(
        self, request: Request, config: ExecutionConfig, deadline_ns: int | None, is_reusable: bool
    ) -> BoundRequest:
        from nnfmq.client.execution.reusable import RequestExecution, ResentRequest  # at the first such call

        if is_reusable and self.connection.has_reusable_executions:
            return RequestExecution.create(self.handle, request, config, deadline_ns)
        return ResentRequest(self.handle, request, config)

    def request_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> Burst:
        """Configure a burst that only has `execute_request`, as `CompiledModel.request_burst`. Blocks."""
        return self._configure_burst(None, deadline_after(timeout), with_memory=False)

    def aidl_burst(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> AidlBurst:
        """Configure an AIDL burst: without queues, over the control channel, with tokens for memories.

        Blocks up to `timeout` seconds (None = no limit). The caller closes the burst.
        """
        from nnfmq.client.burst.aidl import AidlBurst  # as above

        return AidlBurst.configure(self.handle, deadline_after(timeout))

    def close(self) -> None:
        """Release the model in the driver; its bursts remain usable. Idempotent. Blocks up to 1 s.

        Its fallback is closed, too: if the device of a burst fails afterwards, the error is raised.
        """
        burst = self._own_burst.pop(0, None)
        if burst is not None:
            burst.close()
        self.handle.release()
        if self.fallback is not None:
            self.fallback.close()
