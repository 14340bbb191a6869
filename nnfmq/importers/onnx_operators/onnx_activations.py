"""Activations that ONNX defines by other operators: their intermediate results would be rounded, or overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx_operators.onnx_composition import Composition
from nnfmq.importers.onnx_operators.onnx_fused import gelu
from nnfmq.importers.onnx_operators.onnx_half import in_float32
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS"]

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


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "Celu": in_float32(_celu),
    "Gelu": _gelu,
    "Selu": in_float32(_selu),
    "Shrink": _shrink,
}
