"""Small .tflite files with tensors of rank 0, tensors without elements, and outputs that no operator computes."""

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
NONE, NOTHING = tensor("none", 0, 3), tensor("nothing", 0, 3)
_IMAGES = tensor("images", 0, 4, 4, 2)
_KERNEL = Tensor("w", (3, 1, 1, 2), data=np.ones(6, np.float32).tobytes())
_BIAS = Tensor("bias", (3,), data=np.ones(3, np.float32).tobytes())
_UNITS = Tensor("units", (4, 3), data=np.ones(12, np.float32).tobytes())
FIRST = vector("first", 0)
EMPTY = [
    one("RELU", [NONE], [NOTHING], note="of nothing"),
    one("ADD", [NONE, LINE], [NOTHING], "AddOptions", "to nothing"),
    *(one(name, [NONE, FIRST], [LINE], "ReducerOptions", "of nothing")
        for name in ("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD")),
    *(one(name, [tensor("t", 0, 3, kind="BOOL"), FIRST], [tensor("y", 3, kind="BOOL")], "ReducerOptions")
        for name in ("REDUCE_ALL", "REDUCE_ANY")),
    one("SUM", [tensor("x", 0, 3, kind="INT32"), FIRST], [tensor("y", 3, kind="INT32")], "ReducerOptions", "integers"),
    one("SUM", [NONE, vector("axes", 1)], [tensor("y", 0)], "ReducerOptions", "of rows of nothing"),
    one("CONCATENATION", [NONE, X], [ROWS], "ConcatenationOptions", Axis=0),
    one("CONCATENATION", [NONE, NOTHING], [tensor("y", 0, 3)], "ConcatenationOptions", "of nothing", Axis=0),
    one("FULLY_CONNECTED", [NONE, _UNITS], [tensor("y", 0, 4)], "FullyConnectedOptions"),
    one("BATCH_MATMUL", [tensor("a", 0, 2, 3), tensor("b", 0, 3, 4)], [tensor("y", 0, 2, 4)], "BatchMatMulOptions"),
    one("BATCH_MATMUL", [tensor("a", 2, 0), NONE], [ROWS], "BatchMatMulOptions", "over nothing"),
    one("CONV_2D", [_IMAGES, _KERNEL, _BIAS], [tensor("y", 0, 4, 4, 3)], "Conv2DOptions", StrideW=1, StrideH=1),
    one("SOFTMAX", [NONE], [NOTHING], "SoftmaxOptions", Beta=1.0),
    one("RESHAPE", [NONE, vector("shape", 3, 0)], [tensor("y", 3, 0)], "ReshapeOptions", "of nothing"),
    one("TRANSPOSE", [NONE, vector("axes", 1, 0)], [tensor("y", 3, 0)], "TransposeOptions"),
    one("GATHER", [X, tensor("i", 0, kind="INT32")], [NONE], "GatherOptions", "nothing", Axis=0),
    one("SLICE", [X, vector("from", 1, 0), vector("size", 0, 3)], [NONE], "SliceOptions"),
    one("STRIDED_SLICE", [X, vector("from", 1, 0), vector("to", 1, 3), vector("by", 1, 1)], [NONE],
        "StridedSliceOptions", "of nothing"),
    one("TILE", [X, vector("times", 0, 1)], [NONE], "TileOptions"),
    one("BROADCAST_TO", [tensor("a", 1, 3), vector("shape", 0, 3)], [NONE], "BroadcastToOptions", "nothing"),
    one("PAD", [NONE, Tensor("pads", (2, 2), "INT32", ints(1, 1, 0, 0))], [ROWS], "PadOptions"),
    one("SPLIT_V", [X, vector("sizes", 0, 2), FIRST_AXIS], [NONE, ROWS], "SplitVOptions", NumSplits=2),
    one("CAST", [NONE], [tensor("y", 0, 3, kind="INT32")], "CastOptions", "of nothing", InDataType=0, OutDataType=2),
    one("SHAPE", [NONE], [tensor("y", 2, kind="INT32")], "ShapeOptions", OutType=2),
    one("LESS", [NONE, NOTHING], [tensor("y", 0, 3, kind="BOOL")], "LessOptions", "of nothing"),
    one("ADD", [tensor("a", 0, 3, kind="INT8"), tensor("b", 0, 3, kind="INT8")], [tensor("y", 0, 3, kind="INT8")],
        "AddOptions", "of no codes"),
    one("PACK", [tensor("a", 0), tensor("b", 0)], [tensor("y", 2, 0)], "PackOptions", "of nothing", ValuesCount=2),
    one("TOPK_V2", [NONE, constant(1, "k", "INT32")], [tensor("y", 0, 1), tensor("z", 0, 1, kind="INT32")],
        "TopKV2Options"),
    FileCase("a constant without elements", [X, NONE, ROWS],
        [Operator("CONCATENATION", (0, 1), (2,), "ConcatenationOptions", {"Axis": 0})], [0], [2]),
    FileCase("an output without elements", [X, NONE, ROWS], [Operator("RELU", (0,), (2,))], [0], [2, 1]),
    FileCase("a result without elements between operators",
        [X, vector("from", 1, 0), vector("size", 0, 3), NONE, NOTHING, ROWS],
        [Operator("SLICE", (0, 1, 2), (3,), "SliceOptions", {}), Operator("RELU", (3,), (4,)),
            Operator("CONCATENATION", (4, 0), (5,), "ConcatenationOptions", {"Axis": 0})], [0], [5]),
]  # fmt: skip
CASES = [*SCALARS, *OUTPUTS, *EMPTY]
