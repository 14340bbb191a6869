"""Operators that select parts of a tensor: slices, splits, gathers and lookups."""

from __future__ import annotations

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TfliteOperation, operation_code
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite_file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite_operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.options import emit_reshape, normalized_axis, passthrough

__all__ = ["CONVERTERS"]

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


_TWO, _THREE = range(2, 3), range(3, 4)
_SOME = range(1, 1 << 16)

CONVERTERS: dict[str, OpConverter] = {
    "EMBEDDING_LOOKUP": OpConverter(_TWO, _embedding_lookup),
    "GATHER": OpConverter(_TWO, _gather, "GatherOptions"),
    "HASHTABLE_LOOKUP": OpConverter(_THREE, _hashtable_lookup, output_counts=_TWO),
    "SLICE": OpConverter(_THREE, passthrough(OperationType.SLICE)),
    "SPLIT": OpConverter(_TWO, _split, output_counts=_SOME),
    "SPLIT_V": OpConverter(_THREE, _split_v, output_counts=_SOME),
    "STRIDED_SLICE": OpConverter(range(4, 5), _strided_slice, "StridedSliceOptions", True),
    "UNPACK": OpConverter(range(1, 2), _unpack, "UnpackOptions", True, _SOME),
}
