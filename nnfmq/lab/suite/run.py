"""Run the suite: a driver, and one scenario after the other, each with processes of its own.

    plan = SuitePlan(model, inputs=[image], own=my_client, minutes=1)
    report = suite_report(run_suite(plan))

Whatever a scenario starts ends with it, and with this process, also if that is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnfmq.lab import placement
from nnfmq.lab.bench.runner import Load, OpenedFile, RunnerJob
from nnfmq.lab.bench.steps import Array
from nnfmq.lab.child_processes import BenchmarkFailed, RunnerUnavailable
from nnfmq.lab.conditions import machine
from nnfmq.lab.listening_driver import kept_daemon
from nnfmq.lab.stress.counters import OtherProcesses
from nnfmq.lab.stress.machine_load import started_loads
from nnfmq.lab.suite.clients import OwnClient, SuiteClients, SuiteJob, SuiteRequests, started_suite_clients
from nnfmq.lab.suite.peer_death import DeathTimes, deaths_in, started_neighbours
from nnfmq.lab.suite.scenarios import SCENARIOS, SuiteScenario, seconds_of
from nnfmq.lab.suite.thresholds import SuiteThresholds, read_thresholds

__all__ = ["ScenarioRecord", "SuitePlan", "SuiteProgress", "SuiteRun", "run_suite"]

_LEAD_NS = 100_000_000  # until the begin: all processes have received it
_SEEDS = 97


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """The model, one set of its inputs, who executes it, and what is measured.

    Attributes:
        own: The client function of the user; None: the model is executed in `mode`.
        client_class: The class of the measured clients; None: what the driver decides.
        minutes: How long all scenarios take together, without their preparations.
        connect: The socket of a driver; None: one that is started, and ends with the suite.
        is_compared: Whether outputs must be equal to the first ones; not those of a model with states.
    """

    model: Path
    inputs: Sequence[Array]
    own: OwnClient | None = None
    minutes: float = 10.0
    thresholds: SuiteThresholds = field(default_factory=read_thresholds)
    scenarios: Sequence[str] = tuple(SCENARIOS)
    mode: str = "burst"
    shapes: Mapping[str | int, tuple[int, ...]] = field(default_factory=dict)
    signature: str | None = None
    device: str | None = None
    hosted: OpenedFile | None = None
    client_class: str | None = None
    connect: str | None = None
    is_compared: bool = True
    seed: int = 0

    def job(self, socket: str) -> SuiteJob:
        """Return the job of the clients of a driver."""
        runner = RunnerJob(
            self.mode, self.model, self.shapes, self.signature, [self.inputs], self.device, None, socket,
            hosted=self.hosted,
        )  # fmt: skip
        return SuiteJob(runner, self.own, self.is_compared, self.client_class)

    def load(self, seconds: float) -> Load:
        """Return the load of a scenario that takes so long."""
        load = self.thresholds.load
        return Load(seconds, None, load.rate, load.arrivals, self.seed)


@dataclass(slots=True)
class ScenarioRecord:
    """A scenario, and what was measured in it.

    Attributes:
        seconds: How long its load takes.
        clients: The number of measured clients.
        requests: None if there are none, because of `reason`, or because it was interrupted before.
        reason: Why it has no result; `is_skipped` if it is not possible on this machine.
        growth_bytes: The growth of the memory that only the driver, the measured clients or their workers have.
        others_ns: CPU time of processes that took no part.
        stolen_ns: CPU time that a hypervisor gave to other machines.
    """

    scenario: SuiteScenario
    seconds: float
    clients: int = 1
    requests: SuiteRequests | None = None
    details: dict[str, Any] = field(default_factory=dict)
    deaths: DeathTimes | None = None
    growth_bytes: int = 0
    others_ns: int = 0
    stolen_ns: int = 0
    wall_ns: int = 0
    reason: str = ""
    is_skipped: bool = False
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """The measurements of a plan: the conditions before, and a record of each scenario that was begun."""

    plan: SuitePlan
    conditions: dict[str, Any]
    records: list[ScenarioRecord] = field(default_factory=list)


class SuiteProgress:
    """Gets what `run_suite` does. These methods do nothing; a subclass may show it."""

    def update(self, text: str, share: float) -> None:
        """Called about ten times a second; `share`, from 0 to 1, of all scenarios is done."""

    def finished(self, record: ScenarioRecord) -> None:
        """Called after each scenario."""


def run_suite(plan: SuitePlan, progress: SuiteProgress | None = None) -> SuiteRun:
    """Measure the scenarios of the plan, and return what was measured; blocks until that is done.

    Ctrl-C ends it: what was measured until then is returned. A scenario that fails has the reason in its record.

    Raises:
        BenchmarkFailed: If the driver does not start.
    """
    shown, run = progress or SuiteProgress(), SuiteRun(plan, machine())
    records = run.records
    seconds = seconds_of(plan.scenarios, plan.minutes)
    total_s = sum(seconds.values())
    try:
        shown.update("the driver starts", 0.0)
        with _driver(plan.connect) as socket:
            for name in plan.scenarios:
                record = ScenarioRecord(SCENARIOS[name], seconds[name])
                before_s = sum(each.seconds for each in records)
                records.append(record)
                _measure(plan, socket, record, _Ticks(shown, record, len(records), len(seconds), before_s, total_s))
                shown.finished(record)
                if record.is_interrupted:
                    break
    except KeyboardInterrupt:
        for record in records[-1:]:
            record.is_interrupted = True
    return run


@contextmanager
def _driver(existing: str | None) -> Iterator[str]:
    if existing is not None:
        yield existing
        return
    with kept_daemon() as daemon:
        yield daemon.socket


@dataclass(slots=True)
class _Ticks:
    """Tells the progress of a scenario."""

    progress: SuiteProgress
    record: ScenarioRecord
    number: int
    count: int
    before_s: float
    total_s: float
    begin_ns: int = 0
    """Of the load; 0: it is being prepared."""

    def __call__(self) -> None:
        name, seconds = self.record.scenario.name, self.record.seconds
        text = f"{self.number} of {self.count}: {name}"
        done_s = 0.0
        if self.begin_ns:
            done_s = min(seconds, max(0.0, (time.monotonic_ns() - self.begin_ns) / 1e9))
            text += f", {int(done_s)} of {seconds:.0f} s"
        else:
            text += ", the clients start"
        self.progress.update(text, (self.before_s + done_s) / self.total_s)


def _measure(plan: SuitePlan, socket: str, record: ScenarioRecord, ticks: _Ticks) -> None:
    """Measure a scenario, all of whose processes end."""
    scenario, seconds, job = record.scenario, record.seconds, plan.job(socket)
    record.clients = plan.thresholds.load.clients if scenario.has_many_clients else 1
    # A driver that runs already may have compiled the models of an earlier suite.
    seed = plan.seed if plan.connect is None else 1 + os.getpid() % _SEEDS
    try:
        with ExitStack() as stack:
            clients = stack.enter_context(started_suite_clients(job, record.clients, ticks))
            loads = stack.enter_context(started_loads(scenario.loads(seconds), socket, seed))
            deaths = deaths_in(seconds) if scenario.has_deaths else 0
            neighbours = stack.enter_context(started_neighbours(job.runner, deaths, ticks))
            record.deaths = neighbours.times if scenario.has_deaths else None
            ticks.begin_ns = time.monotonic_ns() + _LEAD_NS
            loads.begin(ticks.begin_ns)
            neighbours.begin(ticks.begin_ns, seconds)

            def tick() -> None:
                neighbours.kill_due()
                ticks()

            _execute(plan, clients, record, ticks.begin_ns, tick)
    except RunnerUnavailable as reason:
        record.reason, record.is_skipped = str(reason), True
    except BenchmarkFailed as error:
        record.reason = str(error)


def _execute(
    plan: SuitePlan, clients: SuiteClients, record: ScenarioRecord, begin_ns: int, tick: Callable[[], object]
) -> None:
    """Let the clients execute the load, and record what it takes."""
    pids = [*clients.pids, clients.driver_pid]
    private_bytes, stolen_ns, others = _private_bytes(pids), _stolen_ns(), OtherProcesses([clients.driver_pid])
    record.details = clients.details
    clients.begin(plan.load(record.seconds), begin_ns)
    try:
        record.requests = clients.finish(record.seconds, tick)
    except KeyboardInterrupt:
        record.is_interrupted = True
        record.requests = clients.stop()
    record.wall_ns = time.monotonic_ns() - begin_ns
    record.growth_bytes = _private_bytes(pids) - private_bytes
    record.others_ns, record.stolen_ns = others.used_ns(), _stolen_ns() - stolen_ns


def _private_bytes(pids: Sequence[int]) -> int:
    return sum(memory.private_dirty for pid in pids if (memory := placement.memory_of(pid)) is not None)


def _stolen_ns() -> int:
    """Return the time in which a hypervisor ran other machines on this one's CPUs: `steal` of proc(5)."""
    words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)
    return int(words[8]) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
