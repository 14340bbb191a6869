"""`tools/measure_capabilities.py`: comparison, arithmetic, and that a driver reads its output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.places import ROOT

import nnfmq
from nnfmq.driver.devices.configuration import read_configuration
from nnfmq.hal.capabilities import CPU_PERFORMANCE, PerformanceInfo, performance_of
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import OperandType
from nnfmq.lab.bench.steps import random_input

TOOL = ROOT / "tools" / "measure_capabilities.py"
LIMIT_S = 120


@pytest.fixture
def tool() -> Any:
    import measure_capabilities

    return measure_capabilities


class Machine:
    """Fake clocks, and functions that advance them."""

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 1_000_000
        self.ran: list[str] = []

    def clocks(self, tool: Any) -> Any:
        return tool.Clocks(lambda: self.wall_ns, lambda: self.cpu_ns)

    def taking(self, name: str, walls: list[int], cpu: int) -> Callable[[], None]:
        left = list(walls)

        def run() -> None:
            self.ran.append(name)
            self.wall_ns += left.pop(0)
            self.cpu_ns += cpu

        return run


def test_CAP_7_values_are_the_ratios_of_the_medians_without_the_first_executions(tool: Any) -> None:
    machine = Machine()
    device = machine.taking("device", [900, 900, 10, 20, 1000], 30)  # median of the last three: 20
    reference = machine.taking("reference", [1, 1, 80, 40, 7], 60)  # 40
    assert tool.compare_runs(device, reference, 3, machine.clocks(tool)) == (0.5, 0.5)


def test_CAP_7_both_devices_run_in_each_round_and_the_first_alternates(tool: Any) -> None:
    machine = Machine()
    device, reference = (machine.taking(name, [1] * 6, 1) for name in ("device", "reference"))
    tool.compare_runs(device, reference, 4, machine.clocks(tool))
    rounds = [machine.ran[at : at + 2] for at in range(4, len(machine.ran), 2)]
    assert rounds == [["reference", "device"], ["device", "reference"]] * 2


def test_the_value_for_several_models_is_their_geometric_mean(tool: Any) -> None:
    assert tool.geometric_mean([tool.ExecutionTime(0.5, 4.0), tool.ExecutionTime(2.0, 1.0)]) == pytest.approx(
        (1.0, 2.0)
    )


def test_CAP_7_float_and_quantized_models_are_distinguished_by_their_file_names(tool: Any, tmp_path: Path) -> None:
    names = ["mobilenet_v1_0.25_128", "mobilenet_v1_0.25_128_quant", "mobilenet_v2_1.0_224_quant", "tts_float", "other"]
    for name in names:
        (tmp_path / f"{name}.tflite").touch()
    found = {
        types: [path.stem for path in tool.model_files(tmp_path, patterns, quantized=types == tool.QUANTIZED)]
        for types, patterns in tool.KINDS.items()
    }
    assert found == {tool.FLOAT: [names[0], names[3]], tool.QUANTIZED: names[1:3]}


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", 0, 1), ("uint8", 0, 255), ("int8", -128, 127), ("int32", 0, 1)]
)
def test_random_inputs_are_in_the_range_of_their_type(tool: Any, dtype: str, low: int, high: int) -> None:
    made = random_input(TensorInfo("x", (50, 50), dtype), np.random.default_rng(1))
    assert (made.dtype, made.shape) == (np.dtype(dtype), (50, 50))
    assert low <= made.min() < made.max() <= high


def test_the_cpu_time_of_a_process_is_the_kernel_s(tool: Any) -> None:
    """Of this process: what it spends in a loop is at most what passes, and more than nothing."""
    times = tool.Clocks.for_process(os.getpid()).time(lambda: sum(range(200_000)))
    assert times.cpu > 0
    assert times.wall > 0


def test_CAP_7_a_driver_reads_the_toml(tool: Any, tmp_path: Path) -> None:
    text = tool.performance_toml(
        {tool.FLOAT: tool.ExecutionTime(0.25, 1.5), tool.QUANTIZED: tool.ExecutionTime(2.0, 3.0)}
    )
    path = tmp_path / "devices.toml"
    path.write_text(f'[[device]]\nname = "test-measured"\n{text}\n')
    (entry,) = read_configuration(path)
    capabilities = entry.capabilities
    assert (
        performance_of(capabilities, OperandType.TENSOR_FLOAT32)
        == performance_of(capabilities, OperandType.FLOAT32)
        == PerformanceInfo(0.25, 1.5)
    )
    assert performance_of(capabilities, OperandType.TENSOR_QUANT8_ASYMM_SIGNED) == PerformanceInfo(2.0, 3.0)
    assert performance_of(capabilities, OperandType.TENSOR_INT32) == CPU_PERFORMANCE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small models under the names of those that are measured."""
    shutil.copy(nnfmq.example_path("digits.tflite"), tmp_path / "mobilenet_v1_tiny.tflite")
    shutil.copy(nnfmq.example_path("digits_quant.tflite"), tmp_path / "mobilenet_v1_tiny_quant.tflite")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_CAP_7_a_device_is_measured_against_the_reference_on_what_it_supports(folder: Path) -> None:
    done = run("sample-float_fast", "--models", str(folder), "--rounds", "100")
    assert done.returncode == 0, done.stderr
    assert "mobilenet_v1_tiny_quant.tflite: not supported" in done.stderr
    ratios = tomllib.loads(done.stdout)["device"]["performance"]["types"]
    assert ratios.keys() == {"TENSOR_FLOAT32", "FLOAT32"}
    assert all(ratio["exec_time"] > 0 and ratio["power_usage"] > 0 for ratio in ratios.values())


def test_a_folder_without_models_is_an_error(tmp_path: Path) -> None:
    done = run("reference", "--models", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no model in {tmp_path}" in done.stderr


def test_CAP_7_types_without_models_are_measured_with_an_operation(folder: Path) -> None:
    done = run("reference", "--models", str(folder), "--rounds", "20")
    assert done.returncode == 0, done.stderr
    for text in ("MUL of TENSOR_INT32: exec_time", "LOGICAL_AND of TENSOR_BOOL8: ", "MUL of TENSOR_FLOAT16: "):
        assert text in done.stderr
    ratios = tomllib.loads(done.stdout)["device"]["performance"]["types"]
    assert {"TENSOR_FLOAT32", "TENSOR_INT32", "INT32", "TENSOR_BOOL8", "BOOL", "TENSOR_FLOAT16", "FLOAT16"} <= set(
        ratios
    )
