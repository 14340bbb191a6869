"""A thread that samples every 2 ms what cannot be read for each request: stops, throttling, compilations, stalls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
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


class CompilerUsage:
    """CPU time of the driver's compile server and its compile processes, in total and by CPU.

    They are the descendants of the driver in another session than the driver's (`service.compile_server`).
    """

    def __init__(self, driver_pid: int) -> None:
        self._driver = driver_pid
        self._session = os.getsid(driver_pid)
        self._used: dict[int, int] = {}
        self._is_first = True
        self._stats: dict[int, int] = {}
        self.total, self.by_cpu = 0, dict[int, int]()

    def find(self) -> None:
        """Look for new compile processes; what the server used before the first call does not count."""
        for pid in set(descendants(self._driver)) - self._used.keys():
            with suppress(FileNotFoundError, ProcessLookupError):
                if os.getsid(pid) != self._session:
                    stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
                    self._stats[pid], self._used[pid] = stat, cpu_ns(pid) if self._is_first else 0
        self._is_first = False

    def update(self) -> None:
        """Add what each process has used since the last call."""
        for pid, stat in list(self._stats.items()):
            try:
                used, cpu = cpu_ns(pid), read_state(stat).cpu
            except (ProcessLookupError, OSError):  # it has exited
                os.close(self._stats.pop(pid))
                continue
            increase, self._used[pid] = max(0, used - self._used[pid]), used
            self.total += increase
            self.by_cpu[cpu] = self.by_cpu.get(cpu, 0) + increase

    def pids(self) -> list[int]:
        """Return the processes that have not exited."""
        return sorted(self._stats)

    def on(self, cpu: int | None) -> int:
        """Return the time on a CPU; None: on all."""
        return self.total if cpu is None else self.by_cpu.get(cpu, 0)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._stats:
            os.close(self._stats.popitem()[1])


class Sampler:
    """Samples clients and their workers while entered. `samples` has a list for each; read it after exit."""

    def __init__(self, watched: Sequence[Watched], driver_pid: int) -> None:
        self._watched = watched
        self._compile = CompilerUsage(driver_pid)
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
