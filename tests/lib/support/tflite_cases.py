"""A TFLite file for each operator that the importer knows, in every form that its converter distinguishes.

Inputs are drawn at random; the shapes of the outputs are what TFLite infers, written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from support.tflite_files import CONV, Operator, Tensor, writer

Array = npt.NDArray[Any]
DTYPES = {
    "FLOAT32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "BOOL": bool,
    "INT16": np.int16,
    "COMPLEX64": np.complex64,
}
SAME, VALID = 0, 1


@dataclass(frozen=True)
class Case:
    """One operator between inputs and outputs of the model; constants and variables stand where it takes them."""

    name: str
    given: Sequence[Any]  # its inputs: Tensor, or None where omitted
    outputs: Sequence[Any]
    table: str = ""
    options: dict[str, Any] | None = None
    low: float = -2.0
    high: float = 2.0
    optimized: bool = False  # compare with LiteRT's ordinary kernels instead
    note: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.note)))

    def inputs(self) -> list[Any]:
        return [t for t in self.given if t is not None and t.data is None and not t.extra]

    def content(self) -> bytes:
        tensors = [tensor for tensor in self.given if tensor is not None]
        places = [-1 if tensor is None else tensors.index(tensor) for tensor in self.given]
        results = range(len(tensors), len(tensors) + len(self.outputs))
        operator = Operator(self.name, places, results, self.table, self.options or {})
        sources = [tensors.index(tensor) for tensor in self.inputs()]
        data: bytes = writer.write([*tensors, *self.outputs], [operator], sources, results)
        return data

    def draw(self, rng: np.random.Generator) -> list[Array]:
        return [self._values(rng, tensor) for tensor in self.inputs()]

    def _values(self, rng: np.random.Generator, tensor: Any) -> Any:
        kind: Any = DTYPES[tensor.type]
        if tensor.type == "INT16":
            lowest = 0 if self.low >= 0 else -32768
            return np.rint(rng.normal(0, 12000, tensor.shape)).clip(lowest, 32767).astype(kind)
        if tensor.type in ("UINT8", "INT8"):
            return rng.integers(0, 256, tensor.shape).astype(np.uint8).view(kind)
        if tensor.type == "COMPLEX64":
            parts = rng.uniform(self.low, self.high, (2, *tensor.shape))
            return (parts[0] + 1j * parts[1]).astype(kind)
        if tensor.type == "FLOAT32":
            return rng.uniform(self.low, self.high, tensor.shape).astype(np.float32)
        return rng.integers(int(self.low), int(self.high) + 1, tensor.shape).astype(kind)


def x(*shape: int, kind: str = "FLOAT32", name: str = "x") -> Any:
    """A tensor that the model is given, or that the operator writes."""
    return Tensor(f"{name}{kind}{shape}", shape, kind)


def codes(*shape: int, kind: str = "INT8", scale: float = 0.05, zero_point: int = 3, name: str = "codes") -> Any:
    return Tensor(f"{name}{shape}", shape, kind, scales=(scale,), zero_points=(zero_point,))


def weight(*shape: int, seed: int = 1, scale: float = 1.0) -> Any:
    data = (np.random.default_rng(seed).uniform(-1, 1, shape) * scale).astype(np.float32)
    return Tensor(f"w{shape}{seed}", shape, data=data.tobytes())


def integers(*values: int, kind: str = "INT32", shape: tuple[int, ...] | None = None) -> Any:
    data = np.array(values, DTYPES[kind]).tobytes()
    return Tensor(f"c{values}", (len(values),) if shape is None else shape, kind, data)


def coded_weight(*shape: int, scales: Sequence[float] = (0.02,), dimension: int = 0, kind: str = "INT8") -> Any:
    data = np.random.default_rng(7).integers(-127, 128, shape).astype(np.int8)
    return Tensor(f"q{shape}", shape, kind, data.tobytes(), tuple(scales), (0,) * len(scales), dimension)


def coded_bias(count: int, scales: Sequence[float]) -> Any:
    data = np.random.default_rng(8).integers(-900, 900, count).astype(np.int32)
    return Tensor(f"b{count}", (count,), "INT32", data.tobytes(), tuple(scales), (0,) * len(scales))


def variable(*shape: int, name: str = "state") -> Any:
    return Tensor(f"{name}{shape}", shape, extra={"IsVariable": 1})


IMAGE = x(2, 6, 4, 4)
WINDOW = {"Padding": SAME, "StrideW": 1, "StrideH": 2}


def unary() -> list[Case]:
    floats = ("ABS", "EXP", "FLOOR", "NEG", "SIN", "SQUARE", "LOG_SOFTMAX")
    cases = [Case(name, [x(3, 5)], [x(3, 5)]) for name in floats]
    cases += [Case(name, [x(3, 5)], [x(3, 5)], low=0.1, high=3.0) for name in ("LOG", "RSQRT", "SQRT")]
    cases += [Case(name, [x(3, 5)], [x(3, 5)], optimized=True) for name in ("CEIL", "ELU")]
    cases += [
        Case(name, [codes(3, 64)], [codes(3, 64, scale=out, zero_point=zero)])
        for name, out, zero in (("LOGISTIC", 1 / 256, -128), ("TANH", 1 / 128, 0), ("HARD_SWISH", 0.04, -5))
    ]
    same = codes(3, 64)
    cases += [Case(name, [same], [same]) for name in ("RELU", "RELU6", "RELU_N1_TO_1")]
    wider = codes(3, 64, scale=0.03, zero_point=-100)
    cases += [Case(name, [same], [wider], note="requantized") for name in ("RELU", "RELU6", "RELU_N1_TO_1")]
    cases += [
        Case("LOGICAL_NOT", [x(7, kind="BOOL")], [x(7, kind="BOOL")], low=0, high=1),
        Case("CAST", [x(3, 5)], [x(3, 5, kind="INT32")], "CastOptions", low=-9, high=9),
        Case("CAST", [x(9, kind="UINT8")], [x(9)], note="bytes"),
        Case("CAST", [x(9, kind="INT64")], [x(9)], low=-9, high=9, note="int64"),
        Case("SOFTMAX", [codes(3, 9)], [codes(3, 9, scale=1 / 256, zero_point=-128)], "SoftmaxOptions", {"Beta": 1.5}),
        Case("L2_NORMALIZATION", [x(3, 5)], [x(3, 5)], "L2NormOptions"),
        Case("LOCAL_RESPONSE_NORMALIZATION", [IMAGE], [IMAGE], "LocalResponseNormalizationOptions",
            {"Radius": 1, "Bias": 2.0, "Alpha": 0.5, "Beta": 0.75}, optimized=True),
        Case("LEAKY_RELU", [x(3, 5)], [x(3, 5)], "LeakyReluOptions", {"Alpha": 0.3}),
        Case("LEAKY_RELU", [x(3, 5)], [x(3, 5)], "LeakyReluOptions", {"Alpha": 0.0}, note="zero"),
    ]  # fmt: skip
    cases += [
        Case(name, [codes(3, 64, zero_point=zero)], [codes(3, 64, scale=out, zero_point=3)], note="codes")
        for name, zero, out in (("ABS", 3, 0.05), ("EXP", 100, 2.0))
    ]
    for kind in ("INT8", "UINT8"):
        for slope in (0.3, -0.2, 1.7, 0.0):
            given, out = codes(4, 64, kind=kind), codes(4, 64, kind=kind, scale=0.09, zero_point=40)
            cases.append(
                Case("LEAKY_RELU", [given], [out], "LeakyReluOptions", {"Alpha": slope}, note=f"{kind}{slope}")
            )
    return cases


def binary() -> list[Case]:
    a, row = x(3, 5), x(5)
    fused = [
        Case(name, [a, row], [a], f"{name.title()}Options", {"FusedActivationFunction": code}, 0.5)
        for name, code in (("ADD", 1), ("SUB", 3), ("MUL", 2), ("DIV", 0))
    ]
    plain = [
        Case(name, [a, row], [a], low=0.5, high=3.0)
        for name in ("MAXIMUM", "MINIMUM", "POW", "PRELU", "SQUARED_DIFFERENCE", "FLOOR_DIV")
    ]
    number, few = x(3, 5, kind="INT32"), x(5, kind="INT32")
    compare = [
        Case(name, [number, few], [x(3, 5, kind="BOOL")])
        for name in ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")
    ]
    divisors = Tensor("divisors", (5,), "UINT8", bytes([1, 9, 40, 200, 255]), (0.05,), (0,))
    truth, other = x(3, 5, kind="BOOL"), x(3, 5, kind="BOOL", name="other")
    logic = [Case(name, [truth, other], [truth], low=0, high=1) for name in ("LOGICAL_AND", "LOGICAL_OR")]
    return [
        *fused, *plain, *compare, *logic,
        Case("SUB", [codes(3, 5), codes(5, name="second")], [codes(3, 5, scale=0.1)], "SubOptions", note="codes"),
        Case("SUB", [number, few], [number], "SubOptions", note="integers"),
        Case("SQUARED_DIFFERENCE", [number, few], [number], note="integers"),
        Case("SQUARED_DIFFERENCE", [codes(3, 5), codes(3, 5, name="second")], [codes(3, 5, scale=0.6)],
            note="codes"),
        Case("DIV", [codes(3, 5, kind="UINT8"), divisors],
            [codes(3, 5, kind="UINT8", scale=0.1)], "DivOptions", note="codes"),
        Case("FLOOR_DIV", [x(3, 5, kind="INT32"), integers(2, -3, 5, 1, -1)], [number], low=-9, high=9,
            note="integers"),
        Case("ADD_N", [x(3, 5, name=name) for name in "abc"], [a]),
        Case("SELECT", [truth, a, x(3, 5, name="other")], [a], low=0, high=1),
        Case("SELECT_V2", [truth, row, x(1, 1)], [a], low=0, high=1),
        Case("QUANTIZE", [a], [codes(3, 5)]),
        Case("QUANTIZE", [codes(4, 64, kind="UINT8", zero_point=131)], [codes(4, 64)], note="the other sign"),
        Case("DEQUANTIZE", [codes(3, 5)], [a]),
    ]  # fmt: skip


def moving() -> list[Case]:
    given = x(2, 3, 4)
    row = codes(2, 3, 4)
    return [
        Case("RESHAPE", [given, integers(4, -1, kind="INT32")], [x(4, 6)]),
        Case("SQUEEZE", [x(1, 3, 1)], [x(3)], "SqueezeOptions", {"SqueezeDims": [0, 2]}),
        Case("EXPAND_DIMS", [given, integers(-2)], [x(2, 3, 1, 4)]),
        Case("EXPAND_DIMS", [given, integers(0, kind="INT64")], [x(1, 2, 3, 4)], note="int64"),
        Case("TRANSPOSE", [row, integers(2, 0, 1)], [codes(4, 2, 3)]),
        Case("PAD", [row, integers(1, 0, 0, 2, 1, 1, shape=(3, 2))], [codes(3, 5, 6)]),
        Case("PAD", [given, integers(1, 0, 0, 2, 1, 1, kind="INT64", shape=(3, 2))], [x(3, 5, 6)], note="int64"),
        Case("PADV2", [given, integers(1, 0, 0, 2, 1, 1, shape=(3, 2)), weight(1)], [x(3, 5, 6)]),
        Case("PADV2", [row, integers(1, 0, 0, 2, 1, 1, shape=(3, 2)),
            Tensor("pad", (), "INT8", b"\x85", (0.05,), (3,))], [codes(3, 5, 6)], note="codes"),
        *(Case("MIRROR_PAD", [given, integers(1, 0, 0, 2, 1, 1, shape=(3, 2))], [x(3, 5, 6)], "MirrorPadOptions",
            {"Mode": mode}, note=str(mode)) for mode in (0, 1)),
        Case("CONCATENATION", [given, x(2, 5, 4)], [x(2, 8, 4)], "ConcatenationOptions", {"Axis": -2}),
        Case("PACK", [given, x(2, 3, 4, name="other")], [x(2, 3, 2, 4)], "PackOptions", {"ValuesCount": 2, "Axis": -2}),
        Case("TILE", [given, integers(2, 1, 3)], [x(4, 3, 12)]),
        Case("BROADCAST_TO", [x(3, 1), integers(2, 3, 4)], [given]),
        Case("BROADCAST_TO", [given, integers(2, 3, 4)], [given], note="as it is"),
        Case("REVERSE_V2", [given, integers(1)], [given]),
        Case("FILL", [integers(3, 3), x()], [x(3, 3)]),
        Case("EMBEDDING_LOOKUP", [x(5, kind="INT32"), weight(4, 3)], [x(5, 3)], low=0, high=3),
        Case("HASHTABLE_LOOKUP", [x(4, kind="INT32"), integers(-2, 0, 3), weight(3, 5)], [x(4, 5), x(4, kind="UINT8")],
            low=-2, high=3),
        Case("GATHER", [given, integers(2, 0)], [x(2, 2, 4)], "GatherOptions", {"Axis": 1}),
        Case("GATHER", [given, integers(1, shape=())], [x(2, 4)], "GatherOptions", {"Axis": -2}, note="rank 0"),
        Case("GATHER", [x(6), integers(4, shape=())], [x()], "GatherOptions", note="rank 0 of a vector"),
        Case("GATHER", [given, x(2, kind="INT64")], [x(2, 3, 4)], low=0, high=1, note="int64"),
        Case("SLICE", [given, integers(0, 1, 2), integers(2, -1, 1)], [x(2, 2, 1)]),
        Case("STRIDED_SLICE", [given, integers(1, 0, 3), integers(2, 3, 0), integers(1, 2, -1)], [x(1, 2, 4)],
            "StridedSliceOptions", {"EndMask": 4}),
        Case("STRIDED_SLICE", [given, integers(1), integers(2), integers(1)], [x(3, 4)], "StridedSliceOptions",
            {"ShrinkAxisMask": 1}, note="first dimension only"),
        Case("STRIDED_SLICE", [given, integers(1, -1, 2), integers(2, 0, 3), integers(1, 1, 1)], [x()],
            "StridedSliceOptions", {"ShrinkAxisMask": 7}, note="one element"),
        Case("SPLIT", [integers(-2, shape=()), given], [x(2, 1, 4), x(2, 1, 4), x(2, 1, 4)],
            "SplitOptions", {"NumSplits": 3}),
        Case("SPLIT_V", [given, integers(1, -1), integers(1, shape=())], [x(2, 1, 4), x(2, 2, 4)], "SplitVOptions",
            {"NumSplits": 2}),
        Case("UNPACK", [given], [x(2, 4)] * 3, "UnpackOptions", {"Num": 3, "Axis": -2}),
        Case("UNPACK", [x(3)], [x()] * 3, "UnpackOptions", {"Num": 3, "Axis": 0}, note="of a vector"),
    ]  # fmt: skip


def images() -> list[Case]:
    pools = {"Padding": VALID, "StrideW": 1, "StrideH": 2, "FilterWidth": 3, "FilterHeight": 2}
    nearest, size = "ResizeNearestNeighborOptions", integers(5, 7)
    block = integers(2, 2)
    return [
        *(Case(name, [IMAGE], [x(2, 3, 2, 4)], "Pool2DOptions", pools)
            for name in ("AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D")),
        *(Case("RESIZE_BILINEAR", [IMAGE, size], [x(2, 5, 7, 4)], "ResizeBilinearOptions", flags, note=str(n))
            for n, flags in enumerate(({}, {"AlignCorners": 1}, {"HalfPixelCenters": 1}))),
        *(Case("RESIZE_NEAREST_NEIGHBOR", [IMAGE, size], [x(2, 5, 7, 4)], nearest, flags, note=str(n))
            for n, flags in enumerate(({}, {"AlignCorners": 1}, {"HalfPixelCenters": 1}))),
        Case("DEPTH_TO_SPACE", [IMAGE], [x(2, 12, 8, 1)], "DepthToSpaceOptions", {"BlockSize": 2}),
        Case("SPACE_TO_DEPTH", [IMAGE], [x(2, 3, 2, 16)], "SpaceToDepthOptions", {"BlockSize": 2}),
        Case("SPACE_TO_BATCH_ND", [IMAGE, block, integers(1, 1, 0, 2, shape=(2, 2))], [x(8, 4, 3, 4)]),
        Case("BATCH_TO_SPACE_ND", [x(8, 4, 3, 4), block, integers(0, 0, 0, 0, shape=(2, 2))], [x(2, 8, 6, 4)]),
        Case("BATCH_TO_SPACE_ND", [x(8, 4, 3, 4), block, integers(1, 1, 0, 2, shape=(2, 2))], [x(2, 6, 4, 4)],
            note="crops"),
    ]  # fmt: skip


def reductions() -> list[Case]:
    given = x(2, 3, 4)
    found = [
        Case(name, [given, integers(-1, 0)], [x(1, 3, 1)], "ReducerOptions", {"KeepDims": 1})
        for name in ("MEAN", "SUM", "REDUCE_PROD", "REDUCE_MAX", "REDUCE_MIN")
    ]
    narrow, sums = codes(5, 9, kind="UINT8"), codes(5, kind="UINT8", scale=0.4)
    found.append(Case("SUM", [narrow, integers(1)], [sums], "ReducerOptions", note="codes"))
    truths = x(4, 3, kind="BOOL")
    return [
        *found,
        Case("MEAN", [given, integers(0, 1, 2)], [x()], "ReducerOptions", note="to one"),
        Case("MEAN", [codes(9, 20), integers(1)], [codes(9, scale=0.01)], "ReducerOptions",
            note="requantized"),
        *(Case(name, [truths, integers(1)], [x(4, kind="BOOL")], "ReducerOptions", low=0, high=1)
            for name in ("REDUCE_ALL", "REDUCE_ANY")),
        *(Case(name, [given, integers(-2)], [x(2, 4, kind="INT32")], f"{table}Options", {"OutputType": 2})
            for name, table in (("ARG_MAX", "ArgMax"), ("ARG_MIN", "ArgMin"))),
        Case("ARG_MAX", [x(9), integers(0)], [x(kind="INT64")], "ArgMaxOptions", {"OutputType": 4}, note="int64"),
        Case("TOPK_V2", [x(3, 9), integers(4, shape=())], [x(3, 4), x(3, 4, kind="INT32")]),
        Case("LSH_PROJECTION", [weight(3, 4), x(5, 2, kind="INT32")], [x(3, kind="INT32")], "LSHProjectionOptions",
            {"Type": 1}, note="sparse"),
        Case("LSH_PROJECTION", [weight(3, 4), x(5, 2, kind="INT32"), weight(5, seed=2)], [x(12, kind="INT32")],
            "LSHProjectionOptions", {"Type": 2}, note="dense"),
    ]  # fmt: skip


def products() -> list[Case]:
    scales = (0.02, 0.01, 0.03)
    q, product = codes(2, 6, 4, 4), [0.05 * scale for scale in scales]
    filter = coded_weight(3, 3, 2, 4, scales=scales)
    deconvolved = {"Padding": SAME, "StrideW": 2, "StrideH": 2}
    size = integers(2, 12, 8, 3)
    return [
        Case("CONV_2D", [IMAGE, weight(3, 3, 2, 4), weight(3)], [x(2, 3, 4, 3)], "Conv2DOptions", WINDOW),
        Case("CONV_2D", [q, filter, coded_bias(3, product)], [codes(2, 3, 4, 3, scale=0.2)], "Conv2DOptions", WINDOW,
            note="codes"),
        Case("CONV_2D", [IMAGE, weight(6, 3, 2, 2), weight(6)], [x(2, 3, 4, 6)], "Conv2DOptions", WINDOW,
            note="groups"),
        Case("DEPTHWISE_CONV_2D", [IMAGE, weight(1, 3, 2, 8), weight(8)], [x(2, 6, 4, 8)], "DepthwiseConv2DOptions",
            {**CONV, "DepthMultiplier": 2}),
        Case("TRANSPOSE_CONV", [size, weight(3, 3, 2, 4), IMAGE, weight(3, seed=5)], [x(2, 12, 8, 3)],
            "TransposeConvOptions", deconvolved),
        Case("TRANSPOSE_CONV", [size, weight(3, 3, 2, 4), IMAGE], [x(2, 12, 8, 3)], "TransposeConvOptions", deconvolved,
            note="no bias"),
        Case("TRANSPOSE_CONV", [size, filter, q, coded_bias(3, product)], [codes(2, 12, 8, 3, scale=0.2)],
            "TransposeConvOptions", deconvolved, note="codes"),
        Case("FULLY_CONNECTED", [x(2, 8), weight(3, 8), weight(3)], [x(2, 3)], "FullyConnectedOptions"),
        Case("FULLY_CONNECTED", [x(2, 5, 8), weight(3, 8), None], [x(2, 5, 3)], "FullyConnectedOptions",
            {"KeepNumDims": 1}, note="dimensions"),
        Case("FULLY_CONNECTED", [codes(5, 8), coded_weight(3, 8, scales=scales), coded_bias(3, product)],
            [codes(5, 3, scale=0.1)], "FullyConnectedOptions", {"FusedActivationFunction": 1}, note="per channel"),
        Case("FULLY_CONNECTED", [codes(2, 5, 8), coded_weight(3, 8, scales=scales), coded_bias(3, product)],
            [codes(2, 5, 3, scale=0.1)], "FullyConnectedOptions", {"KeepNumDims": 1}, note="per channel, dimensions"),
        Case("BATCH_MATMUL", [x(2, 4, 3), x(2, 5, 4)], [x(2, 3, 5)], "BatchMatMulOptions", {"AdjX": 1, "AdjY": 1}),
        Case("BATCH_MATMUL", [codes(2, 3, 4), codes(2, 4, 5)], [codes(2, 3, 5, scale=0.3)], "BatchMatMulOptions",
            note="codes"),
        *(Case("BATCH_MATMUL", [x(*left, name="l"), x(*right, name="r")], [x(*out)], "BatchMatMulOptions", options,
            note=f"{left}x{right}") for left, right, out, options in BROADCAST_PRODUCTS),
        *(Case("BATCH_MATMUL", [codes(*left, name="l"), codes(*right, name="r")], [codes(*out, scale=0.3)],
            "BatchMatMulOptions", options, note=f"codes{left}x{right}")
            for left, right, out, options in BROADCAST_PRODUCTS),
        Case("BATCH_MATMUL", [x(2, 3, 4), weight(4, 5)], [x(2, 3, 5)], "BatchMatMulOptions", note="constant"),
        Case("BATCH_MATMUL", [x(2, 3, 4), weight(1, 5, 4)], [x(2, 3, 5)], "BatchMatMulOptions", {"AdjY": 1},
            note="constant of batch 1"),
    ]  # fmt: skip


BROADCAST_PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, int]]] = [
    ((2, 3, 4), (4, 5), (2, 3, 5), {}),
    ((2, 3, 4), (1, 4, 5), (2, 3, 5), {}),
    ((1, 3, 4), (2, 4, 5), (2, 3, 5), {}),
    ((3, 4), (2, 4, 5), (2, 3, 5), {}),
    ((2, 1, 3, 4), (1, 3, 4, 5), (2, 3, 3, 5), {}),
    ((2, 2, 3, 4), (4, 5), (2, 2, 3, 5), {}),
    ((2, 4, 3), (4, 5), (2, 3, 5), {"AdjX": 1}),
    ((2, 3, 4), (5, 4), (2, 3, 5), {"AdjY": 1}),
    ((1, 4, 3), (2, 5, 4), (2, 3, 5), {"AdjX": 1, "AdjY": 1}),
    ((1, 2, 2, 3, 4), (1, 2, 2, 4, 5), (1, 2, 2, 3, 5), {}),
    ((2, 1, 2, 3, 4), (2, 4, 5), (2, 1, 2, 3, 5), {}),
]
"""Shapes of BATCH_MATMUL whose batches differ, or whose rank is above the HAL's 4."""


