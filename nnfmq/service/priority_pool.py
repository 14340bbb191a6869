"""Thread pool that runs one client's calls by priority.

Work waits by priority, first in, first out within one priority: calls of a model of high priority run before those of a
lower one (QOS-1). Running work is not interrupted, so a call of high priority waits at most until a thread is free. One
of low priority waits as long as calls of higher priority keep coming, which the HAL allows. Bursts have their own
threads and do not use this pool.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from nnfmq.hal.types import Priority


class PriorityThreadPool:
    """A thread pool with a priority queue. Thread-safe. Threads start on demand and run until `shutdown`."""

    def __init__(self, threads: int, name: str) -> None:
        self._max_threads = threads
        self._name = name
        self._condition = threading.Condition()
        self._queue: list[tuple[int, int, Callable[[], None]]] = []  # a heap of (-priority, sequence number, work)
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_shut_down = False

    def submit(self, work: Callable[[], None], priority: int = Priority.MEDIUM) -> None:
        """Run `work`, which must not raise, on a thread of the pool. Does not block."""
        with self._condition:
            heapq.heappush(self._queue, (-priority, next(self._sequence), work))
            if len(self._queue) > self._idle and len(self._threads) < self._max_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._condition.notify()

    def shutdown(self) -> None:
        """Run all queued work and end the threads. Blocks. Nothing may be submitted afterwards."""
        with self._condition:
            self._is_shut_down = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one piece of work, or return False after `shutdown`.

        A separate function, so that no local variable of an idle thread keeps the work's objects alive.
        """
        with self._condition:
            while not self._queue:
                if self._is_shut_down:
                    return False
                self._idle += 1
                self._condition.wait()
                self._idle -= 1
            work = heapq.heappop(self._queue)[2]
        work()
        return True
