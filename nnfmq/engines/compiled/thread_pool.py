"""Process-wide thread pool: per-thread ranges with work stealing, as in pthreadpool.

The calling thread runs a list of launch records (function, arguments, work items, `Parallelism`). A parallel launch is
cut into chunks, a contiguous range for each thread. A thread takes chunks from its own range by fetch-add, then steals
from the others. The caller works too, so a sleeping or preempted worker delays only the chunk that it holds. Workers
spin while a run is active and about 10 µs longer, then wait on a futex; only launches with enough remaining work wake
them.

    epoch    odd: parallel region open    even: closed    -1: shut down

A worker sets `busy`, then re-reads `epoch`; the caller closes the region, then waits for `busy` = 0. All four accesses
are seq_cst (Dekker), so at least one of them sees the other, and a region's fields are never overwritten while a worker
reads them. Work items are independent: results do not depend on the schedule.

The loops are LLVM IR (`thread_pool.ll`). Every compiled program has their code with it, so that a process that loads
its first one from a cache compiles nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import cache

import numpy as np

from nnfmq.engines.compiled.jit import Compile
from nnfmq.engines.compiled.kernels.launch_loops import LaunchLoops
from nnfmq.engines.compiled.local_compilation import compile_in_process
from nnfmq.engines.compiled.object_loader import LoadedCode
from nnfmq.engines.compiled.target import host_target

__all__ = ["RECORD_WORDS", "Parallelism", "ThreadPool", "default_thread_pool", "launch_loops", "pool_object_code"]

RECORD_WORDS = 4
"""64-bit words of a launch record: function, argument array, work items, parallelism."""

_LINE_BYTES = 128  # two cache lines: some CPUs prefetch them together
_LINE_WORDS = _LINE_BYTES // 8
_FIRST_SLOT = 3 * _LINE_WORDS
_IDLE_SPINS = 300  # after a run: about 10 µs, because the thread that waits for the result may need the CPU
_BUSY_SPINS = 200_000  # during a run
_SPINS_BEFORE_WAIT = 2000  # of the caller, for a worker that still computes a chunk
_CHUNKS_PER_THREAD = 4
_MAX_WORKERS = 15

_RUN_LAUNCHES = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)
_SHUT_DOWN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_WORKER_LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Parallelism(IntEnum):
    """Which threads compute a launch: the calling thread, also the awake workers, or all after waking them."""

    SERIAL = 0
    PARALLEL = 1
    PARALLEL_WAKE = 2


def launch_loops(machine: str) -> LaunchLoops:
    """Return the pool's functions for `machine`, as `uname -m` names it, in the form in which they are compiled."""
    return LaunchLoops(machine, _CHUNKS_PER_THREAD, _SPINS_BEFORE_WAIT, int(Parallelism.PARALLEL_WAKE))


@cache
def pool_object_code(compile: Compile = compile_in_process) -> bytes:
    """Return the object code of the pool's functions, compiled by `compile`, which raises its errors."""
    (code,) = compile([launch_loops(os.uname().machine)], host_target())
    return code


class ThreadPool:
    """Worker threads that any thread of the process can run launches with, one caller at a time.

    `object_code` is `pool_object_code`, which is called if it is not given.
    """

    def __init__(self, worker_count: int, object_code: bytes | None = None) -> None:
        self.object_code = object_code or pool_object_code()
        self._code = LoadedCode([self.object_code])
        self._run_launches = _RUN_LAUNCHES(self._code.address("run_launches"))
        self._worker_loop = _WORKER_LOOP(self._code.address("worker_loop"))
        self._shut_down = _SHUT_DOWN(self._code.address("shut_down"))
        threads = 1 + worker_count
        self._memory = np.zeros(_FIRST_SLOT + (threads + 1) * _LINE_WORDS, np.int64)  # one more line, to align it
        self._base = -(-self._memory.ctypes.data // _LINE_BYTES) * _LINE_BYTES
        self._words = self._memory[(self._base - self._memory.ctypes.data) // 8 :]
        # Callers that find the pool in use run with this memory, which has 0 workers. They may overwrite each other's
        # fields in it, because no worker reads them.
        self._no_workers = np.zeros(_FIRST_SLOT, np.int64)
        self._no_workers_address = self._no_workers.ctypes.data
        self._in_use = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.worker_count = worker_count
        self.scratch_slots = threads
        """Scratch buffers that a caller provides, whatever the current worker count is."""

    def run(self, records: int, first: int, last: int, scratch: int, stride: int) -> None:
        """Run the launch records from `first` to before `last` of those at address `records`.

        Blocks, without holding the GIL. `scratch` is the address of `scratch_slots` buffers of `stride` bytes. While
        another thread runs launches with the pool, this thread computes alone.
        """
        if not self.worker_count or not self._in_use.acquire(blocking=False):
            self._run_launches(records, first, last, self._no_workers_address, scratch, stride)
            return
        try:
            if not self._threads:
                self._start()
            self._run_launches(records, first, last, self._base, scratch, stride)
        finally:
            self._in_use.release()

    def stop(self) -> None:
        """Stop the worker threads and join them. The next `run` starts them again."""
        with self._in_use:
            self._join_workers()

    def set_worker_count(self, worker_count: int) -> None:
        """Use `worker_count` workers from the next run on, at most as many as at first."""
        with self._in_use:  # so that no run starts the old number of workers meanwhile
            self._join_workers()
            self.worker_count = worker_count

    def _join_workers(self) -> None:
        self._shut_down(self._base)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._words[:] = 0

    def _start(self) -> None:
        for number in range(1, self.worker_count + 1):
            thread = threading.Thread(target=self._work, args=(number,), name=f"nnfmq-pool-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system is out of threads: continue with those that have started
                break
            self._threads.append(thread)
        self._words[0] = len(self._threads)

    def _work(self, number: int) -> None:
        """Be worker `number`. A method, so that the thread refers to the pool's code and memory as long as it runs."""
        self._worker_loop(self._base, number, _IDLE_SPINS, _BUSY_SPINS)


class _Process:
    """What this process has one of."""

    pool: ThreadPool | None = None


_create = threading.Lock()


def default_thread_pool(object_code: Callable[[], bytes] = pool_object_code) -> ThreadPool:
    """Return this process's pool: a thread for each CPU that it may use, the calling thread among them.

    `object_code` returns `ThreadPool.object_code` for the first call. It may block, so it is called without a lock.
    """
    if _Process.pool is None:
        code, workers = object_code(), min(len(os.sched_getaffinity(0)) - 1, _MAX_WORKERS)
        with _create:
            if _Process.pool is None:
                _Process.pool = ThreadPool(workers, code)
    return _Process.pool
