"""ServiceStatus: tells the service manager that a supervisor is ready, how many clients it has, and its end.

The supervisor calls `update` after each turn of its event loop, and the timer for the watchdog is one of that loop: the
manager gets no more messages of a supervisor whose loop does not turn, and ends it.
"""

from __future__ import annotations

import time

from nnfmq.base.service_manager import ServiceManager
from nnfmq.driver.process.event_loop import EventLoop, Timer

__all__ = ["ServiceStatus"]

_INTERVAL_S = 1.0  # the least between two texts: clients may come and go much faster
_END_MARGIN_US = 10_000_000  # beyond the draining: for the ends of workers that have to be killed


class ServiceStatus:
    """Tells a service manager about a supervisor. Used by the loop's thread. Without a manager it does nothing."""

    def __init__(self, loop: EventLoop, manager: ServiceManager) -> None:
        self._loop = loop
        self._manager = manager
        self._told = self._text = ""
        self._next_s = 0.0
        self._timer: Timer | None = None

    @property
    def is_managed(self) -> bool:
        """Whether there is a manager."""
        return bool(self._manager.address)

    def ready(self) -> None:
        """Tell that clients can connect; from now on, if the manager asks for it, that the supervisor works."""
        self._manager.tell(READY=1)
        if self._manager.watchdog_us:
            self._show_life()

    def _show_life(self) -> None:
        if not self.is_managed:
            return
        self._manager.tell(WATCHDOG=1)
        self._loop.call_at(time.monotonic() + self._manager.watchdog_us / 2e6, self._show_life)

    def reloads(self) -> None:
        """Tell that the configuration is being read again, also by a successor, until `reloaded` is called."""
        self._manager.tell(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)

    def reloaded(self) -> None:
        """Tell that the configuration has been read, or that it stays as it was."""
        self._manager.tell(READY=1)

    def moves_to(self, pid: int) -> None:
        """Tell that process `pid` is the service now; from then on it tells, and this process does not."""
        self._manager.tell(MAINPID=pid)
        self._manager = ServiceManager()

    def ends(self, drain_s: float) -> None:
        """Tell that the driver ends, and how long that may take: it waits `drain_s` for its clients, at most."""
        self._manager.tell(STOPPING=1, EXTEND_TIMEOUT_USEC=int(drain_s * 1e6) + _END_MARGIN_US)

    def update(self, text: str) -> None:
        """Show `text` to whoever asks the manager for the service's status, but a new one at most each second."""
        self._text = text
        if self.is_managed and text != self._told and self._timer is None:
            self._timer = self._loop.call_at(self._next_s, self._tell_text)

    def _tell_text(self) -> None:
        self._timer, self._next_s, self._told = None, time.monotonic() + _INTERVAL_S, self._text
        self._manager.tell(STATUS=self._text)
