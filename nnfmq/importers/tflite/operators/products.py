"""Operators with weights, and BATCH_MATMUL.

A missing bias becomes zeros. A quantized operator's bias gets the scale that the HAL requires, input scale × filter
scale. TFLite quantizes a float input of quantized weights at each execution: FULLY_CONNECTED and CONV_2D of few images
become operations of the extension, which do the same. Otherwise the weights are dequantized.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import MAX_DYNAMIC_PRODUCTS, TENSOR_INT64, Scheme, extended_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import DataLocation, LifeTime, Operand, OperandType, PaddingScheme
from nnfmq.importers.tflite.file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite.operators.conversion import (
    FLOAT_TYPES,
    INTEGERS,
    PER_CHANNEL,
    QUANTIZED_TYPES,
    SIXTEEN_BITS,
    ConversionContext,
    OpConverter,
)
from nnfmq.importers.tflite.operators.options import (
    activation,
    dilation,
    dynamically_quantized,
    emit_reshape,
    own_definition,
    padding,
    positive,
    size_argument,
    strides,
)

__all__ = ["CONVERTERS"]

_BIAS_TOLERANCE = 0.02  # of the output's scale: what TFLite itself accepts between bias scale and input × filter
_SAME = 0  # TFLite's code of the padding
_MAX_IMAGES = 16  # of a hybrid convolution, which has operations for each
_QUANTIZED_TYPES = (*QUANTIZED_TYPES, PER_CHANNEL)
_FILTER_TYPES = ((PER_CHANNEL,), (PER_CHANNEL, OperandType.TENSOR_QUANT8_ASYMM_SIGNED))  # of 8, of 16 bits


class _WeightedOp(Struct, frozen=True):
    """Input and weights, of types that the HAL can multiply, and the position of the bias."""

    x: TfliteTensor
    weights: TfliteTensor
    bias_position: int = 2

    @property
    def quantized(self) -> bool:
        return self.x.type not in FLOAT_TYPES

    @property
    def sixteen_bits(self) -> bool:
        return self.x.type == SIXTEEN_BITS

    @property
    def hybrid(self) -> bool:
        return self.x.type == OperandType.TENSOR_FLOAT32 and self.weights.type in _QUANTIZED_TYPES

    @property
    def keeps_bytes(self) -> bool:
        """Whether an operation of the extension multiplies the quantized input by the weights as they are."""
        return self.hybrid and _is_multiplied_as_bytes(self.weights, self.weights.shape[1:])


def _is_multiplied_as_bytes(weights: TfliteTensor, products: Sequence[int], channel_dim: int = 0) -> bool:
    """Return whether the extension has products by such weights; `products` multiply to those of a sum."""
    quant, count = weights.channel_quant, math.prod(products)
    is_symmetric = weights.type in _FILTER_TYPES[1] and (quant is None or quant.channel_dim == channel_dim)
    return is_symmetric and weights.zero_point == 0 and 0 < count <= MAX_DYNAMIC_PRODUCTS


def _weighted_op(
    context: ConversionContext, operator: TfliteOperator, rank: int, order: tuple[int, int, int] = (0, 1, 2)
) -> _WeightedOp:
    x, weights = (context.file.tensor(operator.inputs[position]) for position in order[:2])
    op = _WeightedOp(x, weights, order[2])
    fits = weights.type == x.type or (op.quantized and weights.type in _FILTER_TYPES[op.sixteen_bits])
    if not fits and not (op.hybrid and weights.data is not None):
        raise InvalidArgument(f"{x} is {x.type.name} but {weights} is {weights.type.name}: this mix is not supported")
    if len(weights.shape) != rank:
        raise InvalidArgument(f"{weights} has rank {len(weights.shape)}: it must be {rank}")
    return op


def _operands(
    context: ConversionContext,
    operator: TfliteOperator,
    op: _WeightedOp,
    count: int,
    *,
    row_length: int = 0,
    asymmetric: bool | None = None,
) -> list[int]:
    """Return input, weights and bias; `row_length` and `asymmetric` say how TFLite quantizes the input of a hybrid."""
    x = context.value(op.x.index)
    if op.hybrid and asymmetric is not None:
        x = dynamically_quantized(context, op.x, row_length, asymmetric)
    weights = context.dequantized_constant(op.weights) if op.hybrid else context.value(op.weights.index)
    return [x, weights, _bias(context, operator, op, count)]


def _bias(context: ConversionContext, operator: TfliteOperator, op: _WeightedOp, count: int) -> int:
    if op.sixteen_bits:
        return _bias_of_sixteen_bits(context, operator, op, count)
    scale = _bias_scale(op) if op.quantized else 0.0
    position = op.bias_position
    if len(operator.inputs) <= position or operator.inputs[position] == -1:
        return context.builder.zeros(OperandType.TENSOR_INT32 if op.quantized else op.x.type, scale, count)
    bias = context.file.tensor(operator.inputs[position])
    if not op.quantized:
        return context.value(bias.index)
    if bias.data is None or bias.type != OperandType.TENSOR_INT32:
        raise InvalidArgument(f"{bias}: the bias of a quantized operation must be a constant of type INT32")
    tolerance = _BIAS_TOLERANCE * context.file.tensor(operator.outputs[0]).scale
    if scale and bias.file_scale and abs(scale - bias.file_scale) > tolerance:
        raise InvalidArgument(f"{bias} has scale {bias.file_scale:g}, input times filter make {scale:g}")
    return context.constant(bias, scale)


def _bias_of_sixteen_bits(context: ConversionContext, operator: TfliteOperator, op: _WeightedOp, count: int) -> int:
    """Return a bias of 32 or 64 bits; its width decides how TFLite adds and requantizes the products."""
    if len(operator.inputs) <= op.bias_position or operator.inputs[op.bias_position] == -1:
        context.builder.reserve(8 * count)
        location = context.builder.constant(bytes(8 * count))
        return context.builder.operand(
            Operand(TENSOR_INT64, (count,), lifetime=LifeTime.CONSTANT_COPY, location=location)
        )
    bias = context.file.tensor(operator.inputs[op.bias_position])
    if bias.data is None or bias.type not in INTEGERS:
        raise InvalidArgument(f"{bias}: the bias of a quantized operation must be a constant of type INT32 or INT64")
    return context.constant(bias, 0.0)


def _bias_scale(op: _WeightedOp) -> float:
    """Return input scale × filter scale, rounded to float32; 0 if the filter is quantized per channel."""
    x, weights = op.x, op.weights
    if weights.channel_quant is not None:
        return 0.0
    value = x.scale * weights.scale
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = 0.0
    if rounded <= 0.0:
        raise InvalidArgument(f"the scales of {x} and {weights} multiply to {value:g}: that is no float32 scale")
    return rounded


def _conv_2d(context: ConversionContext, operator: TfliteOperator) -> None:
    op = _weighted_op(context, operator, 4)
    groups, quant = _groups(op), op.weights.channel_quant
    is_per_channel = quant is not None and len(set(quant.scales)) > 1  # LiteRT takes equal scales as one
    if groups == 1 and op.keeps_bytes and _has_few_images(op):
        return _hybrid_conv_2d(context, operator, op, OperationType.CONV_2D, asymmetric=is_per_channel)
    arguments = _operands(context, operator, op, op.weights.shape[0], asymmetric=is_per_channel)
    arguments += [padding(context, operator), *strides(context, operator)]
    dilated = dilation(context, operator)
    if groups == 1:
        return context.emit(OperationType.CONV_2D, operator, *arguments, activation(context, operator), *dilated)
    if dilated:
        raise InvalidArgument("a grouped convolution with dilation is not supported: NNAPI's has none")
    rest = [context.builder.int32(groups), activation(context, operator), context.builder.boolean(False)]
    return context.emit(OperationType.GROUPED_CONV_2D, operator, *arguments, *rest)


def _has_few_images(op: _WeightedOp) -> bool:
    return len(op.x.shape) == 4 and 0 < op.x.shape[0] <= _MAX_IMAGES


def _hybrid_conv_2d(
    context: ConversionContext,
    operator: TfliteOperator,
    op: _WeightedOp,
    operation: OperationType,
    more: Sequence[int] = (),
    *,
    asymmetric: bool,
) -> None:
    """Write convolutions of images of floats, which are quantized at each execution, with weights of 8 bits.

    Each image has a scale of its own, so several are convolved one by one. The operation has `more` after the strides.
    """
    builder, options = context.builder, operator.options
    channels = op.weights.shape[3 if operation == OperationType.DEPTHWISE_CONV_2D else 0]
    arguments = [context.value(op.weights.index), _bias(context, operator, op, channels)]
    arguments += [padding(context, operator)]
    arguments += [*strides(context, operator), *more, activation(context, operator), builder.boolean(False)]
    arguments += positive(context, dilation_w=options.DilationWFactor(), dilation_h=options.DilationHFactor())
    arguments += [builder.boolean(asymmetric)]
    code, count = extended_code(operation, Scheme.HYBRID), op.x.shape[0]
    if count == 1:
        return context.emit(code, operator, context.value(op.x.index), *arguments)
    y = context.file.tensor(operator.outputs[0])
    images = [context.temporary(op.x, (1, *op.x.shape[1:])) for _ in range(count)]
    results = [context.temporary(y, (1, *y.shape[1:])) for _ in range(count)]
    axis = builder.int32(0)
    builder.operation(OperationType.SPLIT, [context.value(op.x.index), axis, builder.int32(count)], *images)
    for image, result in zip(images, results, strict=True):
        builder.operation(code, [image, *arguments], result)
    return context.emit(OperationType.CONCATENATION, operator, *results, axis)


def _groups(op: _WeightedOp) -> int:
    x, weights = op.x, op.weights
    channels, depth = x.shape[3] if len(x.shape) == 4 else 0, weights.shape[3]
    if channels in (0, depth):
        return 1
    if depth == 0 or channels % depth or weights.shape[0] % (channels // depth):
        raise InvalidArgument(f"{x} has {channels} channels, the filter {weights.shape}: these are no groups")
    return channels // depth


def _depthwise_conv_2d(context: ConversionContext, operator: TfliteOperator) -> None:
    op = _weighted_op(context, operator, 4)
    multiplier = positive(context, depth_multiplier=_depth_multiplier(operator, op))
    if op.hybrid and _is_multiplied_as_bytes(op.weights, op.weights.shape[1:3], 3) and _has_few_images(op):
        return _hybrid_conv_2d(context, operator, op, OperationType.DEPTHWISE_CONV_2D, multiplier, asymmetric=True)
    arguments = _operands(context, operator, op, op.weights.shape[3], asymmetric=True)
    arguments += [padding(context, operator), *strides(context, operator), *multiplier, activation(context, operator)]
    return context.emit(OperationType.DEPTHWISE_CONV_2D, operator, *arguments, *dilation(context, operator))


def _depth_multiplier(operator: TfliteOperator, op: _WeightedOp) -> int:
    """Return the multiplier that the shapes say; TFLite's kernels ignore the option, and files have it wrong."""
    x, weights = op.x, op.weights
    channels = x.shape[3] if len(x.shape) == 4 else 0
    if not channels:
        return int(operator.options.DepthMultiplier())
    if weights.shape[3] % channels:
        raise InvalidArgument(f"{weights} has {weights.shape[3]} channels, no multiple of the input's {channels}")
    return weights.shape[3] // channels


