"""A device that fails with each status of the HAL, on each path of the application, with and without a fallback (4.7).

The device computes RELU, and fails if the input is the code of a status. The CPU device returns the code itself, so the
result says who has executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, running_daemon, short_folder
from support.models import relu_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.hal.errors import ErrorStatus, NnfmqError, status_for_error

DEVICE = "test-status"
SOURCE = """
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.capabilities import PerformanceInfo, uniform_capabilities
from nnfmq.hal.errors import ErrorStatus, error_for_status
from nnfmq.hal.types import OperationType
from nnfmq.driver.devices.device import DeviceBase

CODES = {int(status) for status in ErrorStatus if status}


class Status(DeviceBase):
    name = "test-status"
    capabilities = uniform_capabilities(PerformanceInfo(0.1, 0.1))

    def supports(self, model, subgraph, operation):
        return operation.type is OperationType.RELU

    def compile(self, model):
        def run(inputs):
            code = int(inputs[0][0])
            if code in CODES:
                raise error_for_status(ErrorStatus(code), "as the input says")
            return [inputs[0] + 0.5]

        return FunctionProgram(model, run)
"""
S = ErrorStatus
STATUSES = [status for status in S if status not in (S.NONE, S.DEAD_OBJECT)]
"""DEAD_OBJECT is the death of a driver, see `test_cpu_fallback` and `test_driver_death`."""
REPORTED = {status: status for status in STATUSES} | {S.OUTPUT_INSUFFICIENT_SIZE: S.GENERAL_FAILURE}
"""What the application gets without a fallback. OUTPUT_INSUFFICIENT_SIZE without shapes breaks the rules of a reply."""
ON_THE_CPU = {status: float(status) for status in STATUSES} | {S.INVALID_ARGUMENT: S.INVALID_ARGUMENT}
"""What it gets with a fallback: the CPU device's result, except after its own mistake."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    add_plugin(site, "every_status", SOURCE, {"status": "every_status:Status"}, "nnfmq.devices")
    devices = site / "devices.toml"
    devices.write_text("device = []\n")
    environment = {**path_with(site), "NNFMQ_DEVICES": str(devices)}
    with short_folder() as made, running_daemon(made / "d.sock", environment=environment) as daemon:
        yield daemon


@pytest.fixture
def runtime(driver: Daemon) -> Iterator[nnfmq.Runtime]:
    with nnfmq.Runtime([Path(driver.path)]) as made:
        yield made


def fenced(model: Any, *inputs: Any) -> Any:
    with model.execute_fenced(*inputs) as launched:
        return launched.result(LIMIT_S)


def reusable(model: Any, *inputs: Any) -> Any:
    with model.create_reusable_execution() as execution:
        return execution.compute(*inputs)


def burst(model: Any, *inputs: Any) -> Any:
    with model.burst() as made:
        return made.execute(*inputs)


PATHS: dict[str, Callable[..., Any]] = {
    "sync": lambda model, *inputs: model.execute(*inputs),
    "async": lambda model, *inputs: model.execute_async(*inputs).result(LIMIT_S),
    "fenced": fenced,
    "reusable": reusable,
    "burst": burst,
}


def outcome(path: str, model: Any, status: ErrorStatus) -> float | ErrorStatus:
    """Return the result, or the status of the error."""
    try:
        (output,) = PATHS[path](model, np.full(4, int(status), np.float32))
    except NnfmqError as error:
        return status_for_error(error)
    return float(output[0])


@pytest.mark.parametrize("path", PATHS)
def test_API_13_without_a_fallback_each_status_of_a_device_reaches_the_application(
    path: str, runtime: nnfmq.Runtime
) -> None:
    with runtime.prepare(relu_model(), devices=[DEVICE]) as model:
        found = {status: outcome(path, model, status) for status in STATUSES}
        assert outcome(path, model, S.NONE) == 0.5
    assert found == REPORTED


@pytest.mark.parametrize("path", PATHS)
def test_PART_6_API_13_the_cpu_executes_what_a_device_fails_to_with_any_other_status_than_invalid_argument(
    path: str, runtime: nnfmq.Runtime
) -> None:
    with runtime.prepare(relu_model()) as model:
        assert model.plan is not None and model.plan.devices[0] == DEVICE
        found = {status: outcome(path, model, status) for status in STATUSES}
        assert outcome(path, model, S.NONE) == 0.5
    # A fenced execution that was launched keeps its error: the fence is in the application's hands.
    assert found == (REPORTED if path == "fenced" else ON_THE_CPU)
