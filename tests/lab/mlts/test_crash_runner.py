"""Crash tests of real drivers and devices that crash or hang on purpose: what happened must be noticed and named.

The devices are plug-ins of the suite's own driver. The small model is one ADD.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.drivers import Daemon, InThread, Process, running_daemon, short_folder, until
from support.plugins import add_plugin, path_with

from nnfmq.base.processes import children
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.mlts import driver_watch
from nnfmq.lab.mlts.crash_runner import CrashOptions, CrashResult, run_crash_test
from nnfmq.lab.mlts.crash_tests import (
    CRASH_TESTS,
    SELF_TESTS,
    CrashOutcome,
    CrashTest,
    GraphSize,
    KilledClients,
    Workload,
)
from nnfmq.lab.mlts.driver_watch import DriverLog, DriverWatch, RunningDriver
from nnfmq.lab.mlts.stress_models import SMALL_MODELS, ModelCost

ADD = [ModelCost(SMALL_MODELS[0])]
QUICK = CrashOptions(duration_s=1.0, grace_s=3.0)
PATIENT = CrashOptions(duration_s=1.0, grace_s=20.0)

DEVICES = """
import ctypes, os, signal, threading
from nnfmq.engines import interpreter
from nnfmq.engines.function import FunctionProgram
from nnfmq.driver.devices.device import DeviceBase


class Base(DeviceBase):
    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return FunctionProgram(model, self.run)


class Hanging(Base):
    name = "test-hanging"

    def run(self, inputs):
        threading.Event().wait()


class HangingInCompile(Base):
    name = "test-compiling"

    def compile(self, model):
        threading.Event().wait()


class Crashing(Base):
    name = "test-crashing"

    def run(self, inputs):
        # With the GIL: a thread that runs meanwhile could make faulthandler, which reads all stacks, crash, too.
        getattr(ctypes.PyDLL(None), "raise")(signal.SIGSEGV)


class Failing(Base):
    name = "test-failing"

    def run(self, inputs):
        raise ValueError("broken")


class Wrong(Base):
    name = "test-wrong"
    count = 0

    def run(self, inputs):
        self.count += 1
        return [inputs[0] + self.count]


class FailingOnGraphs(Base):
    name = "test-graphs"

    def compile(self, model):
        return super().compile(model) if len(model.main.operations) > 1 else interpreter.prepare(model)

    def run(self, inputs):
        raise ValueError("broken")


class CrashingInSilence(Base):
    name = "test-silent"

    def compile(self, model):
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSEGV)).start()
        return interpreter.prepare(model)
"""
NAMES = ("Hanging", "HangingInCompile", "Crashing", "Failing", "Wrong", "FailingOnGraphs", "CrashingInSilence")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a driver with the devices."""
    site = tmp_path_factory.mktemp("site")
    add_plugin(site, "failing", DEVICES, {name.lower(): f"failing:{name}" for name in NAMES}, "nnfmq.devices")
    return path_with(site)


def small_test(workload: Workload = Workload.INFERENCE, **fields: object) -> CrashTest:
    return replace(CrashTest("test", workload, 60.0), **fields)  # type: ignore[arg-type]


def run(test: CrashTest, device: str = "reference", options: CrashOptions = QUICK) -> CrashResult:
    return run_crash_test(test, device, ADD, options)


@pytest.mark.parametrize("test", SELF_TESTS, ids=lambda test: test.name)
def test_TST_11_the_self_tests_have_their_outcomes(test: CrashTest) -> None:
    result = run(test)
    assert (result.outcome, result.has_failed) == (test.expected, False), result.reason
    assert bool(result.reason) == (test.expected is not CrashOutcome.SUCCESS)


@pytest.mark.full
@pytest.mark.parametrize(("device", "outcome", "reason"), [
    ("test-hanging", CrashOutcome.HANG, "not"),
    ("test-compiling", CrashOutcome.HANG, "not"),
    ("test-crashing", CrashOutcome.CRASH, "worker|is gone|is dead|Segmentation fault"),
    ("test-failing", CrashOutcome.FAILURE, "broken"),
    ("test-wrong", CrashOutcome.FAILURE, "differs|another result"),
])  # fmt: skip
@pytest.mark.parametrize("in_process", [False, True])
def test_TST_11_a_device_that_crashes_or_hangs_is_noticed(
    variables: dict[str, str], device: str, outcome: CrashOutcome, reason: str, in_process: bool
) -> None:
    result = run(small_test(threads=2, in_process=in_process), device, replace(QUICK, variables=variables))
    assert result.outcome is outcome and result.has_failed
    assert re.search(reason, result.reason), result.reason


def test_TST_11_a_crash_that_no_call_shows_is_in_the_log(variables: dict[str, str]) -> None:
    result = run(small_test(Workload.NO_OP), "test-silent", replace(QUICK, variables=variables))
    assert result.outcome is CrashOutcome.CRASH, result.reason


