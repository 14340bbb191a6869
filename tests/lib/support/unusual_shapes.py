"""Small ONNX models with tensors of rank 0, tensors without elements, and outputs that no node computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from support.onnx_files import expected, file_of
from support.onnx_runtime import onnx
from support.oracles import Array

_OPSET = 18
X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
SCALAR = np.array(2.5, np.float32)
NONE = np.zeros((0, 3), np.float32)
make = onnx.helper.make_node


@dataclass(frozen=True)
class ShapeCase:
    """Nodes between the model's inputs and outputs."""

    name: str
    nodes: Sequence[Any]
    fed: Mapping[str, Array]
    outputs: Sequence[str] = ("y",)
    constants: Mapping[str, Array] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def content(self) -> bytes:
        """Return the model's file."""
        return file_of(self.nodes, self.fed, self.outputs, self.constants, _OPSET)


@cache
def _expected(content: bytes, fed: tuple[tuple[str, bytes, str, tuple[int, ...]], ...]) -> list[Array]:
    arrays = {name: np.frombuffer(data, dtype).reshape(shape) for name, data, dtype, shape in fed}
    return expected(content, arrays)


def wanted(case: ShapeCase) -> list[Array]:
    """Return what ONNX Runtime computes."""
    fed = tuple((name, array.tobytes(), array.dtype.name, array.shape) for name, array in case.fed.items())
    return _expected(case.content(), fed)


def one(
    name: str, operator: str, *inputs: Array, constants: Sequence[Array] = (), outputs: int = 1, **attributes: Any
) -> ShapeCase:
    """Return a model of one node, whose last inputs are the constants."""
    fed = {f"x{place}": array for place, array in enumerate(inputs)}
    known = {f"c{place}": array for place, array in enumerate(constants)}
    names = [f"y{place}" for place in range(outputs)]
    return ShapeCase(name, [make(operator, [*fed, *known], names, **attributes)], fed, names, known)


def ints(*values: int) -> Array:
    """Return an int64 vector."""
    return np.array(values, np.int64)


_IMAGE = np.zeros((0, 2, 4, 4), np.float32)
_ONES = np.ones(3, np.float32)

