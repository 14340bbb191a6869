"""Products with weights: convolutions of all kinds, FULLY_CONNECTED, BATCH_MATMUL.

A missing bias becomes zeros. That of a quantized product gets the scale that NNAPI demands, input × filter. Weights of
codes for a float input (TFLite then quantizes the input on the fly) become the real numbers that they stand for.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType, PaddingScheme
from nnfmq.importers.tflite_file import Operator, Tensor
from nnfmq.importers.tflite_operators.conversion import CODES, FLOATS, PER_CHANNEL, Rule, Translation
from nnfmq.importers.tflite_operators.options import (
    activation,
    dilation,
    padding,
    positive,
    reshaped,
    size_of,
    strides,
)

__all__ = ["RULES"]

_BIAS_TOLERANCE = 0.02  # of the output's scale: what TFLite itself accepts between bias scale and input × filter
_CODES = (*CODES, PER_CHANNEL)


@dataclass(frozen=True, slots=True)
class _Product:
    """Input and weights of a product whose types NNAPI can multiply, and which input of the operator is the bias."""

    x: Tensor
    weights: Tensor
    bias_position: int = 2

    @property
    def quantized(self) -> bool:
        return self.x.type not in FLOATS

    @property
    def hybrid(self) -> bool:
        return self.x.type == OperandType.TENSOR_FLOAT32 and self.weights.type in _CODES


def _product(graph: Translation, operator: Operator, rank: int, order: tuple[int, int, int] = (0, 1, 2)) -> _Product:
    x, weights = (graph.file.tensor(operator.inputs[position]) for position in order[:2])
    product = _Product(x, weights, order[2])
    fits = weights.type == x.type or (product.quantized and weights.type == PER_CHANNEL)
    if not fits and not (product.hybrid and weights.data is not None):
        raise InvalidArgument(f"{x} is {x.type.name} but {weights} is {weights.type.name}: this mix is not supported")
    if len(weights.shape) != rank:
        raise InvalidArgument(f"{weights} has rank {len(weights.shape)}: it must be {rank}")
    return product


def _factors(graph: Translation, operator: Operator, product: _Product, count: int) -> list[int]:
    """Return input, weights and bias."""
    weights = graph.widened(product.weights) if product.hybrid else graph.value(product.weights.index)
    return [graph.value(product.x.index), weights, _bias(graph, operator, product, count)]


def _bias(graph: Translation, operator: Operator, product: _Product, count: int) -> int:
    scale = _product_scale(product) if product.quantized else 0.0
    position = product.bias_position
    if len(operator.inputs) <= position or operator.inputs[position] == -1:
        return graph.builder.zeros(OperandType.TENSOR_INT32 if product.quantized else product.x.type, scale, count)
    bias = graph.file.tensor(operator.inputs[position])
    if not product.quantized:
        return graph.value(bias.index)
    if bias.data is None or bias.type != OperandType.TENSOR_INT32:
        raise InvalidArgument(f"{bias}: the bias of a quantized operation must be a constant of type INT32")
    _check_bias_scale(bias, scale, graph.file.tensor(operator.outputs[0]).scale)
    return graph.constant(bias, scale)


def _product_scale(product: _Product) -> float:
    """Return input scale × filter scale as the float32 that it must be; 0 if the filter is quantized per channel."""
    x, weights = product.x, product.weights
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


def _check_bias_scale(bias: Tensor, scale: float, output_scale: float) -> None:
    if scale and bias.file_scale and abs(scale - bias.file_scale) > _BIAS_TOLERANCE * output_scale:
        raise InvalidArgument(f"{bias} has scale {bias.file_scale:g}, input times filter make {scale:g}")


def _conv_2d(graph: Translation, operator: Operator) -> None:
    product = _product(graph, operator, 4)
    groups = _groups(product)
    arguments = _factors(graph, operator, product, product.weights.shape[0])
    arguments += [padding(graph, operator), *strides(graph, operator)]
    dilated = dilation(graph, operator)
    if groups == 1:
        return graph.emit(OperationType.CONV_2D, operator, *arguments, activation(graph, operator), *dilated)
    if dilated:
        raise InvalidArgument("a grouped convolution with dilation is not supported: NNAPI's has none")
    rest = [graph.builder.int32(groups), activation(graph, operator), graph.builder.boolean(False)]
    return graph.emit(OperationType.GROUPED_CONV_2D, operator, *arguments, *rest)


def _groups(product: _Product) -> int:
    x, weights = product.x, product.weights
    channels, depth = x.shape[3] if len(x.shape) == 4 else 0, weights.shape[3]
    if channels in (0, depth):
        return 1
    if depth == 0 or channels % depth or weights.shape[0] % (channels // depth):
        raise InvalidArgument(f"{x} has {channels} channels, the filter {weights.shape}: these are no groups")
    return channels // depth


def _depthwise_conv_2d(graph: Translation, operator: Operator) -> None:
    product = _product(graph, operator, 4)
    multiplier = positive(graph, depth_multiplier=_depth_multiplier(operator, product))
    arguments = _factors(graph, operator, product, product.weights.shape[3])
    arguments += [padding(graph, operator), *strides(graph, operator), *multiplier, activation(graph, operator)]
    graph.emit(OperationType.DEPTHWISE_CONV_2D, operator, *arguments, *dilation(graph, operator))


def _depth_multiplier(operator: Operator, product: _Product) -> int:
    """Return the multiplier that the shapes say; TFLite's kernels ignore the option, and files have it wrong."""
    x, weights = product.x, product.weights
    channels = x.shape[3] if len(x.shape) == 4 else 0
    if not channels:
        return int(operator.options.DepthMultiplier())
    if weights.shape[3] % channels:
        raise InvalidArgument(f"{weights} has {weights.shape[3]} channels, no multiple of the input's {channels}")
    return weights.shape[3] // channels


