"""The HAL's formulas of an LSTM cell in float64, batch by batch and gate by gate; weights by the names of the HAL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Cell = Mapping[str, Any]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


ACTIVATIONS: Mapping[int, Callable[[Array], Array]] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    3: lambda x: np.minimum(np.maximum(x, 0), 6),
    4: np.tanh,
    6: sigmoid,
}


def clipped(x: Array, limit: float) -> Array:
    return np.clip(x, -limit, limit) if limit > 0 else x


def gate(cell: Cell, name: str, x: Array, h: Array, c: Array | None, aux: Array | None) -> Array:
    """Return the sum that one gate's activation gets, of one batch."""
    bias = "cell_gate_bias" if name == "cell" else f"{name}_gate_bias"
    total = cell[f"input_to_{name}_weights"] @ x + cell[f"recurrent_to_{name}_weights"] @ h
    if aux is not None and cell.get(f"aux_input_to_{name}_weights") is not None:
        total = total + cell[f"aux_input_to_{name}_weights"] @ aux
    if c is not None and cell.get(f"cell_to_{name}_weights") is not None:
        total = total + cell[f"cell_to_{name}_weights"] * c
    if cell.get(f"{name}_layer_norm_weights") is not None:
        total = (total - total.mean()) / np.sqrt(total.var() + 1e-8) * cell[f"{name}_layer_norm_weights"]
    return np.asarray(total + cell[bias])


def step(
    cell: Cell,
    x: Array,
    h: Array,
    c: Array,
    aux: Array | None,
    activation: int,
    cell_clip: float,
    projection_clip: float,
) -> tuple[Array, Array]:
    """Return the new output state and cell state of one batch."""
    g = ACTIVATIONS[activation]
    forget = sigmoid(gate(cell, "forget", x, h, c, aux))
    coupled = cell["input_to_input_weights"] is None
    entrance = 1 - forget if coupled else sigmoid(gate(cell, "input", x, h, c, aux))
    c = clipped(forget * c + entrance * g(gate(cell, "cell", x, h, None, aux)), cell_clip)
    h = sigmoid(gate(cell, "output", x, h, c, aux)) * g(c)
    if cell["projection_weights"] is not None:
        bias = 0 if cell["projection_bias"] is None else cell["projection_bias"]
        h = clipped(cell["projection_weights"] @ h + bias, projection_clip)
    return h, c


def sequence(
    cell: Cell, x: Array, h: Array, c: Array, aux: Array | None = None, **controls: Any
) -> tuple[Array, Array, Array]:
    """Return outputs (time, batch, size) and both states after a time-major sequence."""
    outputs = []
    for time in range(len(x)):
        auxiliary = [None] * len(h) if aux is None else aux[time]
        pairs = [step(cell, *row, **controls) for row in zip(x[time], h, c, auxiliary, strict=True)]
        h, c = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
        outputs.append(h)
    return np.array(outputs), h, c
