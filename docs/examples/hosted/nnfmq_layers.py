"""Example of a device that hosts a runtime: `layers` runs .npz files with the weights and biases of dense layers."""

import io
from collections.abc import Sequence

import numpy as np

from nnfmq.hal.hosted import HostedDescription, HostedTensor
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice


class LayersRun(HostedRun):
    """The layers with the arrays of one request."""

    def __init__(self, layers: Sequence[tuple[np.ndarray, np.ndarray]], x: np.ndarray, y: np.ndarray | None) -> None:
        self.layers, self.x, self.y = layers, x, y

    def __call__(self) -> list[np.ndarray | None]:
        """Execute once: fill the client's memory if the shape was known, else return the result."""
        value = self.x
        for weights, bias in self.layers:
            value = np.maximum(value @ weights + bias, 0)
        if self.y is None:
            return [value]
        np.copyto(self.y, value)
        return [None]


class LayersModel(HostedModel):
    """A file that is open."""

    is_thread_safe = True

    def __init__(self, file: HostedFile) -> None:
        with np.load(io.BytesIO(file.model)) as arrays:  # NumPy refuses pickled arrays
            self.layers = [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(len(arrays.files) // 2)]
        first, last = len(self.layers[0][0]), len(self.layers[-1][1])
        self.description = HostedDescription(
            inputs=(HostedTensor("x", "float32", ("batch", first)),),
            outputs=(HostedTensor("y", "float32", ("batch", last)),),
        )

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray | None]) -> LayersRun:
        """Bind one request."""
        return LayersRun(self.layers, inputs[0], outputs[0])


class Layers(HostedDevice):
    """The device."""

    name = "layers"
    formats = ("npz",)

    def open(self, file: HostedFile, options: OpenOptions) -> LayersModel:
        """Open a file. What this raises, the client gets as INVALID_ARGUMENT with its text."""
        return LayersModel(file)
