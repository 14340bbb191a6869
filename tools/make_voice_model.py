"""Write voice.tflite, the model of docs/examples/voice.py: `python3 tools/make_voice_model.py` (a second).

Nothing is trained. A voice is periodic: its spectrum has a line at each multiple of the pitch. The model takes the
magnitudes of the spectrum of 512 samples (32 ms) below 2 kHz, and from them

- the *periodicity*: the largest autocorrelation at the lags of 69 to 400 Hz, as a part of that at lag 0. Magnitudes
  instead of their squares keep one strong formant from hiding the pitch. Noise has 0.2, a voice 0.5 to 0.7.
- the *level* above the quietest one so far, which is a resource variable that rises 1.4 dB a second, so that it follows
  a place that gets noisier.

The probability is the product of a logistic function of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tflite_writer import Operator, Subgraph, Tensor, write

ROOT = Path(__file__).resolve().parent.parent
RATE, LENGTH, FFT, BINS = 16_000, 512, 1024, 128  # Hz; samples; twice that, against circular wrap; the bins below 2 kHz
HUM_HZ = 80  # a voice has little below, mains hum is there
LAGS = np.arange(40, 232, 2)  # of 400 to 69 Hz; 2 kHz has 8 samples to a period, so that every other lag will do
SILENCE = 0.5  # of the sum of magnitudes: below it is silence, with 1 as the largest sample
RISE = 0.005  # of the natural logarithm of the quietest level, each 32 ms
LOUDEST = 20.0  # above each logarithm of a level: the first window sets the quietest one
STEEPNESS, PERIODICITY = 20.0, 0.4
LEVEL_STEEPNESS, LEVEL = 6.0, 1.0

Values = NDArray[np.float32]


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "examples" / "data" / "voice.tflite")
    parser.parse_args().out.write_bytes(model())


def model() -> bytes:
    """Return the file. Its first subgraph computes a probability, the second one sets the resource variable."""
    graph = _Graph()
    samples = graph.tensor("samples", (1, LENGTH))
    graph.add("CALL_ONCE", (), (), "CallOnceOptions", InitSubgraphIndex=1)
    energy, periodic = _sums(graph, samples)
    total = graph.scalar("ADD", energy, graph.constant("silence", SILENCE))
    periodicity = graph.scalar("DIV", graph.maximum(periodic), total)
    above = _above_the_quietest(graph, graph.scalar("LOG", total))
    voiced = graph.logistic(periodicity, STEEPNESS, PERIODICITY)
    loud = graph.logistic(above, LEVEL_STEEPNESS, LEVEL)
    probability = graph.scalar("MUL", voiced, loud, name="probability")
    return write(graph.tensors, graph.operators, (samples,), (probability,), "Voice activity", [_initial()])


def _sums(graph: _Graph, samples: int) -> tuple[int, int]:
    """Return the tensors of the sum of the magnitudes and of their autocorrelation."""
    window = np.hanning(LENGTH + 1)[:-1]
    windowed = graph.tensor("windowed", (1, LENGTH))
    graph.add("MUL", (samples, graph.constant("window", window[None])), (windowed,), "MulOptions")
    spectrum = graph.tensor("spectrum", (1, FFT // 2 + 1), "COMPLEX64")
    graph.add("RFFT2D", (windowed, graph.integers("size", 1, FFT)), (spectrum,), "Rfft2dOptions")
    magnitudes, low = graph.tensor("magnitudes", (1, FFT // 2 + 1)), graph.tensor("low", (1, BINS))
    graph.add("COMPLEX_ABS", (spectrum,), (magnitudes,), "")
    corner, extent = graph.integers("corner", 0, 0), graph.integers("extent", 1, BINS)
    graph.add("SLICE", (magnitudes, corner, extent), (low,), "SliceOptions")
    energy, periodic = graph.tensor("energy", (1, 1)), graph.tensor("periodic", (1, len(LAGS)))
    kept = (np.arange(BINS) * RATE / FFT > HUM_HZ).astype(float)
    own = np.correlate(window, window, "full")[LENGTH - 1 :]  # the window's autocorrelation, which falls with the lag
    cosines = np.cos(2 * np.pi * np.outer(LAGS, np.arange(BINS)) / FFT) * kept / (own[LAGS] / own[0])[:, None]
    for name, weights, result in (("ones", kept[None], energy), ("cosines", cosines, periodic)):
        graph.add("FULLY_CONNECTED", (low, graph.constant(name, weights), -1), (result,), "FullyConnectedOptions")
    return energy, periodic


def _above_the_quietest(graph: _Graph, level: int) -> int:
    """Return the tensor of how far `level` is above the quietest one, which the resource variable keeps."""
    handle, before = graph.tensor("handle", (), "RESOURCE"), graph.tensor("before", (1, 1))
    graph.add("VAR_HANDLE", (), (handle,), "VarHandleOptions", Container="", SharedName="quietest")
    graph.add("READ_VARIABLE", (handle,), (before,), "ReadVariableOptions")
    risen = graph.scalar("ADD", before, graph.constant("rise", RISE))
    quietest = graph.scalar("MINIMUM", risen, level)
    graph.add("ASSIGN_VARIABLE", (handle, quietest), (), "AssignVariableOptions")
    return graph.scalar("SUB", level, quietest)


def _initial() -> Subgraph:
    graph = _Graph()
    handle = graph.tensor("initial handle", (), "RESOURCE")
    graph.add("VAR_HANDLE", (), (handle,), "VarHandleOptions", Container="", SharedName="quietest")
    graph.add("ASSIGN_VARIABLE", (handle, graph.constant("loudest", LOUDEST)), (), "AssignVariableOptions")
    return Subgraph(graph.tensors, graph.operators, (), ())


_TABLES = {"LOG": "", "LOGISTIC": "", "MINIMUM": "MaximumMinimumOptions"}


class _Graph:
    """Tensors and operators, as they are added. A tensor is its index."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []

    def tensor(self, name: str, shape: tuple[int, ...], kind: str = "FLOAT32", data: bytes | None = None) -> int:
        self.tensors.append(Tensor(name, shape, kind, data))
        return len(self.tensors) - 1

    def constant(self, name: str, value: float | NDArray[np.float64]) -> int:
        array = np.array(value, np.float32, ndmin=2)
        return self.tensor(name, array.shape, data=array.tobytes())

    def integers(self, name: str, *values: int) -> int:
        return self.tensor(name, (len(values),), "INT32", np.array(values, np.int32).tobytes())

    def add(self, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], table: str, **options: Any) -> None:
        self.operators.append(Operator(name, inputs, outputs, table, options))

    def scalar(self, operator: str, *inputs: int, name: str = "") -> int:
        """Add an operator whose result has one element."""
        result = self.tensor(name or f"{operator.lower()} {len(self.operators)}", (1, 1))
        self.add(operator, inputs, (result,), _TABLES.get(operator, f"{operator.capitalize()}Options"))
        return result

    def maximum(self, values: int) -> int:
        result = self.tensor("largest", (1, 1))
        self.add("REDUCE_MAX", (values, self.integers("axis", 1)), (result,), "ReducerOptions", KeepDims=True)
        return result

    def logistic(self, value: int, steepness: float, middle: float) -> int:
        """Add the operators of a logistic function, which is a half at `middle`."""
        scaled = self.scalar("MUL", value, self.constant(f"steepness {value}", steepness))
        return self.scalar("LOGISTIC", self.scalar("ADD", scaled, self.constant(f"shift {value}", -steepness * middle)))


if __name__ == "__main__":
    main()
