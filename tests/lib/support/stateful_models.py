"""Small models with states, as .tflite files."""

from __future__ import annotations

import numpy as np

from support.tflite_files import Operator, Tensor, floats, writer

X = Tensor("x", (1, 2))
WEIGHTS = Tensor("w", (2, 2), data=floats(2, 2))
BIAS = Tensor("b", (2,), data=floats(2))
VARIABLE = {"IsVariable": 1}
TANH = 4


def two_rnns(first_state: int = 4, second_state: int = 3) -> bytes:
    """Return two RNNs in a row; the tensors 3 and 4 are variables, and the first RNN uses 4."""
    early, late = (Tensor(name, (1, 2), extra=VARIABLE) for name in ("early", "late"))
    tensors = [X, WEIGHTS, BIAS, late, early, Tensor("between", (1, 2)), Tensor("y", (1, 2))]
    operators = [
        Operator("RNN", (0, 1, 1, 2, first_state), (5,), "RNNOptions", {"FusedActivationFunction": 0}),
        Operator("RNN", (5, 1, 1, 2, second_state), (6,), "RNNOptions", {"FusedActivationFunction": 0}),
    ]
    data: bytes = writer.write(tensors, operators, (0,), (6,))
    return data


def stream() -> bytes:
    """Return a float RNN with TANH, then an SVDF over its output, with states that differ in size; x is 1x3."""
    random = np.random.default_rng(5)

    def weights(name: str, *shape: int) -> Tensor:
        return Tensor(name, shape, data=random.uniform(-0.6, 0.6, shape).astype(np.float32).tobytes())

    tensors = [
        Tensor("x", (1, 3)),
        weights("input", 5, 3),
        weights("recurrent", 5, 5),
        weights("bias", 5),
        Tensor("hidden", (1, 5), extra=VARIABLE),
        Tensor("between", (1, 5)),
        weights("feature", 4, 5),
        weights("time", 4, 7),
        weights("svdf bias", 2),
        Tensor("window", (1, 28), extra=VARIABLE),
        Tensor("y", (1, 2)),
    ]
    operators = [
        Operator("RNN", (0, 1, 2, 3, 4), (5,), "RNNOptions", {"FusedActivationFunction": TANH}),
        Operator("SVDF", (5, 6, 7, 8, 9), (10,), "SVDFOptions", {"Rank": 2, "FusedActivationFunction": 0}),
    ]
    data: bytes = writer.write(tensors, operators, (0,), (10,))
    return data
