"""Write the float model of memory_bench.py: convolutions and matrix products with a given amount of weights.

    python tools/memory_models.py FILE.tflite --megabytes 100

Half of the weights are those of 3×3 convolutions on 4 × 4 pixels, half those of fully connected layers. All weights
are random, so no two layers are equal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tflite_writer
from tflite_writer import Operator, Tensor

SIZE, CHANNELS, UNITS = 4, 512, 1024
_SAME, _VALID, _RELU = 0, 1, 1
_MB = 10**6


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--megabytes", type=int, default=100, help="of weights, at least (default: 100)")
    options = parser.parse_args(arguments)
    options.file.write_bytes(float_model(options.megabytes * _MB))
    return 0


def float_model(weight_bytes: int) -> bytes:
    """Return a .tflite file with at least `weight_bytes` of float weights, and less than two layers more."""
    model = _Model()
    source = model.tensor((1, SIZE, SIZE, CHANNELS))
    value = source
    while model.weight_bytes < weight_bytes / 2:
        weights = model.weights((CHANNELS, 3, 3, CHANNELS), 9 * CHANNELS)
        options = {"Padding": _SAME, "StrideW": 1, "StrideH": 1, "DilationWFactor": 1, "DilationHFactor": 1}
        value = model.layer("CONV_2D", value, weights, (1, SIZE, SIZE, CHANNELS), "Conv2DOptions", options)
    value, width = model.average(value), CHANNELS
    while model.weight_bytes < weight_bytes:
        weights = model.weights((UNITS, width), width)
        value = model.layer("FULLY_CONNECTED", value, weights, (1, UNITS), "FullyConnectedOptions", {})
        width = UNITS
    return tflite_writer.write(model.tensors, model.operators, [source], [value])


class _Model:
    """The tensors and operators of the model so far."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.weight_bytes = 0
        self._random = np.random.default_rng(11)

    def tensor(self, shape: Sequence[int], data: bytes | None = None) -> int:
        """Add a tensor, constant if it has data; return its index."""
        self.tensors.append(Tensor(f"t{len(self.tensors)}", shape, data=data))
        return len(self.tensors) - 1

    def weights(self, shape: Sequence[int], inputs: int) -> int:
        """Add random weights that keep the size of the activations, for sums of `inputs` products."""
        values = self._random.standard_normal(shape, np.float32) * np.float32((2 / inputs) ** 0.5)
        self.weight_bytes += values.nbytes
        return self.tensor(shape, values.tobytes())

    def average(self, source: int) -> int:
        """Add the average over all pixels; return its output."""
        output = self.tensor((1, 1, 1, CHANNELS))
        options = {"Padding": _VALID, "StrideW": 1, "StrideH": 1, "FilterWidth": SIZE, "FilterHeight": SIZE}
        self.operators.append(Operator("AVERAGE_POOL_2D", [source], [output], "Pool2DOptions", options))
        return output

    def layer(
        self, name: str, source: int, weights: int, shape: Sequence[int], table: str, options: dict[str, int]
    ) -> int:
        """Add a layer with a bias of zeros and RELU; return its output."""
        bias = self.tensor((shape[-1],), bytes(4 * shape[-1]))
        output = self.tensor(shape)
        given = {**options, "FusedActivationFunction": _RELU}
        self.operators.append(Operator(name, [source, weights, bias], [output], table, given))
        return output


if __name__ == "__main__":
    sys.exit(main())