def _transpose_conv(context: ConversionContext, operator: TfliteOperator) -> None:
    op = _weighted_op(context, operator, 4, (2, 1, 3))
    size = size_argument(context, operator, 0)
    implicit, steps = padding(context, operator), strides(context, operator)
    explicit = [context.builder.int32(value) for value in _transposed_paddings(operator, op, size)]
    arguments = _operands(context, operator, op, op.weights.shape[0], asymmetric=True)
    arguments += [*(explicit or (context.builder.int32_vector(size), implicit)), *steps]
    arguments += [activation(context, operator), context.builder.boolean(False)]
    context.emit(OperationType.TRANSPOSE_CONV_2D, operator, *arguments)


def _transposed_paddings(operator: TfliteOperator, op: _WeightedOp, size: Sequence[int]) -> list[int]:
    """Return the paddings left, right, top and bottom for an output of `size`; [] if the scheme implies them.

    A convolution drops the last pixels of an image that its strides do not reach, so TFLite may compute a few more
    than NNAPI's scheme VALID. Paddings after the input are negative then.
    """
    if len(op.x.shape) != 4 or len(size) != 4 or min(*op.x.shape, *size) < 1:
        return []
    options, paddings = operator.options, []
    for axis, stride in ((2, options.StrideW()), (1, options.StrideH())):
        wanted, kernel, given = size[axis], op.weights.shape[axis], op.x.shape[axis]
        convolved = wanted if options.Padding() == _SAME else wanted - kernel + 1
        if -(-convolved // stride) != given:
            raise InvalidArgument(f"an output of {list(size)} does not belong to an input of {list(op.x.shape)}")
        paddings += [0, (given - 1) * stride + kernel - wanted]
    return paddings if any(paddings) and options.Padding() != _SAME else []


def _fully_connected(context: ConversionContext, operator: TfliteOperator) -> None:
    op = _weighted_op(context, operator, 2)
    if operator.options is not None and operator.options.WeightsFormat():
        raise InvalidArgument(f"weights format {operator.options.WeightsFormat()} (shuffled) is not supported")
    operation = own_definition(context, OperationType.FULLY_CONNECTED, operator.inputs[0], *operator.outputs)
    is_the_hal_s = operation == OperationType.FULLY_CONNECTED
    if op.weights.channel_quant is not None and is_the_hal_s and not (op.hybrid or op.sixteen_bits):
        return _connected_per_channel(context, operator, op)
    units = op.weights.shape[0]
    asymmetric = operator.options is not None and bool(operator.options.AsymmetricQuantizeInputs())
    if op.keeps_bytes:
        operation = extended_code(OperationType.FULLY_CONNECTED, Scheme.HYBRID)
        x, *rest = [*map(context.value, operator.inputs[:2]), _bias(context, operator, op, units)]
    else:
        x, *rest = _operands(context, operator, op, units, row_length=op.weights.shape[1], asymmetric=asymmetric)
    arguments = [_as_rows(context, op, x), *rest, activation(context, operator)]
    arguments += [context.builder.boolean(asymmetric)] if op.keeps_bytes else []
    y = context.file.tensor(operator.outputs[0])
    keeps_dimensions = operator.options is not None and bool(operator.options.KeepNumDims())
    if not keeps_dimensions or len(y.shape) in (0, 2):
        shape = (_rows(op), units) if op.x.shape else ()
        return context.emit(operation, operator, *arguments, shape=shape)
    # NNAPI's result has two dimensions; the others come back by a RESHAPE.
    flat = context.temporary(y, (math.prod(y.shape[:-1]), units))
    context.builder.operation(operation, arguments, flat)
    return emit_reshape(context, operator, flat, y.shape)


def _as_rows(context: ConversionContext, op: _WeightedOp, x: int) -> int:
    """Return an input of one dimension, which the HAL does not accept, as rows."""
    if len(op.x.shape) != 1 or op.x.shape[0] % op.weights.shape[1]:
        return x
    shape = (_rows(op), op.weights.shape[1])
    rows = context.temporary(op.x, shape)
    context.builder.operation(OperationType.RESHAPE, [x, context.builder.int32_vector(shape)], rows)
    return rows


def _rows(op: _WeightedOp) -> int:
    return math.prod(op.x.shape) // max(op.weights.shape[1], 1)


def _connected_per_channel(context: ConversionContext, operator: TfliteOperator, op: _WeightedOp) -> None:
    """Write FULLY_CONNECTED, which has one scale in NNAPI, as a CONV_2D of 1x1 over images of one pixel."""
    x, weights = op.x, op.weights
    units, size = weights.shape
    assert weights.channel_quant is not None
    if weights.channel_quant.channel_dim != 0 or not x.shape:
        raise InvalidArgument(f"{weights}: scales per input, or an input of unknown shape, are not supported")
    rows, builder = _rows(op), context.builder
    valid = builder.int32(PaddingScheme.VALID)
    images = context.temporary(x, (rows, 1, 1, size))
    builder.operation(OperationType.RESHAPE, [context.value(x.index), builder.int32_vector((rows, 1, 1, size))], images)
    filter = context.constant(weights, 0.0, (units, 1, 1, size))
    arguments = [images, filter, _bias(context, operator, op, units), valid, builder.int32(1)]
    y = context.file.tensor(operator.outputs[0])
    flat = context.temporary(y, (rows, 1, 1, units))
    builder.operation(OperationType.CONV_2D, [*arguments, builder.int32(1), activation(context, operator)], flat)
    emit_reshape(context, operator, flat, y.shape or (rows, units))


_WEIGHTED = range(2, 4)

_WEIGHTED_CONVERTERS: dict[str, OpConverter] = {
    "CONV_2D": OpConverter(_WEIGHTED, _conv_2d, "Conv2DOptions", True),
    "DEPTHWISE_CONV_2D": OpConverter(_WEIGHTED, _depthwise_conv_2d, "DepthwiseConv2DOptions", True),
    "FULLY_CONNECTED": OpConverter(_WEIGHTED, _fully_connected, "FullyConnectedOptions"),
    "TRANSPOSE_CONV": OpConverter(range(3, 5), _transpose_conv, "TransposeConvOptions", True),
}


# ----------------------------------------------------------------------------------------------------------------------
# BATCH_MATMUL, whose batches broadcast in TFLite. Those of the HAL's operation are equal, and its rank is 4 at most.
#
# If one right matrix is for all rows, they become the rows of one left matrix. Otherwise the batches are repeated to
# their common shape, and become one dimension.


_HAL_RANK = 4
Shape = tuple[int, ...]


def _batch_matmul(context: ConversionContext, operator: TfliteOperator) -> None:
    left, right = (context.file.tensor(index) for index in operator.inputs)
    options = operator.options
    adjoints = (bool(options.AdjX()), bool(options.AdjY())) if options is not None else (False, False)
    if not adjoints[0] and _is_product_of_bytes(left, right, adjoints[1]):
        return _product_of_bytes(context, operator, left, right, adjoints[1])
    factors = _factors(context, operator, left, right, adjoints[0])
    flags = [context.builder.boolean(adjoint) for adjoint in adjoints]
    batches = left.shape[:-2], right.shape[:-2]
    is_the_hal_s = batches[0] == batches[1] and len(left.shape) <= _HAL_RANK
    if is_the_hal_s or not left.shape or not right.shape:
        return context.emit(OperationType.BATCH_MATMUL, operator, *factors, *flags)
    if min(len(left.shape), len(right.shape)) < 2:
        raise InvalidArgument(f"the shapes {list(left.shape)} and {list(right.shape)} are not both of matrices")
    batch = _common_batch(*batches)
    rows, columns = left.shape[-1 if adjoints[0] else -2], right.shape[-2 if adjoints[1] else -1]
    if math.prod(batches[1]) == 1 and not adjoints[0]:  # the batch is the left's
        rows_of_all = math.prod(batch) * rows
        shapes: tuple[Shape, Shape] = (rows_of_all, left.shape[-1]), right.shape[-2:]
        product: Shape = rows_of_all, columns
    else:
        factors = [_repeated(context, factor, batch) for factor in factors]
        shapes = (math.prod(batch), *left.shape[-2:]), (math.prod(batch), *right.shape[-2:])
        product = math.prod(batch), rows, columns
    factors = [_reshaped(context, factor, shape) for factor, shape in zip(factors, shapes, strict=True)]
    flat = context.temporary(context.file.tensor(operator.outputs[0]), product)
    context.builder.operation(OperationType.BATCH_MATMUL, [*factors, *flags], flat)
    return emit_reshape(context, operator, flat, (*batch, rows, columns))


def _factors(
    context: ConversionContext, operator: TfliteOperator, left: TfliteTensor, right: TfliteTensor, adjoint_left: bool
) -> list[int]:
    """Return the operands of both sides; TFLite quantizes a left side of floats for a constant of 8 bits."""
    if not _is_hybrid_product(left, right):
        return [context.value(left.index), context.value(right.index)]
    factors = [context.value(left.index), context.dequantized_constant(right)]
    if left.shape and not adjoint_left:
        factors[0] = dynamically_quantized(context, left, left.shape[-1], _quantizes_asymmetrically(operator))
    return factors


def _is_hybrid_product(left: TfliteTensor, right: TfliteTensor) -> bool:
    return left.type == OperandType.TENSOR_FLOAT32 and right.type in QUANTIZED_TYPES and right.data is not None


def _quantizes_asymmetrically(operator: TfliteOperator) -> bool:
    return operator.options is not None and bool(operator.options.AsymmetricQuantizeInputs())


def _is_product_of_bytes(left: TfliteTensor, right: TfliteTensor, adjoint_right: bool) -> bool:
    """Return whether operations of the extension multiply the quantized rows of the left by matrices of bytes."""
    if not _is_hybrid_product(left, right) or min(len(left.shape), len(right.shape)) < 2 or 0 in left.shape:
        return False
    length = right.shape[-1 if adjoint_right else -2]
    count = math.prod(_common_batch(left.shape[:-2], right.shape[:-2]))
    fits = count <= _MAX_IMAGES or math.prod(right.shape[:-2]) == 1
    return fits and left.shape[-1] == length and _is_multiplied_as_bytes(right, (length,))


def _product_of_bytes(
    context: ConversionContext, operator: TfliteOperator, left: TfliteTensor, right: TfliteTensor, adjoint_right: bool
) -> None:
    """Write the products as those of fully connected layers: one for each right matrix, or one for all rows."""
    builder, batch = context.builder, _common_batch(left.shape[:-2], right.shape[:-2])
    matrices = _as_weights(context, right, adjoint_right)
    rows, columns = left.shape[-2], builder[matrices[0]].dimensions[0]
    arguments = [builder.zeros(OperandType.TENSOR_FLOAT32, 0.0, columns), builder.int32(0)]
    arguments.append(builder.boolean(_quantizes_asymmetrically(operator)))
    code = extended_code(OperationType.FULLY_CONNECTED, Scheme.HYBRID)
    flat = context.temporary(context.file.tensor(operator.outputs[0]), (math.prod(batch) * rows, columns))
    if len(matrices) == 1:
        x = _reshaped(context, context.value(left.index), (math.prod(batch) * rows, left.shape[-1]))
        builder.operation(code, [x, matrices[0], *arguments], flat)
    else:
        x = _repeated(context, context.value(left.index), batch)
        x = _reshaped(context, x, (math.prod(batch), *left.shape[-2:]))
        parts = [_like(context, x, (1, *left.shape[-2:])) for _ in range(math.prod(batch))]
        results = [_like(context, flat, (rows, columns)) for _ in parts]
        builder.operation(OperationType.SPLIT, [x, builder.int32(0), builder.int32(len(parts))], *parts)
        numbers = np.broadcast_to(np.arange(len(matrices)).reshape(right.shape[:-2]), batch).reshape(-1).tolist()
        for part, number, result in zip(parts, numbers, results, strict=True):
            builder.operation(code, [part, matrices[number], *arguments], result)
        builder.operation(OperationType.CONCATENATION, [*results, builder.int32(0)], flat)
    emit_reshape(context, operator, flat, (*batch, rows, columns))


def _as_weights(context: ConversionContext, right: TfliteTensor, adjoint_right: bool) -> list[int]:
    """Return constant right matrices as weights of layers, a row for each column."""
    values = np.frombuffer(context.stored_bytes(right), np.int8).reshape(-1, *right.shape[-2:])
    matrices, copy = values if adjoint_right else values.swapaxes(1, 2), LifeTime.CONSTANT_COPY
    context.builder.reserve(values.nbytes)
    return [
        context.builder.operand(
            Operand(right.type, matrix.shape, right.scale, 0, copy, context.builder.stored(matrix.tobytes()))
        )
        for matrix in matrices
    ]


def _common_batch(left: Shape, right: Shape) -> Shape:
    try:
        return tuple(np.broadcast_shapes(left, right))
    except ValueError:
        raise InvalidArgument(f"the batches {list(left)} and {list(right)} have no common shape") from None


def _repeated(context: ConversionContext, value: int, batch: Shape) -> int:
    """Return matrices repeated along dimensions of the batch that are 1, or that they do not have."""
    shape = context.builder[value].dimensions
    aligned = (1,) * (len(batch) + 2 - len(shape)) + shape
    multiples = [wanted // extent for wanted, extent in zip(batch, aligned[:-2], strict=True)]
    if max(multiples, default=1) == 1:
        return value
    value = _reshaped(context, value, aligned)
    found = _like(context, value, (*batch, *shape[-2:]))
    context.builder.operation(OperationType.TILE, [value, context.builder.int32_vector([*multiples, 1, 1])], found)
    return found


def _reshaped(context: ConversionContext, value: int, shape: Shape) -> int:
    if context.builder[value].dimensions == shape:
        return value
    found = _like(context, value, shape)
    context.builder.operation(OperationType.RESHAPE, [value, context.builder.int32_vector(shape)], found)
    return found


def _like(context: ConversionContext, value: int, shape: Shape) -> int:
    operand = context.builder[value]
    return context.builder.operand(
        replace(operand, dimensions=shape, lifetime=LifeTime.TEMPORARY_VARIABLE, location=DataLocation())
    )


_MATRIX_PRODUCT_CONVERTERS: dict[str, OpConverter] = {
    "BATCH_MATMUL": OpConverter(range(2, 3), _batch_matmul, "BatchMatMulOptions")
}

CONVERTERS: dict[str, OpConverter] = {**_WEIGHTED_CONVERTERS, **_MATRIX_PRODUCT_CONVERTERS}
