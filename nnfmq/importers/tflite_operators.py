"""TFLite operators → NNAPI operations: one small function per family, and RULES, the table that names them.

`Translation` keeps which operand stands for which tensor and refuses what is no straight-line graph (read before
written, written twice). A function here reads an operator's options and adds one operation, rarely two. It checks only
what NNAPI's form cannot express or what would be misread; whether the result is a valid model is `validation`'s
business. Messages need not name the operator, `translate` does. Forms: the operation documents of the HAL 1.0 to 1.3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import FusedActivationFunc, LifeTime, Operand, OperandType, PaddingScheme
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.tflite_file import File, Operator, Tensor

__all__ = ["RULES", "Rule", "Translation", "translate"]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
_PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
_ACTIVATIONS = {
    0: FusedActivationFunc.NONE,
    1: FusedActivationFunc.RELU,
    2: FusedActivationFunc.RELU1,
    3: FusedActivationFunc.RELU6,
}
_PADDINGS = {0: PaddingScheme.SAME, 1: PaddingScheme.VALID}
_BIAS_TOLERANCE = 0.02  # of the output's scale: what TFLite itself accepts between bias scale and input × filter
_MANY = range(1, 1 << 16)


class Translation:
    """The state of one translation: the file's tensors, the builder, and the operand of each tensor seen so far."""

    def __init__(self, file: File, builder: GraphBuilder) -> None:
        self.file = file
        self.builder = builder
        self._operands: dict[int, int] = {}
        self._outputs = frozenset(file.outputs)

    def model_input(self, index: int) -> int:
        """Add tensor `index` as an input of the model."""
        tensor = self.file.tensor(index)
        if index in self._operands or tensor.data is not None:
            raise InvalidArgument(f"{tensor} cannot be a model input: it is listed twice or a constant")
        return self._add(tensor, LifeTime.SUBGRAPH_INPUT)

    def model_output(self, index: int) -> int:
        """Return the operand of tensor `index`, which must have been written by an operator."""
        tensor = self.file.tensor(index)
        operand = self._operands.get(index)
        if operand is None or self.builder[operand].lifetime != LifeTime.SUBGRAPH_OUTPUT:
            raise InvalidArgument(f"{tensor} cannot be a model output: no operator writes it")
        return operand

    def value(self, index: int) -> int:
        """Return the operand of a tensor that an operator reads."""
        if index not in self._operands:
            tensor = self.file.tensor(index)
            if tensor.data is None:
                raise InvalidArgument(f"{tensor} is read before it is written")
            self._operands[index] = self.constant(tensor, tensor.scale)
        return self._operands[index]

    def result(self, index: int) -> int:
        """Return a new operand for a tensor that an operator writes."""
        tensor = self.file.tensor(index)
        if index in self._operands or tensor.data is not None:
            raise InvalidArgument(f"{tensor} cannot be written: it is an input, a constant, or was written before")
        is_output = index in self._outputs
        return self._add(tensor, LifeTime.SUBGRAPH_OUTPUT if is_output else LifeTime.TEMPORARY_VARIABLE)

    def constant(self, tensor: Tensor, scale: float) -> int:
        """Add an operand for a constant tensor; several operands of one file buffer share its bytes."""
        assert tensor.data is not None
        location = self.builder.constant_of(tensor.buffer_index, tensor.data)
        copy = LifeTime.CONSTANT_COPY
        channels = tensor.channel_quant
        return self.builder.operand(
            Operand(tensor.type, tensor.shape, scale, tensor.zero_point, copy, location, channels)
        )

    def emit(self, operation_type: OperationType, operator: Operator, *inputs: int) -> None:
        """Add an operation that writes the operator's only output."""
        self.builder.operation(operation_type, inputs, self.result(operator.outputs[0]))

    def _add(self, tensor: Tensor, lifetime: LifeTime) -> int:
        if tensor.channel_quant is not None:
            raise InvalidArgument(f"{tensor}: only constants may be quantized per channel")
        operand = Operand(tensor.type, tensor.shape, tensor.scale, tensor.zero_point, lifetime)
        self._operands[tensor.index] = self.builder.operand(operand)
        return self._operands[tensor.index]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator is translated: how many inputs it may have, which options it needs or may have."""

    input_counts: range
    apply: Callable[[Translation, Operator], None]
    options: str = ""
    needs_options: bool = False


def translate(graph: Translation, operator: Operator) -> None:
    """Add the operations that stand for `operator`. Raises InvalidArgument, naming the operator."""
    rule = RULES.get(operator.name)
    if rule is None:
        raise InvalidArgument(f"{operator} is not supported; it writes {_written(graph, operator)}")
    try:
        _check_form(rule, operator)
        rule.apply(graph, operator)
    except InvalidArgument as error:
        raise InvalidArgument(f"{operator}: {error}") from None


def _written(graph: Translation, operator: Operator) -> str:
    try:
        return str(graph.file.tensor(operator.outputs[0])) if operator.outputs else "no tensor"
    except InvalidArgument as error:
        return str(error)


def _check_form(rule: Rule, operator: Operator) -> None:
    counts = rule.input_counts
    if len(operator.inputs) not in counts:
        raise InvalidArgument(f"{len(operator.inputs)} inputs: {counts.start} to {counts.stop - 1} are allowed")
    if len(operator.outputs) != 1:
        raise InvalidArgument(f"{len(operator.outputs)} outputs: one is allowed")
    if operator.options is None:
        if rule.needs_options:
            raise InvalidArgument(f"has no {rule.options}")
    elif operator.options_name != rule.options:
        raise InvalidArgument(f"has {operator.options_name} instead of {rule.options or 'no options'}")


def _activation(graph: Translation, operator: Operator) -> int:
    code = operator.options.FusedActivationFunction() if operator.options is not None else 0
    if code not in _ACTIVATIONS:
        raise InvalidArgument(f"fused activation {code} is not supported: NONE, RELU, RELU_N1_TO_1 and RELU6 are")
    return graph.builder.int32(_ACTIVATIONS[code])


def _padding(graph: Translation, operator: Operator) -> int:
    code = operator.options.Padding()
    if code not in _PADDINGS:
        raise InvalidArgument(f"padding {code} is neither SAME (0) nor VALID (1)")
    return graph.builder.int32(_PADDINGS[code])


def _positive(graph: Translation, **values: int) -> list[int]:
    for name, value in values.items():
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: it must be positive")
    return [graph.builder.int32(value) for value in values.values()]


def _strides(graph: Translation, operator: Operator) -> list[int]:
    options = operator.options
    return _positive(graph, stride_w=options.StrideW(), stride_h=options.StrideH())


def _dilation(graph: Translation, operator: Operator) -> list[int]:
    """Return the arguments behind the activation: none without dilation, else layout (NHWC) and the two factors."""
    width, height = operator.options.DilationWFactor(), operator.options.DilationHFactor()
    if (width, height) == (1, 1):
        return []
    return [graph.builder.boolean(False), *_positive(graph, dilation_w=width, dilation_h=height)]


def _weights(graph: Translation, operator: Operator, rank: int) -> tuple[Tensor, Tensor]:
    """Return input and weights of a product after checking that NNAPI can multiply their types."""
    x, weights = graph.file.tensor(operator.inputs[0]), graph.file.tensor(operator.inputs[1])
    if weights.type != x.type and (x.type in _FLOATS or weights.type != _PER_CHANNEL):
        raise InvalidArgument(f"{x} is {x.type.name} but {weights} is {weights.type.name}: this mix is not supported")
    if len(weights.shape) != rank:
        raise InvalidArgument(f"{weights} has rank {len(weights.shape)}: it must be {rank}")
    return x, weights


def _bias(graph: Translation, operator: Operator, x: Tensor, weights: Tensor, count: int) -> int:
    """Return the bias operand: the file's, with the scale that NNAPI demands, or zeros where the file has none."""
    quantized = x.type not in _FLOATS
    scale = _product_scale(x, weights) if quantized else 0.0
    if len(operator.inputs) < 3 or operator.inputs[2] == -1:
        return graph.builder.zeros(OperandType.TENSOR_INT32 if quantized else x.type, scale, count)
    bias = graph.file.tensor(operator.inputs[2])
    if not quantized:
        return graph.value(bias.index)
    if bias.data is None or bias.type != OperandType.TENSOR_INT32:
        raise InvalidArgument(f"{bias}: the bias of a quantized operation must be a constant of type INT32")
    _check_bias_scale(bias, scale, graph.file.tensor(operator.outputs[0]).scale)
    return graph.constant(bias, scale)


