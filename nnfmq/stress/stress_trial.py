"""One trial: clients execute for some seconds while disturbances happen. The analysis gets the records alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nnfmq.hal.errors import GeneralFailure
from nnfmq.measure.cpu_pinning import Cpus
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.runtime.connect import connect
from nnfmq.stress.attribution import SlowRequest, Thresholds, slow_requests
from nnfmq.stress.compiler_usage import StatisticsArea
from nnfmq.stress.disturbances import DisturbancePlan, prepared_actions, running_actions
from nnfmq.stress.load_group import started_loads
from nnfmq.stress.other_processes import OtherProcesses
from nnfmq.stress.records import RequestRecord, StressSample
from nnfmq.stress.sampler import Sampler, Watched
from nnfmq.stress.stress_clients import StressClient
from nnfmq.stress.stress_protocol import StressTrial

__all__ = ["TrialRecords", "TrialSetup", "run_trial"]

_LEAD_NS = 100_000_000  # until the begin: the sampler starts meanwhile


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Where a trial runs: the driver's socket, the CPUs of each client and its worker, and a folder for files."""

    socket: str
    cpus: Sequence[Cpus]
    folder: Path


@dataclass(frozen=True, slots=True)
class TrialRecords:
    """The requests of each client, and the samples of each client and its worker.

    `others_ns` is the CPU time of processes that took no part in the trial.
    """

    begin_ns: int
    clients: Sequence[Sequence[RequestRecord]]
    samples: Sequence[Sequence[StressSample]]
    others_ns: int = 0

    def latencies(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the latencies of all clients."""
        return np.array([record.latency for records in self.clients for record in records], np.int64)

    def slow_requests(self, thresholds: Thresholds | None = None) -> list[SlowRequest]:
        """Return the slow requests of all clients with their causes; each client has its own usual latency."""
        return [
            request
            for records, samples in zip(self.clients, self.samples, strict=True)
            for request in slow_requests(records, samples, thresholds)
        ]


def run_trial(
    clients: Sequence[StressClient], setup: TrialSetup, plan: DisturbancePlan, seconds: float, seed: int,
    tick: Callable[[], object] = lambda: None,
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
        for client, cpus in zip(clients, setup.cpus, strict=True):
            client.prepare(StressTrial(seconds, cpus.client, cpus.driver, plan.work, str(setup.folder)), tick)
        begin_ns = time.monotonic_ns() + _LEAD_NS
        loads.begin(begin_ns)
        for client in clients:
            client.begin(begin_ns)
        others = OtherProcesses([clients[0].driver])
        sampler = stack.enter_context(Sampler(watched, clients[0].driver, statistics))
        with running_actions(actions, begin_ns):
            found = [client.finish(seconds, tick) for client in clients]
        others_ns = others.used_ns()
    if not all(found):
        raise BenchmarkFailed(f"no request in {seconds:g} s; give a longer --duration")
    return TrialRecords(begin_ns, found, sampler.samples, others_ns)


def _statistics_area(socket: str, stack: ExitStack) -> StatisticsArea:
    """Return the driver's statistics, mapped until the stack is closed; None if this user may not read them."""
    with connect(socket) as client:
        try:
            return stack.enter_context(client.statistics_memory()).view
        except GeneralFailure:
            return None
