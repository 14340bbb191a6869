"""Measure the performance of a device relative to the CPU, for `[device.performance]` in docs/how-to/devices.md.

    python tools/measure_capabilities.py sample-float_fast --models FOLDER
    python tools/measure_capabilities.py mine --models FOLDER --connect /run/driver.sock --rounds 50

The models are those that the HAL names for this purpose: float MobileNets, asr_float and tts_float for float32, and
quantized MobileNets for 8 bits. FOLDER has their .tflite files (default: `models` in $NNFMQ_DATA). For types that the
HAL names no models for, they are single operations on arrays as large as an image's activations. Each round executes
a model once on the device and once on the reference; which of them is first alternates. exec_time is the ratio of the
medians of wall time. power_usage is the ratio of CPU times in the driver, as a substitute for measured power: for a
device that does not compute on the CPU it is meaningless, and its owner has to measure. The value for several models is
the geometric mean.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import nnfmq
from nnfmq.client.model.arrays import Array
from nnfmq.hal.types import ExecutionPreference, FusedActivationFunc
from nnfmq.lab.bench.steps import random_input
from nnfmq.lab.placement import cpu_ns

Run = Callable[[], object]

FLOAT, QUANTIZED = ("TENSOR_FLOAT32", "FLOAT32"), ("TENSOR_QUANT8_ASYMM", "TENSOR_QUANT8_ASYMM_SIGNED")
KINDS = {  # the types that the ratios are for, and the models that they are measured with
    FLOAT: ("mobilenet_v1_*.tflite", "mobilenet_v2_*.tflite", "asr_float*.tflite", "tts_float*.tflite"),
    QUANTIZED: ("mobilenet_v1_*_quant.tflite", "mobilenet_v2_*_quant.tflite"),
}
OPERATIONS = {  # the types that the ratios are for, and an operation on arrays of the first of them
    ("TENSOR_INT32", "INT32"): "MUL",
    ("TENSOR_BOOL8", "BOOL"): "LOGICAL_AND",
    ("TENSOR_FLOAT16", "FLOAT16"): "MUL",
}
_OPERATION_SHAPE = (1, 56, 56, 64)
_WARM_UP = 2  # executions that are not timed


class ExecutionTime(NamedTuple):
    """Wall time and CPU time of executions in ns, or the ratios of two such pairs."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks that return ns: the wall clock, and the CPU time of a process."""

    wall: Callable[[], int]
    cpu: Callable[[], int]

    @classmethod
    def for_process(cls, pid: int) -> Clocks:
        """Return the clocks for executions in process `pid`, which must run as the same user."""
        return cls(time.perf_counter_ns, lambda: cpu_ns(pid))

    def time(self, run: Run) -> ExecutionTime:
        """Call `run` once and return the time that it took."""
        cpu, wall = self.cpu(), self.wall()
        run()
        return ExecutionTime(self.wall() - wall, self.cpu() - cpu)


def average(times: Sequence[ExecutionTime]) -> ExecutionTime:
    """Return the median of the wall times and the mean of the CPU times.

    The mean, because the kernel updates another process's CPU clock in steps that can be longer than one execution.
    """
    return ExecutionTime(statistics.median(one.wall for one in times), statistics.fmean(one.cpu for one in times))


def compare_runs(device: Run, reference: Run, rounds: int, clocks: Clocks) -> ExecutionTime:
    """Return the time of `device` divided by that of `reference`; which of them runs first alternates by round.

    Raises:
        SystemExit: If the CPU clock did not advance.
    """
    for run in (device, reference) * _WARM_UP:
        run()
    times: dict[Run, list[ExecutionTime]] = {device: [], reference: []}
    for number in range(rounds):
        for run in (device, reference) if number % 2 else (reference, device):
            times[run].append(clocks.time(run))
    device_time, reference_time = average(times[device]), average(times[reference])
    if not (device_time.cpu and reference_time.cpu):
        raise SystemExit(f"the CPU clock did not advance in {rounds} rounds: use more rounds, or larger models")
    return ExecutionTime(device_time.wall / reference_time.wall, device_time.cpu / reference_time.cpu)


def geometric_mean(ratios: Sequence[ExecutionTime]) -> ExecutionTime:
    """Return the geometric mean of ratios."""
    return ExecutionTime(*(statistics.geometric_mean(column) for column in zip(*ratios, strict=True)))