def test_TST_11_the_death_of_the_driver_is_noticed_in_the_process_table() -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        options = replace(PATIENT, duration_s=20.0, driver=running(daemon))
        started = InThread.start(lambda: run(small_test(), options=options))
        until(lambda: len(daemon.process.children()) >= 2, "the client and the liveness checker are connected")
        daemon.kill()
        result = started.wait().value
        assert result.outcome is CrashOutcome.CRASH
        assert f"the driver, process {daemon.program.pid}, has exited" in result.reason
        daemon.path.unlink()


@pytest.mark.parametrize("workload", [Workload.INFERENCE, Workload.COMPILATION, Workload.MAPPED_COMPILATION])
@pytest.mark.parametrize("device", ["reference", "sample-minimal"])
def test_TST_11_healthy_devices_pass(workload: Workload, device: str) -> None:
    result = run(small_test(workload, threads=3), device, PATIENT)
    assert (result.outcome, result.reason) == (CrashOutcome.SUCCESS, "")
    assert sum(result.codes.values()) > 0


@pytest.mark.full
def test_latency_beside_a_compilation_is_measured() -> None:
    result = run(small_test(Workload.DEGRADATION), options=PATIENT)
    slowdown = "the mean latency is"  # of a model of one operation it is that of a call
    assert result.outcome is CrashOutcome.SUCCESS or slowdown in result.reason
    assert {"executed", "prepared"} <= set(result.codes)


@pytest.mark.parametrize("workload", [Workload.RANDOM_COMPILATION, Workload.RANDOM_INFERENCE])
def test_TST_11_random_graphs_are_prepared_and_executed(workload: Workload) -> None:
    graphs = GraphSize(10, 1000, count=3)
    result = run(small_test(workload, graphs=graphs), options=replace(PATIENT, duration_s=20.0))
    assert result.outcome is CrashOutcome.SUCCESS, result.reason
    assert sum(result.codes.values()) == 3 and result.codes["success"] >= 1


@pytest.mark.full
def test_TST_11_a_random_graph_that_fails_is_dumped(variables: dict[str, str], tmp_path: Path) -> None:
    options = replace(PATIENT, variables=variables, dump_to=str(tmp_path), duration_s=10.0)
    graphs = GraphSize(2, 10, count=5)
    result = run(small_test(Workload.RANDOM_INFERENCE, graphs=graphs), "test-graphs", options)
    assert result.outcome is CrashOutcome.FAILURE
    logs = {"test-graphs-test-driver.log", "test-graphs-test-clients.log"}
    (path,) = (path for path in tmp_path.iterdir() if path.name not in logs)
    assert {path.name for path in tmp_path.iterdir()} == {path.name, *logs}
    assert "failed execution" in result.reason and str(path) in result.reason
    ((_, line),) = testmodels.lines(path)
    assert testmodels.read(line).name == path.stem


@pytest.mark.full
def test_TST_11_killed_clients_do_not_harm_the_driver() -> None:
    test = small_test(Workload.COMPILATION, processes=3, killed=KilledClients.ALL)
    result = run(test, options=replace(PATIENT, duration_s=3.0))
    assert (result.outcome, result.killed) == (CrashOutcome.SUCCESS, 3), result.reason


@pytest.mark.full
def test_TST_11_clients_that_kill_themselves_are_replaced() -> None:
    test = small_test(processes=2, killed=KilledClients.SHARE, killed_share=1.0)
    result = run(test, options=replace(PATIENT, duration_s=4.0))
    assert result.outcome is CrashOutcome.SUCCESS and result.killed >= 2, result.reason


@pytest.mark.full
def test_TST_11_the_stacks_of_a_worker_that_crashed_are_kept(variables: dict[str, str], tmp_path: Path) -> None:
    result = run(small_test(), "test-crashing", replace(QUICK, variables=variables, dump_to=str(tmp_path)))
    assert result.outcome is CrashOutcome.CRASH
    text = (tmp_path / "test-crashing-test-driver.log").read_text()
    assert "Fatal Python error: Segmentation fault" in text and "in run" in text


def test_a_client_that_ends_before_it_is_killed_is_a_failure() -> None:
    test = small_test(Workload.NO_OP, killed=KilledClients.ALL)
    result = run(test, options=replace(PATIENT, duration_s=60.0))  # ends long before
    assert result.outcome is CrashOutcome.FAILURE and "before it was killed" in result.reason


def test_a_device_without_models_is_unsupported() -> None:
    result = run_crash_test(CRASH_TESTS[0], "reference", [], QUICK)
    assert result.outcome is CrashOutcome.UNSUPPORTED and not result.has_failed