SCALARS = [
    one("scalar plus scalar", "Add", SCALAR, SCALAR),
    one("tensor times scalar", "Mul", X, SCALAR),
    one("sum of all", "ReduceSum", X, keepdims=0),
    one("integers", "Add", np.array(3, np.int32), np.array(-4, np.int32)),
    one("truth", "Not", np.array(True)),
    one("element by a scalar index", "Gather", X, np.array(1, np.int32)),
    one("scalar to vector", "Unsqueeze", SCALAR, constants=[ints(0)]),
    one("vector to scalar", "Squeeze", X[:1, 0]),
    one("scalar expanded", "Expand", SCALAR, constants=[ints(2, 2)]),
    one("shape of a scalar", "Shape", SCALAR),
    one("size", "Size", X),
    one("product of vectors", "MatMul", X[0], X[1]),
    ShapeCase("scalars between nodes", [make("Sqrt", ["a"], ["m"]), make("Exp", ["m"], ["y"])], {"a": SCALAR}),
]
OUTPUTS = [
    one("identity", "Identity", X),
    ShapeCase(
        "one result under two names", [make("Relu", ["a"], ["y"]), make("Identity", ["y"], ["z"])], {"a": X}, ("y", "z")
    ),
    ShapeCase("an input", [make("Relu", ["a"], ["y"])], {"a": X}, ("y", "a")),
    ShapeCase("a constant", [make("Relu", ["a"], ["y"])], {"a": X}, ("y", "c"), {"c": _ONES}),
    ShapeCase("only constants", [make("Add", ["c", "c"], ["y"])], {}, constants={"c": _ONES}),
    ShapeCase("a constant of rank 0", [make("Add", ["c", "c"], ["y"])], {}, constants={"c": SCALAR}),
    ShapeCase("constants, and an input that is not read", [make("Abs", ["c"], ["y"])], {"a": X}, ("y",), {"c": _ONES}),
    ShapeCase("truths, twice", [make("Not", ["a"], ["y"])], {"a": X > 0}, ("y", "a")),
]
EMPTY = [
    one("input and output", "Relu", NONE),
    one("sum", "ReduceSum", NONE, constants=[ints(0)], keepdims=0),
    one("sum of all", "ReduceSum", NONE),
    one("product", "ReduceProd", NONE, constants=[ints(0)]),
    one("maximum", "ReduceMax", NONE, constants=[ints(0)]),
    one("minimum", "ReduceMin", NONE, constants=[ints(0)]),
    one("norm", "ReduceL2", NONE, constants=[ints(0)]),
    one("logarithm of a sum", "ReduceLogSumExp", NONE, constants=[ints(0)]),
    one("integers", "ReduceSum", NONE.astype(np.int32), constants=[ints(0)]),
    one("rows of none", "ReduceMax", NONE, constants=[ints(1)]),
    one("concatenation", "Concat", NONE, X, axis=0),
    one("concatenation of three", "Concat", X, NONE, X, axis=0),
    one("concatenation of nothing", "Concat", NONE, NONE, axis=0),
    one("rows of a product", "MatMul", NONE, constants=[np.ones((3, 4), np.float32)]),
    one("columns of a product", "MatMul", NONE.T.copy(), NONE),
    one("rows by a computed matrix", "MatMul", NONE, np.ones((3, 4), np.float32)),
    one("affine", "Gemm", NONE.T.copy(), NONE, constants=[_ONES]),
    one("images", "Conv", _IMAGE, constants=[np.ones((3, 2, 3, 3), np.float32)]),
    one("pooling", "MaxPool", _IMAGE, kernel_shape=[2, 2]),
    one("pooling with a window in the padding", "MaxPool", _IMAGE, kernel_shape=[1, 2], strides=[2, 2], ceil_mode=1),
    one(
        "pooling with ceil_mode",
        "AveragePool",
        _IMAGE,
        kernel_shape=[2, 2],
        strides=[3, 3],
        pads=[0, 1, 1, 0],
        ceil_mode=1,
    ),
    one("flatten", "Flatten", _IMAGE),
    one("softmax", "Softmax", NONE, axis=1),
    one("normalization", "LayerNormalization", NONE, constants=[_ONES]),
    one("broadcast", "Max", X[:1], NONE),
    one("truths", "Greater", NONE, NONE),
    one("padding", "Pad", NONE, constants=[ints(1, 0, 1, 0)]),
    one("gather nothing", "Gather", X, np.zeros(0, np.int64)),
    one("scatter nothing", "ScatterND", X, np.zeros((0, 1), np.int64), NONE),
    one("scatter no elements", "ScatterElements", X, NONE.astype(np.int64), NONE),
    one("one-hot", "OneHot", np.zeros(0, np.int64), constants=[np.array(3), np.array([0, 1], np.float32)]),
    one("indices of nothing", "NonZero", NONE),
    one("reshape", "Reshape", NONE, constants=[ints(3, 0)], allowzero=1),
    one("transpose", "Transpose", NONE),
    one("slice of nothing", "Slice", X, constants=[ints(1), ints(1)]),
    one("no copies", "Tile", X, constants=[ints(0, 1)]),
    one("expansion to nothing", "Expand", X[:1], constants=[ints(0, 3)]),
    one("no best", "TopK", X, constants=[ints(0)], outputs=2),
    one("parts", "Split", X, constants=[ints(0, 2)], outputs=2),
    one("a row less", "Pad", X, constants=[ints(-2, 0, 0, 0)]),
    ShapeCase(
        "beside others", [make("Relu", ["a"], ["y"]), make("Relu", ["b"], ["z"])], {"a": NONE, "b": X}, ("z", "y")
    ),
    ShapeCase(
        "between nodes",
        [make("Slice", ["a", "c", "c"], ["m"]), make("Exp", ["m"], ["n"]), make("Concat", ["n", "a"], ["y"], axis=0)],
        {"a": X},
        constants={"c": ints(1)},
    ),
    ShapeCase("a constant", [make("Concat", ["a", "c"], ["y"], axis=0)], {"a": X}, constants={"c": NONE}),
]
CASES = [*SCALARS, *OUTPUTS, *EMPTY]
