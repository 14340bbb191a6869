"""What a wait needs besides the queue: the flag that ends it when the peer dies, and when it polls.

The dead flag is private to this process: the watcher raises it when the peer's socket or pidfd hangs up, and the core
tests it in its spin and after every return of the futex, before it believes the ring. It is never lowered. The polling
window is read from the environment once, where a burst is made. A `Forecast` says where in a wait that window lies: at
its beginning, as in Android, or around the time when the record is expected, with sleep before it. It is arithmetic
alone, the specification of `_waiting.h`; the wait itself is in the cores. FMQ_FACTS 3.5 and 3.6.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument

CONTROLLER_VARIABLE = "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW"
SERVER_VARIABLE = "NNFMQ_BURST_SERVER_POLLING_WINDOW"
DEFAULT_WINDOW_US = 50
_MAX_WINDOW_US = 10**9


POLL, SLEEP = 0, -1  # what Forecast.plan says, unless it says until when to nap

_LONGEST_NS = 100_000_000  # after a longer wait nobody misses what a wake-up costs
_END_OF_CLOCK_NS = 2**63 - 1  # where deadlines saturate (QOS-6): in 292 years
_SHORTEST_NAP_NS = 10_000  # going to sleep and coming back costs about as much
_MARGIN_NS = 5_000  # awake at least so long before a record is expected
_FINDS = 2  # more of them in a row are no chance any more
_SAMPLES = 4  # that make a habit


def deadline_after(timeout: float | None) -> int | None:
    """Return the monotonic deadline (ns) of a timeout in seconds; None = no limit. Raises InvalidArgument below 0."""
    if timeout is None:
        return None
    if not timeout >= 0:  # nor a NaN
        raise InvalidArgument(f"a timeout is 0 or more seconds, or None for no limit; got {timeout}")
    return deadline_in(round(min(timeout, 1e10) * 1e9))


def deadline_in(duration_ns: int) -> int:
    """Return the monotonic deadline (ns) of a duration, at most the clock's end (QOS-6)."""
    return min(_END_OF_CLOCK_NS, time.monotonic_ns() + duration_ns)


class DeadFlag:
    """One process-private word: down until the peer is known to be gone, then up for good.

    `buffer` is what the core reads (4 bytes, native order). Several queues of one peer may share a flag.
    """

    __slots__ = ("buffer",)

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(4)).cast("I")

    @property
    def is_raised(self) -> bool:
        """Return True once the peer is known to be gone."""
        return self.buffer[0] != 0

    def raise_flag(self) -> None:
        """Say that the peer is gone. Waiters notice when they are woken: call `wake_all` of their queues next."""
        self.buffer[0] = 1  # SYNC dead


class Forecast:
    """What one receiver knows of its waits: how long they are, and how late its naps end.

    Each number is an integer of nanoseconds. A wait is predictable when the last ones differed little; then it is spent
    asleep until shortly before its expected end, and the polling window begins there. One that is not, but hardly ends
    within a window, is spent asleep: polling in vain takes a core, perhaps from who computes the answer. No wait ever
    polls for longer than one window. (To sleep at once where another task was seen to take the CPU was tried and was
    worse: beside a process that eats a core, the rare interruption of a poll costs less than all those wake-ups.)
    """

    __slots__ = ("expected", "finds", "lateness", "samples", "spread")

    def __init__(self) -> None:
        self.expected = self.spread = 0  # of a wait, and how far the last ones were off
        self.lateness = 0  # of the end of a nap, nearly the worst
        self.samples = 0
        self.finds = 0  # naps in a row that ended with the record already there

    def plan(self, now: int, window_ns: int) -> int:
        """Return POLL, SLEEP, or when the nap ends after which to poll."""
        if window_ns == 0:
            return SLEEP
        if self.samples < _SAMPLES or self.expected > _LONGEST_NS or self.expected + 2 * self.spread <= window_ns:
            return POLL
        if self.spread > window_ns // 2:
            return SLEEP if self.expected - self.spread > window_ns else POLL
        margin = min(self.lateness + 2 * self.spread + _MARGIN_NS, window_ns)
        nap = self.expected - margin
        return POLL if nap < _SHORTEST_NAP_NS else now + nap

    def learn(self, waited: int) -> None:
        """Take in how long a wait was. One that lasted much longer than all before counts for less."""
        if not self.samples:
            self.expected, self.spread = waited, waited // 2
        error = min(abs(waited - self.expected), 4 * self.spread + 20_000)
        self.expected += error // 4 if waited > self.expected else -(error // 4)
        self.spread += (error - self.spread) // 4 if error > self.spread else -((self.spread - error) // 4)
        self.samples += 1

    def woke(self, planned: int, now: int, found: bool) -> None:
        """Take in when a nap ended, and whether the record was already there."""
        if now >= planned:
            late = min(now - planned, 100_000)
            self.lateness += (late - self.lateness) // 2 if late > self.lateness else -((self.lateness - late) // 16)
        if found:  # it came during the nap, nobody knows when: nap less next time, and much less if it goes on
            self.expected -= self.expected // (2 if self.finds >= _FINDS else 8)
        self.finds = self.finds + 1 if found else 0


@dataclass(frozen=True, slots=True)
class PollingWindow:
    """How long a receive polls its ring before it sleeps; 0 = sleep at once."""

    ns: int

    @classmethod
    def controller(cls, window_us: float | None = None) -> PollingWindow:
        """Return the application's window: `window_us` if given, else $NNFMQ_BURST_CONTROLLER_POLLING_WINDOW (µs)."""
        return cls(_window_ns(CONTROLLER_VARIABLE, window_us))

    @classmethod
    def server(cls, window_us: float | None = None) -> PollingWindow:
        """Return the driver's window: `window_us` if given, else $NNFMQ_BURST_SERVER_POLLING_WINDOW (µs)."""
        return cls(_window_ns(SERVER_VARIABLE, window_us))


def _window_ns(variable: str, window_us: float | None) -> int:
    if os.cpu_count() == 1:
        return 0  # a spin would keep the peer from answering; a process pinned to one CPU of many may well poll
    wanted = _from_environment(variable) if window_us is None else window_us
    if not abs(wanted) <= _MAX_WINDOW_US:  # nor a NaN
        raise InvalidArgument(f"a polling window is 0 to {_MAX_WINDOW_US} µs, got {wanted}")
    return round((wanted if wanted >= 0 else DEFAULT_WINDOW_US) * 1000)


def _from_environment(variable: str) -> int:
    try:
        return int(os.environ.get(variable, DEFAULT_WINDOW_US))
    except ValueError:
        return DEFAULT_WINDOW_US  # unparsable counts as unset, as Android reads its properties
