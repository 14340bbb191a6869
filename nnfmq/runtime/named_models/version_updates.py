"""VersionUpdates: the thread of a client that prepares new versions of its models, and releases old ones.

It starts when the repository serves another version, or has died, and ends when nothing is left to do. Events come
from the watcher thread, which must not block, and from the garbage collector: when the last call that has read the
location of an old version ends, the version is released. `SimpleQueue.put` may be called anywhere.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from nnfmq.deadlines import has_passed, remaining_s
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.model_handle import ModelLocation, release_in_driver

__all__ = ["VersionUpdates"]

_THREAD_NAME = "nnfmq-versions"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0  # between attempts to reach a repository that does not listen
_END_S = 5.0  # releasing a model takes up to 1 s
_log = logging.getLogger("nnfmq.client")


class _Retired(NamedTuple):
    """A version that was replaced: its location, which calls may still have, and what to release then."""

    location: weakref.ref[ModelLocation]
    connection: Connection
    model_id: int | None


class VersionUpdates:
    """Runs `update(name)` for each model of which the repository serves another version.

    `update` returns whether the repository has replied. `reconnect` connects to a repository that has died, and returns
    whether that is done, or is no longer wanted; then it requests an update of each model that is open.
    """

    def __init__(self, update: Callable[[str], bool], reconnect: Callable[[], bool]) -> None:
        self._update, self._reconnect = update, reconnect
        self._lock = threading.Lock()  # held for a few assignments and a thread's start
        self._events: SimpleQueue[str | None] = SimpleQueue()  # the name of a model; None = look at the rest
        self._retired: list[_Retired] = []  # of the thread
        self._is_lost = False
        self._pause_s, self._next_attempt_ns = _FIRST_PAUSE_S, 0  # of attempts to connect again
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def request(self, name: str) -> None:
        """Request an update. Does not block. On the watcher thread only, whose signal mask a new thread gets."""
        self._events.put(name)
        self._ensure_started()

    def repository_was_lost(self) -> None:
        """Connect to the repository again. Does not block. On the watcher thread only."""
        self._is_lost = True
        self._events.put(None)
        self._ensure_started()

    def retire(self, location: ModelLocation) -> None:
        """Release a replaced version when nothing has its location any more. On this thread only, from `update`."""
        events = self._events
        reference = weakref.ref(location, lambda _reference: events.put(None))
        self._retired.append(_Retired(reference, location.connection, location.model_id))

    def _ensure_started(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._is_done():
            try:
                name = self._events.get(timeout=remaining_s(self._next_attempt_ns) if self._is_lost else None)
            except Empty:
                name = None
            if self._is_closed:
                break
            if name is not None:
                self._update_one(name)
            if self._is_lost and has_passed(self._next_attempt_ns):
                self._reconnect_once()
            self._release_unused()

    def _is_done(self) -> bool:
        """Return whether the thread must end: then the next event starts another one."""
        with self._lock:
            if not self._is_closed and (self._is_lost or self._retired or not self._events.empty()):
                return False
            self._thread = None if not self._is_closed else self._thread
            return True

    def _update_one(self, name: str) -> None:
        try:
            if self._update(name):
                self._pause_s = _FIRST_PAUSE_S
        except Exception:  # noqa: BLE001  a bug of one update must not end the thread that the others need
            _log.exception("the update of model %r failed", name)

    def _reconnect_once(self) -> None:
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)  # until the repository replies
        self._next_attempt_ns = time.monotonic_ns() + int(self._pause_s * 1e9)
        self._is_lost = False  # before, because the new connection may be lost immediately
        if not self._reconnect():
            self._is_lost = True

    def _release_unused(self) -> None:
        retired, self._retired = self._retired, []
        for one in retired:
            if one.location() is None:
                release_in_driver(ModelLocation(one.connection, one.model_id))
            else:
                self._retired.append(one)

    def end(self) -> None:
        """Let the thread end after what it does. Idempotent. Does not block."""
        self._is_closed = True
        self._events.put(None)

    def join(self) -> None:
        """Wait until the thread has ended. Call `end` first, and close the connections that it may wait for."""
        if os.getpid() != self._pid:
            return  # the thread, and perhaps the holder of the lock, are the parent's
        with self._lock:  # a thread that is being started cannot be joined
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)
