"""Builder of an ONNX graph for `onnx_export`: values in two layouts, QDQ quantization, and operations' arguments.

Nodes are added in the order of the model's operations. An image can have two names, one in each layout; the second is
added, with a transpose, when an operation first needs it. `onnx_export` describes layouts and quantization.
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
from nnfmq.hal.types import FusedActivationFunc, LifeTime, Model, Operand, OperandType, Operation, PaddingScheme
from nnfmq.operations import REGISTRY
from nnfmq.operations.signature import match

Array = npt.NDArray[Any]
IR_VERSION, OPSET_VERSION = 10, 21  # fixed, so that an older runtime can read what a newer onnx package writes
INT8_TO_UINT8 = 128
NHWC_TO_NCHW, NCHW_TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)
_QUANTIZED_TYPES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_UINT8_MAX = 255
_ACTIVATION_RANGES = {
    FusedActivationFunc.NONE: (-np.inf, np.inf),
    FusedActivationFunc.RELU: (0.0, np.inf),
    FusedActivationFunc.RELU1: (-1.0, 1.0),
    FusedActivationFunc.RELU6: (0.0, 6.0),
}


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
        function = FusedActivationFunc(activation)
        if output.type not in _QUANTIZED_TYPES:
            return self._float_activated(name, function)
        low, high = self._quantized_activation_range(function, output)
        if (low, high) == (0, _UINT8_MAX):
            return name
        return self.node("Clip", [name, self.constant(np.uint8(low)), self.constant(np.uint8(high))])

    def _float_activated(self, name: str, function: FusedActivationFunc) -> str:
        if function == FusedActivationFunc.NONE:
            return name
        if function == FusedActivationFunc.RELU:
            return self.node("Relu", [name])
        return self.node("Clip", [name, *(self.constant(np.float32(bound)) for bound in _ACTIVATION_RANGES[function])])

    def _quantized_activation_range(self, function: FusedActivationFunc, output: Operand) -> tuple[int, int]:
        bounds = [bound / output.scale + self.zero_point(output) for bound in _ACTIVATION_RANGES[function]]
        low, high = (round(min(max(bound, 0), _UINT8_MAX)) for bound in bounds)
        return low, high

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
