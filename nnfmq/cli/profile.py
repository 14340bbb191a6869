"""`nnfmq profile`: time each operation of a model and compare it with the machine's measured ceilings.

The engine runs in this process, without a driver or queue. A model that only a hosted runtime runs is executed by a
driver (`profile_hosted`). Files are read and checked before anything is timed. Without
--input, inputs are random; integers without a scale are 0 because they may be indices. States begin as usual.
The report is made in `profile_report`, its page in `profile_page`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.base.processes import allowed_cores, use_one_blas_thread
from nnfmq.cli.console import (
    add_connect_argument,
    at_least_one,
    compiling,
    console,
    from_zero,
    new_file,
    print_json,
    progress_bar,
)
from nnfmq.cli.model_file import ModelFile, SizesNeeded, add_model_arguments, add_runtime_option
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.cli.inputs import Array
    from nnfmq.engines.profiling import Profile
    from nnfmq.engines.program import Program
    from nnfmq.hal.tensor_info import TensorInfo
    from nnfmq.importers import LoadedModel
    from nnfmq.operations.declaration import Shape

EXAMPLES = """\
examples:
  nnfmq profile mobilenet.tflite
  nnfmq profile mobilenet.tflite --sort time --threads 1 --html profile.html
  nnfmq profile mobilenet.tflite --input photo.jpg --runs 500 --json
  nnfmq profile speech.tflite --device reference --arena
  nnfmq profile detector.onnx --device onnxruntime

