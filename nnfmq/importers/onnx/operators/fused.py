"""Operators that ONNX Runtime's optimizer fuses from others: GELU in its forms, products and convolutions.

Names of operators of ONNX Runtime itself begin with its domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators.composition import Composition, applied
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "activated", "gelu"]

_F32, _F16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
_ACTIVATIONS = {
    "": (), "Clip": ("min", "max"), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Relu": (),
    "Sigmoid": (), "Tanh": (),
}  # fmt: skip


def gelu(node: Node, value: Value, is_approximate: bool = False) -> Value:
    """Return GELU of floats, by the error function or approximated by a hyperbolic tangent."""
    x = node.operand(value)
    kind = node.builder[x].type
    if kind not in (_F32, _F16):
        raise InvalidArgument(f"GELU of {value.dtype.name} is not supported")
    x = x if kind == _F32 else node.emit(Op.CAST, [x], _F32)
    found = node.emit(operation_code(TfliteOperation.GELU), [x, node.builder.boolean(is_approximate)])
    return Value(value.shape, value.dtype, found if kind == _F32 else node.emit(Op.CAST, [found], kind))


def activated(node: Node, value: Value, parameters: Sequence[float]) -> Value:
    """Return the result of the activation that the attribute of a fused node names."""
    name = node.attribute("activation", "")
    if name not in _ACTIVATIONS or len(parameters) < len(_ACTIVATIONS[name]):
        raise InvalidArgument(f"the activation {name!r} with {len(parameters)} parameters is not supported")
    if not name:
        return value
    attributes = dict(zip(_ACTIVATIONS[name], map(float, parameters), strict=False))
    if name == "Clip":
        limits = [Value.of(np.array(limit, value.dtype)) for limit in attributes.values()]
        return applied(node, name, [value, *limits], {})
    return applied(node, name, [value], attributes)


def _gelu_of_sum(is_approximate: bool, node: Node) -> None:
    """Convert GELU of the sum of the inputs, of which the second may be missing."""
    x = node.value(0)
    x = Composition(node)("Add", x, node.value(1)) if node.given(1) else x
    node.results[0] = gelu(node, x, is_approximate)


def _split_gelu(node: Node) -> None:
    """Convert to the sum's first half times GELU of its second half."""
    compose = Composition(node)
    total = compose("Add", node.value(0), node.value(1))
    width = total.shape[-1] // 2
    left, right = (compose.part(total, -1, begin, begin + width) for begin in (0, width))
    node.results[0] = compose("Mul", left, gelu(node, right))


def _quick_gelu(node: Node) -> None:
    compose, x, alpha = Composition(node), node.value(0), node.attribute("alpha", 1.702)
    scaled = x if alpha == 1.0 else compose("Mul", x, compose.like(alpha, x))
    node.results[0] = compose("Mul", x, compose("Sigmoid", scaled))


def _matmul(node: Node) -> None:
    """Convert alpha·A·B, each of which may be transposed; the factor goes into a constant matrix."""
    compose, alpha = Composition(node), node.attribute("alpha", 1.0)
    a, b = (_matrices(node, compose, position) for position in (0, 1))
    if alpha != 1.0 and b.array is not None:
        b = Value.of(b.array * b.dtype.type(alpha))
    found = compose("MatMul", a, b)
    if alpha != 1.0 and b.array is None:
        found = compose("Mul", found, compose.like(alpha, found))
    node.results[0] = found


def _matrices(node: Node, compose: Composition, position: int) -> Value:
    """Return an input of a product as its attributes transpose it."""
    value, side = node.value(position), "AB"[position]
    rank, last = len(value.shape), node.attribute(f"trans{side}", 0)
    order = list(range(rank))
    if node.attribute(f"transBatch{side}", 0):  # the first dimension goes after the other batch dimensions
        order = [*order[1:-1], 0, rank - 1]
    if last and rank > 1:
        order[-2:] = order[:-3:-1]
    return compose.transpose(value, *order)


def _gemm(node: Node) -> None:
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = [node.attribute(name, 0.0) for name in names if name in node.attributes]
    found = applied(node, "Gemm", [node.value(0), node.value(1), node.value(2) if node.given(2) else None])
    node.results[0] = activated(node, found, parameters)


def _convolution(node: Node) -> None:
    """Convert the activation of a convolution plus, if it is given, a fourth input."""
    values = [node.value(position) if node.given(position) else None for position in range(3)]
    found = applied(node, "Conv", values)
    if node.given(3):
        found = Composition(node)("Add", found, node.value(3))
    node.results[0] = activated(node, found, node.attribute("activation_params", ()))


