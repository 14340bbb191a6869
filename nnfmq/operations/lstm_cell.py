"""One LSTM cell in float32, the same for LSTM and its sequence forms: its tensors, their constraints, its steps.

The products of all time steps with the input weights are one matrix product; what remains for each step is one
product with the recurrent weights, and elementwise work. Variants are data: an input gate that is omitted is one
minus the forget gate (CIFG), and peepholes, layer normalization and projection are None where omitted.

    C1  the input's rank                         C7  layer norm weights are all or none, (cells,)
    C2  weights: (cells, input or output size)   C8  states: (batch, output size) and (batch, cells)
    C3  the input gate is whole or absent        C9  clips are not negative
    C4  peepholes are all or none, (cells,)      C10 activation code 0, 1, 3, 4 or 6
    C5  biases: (cells,)                         C11 auxiliary input and weights go together
    C6  projection: (output size, cells), bias only with weights; without it output size = cells

What differs from the reference: forward and backward cells of one operation need not have the same variants, and
auxiliary weights are as wide as the auxiliary input, not as the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from nnfmq.operations.activation import logistic
from nnfmq.operations.shapes import require
from nnfmq.operations.signature import Array, Parameter, ParameterType, Shape, Tensor, weight

T = TypeVar("T")
Gates: TypeAlias = tuple[T | None, T | None, T | None, T | None]  # of the input, forget, cell and output gate

NO_GATES = (None, None, None, None)
TENSOR_COUNT = 17  # of `cell_parameters`
GATES = ("input", "forget", "cell", "output")
_NORMALIZATION_EPSILON = np.float32(1e-8)

ACTIVATIONS: Mapping[int, Callable[[Array], Array]] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.clip(x, -1, 1),
    3: lambda x: np.clip(x, 0, 6),
    4: np.tanh,
    6: logistic,
}
"""Activations of the recurrent operations by their code; LSTM itself has no 2 (RELU1)."""

_LSTM_CODES = frozenset(ACTIVATIONS) - {2}


def cell_parameters(
    prefix: str = "", *, weights: ParameterType = "T", peepholes: ParameterType = "T", biases: ParameterType = "T"
) -> tuple[Parameter, ...]:
    """Return the parameters of one cell from its input weights to its projection, in the HAL's order."""
    cell_to = ("input", "forget", "output")
    return (
        *gate_parameters(prefix + "input_to_{}_weights", weights),
        *gate_parameters(prefix + "recurrent_to_{}_weights", weights),
        *(weight(f"{prefix}cell_to_{gate}_weights", peepholes, optional=True) for gate in cell_to),
        *gate_parameters(prefix + "{}_gate_bias", biases),
        weight(f"{prefix}projection_weights", weights, optional=True),
        weight(f"{prefix}projection_bias", biases, optional=True),
    )


def gate_parameters(
    name: str, type: ParameterType = "T", *, optional: tuple[str, ...] = ("input",)
) -> tuple[Parameter, ...]:
    """Return a weight for each gate, of which `optional` may be omitted."""
    return tuple(weight(name.format(gate), type, optional=gate in optional) for gate in GATES)


@dataclass(frozen=True, slots=True)
class LstmTensors(Generic[T]):
    """What one cell is made of: tensors, or their shapes; None where omitted."""

    input: Gates[T]
    recurrent: Gates[T]
    peephole: Gates[T]
    bias: Gates[T]
    projection: T | None
    projection_bias: T | None
    norm: Gates[T]
    aux: Gates[T]

    @classmethod
    def of(
        cls, tensors: Sequence[T | None], norm: Sequence[T | None] = (), aux: Sequence[T | None] = ()
    ) -> LstmTensors[T]:
        """Sort the arguments of `cell_parameters`, layer norm weights and auxiliary weights."""
        peephole = (tensors[8], tensors[9], None, tensors[10])
        weights, recurrent, bias = _gates(tensors[:4]), _gates(tensors[4:8]), _gates(tensors[11:15])
        return cls(weights, recurrent, peephole, bias, tensors[15], tensors[16], _gates(norm), _gates(aux))

    @property
    def gates(self) -> tuple[int, ...]:
        """The gates that are computed: without 0, the input gate, where that is coupled to the forget gate."""
        return (0, 1, 2, 3) if self.input[0] is not None else (1, 2, 3)


