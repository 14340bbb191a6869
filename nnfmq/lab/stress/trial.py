"""One trial, in which clients execute while disturbances happen, and the scenarios of all trials."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nnfmq.base.settings import BURST_CONTROLLER_POLLING_WINDOW, BURST_SERVER_POLLING_WINDOW
from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import GeneralFailure
from nnfmq.lab.bench.loops import intended_starts
from nnfmq.lab.bench.runner import RunnerJob
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.listening_driver import kept_daemon, kept_folder
from nnfmq.lab.machine_sampler import MachineSampler
from nnfmq.lab.placement import Cpus, choose
from nnfmq.lab.stress.attribution import SlowRequest, Thresholds, slow_requests
from nnfmq.lab.stress.clients import StressClient, StressTrial, started_clients
from nnfmq.lab.stress.counters import OtherProcesses, StatisticsArea
from nnfmq.lab.stress.disturbances import DisturbancePlan, draw_plan, prepared_actions, running_actions
from nnfmq.lab.stress.machine_load import started_loads
from nnfmq.lab.stress.records import RequestRecord, StressSample
from nnfmq.lab.stress.sampler import Sampler, Watched
from nnfmq.observe.causes import holders_text
from nnfmq.observe.machine_record import MachineRecord

__all__ = [
    "LOADS",
    "Scenario",
    "ScenarioPlan",
    "TrialRecords",
    "TrialSetup",
    "run_scenarios",
    "run_trial",
    "socket_and_folder",
]

_LEAD_NS = 100_000_000  # until the begin: the sampler starts meanwhile


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The place of a trial: the driver's socket, the CPUs of each client and its worker, and a folder for files."""

    socket: str
    cpus: Sequence[Cpus]
    folder: Path


