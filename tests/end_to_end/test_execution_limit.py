"""What computes beyond $NNFMQ_EXECUTION_LIMIT_S ends with its worker, and its client knows why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from support.control_flow_models import counting
from support.drivers import LIMIT_S, Daemon, InThread, Process, one, running_daemon, until
from support.models import null_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base import settings
from nnfmq.driver.execution import watchdog
from nnfmq.driver.execution.watchdog import ExecutionLimit

STUCK = 13.0
_DEVICE = f"""
import ctypes
import time

from nnfmq.driver.devices.device import DeviceBase
from nnfmq.engines.function import FunctionProgram


class Sticking(DeviceBase):
    name = "test-sticking"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return FunctionProgram(model, self._compute)

    def _compute(self, inputs):
        if inputs[0][0] == {STUCK}:
            time.sleep(3600)
        return [inputs[0]]


class Keeping(Sticking):
    name = "test-keeping"

    def compile(self, model):
        ctypes.PyDLL(None).pause()  # without releasing the GIL
"""
_STALL = """
import sys

if "serve" in sys.orig_argv:
    from nnfmq.driver.process import heartbeats

    heartbeats.STALL_S = 1.0
"""
TEXT = "an execution has taken 0.3 s, the limit that $NNFMQ_EXECUTION_LIMIT_S of the driver sets"
GIL_TEXT = "ended with status -9: code of a plug-in kept Python's lock beyond its deadline, or beyond the limit"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    names = {"sticking": "nnfmq_sticking:Sticking", "keeping": "nnfmq_sticking:Keeping"}
    add_plugin(site, "nnfmq_sticking", _DEVICE, names, "nnfmq.devices")
    (site / "sitecustomize.py").write_text(_STALL)
    environment = {**path_with(site), settings.EXECUTION_LIMIT_S.variable: "0.3"}
    with running_daemon(site / "d.sock", environment=environment) as started:
        yield started


@pytest.mark.parametrize("mode", ["execute", "burst"])
def test_an_execution_beyond_the_limit_ends_its_worker_and_its_client_is_told_why(daemon: Daemon, mode: str) -> None:
    with (
        daemon.connect() as client,
        daemon.connect() as neighbour,
        client.device("test-sticking").prepare(null_model()) as prepared,
        neighbour.device("test-sticking").prepare(null_model()) as other,
        prepared.burst() as burst,
    ):
        call = InThread.start(lambda: (prepared if mode == "execute" else burst).execute(one(STUCK)))
        while call.is_running:
            assert other.execute(one(1)) == (one(1),)
        assert isinstance(call.wait(LIMIT_S).error, nnfmq.DeadObject)
        assert TEXT in str(call.error)
        assert other.execute(one(2)) == (one(2),)
    until(lambda: TEXT in daemon.program.errors(), "the log says so")


@pytest.mark.parametrize("mode", ["execute", "burst", "reusable", "fenced"])
def test_an_execution_of_nnfmq_s_own_engine_has_the_limit_too(daemon: Daemon, mode: str) -> None:
    x, endless = np.ones(2, np.float32), 2**31 - 1
    with daemon.connect() as client, client.device("reference").prepare(counting()) as prepared:
        MODES[mode](prepared, (x, np.array([1], np.int32), x))
        call = InThread.start(lambda: MODES[mode](prepared, (x, np.array([endless], np.int32), x)))
        assert isinstance(call.wait(LIMIT_S).error, nnfmq.DeadObject), call.error
    until(lambda: TEXT in daemon.program.errors(), "the log says so")


def test_a_worker_in_which_a_plug_in_keeps_the_GIL_ends_although_none_of_its_threads_runs(daemon: Daemon) -> None:
    with (
        daemon.connect() as client,
        daemon.connect() as neighbour,
        neighbour.device("test-sticking").prepare(null_model()) as other,
        Process(client.worker_pid) as worker,
    ):
        call = InThread.start(lambda: client.device("test-keeping").prepare(null_model()))
        while call.is_running:
            assert other.execute(one(1)) == (one(1),)
        assert isinstance(call.wait(LIMIT_S).error, nnfmq.DeadObject), call.error
        worker.wait_for_end()
        assert other.execute(one(2)) == (one(2),)
    until(lambda: GIL_TEXT in daemon.program.errors(), "the log says why")
    assert "has not run its threads for" in daemon.program.errors()


def _burst(model: nnfmq.PreparedModel, given: Sequence[np.ndarray]) -> object:
    with model.burst() as burst:
        return burst.execute(*given)


def _reusable(model: nnfmq.PreparedModel, given: Sequence[np.ndarray]) -> object:
    with model.create_reusable_execution() as execution:
        return execution.compute(*given)


def _fenced(model: nnfmq.PreparedModel, given: Sequence[np.ndarray]) -> object:
    with model.execute_fenced(*given) as launched:
        return launched.result(LIMIT_S)


MODES = {
    "execute": lambda model, given: model.execute(*given),
    "burst": _burst,
    "reusable": _reusable,
    "fenced": _fenced,
}


def test_a_run_is_late_after_so_many_looks_and_another_one_begins_from_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog.watcher, "call_at", lambda _at, look: looks.append(look))
    looks: list[Callable[[], None]] = []
    ended: list[str] = []
    running = {1}
    with ExecutionLimit(lambda: running, ended.append):
        for run in (1, 2):
            running = {run, 3} if run == 1 else {run}
            for _ in range(8):
                looks.pop()()
        assert ended == []
        looks.pop()()
    assert len(ended) == 1 and "the limit that $NNFMQ_EXECUTION_LIMIT_S of the driver sets" in ended[0]


def test_without_a_limit_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.EXECUTION_LIMIT_S.variable, "0")
    monkeypatch.setattr(watchdog.watcher, "call_at", pytest.fail)
    ExecutionLimit(set, pytest.fail).close()
