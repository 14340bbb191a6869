"""The scheduler: which of one client's calls runs next, on a few threads.

Work waits by priority, first in first out within one: what belongs to a model of high priority goes before that of a
lower one (QOS-1). Nothing that runs is interrupted, so a high priority waits until a thread is free at most; a low one
waits as long as the load of higher ones lasts, as the HAL allows, and goes on when it ends. Bursts have threads of
their own and are not scheduled here.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from nnfmq.hal.types import Priority


class PriorityThreadPool:
    """Threads that run work by priority. They start when there is work for them, and stay until `shutdown`."""

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._name = name
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []  # a heap, the most important first
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_ending = False

    def submit(self, work: Callable[[], None], priority: int = Priority.MEDIUM) -> None:
        """Run `work`, which may not raise, on a thread as soon as it is its turn."""
        with self._condition:
            heapq.heappush(self._waiting, (-priority, next(self._numbers), work))
            if len(self._waiting) > self._idle and len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._condition.notify()

    def shutdown(self) -> None:
        """Run what waits, and return when all threads have ended. Nothing may be submitted afterwards."""
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one; in a scope of its own, so that an idle thread keeps nothing of it alive. False at the end."""
        work = self._next()
        if work is None:
            return False
        work()
        return True

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            while not self._waiting:
                if self._is_ending:
                    return None
                self._idle += 1
                self._condition.wait()
                self._idle -= 1
            return heapq.heappop(self._waiting)[2]
