"""Collecting traces: of a command and all processes that it starts, or of a running driver.

The rings are memory of the processes that are traced. They are read every 20 ms, so that a long trace loses nothing,
and once more at the end: the memory of a process that was killed still has what it recorded. Meanwhile a sampler looks
who uses the CPUs, and whether the processes of a trace are stopped (`lab.machine_sampler`).
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nnfmq.base import settings
from nnfmq.base.channel import NO_WAIT, Channel, Listener
from nnfmq.base.memory import Memory
from nnfmq.cli.record import exit_status, signals_passed_to, start
from nnfmq.hal.errors import DeadObject, GeneralFailure, InvalidArgument, MissedDeadlineTransient, NnfmqError
from nnfmq.hal.types import Protection
from nnfmq.lab.conditions import machine
from nnfmq.lab.machine_sampler import MachineSampler
from nnfmq.observe.trace_files import RingReader, Slice, Trace, current_epoch_ns, merged
from nnfmq.observe.trace_layout import BURST_OF, request_base

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client

__all__ = ["WorkerRings", "read_file", "trace_command", "trace_driver", "traced_driver"]

_PERIOD_MS = 20
_CALL_TIMEOUT_NS = 10_000_000_000


def read_file(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        OSError: If it cannot be read.
        InvalidArgument: If it is no trace.
    """
    from nnfmq.observe.trace_files import read_trace

    try:
        return read_trace(path)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


# -- a command --------------------------------------------------------------------------------------------------------


def trace_command(command: Sequence[str]) -> tuple[Trace, int]:
    """Run a command and return the trace of its processes, and its exit status: 128 + n if signal n ended it.

    Blocks until it has exited. Ctrl-C is for the command.

    Raises:
        CommandNotFound: If it cannot be started.
    """
    from nnfmq.client.connection.trace import SOCKET_PREFIX

    recorded_at = machine()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nnfmq-trace-"))
        path = Path(folder, "s")
        sampler = stack.enter_context(MachineSampler())
        collector = stack.enter_context(_Collector(stack.enter_context(Listener.create(path)), sampler))
        environment = os.environ | {settings.TRACE.variable: f"{SOCKET_PREFIX}{path}"}
        with _started(command, environment) as process:
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            collector.collect_until_exit(pidfd)
            status = process.wait()
        sampler.stop()
        trace = collector.trace()
        if trace.slices:
            trace.machine, trace.epoch_ns = sampler.record, current_epoch_ns()
            trace.conditions = recorded_at
        return trace, exit_status(status)


@contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, leave SIGINT to it, and pass SIGTERM on; kill it if the block fails."""
    process = start(command, environment)
    try:
        with signals_passed_to(process):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


class _Collector:
    """Receives rings over connections to a listener, and reads them; lets `sampler` watch the processes that write.

    Close it, or use `with`. Borrows its arguments.
    """

    def __init__(self, listener: Listener, sampler: MachineSampler) -> None:
        self._listener = listener
        self._sampler = sampler
        self._channels: dict[int, Channel] = {}
        self._rings: list[tuple[Memory, RingReader]] = []
        self._poll = select.poll()
        self._poll.register(listener.fileno(), select.POLLIN)

    def collect_until_exit(self, pidfd: int) -> None:
        """Receive and read until the process of `pidfd` has exited."""
        self._poll.register(pidfd, select.POLLIN)
        has_exited = False
        while not has_exited:
            for fd, _ in self._poll.poll(_PERIOD_MS):
                has_exited |= fd == pidfd
                self._receive(fd)
            self._read()
        self._accept()
        for fd in list(self._channels):
            self._receive(fd)
        self._read()

    def _read(self) -> None:
        for _, reader in self._rings:
            reader.poll()
        self._sampler.watch({reader.pid for _, reader in self._rings} - {0})

    def _receive(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
            return
        channel = self._channels.get(fd)
        try:
            while channel is not None:
                with channel.receive(NO_WAIT) as frame:
                    for received in frame.detach_fds():
                        self._add(received)
        except MissedDeadlineTransient:
            pass
        except NnfmqError:  # it has exited
            self._poll.unregister(fd)
            self._channels.pop(fd).close()

    def _accept(self) -> None:
        while (channel := self._listener.accept()) is not None:
            self._channels[channel.fileno()] = channel
            self._poll.register(channel.fileno(), select.POLLIN)

    def _add(self, fd: int) -> None:
        with suppress(InvalidArgument):  # not a ring of nnfmq's
            memory = Memory.adopt(fd, protection=Protection.READ)
            self._rings.append((memory, RingReader(memory.view)))

    def trace(self) -> Trace:
        """Return the trace of what was read."""
        return merged(reader.trace() for _, reader in self._rings)

    def __enter__(self) -> _Collector:
        return self

    def __exit__(self, *_: object) -> None:
        rings, self._rings = self._rings, []
        while rings:
            rings.pop()[0].close()
        for channel in self._channels.values():
            channel.close()


# -- a running driver -------------------------------------------------------------------------------------------------


def trace_driver(client: Client, seconds: float) -> Trace:
    """Return the trace of a driver's workers over `seconds`. Blocks; Ctrl-C ends it earlier.

    Raises what `traced_driver` raises.
    """
    recorded_at, begin_ns = machine(), time.monotonic_ns()
    with traced_driver(client) as rings, MachineSampler() as sampler:
        with suppress(KeyboardInterrupt):
            while client.connection.is_open and time.monotonic_ns() < begin_ns + seconds * 1e9:
                rings.read()
                sampler.watch(rings.workers())
                time.sleep(min(_PERIOD_MS / 1000, seconds))
        rings.read()
        sampler.stop()
        trace = rings.trace()
        trace.machine, trace.epoch_ns = sampler.record, current_epoch_ns()
        trace.conditions = recorded_at
        _name_clients(trace, client)
        return trace


def _name_clients(trace: Trace, client: Client) -> None:
    """Add to the names of workers whose clients these are, and the models of bursts, as far as this user may know."""
    with suppress(GeneralFailure, DeadObject):
        for each in client.statistics().clients:
            if each.worker_pid in trace.machine.processes:
                trace.machine.processes[each.worker_pid] += f" of {each.program or 'a client'}"
            names = {model.id: model.name for model in each.models}
            for burst in each.bursts:
                request, now_ns = request_base(each.worker_pid, burst.id), time.monotonic_ns()
                name = f"{BURST_OF}{names.get(burst.model_id, '')}"
                trace.slices.append(Slice(each.worker_pid, each.worker_pid, now_ns, now_ns, name, request))


@contextmanager
def traced_driver(client: Client) -> Iterator[WorkerRings]:
    """Let all workers of a driver record until `client` is closed, and yield their rings for the block.

    Raises:
        GeneralFailure: If the driver is embedded, another client traces it, or this user does not administer it.
        DeadObject: If the driver exits before it begins.
    """
    from nnfmq.serialize import messages

    memories: list[Memory] = []

    def adopt(fds: list[int]) -> None:
        memories.extend(Memory.adopt(fd, protection=Protection.READ) for fd in fds)

    connection, begin_ns = client.connection, time.monotonic_ns()
    call = messages.TraceDriver(connection.next_call_id())
    connection.call(call, messages.DriverTraced, (), begin_ns + _CALL_TIMEOUT_NS, on_fds=adopt)
    with ExitStack() as stack:
        for memory in memories:
            stack.enter_context(memory)
        rings = WorkerRings(memories[0].view, begin_ns)
        stack.callback(rings.release)
        yield rings


class WorkerRings:
    """Reads the rings in a trace area from `begin_ns` on. A slot may get another worker, which begins a new ring."""

    def __init__(self, view: memoryview, begin_ns: int) -> None:
        self._view = view
        self._begin_ns = begin_ns
        self._current: dict[int, RingReader] = {}
        self._ended: list[RingReader] = []

    def read(self) -> None:
        """Read the rings of all workers that record."""
        from nnfmq.driver.process.trace import ACTIVE, AREA_RING_BYTES, ring_offset, slots_of

        for slot in range(1, 1 + slots_of(len(self._view))):
            if not self._view[ACTIVE + slot]:
                continue
            reader = self._current.get(slot)
            if reader is None or reader.pid not in (0, reader.writer_pid()):
                if reader is not None:
                    self._ended.append(reader)
                offset = ring_offset(slot)
                reader = self._current[slot] = RingReader(self._view[offset : offset + AREA_RING_BYTES])
            reader.poll()

    def workers(self) -> set[int]:
        """Return the pids of the workers that record."""
        return {reader.pid for reader in self._current.values()} - {0}

    def trace(self) -> Trace:
        """Return the trace of what was read. Slices of earlier traces are left out."""
        trace = merged(reader.trace() for reader in (*self._ended, *self._current.values()))
        trace.slices = [one for one in trace.slices if one.end_ns >= self._begin_ns]
        trace.times = [times for times in trace.times if times.end_ns >= self._begin_ns]
        return trace

    def release(self) -> None:
        """Release the memory; `trace` still returns what was read."""
        for reader in (*self._ended, *self._current.values()):
            reader.release()
        self._view.release()
