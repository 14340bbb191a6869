"""RequestRun: one request, as it is executed: validates replies and records what the managed buffers contain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import ExecutionConfig, HalExecutionMode, Request
from nnfmq.runtime.execution_result import ExecutionResult
from nnfmq.runtime.managed_buffer import OutputBuffers
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.runtime.result_validation import ResultValidator
from nnfmq.serialize import messages
from nnfmq.verbose_log import vlog

if TYPE_CHECKING:
    from nnfmq.runtime.request_observation import RequestObservation


class RequestRun:
    """The client's state of one request, for any number of executions.

    Call `begin` before a request is sent, and one of the other methods with each reply. Keeps a reference to the
    request, and thus to its memory pools, only if the model is observed.
    """

    def __init__(self, model: ModelHandle, request: Request, config: ExecutionConfig) -> None:
        self._validator = ResultValidator(model.outputs, request, config)
        self._buffers = OutputBuffers(model.connection, request)
        self._device = model.device
        self._observed = model.observed
        self._request = None if model.observed is None else request

    def begin(self, mode: HalExecutionMode, deadline_ns: int | None) -> RequestObservation | None:
        """Mark the content of the output buffers unknown until a reply reports it.

        Returns the observation of this execution, to which the caller reports its end; None if nothing observes it.
        """
        self._buffers.begin_write()
        vlog("execution", "%s execution on %s", mode.name, self._device)
        if self._observed is None or self._request is None:
            return None
        from nnfmq.runtime.request_observation import RequestObservation

        return RequestObservation(self._observed, self._request, mode, deadline_ns)

    def discard_outputs(self) -> None:
        """Mark the content of the output buffers unknown: the driver has rejected the request (DOM-7)."""
        self._buffers.begin_write()

    def finish(self, reply: messages.Executed | messages.ExecutionFinished) -> ExecutionResult:
        """Return the validated result of a synchronous or asynchronous execution.

        Raises:
            ProtocolError: If the reply is invalid.
            NnfmqError: The error of the reply's status, unless that is NONE.
        """
        result = self._validator.validate(reply)
        reported = [shape.dimensions for shape in result.shapes]
        self._buffers.end_write(reported or self._validator.expected_shapes())
        return result

    def finish_launch(self) -> None:
        """Record that a fenced execution was launched: its outputs will have the expected shapes.

        Raises:
            ProtocolError: If an output's shape is unknown.
        """
        self._validator.validate_launch()
        self._buffers.end_write(self._validator.expected_shapes())

    def finish_fenced(self, reply: messages.FencedExecutionInfo, is_done: bool) -> tuple[Timing, Timing]:
        """Return the validated times of a fenced execution: from its launch, and from the last fence.

        `is_done` says that the fence is no longer active: an error status then means that the execution failed.

        Raises:
            ProtocolError: If the reply is invalid.
            NnfmqError: The error of the reply's status, unless that is NONE.
        """
        if is_done and reply.status is not ErrorStatus.NONE:
            self._buffers.end_write(None)
        return self._validator.validate_fenced(reply)
