"""Scheduling policy and slice of the threads of a process, by sched_setattr(2).

The process may be another one of the same user: the kernel compares users, and asks for CAP_SYS_NICE only for what
cannot be taken back without it. A raised niceness is of that kind, and so is SCHED_IDLE where RLIMIT_NICE is 0, as it
usually is. A process without privileges can always leave SCHED_BATCH and give a thread its slice back. So this module
sets only these, and keeps the niceness.

A slice is how long a thread may compute before the scheduler looks for another one: of two that wait, the one with the
shorter slice is sooner at its turn, and neither gets more time in total. Kernels before Linux 6.12 ignore it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from typing import Final, NamedTuple

__all__ = [
    "BACKGROUND_NICE",
    "BATCH",
    "FOREGROUND_NICE",
    "Scheduling",
    "lower_priority",
    "scheduling_of",
    "set_scheduling",
]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_SET, _GET = (314, 315) if platform.machine() == "x86_64" else (274, 275)
_FORMAT = "=IIQiIQQQ"  # struct sched_attr, as of Linux 3.14
_SIZE = struct.calcsize(_FORMAT)
_ROUNDS_MAX = 100


class Scheduling(NamedTuple):
    """The policy and the slice of a thread.

    Attributes:
        policy: SCHED_OTHER or SCHED_BATCH, whose threads do not interrupt others when they wake.
        slice_ns: The slice; 0 = the kernel's default, and from a kernel that has none.
    """

    policy: int
    slice_ns: int = 0


BATCH = Scheduling(os.SCHED_BATCH, 500_000)
"""Of what computes while others wait for less. A short slice: the kernel lets a thread finish it, and a thread of an
application or of a worker that wakes waits for that."""
FOREGROUND_NICE: Final = 5
"""How much a process is nicer than the driver while somebody waits for its result: a third of the weight."""
BACKGROUND_NICE: Final = 10
"""The same if nobody does: a ninth of the weight."""


def lower_priority(is_background: bool) -> None:
    """Let the calling thread, and the threads that it starts, compute beside executions without delaying them much.

    Call it once, before it has started threads: the priority cannot be raised again. The niceness decides the share of
    a CPU (docs/explanation/scheduling.md has the values), the slice how long an execution waits for its turn.
    """
    os.nice(BACKGROUND_NICE if is_background else FOREGROUND_NICE)
    with suppress(OSError):  # a container may forbid the call
        set_scheduling(os.getpid(), BATCH)


def scheduling_of(thread: int) -> Scheduling:
    """Return the policy and the slice of a thread; the id of a process is also that of its main thread.

    Raises:
        OSError: If there is no such thread.
    """
    attributes = _attributes(thread)
    return Scheduling(attributes[1], attributes[5])


def set_scheduling(pid: int, scheduling: Scheduling) -> None:
    """Let all threads of a process, and those that they start from now on, ask the scheduler for this.

    Does nothing if the process has exited.

    Raises:
        PermissionError: If it is another user's.
    """
    done: set[str] = set()
    for _ in range(_ROUNDS_MAX):  # a thread that was starting has been given its creator's old values
        with suppress(FileNotFoundError, ProcessLookupError):
            found = set(os.listdir(f"/proc/{pid}/task")) - done
            for thread in found:
                with suppress(ProcessLookupError):  # it has ended
                    _set(int(thread), scheduling)
            done |= found
            if found:
                continue
        return


def _attributes(thread: int) -> tuple[int, ...]:
    buffer = ctypes.create_string_buffer(_SIZE)
    _check(_libc.syscall(_GET, thread, buffer, _SIZE, 0))
    return struct.unpack(_FORMAT, buffer.raw)


def _set(thread: int, scheduling: Scheduling) -> None:
    flags, niceness = _attributes(thread)[2:4]
    data = struct.pack(_FORMAT, _SIZE, scheduling.policy, flags, niceness, 0, scheduling.slice_ns, 0, 0)
    _check(_libc.syscall(_SET, thread, data, 0))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the scheduling of a thread: {os.strerror(number)}")
