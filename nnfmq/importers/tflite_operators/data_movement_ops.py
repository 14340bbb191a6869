"""Operators that move elements and compute nothing: shapes, orders, paddings, repetitions, joins.

Axes are counted from the front. What is cut out of a tensor is in `slicing_ops`.
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite_file import Operator
from nnfmq.importers.tflite_operators.conversion import FLOATS, Rule, Translation
from nnfmq.importers.tflite_operators.options import as_they_are, axis_of, no_activation, size_of

__all__ = ["RULES", "broadcast"]

_ELEMENTS = {
    OperandType.TENSOR_FLOAT32: "<f4",
    OperandType.TENSOR_FLOAT16: "<f2",
    OperandType.TENSOR_QUANT8_ASYMM: "u1",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "i1",
}


def broadcast(graph: Translation, index: int, shape: tuple[int, ...]) -> int:
    """Return tensor `index` repeated to `shape`, by RESHAPE and TILE where it is smaller."""
    tensor = graph.file.tensor(index)
    value = graph.value(index)
    if tensor.shape == shape:
        return value
    extents = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
    if len(extents) != len(shape) or any(e not in (1, wanted) for e, wanted in zip(extents, shape, strict=True)):
        raise InvalidArgument(f"{tensor} of shape {list(tensor.shape)} cannot be repeated to {list(shape)}")
    if extents != tensor.shape:
        ranked = graph.temporary(tensor, extents)
        graph.builder.operation(OperationType.RESHAPE, [value, graph.builder.int32_vector(extents)], ranked)
        value = ranked
    multiples = [1 if e == wanted else wanted for e, wanted in zip(extents, shape, strict=True)]
    repeated = graph.temporary(tensor, shape)
    graph.builder.operation(OperationType.TILE, [value, graph.builder.int32_vector(multiples)], repeated)
    return repeated


def scalar(graph: Translation, index: int) -> int:
    """Return a constant of one element as the scalar that NNAPI takes for it: a code is an INT32."""
    tensor = graph.file.tensor(index)
    if tensor.type == OperandType.TENSOR_INT32:
        return graph.builder.int32(graph.one_int(index))
    if tensor.data is None or tensor.shape != (1,) or tensor.type not in _ELEMENTS:
        raise InvalidArgument(f"{tensor} must be a constant of one element")
    value = np.frombuffer(tensor.data, _ELEMENTS[tensor.type])[0]
    if tensor.type in FLOATS:
        return graph.builder.float_scalar(tensor.type, float(value))
    return graph.builder.int32(int(value))


def _reshape(graph: Translation, operator: Operator) -> None:
    x = graph.value(operator.inputs[0])
    graph.emit(OperationType.RESHAPE, operator, x, _new_shape(graph, operator))


def _new_shape(graph: Translation, operator: Operator) -> int:
    """Return the shape argument: the second input if that is a constant, else the option, else the output's own shape.

    A shape that the model computes is that of the output in the file, as far as the file knows it.
    """
    y = graph.file.tensor(operator.outputs[0])
    if len(operator.inputs) == 2 and operator.inputs[1] != -1:
        shape = graph.file.tensor(operator.inputs[1])
        if shape.type != OperandType.TENSOR_INT32:
            raise InvalidArgument(f"{shape} is {shape.type.name}: a shape must be INT32")
        if shape.shape != (0,) and (shape.data is not None or not y.shape):
            return graph.value(shape.index)
    options = operator.options
    wanted = options.NewShapeAsNumpy().tolist() if options is not None and options.NewShapeLength() else []
    return graph.builder.int32_vector(wanted or y.shape or (1,))


def _squeeze(graph: Translation, operator: Operator) -> None:
    x = graph.value(operator.inputs[0])
    rank = len(graph.builder[x].dimensions)
    options = operator.options
    axes = options.SqueezeDimsAsNumpy().tolist() if options is not None and options.SqueezeDimsLength() else []
    if any(not -rank <= axis < rank for axis in axes):
        raise InvalidArgument(f"squeeze dimensions {axes[:8]} are not all in {-rank}..{rank - 1}")
    positive = [axis % rank for axis in axes]
    omitted_or_axes = (
        graph.builder.int32_vector(positive) if positive else graph.builder.omitted(OperandType.TENSOR_INT32)
    )
    graph.emit(OperationType.SQUEEZE, operator, x, omitted_or_axes)


def _expand_dims(graph: Translation, operator: Operator) -> None:
    x = graph.value(operator.inputs[0])
    axis = axis_of(graph.one_int(operator.inputs[1]), len(graph.builder[x].dimensions) + 1)
    graph.emit(OperationType.EXPAND_DIMS, operator, x, graph.builder.int32(axis))


def _padv2(graph: Translation, operator: Operator) -> None:
    x, paddings = map(graph.value, operator.inputs[:2])
    graph.emit(OperationType.PAD_V2, operator, x, paddings, scalar(graph, operator.inputs[2]))


def _mirror_pad(graph: Translation, operator: Operator) -> None:
    x, paddings = map(graph.value, operator.inputs)
    graph.emit(OperationType.MIRROR_PAD, operator, x, paddings, graph.builder.int32(operator.options.Mode()))


def _concatenation(graph: Translation, operator: Operator) -> None:
    no_activation(operator)
    values = [graph.value(index) for index in operator.inputs]
    axis = axis_of(operator.options.Axis(), len(graph.builder[values[0]].dimensions))
    graph.emit(OperationType.CONCATENATION, operator, *values, graph.builder.int32(axis))


def _pack(graph: Translation, operator: Operator) -> None:
    values = [graph.value(index) for index in operator.inputs]
    axis = axis_of(operator.options.Axis(), len(graph.builder[values[0]].dimensions) + 1)
    graph.emit(OperationType.PACK, operator, graph.builder.int32(axis), *values)


def _broadcast_to(graph: Translation, operator: Operator) -> None:
    shape = tuple(size_of(graph, operator.inputs[1], graph.file.tensor(operator.outputs[0]).shape))
    repeated = broadcast(graph, operator.inputs[0], shape)
    graph.emit(OperationType.RESHAPE, operator, repeated, graph.builder.int32_vector(shape))


def _fill(graph: Translation, operator: Operator) -> None:
    stated = graph.file.tensor(operator.outputs[0]).shape
    is_computed = bool(stated) and graph.file.tensor(operator.inputs[0]).data is None
    shape = graph.builder.int32_vector(stated) if is_computed else graph.value(operator.inputs[0])
    graph.emit(OperationType.FILL, operator, shape, scalar(graph, operator.inputs[1]))


_ONE, _TWO, _THREE = range(1, 2), range(2, 3), range(3, 4)
_MANY = range(1, 1 << 16)

RULES: dict[str, Rule] = {
    "BROADCAST_TO": Rule(_TWO, _broadcast_to),
    "CONCATENATION": Rule(_MANY, _concatenation, "ConcatenationOptions", True),
    "EXPAND_DIMS": Rule(_TWO, _expand_dims),
    "FILL": Rule(_TWO, _fill),
    "MIRROR_PAD": Rule(_TWO, _mirror_pad, "MirrorPadOptions", True),
    "PACK": Rule(_MANY, _pack, "PackOptions", True),
    "PAD": Rule(_TWO, as_they_are(OperationType.PAD)),
    "PADV2": Rule(_THREE, _padv2),
    "RESHAPE": Rule(range(1, 3), _reshape, "ReshapeOptions"),
    "REVERSE_V2": Rule(_TWO, as_they_are(OperationType.REVERSE)),
    "SQUEEZE": Rule(_ONE, _squeeze, "SqueezeOptions"),
    "TILE": Rule(_TWO, as_they_are(OperationType.TILE)),
    "TRANSPOSE": Rule(_TWO, as_they_are(OperationType.TRANSPOSE)),
}
