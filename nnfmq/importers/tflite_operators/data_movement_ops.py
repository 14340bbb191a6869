"""Operators that only move data: reshapes, permutations, padding, tiling, concatenation.

Axes become non-negative. `slicing_ops` has the operators that select parts of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TENSOR_INT64, TfliteOperation, operation_code
from nnfmq.hal.types import Operand, OperandType
from nnfmq.importers.tflite_file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite_operators.conversion import FLOAT_TYPES, INTEGERS, ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.options import (
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

    A shape that the model computes is that of the output in the file, as far as the file knows it.
    """
    y = context.file.tensor(operator.outputs[0])
    if y.index in context.resized_shapes:
        return context.builder.int32_vector(context.resized_shapes[y.index])
    if len(operator.inputs) == 2 and operator.inputs[1] != -1:
        shape = context.file.tensor(operator.inputs[1])
        if shape.type not in INTEGERS:
            raise InvalidArgument(f"{shape} is {shape.type.name}: a shape must be INT32 or INT64")
        if shape.shape != (0,) and (shape.data is not None or not y.shape):
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
    shape = tuple(size_argument(context, operator.inputs[1], context.file.tensor(operator.outputs[0]).shape))
    repeated = broadcast(context, operator.inputs[0], shape)
    context.emit(OperationType.RESHAPE, operator, repeated, context.builder.int32_vector(shape))


def _fill(context: ConversionContext, operator: TfliteOperator) -> None:
    declared = context.file.tensor(operator.outputs[0]).shape
    is_computed = bool(declared) and context.file.tensor(operator.inputs[0]).data is None
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

CONVERTERS: dict[str, OpConverter] = {
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
