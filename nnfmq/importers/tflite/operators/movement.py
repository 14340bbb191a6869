"""Operators that move or select elements: reshapes, permutations, padding, slices, gathers and lookups.

Axes become non-negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_INT64, TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import (
    FLOAT_TYPES,
    INTEGERS,
    ConversionContext,
    OpConverter,
    computed_size,
)
from nnfmq.importers.tflite.operators.options import (
    emit_reshape,
    no_activation,
    normalized_axis,
    passthrough,
    size_argument,
)

__all__ = ["CONVERTERS", "broadcast"]

_ELEMENTS = {
    OperandType.TENSOR_FLOAT32: "<f4",
    OperandType.TENSOR_FLOAT16: "<f2",
    OperandType.TENSOR_QUANT8_ASYMM: "u1",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "i1",
    OperandType.TENSOR_QUANT16_SYMM: "<i2",
}


def broadcast(context: ConversionContext, index: int, shape: tuple[int, ...]) -> int:
    """Return tensor `index` broadcast to `shape`, with RESHAPE and TILE if it is smaller."""
    tensor = context.file.tensor(index)
    value = context.value(index)
    if tensor.shape == (shape or (1,)):
        return value
    dimensions = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
    if len(dimensions) != len(shape) or any(e not in (1, wanted) for e, wanted in zip(dimensions, shape, strict=True)):
        raise InvalidArgument(f"{tensor} of shape {list(tensor.shape)} cannot be repeated to {list(shape)}")
    if dimensions != tensor.shape:
        ranked = context.temporary(tensor, dimensions)
        context.builder.operation(OperationType.RESHAPE, [value, context.builder.int32_vector(dimensions)], ranked)
        value = ranked
    multiples = [1 if e == wanted else wanted for e, wanted in zip(dimensions, shape, strict=True)]
    repeated = context.temporary(tensor, shape)
    context.builder.operation(OperationType.TILE, [value, context.builder.int32_vector(multiples)], repeated)
    return repeated


def scalar(context: ConversionContext, index: int) -> int:
    """Return a constant of one element as a scalar operand; a quantized value becomes an INT32."""
    tensor = context.file.tensor(index)
    if tensor.type == OperandType.TENSOR_INT32:
        return context.builder.int32(context.one_int(index))
    if tensor.type == TENSOR_INT64:
        raise InvalidArgument(f"{tensor} is INT64, which is not supported here")
    if tensor.data is None or tensor.shape != (1,) or tensor.type not in _ELEMENTS:
        raise InvalidArgument(f"{tensor} must be a constant of one element")
    value = np.frombuffer(tensor.data, _ELEMENTS[tensor.type])[0]
    if tensor.type in FLOAT_TYPES:
        return context.builder.float_scalar(tensor.type, float(value))
    return context.builder.int32(int(value))


def _reshape(context: ConversionContext, operator: TfliteOperator) -> None:
    x = context.value(operator.inputs[0])
    context.emit(OperationType.RESHAPE, operator, x, _new_shape(context, operator))


def _new_shape(context: ConversionContext, operator: TfliteOperator) -> int:
    """Return the shape argument: the second input if that is a constant, else the option, else the output's own shape.

    A shape that follows from others is that of the output in the file, as far as the file knows it.
    """
    y = context.file.tensor(operator.outputs[0])
    if y.index in context.resized_shapes:
        return context.builder.int32_vector(context.resized_shapes[y.index])
    if len(operator.inputs) == 2 and operator.inputs[1] != -1:
        shape = context.file.tensor(operator.inputs[1])
        if shape.type not in INTEGERS:
            raise InvalidArgument(f"{shape} is {shape.type.name}: a shape must be INT32 or INT64")
        if shape.shape != (0,) and (computed_size(context.file, operator) is None or not y.shape):
            return context.value(shape.index)
    options = operator.options
    wanted = options.NewShapeAsNumpy().tolist() if options is not None and options.NewShapeLength() else []
    return context.builder.int32_vector(wanted or y.shape or (1,))


def _squeeze(context: ConversionContext, operator: TfliteOperator) -> None:
    x = context.value(operator.inputs[0])
    rank = len(context.builder[x].dimensions)
    options = operator.options
    axes = options.SqueezeDimsAsNumpy().tolist() if options is not None and options.SqueezeDimsLength() else []
    if any(not -rank <= axis < rank for axis in axes):
        raise InvalidArgument(f"squeeze dimensions {axes[:8]} are not all in {-rank}..{rank - 1}")
    positive = [axis % rank for axis in axes]
    omitted_or_axes = (
        context.builder.int32_vector(positive) if positive else context.builder.omitted(OperandType.TENSOR_INT32)
    )
    context.emit(OperationType.SQUEEZE, operator, x, omitted_or_axes)


def _expand_dims(context: ConversionContext, operator: TfliteOperator) -> None:
    x = context.value(operator.inputs[0])
    if context.file.tensor(operator.inputs[0]).rank == 0 and context.builder[x].dimensions == (1,):
        return emit_reshape(context, operator, x, (1,))
    axis = normalized_axis(context.one_int(operator.inputs[1]), len(context.builder[x].dimensions) + 1)
    return context.emit(OperationType.EXPAND_DIMS, operator, x, context.builder.int32(axis))


def _padv2(context: ConversionContext, operator: TfliteOperator) -> None:
    x, paddings = map(context.value, operator.inputs[:2])
    value = context.file.tensor(operator.inputs[2])
    if value.type == TENSOR_INT64 and value.data is not None and context.one_int(value.index) == 0:
        return context.emit(OperationType.PAD, operator, x, paddings)
    return context.emit(OperationType.PAD_V2, operator, x, paddings, scalar(context, operator.inputs[2]))


def _mirror_pad(context: ConversionContext, operator: TfliteOperator) -> None:
    x, paddings = map(context.value, operator.inputs)
    context.emit(OperationType.MIRROR_PAD, operator, x, paddings, context.builder.int32(operator.options.Mode()))


def _concatenation(context: ConversionContext, operator: TfliteOperator) -> None:
    no_activation(operator)
    values = [context.value(index) for index in operator.inputs if not context.file.tensor(index).is_empty]
    if not values:
        raise InvalidArgument("joins tensors without elements to one that has some")
    axis = normalized_axis(operator.options.Axis(), len(context.builder[values[0]].dimensions))
    context.emit(OperationType.CONCATENATION, operator, *values, context.builder.int32(axis))


def _pack(context: ConversionContext, operator: TfliteOperator) -> None:
    values = [context.value(index) for index in operator.inputs]
    if all(context.file.tensor(index).rank == 0 for index in operator.inputs):  # of operands of shape (1,)
        return context.emit(OperationType.CONCATENATION, operator, *values, context.builder.int32(0))
    axis = normalized_axis(operator.options.Axis(), len(context.builder[values[0]].dimensions) + 1)
    return context.emit(OperationType.PACK, operator, context.builder.int32(axis), *values)


def _broadcast_to(context: ConversionContext, operator: TfliteOperator) -> None:
    shape = tuple(size_argument(context, operator, 1))
    repeated = broadcast(context, operator.inputs[0], shape)
    context.emit(OperationType.RESHAPE, operator, repeated, context.builder.int32_vector(shape))


def _fill(context: ConversionContext, operator: TfliteOperator) -> None:
    declared = context.file.tensor(operator.outputs[0]).shape
    is_computed = bool(declared) and computed_size(context.file, operator) is not None
    if is_computed:
        declared = tuple(size_argument(context, operator, 0))
    value = context.file.tensor(operator.inputs[1])
    is_known = is_computed or context.file.tensor(operator.inputs[0]).data is not None
    if is_known and (value.type == TENSOR_INT64 or value.data is None):
        return _tiled(context, operator, value, declared if is_computed else context.ints(operator.inputs[0]) or (1,))
    shape = context.builder.int32_vector(declared) if is_computed else context.value(operator.inputs[0])
    return context.emit(OperationType.FILL, operator, shape, scalar(context, operator.inputs[1]))


def _tiled(
    context: ConversionContext, operator: TfliteOperator, value: TfliteTensor, dimensions: Sequence[int]
) -> None:
    """Convert FILL to the repetition of one element."""
    one = context.temporary(value, (1,) * len(dimensions))
    ones = context.builder.int32_vector([1] * len(dimensions))
    context.builder.operation(OperationType.RESHAPE, [context.value(value.index), ones], one)
    context.emit(OperationType.TILE, operator, one, context.builder.int32_vector(dimensions))


def _densify(context: ConversionContext, operator: TfliteOperator) -> None:
    """Copy a constant that became dense when it was read; folding does that for all but outputs of the model."""
    x = context.file.tensor(operator.inputs[0])
    emit_reshape(context, operator, context.value(x.index), x.shape)


def _transpose(context: ConversionContext, operator: TfliteOperator) -> None:
    x = context.value(operator.inputs[0])
    context.emit(OperationType.TRANSPOSE, operator, x, _from_the_start(context, operator))


def _reverse(context: ConversionContext, operator: TfliteOperator) -> None:
    axes = context.file.tensor(operator.inputs[1])
    if axes.data is None and axes.shape != (1,):
        raise InvalidArgument(f"{axes} must be a constant, or one axis")
    if axes.data is None or len(context.ints(axes.index)) == 1:
        axis = _from_the_start(context, operator)
        return context.emit(OperationType.REVERSE, operator, context.value(operator.inputs[0]), axis)
    x = context.file.tensor(operator.inputs[0])
    *first, last = dict.fromkeys(normalized_axis(axis, len(x.shape)) for axis in context.ints(axes.index))
    value = context.value(x.index)
    for axis in first:
        reversed_value = context.temporary(x, x.shape)
        context.builder.operation(OperationType.REVERSE, [value, context.builder.int32_vector([axis])], reversed_value)
        value = reversed_value
    return context.emit(OperationType.REVERSE, operator, value, context.builder.int32_vector([last]))


def _from_the_start(context: ConversionContext, operator: TfliteOperator) -> int:
    """Return axes, the second input, as indices from 0 up."""
    rank, axes = len(context.file.tensor(operator.inputs[0]).shape), context.file.tensor(operator.inputs[1])
    if not rank:  # or an unknown one
        return context.value(axes.index)
    if axes.data is not None:
        return context.builder.int32_vector([normalized_axis(axis, rank) for axis in context.ints(axes.index)])
    found = context.builder.operand(Operand(OperandType.TENSOR_INT32, axes.shape))
    count = context.builder.int32_vector([rank])
    context.builder.operation(operation_code(TfliteOperation.FLOOR_MOD), [context.value(axes.index), count], found)
    return found


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)
_MANY = range(1, 1 << 16)

_DATA_MOVEMENT_CONVERTERS: dict[str, OpConverter] = {
    "BROADCAST_TO": OpConverter(_TWO, _broadcast_to),
    "CONCATENATION": OpConverter(_MANY, _concatenation, "ConcatenationOptions", True),
    "DENSIFY": OpConverter(_ONE, _densify),
    "EXPAND_DIMS": OpConverter(_TWO, _expand_dims),
    "FILL": OpConverter(_TWO, _fill),
    "MIRROR_PAD": OpConverter(_TWO, _mirror_pad, "MirrorPadOptions", True),
    "PACK": OpConverter(_MANY, _pack, "PackOptions", True),
    "PAD": OpConverter(_TWO, passthrough(OperationType.PAD)),
    "PADV2": OpConverter(_THREE, _padv2),
    "RESHAPE": OpConverter(range(1, 3), _reshape, "ReshapeOptions"),
    "REVERSE_V2": OpConverter(_TWO, _reverse),
    "SQUEEZE": OpConverter(_ONE, _squeeze, "SqueezeOptions"),
    "TILE": OpConverter(_TWO, passthrough(OperationType.TILE)),
    "TRANSPOSE": OpConverter(_TWO, _transpose),
}


# ----------------------------------------------------------------------------------------------------------------------
# Operators that select parts of a tensor: slices, splits, gathers and lookups.


_FEW = 8  # TFLite's highest rank


class _Strides(Struct):
    """The arguments of a STRIDED_SLICE: one element, and one bit of the masks, for each dimension."""

    begin: list[int]
    end: list[int]
    strides: list[int]
    begin_mask: int
    end_mask: int

    def take_whole(self, rank: int) -> None:
        """Append the dimensions for which there are no arguments."""
        rest = rank - len(self.begin)
        added = ((1 << rest) - 1) << len(self.begin)
        self.begin, self.end, self.strides = self.begin + [0] * rest, self.end + [0] * rest, self.strides + [1] * rest
        self.begin_mask, self.end_mask = self.begin_mask | added, self.end_mask | added

    def take_one(self, axis: int, dimension: int) -> None:
        """Select only the element at `begin`: TFLite's meaning of a shrunk dimension, regardless of its end."""
        begin = 0 if self.begin_mask & (1 << axis) else self.begin[axis]
        begin += dimension if begin < 0 else 0
        self.begin[axis], self.end[axis], self.strides[axis] = begin, begin + 1, 1
        self.begin_mask, self.end_mask = self.begin_mask & ~(1 << axis), self.end_mask & ~(1 << axis)


