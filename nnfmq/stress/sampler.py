"""A thread that samples every 2 ms what cannot be read for each request: stops, throttling, compilations, stalls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from nnfmq.measure.cpu_pinning import cpu_ns
from nnfmq.observe.process_usage import descendants
from nnfmq.stress.cpu_groups import throttle_files, throttled_ns
from nnfmq.stress.process_counters import memory_stall_ns, read_state
from nnfmq.stress.records import StressSample

__all__ = ["Sampler", "Watched"]

INTERVAL_S = 0.002
_FIND_EVERY = 5  # samples; compile processes live for many milliseconds
_STOPPED = ("T", "t")
_ACTIVE_NS = 50_000_000  # after its last use of the CPU, a compile process may wait for the worker


class Watched(NamedTuple):
    """A client and its worker: their pids, and their CPUs; None: any."""

    client: int
    worker: int
    client_cpu: int | None
    worker_cpu: int | None


@dataclass
class _Files:
    """Open files of a process: stat, and each cpu.stat that counts its throttling."""

    stat: int
    throttling: list[int] = field(default_factory=list)

    def is_stopped(self) -> bool:
        with suppress(ProcessLookupError):
            return read_state(self.stat).state in _STOPPED
        return False

    def throttled_ns(self) -> int:
        return sum(throttled_ns(os.pread(fd, 4096, 0).decode()) for fd in self.throttling)


@dataclass(slots=True)
class _Process:
    """A process of the driver: its open stat, the CPU time that it has used, whether it compiles, and its last CPU."""

    stat: int
    used: int
    is_compiler: bool
    cpu: int | None = None


class CompilerUsage:
    """CPU time of the compilations in a driver, in total and by CPU.

    It is that of the compile server and its compile processes, the descendants of the driver in another session than
    the driver's (`service.compile_server`); and, while these compute, that of the driver's workers, except those in
    `executing`: a worker checks and packs the model that it has compiled, and links the program. What a process used
    while it changed from one CPU to another counts on both, because nothing says how much it was on each.
    """

    def __init__(self, driver_pid: int, executing: Collection[int] = ()) -> None:
        self._driver = driver_pid
        self._executing = {driver_pid, *executing}
        self._session = os.getsid(driver_pid)
        self._known: set[int] = set()
        self._processes: dict[int, _Process] = {}
        self._active_until = 0
        self.total, self.by_cpu = 0, dict[int, int]()

    def find(self) -> None:
        """Look for new processes; what they used before the first call does not count."""
        is_first = not self._known
        for pid in set(descendants(self._driver)) - self._known - self._executing:
            with suppress(FileNotFoundError, ProcessLookupError):
                is_compiler = os.getsid(pid) != self._session
                stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
                self._processes[pid] = _Process(stat, cpu_ns(pid) if is_first or not is_compiler else 0, is_compiler)
                self._known.add(pid)

    def update(self) -> None:
        """Add what each process has used since the last call."""
        now_ns = time.monotonic_ns()
        for pid, process in sorted(self._processes.items(), key=lambda item: not item[1].is_compiler):
            try:
                used, cpu = cpu_ns(pid), read_state(process.stat).cpu
            except (ProcessLookupError, OSError):  # it has exited
                os.close(self._processes.pop(pid).stat)
                continue
            increase, process.used = max(0, used - process.used), used
            if increase and process.is_compiler:
                self._active_until = now_ns + _ACTIVE_NS
            if process.is_compiler or now_ns < self._active_until:
                self.total += increase
                for each in {cpu, cpu if process.cpu is None else process.cpu}:
                    self.by_cpu[each] = self.by_cpu.get(each, 0) + increase
            process.cpu = cpu

    def pids(self) -> list[int]:
        """Return the compile processes that have not exited."""
        return sorted(pid for pid, process in self._processes.items() if process.is_compiler)

    def on(self, cpu: int | None) -> int:
        """Return the time on a CPU; None: on all."""
        return self.total if cpu is None else self.by_cpu.get(cpu, 0)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._processes:
            os.close(self._processes.popitem()[1].stat)


class Sampler:
    """Samples clients and their workers while entered. `samples` has a list for each; read it after exit."""

    def __init__(self, watched: Sequence[Watched], driver_pid: int) -> None:
        self._watched = watched
        self._compile = CompilerUsage(driver_pid, [each.worker for each in watched])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nnfmq-sampler", daemon=True)
        self._resources = ExitStack()
        self._files: dict[int, _Files] = {}
        self.samples: list[list[StressSample]] = [[] for _ in watched]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._compile.close)
            for each in self._watched:
                for pid in (each.client, each.worker):
                    self._files[pid] = _Files(self._open(stack, Path(f"/proc/{pid}/stat")))
                    self._files[pid].throttling = [self._open(stack, path) for path in throttle_files(pid)]
            self._resources = stack.pop_all()
        self._thread.start()
        return self

    @staticmethod
    def _open(stack: ExitStack, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        return fd

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._resources.close()

    def _run(self) -> None:
        with suppress(PermissionError):  # of this thread: without it, samples beside CPU hogs are late
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        number = 0
        while not self._ended.wait(INTERVAL_S):
            if number % _FIND_EVERY == 0:
                self._compile.find()
            number += 1
            self._sample()

    def _sample(self) -> None:
        self._compile.update()
        stall = memory_stall_ns()
        for each, samples in zip(self._watched, self.samples, strict=True):
            client, worker = self._files[each.client], self._files[each.worker]
            samples.append(
                StressSample(
                    time.monotonic_ns(),
                    client.is_stopped(),
                    worker.is_stopped(),
                    client.throttled_ns(),
                    worker.throttled_ns(),
                    self._compile.total,
                    self._compile.on(each.client_cpu),
                    self._compile.on(each.worker_cpu),
                    stall,
                )
            )