def _gates(tensors: Sequence[T | None]) -> Gates[T]:
    first, second, third, fourth = tensors or NO_GATES
    return first, second, third, fourth


# -- constraints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """The extents that a cell's tensors agree on."""

    batch: int
    input: int
    cells: int
    output: int


def check_cell(cell: LstmTensors[Shape], rows: Shape, states: Sequence[Shape], aux: Shape | None = None) -> None:
    """Check C2-C8 and C11 for a step's `rows` (batch, input size); `aux` is the shape of an auxiliary input."""
    first, recurrent = cell.input[3], cell.recurrent[3]
    assert first is not None and recurrent is not None, "the output gate's weights are not optional"
    require(len(first) == len(recurrent) == 2, "C2", f"weights of the output gate have shapes {first}, {recurrent}")
    sizes = Sizes(rows[0], rows[1], first[0], recurrent[1])
    _check_gates(cell, sizes, aux)
    _check_projection(cell, sizes)
    wanted = [(sizes.batch, sizes.output), (sizes.batch, sizes.cells)]
    require(list(states) == wanted, "C8", f"states have shapes {list(states)}, needed are {wanted}")


def _check_gates(cell: LstmTensors[Shape], sizes: Sizes, aux: Shape | None) -> None:
    cells = sizes.cells
    _check_group("C2", "input weights", cell.input, (cells, sizes.input), cell.gates)
    _check_group("C2", "recurrent weights", cell.recurrent, (cells, sizes.output), cell.gates)
    _check_group("C5", "biases", cell.bias, (cells,), cell.gates)
    _check_optional("C4", "peepholes", cell.peephole, (cells,), tuple(gate for gate in cell.gates if gate != 2))
    _check_optional("C7", "layer norm weights", cell.norm, (cells,), cell.gates)
    if aux is not None:  # without an auxiliary input `Linking` has refused weights for it
        _check_optional("C11", "auxiliary weights", cell.aux, (cells, aux[-1]), cell.gates)


def _check_optional(rule: str, name: str, shapes: Gates[Shape], wanted: Shape, gates: tuple[int, ...]) -> None:
    if shapes != NO_GATES:
        given = [GATES[gate] for gate in gates if shapes[gate] is None]
        require(not given, rule, f"{name} of some gates only; missing: {given}")
        _check_group(rule, name, shapes, wanted, gates)


def _check_group(rule: str, name: str, shapes: Gates[Shape], wanted: Shape, gates: tuple[int, ...]) -> None:
    for gate in range(4):
        if gate in gates:
            require(shapes[gate] is not None, "C3", f"{name} of the {GATES[gate]} gate are missing, others are given")
            require(shapes[gate] == wanted, rule, f"{name} ({GATES[gate]} gate): {shapes[gate]}, needed: {wanted}")
        else:
            require(shapes[gate] is None, "C3", f"{name} of the {GATES[gate]} gate without its input weights")


def _check_projection(cell: LstmTensors[Shape], sizes: Sizes) -> None:
    wanted = (sizes.output, sizes.cells)
    if cell.projection is None:
        require(cell.projection_bias is None, "C6", "a projection bias without projection weights")
        require(sizes.output == sizes.cells, "C6", f"{wanted} outputs and cells without a projection")
        return
    require(cell.projection == wanted, "C6", f"projection weights have shape {cell.projection}, needed is {wanted}")
    bias = cell.projection_bias
    require(bias in (None, wanted[:1]), "C6", f"the projection bias has shape {bias}, needed is {wanted[:1]}")


