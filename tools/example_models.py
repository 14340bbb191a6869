"""Write the models of `nnfmq demo` and of the examples: `python tools/example_models.py digits|words|voice` (seconds).

*digits*: the classifier of 8 × 8 handwritten digits. Data: the 1,797 digits of scikit-learn's `load_digits`. The last
quarter, in the data set's order, is the test set: neighbouring digits may be by the same writer, so a shuffled split
would make the measured accuracy too high. Network: two convolutions with max pooling, one fully connected layer,
softmax. Training: plain NumPy, Adam, images shifted by up to one pixel. No hyperparameter was chosen with the test set.
The seed is fixed, but another BLAS may change the last bits of a weight. Writes digits.tflite (float32), digits.npz
(test images, labels, and the number that the model classifies correctly) and digits_quant.tflite (int8, calibrated with
the training set) to nnfmq/data. CREDITS.md there is written by hand.

*words*: vectors of words, learned from the paragraphs of this documentation by latent semantic analysis. A word has a
row of a table by its hash; a text is the vector of how often it has the words of each row, weighted by how rare they
are (idf); the first right singular vectors of all texts give each row 48 numbers. Row numbers (1, 64) in, a vector of
length 1 out; the table is int8 with one scale.

*voice*: nothing is trained. A voice is periodic: its spectrum has a line at each multiple of the pitch. The model takes
the magnitudes of the spectrum of 512 samples (32 ms) below 2 kHz. From them it computes the periodicity, the largest
autocorrelation at the lags of 69 to 400 Hz as a part of that at lag 0: magnitudes instead of their squares keep one
strong formant from hiding the pitch; noise has 0.2, a voice 0.5 to 0.7. And the level above the quietest one so far, a
resource variable that rises 1.4 dB a second, so that it follows a place that gets noisier. The probability is the
product of a logistic function of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from quantize import Calibrator, quantize
from tflite_writer import Operator, Subgraph, Tensor, write

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"


# ---- digits: the classifier of `nnfmq demo`


Array = NDArray[np.float32]
Weights = dict[str, Array]
SEED = 20240229
TEST_COUNT = 450
EPOCHS = 80
BATCH = 64
LEARNING_RATE = 4e-3
SHAPES = {"conv1": (12, 3, 3, 1), "conv2": (24, 3, 3, 12), "dense": (10, 96)}
DATA = ROOT / "nnfmq" / "data"


def write_digits(folder: Path, only_quantized: bool) -> None:
    """Write all files of the digits, or only the quantized model, to `folder`."""
    images, labels = load_digits()
    x = images[..., None].astype(np.float32) / np.float32(16)
    if not only_quantized:
        write_trained(folder, images, labels, x)
    model = (DATA if only_quantized else folder) / "digits.tflite"
    result = quantize(model.read_bytes(), {"image": x[:-TEST_COUNT]}, per_channel=True, calibrator=Calibrator())
    (folder / "digits_quant.tflite").write_bytes(result.content)


def write_trained(folder: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8], x: Array) -> None:
    """Train with the training part of `x` (all images, in 0..1), test, and write model and test set to `folder`."""
    weights = train(x[:-TEST_COUNT], labels[:-TEST_COUNT])
    correct = int((predict(weights, x[-TEST_COUNT:]) == labels[-TEST_COUNT:]).sum())
    (folder / "digits.tflite").write_bytes(digits_model(weights, correct))
    np.savez_compressed(
        folder / "digits.npz",
        images=images[-TEST_COUNT:], labels=labels[-TEST_COUNT:], correct_count=np.int64(correct),
    )  # fmt: skip
    print(f"{correct} of {TEST_COUNT} test digits classified correctly: {correct / TEST_COUNT:.4f}")


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images [n,8,8] with values 0..16 and labels [n], in the data set's order."""
    from sklearn.datasets import load_digits as load

    digits = load()
    return digits.images.astype(np.uint8), digits.target.astype(np.uint8)


