"""The order of one client's executions, and the threads that run its calls by priority.

Higher priorities go first, within one priority whoever is due first (QOS-1). Priorities count among the executions of
one client only: which client is next does not depend on them (PREP-5). Further executions of a client run beside
its first one as long as a core is free, and so does one that has waited for too long (`turns.wait_limit_ns`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import NamedTuple

from nnfmq.base.threads import Thread
from nnfmq.driver.execution.turns import DUE_WITHOUT_DEADLINE_NS, CoreTurns, wait_limit_ns
from nnfmq.hal.types import Priority
from nnfmq.observe.trace_layout import TURN
from nnfmq.observe.trace_points import recorded

__all__ = ["LONG_NS", "ClientOrder", "PriorityThreadPool", "RunTimes"]

LONG_NS = 1_000_000
"""A shorter execution has no turn: taking and giving it costs some tens of microseconds, and few are interrupted."""
_WAIT_S = 0.02  # between two looks at the others


class RunTimes:
    """An estimate of how long one execution of a model runs; 0 until the first one that is long."""

    __slots__ = ("expected_ns",)

    def __init__(self) -> None:
        self.expected_ns = 0

    def add(self, run_ns: int) -> None:
        """Add the time of a run."""
        self.expected_ns += (run_ns - self.expected_ns) // 4 if self.expected_ns else run_ns


class _Entry(NamedTuple):
    """An execution; the order of entries is that of their turns."""

    rank: int  # less is first
    due_ns: int
    number: int
    has_deadline: bool
    expected_ns: int
    gate: threading.Semaphore


class ClientOrder:
    """The executions of one worker that have or await a turn. Thread-safe."""

    def __init__(self, turns: CoreTurns) -> None:
        self._turns = turns
        self._lock = threading.Lock()
        self._active = 0  # executions that run, or the one that waits for the worker's turn
        self._first: _Entry | None = None  # the one that waits for the worker's turn
        self._queue: list[_Entry] = []
        self._has_turn = False
        self.has_chosen = False
        self._numbers = itertools.count()

    def enter(self, priority: int, deadline_ns: int | None, expected_ns: int) -> None:
        """Wait until an execution may run; call `leave` at its end."""
        due_ns = monotonic_ns() + DUE_WITHOUT_DEADLINE_NS if deadline_ns is None else deadline_ns
        gate = threading.Semaphore(0)
        entry = _Entry(-priority, due_ns, next(self._numbers), deadline_ns is not None, expected_ns, gate)
        with self._lock:
            is_first = not self._active
            if is_first:
                self._active, self._first = 1, entry
            elif not self._queue and self._core_is_free():
                self._active += 1
                return
            else:
                heapq.heappush(self._queue, entry)
                if self._first is not None and entry < self._first:
                    self._turns.hurry(due_ns, entry.has_deadline)
        if is_first or self._is_first(entry):
            self._await_turn(entry)

    def leave(self) -> None:
        """End an execution."""
        with self._lock:
            self._active -= 1
            if self._active:
                return
            self._has_turn = False
            self._turns.release()
            self.has_chosen = True
            if self._queue:
                self._active, self._first = 1, heapq.heappop(self._queue)
                self._first.gate.release()

    def wake_next(self) -> None:
        """Wake those whose turn is next. Call it after `leave`, when the reply of the execution was sent."""
        with self._lock:
            self.has_chosen = False
            self._turns.wake_chosen()

    def _core_is_free(self) -> bool:
        return self._has_turn and self._active + self._turns.others() < self._turns.cores

    def _is_first(self, entry: _Entry) -> bool:
        """Wait in the queue. Return whether the entry has to wait for the worker's turn; False if it may run."""
        with recorded(TURN):
            return self._wait_for_gate(entry)

    def _wait_for_gate(self, entry: _Entry) -> bool:
        begin_ns = monotonic_ns()
        while not entry.gate.acquire(timeout=_WAIT_S):
            with self._lock:
                executions = self._active + len(self._queue) + self._turns.others()
                waited_ns = monotonic_ns() - begin_ns
                is_late = entry.has_deadline and monotonic_ns() >= entry.due_ns
                if entry in self._queue and (
                    is_late or waited_ns > wait_limit_ns(entry.expected_ns, executions, self._turns.cores)
                ):
                    self._queue.remove(entry)
                    heapq.heapify(self._queue)
                    self._active += 1
                    return False
        return self._first is entry

    def _await_turn(self, entry: _Entry) -> None:
        """Wait for the worker's turn as its first execution. If a better one has come meanwhile, that has the turn."""
        if entry.has_deadline or self._turns.are_taken:
            with recorded(TURN):
                self._turns.take(entry.due_ns, entry.has_deadline, entry.expected_ns)
        else:
            self._turns.begin(entry.expected_ns)
        with self._lock:
            self._first, self._has_turn = None, True
            if not self._queue or entry < self._queue[0]:
                return
            heapq.heappushpop(self._queue, entry).gate.release()
        if self._is_first(entry):
            self._await_turn(entry)


# ----------------------------------------------------------------------------------------------------------------------
# Thread pool that runs one client's calls by priority.
#
# Work waits by priority, first in, first out within one priority: calls of a model of high priority run before those of
# a lower one (QOS-1). Running work is not interrupted, so a call of high priority waits at most until a thread is free.
# One of low priority waits as long as calls of higher priority keep coming, which the HAL allows. Bursts have their own
# threads and do not use this pool.


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
                self._threads.append(Thread(target=self._run, name=name, daemon=True))
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
