"""Operators that move elements: shapes, concatenation, splitting, padding, transposition, repetition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import WIDE_TYPES
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx.file import dtype_of
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS", "axis_of", "broadcast_to", "common_shape", "pad", "part", "reversed_along", "transposed"]


# ----------------------------------------------------------------------------------------------------------------------
# Broadcasting: the common shape of values, and an operand repeated to a shape.


def common_shape(*values: Value) -> tuple[int, ...]:
    """Return the shape that the values have together. Raises InvalidArgument if there is none."""
    try:
        return np.broadcast_shapes(*(value.shape for value in values))
    except ValueError:
        shapes = ", ".join(str(value.shape) for value in values)
        raise InvalidArgument(f"the shapes {shapes} have no common shape") from None


def broadcast_to(node: Node, operand: int, shape: tuple[int, ...]) -> int:
    """Return an operand of `shape`, with the elements of `operand` repeated along dimensions of 1."""
    wanted = shape or (1,)
    if node.shape(operand) == wanted:
        return operand
    if node.builder[operand].type == OperandType.TENSOR_BOOL8:
        node.builder.reserve(math.prod(wanted))  # before the array exists
        nothing = node.add_constant(np.zeros(wanted, bool))
        return node.emit(OperationType.LOGICAL_OR, [operand, nothing])
    given = node.shape(operand)
    aligned = (1,) * (len(wanted) - len(given)) + given
    multiples = [size // extent for size, extent in zip(wanted, aligned, strict=True)]
    operand = node.reshaped(operand, aligned)
    return node.emit(OperationType.TILE, [operand, node.builder.int32_vector(multiples)])


# ----------------------------------------------------------------------------------------------------------------------
# Operators that move elements: shapes, concatenation, splitting, padding, transposition, repetition.


_B8 = OperandType.TENSOR_BOOL8
_UNEVEN_SPLIT = 18
_IN_BLOCKS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the first one. Raises InvalidArgument if there is no such axis."""
    if not -rank <= axis < rank:
        raise InvalidArgument(f"axis {axis} of a tensor of rank {rank}")
    return axis % rank


def transposed(node: Node, operand: int, permutation: Sequence[int]) -> int:
    """Return an operand with permuted dimensions."""
    if list(permutation) == sorted(permutation):
        return operand
    return node.emit(Op.TRANSPOSE, [operand, node.builder.int32_vector(permutation)])


def reversed_along(node: Node, operand: int, axis: int) -> int:
    """Return an operand with the elements along an axis in reverse order."""
    return node.emit(Op.REVERSE, [operand, node.builder.int32_vector([axis])])


def pad(node: Node, operand: int, begin: Sequence[int], end: Sequence[int], number: float) -> int:
    """Return an operand padded with a number; a negative padding removes elements."""
    operand = _cropped(node, operand, begin, end)
    kind, pairs = node.builder[operand].type, np.maximum([begin, end], 0).astype(np.int32).T
    if not pairs.any():
        return operand
    if kind in WIDE_TYPES:
        found = node.emit(Op.PAD, [operand, node.add_constant(pairs)])
        return _with_border(node, found, node.filled(kind, number), begin, end) if number else found
    return node.emit(Op.PAD_V2, [operand, node.add_constant(pairs), node.scalar(kind, number)])


def _with_border(node: Node, operand: int, value: int, begin: Sequence[int], end: Sequence[int]) -> int:
    """Return a padded operand with a value that is an operand in the border."""
    shape = node.shape(operand)
    node.builder.reserve(math.prod(shape))  # before the mask exists
    inside = np.zeros(shape, bool)
    sides = zip(begin, end, shape, strict=True)
    inside[tuple(slice(max(low, 0), extent - max(high, 0)) for low, high, extent in sides)] = True
    return node.emit(
        Op.SELECT, [node.add_constant(inside), operand, broadcast_to(node, value, shape)], node.builder[operand].type
    )


def _cropped(node: Node, operand: int, begin: Sequence[int], end: Sequence[int]) -> int:
    """Return an operand without the elements that negative paddings remove."""
    if min((*begin, *end), default=0) >= 0:
        return operand
    shape = node.shape(operand)
    starts = [-min(number, 0) for number in begin]
    extents = [n - start + min(more, 0) for n, start, more in zip(shape, starts, end, strict=True)]
    if min(extents) < 1:
        raise InvalidArgument(f"pads {list(begin)} and {list(end)} leave nothing of the shape {shape}")
    return node.emit(Op.SLICE, [operand, *map(node.builder.int32_vector, (starts, extents))])


