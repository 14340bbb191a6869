"""TFLite files of recurrent operators on INT8, with random weights: LSTM cells in all their forms, and SVDF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from support.tflite_files import Operator, Tensor, writer

BATCH, TIME, SIZE, UNITS = 2, 3, 5, 4
INPUT_SCALE, HIDDEN_SCALE, STATE_SCALE = 0.02, 0.007, 2.0**-11
GATES = ("input", "forget", "cell", "output")


@dataclass(frozen=True)
class LstmForm:
    """What an LSTM has beside the four gates; `outputs` differs from UNITS if it has a projection."""

    name: str = "UNIDIRECTIONAL_SEQUENCE_LSTM"
    coupled: bool = False
    peephole: bool = False
    normalized: bool = False
    outputs: int = UNITS
    projection: bool = False
    projection_bias: bool = False
    time_major: bool = False
    cell_clip: float = 0.0
    projection_clip: float = 0.0

    def __str__(self) -> str:
        given = {key: value for key, value in vars(self).items() if value != getattr(LstmForm, key, None)}
        return "-".join(f"{key}={value}" for key, value in given.items()) or "plain"


def constant(rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: str, scale: float, largest: int) -> Any:
    values = rng.integers(-largest, largest + 1, shape).astype(kind.lower())
    return Tensor(name, shape, kind, values.tobytes(), (scale,), (0,))


def lstm(form: LstmForm, seed: int = 1) -> bytes:
    """Return a model of one LSTM; its input is random INT8."""
    rng = np.random.default_rng(seed)
    gates = range(1 if form.coupled else 0, 4)
    given: list[Any] = [None] * 24
    shape: tuple[int, ...] = (TIME, BATCH, SIZE) if form.time_major else (BATCH, TIME, SIZE)
    shape = shape if form.name != "LSTM" else (BATCH, SIZE)
    given[0] = Tensor("x", shape, "INT8", None, (INPUT_SCALE,), (-7,))
    for gate in gates:
        given[1 + gate] = constant(rng, f"w{gate}", (UNITS, SIZE), "INT8", 0.01 + 0.003 * gate, 127)
        given[5 + gate] = constant(rng, f"r{gate}", (UNITS, form.outputs), "INT8", 0.008 + 0.002 * gate, 127)
        given[12 + gate] = constant(rng, f"b{gate}", (UNITS,), "INT32", 2e-4, 3000)
        if form.normalized:
            given[20 + gate] = constant(rng, f"n{gate}", (UNITS,), "INT16", 4e-5, 32000)
        if form.peephole and gate != 2:
            position = 9 + (0, 1, 0, 2)[gate]
            given[position] = constant(rng, f"p{gate}", (UNITS,), "INT16", 3e-5, 32000)
    if form.projection:
        given[16] = constant(rng, "projection", (form.outputs, UNITS), "INT8", 0.01, 127)
        if form.projection_bias:
            given[17] = constant(rng, "bias", (form.outputs,), "INT32", 1e-4, 500)
    variable = {"IsVariable": 1}
    given[18] = Tensor("hidden", (BATCH, form.outputs), "INT8", None, (HIDDEN_SCALE,), (4,), extra=variable)
    given[19] = Tensor("cells", (BATCH, UNITS), "INT16", None, (STATE_SCALE,), (0,), extra=variable)
    given = given if form.normalized else given[:20]
    result = (BATCH, form.outputs) if form.name == "LSTM" else (*shape[:2], form.outputs)
    output = Tensor("y", result, "INT8", None, (HIDDEN_SCALE,), (4,))
    return _file(form, given, output)


def _file(form: LstmForm, given: list[Any], output: Any) -> bytes:
    hidden = (0.009, -3) if form.projection else (HIDDEN_SCALE, 4)
    inner = [Tensor(f"i{gate}", (), "INT16", None, (0.0003 + 0.0001 * gate,), (0,)) for gate in range(4)]
    inner.append(Tensor("i4", (), "INT8", None, hidden[:1], hidden[1:]))
    tensors = [tensor for tensor in given if tensor is not None]
    places = [-1 if tensor is None else tensors.index(tensor) for tensor in given]
    options: dict[str, Any] = {
        "FusedActivationFunction": 4,
        "CellClip": form.cell_clip,
        "ProjClip": form.projection_clip,
    }
    table = "LSTMOptions"
    if form.name != "LSTM":
        table, options = "UnidirectionalSequenceLSTMOptions", options | {"TimeMajor": form.time_major}
    first = len(tensors) + 1
    intermediates = range(first, first + len(inner))
    operator = Operator(form.name, places, (len(tensors),), table, options, intermediates=intermediates)
    content: bytes = writer.write([*tensors, output, *inner], [operator], (0,), (len(tensors),))
    return content


LSTM_FORMS = (
    LstmForm(),
    LstmForm(time_major=True),
    LstmForm(name="LSTM"),
    LstmForm(coupled=True, peephole=True),
    LstmForm(peephole=True, cell_clip=0.8),
    LstmForm(normalized=True),
    LstmForm(name="LSTM", coupled=True, normalized=True, peephole=True),
    LstmForm(projection=True, outputs=3),
    LstmForm(projection=True, outputs=3, projection_bias=True, normalized=True),
    LstmForm(projection=True, projection_bias=True, projection_clip=0.3, peephole=True),
)


def svdf(kind: str = "INT16", rank: int = 2, with_bias: bool = True) -> bytes:
    """Return a model of an SVDF with a state of `kind`."""
    rng = np.random.default_rng(3)
    filters, memory = 6, 4
    state_scale = 0.0004 if kind == "INT16" else 0.08
    tensors = [
        Tensor("x", (BATCH, SIZE), "INT8", None, (INPUT_SCALE,), (-7,)),
        constant(rng, "features", (filters, SIZE), "INT8", 0.01, 127),
        constant(rng, "times", (filters, memory), kind, 3e-5 if kind == "INT16" else 0.008, np.iinfo(kind.lower()).max),
        constant(rng, "bias", (filters // rank,), "INT32", 1e-4, 3000),
        Tensor("state", (BATCH, filters * memory), kind, None, (state_scale,), (0,), extra={"IsVariable": 1}),
        Tensor("y", (BATCH, filters // rank), "INT8", None, (0.05,), (-128,)),
    ]
    places = [0, 1, 2, 3 if with_bias else -1, 4]
    options = {"Rank": rank, "FusedActivationFunction": 1}
    content: bytes = writer.write(tensors, [Operator("SVDF", places, (5,), "SVDFOptions", options)], (0,), (5,))
    return content
