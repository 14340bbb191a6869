"""`nnfmq run`: execute one model over a burst and print the top classes and the time of each stage.

Files are read and checked before a driver is contacted, unless a hosted runtime has to open the model. If all elements
of an output are along its last dimension, and floats or quantized, they are taken as class scores. Other outputs are
printed if they are small, and otherwise summarized by their range. Quantized values are printed as real numbers;
`--output` saves the elements unchanged. A model with states takes several
sets of input files, one for each step; the outputs of the last step are printed and saved.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import (
    add_class_argument,
    add_connect_argument,
    at_least_one,
    compiling,
    console,
    microseconds,
    number,
    open_client,
    open_runtime,
    print_json,
    progress_bar,
    shape_text,
    table,
)
from nnfmq.cli.model_file import (
    ModelFile,
    add_model_arguments,
    add_runtime_option,
    file_options,
    program_report,
    program_text,
    sizes_as_options,
)
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from nnfmq.cli.inputs import Array
    from nnfmq.client.connection.hosted_choice import FileOptions
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.importers import LoadedModel
    from nnfmq.media.images import Normalization

EXAMPLES = """\
examples:
  nnfmq run mobilenet.tflite --input photo.jpg --labels labels.txt
  nnfmq run mobilenet.tflite --input array.npy --repeat 200 --json
  nnfmq run mobilenet.tflite --shape 4x224x224x3 --input batch.npy
  nnfmq run detector.onnx --input image.npy --device onnxruntime
  nnfmq run speech.tflite --input step.npy --output step.npz

States of recurrent models start at zero, unless there is an --input for each.
Photos (extra `images`): the central square of 87.5 %, resized bilinearly.
"""

_CPU = "nnapi-reference"
_EXECUTION_S = 60.0
_SHOWN_MAX = 16
"""Outputs of so many elements are printed, and not only their range."""
_STAGES = {
    "latency": "from sending the request to having read the result",
    "queue": "both queues and wake-ups",
    "driver": "decoding the request, memory, encoding the result",
    "engine": "the model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`."""
    parser.usage = "%(prog)s [options] --input FILE MODEL.tflite"
    add_model_arguments(parser)
    parser.add_argument(
        "--input", metavar="FILE", type=Path, action="append", required=True,
        help="photo, .wav, .npy or raw; for each input (and step)",
    )  # fmt: skip
    parser.add_argument("--labels", metavar="FILE", type=Path, help="one class name per line (default: the model's)")
    parser.add_argument(
        "--normalize", metavar="MEAN,STD", type=_mean_and_std, help="of a photo's pixels (default: the model's)"
    )
    parser.add_argument(
        "--top", metavar="N", type=at_least_one, default=5, help="number of classes to print (default: 5)"
    )
    parser.add_argument(
        "--device", metavar="NAME",
        help="or several, as NAME,NAME (default: the best)",
    )  # fmt: skip
    add_runtime_option(parser)
    parser.add_argument("--deterministic", action="store_true", help="the same bits on every machine")
    parser.add_argument(
        "--repeat",
        metavar="N",
        type=at_least_one,
        default=1,
        help="number of executions; times are their p50 (default: 1)",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=number,
        help="limit in seconds (default: 60 for an execution)",
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="save the outputs as .npy, or .npz if there are several"
    )
    add_connect_argument(parser)
    add_class_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read the files, execute the model, print the result; return the exit status."""
    from nnfmq.lab.conditions import subject_of
    from nnfmq.media.class_scores import metadata_labels, read_labels

    file = ModelFile.read(arguments)
    steps = None if file.loaded is None else _steps(arguments, file.loaded)
    labels = None if arguments.labels is None else read_labels(arguments.labels)
    subject = subject_of(arguments.model)
    ran, model, outputs, times = _burst(arguments, file, steps)
    results = list(zip(outputs, model.outputs, strict=True))
    if arguments.output is not None:
        _save(arguments.output, outputs)
    report = {
        **subject,
        **ran,
        "outputs": [
            _output(array, info, metadata_labels(model, index) if labels is None else labels, arguments.top)
            for index, (array, info) in enumerate(results)
        ],
        "repeat": arguments.repeat,
        "p50_ns": times,
    }
    if arguments.json:
        print_json(report)
    else:
        _print(console(arguments.no_color), report)
    return 0


def _steps(arguments: argparse.Namespace, model: LoadedModel | CompiledModel) -> list[list[Array]]:
    from nnfmq.cli.inputs import read_steps

    normalizations = photo_normalizations(model, arguments.normalize)
    return read_steps(arguments.input, model.inputs, normalizations, has_states=bool(model.states))


def photo_normalizations(
    model: LoadedModel | CompiledModel, normalization: Normalization = None
) -> list[Normalization]:
    """Return the normalization of each input: `normalization`, else that of the file's metadata, if any."""
    if normalization is not None:
        return [normalization] * len(model.inputs)
    described = model.metadata.inputs if model.metadata is not None else ()
    return [(tensor.mean, tensor.std) if tensor.mean else None for tensor in described]


