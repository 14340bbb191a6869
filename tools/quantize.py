"""Quantize a float32 .tflite model to 8-bit integers after training, by what it computes for some inputs.

    python tools/quantize.py MODEL.tflite CALIBRATION.npz -o OUT.tflite

CALIBRATION.npz holds float arrays, one for each input of the model and of its name (any name where the model has one
input): n inputs along the first axis, as the model gets them. A hundred, typical of what it will see, are plenty.
The result takes and gives codes: int8 (or uint8), with the scale and zero point that its file says. What is done is in
docs/how-to/quantize.md.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quant_params import Array, Range, sqnr_db
from quantize_calibration import Estimator, Sample, errors, measured, samples
from quantize_graph import Quantized, check, label, parameters, quantized, values
from tflite_reader import Graph, read

from nnfmq.cli.console import console, print_json, table
from nnfmq.hal.errors import InvalidArgument, NnfmqError


@dataclass(frozen=True, slots=True)
class Layer:
    """What became of one operator, or of an input of the model (`operator` is then "input").

    `low` and `high` were measured, `scale` and `zero_point` are the output's; `sqnr_db` compares the output with the
    float model's, `weights_sqnr_db` the weights (None: no error, or nothing to compare).
    """

    operator: str
    tensor: str
    low: float
    high: float
    scale: float
    zero_point: int
    sqnr_db: float | None
    weights_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A quantized model's file, and what became of each layer."""

    content: bytes
    layers: list[Layer]


def quantize(
    model: bytes, arrays: dict[str, Array], *, dtype: str = "int8", per_channel: bool, estimator: Estimator
) -> Result:
    """Quantize the .tflite file `model`; `arrays` are calibration inputs as `quantize_calibration.samples` takes them.

    The quantized model is also executed, so a result is one that nnfmq runs. Raises InvalidArgument for what cannot be
    quantized, GeneralFailure for what nnfmq cannot execute.
    """
    if per_channel and dtype != "int8":
        raise InvalidArgument(f"{dtype} has no scales per channel: int8 has")
    graph = read(model)
    check(graph)
    inputs = samples(arrays, graph)
    ranges = measured(graph, inputs, estimator)
    made = quantized(graph, parameters(graph, ranges, dtype), per_channel=per_channel)
    content = made.graph.compacted().written(f"{dtype}, calibrated with {len(inputs)} inputs")
    return Result(content, _layers(graph, made, ranges, inputs))


def _layers(graph: Graph, made: Quantized, ranges: dict[int, Range], inputs: Sequence[Sample]) -> list[Layer]:
    found = errors(graph, made.graph, made.parameters, inputs)
    named: list[tuple[str, int, float | None]] = [("input", index, None) for index in graph.inputs]
    named += [(label(n, o), o.outputs[0], _weights_sqnr(graph, made, n)) for n, o in enumerate(graph.operators)]
    return [_layer(graph, made, ranges, found, *each) for each in named]


def _layer(
    graph: Graph,
    made: Quantized,
    ranges: dict[int, Range],
    found: dict[int, float | None],
    name: str,
    index: int,
    weights: float | None,
) -> Layer:
    how, span = made.parameters[index], ranges[index]
    tensor = graph.tensors[index].name
    return Layer(name, tensor, span.low, span.high, how.scale, how.zero_point, found[index], weights)


def _weights_sqnr(graph: Graph, made: Quantized, number: int) -> float | None:
    if number not in made.weights:
        return None
    exact = values(graph.tensors[graph.operators[number].inputs[1]]).astype(np.float64)
    noise = np.square(exact - made.weights[number].reals()).sum()
    return sqnr_db(float(np.square(exact).sum()), float(noise))


def main(words: Sequence[str] | None = None) -> int:
    """Quantize a file as the command line says; return the exit status."""
    arguments = _parser().parse_args(words)
    per_channel = arguments.dtype == "int8" if arguments.per_channel is None else arguments.per_channel
    estimator = Estimator(arguments.percentile, arguments.moving_average)
    try:
        arrays = _arrays(arguments.calibration)
        model = arguments.model.read_bytes()
        result = quantize(model, arrays, dtype=arguments.dtype, per_channel=per_channel, estimator=estimator)
        arguments.out.write_bytes(result.content)
    except (NnfmqError, OSError) as error:
        print(f"quantize: error: {error}", file=sys.stderr)
        return 1
    sizes = {"float_bytes": len(model), "quantized_bytes": len(result.content)}
    if arguments.json:
        print_json({**sizes, "layers": [asdict(layer) for layer in result.layers]})
    else:
        _show(result.layers, sizes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a float32 .tflite file")
    parser.add_argument("calibration", type=Path, help="an .npz file with inputs")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--dtype", choices=("int8", "uint8"), default="int8", help="type of the codes (%(default)s)")
    channels = parser.add_mutually_exclusive_group()
    channels.add_argument(
        "--per-channel",
        action="store_const",
        const=True,
        help="convolutions: a scale per output channel (int8's default)",
    )
    channels.add_argument(
        "--per-tensor", dest="per_channel", action="store_const", const=False, help="one scale per tensor"
    )
    ranges = parser.add_mutually_exclusive_group()
    ranges.add_argument(
        "--percentile", type=_percentile, help="ranges from percentiles of each input, 50 to 100 excluded"
    )
    ranges.add_argument("--moving-average", type=_momentum, metavar="M", help="a moving average of extremes, old × M")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _percentile(text: str) -> float:
    return _between(text, 50.0, 100.0)


def _momentum(text: str) -> float:
    return _between(text, 0.0, 1.0)


def _between(text: str, low: float, high: float) -> float:
    value = float(text)
    if not low < value < high:
        raise argparse.ArgumentTypeError(f"between {low:g} and {high:g}, both excluded")
    return value


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file:  # np.load by itself would leave a damaged one open
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise InvalidArgument(f"{path}: not an .npz file but one array, as .npy has it")
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgument(f"{path}: not an .npz file of plain arrays: {error}") from None


def _show(layers: Sequence[Layer], sizes: dict[str, Any]) -> None:
    shown = table("layer", "output", ">low", ">high", ">scale", ">zero point", ">SQNR dB", ">weights dB")
    for layer in layers:
        numbers = (f"{layer.low:.4g}", f"{layer.high:.4g}", f"{layer.scale:.4g}", str(layer.zero_point))
        name = layer.operator.removeprefix("operator ")
        shown.add_row(name, layer.tensor, *numbers, _decibels(layer.sqnr_db), _decibels(layer.weights_sqnr_db))
    screen = console(no_color=False, at_least=110)
    screen.print(shown)
    screen.print("{float_bytes:,} bytes became {quantized_bytes:,}".format(**sizes))


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
