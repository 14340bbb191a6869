"""Close what the application has dropped without closing it: connections with their drivers, bursts, models, buffers.

The garbage collector may finalize an object at any instruction of any thread, which may hold any lock, and the watcher
thread must not wait for a driver. So `__del__` only puts the object into a queue, which is reentrant, and warns, as
that of a file does. A thread closes what is in the queue. It runs as long as a connection is open, as the watcher
thread does, and is a daemon. When the interpreter exits, `__del__` only warns: the kernel hangs up, and the drivers
end.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from nnfmq.base.ownership import Uncopyable
from nnfmq.base.threads import BLOCKED_SIGNALS, Thread

__all__ = ["ClosedWhenDropped", "CloserUse", "catch_up", "weak_call"]

THREAD_NAME = "nnfmq-garbage"
_WAITING_MAX = 8
_CATCH_UP_NS = 2_000_000_000
_log = logging.getLogger("nnfmq.client")


class ClosedWhenDropped(Uncopyable):
    """The base of objects that are closed when nothing refers to them any more.

    A constructor sets last what `_is_left_open` reads, or that says until then that there is nothing to close: a signal
    handler may raise at any line. The finalizers of its parts then release those.
    """

    __slots__ = ()

    def _is_left_open(self) -> bool:
        """Return whether `close` would release anything. Must not block or take locks. May raise AttributeError."""
        raise NotImplementedError

    def _is_of_process(self) -> bool:
        """Return whether that has descriptors or processes, so that a ResourceWarning says that it was not closed."""
        return False

    def _close_dropped(self) -> None:
        """Release everything; may block. Called once, on the thread."""
        raise NotImplementedError

    def _leave_at_exit(self) -> None:
        """Have the parts not warn again when the interpreter exits. Must not block or take locks."""

    def __del__(self) -> None:
        try:
            is_left_open = self._is_left_open()
        except AttributeError:  # the constructor has failed
            return
        if is_left_open:
            _Current.process.drop(self)


def catch_up() -> None:
    """Wait for the thread, up to 2 s, if it has much to close: a loop that drops faster would use up all descriptors.

    Call it before descriptors are opened, never in a finalizer.
    """
    process, limit_ns = _Current.process, 0
    while process.waiting() > _WAITING_MAX:
        limit_ns = limit_ns or time.monotonic_ns() + _CATCH_UP_NS
        if time.monotonic_ns() > limit_ns:
            return
        time.sleep(0.001)


def weak_call(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls a bound method while its object exists, and does not keep that.

    For what the watcher thread calls: otherwise it would keep an object until that is closed.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        found = reference()
        if found is not None:
            found(*arguments)

    return call


class CloserUse:
    """Keeps the thread running until `end`, for one connection."""

    def __init__(self) -> None:
        process = _Current.process
        process.add_user()
        self._process: list[_Process] = [process]  # at most one; list.pop is atomic

    def end(self) -> None:
        """Let the thread end, unless there are other users. Idempotent, also in a forked child."""
        try:
            process = self._process.pop()
        except IndexError:
            return
        if process is _Current.process:  # else the parent's
            process.remove_user()


class _Process:
    """The queue and the thread of this process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # finalizers do not take it
        self._users = 0
        self._dropped: SimpleQueue[ClosedWhenDropped | None] = SimpleQueue()  # None ends a thread
        self.is_exiting = False

    def add_user(self) -> None:
        with self._lock:
            if not self._users:
                self._start()
            self._users += 1

    def _start(self) -> None:
        thread = Thread(target=self._run, name=THREAD_NAME, daemon=True)
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            thread.start()  # it inherits this mask: signals must interrupt the main thread
        except BaseException:  # a signal handler has raised
            if thread.ident is not None:
                self._dropped.put(None)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def remove_user(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._dropped.put(None)

    def drop(self, resource: ClosedWhenDropped) -> None:
        """Have a resource closed soon, and warn. Does not block; takes no lock. For finalizers.

        Without a thread, because no connection is open, the finalizers of what the resource consists of release that.
        """
        if not self._users or self._pid != os.getpid():
            return
        text = f"{resource!r} was never closed: call close(), or use `with`" if resource._is_of_process() else ""
        if self.is_exiting:
            resource._leave_at_exit()
        else:
            self._dropped.put(resource)
        if text:
            warnings.warn(text, ResourceWarning, stacklevel=3, source=resource)

    def waiting(self) -> int:
        """Return how many resources wait to be closed."""
        return self._dropped.qsize()

    def _run(self) -> None:
        while True:
            resource = self._dropped.get()
            if resource is None:
                return
            try:
                resource._close_dropped()
            except Exception:  # noqa: BLE001  a bug in one object must not end the thread that the others need
                _log.exception("%r was not closed", resource)
            del resource


class _Current:
    """The objects of which a process has one."""

    process = _Process()


def _exit() -> None:
    _Current.process.is_exiting = True


def _forget_parent() -> None:
    """Start without the parent's thread and what it dropped. Runs in the child after fork(2)."""
    _Current.process = _Process()


atexit.register(_exit)
os.register_at_fork(after_in_child=_forget_parent)
