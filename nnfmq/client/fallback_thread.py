"""The fallback thread: one thread per process for work that the watcher thread must not do, because it blocks.

An asynchronous execution whose device fails is executed on the CPU; the watcher thread learns of the failure, but must
not wait for anything. So it submits the execution to this thread. Submitted functions run one after the other, in the
order of submission.

The thread starts with the first function and ends when none is left, so a process whose devices do not fail has no
such thread. It is a daemon: a process that exits does not wait for results that nobody reads any more. A forked child
starts without functions: they belong to executions of the parent.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from nnfmq.base.threads import start_daemon

__all__ = ["THREAD_NAME", "submit"]

THREAD_NAME = "nnfmq-fallback"
_log = logging.getLogger("nnfmq.client")


class _FallbackThread:
    """The thread and the functions that it has not run yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: deque[Callable[[], object]] = deque()
        self._is_running = False

    def submit(self, function: Callable[[], object]) -> None:
        with self._lock:
            self._functions.append(function)
            if not self._is_running:
                self._start()

    def _start(self) -> None:
        try:
            start_daemon(self._run, THREAD_NAME)
            self._is_running = True
        except RuntimeError:
            self._functions.pop()
            raise

    def _run(self) -> None:
        while True:
            function = self._next()
            if function is None:
                return
            try:
                function()
            except Exception:  # noqa: BLE001  a bug of one caller must not end the thread that the others need
                _log.exception("work on the fallback thread failed")
            del function  # it may refer to memory of an execution that has ended

    def _next(self) -> Callable[[], object] | None:
        """Return the next function; None if the thread must end, because there is none."""
        with self._lock:
            self._is_running = bool(self._functions)
            return self._functions.popleft() if self._functions else None

    def reset_after_fork(self) -> None:
        """Forget all functions in a forked child, which has no copy of the thread."""
        self.__init__()  # type: ignore[misc]  # a new lock as well: a thread of the parent may have held the old one


_thread = _FallbackThread()


def submit(function: Callable[[], object]) -> None:
    """Run `function` on the fallback thread, after those submitted before. Does not block.

    It must deliver its own result and errors, and must not wait for another submitted function. An error that it raises
    is logged.

    Raises:
        RuntimeError: If no thread can be started.
    """
    _thread.submit(function)


os.register_at_fork(after_in_child=_thread.reset_after_fork)
