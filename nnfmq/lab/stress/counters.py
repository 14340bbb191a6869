"""Counters in /proc and in control groups that are cheap enough to be read for each request or every 2 ms."""

from __future__ import annotations

import os
import resource
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

from nnfmq.base.processes import descendants
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.placement import cpu_ns
from nnfmq.observe.driver_statistics import ClientCalls, client_calls

__all__ = [
    "MEMORY_STALLS",
    "NEWEST_PROCESS",
    "PERIOD_US",
    "CompilerUsage",
    "CpuGroup",
    "OtherProcesses",
    "ProcessState",
    "RequestCounters",
    "StatisticsArea",
    "StopFiles",
    "ThreadUse",
    "UsageLog",
    "compilation_uses",
    "limited_group",
    "memory_stall_ns",
    "newest_process",
    "read_state",
    "run_ns",
    "throttle_files",
    "throttled_ns",
]

_BYTES = 512
_MINOR, _MAJOR, _CPU = 7, 9, 36  # of the fields in /proc/PID/stat after the name


class ProcessState(NamedTuple):
    """The state (`R`, `S`, `T`...), minor and major faults, and the CPU on which it, or its first thread, last ran."""

    state: str
    minor_faults: int
    major_faults: int
    cpu: int


def read_state(fd: int) -> ProcessState:
    """Return the content of an open /proc/PID/stat, or /proc/PID/task/TID/stat.

    Raises:
        ProcessLookupError: If the process has been reaped.
    """
    fields = os.pread(fd, _BYTES, 0).rpartition(b")")[2].split()
    return ProcessState(fields[0].decode(), int(fields[_MINOR]), int(fields[_MAJOR]), int(fields[_CPU]))


_STOP_STATES = {"T": "stopped", "t": "traced"}
_GROUPS = Path("/sys/fs/cgroup")


class StopFiles:
    """Tells how a process is kept from running: by a signal, a debugger, or its control group. Close it.

    Owns the files that say so.

    Raises:
        OSError: If the process has exited.
    """

    def __init__(self, pid: int) -> None:
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._group = -1
        with suppress(OSError):  # only version 2 tells, and not of its root
            self._group = os.open(_GROUPS / _unified_group(pid) / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)

    def stop_kind(self) -> str:
        """Return the kind of its stop, a key of `machine_record.STOPS`; empty if it is not stopped, or has exited."""
        with suppress(OSError):
            how = _STOP_STATES.get(read_state(self._stat).state, "")
            if not how and self._group >= 0 and b"frozen 1" in os.pread(self._group, _BYTES, 0):
                return "frozen"
            return how
        return ""

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in (self._stat, self._group):
            if fd >= 0:
                os.close(fd)
        self._stat = self._group = -1


def _unified_group(pid: int) -> str:
    """Return the path of a process's group of version 2. Raises OSError if it has none, or the root."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::/") and line != "0::/":
            return line.removeprefix("0::/")
    raise FileNotFoundError


class RequestCounters:
    """Counters of the calling thread and of a worker process. Owns file descriptors until `close`."""

    def __init__(self, worker_pid: int) -> None:
        self._worker_pid = worker_pid
        self._fds: list[int] = []
        own = f"/proc/self/task/{threading.get_native_id()}"
        self._own = self._open(f"{own}/schedstat")
        self._state = self._open(f"/proc/{worker_pid}/stat")
        tasks = sorted(os.listdir(f"/proc/{worker_pid}/task"), key=int)
        self._threads = [self._open(f"/proc/{worker_pid}/task/{task}/schedstat") for task in tasks]

    def _open(self, path: str) -> int:
        self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return self._fds[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file descriptors. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def read(self) -> tuple[list[int], list[int]]:
        """Return the counters in the order of RequestRecord from `client_cpu` on, and each worker thread's delay.

        The worker's delay is left out of the first list. A thread of the worker that has ended has delay 0.
        """
        usage, state = resource.getrusage(resource.RUSAGE_THREAD), read_state(self._state)
        delays = [_delay(fd) for fd in self._threads]
        counters = [
            time.thread_time_ns(), round(usage.ru_stime * 1e9), _delay(self._own), usage.ru_minflt, usage.ru_majflt,
            cpu_ns(self._worker_pid), state.minor_faults, state.major_faults,
        ]  # fmt: skip
        return counters, delays


def _delay(fd: int) -> int:
    """Return the time that a thread has waited for a CPU; its second number in schedstat."""
    with suppress(ProcessLookupError):
        return int(os.pread(fd, _BYTES, 0).split()[1])
    return 0


def run_ns(fd: int) -> int:
    """Return the CPU time of a thread from its open schedstat, in ns.

    Raises:
        ProcessLookupError: If the thread has ended.
    """
    return int(os.pread(fd, _BYTES, 0).split()[0])


MEMORY_STALLS = Path("/proc/pressure/memory")
"""The kernel's PSI of memory, for `memory_stall_ns`. Not every kernel has it."""


def memory_stall_ns(fd: int) -> int:
    """Return the time in which some task waited for memory since the boot, from an open `MEMORY_STALLS`."""
    return int(os.pread(fd, _BYTES, 0).partition(b"\n")[0].rpartition(b"=")[2]) * 1000


NEWEST_PROCESS = Path("/proc/loadavg")
"""The file for `newest_process`."""


def newest_process(fd: int) -> int:
    """Return the id of the process or thread that was started last, from an open `NEWEST_PROCESS`."""
    return int(os.pread(fd, _BYTES, 0).split()[-1])


# ----------------------------------------------------------------------------------------------------------------------
# CPU limits of cgroups: the files that count throttling, and a group of its own with a limit.
#
# Both versions of cgroups are supported: version 2 has `cpu.max` and counts `throttled_usec`; version 1, which some
# machines still mount for the CPU controller, has `cpu.cfs_quota_us` and counts `throttled_time` in ns.