def _product_scale(x: Tensor, weights: Tensor) -> float:
    """Return input scale × filter scale as the float32 that it must be; 0 if the filter is quantized per channel."""
    if weights.channel_quant is not None:
        return 0.0
    product = x.scale * weights.scale
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", product))[0]
    except OverflowError:
        rounded = 0.0
    if rounded <= 0.0:
        raise InvalidArgument(f"the scales of {x} and {weights} multiply to {product:g}: that is no float32 scale")
    return rounded


def _check_bias_scale(bias: Tensor, scale: float, output_scale: float) -> None:
    if scale and bias.file_scale and abs(scale - bias.file_scale) > _BIAS_TOLERANCE * output_scale:
        raise InvalidArgument(f"{bias} has scale {bias.file_scale:g}, input times filter make {scale:g}")


def _conv_2d(graph: Translation, operator: Operator) -> None:
    x, weights = _weights(graph, operator, 4)
    if len(x.shape) == 4 and x.shape[3] not in (0, weights.shape[3]):
        raise InvalidArgument(f"{x} has {x.shape[3]} channels, the filter {weights.shape[3]}: groups are not supported")
    arguments = [graph.value(x.index), graph.value(weights.index), _bias(graph, operator, x, weights, weights.shape[0])]
    arguments += [_padding(graph, operator), *_strides(graph, operator), _activation(graph, operator)]
    graph.emit(OperationType.CONV_2D, operator, *arguments, *_dilation(graph, operator))


