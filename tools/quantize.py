"""Quantize a float32 .tflite model to 8-bit integers after training, calibrated with sample inputs.

    python tools/quantize.py MODEL.tflite CALIBRATION.npz -o OUT.tflite

CALIBRATION.npz contains a float array for each input of the model, with the input's name (any name if there is only one
input). The first axis counts the inputs; values are scaled as the model expects them. About 100 typical inputs suffice.
Inputs and outputs of the quantized model are int8 or uint8, with the scale and zero point in its file. The method is
described in docs/how-to/quantize.md.
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
from quant_params import Array, sqnr_db
from quantize_calibration import Calibrator, calibrate, calibration_samples, measure_sqnr
from quantize_graph import (
    QuantizedGraph,
    check_quantizable,
    choose_params,
    constant_values,
    convert_graph,
    operator_label,
)
from tflite_reader import Graph, read

from nnfmq.cli.console import console, print_json, table
from nnfmq.hal.errors import InvalidArgument, NnfmqError


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The quantization of one operator's output, or of an input of the model (`operator` is then "input").

    `low` and `high` are the calibrated range, `scale` and `zero_point` the chosen parameters. `sqnr_db` compares the
    output with the float model's, `weights_sqnr_db` the weights; None: they are equal, or there is nothing to compare.
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
class QuantizationResult:
    """The content of the quantized .tflite file, and a report for each layer."""

    content: bytes
    layers: list[LayerReport]


def quantize(
    model: bytes, arrays: dict[str, Array], *, dtype: str = "int8", per_channel: bool, calibrator: Calibrator
) -> QuantizationResult:
    """Quantize the .tflite file `model`; `arrays` are calibration inputs, see `calibration_samples`.

    The quantized model is executed with them, so a returned model is one that nnfmq can execute.

    Raises:
        InvalidArgument: If the model or the calibration inputs cannot be quantized.
        GeneralFailure: If nnfmq cannot execute the model.
    """
    if per_channel and dtype != "int8":
        raise InvalidArgument(f"{dtype} has no per-channel scales; int8 has")
    graph = read(model)
    check_quantizable(graph)
    samples = calibration_samples(arrays, graph)
    ranges = calibrate(graph, samples, calibrator)
    quantized = convert_graph(graph, choose_params(graph, ranges, dtype), per_channel=per_channel)
    content = quantized.graph.without_unused_tensors().to_bytes(f"{dtype}, calibrated with {len(samples)} inputs")

    sqnr = measure_sqnr(graph, quantized.graph, quantized.params, samples)
    rows: list[tuple[str, int, float | None]] = [("input", index, None) for index in graph.inputs]
    for number, operator in enumerate(graph.operators):
        rows.append((operator_label(number, operator), operator.outputs[0], _weights_sqnr(graph, quantized, number)))
    layers = []
    for label, index, weights_sqnr in rows:
        params, low, high = quantized.params[index], ranges[index].low, ranges[index].high
        name = graph.tensors[index].name
        layers.append(LayerReport(label, name, low, high, params.scale, params.zero_point, sqnr[index], weights_sqnr))
    return QuantizationResult(content, layers)


def _weights_sqnr(graph: Graph, quantized: QuantizedGraph, number: int) -> float | None:
    """Return the ratio for the weights of an operator in dB, or None if it has none."""
    if number not in quantized.weights:
        return None
    exact = constant_values(graph.tensors[graph.operators[number].inputs[1]]).astype(np.float64)
    noise = np.square(exact - quantized.weights[number].dequantize()).sum()
    return sqnr_db(float(np.square(exact).sum()), float(noise))


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 if the file was written, 1 if it was not."""
    options = _parser().parse_args(args)
    per_channel = options.dtype == "int8" if options.per_channel is None else options.per_channel
    calibrator = Calibrator(options.percentile, options.moving_average)
    try:
        arrays = _load_arrays(options.calibration)
        model = options.model.read_bytes()
        result = quantize(model, arrays, dtype=options.dtype, per_channel=per_channel, calibrator=calibrator)
        options.out.write_bytes(result.content)
    except (NnfmqError, OSError) as error:
        print(f"quantize: error: {error}", file=sys.stderr)
        return 1
    sizes = {"float_bytes": len(model), "quantized_bytes": len(result.content)}
    if options.json:
        print_json({**sizes, "layers": [asdict(layer) for layer in result.layers]})
    else:
        _print_table(result.layers, sizes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a float32 .tflite file")
    parser.add_argument("calibration", type=Path, help="an .npz file with calibration inputs")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--dtype", choices=("int8", "uint8"), default="int8", help="type of the quantized values (default: %(default)s)"
    )
    channels = parser.add_mutually_exclusive_group()
    channels.add_argument(
        "--per-channel",
        action="store_const",
        const=True,
        help="one scale for each output channel of a convolution (default for int8)",
    )
    channels.add_argument(
        "--per-tensor", dest="per_channel", action="store_const", const=False, help="one scale for each tensor"
    )
    ranges = parser.add_mutually_exclusive_group()
    ranges.add_argument(
        "--percentile",
        type=_percentile,
        metavar="P",
        help="ranges from the P-th percentiles of each input's values, 50 < P < 100",
    )
    ranges.add_argument(
        "--moving-average", type=_momentum, metavar="M", help="ranges from moving averages: old × M + new × (1 − M)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _percentile(text: str) -> float:
    return _between(text, 50.0, 100.0)


def _momentum(text: str) -> float:
    return _between(text, 0.0, 1.0)


def _between(text: str, low: float, high: float) -> float:
    value = float(text)
    if not low < value < high:
        raise argparse.ArgumentTypeError(f"must be greater than {low:g} and less than {high:g}")
    return value


def _load_arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file:  # np.load(path) does not close the file if it is corrupt
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise InvalidArgument(f"{path}: not an .npz file but a single array (.npy)")
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgument(f"{path}: not an .npz file of plain arrays: {error}") from None


def _print_table(layers: Sequence[LayerReport], sizes: dict[str, Any]) -> None:
    rows = table("layer", "output", ">low", ">high", ">scale", ">zero point", ">SQNR dB", ">weights dB")
    for layer in layers:
        name = layer.operator.removeprefix("operator ")
        values = (f"{layer.low:.4g}", f"{layer.high:.4g}", f"{layer.scale:.4g}", str(layer.zero_point))
        rows.add_row(name, layer.tensor, *values, _format_db(layer.sqnr_db), _format_db(layer.weights_sqnr_db))
    screen = console(no_color=False, at_least=110)
    screen.print(rows)
    screen.print("float model: {float_bytes:,} bytes, quantized model: {quantized_bytes:,} bytes".format(**sizes))


def _format_db(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
