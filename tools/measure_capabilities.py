"""Measure how fast a device is, relative to the CPU: the figures of `[device.performance]` in docs/how-to/devices.md.

    python tools/measure_capabilities.py sample-float_fast --models FOLDER
    python tools/measure_capabilities.py mine --models FOLDER --connect /run/driver.sock --rounds 50

The models are those that the HAL names for it: float MobileNets, asr_float and tts_float for float32, quantized
MobileNets for 8 bits; FOLDER holds their .tflite files (default: `models` in $NNFMQ_DATA). Each round executes a model
once on the device and once on the reference, in turns which of them is first. exec_time is the ratio of the medians of
wall time. power_usage is that of the driver's CPU time, a stand-in where nothing measures power: of a device that does
not compute on the CPU it says nothing, and its owner has to measure. Of several models it is the geometric mean.
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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import nnfmq
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import ExecutionPreference

Array = npt.NDArray[Any]
Run = Callable[[], object]

FLOAT, CODES = ("TENSOR_FLOAT32", "FLOAT32"), ("TENSOR_QUANT8_ASYMM", "TENSOR_QUANT8_ASYMM_SIGNED")
KINDS = {  # what the figures are of, and the models that they come from
    FLOAT: ("mobilenet_v1_*.tflite", "mobilenet_v2_*.tflite", "asr_float*.tflite", "tts_float*.tflite"),
    CODES: ("mobilenet_v1_*_quant.tflite", "mobilenet_v2_*_quant.tflite"),
}
_WARM_UP = 2  # executions whose times nobody looks at


class Spent(NamedTuple):
    """What executions took, in nanoseconds, or how two of them compare."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where times come from, in nanoseconds: the wall's, and the CPU time of a process."""

    wall: Callable[[], int]
    cpu: Callable[[], int]

    @classmethod
    def of(cls, pid: int) -> Clocks:
        """Return the clocks for executions in process `pid`, which is ours to look at."""
        clock = ~pid << 3 | 2  # what clock_getcpuclockid returns: the time of all its threads
        return cls(time.perf_counter_ns, lambda: time.clock_gettime_ns(clock))

    def time(self, run: Run) -> Spent:
        """Run once."""
        cpu, wall = self.cpu(), self.wall()
        run()
        return Spent(self.wall() - wall, self.cpu() - cpu)


def typical(spent: Sequence[Spent]) -> Spent:
    """Return the median of the wall's time, and the mean of the processor's, whose clock may stand still a while."""
    return Spent(statistics.median(one.wall for one in spent), statistics.fmean(one.cpu for one in spent))


def compared(device: Run, reference: Run, rounds: int, clocks: Clocks) -> Spent:
    """Return how long `device` takes, relative to `reference`, in rounds in which either is first in turns."""
    for run in (device, reference) * _WARM_UP:
        run()
    spent: dict[Run, list[Spent]] = {device: [], reference: []}
    for number in range(rounds):
        for run in (device, reference) if number % 2 else (reference, device):
            spent[run].append(clocks.time(run))
    ours, theirs = typical(spent[device]), typical(spent[reference])
    if not (ours.cpu and theirs.cpu):
        raise SystemExit(f"the processor's clock has not moved in {rounds} rounds: take more, or larger models")
    return Spent(ours.wall / theirs.wall, ours.cpu / theirs.cpu)


def mean(figures: Sequence[Spent]) -> Spent:
    """Return the geometric mean: figures are ratios."""
    return Spent(*(statistics.geometric_mean(column) for column in zip(*figures, strict=True)))


def files_in(folder: Path, patterns: Iterable[str], *, quantized: bool) -> list[Path]:
    """Return the models of one kind."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.stem.endswith("_quant") == quantized)


def random_input(info: TensorInfo, random: np.random.Generator) -> Array:
    """Return an input: codes of all values, or floats in [0, 1)."""
    dtype = np.dtype(info.dtype)
    if dtype.kind == "f":
        return random.random(info.shape).astype(dtype)
    low, high = (0, 2) if dtype.itemsize > 1 else (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
    return random.integers(low, high, info.shape).astype(dtype)


def compare_on(
    client: nnfmq.Client, device: str, reference: str, model: nnfmq.LoadedModel, rounds: int, clocks: Clocks
) -> Spent | None:
    """Compare both devices of a driver on one model; None where `device` does not support all of it."""
    if not all(client.device(device).supported_operations(model)):
        return None
    inputs = [random_input(info, np.random.default_rng(1)) for info in model.inputs]
    with ExitStack() as stack:

        def running(name: str) -> Run:
            prepared = stack.enter_context(
                client.device(name).prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED)
            )
            burst = stack.enter_context(prepared.burst())
            return lambda: burst.execute(*inputs)

        return compared(running(device), running(reference), rounds, clocks)


def table(figures: dict[tuple[str, ...], Spent]) -> str:
    """Return the TOML that goes into the device's entry."""
    lines = [
        "# exec_time: wall time; power_usage: CPU time, a stand-in. Both relative to the reference on this machine."
    ]
    lines.append("[device.performance.types]")
    for types, figure in figures.items():
        lines += [f"{name} = {{ exec_time = {figure.wall:.3g}, power_usage = {figure.cpu:.3g} }}" for name in types]
    return "\n".join(lines)


def measure(
    client: nnfmq.Client, folder: Path, device: str, reference: str, rounds: int, clocks: Clocks
) -> dict[tuple[str, ...], Spent]:
    """Return the figures of each kind of which `device` runs a model; says on stderr what each model gave."""
    figures: dict[tuple[str, ...], Spent] = {}
    for types, patterns in KINDS.items():
        found = []
        for path in files_in(folder, patterns, quantized=types == CODES):
            figure = compare_on(client, device, reference, nnfmq.load(path), rounds, clocks)
            said = "not supported" if figure is None else f"exec_time {figure.wall:.3f}, CPU time {figure.cpu:.3f}"
            print(f"{path.name}: {said}", file=sys.stderr)
            found += [] if figure is None else [figure]
        if found:
            figures[types] = mean(found)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table; exit status 1 where nothing could be measured."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", metavar="DEVICE")
    parser.add_argument("--reference", metavar="DEVICE", default="reference", help="the CPU (default: reference)")
    parser.add_argument(
        "--models", metavar="FOLDER", type=Path, default=Path(os.environ.get("NNFMQ_DATA", ".")) / "models"
    )
    parser.add_argument("--connect", metavar="SOCKET", help="a running driver (default: one of its own)")
    parser.add_argument("--rounds", metavar="N", type=int, default=30, help="executions on each (default: 30)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    with nnfmq.connect(options.connect, embedded=options.connect is None) as client:
        clocks = Clocks.of(client.driver_pid)
        figures = measure(client, options.models, options.device, options.reference, options.rounds, clocks)
    if not figures:
        print(f"no model in {options.models} that {options.device} supports", file=sys.stderr)
        return 1
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