The engine runs in this process, without a driver. Each operation is timed in place during passes over the whole model.
A model that a hosted runtime runs is one operation, which a driver executes.
"""

DEVICES = ("compiled", "reference")
_RUNS = {"compiled": 100, "reference": 10}
_INSTALL = "llvmlite is not installed; run pip install 'nnfmq[compiled]', or profile --device reference"
_WIDE = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `profile`."""
    parser.usage = "%(prog)s [options] MODEL.tflite"
    add_model_arguments(parser)
    parser.add_argument(
        "--device", metavar="NAME", type=_device, help="default: compiled, or a hosted runtime if needed"
    )
    parser.add_argument(
        "--threads", metavar="N", type=at_least_one, help="threads of the device compiled (default: all cores)"
    )
    parser.add_argument("--runs", metavar="N", type=at_least_one, help="number of runs (default: 100; reference: 10)")
    parser.add_argument(
        "--input", metavar="FILE", type=Path, action="append", default=[],
        help="photo, .wav, .npy or raw; once for each input of the model",
    )  # fmt: skip
    parser.add_argument(
        "--seed", metavar="N", type=from_zero, default=0, help="seed of random inputs, without --input (default: 0)"
    )
    parser.add_argument(
        "--sort", choices=("order", "time"), default="order", help="order of the table (default: the model's order)"
    )
    parser.add_argument("--arena", action="store_true", help="also print the memory plan")
    parser.add_argument("--html", metavar="FILE", type=new_file, help="write an HTML page with charts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_connect_argument(parser)
    add_runtime_option(parser, in_help=False)


def _device(name: str) -> str:
    """Argparse type: a device of nnfmq's own engines, or one that hosts a runtime."""
    if name not in DEVICES:
        from nnfmq.hal.hosted import RUNTIMES, is_runtime_name

        if not is_runtime_name(name):
            names = ", ".join((*DEVICES, *(runtime.name for runtime in RUNTIMES)))
            raise argparse.ArgumentTypeError(f"{name!r} is none of {names}")
    return name


def execute(arguments: argparse.Namespace) -> int:
    """Read the files, measure, write and print the report; return the exit status."""
    if problem := _misuse(arguments):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    if "numpy" not in sys.modules:
        use_one_blas_thread()  # as in the driver
    from nnfmq.client.model.handle import initial_values
    from nnfmq.lab.conditions import subject_of
    from nnfmq.validation import validate_model

    file = ModelFile.read(arguments)
    if file.loaded is None:
        return _execute_hosted(arguments, file)
    model = file.loaded
    arguments.device = arguments.device or DEVICES[0]
    validate_model(model.model)
    inputs = [*_inputs(arguments, model.inputs), *initial_values(model.states)]
    report = subject_of(arguments.model) | profile_report(arguments, model, inputs)
    if arguments.html is not None:
        from nnfmq.cli.profile_page import render

        arguments.html.write_text(render(report), encoding="utf-8")
    if arguments.json:
        print_json(report)
    else:
        _print(console(arguments.no_color), report, arguments)
    return 0


def _execute_hosted(arguments: argparse.Namespace, file: ModelFile) -> int:
    """Do the same with a model that a hosted runtime runs."""
    from nnfmq.cli.profile_hosted import print_report, profile_hosted
    from nnfmq.importers.loaded_model import UnknownShapes
    from nnfmq.lab.conditions import subject_of

    if isinstance(file.refusal, UnknownShapes):
        raise SizesNeeded(file.refusal)
    device, model = file.hosted(arguments)
    subject = subject_of(arguments.model)
    print_report(arguments, subject | profile_hosted(arguments, device, model, _inputs(arguments, model.inputs)))
    return 0


def _misuse(arguments: argparse.Namespace) -> str:
    available = allowed_cores()
    if arguments.threads is None:
        return ""
    if arguments.device not in (None, "compiled"):
        return f"--threads applies to the device compiled only; {arguments.device} uses one thread: omit it"
    if arguments.threads > available:
        return f"--threads {arguments.threads}: this process may use {available} cores, so give 1 to {available}"
    return ""


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


# -- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(arguments: argparse.Namespace, tensors: Sequence[TensorInfo]) -> list[Array]:
    if arguments.input:
        from nnfmq.cli.inputs import read_inputs

        return read_inputs(arguments.input, tensors)
    return random_inputs(tensors, arguments.seed)


def random_inputs(tensors: Sequence[TensorInfo], seed: int) -> list[Array]:
    """Return an array for each input, the same for the same seed.

    Raises:
        InvalidArgument: If the shape of an input is unknown.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    return [_random(random, tensor) for tensor in tensors]


def _random(random: Any, tensor: TensorInfo) -> Array:
    import numpy as np

    dtype = np.dtype(tensor.dtype)
    if tensor.has_unknown_shape:
        shape = "x".join(str(size or "?") for size in tensor.shape) or "unknown"
        raise InvalidArgument(f"the shape of input {tensor.name} is {shape}; measuring needs a known one: give --shape")
    if dtype.kind == "f":
        return np.asarray(random.uniform(-1, 1, tensor.shape), dtype)
    if tensor.scale:
        info = np.iinfo(dtype)
        return np.asarray(random.integers(info.min, info.max, tensor.shape, endpoint=True), dtype)
    return np.zeros(tensor.shape, dtype)


# -- measuring --------------------------------------------------------------------------------------------------------


def profile_report(arguments: argparse.Namespace, model: LoadedModel, inputs: Sequence[Array]) -> dict[str, Any]:
    """Measure each operation and return the report; `arguments` are those of this command, `inputs` has the states.

    Raises:
        InvalidArgument: If the device `compiled` is not available.
    """
    from nnfmq.cli.profile_report import build

    has_llvmlite = _is_installed("llvmlite")
    if arguments.device == "compiled" and not has_llvmlite:
        raise InvalidArgument(_INSTALL)
    runs = arguments.runs or _RUNS[arguments.device]
    conditions = {
        "model": str(arguments.model),
        "device": arguments.device,
        "where": "in this process",
        "runs": runs,
        "inputs": [str(path) for path in arguments.input] or f"random, seed {arguments.seed}",
    }
    if not has_llvmlite:
        program, times = _measured(arguments, model, inputs, runs)
        return build(model.model.main, program, times, None, {**conditions, "threads": 1, "target": None})
    from nnfmq.engines.compiled.target import host_target
    from nnfmq.lab.roofline import measure_ceilings

    with _limited_pool(arguments.threads) as pool:
        ceilings = measure_ceilings(pool)
        program, times = _measured(arguments, model, inputs, runs)
        threads = pool.worker_count + 1 if arguments.device == "compiled" else 1
        conditions |= {"threads": threads, "ceiling_threads": pool.worker_count + 1, "target": host_target().name}
        return build(model.model.main, program, times, ceilings, conditions)


@contextmanager
def _limited_pool(threads: int | None) -> Iterator[Any]:
    """Yield the process's thread pool, limited to `threads` threads meanwhile."""
    from nnfmq.engines.compiled.thread_pool import default_thread_pool

    pool = default_thread_pool()
    usual = pool.worker_count
    if threads is not None:
        pool.set_worker_count(threads - 1)
    try:
        yield pool
    finally:
        pool.set_worker_count(usual)


def _measured(
    arguments: argparse.Namespace, model: LoadedModel, inputs: Sequence[Array], runs: int
) -> tuple[Program, Profile]:
    import numpy as np

    from nnfmq.engines.profiling import measure
    from nnfmq.operations.declaration import NUMPY_TYPES

    program, main = _prepared(arguments, model), model.model.main
    dtypes = [NUMPY_TYPES[main.operands[index].type] for index in (*main.input_indexes, *main.output_indexes)]
    arrays = [array.astype(dtype, copy=False) for array, dtype in zip(inputs, dtypes, strict=False)]
    outputs = [_output(program.shapes[index], dtypes[len(inputs) + n]) for n, index in enumerate(main.output_indexes)]
    with np.errstate(all="ignore"), progress_bar("timing", arguments.no_color) as progress:
        return program, measure(program, program.bind(arrays, outputs), runs, progress)


def _prepared(arguments: argparse.Namespace, model: LoadedModel) -> Program:
    from nnfmq.engines import interpreter

    if arguments.device == "reference":
        return interpreter.prepare(model.model)
    from nnfmq.client.connection.prepare_arguments import compile_notice
    from nnfmq.engines.compiled.kernel_compilation import compile_in_process
    from nnfmq.engines.compiled.partition import prepare

    model_name = arguments.model.name
    with compiling(arguments.no_color, model_name) as bar, compile_notice(model_name, bar) as progress:
        if progress is None:
            return prepare(model.model)
        return prepare(model.model, compile=partial(compile_in_process, on_progress=progress))


def _output(shape: Shape | None, dtype: Any) -> Any:
    """Return an array for an output, or a `DynamicOutput` if its shape is not known before the execution."""
    import numpy as np

    from nnfmq.engines.execution import DynamicOutput

    return DynamicOutput(lambda shape: np.empty(shape, dtype)) if shape is None else np.empty(shape, dtype)


# -- printing ---------------------------------------------------------------------------------------------------------


def _print(screen: Console, report: dict[str, Any], arguments: argparse.Namespace) -> None:
    from nnfmq.cli.profile_report import arena_table, operations_table, summary

    screen.print(operations_table(report, arguments.sort, wide=screen.width >= _WIDE))
    if arguments.arena:
        for arena in report["arenas"]:
            screen.print(arena_table(arena))
    for line in summary(report):
        screen.print(line)