def _strided_slice(context: ConversionContext, operator: TfliteOperator) -> None:
    options, x = operator.options, context.file.tensor(operator.inputs[0])
    if options.EllipsisMask() or options.NewAxisMask() or options.Offset():
        return _strided_slice_of_entries(context, operator)
    begin, end, strides = (context.ints(index, _FEW) for index in operator.inputs[1:])
    rank, shrunk = len(x.shape), options.ShrinkAxisMask()
    if len(begin) > rank or not len(begin) == len(end) == len(strides):
        raise InvalidArgument(f"begin, end and strides of {len(begin)}, {len(end)} and {len(strides)} for rank {rank}")
    taken = _Strides(begin, end, strides, options.BeginMask(), options.EndMask())
    taken.take_whole(rank)
    axes = [axis for axis in range(rank) if shrunk & (1 << axis)]
    for axis in axes:
        taken.take_one(axis, x.shape[axis])
    arguments = [context.builder.int32_vector(values) for values in (taken.begin, taken.end, taken.strides)]
    arguments += [context.builder.int32(mask) for mask in (taken.begin_mask, taken.end_mask, shrunk)]
    shape = (1,) if len(axes) == rank else ()
    return context.emit(OperationType.STRIDED_SLICE, operator, context.value(x.index), *arguments, shape=shape)


