"""The measurement of `nnfmq bench`: start the runners, warm them up, measure them in turn, level by level."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.lab.bench.runner import Load, LoadResult, OpenedFile, OwnRunner, RunnerGroup, RunnerJob, started_group
from nnfmq.lab.bench.steps import Array
from nnfmq.lab.child_processes import BenchmarkFailed, RunnerUnavailable
from nnfmq.lab.listening_driver import kept_daemon
from nnfmq.lab.statistics import REPORTED, STABLE_WINDOWS, WarmUpWindow, are_stable, percentile
from nnfmq.lab.stress.counters import OtherProcesses

__all__ = ["LoadLevel", "LoadMeasurements", "LoadPlan", "MeasuredLoad", "measure_plan", "rotated"]

ROUNDS = 5  # of several runners: each is measured in as many parts, in turn with the others


class LoadLevel(NamedTuple):
    """The number of clients, and the requests per second of all together; None: a closed loop."""

    clients: int
    rate: float | None

    def text(self) -> str:
        """Return the level in words."""
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return clients if self.rate is None else f"{clients}, {self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The model, its inputs, the runners (execution modes, peers, and names in `own`) and the load.

    Each level is measured for `seconds`, or with `count` requests. `warm_up` is a number of requests; None: windows of
    `window_s`, until the last ones differ by at most `stability` percent. The first level at which `percentile` of the
    first runner exceeds `threshold_ns` is the last one.
    """

    model: Path
    inputs: Sequence[Sequence[Array]]
    runners: tuple[str, ...]
    shapes: Mapping[str | int, tuple[int, ...]] = field(default_factory=dict)
    signature: str | None = None
    clients: tuple[int, ...] = (1,)
    rates: tuple[float | None, ...] = (None,)
    distribution: str = "constant"
    seed: int = 0
    seconds: float = 10.0
    count: int | None = None
    warm_up: int | None = None
    window_s: float = 0.5
    stability: float = 10.0
    percentile: str = "p99"
    threshold_ns: int | None = None
    device: str | None = None
    threads: int | None = None
    connect: str | None = None
    own: Mapping[str, OwnRunner] = field(default_factory=dict)
    hosted: OpenedFile | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        assert self.percentile in REPORTED

    @property
    def rounds(self) -> int:
        """The number of parts in which each runner is measured."""
        return 1 if len(self.runners) == 1 else ROUNDS

    def levels(self) -> Iterator[LoadLevel]:
        """Yield the levels in the order in which they are measured."""
        for clients in self.clients:
            for rate in self.rates:
                yield LoadLevel(clients, rate)

    def trial(self, level: LoadLevel, number: int) -> Load:
        """Return one of `rounds` parts of the load; its `number` is also the seed of its arrivals."""
        count = None if self.count is None else len(range(number, self.count, self.rounds))
        return self._load(level, self.seconds / self.rounds, count, self.seed + number)

    def warm_up_load(self, level: LoadLevel) -> Load:
        """Return the load of the warm-up, or of one of its windows."""
        if self.warm_up is not None:
            return self._load(level, self.seconds, self.warm_up, self.seed)
        # In an open loop a window needs some requests, however few there are.
        seconds = self.window_s if level.rate is None else max(self.window_s, 10 / level.rate)
        return self._load(level, seconds, None, self.seed)

    def _load(self, level: LoadLevel, seconds: float, count: int | None, seed: int) -> Load:
        return Load(seconds, count, level.rate, self.distribution, seed)


# ----------------------------------------------------------------------------------------------------------------------
# The measurement.


MAX_WINDOWS = 10  # of a warm-up
_STAGE_EXECUTIONS = 200
Progress = Callable[[str], object]
"""Called with a text about ten times a second, and whenever that changes."""


@dataclass(slots=True)
class MeasuredLoad:
    """The trials of one runner at one level; `is_stable` is None after a warm-up of fixed length.

    `others_ns` is the CPU time that processes that take no part used during the trials, which took `elapsed_ns`.
    """

    runner: str
    level: LoadLevel
    details: dict[str, str | int | float]
    windows: list[WarmUpWindow] = field(default_factory=list)
    is_stable: bool | None = None
    trials: list[LoadResult] = field(default_factory=list)
    pss_bytes: int = 0
    processes: int = 0
    others_ns: int = 0
    elapsed_ns: int = 0

    def latency_ns(self, name: str) -> int:
        """Return a percentile of all requests."""
        return percentile(np.sort(np.concatenate([trial.latencies for trial in self.trials])), REPORTED[name])


