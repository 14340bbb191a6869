"""register: call a function with the record of each compilation and execution.

The function is called on a thread of its registration. One that raises is logged and called again for the next record;
one that blocks makes the queue of its registration full, whose further records are dropped and counted. Neither delays
an execution.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from nnfmq.base.ownership import Closable
from nnfmq.hal.errors import ErrorStatus
from nnfmq.observe.executions import (
    ModelObserver,
    ObservedExecution,
    ObservedPreparation,
    add_observer,
    remove_observer,
)
from nnfmq.telemetry.records import CompilationRecord, TelemetryRecord, compilation_record, execution_record

__all__ = ["QUEUE_RECORDS_MAX", "TelemetryCallback", "TelemetryRegistration", "register"]

TelemetryCallback: TypeAlias = Callable[[TelemetryRecord], object]
QUEUE_RECORDS_MAX = 10_000
"""Records that wait for a callback; further ones are dropped."""

_CLOSE_TIMEOUT_S = 5.0
_log = logging.getLogger("nnfmq.telemetry")
_Item: TypeAlias = "CompilationRecord | tuple[CompilationRecord, ObservedExecution] | None"


class _TelemetryModel:
    """The observer of one model's executions."""

    needs_tensors = False

    def __init__(self, registration: TelemetryRegistration, compilation: CompilationRecord) -> None:
        self._registration = registration
        self._compilation = compilation

    def executed(self, execution: ObservedExecution) -> None:
        """Queue an execution for the callback, or drop it."""
        self._registration.put((self._compilation, execution))


class TelemetryRegistration(Closable):
    """A callback that is called until `close`. Use `with`, or keep it open until the process exits."""

    def __init__(self, callback: TelemetryCallback) -> None:
        self._callback = callback
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._pid = os.getpid()
        self._is_closed = False
        self.dropped = 0
        """Records that were dropped because the callback was too slow; approximate if several threads execute."""
        self.failures = 0
        """Calls that raised."""
        self._thread = threading.Thread(target=self._call_all, name="nnfmq-telemetry", daemon=True)

    def start(self) -> None:
        """Start the thread, and observe this process from now on."""
        self._thread.start()
        add_observer(self)
        atexit.register(self.close)

    def prepared(self, preparation: ObservedPreparation) -> ModelObserver | None:
        """Queue the record of a preparation; return the observer of the model's executions. Does not block.

        The steps of a plan have no records of their own.
        """
        if preparation.choice == "step":
            return None
        record = compilation_record(preparation)
        self.put(record)
        return _TelemetryModel(self, record) if preparation.status == ErrorStatus.NONE else None

    def put(self, item: _Item) -> None:
        """Queue a record, or drop it. Does not block."""
        if self._is_closed or self._queue.qsize() >= QUEUE_RECORDS_MAX:
            self.dropped += not self._is_closed
            return
        self._queue.put(item)

    def _call_all(self) -> None:
        while (item := self._queue.get()) is not None:
            record = item if isinstance(item, CompilationRecord) else execution_record(*item)
            try:
                self._callback(record)
            except Exception:  # noqa: BLE001  of the application; it must not end the thread
                self.failures += 1
                if self.failures == 1:  # further ones are counted only: there may be one for each execution
                    _log.exception("a telemetry callback raised")

    def close(self) -> None:
        """Call the callback with what is queued, and no more; waits at most 5 s. Idempotent.

        Not from the callback itself. Does nothing in a forked child.
        """
        remove_observer(self)
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("a telemetry callback has not returned within %g s", _CLOSE_TIMEOUT_S)


def register(callback: TelemetryCallback) -> TelemetryRegistration:
    """Call `callback` with a CompilationRecord or ExecutionRecord for all models that are prepared from now on.

    Several callbacks may be registered; each has a thread. The caller closes the result, or the process's exit does.
    """
    registration = TelemetryRegistration(callback)
    registration.start()
    return registration
