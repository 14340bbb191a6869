"""Deadlines: points of the monotonic clock, in integer nanoseconds.

The public interface takes timeouts (seconds) and durations (ns). They become deadlines once, when a call is made, so
that everything that the call waits for ends at the same time. `None` means no deadline.
"""

from __future__ import annotations

import threading
import time

from nnfmq.hal.errors import InvalidArgument, MissedDeadlineTransient

CLOCK_MAX_NS = 2**63 - 1
"""The last point of CLOCK_MONOTONIC that the kernel can express: 292 years. Later deadlines are cut to it (QOS-6)."""

_TIMEOUT_MAX_S = 1e10  # beyond it, a float of seconds times 1e9 exceeds CLOCK_MAX_NS


def deadline_after(timeout: float | None) -> int | None:
    """Return the deadline of a timeout in seconds that starts now; None if there is no timeout.

    Raises:
        InvalidArgument: If `timeout` is negative, NaN, or no number.
    """
    if timeout is None:
        return None
    try:
        is_valid = timeout >= 0  # False for NaN as well
    except TypeError:
        is_valid = False
    if not is_valid:
        raise InvalidArgument(f"a timeout is 0 or more seconds, or None for no limit; got {timeout!r}")
    return deadline_in(round((timeout if timeout < _TIMEOUT_MAX_S else _TIMEOUT_MAX_S) * 1e9))


def deadline_in(duration_ns: int) -> int:
    """Return the deadline of a duration that starts now. Saturates at `CLOCK_MAX_NS`."""
    deadline_ns = time.monotonic_ns() + duration_ns
    return deadline_ns if deadline_ns < CLOCK_MAX_NS else CLOCK_MAX_NS  # `min` would take twice as long


def has_passed(deadline_ns: int | None) -> bool:
    """Return whether the deadline has been reached; False if there is none."""
    return deadline_ns is not None and time.monotonic_ns() >= deadline_ns


def remaining_s(deadline_ns: int | None) -> float | None:
    """Return the seconds until a deadline, 0.0 once it has passed; None if there is none."""
    return None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns()) / 1e9


def remaining_ms(deadline_ns: int | None) -> int:
    """Return the time until a deadline as poll(2) and epoll_wait(2) expect it: whole milliseconds, or -1 for no limit.

    Rounds up, so that a caller that polls again until the deadline does not spin through its last millisecond.
    """
    if deadline_ns is None:
        return -1
    return min(max(0, -(-(deadline_ns - time.monotonic_ns()) // 1_000_000)), _POLL_MS_MAX)


_POLL_MS_MAX = 2**31 - 1  # poll(2) takes an int


def acquire(lock: threading.Lock | threading.RLock, deadline_ns: int | None, missed: str) -> None:
    """Acquire a lock, which the caller releases. Blocks until the deadline at most.

    Raises:
        MissedDeadlineTransient: If the deadline has passed; its text is `missed`.
    """
    if lock.acquire(False):  # usually; what follows would take several times as long
        return
    left_s = remaining_s(deadline_ns)
    if not lock.acquire(timeout=-1 if left_s is None else min(left_s, threading.TIMEOUT_MAX)):
        raise MissedDeadlineTransient(missed)
