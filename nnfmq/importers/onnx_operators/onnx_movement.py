"""Operators that move elements: shapes, concatenation, splitting, padding, transposition, repetition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.tflite_codes import WIDE_TYPES
from nnfmq.hal.types import OperandType
from nnfmq.importers.onnx_file import dtype_of
from nnfmq.importers.onnx_operators.onnx_broadcasting import broadcast_to
from nnfmq.importers.onnx_values import Node, Value

__all__ = ["CONVERTERS", "axis_of", "pad", "reversed_along", "transposed"]

_B8 = OperandType.TENSOR_BOOL8
_UNEVEN_SPLIT = 18
_PAD_MODES = {"reflect": 0}


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
    """Return an operand padded with a number."""
    kind, pairs = node.builder[operand].type, node.add_constant(np.array([begin, end], np.int32).T)
    if kind in WIDE_TYPES:
        found = node.emit(Op.PAD, [operand, pairs])
        return _with_border(node, found, node.filled(kind, number), begin, end) if number else found
    return node.emit(Op.PAD_V2, [operand, pairs, node.scalar(kind, number)])


def _with_border(node: Node, operand: int, value: int, begin: Sequence[int], end: Sequence[int]) -> int:
    """Return a padded operand with a value that is an operand in the border."""
    shape = node.shape(operand)
    node.builder.reserve(math.prod(shape))  # before the mask exists
    inside = np.zeros(shape, bool)
    inside[tuple(slice(low, extent - high) for low, high, extent in zip(begin, end, shape, strict=True))] = True
    return node.emit(
        Op.SELECT, [node.add_constant(inside), operand, broadcast_to(node, value, shape)], node.builder[operand].type
    )


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
    pads = node.integers("pads", 1)
    axes = [axis_of(int(axis), len(shape)) for axis in node.constant(3, "axes")] if node.given(3) else range(len(shape))
    if pads is None or len(pads) != 2 * len(axes) or min(pads, default=0) < 0:
        raise InvalidArgument(f"pads {pads} are not supported for {len(axes)} axes")
    begin, end = [0] * len(shape), [0] * len(shape)
    for position, axis in enumerate(axes):
        begin[axis], end[axis] = pads[position], pads[position + len(axes)]
    x = node.operand(0)
    if mode == "constant":
        found = _padded(node, x, begin, end)
    elif mode in _PAD_MODES:
        pairs = node.add_constant(np.array([begin, end], np.int32).T)
        found = node.emit(Op.MIRROR_PAD, [x, pairs, node.builder.int32(_PAD_MODES[mode])])
    else:
        raise InvalidArgument(f"mode {mode!r} is not supported")
    node.result(found, node.shape(found))


def _padded(node: Node, x: int, begin: Sequence[int], end: Sequence[int]) -> int:
    """Return an operand padded with a constant, or with a value that the model computes."""
    if not node.given(2):
        return pad(node, x, begin, end, node.attribute("value", 0.0))
    given = node.value(2)
    if given.array is not None:
        return pad(node, x, begin, end, given.array.item())
    return _with_border(node, pad(node, x, begin, end, 0.0), node.operand(given), begin, end)


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
    if name == "value" and isinstance(value, np.ndarray):
        node.constant_result(value)
    elif name in dtypes:
        node.constant_result(np.array(value, dtypes[name]))
    else:
        raise InvalidArgument(f"a Constant of {name} is not supported")


def _constant_of_shape(node: Node) -> None:
    raise InvalidArgument("its shape is not a constant")


def _depth_to_space(node: Node) -> None:
    value, block = node.value(0), node.attribute("blocksize", 0)
    x = node.operand(value)
    if len(value.shape) != 4 or block < 1 or value.shape[1] % block**2:
        raise InvalidArgument(f"blocks of {block} do not fit the shape {value.shape}")
    if value.dtype.kind != "f" or value.dtype == np.float64:
        return _blocks_to_space(node, x, block)
    if node.attribute("mode", "DCR") == "CRD":  # the same after reordering the channels
        channels = np.arange(value.shape[1]).reshape(-1, block * block).T.reshape(-1)
        x = node.emit(Op.GATHER, [x, node.builder.int32(1), node.index_operand(Value.of(channels))])
    found = node.emit(Op.DEPTH_TO_SPACE, [x, node.builder.int32(block), node.builder.boolean(True)])
    return node.result(found, node.shape(found))


def _blocks_to_space(node: Node, x: int, block: int) -> None:
    """Convert DepthToSpace of elements that the HAL's operation does not take."""
    batch, channels, height, width = node.value(0).shape
    parts, shape = channels // block**2, (batch, channels // block**2, height * block, width * block)
    if node.attribute("mode", "DCR") == "CRD":
        x = transposed(node, node.reshaped(x, (batch, parts, block, block, height, width)), (0, 1, 4, 2, 5, 3))
    else:
        x = transposed(node, node.reshaped(x, (batch, block, block, parts, height, width)), (0, 3, 4, 1, 5, 2))
    node.result(node.reshaped(x, shape), shape)


def _space_to_blocks(node: Node, x: int, block: int) -> None:
    """Convert SpaceToDepth of elements that the HAL's operation does not take."""
    batch, channels, height, width = node.value(0).shape
    rows, columns = height // block, width // block
    x = transposed(node, node.reshaped(x, (batch, channels, rows, block, columns, block)), (0, 3, 5, 1, 2, 4))
    shape = (batch, channels * block**2, rows, columns)
    node.result(node.reshaped(x, shape), shape)


def _space_to_depth(node: Node) -> None:
    if node.attribute("mode", "DCR") != "DCR":
        raise InvalidArgument("only mode 'DCR' is supported")
    value, size = node.value(0), node.attribute("blocksize", 0)
    if len(value.shape) != 4 or size < 1 or value.shape[2] % size or value.shape[3] % size:
        raise InvalidArgument(f"blocks of {size} do not fit the shape {value.shape}")
    if value.dtype.kind != "f" or value.dtype == np.float64:
        return _space_to_blocks(node, node.operand(0), size)
    block = node.builder.int32(size)
    found = node.emit(Op.SPACE_TO_DEPTH, [node.operand(0), block, node.builder.boolean(True)])
    return node.result(found, node.shape(found))


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
