"""ExecutionRecorder: write the preparations and executions of this process to a file, on a thread of its own.

The application's threads copy inputs and outputs and put them into a queue of at most QUEUE_BYTES_MAX, or one
execution that is larger. If the disk is
slower than the application, executions are dropped and counted, and the application goes on. A preparation, which takes
long anyway, waits until its model is written: the caller may close the model's memory afterwards.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

from nnfmq import settings
from nnfmq.execution_observers import (
    ModelObserver,
    ObservedExecution,
    ObservedPreparation,
    add_observer,
    remove_observer,
)
from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.recording.recording_writer import RecordingWriter, check_limit, create_recording_file

__all__ = ["QUEUE_BYTES_MAX", "ExecutionRecorder", "record_from_environment"]

QUEUE_BYTES_MAX = 64 << 20
"""Inputs and outputs that wait to be written."""

_OVERHEAD_BYTES = 1024  # of one execution in the queue beside its tensors
_MODEL_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger("nnfmq.recording")


class _PendingModel:
    """A preparation for the writer thread; `written` is set when `number` is final. None = it was not written."""

    def __init__(self, prepared: ObservedPreparation) -> None:
        self.prepared = prepared
        self.number: int | None = None
        self.written = threading.Event()


class _PendingRecord(NamedTuple):
    """An execution for the writer thread, and the bytes that it takes in the queue."""

    model: int
    execution: ObservedExecution
    size_bytes: int


class _RecordedModel:
    """The observer of one model's executions."""

    def __init__(self, recorder: ExecutionRecorder, number: int) -> None:
        self._recorder = recorder
        self._number = number
        self.needs_tensors = recorder.has_tensors

    def executed(self, execution: ObservedExecution) -> None:
        """Queue an execution for the writer thread, or drop it."""
        self._recorder.put(self._number, execution)


class ExecutionRecorder:
    """Records this process from `start` until `close`. Use `with`. Models that were prepared before are not recorded.

    The file is complete when `close` returns. If the process exits without `close`, an exit handler closes it; if it is
    killed, the file ends with the last whole record.
    """

    def __init__(self, path: str | os.PathLike[str], *, tensors: bool = True, limit_bytes: int | None = None) -> None:
        check_limit(limit_bytes)
        fd, self.path = create_recording_file(Path(path))
        self.has_tensors = tensors
        self.dropped = 0
        """Executions that were not written because the queue was full or the file could not be written."""
        self._writer = RecordingWriter(fd, has_tensors=tensors, limit_bytes=limit_bytes)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._has_failed = self._is_closed = False
        self._queue: SimpleQueue[_PendingModel | _PendingRecord | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="nnfmq-recorder", daemon=True)

    @classmethod
    def start(cls, path: str | os.PathLike[str], *, tensors: bool = True, limit_bytes: int | None = None) -> Self:
        """Create the file and begin to record. If the file exists, another one is created: PATH.PID.

        Args:
            path: The file, in an existing folder.
            tensors: Whether to record inputs and outputs.
            limit_bytes: The size that the file does not exceed; None = no limit.

        Raises:
            InvalidArgument: If the limit is below 4096 bytes.
            OSError: If the file cannot be created.
        """
        recorder = cls(path, tensors=tensors, limit_bytes=limit_bytes)
        recorder._thread.start()
        add_observer(recorder)
        atexit.register(recorder.close)
        return recorder

    def prepared(self, preparation: ObservedPreparation) -> ModelObserver | None:
        """Write a model; blocks until it is written. Returns the observer of its executions.

        Of a model that is divided among devices the steps are written, each as a model.
        """
        if preparation.status != ErrorStatus.NONE or preparation.plan_devices:
            return None
        pending = _PendingModel(preparation)
        self._queue.put(pending)
        if not pending.written.wait(_MODEL_TIMEOUT_S) or pending.number is None:
            _log.warning("a model is not recorded: %s is full, or cannot be written", self.path)
            return None
        return _RecordedModel(self, pending.number)

    def put(self, model: int, execution: ObservedExecution) -> None:
        """Queue an execution for the writer thread; drop it if the queue is full. Does not block."""
        tensors = (*(execution.inputs or ()), *(execution.outputs or ()))
        size_bytes = _OVERHEAD_BYTES + sum(len(tensor.data) for tensor in tensors)
        with self._lock:
            is_full = self._queued_bytes > 0 and self._queued_bytes + size_bytes > QUEUE_BYTES_MAX
            if is_full or self._has_failed:
                self.dropped += 1
                return
            self._queued_bytes += size_bytes
        self._queue.put(_PendingRecord(model, execution, size_bytes))

    def _write_all(self) -> None:
        """Write what the queue has, until it has None; on the writer thread."""
        while (item := self._queue.get()) is not None:
            try:
                if not self._has_failed:
                    self._write(item)
                elif isinstance(item, _PendingRecord):
                    self.dropped += 1
            except OSError as error:
                self._has_failed = True
                _log.warning("nothing more is recorded: %s cannot be written: %s", self.path, error.strerror)
            finally:
                self._release(item)

    def _write(self, item: _PendingModel | _PendingRecord) -> None:
        if isinstance(item, _PendingRecord):
            self._writer.add_execution(item.model, item.execution)
            return
        try:
            item.number = self._writer.add_model(item.prepared)
        except NnfmqError as error:  # the application has closed the model's memory in another thread
            _log.warning("a model cannot be read: %s", error)

    def _release(self, item: _PendingModel | _PendingRecord) -> None:
        if isinstance(item, _PendingModel):
            item.written.set()
            return
        with self._lock:
            self._queued_bytes -= item.size_bytes

    def close(self) -> None:
        """Stop recording, write what is queued, and close the file; waits at most 10 s. Idempotent.

        In a forked child nothing is written. If executions are missing in the file, their number is logged.
        """
        remove_observer(self)
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("%s is not complete: its disk took more than %g s", self.path, _CLOSE_TIMEOUT_S)
            return
        self._close_file()
        if self.dropped:
            _log.warning("%s lacks %d executions that came faster than they could be written", self.path, self.dropped)
        if self._writer.beyond_limit:
            _log.warning("%s lacks %d executions beyond its limit", self.path, self._writer.beyond_limit)

    def _close_file(self) -> None:
        if self._has_failed:
            self._writer.abandon()
            return
        try:
            self._writer.close(self.dropped)
        except OSError as error:
            _log.warning("%s has no END record: %s", self.path, error.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def record_from_environment(path: str) -> None:
    """Record to `path`, as the variables `NNFMQ_RECORD_TENSORS` and `NNFMQ_RECORD_LIMIT_BYTES` say.

    Raises:
        InvalidArgument: If a variable has no valid value.
        OSError: If the file cannot be created.
    """
    tensors, limit_bytes = settings.RECORD_TENSORS.value() == "1", settings.RECORD_LIMIT_BYTES.value()
    ExecutionRecorder.start(path, tensors=tensors, limit_bytes=limit_bytes)