@dataclass(slots=True)
class LoadMeasurements:
    """All measured loads, and the reason for each missing runner."""

    loads: list[MeasuredLoad] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def measure_plan(plan: LoadPlan, progress: Progress = lambda _: None) -> LoadMeasurements:
    """Measure all levels of the plan; blocks until that is done.

    Raises:
        BenchmarkFailed: If a runner fails, or there is no request at a level.
        NnfmqError: If the driver cannot be started.
    """
    found = LoadMeasurements()
    with _driver(plan) as target:
        for clients in plan.clients:
            with ExitStack() as stack:
                groups = _start(plan, clients, target, found, stack, progress)
                for level in (level for level in plan.levels() if level.clients == clients):
                    measured = _level(plan, level, groups, progress)
                    found.loads += measured
                    if _exceeds(plan, measured):
                        return found
    return found


@contextmanager
def _driver(plan: LoadPlan) -> Iterator[str | None]:
    """Yield the driver that clients connect to. Several need one that listens; it is started unless one runs."""
    if plan.connect is not None or max(plan.clients) == 1:
        yield plan.connect
        return
    try:
        connect(embedded=False).close()
    except DeviceUnavailable:
        with kept_daemon() as driver:
            yield driver.socket
    else:
        yield None


def _start(
    plan: LoadPlan, clients: int, target: str | None, found: LoadMeasurements, stack: ExitStack, progress: Progress
) -> dict[str, RunnerGroup]:
    """Return the groups of the runners that can run here, and note the others in `found`."""
    groups: dict[str, RunnerGroup] = {}
    for name in plan.runners:
        if name in found.missing:
            continue
        text = f"{name}: loading the model"
        progress(text)
        job = RunnerJob(
            name, plan.model, plan.shapes, plan.signature, plan.inputs, plan.device, plan.threads, target,
            plan.own.get(name), plan.hosted, plan.deterministic,
        )  # fmt: skip
        try:
            groups[name] = stack.enter_context(started_group(name, [job] * clients, partial(progress, text)))
        except RunnerUnavailable as reason:
            found.missing[name] = str(reason)
    return groups


def _level(plan: LoadPlan, level: LoadLevel, groups: dict[str, RunnerGroup], progress: Progress) -> list[MeasuredLoad]:
    measured = {name: MeasuredLoad(name, level, group.details) for name, group in groups.items()}
    for name, group in groups.items():
        _wait_until_idle(groups)
        _warm_up(plan, measured[name], group, progress)
    for number in range(plan.rounds):
        for name in rotated(list(groups), number):
            if len(groups) > 1:
                _wait_until_idle(groups)
            _trial(plan, measured[name], groups[name], number, progress)
    for name, load in measured.items():
        load.pss_bytes, load.processes = groups[name].pss_bytes(), len(groups[name].pids)
        if not any(trial.latencies.size for trial in load.trials):
            raise BenchmarkFailed(f"{name}: no request in {plan.seconds:g} s; give a longer --duration")
    return list(measured.values())


def _wait_until_idle(groups: dict[str, RunnerGroup]) -> None:
    for group in groups.values():
        group.wait_until_idle()


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names, rotated by `number`, so that each of them is first in turn."""
    first = number % max(1, len(names))
    return [*names[first:], *names[:first]]


def _warm_up(plan: LoadPlan, load: MeasuredLoad, group: RunnerGroup, progress: Progress) -> None:
    name, window = f"{load.runner}, {load.level.text()}: warm-up", plan.warm_up_load(load.level)
    tick = partial(progress, name)
    if plan.warm_up is not None:
        group.run(window, tick=tick)
        return
    while len(load.windows) < MAX_WINDOWS and not are_stable(load.windows, plan.stability):
        result = group.run(window, tick=tick)
        if not result.latencies.size:
            break
        latency_ns = percentile(np.sort(result.latencies), 50)
        load.windows.append(WarmUpWindow(latency_ns, result.latencies.size * 1e9 / result.wall_ns))
        tick = partial(progress, f"{name}, p50 {latency_ns / 1000:,.1f} µs")
    load.is_stable = len(load.windows) >= STABLE_WINDOWS and are_stable(load.windows, plan.stability)


def _trial(plan: LoadPlan, load: MeasuredLoad, group: RunnerGroup, number: int, progress: Progress) -> None:
    known = f", p99 {load.latency_ns('p99') / 1000:,.1f} µs" if load.trials else ""
    text = f"{load.runner}, {load.level.text()}: part {number + 1} of {plan.rounds}{known}"
    progress(text)
    is_last = number == plan.rounds - 1
    stages = _STAGE_EXECUTIONS if is_last else 0
    others, begin_ns = OtherProcesses(group.pids), time.monotonic_ns()
    load.trials.append(group.run(plan.trial(load.level, number), stages=stages, tick=partial(progress, text)))
    load.elapsed_ns += time.monotonic_ns() - begin_ns
    load.others_ns += others.used_ns()


def _exceeds(plan: LoadPlan, measured: Sequence[MeasuredLoad]) -> bool:
    """Return True if the first runner's percentile is above the threshold."""
    return (
        plan.threshold_ns is not None and bool(measured) and measured[0].latency_ns(plan.percentile) > plan.threshold_ns
    )