def test_a_worker_that_exits_after_its_client_has_reported_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner may see the exit of the worker first."""
    exits = iter([driver_watch.Observation(CrashOutcome.CRASH, "a worker")])
    monkeypatch.setattr(DriverWatch, "exited_worker", lambda _watch: next(exits, None))
    assert run(small_test(Workload.NO_OP)).outcome is CrashOutcome.SUCCESS
    assert next(exits, None) is None


def test_TST_11_a_worker_that_exits_while_its_client_runs_is_a_crash(watched: DriverWatch) -> None:
    assert watched.exited_worker() is None
    until(lambda: bool(children(watched._driver.pid)), "the liveness checker is connected")
    (pid,) = children(watched._driver.pid)
    assert watched.add_worker(pid, "client 0") is None
    watched._liveness.stop()
    until(lambda: watched.exited_worker() is not None, "the worker of the liveness checker has exited")
    found = watched.exited_worker()
    assert found is not None and f"client 0: its worker, process {pid}, has exited" in found.reason
    watched.remove_worker(pid)
    assert watched.exited_worker() is None


# ------------------------------------------------------------------------------------------------ the watch


def running(daemon: Daemon) -> RunningDriver:
    return RunningDriver(str(daemon.path), daemon.program.pid, is_own=True)


@pytest.fixture
def watched() -> Iterator[DriverWatch]:
    """The watch of a driver that is well."""
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock") as daemon,
        DriverWatch(running(daemon), "reference", ADD[0].name, 2.0) as watch,
    ):
        yield watch


def test_a_driver_that_is_well_has_no_observation(watched: DriverWatch) -> None:
    assert watched.observe() is None
    assert watched.finish() is None


def test_TST_11_a_worker_that_does_not_exit_after_its_client_is_a_hang(
    watched: DriverWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: bool(children(watched._driver.pid)), "the liveness checker is connected")
    with Process(children(watched._driver.pid)[0]) as worker:
        monkeypatch.setattr(driver_watch, "children", lambda _pid: [worker.pid])
        monkeypatch.setattr(watched, "_limit_s", 0.0)
        found = watched._left_workers()
    assert found is not None and found.outcome is CrashOutcome.HANG
    assert f"have not exited: {worker.pid}" in found.reason


def test_workers_of_other_clients_are_not_waited_for(watched: DriverWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_running", replace(watched._running, is_own=False))
    until(lambda: bool(children(watched._driver.pid)), "the liveness checker is connected")
    assert watched._left_workers() is None
    (worker,) = children(watched._driver.pid)
    assert watched.add_worker(worker, "client 0") is None
    assert watched._new_children() == [worker]


def test_the_worker_of_a_client_that_is_gone_already_is_a_crash(watched: DriverWatch) -> None:
    found = watched.add_worker(2**22 + 1, "client 0")  # above the largest pid
    assert found is not None and found.outcome is CrashOutcome.CRASH


def test_new_lines_of_a_log_are_complete_lines_after_the_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    log = DriverLog(path)
    with path.open("ab") as file:
        file.write(b"one\ntw")
        file.flush()
        assert log.new_lines() == ["one"]
        file.write(b"o\n")
        file.flush()
    assert log.new_lines() == ["two"] and log.new_lines() == [] and DriverLog(None).new_lines() == []


@pytest.mark.parametrize(("line", "reports"), [
    ("worker 12 ended with status -11", True), ("the compile server ended with status 1", True),
    ("an internal error ends this worker", True), ("the compile server has died during a compilation", True),
    ("device 'x' is left out", False), ("worker 12 no longer shares programs: no space", False),
])  # fmt: skip
def test_lines_that_report_a_death_are_recognized(line: str, reports: bool) -> None:
    assert bool(driver_watch.CRASH_LINES.search(line)) is reports


# ------------------------------------------------------------------------------------------------ the list


def test_TST_11_the_list_has_the_nine_targets_with_mlts_s_parameters() -> None:
    targets = {test.target for test in CRASH_TESTS}
    assert targets == {
        "parallel-inference-stress", "parallel-inference-stress-in-process", "client-early-termination-stress",
        "multi-process-inference-stress", "multi-process-model-load-stress", "memory-mapped-model-load-stress",
        "model-load-random-stress", "inference-random-stress", "performance-degradation-stress",
    }  # fmt: skip
    by_name = {test.name: test for test in CRASH_TESTS}
    assert len(by_name) == len(CRASH_TESTS) == 16
    load = by_name["multi-process-model-load-stress-50-killed"]
    assert (load.processes, load.threads, load.killed_share, load.mlts_s, load.pause_s) == (
        6,
        10,
        0.5,
        1200,
        (0.3, 0.8),
    )
    assert by_name["parallel-inference-stress-in-process-12-threads"].in_process
    assert by_name["client-early-termination-stress"].processes == 4
    assert by_name["memory-mapped-model-load-stress"].threads == 4
    assert by_name["inference-random-stress-600-operations"].graphs == GraphSize(600, 10, 600)