@dataclass(frozen=True, slots=True)
class TrialRecords:
    """The requests of each client, and the samples of each client and its worker.

    `others_ns` is the CPU time of processes that took no part in the trial. `machine` has who used the CPUs meanwhile,
    those of `watched`, among others: the processes and CPUs of each client. `own_pid` is the process that measures.
    """

    begin_ns: int
    clients: Sequence[Sequence[RequestRecord]]
    samples: Sequence[Sequence[StressSample]]
    others_ns: int = 0
    machine: MachineRecord = field(default_factory=MachineRecord)
    watched: Sequence[Watched] = ()
    own_pid: int = field(default_factory=os.getpid)

    def latencies(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the latencies of all clients."""
        return np.array([record.latency for records in self.clients for record in records], np.int64)

    def slow_requests(self, thresholds: Thresholds | None = None) -> list[SlowRequest]:
        """Return the slow requests of all clients with their causes; each client has its own usual latency."""
        return [
            request
            for number, (records, samples) in enumerate(zip(self.clients, self.samples, strict=True))
            for request in slow_requests(records, samples, thresholds, partial(self._cpu_holders, number))
        ]

    def _cpu_holders(self, number: int, side: str, record: RequestRecord, waited_ns: int) -> tuple[str, int]:
        """Say who had the CPU for which a side of a client waited in a request, and how long this process had it."""
        if not self.watched:
            return "", 0
        each = self.watched[number]
        pid, cpu = (each.client, each.client_cpu) if side == "client" else (each.worker, each.worker_cpu)
        cpus = None if cpu is None else {cpu}
        holders = self.machine.holders((pid, 0), record.begin, record.end, waited_ns, cpus)
        own_ns = sum(holder.had_ns for holder in holders if holder.pid == self.own_pid)
        return holders_text(holders, waited_ns, is_sampled=self.machine.is_sampled), own_ns


def run_trial(
    clients: Sequence[StressClient], setup: TrialSetup, plan: DisturbancePlan, seconds: float, seed: int,
    tick: Callable[[], object] = lambda: None, rate: float | None = None,
) -> TrialRecords:  # fmt: skip
    """Run one trial; blocks until it is done. Stops and a CPU limit affect the first client or its worker.

    Raises:
        BenchmarkFailed: If a client or a load fails, or has no request, or a CPU limit is not possible here.
    """
    watched = [
        Watched(client.pid, client.worker, cpus.client, cpus.driver)
        for client, cpus in zip(clients, setup.cpus, strict=True)
    ]
    with ExitStack() as stack:
        statistics = _statistics_area(setup.socket, stack)
        loads = stack.enter_context(started_loads(plan.loads, setup.socket, seed))
        actions = stack.enter_context(prepared_actions(plan, clients[0].pid, clients[0].worker))
        for number, (client, cpus) in enumerate(zip(clients, setup.cpus, strict=True)):
            starts = None if rate is None else intended_starts(rate, seconds, "constant", number, len(clients))
            client.prepare(StressTrial(seconds, cpus, plan.work, setup.folder, starts), tick)
        begin_ns = time.monotonic_ns() + _LEAD_NS
        loads.begin(begin_ns)
        for client in clients:
            client.begin(begin_ns)
        others = OtherProcesses([clients[0].driver])
        machine = stack.enter_context(MachineSampler())
        sampler = stack.enter_context(Sampler(watched, clients[0].driver, statistics))
        with running_actions(actions, begin_ns):
            found = [client.finish(seconds, tick) for client in clients]
        others_ns = others.used_ns()
    if not all(found):
        raise BenchmarkFailed(f"no request in {seconds:g} s; give a longer --duration")
    return TrialRecords(begin_ns, found, sampler.samples, others_ns, machine.record, watched)


def _statistics_area(socket: str, stack: ExitStack) -> StatisticsArea:
    """Return the driver's statistics, mapped until the stack is closed; None if this user may not read them."""
    with connect(socket) as client:
        try:
            return stack.enter_context(client.statistics_memory()).view
        except GeneralFailure:
            return None


# ----------------------------------------------------------------------------------------------------------------------
# The scenarios of `nnfmq stress`: each combination of mode, clients, polling window, placement and load.
#
# Every polling window has a driver of its own, because a driver reads its window when it starts.


LOADS: dict[str, tuple[str, ...]] = {
    "none": (),
    "cpu": ("cpu-client", "cpu-worker"),
    "memory": ("memory",),
    "churn": ("churn",),
    "compile": ("compilation",),
    "faults": ("page-faults",),
    "gc": ("gc",),
    "stops": ("stops",),
    "throttle": ("throttling",),
}
"""Name of a load → its disturbances."""
Progress = Callable[[str], object]


class Scenario(NamedTuple):
    """The subject of one trial; `window_us` is None for the default."""

    mode: str
    clients: int
    window_us: int | None
    placement: str
    load: str

    def text(self) -> str:
        """Return the scenario in words; what is the default is left out."""
        clients = "" if self.clients == 1 else f", {self.clients} clients"
        window = "" if self.window_us is None else f", {self.window_us} µs"
        placement = "" if self.placement == "apart" else f", {self.placement}"
        return f"{self.mode}{clients}{window}{placement}: {self.load}"


@dataclass(frozen=True, slots=True)
class ScenarioPlan:
    """The job of the clients, and the values whose combinations are measured, `seconds` each.

    `rate` is how many requests per second all clients together begin; None: a closed loop.
    """

    job: RunnerJob
    modes: Sequence[str]
    clients: Sequence[int] = (1,)
    windows_us: Sequence[int | None] = (None,)
    placements: Sequence[str] = ("apart",)
    loads: Sequence[str] = ("none",)
    seconds: float = 2.0
    seed: int = 0
    rate: float | None = None

    def count(self) -> int:
        """Return the number of scenarios."""
        return len(list(product(self.modes, self.clients, self.windows_us, self.placements, self.loads)))


@contextmanager
def socket_and_folder(existing: str | None, window_us: int | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the socket of the given driver, or of one that runs meanwhile, and a folder for files.

    Nothing of them remains, also if this process is killed.

    Raises:
        BenchmarkFailed: If the driver does not start.
    """
    if existing is not None:
        with kept_folder() as folder:
            yield existing, folder
        return
    with kept_daemon(_windows(BURST_SERVER_POLLING_WINDOW.variable, window_us)) as daemon:
        yield daemon.socket, daemon.folder


def _windows(variable: str, window_us: int | None) -> dict[str, str]:
    return {} if window_us is None else {variable: str(window_us)}


def run_scenarios(plan: ScenarioPlan, progress: Progress) -> Iterator[tuple[Scenario, TrialRecords | str]]:
    """Yield each scenario with its records, or with the reason why it is not possible here.

    Raises:
        BenchmarkFailed: If the driver or a client fails.
    """
    number = 0
    for window_us in plan.windows_us:
        progress("the driver starts")
        with socket_and_folder(plan.job.connect, window_us) as (socket, folder):
            for mode, clients in product(plan.modes, plan.clients):
                for scenario, records in _of_group(plan, (mode, clients, window_us), socket, folder, number, progress):
                    number += 1
                    yield scenario, records


def _of_group(
    plan: ScenarioPlan, group: tuple[str, int, int | None], socket: str, folder: Path, number: int, progress: Progress
) -> Iterator[tuple[Scenario, TrialRecords | str]]:
    """Yield the scenarios of the same clients, which load the model once."""
    mode, count, window_us = group
    job = replace(plan.job, runner=mode, connect=socket)
    loading = partial(progress, f"{mode}: clients load the model: {count}")
    with started_clients(job, count, _windows(BURST_CONTROLLER_POLLING_WINDOW.variable, window_us), loading) as clients:
        for position, (placement, load) in enumerate(product(plan.placements, plan.loads), number):
            scenario = Scenario(mode, count, window_us, placement, load)
            progress(f"{position + 1} of {plan.count()}: {scenario.text()}")
            setup = TrialSetup(socket, [choose(placement, each) for each in range(count)], folder)
            yield scenario, _trial(plan, scenario, clients, setup, position, progress)


def _trial(
    plan: ScenarioPlan, scenario: Scenario, clients: Sequence[StressClient], setup: TrialSetup, position: int,
    progress: Progress,
) -> TrialRecords | str:  # fmt: skip
    names = LOADS[scenario.load]
    cpus = setup.cpus[0].client, setup.cpus[0].driver
    drawn = draw_plan(names, plan.seconds, cpus, random.Random(f"{plan.seed} {position}"))
    tick = partial(progress, f"{position + 1} of {plan.count()}: {scenario.text()}")
    run = partial(run_trial, clients, setup, drawn, plan.seconds, position, tick, plan.rate)
    if "throttling" not in names:
        return run()
    try:
        return run()
    except BenchmarkFailed as reason:
        return str(reason)  # a CPU limit needs permissions
