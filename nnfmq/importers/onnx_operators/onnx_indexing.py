"""Operators that select elements: Compress, Gather, Slice, TopK."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import WIDE_TYPES, TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_operators.onnx_elements import from_the_start
from nnfmq.importers.onnx_operators.onnx_integers import inverted
from nnfmq.importers.onnx_operators.onnx_movement import axis_of, reversed_along, transposed
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "slice_ranges", "sliced"]

_B8, _I32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_INT32


def _gather(node: Node) -> None:
    value, indices = node.value(0), node.value(1)
    shape = value.shape
    axis = axis_of(node.attribute("axis", 0), len(shape))
    if value.array is not None and value.dtype in (np.int8, np.uint8):  # a quantized table, of which the scale follows
        value = Value.of(value.array.astype(np.float32))
    found = node.emit(
        Op.GATHER,
        [node.operand(value), node.builder.int32(axis), from_the_start(node, indices, shape[axis : axis + 1])],
    )
    node.result(found, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))


def _slice(node: Node) -> None:
    ranges = slice_ranges(node)
    if not all(ranges):
        raise InvalidArgument("an empty result is not supported")
    x = node.operand(0)
    is_bool = node.builder[x].type == _B8
    found = sliced(node, node.from_bool(x) if is_bool else x, ranges)
    node.result(node.to_bool(found) if is_bool else found, tuple(map(len, ranges)))


def slice_ranges(node: Node) -> list[range]:
    """Return the indices that a Slice takes of each dimension. Raises InvalidArgument if it is malformed."""
    shape = node.value(0).shape
    starts, ends = node.integers("starts", 1), node.integers("ends", 2)
    axes, steps = node.integers("axes", 3), node.integers("steps", 4)
    if starts is None or ends is None:
        raise InvalidArgument("starts or ends are missing")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise InvalidArgument("starts, ends, axes and steps do not fit together")
    ranges = [range(extent) for extent in shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        at = axis_of(axis, len(shape))
        ranges[at] = _slice_range(shape[at], start, end, step)
    return ranges


def _slice_range(extent: int, start: int, end: int, step: int) -> range:
    """Return the indices of one dimension. Unlike Python, a start before the first element is clamped to it."""
    start, end = (place + extent if place < 0 else place for place in (start, end))
    if step > 0:
        return range(min(max(start, 0), extent), min(max(end, 0), extent), step)
    return range(min(max(start, 0), extent - 1), min(max(end, -1), extent - 1), step)


def sliced(node: Node, operand: int, ranges: Sequence[range]) -> int:
    """Return the elements at these indices of each dimension."""
    begins = node.builder.int32_vector([indices[0] for indices in ranges])
    if all(indices.step == 1 for indices in ranges):
        return node.emit(Op.SLICE, [operand, begins, node.builder.int32_vector([len(indices) for indices in ranges])])
    ends = [indices[-1] + (1 if indices.step > 0 else -1) for indices in ranges]
    to_start = sum(1 << axis for axis, end in enumerate(ends) if end < 0)  # a mask: -1 would be the last element
    vectors = [begins, node.builder.int32_vector([max(end, 0) for end in ends])]
    vectors.append(node.builder.int32_vector([indices.step for indices in ranges]))
    masks = [node.builder.int32(mask) for mask in (0, to_start, 0)]
    return node.emit(Op.STRIDED_SLICE, [operand, *vectors, *masks])


def _top_k(node: Node) -> None:
    shape = node.value(0).shape
    axis, count = axis_of(node.attribute("axis", -1), len(shape)), _count(node)
    if not 0 < count <= shape[axis]:
        raise InvalidArgument(f"k is {count}: the axis has {shape[axis]} elements")
    permutation = [*(other for other in range(len(shape)) if other != axis), axis]
    is_largest = bool(node.attribute("largest", 1))
    x = transposed(node, node.operand(0), permutation)
    values, indices = (_largest if is_largest else _smallest)(node, x, count)
    result = (*shape[:axis], count, *shape[axis + 1 :])
    inverse = [int(at) for at in np.argsort(permutation)]
    node.result(transposed(node, values, inverse), result)
    if node.used(1):
        node.result(transposed(node, indices, inverse), result, np.dtype(np.int64), position=1)


def _smallest(node: Node, x: int, count: int) -> tuple[int, ...]:
    """Return the smallest elements along the last axis, and their indices; NaN is above all numbers."""
    if node.value(0).dtype.kind != "f":
        values, indices = _largest(node, inverted(node, x), count)
        return inverted(node, values), indices
    last = len(node.shape(x)) - 1
    ordered = _largest(node, reversed_along(node, x, last), node.shape(x)[last])  # the last ones first among equals
    begin, extents = [0] * (last + 1), [*node.shape(x)[:last], count]
    values, from_end = (
        node.emit(Op.SLICE, [reversed_along(node, each, last), *map(node.builder.int32_vector, (begin, extents))])
        for each in ordered
    )
    return values, _from_the_other_end(node, from_end, node.shape(x)[last])


def _largest(node: Node, x: int, count: int) -> tuple[int, ...]:
    """Return the largest elements along the last axis, and their indices; of equal elements the first ones."""
    kinds, number = [node.builder[x].type, _I32], node.builder.int32(count)
    if kinds[0] in WIDE_TYPES:
        return node.emit_many(operation_code(TfliteOperation.TOPK_V2), [x, number], kinds)
    last = len(node.shape(x)) - 1
    values, indices = node.emit_many(Op.TOPK_V2, [reversed_along(node, x, last), number], kinds)  # the last ones
    return values, _from_the_other_end(node, indices, node.shape(x)[last])


def _from_the_other_end(node: Node, indices: int, extent: int) -> int:
    return node.emit(Op.SUB, [node.filled(_I32, extent - 1), indices, node.builder.int32(0)])


def _count(node: Node) -> int:
    """Return k, an attribute of TopK before opset 10."""
    if not node.given(1):
        return int(node.attribute("k", 0))
    numbers = node.integers("k", 1) or ()
    if len(numbers) != 1:
        raise InvalidArgument(f"k is {numbers}: it must be one integer")
    return numbers[0]


def _compress(node: Node) -> None:
    """Convert to the elements at the true places of a constant condition."""
    shape, condition = node.value(0).shape, node.constant(1, "condition").reshape(-1)
    axis = node.attributes.get("axis")
    node.attributes_read.add("axis")
    flat = shape if axis is not None else (node.value(0).size,)
    along = axis_of(0 if axis is None else axis, len(flat))
    indices = np.flatnonzero(condition)
    if not indices.size or indices[-1] >= flat[along]:
        raise InvalidArgument(f"its condition selects {indices.size} of {flat[along]} elements, or others")
    x = node.reshaped(node.operand(0), flat)
    found = node.emit(Op.GATHER, [x, node.builder.int32(along), node.builder.int32_vector(list(map(int, indices)))])
    node.result(found, (*flat[:along], indices.size, *flat[along + 1 :]))


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "Compress": _compress,
    "Gather": _gather,
    "Slice": _slice,
    "TopK": _top_k,
}