def part(node: Node, value: Value, axis: int, begin: int, end: int) -> Value:
    """Return the elements from `begin` to `end` along an axis; a constant stays one."""
    axis %= len(value.shape)
    if (begin, end) == (0, value.shape[axis]):
        return value
    if value.array is not None:
        return Value.of(value.array[(slice(None),) * axis + (slice(begin, end),)])
    begins, extents = [0] * len(value.shape), list(value.shape)
    begins[axis], extents[axis] = begin, end - begin
    found = node.emit(Op.SLICE, [node.operand(value), *map(node.builder.int32_vector, (begins, extents))])
    return Value(tuple(extents), value.dtype, found)


def _convert_any_type(node: Node, move: Callable[[int], int], shape: Sequence[int]) -> None:
    """Add an operation that moves elements; BOOL8, which such operations do not take, moves as FLOAT32."""
    x = node.operand(0)
    if node.builder[x].type == _B8:
        return node.result(node.to_bool(move(node.from_bool(x))), tuple(shape))
    return node.result(move(x), tuple(shape))


def _reshape(node: Node) -> None:
    given = node.value(0).shape
    wanted = [int(extent) for extent in node.constant(1, "shape").reshape(-1)]
    if not node.attribute("allowzero", 0):
        if any(extent == 0 and axis >= len(given) for axis, extent in enumerate(wanted)):
            raise InvalidArgument(f"shape {wanted} copies a dimension that {given} does not have")
        wanted = [given[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)]
    _reshaped(node, wanted)


