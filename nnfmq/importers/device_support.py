"""Check that a device can compute what an importer emits, so that `load` refuses a file and names the operator.

A driver makes the same checks when a model is prepared.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from msgspec import Struct

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import PREFIX, Scheme, extended_code, extension_prefix
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import CLAMPS, LifeTime, Operand, OperandType, Operation, PaddingScheme, is_scalar
from nnfmq.importers.graph_builder import GraphBuilder

__all__ = ["is_usual", "require_computable"]


# ----------------------------------------------------------------------------------------------------------------------
# Operations in the forms that most models have, which every device computes.
#
# `is_usual` recognizes them without the declarations of operations, whose import takes 25 ms and 1 MiB of an
# application. It may miss one, and the declarations then decide.


_FLOAT = OperandType.TENSOR_FLOAT32
_BYTES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_RANKS = range(1, 5)
_IMAGE = 4
_POOL_NUMBERS, _CONVOLUTION_NUMBERS = 6, 4
_Shape: TypeAlias = tuple[int, ...]


class _Given(Struct, frozen=True):
    """The shapes of an operation's tensors, the constant integers behind them, and the elements of the last tensor.

    `target` is empty unless that is a constant of integers.
    """

    shapes: Sequence[_Shape]
    numbers: Sequence[int]
    target: _Shape


def is_usual(builder: GraphBuilder, operation: Operation) -> bool:
    """Return True if an operation certainly has a kernel for its types, and a result of its output's shape."""
    count, rule = _RULES.get(operation.type, (0, _same))
    if not count or len(operation.outputs) != 1:
        return False
    inputs, y = [builder[index] for index in operation.inputs], builder[operation.outputs[0]]
    shapes = [operand.dimensions for operand in inputs if operand.dimensions]
    known = all(len(shape) in _RANKS and 0 not in shape for shape in (*shapes, y.dimensions))
    if len(shapes) != count or not known or not _have_usual_types(operation.type, inputs, y):
        return False
    if y.type in _BYTES and not _have_usual_scales(operation.type, inputs, y):
        return False
    constants = [(o.type, builder.content(i)) for o, i in zip(inputs, operation.inputs, strict=True) if _is_constant(o)]
    numbers = [number for kind, data in constants if kind == OperandType.INT32 for number in _numbers(data)]
    is_target = constants and constants[-1][0] == OperandType.TENSOR_INT32 and len(constants[-1][1]) <= 4 * _IMAGE
    return rule(_Given(shapes, numbers, _numbers(constants[-1][1]) if is_target else ())) == y.dimensions


def _is_constant(operand: Operand) -> bool:
    return operand.lifetime == LifeTime.CONSTANT_COPY


def _have_usual_types(code: OperationType, inputs: Sequence[Operand], y: Operand) -> bool:
    x = inputs[0]
    if code in _CONVERSIONS:
        return (x.type, y.type) in _CONVERSIONS[code]
    if x.type != y.type or x.type not in (_FLOAT, *_BYTES):
        return False
    return code not in _SAME_QUANTIZATION or _quantization(x) == _quantization(y)


def _have_usual_scales(code: OperationType, inputs: Sequence[Operand], y: Operand) -> bool:
    """Return whether quotients of scales are within the limits that requantization has, with much to spare."""
    if code in _FIXED_SCALES:
        return y.scale == _FIXED_SCALES[code]
    scales = [operand.scale for operand in inputs if operand.type in _BYTES]
    scales += [max(operand.channel_quant.scales) for operand in inputs if operand.channel_quant is not None]
    limit = y.scale * _LARGEST_QUOTIENT
    return max(scales, default=0.0) < limit and math.prod(scales) < (y.scale if code == _Codes.MUL else limit)


def _quantization(operand: Operand) -> tuple[OperandType, float, int]:
    return operand.type, operand.scale, operand.zero_point


def _numbers(data: bytes | memoryview) -> _Shape:
    return struct.unpack(f"<{len(data) // 4}i", data)


def _same(given: _Given) -> _Shape:
    return given.shapes[0]


