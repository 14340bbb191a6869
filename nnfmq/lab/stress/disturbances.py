"""Disturbances of one trial: what happens when, drawn from a seed, and the thread that stops and limits processes.

A disturbance has the name of the cause that the analysis should find. What the application does within requests is done
by the client (`recording_client`), loads of the machine are processes (`load_process`), stops and CPU limits come from
here. The analysis gets none of this.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from nnfmq.lab.bench.runner_group import runner_environment
from nnfmq.lab.bench.runner_protocol import BenchmarkFailed
from nnfmq.lab.stress.counters import PERIOD_US, limited_group
from nnfmq.lab.stress.recording_client import WORK

__all__ = [
    "Action",
    "DisturbancePlan",
    "LoadGroup",
    "MachineLoad",
    "draw_plan",
    "prepared_actions",
    "running_actions",
    "started_loads",
]


# ----------------------------------------------------------------------------------------------------------------------
# Start processes that load the machine, tell them when, and end them.


_READY_S = 120.0
_END_S = 30.0


class MachineLoad(NamedTuple):
    """A load of `load_process.LOADS`, its CPU (None: any), and its begin and end after the begin of the trial, in s."""

    kind: str
    cpu: int | None
    begin_s: float
    end_s: float


class LoadGroup:
    """Processes that wait for the begin of a trial."""

    def __init__(self, loads: Sequence[MachineLoad], processes: Sequence[subprocess.Popen[str]]) -> None:
        self._loads = loads
        self._processes = processes

    def begin(self, begin_ns: int) -> None:
        """Tell the processes the begin of the trial on the monotonic clock."""
        for load, process in zip(self._loads, self._processes, strict=True):
            assert process.stdin is not None
            times = (begin_ns + round(seconds * 1e9) for seconds in (load.begin_s, load.end_s))
            print(*times, file=process.stdin, flush=True)


@contextmanager
def started_loads(loads: Sequence[MachineLoad], socket: str, seed: int) -> Iterator[LoadGroup]:
    """Start a process for each load, and yield them when all are ready; at exit they are killed and reaped.

    Raises:
        BenchmarkFailed: If a process does not become ready.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for load in loads:
            cpu = "-" if load.cpu is None else str(load.cpu)
            command = [sys.executable, "-P", "-m", "nnfmq.lab.stress.load_process", load.kind, cpu, socket, str(seed)]
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                    env=runner_environment(),
                )
            )
        for load, process in zip(loads, processes, strict=True):
            _wait_until_ready(load, process)
        yield LoadGroup(loads, processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate(timeout=_END_S)


def _wait_until_ready(load: MachineLoad, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _READY_S)
    if not readable or process.stdout.readline() != "ready\n":
        raise BenchmarkFailed(f"the load {load.kind} did not start")


# ----------------------------------------------------------------------------------------------------------------------
# Disturbances of one trial: what happens when, drawn from a seed, and the thread that stops and limits processes.


_HOGS = 3  # on one CPU: a thread then waits for several time slices
_CPU_LIMIT_US = PERIOD_US // 25
_BETWEEN_S = (0.06, 0.12)
_STOP_S = (0.015, 0.04)


class Action(NamedTuple):
    """A call at a time after the begin of the trial, in s."""

    at_s: float
    call: Callable[[], object]


@dataclass(slots=True)
class DisturbancePlan:
    """What happens in a trial: work within requests, loads of the machine, stops, a CPU limit.

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


@contextmanager
def prepared_actions(plan: DisturbancePlan, client: int, worker: int) -> Iterator[list[Action]]:
    """Yield the stops and limits of a plan as actions on the pids; at exit both processes run without a limit.

    Raises:
        BenchmarkFailed: If this user may not limit CPU time.
    """
    pids = {"client": client, "worker": worker}
    with ExitStack() as stack:
        actions = []
        for begin_s, end_s, target in plan.stops:
            stack.callback(_send, pids[target], signal.SIGCONT)
            actions.append(Action(begin_s, _sending(pids[target], signal.SIGSTOP)))
            actions.append(Action(end_s, _sending(pids[target], signal.SIGCONT)))
        if plan.limit is not None:
            begin_s, end_s, target = plan.limit
            group = stack.enter_context(limited_group(pids[target]))
            actions.append(Action(begin_s, lambda: group.limit(_CPU_LIMIT_US)))
            actions.append(Action(end_s, lambda: group.limit(None)))
        yield sorted(actions, key=lambda action: action.at_s)


def _sending(pid: int, number: signal.Signals) -> Callable[[], object]:
    return lambda: _send(pid, number)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has exited, which the client's reply reports
        os.kill(pid, number)


@contextmanager
def running_actions(actions: Sequence[Action], begin_ns: int) -> Iterator[None]:
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
