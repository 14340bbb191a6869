"""RecordingWriter: append models and executions to a recording.

Equal contents are written once: the writer keeps the SHA-256 of what it has written. A record is written by one
writev(2), so that a killed process leaves whole records and at most one part.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Self

from nnfmq.base import settings
from nnfmq.base.ownership import Closable
from nnfmq.base.packages import installed_version
from nnfmq.base.threads import Thread
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import to_limit_field
from nnfmq.observe.executions import (
    CapturedTensor,
    ModelObserver,
    ObservedExecution,
    ObservedPreparation,
    add_observer,
    remove_observer,
)
from nnfmq.recording.format import (
    NO_DATA,
    RECORD_HEADER_BYTES,
    EndRow,
    ExecutionRow,
    ModelRow,
    RecordKind,
    SessionRow,
    TensorContent,
    TensorFormat,
    encode_row,
    file_header,
    record_header,
)
from nnfmq.serialize.models import encode_model

__all__ = [
    "QUEUE_BYTES_MAX",
    "ExecutionRecorder",
    "RecordingWriter",
    "create_recording_file",
    "record_from_environment",
]

_DIGESTS_MAX = 1 << 18  # of contents that are remembered, some 40 MiB; then the writer forgets them all
_EXECUTION_BYTES = 512  # at most some hundred in fact: what an execution's own record needs below the limit
_TENSOR_BYTES = 64
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def create_recording_file(path: Path) -> tuple[int, Path]:
    """Create a new file with mode 0600, and return its fd and its path: PATH.PID if there is a file PATH already.

    So two processes of one application have a file each, and no recording is overwritten.

    Raises:
        OSError: If neither can be created.
    """
    try:
        return os.open(path, _FLAGS, 0o600), path
    except FileExistsError:
        own = path.with_name(f"{path.name}.{os.getpid()}")
        return os.open(own, _FLAGS, 0o600), own


class RecordingWriter(Closable):
    """Writes a recording. Takes ownership of `fd`. One thread at a time. Close it.

    Args:
        fd: An empty file, open for writing.
        has_tensors: Whether executions come with inputs and outputs.
        limit_bytes: The size that the file does not exceed; None = no limit.
    """

    def __init__(self, fd: int, *, has_tensors: bool = True, limit_bytes: int | None = None) -> None:
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._data_count = self._model_count = 0
        self._data: dict[bytes, int] = {}
        self._models: dict[bytes, int] = {}
        self.executions = 0
        """Written ones."""
        self.beyond_limit = 0
        """Executions that were not written because the file was full."""
        self._append(file_header())
        self._append_record(RecordKind.SESSION, encode_row(_session(has_tensors)))

    def add_model(self, prepared: ObservedPreparation) -> int | None:
        """Write a model, unless it was written before, and return its number; None if the file is full.

        Raises:
            OSError: If the file cannot be written.
        """
        encoded, pools = (b"", ()) if prepared.model is None else encode_model(prepared.model)
        digest = hashlib.sha256(encoded)
        for pool in pools:
            digest.update(pool.view)
        row = ModelRow(
            digest.digest(), prepared.device, prepared.device_version, prepared.preference, prepared.priority,
            _formats(prepared.inputs), _formats(prepared.outputs), prepared.state_count, NO_DATA, (),
        )  # fmt: skip
        key = encode_row(row)
        if key not in self._models:
            contents: list[bytes | memoryview] = [encoded, *(pool.view for pool in pools)]
            if prepared.model is None:
                contents = []
            if not self._has_space(sum(map(len, contents)) + len(key) + _TENSOR_BYTES * len(contents)):
                return None
            numbers = [self._add_data(content) for content in contents]
            row = ModelRow(
                row.digest, row.device, row.device_version, row.preference, row.priority, row.inputs, row.outputs,
                row.state_count, numbers[0] if numbers else NO_DATA, tuple(numbers[1:]),
            )  # fmt: skip
            self._append_record(RecordKind.MODEL, encode_row(row))
            self._models[key] = self._model_count
            self._model_count += 1
        return self._models[key]

    def add_execution(self, model: int, execution: ObservedExecution) -> None:
        """Write an execution of model `model`; count it instead if the file is full.

        Raises:
            OSError: If the file cannot be written.
        """
        tensors = [*(execution.inputs or ()), *(execution.outputs or ())]
        needed = sum(len(tensor.data) + _TENSOR_BYTES for tensor in tensors) + _EXECUTION_BYTES
        if self.beyond_limit or not self._has_space(needed):  # once full, all are left out: a series without gaps
            self.beyond_limit += 1
            return
        row = ExecutionRow(
            model, execution.mode, ErrorStatus(execution.status),
            execution.intended_ns, execution.begin_ns, execution.end_ns, to_limit_field(execution.deadline_ns),
            execution.time_on_device_ns, execution.time_in_driver_ns,
            self._contents(execution.inputs), self._contents(execution.outputs),
        )  # fmt: skip
        self._append_record(RecordKind.EXECUTION, encode_row(row))
        self.executions += 1

    def _contents(self, tensors: Sequence[CapturedTensor] | None) -> tuple[TensorContent, ...] | None:
        if tensors is None:
            return None
        return tuple(TensorContent(tensor.shape, self._add_data(tensor.data)) for tensor in tensors)

    def _add_data(self, content: bytes | memoryview) -> int:
        """Return the number of the DATA record with this content; writes it if there is none."""
        digest = hashlib.sha256(content).digest()
        number = self._data.get(digest)
        if number is None:
            if len(self._data) >= _DIGESTS_MAX:
                self._data.clear()
            self._append_record(RecordKind.DATA, content)
            number = self._data[digest] = self._data_count
            self._data_count += 1
        return number

    def _has_space(self, size_bytes: int) -> bool:
        """Return whether so many bytes fit, and the END record after them."""
        needed = self._size_bytes + size_bytes + 2 * RECORD_HEADER_BYTES + _TENSOR_BYTES
        return self._limit_bytes is None or needed <= self._limit_bytes

    def _append_record(self, kind: RecordKind, payload: bytes | memoryview) -> None:
        self._append(record_header(kind, payload), payload)

    def _append(self, *parts: bytes | memoryview) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            written = os.writev(self._fd, left)
            self._size_bytes += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]

    def close(self, dropped: int = 0) -> None:
        """Write the END record and close the file. Idempotent.

        Raises:
            OSError: If the file cannot be written. It is closed nevertheless.
        """
        fd = self._fd
        if fd < 0:
            return
        try:
            self._append_record(RecordKind.END, encode_row(EndRow(self.executions, dropped, self.beyond_limit)))
        finally:
            self._fd = -1
            os.close(fd)

    def abandon(self) -> None:
        """Close the file without an END record, after it could not be written. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _session(has_tensors: bool) -> SessionRow:
    version = installed_version("nnfmq") or "unknown"
    command = tuple(word[: 1 << 16].encode("utf-8", "replace").decode() for word in sys.argv[:4096])
    return SessionRow(version, os.getpid(), command, time.monotonic_ns(), time.time_ns(), has_tensors)