def check_attributes(activation: int, cell_clip: float, projection_clip: float) -> None:
    """Check C9 and C10."""
    require(cell_clip >= 0 and projection_clip >= 0, "C9", f"clips are {cell_clip} and {projection_clip}")
    allowed = sorted(_LSTM_CODES)
    require(activation in _LSTM_CODES, "C10", f"activation code {activation}, allowed are {allowed}")


# -- computation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateParams:
    """What is added to one gate's products."""

    bias: Array
    peephole: Array | None
    norm: Array | None

    def apply(self, products: Array, state: Array) -> Array:
        """Add peephole, normalize, add bias."""
        if self.peephole is not None:
            products = products + self.peephole * state
        if self.norm is not None:
            products = _normalized(products) * self.norm
        return products + self.bias


def _normalized(rows: Array) -> Array:
    centred = rows - rows.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + _NORMALIZATION_EPSILON)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PreparedLstmCell:
    """A cell ready to run: matrices that make all gates' products at once, and each gate's rest.

    `gates` are input, forget, cell and output; without the first where it is coupled to the forget gate.
    """

    weights: Array
    aux_weights: Array | None
    recurrent: Array
    gates: tuple[GateParams, ...]
    activation: Callable[[Array], Array]
    cell_clip: float
    projection: Callable[[Array], Array]

    def run_sequence(self, steps: Array, aux: Array | None, hidden: Array, state: Array) -> tuple[Array, Array, Array]:
        """Run over `steps` (time, batch, size); return (time, batch, output size) and both final states."""
        products = steps @ self.weights
        if aux is not None and self.aux_weights is not None:
            products = products + aux @ self.aux_weights
        out = np.empty((len(steps), *hidden.shape), np.float32)
        for time, row in enumerate(products):
            hidden, state = self._step(row + hidden @ self.recurrent, state)
            out[time] = hidden
        return out, hidden, state

    def _step(self, products: Array, state: Array) -> tuple[Array, Array]:
        *parts, output = np.split(products, len(self.gates), axis=-1)
        sums = [gate.apply(part, state) for gate, part in zip(self.gates[:-1], parts, strict=True)]
        forget = logistic(sums[-2])
        entrance = logistic(sums[0]) if len(sums) == 3 else 1 - forget
        state = forget * state + entrance * self.activation(sums[-1])
        if self.cell_clip > 0:
            state = np.clip(state, -self.cell_clip, self.cell_clip)
        opened = logistic(self.gates[-1].apply(output, state))  # its peephole sees the new state
        return self.projection(opened * self.activation(state)), state


def pack(cell: LstmTensors[Tensor], activation: int, cell_clip: float, projection_clip: float) -> PreparedLstmCell:
    """Prepare a cell that has passed `check_cell` and `check_attributes`."""
    return PreparedLstmCell(
        _stacked(cell.input, cell.gates),
        None if cell.aux == NO_GATES else _stacked(cell.aux, cell.gates),
        _stacked(cell.recurrent, cell.gates),
        tuple(
            GateParams(_value(cell.bias[g]), _optional(cell.peephole[g]), _optional(cell.norm[g])) for g in cell.gates
        ),
        ACTIVATIONS[activation],
        cell_clip,
        _projection(cell, projection_clip),
    )


def _value(tensor: Tensor | None) -> Array:
    assert tensor is not None, "check_cell asked for it"
    return tensor.array.copy()  # a weight that comes with the request may lie in another process's memory


def _optional(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else _value(tensor)


def _stacked(tensors: Gates[Tensor], gates: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(np.concatenate([_value(tensors[gate]) for gate in gates]).T)


def _projection(cell: LstmTensors[Tensor], clip: float) -> Callable[[Array], Array]:
    if cell.projection is None:
        return lambda hidden: hidden
    weights = np.ascontiguousarray(_value(cell.projection).T)
    bias = np.float32(0) if cell.projection_bias is None else _value(cell.projection_bias)

    def project(hidden: Array) -> Array:
        result: Array = hidden @ weights + bias
        return np.clip(result, -clip, clip) if clip > 0 else result

    return project