@dataclass
class Adam:
    """The Adam optimizer's state: first and second moments of the gradients."""

    mean: Weights
    square: Weights
    step: int = 0

    def update(self, weights: Weights, gradients: Weights, rate: float) -> None:
        """Update `weights` in place with one step."""
        self.step += 1
        correction = rate * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        for name, gradient in gradients.items():
            self.mean[name] += np.float32(0.1) * (gradient - self.mean[name])
            self.square[name] += np.float32(0.001) * (gradient**2 - self.square[name])
            weights[name] -= np.float32(correction) * self.mean[name] / (np.sqrt(self.square[name]) + np.float32(1e-8))


def train(x: Array, labels: NDArray[np.uint8]) -> Weights:
    """Return the weights after EPOCHS passes over the shuffled and randomly shifted digits."""
    rng = np.random.default_rng(SEED)
    weights = initial_weights(rng)
    adam = Adam({k: np.zeros_like(v) for k, v in weights.items()}, {k: np.zeros_like(v) for k, v in weights.items()})
    for epoch in range(EPOCHS):
        rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
        order = rng.permutation(len(x))
        for start in range(0, len(x), BATCH):
            batch = order[start : start + BATCH]
            adam.update(weights, gradients(weights, shift_randomly(x[batch], rng), labels[batch]), rate)
    return weights


def initial_weights(rng: np.random.Generator) -> Weights:
    """Return He-initialized weights and zero biases."""
    weights: Weights = {}
    for name, shape in SHAPES.items():
        deviation = np.sqrt(2 / np.prod(shape[1:]))
        weights[name] = (rng.standard_normal(shape) * deviation).astype(np.float32)
        weights[f"{name}_bias"] = np.zeros(shape[0], np.float32)
    return weights


def shift_randomly(x: Array, rng: np.random.Generator) -> Array:
    """Return each image shifted by -1, 0 or 1 pixel along both axes, filled with zeros."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = sliding_window_view(padded, (8, 8), axis=(1, 2))[:, :, :, 0]
    rows, columns = rng.integers(0, 3, (2, len(x)))
    result: Array = windows[np.arange(len(x)), rows, columns][..., None]
    return result


def patches(x: Array) -> Array:
    """Return the 3 × 3 neighbourhoods [n·h·w, 9·c] of a zero-padded batch (im2col)."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = sliding_window_view(padded, (3, 3), axis=(1, 2))
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[3])


def convolve(x: Array, kernel: Array, bias: Array) -> Array:
    """Return the 3 × 3 convolution with zero padding."""
    return (patches(x) @ kernel.reshape(len(kernel), -1).T + bias).reshape(*x.shape[:3], -1)


