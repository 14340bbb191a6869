"""Operations that the HAL and TFLite share, on random shapes and parameters, against LiteRT's reference kernels.

LiteRT is an optional dependency; without it these tests are skipped. Codes must be equal, floats nearly (sums have
another order). What the two define differently is in `support.tflite_differences`, and must differ here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.one_result import result_of
from support.places import ROOT
from support.tflite_differences import DIFFERENCES
from support.tflite_files import Operator, Tensor, writer

from nnfmq.hal.types import Operand, OperandType, OperationType

litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

Array = npt.NDArray[Any]
Argument = tuple[Operand, Array]

TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "int32": OperandType.TENSOR_INT32,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}
COMPARISONS = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")
SEEDS = range(6)


@dataclass(frozen=True)
class Case:
    """One operator: `data` are both sides' first arguments; then come the HAL's `rest`, and TFLite's constants."""

    operation: OperationType
    data: Sequence[Argument]
    output: Operand
    rest: Sequence[Any] = ()
    constants: Sequence[Array] = ()
    table: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Draw:
    """Random arguments of one type."""

    def __init__(self, name: str, seed: int, dtype: str) -> None:
        self.rng = np.random.default_rng([seed, *name.encode()])
        self.dtype = dtype

    def below(self, least: int, end: int) -> int:
        return int(self.rng.integers(least, end))

    def shape(self, rank: int, most: int = 6) -> tuple[int, ...]:
        return tuple(self.below(1, most + 1) for _ in range(rank))

    def operand(self, shape: tuple[int, ...], scale: float = 0.0) -> Operand:
        if self.dtype not in ("uint8", "int8"):
            return Operand(TYPES[self.dtype], shape)
        chosen = float(np.float32(scale or self.rng.uniform(0.01, 0.1)))
        return Operand(TYPES[self.dtype], shape, chosen, self.below(0, 256) - 128 * (self.dtype == "int8"))

    def tensor(self, shape: tuple[int, ...], least: float = -4.0) -> Argument:
        if self.dtype == "float32":
            return self.operand(shape), self.rng.uniform(least, 4, shape).astype(np.float32)
        return self.operand(shape), self.rng.integers(0, 256, shape).astype(np.uint8).view(self.dtype)


def like(operand: Operand, shape: tuple[int, ...]) -> Operand:
    return Operand(operand.type, shape, operand.scale, operand.zero_point)


