"""`nnfmq profile`: where a model's time goes, operation by operation, beside what the machine could do.

The engine runs in this process: no driver, no queue, nothing is copied. Files are read and judged before anything is
timed. Inputs that are not given are random numbers, whole ones 0 (they may be indices), states their zero point.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import at_least_one, console, from_zero, new_file, print_json
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.cli.inputs import Array
    from nnfmq.engines.interpreter import Program
    from nnfmq.engines.profiling import Profile
    from nnfmq.hal.tensor_info import TensorInfo
    from nnfmq.importers import LoadedModel
    from nnfmq.operations.signature import Shape

EXAMPLES = """\
examples:
  nnfmq profile mobilenet.tflite
  nnfmq profile mobilenet.tflite --sort time --threads 1 --html profile.html
  nnfmq profile mobilenet.tflite --input photo.jpg --runs 500 --json
  nnfmq profile speech.tflite --device reference --arena

The engine runs in this process, without a driver. Times are of whole passes over the model, each operation timed in
its place. Without --input: random numbers.
"""

DEVICES = ("compiled", "reference")
_RUNS = {"compiled": 100, "reference": 10}
_INSTALL = "llvmlite is not installed: pip install 'nnfmq[compiled]', or profile --device reference"
_WIDE = 110
_BLAS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `profile`."""
    parser.usage = "%(prog)s [options] MODEL.tflite"
    parser.add_argument("model", metavar="MODEL.tflite", type=Path)
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="default: compiled")
    parser.add_argument("--threads", metavar="N", type=at_least_one, help="of compiled (default: all processors)")
    parser.add_argument("--runs", metavar="N", type=at_least_one, help="default: 100, for reference 10")
    parser.add_argument(
        "--input", metavar="FILE", type=Path, action="append", default=[],
        help="photo, .npy array, or raw elements; once per input of the model",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=from_zero, default=0, help="of random inputs (default: 0)")
    parser.add_argument("--sort", choices=("order", "time"), default="order", help="of the table (default: order)")
    parser.add_argument("--arena", action="store_true", help="print where values lie, too")
    parser.add_argument("--html", metavar="FILE", type=new_file, help="write a page with charts")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read, prepare, measure, write, print."""
    if problem := _misuse(arguments):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(_BLAS, "1"))  # as the driver has it
    import nnfmq
    from nnfmq.validation import validate_model

    model = nnfmq.load(arguments.model)
    validate_model(model.model)
    inputs = _inputs(arguments, model.inputs)
    report = _report(arguments, model, inputs)
    if arguments.html is not None:
        from nnfmq.cli.profile_page import render

        arguments.html.write_text(render(report), encoding="utf-8")
    if arguments.json:
        print_json(report)
    else:
        _print(console(arguments.no_color), report, arguments)
    return 0


def _misuse(arguments: argparse.Namespace) -> str:
    available = len(os.sched_getaffinity(0))
    if arguments.threads is None:
        return ""
    if arguments.device != "compiled":
        return f"--threads are the compiling engine's; {arguments.device} runs on one: leave it out"
    if arguments.threads > available:
        return f"--threads {arguments.threads}: this process may use {available} processors, so 1 to {available}"
    return ""


def _is_there(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


# -- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(arguments: argparse.Namespace, tensors: Sequence[TensorInfo]) -> list[Array]:
    if arguments.input:
        from nnfmq.cli.inputs import read_inputs

        return read_inputs(arguments.input, tensors)
    return random_inputs(tensors, arguments.seed)


def random_inputs(tensors: Sequence[TensorInfo], seed: int) -> list[Array]:
    """Return an array for each input, the same for the same seed. Raises InvalidArgument for an unknown shape."""
    import numpy as np

    random = np.random.default_rng(seed)
    return [_random(random, tensor) for tensor in tensors]


def _random(random: Any, tensor: TensorInfo) -> Array:
    import numpy as np

    dtype = np.dtype(tensor.dtype)
    if 0 in tensor.shape or not (tensor.shape or tensor.is_scalar):
        given = "x".join(str(extent or "?") for extent in tensor.shape) or "an unknown shape"
        raise InvalidArgument(
            f"input {tensor.name} is {given}: only models whose inputs have known shapes are profiled"
        )
    if tensor.is_state:
        return np.full(tensor.shape, tensor.zero_point, dtype)
    if dtype.kind == "f":
        return np.asarray(random.uniform(-1, 1, tensor.shape), dtype)
    if tensor.scale:
        info = np.iinfo(dtype)
        return np.asarray(random.integers(info.min, info.max, tensor.shape, endpoint=True), dtype)
    return np.zeros(tensor.shape, dtype)


# -- measuring --------------------------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace, model: LoadedModel, inputs: Sequence[Array]) -> dict[str, Any]:
    from nnfmq.cli.profile_report import build

    has_generator = _is_there("llvmlite")
    if arguments.device == "compiled" and not has_generator:
        raise InvalidArgument(_INSTALL)
    runs = arguments.runs or _RUNS[arguments.device]
    known = {
        "model": str(arguments.model),
        "device": arguments.device,
        "where": "in this process",
        "runs": runs,
        "inputs": [str(path) for path in arguments.input] or f"random, seed {arguments.seed}",
    }
    if not has_generator:
        program, times = _measured(arguments.device, model, inputs, runs)
        return build(model.model.main, program, times, None, {**known, "threads": 1, "target": None})
    from nnfmq.engines.compiled.jit import host_target
    from nnfmq.engines.compiled.roofline import measure_ceilings

    with _team(arguments.threads) as team:
        peaks = measure_ceilings(team)
        program, times = _measured(arguments.device, model, inputs, runs)
        threads = team.worker_count + 1 if arguments.device == "compiled" else 1
        known |= {"threads": threads, "team": team.worker_count + 1, "target": host_target().name}
        return build(model.model.main, program, times, peaks, known)


@contextmanager
def _team(threads: int | None) -> Iterator[Any]:
    """Let this process's team have so many threads; afterwards it has none but this one, and may have all again."""
    from nnfmq.engines.compiled.thread_pool import default_thread_pool

    team = default_thread_pool()
    usual = team.worker_count
    if threads is not None:
        team.set_worker_count(threads - 1)
    try:
        yield team
    finally:
        team.set_worker_count(usual)


