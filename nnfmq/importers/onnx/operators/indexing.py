"""Operators that select elements: Compress, Gather, Slice, TopK, and those whose indices have any shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import WIDE_TYPES, Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.operators.integers import inverted
from nnfmq.importers.onnx.operators.movement import axis_of, broadcast_to, reversed_along, transposed
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "from_the_start", "slice_ranges", "sliced"]


# ----------------------------------------------------------------------------------------------------------------------
# Operators whose indices are tensors of any shape: GatherElements, GatherND, OneHot, the scatters, ReverseSequence.


_B8, _I32 = OperandType.TENSOR_BOOL8, OperandType.TENSOR_INT32
_LAST_AXIS_OPSET = 13
_NEGATIVE_ONE_HOT = 11  # the opset from which indices of OneHot may count from the end
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
    """Convert; with batch dimensions, the number of the batch becomes the first index."""
    x, indices, count = node.value(0), node.value(1), node.attribute("batch_dims", 0)
    if not 0 <= count < min(len(x.shape), len(indices.shape)) or x.shape[:count] != indices.shape[:count]:
        raise InvalidArgument(f"batch_dims {count} of the shapes {x.shape} and {indices.shape}")
    width, extents = indices.shape[-1], x.shape[count:]
    if not 1 <= width <= len(extents):
        raise InvalidArgument(f"index vectors of {width} elements for a tensor of shape {x.shape}")
    positions = from_the_start(node, indices, extents[:width])
    batches = math.prod(x.shape[:count])
    array = node.operand(x)
    if count:
        array = node.reshaped(array, (batches, *extents))
        positions = node.reshaped(positions, (batches, math.prod(indices.shape[count:-1]), width))
        rows = node.shape(positions)[1]
        own = np.repeat(np.arange(batches, dtype=np.int32), rows).reshape(batches, rows, 1)
        positions = node.emit(Op.CONCATENATION, [node.add_constant(own), positions, node.builder.int32(2)])
    found = node.emit(operation_code(TfliteOperation.GATHER_ND), [array, positions])
    node.result(found, (*indices.shape[:-1], *extents[width:]))


def _scatter_elements(node: Node) -> None:
    x = node.value(0)
    axis, reduction = axis_of(node.attribute("axis", 0), len(x.shape)), _reduction(node)
    if not node.value(1).size:
        return node.result(node.operand(x), x.shape)
    positions = from_the_start(node, node.value(1), x.shape[axis : axis + 1])
    return _scattered(node, TfliteOperation.SCATTER_ELEMENTS, positions, [node.builder.int32(axis), reduction])


def _scatter_nd(node: Node) -> None:
    x, indices, reduction = node.value(0), node.value(1), _reduction(node)
    if not indices.size:
        return node.result(node.operand(x), x.shape)
    positions = from_the_start(node, indices, x.shape[: indices.shape[-1]])
    return _scattered(node, TfliteOperation.SCATTER_ND_UPDATE, positions, [reduction])


def _scattered(node: Node, operation: TfliteOperation, positions: int, rest: list[int]) -> None:
    """Add a scatter of the first and third input; truths, which it does not take, are 0 and 1."""
    arrays, shape = [node.operand(0), node.operand(2)], node.value(0).shape
    if node.value(0).dtype != np.bool_:
        return node.result(node.emit(operation_code(operation), [arrays[0], positions, arrays[1], *rest]), shape)
    numbers = [node.from_bool(array, _I32) for array in arrays]
    found = node.emit(operation_code(operation), [numbers[0], positions, numbers[1], *rest])
    return node.result(node.to_bool(found), shape)


def _tensor_scatter(node: Node) -> None:
    """Convert to SCATTER_ND_UPDATE of a cache whose sequence is its second dimension."""
    cache, update = node.value(0), node.value(1)
    rank, mode = len(cache.shape), node.attribute("mode", "linear")
    axis = axis_of(node.attribute("axis", -2), rank)
    if axis == 0 or mode not in ("linear", "circular"):
        raise InvalidArgument(f"axis {axis} and mode {mode!r} are not supported")
    order = [0, axis, *(other for other in range(1, rank) if other != axis)]
    (batch, extent), count = (cache.shape[0], cache.shape[axis]), update.shape[axis]
    steps = np.arange(count, dtype=np.int32).reshape(1, count, 1)
    rows = np.broadcast_to(np.arange(batch, dtype=np.int32).reshape(batch, 1, 1), (batch, count, 1))
    first = node.reshaped(node.index_operand(2), (batch, 1, 1)) if node.given(2) else node.filled(_I32, 0)
    places = broadcast_to(
        node, node.emit(Op.ADD, [first, node.add_constant(steps), node.builder.int32(0)]), (batch, count, 1)
    )
    if mode == "circular":
        places = node.emit(operation_code(TfliteOperation.FLOOR_MOD), [places, node.filled(_I32, extent)])
    indices = node.emit(Op.CONCATENATION, [node.add_constant(rows), places, node.builder.int32(2)])
    is_bool = cache.dtype == np.bool_
    arrays = [transposed(node, node.operand(value), order) for value in (cache, update)]
    arrays = [node.from_bool(array) for array in arrays] if is_bool else arrays
    arguments = [arrays[0], indices, arrays[1], node.builder.int32(_REDUCTIONS.index("none"))]
    found = node.emit(operation_code(TfliteOperation.SCATTER_ND_UPDATE), arguments)
    found = node.to_bool(found) if is_bool else found
    node.result(transposed(node, found, [int(at) for at in np.argsort(order)]), cache.shape)


def _reduction(node: Node) -> int:
    name = node.attribute("reduction", "none")
    if name not in _REDUCTIONS:
        raise InvalidArgument(f"reduction {name!r} is not supported; {', '.join(_REDUCTIONS)} are")
    return node.builder.int32(_REDUCTIONS.index(name))


def _one_hot(node: Node) -> None:
    """Convert with the values' type; indices outside the depth give the off value everywhere."""
    indices, values = node.value(0), node.value(2)
    if values.size != 2 or values.dtype == np.bool_:
        raise InvalidArgument(f"{values.size} values of {values.dtype.name} are not supported: it needs two numbers")
    depth = int(node.constant(1, "depth").reshape(-1)[0])
    if depth < 1:
        raise InvalidArgument(f"depth {depth} is not supported")
    rank = len(indices.shape)
    axis = axis_of(node.attribute("axis", -1), rank + 1)
    chosen, none = node.index_operand(indices), node.builder.int32(0)
    if node.builder[chosen].type != _I32:
        chosen = node.emit(Op.CAST, [chosen], _I32)
    if node.opset >= _NEGATIVE_ONE_HOT:
        is_negative = node.emit(Op.LESS, [chosen, node.filled(_I32, 0)], _B8)
        from_end = node.emit(Op.ADD, [chosen, node.filled(_I32, depth), none])
        chosen = node.emit(Op.SELECT, [is_negative, from_end, chosen], _I32)
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
    """Convert to 1 at the first of the largest elements, and 0 elsewhere; before opset 13 of all axes from one on."""
    x, shape = node.operand(0), node.value(0).shape
    is_new = node.opset >= _LAST_AXIS_OPSET
    axis = axis_of(node.attribute("axis", -1 if is_new else 1), len(shape))
    if not is_new:
        x, axis = node.reshaped(x, (math.prod(shape[:axis]), math.prod(shape[axis:]))), 1
    kind = node.builder[x].type
    largest = node.emit(Op.ARGMAX, [x, node.builder.int32(axis)], _I32)
    depth = node.add_constant(np.array([node.shape(x)[axis]], np.int32))
    arguments = [largest, depth, node.filled(kind, 1.0), node.filled(kind, 0.0), node.builder.int32(axis)]
    node.result(node.emit(operation_code(TfliteOperation.ONE_HOT), arguments, kind), shape)


