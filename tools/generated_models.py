"""Models for benchmarks: transformer blocks and products, models of many weights, and convolutions.

    python tools/generated_models.py block_768x128_int8 product_768x3072x8_float32 --out FOLDER

A block has the products of BERT's: projections to queries, keys and values, attention by heads of 64, an output
projection, and two feed-forward layers with RELU between them, four times as wide; both parts have a residual. There is
no normalization, which the runtimes quantize differently. Weights and biases are random, scaled so that activations
keep their magnitude. int8 models are quantized with one scale for each tensor, calibrated with random inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quantize import Calibrator, quantize, read
from tflite_writer import Operator, Tensor, write

from nnfmq.hal.errors import InvalidArgument, NnfmqError

HEAD_WIDTH = 64
DTYPES = ("float32", "int8")
_CALIBRATION_INPUTS = 4
_SEED = 11
_RELU = 1  # TFLite's code of the fused activation
_STRIDES = {"StrideW": 1, "StrideH": 1}
FLOAT_SIZE, FLOAT_CHANNELS, FLOAT_UNITS = 4, 512, 1024


@dataclass
class _Graph:
    """Tensors and operators, as they are added. A tensor is its index."""

    random: np.random.Generator
    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    weight_bytes: int = 0

    def shape(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.tensors[tensor].shape)

    def tensor(self, shape: Sequence[int], values: npt.NDArray[Any] | None = None) -> int:
        number = len(self.tensors)
        kind = "INT32" if values is not None and values.dtype == np.int32 else "FLOAT32"
        data = None if values is None else values.tobytes()
        self.tensors.append(Tensor(f"t{number}", tuple(shape), kind, data))
        return number

    def add(self, name: str, inputs: Sequence[int], shape: Sequence[int], table: str, **options: Any) -> int:
        result = self.tensor(shape)
        self.operators.append(Operator(name, tuple(inputs), (result,), table, options))
        return result

    def fully_connected(self, source: int, width: int, activation: int = 0, scale: float = 1.0) -> int:
        rows, depth = self.shape(source)
        inputs = (source, *self.parameters((width, depth), scale))
        options = {"FusedActivationFunction": activation}
        return self.add("FULLY_CONNECTED", inputs, (rows, width), "FullyConnectedOptions", **options)

    def parameters(self, shape: Sequence[int], scale: float) -> tuple[int, int]:
        """Add random weights, whose products' sums have `scale` times the size of the inputs, and a bias."""
        deviation = np.float32(scale / np.sqrt(np.prod(shape[1:])))
        weights = self.random.standard_normal(shape, np.float32) * deviation
        bias = self.random.normal(0.0, 0.1 * scale, shape[0]).astype(np.float32)
        self.weight_bytes += weights.nbytes
        return self.tensor(shape, weights), self.tensor(bias.shape, bias)

    def convolution(self, source: int, channels: int, activation: int = 0, scale: float = 1.0) -> int:
        """Add a 3×3 convolution that keeps the size of the image."""
        *extents, depth = self.shape(source)
        inputs = (source, *self.parameters((channels, 3, 3, depth), scale))
        options = {"Padding": 0, **_STRIDES, "DilationWFactor": 1, "DilationHFactor": 1}
        options |= {"FusedActivationFunction": activation}
        return self.add("CONV_2D", inputs, (*extents, channels), "Conv2DOptions", **options)

    def reshape(self, source: int, shape: Sequence[int]) -> int:
        target = self.tensor((len(shape),), np.array(shape, np.int32))
        return self.add("RESHAPE", (source, target), shape, "ReshapeOptions", NewShape=list(shape))

    def transpose(self, source: int, order: Sequence[int]) -> int:
        permutation = self.tensor((len(order),), np.array(order, np.int32))
        shape = [self.shape(source)[axis] for axis in order]
        return self.add("TRANSPOSE", (source, permutation), shape, "TransposeOptions")

    def product(self, first: int, second: int, *, adjoint: bool) -> int:
        """Multiply the matrices of two batches; `adjoint` transposes the second ones."""
        shape = (*self.shape(first)[:-1], self.shape(second)[-2 if adjoint else -1])
        return self.add("BATCH_MATMUL", (first, second), shape, "BatchMatMulOptions", AdjX=False, AdjY=adjoint)

    def softmax(self, source: int) -> int:
        return self.add("SOFTMAX", (source,), self.shape(source), "SoftmaxOptions", Beta=1.0)

    def sum(self, first: int, second: int) -> int:
        return self.add("ADD", (first, second), self.shape(first), "AddOptions")


