"""Functions of one and two operands, comparisons, reductions and what works along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.one_result import results_of
from support.onnx_runtime import by_onnx
from support.oracles import FLOAT, NUMBERS, TYPES, Argument, Array, Builder, Case, Draw, Listed, integers, like

UNARY = {
    **{name: name.upper() for name in ("Abs", "Neg", "Exp", "Log", "Sin", "Sqrt", "Floor", "Relu", "Tanh")},
    "Sigmoid": "LOGISTIC",
    "HardSwish": "HARD_SWISH",
}
BINARY = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL", "Div": "DIV"}
PLAIN_BINARY = {"Pow": "POW", "PRelu": "PRELU", "Max": "MAXIMUM", "Min": "MINIMUM"}
COMPARISONS = {
    "Equal": "EQUAL",
    "Less": "LESS",
    "LessOrEqual": "LESS_EQUAL",
    "Greater": "GREATER",
    "GreaterOrEqual": "GREATER_EQUAL",
}
REDUCTIONS = {
    "ReduceSum": "REDUCE_SUM",
    "ReduceProd": "REDUCE_PROD",
    "ReduceMax": "REDUCE_MAX",
    "ReduceMin": "REDUCE_MIN",
    "ReduceMean": "MEAN",
}


def unary(name: str, code: str, *rest: Any, **attributes: Any) -> Builder:
    """Build a function of one tensor; `rest` are the HAL's further arguments, `attributes` are ONNX's."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(draw.below(1, 5)), 0.1 if name in ("Log", "Sqrt") else -8, 8)
        return Case(
            lambda: results_of(OperationType[code], [argument, *rest], [argument[0]]),
            lambda: by_onnx(name, [argument[1]], **attributes),
        )

    return build


def elu(draw: Draw) -> Case:
    """Build ELU with any factor."""
    alpha = draw.real(0.1, 3)
    return unary("Elu", "ELU", alpha, alpha=alpha)(draw)