def _reverse_sequence(node: Node) -> None:
    x = node.value(0)
    axes = [
        axis_of(node.attribute(name, default), len(x.shape)) for name, default in (("time_axis", 0), ("batch_axis", 1))
    ]
    arguments = [node.operand(x), node.index_operand(1), *map(node.builder.int32, axes)]
    node.result(node.emit(operation_code(TfliteOperation.REVERSE_SEQUENCE), arguments), x.shape)


_ELEMENTS_CONVERTERS: dict[str, Callable[[Node], None]] = {
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Hardmax": _hardmax,
    "OneHot": _one_hot,
    "ReverseSequence": _reverse_sequence,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "com.microsoft.GatherND": _gather_nd,
}


# ----------------------------------------------------------------------------------------------------------------------
# Operators that select elements: Compress, Gather, Slice, TopK.


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
        return node.emit_many(extended_code(Op.TOPK_V2, Scheme.TFLITE), [x, number], kinds)
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


_INDEXING_CONVERTERS: dict[str, Callable[[Node], None]] = {
    "Compress": _compress,
    "Gather": _gather,
    "Slice": _slice,
    "TopK": _top_k,
}

CONVERTERS: dict[str, Callable[[Node], None]] = {**_INDEXING_CONVERTERS, **_ELEMENTS_CONVERTERS}