def _mean_and_std(text: str) -> tuple[list[float], list[float]]:
    """Argparse type: MEAN,STD of all channels, or the means of each, then the standard deviations."""
    numbers = [float(number) for number in text.split(",")]
    half = len(numbers) // 2
    mean, std = numbers[:half], numbers[half:]
    if len(mean) != len(std) or len(mean) not in (1, 3) or not all(map(math.isfinite, numbers)) or 0 in std:
        raise argparse.ArgumentTypeError("MEAN,STD, or 3 means and 3 STDs: finite numbers, and no STD of 0")
    return mean, std


def _burst(
    arguments: argparse.Namespace, file: ModelFile, steps: Sequence[Sequence[Array]] | None
) -> tuple[dict[str, Any], LoadedModel | CompiledModel, tuple[Array, ...], dict[str, int]]:
    """Return the executing program, the model, the last outputs, and the p50 of each stage over all executions."""
    with ExitStack() as stack:
        prepare = _prepare_function(arguments, file, stack)
        begin_ns = time.monotonic_ns()
        with compiling(arguments.no_color, arguments.model.name) as progress:
            prepared = prepare(progress=progress, timeout=arguments.timeout, deterministic=arguments.deterministic)
        ran = program_report(prepared, time.monotonic_ns() - begin_ns)
        stack.enter_context(prepared)
        if steps is None:
            steps = _steps(arguments, prepared)
        timeout = _EXECUTION_S if arguments.timeout is None else arguments.timeout
        burst = prepared.burst()
        stack.enter_context(burst)
        progress = stack.enter_context(progress_bar("executing", arguments.no_color))
        executions = []
        for _ in range(arguments.repeat):
            for inputs in steps:
                outputs = burst.execute(*inputs, timeout=timeout)
                executions.append(burst.last)
                if progress is not None:
                    progress(len(executions), arguments.repeat * len(steps))
    return (
        ran,
        prepared if file.loaded is None else file.loaded,
        outputs,
        {name: median_low(getattr(last, f"{name}_ns") for last in executions) for name in _STAGES},
    )


def _prepare_function(arguments: argparse.Namespace, file: ModelFile, stack: ExitStack) -> Callable[..., CompiledModel]:
    """Return the function that prepares the model on the devices that --device names; by default on the best one.

    A file that nnfmq's own engine does not take is given as such: a hosted runtime opens it.
    """
    from nnfmq.client.connection.device import hosts_runtime
    from nnfmq.importers.file_format import read_source

    loaded, of_file = file.loaded, file_options(arguments)
    names = (arguments.device or "").split(",")
    if len(names) > 1 or names == [_CPU]:
        runtime = stack.enter_context(open_runtime(arguments.connect))
        prepare = partial(runtime.prepare, devices=names)
        if loaded is not None:
            return partial(prepare, loaded)
        return partial(_prepare_file, partial(prepare, arguments.model), of_file)
    client = stack.enter_context(open_client(arguments.connect))
    if arguments.device is None:
        if loaded is not None:
            return partial(client.prepare, loaded)
        source = read_source(arguments.model)
        return partial(_prepare_file, partial(client.prepare_hosted, None, source, file.refusal), of_file)
    device = client.device(arguments.device)
    is_own = not hosts_runtime(device.info)
    if is_own and loaded is not None:
        return partial(device.prepare, loaded)
    if is_own and file.refusal is not None:
        with sizes_as_options():
            raise file.refusal
    return partial(_prepare_file, partial(device.prepare, arguments.model), of_file)