def _reshaped(node: Node, wanted: Sequence[int]) -> None:
    """Make the first input, with another shape, the result; one extent may be -1."""
    size, known = node.value(0).size, math.prod(extent for extent in wanted if extent != -1)
    if list(wanted).count(-1) > 1 or min(wanted, default=1) < -1 or known < 1 or size % known:
        raise InvalidArgument(f"{size} elements do not fit the shape {tuple(wanted)}")
    shape = tuple(size // known if extent == -1 else extent for extent in wanted)
    if math.prod(shape) != size:
        raise InvalidArgument(f"{size} elements do not fit the shape {shape}")
    node.result(node.operand(0), shape)


def _flatten(node: Node) -> None:
    shape = node.value(0).shape
    axis = node.attribute("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    if not 0 <= axis <= len(shape):
        raise InvalidArgument(f"axis {axis} of a tensor of rank {len(shape)}")
    _reshaped(node, (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _squeeze(node: Node) -> None:
    shape, axes = node.value(0).shape, node.integers("axes", 1)
    removed = {axis_of(axis, len(shape)) for axis in axes} if axes is not None else {
        axis for axis, extent in enumerate(shape) if extent == 1
    }  # fmt: skip
    if any(shape[axis] != 1 for axis in removed):
        raise InvalidArgument(f"axes {sorted(removed)} of the shape {shape} are not all 1")
    _reshaped(node, [extent for axis, extent in enumerate(shape) if axis not in removed])


def _unsqueeze(node: Node) -> None:
    shape, axes = node.value(0).shape, node.integers("axes", 1)
    if axes is None:
        raise InvalidArgument("the axes are missing")
    rank = len(shape) + len(axes)
    added, rest = {axis_of(axis, rank) for axis in axes}, iter(shape)
    if len(added) != len(axes):
        raise InvalidArgument(f"axes {axes} name an axis twice")
    _reshaped(node, [1 if axis in added else next(rest) for axis in range(rank)])


def _trilu(node: Node) -> None:
    """Convert to a selection between the elements and 0, with a constant mask."""
    value = node.value(0)
    if len(value.shape) < 2:
        raise InvalidArgument(f"a tensor of rank {len(value.shape)} is no matrix")
    k = int(node.constant(1, "k").reshape(-1)[0]) if node.given(1) else 0
    node.builder.reserve(value.size)  # before the mask exists
    is_upper, (rows, columns) = node.attribute("upper", 1), value.shape[-2:]
    lower = np.tri(rows, columns, k - 1 if is_upper else k, dtype=bool)
    mask = np.broadcast_to(~lower if is_upper else lower, value.shape)
    x = node.operand(0)
    kind = node.builder[x].type
    if kind == _B8:
        return node.result(node.emit(Op.LOGICAL_AND, [x, node.add_constant(mask)]), value.shape)
    zeros = node.uniform(kind, value.shape, 0.0)
    return node.result(node.emit(Op.SELECT, [node.add_constant(mask), x, zeros], kind), value.shape)


def _eye_like(node: Node) -> None:
    value = node.value(0)
    if len(value.shape) != 2:
        raise InvalidArgument(f"a tensor of rank {len(value.shape)} is no matrix")
    number = node.attribute("dtype", 0)
    node.builder.reserve(8 * value.size)  # before the matrix exists
    node.constant_result(
        np.eye(*value.shape, k=node.attribute("k", 0), dtype=dtype_of(number) if number else value.dtype)
    )


def _transpose(node: Node) -> None:
    shape = node.value(0).shape
    permutation = node.attribute("perm", tuple(reversed(range(len(shape)))))
    if sorted(permutation) != list(range(len(shape))):
        raise InvalidArgument(f"perm {permutation} is no permutation of {len(shape)} axes")
    _convert_any_type(node, lambda x: transposed(node, x, permutation), [shape[axis] for axis in permutation])


def _concat(node: Node) -> None:
    values = [node.value(position) for position in range(len(node.inputs))]
    axis = axis_of(node.attribute("axis", 0), len(values[0].shape))
    values = [value for value in values if value.size]  # not all are empty: that would be a constant
    operands = [node.operand(value) for value in values]
    if len(operands) == 1:
        return node.result(operands[0], values[0].shape)
    is_bool = node.builder[operands[0]].type == _B8
    operands = [node.from_bool(operand) for operand in operands] if is_bool else operands
    found = node.emit(Op.CONCATENATION, [*operands, node.builder.int32(axis)])
    return node.result(node.to_bool(found) if is_bool else found, node.shape(found))


def _split(node: Node) -> None:
    shape = node.value(0).shape
    axis = axis_of(node.attribute("axis", 0), len(shape))
    sizes, begin = _parts(node, shape[axis]), 0
    x = node.operand(0)
    for position, size in enumerate(sizes):
        begins, extents = [0] * len(shape), list(shape)
        begins[axis], extents[axis] = begin, size
        if not size:
            node.constant_result(np.zeros(extents, node.value(0).dtype), position)
            continue
        part = node.emit(Op.SLICE, [x, *map(node.builder.int32_vector, (begins, extents))])
        node.result(part, tuple(extents), position=position)
        begin += size


def _parts(node: Node, extent: int) -> tuple[int, ...]:
    """Return the sizes of a Split's outputs."""
    sizes, count = node.integers("split", 1), node.attribute("num_outputs", len(node.output_names))
    if count != len(node.output_names):
        raise InvalidArgument(f"num_outputs is {count}, and there are {len(node.output_names)} outputs")
    if sizes is None:
        size = -(-extent // count)
        sizes = (*[size] * (count - 1), extent - size * (count - 1))
        if node.opset < _UNEVEN_SPLIT and extent % count:
            raise InvalidArgument(f"{extent} elements cannot be split into {count} equal parts")
    if len(sizes) != count or sum(sizes) != extent or min(sizes) < 0:
        raise InvalidArgument(f"parts of {sizes} elements do not fit {count} outputs of {extent} elements")
    return sizes


def _pad(node: Node) -> None:
    shape, mode = node.value(0).shape, node.attribute("mode", "constant")
    pads, given = node.integers("pads", 1), node.integers("axes", 3)
    axes = [axis_of(axis, len(shape)) for axis in (range(len(shape)) if given is None else given)]
    if pads is None or len(pads) != 2 * len(axes) or len(set(axes)) < len(axes):
        raise InvalidArgument(f"pads {pads} do not fit the axes {axes}")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise InvalidArgument(f"mode {mode!r} is not supported")
    begin, end = [0] * len(shape), [0] * len(shape)
    for position, axis in enumerate(axes):
        begin[axis], end[axis] = pads[position], pads[position + len(axes)]
    x = node.operand(0)
    is_bool = node.builder[x].type == _B8
    x = node.from_bool(x) if is_bool else x
    found = _padded(node, x, begin, end) if mode == "constant" else _repeated(node, x, begin, end, mode)
    node.result(node.to_bool(found) if is_bool else found, node.shape(found) if shape else ())


def _repeated(node: Node, x: int, begin: Sequence[int], end: Sequence[int], mode: Any) -> int:
    """Return an operand padded with its own elements: those of the edge, reflected ones, or those of the other side."""
    x = _cropped(node, x, begin, end)
    for axis, extent in enumerate(node.shape(x)):
        pair = max(begin[axis], 0), max(end[axis], 0)
        if mode == "reflect" and max(pair) >= extent > 0 != max(pair):
            raise InvalidArgument(f"{max(pair)} elements cannot be reflected: the axis has {extent}")
        if any(pair):
            node.builder.reserve(4 * (extent + sum(pair)))  # before the indices exist
            indices = np.pad(np.arange(extent, dtype=np.int32), pair, mode)
            x = node.emit(Op.GATHER, [x, node.builder.int32(axis), node.add_constant(indices)])
    return x


def _padded(node: Node, x: int, begin: Sequence[int], end: Sequence[int]) -> int:
    """Return an operand padded with a constant, or with a value that the model computes."""
    if not node.given(2):
        return pad(node, x, begin, end, node.attribute("value", 0.0))
    given = node.value(2)
    if given.size != 1:
        raise InvalidArgument(f"its value has {given.size} elements")
    if given.array is not None:
        return pad(node, x, begin, end, given.array.item())
    number = node.operand(given)
    number = node.from_bool(number) if given.dtype == np.bool_ else number
    return _with_border(node, pad(node, x, begin, end, 0.0), number, begin, end)


def _expand(node: Node) -> None:
    wanted = tuple(int(extent) for extent in node.constant(1, "shape").reshape(-1))
    try:
        shape = np.broadcast_shapes(node.value(0).shape, wanted)
    except ValueError:
        raise InvalidArgument(f"shape {node.value(0).shape} cannot be expanded to {wanted}") from None
    node.result(broadcast_to(node, node.operand(0), shape), shape)


def _tile(node: Node) -> None:
    shape = node.value(0).shape
    multiples = [int(count) for count in node.constant(1, "repeats").reshape(-1)]
    if len(multiples) != len(shape):
        raise InvalidArgument(f"{len(multiples)} repeats of a tensor of rank {len(shape)}")
    counts = node.builder.int32_vector(multiples or [1])
    result = [extent * count for extent, count in zip(shape, multiples, strict=True)]
    _convert_any_type(node, lambda x: node.emit(Op.TILE, [x, counts]), result)


def _shape(node: Node) -> None:
    shape = node.value(0).shape
    begin, end = node.attribute("start", 0), node.attribute("end", len(shape))
    node.constant_result(np.array(shape[begin:end], np.int64))


def _size(node: Node) -> None:
    node.constant_result(np.array(node.value(0).size, np.int64))


def _constant(node: Node) -> None:
    (name, value), *others = node.attributes.items() or [("", None)]
    if others or value is None:
        raise InvalidArgument("a Constant has exactly one attribute")
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if name in ("value", "sparse_value") and isinstance(value, np.ndarray):
        node.constant_result(value)
    elif name in dtypes:
        node.constant_result(np.array(value, dtypes[name]))
    else:
        raise InvalidArgument(f"a Constant of {name} is not supported")


def _constant_of_shape(node: Node) -> None:
    raise InvalidArgument("its shape is not a constant")


def _depth_to_space(node: Node) -> None:
    block, (batch, channels, height, width) = _blocks(node)
    if channels % block**2:
        raise InvalidArgument(f"blocks of {block} do not fit {channels} channels")
    rest, is_dcr = channels // block**2, _is_depth_first(node)
    extents = (batch, block, block, rest, height, width) if is_dcr else (batch, rest, block, block, height, width)
    result = (batch, rest, height * block, width * block)
    if is_dcr and node.builder[node.operand(0)].type in _IN_BLOCKS:
        found = node.emit(Op.DEPTH_TO_SPACE, [node.operand(0), node.builder.int32(block), node.builder.boolean(True)])
        return node.result(found, result)
    return _rearranged(node, extents, (0, 3, 4, 1, 5, 2) if is_dcr else (0, 1, 4, 2, 5, 3), result)


def _space_to_depth(node: Node) -> None:
    block, (batch, channels, height, width) = _blocks(node)
    if height % block or width % block:
        raise InvalidArgument(f"blocks of {block} do not fit an image of {height} x {width}")
    extents = (batch, channels, height // block, block, width // block, block)
    result, is_dcr = (batch, channels * block**2, height // block, width // block), _is_depth_first(node)
    if is_dcr and node.builder[node.operand(0)].type in _IN_BLOCKS:
        found = node.emit(Op.SPACE_TO_DEPTH, [node.operand(0), node.builder.int32(block), node.builder.boolean(True)])
        return node.result(found, result)
    return _rearranged(node, extents, (0, 3, 5, 1, 2, 4) if is_dcr else (0, 1, 3, 5, 2, 4), result)


def _blocks(node: Node) -> tuple[int, tuple[int, ...]]:
    """Return the extent of blocks and the shape of the images."""
    shape, block = node.value(0).shape, node.attribute("blocksize", 0)
    if len(shape) != 4 or block < 1:
        raise InvalidArgument(f"blocks of {block} in a tensor of shape {shape}")
    return block, shape


def _is_depth_first(node: Node) -> bool:
    """Return whether the pixels of a block are farther apart in the channels than the channels of a pixel."""
    mode = node.attribute("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise InvalidArgument(f"mode {mode!r} is unknown")
    return bool(mode == "DCR")


def _rearranged(node: Node, extents: Sequence[int], permutation: Sequence[int], result: Sequence[int]) -> None:
    found = transposed(node, node.reshaped(node.operand(0), tuple(extents)), permutation)
    node.result(found, tuple(result))


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "EyeLike": _eye_like,
    "Flatten": _flatten,
    "Pad": _pad,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "com.microsoft.Pad": _pad,
    "com.microsoft.Trilu": _trilu,
}
