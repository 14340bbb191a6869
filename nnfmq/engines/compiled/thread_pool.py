"""Process-wide thread pool: per-thread ranges with work stealing, as in pthreadpool.

The calling thread runs a list of launch records (function, arguments, work items, `Parallelism`). A parallel launch is
cut into chunks, a contiguous range for each thread. A thread takes chunks from its own range, then steals from the
others. Workers spin while a run is active and about 130 µs longer, then wait on a futex; launches with enough remaining
work wake them, and in runs that follow each other quickly every parallel launch. Work items are independent: results do
not depend on the schedule.

The pools of several processes can divide the cores between them (`CoreDivision`): before each launch a pool counts the
busy processes, and uses no more threads than its share. It pauses while a higher class uses all cores.

The loops of the threads are C (`_thread_pool.h`, which has the protocol) in the compiled core `_pool`. Without it the
calling thread computes alone (`_pypool`); `nnfmq doctor` reports that, and so does the log.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nnfmq.base.cores import CorePair
from nnfmq.base.deadlines import acquire
from nnfmq.base.processes import allowed_cores
from nnfmq.base.threads import Thread

if TYPE_CHECKING:
    from nnfmq.engines.compiled import _pypool
    from nnfmq.operations.declaration import Array

__all__ = [
    "RECORD_WORDS",
    "CoreDivision",
    "CorePauses",
    "Parallelism",
    "ThreadPool",
    "available",
    "core_name",
    "default_thread_pool",
    "divide_cores",
    "load",
]

_log = logging.getLogger(__name__)
_NEVER_NS = 2**63 - 1

RECORD_WORDS = 4
"""64-bit words of a launch record: function, argument array, work items, parallelism."""

_CORES: CorePair[PoolCore] = CorePair(compiled="nnfmq.engines.compiled._pool", python="nnfmq.engines.compiled._pypool")


class PoolCore(Protocol):
    """Interface of both cores."""

    @property
    def LaunchCore(self) -> type[_pypool.LaunchCore]:
        """The class of a pool's memory and loops."""
        ...

    @property
    def MAX_WORKERS(self) -> int:
        """Workers that a pool may have beside its caller."""
        ...


def load(name: str) -> PoolCore:
    """Import and return the core `name` (`compiled` or `python`).

    Raises:
        ImportError: If there is no core of that name, or the compiled one is not built. The text has the remedy.
    """
    return _CORES.load(name)


def available() -> tuple[str, ...]:
    """Return the names of the cores that can be loaded, the fastest first."""
    return _CORES.available()


core_name, core_reason = _CORES.choose()
_ACTIVE_CORE = load(core_name)


class Parallelism(IntEnum):
    """The threads that compute a launch: the calling thread, also the awake workers, or all after waking them."""

    SERIAL = 0
    PARALLEL = 1
    PARALLEL_WAKE = 2


class CorePauses(NamedTuple):
    """The state of processes that pause for each other, with an entry for each, in memory that all of them map.

    Attributes:
        classes: The classes, `hal.client_class`; 0 counts as normal. The pool only reads them.
        uses: How many threads the last run of a process used.
        paused: 1 while a process pauses, otherwise 0. Whoever learns of its death clears it.
        resumed: A futex word of 4 bytes, which changes when those that pause are woken.
    """

    classes: Array
    uses: Array
    paused: Array
    resumed: Array


class CoreDivision(NamedTuple):
    """The processes that divide the cores of this machine: two bytes of each, in memory that all of them map.

    A process counts as busy if either is 1, not 0. Whoever learns of its death clears both.

    Attributes:
        busy: The busy bytes; a multiple of 8. A byte is 1 while its process runs launches with its pool, which sets it.
        claims: As many claim bytes, which the pool reads only. A byte is 1 while its process
            executes a model or waits for a core.
        own: The number of this process's bytes.
        pauses: What processes of different classes know of each other; None = all are equal.
    """

    busy: Array
    claims: Array
    own: int
    pauses: CorePauses | None = None


