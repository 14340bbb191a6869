"""The watcher: one thread per process that sleeps in the kernel on control sockets and pidfds, and learns of deaths.

A fast message queue cannot tell whether its peer lives; the kernel can. The watcher polls the control sockets (a
readable one is handed to its owner, a hang-up ends it) and pidfds. When a peer dies, its dead flag goes up first and
then every event word registered for it is woken, again each millisecond until no waiter is left, since a waiter may
be between its look at the flag and its sleep. No heartbeat, no periodic time-out: an idle process sleeps for good.
It also keeps alarms, for what must end at a deadline while no thread waits for it.

The thread starts with the first watch or alarm and ends with the last. Callbacks run on it and must be short; one that
raises ends its own watch only, with a log line, and its owner is told. It takes no signals, and neither do the threads
that it starts: a handler runs on the main thread, which would sleep on if another had been interrupted in its place.
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
from typing import Protocol

THREAD_NAME = "nnfmq-watcher"
_REPEAT_SECONDS = 0.001
_LONGEST_SECONDS = 1_000_000.0  # epoll_wait(2) takes an int of milliseconds
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}  # belong to the thread itself
_SIGNALS = signal.valid_signals() - _FAULTS
_log = logging.getLogger("nnfmq.watcher")


class Wakeable(Protocol):
    """What may have waiters: a message queue."""

    @property
    def waiters(self) -> int:
        """How many threads of this process are inside a wait."""
        ...

    def wake_all(self) -> object:
        """Set all bits of the event word and wake all who sleep on it."""
        ...


class Flag(Protocol):
    """What goes up when a peer is dead: `queue.PeerDeathFlag`."""

    def set(self) -> None:
        """Raise it, for good."""
        ...


class Peer:
    """What must be woken when one peer dies: its dead flag and its queues. Thread-safe."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self._lock = threading.Lock()
        self._queues: list[Wakeable] = []

    def add(self, *queues: Wakeable) -> None:
        """Register queues whose waiters end with this peer."""
        with self._lock:
            self._queues.extend(queues)

    def discard(self, *queues: Wakeable) -> None:
        """Forget queues that are closed in good order."""
        with self._lock:
            self._queues = [queue for queue in self._queues if not any(queue is gone for gone in queues)]

    def die(self) -> None:
        """Raise the flag, then wake everybody once."""
        self.flag.set()
        self.wake()

    def wake(self) -> bool:
        """Wake every registered queue; True while somebody still waits on one."""
        with self._lock:
            for queue in self._queues:
                queue.wake_all()
            return any(queue.waiters for queue in self._queues)