def _strided_slice_of_entries(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert a slice with an ellipsis, new axes or ends relative to their begins: slice every dimension, then RESHAPE.

    Entry i of begin, end and strides is not for dimension i here.
    """
    options, x = operator.options, context.file.tensor(operator.inputs[0])
    begin, end, strides = (context.ints(index, _FEW) for index in operator.inputs[1:])
    masks = (options.EllipsisMask(), options.NewAxisMask(), options.ShrinkAxisMask())
    count, rank = len(begin), len(x.shape)
    if not count == len(end) == len(strides) or 0 in strides or 0 in x.shape:
        raise InvalidArgument(f"begin, end and strides of {count}, {len(end)} and {len(strides)}, or a stride of 0")
    ellipsis, new, shrunk = ([bool(mask >> entry & 1) for entry in range(count)] for mask in masks)
    taken = sum(not (e or n) for e, n in zip(ellipsis, new, strict=True))
    if sum(ellipsis) > 1 or taken > rank:
        raise InvalidArgument(f"{taken} slices and {sum(ellipsis)} ellipses for rank {rank}")
    slices: list[slice] = []
    shape: list[int] = []
    for entry in range(count):
        if ellipsis[entry]:
            whole = range(len(slices), len(slices) + rank - taken)
            shape += [x.shape[axis] for axis in whole]
            slices += [slice(0, x.shape[axis], 1) for axis in whole]
        elif new[entry]:
            shape.append(1)
        else:
            extent = x.shape[len(slices)]
            first = None if options.BeginMask() >> entry & 1 else begin[entry]
            last = None if options.EndMask() >> entry & 1 else end[entry] + (begin[entry] if options.Offset() else 0)
            slices.append(_one(first, extent) if shrunk[entry] else _box(first, last, strides[entry], extent))
            shape += [] if shrunk[entry] else [len(range(slices[-1].start, slices[-1].stop, slices[-1].step))]
    rest = x.shape[len(slices) :]
    shape, slices = [*shape, *rest], [*slices, *(slice(0, extent, 1) for extent in rest)]
    _emit_box(context, operator, slices, tuple(shape) or (1,))


def _one(first: int | None, extent: int) -> slice:
    start = (first or 0) + (extent if (first or 0) < 0 else 0)
    if not 0 <= start < extent:
        raise InvalidArgument(f"element {first} of a dimension of {extent}")
    return slice(start, start + 1, 1)


def _box(first: int | None, last: int | None, stride: int, extent: int) -> slice:
    """Return a slice without open or negative ends; -1 as stop means that the first element is the last one."""
    return slice(*slice(first, last, stride).indices(extent))


def _emit_box(
    context: ConversionContext, operator: TfliteOperator, slices: list[slice], shape: tuple[int, ...]
) -> None:
    x = context.file.tensor(operator.inputs[0])
    sizes = tuple(len(range(s.start, s.stop, s.step)) for s in slices)
    if 0 in sizes:
        raise InvalidArgument("a slice without elements is not supported")
    # A stop before the first element cannot be written as an index: the mask means it.
    open_ends = sum(1 << axis for axis, s in enumerate(slices) if s.stop < 0)
    vectors = [[getattr(s, name) for s in slices] for name in ("start", "stop", "step")]
    arguments = [context.builder.int32_vector(values) for values in vectors]
    arguments += [context.builder.int32(mask) for mask in (0, open_ends, 0)]
    part = context.temporary(x, sizes)
    context.builder.operation(OperationType.STRIDED_SLICE, [context.value(x.index), *arguments], part)
    emit_reshape(context, operator, part, shape)


def _split(context: ConversionContext, operator: TfliteOperator) -> None:
    x = context.file.tensor(operator.inputs[1])
    axis = normalized_axis(context.one_int(operator.inputs[0]), len(x.shape))
    _equal_parts(context, x, axis, [context.result(index) for index in operator.outputs])


def _equal_parts(context: ConversionContext, x: TfliteTensor, axis: int, parts: list[int]) -> None:
    arguments = [context.value(x.index), context.builder.int32(axis), context.builder.int32(len(parts))]
    context.builder.operation(OperationType.SPLIT, arguments, *parts)


def _split_v(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert to one SLICE for each part; one of the sizes may be -1, for the remainder."""
    x = context.file.tensor(operator.inputs[0])
    sizes = context.ints(operator.inputs[1], len(operator.outputs))
    axis = normalized_axis(context.one_int(operator.inputs[2]), len(x.shape))
    if len(sizes) != len(operator.outputs) or sizes.count(-1) > 1:
        raise InvalidArgument(
            f"{len(sizes)} sizes, {sizes.count(-1)} of them open, for {len(operator.outputs)} outputs"
        )
    known = sum(size for size in sizes if size != -1)
    start, value = 0, context.value(x.index)
    for index, size in zip(operator.outputs, sizes, strict=True):
        dimension = x.shape[axis] - known if size == -1 else size
        begin, extents = [0] * len(x.shape), list(x.shape)
        begin[axis], extents[axis] = start, dimension
        if not dimension:
            context.file.set_value(index, b"", tuple(extents))
            continue
        vectors = [context.builder.int32_vector(values) for values in (begin, extents)]
        context.builder.operation(OperationType.SLICE, [value, *vectors], context.result(index))
        start += dimension


def _unpack(context: ConversionContext, operator: TfliteOperator) -> None:
    """Write it as SPLIT into parts of extent 1, and a RESHAPE of each."""
    x = context.file.tensor(operator.inputs[0])
    axis = normalized_axis(operator.options.Axis(), len(x.shape))
    thin, final = ((*x.shape[:axis], *one, *x.shape[axis + 1 :]) for one in ((1,), ()))
    parts = [context.temporary(x, thin) for _ in operator.outputs]
    _equal_parts(context, x, axis, parts)
    shape = context.builder.int32_vector(final or (1,))
    for part, index in zip(parts, operator.outputs, strict=True):
        context.builder.operation(OperationType.RESHAPE, [part, shape], context.result(index, final or (1,)))


def _gather(context: ConversionContext, operator: TfliteOperator) -> None:
    x, indices = (context.file.tensor(index) for index in operator.inputs)
    options = operator.options
    axis = normalized_axis(options.Axis() if options is not None else 0, len(x.shape))
    if options is not None and options.BatchDims():
        return _gather_in_batches(context, operator, axis)
    arguments = [context.value(x.index), context.builder.int32(axis), context.value(indices.index)]
    if indices.rank:
        return context.emit(OperationType.GATHER, operator, *arguments)
    # An index of rank 0 removes a dimension. An operand has at least one, so a RESHAPE removes the gathered dimension.
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    row = context.temporary(x, (*before, 1, *after))
    context.builder.operation(OperationType.GATHER, arguments, row)
    return emit_reshape(context, operator, row, (*before, *after) or (1,))


def _gather_in_batches(context: ConversionContext, operator: TfliteOperator, axis: int) -> None:
    x, indices = (context.file.tensor(index) for index in operator.inputs)
    count = normalized_axis(operator.options.BatchDims(), len(indices.shape) + 1)
    if count > axis:
        raise InvalidArgument(f"{count} batch dimensions before axis {axis} are not possible")
    numbers = [context.builder.int32(number) for number in (axis, count)]
    arguments = [context.value(x.index), numbers[0], context.value(indices.index), numbers[1]]
    context.emit(operation_code(TfliteOperation.BATCH_GATHER), operator, *arguments)


def _embedding_lookup(context: ConversionContext, operator: TfliteOperator) -> None:
    """Dequantize quantized rows after they are looked up; before, if each has a scale of its own."""
    lookups, values = operator.inputs
    table, y = context.file.tensor(values), context.file.tensor(operator.outputs[0])
    arguments = [context.value(lookups)]
    if table.type == y.type or y.type != OperandType.TENSOR_FLOAT32:
        return context.emit(OperationType.EMBEDDING_LOOKUP, operator, *arguments, context.value(values))
    if table.channel_quant is not None:
        return context.emit(OperationType.EMBEDDING_LOOKUP, operator, *arguments, context.dequantized_constant(table))
    if table.type != OperandType.TENSOR_QUANT8_ASYMM_SIGNED or table.zero_point != 0:  # TFLite reads INT8 without one
        raise InvalidArgument(f"{table} must be INT8 with zero point 0 for a result of FLOAT32")
    rows = context.temporary(table, y.shape)
    context.builder.operation(OperationType.EMBEDDING_LOOKUP, [*arguments, context.value(values)], rows)
    return context.emit(OperationType.DEQUANTIZE, operator, rows)


def _hashtable_lookup(context: ConversionContext, operator: TfliteOperator) -> None:
    values = [context.value(index) for index in operator.inputs]
    results = [context.result(index) for index in operator.outputs]
    context.builder.operation(OperationType.HASHTABLE_LOOKUP, values, *results)


_SLICED_BY_TWO, _SLICED_BY_THREE = range(2, 3), range(3, 4)
_SOME = range(1, 1 << 16)

_SLICING_CONVERTERS: dict[str, OpConverter] = {
    "EMBEDDING_LOOKUP": OpConverter(_SLICED_BY_TWO, _embedding_lookup),
    "GATHER": OpConverter(_SLICED_BY_TWO, _gather, "GatherOptions"),
    "HASHTABLE_LOOKUP": OpConverter(_SLICED_BY_THREE, _hashtable_lookup, output_counts=_SLICED_BY_TWO),
    "SLICE": OpConverter(_SLICED_BY_THREE, passthrough(OperationType.SLICE)),
    "SPLIT": OpConverter(_SLICED_BY_TWO, _split, output_counts=_SOME),
    "SPLIT_V": OpConverter(_SLICED_BY_THREE, _split_v, output_counts=_SOME),
    "STRIDED_SLICE": OpConverter(range(4, 5), _strided_slice, "StridedSliceOptions", True),
    "UNPACK": OpConverter(range(1, 2), _unpack, "UnpackOptions", True, _SOME),
}

CONVERTERS: dict[str, OpConverter] = {**_DATA_MOVEMENT_CONVERTERS, **_SLICING_CONVERTERS}