def _transpose_conv(graph: Translation, operator: Operator) -> None:
    product = _product(graph, operator, 4, (2, 1, 3))
    y = graph.file.tensor(operator.outputs[0])
    size = graph.builder.int32_vector(size_of(graph, operator.inputs[0], y.shape))
    arguments = [*_factors(graph, operator, product, product.weights.shape[0]), size, padding(graph, operator)]
    arguments += [*strides(graph, operator), activation(graph, operator), graph.builder.boolean(False)]
    graph.emit(OperationType.TRANSPOSE_CONV_2D, operator, *arguments)


def _fully_connected(graph: Translation, operator: Operator) -> None:
    product = _product(graph, operator, 2)
    if operator.options is not None and operator.options.WeightsFormat():
        raise InvalidArgument(f"weights format {operator.options.WeightsFormat()} (shuffled) is not supported")
    if product.weights.channel_quant is not None and not product.hybrid:
        return _connected_per_channel(graph, operator, product)
    units = product.weights.shape[0]
    arguments = [*_factors(graph, operator, product, units), activation(graph, operator)]
    y = graph.file.tensor(operator.outputs[0])
    if not _keeps_dimensions(operator) or len(y.shape) in (0, 2):
        shape = (_rows(product), units) if product.x.shape else ()
        return graph.emit(OperationType.FULLY_CONNECTED, operator, *arguments, shape=shape)
    # NNAPI's result has two dimensions; the others come back by a RESHAPE.
    flat = graph.temporary(y, (math.prod(y.shape[:-1]), units))
    graph.builder.operation(OperationType.FULLY_CONNECTED, arguments, flat)
    return reshaped(graph, operator, flat, y.shape)


def _keeps_dimensions(operator: Operator) -> bool:
    return operator.options is not None and bool(operator.options.KeepNumDims())


def _rows(product: _Product) -> int:
    return math.prod(product.x.shape) // max(product.weights.shape[1], 1)


def _connected_per_channel(graph: Translation, operator: Operator, product: _Product) -> None:
    """Write FULLY_CONNECTED, which has one scale in NNAPI, as a CONV_2D of 1x1 over images of one pixel."""
    x, weights = product.x, product.weights
    units, size = weights.shape
    assert weights.channel_quant is not None
    if weights.channel_quant.channel_dim != 0 or not x.shape:
        raise InvalidArgument(f"{weights}: scales per input, or an input of unknown shape, are not supported")
    rows, builder = _rows(product), graph.builder
    valid = builder.int32(PaddingScheme.VALID)
    images = graph.temporary(x, (rows, 1, 1, size))
    builder.operation(OperationType.RESHAPE, [graph.value(x.index), builder.int32_vector((rows, 1, 1, size))], images)
    filter = graph.constant(weights, 0.0, (units, 1, 1, size))
    arguments = [images, filter, _bias(graph, operator, product, units), valid, builder.int32(1)]
    y = graph.file.tensor(operator.outputs[0])
    flat = graph.temporary(y, (rows, 1, 1, units))
    builder.operation(OperationType.CONV_2D, [*arguments, builder.int32(1), activation(graph, operator)], flat)
    reshaped(graph, operator, flat, y.shape or (rows, units))


def _batch_matmul(graph: Translation, operator: Operator) -> None:
    adjoint_x, adjoint_y = (False, False)
    if operator.options is not None:
        adjoint_x, adjoint_y = bool(operator.options.AdjX()), bool(operator.options.AdjY())
    left, right = (graph.file.tensor(index) for index in operator.inputs)
    hybrid = left.type == OperandType.TENSOR_FLOAT32 and right.type in _CODES and right.data is not None
    factors = [graph.value(left.index), graph.widened(right) if hybrid else graph.value(right.index)]
    flags = [graph.builder.boolean(adjoint_x), graph.builder.boolean(adjoint_y)]
    graph.emit(OperationType.BATCH_MATMUL, operator, *factors, *flags)


_WEIGHTED = range(2, 4)
_TWO = range(2, 3)

RULES: dict[str, Rule] = {
    "BATCH_MATMUL": Rule(_TWO, _batch_matmul, "BatchMatMulOptions"),
    "CONV_2D": Rule(_WEIGHTED, _conv_2d, "Conv2DOptions", True),
    "DEPTHWISE_CONV_2D": Rule(_WEIGHTED, _depthwise_conv_2d, "DepthwiseConv2DOptions", True),
    "FULLY_CONNECTED": Rule(_WEIGHTED, _fully_connected, "FullyConnectedOptions"),
    "TRANSPOSE_CONV": Rule(range(3, 5), _transpose_conv, "TransposeConvOptions", True),
}
