"""CompiledModel: what the objects of this package need of a model that was compiled, and how they share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.nnapi.user_count import UserCount
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.tensor_layout import MemoryPreference
from nnfmq.uncopyable import Uncopyable

if TYPE_CHECKING:
    from nnfmq.fence import HasFileno
    from nnfmq.runtime.async_execution import PendingExecution
    from nnfmq.runtime.fenced_execution import FencedExecution, FencedTiming

__all__ = ["CompiledModel", "RequestBurst", "SharedModel"]


class RequestBurst(Protocol):
    """A burst that executes HAL requests."""

    def execute_request(
        self, request: Request, config: ExecutionConfig = ..., *, timeout: float | None = None
    ) -> ExecutionResult:
        """Execute a request; blocks."""
        ...

    def close(self) -> None:
        """Release the burst."""
        ...


class CompiledModel(Protocol):
    """A model that executes HAL requests: a PreparedModel, for instance."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs without the states."""
        ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs without the states."""
        ...

    @property
    def states(self) -> tuple[StateInfo, ...]:
        """The states, which requests have as inputs and outputs after all others."""
        ...

    def memory_preference(self, kind: Literal["input", "output"], index: int) -> MemoryPreference:
        """Return the fastest placement of an input or output."""
        ...

    def execute_request(
        self, request: Request, config: ExecutionConfig = ..., *, timeout: float | None = None
    ) -> ExecutionResult:
        """Execute a request; blocks."""
        ...

    def execute_request_async(
        self, request: Request, config: ExecutionConfig = ..., *, timeout: float | None = None
    ) -> PendingExecution[ExecutionResult]:
        """Start to execute a request."""
        ...

    def execute_request_fenced(
        self,
        request: Request,
        config: ExecutionConfig = ...,
        *,
        wait_for: Sequence[HasFileno | int] = (),
        timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution[FencedTiming]:
        """Execute a request behind fences; blocks until it is launched."""
        ...

    def request_burst(self) -> RequestBurst:
        """Configure a burst; blocks. The caller closes it."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


class SharedModel(Uncopyable):
    """A compiled model that a compilation, its executions and its bursts share: its `users`.

    `inputs` and `outputs` are those of requests: with the states.
    """

    def __init__(self, model: CompiledModel) -> None:
        states = tuple(state.tensor for state in model.states)
        self.model = model
        self.inputs = (*model.inputs, *states)
        self.outputs = (*model.outputs, *states)
        self.users = UserCount("model", model.close)

    @property
    def sends_padding(self) -> bool:
        """Whether a request tells the driver of an argument's padding: HIDL has no field for it (MEM-6)."""
        return self.model.memory_preference("output", 0).padding > 1
