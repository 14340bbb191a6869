"""Recurrent operations. TFLite changes their states in place; the HAL returns them as further outputs.

Both list a cell's tensors in the same order: an operation's parameters without its controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import Role
from support.by_name import Use
from support.litert import Feed, by_litert
from support.oracles import FLOAT, Argument, Array, Builder, Case, Draw, Listed

GATES = ("input", "forget", "cell", "output")
ACTIVATIONS = (0, 1, 3, 4)  # none, RELU, RELU6, TANH: those with one number in both


def numbers(draw: Draw, *shape: int) -> Array:
    """Return floats of the size of trained weights."""
    return draw.rng.normal(0, 0.5, shape).astype(np.float32)


def feeds(code: OperationType, values: Mapping[str, Any]) -> tuple[list[Feed], list[int]]:
    """Return TFLite's inputs, and which of them are states."""
    names = [p.name for p in REGISTRY[code].overloads[0].parameters if p.role is not Role.ATTRIBUTE]
    if code is OperationType.BIDIRECTIONAL_SEQUENCE_LSTM:  # TFLite's has no normalization
        names = [name for name in names if "norm" not in name]
    found: list[Feed] = []
    for name in names:
        array = values[name]
        found.append(None if array is None else (Operand(OperandType.TENSOR_FLOAT32, array.shape), array))
    return found, [place for place, name in enumerate(names) if "state" in name]


