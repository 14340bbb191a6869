"""`nnfmq demo`: classify the packaged digits in a driver process; needs nothing but the package.

The command starts an embedded driver, classifies every digit of `nnfmq/data` over one burst, and shows some of them.
The progress bar is drawn between the timed executions. Times are
those of the call to `burst.execute`, as an application sees them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import compiling, console, microseconds, print_json, progress_bar, share_text, table
from nnfmq.cli.model_file import program_report, program_text

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from nnfmq.hal.tensor_info import TensorInfo

    Array = np.ndarray[Any, Any]

EXAMPLES = """\
examples:
  nnfmq demo
  nnfmq demo --quantized
  nnfmq demo --json
"""

_FLOAT_MODEL = "digits.tflite"
_QUANTIZED_MODEL = "digits_quant.tflite"

_SHOWN = 6
_WARM_UP = 20
_TIMEOUT_S = 30.0
_BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
_NEXT = {
    "your own model": "nnfmq run MODEL.tflite --input photo.jpg",
    "one driver for all applications": "nnfmq serve",
    "check this machine": "nnfmq doctor",
}


@dataclass(frozen=True, slots=True)
class Classification:
    """The predicted class and the latency for each digit, the time from `connect` to the first result, and what ran."""

    predictions: list[int]
    latencies_ns: list[int]
    first_result_ns: int
    ran: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--quantized", action="store_true", help="also run the int8 model, and print both side by side")
    parser.add_argument("--json", action="store_true", help="print JSON instead of drawings")


def execute(arguments: argparse.Namespace) -> int:
    """Classify every digit and print the result; return the exit status."""
    from nnfmq.lab.conditions import machine

    images, labels = load_digits()
    conditions = machine()
    screen = console(arguments.no_color)
    result = classify(images, _FLOAT_MODEL, arguments.no_color)
    report = {"digits": len(labels), **_metrics(_FLOAT_MODEL, result, labels), "conditions": conditions}
    report |= {"predictions": result.predictions, "labels": labels.tolist()}
    if arguments.quantized:
        quantized = classify(images, _QUANTIZED_MODEL, arguments.no_color)
        report["quantized"] = _metrics(_QUANTIZED_MODEL, quantized, labels)
    if arguments.json:
        print_json(report)
    else:
        _show(screen, images, labels, result.predictions)
        _summarize(screen, report)
    return 0


def load_digits() -> tuple[Array, Array]:
    """Return the packaged test digits, (n, 8, 8) float32 in [0, 1], and their labels, (n,) int64."""
    import numpy as np

    import nnfmq

    with np.load(nnfmq.example_path("digits.npz"), allow_pickle=False) as data:
        return data["images"].astype(np.float32) / np.float32(16), data["labels"].astype(np.int64)


def classify(images: Array, name: str, no_color: bool) -> Classification:
    """Classify `images` with the packaged model `name`, over one burst of an embedded driver started for this call."""
    from nnfmq import connect, example_path, load
    from nnfmq.queue.core import core_name

    begin = time.monotonic_ns()
    with ExitStack() as stack:
        client = stack.enter_context(connect(embedded=True))
        with compiling(no_color, name) as progress:
            prepare_begin = time.monotonic_ns()
            model = client.prepare(load(example_path(name)), progress=progress)
            ran = program_report(model, time.monotonic_ns() - prepare_begin)
        ran |= {"core": core_name, "driver_core": client.driver_core}
        stack.enter_context(model)
        burst = model.burst()
        stack.enter_context(burst)
        inputs = as_inputs(images, model.inputs[0])
        burst.execute(inputs[0], timeout=_TIMEOUT_S)
        first_result_ns = time.monotonic_ns() - begin
        for image in inputs[:_WARM_UP]:
            burst.execute(image, timeout=_TIMEOUT_S)
        predictions, latencies_ns = [], []
        for image in _with_progress(inputs, no_color):
            begin = time.monotonic_ns()
            (scores,) = burst.execute(image, timeout=_TIMEOUT_S)
            latencies_ns.append(time.monotonic_ns() - begin)
            predictions.append(int(scores.argmax()))
    return Classification(predictions, latencies_ns, first_result_ns, ran)


def as_inputs(images: Array, info: TensorInfo) -> Array:
    """Return `images`, shape (n, 8, 8), as n inputs of the model, quantized if the input is."""
    import numpy as np

    inputs = images.reshape(len(images), *info.shape)
    if not info.scale:
        return inputs
    limits = np.iinfo(info.dtype)
    quantized: Array = np.rint(inputs / info.scale) + info.zero_point
    return quantized.clip(limits.min, limits.max).astype(info.dtype)


def _with_progress(inputs: Array, no_color: bool) -> Iterator[Array]:
    """Yield the inputs and advance a progress bar after each."""
    with progress_bar("classifying digits", no_color) as show:
        for done, image in enumerate(inputs, start=1):
            yield image
            if show is not None:
                show(done, len(inputs))


def _metrics(model: str, result: Classification, labels: Array) -> dict[str, Any]:
    from nnfmq import example_path
    from nnfmq.lab.conditions import model_identity
    from nnfmq.lab.statistics import distribution

    correct = sum(a == b for a, b in zip(result.predictions, labels.tolist(), strict=True))
    return {
        **model_identity(example_path(model)),
        "correct": correct,
        "accuracy": correct / len(labels),
        "ran": result.ran,
        "first_result_ns": result.first_result_ns,
        "latency_ns": distribution(result.latencies_ns),
    }


def _show(screen: Console, images: Array, labels: Array, predictions: Sequence[int]) -> None:
    """Draw different digits that were classified correctly, and one that was not if there is one, side by side."""
    from rich.columns import Columns
    from rich.text import Text

    right = {digit: index for index, digit in enumerate(predictions) if digit == labels[index]}
    wrong = [index for index, digit in enumerate(predictions) if digit != labels[index]]
    chosen = [*(right[digit] for digit in sorted(right)[: _SHOWN - 1]), *wrong[:1]]
    in_color = screen.color_system is not None and not screen.no_color
    columns: list[Text] = []
    for index in chosen:
        prediction, label = predictions[index], int(labels[index])
        caption = f"= {prediction}" if prediction == label else f"= {prediction}, is {label}"
        columns.append(Text.assemble(draw(images[index], in_color), "\n", caption))
    screen.print(Columns(columns, padding=(1, 3)))


def draw(image: Array, in_color: bool) -> Text:
    """Return an image with values from 0 to 1 as half-block characters, two rows of pixels in each line."""
    from rich.text import Text

    lines = Text()
    for upper, lower in zip(image[0::2].tolist(), image[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            if in_color:
                lines.append("▀", f"{_grey(above)} on {_grey(below)}")
            else:
                lines.append(_BLOCKS[above >= 0.5, below >= 0.5])
        lines.append("\n")
    lines.rstrip()
    return lines


def _grey(value: float) -> str:
    level = round(255 * min(max(value, 0.0), 1.0))
    return f"rgb({level},{level},{level})"


def _summarize(screen: Console, report: dict[str, Any]) -> None:
    columns = {"float32": report, "int8": report["quantized"]} if "quantized" in report else {"": report}
    accuracies, programs, first_results, latencies = [], [], [], []
    for metrics in columns.values():
        times = metrics["latency_ns"]
        accuracies.append(f"{share_text(metrics['accuracy'], 1)} ({metrics['correct']} of {report['digits']} digits)")
        programs.append(program_text(metrics["ran"]))
        first_results.append(f"{metrics['first_result_ns'] / 1e6:,.0f} ms after `connect` was called")
        latencies.append(f"p50 {microseconds(times['p50'])} µs, p99 {microseconds(times['p99'])} µs")
    summary = table("result", *columns)
    summary.add_row("accuracy", *accuracies)
    summary.add_row("device", *programs)
    summary.add_row("first result", *first_results)
    summary.add_row("burst execution", *latencies)
    screen.print(summary)
    following = table("Next steps", "")
    for step in _NEXT.items():
        following.add_row(*step)
    screen.print(following)