_MICROSOFT = "com.microsoft."
_FUSED_CONVERTERS: dict[str, Callable[[Node], Any]] = {
    f"{_MICROSOFT}BiasGelu": partial(_gelu_of_sum, False),
    f"{_MICROSOFT}BiasSplitGelu": _split_gelu,
    f"{_MICROSOFT}FastGelu": partial(_gelu_of_sum, True),
    f"{_MICROSOFT}FusedConv": _convolution,
    f"{_MICROSOFT}FusedGemm": _gemm,
    f"{_MICROSOFT}FusedMatMul": _matmul,
    f"{_MICROSOFT}Gelu": partial(_gelu_of_sum, False),
    f"{_MICROSOFT}QuickGelu": _quick_gelu,
    f"{_MICROSOFT}TransposeMatMul": _matmul,
}


# ----------------------------------------------------------------------------------------------------------------------
# Activations that ONNX defines by other operators: their intermediate results would be rounded, or overflow.


_INT32, _INT64 = 6, 7  # the numbers of ONNX's element types

_ALPHA, _GAMMA = 1.67326319217681884765625, 1.05070102214813232421875  # of Selu


def _celu(node: Node) -> None:
    """Convert to max(x, 0) + min(alpha · (e^(x / alpha) − 1), 0)."""
    x, alpha, none = node.operand(0), node.attribute("alpha", 1.0), node.builder.int32(0)
    kind = node.builder[x].type
    zero, factor = node.filled(kind, 0.0), node.filled(kind, alpha)
    ratio = node.emit(Op.DIV, [x, factor, none])
    if alpha > 0:
        curve = node.emit(Op.ELU, [ratio, node.scalar(kind, 1.0)])
    else:  # the minimum is that of a curve above 0, which ELU does not have
        curve = node.emit(Op.SUB, [node.emit(Op.EXP, [ratio]), node.filled(kind, 1.0), none])
    below = node.emit(Op.MINIMUM, [node.emit(Op.MUL, [curve, factor, none]), zero])
    node.result(node.emit(Op.ADD, [node.emit(Op.MAXIMUM, [x, zero]), below, none]), node.value(0).shape)


def _gelu(node: Node) -> None:
    approximation = node.attribute("approximate", "none")
    if approximation not in ("none", "tanh"):
        raise InvalidArgument(f"the approximation {approximation!r} is not supported; none and tanh are")
    node.results[0] = gelu(node, node.value(0), approximation == "tanh")


def _selu(node: Node) -> None:
    """Convert to gamma · ELU."""
    x = node.operand(0)
    kind = node.builder[x].type
    curve = node.emit(Op.ELU, [x, node.scalar(kind, node.attribute("alpha", _ALPHA))])
    gamma = node.filled(kind, node.attribute("gamma", _GAMMA))
    node.result(node.emit(Op.MUL, [curve, gamma, node.builder.int32(0)]), node.value(0).shape)


def _shrink(node: Node) -> None:
    """Convert to x + bias below -lambd, x - bias above lambd, and 0; results that are no integers are cut off."""
    compose, x, dtype = Composition(node), node.value(0), node.value(0).dtype
    if dtype in (np.uint32, np.uint64):
        raise InvalidArgument(f"elements of {dtype.name} are not supported")
    limit, bias = node.attribute("lambd", 0.5), node.attribute("bias", 0.0)
    if dtype.kind in "iu":
        x = compose("Cast", x, to=_INT64) if dtype == np.int64 else compose("Cast", x, to=_INT32)
        limit = _within(math.floor(limit), x.dtype)
    below, above = (compose.like(number, x) for number in (-limit, limit))
    zero, shifted = compose.like(0, x), [_shifted(compose, x, number) for number in (bias, -bias)]
    found = compose("Where", compose("Greater", x, above), shifted[1], zero)
    found = compose("Where", compose("Less", x, below), shifted[0], found)
    node.results[0] = compose("CastLike", found, node.value(0))


def _shifted(compose: Composition, x: Value, number: float) -> Value:
    """Return x plus a number; a sum of integers that is none is rounded towards 0."""
    if x.dtype.kind == "f":
        return compose("Add", x, compose.like(number, x))
    found = compose("Add", x, compose.like(_within(math.floor(number), x.dtype), x))
    if number == math.floor(number):
        return found
    is_below = compose("Less", found, compose.like(0, x))
    return compose("Add", found, compose("CastLike", is_below, x))


def _within(number: int, dtype: np.dtype[Any]) -> int:
    limits = np.iinfo(dtype)
    return min(max(number, limits.min + 1), limits.max)


_ACTIVATIONS_CONVERTERS: dict[str, Callable[[Node], None]] = {
    "Celu": in_float32(_celu),
    "Gelu": _gelu,
    "Selu": in_float32(_selu),
    "Shrink": _shrink,
}

CONVERTERS: dict[str, Callable[[Node], Any]] = {**_FUSED_CONVERTERS, **_ACTIVATIONS_CONVERTERS}
