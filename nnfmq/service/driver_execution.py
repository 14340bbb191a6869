"""A reusable execution: a request that was checked and bound to its memory once, to be run any number of times.

It keeps its model and its memories for as long as it lives, so both may be released meanwhile (LIFE-2). One run at a
time is the caller's duty; a second one is refused, from the launch of the first to its end. (REQUIREMENTS RUX)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.types import ExecutionConfig, Request
from nnfmq.service.driver_prepared_model import BoundExecution, DriverPreparedModel, StagedExecution, execution_limits
from nnfmq.validation import validate_request


class DriverExecution:
    """One of them (IExecution). `bound` runs it, inside `exclusive_run`."""

    def __init__(
        self,
        prepared: DriverPreparedModel,
        request: Request,
        config: ExecutionConfig,
        bound: BoundExecution | StagedExecution,
        held: ExitStack,
    ) -> None:
        self._prepared = prepared
        self._request = request
        self._held = held
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_released = False
        self.bound = bound
        self.config = config

    @classmethod
    def create(
        cls, prepared: DriverPreparedModel, request: Request, config: ExecutionConfig, undo: ExitStack
    ) -> DriverExecution:
        """Check and bind a request; takes over what it refers to, which `undo` has. Raises InvalidArgument."""
        execution_limits(config, None)
        bound = prepared.bind(request)
        return cls(prepared, request, config, bound, undo.pop_all())

    @property
    def priority(self) -> int:
        """The model's."""
        return self._prepared.priority

    def require_fenceable(self) -> None:
        """Raise InvalidArgument unless all outputs are fully specified (FEN-7)."""
        validate_request(self._prepared.model, self._request, allow_unspecified_output=False)

    @contextmanager
    def exclusive_run(self) -> Iterator[None]:
        """Keep it for one run. Raises InvalidArgument while another has it (RUX-3)."""
        with self._lock:
            if self._is_busy:
                raise InvalidArgument("RUX-3: this execution is running; one run at a time")
            self._is_busy = True
        try:
            yield
        finally:
            with self._lock:
                self._is_busy = False
                is_last = self._is_released
            if is_last:
                self._held.close()

    @contextmanager
    def uninitialize_outputs_on_error(self) -> Iterator[None]:
        """Lose the outputs in the driver's buffers where an error keeps a run from its beginning (DOM-7)."""
        try:
            yield
        except NnfmqError:
            self.bound.fail()
            raise

    def release(self) -> None:
        """Give back its memories, once a run that was begun has ended."""
        with self._lock:
            self._is_released = True
            is_idle = not self._is_busy
        if is_idle:
            self._held.close()
