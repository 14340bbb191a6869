"""Processes below a process: find them, read their memory, and end them. Used by the benchmarks of the driver.

An orphan is adopted by the nearest ancestor that called `adopt_orphans` (PR_SET_CHILD_SUBREAPER). A benchmark that
calls it first therefore finds every process that it caused among its own descendants.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GONE = (FileNotFoundError, ProcessLookupError)
_END_S = 10.0


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
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(*_GONE):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(*_GONE):
                    file = f"/proc/{pid}/fd/{name}"
                    if os.readlink(file).startswith("/memfd:"):
                        found = os.stat(file)
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def command_of(pid: int) -> str:
    """Return the command line of a process, shortened; empty if it has exited."""
    with suppress(*_GONE):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    return ""


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it has exited."""
    found: list[int] = []
    with suppress(*_GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_GONE):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


@contextmanager
def opened_pidfd(pid: int) -> Iterator[int]:
    """Yield a pidfd of a process, and close it afterwards."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def has_exited(pidfd: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for a process to exit; return whether it has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that a benchmark ends and removes what it made."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_descendants() -> None:
    """Kill and reap all descendants of this process. Waits at most 10 s."""
    end = time.monotonic() + _END_S
    while (found := descendants(os.getpid())) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
