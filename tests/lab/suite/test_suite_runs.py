"""Whole suites of some tenths of a second with real driver processes: what is measured, and what survives whom."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Process, short_folder

import nnfmq
from nnfmq.base.processes import allowed_cpus, children, descendants
from nnfmq.lab.suite.report import suite_report
from nnfmq.lab.suite.run import ScenarioRecord, SuitePlan, SuiteProgress, run_suite
from nnfmq.lab.suite.scenarios import SCENARIOS
from nnfmq.lab.suite.thresholds import SuiteLoad, SuiteThresholds

DIGITS = nnfmq.example_path("digits.tflite")
ONES = [np.ones((1, 8, 8, 1), np.float32)]
# With such a file `tempfile` looks whether a folder is writable, when multiprocess imports dill in a child; it stays
# if the child is killed in this moment.
_PROBE = re.compile(r"[a-z0-9_]{8}")
LOAD = SuiteLoad(rate=50.0, arrivals="poisson", deadline_ms=50.0, clients=2)


def plan(*names: str, seconds: float = 0.4, limits: dict[str, float] | None = None) -> SuitePlan:
    """A plan in which each scenario takes so long; the soak takes four times as long."""
    shares = sum(SCENARIOS[name].share for name in names)
    thresholds = SuiteThresholds(LOAD, dict.fromkeys(SCENARIOS, limits or {}))
    return SuitePlan(
        DIGITS, ONES, minutes=shares * seconds / 60, thresholds=thresholds, scenarios=names, device="reference"
    )


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each suite there is no process that it has started, and no file."""
    before = set(descendants(os.getpid()))
    with short_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))  # of the child process that has the driver
        yield
        assert [path for path in folder.iterdir() if not _PROBE.fullmatch(path.name)] == []
    assert set(descendants(os.getpid())) <= before


class Acting(SuiteProgress):
    """Calls functions, each once when the text of the progress contains a part."""

    def __init__(self, **actions: Callable[[], object]) -> None:
        self._actions = {part.replace("__", ", ").replace("_", " "): act for part, act in actions.items()}
        self.finished_scenarios: list[str] = []
        self.shares: list[float] = []

    def update(self, text: str, share: float) -> None:
        self.shares.append(share)
        for part in [part for part in self._actions if part in text]:
            self._actions.pop(part)()

    def finished(self, record: ScenarioRecord) -> None:
        self.finished_scenarios.append(record.scenario.name)


def interrupt() -> None:
    raise KeyboardInterrupt


class Counting(Acting):
    """Counts the processes while the load of each scenario runs, and this process's children after it."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, int] = {}
        self.children_after: list[set[int]] = []

    def update(self, text: str, share: float) -> None:
        super().update(text, share)
        scenario = re.search(r": ([\w-]+), \d+ of", text)
        if scenario is not None:
            count = len(descendants(os.getpid()))
            self.processes[scenario[1]] = max(count, self.processes.get(scenario[1], 0))

    def finished(self, record: ScenarioRecord) -> None:
        super().finished(record)
        self.children_after.append(set(children(os.getpid())))


@pytest.mark.full
def test_every_scenario_is_measured_with_its_load_and_its_deaths() -> None:
    of_all = plan(*SCENARIOS, limits={"wrong_outputs": 0, "max_ms": 1e6, "growth_mib": 1e6})
    progress = Counting()
    before = set(children(os.getpid()))
    report = suite_report(run_suite(of_all, progress))
    assert {
        result["scenario"]: (result["outcome"], result["reason"]) for result in report["scenarios"]
    } == dict.fromkeys(SCENARIOS, ("passed", ""))
    assert progress.finished_scenarios == list(SCENARIOS)
    for result in report["scenarios"]:
        assert result["requests"] > 0 and result["wrong_outputs"] == 0
        assert result["clients"] == (2 if result["scenario"] == "many-clients" else 1)
        assert result["details"]["device"] == "reference"
    deaths = next(result["deaths_ns"] for result in report["scenarios"] if result["deaths_ns"] is not None)
    assert len(deaths["client"]) == len(deaths["worker"]) == 1
    assert min(*deaths["client"], *deaths["worker"]) > 0
    # Beside those of the scenario idle: loads, or another client with its worker.
    more = {
        "busy-cores": allowed_cpus(),
        "memory": 1 + allowed_cpus(),
        "compile": 2,
        "many-clients": 2,
        "peer-death": 2,
    }
    assert all(progress.processes[name] >= progress.processes["idle"] + count for name, count in more.items())
    assert all(len(after - before) == 1 for after in progress.children_after)  # the one that has the driver
    assert progress.shares == sorted(progress.shares) and 0.5 < progress.shares[-1] <= 1


def worker_of_the_measured_client() -> int:
    """The supervisor's child with the client as its peer: in the scenario idle the only one that executes."""
    (pid,) = (pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}/comm").read_text() == "nnfmq-worker\n")
    return pid


def test_the_death_of_the_worker_is_the_reason_of_its_scenario_and_the_next_one_is_measured() -> None:
    def kill_worker() -> None:
        with Process(worker_of_the_measured_client()) as worker:
            worker.kill()

    of_two = plan("idle", "compile", seconds=60.0)
    report = suite_report(run_suite(of_two, Acting(idle__0_of_60_s=kill_worker, compile__1_of_60_s=interrupt)))
    idle, compiling = report["scenarios"]
    assert idle["outcome"] == "error" and "a measured client: " in idle["reason"]
    assert compiling["requests"] > 0 and compiling["reason"] == ""


def test_an_interrupted_suite_has_what_was_measured_until_then() -> None:
    of_two = plan("idle", "soak", seconds=60.0)
    report = suite_report(run_suite(of_two, Acting(idle__1_of_60_s=interrupt)))
    idle, soak = report["scenarios"]
    assert report["is_interrupted"] and idle["is_interrupted"]
    assert 1e9 <= idle["wall_ns"] < 30e9 and idle["requests"] > 0 and idle["latency_ns"]["p50"] > 0
    assert (soak["outcome"], soak["requests"]) == ("not run", 0)


def test_an_interrupt_before_the_load_leaves_scenarios_that_were_not_run() -> None:
    of_one = plan("idle")
    report = suite_report(run_suite(of_one, Acting(the_clients_start=interrupt)))
    assert report["is_interrupted"]
    assert report["scenarios"][0]["outcome"] == "not run"


def test_too_little_time_for_a_request_is_an_error() -> None:
    of_idle = plan("idle", seconds=1e-6)
    report = suite_report(run_suite(of_idle))
    assert report["scenarios"][0]["outcome"] == "error"
    assert "give more --minutes or a higher rate" in report["scenarios"][0]["reason"]
