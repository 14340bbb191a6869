"""BurstBuilder: NNAPI's burst, for a series of executions of one compilation."""

from __future__ import annotations

import logging

from nnfmq.base.ownership import Claims, Closable, exclusive
from nnfmq.client.burst.burst import ModelBurst
from nnfmq.client.model.arrays import ExecutionResult
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.hal.errors import BadState, InvalidArgument, NnfmqError
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.nnapi.checks import required
from nnfmq.nnapi.compilation import CompilationBuilder, SharedModel

__all__ = ["BurstBuilder"]

_log = logging.getLogger("nnfmq.nnapi")


class BurstBuilder(Closable):
    """A burst of a compilation; blocks while it is configured. Close it, or use `with`. One computation at a time.

    Memories that executions use remain mapped in the driver until they are closed. A model on several devices has a
    burst for each step (PART-10).

    Raises:
        BadState: If the compilation is not finished, has failed or is closed.
        NnfmqError: If the driver configures no burst, and the CPU may not be used instead.
    """

    def __init__(self, compilation: CompilationBuilder) -> None:
        self._claims: Claims = {}
        self._shared: SharedModel | None = None
        self._burst: ModelBurst | None = None
        shared = required(compilation, "the compilation").require_compiled("a burst")
        shared.users.acquire()
        try:
            self._burst = _burst_of(shared.model)
        except BaseException:
            shared.users.release()
            raise
        self._shared = shared

    def require_model(self, shared: SharedModel) -> None:
        """Require that the burst is one of this compiled model.

        Raises:
            BadState: If it is closed.
            InvalidArgument: If it is another compilation's.
        """
        if self._shared is None:
            raise BadState("this burst is closed")
        if self._shared is not shared:
            raise InvalidArgument("the burst and the execution are of different compilations")

    @exclusive
    def execute(self, request: Request, config: ExecutionConfig, timeout: float | None) -> ExecutionResult:
        """Execute a request for `ExecutionBuilder.burst_compute`; blocks. Raises as `Burst.execute_request`.

        Raises:
            BadState: If another thread computes with the burst.
        """
        burst = self._burst
        if burst is not None:
            return burst.execute_request(request, config, timeout=timeout)
        assert self._shared is not None  # `require_model` has checked it
        return self._shared.model.execute_request(request, config, timeout=timeout)

    def _busy_error(self) -> Exception:
        return BadState("burst_compute: another thread computes with this burst; make one for each thread")

    def close(self) -> None:
        """Close the burst here and in the driver; waits up to 5 s for a computation in progress. Idempotent."""
        shared, self._shared = self._shared, None
        if shared is not None:
            if self._burst is not None:
                self._burst.close()
            shared.users.release()


def _burst_of(model: CompiledModel) -> ModelBurst | None:
    """Return a burst of the model's device; None if it fails, and the CPU executes what the device cannot."""
    try:
        return model.request_burst()
    except NnfmqError as error:
        if model.handle.fallback is None:
            raise
        _log.info("executions are computed without a burst, because device %s fails: %s", model.device, error)
        return None
