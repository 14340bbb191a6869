"""Assign processes to CPUs, and measure the CPU time of a process. Used by the benchmarks.

The time of a round trip depends on the placement of its two processes: waking a thread on another CPU can take thirty
times as long as on the same one. Placement `apart` gives client and driver a CPU each, `same` one CPU for both, and
`free` leaves both to the scheduler. Several clients get the allowed CPUs round-robin.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

PLACEMENTS = ("apart", "same", "free")
ALLOWED = frozenset(os.sched_getaffinity(0))
"""The CPUs that this process may use, read before it is pinned: sched_getaffinity returns fewer afterwards."""


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPU of a client and the CPU of its driver process; None: any allowed CPU."""

    client: int | None
    driver: int | None


def choose(placement: str, client_number: int) -> Cpus:
    """Return the CPUs for the client with this number, counted from 0, among the allowed CPUs.

    With one allowed CPU, `apart` gives the same CPU twice.
    """
    allowed = sorted(ALLOWED)
    if placement == "free":
        return Cpus(None, None)
    if placement == "same":
        both = allowed[client_number % len(allowed)]
        return Cpus(both, both)
    first = 2 * client_number
    return Cpus(allowed[first % len(allowed)], allowed[(first + 1) % len(allowed)])


def two_cpus() -> Cpus | None:
    """Return two different CPUs, or None if only one is allowed."""
    allowed = sorted(ALLOWED)
    return Cpus(allowed[0], allowed[1]) if len(allowed) > 1 else None


def pin_process(pid: int, cpu: int | None) -> None:
    """Pin every thread of process `pid` (0: this one) to `cpu`, or to all allowed CPUs if it is None."""
    pin_to(pid, ALLOWED if cpu is None else {cpu})


def pin_to(pid: int, cpus: Iterable[int]) -> None:
    """Set the CPU affinity of every thread of process `pid` (0: this one) to `cpus`.

    Threads that these threads start later inherit the affinity (sched_setaffinity(2)).
    """
    allowed = frozenset(cpus)
    for thread in os.listdir(f"/proc/{pid or 'self'}/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread ended after the directory was read
            os.sched_setaffinity(int(thread), allowed)


def cpu_ns(pid: int) -> int:
    """Return the CPU time, user and system, of a process (0: this one) with its ended threads, in ns.

    For another process the id of its CPU clock is derived from its pid, as clock_getcpuclockid(3) does on Linux.
    /proc/PID/stat counts ticks of 10 ms only.
    """
    if pid == 0:
        return time.process_time_ns()
    return time.clock_gettime_ns(~pid << 3 | 2)
