"""Export of a model to ONNX, in the form that ONNX Runtime executes fastest, and the builder of its graph.

So ONNX Runtime and OpenVINO execute the weights of a .tflite file as the other runtimes do. Convolutions, pooling,
fully connected layers, products of batches, and RNN and LSTM cells are supported. A model with another operation is
rejected, and the message names the operation.

Layout: ONNX's images are NCHW. A transpose is added to each image input and output of the graph. A transpose
of the model from NCHW to NHWC is removed, and so is a PAD before a convolution.

Quantized models are written with QuantizeLinear and DequantizeLinear (QDQ), which ONNX Runtime fuses to its integer
kernels. These are optimized for uint8 activations. For an int8 model all quantized values, those of inputs and outputs
included, are therefore uint8 and higher by 128 (`OnnxExport.is_shifted`). Weights are uint8 too, also per-channel ones.
int8 weights are an option: the u8·s8 kernels are faster on processors with VNNI, but on others with AVX2 their int16
sums saturate, which gives wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from nnfmq.engines.interpreter import load_constant
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import (
    FusedActivationFunc,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    PaddingScheme,
)
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import match
from nnfmq.operations.preparation import tensor_of
from nnfmq.operations.quantization import quantized_activation_range

__all__ = ["MatchedOperation", "OnnxExport", "OnnxGraphBuilder", "convert_weights", "export_to_onnx"]


# ----------------------------------------------------------------------------------------------------------------------
# Builder of an ONNX graph for `onnx_export`: values in two layouts, QDQ quantization, and operations' arguments.
#
# Nodes are added in the order of the model's operations. An image can have two names, one in each layout; the second is
# added, with a transpose, when an operation first needs it. `onnx_export` describes layouts and quantization.


IR_VERSION, OPSET_VERSION = 10, 21  # fixed, so that an older runtime can read what a newer onnx package writes
INT8_TO_UINT8 = 128
NHWC_TO_NCHW, NCHW_TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)
_QUANTIZED_TYPES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_UINT8_MAX = 255


@dataclass
class OnnxGraphBuilder:
    """An ONNX graph under construction.

    `names` and `nchw_names` are the names of operands' values by operand index, in the model's layout and in NCHW.
    `deferred_pads` has the input and the paddings of each PAD that has not been added yet.
    """

    model: Model
    weight_type: npt.DTypeLike
    names: dict[int, str] = field(default_factory=dict)
    nchw_names: dict[int, str] = field(default_factory=dict)
    deferred_pads: dict[int, tuple[int, Array]] = field(default_factory=dict)
    is_shifted: bool = False
    _nodes: list[Any] = field(default_factory=list)
    _constants: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _initializers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        operands = self.model.main.operands
        self.is_shifted = any(o.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED for o in operands)
        self.names = {index: f"v{index}" for index in self.model.main.input_indexes}

    def operand(self, index: int) -> Operand:
        """Return an operand of the model."""
        return self.model.main.operands[index]

    def constant_of(self, index: int) -> Array:
        """Return the value of a constant operand.

        Raises:
            InvalidArgument: If the operand is not constant.
        """
        found = load_constant(self.model, self.operand(index))
        if found is None:
            raise InvalidArgument(f"operand {index} is not a constant: the model cannot be exported")
        return found

    def node(self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return the name of its first output. Further ones have the suffixes `.1`, `.2` and so on."""
        name = f"n{len(self._nodes)}"
        names = [name, *(f"{name}.{number}" for number in range(1, outputs))]
        self._nodes.append(helper.make_node(kind, list(inputs), names, name=f"{kind}_{name}", **attributes))
        return name

    def constant(self, array: Array | np.generic) -> str:
        """Return the name of an initializer with these values; equal arrays share one."""
        array = np.array(array, order="C")  # unlike ascontiguousarray, keeps the rank of a scalar
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"c{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    # ---- layout

    def value(self, index: int) -> str:
        """Return the name of an operand's value in the model's layout."""
        if index not in self.names:
            self.names[index] = self.node("Transpose", [self.nchw_value(index)], perm=NCHW_TO_NHWC)
        return self.names[index]

    def nchw_value(self, index: int) -> str:
        """Return the name of an image in NCHW."""
        if index in self.deferred_pads:
            source, pads = self.deferred_pads.pop(index)
            self.nchw_names[index] = self._pad(source, pads)
        if index not in self.nchw_names:
            self.nchw_names[index] = self.node("Transpose", [self.names[index]], perm=NHWC_TO_NCHW)
        return self.nchw_names[index]

    def _pad(self, source: int, pads: Array) -> str:
        operand, nchw_pads = self.operand(source), pads[list(NHWC_TO_NCHW)]
        fill = (
            np.zeros((), np.float32)
            if operand.type not in _QUANTIZED_TYPES
            else np.array(self.zero_point(operand), np.uint8)
        )
        flat = self.constant(np.concatenate([nchw_pads[:, 0], nchw_pads[:, 1]]).astype(np.int64))
        return self.node("Pad", [self.nchw_value(source), flat, self.constant(fill)])

    # ---- quantization

    def zero_point(self, operand: Operand) -> int:
        """Return the zero point of an operand in the export, where activations are uint8."""
        is_int8 = operand.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED
        return operand.zero_point + (INT8_TO_UINT8 if is_int8 else 0)

    def _qdq_params(self, operand: Operand) -> list[str]:
        scale, zero = np.float32(operand.scale), np.uint8(self.zero_point(operand))
        return [self.constant(scale), self.constant(zero)]

    def dequantized(self, name: str, operand: Operand) -> str:
        """Return the name of a value as floats: the same name if the operand is not quantized."""
        if operand.type not in _QUANTIZED_TYPES:
            return name
        return self.node("DequantizeLinear", [name, *self._qdq_params(operand)])

    def quantized(self, name: str, operand: Operand) -> str:
        """Return the name of floats quantized for `operand`: the same name if the operand is not quantized."""
        return (
            name
            if operand.type not in _QUANTIZED_TYPES
            else self.node("QuantizeLinear", [name, *self._qdq_params(operand)])
        )

    def weights(self, index: int, arrange: Callable[[Array], Array], channel_axis: int) -> tuple[str, Array]:
        """Return the name of weights as floats, and their scales (1 if the operand is not quantized)."""
        operand, array = self.operand(index), arrange(self.constant_of(index))
        if operand.type == OperandType.TENSOR_FLOAT32:
            return self.constant(array), np.ones((), np.float32)
        if operand.channel_quant is not None:
            scales = np.array(operand.channel_quant.scales, np.float32)
        else:
            scales = np.array(operand.scale, np.float32)
        values, zero = convert_weights(array, operand.zero_point, np.dtype(self.weight_type))
        zeros = np.full(scales.shape, zero, values.dtype)
        axis = {"axis": channel_axis} if scales.ndim else {}
        return self.node("DequantizeLinear", [self.constant(a) for a in (values, scales, zeros)], **axis), scales

    def bias(self, index: int, source: Operand, scales: Array) -> str:
        """Return the name of a bias as floats; its scale is input scale · weight scale."""
        array = self.constant_of(index)
        if array.dtype == np.float32:
            return self.constant(array)
        products = np.array(np.float32(source.scale) * scales, np.float32)
        axis = {"axis": 0} if products.ndim else {}
        zeros = np.zeros(products.shape, np.int32)
        return self.node("DequantizeLinear", [self.constant(a) for a in (array, products, zeros)], **axis)

    def output_value(self, name: str, activation: int, output: Operand) -> str:
        """Return the name of floats as an operation's output: quantized, with one of the HAL's fused activations.

        The quantized values are clamped, as in TFLite. An activation between a product and its quantization would
        prevent ONNX Runtime from fusing the two.
        """
        return self.activated(self.quantized(name, output), activation, output)

    def activated(self, name: str, activation: int, output: Operand) -> str:
        """Return the name of a value with one of the HAL's fused activations, applied in the type of `output`."""
        if output.type not in _QUANTIZED_TYPES:
            return self._float_activated(name, FusedActivationFunc(activation))
        shift = self.zero_point(output) - output.zero_point
        low, high = (code + shift for code in quantized_activation_range(activation, tensor_of(output, ())))
        if (low, high) == (0, _UINT8_MAX):
            return name
        return self.node("Clip", [name, self.constant(np.uint8(low)), self.constant(np.uint8(high))])

    def _float_activated(self, name: str, function: FusedActivationFunc) -> str:
        if function == FusedActivationFunc.NONE:
            return name
        if function == FusedActivationFunc.RELU:
            return self.node("Relu", [name])
        return self.node("Clip", [name, *(self.constant(np.float32(bound)) for bound in function.bounds)])

    # ---- result

    def build(self) -> Any:
        """Return the model (ModelProto) after a check with `onnx.checker`."""
        main = self.model.main
        results = self._output_infos()
        inputs = [self._value_info(self.names[index], self.operand(index)) for index in main.input_indexes]
        graph = helper.make_graph(self._nodes, "model", inputs, results, self._initializers)
        opsets = [helper.make_opsetid("", OPSET_VERSION)]
        proto = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name="nnfmq")
        onnx.checker.check_model(proto)
        return proto

    def _output_infos(self) -> list[Any]:
        """Return the outputs' names and types.

        ONNX requires that an output is not an input and that no two have the same name.
        """
        used_names, infos = [self.names[index] for index in self.model.main.input_indexes], []
        for index in self.model.main.output_indexes:
            name = self.value(index)
            used_names.append(self.node("Identity", [name]) if name in used_names else name)
            infos.append(self._value_info(used_names[-1], self.operand(index)))
        return infos

    def _value_info(self, name: str, operand: Operand) -> Any:
        kind = TensorProto.UINT8 if operand.type in _QUANTIZED_TYPES else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, operand.dimensions)


