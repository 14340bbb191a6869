"""Train the digit classifier of `nnfmq demo` and write its files: `python3 tools/train_digits.py` (seconds).

Data: the 1,797 handwritten digits of scikit-learn's `load_digits`, 8 × 8 pixels of 0..16. The last quarter, in the data
set's order, is the test set. It is not a random sample, because neighbouring digits may be by the same writer, so a
shuffled split would make the measured accuracy too high. Network: two convolutions with max pooling, one fully
connected layer, softmax. Training: plain NumPy, Adam, images shifted by up to one pixel. No hyperparameter was chosen
with the test set. The seed is fixed, but another BLAS may change the last bits of a weight.

Writes digits.tflite (float32; input [1,8,8,1] in 0..1), digits.npz (test images and labels, and the number of them that
the model classifies correctly) and digits_quant.tflite (the model quantized to int8, calibrated with the training set)
to nnfmq/data. CREDITS.md there is written by hand. `--only-quantized` does not train: it writes digits_quant.tflite
from the digits.tflite in nnfmq/data.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from quantize import quantize
from quantize_calibration import Calibrator
from tflite_writer import Operator, Tensor, write

Array = NDArray[np.float32]
Weights = dict[str, Array]

SEED = 20240229
TEST_COUNT = 450
EPOCHS = 80
BATCH = 64
RATE = 4e-3
SHAPES = {"conv1": (12, 3, 3, 1), "conv2": (24, 3, 3, 12), "dense": (10, 96)}
DATA = Path(__file__).resolve().parent.parent / "nnfmq" / "data"


def main() -> None:
    """Write all files, or only the quantized model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA, help="output folder (default: %(default)s)")
    parser.add_argument(
        "--only-quantized", action="store_true", help="write only digits_quant.tflite, without training"
    )
    arguments = parser.parse_args()
    images, labels = load_digits()
    x = images[..., None].astype(np.float32) / np.float32(16)
    model = (DATA if arguments.only_quantized else arguments.out) / "digits.tflite"
    if not arguments.only_quantized:
        write_trained(arguments.out, images, labels, x)
    result = quantize(model.read_bytes(), {"image": x[:-TEST_COUNT]}, per_channel=True, calibrator=Calibrator())
    (arguments.out / "digits_quant.tflite").write_bytes(result.content)


def write_trained(folder: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8], x: Array) -> None:
    """Train with the training part of `x` (all images, in 0..1), test, and write model and test set to `folder`."""
    weights = train(x[:-TEST_COUNT], labels[:-TEST_COUNT])
    correct = int((predict(weights, x[-TEST_COUNT:]) == labels[-TEST_COUNT:]).sum())
    (folder / "digits.tflite").write_bytes(model_file(weights, correct))
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
        rate = RATE * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
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


def model_file(weights: Weights, correct: int) -> bytes:
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


if __name__ == "__main__":
    main()
