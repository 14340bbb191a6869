"""The watchdog of a worker: it ends executions of other runtimes at their deadline.

A runtime computes without looking at the clock. At the deadline the watchdog's thread tells it to stop, if it has a
function for that. If the execution has not ended GRACE_S later, or the runtime cannot be told, the worker exits, which
its client sees at once; the driver starts another one for it (docs/explanation/peer-death.md).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from nnfmq.base.threads import start_daemon

__all__ = ["GRACE_S", "WATCHDOG", "Watchdog"]

GRACE_S = 2.0
"""How long after its deadline an execution may still run."""
_IDLE_S = 0.1  # how long the thread looks at the clock after the last execution: a burst need not wake it each time
_NEVER = 2**63 - 1
_log = logging.getLogger("nnfmq.hosted")


class Watchdog:
    """Ends the executions of this process that run beyond their deadlines. Thread-safe.

    `end_process` is called if an execution cannot be ended otherwise.
    """

    def __init__(self, end_process: Callable[[], object]) -> None:
        self._end_process = end_process
        self._running: dict[int, tuple[int, Callable[[], bool]]] = {}
        self._aborted: set[int] = set()
        self._condition = threading.Condition()
        self._look_ns = _NEVER  # when the thread looks next; _NEVER: when it is woken
        self._has_thread = False

    def begin(self, execution: object, deadline_ns: int, abort: Callable[[], bool]) -> None:
        """Watch an execution until `end`; `abort` ends it and returns True, or returns False."""
        self._running[id(execution)] = deadline_ns, abort
        if deadline_ns < self._look_ns:
            with self._condition:
                if not self._has_thread:
                    start_daemon(self._watch, "nnfmq-watchdog")
                    self._has_thread = True
                self._condition.notify()

    def end(self, execution: object) -> None:
        """Stop watching an execution, which has ended."""
        self._running.pop(id(execution), None)
        self._aborted.discard(id(execution))

    def _watch(self) -> None:
        while True:
            with self._condition:
                now_ns = time.monotonic_ns()
                if self._running:
                    self._look_ns = min(self._next_ns(now_ns), now_ns + int(_IDLE_S * 1e9))
                elif self._look_ns == _NEVER or now_ns >= self._look_ns:
                    self._look_ns = _NEVER
                wait_s = None if self._look_ns == _NEVER else max(self._look_ns - now_ns, 0) / 1e9
                if not (wait_s is None and self._running):  # one began before `_look_ns` was set: it has not notified
                    self._condition.wait(wait_s)
            self._end_late(time.monotonic_ns())

    def _next_ns(self, now_ns: int) -> int:
        grace_ns = int(GRACE_S * 1e9)
        limits = (
            deadline_ns + grace_ns * (key in self._aborted) for key, (deadline_ns, _) in list(self._running.items())
        )
        return min(limits, default=now_ns)

    def _end_late(self, now_ns: int) -> None:
        for key, (deadline_ns, abort) in list(self._running.items()):
            if now_ns < deadline_ns:
                continue
            if key not in self._aborted:
                self._aborted.add(key)
                abort()
            elif now_ns >= deadline_ns + int(GRACE_S * 1e9):
                _log.error("an execution runs %.1f s after its deadline: the worker exits", GRACE_S)
                self._end_process()


WATCHDOG = Watchdog(lambda: os._exit(os.EX_SOFTWARE))
"""That of this process."""