def convert_weights(values: Array, zero_point: int, dtype: np.dtype[Any]) -> tuple[Array, int]:
    """Return 8-bit quantized weights and their zero point, converted to `dtype` (int8 or uint8)."""
    if values.dtype == dtype:
        return values, zero_point
    shift = INT8_TO_UINT8 if dtype == np.uint8 else -INT8_TO_UINT8
    return (values.astype(np.int16) + shift).astype(dtype), zero_point + shift


@dataclass(frozen=True, slots=True)
class MatchedOperation:
    """An operation matched with its declaration.

    `arguments` has the operand index of each argument by its name in the declaration; omitted ones have no entry.
    """

    operation: Operation
    arguments: Mapping[str, int]
    builder: OnnxGraphBuilder

    @classmethod
    def of(cls, builder: OnnxGraphBuilder, operation: Operation) -> MatchedOperation:
        """Match an operation of the builder's model."""
        operands = builder.model.main.operands
        inputs, outputs = [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs]
        matched = match(REGISTRY[operation.type], inputs, outputs)
        pairs = zip(matched.parameters, operation.inputs, strict=True)
        arguments = {p.name: index for p, index in pairs if operands[index].lifetime != LifeTime.NO_VALUE}
        return cls(operation, arguments, builder)

    def attribute(self, name: str, default: int = 0) -> int:
        """Return an integer or bool argument, or `default` if it is omitted."""
        return int(self.builder.constant_of(self.arguments[name])) if name in self.arguments else default

    def float_attribute(self, name: str) -> float:
        """Return a float argument, or 0 if it is omitted."""
        return float(self.builder.constant_of(self.arguments[name])) if name in self.arguments else 0.0

    def operand(self, name: str) -> Operand:
        """Return the operand of an argument."""
        return self.builder.operand(self.arguments[name])

    @property
    def output(self) -> Operand:
        """The first output."""
        return self.builder.operand(self.operation.outputs[0])

    def size(self, prefix: str) -> tuple[int, int]:
        """Return the attributes `prefix`_height and `prefix`_width."""
        return self.attribute(f"{prefix}_height", 1), self.attribute(f"{prefix}_width", 1)

    def pads(self, source: Sequence[int], window: Sequence[int], strides: Sequence[int]) -> list[int]:
        """Return ONNX's pads (top, left, bottom, right) of a window, its dilation included, over height and width."""
        if "padding_scheme" not in self.arguments:
            sides = ("top", "left", "bottom", "right")
            return [self.attribute(f"padding_{side}") for side in sides]
        if self.attribute("padding_scheme") == PaddingScheme.VALID:
            return [0, 0, 0, 0]
        dimensions = zip(source, window, strides, strict=True)
        # SAME padding, of which the end gets the odd pixel
        totals = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size, kernel, stride in dimensions]
        return [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]

    def reject_nchw(self) -> None:
        """Raise InvalidArgument if the model's images are NCHW."""
        if self.attribute("nchw"):
            raise InvalidArgument(f"{self.operation.type.name} in NCHW cannot be exported")


