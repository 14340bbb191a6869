"""Write the ONNX twin of a .tflite model: the same network, in the form in which ONNX Runtime is fast.

    python tools/tflite_to_onnx.py model.tflite model.onnx

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx_writer import SIGNED_SHIFT, TO_LAST, Call, Writer

import nnfmq
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.types import Model, OperationType

Array = npt.NDArray[Any]
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
        return (array.view(np.uint8) ^ np.uint8(SIGNED_SHIFT)) if self.is_shifted and array.dtype == np.int8 else array

    def codes_out(self, array: Array) -> Array:
        """Return an output of the twin as the original gives it."""
        return (array ^ np.uint8(SIGNED_SHIFT)).view(np.int8) if self.is_shifted and array.dtype == np.uint8 else array


def twin_of(model: Model, weight_type: npt.DTypeLike = np.uint8) -> Twin:
    """Return the twin of a model whose shapes are known. Raises InvalidArgument naming what has no twin.

    `weight_type`, uint8 or int8, is that of quantized weights.
    """
    writer = Writer(model, weight_type)
    for operation in model.main.operations:
        rule = _RULES.get(operation.type)
        if rule is None:
            raise InvalidArgument(f"{operation.type.name} has no twin here: {', '.join(t.name for t in _RULES)}")
        rule(writer, Call.of(writer, operation))
    return Twin(writer.finished(), writer.is_shifted)


# ---- images


def _convolution(w: Writer, call: Call) -> None:
    def arrange(filters: Array) -> Array:
        return np.moveaxis(filters, -1, 1)

    height, width = call.operand("filter").dimensions[1:3]
    _windowed(w, call, arrange, 1, (height, width))


def _depthwise(w: Writer, call: Call) -> None:
    _, height, width, _ = call.operand("filter").dimensions
    group = call.operand("input").dimensions[3]
    _windowed(w, call, lambda filters: np.moveaxis(filters[0], -1, 0)[:, None], group, (height, width))


def _windowed(
    w: Writer, call: Call, arrange: Callable[[Array], Array], group: int, kernel: tuple[int, int]
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
    w.first[call.operation.outputs[0]] = w.stored(made, call.attribute("activation"), call.output)


def _pooling(w: Writer, call: Call) -> None:
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
    w.first[call.operation.outputs[0]] = w.stored(made, call.attribute("activation"), call.output)


def _greatest(w: Writer, call: Call) -> None:
    call.refuse_nchw()
    source = call.arguments["input"]
    kernel, strides = call.size("filter"), call.size("stride")
    pads = call.pads(w.operand(source).dimensions[1:3], kernel, strides)
    made = w.node("MaxPool", [w.image(source)], kernel_shape=kernel, strides=strides, pads=pads)  # of codes as well
    w.first[call.operation.outputs[0]] = w.clamped(made, call.attribute("activation"), call.output)


def _mean(w: Writer, call: Call) -> None:
    source = call.arguments["input"]
    axes = sorted(w.value(call.arguments["axes"]).tolist())
    if axes != [1, 2] or not call.attribute("keep_dimensions"):
        raise InvalidArgument(f"MEAN over {axes} has no twin here: only that of images, dimensions kept")
    made = w.node("GlobalAveragePool", [w.real(w.image(source), w.operand(source))])
    w.first[call.operation.outputs[0]] = w.coded(made, call.output)


def _pad(w: Writer, call: Call) -> None:
    source, paddings = call.arguments["input"], w.value(call.arguments["paddings"])
    if paddings.shape != (4, 2) or paddings[[0, 3]].any():
        raise InvalidArgument("PAD has a twin only for the heights and widths of images")
    w.padded[call.operation.outputs[0]] = source, paddings


def _addition(w: Writer, call: Call) -> None:
    both = [call.arguments["first"], call.arguments["second"]]
    is_image = any(index in w.first for index in both)
    names = [w.real(w.image(index) if is_image else w.last(index), w.operand(index)) for index in both]
    made = w.stored(w.node("Add", names), call.attribute("activation"), call.output)
    (w.first if is_image else w.names)[call.operation.outputs[0]] = made


# ---- the rest


def _transpose(w: Writer, call: Call) -> None:
    source, order = call.arguments["input"], tuple(w.value(call.arguments["permutation"]).tolist())
    if order == TO_LAST:
        w.first[call.operation.outputs[0]] = w.last(source)
    else:
        w.names[call.operation.outputs[0]] = w.node("Transpose", [w.last(source)], perm=order)


def _reshape(w: Writer, call: Call) -> None:
    source = call.arguments["input"]
    shape = w.operand(source).dimensions
    is_row = len(shape) == 4 and shape[1:3] == (1, 1)  # then both layouts are the same bytes
    name = w.image(source) if is_row and source in w.first else w.last(source)
    wanted = w.const(np.array(call.output.dimensions, np.int64))
    w.names[call.operation.outputs[0]] = w.node("Reshape", [name, wanted])


def _softmax(w: Writer, call: Call) -> None:
    source = call.arguments["input"]
    name, beta = w.real(w.last(source), w.operand(source)), call.number("beta")
    if beta != 1:
        name = w.node("Mul", [name, w.const(np.float32(beta))])
    w.names[call.operation.outputs[0]] = w.coded(w.node("Softmax", [name], axis=-1), call.output)


def _fully_connected(w: Writer, call: Call) -> None:
    source = call.arguments["input"]
    operand, name = w.operand(source), w.last(source)
    weights, scales = w.weights(call.arguments["weights"], lambda array: array, 0)
    if len(operand.dimensions) > 2:
        columns = call.operand("weights").dimensions[1]
        name = w.node("Reshape", [name, w.const(np.array([-1, columns], np.int64))])
    inputs = [w.real(name, operand), weights, w.bias(call.arguments["bias"], operand, scales)]
    made = w.stored(w.node("Gemm", inputs, transB=1), call.attribute("activation"), call.output)
    w.names[call.operation.outputs[0]] = made


# ---- cells


def _clipped(w: Writer, name: str, limit: float) -> str:
    if not limit:
        return name
    return w.node("Clip", [name, *(w.const(np.float32(bound)) for bound in (-limit, limit))])


def _cell_activated(w: Writer, name: str, number: int) -> str:
    if number and number not in _CELL_FUNCTIONS:
        raise InvalidArgument(f"a cell's activation {number} has no twin here")
    return w.node(_CELL_FUNCTIONS[number], [name]) if number else name


def _joined(w: Writer, first: str, second: str, weights: Sequence[Sequence[Array]], bias: Array) -> str:
    """Return one product of two inputs side by side: `weights` are those of each input, gate above gate."""
    stacked = np.concatenate([np.concatenate(gates) for gates in weights], axis=1)
    both = w.node("Concat", [first, second], axis=1)
    return w.node("Gemm", [both, w.const(np.ascontiguousarray(stacked.T)), w.const(bias)])


def _rnn(w: Writer, call: Call) -> None:
    weights = [[w.value(call.arguments[name])] for name in ("weights", "recurrent_weights")]
    inputs = [w.last(call.arguments[name]) for name in ("input", "hidden_state")]
    made = _joined(w, inputs[0], inputs[1], weights, w.value(call.arguments["bias"]))
    made = _cell_activated(w, made, call.attribute("activation"))
    for output in call.operation.outputs:
        w.names[output] = made


def _lstm(w: Writer, call: Call) -> None:
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
    split = w.node("Split", [product], outputs=3, axis=1, num_outputs=3)
    number = call.attribute("activation")
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


def _peeped(w: Writer, call: Call, name: str, gate: str, cell: str) -> str:
    if name not in call.arguments:
        return gate
    return w.node("Add", [gate, w.node("Mul", [cell, w.const(w.value(call.arguments[name]))])])


def _projected(w: Writer, call: Call, hidden: str) -> str:
    weights = w.value(call.arguments["projection_weights"])
    inputs = [hidden, w.const(np.ascontiguousarray(weights.T))]
    if "projection_bias" in call.arguments:
        inputs.append(w.const(w.value(call.arguments["projection_bias"])))
    return _clipped(w, w.node("Gemm", inputs), call.number("projection_clip"))


_RULES: dict[OperationType, Callable[[Writer, Call], None]] = {
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
        print(f"tflite_to_onnx: error: {error}", file=sys.stderr)
        return 1
    if twin.is_shifted:
        print("codes are uint8, 128 above the model's int8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