def _measured(device: str, model: LoadedModel, inputs: Sequence[Array], runs: int) -> tuple[Program, Profile]:
    import numpy as np

    from nnfmq.engines.profiling import measure
    from nnfmq.operations.signature import NUMPY_TYPES

    program, main = _prepared(device, model), model.model.main
    dtypes = [NUMPY_TYPES[main.operands[index].type] for index in (*main.input_indexes, *main.output_indexes)]
    arrays = [array.view(dtype) for array, dtype in zip(inputs, dtypes, strict=False)]  # booleans are bytes
    rooms = [_room(program.shapes[index], dtypes[len(inputs) + n]) for n, index in enumerate(main.output_indexes)]
    with np.errstate(all="ignore"):
        return program, measure(program, program.bind(arrays, rooms), runs)


def _prepared(device: str, model: LoadedModel) -> Program:
    from nnfmq.engines import interpreter

    if device == "reference":
        return interpreter.prepare(model.model)
    from nnfmq.engines.compiled.partition import prepare

    return prepare(model.model)


def _room(shape: Shape | None, dtype: Any) -> Any:
    """Return an array for an output; one whose shape comes with the execution gets a new one each time."""
    import numpy as np

    from nnfmq.engines.execution import DynamicOutput

    return DynamicOutput(lambda shape: np.empty(shape, dtype)) if shape is None else np.empty(shape, dtype)


# -- printing ---------------------------------------------------------------------------------------------------------


def _print(screen: Console, report: dict[str, Any], arguments: argparse.Namespace) -> None:
    from nnfmq.cli.profile_tables import arena_table, operations_table, summary

    screen.print(operations_table(report, arguments.sort, wide=screen.width >= _WIDE))
    if arguments.arena:
        for arena in report["arenas"]:
            screen.print(arena_table(arena))
    for line in summary(report):
        screen.print(line)
