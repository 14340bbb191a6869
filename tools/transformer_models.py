"""Write .tflite models of transformer shapes: whole blocks, and single fully connected layers; float32 or int8.

    python tools/transformer_models.py block_768x128_int8 product_768x3072x8_float32 --out FOLDER

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
from quantize import Calibrator, quantize
from tflite_writer import Operator, Tensor, write

from nnfmq.hal.errors import InvalidArgument, NnfmqError

HEAD_WIDTH = 64
DTYPES = ("float32", "int8")
_CALIBRATION_INPUTS = 4
_SEED = 11
_RELU = 1  # TFLite's code of the fused activation


@dataclass
class _Graph:
    """Tensors and operators, as they are added. A tensor is its index."""

    random: np.random.Generator
    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

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
        weights = self.random.normal(0.0, scale / np.sqrt(depth), (width, depth)).astype(np.float32)
        bias = self.random.normal(0.0, 0.1 * scale, width).astype(np.float32)
        inputs = (source, self.tensor(weights.shape, weights), self.tensor(bias.shape, bias))
        options = {"FusedActivationFunction": activation}
        return self.add("FULLY_CONNECTED", inputs, (rows, width), "FullyConnectedOptions", **options)

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
    from quantize import read

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
        print(f"transformer_models: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
