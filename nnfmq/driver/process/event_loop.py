"""The supervisor's event loop: callbacks for readable fds and for points in time, all on one thread.

The supervisor forks, so it must not start threads, and `nnfmq.base.watcher` is one. No callback may block.

If the kernel has no memory for another registration of epoll(7), or the user has as many as it allows, the loop
looks at that fd again and again instead: whoever is served stays served, and a child's exit is always seen.

The loop also ends children that are stopped (SIGSTOP) and that nobody continues within STOP_GRACE_S: to whoever needs
one, it would look like a child that never ends. The kernel reports a stop as it reports an exit, by SIGCHLD.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from nnfmq.base.ownership import Closable

__all__ = ["CLOSE_S", "LOOK_S", "STOP_GRACE_S", "Child", "EventLoop", "Timer"]

CLOSE_S = 0.005
"""For so long a close(2) may block in a loop that limits it."""
STOP_GRACE_S = 0.2
"""For so long a child may be stopped; a debugger that attaches stops it in another way (ptrace)."""
LOOK_S = 0.05
"""The pause between two looks at fds for which epoll has no memory."""
_SHORTAGES = (errno.ENOSPC, errno.ENOMEM)
_WAIT_S_MAX = 1_000_000.0  # epoll_wait(2) takes an int of milliseconds


class Timer:
    """A callback that is due at a time of the monotonic clock, in seconds."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Drop the callback. Idempotent; does nothing if it has been called."""
        self.callback = None


class Child(Protocol):
    """A child process, as the loop sees it."""

    def is_stopped(self) -> bool:
        """Return whether it is stopped."""
        ...


class EventLoop(Closable):
    """Waits for fds and timers and calls their callbacks. One thread. Close it, or use `with`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._poll = select.poll()  # for fds that epoll has rejected
        self._rejected: set[int] = set()
        self._readers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []  # a heap; the counter keeps the order of equal times
        self._timer_ids = itertools.count()
        self._children: dict[Child, Callable[[], None]] = {}
        self._child_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # written when SIGCHLD arrives
        self._previous_handler: object = None  # of SIGCHLD; None: it is not this object that handles it
        self._on_change: Callable[[], None] = lambda: None
        self._previous_timer_handler: object = None  # of SIGALRM; the same
        self.add_reader(self._child_fd, self._on_child_change)

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable or hung up. Borrows `fd`."""
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            self._poll.register(fd, select.POLLIN)
            self._rejected.add(fd)
        self._readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        """End the registration of `fd`, before it is closed. Idempotent."""
        if self._readers.pop(fd, None) is not None:
            (self._poll if fd in self._rejected else self._epoll).unregister(fd)
            self._rejected.discard(fd)

    def call_at(self, time_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once at a monotonic time, in seconds, or shortly after it."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time_s, next(self._timer_ids), timer))
        return timer

    def limit_closes(self) -> None:
        """Let no close(2) in a callback block for longer than CLOSE_S. Main thread only; handles SIGALRM from now on.

        The last close of a socket may wait until its peer has read, for as long as its owner has chosen (SO_LINGER).
        Strangers send such sockets over connections, and leave them there unread. A signal ends that wait.
        """
        self._previous_timer_handler = signal.signal(signal.SIGALRM, lambda *_: None)

    def watch_stops(self, child: Child, on_stopped: Callable[[], None]) -> None:
        """Call `on_stopped` once if `child` is stopped and nobody continues it within STOP_GRACE_S. Main thread only.

        Call `unwatch_stops` before the child is reaped.
        """
        self._handle_signal()
        self._children[child] = on_stopped

    def watch_children(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` when a child process has exited, or has been stopped or continued. Main thread only."""
        self._handle_signal()
        self._on_change = on_change

    def _handle_signal(self) -> None:
        if self._previous_handler is None:
            fd = self._child_fd
            self._previous_handler = signal.signal(signal.SIGCHLD, lambda *_: os.eventfd_write(fd, 1))

    def unwatch_stops(self, child: Child) -> None:
        """End what `watch_stops` began. Idempotent."""
        self._children.pop(child, None)

    def _on_child_change(self) -> None:
        os.eventfd_read(self._child_fd)
        self._on_change()
        for child in [child for child in self._children if child.is_stopped()]:
            self.call_at(time.monotonic() + STOP_GRACE_S, partial(self._report_stop, child))

    def _report_stop(self, child: Child) -> None:
        if child in self._children and child.is_stopped():
            self._children.pop(child)()

    def run_once(self, until_s: float | None = None) -> None:
        """Wait for events, at most until a monotonic time, and handle those that are there. Blocks."""
        # An fd that a callback opens may have the number of one that another callback of this round closed: events
        # belong to the callback that was registered when they arrived.
        events = self._epoll.poll(self._timeout_s(until_s))
        if self._rejected:
            events += self._poll.poll(0)
        ready = [(fd, self._readers[fd]) for fd, _ in events]
        limits_closes = self._previous_timer_handler is not None
        if limits_closes:
            signal.setitimer(signal.ITIMER_REAL, CLOSE_S, CLOSE_S)
        try:
            self._handle(ready)
        finally:
            if limits_closes:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, ready: list[tuple[int, Callable[[], None]]]) -> None:
        for fd, callback in ready:
            if self._readers.get(fd) is callback:
                callback()
        while self._timers and self._timers[0][0] <= time.monotonic():
            due = heapq.heappop(self._timers)[2].callback
            if due is not None:
                due()

    def _timeout_s(self, until_s: float | None) -> float:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        times = [*([] if until_s is None else [until_s]), *([self._timers[0][0]] if self._timers else [])]
        times += [time.monotonic() + LOOK_S] if self._rejected else []
        return min(max(0.0, min(times) - time.monotonic()), _WAIT_S_MAX) if times else -1

    def close(self) -> None:
        """Close the loop's own fds, and restore the handlers of signals. Idempotent."""
        previous, self._previous_handler = self._previous_handler, None
        if previous is not None:
            signal.signal(signal.SIGCHLD, previous)  # type: ignore[arg-type]  # what it returned
        previous, self._previous_timer_handler = self._previous_timer_handler, None
        if previous is not None:
            signal.signal(signal.SIGALRM, previous)  # type: ignore[arg-type]  # what it returned
        fd, self._child_fd = self._child_fd, -1
        if fd >= 0:
            os.close(fd)
        self._epoll.close()
