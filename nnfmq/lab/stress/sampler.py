"""A thread that samples every 2 ms what cannot be read for each request: stops, throttling, compilations, stalls."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from nnfmq.lab.stress.counters import (
    MEMORY_STALLS,
    CompilerUsage,
    StatisticsArea,
    StopFiles,
    memory_stall_ns,
    throttle_files,
    throttled_ns,
)
from nnfmq.lab.stress.records import StressSample

__all__ = ["Sampler", "Watched"]

INTERVAL_S = 0.002
_FIND_EVERY = 5  # samples; compile processes live for many milliseconds


class Watched(NamedTuple):
    """A client and its worker: their pids, and their CPUs; None: any."""

    client: int
    worker: int
    client_cpu: int | None
    worker_cpu: int | None


@dataclass
class _Files:
    """Open files of a process: those that tell how it is stopped, and each cpu.stat that counts its throttling."""

    stops: StopFiles
    throttling: list[int] = field(default_factory=list)

    def throttled_ns(self) -> int:
        return sum(throttled_ns(os.pread(fd, 4096, 0).decode()) for fd in self.throttling)


class Sampler:
    """Samples clients and their workers while entered. `samples` has a list for each; read it after exit.

    `statistics` is the driver's statistics area, None if it may not be read. It is borrowed until the exit.
    """

    def __init__(self, watched: Sequence[Watched], driver_pid: int, statistics: StatisticsArea = None) -> None:
        self._watched = watched
        executing = [pid for each in watched for pid in (each.client, each.worker)]
        self._compile = CompilerUsage(driver_pid, executing, statistics)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nnfmq-sampler", daemon=True)
        self._resources = ExitStack()
        self._files: dict[int, _Files] = {}
        self._stalls: int | None = None
        self.samples: list[list[StressSample]] = [[] for _ in watched]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._compile.close)
            with suppress(OSError):  # the kernel has no PSI
                self._stalls = self._open(stack, MEMORY_STALLS)
            for each in self._watched:
                for pid in (each.client, each.worker):
                    self._files[pid] = _Files(StopFiles(pid))
                    stack.callback(self._files[pid].stops.close)
                    self._files[pid].throttling = [self._open(stack, path) for path in throttle_files(pid)]
            self._resources = stack.pop_all()
        if gc.isenabled():
            gc.disable()  # a collection takes milliseconds of a CPU that a client or worker needs
            self._resources.callback(gc.enable)
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
        self._add_compilations()

    def _add_compilations(self) -> None:
        """Add the time of compilations to the samples, which is known only now."""
        totals = self._compile.totals()
        for each, samples in zip(self._watched, self.samples, strict=True):
            samples[:] = [
                sample._replace(
                    compiling=total[None],
                    compiling_client=total[each.client_cpu],
                    compiling_worker=total[each.worker_cpu],
                )
                for sample, total in zip(samples, totals, strict=True)
            ]

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
        begin_ns = time.monotonic_ns()
        self._compile.update()
        stall = 0 if self._stalls is None else memory_stall_ns(self._stalls)
        for each, samples in zip(self._watched, self.samples, strict=True):
            client, worker = self._files[each.client], self._files[each.worker]
            stopped = client.stops.stop_kind(), worker.stops.stop_kind()
            throttled = client.throttled_ns(), worker.throttled_ns()
            read_ns = time.monotonic_ns()
            samples.append(StressSample(begin_ns, read_ns, *stopped, *throttled, memory_stall=stall))