def _formats(infos: Sequence[TensorInfo]) -> tuple[TensorFormat, ...]:
    return tuple(
        TensorFormat(info.name, info.shape, info.dtype, info.scale, info.zero_point, info.is_scalar, info.is_empty)
        for info in infos
    )


def check_limit(limit_bytes: int | None) -> None:
    """Raise InvalidArgument unless a limit is None, or at least 4096 bytes."""
    if limit_bytes is not None and limit_bytes < 4096:
        raise InvalidArgument(f"a recording needs 4096 bytes or more, not {limit_bytes}")


# ----------------------------------------------------------------------------------------------------------------------
# ExecutionRecorder: write the preparations and executions of this process to a file, on a thread of its own.
#
# The application's threads copy inputs and outputs and put them into a queue of at most QUEUE_BYTES_MAX, or one
# execution that is larger. If the disk is slower than the application, executions are dropped and counted, and the
# application goes on. A preparation, which takes long anyway, waits until its model is written: the caller may close
# the model's memory afterwards.


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


class ExecutionRecorder(Closable):
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
        self._thread = Thread(target=self._write_all, name="nnfmq-recorder", daemon=True)

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


def record_from_environment(path: str) -> None:
    """Record to `path`, as the variables `NNFMQ_RECORD_TENSORS` and `NNFMQ_RECORD_LIMIT_BYTES` say.

    Raises:
        InvalidArgument: If a variable has no valid value.
        OSError: If the file cannot be created.
    """
    tensors, limit_bytes = settings.RECORD_TENSORS.value() == "1", settings.RECORD_LIMIT_BYTES.value()
    ExecutionRecorder.start(path, tensors=tensors, limit_bytes=limit_bytes)
