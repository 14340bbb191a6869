"""RequestSender: sends the request of an execution to the driver, in each of NNAPI's modes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nnfmq.fence import Fence, HasFileno, sync_wait
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, FenceState, OutputShape
from nnfmq.nnapi.assembled_request import AssembledRequest
from nnfmq.nnapi.burst_builder import BurstBuilder
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.runtime.reusable_execution import BoundRequest

if TYPE_CHECKING:
    from nnfmq.runtime.compiled_model import CompiledModel
    from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming

__all__ = ["PendingResult", "RequestSender", "TimedResult"]


class TimedResult(NamedTuple):
    """The reported shapes (empty if none are), and the times from the launch and from the last fence."""

    shapes: tuple[OutputShape, ...]
    launched: Timing
    fenced: Timing


class PendingResult(NamedTuple):
    """The result of an execution that was started; `fence` is signaled at its end, if there is one.

    `result` returns it or raises the execution's error, once `done` returns True; `wait` blocks until then. `close`
    releases the driver's part of it.
    """

    done: Callable[[], bool]
    wait: Callable[[], object]
    result: Callable[[], TimedResult]
    close: Callable[[], object]
    fence: Fence | None = None


class RequestSender:
    """Executes one request any number of times, one at a time. Close it; it closes the request.

    Args:
        model: The model.
        assembled: The request. This object owns it.
        config: The configuration of its executions.
        is_reusable: Make the driver bind the request once, if its interface version can (RUX-1).
    """

    def __init__(
        self, model: CompiledModel, assembled: AssembledRequest, config: ExecutionConfig, is_reusable: bool
    ) -> None:
        self._model = model
        self.assembled = assembled
        self._config = config
        self._is_reusable = is_reusable
        self._bound: BoundRequest | None = None

    def execute(self, timeout: float | None) -> ExecutionResult:
        """Execute the request; blocks. Raises as `PreparedModel.execute_request`."""
        bound = self._bind(timeout)
        if bound is not None:
            return bound.compute(timeout=timeout)
        return self._model.execute_request(self.assembled.request, self._config, timeout=timeout)

    def _bind(self, timeout: float | None) -> BoundRequest | None:
        if self._is_reusable and self._bound is None:
            self._bound = self._model.create_reusable_request(self.assembled.request, self._config, timeout=timeout)
        return self._bound

    def execute_in(self, burst: BurstBuilder, timeout: float | None) -> ExecutionResult:
        """Execute the request with a burst; blocks. Raises as `Burst.execute_request`."""
        return burst.execute(self.assembled.request, self._config, timeout)

    def start(self, timeout: float | None) -> PendingResult:
        """Start to execute the request. Raises as `PreparedModel.execute_request_async`."""
        pending = self._model.execute_request_async(self.assembled.request, self._config, timeout=timeout)
        return PendingResult(pending.done, pending.wait, lambda: _timed(pending.result()), _nothing)

    def launch(self, fences: Sequence[HasFileno], timeout: float | None, duration: float | None) -> PendingResult:
        """Execute the request behind fences; blocks until launched. Raises as `PreparedModel.execute_request_fenced`.

        An interface version older than HIDL 1.3 has no fences: this then blocks until the execution is done.
        """
        if isinstance(self._model, PreparedModel) and self._model.connection.level < FeatureLevel.V1_3:
            return self._execute_after(fences, timeout)
        bound = self._bind(timeout)
        if bound is not None:
            return _launched(bound.compute_fenced(fences, timeout=timeout, duration=duration))
        request = self.assembled.request
        return _launched(
            self._model.execute_request_fenced(
                request, self._config, wait_for=fences, timeout=timeout, duration=duration
            )
        )

    def _execute_after(self, fences: Sequence[HasFileno], timeout: float | None) -> PendingResult:
        for fence in fences:
            if sync_wait(fence.fileno()) is not FenceState.SIGNALED:
                raise InvalidArgument("a fence on which the computation depends is in error (FEN-5)")
        result = _timed(self.execute(timeout))
        return PendingResult(lambda: True, _nothing, lambda: result, _nothing)

    def close(self) -> None:
        """Release what the driver has bound, and the request's own memory. Idempotent."""
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
        self.assembled.close()


def _timed(result: ExecutionResult) -> TimedResult:
    return TimedResult(result.shapes, result.timing, result.timing)


def _launched(execution: FencedExecution[FencedTiming]) -> PendingResult:
    try:
        fence = Fence.adopt(os.dup(execution.fence.fileno()))
    except BaseException:
        execution.close()
        raise

    def is_done() -> bool:
        return fence.state is not FenceState.ACTIVE

    return PendingResult(is_done, fence.wait, lambda: TimedResult((), *execution.result()), execution.close, fence)


def _nothing() -> None:
    """Nothing is to be waited for or released."""
