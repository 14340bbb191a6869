"""Write the ONNX twin of a .tflite model: the same network, in the form in which ONNX Runtime is fast.

    python tools/onnx_twins.py model.tflite model.onnx

For the models of `model_bench.py`, so that ONNX Runtime runs the same weights as everybody else: convolutions, their
relatives, pooling, and LSTM cells. What a model has beyond that is refused by name.

Layout: ONNX has images in NCHW. There is one transpose where an image enters the graph, and one where one leaves it; a
transpose of the model's own from NCHW to NHWC disappears, and so does a padding before a convolution.

Quantized models are in QDQ form, which ONNX Runtime fuses to its integer kernels. Activations are uint8, which these
are written for: where the model has int8, every code is 128 higher, those of inputs and outputs too
(`Twin.is_shifted`). Weights are uint8 as well, also those with a scale for each channel, unless int8 is asked for: the
kernels for uint8 times int8 are faster on processors with VNNI; on others with AVX2 their sums saturate, and results
are wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

import nnfmq
from nnfmq.engines.interpreter import constant
from nnfmq.hal.errors import InvalidArgument, NnfmqError
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
from nnfmq.operations.signature import match

Array = npt.NDArray[Any]
FORMAT, OPERATORS = 10, 21  # of ONNX: fixed, so that a newer package writes what an older runtime reads
SIGNED_SHIFT = 128
_TO_FIRST, _TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
_CODES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_HIGHEST = 255
_RANGES = {
    FusedActivationFunc.NONE: (-np.inf, np.inf),
    FusedActivationFunc.RELU: (0.0, np.inf),
    FusedActivationFunc.RELU1: (-1.0, 1.0),
    FusedActivationFunc.RELU6: (0.0, 6.0),
}
_CELL_FUNCTIONS = {1: "Relu", 4: "Tanh", 6: "Sigmoid"}  # TFLite's numbers, which LSTM has in the HAL too


@dataclass(frozen=True, slots=True)
class Twin:
    """An ONNX model; inputs and outputs are in the original's order, shapes and layout.

    `is_shifted`: codes are uint8 where the original's are int8, each 128 higher.
    """

    proto: Any
    is_shifted: bool

    def codes_in(self, array: Array) -> Array:
        """Return an input of the original as the twin takes it."""
        return (array.view(np.uint8) ^ np.uint8(128)) if self.is_shifted and array.dtype == np.int8 else array

    def codes_out(self, array: Array) -> Array:
        """Return an output of the twin as the original gives it."""
        return (array ^ np.uint8(128)).view(np.int8) if self.is_shifted and array.dtype == np.uint8 else array


def twin_of(model: Model, weight_type: npt.DTypeLike = np.uint8) -> Twin:
    """Return the twin of a model whose shapes are known. Raises InvalidArgument naming what has no twin.

    `weight_type`, uint8 or int8, is that of quantized weights.
    """
    writer = _Writer(model, weight_type)
    for operation in model.main.operations:
        rule = _RULES.get(operation.type)
        if rule is None:
            raise InvalidArgument(f"{operation.type.name} has no twin here: {', '.join(t.name for t in _RULES)}")
        rule(writer, _Call.of(writer, operation))
    return Twin(writer.finished(), writer.is_shifted)


@dataclass
class _Writer:
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
        return self.model.main.operands[index]

    def value(self, index: int) -> Array:
        """Return a constant of the model."""
        found = constant(self.model, self.operand(index))
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
            self.names[index] = self.node("Transpose", [self.image(index)], perm=_TO_LAST)
        return self.names[index]

    def image(self, index: int) -> str:
        """Return the name of an image in NCHW."""
        if index in self.padded:
            source, pads = self.padded.pop(index)
            self.first[index] = self._pad(source, pads)
        if index not in self.first:
            self.first[index] = self.node("Transpose", [self.names[index]], perm=_TO_FIRST)
        return self.first[index]

    def _pad(self, source: int, pads: Array) -> str:
        operand, order = self.operand(source), pads[list(_TO_FIRST)]
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
        codes, zero = _as_weights(array, operand.zero_point, np.dtype(self.weight_type))
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
            taken.append(self.node("Identity", [name]) if name in taken else name)
            described.append(self._described(taken[-1], self.operand(index)))
        return described

    def _described(self, name: str, operand: Operand) -> Any:
        kind = TensorProto.UINT8 if operand.type in _CODES else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, operand.dimensions)


def _as_weights(codes: Array, zero_point: int, wanted: np.dtype[Any]) -> tuple[Array, int]:
    """Return codes of 8 bits, signed or not as `wanted`, and where zero lies among them."""
    if codes.dtype == wanted:
        return codes, zero_point
    shift = SIGNED_SHIFT if wanted == np.uint8 else -SIGNED_SHIFT
    return (codes.astype(np.int16) + shift).astype(wanted), zero_point + shift


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation, its arguments by their names in the declaration."""

    operation: Operation
    arguments: Mapping[str, int]  # operand's index; what is omitted is not there
    writer: _Writer

    @classmethod
    def of(cls, writer: _Writer, operation: Operation) -> _Call:
        operands = writer.model.main.operands
        inputs, outputs = [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs]
        found = match(REGISTRY[operation.type], inputs, outputs)
        pairs = zip(found.parameters, operation.inputs, strict=True)
        given = {p.name: index for p, index in pairs if operands[index].lifetime != LifeTime.NO_VALUE}
        return cls(operation, given, writer)

    def control(self, name: str, default: int = 0) -> int:
        """Return a scalar argument."""
        return int(self.writer.value(self.arguments[name])) if name in self.arguments else default

    def number(self, name: str) -> float:
        """Return a scalar float; 0 where it is not given."""
        return float(self.writer.value(self.arguments[name])) if name in self.arguments else 0.0

    def operand(self, name: str) -> Operand:
        return self.writer.operand(self.arguments[name])

    @property
    def output(self) -> Operand:
        return self.writer.operand(self.operation.outputs[0])

    def size(self, what: str) -> tuple[int, int]:
        """Return the controls of height and width whose names begin so."""
        return self.control(f"{what}_height", 1), self.control(f"{what}_width", 1)

    def pads(self, source: Sequence[int], window: Sequence[int], strides: Sequence[int]) -> list[int]:
        """Return ONNX's pads, begins before ends, of a window (dilation included) over the height and width."""
        if "padding_scheme" not in self.arguments:
            sides = ("top", "left", "bottom", "right")
            return [self.control(f"padding_{side}") for side in sides]
        if self.control("padding_scheme") == PaddingScheme.VALID:
            return [0, 0, 0, 0]
        triples = list(zip(source, window, strides, strict=True))
        totals = [max((-(-size // stride) - 1) * stride + taps - size, 0) for size, taps, stride in triples]
        return [*(total // 2 for total in totals), *(total - total // 2 for total in totals)]

    def refuse_nchw(self) -> None:
        if self.control("nchw"):
            raise InvalidArgument(f"{self.operation.type.name} in NCHW has no twin here")


# ---- images


def _convolution(w: _Writer, call: _Call) -> None:
    def arrange(filters: Array) -> Array:
        return np.moveaxis(filters, -1, 1)

    height, width = call.operand("filter").dimensions[1:3]
    _windowed(w, call, arrange, 1, (height, width))


def _depthwise(w: _Writer, call: _Call) -> None:
    _, height, width, _ = call.operand("filter").dimensions
    group = call.operand("input").dimensions[3]
    _windowed(w, call, lambda filters: np.moveaxis(filters[0], -1, 0)[:, None], group, (height, width))


def _windowed(
    w: _Writer, call: _Call, arrange: Callable[[Array], Array], group: int, kernel: tuple[int, int]
) -> None:  # fmt: skip
    call.refuse_nchw()
    source = call.arguments["input"]
    strides, dilations = call.size("stride"), call.size("dilation")
    window = [(taps - 1) * step + 1 for taps, step in zip(kernel, dilations, strict=True)]
    pads = call.pads(w.operand(source).dimensions[1:3], window, strides)
    if source in w.padded:
        source, before = w.padded[source]
        pads = [own + int(more) for own, more in zip(pads, before[1:3].T.reshape(-1), strict=True)]
    weights, scales = w.weights(call.arguments["filter"], arrange, 0)
    operand = w.operand(source)
    inputs = [w.real(w.image(source), operand), weights, w.bias(call.arguments["bias"], operand, scales)]
    made = w.node(
        "Conv", inputs, group=group, kernel_shape=kernel, strides=strides, dilations=dilations, pads=pads
    )  # fmt: skip
    w.first[call.operation.outputs[0]] = w.stored(made, call.control("activation"), call.output)


def _pooling(w: _Writer, call: _Call) -> None:
    call.refuse_nchw()
    source = call.arguments["input"]
    operand = w.operand(source)
    kernel, strides = call.size("filter"), call.size("stride")
    pads = call.pads(operand.dimensions[1:3], kernel, strides)
    given = [w.real(w.image(source), operand)]
    if kernel == operand.dimensions[1:3] and not any(pads) and call.output.dimensions[1:3] == (1, 1):
        made = w.node("GlobalAveragePool", given)
    else:
        made = w.node("AveragePool", given, kernel_shape=kernel, strides=strides, pads=pads)
    w.first[call.operation.outputs[0]] = w.stored(made, call.control("activation"), call.output)


def _greatest(w: _Writer, call: _Call) -> None:
    call.refuse_nchw()
    source = call.arguments["input"]
    kernel, strides = call.size("filter"), call.size("stride")
    pads = call.pads(w.operand(source).dimensions[1:3], kernel, strides)
    made = w.node("MaxPool", [w.image(source)], kernel_shape=kernel, strides=strides, pads=pads)  # of codes as well
    w.first[call.operation.outputs[0]] = w.clamped(made, call.control("activation"), call.output)


def _mean(w: _Writer, call: _Call) -> None:
    source = call.arguments["input"]
    axes = sorted(w.value(call.arguments["axes"]).tolist())
    if axes != [1, 2] or not call.control("keep_dimensions"):
        raise InvalidArgument(f"MEAN over {axes} has no twin here: only that of images, dimensions kept")
    made = w.node("GlobalAveragePool", [w.real(w.image(source), w.operand(source))])
    w.first[call.operation.outputs[0]] = w.coded(made, call.output)


def _pad(w: _Writer, call: _Call) -> None:
    source, paddings = call.arguments["input"], w.value(call.arguments["paddings"])
    if paddings.shape != (4, 2) or paddings[[0, 3]].any():
        raise InvalidArgument("PAD has a twin only for the heights and widths of images")
    w.padded[call.operation.outputs[0]] = source, paddings


def _addition(w: _Writer, call: _Call) -> None:
    both = [call.arguments["first"], call.arguments["second"]]
    is_image = any(index in w.first for index in both)
    names = [w.real(w.image(index) if is_image else w.last(index), w.operand(index)) for index in both]
    made = w.stored(w.node("Add", names), call.control("activation"), call.output)
    (w.first if is_image else w.names)[call.operation.outputs[0]] = made


# ---- the rest


def _transpose(w: _Writer, call: _Call) -> None:
    source, order = call.arguments["input"], tuple(w.value(call.arguments["permutation"]).tolist())
    if order == _TO_LAST:
        w.first[call.operation.outputs[0]] = w.last(source)
    else:
        w.names[call.operation.outputs[0]] = w.node("Transpose", [w.last(source)], perm=order)


def _reshape(w: _Writer, call: _Call) -> None:
    source = call.arguments["input"]
    shape = w.operand(source).dimensions
    is_row = len(shape) == 4 and shape[1:3] == (1, 1)  # then both layouts are the same bytes
    name = w.image(source) if is_row and source in w.first else w.last(source)
    wanted = w.const(np.array(call.output.dimensions, np.int64))
    w.names[call.operation.outputs[0]] = w.node("Reshape", [name, wanted])


def _softmax(w: _Writer, call: _Call) -> None:
    source = call.arguments["input"]
    name, beta = w.real(w.last(source), w.operand(source)), call.number("beta")
    if beta != 1:
        name = w.node("Mul", [name, w.const(np.float32(beta))])
    w.names[call.operation.outputs[0]] = w.coded(w.node("Softmax", [name], axis=-1), call.output)


def _fully_connected(w: _Writer, call: _Call) -> None:
    source = call.arguments["input"]
    operand, name = w.operand(source), w.last(source)
    weights, scales = w.weights(call.arguments["weights"], lambda array: array, 0)
    if len(operand.dimensions) > 2:
        columns = call.operand("weights").dimensions[1]
        name = w.node("Reshape", [name, w.const(np.array([-1, columns], np.int64))])
    inputs = [w.real(name, operand), weights, w.bias(call.arguments["bias"], operand, scales)]
    made = w.stored(w.node("Gemm", inputs, transB=1), call.control("activation"), call.output)
    w.names[call.operation.outputs[0]] = made


# ---- cells


def _clipped(w: _Writer, name: str, limit: float) -> str:
    if not limit:
        return name
    return w.node("Clip", [name, *(w.const(np.float32(bound)) for bound in (-limit, limit))])


def _cell_activated(w: _Writer, name: str, number: int) -> str:
    if number and number not in _CELL_FUNCTIONS:
        raise InvalidArgument(f"a cell's activation {number} has no twin here")
    return w.node(_CELL_FUNCTIONS[number], [name]) if number else name


def _joined(w: _Writer, first: str, second: str, weights: Sequence[Sequence[Array]], bias: Array) -> str:
    """Return one product of two inputs side by side: `weights` are those of each input, gate above gate."""
    stacked = np.concatenate([np.concatenate(gates) for gates in weights], axis=1)
    both = w.node("Concat", [first, second], axis=1)
    return w.node("Gemm", [both, w.const(np.ascontiguousarray(stacked.T)), w.const(bias)])


def _rnn(w: _Writer, call: _Call) -> None:
    weights = [[w.value(call.arguments[name])] for name in ("weights", "recurrent_weights")]
    inputs = [w.last(call.arguments[name]) for name in ("input", "hidden_state")]
    made = _joined(w, inputs[0], inputs[1], weights, w.value(call.arguments["bias"]))
    made = _cell_activated(w, made, call.control("activation"))
    for output in call.operation.outputs:
        w.names[output] = made


def _lstm(w: _Writer, call: _Call) -> None:
    if "input_to_input_weights" in call.arguments or "cell_layer_norm_weights" in call.arguments:
        raise InvalidArgument("LSTM has a twin only with the input gate coupled to the forget gate, without norms")
    gates = ("forget", "cell", "output")
    kinds = ("input_to_{}_weights", "recurrent_to_{}_weights")
    weights = [[w.value(call.arguments[kind.format(gate)]) for gate in gates] for kind in kinds]
    bias = np.concatenate([w.value(call.arguments[f"{gate}_gate_bias"]) for gate in gates])
    state = w.last(call.arguments["cell_state_in"])
    product = _joined(
        w, w.last(call.arguments["input"]), w.last(call.arguments["output_state_in"]), weights, bias
    )  # fmt: skip
    w.node("Split", [product], outputs=3, axis=1, num_outputs=3)
    split = f"n{len(w._nodes) - 1}"
    number = call.control("activation")
    forget = w.node("Sigmoid", [_peeped(w, call, "cell_to_forget_weights", split, state)])
    update = _cell_activated(w, f"{split}.1", number)
    # f c + (1 - f) u with an operation less
    kept = w.node("Mul", [forget, w.node("Sub", [state, update])])
    cell = _clipped(w, w.node("Add", [kept, update]), call.number("cell_clip"))
    output = w.node("Sigmoid", [_peeped(w, call, "cell_to_output_weights", f"{split}.2", cell)])
    hidden = w.node("Mul", [output, _cell_activated(w, cell, number)])
    if "projection_weights" in call.arguments:
        hidden = _projected(w, call, hidden)
    for place, name in ((1, hidden), (2, cell), (3, hidden)):  # 0 is scratch, which nobody reads
        w.names[call.operation.outputs[place]] = name


def _peeped(w: _Writer, call: _Call, name: str, gate: str, cell: str) -> str:
    if name not in call.arguments:
        return gate
    return w.node("Add", [gate, w.node("Mul", [cell, w.const(w.value(call.arguments[name]))])])


def _projected(w: _Writer, call: _Call, hidden: str) -> str:
    weights = w.value(call.arguments["projection_weights"])
    inputs = [hidden, w.const(np.ascontiguousarray(weights.T))]
    if "projection_bias" in call.arguments:
        inputs.append(w.const(w.value(call.arguments["projection_bias"])))
    return _clipped(w, w.node("Gemm", inputs), call.number("projection_clip"))


_RULES: dict[OperationType, Callable[[_Writer, _Call], None]] = {
    OperationType.ADD: _addition,
    OperationType.AVERAGE_POOL_2D: _pooling,
    OperationType.CONV_2D: _convolution,
    OperationType.DEPTHWISE_CONV_2D: _depthwise,
    OperationType.FULLY_CONNECTED: _fully_connected,
    OperationType.LSTM: _lstm,
    OperationType.MAX_POOL_2D: _greatest,
    OperationType.MEAN: _mean,
    OperationType.PAD: _pad,
    OperationType.RESHAPE: _reshape,
    OperationType.RNN: _rnn,
    OperationType.SOFTMAX: _softmax,
    OperationType.TRANSPOSE: _transpose,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert one file; 0 done, 1 failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a .tflite file")
    parser.add_argument("output", metavar="FILE", type=Path, help="the .onnx file to write")
    options = parser.parse_args(arguments)
    try:
        twin = twin_of(nnfmq.load(options.model).model)
        options.output.write_bytes(twin.proto.SerializeToString())
    except (NnfmqError, OSError) as error:
        print(f"onnx_twins: error: {error}", file=sys.stderr)
        return 1
    if twin.is_shifted:
        print("codes are uint8, 128 above the model's int8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
