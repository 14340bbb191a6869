"""LoopBlocking: when a request of a ModelServer waits for its result on the event loop's thread, so that no task runs.

A short wait that blocks the thread costs less than the two wake-ups of one that does not. It must not hold up other
requests, nor lose the parallel execution of several. So a request blocks only

* if it is the only one of its server, also after all tasks that were ready have run,
* for a limited time, and not at all for a while if the model's results came later than that,
* not at all for a while if another request had arrived while one blocked.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import Any

__all__ = ["LoopBlocking", "ModelBlocking"]


_PAUSE_MAX = 1024  # requests between two attempts with a model whose results come late
_OVERLAP_PAUSE = 64  # requests that do not block after one that held up another
_IDLE_NS = 20_000  # a loop that has slept in its selector did so for longer


class LoopBlocking:
    """The requests of one server, which share an event loop."""

    def __init__(self) -> None:
        self.requests = 0
        self._pause = 0  # requests that do not block from now on
        self._last_task: weakref.ref[asyncio.Task[Any]] | None = None  # that has blocked, until the next request
        self._idle_ns = 0

    @property
    def is_allowed(self) -> bool:
        """Whether the request in progress is the only one, and none was held up lately."""
        return self.requests == 1 and not self._pause

    def enter(self) -> None:
        """Count a request that begins, in its task. Call `leave` when it ends."""
        self.requests += 1
        if self._pause:
            self._pause -= 1
        elif self._last_task is not None:
            if self._is_overlap():
                self._pause = _OVERLAP_PAUSE
            self._last_task = None

    def leave(self) -> None:
        """Count a request that ends."""
        self.requests -= 1

    def on_blocked(self) -> None:
        """Remember which task has just blocked the loop."""
        task = asyncio.current_task()
        self._last_task = None if task is None else weakref.ref(task)
        self._idle_ns = _thread_idle_ns()

    def _is_overlap(self) -> bool:
        """Return whether the request that begins had arrived while the last one blocked.

        Then the loop did not sleep in between. A task that sends one request after the other does not let it either.
        """
        assert self._last_task is not None
        return _thread_idle_ns() - self._idle_ns < _IDLE_NS and self._last_task() is not asyncio.current_task()


class ModelBlocking:
    """Decides for the requests of one model (a `BlockingWait`). Each wait blocks for at most `limit_ns`."""

    def __init__(self, loop: LoopBlocking, limit_ns: int) -> None:
        self._loop, self._limit_ns = loop, limit_ns
        self._pause = self._next_pause = 0

    async def begin(self) -> int:
        """Return until when a wait may block; 0 = not at all. Tasks that are ready run first."""
        if self._pause:
            self._pause -= 1
            return 0
        if not self._loop.is_allowed:
            return 0
        await asyncio.sleep(0)
        return time.monotonic_ns() + self._limit_ns if self._loop.is_allowed else 0

    def end(self, has_result: bool) -> None:
        """Learn how a wait has ended. After each late result in a row twice as many requests do not block."""
        self._loop.on_blocked()
        self._next_pause = 0 if has_result else min(2 * self._next_pause or 2, _PAUSE_MAX)
        self._pause = self._next_pause


def _thread_idle_ns() -> int:
    """Return for how long this thread has not run, from a point in the past."""
    return time.monotonic_ns() - time.thread_time_ns()
