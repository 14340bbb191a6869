"""Threads of the library, whose start does not hang; most are daemons that signals do not reach.

Python runs signal handlers on the main thread only, which would not be interrupted if the kernel delivered a signal to
another thread. So every thread of the library blocks all signals, and a thread that it starts inherits the mask. The
module is short because everything that starts a thread needs it, from the watcher to the client.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from nnfmq.base.processes import set_name

__all__ = ["BEGIN_S", "BLOCKED_SIGNALS", "Thread", "start_daemon"]

# Signals that a fault of the thread itself raises cannot be left to another thread.
_FAULT_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
BLOCKED_SIGNALS = signal.valid_signals() - _FAULT_SIGNALS


BEGIN_S = 10.0
"""A thread that has not begun so long after its start has no memory to begin with."""


class Thread(threading.Thread):
    """A thread whose `start` raises RuntimeError if there is no memory for it to begin; it blocks for BEGIN_S then.

    Python's `start` waits until the new thread has begun. Without memory for its first frame the thread ends before,
    and the wait never ends (python/cpython#140746). Such a thread does nothing if it begins after all.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._started = _Beginning()  # the event for which `start` waits

    def run(self) -> None:
        """Call the target, unless `start` has raised. The kernel has the thread's name, too."""
        if not self._started.is_given_up:
            set_name(self.name)
            super().run()


class _Beginning(threading.Event):
    is_given_up = False

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(BEGIN_S if timeout is None else timeout):
            self.is_given_up = True
            raise RuntimeError("there is no memory for another thread")
        return True


def start_daemon(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread in which all signals are blocked, and return it. A process that exits does not wait for it.

    Raises:
        RuntimeError: If no thread can be started.
    """
    thread = Thread(target=run, name=name, daemon=True)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        thread.start()  # it inherits this mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return thread