# ----------------------------------------------------------------------------------------------------------------------
# Export a model to ONNX, in the form that ONNX Runtime executes fastest.


Array = npt.NDArray[Any]
_CELL_ACTIVATIONS = {1: "Relu", 4: "Tanh", 6: "Sigmoid"}  # by TFLite's activation code, which the HAL's LSTM uses too


@dataclass(frozen=True, slots=True)
class OnnxExport:
    """An ONNX model; its inputs and outputs have the order, shapes and layout of the original model's.

    `is_shifted`: the original is int8, the export uint8, with quantized values that are higher by 128.
    """

    proto: Any
    is_shifted: bool

    def to_onnx_input(self, array: Array) -> Array:
        """Convert an input of the original model to one of the export."""
        return (array.view(np.uint8) ^ np.uint8(INT8_TO_UINT8)) if self.is_shifted and array.dtype == np.int8 else array

    def from_onnx_output(self, array: Array) -> Array:
        """Convert an output of the export to one of the original model."""
        return (array ^ np.uint8(INT8_TO_UINT8)).view(np.int8) if self.is_shifted and array.dtype == np.uint8 else array


def export_to_onnx(model: Model, weight_type: npt.DTypeLike = np.uint8) -> OnnxExport:
    """Export a model whose shapes are known. `weight_type`, uint8 or int8, is the type of quantized weights.

    Raises:
        InvalidArgument: If an operation, or one of its options, is not supported.
    """
    builder = OnnxGraphBuilder(model, weight_type)
    for operation in model.main.operations:
        convert = _CONVERTERS.get(operation.type)
        if convert is None:
            supported = ", ".join(each.name for each in _CONVERTERS)
            raise InvalidArgument(f"{operation.type.name} cannot be exported; supported operations: {supported}")
        convert(builder, MatchedOperation.of(builder, operation))
    return OnnxExport(builder.build(), builder.is_shifted)