def pool(x: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the maximum of each 2 × 2 block, and a mask [n,h/2,2,w/2,2,c] of the maxima."""
    n, h, w, c = x.shape
    blocks = x.reshape(n, h // 2, 2, w // 2, 2, c)
    largest = blocks.max(axis=(2, 4), keepdims=True)
    return largest[:, :, 0, :, 0], blocks == largest


def unpool(gradient: Array, mask: NDArray[np.bool_]) -> Array:
    """Return the gradient at the pooling's input, from that at its output and the mask that `pool` returned."""
    n, h, _, w, _, c = mask.shape
    return (mask * gradient[:, :, None, :, None]).reshape(n, 2 * h, 2 * w, c)


def gradients(weights: Weights, x: Array, labels: NDArray[np.uint8]) -> Weights:
    """Return the gradients of the mean cross-entropy loss."""
    a1 = np.maximum(convolve(x, weights["conv1"], weights["conv1_bias"]), 0)
    p1, mask1 = pool(a1)
    a2 = np.maximum(convolve(p1, weights["conv2"], weights["conv2_bias"]), 0)
    p2, mask2 = pool(a2)
    flat = p2.reshape(len(x), -1)
    d_logits = softmax(flat @ weights["dense"].T + weights["dense_bias"])
    d_logits[np.arange(len(x)), labels] -= 1
    d_logits /= np.float32(len(x))
    d2 = unpool((d_logits @ weights["dense"]).reshape(p2.shape), mask2) * (a2 > 0)
    d1 = unpool(convolve(d2, flip(weights["conv2"]), np.zeros(1, np.float32)), mask1) * (a1 > 0)
    return {
        "dense": d_logits.T @ flat, "dense_bias": d_logits.sum(axis=0),
        "conv2": kernel_gradient(d2, p1), "conv2_bias": d2.sum(axis=(0, 1, 2)),
        "conv1": kernel_gradient(d1, x), "conv1_bias": d1.sum(axis=(0, 1, 2)),
    }  # fmt: skip


def flip(kernel: Array) -> Array:
    """Return the kernel for the input gradient: rotated by 180°, input and output channels exchanged."""
    return np.ascontiguousarray(kernel[:, ::-1, ::-1].transpose(3, 1, 2, 0))


def kernel_gradient(gradient: Array, x: Array) -> Array:
    """Return the gradient [out,3,3,in] of a convolution's kernel."""
    out = gradient.shape[3]
    return (gradient.reshape(-1, out).T @ patches(x)).reshape(out, 3, 3, x.shape[3])


def softmax(logits: Array) -> Array:
    """Return the probabilities of each row."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = powers / powers.sum(axis=1, keepdims=True)
    return result


def predict(weights: Weights, x: Array) -> NDArray[np.intp]:
    """Return the most likely digit of each image."""
    p1, _ = pool(np.maximum(convolve(x, weights["conv1"], weights["conv1_bias"]), 0))
    p2, _ = pool(np.maximum(convolve(p1, weights["conv2"], weights["conv2_bias"]), 0))
    logits = p2.reshape(len(x), -1) @ weights["dense"].T + weights["dense_bias"]
    digits: NDArray[np.intp] = logits.argmax(axis=1)
    return digits


def digits_model(weights: Weights, correct: int) -> bytes:
    """Return the content of the .tflite file; its description has the number of `correct` test digits."""
    constants = [Tensor(name, value.shape, data=value.tobytes()) for name, value in weights.items()]
    activations = [
        Tensor("image", (1, 8, 8, 1)), Tensor("conv1_out", (1, 8, 8, 12)), Tensor("pool1_out", (1, 4, 4, 12)),
        Tensor("conv2_out", (1, 4, 4, 24)), Tensor("pool2_out", (1, 2, 2, 24)), Tensor("logits", (1, 10)),
        Tensor("probabilities", (1, 10)),
    ]  # fmt: skip
    conv = {"Padding": 0, "StrideW": 1, "StrideH": 1, "FusedActivationFunction": 1}
    block = {"Padding": 1, "StrideW": 2, "StrideH": 2, "FilterWidth": 2, "FilterHeight": 2}
    operators = [
        Operator("CONV_2D", (6, 0, 1), (7,), "Conv2DOptions", conv),
        Operator("MAX_POOL_2D", (7,), (8,), "Pool2DOptions", block),
        Operator("CONV_2D", (8, 2, 3), (9,), "Conv2DOptions", conv),
        Operator("MAX_POOL_2D", (9,), (10,), "Pool2DOptions", block),
        Operator("FULLY_CONNECTED", (10, 4, 5), (11,), "FullyConnectedOptions"),
        Operator("SOFTMAX", (11,), (12,), "SoftmaxOptions", {"Beta": 1.0}),
    ]
    description = f"Handwritten digits, 8x8 in 0..1; {correct} of {TEST_COUNT} held-out digits right."
    return write([*constants, *activations], operators, [6], [12], description)


# ---- words: vectors of texts, for docs/examples/embed.py


DIMENSIONS = 48


def _embed() -> Any:
    """Return the module docs/examples/embed.py, which decides how a text becomes row numbers."""
    sys.path.insert(0, str(EXAMPLES))
    import embed  # type: ignore[import-not-found]

    return embed


def _rows(texts: Path) -> NDArray[np.int32]:
    embed = _embed()
    return np.vstack([embed.words(text) for _, text in embed.paragraphs(texts)])


def table_of(rows: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the table from the row numbers of each text. A row without words is zero, and so is row 0."""
    counts = np.zeros((len(rows), _embed().ROWS))
    np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1)
    counts[:, 0] = 0
    rarity = np.log((1 + len(rows)) / (1 + (counts > 0).sum(axis=0)))
    weighted = np.log1p(counts) * rarity
    weighted /= np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-9)
    _, _, directions = np.linalg.svd(weighted, full_matrices=False)
    table = directions[:DIMENSIONS].T * rarity[:, None]
    table[counts.sum(axis=0) == 0] = 0
    result: NDArray[np.float32] = table.astype(np.float32)
    return result