def _depthwise_conv_2d(graph: Translation, operator: Operator) -> None:
    x, weights = _weights(graph, operator, 4)
    multiplier = _positive(graph, depth_multiplier=_depth_multiplier(operator, x, weights))
    arguments = [graph.value(x.index), graph.value(weights.index), _bias(graph, operator, x, weights, weights.shape[3])]
    arguments += [_padding(graph, operator), *_strides(graph, operator), *multiplier, _activation(graph, operator)]
    graph.emit(OperationType.DEPTHWISE_CONV_2D, operator, *arguments, *_dilation(graph, operator))


def _depth_multiplier(operator: Operator, x: Tensor, weights: Tensor) -> int:
    """Return the multiplier that the shapes say; TFLite's kernels ignore the option, and files have it wrong."""
    channels = x.shape[3] if len(x.shape) == 4 else 0
    if not channels:
        return int(operator.options.DepthMultiplier())
    if weights.shape[3] % channels:
        raise InvalidArgument(f"{weights} has {weights.shape[3]} channels, no multiple of the input's {channels}")
    return weights.shape[3] // channels


def _fully_connected(graph: Translation, operator: Operator) -> None:
    x, weights = _weights(graph, operator, 2)
    if operator.options is not None and operator.options.WeightsFormat():
        raise InvalidArgument(f"weights format {operator.options.WeightsFormat()} (shuffled) is not supported")
    units = weights.shape[0]
    arguments = [graph.value(x.index), graph.value(weights.index), _bias(graph, operator, x, weights, units)]
    arguments.append(_activation(graph, operator))
    y = graph.file.tensor(operator.outputs[0])
    if operator.options is None or not operator.options.KeepNumDims() or len(y.shape) in (0, 2):
        return graph.emit(OperationType.FULLY_CONNECTED, operator, *arguments)
    # NNAPI's result has two dimensions; the others come back by a RESHAPE.
    flat = graph.builder.operand(Operand(y.type, (math.prod(y.shape[:-1]), units), y.scale, y.zero_point))
    graph.builder.operation(OperationType.FULLY_CONNECTED, arguments, flat)
    return graph.emit(OperationType.RESHAPE, operator, flat, graph.builder.int32_vector(y.shape))


