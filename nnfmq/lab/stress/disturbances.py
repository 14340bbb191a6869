"""Disturbances of one trial, drawn from a seed: an application's work within requests, loads, stops.

A disturbance has the name of the cause that the analysis should find. What the application does within requests is done
by the client, loads of the machine are processes (`machine_load`), and a thread of the parent stops and limits
processes. The analysis gets none of this.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnfmq.lab.stress.counters import PERIOD_US, limited_group
from nnfmq.lab.stress.machine_load import MachineLoad

__all__ = [
    "WORK",
    "ApplicationWork",
    "DisturbancePlan",
    "TimedAction",
    "can_reclaim",
    "draw_plan",
    "prepared_actions",
    "running_actions",
]

_HOGS = 3  # on one CPU: a thread then waits for several time slices
_CPU_LIMIT_US = PERIOD_US // 25
_BETWEEN_S = (0.06, 0.12)
_STOP_S = (0.015, 0.04)


class TimedAction(NamedTuple):
    """A call at a time after the begin of the trial, in s."""

    at_s: float
    call: Callable[[], object]


@dataclass(slots=True)
class DisturbancePlan:
    """The disturbances of a trial: work within requests, loads of the machine, stops, a CPU limit.

    `work` has times in ns after the begin. `stops` and `limit` have begin and end in s; the target is `client` or
    `worker`.
    """

    work: list[tuple[int, str]] = field(default_factory=list)
    loads: list[MachineLoad] = field(default_factory=list)
    stops: list[tuple[float, float, str]] = field(default_factory=list)
    limit: tuple[float, float, str] | None = None


def draw_plan(
    names: Sequence[str], seconds: float, cpus: tuple[int | None, int | None], randomness: random.Random
) -> DisturbancePlan:
    """Return a plan of the named disturbances; each has a period of its own within the trial.

    `cpus` are those of the client and of the worker. Beside the causes, `churn` takes and returns memory all the time.
    """
    plan = DisturbancePlan()
    for name in names:
        begin_s = seconds * randomness.uniform(0.1, 0.25)
        end_s = seconds * randomness.uniform(0.75, 0.95)
        target = randomness.choice(("client", "worker"))
        if name in WORK:
            plan.work += [(round(at_s * 1e9), name) for at_s in _times(begin_s, end_s, randomness)]
        elif name == "stops":
            plan.stops += [
                (at_s, at_s + randomness.uniform(*_STOP_S), target) for at_s in _times(begin_s, end_s, randomness)
            ]
        elif name == "throttling":
            plan.limit = (begin_s, end_s, target)
        elif name in ("cpu-client", "cpu-worker"):
            cpu = cpus[name == "cpu-worker"]
            plan.loads += [MachineLoad("cpu", cpu, begin_s, end_s)] * _HOGS
        else:
            plan.loads.append(MachineLoad(name, None, begin_s, end_s))
    plan.work.sort()
    return plan


def _times(begin_s: float, end_s: float, randomness: random.Random) -> Iterator[float]:
    at_s = begin_s
    while at_s < end_s:
        yield at_s
        at_s += randomness.uniform(*_BETWEEN_S)


# ----------------------------------------------------------------------------------------------------------------------
# What an application may do within a request beside the execution, and what makes the request slow.
#
# `gc`: a full garbage collection with many objects. `page-faults`: a new array for a frame of 96 MiB. `memory`: a read
# of a mapped file, whose pages the kernel was told to reclaim before the request (MADV_PAGEOUT), as it does when memory
# is scarce.


_MADV_RANDOM, _MADV_PAGEOUT = 1, 21  # mmap.MADV_PAGEOUT is not in CPython 3.11
_OBJECTS = 300_000
_FRAME_BYTES = 96 << 20  # of floats in 4K; its faults take some 10 ms, more than what every machine has
_FILE_BYTES, _STRIDE = 16 << 20, 1 << 16
_PAGE = 4096


class _WorkKind(Protocol):
    def prepare(self) -> None:
        """Do what is not part of the request."""

    def work(self) -> None:
        """Do what is part of the request."""


class _Collection:
    def __init__(self, folder: Path) -> None:
        self._objects: list[list[int]] = [[number] for number in range(_OBJECTS)]

    def prepare(self) -> None:
        pass

    def work(self) -> None:
        gc.collect()


class _NewFrame:
    def __init__(self, folder: Path) -> None:
        pass

    def prepare(self) -> None:
        pass

    def work(self) -> None:
        np.empty(_FRAME_BYTES, np.uint8)[::_PAGE] = 1


class _MappedFile:
    def __init__(self, folder: Path) -> None:
        path = folder / f"mapped-{os.getpid()}"
        with path.open("wb") as file:
            file.write(os.urandom(_FILE_BYTES))
            os.fsync(file.fileno())  # dirty pages would not be reclaimed
        pages: Any = np.memmap(path, np.uint8, "r")
        path.unlink()
        pages._mmap.madvise(_MADV_RANDOM)
        self._pages = pages

    def prepare(self) -> None:
        self._pages._mmap.madvise(_MADV_PAGEOUT)

    def work(self) -> None:
        self._pages[::_STRIDE].sum()


WORK: dict[str, Callable[[Path], _WorkKind]] = {"gc": _Collection, "page-faults": _NewFrame, "memory": _MappedFile}
"""By the names of the causes."""


class _Due(NamedTuple):
    time_ns: int
    kind: _WorkKind


class ApplicationWork:
    """The work of one trial: `schedule` has times after its begin, in ns, and names of `WORK`."""

    def __init__(self, schedule: Sequence[tuple[int, str]], folder: Path) -> None:
        kinds = {name: WORK[name](folder) for name in sorted({name for _, name in schedule})}
        self._due = [_Due(time_ns, kinds[name]) for time_ns, name in sorted(schedule, reverse=True)]
        self._begin_ns = 0

    def begin(self, begin_ns: int) -> None:
        """Set the begin of the trial."""
        self._begin_ns = begin_ns

    def next_due(self, now_ns: int) -> Callable[[], None] | None:
        """Return the work of the next request, or None. Prepares it, which is not part of the request."""
        if not self._due or self._due[-1].time_ns > now_ns - self._begin_ns:
            return None
        kind = self._due.pop().kind
        kind.prepare()
        return kind.work


def can_reclaim(folder: Path) -> bool:
    """Return True if the kernel reclaims mapped pages of a file in `folder` when told to; not on tmpfs."""
    file = _MappedFile(folder)
    for _ in range(2):  # pages that were never mapped are not reclaimed the first time
        file.work()
        file.prepare()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    file.work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt > before


# ----------------------------------------------------------------------------------------------------------------------
# Stops and CPU limits: actions at their times, on a thread of the parent.


@contextmanager
def prepared_actions(plan: DisturbancePlan, client: int, worker: int) -> Iterator[list[TimedAction]]:
    """Yield the stops and limits of a plan as actions on the pids; at exit both processes run without a limit.

    Raises:
        BenchmarkFailed: If this user may not limit CPU time.
    """
    pids = {"client": client, "worker": worker}
    with ExitStack() as stack:
        actions = []
        for begin_s, end_s, target in plan.stops:
            stack.callback(_send, pids[target], signal.SIGCONT)
            actions.append(TimedAction(begin_s, _sending(pids[target], signal.SIGSTOP)))
            actions.append(TimedAction(end_s, _sending(pids[target], signal.SIGCONT)))
        if plan.limit is not None:
            begin_s, end_s, target = plan.limit
            group = stack.enter_context(limited_group(pids[target]))
            actions.append(TimedAction(begin_s, lambda: group.limit(_CPU_LIMIT_US)))
            actions.append(TimedAction(end_s, lambda: group.limit(None)))
        yield sorted(actions, key=lambda action: action.at_s)


def _sending(pid: int, number: signal.Signals) -> Callable[[], object]:
    return lambda: _send(pid, number)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has exited, which the client's reply reports
        os.kill(pid, number)


@contextmanager
def running_actions(actions: Sequence[TimedAction], begin_ns: int) -> Iterator[None]:
    """Call the actions at their times, on a thread of their own; at exit those still to come are left out."""
    ended = threading.Event()

    def run() -> None:
        for action in actions:
            wait_s = (begin_ns - time.monotonic_ns()) / 1e9 + action.at_s
            if ended.wait(max(0.0, wait_s)):
                return
            action.call()

    thread = threading.Thread(target=run, name="nnfmq-disturbances", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
