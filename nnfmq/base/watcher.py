"""The watcher thread: one thread per process that reports readable fds, the death of peers, and expired timers.

A message queue cannot detect whether its peer is alive, but the kernel can: the control socket of a dead process hangs
up, and its pidfd becomes readable. The watcher sleeps in epoll_wait(2) on control sockets and pidfds, without a
heartbeat or a periodic timeout. When a peer dies, its owner calls `notify_peer_death`, which cancels every wait on the
queues that the peer shared.

The thread starts with the first reader or timer and ends with the last. Callbacks run on it and must not block. A
callback that raises loses its registration; the error is logged, and the owner is informed.

The thread blocks all signals (see `threads`), and so do the threads that it starts.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

from nnfmq.base.deadlines import remaining_s
from nnfmq.base.ownership import Uncopyable
from nnfmq.base.threads import BLOCKED_SIGNALS, Thread

THREAD_NAME = "nnfmq-watcher"
_WAKE_INTERVAL_S = 0.001
_POLL_S_MAX = 1_000_000.0  # epoll_wait(2) takes an int of milliseconds
_log = logging.getLogger("nnfmq.watcher")
T = TypeVar("T")


class Wakeable(Protocol):
    """A queue, as the watcher sees it."""

    @property
    def waiters(self) -> int:
        """Number of threads of this process that are blocked on the queue."""
        ...

    def wake_all(self) -> object:
        """Wake all threads of this process that are blocked on the queue."""
        ...


class Flag(Protocol):
    """A flag that is set once: `queue.PeerDeathFlag`."""

    def set(self) -> None:
        """Set the flag."""
        ...


class DeathRecipients(Uncopyable):
    """The flag to set and the queues to wake when one peer dies. Thread-safe."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self._lock = threading.Lock()
        self._queues: list[Wakeable] = []

    def add(self, *queues: Wakeable) -> None:
        """Add queues whose waits end when the peer dies."""
        with self._lock:
            self._queues.extend(queues)

    def discard(self, *queues: Wakeable) -> None:
        """Remove queues, before they are closed. Idempotent."""
        with self._lock:
            self._queues = [queue for queue in self._queues if not any(queue is removed for removed in queues)]

    def mark_dead(self) -> None:
        """Set the flag, then wake all waiters once."""
        self.flag.set()
        self.wake()

    def wake(self) -> bool:
        """Wake all waiters once; return whether there are any left."""
        with self._lock:
            for queue in self._queues:
                queue.wake_all()
            return any(queue.waiters for queue in self._queues)


