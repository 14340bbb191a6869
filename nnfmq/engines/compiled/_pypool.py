"""The Python core of the thread pool: runs launches on the calling thread alone.

The protocol between threads needs ordered accesses to memory, which Python does not have. The compiled core (`_pool`)
has them.
"""

from __future__ import annotations

import ctypes
from time import monotonic_ns

__all__ = ["MAX_WORKERS", "LaunchCore"]

MAX_WORKERS = 0
"""Workers that a core may have."""

_RECORD_WORDS = 4
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class LaunchCore:
    """Memory of a pool, and the loops of its threads."""

    def set_workers(self, count: int) -> None:
        """Let `run` share its launches with workers 1 to `count`. No run may be in progress.

        Raises:
            ValueError: There are more than MAX_WORKERS.
        """
        if count:
            raise ValueError(f"{count} workers; without the compiled core none is possible")

    def divide(self, busy: int, claims: int, count: int, own: int, cores: int) -> None:
        """Use this process's share of `cores` from the next run on: `cores` divided by the number of busy processes.

        `busy` and `claims` are the addresses of `count` bytes in memory that these processes share, a multiple of 8;
        see `CoreDivision`. `own` is the number of this process's bytes. Without workers there is nothing to divide.

        Raises:
            ValueError: `own` or `count` is not possible.
        """

    def pause(self, classes: int, uses: int, paused: int, resumed: int) -> None:
        """Pause for processes of higher classes from the next run on. Call `divide` before.

        The arguments are the addresses of the arrays of `CorePauses`. Without workers the pool never pauses.
        """

    def take_pauses(self) -> list[tuple[int, int, int]]:
        """Return the pauses since the last call: begin, end, and the class for which the process paused.

        At most 64 are kept. While another thread runs launches, they are of that run.
        """
        return []

    def begin_work(self, until_ns: int) -> list[tuple[int, int, int]]:
        """Begin work of other code than launches, so that other processes see that this one is busy.

        Pauses before it, until `until_ns` at most (CLOCK_MONOTONIC), and returns the pause as `take_pauses`. Blocks,
        without the GIL. One caller at a time, and no other before `end_work`. Without workers there is nothing to do.
        """
        return []

    def end_work(self, threads: int) -> None:
        """End the work, which used so many threads."""

    def run(self, launches: int, first: int, last: int, scratch: int, stride: int, times: int = 0) -> None:
        """Run the launch records from `first` to before `last` of those at address `launches`, with the workers.

        Blocks, without the GIL. One caller at a time. `scratch` is the address of a buffer of `stride` bytes for each
        thread. Unless `times` is 0, it is the address of an i64 for each launch and one more: the first becomes the
        time before launch 0, and those after it become the times after the launches (CLOCK_MONOTONIC, ns).
        """
        self.run_serially(launches, first, last, scratch, times)

    def run_serially(self, launches: int, first: int, last: int, scratch: int, times: int = 0) -> None:
        """Run launch records on the calling thread. Blocks, without the GIL. Any number of callers."""
        stamps = (ctypes.c_int64 * (last + 1)).from_address(times) if times else None
        if stamps is not None and not first:
            stamps[0] = monotonic_ns()
        words = (ctypes.c_int64 * (_RECORD_WORDS * last)).from_address(launches)
        for start in range(_RECORD_WORDS * first, _RECORD_WORDS * last, _RECORD_WORDS):
            kernel, args, items, _ = words[start : start + _RECORD_WORDS]
            _KERNEL(kernel)(args, 0, items, scratch)
            if stamps is not None:
                stamps[start // _RECORD_WORDS + 1] = monotonic_ns()

    def work(self, number: int) -> None:
        """Be worker `number` until `stop` is called. Blocks, without the GIL.

        Raises:
            ValueError: There is no such worker.
        """
        raise ValueError(f"worker {number}; without the compiled core none is possible")

    def stop(self) -> None:
        """Let all workers return from `work`, for good: the core cannot be used again. No run may be in progress."""

    @property
    def sleepers(self) -> int:
        """The workers counted as sleepers since the last wake-up; some may not have slept after all."""
        return 0