class ThreadPool:
    """Worker threads that any thread of the process can run launches with, one caller at a time.

    It has at most `worker_count` workers, and at most as many as the core may have. In a forked child it has none until
    the child runs launches.
    """

    def __init__(self, worker_count: int, core: PoolCore = _ACTIVE_CORE) -> None:
        self._new_core = core.LaunchCore
        self.worker_count = min(worker_count, core.MAX_WORKERS)
        self.scratch_slots = 1 + self.worker_count
        """Scratch buffers that a caller provides, whatever the current worker count is."""
        self._division: tuple[CoreDivision, int] | None = None
        self._forget_threads()
        _pools.add(self)

    def run(self, records: int, first: int, last: int, scratch: int, stride: int, times: int = 0) -> None:
        """Run the launch records from `first` to before `last` of those at address `records`.

        Blocks, without holding the GIL. `scratch` is the address of `scratch_slots` buffers of `stride` bytes. While
        another thread runs launches with the pool, this thread computes alone. `times`, unless it is 0, is where the
        time before launch 0 and after each launch goes (`_pypool.LaunchCore.run`).
        """
        if not self._in_use.acquire(blocking=False):
            self._core.run_serially(records, first, last, scratch, times)
            return
        try:
            if self.worker_count and not self._threads:
                self._start()
            self._core.run(records, first, last, scratch, stride, times)
        finally:
            self._in_use.release()

    def take_pauses(self) -> list[tuple[int, int, int]]:
        """Return the pauses of the runs since the last call: begin, end, and the class for which the pool paused."""
        return self._core.take_pauses()

    def begin_work(self, deadline_ns: int | None) -> list[tuple[int, int, int]]:
        """Begin work of other code than launches; call `end_work` at its end. Blocks, without holding the GIL.

        Other processes see that this one is busy. It pauses before if processes of higher classes use all cores, not
        beyond the deadline; the pause is returned as by `take_pauses`. Several threads may work at the same time.

        Raises:
            MissedDeadlineTransient: If another thread paused until the deadline: then no work has begun.
        """
        acquire(self._work_lock, deadline_ns, "the deadline passed while clients of higher classes used all cores")
        try:  # it is held during a pause: the next thread would have to pause, too, but perhaps not as long
            pauses = self._core.begin_work(_NEVER_NS if deadline_ns is None else deadline_ns) if not self._works else []
            self._works += 1
            return pauses
        finally:
            self._work_lock.release()

    def end_work(self, threads: int) -> None:
        """End the work, which used so many threads."""
        with self._work_lock:
            self._works -= 1
            if not self._works:
                self._core.end_work(threads)

    def divide(self, division: CoreDivision, cores: int) -> None:
        """Use no more than a share of `cores` from the next run on: `cores` divided by the number of busy processes.

        What processes of higher classes use is not divided, and if that is all, a run pauses before its next launch
        (`_core_division.h`). A run uses a thread at least, and looks again before each launch. The pool keeps the
        bytes' memory.
        """
        with self._in_use:
            self._division = division, cores
            self._divide()

    def _divide(self) -> None:
        if self._division is not None:
            (busy, claims, own, pauses), cores = self._division
            self._core.divide(busy.ctypes.data, claims.ctypes.data, busy.nbytes, own, cores)
            if pauses is not None:
                self._core.pause(*(array.ctypes.data for array in pauses))

    def stop(self) -> None:
        """Stop the worker threads and join them. The next `run` starts them again."""
        with self._in_use:
            self._join_workers()

    def set_worker_count(self, worker_count: int) -> None:
        """Use `worker_count` workers from the next run on, at most as many as at first."""
        with self._in_use:  # so that no run starts the old number of workers meanwhile
            self._join_workers()
            self.worker_count = min(worker_count, self.scratch_slots - 1)

    @property
    def sleepers(self) -> int:
        """The workers counted as sleepers since the last wake-up; some may not have slept after all."""
        return self._core.sleepers

    def _forget_threads(self) -> None:
        """Begin without workers. Threads of the parent process do not exist in a child; what they left is invalid.

        Nor does a child have a share of its own.
        """
        self._core = self._new_core()
        self._division = None
        self._in_use = threading.Lock()
        self._work_lock, self._works = threading.Lock(), 0
        self._threads: list[threading.Thread] = []

    def _join_workers(self) -> None:
        if self._threads:
            self._core.stop()
            for thread in self._threads:
                thread.join()
            self._threads.clear()
            self._core = self._new_core()
            self._divide()

    def _start(self) -> None:
        for number in range(1, self.worker_count + 1):
            thread = Thread(target=self._work, args=(number,), name=f"nnfmq-pool-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system is out of threads: continue with those that have started
                break
            self._threads.append(thread)
        self._core.set_workers(len(self._threads))

    def _work(self, number: int) -> None:
        """Be worker `number`. A method, so that the thread refers to the pool as long as it runs."""
        self._core.work(number)


class _Process:
    """The objects of which a process has one."""

    pool: ThreadPool | None = None
    create = threading.Lock()
    division: CoreDivision | None = None


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


def _forget_threads_of_the_parent() -> None:
    _Process.create = threading.Lock()
    _Process.division = None
    for pool in list(_pools):
        pool._forget_threads()


os.register_at_fork(after_in_child=_forget_threads_of_the_parent)


def divide_cores(division: CoreDivision) -> None:
    """Let this process's pool use a share of the cores only. Call it before the pool is used.

    The pool is not created yet, because the CPUs that the process may use can change until its first model.
    """
    _Process.division = division


def default_thread_pool() -> ThreadPool:
    """Return this process's pool: a thread for each core that it may use, the calling thread among them."""
    with _Process.create:
        if _Process.pool is None:
            cores = allowed_cores()
            _Process.pool = ThreadPool(cores - 1)
            if _Process.division is not None:
                _Process.pool.divide(_Process.division, cores)
            if core_name != "compiled":
                _log.warning("models run with one thread: the thread pool needs the compiled core (%s)", core_reason)
    return _Process.pool
