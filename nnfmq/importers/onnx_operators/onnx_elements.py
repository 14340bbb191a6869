"""Operators whose indices are tensors of any shape: GatherElements, GatherND, OneHot, the scatters, ReverseSequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_movement import axis_of
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "from_the_start"]

_B8, _I32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_INT32
_LAST_AXIS_OPSET = 13
_REDUCTIONS = ("none", "add", "mul", "max", "min")


def from_the_start(node: Node, value: Value, extents: Sequence[int]) -> int:
    """Return indices without negative ones, which count from the end.

    `extents` are those of the dimensions that the indices along the last axis select; one extent is for all.
    """
    limits = np.array(extents, np.int32)
    if value.array is not None:
        if value.array.size and not ((-limits <= value.array) & (value.array < limits)).all():
            raise InvalidArgument(f"an index is outside the dimensions of {', '.join(map(str, extents))} elements")
        return node.add_constant(np.where(value.array < 0, value.array + limits, value.array).astype(np.int32))
    given, none = node.index_operand(value), node.builder.int32(0)
    is_negative = node.emit(Op.LESS, [given, node.filled(_I32, 0)], _B8)
    from_end = node.emit(Op.ADD, [given, node.add_constant(limits), none])
    return node.emit(Op.SELECT, [is_negative, from_end, given], _I32)


def _gather_elements(node: Node) -> None:
    x, indices = node.value(0), node.value(1)
    axis = axis_of(node.attribute("axis", 0), len(x.shape))
    arguments = [node.operand(x), from_the_start(node, indices, x.shape[axis : axis + 1]), node.builder.int32(axis)]
    node.result(node.emit(operation_code(TfliteOperation.GATHER_ELEMENTS), arguments), indices.shape)


def _gather_nd(node: Node) -> None:
    x, indices = node.value(0), node.value(1)
    if node.attribute("batch_dims", 0):
        raise InvalidArgument("batch_dims is not supported")
    width = indices.shape[-1]
    positions = from_the_start(node, indices, x.shape[:width])
    found = node.emit(operation_code(TfliteOperation.GATHER_ND), [node.operand(x), positions])
    node.result(found, (*indices.shape[:-1], *x.shape[width:]))


def _scatter_elements(node: Node) -> None:
    x = node.value(0)
    axis, reduction = axis_of(node.attribute("axis", 0), len(x.shape)), _reduction(node)
    if not node.value(1).size:
        return node.result(node.operand(x), x.shape)
    positions = from_the_start(node, node.value(1), x.shape[axis : axis + 1])
    arguments = [node.operand(x), positions, node.operand(2), node.builder.int32(axis), reduction]
    return node.result(node.emit(operation_code(TfliteOperation.SCATTER_ELEMENTS), arguments), x.shape)


def _scatter_nd(node: Node) -> None:
    x, indices, reduction = node.value(0), node.value(1), _reduction(node)
    if not indices.size:
        return node.result(node.operand(x), x.shape)
    positions = from_the_start(node, indices, x.shape[: indices.shape[-1]])
    arguments = [node.operand(x), positions, node.operand(2), reduction]
    return node.result(node.emit(operation_code(TfliteOperation.SCATTER_ND_UPDATE), arguments), x.shape)


def _reduction(node: Node) -> int:
    name = node.attribute("reduction", "none")
    if name not in _REDUCTIONS:
        raise InvalidArgument(f"reduction {name!r} is not supported; {', '.join(_REDUCTIONS)} are")
    return node.builder.int32(_REDUCTIONS.index(name))


def _one_hot(node: Node) -> None:
    """Convert with the values' type; indices outside the depth give the off value everywhere."""
    indices, values = node.value(0), node.value(2)
    if indices.dtype.kind not in "iu" or values.size != 2:
        raise InvalidArgument("indices that are no integers, or not two values, are not supported")
    depth = int(node.constant(1, "depth").reshape(-1)[0])
    if depth < 1:
        raise InvalidArgument(f"depth {depth} is not supported")
    rank = len(indices.shape)
    axis = axis_of(node.attribute("axis", -1), rank + 1)
    operand, none = node.index_operand(indices), node.builder.int32(0)
    is_negative = node.emit(Op.LESS, [operand, node.filled(_I32, 0)], _B8)
    from_end = node.emit(Op.ADD, [operand, node.filled(_I32, depth), none])
    chosen = node.emit(Op.SELECT, [is_negative, from_end, operand], _I32)
    pair = node.operand(values)
    off, on = (
        node.emit(Op.SLICE, [pair, node.builder.int32_vector([place]), node.builder.int32_vector([1])])
        for place in (0, 1)
    )
    arguments = [chosen, node.add_constant(np.array([depth], np.int32)), on, off, node.builder.int32(axis)]
    found = node.emit(operation_code(TfliteOperation.ONE_HOT), arguments, node.builder[on].type)
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    node.result(found, shape, values.dtype)


def _hardmax(node: Node) -> None:
    """Convert to 1 at the first of the largest elements, and 0 elsewhere."""
    x = node.value(0)
    if node.opset < _LAST_AXIS_OPSET:
        raise InvalidArgument(f"opset {node.opset} is not supported: the axis has had another meaning")
    axis = axis_of(node.attribute("axis", -1), len(x.shape))
    kind = node.builder[node.operand(x)].type
    largest = node.emit(Op.ARGMAX, [node.operand(x), node.builder.int32(axis)], _I32)
    depth = node.add_constant(np.array([x.shape[axis]], np.int32))
    arguments = [largest, depth, node.filled(kind, 1.0), node.filled(kind, 0.0), node.builder.int32(axis)]
    node.result(node.emit(operation_code(TfliteOperation.ONE_HOT), arguments, kind), x.shape)


def _reverse_sequence(node: Node) -> None:
    x = node.value(0)
    axes = [
        axis_of(node.attribute(name, default), len(x.shape)) for name, default in (("time_axis", 0), ("batch_axis", 1))
    ]
    arguments = [node.operand(x), node.index_operand(1), *map(node.builder.int32, axes)]
    node.result(node.emit(operation_code(TfliteOperation.REVERSE_SEQUENCE), arguments), x.shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Hardmax": _hardmax,
    "OneHot": _one_hot,
    "ReverseSequence": _reverse_sequence,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "com.microsoft.GatherND": _gather_nd,
}
