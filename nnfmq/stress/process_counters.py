"""Counters of threads and processes in /proc that are cheap enough to be read for each request or every 2 ms."""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from nnfmq.measure.cpu_pinning import cpu_ns

__all__ = [
    "MEMORY_STALLS",
    "NEWEST_PROCESS",
    "ProcessState",
    "RequestCounters",
    "memory_stall_ns",
    "newest_process",
    "read_state",
    "run_ns",
]

_BYTES = 512
_MINOR, _MAJOR, _CPU = 7, 9, 36  # of the fields in /proc/PID/stat after the name


class ProcessState(NamedTuple):
    """The state (`R`, `S`, `T`...), minor and major faults, and the CPU on which it, or its first thread, last ran."""

    state: str
    minor_faults: int
    major_faults: int
    cpu: int


def read_state(fd: int) -> ProcessState:
    """Return the content of an open /proc/PID/stat, or /proc/PID/task/TID/stat.

    Raises:
        ProcessLookupError: If the process has been reaped.
    """
    fields = os.pread(fd, _BYTES, 0).rpartition(b")")[2].split()
    return ProcessState(fields[0].decode(), int(fields[_MINOR]), int(fields[_MAJOR]), int(fields[_CPU]))


class RequestCounters:
    """Counters of the calling thread and of a worker process. Owns file descriptors until `close`."""

    def __init__(self, worker_pid: int) -> None:
        self._worker_pid = worker_pid
        self._fds: list[int] = []
        own = f"/proc/self/task/{threading.get_native_id()}"
        self._own = self._open(f"{own}/schedstat")
        self._state = self._open(f"/proc/{worker_pid}/stat")
        tasks = sorted(os.listdir(f"/proc/{worker_pid}/task"), key=int)
        self._threads = [self._open(f"/proc/{worker_pid}/task/{task}/schedstat") for task in tasks]

    def _open(self, path: str) -> int:
        self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return self._fds[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file descriptors. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def read(self) -> tuple[list[int], list[int]]:
        """Return the counters in the order of RequestRecord from `client_cpu` on, and each worker thread's delay.

        The worker's delay is left out of the first list. A thread of the worker that has ended has delay 0.
        """
        usage, state = resource.getrusage(resource.RUSAGE_THREAD), read_state(self._state)
        delays = [_delay(fd) for fd in self._threads]
        counters = [
            time.thread_time_ns(), round(usage.ru_stime * 1e9), _delay(self._own), usage.ru_minflt, usage.ru_majflt,
            cpu_ns(self._worker_pid), state.minor_faults, state.major_faults,
        ]  # fmt: skip
        return counters, delays


def _delay(fd: int) -> int:
    """Return the time that a thread has waited for a CPU; its second number in schedstat."""
    with suppress(ProcessLookupError):
        return int(os.pread(fd, _BYTES, 0).split()[1])
    return 0


def run_ns(fd: int) -> int:
    """Return the CPU time of a thread from its open schedstat, in ns.

    Raises:
        ProcessLookupError: If the thread has ended.
    """
    return int(os.pread(fd, _BYTES, 0).split()[0])


MEMORY_STALLS = Path("/proc/pressure/memory")
"""The kernel's PSI of memory, for `memory_stall_ns`. Not every kernel has it."""


def memory_stall_ns(fd: int) -> int:
    """Return the time in which some task waited for memory since the boot, from an open `MEMORY_STALLS`."""
    return int(os.pread(fd, _BYTES, 0).partition(b"\n")[0].rpartition(b"=")[2]) * 1000


NEWEST_PROCESS = Path("/proc/loadavg")
"""The file for `newest_process`."""


def newest_process(fd: int) -> int:
    """Return the id of the process or thread that was started last, from an open `NEWEST_PROCESS`."""
    return int(os.pread(fd, _BYTES, 0).split()[-1])
