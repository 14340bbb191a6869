"""The CPU time of the compilations in a driver: compile processes, the workers that ask for them, and their clients.

`CompilerUsage` records what the processes of the driver and its clients use; `compilation_uses` tells afterwards which
of it was for compilations, because a client and its worker begin before the compile process that shows what they do.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from nnfmq.observe.driver_statistics import ClientCalls, client_calls
from nnfmq.observe.process_usage import descendants
from nnfmq.stress.process_counters import NEWEST_PROCESS, newest_process, read_state, run_ns

__all__ = ["CompilerUsage", "StatisticsArea", "ThreadUse", "UsageLog", "compilation_uses"]

_AROUND_NS = 50_000_000  # a client works on a call also before and after it; a compile process waits for its worker

StatisticsArea: TypeAlias = "memoryview | None"
"""The statistics area of a driver, which `observe.driver_statistics` reads; None: not readable."""


class ThreadUse(NamedTuple):
    """The CPU time that a thread has used since the reading before `time`, and the CPUs on which it was at both."""

    time: int
    pid: int
    used: int
    cpus: frozenset[int]


@dataclass(slots=True)
class UsageLog:
    """What was read: the times of the readings, the uses in order of time, and which processes they are of.

    `calls` has for clients and workers the times at which the client had an open call.
    """

    times: list[int] = field(default_factory=list)
    uses: list[ThreadUse] = field(default_factory=list)
    compilers: set[int] = field(default_factory=set)
    workers: set[int] = field(default_factory=set)
    calls: dict[int, list[int]] = field(default_factory=dict)


def compilation_uses(log: UsageLog) -> Iterator[ThreadUse]:
    """Yield what was used for compilations, in order of time.

    Compile processes count always; workers just after these have computed, because a worker checks, packs and links
    what they return; clients and their workers around calls during which compile processes computed.
    """
    computed = [use.time for use in log.uses if use.pid in log.compilers]
    calls = {pid: [call for call in _spans(times) if _is_between(computed, *call)] for pid, times in log.calls.items()}
    for use in log.uses:
        is_for_call = any(begin <= use.time <= end for begin, end in calls.get(use.pid, ()))
        is_after = use.pid in log.workers and _is_between(computed, use.time - _AROUND_NS, use.time)
        if use.pid in log.compilers or is_for_call or is_after:
            yield use


def _spans(times: list[int]) -> list[tuple[int, int]]:
    """Return from when to when a client worked on its calls; calls that follow each other closely are one span."""
    spans: list[tuple[int, int]] = []
    for at in times:
        if spans and at - _AROUND_NS <= spans[-1][1]:
            spans[-1] = (spans[-1][0], at + _AROUND_NS)
        else:
            spans.append((at - _AROUND_NS, at + _AROUND_NS))
    return spans


def _is_between(times: list[int], begin: int, end: int) -> bool:
    first = bisect_left(times, begin)
    return first < len(times) and times[first] <= end


@dataclass(slots=True)
class _Thread:
    """A thread: its process, its open schedstat and stat, the CPU time that it has used, and its last CPU."""

    pid: int
    schedstat: int
    stat: int
    used: int = 0
    cpu: int | None = None

    def read(self) -> tuple[int, int]:
        """Return the CPU time that it has used, and the CPU on which it last ran. Raises OSError if it has ended."""
        return run_ns(self.schedstat), read_state(self.stat).cpu

    def close(self) -> None:
        os.close(self.schedstat)
        os.close(self.stat)


class CompilerUsage:
    """Records the CPU time of the compilations in a driver; `totals` returns it, in total and by CPU.

    Compile processes are the descendants of the driver in another session than the driver's (`service.compile_server`);
    its other descendants are workers. Clients with open calls are found in `statistics`. Processes in `executing` do
    not count. Each thread is read, because the kernel tells the CPU of a thread only. What a thread used while it
    changed from one CPU to another counts on both, because nothing says how much it was on each.
    """

    def __init__(self, driver_pid: int, executing: Collection[int] = (), statistics: StatisticsArea = None) -> None:
        self._driver = driver_pid
        self._executing = {driver_pid, os.getpid(), *executing}
        self._statistics = statistics
        self._session = os.getsid(driver_pid)
        self._newest_fd = os.open(NEWEST_PROCESS, os.O_RDONLY | os.O_CLOEXEC)
        self._newest = 0
        self._threads: dict[int, _Thread] = {}
        self._known: set[int] = set()
        self._log = UsageLog()

    def find(self) -> None:
        """Look for new processes and threads; what they used before the first call does not count.

        To list them takes 0.2 ms of the CPUs that are measured, so it is done only if one was started since.
        """
        newest = newest_process(self._newest_fd)
        if newest != self._newest:
            self._newest = newest
            self._find_started()
        self._find_compilers()
        for pid in {each.pid for each in self._clients()} - self._known - self._executing:
            self._find_threads(pid, counts_from_start=False)
            self._known.add(pid)

    def _find_started(self) -> None:
        counts_from_start = bool(self._log.times)
        for pid in self._known:
            self._find_threads(pid, counts_from_start=True)
        for pid in set(descendants(self._driver)) - self._known - self._executing:
            self._find_threads(pid, counts_from_start)
            self._log.workers.add(pid)
            self._known.add(pid)

    def _find_compilers(self) -> None:
        """Tell compile processes from workers at each call: a child begins its session some time after its fork."""
        for pid in list(self._log.workers):
            with suppress(OSError):  # it has exited
                if os.getsid(pid) != self._session:
                    self._log.workers.remove(pid)
                    self._log.compilers.add(pid)

    def _clients(self) -> list[ClientCalls]:
        return [] if self._statistics is None else client_calls(self._statistics)

    def _find_threads(self, pid: int, counts_from_start: bool) -> None:
        names: list[str] = []
        with suppress(OSError):  # it has exited, or is in another pid namespace
            names = os.listdir(f"/proc/{pid}/task")
        for tid in set(map(int, names)) - self._threads.keys():
            with suppress(OSError):  # it has ended
                self._add(pid, tid, counts_from_start)

    def _add(self, pid: int, tid: int, counts_from_start: bool) -> None:
        with ExitStack() as stack:
            fds = []
            for name in ("schedstat", "stat"):
                fds.append(os.open(f"/proc/{pid}/task/{tid}/{name}", os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, fds[-1])
            thread = _Thread(pid, *fds)
            if not counts_from_start:
                thread.used, thread.cpu = thread.read()
            stack.pop_all()
        self._threads[tid] = thread

    def update(self) -> None:
        """Record what each thread has used since the last call."""
        now_ns = time.monotonic_ns()
        self._log.times.append(now_ns)
        for each in self._clients():
            if each.open_calls:
                self._log.calls.setdefault(each.pid, []).append(now_ns)
                self._log.calls.setdefault(each.worker_pid, []).append(now_ns)
        for tid, thread in list(self._threads.items()):
            try:
                used, cpu = thread.read()
            except OSError:  # it has ended
                self._threads.pop(tid).close()
                continue
            if used > thread.used:
                cpus = frozenset((cpu, cpu if thread.cpu is None else thread.cpu))
                self._log.uses.append(ThreadUse(now_ns, thread.pid, used - thread.used, cpus))
            thread.used, thread.cpu = used, cpu

    def totals(self) -> list[Counter[int | None]]:
        """Return the time until each update by CPU; that on all CPUs under None."""
        by_time: dict[int, list[ThreadUse]] = {}
        for use in compilation_uses(self._log):
            by_time.setdefault(use.time, []).append(use)
        totals, sums = [], Counter[int | None]()
        for at in self._log.times:
            for use in by_time.get(at, ()):
                sums.update(dict.fromkeys((None, *use.cpus), use.used))
            totals.append(sums.copy())
        return totals

    def pids(self) -> list[int]:
        """Return the compile processes that have not exited."""
        return sorted(self._log.compilers & {thread.pid for thread in self._threads.values()})

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._newest_fd >= 0:
            os.close(self._newest_fd)
            self._newest_fd = -1
        while self._threads:
            self._threads.popitem()[1].close()