def _reshaped(given: _Given) -> _Shape:
    is_whole = bool(given.target) and min(given.target) > 0 and math.prod(given.target) == math.prod(given.shapes[0])
    return given.target if is_whole else ()


def _broadcast(given: _Given) -> _Shape:
    first, second = given.shapes
    return first if second in (first, first[-1:], (1,)) else ()


def _rows(given: _Given) -> _Shape:
    x, weights, bias = given.shapes
    fits = len(x) > 1 and len(weights) == 2 and bias == weights[:1] and math.prod(x) % weights[1] == 0
    return (math.prod(x) // weights[1], weights[0]) if fits else ()


def _windows(x: _Shape, kernel: Sequence[int], numbers: Sequence[int], channels: int) -> _Shape:
    scheme, stride_width, stride_height = numbers[:3]
    found = [x[0]]
    for size, window, stride in ((x[1], kernel[0], stride_height), (x[2], kernel[1], stride_width)):
        if stride < 1 or window < 1 or window > size:
            return ()
        found.append(-(-(size if scheme == PaddingScheme.SAME else size - window + 1) // stride))
    return (*found, channels)


def _pooled(given: _Given) -> _Shape:
    """Of an image, the padding scheme, strides, the filter's width and height, and the activation."""
    x, numbers = given.shapes[0], given.numbers
    if len(x) != _IMAGE or len(numbers) != _POOL_NUMBERS:
        return ()
    return _windows(x, (numbers[4], numbers[3]), numbers, x[3])


def _convolved(given: _Given, *, is_depthwise: bool) -> _Shape:
    """Of an image, a filter, a bias, the padding scheme, strides, a multiplier if depthwise, and the activation."""
    x, filter, bias = given.shapes
    if not len(x) == len(filter) == _IMAGE or len(given.numbers) != _CONVOLUTION_NUMBERS + is_depthwise:
        return ()
    channels = filter[3] if is_depthwise else filter[0]
    depth = (1, x[3] * given.numbers[3]) if is_depthwise else (filter[0], x[3])
    fits = (filter[0], filter[3]) == depth and bias == (channels,)
    return _windows(x, filter[1:3], given.numbers, channels) if fits else ()


_Codes = OperationType
_FIXED_SCALES = {_Codes.LOGISTIC: 1 / 256, _Codes.SOFTMAX: 1 / 256, _Codes.TANH: 1 / 128}
_LARGEST_QUOTIENT = 2.0**15
_RULES: Mapping[OperationType, tuple[int, Callable[[_Given], _Shape]]] = {
    **dict.fromkeys((_Codes.DEQUANTIZE, _Codes.LOGISTIC, _Codes.QUANTIZE, *CLAMPS), (1, _same)),
    **dict.fromkeys((_Codes.SOFTMAX, _Codes.TANH), (1, _same)),
    **dict.fromkeys((_Codes.ADD, _Codes.MUL, _Codes.SUB), (2, _broadcast)),
    **dict.fromkeys((_Codes.AVERAGE_POOL_2D, _Codes.MAX_POOL_2D), (1, _pooled)),
    _Codes.CONV_2D: (3, partial(_convolved, is_depthwise=False)),
    _Codes.DEPTHWISE_CONV_2D: (3, partial(_convolved, is_depthwise=True)),
    _Codes.FULLY_CONNECTED: (3, _rows),
    _Codes.RESHAPE: (2, _reshaped),
}
"""The number of an operation's tensors, and the shape of its result; () if it is not a usual one."""
_SAME_QUANTIZATION = (_Codes.AVERAGE_POOL_2D, _Codes.MAX_POOL_2D, _Codes.RESHAPE, *CLAMPS)
_CONVERSIONS = {
    _Codes.DEQUANTIZE: [(kind, _FLOAT) for kind in _BYTES],
    _Codes.QUANTIZE: [(_FLOAT, kind) for kind in _BYTES],
}


# ----------------------------------------------------------------------------------------------------------------------
# Check that a device can compute what an importer emits, so that `load` refuses a file and names the operator.


_FEW_ELEMENTS = 1 << 14
_USUAL_SCALES = (2.0**-24, 2.0**4)
_CALLS = (OperationType.IF, OperationType.WHILE)
_CASTS = (OperationType.CAST, extended_code(OperationType.CAST, Scheme.WIDER))


def require_computable(builder: GraphBuilder, begin: int) -> None:
    """Require that a device can compute each operation from `begin` on: its types, shapes and attributes.

    Results of unknown shape get that which follows from the inputs. Sizes that follow from data become unknown,
    whatever the file states: each execution decides them. The results of what reads such a one must be unknown, too:
    its conversion may rely on what the file states. Operations of other people's extensions are not checked: only the
    driver knows them.

    Raises:
        InvalidArgument: If an operation violates a rule; the message says which.
    """
    for operation in builder.operations[begin:]:
        is_known = extension_prefix(operation.type) in (0, PREFIX) and operation.type not in _CALLS
        if is_known and not is_usual(builder, operation):
            inputs, outputs = ([builder[index] for index in each] for each in (operation.inputs, operation.outputs))
            _require_match(operation, inputs, outputs)
            if not any(map(_is_unknown, inputs)):
                _find_shapes(builder, operation, outputs)
                _require_plan(builder, operation)
            elif not builder.sized_by_data.isdisjoint(operation.inputs):  # others are of operators with problems
                _require_unknown(builder, operation)


def _require_match(operation: Operation, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    from nnfmq.operations import REGISTRY
    from nnfmq.operations.declaration import match

    try:
        found = match(REGISTRY[operation.type], inputs, outputs)
    except InvalidArgument as error:
        raise InvalidArgument(f"no device can take its types: {operation.type.name}: {error}") from None
    if found.variant.plan is None:
        kinds = ", ".join(operand.type.name for operand in inputs)
        raise InvalidArgument(f"no device computes {operation.type.name} of {kinds}")


def _find_shapes(builder: GraphBuilder, operation: Operation, outputs: Sequence[Operand]) -> None:
    try:
        shapes = builder.output_shapes(operation)
    except InvalidArgument:  # they depend on the data
        shapes = [(0,) * len(operand.dimensions) for operand in outputs]
    except GeneralFailure as error:
        raise InvalidArgument(f"no device can compute it: {operation.type.name}: {error}") from None
    for index, operand, shape in zip(operation.outputs, outputs, shapes, strict=True):
        if _is_unknown(operand) or 0 in shape:
            builder.set_dimensions(index, shape)
        if 0 in shape or not shape:
            builder.sized_by_data.add(index)


def _require_unknown(builder: GraphBuilder, operation: Operation) -> None:
    """Require that the results of an operation on tensors of unknown sizes are unknown, too; those of a CAST become so.

    Raises:
        InvalidArgument: If the file states the shape of one.
    """
    builder.sized_by_data.update(operation.outputs)
    if operation.type in _CASTS:
        return builder.set_dimensions(operation.outputs[0], builder[operation.inputs[0]].dimensions)
    if not all(_is_unknown(builder[index]) for index in operation.outputs):
        raise InvalidArgument("the shape of an input depends on the data, and the file states the result's")
    return None


def _require_plan(builder: GraphBuilder, operation: Operation) -> None:
    """Require the scales and attributes that a plan requires. With large weights it is made for extreme scales only."""
    operands = [builder[index] for index in (*operation.inputs, *operation.outputs)]
    constants = [operand.dimensions for operand in operands if operand.lifetime == LifeTime.CONSTANT_COPY]
    if sum(map(math.prod, constants)) > _FEW_ELEMENTS and not any(map(_is_extreme, operands)):
        return
    try:
        builder.require_plan(operation)
    except InvalidArgument:  # they depend on the data
        return
    except GeneralFailure as error:
        raise InvalidArgument(f"no device can compute it: {operation.type.name}: {error}") from None


def _is_extreme(operand: Operand) -> bool:
    return operand.scale != 0 and not _USUAL_SCALES[0] < operand.scale < _USUAL_SCALES[1]


def _is_unknown(operand: Operand) -> bool:
    is_tensor = operand.lifetime != LifeTime.NO_VALUE and not is_scalar(operand.type)
    return is_tensor and (not operand.dimensions or 0 in operand.dimensions)
