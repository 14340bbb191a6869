"""RestartLimit: how soon a driver that has died is started again.

The first deaths cost nothing: the next driver starts at once. If a driver has died again and again, each time soon
after its start, a model probably kills it, and the next start is delayed: 1 s, then twice as long each time, up to
60 s. A driver that lives longer ends the delays.
"""

from __future__ import annotations

import logging
import threading
import time

from nnfmq.hal.errors import DeadObject

__all__ = ["RestartLimit"]

_STABLE_NS = 10_000_000_000
_FREE_DEATHS = 5
_DELAY_MAX_S = 60
_log = logging.getLogger("nnfmq.client")


class RestartLimit:
    """The deaths of one driver and of its successors. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few assignments
        self._began_ns = time.monotonic_ns()
        self._ended_ns = 0
        self._early_deaths = 0
        self._next_start_ns = 0

    def begin(self) -> None:
        """Note that a driver runs from now on."""
        with self._lock:
            self._began_ns = time.monotonic_ns()

    def require_allowed(self, ended_ns: int) -> None:
        """Do nothing if another driver may be started now in place of the one that died at `ended_ns`.

        Raises:
            DeadObject: If not. The text says when.
        """
        with self._lock:
            if ended_ns != self._ended_ns:
                self._ended_ns = ended_ns
                self._count(ended_ns - self._began_ns < _STABLE_NS)
        left_s = (self._next_start_ns - time.monotonic_ns()) / 1e9
        if left_s > 0:
            raise DeadObject(f"{self._text()}; the next one is started in {left_s:.1f} s at the earliest")

    def fail(self) -> None:
        """Note that a driver has exited while it started."""
        with self._lock:
            self._count(True)

    def _count(self, is_early: bool) -> None:
        self._early_deaths = self._early_deaths + 1 if is_early else 0
        late = self._early_deaths - _FREE_DEATHS
        if late > 0:
            delay_s = min(2 ** min(late - 1, 10), _DELAY_MAX_S)
            self._next_start_ns = time.monotonic_ns() + delay_s * 1_000_000_000
            _log.warning("%s; the next one is started in %d s", self._text(), delay_s)

    def _text(self) -> str:
        return (
            f"{self._early_deaths} drivers have died one after the other, each within {_STABLE_NS // 10**9} s of its "
            "start: probably a model makes them crash"
        )