def _pool_2d(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        options = operator.options
        arguments = [graph.value(operator.inputs[0]), _padding(graph, operator), *_strides(graph, operator)]
        arguments += _positive(graph, filter_w=options.FilterWidth(), filter_h=options.FilterHeight())
        graph.emit(operation_type, operator, *arguments, _activation(graph, operator))

    return apply


def _elementwise(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    """Operations whose NNAPI arguments are TFLite's inputs, as they are."""

    def apply(graph: Translation, operator: Operator) -> None:
        graph.emit(operation_type, operator, *map(graph.value, operator.inputs))

    return apply


def _binary(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    def apply(graph: Translation, operator: Operator) -> None:
        a, b = map(graph.value, operator.inputs)
        graph.emit(operation_type, operator, a, b, _activation(graph, operator))

    return apply


def _softmax(graph: Translation, operator: Operator) -> None:
    x, beta = graph.value(operator.inputs[0]), operator.options.Beta()
    if not (math.isfinite(beta) and beta > 0):
        raise InvalidArgument(f"beta is {beta}: it must be a positive number")
    graph.emit(OperationType.SOFTMAX, operator, x, graph.builder.float_scalar(graph.builder[x].type, beta))


def _concatenation(graph: Translation, operator: Operator) -> None:
    if operator.options.FusedActivationFunction():
        raise InvalidArgument("a fused activation is not supported here")
    values = [graph.value(index) for index in operator.inputs]
    rank = len(graph.builder[values[0]].dimensions)
    axis = operator.options.Axis()
    if not -rank <= axis < rank:
        raise InvalidArgument(f"axis {axis} is not in {-rank}..{rank - 1}")
    graph.emit(OperationType.CONCATENATION, operator, *values, graph.builder.int32(axis % rank))


def _reshape(graph: Translation, operator: Operator) -> None:
    x = graph.value(operator.inputs[0])
    graph.emit(OperationType.RESHAPE, operator, x, _new_shape(graph, operator))


def _new_shape(graph: Translation, operator: Operator) -> int:
    """Return the shape argument: the second input if there is one, else the option, else the output's own shape."""
    if len(operator.inputs) == 2 and operator.inputs[1] != -1:
        shape = graph.file.tensor(operator.inputs[1])
        if shape.type != OperandType.TENSOR_INT32:
            raise InvalidArgument(f"{shape} is {shape.type.name}: a shape must be INT32")
        if shape.shape != (0,):
            return graph.value(shape.index)
    options = operator.options
    wanted = options.NewShapeAsNumpy().tolist() if options is not None and options.NewShapeLength() else []
    return graph.builder.int32_vector(wanted or graph.file.tensor(operator.outputs[0]).shape or (1,))


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


def _mean(graph: Translation, operator: Operator) -> None:
    x, axes = map(graph.value, operator.inputs)
    keep = operator.options is not None and operator.options.KeepDims()
    graph.emit(OperationType.MEAN, operator, x, axes, graph.builder.int32(int(keep)))


def _quantize(graph: Translation, operator: Operator) -> None:
    x = graph.file.tensor(operator.inputs[0])
    if x.type not in _FLOATS:
        raise InvalidArgument(f"{x} is {x.type.name}: only floats can be quantized, requantizing is not supported")
    graph.emit(OperationType.QUANTIZE, operator, graph.value(x.index))


def _dequantize(graph: Translation, operator: Operator) -> None:
    x = graph.file.tensor(operator.inputs[0])
    if x.type in _FLOATS:
        raise InvalidArgument(f"{x} is {x.type.name}: widening floats is not supported")
    graph.emit(OperationType.DEQUANTIZE, operator, graph.value(x.index))


_ONE = range(1, 2)
_TWO = range(2, 3)
_WEIGHTED = range(2, 4)

RULES: dict[str, Rule] = {
    "ADD": Rule(_TWO, _binary(OperationType.ADD), "AddOptions"),
    "AVERAGE_POOL_2D": Rule(_ONE, _pool_2d(OperationType.AVERAGE_POOL_2D), "Pool2DOptions", True),
    "CONCATENATION": Rule(_MANY, _concatenation, "ConcatenationOptions", True),
    "CONV_2D": Rule(_WEIGHTED, _conv_2d, "Conv2DOptions", True),
    "DEPTHWISE_CONV_2D": Rule(_WEIGHTED, _depthwise_conv_2d, "DepthwiseConv2DOptions", True),
    "DEQUANTIZE": Rule(_ONE, _dequantize),
    "FULLY_CONNECTED": Rule(_WEIGHTED, _fully_connected, "FullyConnectedOptions"),
    "LOGISTIC": Rule(_ONE, _elementwise(OperationType.LOGISTIC)),
    "MAX_POOL_2D": Rule(_ONE, _pool_2d(OperationType.MAX_POOL_2D), "Pool2DOptions", True),
    "MEAN": Rule(_TWO, _mean, "ReducerOptions"),
    "MUL": Rule(_TWO, _binary(OperationType.MUL), "MulOptions"),
    "PAD": Rule(_TWO, _elementwise(OperationType.PAD)),
    "QUANTIZE": Rule(_ONE, _quantize),
    "RELU": Rule(_ONE, _elementwise(OperationType.RELU)),
    "RELU6": Rule(_ONE, _elementwise(OperationType.RELU6)),
    "RELU_N1_TO_1": Rule(_ONE, _elementwise(OperationType.RELU1)),
    "RESHAPE": Rule(range(1, 3), _reshape, "ReshapeOptions"),
    "SOFTMAX": Rule(_ONE, _softmax, "SoftmaxOptions", True),
    "SQUEEZE": Rule(_ONE, _squeeze, "SqueezeOptions"),
}