def both(
    code: OperationType,
    values: Mapping[str, Any],
    order: Sequence[int],
    table: str,
    options: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> Case:
    """Return a case; `order` picks the HAL's outputs: TFLite's outputs, of `shapes`, and then its states."""
    argument, states = feeds(code, values)
    outputs = [Operand(OperandType.TENSOR_FLOAT32, shape) for shape in shapes]

    def run_nnfmq() -> list[Array]:
        found = Use(code, values, max(order) + 1).run()
        return [found[place] for place in order]

    return Case(run_nnfmq, lambda: by_litert(code.name, argument, outputs, table, options, states))


def basic_cell(draw: Draw, prefix: str, batch: int, size: int, units: int) -> dict[str, Any]:
    """Return the tensors of an RNN's cell."""
    return {
        f"{prefix}weights": numbers(draw, units, size),
        f"{prefix}recurrent_weights": numbers(draw, units, units),
        f"{prefix}bias": numbers(draw, units),
        f"{prefix}hidden_state": numbers(draw, batch, units),
    }


def rnn(draw: Draw) -> Case:
    """Build RNN."""
    batch, size, units = draw.shape(3, 9)
    code = ACTIVATIONS[draw.below(0, 4)]
    values = basic_cell(draw, "", batch, size, units) | {"input": numbers(draw, batch, size), "activation": code}
    options = {"FusedActivationFunction": code}
    return both(OperationType.RNN, values, [1, 0], "RNNOptions", options, [(batch, units)])


def in_order(array: Array, time_major: bool) -> Array:
    """Return a sequence (time, batch, size) as the flag says."""
    return np.ascontiguousarray(array if time_major else array.swapaxes(0, 1))


def rnn_sequence(draw: Draw) -> Case:
    """Build UNIDIRECTIONAL_SEQUENCE_RNN."""
    (batch, size, units), time, time_major = draw.shape(3), draw.below(1, 6), draw.truth()
    code = ACTIVATIONS[draw.below(0, 4)]
    x = in_order(numbers(draw, time, batch, size), time_major)
    values = basic_cell(draw, "", batch, size, units)
    values |= {"input": x, "activation": code, "time_major": int(time_major)}
    options = {"FusedActivationFunction": code, "TimeMajor": time_major}
    shape = (*x.shape[:2], units)
    return both(OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, values, [0, 1], "SequenceRNNOptions", options, [shape])


def bidirectional_rnn(draw: Draw) -> Case:
    """Build BIDIRECTIONAL_SEQUENCE_RNN: merged or not, without auxiliary input or with one and its weights."""
    (batch, size, units, back), time = draw.shape(4), draw.below(1, 6)
    time_major, merged, linked = draw.truth(), draw.truth(), draw.truth()
    code = ACTIVATIONS[draw.below(0, 4)]
    x = in_order(numbers(draw, time, batch, size), time_major)
    values = basic_cell(draw, "fw_", batch, size, units) | basic_cell(draw, "bw_", batch, size, back)
    values |= {"aux_input": None, "fw_aux_weights": None, "bw_aux_weights": None}
    if linked:
        values["aux_input"] = in_order(numbers(draw, time, batch, size), time_major)
        values |= {"fw_aux_weights": numbers(draw, units, size), "bw_aux_weights": numbers(draw, back, size)}
    values |= {"input": x, "activation": code, "time_major": time_major, "merge_outputs": merged}
    options = {"FusedActivationFunction": code, "TimeMajor": time_major, "MergeOutputs": merged}
    sizes = [units + back] if merged else [units, back]
    shapes = [(*x.shape[:2], n) for n in sizes]
    order = range(len(sizes) + 2)
    name = OperationType.BIDIRECTIONAL_SEQUENCE_RNN
    return both(name, values, order, "BidirectionalSequenceRNNOptions", options, shapes)


def svdf(draw: Draw) -> Case:
    """Build SVDF. The HAL shifts its memory after the step, TFLite before it: TFLite's is one column behind."""
    (batch, size, units, memory), rank = draw.shape(4), draw.below(1, 3)
    code, filters = draw.below(0, 2), units * rank
    past = numbers(draw, batch, filters, memory)
    values: dict[str, Any] = {
        "input": numbers(draw, batch, size),
        "weights_feature": numbers(draw, filters, size),
        "weights_time": numbers(draw, filters, memory),
        "bias": numbers(draw, units) if draw.truth() else None,
        "state_in": past.reshape(batch, -1),
        "rank": rank,
        "activation": code,
    }
    behind = np.roll(past, 1, axis=2).reshape(batch, -1)
    argument, states = feeds(OperationType.SVDF, values | {"state_in": behind})
    output = Operand(OperandType.TENSOR_FLOAT32, (batch, units))
    options = {"Rank": rank, "FusedActivationFunction": code}

    def run_nnfmq() -> list[Array]:
        state, found = Use(OperationType.SVDF, values, 2).run()
        return [found, state.reshape(past.shape)[..., :-1]]

    def run_litert() -> list[Array]:
        found, state = by_litert("SVDF", argument, [output], "SVDFOptions", options, states)
        return [found, state.reshape(past.shape)[..., 1:]]

    return Case(run_nnfmq, run_litert)


def gated_cell(
    draw: Draw, prefix: str, size: int, cells: int, output: int, *, norm: bool = False, aux: int = 0
) -> dict[str, Any]:
    """Return the tensors of an LSTM's cell with some of its optional parts."""
    coupled, peephole, projected = draw.truth(), draw.truth(), output != cells or draw.truth()
    values: dict[str, Any] = {}

    def put(name: str, present: bool, *shape: int) -> None:
        values[prefix + name] = numbers(draw, *shape) if present else None

    for gate in GATES:
        here = gate != "input" or not coupled
        put(f"input_to_{gate}_weights", here, cells, size)
        put(f"recurrent_to_{gate}_weights", here, cells, output)
        put(f"{gate}_gate_bias", here, cells)
        put(f"{gate}_layer_norm_weights", here and norm, cells)
        put(f"aux_input_to_{gate}_weights", here and aux > 0, cells, max(aux, 1))
        put(f"cell_to_{gate}_weights", here and peephole, cells)
    put("projection_weights", projected, output, cells)
    put("projection_bias", projected and draw.truth(), output)
    return values


def output_size(draw: Draw, cells: int) -> int:
    """Return the size of an LSTM's output, which only a projection makes another than that of its state."""
    return cells if draw.truth() else draw.below(1, 6)


def gate_controls(draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return activation and clips, by the HAL's names and by TFLite's.

    Without an activation TFLite's kernels take whatever an earlier step left in their scratch memory.
    """
    code = ACTIVATIONS[draw.below(1, 4)]
    clips = [0.0 if draw.truth() else draw.real(0.2, 1) for _ in range(2)]
    hal_arguments = {"activation": code, "cell_clip": clips[0], "projection_clip": clips[1]}
    return hal_arguments, {"FusedActivationFunction": code, "CellClip": clips[0], "ProjClip": clips[1]}


def lstm(draw: Draw) -> Case:
    """Build LSTM with any of its optional parts."""
    batch, size, cells = draw.shape(3)
    output = output_size(draw, cells)
    values = gated_cell(draw, "", size, cells, output, norm=draw.truth())
    attributes, options = gate_controls(draw)
    values |= attributes | {"input": numbers(draw, batch, size)}
    values |= {"output_state_in": numbers(draw, batch, output), "cell_state_in": numbers(draw, batch, cells)}
    return both(OperationType.LSTM, values, [3, 1, 2], "LSTMOptions", options, [(batch, output)])


def lstm_sequence(draw: Draw) -> Case:
    """Build UNIDIRECTIONAL_SEQUENCE_LSTM with any of its optional parts."""
    (batch, size, cells), time, time_major = draw.shape(3), draw.below(1, 6), draw.truth()
    output = output_size(draw, cells)
    values = gated_cell(draw, "", size, cells, output, norm=draw.truth())
    attributes, options = gate_controls(draw)
    x = in_order(numbers(draw, time, batch, size), time_major)
    values |= attributes | {"input": x, "time_major": time_major}
    values |= {"output_state_in": numbers(draw, batch, output), "cell_state_in": numbers(draw, batch, cells)}
    options |= {"TimeMajor": time_major}
    shape = (*x.shape[:2], output)
    name = OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM
    return both(name, values, [0, 1, 2], "UnidirectionalSequenceLSTMOptions", options, [shape])


def bidirectional_lstm(draw: Draw) -> Case:
    """Build BIDIRECTIONAL_SEQUENCE_LSTM: merged or not, with auxiliary input or not; TFLite wants equal sizes."""
    (batch, size, cells), time = draw.shape(3), draw.below(1, 6)
    output = output_size(draw, cells)
    time_major, aux = draw.truth(), size if draw.truth() else 0
    merged = time_major and draw.truth()  # TFLite finds the wrong states where batches come first and are merged
    forward, backward = (gated_cell(draw, prefix, size, cells, output, aux=aux) for prefix in ("fw_", "bw_"))
    attributes, options = gate_controls(draw)
    x = in_order(numbers(draw, time, batch, size), time_major)
    values = forward | backward | attributes | {"input": x, "time_major": time_major, "merge_outputs": merged}
    values["aux_input"] = in_order(numbers(draw, time, batch, aux), time_major) if aux else None
    for prefix in ("fw_", "bw_"):
        values[f"{prefix}output_state_in"] = numbers(draw, batch, output)
        values[f"{prefix}cell_state_in"] = numbers(draw, batch, cells)
    sizes = [2 * output] if merged else [output, output]
    options |= {"TimeMajor": time_major, "MergeOutputs": merged}
    name = OperationType.BIDIRECTIONAL_SEQUENCE_LSTM
    table, shapes = "BidirectionalSequenceLSTMOptions", [(*x.shape[:2], n) for n in sizes]
    return both(name, values, range(len(sizes) + 4), table, options, shapes)


def quantized_lstm(draw: Draw) -> Case:
    """Build QUANTIZED_16BIT_LSTM, which is TFLite's basic LSTM.

    TFLite has one matrix, whose rows are the gates input, cell, forget, output. The HAL's reference puts the recurrent
    weights into the first columns of it, and the input before the previous output into the vector. LiteRT has only an
    optimized kernel here, which rounds the sums once; with these scales they need no rounding.
    """
    batch, size, cells = draw.below(1, 4), draw.below(1, 9), draw.below(1, 9)
    bias_scale, zero_point = 2.0**-12, draw.below(100, 156)
    scale = 128 * bias_scale
    values: dict[str, Any] = {"input": draw.rng.integers(0, 256, (batch, size)).astype(np.uint8)}
    for gate in GATES:
        for name, count in (("input", size), ("recurrent", cells)):
            codes = draw.rng.integers(-24, 25, (cells, count)) + zero_point
            values[f"{name}_to_{gate}_weights"] = codes.astype(np.uint8)
        values[f"{gate}_gate_bias"] = draw.rng.integers(-8000, 8000, cells).astype(np.int32)
    values["prev_cell_state"] = draw.rng.integers(-(1 << 15), 1 << 15, (batch, cells)).astype(np.int16)
    values["prev_output"] = draw.rng.integers(0, 256, (batch, cells)).astype(np.uint8)
    places = {name: (scale, zero_point) for name in values if name.endswith("weights")}
    places |= {f"{gate}_gate_bias": (bias_scale, 0) for gate in GATES}
    places |= dict.fromkeys(("input", "prev_output", "output1"), (1 / 128, 128))
    places |= dict.fromkeys(("prev_cell_state", "output0"), (2.0 ** (-11), 0))
    order = ("input", "cell", "forget", "output")
    rows = [
        np.concatenate([values[f"recurrent_to_{gate}_weights"], values[f"input_to_{gate}_weights"]], axis=1)
        for gate in order
    ]
    argument: list[Argument] = [
        _codes(values["input"], 1 / 128, 128),
        _codes(values["prev_output"], 1 / 128, 128),
        _codes(np.concatenate(rows), scale, zero_point),
        _codes(np.concatenate([values[f"{gate}_gate_bias"] for gate in order]), bias_scale, 0),
        _codes(values["prev_cell_state"], 2.0**-11, 0),
    ]
    outputs = [
        _operand(np.uint8, (batch, cells), 1 / 128, 128),
        _operand(np.int16, (batch, cells), 2.0**-11, 0),
        _operand(np.uint8, (batch, size + cells), 1 / 128, 128),
        _operand(np.int16, (batch, 4 * cells), 2.0**-12, 0),
    ]
    first = OperandType.TENSOR_QUANT8_ASYMM
    use = Use(OperationType.QUANTIZED_16BIT_LSTM, values, 2, first_type=first, quantization=places)
    options = {"FusedActivationFunction": 4, "KernelType": 1}
    return Case(
        lambda: use.run()[::-1],
        lambda: by_litert("LSTM", argument, outputs, "LSTMOptions", options)[:2],
    )


def integer_lstm(draw: Draw) -> Case:
    """Build QUANTIZED_LSTM, which is TFLite's LSTM of 8 and 16 bits.

    Where the two agree: TFLite clips the projection's codes together with their zero point and at 127 at the latest,
    its gates are in Q3.12 always without normalization, and its peepholes take the output's size for the state's.
    Without a projection the hidden state is the output; its zero point is 0 then: the HAL's reference subtracts it,
    TFLite adds it.
    """
    batch, size, cells = draw.shape(3, 9)
    output, norm = output_size(draw, cells), draw.truth()
    attributes, options = gate_controls(draw)
    kinds = gated_cell(draw, "", size, cells, output, norm=norm)
    if output != cells:
        kinds |= {name: None for name in kinds if name.startswith("cell_to")}
    values: dict[str, Any] = {"input": draw.rng.integers(-128, 128, (batch, size)).astype(np.int8)}
    places = {"input": (draw.real(0.005, 0.02), draw.below(-128, 128))}
    for name, numbered in kinds.items():
        if "aux" not in name:
            part, places[name] = _part(draw, name, (1,) if numbered is None else numbered.shape)
            values[name] = None if numbered is None else part
    clipped = values["projection_weights"] is not None and attributes["projection_clip"] > 0
    places["output_state_in"] = (draw.real(0.01, 0.02), 0 if clipped else draw.below(-128, 128))
    places["cell_state_in"] = (2.0 ** -draw.below(9, 15), 0)
    values["output_state_in"] = draw.rng.integers(-128, 128, (batch, output)).astype(np.int8)
    values["cell_state_in"] = draw.rng.integers(-(1 << 15), 1 << 15, (batch, cells)).astype(np.int16)
    places |= {"output0": places["output_state_in"], "output1": places["cell_state_in"]}
    places["output2"] = places["output0"]
    intermediate = [draw.real(0.5, 2) / 4096 if norm else 1 / 4096 for _ in GATES]
    hidden = draw.real(0.005, 0.01), draw.below(-128, 128) if values["projection_weights"] is not None else 0
    names = [p.name for p in REGISTRY[OperationType.QUANTIZED_LSTM].overloads[0].parameters if p.name in values]
    argument = [_integer_feed(name, values[name], *places[name]) for name in names]
    use = Use(
        OperationType.QUANTIZED_LSTM,
        values
        | {"cell_clip": attributes["cell_clip"], "projection_clip": attributes["projection_clip"]}
        | {f"{gate}_intermediate_scale": scale for gate, scale in zip(GATES, intermediate, strict=True)}
        | {"hidden_state_zero_point": hidden[1], "hidden_state_scale": hidden[0]},
        3,
        first_type=OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
        quantization=places,
    )
    inner = [_operand(np.int16, (1,), scale, 0) for scale in intermediate] + [_operand(np.int8, (1,), *hidden)]
    result = _operand(np.int8, (batch, output), *places["output_state_in"])
    states = [names.index("output_state_in"), names.index("cell_state_in")]

    def run_nnfmq() -> list[Array]:
        state, cell, found = use.run()
        return [found, state, cell]

    tanh = options | {"FusedActivationFunction": 4}
    return Case(
        run_nnfmq, lambda: by_litert("LSTM", argument, [result], "LSTMOptions", tanh, states, intermediates=inner)
    )


def _integer_feed(name: str, array: Array | None, scale: float, zero_point: int) -> Feed:
    """Return a tensor as TFLite wants it: weights must be constant."""
    if array is None:
        return None
    operand, codes = _codes(array, scale, zero_point)
    return (operand, codes) if name == "input" or "state" in name else (operand, codes.tobytes())


def _part(draw: Draw, name: str, shape: tuple[int, ...]) -> tuple[Array, tuple[float, int]]:
    """Return codes of a cell's tensor, and their scale."""
    if name.endswith("bias"):
        return draw.rng.integers(-8000, 8000, shape).astype(np.int32), (2.0**-14, 0)
    if name.endswith("norm_weights") or name.startswith("cell_to"):
        return draw.rng.integers(-(1 << 15), 1 << 15, shape).astype(np.int16), (draw.real(1, 4) * 2.0**-15, 0)
    return draw.rng.integers(-127, 128, shape).astype(np.int8), (draw.real(0.002, 0.01), 0)


_OF_NUMPY = {
    np.dtype(np.int8): OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    np.dtype(np.uint8): OperandType.TENSOR_QUANT8_ASYMM,
    np.dtype(np.int16): OperandType.TENSOR_QUANT16_SYMM,
    np.dtype(np.int32): OperandType.TENSOR_INT32,
}


def _operand(dtype: Any, shape: tuple[int, ...], scale: float, zero_point: int) -> Operand:
    return Operand(_OF_NUMPY[np.dtype(dtype)], shape, scale, zero_point)


def _codes(array: Array, scale: float, zero_point: int) -> Argument:
    return _operand(array.dtype, array.shape, scale, zero_point), array


_BUILDERS: dict[str, Builder] = {
    "RNN": rnn,
    "UNIDIRECTIONAL_SEQUENCE_RNN": rnn_sequence,
    "BIDIRECTIONAL_SEQUENCE_RNN": bidirectional_rnn,
    "SVDF": svdf,
    "LSTM": lstm,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": lstm_sequence,
    "BIDIRECTIONAL_SEQUENCE_LSTM": bidirectional_lstm,
}
CASES: list[Listed] = [
    *((name, FLOAT, build) for name, build in _BUILDERS.items()),
    ("LSTM, basic", ("uint8",), quantized_lstm),
    ("LSTM, integer", ("int8",), integer_lstm),
]
