"""Threads of the library: daemons that signals do not reach.

Python runs signal handlers on the main thread only, which would not be interrupted if the kernel delivered a signal to
another thread. So every thread of the library blocks all signals, and a thread that it starts inherits the mask. The
module is short because everything that starts a thread needs it, from the watcher to the client.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

__all__ = ["BLOCKED_SIGNALS", "start_daemon"]

# Signals that a fault of the thread itself raises cannot be left to another thread.
_FAULT_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
BLOCKED_SIGNALS = signal.valid_signals() - _FAULT_SIGNALS


def start_daemon(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread in which all signals are blocked, and return it. A process that exits does not wait for it.

    Raises:
        RuntimeError: If no thread can be started.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        thread.start()  # it inherits this mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return thread
