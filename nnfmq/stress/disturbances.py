"""Disturbances of one trial: what happens when, drawn from a seed, and the thread that stops and limits processes.

A disturbance has the name of the cause that the analysis should find. What the application does within requests is done
by the client (`application_work`), loads of the machine are processes (`load_process`), stops and CPU limits come from
here. The analysis gets none of this.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from nnfmq.stress.application_work import WORK
from nnfmq.stress.cpu_groups import PERIOD_US, limited_group
from nnfmq.stress.load_group import MachineLoad

__all__ = ["Action", "DisturbancePlan", "draw_plan", "prepared_actions", "running_actions"]

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
