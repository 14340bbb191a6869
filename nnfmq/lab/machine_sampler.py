"""Samples the machine while requests are looked at: who uses the CPUs, and which processes are stopped.

It reads the CPU clock of every process, which takes less than a microsecond for each, and only of those that have
computed since the last time the threads, their times (`schedstat`) and CPUs (`stat`). That needs no privilege; what
/proc hides, processes of other PID namespaces and of other users on some machines, is missing. Such a look takes some
0.1 ms of a CPU with a hundred processes, and the pauses between them are so long that all take no more than a
twenty-fifth of one. Whether the processes of a request are stopped takes less, and is looked at more often.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nnfmq.base.processes import command_name
from nnfmq.lab.placement import cpu_ns
from nnfmq.lab.stress.counters import NEWEST_PROCESS, StopFiles, newest_process, read_state, run_ns
from nnfmq.observe.machine_record import CpuUse, MachineRecord, Stop

__all__ = ["MachineSampler", "role_name"]

STOPS_INTERVAL_S = 0.004
INTERVAL_NS = 5_000_000
_COST_SHARE = 25  # the pause is so many times as long as a sample
_MIN_NS = 20_000  # of CPU time: less is added to the next sample
_THREADS_MAX = 256  # with open files
_ROLES = "nnfmq-"  # names that the driver gives its processes


def role_name(pid: int) -> str:
    """Return the name of a process: its role in a driver, or its program or script; that of its main thread else."""
    name = _comm(f"/proc/{pid}/comm")
    return name if name.startswith(_ROLES) else command_name(pid) or name


def _comm(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text("utf-8").rstrip("\n")
    return ""


@dataclass(slots=True)
class _Process:
    """A process: its CPU time when it was last recorded, and when that was; whether its threads were read then."""

    used: int
    since_ns: int
    has_threads: bool = False


@dataclass(slots=True)
class _Thread:
    """A thread: its open schedstat and stat, its CPU time, the CPU on which it last ran, and how often it was seen."""

    schedstat: int
    stat: int
    used: int
    cpu: int
    looks: int = 0

    @classmethod
    def open(cls, pid: int, tid: int) -> _Thread:
        """Return a thread. Raises OSError if it has ended."""
        flags, folder = os.O_RDONLY | os.O_CLOEXEC, f"/proc/{pid}/task/{tid}"
        schedstat = os.open(f"{folder}/schedstat", flags)
        try:
            stat = os.open(f"{folder}/stat", flags)
        except OSError:
            os.close(schedstat)
            raise
        thread = cls(schedstat, stat, 0, -1)
        try:
            thread.read()
        except OSError:
            thread.close()
            raise
        return thread

    def read(self) -> int:
        """Return the CPU time since the last call. Raises OSError if it has ended."""
        before, self.used = self.used, run_ns(self.schedstat)
        if self.used != before:
            self.cpu = read_state(self.stat).cpu
        return self.used - before

    def close(self) -> None:
        os.close(self.schedstat)
        os.close(self.stat)


@dataclass(slots=True)
class _Watched:
    """A process whose stops are recorded, how it is kept from running, and since when."""

    files: StopFiles
    how: str = ""
    since_ns: int = 0


class MachineSampler:
    """Samples on a thread of its own while it is entered; `record` has what it saw. Used by one thread. Close it."""

    def __init__(self, interval_ns: int = INTERVAL_NS) -> None:
        self.record = MachineRecord(is_sampled=True)
        self._interval_ns = interval_ns
        self._processes: dict[int, _Process] = {}
        self._threads: OrderedDict[tuple[int, int], _Thread] = OrderedDict()
        self._watched: dict[int, _Watched] = {}
        self._to_watch: set[int] = set()
        self._newest_fd, self._newest = os.open(NEWEST_PROCESS, os.O_RDONLY | os.O_CLOEXEC), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nnfmq-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Sample once more, and end; blocks for some milliseconds. Idempotent."""
        self._ended.set()
        self._thread.join()
        self.close()

    def watch(self, pids: Collection[int]) -> None:
        """Record the stops of these processes from now on. Idempotent. Thread-safe."""
        self._to_watch.update(pids)

    def _run(self) -> None:
        next_ns = 0
        while not self._ended.wait(STOPS_INTERVAL_S):
            self.look_at_stops()
            if time.monotonic_ns() >= next_ns:
                next_ns = time.monotonic_ns() + max(self._interval_ns, self.look_at_uses() * _COST_SHARE)
        self.look_at_stops()
        self.look_at_uses()

    def look_at_uses(self) -> int:
        """Look once at what all processes have used; return the CPU time that this took, in ns."""
        begin_ns = time.thread_time_ns()  # not of the clock: on a busy machine it takes longer
        self._sample()
        return time.thread_time_ns() - begin_ns

    def _sample(self) -> None:
        if (newest := newest_process(self._newest_fd)) != self._newest:
            self._newest = newest
            self._find_processes()
        for pid, process in list(self._processes.items()):
            try:
                used = cpu_ns(pid)
            except OSError:  # it has exited
                del self._processes[pid]
                continue
            if used - process.used >= _MIN_NS:
                self._add_uses(pid, process, used)

    def _find_processes(self) -> None:
        """Find new processes. What one used before counts from the last sample on, unless this is the first."""
        now_ns, is_first = time.monotonic_ns(), not self._processes
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in self._processes:
                with suppress(OSError):  # it has exited
                    self._processes[int(name)] = _Process(cpu_ns(int(name)) if is_first else 0, now_ns)

    def _add_uses(self, pid: int, process: _Process, used: int) -> None:
        """Record what a process has used, by thread if its threads are known since the last time."""
        if pid not in self.record.processes:
            self.record.processes[pid] = role_name(pid)
        begin_ns, process.since_ns = process.since_ns, time.monotonic_ns()
        uses = self._thread_uses(pid, begin_ns, process.since_ns)
        if process.has_threads and len(uses) > 1:
            self.record.uses += [use for use in uses if use.used_ns]
        else:  # the clock of a process is exact; schedstat counts up to the last tick
            cpus = {cpu for use in uses for cpu in use.cpus}
            thread = pid if len(uses) == 1 else 0
            use = CpuUse(pid, thread, begin_ns, process.since_ns, used - process.used, tuple(cpus))
            self.record.uses.append(use)
        process.used, process.has_threads = used, True

    def _thread_uses(self, pid: int, begin_ns: int, end_ns: int) -> list[CpuUse]:
        names: list[str] = []
        with suppress(OSError):  # it has exited
            names = os.listdir(f"/proc/{pid}/task")
        found = []
        for tid in map(int, names):
            with suppress(OSError):  # it has ended
                found.append(self._use_of(pid, tid, begin_ns, end_ns))
        return found

    def _use_of(self, pid: int, tid: int, begin_ns: int, end_ns: int) -> CpuUse:
        """Return the CPU time of a thread. Raises OSError if it has ended."""
        key = pid, tid
        thread = self._threads.get(key)
        if thread is None:
            thread = self._threads[key] = _Thread.open(pid, tid)
            self._name_thread(pid, tid)
            if len(self._threads) > _THREADS_MAX:
                self._threads.popitem(last=False)[1].close()
            return CpuUse(pid, tid, begin_ns, end_ns, thread.used, (thread.cpu,))
        self._threads.move_to_end(key)
        before, thread.looks = thread.cpu, thread.looks + 1
        if thread.looks == 1:  # a thread may get its name some time after its start
            self._name_thread(pid, tid)
        try:
            used = thread.read()
        except OSError:
            self._threads.pop(key).close()
            raise
        return CpuUse(pid, tid, begin_ns, end_ns, used, tuple({before, thread.cpu}))

    def _name_thread(self, pid: int, tid: int) -> None:
        name = _comm(f"/proc/{pid}/task/{tid}/comm")
        if tid != pid and name and name != _comm(f"/proc/{pid}/comm"):
            self.record.threads[pid, tid] = name

    def look_at_stops(self) -> None:
        """Look once whether processes that are watched are stopped."""
        for pid in self._to_watch.copy() - self._watched.keys():
            with suppress(OSError):  # it has exited
                self._watched[pid] = _Watched(StopFiles(pid))
                self.record.processes.setdefault(pid, role_name(pid))
        for pid, watched in self._watched.items():
            self._note_stop(pid, watched, watched.files.stop_kind())

    def _note_stop(self, pid: int, watched: _Watched, how: str) -> None:
        if how == watched.how:
            return
        now_ns = time.monotonic_ns()
        if watched.how:
            self.record.stops.append(Stop(pid, watched.since_ns, now_ns, watched.how))
        watched.how, watched.since_ns = how, now_ns

    def close(self) -> None:
        """Record the stops that go on, and close the files. Idempotent."""
        while self._watched:
            pid, watched = self._watched.popitem()
            self._note_stop(pid, watched, "")
            watched.files.close()
        while self._threads:
            self._threads.popitem()[1].close()
        if self._newest_fd >= 0:
            os.close(self._newest_fd)
            self._newest_fd = -1
