"""Reductions, ArgMax and ArgMin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_FLOAT64
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators.elementwise import conversion, in_float32
from nnfmq.importers.onnx.operators.movement import axis_of, reversed_along
from nnfmq.importers.onnx.values import Node

__all__ = ["CONVERTERS", "divisor"]

_I32 = OperandType.TENSOR_INT32
_MIN_NORMAL = {TENSOR_FLOAT64: 2.0**-1022}


def _axes(node: Node) -> list[int]:
    """Return the axes to reduce: those given, or all."""
    rank, given = len(node.value(0).shape), node.integers("axes", 1)
    keeps_all = node.attribute("noop_with_empty_axes", 0)  # without effect if there are axes
    if not given:
        return [] if keeps_all else list(range(rank))
    return sorted({axis_of(axis, rank) for axis in given})


def _reduced(node: Node, operation: Op, x: int, axes: list[int]) -> int:
    """Return a reduction that keeps the dimensions as 1."""
    if not axes:
        return x
    keeps = node.builder.int32(1) if operation == Op.MEAN else node.builder.boolean(True)
    return node.emit(operation, [x, node.builder.int32_vector(axes), keeps])


def _finish(node: Node, operand: int, axes: list[int]) -> None:
    keeps, shape = node.attribute("keepdims", 1), node.value(0).shape
    kept = [1 if axis in axes else extent for axis, extent in enumerate(shape)]
    node.result(operand, tuple(kept) if keeps else tuple(e for axis, e in enumerate(kept) if axis not in axes))


def finite(node: Node, x: int) -> int:
    """Return floats, the infinite ones replaced by the largest finite number of their sign."""
    kind = node.builder[x].type
    dtypes: dict[OperandType, Any] = {OperandType.TENSOR_FLOAT16: np.float16, TENSOR_FLOAT64: np.float64}
    largest = float(np.finfo(dtypes.get(kind, np.float32)).max)
    x = node.emit(Op.MAXIMUM, [x, node.filled(kind, -largest)])
    return node.emit(Op.MINIMUM, [x, node.filled(kind, largest)])


def divisor(node: Node, x: int, axes: list[int]) -> int:
    """Return the maximum absolute value along axes, neither 0 nor infinite.

    Elements divided by it have squares that neither overflow nor vanish.
    """
    kind = node.builder[x].type
    maximum = _reduced(node, Op.REDUCE_MAX, node.emit(Op.ABS, [x]), axes)
    return finite(node, node.emit(Op.MAXIMUM, [maximum, node.filled(kind, _MIN_NORMAL.get(kind, 2.0**-126))]))


def _norm(node: Node) -> None:
    """Convert ReduceL2 to m · √(Σ (x / m)²), m being the maximum absolute value."""
    x, axes, none = node.operand(0), _axes(node), node.builder.int32(0)
    if node.value(0).dtype.kind in "iu":
        return _norm_of_integers(node)
    maximum = divisor(node, x, axes)
    scaled = node.emit(Op.DIV, [x, maximum, none])
    total = _reduced(node, Op.REDUCE_SUM, node.emit(Op.MUL, [scaled, scaled, none]), axes)
    return _finish(node, node.emit(Op.MUL, [node.emit(Op.SQRT, [total]), maximum, none]), axes)


def _norm_of_integers(node: Node) -> None:
    """Convert to the function that defines it: the root of the sum as a float32, which becomes an integer again."""
    x, axes, single = node.operand(0), _axes(node), OperandType.TENSOR_FLOAT32
    kind = node.builder[x].type
    total = _reduced(node, Op.REDUCE_SUM, node.emit(Op.MUL, [x, x, node.builder.int32(0)]), axes)
    root = node.emit(Op.SQRT, [node.emit(Op.CAST, [total], single)])
    _finish(node, node.emit(conversion(single, kind), [root], kind), axes)


def _logarithm(convert: Callable[[Node], None], node: Node) -> None:
    if node.value(0).dtype.kind in "iu":
        raise InvalidArgument("logarithms of integers are not supported: ONNX leaves open how they are rounded")
    convert(node)


def _reduce(operation: Op, before: str, after: str, node: Node) -> None:
    """Convert a reduction of the absolute values or squares; its root or logarithm may follow."""
    x, axes = node.operand(0) if node.value(0).shape else node.reshaped(node.operand(0), (1,)), _axes(node)
    if node.builder[x].type == OperandType.TENSOR_BOOL8:
        operation = {Op.REDUCE_MAX: Op.REDUCE_ANY, Op.REDUCE_MIN: Op.REDUCE_ALL}.get(operation, operation)
    if before == "abs":
        x = node.emit(Op.ABS, [x])
    elif before == "square":
        x = node.emit(Op.MUL, [x, x, node.builder.int32(0)])
    found = _reduced(node, operation, x, axes)
    found = node.emit(Op[after], [found]) if after else found
    _finish(node, found, axes)


def _log_sum_exp(node: Node) -> None:
    """Convert to max + log(sum(exp(x − max))), which does not overflow; an infinite maximum becomes a finite one."""
    x, axes, none = node.operand(0), _axes(node), node.builder.int32(0)
    highest = finite(node, _reduced(node, Op.REDUCE_MAX, x, axes))
    powers = node.emit(Op.EXP, [node.emit(Op.SUB, [x, highest, none])])
    total = node.emit(Op.LOG, [_reduced(node, Op.REDUCE_SUM, powers, axes)])
    _finish(node, node.emit(Op.ADD, [total, highest, none]), axes)


def _arg(operation: Op, node: Node) -> None:
    shape = node.value(0).shape
    axis = axis_of(node.attribute("axis", 0), len(shape))
    is_last, x = node.attribute("select_last_index", 0), node.operand(0)
    x = reversed_along(node, x, axis) if is_last else x
    found = node.emit(operation, [x, node.builder.int32(axis)], _I32)
    if is_last:
        found = node.emit(Op.SUB, [node.filled(_I32, shape[axis] - 1), found, node.builder.int32(0)])
    kept = (1,) if node.attribute("keepdims", 1) else ()
    node.result(found, (*shape[:axis], *kept, *shape[axis + 1 :]), np.dtype(np.int64))


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "ArgMax": partial(_arg, Op.ARGMAX),
    "ArgMin": partial(_arg, Op.ARGMIN),
    "ReduceL1": partial(_reduce, Op.REDUCE_SUM, "abs", ""),
    "ReduceL2": in_float32(_norm),
    "ReduceLogSum": partial(_logarithm, partial(_reduce, Op.REDUCE_SUM, "", "LOG")),
    "ReduceLogSumExp": partial(_logarithm, in_float32(_log_sum_exp)),
    "ReduceMax": partial(_reduce, Op.REDUCE_MAX, "", ""),
    "ReduceMean": partial(_reduce, Op.MEAN, "", ""),
    "ReduceMin": partial(_reduce, Op.REDUCE_MIN, "", ""),
    "ReduceProd": partial(_reduce, Op.REDUCE_PROD, "", ""),
    "ReduceSum": partial(_reduce, Op.REDUCE_SUM, "", ""),
    "ReduceSumSquare": partial(_reduce, Op.REDUCE_SUM, "square", ""),
}
