"""Driver's end of a reusable execution (AIDL `IExecution`): a request that was bound once, to run any number of times.

It keeps its model and its memory until it is released, so the client may release both earlier (LIFE-2). The client must
run it once at a time: a second run is rejected between the launch and the end of the first. (RUX)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from nnfmq.driver.execution.prepared_model import BoundExecution, DriverPreparedModel, execution_options
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.validation import validate_request


class DriverExecution:
    """A reusable execution. Thread-safe. Call `bound.run` only inside `exclusive_run`."""

    def __init__(
        self,
        prepared: DriverPreparedModel,
        request: Request,
        config: ExecutionConfig,
        bound: BoundExecution,
        resources: ExitStack,
    ) -> None:
        self._prepared = prepared
        self._request = request
        self._resources = resources
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_released = False
        self.bound = bound
        self.config = config

    @classmethod
    def create(
        cls, prepared: DriverPreparedModel, request: Request, config: ExecutionConfig, undo: ExitStack
    ) -> DriverExecution:
        """Validate and bind a request.

        Takes ownership of the request's memory, which `undo` would close, unless it raises.

        Raises:
            InvalidArgument: If the request or the configuration is invalid.
        """
        execution_options(config, None)
        bound = prepared.bind(request)
        return cls(prepared, request, config, bound, undo.pop_all())

    @property
    def priority(self) -> int:
        """The priority of its model."""
        return self._prepared.priority

    def require_fenceable(self) -> None:
        """Check that all outputs are fully specified, as a fenced run requires (FEN-7).

        Raises:
            InvalidArgument: If an output is not.
        """
        validate_request(self._prepared.model, self._request, allow_unspecified_output=False)

    @contextmanager
    def exclusive_run(self) -> Iterator[None]:
        """Reserve the execution for one run.

        Raises:
            InvalidArgument: If it is running.
        """
        with self._lock:
            if self._is_busy:
                raise InvalidArgument("this execution is running; one run at a time (RUX-3)")
            self._is_busy = True
        try:
            yield
        finally:
            with self._lock:
                self._is_busy = False
                is_released = self._is_released
            if is_released:
                self._resources.close()

    @contextmanager
    def counted_on_error(self) -> Iterator[None]:
        """Prepare one run in the block. If it raises NnfmqError, the run counts as failed.

        The outputs in managed buffers are then uninitialized (DOM-7).
        """
        try:
            yield
        except NnfmqError:
            self.bound.recorder.add_failure()
            self.bound.abort()
            raise

    def release(self) -> None:
        """Close the request's memory, after a current run has ended. Does not block."""
        with self._lock:
            self._is_released = True
            is_idle = not self._is_busy
        if is_idle:
            self._resources.close()
