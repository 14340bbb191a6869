"""A plug-in that computes beyond $NNFMQ_EXECUTION_LIMIT_S ends with its worker, and its client knows why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, one, running_daemon
from support.models import null_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base import settings

STUCK = 13.0
_DEVICE = f"""
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
"""
TEXT = "device 'test-sticking' has computed for 0.3 s, the limit of one execution that $NNFMQ_EXECUTION_LIMIT_S"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    add_plugin(site, "nnfmq_sticking", _DEVICE, {"sticking": "nnfmq_sticking:Sticking"}, "nnfmq.devices")
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
    assert TEXT in daemon.program.errors()


def test_without_a_limit_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnfmq.driver.execution.watchdog import limited

    monkeypatch.setenv(settings.EXECUTION_LIMIT_S.variable, "0")
    assert limited("x", len) is len
