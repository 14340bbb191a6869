"""The trace of this application: $NNFMQ_TRACE makes the client library record from the first connection on.

The variable names the JSON file that is written when the process exits; `%p` in it stands for the pid. With the prefix
`socket:` it names the socket of `nnfmq trace`, which gets the memory of every ring as soon as that is made, so that it
has the slices even of processes that were killed. The driver records its part in rings that this process makes, too.
A forked child records nothing. (OBS-7)
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.deadlines import deadline_after
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.observe.trace_layout import RING_BYTES, request_base
from nnfmq.observe.trace_points import TRACING, TraceRecorder
from nnfmq.serialize import messages

__all__ = [
    "SOCKET_PREFIX",
    "BurstTrace",
    "burst_trace",
    "finish",
    "record_call",
    "start",
    "trace_worker",
]

if TYPE_CHECKING:
    from nnfmq.observe.trace_core import ExchangeTrace

BurstTrace: TypeAlias = "ExchangeTrace | None"
"""What records the requests of a burst; None: this process does not record."""

SOCKET_PREFIX = "socket:"
_CONNECT_TIMEOUT_S = 5.0
_log = logging.getLogger("nnfmq.client")


class _Application:
    """The rings of this process and its drivers, and where their slices go."""

    def __init__(self, target: str) -> None:
        self.pid = os.getpid()
        self.begin_ns = time.monotonic_ns()
        self.rings: list[Memory] = []
        self.collector: Channel | None = None
        self.file: Path | None = None
        if target.startswith(SOCKET_PREFIX):
            path = Path(target.removeprefix(SOCKET_PREFIX))
            self.collector = Channel.connect(path, deadline_after(_CONNECT_TIMEOUT_S))
        else:
            self.file = Path(target.replace("%p", str(self.pid)))

    def new_ring(self) -> Memory:
        """Make a ring and, if there is a collector, pass it on."""
        ring = Memory.create(RING_BYTES, "nnfmq-trace")
        self.rings.append(ring)
        if self.collector is not None:
            try:
                self.collector.send(b"ring", [ring.fileno()], deadline_after(_CONNECT_TIMEOUT_S))
            except (NnfmqError, OSError) as error:  # it has ended: nobody wants the trace
                _log.info("the trace is not collected any more: %s", error)
        return ring

    def write(self) -> None:
        """Write the file, if there is to be one."""
        if self.file is None:
            return
        from nnfmq.base.conditions import conditions  # at the exit of few processes
        from nnfmq.observe.trace_files import RingReader, current_epoch_ns, merged, write_trace  # as above
        from nnfmq.queue.core import core_name  # as above

        readers = [RingReader(ring.view) for ring in self.rings]
        for reader in readers:
            reader.poll()
        trace = merged(reader.trace() for reader in readers)
        trace.epoch_ns, trace.conditions = current_epoch_ns(), conditions(core_name)
        write_trace(trace, self.file)

    def close(self) -> None:
        """Release everything."""
        for ring in self.rings:
            ring.close()
        if self.collector is not None:
            self.collector.close()


class _Process:
    """The objects of which a process has one."""

    application: _Application | None = None
    has_failed = False
    lock = threading.Lock()


def start() -> None:
    """Begin to record, if $NNFMQ_TRACE asks for it and this process does not yet. Blocks up to 5 s for a collector."""
    target = settings.TRACE.value()
    if not target or _Process.application is not None or _Process.has_failed:
        return
    with _Process.lock:
        if _Process.application is not None:
            return
        try:
            application = _Application(target)
            ring = application.new_ring()
        except (NnfmqError, OSError) as error:
            _log.warning("this process is not traced: $%s is %r: %s", settings.TRACE.variable, target, error)
            _Process.has_failed = True
            return
        TRACING.start(TraceRecorder(ring.view, f"application {Path(sys.argv[0] or 'python').name}"))
        _Process.application = application
        atexit.register(finish)


def finish() -> None:
    """End the trace, and write the file. Idempotent. Called when the process exits."""
    application, _Process.application = _Process.application, None
    if application is None or application.pid != os.getpid():
        return
    if TRACING.recorder is not None:
        TRACING.recorder.slice("[NN_LA_PO]application", application.begin_ns, time.monotonic_ns())
    TRACING.stop()
    try:
        application.write()
    except OSError as error:
        _log.error("the trace was not written: %s: %s", application.file, error.strerror)
    finally:
        application.close()


# -- what connections and bursts call ---------------------------------------------------------------------------------


class WorkerConnection(Protocol):
    """A connection, as this module uses it."""

    def next_call_id(self) -> int:
        """Return an id for a new call."""
        ...

    def wait_until_ready(self) -> messages.HelloReply:
        """Return the driver's reply to Hello."""
        ...

    def start_call_nonblocking(
        self, message: messages.Call, reply_type: type[messages.Call], handler: Any, fds: Sequence[int] = ()
    ) -> None:
        """Send a call and return."""
        ...


def trace_worker(connection: WorkerConnection, worker_pid: int) -> None:
    """Let the worker of a connection record in a ring of this process, if that records. Does not block."""
    application = _Process.application
    if application is None or application.pid != os.getpid():
        return
    try:
        ring = application.new_ring()
        call = messages.StartTrace(connection.next_call_id())
        connection.start_call_nonblocking(call, messages.Reply, _StartHandler(worker_pid), [ring.fileno()])
    except NnfmqError as error:
        _StartHandler(worker_pid).set_exception(error)


class _StartHandler:
    """Logs that a worker does not record; the application goes on without its slices."""

    def __init__(self, worker_pid: int) -> None:
        self._worker_pid = worker_pid

    def set_result(self, reply: messages.Reply) -> None:
        """Receive the reply."""
        if reply.status is not ErrorStatus.NONE:
            _log.warning("worker %d is not traced: %s", self._worker_pid, reply.message)

    def set_exception(self, error: NnfmqError) -> None:
        """Receive the error."""
        _log.warning("worker %d is not traced: %s", self._worker_pid, error)


def record_call(connection: WorkerConnection, message: messages.Call, begin_ns: int) -> None:
    """Record a call over the control channel that ends now."""
    recorder = TRACING.recorder
    if recorder is not None:
        request = request_base(connection.wait_until_ready().worker_pid) | message.call % (1 << 24)
        recorder.slice(message.trace_name("LI"), begin_ns, time.monotonic_ns(), request)


def burst_trace(connection: WorkerConnection, burst_id: int, words: memoryview) -> BurstTrace:
    """Return a recorder of the requests of a burst, whose execution statistics are `words`; None if nothing records."""
    recorder = TRACING.recorder
    if recorder is None:
        return None
    from nnfmq.observe.trace_core import ExchangeTrace  # few processes record

    base = request_base(connection.wait_until_ready().worker_pid, burst_id)
    return ExchangeTrace(recorder.ring, base, words, recorder.sample_times)
