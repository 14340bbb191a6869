"""start_daemon: a thread for work of the client that must not run on the application's threads or the watcher's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

__all__ = ["BLOCKED_SIGNALS", "start_daemon"]

# Signals that a fault of the thread itself raises cannot be left to another thread.
_FAULT_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
BLOCKED_SIGNALS = signal.valid_signals() - _FAULT_SIGNALS


def start_daemon(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread and return it. All signals are blocked in it, because signals must interrupt the main thread.

    A process that exits does not wait for it.

    Raises:
        RuntimeError: If no thread can be started.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        thread.start()  # the thread inherits this mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return thread
