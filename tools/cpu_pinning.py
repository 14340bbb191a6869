"""Which process runs on which core, and how much CPU it used. Used by the benchmarks.

A round trip means nothing without its placement: waking a sleeper on another core can cost thirty times what it costs
on the same one. `apart` gives client and driver a core each, `same` one for both, `free` leaves it to the kernel.
Several clients take the cores in turn.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

PLACEMENTS = ("apart", "same", "free")
ALLOWED = frozenset(os.sched_getaffinity(0))
"""The cores that this process may use, as it started: pinning narrows what the kernel says later."""


@dataclass(frozen=True, slots=True)
class Cpus:
    """The core of a client and the core of its driver process; None: anywhere."""

    client: int | None
    driver: int | None


def choose(placement: str, client_number: int) -> Cpus:
    """Return the cores of the client with this number (from 0) among those that this process may use."""
    allowed = sorted(ALLOWED)
    if placement == "free":
        return Cpus(None, None)
    if placement == "same":
        both = allowed[client_number % len(allowed)]
        return Cpus(both, both)
    first = 2 * client_number
    return Cpus(allowed[first % len(allowed)], allowed[(first + 1) % len(allowed)])


def two_cpus() -> Cpus | None:
    """Return two different cores, or None where only one may be used."""
    allowed = sorted(ALLOWED)
    return Cpus(allowed[0], allowed[1]) if len(allowed) > 1 else None


def pin_process(pid: int, cpu: int | None) -> None:
    """Put every thread of a process (0: this one) on `cpu`, or anywhere; threads started later inherit it."""
    pin_to(pid, ALLOWED if cpu is None else {cpu})


def pin_to(pid: int, cpus: Iterable[int]) -> None:
    """Put every thread of a process (0: this one) on some cores; threads started later inherit it."""
    allowed = frozenset(cpus)
    for thread in os.listdir(f"/proc/{pid or 'self'}/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread), allowed)


def cpu_ns(pid: int) -> int:
    """Return the CPU time, user and system, of a process (0: this one) with its ended threads, in ns.

    Linux derives the number of a process's CPU clock from its pid (clock_getcpuclockid); /proc/PID/stat only counts
    ticks of 10 ms.
    """
    if pid == 0:
        return time.process_time_ns()
    return time.clock_gettime_ns(~pid << 3 | 2)
