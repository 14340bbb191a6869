"""`nnfmq run`: one model, one input, over a burst: the top classes, and where the time went.

Files are read and judged before any driver is contacted. An output whose elements all lie along its last dimension is
taken for one score per class; others are summarized by their range. Quantized scores are printed as the real numbers
that they stand for; `--output` keeps every element as it came. States go from each execution to the next, beginning
with zeros or what was given for them; they are not printed, and saved only in an .npz, behind the outputs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import (
    add_connect_argument,
    at_least_one,
    compiling,
    console,
    microseconds,
    open_client,
    print_json,
    shape_text,
    table,
)
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from nnfmq.cli.inputs import Array

EXAMPLES = """\
examples:
  nnfmq run mobilenet.tflite --input photo.jpg --labels labels.txt
  nnfmq run mobilenet.tflite --input array.npy --repeat 200 --json
  nnfmq run model.tflite --input raw.bin --output scores.npy --connect embedded
  nnfmq run speech.tflite --input step.npy --output step.npz

States of recurrent models start from zeros, unless --input is given for each of them as well.
Photos (extra `images`): central square of 87.5 %, bilinear; float inputs in [-1, 1], uint8 as it is.
"""

_STAGES = {
    "latency": "from sending the request to having the result",
    "queue": "both ways through the queues, and waking",
    "driver": "reading the request, memory, answering",
    "engine": "the model itself",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`."""
    parser.add_argument("model", metavar="MODEL.tflite", type=Path)
    parser.add_argument(
        "--input", metavar="FILE", type=Path, action="append", required=True,
        help="photo, .npy array, or raw elements; once per input of the model (states may be left out)",
    )  # fmt: skip
    parser.add_argument("--labels", metavar="FILE", type=Path, help="one class name per line")
    parser.add_argument("--top", metavar="N", type=at_least_one, default=5, help="how many classes (default: 5)")
    parser.add_argument("--device", metavar="NAME", default="reference", help="default: reference")
    parser.add_argument("--repeat", metavar="N", type=at_least_one, default=1, help="executions; times are their p50")
    parser.add_argument("--timeout", metavar="S", type=float, default=60.0, help="seconds per step (default: 60)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="save the outputs: .npy, or .npz if several")
    add_connect_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read the files, prepare, burst, print."""
    import nnfmq
    from nnfmq.cli.inputs import read_inputs

    model = nnfmq.load(arguments.model)
    inputs = read_inputs(arguments.input, model.inputs)
    labels = None if arguments.labels is None else read_labels(arguments.labels)
    outputs, times = _burst(arguments, model, inputs)
    results = [pair for pair in zip(outputs, model.outputs, strict=True) if not pair[1].is_state]
    if arguments.output is not None:
        _save(arguments.output, outputs, len(results))
    report = {
        "model": str(arguments.model),
        "device": arguments.device,
        "outputs": [_output(array, info, labels, arguments.top) for array, info in results],
        "repeat": arguments.repeat,
        "p50_ns": times,
    }
    if arguments.json:
        print_json(report)
    else:
        _print(console(arguments.no_color), report)
    return 0


def read_labels(path: Path) -> list[str]:
    """Read one label per line. Raises InvalidArgument for what is not text."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as bad:
        raise InvalidArgument(f"{path}: not a text file in UTF-8: {bad.reason}") from bad


def _burst(
    arguments: argparse.Namespace, model: Any, inputs: Sequence[Array]
) -> tuple[tuple[Array, ...], dict[str, int]]:
    """Return the outputs, and the p50 of each stage over the repeats."""
    from contextlib import ExitStack

    from nnfmq.hal.types import ExecutionPreference

    with ExitStack() as stack:
        client = stack.enter_context(open_client(arguments.connect))
        device = client.device(arguments.device)
        one, many = ExecutionPreference.FAST_SINGLE_ANSWER, ExecutionPreference.SUSTAINED_SPEED
        how = {"preference": one if arguments.repeat == 1 else many, "timeout": arguments.timeout}
        with compiling(arguments.no_color) as progress:
            prepared = stack.enter_context(device.prepare(model, progress=progress, **how))
        burst = stack.enter_context(prepared.burst())
        executions, states = [], sum(info.is_state for info in model.inputs)
        for _ in range(arguments.repeat):
            outputs = burst.execute(*inputs, timeout=arguments.timeout)
            executions.append(burst.last)
            inputs = [*inputs[: len(inputs) - states], *outputs[len(outputs) - states :]]
    return outputs, {name: median_low(getattr(last, f"{name}_ns") for last in executions) for name in _STAGES}


def _save(path: Path, outputs: Sequence[Array], count: int) -> None:
    """Save the outputs, of which `count` are no states."""
    import numpy as np

    if path.suffix == ".npz":
        np.savez(path, *outputs)
    elif path.suffix == ".npy" and count == 1:
        np.save(path, outputs[0])
    else:
        raise InvalidArgument(f"{path}: {count} outputs are saved as .npz{' or .npy' * (count == 1)}")


def _output(array: Array, info: Any, labels: list[str] | None, top: int) -> dict[str, Any]:
    real = _real(array, info)
    described = {"name": info.name, "shape": list(array.shape), "dtype": str(array.dtype)}
    if array.ndim and array.size == array.shape[-1] and array.size > 1:
        return described | {"top": _top(real.reshape(-1), labels, top)}
    return described | ({"min": float(real.min()), "max": float(real.max())} if array.size else {})


def _real(array: Array, info: Any) -> Array:
    """Return the real numbers that quantized elements stand for."""
    real: Array = (array.astype("float64") - info.zero_point) * info.scale if info.scale else array
    return real


def _top(scores: Array, labels: list[str] | None, top: int) -> list[dict[str, Any]]:
    if labels is not None and len(labels) != scores.size:
        raise InvalidArgument(f"{len(labels)} labels given; the model has {scores.size} classes")
    best = (-scores.astype("float64")).argsort(kind="stable")[:top]
    return [
        {"class": int(index), "score": float(scores[index])} | ({} if labels is None else {"label": labels[index]})
        for index in best
    ]


def _print(console: Console, report: dict[str, Any]) -> None:
    for output in report["outputs"]:
        console.print(_top_table(output) if "top" in output else _summary(output))
    split = table("time", ">µs" if report["repeat"] == 1 else ">p50 µs", "")
    for name, meaning in _STAGES.items():
        split.add_row(name, microseconds(report["p50_ns"][name]), meaning)
    console.print(split)
    count = report["repeat"]
    once = "One execution, the first: --repeat N shows the settled times."
    console.print(f"{count} executions." if count > 1 else once)


def _top_table(output: dict[str, Any]) -> Any:
    listing = table(">score", ">class", "label")
    for entry in output["top"]:
        listing.add_row(f"{entry['score']:.4f}", str(entry["class"]), entry.get("label", ""))
    return listing


def _summary(output: dict[str, Any]) -> str:
    shape = f"{shape_text(output['shape'])} {output['dtype']}"
    extent = f"from {output['min']:.6g} to {output['max']:.6g}" if "min" in output else "no elements"
    return f"{output['name']}: {shape}, {extent}"
