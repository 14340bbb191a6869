"""Small models with states, as .tflite files."""

from __future__ import annotations

import numpy as np

from support.tflite_files import Operator, Tensor, floats, ints, writer

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


def handle(name: str) -> Operator:
    """Return the VAR_HANDLE of a variable; its result is tensor 0, or 1 for the variable `b`."""
    return Operator("VAR_HANDLE", (), (int(name == "b"),), "VarHandleOptions", {"Container": "", "SharedName": name})


def moving() -> bytes:
    """Return an RNN whose output a tensor, "sizes", shapes, and a product with int8 weights.

    After the operator whose sizes are computed, LiteRT allocates memory for the product during the first execution,
    without delegates by moving the variable tensor.
    """
    random, rows = np.random.default_rng(1), 4096

    def weights(name: str, *shape: int) -> Tensor:
        return Tensor(name, shape, data=random.uniform(-0.6, 0.6, shape).astype(np.float32).tobytes())

    tensors = [
        X,
        weights("recurrent", 2, 2),
        Tensor("hidden", (1, 2), extra=VARIABLE),
        Tensor("between", (1, 2)),
        Tensor("sizes", (2,), "INT32"),
        Tensor("row", (1, 2)),
        Tensor("product", (rows, 2), "INT8", random.integers(-100, 100, (rows, 2), np.int8).tobytes(), (0.01,), (0,)),
        weights("product bias", rows),
        Tensor("y", (1, rows)),
        BIAS,
    ]
    options = {"FusedActivationFunction": 0, "AsymmetricQuantizeInputs": True}
    operators = [
        Operator("RNN", (0, 1, 1, 9, 2), (3,), "RNNOptions", {"FusedActivationFunction": 0}),
        Operator("RESHAPE", (3, 4), (5,), "ReshapeOptions", {}),
        Operator("FULLY_CONNECTED", (5, 6, 7), (8,), "FullyConnectedOptions", options),
    ]
    data: bytes = writer.write(tensors, operators, (0, 4), (8,))
    return data


def streaming_window() -> bytes:
    """Return a model of resource variables: a window of the last 4 inputs, int8, and a counter, int32.

    The input x is 1x1x3; y is the window (5 of the 4+1 rows), dequantized, times the number of executions. The window
    is 2 everywhere at first, the counter is 10.
    """
    resource = {"type": "RESOURCE"}
    window = {"type": "INT8", "scales": (0.5,), "zero_points": (1,)}
    tensors = [
        Tensor("a", (), **resource),
        Tensor("b", (), **resource),
        Tensor("x", (1, 1, 3), **window),
        Tensor("old", (1, 4, 3), **window),
        Tensor("rows", (1, 5, 3), **window),
        Tensor("begin", (3,), "INT32", ints(0, 1, 0)),
        Tensor("size", (3,), "INT32", ints(1, 4, 3)),
        Tensor("new", (1, 4, 3), **window),
        Tensor("count", (1,), "INT32"),
        Tensor("one", (1,), "INT32", ints(1)),
        Tensor("next", (1,), "INT32"),
        Tensor("real", (1, 5, 3)),
        Tensor("times", (1,)),
        Tensor("y", (1, 5, 3)),
    ]
    operators = [
        Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 1}),
        handle("a"),
        handle("b"),
        Operator("READ_VARIABLE", (0,), (3,), "ReadVariableOptions"),
        Operator("CONCATENATION", (3, 2), (4,), "ConcatenationOptions", {"Axis": 1}),
        Operator("SLICE", (4, 5, 6), (7,), "SliceOptions"),
        Operator("ASSIGN_VARIABLE", (0, 7), (), "AssignVariableOptions"),
        Operator("READ_VARIABLE", (1,), (8,), "ReadVariableOptions"),
        Operator("ADD", (8, 9), (10,), "AddOptions", {"FusedActivationFunction": 0}),
        Operator("ASSIGN_VARIABLE", (1, 10), (), "AssignVariableOptions"),
        Operator("DEQUANTIZE", (4,), (11,), "DequantizeOptions"),
        Operator("CAST", (10,), (12,), "CastOptions"),
        Operator("MUL", (11, 12), (13,), "MulOptions", {"FusedActivationFunction": 0}),
    ]
    initial = writer.Subgraph(
        [
            Tensor("a", (), **resource),
            Tensor("b", (), **resource),
            Tensor("first window", (1, 4, 3), data=bytes([2] * 12), **window),
            Tensor("first count", (1,), "INT32", ints(10)),
        ],
        [
            handle("a"),
            handle("b"),
            Operator("ASSIGN_VARIABLE", (0, 2), (), "AssignVariableOptions"),
            Operator("ASSIGN_VARIABLE", (1, 3), (), "AssignVariableOptions"),
        ],
        (),
        (),
    )
    data: bytes = writer.write(tensors, operators, (2,), (13,), more=[initial])
    return data
