"""RNN and LSTM sequences, one way and both ways.

ONNX stacks what the HAL has as separate tensors: directions first, then an LSTM's gates as input, output, forget,
cell. Its clips are of other sums than the HAL's, and it has neither projection nor normalization.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import OperationType
from support.by_name import Use
from support.onnx_runtime import by_onnx
from support.oracles import FLOAT, Array, Case, Draw, Listed

GATES = ("input", "output", "forget", "cell")
PEEPHOLES = ("input", "output", "forget")
PREFIXES = ("fw_", "bw_")


def numbers(draw: Draw, *shape: int) -> Array:
    """Return floats of the size of trained weights."""
    return draw.rng.normal(0, 0.5, shape).astype(np.float32)


def in_order(array: Array, time_major: bool) -> Array:
    """Return a sequence (time, batch, size) as the flag says."""
    return np.ascontiguousarray(array if time_major else array.swapaxes(0, 1))


def stacked(values: dict[str, Any], prefixes: tuple[str, ...], *names: str) -> Array:
    """Return the tensors of those names one below the other, for each direction."""
    return np.stack([np.concatenate([values[prefix + name] for name in names]) for prefix in prefixes])


def rnn(*, bidirectional: bool) -> Any:
    """Build UNIDIRECTIONAL_SEQUENCE_RNN or BIDIRECTIONAL_SEQUENCE_RNN with TANH or RELU."""
    prefixes = PREFIXES if bidirectional else ("",)
    code = OperationType.BIDIRECTIONAL_SEQUENCE_RNN if bidirectional else OperationType.UNIDIRECTIONAL_SEQUENCE_RNN

    def build(draw: Draw) -> Case:
        (batch, size, units), time, activation = draw.shape(3), draw.below(1, 6), (1, 4)[draw.below(0, 2)]
        time_major, x = draw.truth(), numbers(draw, time, batch, size)
        values: dict[str, Any] = {"input": in_order(x, time_major), "activation": activation}
        values["time_major"] = time_major if bidirectional else int(time_major)
        for prefix in prefixes:
            values[f"{prefix}weights"] = numbers(draw, units, size)
            values[f"{prefix}recurrent_weights"] = numbers(draw, units, units)
            values[f"{prefix}bias"] = numbers(draw, units)
            values[f"{prefix}hidden_state"] = numbers(draw, batch, units)
            values[f"{prefix}no_bias"] = np.zeros(units, np.float32)
        if bidirectional:
            values |= dict.fromkeys(("aux_input", "fw_aux_weights", "bw_aux_weights"))
            values["merge_outputs"] = False
        names = [("weights",), ("recurrent_weights",), ("bias", "no_bias")]
        inputs = [x, *(stacked(values, prefixes, *part) for part in names), None]
        inputs.append(stacked(values, prefixes, "hidden_state"))
        function = {1: "Relu", 4: "Tanh"}[activation]
        options: dict[str, Any] = {"direction": "bidirectional"} if bidirectional else {}

        def run_onnx() -> list[Array]:
            found, last = by_onnx(
                "RNN", inputs, 2, hidden_size=units, activations=[function] * len(prefixes), **options
            )
            return [*(in_order(part, time_major) for part in found.swapaxes(0, 1)), *last]

        return Case(lambda: Use(code, values, 2 * len(prefixes)).run(), run_onnx)

    return build


def lstm(*, bidirectional: bool) -> Any:
    """Build UNIDIRECTIONAL_SEQUENCE_LSTM or BIDIRECTIONAL_SEQUENCE_LSTM, with peepholes or without."""
    prefixes = PREFIXES if bidirectional else ("",)
    code = OperationType.BIDIRECTIONAL_SEQUENCE_LSTM if bidirectional else OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM

    def build(draw: Draw) -> Case:
        (batch, size, units), time, time_major = draw.shape(3), draw.below(1, 6), draw.truth()
        x, peephole = numbers(draw, time, batch, size), draw.truth()
        values: dict[str, Any] = {"input": in_order(x, time_major), "time_major": time_major, "activation": 4}
        values |= {"cell_clip": 0.0, "projection_clip": 0.0, "aux_input": None, "merge_outputs": False}
        for prefix in prefixes:
            values |= cell(draw, prefix, batch, size, units, peephole)
        names = [
            [f"input_to_{gate}_weights" for gate in GATES],
            [f"recurrent_to_{gate}_weights" for gate in GATES],
            [f"{gate}_gate_bias" for gate in GATES] + ["no_bias"] * 4,
        ]
        inputs = [x, *(stacked(values, prefixes, *part) for part in names), None]
        inputs += [stacked(values, prefixes, "output_state_in"), stacked(values, prefixes, "cell_state_in")]
        if peephole:
            inputs.append(stacked(values, prefixes, *(f"cell_to_{gate}_weights" for gate in PEEPHOLES)))
        options: dict[str, Any] = {"direction": "bidirectional"} if bidirectional else {}

        def run_onnx() -> list[Array]:
            found, hidden, cells = by_onnx("LSTM", inputs, 3, hidden_size=units, **options)
            states = [state for pair in zip(hidden, cells, strict=True) for state in pair]
            return [*(in_order(part, time_major) for part in found.swapaxes(0, 1)), *states]

        return Case(lambda: Use(code, values, 3 * len(prefixes)).run(), run_onnx)

    return build


def cell(draw: Draw, prefix: str, batch: int, size: int, units: int, peephole: bool) -> dict[str, Any]:
    """Return the tensors of an LSTM's cell; None for those that ONNX does not have."""
    values: dict[str, Any] = {"no_bias": np.zeros(units, np.float32)}
    for gate in GATES:
        values[f"input_to_{gate}_weights"] = numbers(draw, units, size)
        values[f"recurrent_to_{gate}_weights"] = numbers(draw, units, units)
        values[f"{gate}_gate_bias"] = numbers(draw, units)
        values |= dict.fromkeys((f"{gate}_layer_norm_weights", f"aux_input_to_{gate}_weights"))
    for gate in PEEPHOLES:
        values[f"cell_to_{gate}_weights"] = numbers(draw, units) if peephole else None
    values |= {"projection_weights": None, "projection_bias": None}
    values |= {"output_state_in": numbers(draw, batch, units), "cell_state_in": numbers(draw, batch, units)}
    return {prefix + name: value for name, value in values.items()}


CASES: list[Listed] = [
    ("RNN", FLOAT, rnn(bidirectional=False)),
    ("RNN, both ways", FLOAT, rnn(bidirectional=True)),
    ("LSTM", FLOAT, lstm(bidirectional=False)),
    ("LSTM, both ways", FLOAT, lstm(bidirectional=True)),
]
