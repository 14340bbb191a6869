"""Functions of real numbers that the HAL does not have: trigonometric and hyperbolic ones, IsNaN, IsInf, Sign, Mod."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TENSOR_FLOAT64, TENSOR_INT64, TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_broadcasting import broadcast_to, common_shape
from nnfmq.importers.onnx_values import Node

__all__ = ["CONVERTERS"]

_FLOOR_MOD_OF_FLOATS = 28  # the opset from which floats need no fmod
_BOOL = np.dtype(bool)
_B8, _F32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_FLOAT32
_BITS = {_F32: OperandType.TENSOR_INT32, TENSOR_FLOAT64: TENSOR_INT64}
"""The type of integers whose sign is that of a float's bits."""


_FUNCTIONS = {
    "Acos": TfliteOperation.ACOS, "Acosh": TfliteOperation.ACOSH, "Asin": TfliteOperation.ASIN,
    "Asinh": TfliteOperation.ASINH, "Atan": TfliteOperation.ATAN, "Atanh": TfliteOperation.ATANH,
    "Cos": TfliteOperation.COS, "Cosh": TfliteOperation.COSH, "Erf": TfliteOperation.ERF, "Mish": TfliteOperation.MISH,
    "Sign": TfliteOperation.SIGN, "Sinh": TfliteOperation.SINH, "Softplus": TfliteOperation.SOFTPLUS,
    "Tan": TfliteOperation.TAN,
}  # fmt: skip


def _function(operation: TfliteOperation, node: Node) -> None:
    """Convert a function of one real number, which an operation of the extension computes."""
    node.result(node.emit(operation_code(operation), [node.operand(0)]), node.value(0).shape)


def _is_nan(node: Node) -> None:
    x = node.operand(0)
    node.result(node.emit(Op.NOT_EQUAL, [x, x], _B8), node.value(0).shape, _BOOL)


def _is_inf(node: Node) -> None:
    x = node.operand(0)
    signs = {name: node.attribute(f"detect_{name}", 1) for name in ("positive", "negative")}
    if all(signs.values()):
        x = node.emit(Op.ABS, [x])
    limit = math.inf if signs["positive"] else -math.inf if signs["negative"] else math.nan  # no number is NaN
    number = node.filled(node.builder[x].type, limit)
    node.result(node.emit(Op.EQUAL, [x, number], _B8), node.value(0).shape, _BOOL)


def _mod(node: Node) -> None:
    """Convert the remainder that has the divisor's sign; with `fmod`, which floats need, it has the dividend's."""
    a, b = node.value(0), node.value(1)
    shape, operands = common_shape(a, b), [node.operand(0), node.operand(1)]
    if a.dtype.kind == "f" and not node.attribute("fmod", 0) and node.opset < _FLOOR_MOD_OF_FLOATS:
        raise InvalidArgument(f"opset {node.opset} requires fmod = 1 for floats")
    kind, has_sign_of_dividend = node.builder[operands[0]].type, node.attribute("fmod", 0)
    if has_sign_of_dividend and a.dtype.kind in "iu":
        return node.result(_rest(node, *operands), shape)
    if kind == OperandType.TENSOR_FLOAT16:
        operands = [node.emit(Op.CAST, [operand], _F32) for operand in operands]
    dividend, computed = operands[0], node.builder[operands[0]].type
    if has_sign_of_dividend:
        operands = [node.emit(Op.ABS, [operand]) for operand in operands]
    found = node.emit(operation_code(TfliteOperation.FLOOR_MOD), operands)
    if has_sign_of_dividend:
        bits = node.emit(operation_code(TfliteOperation.BITCAST), [dividend], _BITS[computed])  # -0 is negative, too
        is_negative = node.emit(Op.LESS, [bits, node.filled(_BITS[computed], 0)], _B8)
        pair = [node.emit(Op.NEG, [found]), found]
        chosen = [broadcast_to(node, operand, shape) for operand in (is_negative, *pair)]
        found = node.emit(Op.SELECT, chosen, computed)
    return node.result(found if computed == kind else node.emit(Op.CAST, [found], kind), shape)


def _rest(node: Node, dividend: int, divisor: int) -> int:
    """Return what the quotient of integers, rounded towards zero, leaves of the dividend."""
    quotient = node.emit(operation_code(TfliteOperation.TRUNCATED_DIV), [dividend, divisor])
    none = node.builder.int32(0)
    return node.emit(Op.SUB, [dividend, node.emit(Op.MUL, [quotient, divisor, none]), none])


CONVERTERS: dict[str, Callable[[Node], None]] = {
    **{name: partial(_function, operation) for name, operation in _FUNCTIONS.items()},
    "IsInf": _is_inf,
    "IsNaN": _is_nan,
    "Mod": _mod,
}
