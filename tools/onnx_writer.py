"""An ONNX graph under construction, for tflite_to_onnx.py: values, layouts, quantized values, and operations by name.

Values are written in the order of the model's operations. An image has up to two names, one for each layout; what is
never asked for in a layout is never turned. Which quantized forms there are, and why, is told in tflite_to_onnx.py.
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
FORMAT, OPERATORS = 10, 21  # of ONNX: fixed, so that a newer package writes what an older runtime reads
SIGNED_SHIFT = 128
TO_FIRST, TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
_CODES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_HIGHEST = 255
_RANGES = {
    FusedActivationFunc.NONE: (-np.inf, np.inf),
    FusedActivationFunc.RELU: (0.0, np.inf),
    FusedActivationFunc.RELU1: (-1.0, 1.0),
    FusedActivationFunc.RELU6: (0.0, 6.0),
}


@dataclass
class Writer:
    """An ONNX graph under construction. Values have the names that `names` and, for NCHW, `first` give operands."""

    model: Model
    weight_type: npt.DTypeLike
    names: dict[int, str] = field(default_factory=dict)
    first: dict[int, str] = field(default_factory=dict)
    padded: dict[int, tuple[int, Array]] = field(default_factory=dict)
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

    def value(self, index: int) -> Array:
        """Return a constant of the model."""
        found = load_constant(self.model, self.operand(index))
        if found is None:
            raise InvalidArgument(f"operand {index} is no constant: it has no twin")
        return found

    def node(self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return the name of its output, or of the first of several (then `.1` and so on)."""
        name = f"n{len(self._nodes)}"
        names = [name, *(f"{name}.{number}" for number in range(1, outputs))]
        self._nodes.append(helper.make_node(kind, list(inputs), names, name=f"{kind}_{name}", **attributes))
        return name

    def const(self, array: Array | np.generic) -> str:
        """Return the name of an initializer; equal ones are one."""
        array = np.array(array, order="C")  # a scalar stays one
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"c{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    # ---- layout

    def last(self, index: int) -> str:
        """Return the name of a value as the model has it."""
        if index not in self.names:
            self.names[index] = self.node("Transpose", [self.image(index)], perm=TO_LAST)
        return self.names[index]

    def image(self, index: int) -> str:
        """Return the name of an image in NCHW."""
        if index in self.padded:
            source, pads = self.padded.pop(index)
            self.first[index] = self._pad(source, pads)
        if index not in self.first:
            self.first[index] = self.node("Transpose", [self.names[index]], perm=TO_FIRST)
        return self.first[index]

    def _pad(self, source: int, pads: Array) -> str:
        operand, order = self.operand(source), pads[list(TO_FIRST)]
        fill = np.zeros((), np.float32) if operand.type not in _CODES else np.array(self.zero_point(operand), np.uint8)
        flat = self.const(np.concatenate([order[:, 0], order[:, 1]]).astype(np.int64))
        return self.node("Pad", [self.image(source), flat, self.const(fill)])

    # ---- codes

    def zero_point(self, operand: Operand) -> int:
        """Return where zero lies among the twin's codes."""
        signed = operand.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED
        return operand.zero_point + (SIGNED_SHIFT if signed else 0)

    def _parameters(self, operand: Operand) -> list[str]:
        scale, zero = np.float32(operand.scale), np.uint8(self.zero_point(operand))
        return [self.const(scale), self.const(zero)]

    def real(self, name: str, operand: Operand) -> str:
        """Return the name of a value's numbers: itself, unless it is of codes."""
        if operand.type not in _CODES:
            return name
        return self.node("DequantizeLinear", [name, *self._parameters(operand)])

    def coded(self, name: str, operand: Operand) -> str:
        """Return the name of numbers as codes, where the operand has codes."""
        return name if operand.type not in _CODES else self.node("QuantizeLinear", [name, *self._parameters(operand)])

    def weights(self, index: int, arrange: Callable[[Array], Array], channel_axis: int) -> tuple[str, Array]:
        """Return the name of weights as numbers, and their scales (1 where they are floats)."""
        operand, array = self.operand(index), arrange(self.value(index))
        if operand.type == OperandType.TENSOR_FLOAT32:
            return self.const(array), np.ones((), np.float32)
        if operand.channel_quant is not None:
            scales = np.array(operand.channel_quant.scales, np.float32)
        else:
            scales = np.array(operand.scale, np.float32)
        codes, zero = as_weights(array, operand.zero_point, np.dtype(self.weight_type))
        zeros = np.full(scales.shape, zero, codes.dtype)
        axis = {"axis": channel_axis} if scales.ndim else {}
        return self.node("DequantizeLinear", [self.const(a) for a in (codes, scales, zeros)], **axis), scales

    def bias(self, index: int, source: Operand, scales: Array) -> str:
        """Return the name of a bias as numbers; its scale is that of the products."""
        array = self.value(index)
        if array.dtype == np.float32:
            return self.const(array)
        products = np.array(np.float32(source.scale) * scales, np.float32)
        axis = {"axis": 0} if products.ndim else {}
        zeros = np.zeros(products.shape, np.int32)
        return self.node("DequantizeLinear", [self.const(a) for a in (array, products, zeros)], **axis)

    def stored(self, name: str, number: int, output: Operand) -> str:
        """Return numbers as an operation's output has them: with one of the HAL's fused activations, and as codes.

        Codes are clamped themselves, as TFLite does it: a function between a product and its codes would keep ONNX
        Runtime from fusing the two.
        """
        return self.clamped(self.coded(name, output), number, output)

    def clamped(self, name: str, number: int, output: Operand) -> str:
        """Apply one of the HAL's fused activations to numbers or codes."""
        function = FusedActivationFunc(number)
        if output.type not in _CODES:
            return self._activated(name, function)
        low, high = self._limits(function, output)
        if (low, high) == (0, _HIGHEST):
            return name
        return self.node("Clip", [name, self.const(np.uint8(low)), self.const(np.uint8(high))])

    def _activated(self, name: str, function: FusedActivationFunc) -> str:
        if function == FusedActivationFunc.NONE:
            return name
        if function == FusedActivationFunc.RELU:
            return self.node("Relu", [name])
        return self.node("Clip", [name, *(self.const(np.float32(bound)) for bound in _RANGES[function])])

    def _limits(self, function: FusedActivationFunc, output: Operand) -> tuple[int, int]:
        codes = [bound / output.scale + self.zero_point(output) for bound in _RANGES[function]]
        low, high = (round(min(max(code, 0), _HIGHEST)) for code in codes)
        return low, high

    # ---- the end

    def finished(self) -> Any:
        """Return the checked model."""
        main = self.model.main
        results = self._results()
        inputs = [self._described(self.names[index], self.operand(index)) for index in main.input_indexes]
        graph = helper.make_graph(self._nodes, "twin", inputs, results, self._initializers)
        opsets = [helper.make_opsetid("", OPERATORS)]
        proto = helper.make_model(graph, ir_version=FORMAT, opset_imports=opsets, producer_name="nnfmq")
        onnx.checker.check_model(proto)
        return proto

    def _results(self) -> list[Any]:
        """Describe the outputs; ONNX wants a name of its own for each, and for none that of an input."""
        taken, described = [self.names[index] for index in self.model.main.input_indexes], []
        for index in self.model.main.output_indexes:
            name = self.last(index)
            taken.append(self.node("DeviceIdentity", [name]) if name in taken else name)
            described.append(self._described(taken[-1], self.operand(index)))
        return described

    def _described(self, name: str, operand: Operand) -> Any:
        kind = TensorProto.UINT8 if operand.type in _CODES else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, operand.dimensions)


