"""`nnfmq demo`: a real classifier in a real driver process, with nothing but the package.

It starts an embedded driver, classifies every digit of `nnfmq/data` over one burst, and shows some with their answers.
The progress bar is drawn between the timed executions, never by a thread of its own, which would compete with them for
the interpreter. Times are what an application sees: the call to `burst.execute`, from outside.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnfmq.cli.output import console, distribution, microseconds, print_json, table

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
_NEXT = """\
What to do next
  your own model                   nnfmq run MODEL.tflite --input photo.jpg
  one driver for all applications  nnfmq serve
  what this machine offers         nnfmq doctor
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo found: an answer and a time for each digit, and the time to the first answer."""

    answers: list[int]
    latencies_ns: list[int]
    first_result_ns: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--quantized", action="store_true", help="the model in int8 as well, and the two side by side")
    parser.add_argument("--json", action="store_true", help="print JSON, no drawings and no progress")


def execute(arguments: argparse.Namespace) -> int:
    """Classify every digit and show what came of it."""
    images, labels = load_digits()
    screen = console(arguments.no_color)
    progress = None if arguments.json else screen
    outcome = classify(images, _FLOAT_MODEL, progress)
    report = _report(outcome, labels)
    if arguments.quantized:
        report["quantized"] = _measures(classify(images, _QUANTIZED_MODEL, progress), labels)
    if arguments.json:
        print_json(report)
    else:
        _show(screen, images, labels, outcome.answers)
        _summarize(screen, report)
    return 0


def load_digits() -> tuple[Array, Array]:
    """Return the packaged test digits, (n, 8, 8) float32 in [0, 1], and the digit that each one is, (n,)."""
    import numpy as np

    import nnfmq

    with np.load(nnfmq.example_path("digits.npz"), allow_pickle=False) as data:
        return data["images"].astype(np.float32) / np.float32(16), data["labels"].astype(np.int64)


def classify(images: Array, name: str, screen: Console | None) -> Outcome:
    """Classify `images` by the packaged model `name`, over one burst with an embedded driver that ends before this."""
    from nnfmq import connect, example_path, load

    begin = time.monotonic_ns()
    with (
        connect(embedded=True) as client,
        client.device("reference").prepare(load(example_path(name))) as model,
        model.burst() as burst,
    ):
        inputs = as_inputs(images, model.inputs[0])
        burst.execute(inputs[0], timeout=_TIMEOUT_S)
        first_result_ns = time.monotonic_ns() - begin
        for image in inputs[:_WARM_UP]:
            burst.execute(image, timeout=_TIMEOUT_S)
        timed = [_timed(burst, image) for image in _with_progress(inputs, screen)]
    return Outcome([answer for answer, _ in timed], [latency_ns for _, latency_ns in timed], first_result_ns)


def as_inputs(images: Array, info: TensorInfo) -> Array:
    """Return `images`, n of them, as n inputs of the model: as they are, or the nearest codes where it takes codes."""
    import numpy as np

    inputs = images.reshape(len(images), *info.shape)
    if not info.scale:
        return inputs
    limits = np.iinfo(info.dtype)
    codes: Array = np.rint(inputs / info.scale) + info.zero_point
    return codes.clip(limits.min, limits.max).astype(info.dtype)


def _timed(burst: Any, image: Array) -> tuple[int, int]:
    begin = time.monotonic_ns()
    (scores,) = burst.execute(image, timeout=_TIMEOUT_S)
    end = time.monotonic_ns()
    return int(scores.argmax()), end - begin


def _with_progress(inputs: Array, screen: Console | None) -> Iterator[Array]:
    """Yield the inputs, and advance a bar on `screen` every tenth one."""
    if screen is None:
        yield from inputs
        return
    from rich.progress import Progress

    with Progress(console=screen, auto_refresh=False, disable=not screen.is_terminal) as progress:
        task = progress.add_task("classifying digits", total=len(inputs))
        for done, image in enumerate(inputs, start=1):
            yield image
            progress.update(task, completed=done, refresh=done % 10 == 0 or done == len(inputs))


def _report(outcome: Outcome, labels: Array) -> dict[str, Any]:
    answers = {"answers": outcome.answers, "labels": labels.tolist()}
    return {"digits": len(labels), **_measures(outcome, labels), **answers}


def _measures(outcome: Outcome, labels: Array) -> dict[str, Any]:
    correct = sum(answer == label for answer, label in zip(outcome.answers, labels.tolist(), strict=True))
    return {
        "correct": correct,
        "accuracy": correct / len(labels),
        "first_result_ns": outcome.first_result_ns,
        "latency_ns": distribution(outcome.latencies_ns),
    }


def _show(screen: Console, images: Array, labels: Array, answers: Sequence[int]) -> None:
    """Draw different digits with right answers, and one wrong answer if there is one, side by side."""
    from rich.columns import Columns
    from rich.text import Text

    right = {answer: index for index, answer in enumerate(answers) if answer == labels[index]}
    wrong = [index for index, answer in enumerate(answers) if answer != labels[index]]
    chosen = [*(right[digit] for digit in sorted(right)[: _SHOWN - 1]), *wrong[:1]]
    in_color = screen.color_system is not None and not screen.no_color
    captions = [_caption(answers[index], int(labels[index])) for index in chosen]
    drawings = [draw(images[index], in_color) for index in chosen]
    cells = [Text.assemble(drawing, "\n", caption) for drawing, caption in zip(drawings, captions, strict=True)]
    screen.print(Columns(cells, padding=(1, 3)))


def _caption(answer: int, label: int) -> str:
    return f"= {answer}" if answer == label else f"= {answer}, is {label}"


def draw(image: Array, in_color: bool) -> Text:
    """Return an image, values 0 to 1, as half-block characters: two rows of pixels in each line of text."""
    from rich.text import Text

    lines = Text()
    for upper, lower in zip(image[0::2].tolist(), image[1::2].tolist(), strict=True):
        for pair in zip(upper, lower, strict=True):
            lines.append_text(_cell(*pair, in_color))
        lines.append("\n")
    lines.rstrip()
    return lines


def _cell(upper: float, lower: float, in_color: bool) -> Text:
    from rich.text import Text

    if in_color:
        return Text("▀", f"{_grey(upper)} on {_grey(lower)}")
    return Text(_BLOCKS[upper >= 0.5, lower >= 0.5])


def _grey(value: float) -> str:
    level = round(255 * min(max(value, 0.0), 1.0))
    return f"rgb({level},{level},{level})"


def _summarize(screen: Console, report: dict[str, Any]) -> None:
    columns = {"float32": report, "int8": report["quantized"]} if "quantized" in report else {"": report}
    measures = columns.values()
    figures = table("result", *columns)
    figures.add_row("accuracy", *(_accuracy(m, report["digits"]) for m in measures))
    figures.add_row(
        "first answer", *(f"{m['first_result_ns'] / 1e6:,.0f} ms after asking for a driver" for m in measures)
    )
    figures.add_row("burst execution", *(_times(m["latency_ns"]) for m in measures))
    screen.print(figures)
    screen.print(_NEXT)


def _accuracy(measures: dict[str, Any], count: int) -> str:
    return f"{measures['accuracy']:.1%} ({measures['correct']} of {count} digits)"


def _times(times: dict[str, int]) -> str:
    return f"p50 {microseconds(times['p50'])} µs, p99 {microseconds(times['p99'])} µs"
