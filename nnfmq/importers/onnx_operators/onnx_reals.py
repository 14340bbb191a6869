"""Functions of real numbers that the HAL does not have: trigonometric and hyperbolic ones, IsNaN, IsInf, Sign, Mod."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_broadcasting import broadcast_to, common_shape
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_BOOL = np.dtype(bool)
_B8, _F32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_FLOAT32


class _Reals:
    """Arithmetic on operands of one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.x = node.operand(0)
        self._kind = node.builder[self.x].type
        if node.value(0).dtype.kind != "f":
            raise InvalidArgument(f"elements of {node.value(0).dtype.name} are not supported")

    def number(self, value: float) -> int:
        return self.node.filled(self._kind, value)

    def binary(self, operation: Op, a: int, b: int) -> int:
        return self.node.emit(operation, [a, b, self.node.builder.int32(0)])

    def unary(self, operation: Op | TfliteOperation, x: int) -> int:
        code = operation_code(operation) if isinstance(operation, TfliteOperation) else operation
        return self.node.emit(code, [x])

    def angle(self, y: int, x: int) -> int:
        """Return the angle of the point (x, y)."""
        return self.node.emit(operation_code(TfliteOperation.ATAN2), [y, x])

    def finish(self, found: int) -> None:
        self.node.result(found, self.node.value(0).shape)


def _cos(node: Node) -> None:
    reals = _Reals(node)
    reals.finish(reals.unary(TfliteOperation.COS, reals.x))


def _sign(node: Node) -> None:
    reals = _Reals(node)
    reals.finish(reals.unary(TfliteOperation.SIGN, reals.x))


def _tan(node: Node) -> None:
    reals = _Reals(node)
    sine, cosine = reals.unary(Op.SIN, reals.x), reals.unary(TfliteOperation.COS, reals.x)
    reals.finish(reals.binary(Op.DIV, sine, cosine))


def _arc(name: str, node: Node) -> None:
    """Convert Asin, Acos and Atan to the angle of a point."""
    reals = _Reals(node)
    one = reals.number(1.0)
    if name == "Atan":
        return reals.finish(reals.angle(reals.x, one))
    rest = reals.binary(Op.MUL, reals.binary(Op.SUB, one, reals.x), reals.binary(Op.ADD, one, reals.x))
    other = reals.unary(Op.SQRT, rest)
    return reals.finish(reals.angle(reals.x, other) if name == "Asin" else reals.angle(other, reals.x))


def _hyperbolic(operation: Op, node: Node) -> None:
    """Convert Sinh and Cosh to (exp(x) ∓ exp(−x)) / 2."""
    reals = _Reals(node)
    rising, falling = (reals.unary(Op.EXP, x) for x in (reals.x, reals.unary(Op.NEG, reals.x)))
    reals.finish(reals.binary(Op.MUL, reals.binary(operation, rising, falling), reals.number(0.5)))


def _area(name: str, node: Node) -> None:
    """Convert Asinh to sign(x) · log(|x| + √(x² + 1)), Acosh to log(x + √(x² − 1)), Atanh to half a logarithm."""
    reals = _Reals(node)
    one, x = reals.number(1.0), reals.x
    if name == "Atanh":
        ratio = reals.binary(Op.DIV, reals.binary(Op.ADD, one, x), reals.binary(Op.SUB, one, x))
        return reals.finish(reals.binary(Op.MUL, reals.unary(Op.LOG, ratio), reals.number(0.5)))
    square = reals.binary(Op.MUL, x, x)
    root = reals.unary(Op.SQRT, reals.binary(Op.ADD if name == "Asinh" else Op.SUB, square, one))
    if name == "Acosh":
        return reals.finish(reals.unary(Op.LOG, reals.binary(Op.ADD, x, root)))
    size = reals.unary(Op.LOG, reals.binary(Op.ADD, reals.unary(Op.ABS, x), root))
    return reals.finish(reals.binary(Op.MUL, size, reals.unary(TfliteOperation.SIGN, x)))


def _is_nan(node: Node) -> None:
    x = _Reals(node).x
    node.result(node.emit(Op.NOT_EQUAL, [x, x], _B8), node.value(0).shape, _BOOL)


def _is_inf(node: Node) -> None:
    reals = _Reals(node)
    signs = {name: node.attribute(f"detect_{name}", 1) for name in ("positive", "negative")}
    if not any(signs.values()):
        raise InvalidArgument("neither positive nor negative infinities are to be found")
    x = reals.unary(Op.ABS, reals.x) if all(signs.values()) else reals.x
    limit = reals.number(math.inf if signs["positive"] else -math.inf)
    node.result(node.emit(Op.EQUAL, [x, limit], _B8), node.value(0).shape, _BOOL)


def _mod(node: Node) -> None:
    """Convert the remainder that has the divisor's sign; with `fmod`, which floats need, it has the dividend's."""
    a, b = node.value(0), node.value(1)
    shape, operands = common_shape(a, b), [node.operand(0), node.operand(1)]
    kind, has_sign_of_dividend = node.builder[operands[0]].type, node.attribute("fmod", 0)
    if kind == OperandType.TENSOR_FLOAT16:
        operands = [node.emit(Op.CAST, [operand], _F32) for operand in operands]
    dividend, computed = operands[0], node.builder[operands[0]].type
    if has_sign_of_dividend:
        operands = [node.emit(Op.ABS, [operand]) for operand in operands]
    found = node.emit(operation_code(TfliteOperation.FLOOR_MOD), operands)
    if has_sign_of_dividend:
        is_negative = node.emit(Op.LESS, [dividend, node.filled(computed, 0.0)], _B8)
        pair = [node.emit(Op.NEG, [found]), found]
        chosen = [broadcast_to(node, operand, shape) for operand in (is_negative, *pair)]
        found = node.emit(Op.SELECT, chosen, computed)
    node.result(found if computed == kind else node.emit(Op.CAST, [found], kind), shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {
    **{name: partial(_arc, name) for name in ("Acos", "Asin", "Atan")},
    **{name: partial(_area, name) for name in ("Acosh", "Asinh", "Atanh")},
    "Cos": _cos,
    "Cosh": partial(_hyperbolic, Op.ADD),
    "IsInf": _is_inf,
    "IsNaN": _is_nan,
    "Mod": _mod,
    "Sign": _sign,
    "Sinh": partial(_hyperbolic, Op.SUB),
    "Tan": _tan,
}