def model_files(folder: Path, patterns: Iterable[str], *, quantized: bool) -> list[Path]:
    """Return the files in `folder` that match a pattern, either the quantized or the float models."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.stem.endswith("_quant") == quantized)


def one_operation(operand_type: str, operation: str) -> nnfmq.ModelBuilder:
    """Return a model of one operation on two arrays. The caller closes it."""
    builder = nnfmq.ModelBuilder()
    first, second, result = (builder.add_operand(operand_type, _OPERATION_SHAPE) for _ in range(3))
    arguments = [first, second]
    if operation == "MUL":
        arguments.append(builder.add_operand("INT32"))
        builder.set_operand_value(arguments[-1], FusedActivationFunc.NONE)
    builder.add_operation(operation, arguments, [result])
    builder.identify_inputs_and_outputs([first, second], [result])
    builder.finish()
    return builder


def random_array(info: nnfmq.TensorInfo) -> Array:
    """Return a random input."""
    random = np.random.default_rng(1)
    return random.random(info.shape) < 0.5 if info.dtype == "bool" else random_input(info, random)


def compare_devices(
    client: nnfmq.Client,
    device: str,
    reference: str,
    model: nnfmq.LoadedModel | nnfmq.ModelBuilder,
    rounds: int,
    clocks: Clocks,
) -> ExecutionTime | None:
    """Compare both devices of a driver on one model; return None if `device` does not support all of it."""
    if not all(client.device(device).supported_operations(model)):
        return None
    inputs = [random_array(info) for info in model.inputs]
    with ExitStack() as stack:

        def running(name: str) -> Run:
            prepared = stack.enter_context(
                client.device(name).prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED)
            )
            burst = stack.enter_context(prepared.burst())
            return lambda: burst.execute(*inputs)

        return compare_runs(running(device), running(reference), rounds, clocks)


def performance_toml(ratios: dict[tuple[str, ...], ExecutionTime]) -> str:
    """Return the TOML for the device's entry in the configuration."""
    lines = [
        "# exec_time: wall time; power_usage: CPU time, a substitute. Both relative to the reference on this machine."
    ]
    lines.append("[device.performance.types]")
    for types, ratio in ratios.items():
        lines += [f"{name} = {{ exec_time = {ratio.wall:.3g}, power_usage = {ratio.cpu:.3g} }}" for name in types]
    return "\n".join(lines)


def measure(
    client: nnfmq.Client, folder: Path, device: str, reference: str, rounds: int, clocks: Clocks
) -> dict[tuple[str, ...], ExecutionTime]:
    """Return the ratios for each kind of model that `device` supports, and for single operations if there are any.

    Prints the result of each model to stderr.
    """
    ratios: dict[tuple[str, ...], ExecutionTime] = {}
    for types, patterns in KINDS.items():
        found = []
        for path in model_files(folder, patterns, quantized=types == QUANTIZED):
            ratio = compare_devices(client, device, reference, nnfmq.load(path), rounds, clocks)
            print(f"{path.name}: {_text(ratio)}", file=sys.stderr)
            found += [] if ratio is None else [ratio]
        if found:
            ratios[types] = geometric_mean(found)
    for types, operation in OPERATIONS.items() if ratios else ():
        with one_operation(types[0], operation) as built:
            ratio = compare_devices(client, device, reference, built, rounds, clocks)
        if ratio is not None:
            print(f"{operation} of {types[0]}: {_text(ratio)}", file=sys.stderr)
            ratios[types] = ratio
    return ratios


def _text(ratio: ExecutionTime | None) -> str:
    return "not supported" if ratio is None else f"exec_time {ratio.wall:.3f}, CPU time {ratio.cpu:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the TOML; return 1 if `device` supports none of the models."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", metavar="DEVICE")
    parser.add_argument("--reference", metavar="DEVICE", default="reference", help="the CPU (default: reference)")
    parser.add_argument(
        "--models", metavar="FOLDER", type=Path, default=Path(os.environ.get("NNFMQ_DATA", ".")) / "models"
    )
    parser.add_argument("--connect", metavar="SOCKET", help="a running driver (default: an embedded driver)")
    parser.add_argument("--rounds", metavar="N", type=int, default=30, help="executions on each device (default: 30)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    with nnfmq.connect(options.connect, embedded=options.connect is None) as client:
        clocks = Clocks.for_process(client.worker_pid)
        ratios = measure(client, options.models, options.device, options.reference, options.rounds, clocks)
    if not ratios:
        print(f"no model in {options.models} that {options.device} supports", file=sys.stderr)
        return 1
    print(performance_toml(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