def words_model(table: NDArray[np.float32]) -> bytes:
    """Return the file: GATHER, DEQUANTIZE, SUM and L2_NORMALIZATION."""
    scale = float(np.abs(table).max()) / 127
    stored = np.round(table / scale).astype(np.int8)
    length = _embed().LENGTH
    shape = (1, length, DIMENSIONS)
    tensors = [
        Tensor("words", (1, length), "INT32"),
        Tensor("table", stored.shape, "INT8", stored.tobytes(), (scale,), (0,)),
        Tensor("rows", shape, "INT8", None, (scale,), (0,)),
        Tensor("vectors", shape),
        Tensor("axis", (1,), "INT32", np.array([1], np.int32).tobytes()),
        Tensor("sum", (1, DIMENSIONS)),
        Tensor("embedding", (1, DIMENSIONS)),
    ]
    operators = [
        Operator("GATHER", (1, 0), (2,), "GatherOptions", {"Axis": 0}),
        Operator("DEQUANTIZE", (2,), (3,), "DequantizeOptions"),
        Operator("SUM", (3, 4), (5,), "ReducerOptions", {"KeepDims": False}),
        Operator("L2_NORMALIZATION", (5,), (6,), "L2NormOptions"),
    ]
    return write(tensors, operators, (0,), (6,), "Vectors of texts")


# ---- voice: voice activity, for docs/examples/voice.py


RATE, LENGTH, FFT, BINS = 16_000, 512, 1024, 128  # Hz; samples; twice that, against circular wrap; the bins below 2 kHz
HUM_HZ = 80  # a voice has little below, mains hum is there
LAGS = np.arange(40, 232, 2)  # of 400 to 69 Hz; 2 kHz has 8 samples to a period, so that every other lag will do
SILENCE = 0.5  # of the sum of magnitudes: below it is silence, with 1 as the largest sample
RISE = 0.005  # of the natural logarithm of the quietest level, each 32 ms
LOUDEST = 20.0  # above each logarithm of a level: the first window sets the quietest one
STEEPNESS, PERIODICITY = 20.0, 0.4
LEVEL_STEEPNESS, LEVEL = 6.0, 1.0
Values = NDArray[np.float32]


def voice_model() -> bytes:
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


# ---- the program


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files of one model; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("digits", "words", "voice"))
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: the folder of the committed files")
    parser.add_argument("--only-quantized", action="store_true", help="digits: write digits_quant.tflite only")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", default=ROOT / "docs", help="words: the documents")
    arguments = parser.parse_args(argv)
    folder = arguments.out or (DATA if arguments.model == "digits" else EXAMPLES / "data")
    if arguments.model == "digits":
        write_digits(folder, arguments.only_quantized)
    else:
        content = voice_model() if arguments.model == "voice" else words_model(table_of(_rows(arguments.texts)))
        (folder / f"{arguments.model}.tflite").write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