PERIOD_US = 50_000


class _Location(NamedTuple):
    """The mount of the CPU controller, the path of a process below it, and the version."""

    mount: Path
    path: str
    version: int


def _location(pid: int) -> _Location | None:
    """Return the location of a process in the CPU controller; None if that is not mounted."""
    return _found_location(Path(f"/proc/{pid}/cgroup").read_text(), Path("/proc/self/mounts").read_text())


def _found_location(cgroup: str, mounted: str) -> _Location | None:
    """Return the location in the content of /proc/PID/cgroup and /proc/self/mounts; None if there is none."""
    groups = [line.split(":", 2) for line in cgroup.splitlines()]
    mounts = [line.split(" ") for line in mounted.splitlines()]
    for _, mount, kind, options, *_ in mounts:
        for _, controllers, path in groups:
            if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in controllers.split(","):
                return _Location(Path(mount), path, 1)
            has_cpu = kind == "cgroup2" and "cpu" in _words(Path(mount) / "cgroup.controllers")
            if has_cpu and not controllers:
                return _Location(Path(mount), path, 2)
    return None


def _words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().split()
    return []


def throttle_files(pid: int) -> list[Path]:
    """Return the files cpu.stat of a process's group and of the groups above it; none without the CPU controller."""
    location = _location(pid)
    if location is None:
        return []
    folder = location.mount / location.path.lstrip("/")
    above = [each for each in (folder, *folder.parents) if each.is_relative_to(location.mount)]
    return [each / "cpu.stat" for each in above if "nr_throttled" in _words(each / "cpu.stat")]


def throttled_ns(text: str) -> int:
    """Return the throttled time in the content of a cpu.stat."""
    values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(values["throttled_time"]) if "throttled_time" in values else int(values["throttled_usec"]) * 1000


class CpuGroup:
    """A group with one process, whose CPU time can be limited."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version

    def limit(self, quota_us: int | None) -> None:
        """Limit the group to `quota_us` in each 50 ms; None: no limit."""
        if self._version == 2:
            (self._folder / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {PERIOD_US}")
            return
        (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._folder / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))


@contextmanager
def limited_group(pid: int) -> Iterator[CpuGroup]:
    """Move a process to a new group beside its own, and yield it; at exit the process moves back.

    Raises:
        BenchmarkFailed: If this user may not do that; the message says what is missing.
    """
    location = _location(pid)
    if location is None:
        raise BenchmarkFailed("the CPU controller of cgroups is not available")
    own = location.mount / location.path.lstrip("/")
    parent = own if location.version == 1 or own == location.mount else own.parent
    folder = parent / f"nnfmq-stress-{os.getpid()}-{pid}"
    try:
        if location.version == 2:
            (parent / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
    except OSError as error:
        raise BenchmarkFailed(f"a CPU limit needs root or a delegated cgroup: {parent}: {error.strerror}") from error
    try:
        _move(pid, folder)
        yield CpuGroup(folder, location.version)
    finally:
        with suppress(ProcessLookupError):  # the process has exited
            _move(pid, own)
        folder.rmdir()


def _move(pid: int, folder: Path) -> None:
    try:
        (folder / "cgroup.procs").write_text(str(pid))
    except PermissionError as error:
        raise BenchmarkFailed(f"a CPU limit needs root or a delegated cgroup: {folder}: {error.strerror}") from error


# ----------------------------------------------------------------------------------------------------------------------
# The CPU time of the compilations in a driver: compile processes, the workers that ask for them, and their clients.
#
# `CompilerUsage` records what the processes of the driver and its clients use; `compilation_uses` tells afterwards
# which of it was for compilations, because a client and its worker begin before the compile process that shows what
# they do.


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
    """The readings: their times, the uses in order of time, and the processes that they are of.

    `calls` has for clients and workers the times at which the client had an open call.
    """

    times: list[int] = field(default_factory=list)
    uses: list[ThreadUse] = field(default_factory=list)
    compilers: set[int] = field(default_factory=set)
    workers: set[int] = field(default_factory=set)
    calls: dict[int, list[int]] = field(default_factory=dict)


def compilation_uses(log: UsageLog) -> Iterator[ThreadUse]:
    """Yield the uses of CPUs for compilations, in order of time.

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

    Compile processes are the descendants of the driver in another session (`driver.compilation.server`); its other
    descendants are workers. Clients with open calls are found in `statistics`. Processes in `executing` do not count.
    Each thread is read, because the kernel tells the CPU of a thread only. What a thread used while it changed from one
    CPU to another counts on both, because nothing says how much it was on each.
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


# ----------------------------------------------------------------------------------------------------------------------
# CPU time of the processes that take no part in a trial: whether the machine was as idle as the trial assumes.


class OtherProcesses:
    """Measures the CPU time of all processes but `roots`, this one, and what these have started.

    Kernel threads count. What a process used that has exited since does not, nor that of processes in other pid
    namespaces. Making one, and `used_ns`, take about 1 ms for 100 processes.
    """

    def __init__(self, roots: Collection[int]) -> None:
        self._roots = {os.getpid(), *roots}
        self._before = dict(self._times())

    def used_ns(self) -> int:
        """Return the CPU time in ns that they have used since this object was made."""
        return sum(max(0, used - self._before.get(pid, 0)) for pid, used in self._times())

    def _times(self) -> Iterator[tuple[int, int]]:
        own = self._roots.union(*map(descendants, self._roots))
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in own:
                with suppress(OSError):  # it has exited
                    yield int(name), cpu_ns(int(name))
