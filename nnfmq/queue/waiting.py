"""What a wait needs besides the queue: the flag that ends it when the peer dies, and how long it polls first.

The dead flag is private to this process: the watcher raises it when the peer's socket or pidfd hangs up, and the core
tests it in its spin and after every return of the futex, before it believes the ring. It is never lowered. The polling
window is read from the environment once, where a burst is made; the wait itself is in the cores. Left out: core-aware
and predictive waiting. FMQ_FACTS 3.5 and 3.6.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument

CONTROLLER_VARIABLE = "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW"
SERVER_VARIABLE = "NNFMQ_BURST_SERVER_POLLING_WINDOW"
DEFAULT_WINDOW_US = 50
_MAX_WINDOW_US = 10**9


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