def float_model(weight_bytes: int) -> bytes:
    """Return a model with at least `weight_bytes` of float weights, and less than two layers more.

    Half of the weights are those of 3×3 convolutions on 4 × 4 pixels, half those of fully connected layers. All are
    random, so no two layers are equal, and keep the size of the activations.
    """
    graph = _Graph(np.random.default_rng(_SEED))
    source = value = graph.tensor((1, FLOAT_SIZE, FLOAT_SIZE, FLOAT_CHANNELS))
    while graph.weight_bytes < weight_bytes / 2:
        value = graph.convolution(value, FLOAT_CHANNELS, _RELU, 2**0.5)
    window = {"Padding": 1, **_STRIDES, "FilterWidth": FLOAT_SIZE, "FilterHeight": FLOAT_SIZE}
    pooled = graph.add("AVERAGE_POOL_2D", (value,), (1, 1, 1, FLOAT_CHANNELS), "Pool2DOptions", **window)
    value = graph.reshape(pooled, (1, FLOAT_CHANNELS))
    while graph.weight_bytes < weight_bytes:
        value = graph.fully_connected(value, FLOAT_UNITS, _RELU, 2**0.5)
    return write(graph.tensors, graph.operators, (source,), (value,), f"{graph.weight_bytes} bytes of weights")


def convolution(size: int, channels: int) -> bytes:
    """Return the float32 model of one 3×3 convolution of an image of `size` × `size` pixels with `channels`."""
    graph = _Graph(np.random.default_rng(_SEED))
    source = graph.tensor((1, size, size, channels))
    result = graph.convolution(source, channels)
    return write(graph.tensors, graph.operators, (source,), (result,), f"convolution, {channels} channels")


def block(width: int, length: int) -> bytes:
    """Return the float32 model of a block `width` wide, for `length` tokens. Input and output: (length, width)."""
    graph = _Graph(np.random.default_rng(_SEED))
    source = graph.tensor((length, width))
    attended = graph.sum(source, _attention(graph, source))
    inner = graph.fully_connected(attended, 4 * width, _RELU)
    result = graph.sum(attended, graph.fully_connected(inner, width))
    return write(graph.tensors, graph.operators, (source,), (result,), f"transformer block, {width} wide")


def _attention(graph: _Graph, source: int) -> int:
    length, width = graph.shape(source)
    scale = 1 / np.sqrt(HEAD_WIDTH)  # of the scores, in the weights of the queries
    queries, keys, values = (
        _heads(graph, graph.fully_connected(source, width, scale=factor)) for factor in (scale, 1.0, 1.0)
    )
    weights = graph.softmax(graph.product(queries, keys, adjoint=True))
    joined = graph.transpose(graph.product(weights, values, adjoint=False), (1, 0, 2))
    return graph.fully_connected(graph.reshape(joined, (length, width)), width)


def _heads(graph: _Graph, source: int) -> int:
    """Split (length, width) into (heads, length, HEAD_WIDTH)."""
    length, width = graph.shape(source)
    return graph.transpose(graph.reshape(source, (length, width // HEAD_WIDTH, HEAD_WIDTH)), (1, 0, 2))


def product(inputs: int, outputs: int, rows: int) -> bytes:
    """Return the float32 model of one fully connected layer. Input: (rows, inputs); output: (rows, outputs)."""
    graph = _Graph(np.random.default_rng(_SEED))
    source = graph.tensor((rows, inputs))
    result = graph.fully_connected(source, outputs)
    return write(graph.tensors, graph.operators, (source,), (result,), f"{inputs} × {outputs}")


def generate(name: str) -> bytes:
    """Return the file of `name`: block_WIDTHxLENGTH_DTYPE or product_INPUTSxOUTPUTSxROWS_DTYPE.

    Raises:
        InvalidArgument: If the name has another form.
    """
    kind, _, rest = name.partition("_")
    sizes, _, dtype = rest.partition("_")
    makers = {"block": (block, 2), "product": (product, 3)}
    parts = sizes.split("x")
    if kind not in makers or dtype not in DTYPES or len(parts) != makers[kind][1] or not all(map(str.isdecimal, parts)):
        raise InvalidArgument(f"{name!r} is neither block_WIDTHxLENGTH_DTYPE nor product_INPUTSxOUTPUTSxROWS_DTYPE")
    make: Any = makers[kind][0]
    content: bytes = make(*map(int, parts))
    return content if dtype == "float32" else _quantized(content)


def _quantized(content: bytes) -> bytes:
    graph = read(content)
    shape = tuple(graph.tensors[graph.inputs[0]].shape)
    random = np.random.default_rng(_SEED + 1)
    inputs = random.normal(0.0, 1.0, (_CALIBRATION_INPUTS, *shape)).astype(np.float32)
    return quantize(content, {"input": inputs}, per_channel=False, calibrator=Calibrator()).content


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 if the files were written, 1 if not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="+", help="block_WIDTHxLENGTH_DTYPE, product_INxOUTxROWS_DTYPE")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path())
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            (options.out / f"{name}.tflite").write_bytes(generate(name))
    except (NnfmqError, OSError) as error:
        print(f"generated_models: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
