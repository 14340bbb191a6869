"""Calls that may block, on behalf of threads that must not: one thread for this process, while there is work.

The watcher thread reports the end of asynchronous executions. What follows from that may have to start a driver,
prepare a model or release one, which waits for replies that the watcher thread itself receives.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable

from nnfmq.hal.errors import ResourceExhaustedTransient

__all__ = ["THREAD_NAME", "submit"]

THREAD_NAME = "nnfmq-background"
_BLOCKED_SIGNALS = signal.valid_signals() - {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
}
_log = logging.getLogger("nnfmq.runtime")


class BackgroundCalls:
    """Calls in the order of their submission, on a thread that ends with the last of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_running = False

    def submit(self, call: Callable[[], object]) -> None:
        """Make a call on the thread, which starts if it does not run.

        Raises:
            ResourceExhaustedTransient: If the thread cannot be started. The call is then not made.
        """
        # Signal handlers run on the main thread, which the kernel must interrupt: this thread takes no signals. And
        # none interrupts the caller between the two steps.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            with self._lock:
                self._calls.append(call)
                if not self._is_running:
                    self._start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()
        except RuntimeError as error:
            self._calls.pop()
            raise ResourceExhaustedTransient(f"no thread can be started: {error}") from error
        self._is_running = True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._is_running = False
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # noqa: BLE001  a bug of one caller must not end the thread that the others need
                _log.exception("a call in the background failed")

    def reset_after_fork(self) -> None:
        """Forget calls and thread: a forked child has no copy of the thread."""
        self.__init__()  # type: ignore[misc]  # a new lock as well: a thread of the parent may have held the old one


_calls = BackgroundCalls()
submit = _calls.submit

os.register_at_fork(after_in_child=_calls.reset_after_fork)