def unary(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        given = draw.tensor(draw.shape(draw.below(1, 5)), 0.1 if name in ("LOG", "RSQRT", "SQRT") else -4.0)
        return Case(OperationType[{"RELU_N1_TO_1": "RELU1"}.get(name, name)], [given], given[0])

    return build


def binary(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        first, second = draw.tensor(shape, 0.5), draw.tensor(shape[1:], 0.5)
        fused = name in ("ADD", "SUB", "MUL", "DIV")
        code = draw.below(0, 4) if fused else 0
        table = f"{name.capitalize()}Options" if fused else ""
        options = {"FusedActivationFunction": code} if fused else {}
        return Case(OperationType[name], [first, second], first[0], [code] * fused, (), table, options)

    return build


def pool(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        given = draw.tensor((draw.below(1, 3), draw.below(4, 9), draw.below(4, 9), draw.below(1, 4)))
        same, sizes = draw.below(0, 2), [draw.below(1, 4) for _ in range(4)]
        options = dict(zip(("StrideW", "StrideH", "FilterWidth", "FilterHeight"), sizes, strict=True))
        output = like(given[0], windowed(given[1].shape, sizes[3::-1][:2], sizes[1::-1], same))
        return Case(
            OperationType[name], [given], output, [2 - same, *sizes, 0], (), "Pool2DOptions",
            {"Padding": 1 - same, **options},
        )  # fmt: skip

    return build


def windowed(shape: tuple[int, ...], filters: Sequence[int], strides: Sequence[int], same: int) -> tuple[int, ...]:
    """Return the image's extents after filters and strides, each (height, width)."""
    sizes = [-(-(n if same else n - f + 1) // s) for n, f, s in zip(shape[1:3], filters, strides, strict=True)]
    return (shape[0], *sizes, shape[3])


def reduction(name: str, code: OperationType) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        given = draw.tensor(draw.shape(4))
        axes = np.sort(draw.rng.permutation(4)[: draw.below(1, 4)]).astype(np.int32)
        keep = draw.below(0, 2) == 1
        shape = tuple(1 if n in axes else e for n, e in enumerate(given[1].shape) if keep or n not in axes)
        held = (Operand(OperandType.TENSOR_INT32, axes.shape), axes.tobytes())
        rest = [held, int(keep) if name == "MEAN" else keep]
        return Case(code, [given], like(given[0], shape), rest, [axes], "ReducerOptions", {"KeepDims": keep})

    return build


def moved(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        given = draw.tensor(draw.shape(3))
        shape = np.array(given[1].shape)
        control, result = {
            "TRANSPOSE": lambda order: (order, shape[order]),
            "TILE": lambda times: (times + 1, shape * (times + 1)),
        }[name](draw.rng.permutation(3))
        control = control.astype(np.int32)
        held = (Operand(OperandType.TENSOR_INT32, (3,)), control.tobytes())
        return Case(OperationType[name], [given], like(given[0], tuple(map(int, result))), [held], [control])

    return build


def softmax(draw: Draw) -> Case:
    given = draw.tensor(draw.shape(2))
    beta = float(np.float32(draw.rng.uniform(0.5, 2)))
    unit = Operand(given[0].type, given[1].shape, 1 / 256, -128 if draw.dtype == "int8" else 0)
    output = given[0] if draw.dtype == "float32" else unit
    return Case(OperationType.SOFTMAX, [given], output, [beta], (), "SoftmaxOptions", {"Beta": beta})


def l2_normalization(draw: Draw) -> Case:
    given = draw.tensor(draw.shape(3))
    unit = Operand(given[0].type, given[1].shape, 1 / 128, 0 if draw.dtype == "int8" else 128)
    output = given[0] if draw.dtype == "float32" else unit
    return Case(
        OperationType.L2_NORMALIZATION, [given], output, (), (), "L2NormOptions", {"FusedActivationFunction": 0}
    )


def comparison(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        output = Operand(OperandType.TENSOR_BOOL8, shape)
        pair = [draw.tensor(shape), draw.tensor(shape[1:])]
        rounded = [(operand, np.round(values)) for operand, values in pair]  # some are equal
        return Case(OperationType[name], rounded, output)

    return build


def extremum(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        first, second = draw.tensor(shape), draw.tensor(shape[1:])
        return Case(OperationType[name], [first, (like(first[0], shape[1:]), second[1])], first[0])

    return build


def weights(draw: Draw, shape: tuple[int, ...], input: Operand, units: int) -> tuple[Argument, Argument]:
    """Return a filter and a bias of `units` values, in int32 where the filter has codes."""
    filter = draw.tensor(shape)
    if draw.dtype == "float32":
        return filter, draw.tensor((units,))
    if draw.dtype == "int8":  # TFLite's signed weights are symmetric
        filter = (Operand(filter[0].type, shape, filter[0].scale, 0), filter[1])
    bias = Operand(OperandType.TENSOR_INT32, (units,), float(np.float32(input.scale) * np.float32(filter[0].scale)))
    return filter, (bias, draw.rng.integers(-3000, 3000, units).astype(np.int32))


def convolution(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        deep = name == "DEPTHWISE_CONV_2D"
        depth, many, same = draw.below(1, 4), draw.below(1, 5), draw.below(0, 2)
        given = draw.tensor((draw.below(1, 3), draw.below(4, 9), draw.below(4, 9), depth))
        filters = (draw.below(1, 4), draw.below(1, 4))
        strides = (draw.below(1, 3), draw.below(1, 3))
        units = depth * many if deep else many
        filter, bias = weights(draw, (1, *filters, units) if deep else (units, *filters, depth), given[0], units)
        shape = (*windowed(given[1].shape, filters, strides, same)[:3], units)
        options = {"Padding": 1 - same, "StrideW": strides[1], "StrideH": strides[0]}
        return Case(
            OperationType[name],
            [given, filter, bias],
            draw.operand(shape, 1.0),
            [2 - same, strides[1], strides[0], *([many] if deep else []), 0],
            (),
            "DepthwiseConv2DOptions" if deep else "Conv2DOptions",
            {**options, **({"DepthMultiplier": many} if deep else {})},
        )

    return build


def fully_connected(draw: Draw) -> Case:
    rows, length, units = draw.shape(3, 9)
    given = draw.tensor((rows, length))
    filter, bias = weights(draw, (units, length), given[0], units)
    output = draw.operand((rows, units), 1.0)
    options = {"FusedActivationFunction": 0}
    return Case(OperationType.FULLY_CONNECTED, [given, filter, bias], output, [0], (), "FullyConnectedOptions", options)


def resize(name: str) -> Callable[[Draw], Case]:
    def build(draw: Draw) -> Case:
        given = draw.tensor(draw.shape(4))
        height, width = draw.below(1, 12), draw.below(1, 12)
        aligned, centred = [(False, False), (True, False), (False, True)][draw.below(0, 3)]
        shape = (given[1].shape[0], height, width, given[1].shape[3])
        options = {"AlignCorners": aligned, "HalfPixelCenters": centred}
        table = "ResizeBilinearOptions" if name == "RESIZE_BILINEAR" else "ResizeNearestNeighborOptions"
        rest = [width, height, False, aligned, centred]
        size = np.array([height, width], np.int32)
        return Case(OperationType[name], [given], like(given[0], shape), rest, [size], table, options)

    return build


FLOAT, ALL = ("float32",), ("float32", "uint8", "int8")
BUILDERS: list[tuple[str, tuple[str, ...], Callable[[Draw], Case]]] = [
    *((name, FLOAT, unary(name)) for name in ("ABS", "EXP", "FLOOR", "LOG", "NEG", "RSQRT", "SIN", "SQRT")),
    *((name, FLOAT, unary(name)) for name in ("LOGISTIC", "TANH", "HARD_SWISH")),
    *((name, ALL, unary(name)) for name in ("RELU", "RELU6", "RELU_N1_TO_1")),
    *((name, FLOAT, binary(name)) for name in ("ADD", "SUB", "MUL", "DIV", "POW", "PRELU")),
    *((name, ALL, pool(name)) for name in ("AVERAGE_POOL_2D", "MAX_POOL_2D")),
    ("L2_POOL_2D", FLOAT, pool("L2_POOL_2D")),
    ("MEAN", ALL, reduction("MEAN", OperationType.MEAN)),
    ("SUM", FLOAT, reduction("SUM", OperationType.REDUCE_SUM)),
    ("REDUCE_PROD", FLOAT, reduction("REDUCE_PROD", OperationType.REDUCE_PROD)),
    ("REDUCE_MAX", ALL, reduction("REDUCE_MAX", OperationType.REDUCE_MAX)),
    ("REDUCE_MIN", ALL, reduction("REDUCE_MIN", OperationType.REDUCE_MIN)),
    *((name, ALL, moved(name)) for name in ("TRANSPOSE", "TILE")),
    ("SOFTMAX", ALL, softmax),
    ("L2_NORMALIZATION", ALL, l2_normalization),
    *((name, ALL, extremum(name)) for name in ("MAXIMUM", "MINIMUM")),
    *((name, FLOAT, comparison(name)) for name in COMPARISONS),
    *((name, ALL, convolution(name)) for name in ("CONV_2D", "DEPTHWISE_CONV_2D")),
    ("FULLY_CONNECTED", ALL, fully_connected),
    *((name, ALL, resize(name)) for name in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")),
]
CASES = [(name, dtype, build) for name, types, build in BUILDERS for dtype in types]
EQUAL = [case for case in CASES if case[:2] not in DIFFERENCES]
DIFFERENT = [case for case in CASES if case[:2] in DIFFERENCES]


def label(value: object) -> str:
    return value if isinstance(value, str) else ""


def lite_tensor(name: str, operand: Operand, array: Array | None = None, data: bytes | None = None) -> Any:
    kinds = {number: kind.upper() for kind, number in TYPES.items()} | {OperandType.TENSOR_BOOL8: "BOOL"}
    scales = ((operand.scale,), (operand.zero_point,)) if operand.scale else ((), ())
    shape = operand.dimensions if array is None else array.shape
    return Tensor(name, shape, kinds[operand.type], data, *scales)


def by_litert(name: str, case: Case) -> Array:
    tensors = [lite_tensor(f"i{n}", *pair) for n, pair in enumerate(case.data)]
    integers = Operand(OperandType.TENSOR_INT32)
    tensors += [lite_tensor(f"c{n}", integers, array, array.tobytes()) for n, array in enumerate(case.constants)]
    count, inputs = len(tensors), range(len(case.data))
    tensors.append(lite_tensor("o", case.output))
    operator = Operator(name, range(count), (count,), case.table, case.options)
    content = writer.write(tensors, [operator], inputs, (count,))
    runner = litert.Interpreter(
        model_content=content, experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF, num_threads=1
    )
    runner.allocate_tensors()
    for detail, (_, array) in zip(runner.get_input_details(), case.data, strict=True):
        runner.set_tensor(detail["index"], array)
    runner.invoke()
    found: Array = runner.get_tensor(runner.get_output_details()[0]["index"])
    return found


def both(name: str, dtype: str, seed: int, build: Callable[[Draw], Case]) -> tuple[Array, Array]:
    """Return our result and LiteRT's. The HAL has no rank 0: what is reduced to one number has shape (1,)."""
    case = build(Draw(name, seed, dtype))
    ours, theirs = result_of(case.operation, [*case.data, *case.rest], case.output), by_litert(name, case)
    return ours, theirs.reshape(theirs.shape or (1,)).astype(ours.dtype if theirs.dtype == bool else theirs.dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "dtype", "build"), EQUAL, ids=label)
def test_an_operation_is_litert_s(name: str, dtype: str, build: Callable[[Draw], Case], seed: int) -> None:
    ours, theirs = both(name, dtype, seed, build)

    tolerance = 1e-5 if dtype == "float32" else 0
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, strict=True)


@pytest.mark.parametrize(("name", "dtype", "build"), DIFFERENT, ids=label)
def test_a_listed_difference_is_there_and_small(name: str, dtype: str, build: Callable[[Draw], Case]) -> None:
    pairs = [both(name, dtype, seed, build) for seed in range(40)]

    assert max(int(np.abs(ours.astype(int) - theirs).max()) for ours, theirs in pairs) == 1


@pytest.mark.parametrize(("name", "dtype"), DIFFERENCES)
def test_a_listed_difference_is_in_the_documents(name: str, dtype: str) -> None:
    assert f"| {name} | {dtype} | {DIFFERENCES[name, dtype]} |" in (ROOT / "docs" / "engine.md").read_text()
