"""The built-in extension `nnfmq.tflite` through a driver: reported, executed, refused with what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder
from support.tflite_files import Operator, Tensor, writer

import nnfmq
from nnfmq.hal.extensions import NAME

DEVICES = """
[[device]]
name = "vendor-whole"
[[device]]
name = "vendor-limited"
except_operations = ["SOFTMAX"]
"""
ANGLES = np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3)


def model() -> nnfmq.LoadedModel:
    """Return COS(SIGN(RELU(COS(x)))): three operations of the extension and one of the HAL."""
    names = ("COS", "RELU", "SIGN", "COS")
    tensors = [Tensor(f"t{index}", (2, 3)) for index in range(len(names) + 1)]
    operators = [Operator(name, (index,), (index + 1,)) for index, name in enumerate(names)]
    return nnfmq.load(writer.write(tensors, operators, (0,), (len(names),)))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a driver with two devices, of which one is limited to operations of the HAL."""
    file: Path = tmp_path_factory.mktemp("devices") / "devices.toml"
    file.write_text(DEVICES)
    with (
        short_folder() as made,
        running_daemon(made / "d.sock", environment={"NNFMQ_DEVICES": str(file), "NNFMQ_RUNTIMES": ""}) as daemon,
    ):
        yield daemon


def test_every_unlimited_device_offers_the_extension(daemon: Daemon) -> None:
    with daemon.connect() as client:
        offered = {device.name: [extension.name for extension in device.extensions] for device in client.devices()}
    assert offered == {"vendor-whole": [NAME], "vendor-limited": []}


def test_a_model_with_operations_of_the_extension_is_executed_in_a_burst(daemon: Daemon) -> None:
    with (
        daemon.connect() as client,
        client.device("vendor-whole").prepare(model()) as prepared,
        prepared.burst() as burst,
    ):
        (found,) = burst.execute(ANGLES)
    np.testing.assert_allclose(found, np.cos(np.sign(np.maximum(np.cos(ANGLES), 0))), rtol=1e-6)


def test_a_device_without_the_extension_refuses_the_model_with_all_operations_that_it_lacks(daemon: Daemon) -> None:
    with daemon.connect() as client:
        device = client.device("vendor-limited")
        assert device.supported_operations(model().model) == [False, True, False, False]
        with pytest.raises(nnfmq.GeneralFailure) as caught:
            device.prepare(model())
    assert str(caught.value) == (
        "device 'vendor-limited' does not support operations 0, 3 (nnfmq.tflite.COS), 2 (nnfmq.tflite.SIGN)"
        " as they are here"
    )