# ---- images


def _convolution(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    def arrange(filters: Array) -> Array:
        return np.moveaxis(filters, -1, 1)

    height, width = op.operand("filter").dimensions[1:3]
    _windowed(g, op, arrange, 1, (height, width))


def _depthwise(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    _, height, width, _ = op.operand("filter").dimensions
    group = op.operand("input").dimensions[3]
    _windowed(g, op, lambda filters: np.moveaxis(filters[0], -1, 0)[:, None], group, (height, width))


def _windowed(
    g: OnnxGraphBuilder,
    op: MatchedOperation,
    arrange: Callable[[Array], Array],
    group: int,
    kernel: tuple[int, int],
) -> None:  # fmt: skip
    op.reject_nchw()
    source = op.arguments["input"]
    strides, dilations = op.size("stride"), op.size("dilation")
    window = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    pads = op.pads(g.operand(source).dimensions[1:3], window, strides)
    if source in g.deferred_pads:
        source, paddings = g.deferred_pads[source]  # merge the PAD before this operation into its padding
        pads = [own + int(extra) for own, extra in zip(pads, paddings[1:3].T.reshape(-1), strict=True)]
    weights, scales = g.weights(op.arguments["filter"], arrange, 0)
    operand = g.operand(source)
    inputs = [g.dequantized(g.nchw_value(source), operand), weights, g.bias(op.arguments["bias"], operand, scales)]
    result = g.node(
        "Conv", inputs, group=group, kernel_shape=kernel, strides=strides, dilations=dilations, pads=pads
    )  # fmt: skip
    g.nchw_names[op.operation.outputs[0]] = g.output_value(result, op.attribute("activation"), op.output)


def _pooling(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    op.reject_nchw()
    source = op.arguments["input"]
    operand = g.operand(source)
    kernel, strides = op.size("filter"), op.size("stride")
    pads = op.pads(operand.dimensions[1:3], kernel, strides)
    inputs = [g.dequantized(g.nchw_value(source), operand)]
    if kernel == operand.dimensions[1:3] and not any(pads) and op.output.dimensions[1:3] == (1, 1):
        result = g.node("GlobalAveragePool", inputs)
    else:
        result = g.node("AveragePool", inputs, kernel_shape=kernel, strides=strides, pads=pads)
    g.nchw_names[op.operation.outputs[0]] = g.output_value(result, op.attribute("activation"), op.output)


def _max_pooling(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    op.reject_nchw()
    source = op.arguments["input"]
    kernel, strides = op.size("filter"), op.size("stride")
    pads = op.pads(g.operand(source).dimensions[1:3], kernel, strides)
    result = g.node(
        "MaxPool", [g.nchw_value(source)], kernel_shape=kernel, strides=strides, pads=pads
    )  # accepts quantized values
    g.nchw_names[op.operation.outputs[0]] = g.activated(result, op.attribute("activation"), op.output)


def _mean(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    source = op.arguments["input"]
    axes = sorted(g.constant_of(op.arguments["axes"]).tolist())
    if axes != [1, 2] or not op.attribute("keep_dimensions"):
        raise InvalidArgument(
            f"MEAN over axes {axes} cannot be exported: only over height and width, with dimensions kept"
        )
    result = g.node("GlobalAveragePool", [g.dequantized(g.nchw_value(source), g.operand(source))])
    g.nchw_names[op.operation.outputs[0]] = g.quantized(result, op.output)


def _pad(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    source, paddings = op.arguments["input"], g.constant_of(op.arguments["paddings"])
    if paddings.shape != (4, 2) or paddings[[0, 3]].any():
        raise InvalidArgument("PAD can be exported only if it pads height and width of images")
    g.deferred_pads[op.operation.outputs[0]] = source, paddings


def _addition(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    operands = [op.arguments["first"], op.arguments["second"]]
    is_nchw = any(index in g.nchw_names for index in operands)
    names = [g.dequantized(g.nchw_value(index) if is_nchw else g.value(index), g.operand(index)) for index in operands]
    result = g.output_value(g.node("Add", names), op.attribute("activation"), op.output)
    (g.nchw_names if is_nchw else g.names)[op.operation.outputs[0]] = result


# ---- other operations


def _transpose(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    source, order = op.arguments["input"], tuple(g.constant_of(op.arguments["permutation"]).tolist())
    if order == NCHW_TO_NHWC:
        g.nchw_names[op.operation.outputs[0]] = g.value(source)
    else:
        g.names[op.operation.outputs[0]] = g.node("Transpose", [g.value(source)], perm=order)


def _reshape(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    source = op.arguments["input"]
    shape = g.operand(source).dimensions
    is_pixel = len(shape) == 4 and shape[1:3] == (1, 1)  # NCHW and NHWC are then the same bytes
    name = g.nchw_value(source) if is_pixel and source in g.nchw_names else g.value(source)
    new_shape = g.constant(np.array(op.output.dimensions, np.int64))
    g.names[op.operation.outputs[0]] = g.node("Reshape", [name, new_shape])


def _softmax(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    source = op.arguments["input"]
    name, beta = g.dequantized(g.value(source), g.operand(source)), op.float_attribute("beta")
    if beta != 1:
        name = g.node("Mul", [name, g.constant(np.float32(beta))])
    g.names[op.operation.outputs[0]] = g.quantized(g.node("Softmax", [name], axis=-1), op.output)


def _fully_connected(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    source = op.arguments["input"]
    operand, name = g.operand(source), g.value(source)
    weights, scales = g.weights(op.arguments["weights"], lambda array: array, 0)
    if len(operand.dimensions) > 2:
        input_size = op.operand("weights").dimensions[1]
        name = g.node("Reshape", [name, g.constant(np.array([-1, input_size], np.int64))])
    inputs = [g.dequantized(name, operand), weights, g.bias(op.arguments["bias"], operand, scales)]
    result = g.output_value(g.node("Gemm", inputs, transB=1), op.attribute("activation"), op.output)
    g.names[op.operation.outputs[0]] = result


def _batch_matmul(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    factors = []
    for side in ("left", "right"):
        index = op.arguments[side]
        name, rank = g.dequantized(g.value(index), g.operand(index)), len(g.operand(index).dimensions)
        if op.attribute(f"adjoint_{side}"):
            name = g.node("Transpose", [name], perm=[*range(rank - 2), rank - 1, rank - 2])
        factors.append(name)
    g.names[op.operation.outputs[0]] = g.quantized(g.node("MatMul", factors), op.output)


# ---- recurrent cells


def _clip(g: OnnxGraphBuilder, name: str, limit: float) -> str:
    if not limit:
        return name
    return g.node("Clip", [name, *(g.constant(np.float32(bound)) for bound in (-limit, limit))])


def _cell_activation(g: OnnxGraphBuilder, name: str, code: int) -> str:
    if code and code not in _CELL_ACTIVATIONS:
        raise InvalidArgument(f"activation {code} of a recurrent cell cannot be exported")
    return g.node(_CELL_ACTIVATIONS[code], [name]) if code else name


def _concat_gemm(g: OnnxGraphBuilder, first: str, second: str, weights: Sequence[Sequence[Array]], bias: Array) -> str:
    """Return one GEMM of two concatenated inputs; `weights` has for each input the weights of all gates."""
    stacked = np.concatenate([np.concatenate(gates) for gates in weights], axis=1)
    inputs = g.node("Concat", [first, second], axis=1)
    return g.node("Gemm", [inputs, g.constant(np.ascontiguousarray(stacked.T)), g.constant(bias)])


def _rnn(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    weights = [[g.constant_of(op.arguments[name])] for name in ("weights", "recurrent_weights")]
    inputs = [g.value(op.arguments[name]) for name in ("input", "hidden_state")]
    result = _concat_gemm(g, inputs[0], inputs[1], weights, g.constant_of(op.arguments["bias"]))
    result = _cell_activation(g, result, op.attribute("activation"))
    for output in op.operation.outputs:
        g.names[output] = result


def _lstm(g: OnnxGraphBuilder, op: MatchedOperation) -> None:
    if "input_to_input_weights" in op.arguments or "cell_layer_norm_weights" in op.arguments:
        raise InvalidArgument(
            "LSTM can be exported only with CIFG (coupled input and forget gates) and without layer normalization"
        )
    gates = ("forget", "cell", "output")
    kinds = ("input_to_{}_weights", "recurrent_to_{}_weights")
    weights = [[g.constant_of(op.arguments[kind.format(gate)]) for gate in gates] for kind in kinds]
    bias = np.concatenate([g.constant_of(op.arguments[f"{gate}_gate_bias"]) for gate in gates])
    state = g.value(op.arguments["cell_state_in"])
    gates_out = _concat_gemm(
        g, g.value(op.arguments["input"]), g.value(op.arguments["output_state_in"]), weights, bias
    )  # fmt: skip
    split = g.node("Split", [gates_out], outputs=3, axis=1, num_outputs=3)
    activation = op.attribute("activation")
    forget = g.node("Sigmoid", [_add_peephole(g, op, "cell_to_forget_weights", split, state)])
    update = _cell_activation(g, f"{split}.1", activation)
    # f · c + (1 − f) · u as f · (c − u) + u, which is one operation less
    kept = g.node("Mul", [forget, g.node("Sub", [state, update])])
    cell = _clip(g, g.node("Add", [kept, update]), op.float_attribute("cell_clip"))
    output = g.node("Sigmoid", [_add_peephole(g, op, "cell_to_output_weights", f"{split}.2", cell)])
    hidden = g.node("Mul", [output, _cell_activation(g, cell, activation)])
    if "projection_weights" in op.arguments:
        hidden = _project(g, op, hidden)
    for number, name in ((1, hidden), (2, cell), (3, hidden)):  # output 0 is scratch, which no operation reads
        g.names[op.operation.outputs[number]] = name


def _add_peephole(g: OnnxGraphBuilder, op: MatchedOperation, name: str, gate: str, cell: str) -> str:
    if name not in op.arguments:
        return gate
    return g.node("Add", [gate, g.node("Mul", [cell, g.constant(g.constant_of(op.arguments[name]))])])


def _project(g: OnnxGraphBuilder, op: MatchedOperation, hidden: str) -> str:
    weights = g.constant_of(op.arguments["projection_weights"])
    inputs = [hidden, g.constant(np.ascontiguousarray(weights.T))]
    if "projection_bias" in op.arguments:
        inputs.append(g.constant(g.constant_of(op.arguments["projection_bias"])))
    return _clip(g, g.node("Gemm", inputs), op.float_attribute("projection_clip"))


_CONVERTERS: dict[OperationType, Callable[[OnnxGraphBuilder, MatchedOperation], None]] = {
    OperationType.ADD: _addition,
    OperationType.AVERAGE_POOL_2D: _pooling,
    OperationType.BATCH_MATMUL: _batch_matmul,
    OperationType.CONV_2D: _convolution,
    OperationType.DEPTHWISE_CONV_2D: _depthwise,
    OperationType.FULLY_CONNECTED: _fully_connected,
    OperationType.LSTM: _lstm,
    OperationType.MAX_POOL_2D: _max_pooling,
    OperationType.MEAN: _mean,
    OperationType.PAD: _pad,
    OperationType.RESHAPE: _reshape,
    OperationType.RNN: _rnn,
    OperationType.SOFTMAX: _softmax,
    OperationType.TRANSPOSE: _transpose,
}
