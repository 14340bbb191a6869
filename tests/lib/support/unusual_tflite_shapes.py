"""Small .tflite files with tensors of rank 0, and with outputs that no operator computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.oracles import Array
from support.tflite_files import Operator, Tensor, ints, writer

_KINDS: Mapping[str, Any] = {
    "BOOL": bool,
    "FLOAT32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "INT8": np.int8,
}


@dataclass(frozen=True)
class FileCase:
    """A file: its tensors, its operators, and the indexes of inputs and outputs."""

    name: str
    tensors: Sequence[Any]
    operators: Sequence[Any]
    inputs: Sequence[int]
    outputs: Sequence[int]

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def content(self) -> bytes:
        """Return the file."""
        data: bytes = writer.write(self.tensors, self.operators, self.inputs, self.outputs)
        return data

    def draw(self) -> list[Array]:
        """Return the same inputs each time: positive numbers, indices, truths."""
        rng = np.random.default_rng(len(self.tensors))
        tensors = [self.tensors[index] for index in self.inputs]
        return [np.asarray(rng.uniform(0.2, 1.9, each.shape)).astype(_KINDS[each.type]) for each in tensors]


def tensor(name: str, *shape: int, kind: str = "FLOAT32") -> Any:
    """Return a tensor of this shape; () is rank 0."""
    if kind == "INT8":
        return Tensor(name, shape, kind, scales=[0.5], zero_points=[3])
    return Tensor(name, shape, kind)


def constant(value: float, name: str, kind: str = "FLOAT32") -> Any:
    """Return a constant of rank 0."""
    return Tensor(name, (), kind, np.asarray(value, _KINDS[kind]).tobytes())


def vector(name: str, *values: int) -> Any:
    """Return a constant vector of INT32."""
    return Tensor(name, (len(values),), "INT32", ints(*values))


def one(
    name: str, given: Sequence[Any], results: Sequence[Any], table: str = "", note: str = "", **options: Any
) -> Any:
    """Return a file of one operator."""
    results_at = range(len(given), len(given) + len(results))
    inputs = [index for index, each in enumerate(given) if each.data is None]
    operator = Operator(name, range(len(given)), results_at, table, options)
    return FileCase(f"{name} {note}".strip(), [*given, *results], [operator], inputs, list(results_at))


A, B, Y, Z, X = tensor("a"), tensor("b"), tensor("y"), tensor("z"), tensor("x", 2, 3)
ROWS, LINE = tensor("rows", 2, 3), tensor("line", 3)
INDEX, TRUTH = tensor("i", kind="INT32"), tensor("t", kind="BOOL")
PAIR = np.array([1, 2], np.float32).tobytes()
BOTH_AXES, FIRST_AXIS = vector("axes", 0, 1), constant(0, "axis", "INT32")

SCALARS = [
    one("ADD", [A, B], [Y], "AddOptions"),
    one("ADD", [X, B], [ROWS], "AddOptions", "tensor"),
    one("MUL", [A, X], [ROWS], "MulOptions", "first"),
    one("POW", [A, B], [Y], "PowOptions"),
    one("MAXIMUM", [A, B], [Y], "MaximumMinimumOptions"),
    one("SQUARED_DIFFERENCE", [A, B], [Y], "SquaredDifferenceOptions"),
    one("EXP", [A], [Y], "ExpOptions"),
    one("RELU", [A], [Y]),
    one("TANH", [A], [Y]),
    one("LOGISTIC", [A], [Y]),
    one("NEG", [A], [Y], "NegOptions"),
    one("CAST", [A], [tensor("y", kind="INT32")], "CastOptions", InDataType=0, OutDataType=2),
    one("LESS", [A, B], [tensor("y", kind="BOOL")], "LessOptions"),
    one("LOGICAL_NOT", [TRUTH], [tensor("y", kind="BOOL")], "LogicalNotOptions"),
    one("ADD", [tensor("a", kind="INT64"), tensor("b", kind="INT64")], [tensor("y", kind="INT64")], "AddOptions", "64"),
    one("ADD", [tensor("a", kind="INT8"), tensor("b", kind="INT8")], [tensor("y", kind="INT8")], "AddOptions", "codes"),
    one("QUANTIZE", [A], [tensor("y", kind="INT8")], "QuantizeOptions"),
    one("DEQUANTIZE", [tensor("a", kind="INT8")], [Y], "DequantizeOptions"),
    one("GATHER", [X, INDEX], [LINE], "GatherOptions", Axis=0),
    one("GATHER", [LINE, INDEX], [Y], "GatherOptions", "element", Axis=0),
    one("ONE_HOT", [INDEX, constant(3, "n", "INT32"), constant(1, "on"), constant(0, "off")],
        [tensor("y", 3)], "OneHotOptions", Axis=-1),
    one("PACK", [A, B], [tensor("y", 2)], "PackOptions", ValuesCount=2, Axis=0),
    one("UNPACK", [tensor("x", 2)], [Y, Z], "UnpackOptions", Num=2, Axis=0),
    one("EXPAND_DIMS", [A, FIRST_AXIS], [tensor("y", 1)], "ExpandDimsOptions"),
    one("SQUEEZE", [tensor("x", 1, 1)], [Y], "SqueezeOptions"),
    one("RESHAPE", [A, vector("shape", 1)], [tensor("y", 1)], "ReshapeOptions"),
    one("FILL", [vector("shape", 2, 3), A], [ROWS], "FillOptions"),
    one("BROADCAST_TO", [A, vector("shape", 2, 3)], [ROWS], "BroadcastToOptions"),
    one("SUM", [X, BOTH_AXES], [Y], "ReducerOptions", KeepDims=0),
    one("MEAN", [X, BOTH_AXES], [Y], "ReducerOptions", KeepDims=0),
    one("ARG_MAX", [LINE, FIRST_AXIS], [tensor("y", kind="INT32")], "ArgMaxOptions", OutputType=2),
    one("STRIDED_SLICE", [LINE, vector("from", 1), vector("to", 2), vector("by", 1)], [Y], "StridedSliceOptions",
        ShrinkAxisMask=1),
    one("SELECT_V2", [TRUTH, X, ROWS], [tensor("y", 2, 3)], "SelectV2Options"),
    one("SELECT_V2", [TRUTH, A, B], [Y], "SelectV2Options", "of scalars"),
    one("RANK", [X], [tensor("y", kind="INT32")], "RankOptions"),
    FileCase("between operators", [A, B, Y], [Operator("EXP", (0,), (1,), "ExpOptions", {}),
        Operator("NEG", (1,), (2,), "NegOptions", {})], [0], [2]),
    FileCase("sum and product", [X, BOTH_AXES, A, ROWS], [Operator("SUM", (0, 1), (2,), "ReducerOptions", {}),
        Operator("MUL", (0, 2), (3,), "MulOptions", {})], [0], [3]),
]  # fmt: skip


def relu(result: Any, outputs: Sequence[int], *more: Any, x: Any = X) -> FileCase:
    """Return a file of RELU, with more tensors that it does not read."""
    names = ", ".join(str(index) for index in outputs)
    return FileCase(f"outputs {names} {x.type}", [x, result, *more], [Operator("RELU", (0,), (1,))], [0], outputs)


CODES = tensor("q", 2, 3, kind="INT8"), tensor("r", 2, 3, kind="INT8")
OUTPUTS = [
    relu(ROWS, [1, 1]),
    relu(ROWS, [1, 0]),
    relu(ROWS, [1, 2], Tensor("c", (2,), data=PAIR)),
    relu(ROWS, [2, 1, 2], constant(2.5, "c")),
    relu(CODES[1], [1, 1, 0], x=CODES[0]),
    FileCase("truths", [tensor("x", 2, kind="BOOL"), tensor("y", 2, kind="BOOL")],
        [Operator("LOGICAL_NOT", (0,), (1,), "LogicalNotOptions", {})], [0], [1, 0, 1]),
    FileCase("INT64", [tensor("x", 2, kind="INT64"), tensor("y", 2, kind="INT64")],
        [Operator("ADD", (0, 0), (1,), "AddOptions", {})], [0], [1, 1, 0]),
    FileCase("a result that is read", [X, ROWS, tensor("z", 2, 3)], [Operator("RELU", (0,), (1,)),
        Operator("NEG", (1,), (2,), "NegOptions", {})], [0], [1, 2, 1]),
    FileCase("an input alone", [X], [], [0], [0]),
    FileCase("a constant alone", [Tensor("c", (2,), data=PAIR)], [], [], [0]),
    FileCase("no inputs", [Tensor("c", (2,), data=PAIR), tensor("y", 2)],
        [Operator("NEG", (0,), (1,), "NegOptions", {})], [], [1]),
]  # fmt: skip
CASES = [*SCALARS, *OUTPUTS]