class Watch:
    """One watched fd: `on_ready` runs when it is readable or hung up. The fd stays its owner's.

    `on_failure` learns of an error that `on_ready` did not foresee, so that nobody waits for what will not come.
    """

    __slots__ = ("fd", "on_failure", "on_ready")

    def __init__(self, fd: int, on_ready: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        self.fd = fd
        self.on_ready = on_ready
        self.on_failure = on_failure


class Alarm:
    """An action that runs on the watcher's thread at a time, unless it is cancelled before."""

    __slots__ = ("action", "at_ns")

    def __init__(self, at_ns: int, action: Callable[[], None]) -> None:
        self.at_ns = at_ns
        self.action: Callable[[], None] | None = action


def _nobody_to_tell(_error: Exception) -> None:
    """Stand for an owner whom nobody waits for."""


class Watcher:
    """The thread and its epoll set. One per process: use the module's `watch`, `unwatch` and `bury`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._dying: list[Peer] = []
        self._alarms: list[tuple[int, int, Alarm]] = []  # a heap; cancelled ones stay until they are due or outnumber
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._bell = -1

    def watch(
        self, fd: int, on_ready: Callable[[], None], on_failure: Callable[[Exception], None] = _nobody_to_tell
    ) -> Watch:
        """Call `on_ready` on the watcher's thread whenever `fd` is readable or hung up, until `unwatch`.

        If it raises, the watch is given up, and `on_failure` is called with the error. Raises OSError for what poll(2)
        does not know, what is watched already, or a lack of fds, and RuntimeError where no thread can be started.
        """
        watch = Watch(fd, on_ready, on_failure)
        with self._lock:
            epoll = self._started()
            try:
                epoll.register(fd, select.EPOLLIN)
            except OSError:
                self._ring()  # the thread may have been started for nothing
                raise
            self._watches[fd] = watch
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Stop watching; call it before the fd is closed. Harmless when repeated."""
        with self._lock:
            if self._watches.get(watch.fd) is not watch:
                return
            del self._watches[watch.fd]
            if self._epoll is not None:
                self._epoll.unregister(watch.fd)
            self._ring()

    def alarm(self, at_ns: int, action: Callable[[], None]) -> Alarm:
        """Call `action` on the watcher's thread at a monotonic time (ns), up to some milliseconds late."""
        alarm = Alarm(at_ns, action)
        with self._lock:
            self._started()
            heapq.heappush(self._alarms, (at_ns, next(self._numbers), alarm))
            if self._alarms[0][2] is alarm:
                self._ring()
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Forget an alarm. Harmless when repeated, or when it went off."""
        with self._lock:
            alarm.action = None
            self._alarms = [entry for entry in self._alarms if entry[2].action is not None]
            heapq.heapify(self._alarms)
            if not self._alarms:
                self._ring()  # the thread may have been there for nothing else

    def bury(self, peer: Peer) -> None:
        """A peer is dead: raise its flag now, and wake its waiters until none is left. Any thread may call it."""
        peer.die()
        with self._lock:
            self._started()
            self._dying.append(peer)
            self._ring()

    def forget(self) -> None:
        """Close everything without touching the thread: in a forked child, where the thread does not exist."""
        epoll, bell = self._epoll, self._bell
        self.__init__()  # type: ignore[misc]  # new locks too: the parent may have held the old one
        if epoll is not None:
            epoll.close()
            os.close(bell)

    def _started(self) -> select.epoll:
        """Return the set, with a thread that waits in it. Where one cannot be had nothing stays, so the next may."""
        if self._epoll is not None:
            return self._epoll
        with ExitStack() as undo:
            epoll = undo.enter_context(select.epoll())
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, bell)
            epoll.register(bell, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(epoll, bell), name=THREAD_NAME, daemon=True)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                thread.start()  # with this mask
                self._epoll, self._thread, self._bell = epoll, thread, bell
                undo.pop_all()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a handler may raise here: all is in place
        return epoll

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def _run(self, epoll: select.epoll, bell: int) -> None:
        while not self._ended(epoll):
            for fd, _ in epoll.poll(self._patience()):
                if fd == bell:
                    os.eventfd_read(bell)
                else:
                    self._serve(fd)
            self._wake_the_dying()
            self._sound_alarms()

    def _patience(self) -> float:
        """Return how many seconds there is nothing to do unasked; -1 = for ever."""
        if self._dying:
            return _REPEAT_SECONDS
        with self._lock:
            if not self._alarms:
                return -1
            left_ns = self._alarms[0][0] - time.monotonic_ns()
        return min(max(0, left_ns) / 1e9, _LONGEST_SECONDS)

    def _sound_alarms(self) -> None:
        while True:
            with self._lock:
                if not self._alarms or self._alarms[0][0] > time.monotonic_ns():
                    return
                alarm = heapq.heappop(self._alarms)[2]
            self._sound(alarm)

    @staticmethod
    def _sound(alarm: Alarm) -> None:
        action, alarm.action = alarm.action, None
        try:
            if action is not None:
                action()
        except Exception:  # noqa: BLE001  one owner's bug must not end the thread that all others rely on
            _log.exception("an alarm failed")

    def _ended(self, epoll: select.epoll) -> bool:
        """Close up when nothing is left to watch: decided under the lock, so that `watch` starts anew after it."""
        with self._lock:
            if self._epoll is not epoll:
                return True  # its start was interrupted, and undone
            if self._watches or self._dying or self._alarms:
                return False
            epoll.close()
            os.close(self._bell)
            self._epoll, self._thread, self._bell = None, None, -1
            return True

    def _serve(self, fd: int) -> None:
        with self._lock:
            watch = self._watches.get(fd)
        if watch is None:
            return  # unwatched after poll had seen it
        try:
            watch.on_ready()
        except Exception as error:  # noqa: BLE001  one owner's bug must not end the thread that all others rely on
            _log.exception("a watch on fd %d failed and is given up", fd)
            self.unwatch(watch)
            watch.on_failure(error)

    def _wake_the_dying(self) -> None:
        with self._lock:
            dying = list(self._dying)
        done = [peer for peer in dying if not peer.wake()]
        with self._lock:
            self._dying = [peer for peer in self._dying if peer not in done]


_watcher = Watcher()
watch = _watcher.watch
unwatch = _watcher.unwatch
bury = _watcher.bury
alarm = _watcher.alarm
cancel = _watcher.cancel


def thread() -> threading.Thread | None:
    """Return the watcher's thread while it runs."""
    return _watcher._thread


os.register_at_fork(after_in_child=_watcher.forget)