def as_weights(codes: Array, zero_point: int, wanted: np.dtype[Any]) -> tuple[Array, int]:
    """Return codes of 8 bits, signed or not as `wanted`, and where zero lies among them."""
    if codes.dtype == wanted:
        return codes, zero_point
    shift = SIGNED_SHIFT if wanted == np.uint8 else -SIGNED_SHIFT
    return (codes.astype(np.int16) + shift).astype(wanted), zero_point + shift


@dataclass(frozen=True, slots=True)
class Call:
    """An operation, its arguments by their names in the declaration."""

    operation: Operation
    arguments: Mapping[str, int]  # operand's index; what is omitted is not there
    writer: Writer

    @classmethod
    def of(cls, writer: Writer, operation: Operation) -> Call:
        """Match an operation of the writer's model with its declaration."""
        operands = writer.model.main.operands
        inputs, outputs = [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs]
        found = match(REGISTRY[operation.type], inputs, outputs)
        pairs = zip(found.parameters, operation.inputs, strict=True)
        given = {p.name: index for p, index in pairs if operands[index].lifetime != LifeTime.NO_VALUE}
        return cls(operation, given, writer)

    def attribute(self, name: str, default: int = 0) -> int:
        """Return a scalar argument."""
        return int(self.writer.value(self.arguments[name])) if name in self.arguments else default

    def number(self, name: str) -> float:
        """Return a scalar float; 0 where it is not given."""
        return float(self.writer.value(self.arguments[name])) if name in self.arguments else 0.0

    def operand(self, name: str) -> Operand:
        """Return the operand that an argument is."""
        return self.writer.operand(self.arguments[name])

    @property
    def output(self) -> Operand:
        """The first output."""
        return self.writer.operand(self.operation.outputs[0])

    def size(self, what: str) -> tuple[int, int]:
        """Return the controls of height and width whose names begin so."""
        return self.attribute(f"{what}_height", 1), self.attribute(f"{what}_width", 1)

    def pads(self, source: Sequence[int], window: Sequence[int], strides: Sequence[int]) -> list[int]:
        """Return ONNX's pads, begins before ends, of a window (dilation included) over the height and width."""
        if "padding_scheme" not in self.arguments:
            sides = ("top", "left", "bottom", "right")
            return [self.attribute(f"padding_{side}") for side in sides]
        if self.attribute("padding_scheme") == PaddingScheme.VALID:
            return [0, 0, 0, 0]
        triples = list(zip(source, window, strides, strict=True))
        totals = [max((-(-size // stride) - 1) * stride + taps - size, 0) for size, taps, stride in triples]
        return [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]

    def refuse_nchw(self) -> None:
        """Raise InvalidArgument for images that the model has in NCHW."""
        if self.attribute("nchw"):
            raise InvalidArgument(f"{self.operation.type.name} in NCHW has no twin here")
