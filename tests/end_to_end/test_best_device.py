"""`Client.prepare` uses the compiling device if it is available, otherwise the reference device with one warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.absent_packages import WITHOUT_LLVMLITE
from support.drivers import LIMIT_S, running_daemon

import nnfmq
from nnfmq.hal.types import DeviceStatus, ExecutionPreference

INSTALLATION = "pip install 'nnfmq[compiled]'"


@pytest.fixture
def digits() -> nnfmq.LoadedModel:
    return nnfmq.load(nnfmq.example_path("digits.tflite"))


@pytest.fixture
def bare_client(folder: Path, tmp_path: Path) -> Iterator[nnfmq.Client]:
    """A client of a driver in whose environment llvmlite is not installed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LLVMLITE)
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        running_daemon(folder / "bare.sock", environment=environment) as daemon,
        nnfmq.connect(daemon.path, timeout=LIMIT_S) as client,
    ):
        yield client


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_model_is_prepared_on_the_compiling_device(
    client: nnfmq.Client, digits: nnfmq.LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with client.prepare(digits) as model:
        assert model.device == "compiled"
    assert warnings_in(caplog) == []


def test_API_5_the_options_are_those_of_a_device(client: nnfmq.Client, digits: nnfmq.LoadedModel) -> None:
    with client.prepare(digits, preference=ExecutionPreference.SUSTAINED_SPEED, timeout=LIMIT_S) as model:
        image = np.zeros(model.inputs[0].shape, model.inputs[0].dtype)
        assert model.execute(image)[0].shape == model.outputs[0].shape
    with pytest.raises(nnfmq.InvalidArgument):
        client.prepare(object())  # type: ignore[arg-type]


def test_without_llvmlite_the_reference_device_is_chosen_with_exactly_one_warning(
    bare_client: nnfmq.Client, digits: nnfmq.LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with bare_client.prepare(digits) as first, bare_client.prepare(digits) as second:
        assert (first.device, second.device) == ("reference", "reference")
    (warning,) = warnings_in(caplog)
    assert "'compiled' is OFFLINE" in warning
    assert INSTALLATION in warning


def test_the_reference_device_is_chosen_while_the_compiling_device_is_busy(
    folder: Path, digits: nnfmq.LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_daemon(folder / "busy.sock", options=["--allow-device-status"]) as daemon,
        nnfmq.connect(daemon.path, timeout=LIMIT_S) as client,
    ):
        client.set_device_status("compiled", DeviceStatus.BUSY)
        with client.prepare(digits) as model:
            assert model.device == "reference"
        client.set_device_status("compiled", DeviceStatus.AVAILABLE)
        with client.prepare(digits) as model:
            assert model.device == "compiled"
    (warning,) = warnings_in(caplog)
    assert "'compiled' is BUSY" in warning


def test_a_device_can_still_be_chosen_by_name(client: nnfmq.Client, digits: nnfmq.LoadedModel) -> None:
    with client.device("reference").prepare(digits) as model:
        assert model.device == "reference"
