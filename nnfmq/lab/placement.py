"""Processes of a measurement: their CPUs, CPU time and memory.

The time of a round trip depends on the placement of its two processes: waking a thread on another CPU can take thirty
times as long as on the same one. Placement `apart` gives client and driver a CPU each, `same` one CPU for both, and
`free` leaves both to the scheduler. Several clients get the allowed CPUs round-robin.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nnfmq.lab.child_processes import BenchmarkFailed

__all__ = [
    "Cpus",
    "ProcessMemory",
    "choose",
    "command_of",
    "cpu_ns",
    "memory_of",
    "open_memfd_bytes",
    "open_memfd_sizes",
    "pin_process",
    "pin_to",
    "two_cpus",
    "wait_until_idle",
]

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


# ----------------------------------------------------------------------------------------------------------------------
# Resources of processes, read from /proc: memory, open shared memory, and whether they compute.
#
# Nothing here is sent to a process or changes it.


IDLE_POLL_S, IDLE_CPU_NS, IDLE_POLLS, IDLE_TIMEOUT_S = 0.01, 200_000, 2, 10
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a process, or the sum of several, in bytes.

    `pss` is the proportional set size: a page that n processes map counts 1/n in each. `private_dirty` is memory that
    only this process has, and has written to.
    """

    pss: int = 0
    private_dirty: int = 0
    anonymous: int = 0
    file: int = 0
    shared: int = 0

    def __add__(self, other: ProcessMemory) -> ProcessMemory:
        return ProcessMemory(
            self.pss + other.pss,
            self.private_dirty + other.private_dirty,
            self.anonymous + other.anonymous,
            self.file + other.file,
            self.shared + other.shared,
        )


_FIELDS = {"Pss": "pss", "Private_Dirty": "private_dirty", "Pss_Anon": "anonymous", "Pss_File": "file",
           "Pss_Shmem": "shared"}  # fmt: skip


def memory_of(pid: int) -> ProcessMemory | None:
    """Return the memory of a process from /proc/PID/smaps_rollup; None if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except _GONE:
        return None
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return ProcessMemory(**{field: values.get(name, 0) for name, field in _FIELDS.items()})


def open_memfd_bytes(pids: Iterable[int]) -> int:
    """Return the size of the shared memory (memfd) that processes have open, mapped or not; each file counts once."""
    return sum(blocks * 512 for _, blocks in _open_memfds(pids).values())


def open_memfd_sizes(pids: Iterable[int]) -> list[int]:
    """Return the size of each shared memory (memfd) that processes have open, mapped or not."""
    return [size for size, _ in _open_memfds(pids).values()]


def _open_memfds(pids: Iterable[int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the size and the blocks of 512 bytes of each memfd, by device and inode."""
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for pid in pids:
        with suppress(*_GONE):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(*_GONE):
                    file = f"/proc/{pid}/fd/{name}"
                    if os.readlink(file).startswith("/memfd:"):
                        found = os.stat(file)
                        sizes[found.st_dev, found.st_ino] = found.st_size, found.st_blocks
    return sizes


def command_of(pid: int) -> str:
    """Return the command line of a process, shortened; empty if it has exited."""
    with suppress(*_GONE):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    return ""


def wait_until_idle(pids: Sequence[int], timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Return when none of the processes has used the CPU in two consecutive polls.

    Threads of a runtime poll for some time after an execution, and would compete with what is measured next.

    Raises:
        BenchmarkFailed: If a process still computes after `timeout_s`.
    """
    deadline, idle_polls, before = time.monotonic() + timeout_s, 0, [cpu_ns(pid) for pid in pids]
    while idle_polls < IDLE_POLLS:
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"a runner still computes {timeout_s:g} s after its trial")
        time.sleep(IDLE_POLL_S)
        now = [cpu_ns(pid) for pid in pids]
        idle_polls = idle_polls + 1 if all(b - a < IDLE_CPU_NS for a, b in zip(before, now, strict=True)) else 0
        before = now
