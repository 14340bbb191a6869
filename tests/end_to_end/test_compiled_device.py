"""The device `compiled` through a real driver: the reference's codes, its caches, and machines where it cannot be."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.absent_packages import WITHOUT_LLVMLITE
from support.caching import TOKEN, Paths
from support.drivers import LIMIT_S, running_daemon
from support.machine_code import machine_code

import nnfmq
from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.types import DeviceStatus, ExecutionPreference

SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # nothing but machine code
MODEL = "mobilenet_v1_0.25_128_quant.tflite"


@pytest.fixture
def image() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(5).integers(0, 256, (1, 128, 128, 3)).astype(np.uint8)


@pytest.fixture
def model(data_dir: Path) -> Any:
    return nnfmq.load(data_dir / "models" / MODEL)


def saved(device: nnfmq.Device, model: Any, files: Paths, stack: ExitStack) -> nnfmq.PreparedModel:
    model_cache, data_cache = files.open(stack)
    return device.prepare(model, token=TOKEN, model_cache=model_cache, data_cache=data_cache)


def test_a_quantized_classifier_returns_the_reference_s_values_over_a_burst(
    client: nnfmq.Client, model: Any, image: np.ndarray
) -> None:
    with ExitStack() as stack:
        devices = [client.device(name) for name in ("reference", "compiled")]
        prepared = [stack.enter_context(device.prepare(model, preference=SUSTAINED)) for device in devices]
        machine_code(prepared[1], len(model.model.main.operations))
        bursts = [stack.enter_context(one.burst()) for one in prepared]
        expected, found = (burst.execute(image)[0] for burst in bursts)
        assert np.array_equal(expected, found) and expected.any()
        assert np.array_equal(bursts[1].execute(image[:, ::-1])[0], prepared[0].execute(image[:, ::-1])[0])


def test_CACHE_8_machine_code_is_restored_and_not_generated_again(
    client: nnfmq.Client, model: Any, image: np.ndarray, tmp_path: Path
) -> None:
    files = Paths.new(tmp_path)
    with ExitStack() as stack:
        device = client.device("compiled")
        first = stack.enter_context(saved(device, model, files, stack))
        again = stack.enter_context(device.prepare_from_cache(TOKEN, *files.open(stack), model=model.model))
        assert machine_code(again).program is ProgramKind.CACHED
        assert np.array_equal(machine_code(first).execute(image)[0], again.execute(image)[0])


def test_CACHE_8_code_for_another_instruction_set_is_not_restored(
    folder: Path, client: nnfmq.Client, model: Any, image: np.ndarray, tmp_path: Path
) -> None:
    files = Paths.new(tmp_path)
    with ExitStack() as stack:
        device = client.device("compiled")
        expected = stack.enter_context(saved(device, model, files, stack)).execute(image)
        forced = {"NNFMQ_TARGET": "sse4.1"}
        other = stack.enter_context(running_daemon(folder / "forced.sock", environment=forced))
        slower = stack.enter_context(other.connect()).device("compiled")
        with pytest.raises(GeneralFailure):
            slower.prepare_from_cache(TOKEN, *files.open(stack), model=model.model)
        found = machine_code(stack.enter_context(slower.prepare(model, preference=SUSTAINED))).execute(image)
        assert np.array_equal(expected[0], found[0])


def test_DEV_14_without_llvmlite_the_device_is_offline_and_reports_the_reason(
    folder: Path, tmp_path: Path, model: Any
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LLVMLITE)
    with (
        running_daemon(
            folder / "bare.sock", environment={"PYTHONPATH": str(tmp_path)}, options=["--allow-device-status"]
        ) as daemon,
        nnfmq.connect(daemon.path, timeout=LIMIT_S) as client,
    ):
        device = client.device("compiled")
        assert device.info.status.name == "OFFLINE"
        with pytest.raises(DeviceUnavailable, match=r"pip install 'nnfmq\[compiled\]'"):
            device.prepare(model)
        client.set_device_status("compiled", DeviceStatus.AVAILABLE)
        assert client.device("compiled").info.status.name == "OFFLINE"
        with client.device("reference").prepare(model):
            pass