class ReaderHandle:
    """Registration of one fd, which `remove_reader` ends. Borrows the fd."""

    __slots__ = ("fd", "on_failure", "on_ready")

    def __init__(self, fd: int, on_ready: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        self.fd = fd
        self.on_ready = on_ready
        self.on_failure = on_failure


class TimerHandle:
    """A callback for a point in time, which `cancel_timer` cancels."""

    __slots__ = ("at_ns", "callback")

    def __init__(self, at_ns: int, callback: Callable[[], None]) -> None:
        self.at_ns = at_ns
        self.callback: Callable[[], None] | None = callback


def _ignore(_error: Exception) -> None:
    """Do nothing: the default of `on_failure`."""


class Watcher(Uncopyable):
    """The thread and its epoll set. Thread-safe. Use the functions of this module, which share one instance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[int, ReaderHandle] = {}
        self._dead_peers: list[DeathRecipients] = []  # that may still have waiters
        self._timers: list[tuple[int, int, TimerHandle]] = []  # a heap; the counter keeps the order of equal times
        self._timer_ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wakeup_fd = -1  # an eventfd in the epoll set

    def add_reader(
        self, fd: int, on_ready: Callable[[], None], on_failure: Callable[[Exception], None] = _ignore
    ) -> ReaderHandle:
        """Call `on_ready` on the watcher's thread whenever `fd` is readable or hung up. Borrows `fd`.

        If `on_ready` raises, the registration ends and `on_failure` is called with the error.

        Raises:
            OSError: If epoll does not support the fd, the fd is already registered, or no fd is left for the epoll set.
            RuntimeError: If the thread cannot be started.
        """
        handle = ReaderHandle(fd, on_ready, on_failure)
        with self._lock:
            epoll = self._ensure_started()
            try:
                epoll.register(fd, select.EPOLLIN)
            except OSError:
                self._wakeup()  # lets the thread end if it was started for this fd
                raise
            self._readers[fd] = handle
        return handle

    def remove_reader(self, handle: ReaderHandle) -> None:
        """End a registration. Idempotent. Call it before the fd is closed."""
        with self._lock:
            if self._readers.get(handle.fd) is not handle:
                return
            del self._readers[handle.fd]
            if self._epoll is not None:
                self._epoll.unregister(handle.fd)
            self._wakeup()

    def call_at(self, at_ns: int, callback: Callable[[], None]) -> TimerHandle:
        """Call `callback` on the watcher's thread at a monotonic time (ns), or up to some milliseconds later."""
        handle = TimerHandle(at_ns, callback)
        with self._lock:
            self._ensure_started()
            heapq.heappush(self._timers, (at_ns, next(self._timer_ids), handle))
            if self._timers[0][2] is handle:
                self._wakeup()
        return handle

    def cancel_timer(self, handle: TimerHandle) -> None:
        """Cancel a timer. Idempotent; does nothing if the timer has expired."""
        with self._lock:
            handle.callback = None
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            if not self._timers:
                self._wakeup()  # lets the thread end

    def notify_peer_death(self, peer: DeathRecipients) -> None:
        """Cancel all waits on a peer that has exited. Thread-safe. Does not block.

        Sets the peer's flag and wakes its waiters. The watcher's thread wakes them again every millisecond until none
        is left, because a waiter may have checked the flag just before it was set, and not be asleep yet.
        """
        peer.mark_dead()
        with self._lock:
            self._ensure_started()
            self._dead_peers.append(peer)
            self._wakeup()

    def reset_after_fork(self) -> None:
        """Close the fds that a forked child has inherited; its copy of the thread does not exist."""
        epoll, wakeup_fd = self._epoll, self._wakeup_fd
        self.__init__()  # type: ignore[misc]  # a new lock as well: a thread of the parent may have held the old one
        if epoll is not None:
            epoll.close()
            os.close(wakeup_fd)

    def _ensure_started(self) -> select.epoll:
        """Return the epoll set of the running thread; start the thread if there is none. `_lock` is held.

        If that fails, or a signal handler raises, everything is released, so that the next call can try again.
        """
        if self._epoll is not None:
            return self._epoll
        with ExitStack() as undo:
            epoll = undo.enter_context(select.epoll())
            wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, wakeup_fd)
            epoll.register(wakeup_fd, select.EPOLLIN)
            thread = Thread(target=self._run, args=(epoll, wakeup_fd), name=THREAD_NAME, daemon=True)
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
            try:
                thread.start()  # the thread inherits this mask
                self._epoll, self._thread, self._wakeup_fd = epoll, thread, wakeup_fd
                undo.pop_all()
            finally:
                # Unblocking delivers pending signals, whose handlers may raise: by now all state is consistent.
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        return epoll

    def _wakeup(self) -> None:
        if self._wakeup_fd >= 0:
            os.eventfd_write(self._wakeup_fd, 1)

    def _run(self, epoll: select.epoll, wakeup_fd: int) -> None:
        while not self._stop_if_idle(epoll):
            for fd, _ in epoll.poll(self._poll_timeout_s()):
                if fd == wakeup_fd:
                    os.eventfd_read(wakeup_fd)
                else:
                    self._call_reader(fd)
            self._wake_dead_peers()
            self._run_expired_timers()

    def _stop_if_idle(self, epoll: select.epoll) -> bool:
        """Return whether the thread must end; if it does because nothing is registered, close its fds.

        The decision is made under the lock, so a concurrent `add_reader` either keeps this thread or starts another.
        """
        with self._lock:
            if self._epoll is not epoll:
                return True  # a signal interrupted `_ensure_started`, which has released everything
            if self._readers or self._dead_peers or self._timers:
                return False
            epoll.close()
            os.close(self._wakeup_fd)
            self._epoll, self._thread, self._wakeup_fd = None, None, -1
            return True

    def _poll_timeout_s(self) -> float:
        if self._dead_peers:
            return _WAKE_INTERVAL_S
        with self._lock:
            next_ns = self._timers[0][0] if self._timers else None
        left_s = remaining_s(next_ns)
        return -1 if left_s is None else min(left_s, _POLL_S_MAX)

    def _call_reader(self, fd: int) -> None:
        with self._lock:
            handle = self._readers.get(fd)
        if handle is None:
            return  # removed after epoll_wait returned
        try:
            handle.on_ready()
        except Exception as error:  # noqa: BLE001  a bug of one owner must not end the thread that the others need
            _log.exception("the callback for fd %d failed; the fd is no longer watched", fd)
            self.remove_reader(handle)
            self._call(partial(handle.on_failure, error), "the report of that failure failed")

    def _wake_dead_peers(self) -> None:
        with self._lock:
            peers = list(self._dead_peers)
        done = [peer for peer in peers if not self._call(peer.wake, "a queue of a dead peer could not be woken")]
        with self._lock:
            self._dead_peers = [peer for peer in self._dead_peers if peer not in done]

    def _run_expired_timers(self) -> None:
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > time.monotonic_ns():
                    return
                handle = heapq.heappop(self._timers)[2]
            callback, handle.callback = handle.callback, None
            if callback is not None:
                self._call(callback, "a timer's callback failed")

    @staticmethod
    def _call(callback: Callable[[], T], failure: str) -> T | None:
        """Return the result of the callback; None, and log `failure`, if it raises."""
        try:
            return callback()
        except Exception:  # noqa: BLE001  a bug of one owner must not end the thread that the others need
            _log.exception(failure)
            return None


_watcher = Watcher()
add_reader = _watcher.add_reader
remove_reader = _watcher.remove_reader
call_at = _watcher.call_at
cancel_timer = _watcher.cancel_timer
notify_peer_death = _watcher.notify_peer_death


def thread() -> threading.Thread | None:
    """Return the watcher's thread, or None if it does not run."""
    return _watcher._thread


os.register_at_fork(after_in_child=_watcher.reset_after_fork)