def lstm_tensors(cells: int, size: int, units: int, *, first_gate: bool, full: bool, seed: int) -> list[Any]:
    """Weights and biases of one cell: with peepholes and projection where `full`, else units == cells."""
    gates = [first_gate, True, True, True]
    tensors: list[Any] = [weight(cells, size, seed=seed + n) if g else None for n, g in enumerate(gates)]
    tensors += [weight(cells, units, seed=seed + 10 + n) if g else None for n, g in enumerate(gates)]
    tensors += [
        weight(cells, seed=seed + 20 + n) if full and g else None for n, g in enumerate([first_gate, True, True])
    ]
    tensors += [weight(cells, seed=seed + 30 + n) if g else None for n, g in enumerate(gates)]
    return tensors + ([weight(units, cells, seed=seed + 40), weight(units, seed=seed + 41)] if full else [None, None])


def states(*sizes: int) -> list[Any]:
    return [variable(2, size, name=f"state{n}") for n, size in enumerate(sizes)]


def recurrent() -> list[Case]:
    tanh = {"FusedActivationFunction": 4}
    clipped = {**tanh, "CellClip": 0.5, "ProjClip": 0.3}
    plain = lstm_tensors(5, 3, 5, first_gate=True, full=False, seed=100)
    coupled = lstm_tensors(5, 3, 4, first_gate=False, full=True, seed=200)
    normed = [*lstm_tensors(5, 3, 5, first_gate=True, full=False, seed=300), *states(5, 5)]
    norms = [weight(5, seed=350 + n) for n in range(4)]
    backward = lstm_tensors(5, 3, 5, first_gate=True, full=False, seed=400)
    basic = [weight(4, 3), weight(4, 4), weight(4), *states(4)]
    other = [weight(4, 3, seed=2), weight(4, 4, seed=2), weight(4, seed=2), variable(2, 4, name="other")]
    aux, aux_weights = x(2, 6, 2, name="aux"), [weight(5, 2, seed=500 + n) for n in range(8)]
    sequence, both = "UnidirectionalSequenceLSTMOptions", "BidirectionalSequenceLSTMOptions"
    rnns = "BidirectionalSequenceRNNOptions"
    return [
        Case("RNN", [x(2, 3), *basic], [x(2, 4)], "RNNOptions", tanh),
        Case("UNIDIRECTIONAL_SEQUENCE_RNN", [x(2, 6, 3), *basic], [x(2, 6, 4)], "SequenceRNNOptions", tanh),
        Case("UNIDIRECTIONAL_SEQUENCE_RNN", [x(6, 2, 3), *basic], [x(6, 2, 4)], "SequenceRNNOptions",
            {**tanh, "TimeMajor": 1}, note="time major"),
        Case("BIDIRECTIONAL_SEQUENCE_RNN", [x(2, 6, 3), *basic, *other, *[None] * 3], [x(2, 6, 4)] * 2, rnns, tanh),
        Case("BIDIRECTIONAL_SEQUENCE_RNN", [x(6, 2, 3), *basic, *other, *[None] * 3], [x(6, 2, 8)], rnns,
            {**tanh, "TimeMajor": 1, "MergeOutputs": 1}, note="merged, time major"),
        Case("BIDIRECTIONAL_SEQUENCE_RNN", [x(2, 6, 3), *basic, *other, aux, weight(4, 2), weight(4, 2, seed=3)],
            [x(2, 6, 4)] * 2, rnns, tanh, note="auxiliary input"),
        Case("SVDF", [x(2, 3), weight(8, 3), weight(8, 5), weight(4), variable(2, 40)], [x(2, 4)], "SVDFOptions",
            {"Rank": 2, "FusedActivationFunction": 1}),
        Case("SVDF", [x(2, 3), weight(8, 3), weight(8, 5), None, variable(2, 40)], [x(2, 8)], "SVDFOptions",
            {"Rank": 1}, note="no bias"),
        Case("LSTM", [x(2, 3), *plain, *states(5, 5)], [x(2, 5)], "LSTMOptions", tanh),
        Case("LSTM", [x(2, 3), *coupled, *states(4, 5)], [x(2, 4)], "LSTMOptions", clipped, note="coupled, projected"),
        Case("LSTM", [x(2, 3), *normed, *norms], [x(2, 5)], "LSTMOptions", tanh, note="normalized"),
        Case("UNIDIRECTIONAL_SEQUENCE_LSTM", [x(2, 6, 3), *plain, *states(5, 5), *[None] * 4], [x(2, 6, 5)], sequence,
            tanh),
        Case("UNIDIRECTIONAL_SEQUENCE_LSTM", [x(6, 2, 3), *coupled, *states(4, 5)], [x(6, 2, 4)], sequence,
            {**clipped, "TimeMajor": 1}, note="time major"),
        Case("UNIDIRECTIONAL_SEQUENCE_LSTM", [x(2, 6, 3), *normed, *norms], [x(2, 6, 5)], sequence, tanh,
            note="normalized"),
        Case("BIDIRECTIONAL_SEQUENCE_LSTM", [x(2, 6, 3), *plain, *backward, *states(5, 5, 5, 5), *[None] * 9],
            [x(2, 6, 5)] * 2, both, {**tanh, "TimeMajor": 0}),
        Case("BIDIRECTIONAL_SEQUENCE_LSTM", [x(6, 2, 3), *plain, *backward, *states(5, 5, 5, 5), *[None] * 9],
            [x(6, 2, 10)], both, {**tanh, "TimeMajor": 1, "MergeOutputs": 1}, note="merged, time major"),
        Case("BIDIRECTIONAL_SEQUENCE_LSTM", [x(2, 6, 3), *plain, *backward, *states(5, 5, 5, 5), aux, *aux_weights],
            [x(2, 6, 5)] * 2, both, {**tanh, "TimeMajor": 0}, note="auxiliary input"),
    ]  # fmt: skip


CASES = [*unary(), *binary(), *moving(), *images(), *reductions(), *products(), *recurrent()]
