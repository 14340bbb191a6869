"""The scenarios of `nnfmq stress`: each combination of mode, clients, polling window, placement and load.

Every polling window has a driver of its own, because a driver reads its window when it starts.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.listening_driver import started_daemon
from nnfmq.measure.runner_protocol import RunnerJob
from nnfmq.settings import BURST_CONTROLLER_POLLING_WINDOW, BURST_SERVER_POLLING_WINDOW
from nnfmq.stress.disturbances import draw_plan
from nnfmq.stress.stress_clients import StressClient, started_clients
from nnfmq.stress.stress_trial import TrialRecords, TrialSetup, run_trial

__all__ = ["LOADS", "Scenario", "ScenarioPlan", "driver_socket", "run_scenarios"]

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
    """What one trial measures; `window_us` is None for the default."""

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
    """The job of the clients, and the values whose combinations are measured, `seconds` each."""

    job: RunnerJob
    modes: Sequence[str]
    clients: Sequence[int] = (1,)
    windows_us: Sequence[int | None] = (None,)
    placements: Sequence[str] = ("apart",)
    loads: Sequence[str] = ("none",)
    seconds: float = 2.0
    seed: int = 0

    def count(self) -> int:
        """Return the number of scenarios."""
        return len(list(product(self.modes, self.clients, self.windows_us, self.placements, self.loads)))


@contextmanager
def driver_socket(existing: str | None, folder: Path, window_us: int | None = None) -> Iterator[str]:
    """Yield the socket of the given driver, or of one that runs meanwhile.

    Raises:
        BenchmarkFailed: If the driver does not start.
    """
    if existing is not None:
        yield existing
        return
    with started_daemon(folder, _windows(BURST_SERVER_POLLING_WINDOW.variable, window_us)) as daemon:
        yield daemon.socket


def _windows(variable: str, window_us: int | None) -> dict[str, str]:
    return {} if window_us is None else {variable: str(window_us)}


def run_scenarios(plan: ScenarioPlan, progress: Progress) -> Iterator[tuple[Scenario, TrialRecords | str]]:
    """Yield each scenario with its records, or with the reason why it is not possible here.

    Raises:
        BenchmarkFailed: If the driver or a client fails.
    """
    number = 0
    for window_us in plan.windows_us:
        with tempfile.TemporaryDirectory(prefix="nnfmq-") as name, ExitStack() as stack:
            folder = Path(name)
            progress("the driver starts")
            socket = stack.enter_context(driver_socket(plan.job.connect, folder, window_us))
            for mode, clients in product(plan.modes, plan.clients):
                for scenario, records in _of_group(plan, (mode, clients, window_us), socket, folder, number, progress):
                    number += 1
                    yield scenario, records


def _of_group(
    plan: ScenarioPlan, group: tuple[str, int, int | None], socket: str, folder: Path, number: int, progress: Progress
) -> Iterator[tuple[Scenario, TrialRecords | str]]:
    """Yield the scenarios of the same clients, which load the model once."""
    mode, count, window_us = group
    job = RunnerJob(
        mode, plan.job.model, plan.job.shapes, plan.job.signature, plan.job.inputs, plan.job.device, None, socket
    )
    loading = partial(progress, f"{mode}: {count} clients load the model")
    with started_clients(job, count, _windows(BURST_CONTROLLER_POLLING_WINDOW.variable, window_us), loading) as clients:
        for position, (placement, load) in enumerate(product(plan.placements, plan.loads), number):
            scenario = Scenario(mode, count, window_us, placement, load)
            progress(f"{position + 1} of {plan.count()}: {scenario.text()}")
            setup = TrialSetup(socket, [cpu_pinning.choose(placement, each) for each in range(count)], folder)
            yield scenario, _trial(plan, scenario, clients, setup, position, progress)


def _trial(
    plan: ScenarioPlan, scenario: Scenario, clients: Sequence[StressClient], setup: TrialSetup, position: int,
    progress: Progress,
) -> TrialRecords | str:  # fmt: skip
    names = LOADS[scenario.load]
    cpus = setup.cpus[0].client, setup.cpus[0].driver
    drawn = draw_plan(names, plan.seconds, cpus, random.Random(f"{plan.seed} {position}"))
    tick = partial(progress, f"{position + 1} of {plan.count()}: {scenario.text()}")
    if "throttling" not in names:
        return run_trial(clients, setup, drawn, plan.seconds, position, tick)
    try:
        return run_trial(clients, setup, drawn, plan.seconds, position, tick)
    except BenchmarkFailed as reason:
        return str(reason)  # a CPU limit needs permissions