def _prepare_file(prepare: Callable[..., CompiledModel], of_file: FileOptions, **options: Any) -> CompiledModel:
    with sizes_as_options():
        return prepare(**of_file, **options)


def _save(path: Path, outputs: Sequence[Array]) -> None:
    """Save the outputs.

    Raises:
        InvalidArgument: If the file's suffix does not fit the number of outputs.
    """
    import numpy as np

    count = len(outputs)
    if path.suffix == ".npz":
        np.savez(path, *outputs)
    elif path.suffix == ".npy" and count == 1:
        np.save(path, outputs[0])
    else:
        outputs_text = counted(count, "output")
        raise InvalidArgument(f"{path}: {outputs_text} can be saved as .npz{' or .npy' * (count == 1)} only")


def _output(array: Array, info: Any, labels: list[str] | None, top: int) -> dict[str, Any]:
    from nnfmq.media.class_scores import real_values

    real = real_values(array, info)
    summary = {"name": info.name, "shape": list(array.shape), "dtype": str(array.dtype)}
    if array.ndim and array.size == array.shape[-1] and array.size > 1 and real.dtype.kind == "f":
        return summary | {"top": _top(real, labels, top)}
    if array.size and array.dtype.kind != "c":  # complex numbers have no order
        summary |= {"min": float(real.min()), "max": float(real.max())}
    if array.size <= _SHOWN_MAX:
        summary["values"] = real.tolist() if real.dtype.kind != "c" else [real.real.tolist(), real.imag.tolist()]
    return summary


def _top(scores: Array, labels: list[str] | None, top: int) -> list[dict[str, Any]]:
    from nnfmq.media.class_scores import top_classes

    return [
        {"class": each.class_id, "score": each.score} | ({} if labels is None else {"label": each.label})
        for each in top_classes(scores, labels=labels, count=top)
    ]


def _values_text(output: dict[str, Any]) -> str:
    """Return the values of an output, or their range."""
    if "values" in output:
        return _rounded(output["values"])
    return f"from {output['min']:.6g} to {output['max']:.6g}" if "min" in output else "complex numbers"


def _rounded(values: Any) -> str:
    """Return numbers, in lists or not, with six significant digits."""
    if isinstance(values, list):
        return f"[{', '.join(map(_rounded, values))}]"
    return f"{values:.6g}" if isinstance(values, float) else str(values)


def _print(console: Console, report: dict[str, Any]) -> None:
    for output in report["outputs"]:
        if "top" in output:
            classes = table(">score", ">class", "label")
            for entry in output["top"]:
                classes.add_row(f"{entry['score']:.4f}", str(entry["class"]), entry.get("label", ""))
            console.print(classes)
        else:
            console.print(f"{output['name']}: {shape_text(output['shape'])} {output['dtype']}, {_values_text(output)}")
    split = table("time", ">µs" if report["repeat"] == 1 else ">p50 µs", "")
    for name, meaning in _STAGES.items():
        split.add_row(name, microseconds(report["p50_ns"][name]), meaning)
    console.print(split)
    console.print(program_text(report))
    count = report["repeat"]
    once = "One execution. The first one is slower than later ones: use --repeat N to compare times."
    console.print(f"{count} executions." if count > 1 else once)
