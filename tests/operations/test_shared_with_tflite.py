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
    return Case(OperationType.SOFTMAX, [given], given[0], [beta], (), "SoftmaxOptions", {"Beta": beta})


FLOAT, ALL = ("float32",), ("float32", "uint8", "int8")
BUILDERS: list[tuple[str, tuple[str, ...], Callable[[Draw], Case]]] = [
    *((name, FLOAT, unary(name)) for name in ("ABS", "EXP", "FLOOR", "LOG", "NEG", "RSQRT", "SIN", "SQRT")),
    *((name, FLOAT, unary(name)) for name in ("LOGISTIC", "TANH", "HARD_SWISH")),
    *((name, ALL, unary(name)) for name in ("RELU", "RELU6", "RELU_N1_TO_1")),
    *((name, FLOAT, binary(name)) for name in ("ADD", "SUB", "MUL", "DIV", "POW", "MAXIMUM", "MINIMUM", "PRELU")),
    *((name, ALL, pool(name)) for name in ("AVERAGE_POOL_2D", "MAX_POOL_2D")),
    ("L2_POOL_2D", FLOAT, pool("L2_POOL_2D")),
    ("MEAN", ALL, reduction("MEAN", OperationType.MEAN)),
    ("SUM", FLOAT, reduction("SUM", OperationType.REDUCE_SUM)),
    ("REDUCE_PROD", FLOAT, reduction("REDUCE_PROD", OperationType.REDUCE_PROD)),
    ("REDUCE_MAX", ALL, reduction("REDUCE_MAX", OperationType.REDUCE_MAX)),
    ("REDUCE_MIN", ALL, reduction("REDUCE_MIN", OperationType.REDUCE_MIN)),
    *((name, ALL, moved(name)) for name in ("TRANSPOSE", "TILE")),
    ("SOFTMAX", FLOAT, softmax),
]
CASES = [(name, dtype, build) for name, types, build in BUILDERS for dtype in types]
EQUAL = [case for case in CASES if case[:2] not in DIFFERENCES]
DIFFERENT = [case for case in CASES if case[:2] in DIFFERENCES]


def label(value: object) -> str:
    return value if isinstance(value, str) else ""


def lite_tensor(name: str, operand: Operand, array: Array | None = None, data: bytes | None = None) -> Any:
    kinds = {number: kind.upper() for kind, number in TYPES.items()}
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
    return ours, theirs.reshape(theirs.shape or (1,))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "dtype", "build"), EQUAL, ids=label)
def test_an_operation_is_litert_s(name: str, dtype: str, build: Callable[[Draw], Case], seed: int) -> None:
    ours, theirs = both(name, dtype, seed, build)

    tolerance = 1e-5 if dtype == "float32" else 0
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, strict=True)


@pytest.mark.parametrize(("name", "dtype", "build"), DIFFERENT, ids=label)
def test_a_listed_difference_is_there_and_small(name: str, dtype: str, build: Callable[[Draw], Case]) -> None:
    pairs = [both(name, dtype, seed, build) for seed in SEEDS]

    assert max(int(np.abs(ours.astype(int) - theirs).max()) for ours, theirs in pairs) == 1


@pytest.mark.parametrize(("name", "dtype"), DIFFERENCES)
def test_a_listed_difference_is_in_the_documents(name: str, dtype: str) -> None:
    assert f"| {name} | {dtype} | {DIFFERENCES[name, dtype]} |" in (ROOT / "docs" / "engine.md").read_text()