def clip(code: str, low: float, high: float) -> Builder:
    """Build RELU1 or RELU6."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(draw.below(1, 5)), -8, 8)
        bounds = [np.float32(low), np.float32(high)]
        return Case(
            lambda: results_of(OperationType[code], [argument], [argument[0]]),
            lambda: by_onnx("Clip", [argument[1], *map(np.asarray, bounds)]),
        )

    return build


def pair(draw: Draw, rank: int, least: float = -4) -> tuple[list[Argument], tuple[int, ...]]:
    """Return two arguments that broadcast each other, and the shape of what comes out."""
    shape = draw.shape(rank, 4)
    first = tuple(1 if draw.below(0, 4) == 0 else extent for extent in shape)
    second = tuple(1 if draw.below(0, 4) == 0 else extent for extent in shape)[draw.below(0, rank) :]
    return [draw.tensor(first, least), draw.tensor(second, least)], np.broadcast_shapes(first, second)


def binary(name: str, code: str, rank: int, *rest: Any) -> Builder:
    """Build a function of two tensors that broadcast each other."""

    def build(draw: Draw) -> Case:
        data, shape = pair(draw, rank, 0.5 if name in ("Div", "Pow") else -4)
        if name == "PRelu":  # ONNX stretches the slope only
            data[0] = draw.tensor(shape)
        return Case(
            lambda: results_of(OperationType[code], [*data, *rest], [like(data[0][0], shape)]),
            lambda: by_onnx(name, [array for _, array in data]),
        )

    return build


def comparison(name: str, code: str) -> Builder:
    """Build a comparison of rounded numbers of rank 5, of which some are equal."""

    def build(draw: Draw) -> Case:
        data, shape = pair(draw, 5)
        data = [(operand, np.round(array)) for operand, array in data]
        output = Operand(OperandType.TENSOR_BOOL8, shape)
        return Case(
            lambda: results_of(OperationType[code], data, [output]),
            lambda: by_onnx(name, [array for _, array in data]),
        )

    return build


def logical(name: str, code: str) -> Builder:
    """Build LOGICAL_AND, LOGICAL_OR or EQUAL of truth values."""

    def build(draw: Draw) -> Case:
        data, shape = pair(draw, 5)
        output = Operand(OperandType.TENSOR_BOOL8, shape)
        return Case(
            lambda: results_of(OperationType[code], data, [output]),
            lambda: by_onnx(name, [array.astype(bool) for _, array in data]),
        )

    return build


def logical_not(draw: Draw) -> Case:
    """Build LOGICAL_NOT."""
    argument = draw.tensor(draw.shape(5, 3))
    return Case(
        lambda: results_of(OperationType.LOGICAL_NOT, [argument], [argument[0]]),
        lambda: by_onnx("Not", [argument[1].astype(bool)]),
    )


def where(draw: Draw) -> Case:
    """Build SELECT."""
    shape = draw.shape(5, 3)
    first, second = draw.tensor(shape), draw.tensor(shape)
    mask = Operand(OperandType.TENSOR_BOOL8, shape), draw.rng.integers(0, 2, shape).astype(np.uint8)
    return Case(
        lambda: results_of(OperationType.SELECT, [mask, first, (first[0], second[1])], [first[0]]),
        lambda: by_onnx("Where", [mask[1].astype(bool), first[1], second[1]]),
    )


def axes_of(draw: Draw, rank: int) -> Array:
    """Return some axes, negative ones among them."""
    axes = draw.rng.permutation(rank)[: draw.below(1, rank + 1)]
    return np.where(draw.rng.random(len(axes)) < 0.3, axes - rank, axes)


def reduction(name: str, code: str) -> Builder:
    """Build a reduction over some or all axes."""

    def build(draw: Draw) -> Case:
        # Few factors: each rounds, in one order or another.
        argument = draw.tensor(draw.shape(draw.below(1, 5), 2 if name == "ReduceProd" else 6))
        axes, keep = axes_of(draw, argument[1].ndim), draw.truth()
        rest = [integers(axes), int(keep) if code == "MEAN" else keep]
        return Case(
            lambda: results_of(OperationType[code], [argument, *rest], [argument[0]]),
            lambda: by_onnx(name, [argument[1], axes.astype(np.int64)], keepdims=int(keep)),
        )

    return build


def extreme_place(name: str, code: str) -> Builder:
    """Build ARGMAX or ARGMIN; some numbers are equal."""

    def build(draw: Draw) -> Case:
        operand, array = draw.tensor(draw.shape(draw.below(1, 6), 5))
        numbers = np.round(array / (1 if array.dtype == np.float32 else 16)).astype(array.dtype)
        axis = draw.below(-numbers.ndim, numbers.ndim)
        output = Operand(OperandType.TENSOR_INT32)
        return Case(
            lambda: results_of(OperationType[code], [(operand, numbers), axis], [output]),
            lambda: [by_onnx(name, [numbers], axis=axis, keepdims=0)[0].astype(np.int32)],
        )

    return build


def along_axis(name: str, code: str) -> Builder:
    """Build SOFTMAX or LOG_SOFTMAX over any axis."""

    def build(draw: Draw) -> Case:
        argument = draw.tensor(draw.shape(draw.below(1, 5)))
        axis = draw.below(-argument[1].ndim, argument[1].ndim)
        return Case(
            lambda: results_of(OperationType[code], [argument, 1.0, axis], [argument[0]]),
            lambda: by_onnx(name, [argument[1]], axis=axis),
        )

    return build


def l2_normalization(draw: Draw) -> Case:
    """Build L2_NORMALIZATION over any axis."""
    argument = draw.tensor(draw.shape(draw.below(1, 5)))
    axis = draw.below(-argument[1].ndim, argument[1].ndim)
    return Case(
        lambda: results_of(OperationType.L2_NORMALIZATION, [argument, axis], [argument[0]]),
        lambda: by_onnx("LpNormalization", [argument[1]], axis=axis, p=2),
    )


def local_response_normalization(draw: Draw) -> Case:
    """Build LOCAL_RESPONSE_NORMALIZATION along axis 1; ONNX's alpha is for the mean of the window's squares."""
    argument = draw.tensor(draw.shape(4))
    radius, bias, alpha, beta = draw.below(1, 4), draw.real(0.5, 2), draw.real(0.1, 2), draw.real(0.3, 1)
    size = 2 * radius + 1
    rest = [radius, bias, alpha, beta, 1]
    return Case(
        lambda: results_of(OperationType.LOCAL_RESPONSE_NORMALIZATION, [argument, *rest], [argument[0]]),
        lambda: by_onnx("LRN", [argument[1]], size=size, bias=bias, alpha=alpha * size, beta=beta),
    )


def instance_normalization(draw: Draw) -> Case:
    """Build INSTANCE_NORMALIZATION, channels first."""
    argument = draw.tensor((*draw.shape(2), *(extent + 1 for extent in draw.shape(2))))
    gamma, beta, epsilon = draw.real(0.5, 2), draw.real(-1, 1), draw.real(0.001, 0.1)
    channels = argument[1].shape[1]
    same = [np.full(channels, value, np.float32) for value in (gamma, beta)]
    return Case(
        lambda: results_of(OperationType.INSTANCE_NORMALIZATION, [argument, gamma, beta, epsilon, True], [argument[0]]),
        lambda: by_onnx("InstanceNormalization", [argument[1], *same], epsilon=epsilon),
    )


def cast(source_type: str, target_type: str, low: float, high: float) -> Builder:
    """Build CAST of numbers that both types have; floats lose their fraction."""

    def build(draw: Draw) -> Case:
        shape = draw.shape(3)
        numbers = draw.rng.uniform(low, high, shape).astype(source_type)
        data = Operand(TYPES[source_type], shape, *((0.5, 9) if source_type == "uint8" else ())), numbers
        output = Operand(TYPES[target_type], shape, *((0.5, 9) if target_type == "uint8" else ()))
        kind = {"float32": 1, "uint8": 2, "int32": 6}[target_type]
        return Case(
            lambda: results_of(OperationType.CAST, [data], [output]), lambda: by_onnx("Cast", [numbers], to=kind)
        )

    return build


_PAIRS = [
    (source_type, target_type)
    for source_type in ("float32", "int32", "uint8")
    for target_type in ("float32", "int32", "uint8")
]
CASES: list[Listed] = [
    *(
        (name, (*FLOAT, "int32") if name in ("Abs", "Neg") else FLOAT, unary(name, code))
        for name, code in UNARY.items()
    ),
    ("Elu", FLOAT, elu),
    ("Clip", FLOAT, clip("RELU1", -1, 1)),
    ("Clip", FLOAT, clip("RELU6", 0, 6)),
    *((name, FLOAT, binary(name, code, 4, 0)) for name, code in BINARY.items()),
    *((name, ("int32",), binary(name, code, 4, 0)) for name, code in BINARY.items() if name != "Div"),
    *((name, FLOAT, binary(name, code, 5)) for name, code in PLAIN_BINARY.items()),
    *((name, ("int32",), binary(name, code, 5)) for name, code in PLAIN_BINARY.items() if name in ("Max", "Min")),
    *((name, (*FLOAT, "int32"), comparison(name, code)) for name, code in COMPARISONS.items()),
    *((name, ("bool",), logical(name, code)) for name, code in (("And", "LOGICAL_AND"), ("Or", "LOGICAL_OR"))),
    ("Equal", ("bool",), logical("Equal", "EQUAL")),
    ("Not", ("bool",), logical_not),
    ("Where", NUMBERS, where),
    *((name, FLOAT, reduction(name, code)) for name, code in REDUCTIONS.items()),
    *((name, ("uint8", "int8"), reduction(name, REDUCTIONS[name])) for name in ("ReduceMax", "ReduceMin")),
    *((name, NUMBERS, extreme_place(name, name.upper())) for name in ("ArgMax", "ArgMin")),
    *((name, FLOAT, along_axis(name, code)) for name, code in (("Softmax", "SOFTMAX"), ("LogSoftmax", "LOG_SOFTMAX"))),
    ("LpNormalization", FLOAT, l2_normalization),
    ("LRN", FLOAT, local_response_normalization),
    ("InstanceNormalization", FLOAT, instance_normalization),
    *(
        (f"Cast, from {source_type}", (target_type,), cast(source_type, target_type, 0, 256))
        for source_type, target_type in _PAIRS
    ),
]
