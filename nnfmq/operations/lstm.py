"""LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM and BIDIRECTIONAL_SEQUENCE_LSTM.

The cell in float32 comes first: tensors, constraints, computation. One matrix product computes all time steps' products
with the input weights; each step then has one product with the recurrent weights and elementwise work. An omitted input
gate is one minus the forget gate (CIFG); omitted peepholes, layer normalization and projection are None. float16 is
computed in float32 and rounded once. `recurrent_sequences` has C12.

    C2  weights: (units, input or output size)   C8  states: (batch, output size) and (batch, units)
    C3  the input gate is complete or absent     C9  clips are not negative
    C4  peepholes are all or none, (units,)      C10 activation code 0, 1, 3, 4 or 6
    C5  biases: (units,)                         C11 auxiliary input and weights are both given or both omitted
    C6  projection: (output size, units), bias only with weights; without it output size = units
    C7  layer norm weights are all or none, (units,)

LSTM  C1 the input has rank 2

Unlike in TFLite, the forward and backward cells of one operation may have different variants, and auxiliary weights
have the size of the auxiliary input, not of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import FusedActivationFunc, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.activation import logistic
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.dynamic_matmul import DynamicWeights, Quantize, packed_weights, product_of_rows
from nnfmq.operations.kernel_adapters import float_variants
from nnfmq.operations.recurrent_sequences import (
    ACTIVATIONS,
    Linking,
    bidirectional_shapes,
    dynamic,
    hybrid,
    run_bidirectional,
    swap_time_batch,
    time_major_shape,
)
from nnfmq.operations.shapes import require

T = TypeVar("T")
Gates: TypeAlias = tuple[T | None, T | None, T | None, T | None]  # of the input, forget, cell and output gate

NO_GATES = (None, None, None, None)
TENSOR_COUNT = 17  # of `cell_parameters`
GATES = ("input", "forget", "cell", "output")
_NORMALIZATION_EPSILON = np.float32(1e-8)


_LSTM_CODES = frozenset(ACTIVATIONS) - {FusedActivationFunc.RELU1}


def cell_parameters(
    prefix: str = "",
    *,
    weights: op.ParameterType = "T",
    peepholes: op.ParameterType = "T",
    biases: op.ParameterType = "T",
) -> tuple[op.Parameter, ...]:
    """Return the parameters of one cell, from input weights to projection bias, in the HAL's order."""
    cell_to = ("input", "forget", "output")
    return (
        *gate_parameters(prefix + "input_to_{}_weights", weights),
        *gate_parameters(prefix + "recurrent_to_{}_weights", weights),
        *(op.weight(f"{prefix}cell_to_{gate}_weights", peepholes, optional=True) for gate in cell_to),
        *gate_parameters(prefix + "{}_gate_bias", biases),
        op.weight(f"{prefix}projection_weights", weights, optional=True),
        op.weight(f"{prefix}projection_bias", biases, optional=True),
    )


def gate_parameters(
    name: str, type: op.ParameterType = "T", *, optional: tuple[str, ...] = ("input",)
) -> tuple[op.Parameter, ...]:
    """Return a weight for each gate; those of the gates in `optional` may be omitted."""
    return tuple(op.weight(name.format(gate), type, optional=gate in optional) for gate in GATES)


class LstmTensors(Struct, Generic[T], frozen=True):
    """The tensors of one cell, or their shapes; None if omitted."""

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
        """The gates that are computed: without 0, the input gate, if it is coupled to the forget gate (CIFG)."""
        return (0, 1, 2, 3) if self.input[0] is not None else (1, 2, 3)


def _gates(tensors: Sequence[T | None]) -> Gates[T]:
    first, second, third, fourth = tensors or NO_GATES
    return first, second, third, fourth


# -- constraints ------------------------------------------------------------------------------------------------------


class Sizes(Struct, frozen=True):
    """The sizes of a cell's tensors."""

    batch: int
    input: int
    units: int
    output: int


def check_cell(cell: LstmTensors[Shape], rows: Shape, states: Sequence[Shape], aux: Shape | None = None) -> None:
    """Check C2-C8 and C11 for a step's `rows` (batch, input size); `aux` is the shape of an auxiliary input."""
    first, recurrent = cell.input[3], cell.recurrent[3]
    assert first is not None and recurrent is not None, "the output gate's weights are not optional"
    require(len(first) == len(recurrent) == 2, "C2", f"weights of the output gate have shapes {first}, {recurrent}")
    sizes = Sizes(rows[0], rows[1], first[0], recurrent[1])
    _check_gates(cell, sizes, aux)
    _check_projection(cell, sizes)
    wanted = [(sizes.batch, sizes.output), (sizes.batch, sizes.units)]
    require(list(states) == wanted, "C8", f"states have shapes {list(states)}, required are {wanted}")


def _check_gates(cell: LstmTensors[Shape], sizes: Sizes, aux: Shape | None) -> None:
    units = sizes.units
    _check_group("C2", "input weights", cell.input, (units, sizes.input), cell.gates)
    _check_group("C2", "recurrent weights", cell.recurrent, (units, sizes.output), cell.gates)
    _check_group("C5", "biases", cell.bias, (units,), cell.gates)
    _check_optional("C4", "peepholes", cell.peephole, (units,), tuple(gate for gate in cell.gates if gate != 2))
    _check_optional("C7", "layer norm weights", cell.norm, (units,), cell.gates)
    if aux is not None:  # `Linking.of` has rejected auxiliary weights without an auxiliary input
        _check_optional("C11", "auxiliary weights", cell.aux, (units, aux[-1]), cell.gates)


def _check_optional(rule: str, name: str, shapes: Gates[Shape], wanted: Shape, gates: tuple[int, ...]) -> None:
    if shapes != NO_GATES:
        missing = [GATES[gate] for gate in gates if shapes[gate] is None]
        require(not missing, rule, f"{name} are given for some gates only, missing are {missing}")
        _check_group(rule, name, shapes, wanted, gates)


def _check_group(rule: str, name: str, shapes: Gates[Shape], wanted: Shape, gates: tuple[int, ...]) -> None:
    for gate in range(4):
        if gate in gates:
            require(shapes[gate] is not None, "C3", f"{name} of the {GATES[gate]} gate are missing, others are given")
            require(shapes[gate] == wanted, rule, f"{name} ({GATES[gate]} gate): {shapes[gate]}, required: {wanted}")
        else:
            require(shapes[gate] is None, "C3", f"{name} of the {GATES[gate]} gate without its input weights")


def _check_projection(cell: LstmTensors[Shape], sizes: Sizes) -> None:
    wanted = (sizes.output, sizes.units)
    if cell.projection is None:
        require(cell.projection_bias is None, "C6", "a projection bias without projection weights")
        require(sizes.output == sizes.units, "C6", f"{wanted} outputs and cells without a projection")
        return
    require(cell.projection == wanted, "C6", f"projection weights have shape {cell.projection}, required is {wanted}")
    bias = cell.projection_bias
    require(bias in (None, wanted[:1]), "C6", f"the projection bias has shape {bias}, required is {wanted[:1]}")


def check_attributes(activation: int, cell_clip: float, projection_clip: float) -> None:
    """Check C9 and C10."""
    require(cell_clip >= 0 and projection_clip >= 0, "C9", f"clips are {cell_clip} and {projection_clip}")
    allowed = sorted(_LSTM_CODES)
    require(activation in _LSTM_CODES, "C10", f"activation code {activation}, allowed are {allowed}")


# -- computation ------------------------------------------------------------------------------------------------------


class GateParams(Struct, frozen=True):
    """A gate's bias, peephole weights and layer norm weights."""

    bias: Array
    peephole: Array | None
    norm: Array | None

    def apply(self, products: Array, state: Array) -> Array:
        """Add the peephole's product, normalize, add the bias."""
        if self.peephole is not None:
            products = products + self.peephole * state
        if self.norm is not None:
            centered = products - products.mean(axis=-1, keepdims=True)
            variance = np.square(centered).mean(axis=-1, keepdims=True)
            products = centered / np.sqrt(variance + _NORMALIZATION_EPSILON) * self.norm
        return products + self.bias


class PreparedLstmCell(Struct, frozen=True):
    """A cell with packed weights: matrices that compute all gates' products together, and each gate's other parameters.

    `gates` are input, forget, cell and output, without the first if it is coupled to the forget gate. `quantize`, if
    set, makes bytes of all rows that are multiplied by weights.
    """

    weights: Array | DynamicWeights
    aux_weights: Array | DynamicWeights | None
    recurrent: Array | DynamicWeights
    gates: tuple[GateParams, ...]
    activation: Callable[[Array], Array]
    cell_clip: float
    projection: Callable[[Array], Array]
    quantize: Quantize | None

    def run_sequence(self, steps: Array, aux: Array | None, hidden: Array, state: Array) -> tuple[Array, Array, Array]:
        """Run over `steps` (time, batch, size); return (time, batch, output size) and both final states."""
        products = product_of_rows(steps, self.weights, self.quantize)
        if aux is not None and self.aux_weights is not None:
            products = products + product_of_rows(aux, self.aux_weights, self.quantize)
        out = np.empty((len(steps), *hidden.shape), np.float32)
        for time, row in enumerate(products):
            hidden, state = self._step(row + product_of_rows(hidden, self.recurrent, self.quantize), state)
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
        opened = logistic(self.gates[-1].apply(output, state))  # the output gate's peephole reads the new state
        return self.projection(opened * self.activation(state)), state


def pack(
    cell: LstmTensors[Tensor],
    activation: int,
    cell_clip: float,
    projection_clip: float,
    quantize: Quantize | None = None,
) -> PreparedLstmCell:
    """Copy and pack the weights of a cell that `check_cell` and `check_attributes` accepted.

    `quantize`, if set, makes bytes of all rows that are multiplied by weights.
    """
    return PreparedLstmCell(
        _stacked(cell.input, cell.gates),
        None if cell.aux == NO_GATES else _stacked(cell.aux, cell.gates),
        _stacked(cell.recurrent, cell.gates),
        tuple(
            GateParams(_value(cell.bias[g]), _optional(cell.peephole[g]), _optional(cell.norm[g])) for g in cell.gates
        ),
        ACTIVATIONS[activation],
        cell_clip,
        _projection(cell, projection_clip, quantize),
        quantize,
    )


def _value(tensor: Tensor | None) -> Array:
    assert tensor is not None, "check_cell requires it"
    return tensor.array.copy()  # a weight that comes with the request may be in another process's memory


def _optional(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else _value(tensor)


def _stacked(tensors: Gates[Tensor], gates: tuple[int, ...]) -> Array | DynamicWeights:
    return packed_weights([tensor for gate in gates if (tensor := tensors[gate]) is not None])


def _projection(cell: LstmTensors[Tensor], clip: float, quantize: Quantize | None) -> Callable[[Array], Array]:
    if cell.projection is None:
        return lambda hidden: hidden
    weights = packed_weights([cell.projection])
    bias = np.float32(0) if cell.projection_bias is None else _value(cell.projection_bias)

    def project(hidden: Array) -> Array:
        result: Array = product_of_rows(hidden, weights, quantize) + bias
        return np.clip(result, -clip, clip) if clip > 0 else result

    return project


# ----------------------------------------------------------------------------------------------------------------------
# Operations: parameter lists, and the distribution of their tensors.


Shapes: TypeAlias = tuple[Shape, ...]
Tensors: TypeAlias = tuple[Tensor, ...]


def lstm_shape(input: Shape, *rest: Shape, activation: int, cell_clip: float, projection_clip: float) -> Shapes:
    """Return the shapes of the scratch buffer, both states and the output."""
    require(len(input) == 2, "C1", f"the input has shape {input}, required is (batch, input size)")
    check_attributes(activation, cell_clip, projection_clip)
    cell, states = one_cell(rest)
    check_cell(cell, input, states)
    hidden, state = states
    return (input[0], len(cell.gates) * state[1]), hidden, state, hidden


def one_cell(rest: Sequence[T]) -> tuple[LstmTensors[T], Sequence[T]]:
    """Return the cell and the two states from all arguments after the input."""
    cell = LstmTensors.of(rest[:TENSOR_COUNT], norm=rest[TENSOR_COUNT + 2 :])
    return cell, rest[TENSOR_COUNT : TENSOR_COUNT + 2]


def plan_lstm(
    input: Tensor,
    *rest: Tensor,
    output: Tensors,
    activation: int,
    cell_clip: float,
    projection_clip: float,
    quantize: Quantize | None = None,
) -> Run:
    """Plan one step. The scratch buffer's contents are undefined in the HAL; they are zeros here."""
    packed = pack(one_cell(rest)[0], activation, cell_clip, projection_clip, quantize)
    scratch_shape = output[0].shape

    def run(input: Array, hidden: Array, state: Array) -> tuple[Array, ...]:
        out, hidden, state = packed.run_sequence(input[np.newaxis], None, hidden, state)
        return np.zeros(scratch_shape, np.float32), hidden, state, out[0]

    return run


def unidirectional_shape(
    input: Shape, *rest: Shape, time_major: bool, output_count: int, **cell_attributes: Any
) -> Shapes:
    """Return the shapes of the output and, if there are three outputs, of both states."""
    check_attributes(**cell_attributes)
    steps = time_major_shape(input, time_major)
    cell, states = one_cell(rest)
    check_cell(cell, steps[1:], states)
    return (time_major_shape((*steps[:2], states[0][1]), time_major), *states)[:output_count]


def plan_unidirectional(
    input: Tensor, *rest: Tensor, output: Tensors, time_major: bool, output_count: int, **cell_attributes: Any
) -> Run:
    """Plan all steps of a sequence."""
    packed = pack(one_cell(rest)[0], **cell_attributes)

    def run(input: Array, hidden: Array, state: Array) -> tuple[Array, ...]:
        out, hidden, state = packed.run_sequence(swap_time_batch(input, time_major), None, hidden, state)
        return (swap_time_batch(out, time_major), hidden, state)[:output_count]

    return run


_STATES = 2 * TENSOR_COUNT  # positions after the input: two cells, four states, the auxiliary input, its weights, norms
AUX = _STATES + 4
_NORMS = AUX + 9


def two_cells(rest: Sequence[T]) -> tuple[LstmTensors[T], LstmTensors[T]]:
    """Return the forward and the backward cell from all arguments after the input."""
    fw_aux, bw_aux = rest[AUX + 1 : AUX + 5], rest[AUX + 5 : _NORMS]
    forward = LstmTensors.of(rest[:TENSOR_COUNT], norm=rest[_NORMS : _NORMS + 4], aux=fw_aux)
    return forward, LstmTensors.of(rest[TENSOR_COUNT:_STATES], norm=rest[_NORMS + 4 :], aux=bw_aux)


def bidirectional_shape(
    input: Shape, *rest: Shape, merge_outputs: bool, time_major: bool, output_count: int, **cell_attributes: Any
) -> Shapes:
    """Return the shapes of the outputs, two or merged to one, and of the four states if they are outputs."""
    check_attributes(**cell_attributes)
    forward, backward = two_cells(rest)
    linking = Linking.of(input, rest[AUX], (forward.aux != NO_GATES, backward.aux != NO_GATES))
    states = rest[_STATES:AUX]
    steps = time_major_shape(input, time_major)
    check_cell(forward, steps[1:], states[:2], linking.aux)
    check_cell(backward, (steps[1], linking.backward[2]), states[2:], linking.aux)
    sizes = (states[0][1], states[2][1])
    return bidirectional_shapes(steps, sizes, states, time_major, merge_outputs, output_count)


def plan_bidirectional(
    input: Tensor,
    *rest: Tensor,
    output: Tensors,
    merge_outputs: bool,
    time_major: bool,
    output_count: int,
    **cell_attributes: Any,
) -> Run:
    """Plan both directions of a sequence."""
    cells = two_cells(rest)
    forward, backward = (pack(cell, **cell_attributes) for cell in cells)
    linked = cells[0].aux == NO_GATES

    both = (forward.run_sequence, backward.run_sequence)

    def run(input: Array, *others: Any) -> tuple[Array, ...]:
        *states, aux = others
        results = run_bidirectional(
            both, (input, aux), states, linked=linked, time_major=time_major, merged=merge_outputs
        )
        return results[:output_count]

    return run


# -- declarations -----------------------------------------------------------------------------------------------------

_CLIPS = (op.attribute("activation"), op.attribute("cell_clip", "S"), op.attribute("projection_clip", "S"))


def _norms(prefix: str = "") -> tuple[op.Parameter, ...]:
    return gate_parameters(prefix + "{}_layer_norm_weights", optional=GATES)


def _aux(prefix: str, weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return gate_parameters(prefix + "aux_input_to_{}_weights", weights, optional=GATES)


def _states(prefix: str = "") -> tuple[op.Parameter, ...]:
    return op.data(f"{prefix}output_state_in"), op.data(f"{prefix}cell_state_in")


def _one_step(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return (op.data("input"), *cell_parameters(weights=weights), *_states(), *_CLIPS, *_norms())


def _unidirectional(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    step = _one_step(weights)
    return (*step[: -len(GATES)], op.attribute("time_major", op.BOOL), *step[-len(GATES) :])


_DYNAMIC = (op.data("input"), *cell_parameters(weights="W")[:8], *_unidirectional()[9:])


def _bidirectional(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return (
        op.data("input"),
        *(*cell_parameters("fw_", weights=weights), *cell_parameters("bw_", weights=weights)),
        *(*_states("fw_"), *_states("bw_")),
        op.data("aux_input", optional=True),
        *(*_aux("fw_", weights), *_aux("bw_", weights)),
        *_CLIPS,
        op.attribute("merge_outputs", op.BOOL),
        op.attribute("time_major", op.BOOL),
        *(*_norms("fw_"), *_norms("bw_")),
    )


DECLARATIONS = (
    op.Declaration(
        OperationType.LSTM,
        since=op.V1_0,
        overloads=(op.overload(*_one_step(), level=op.V1_2, also={23: op.V1_0}),),
        variants=float_variants(plan_lstm, "S", level=op.V1_0),
        shape=lstm_shape,
        outputs=("T",) * 4,
        extended=(hybrid(plan_lstm, lstm_shape, _one_step("W"), S=op.FLOAT32),),
    ),
    op.Declaration(
        OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
        since=op.V1_2,
        overloads=(op.overload(*_unidirectional()),),
        variants=float_variants(plan_unidirectional, "S"),
        shape=unidirectional_shape,
        outputs=("T",) * 3,
        output_counts={1: op.V1_2, 3: op.V1_3},
        extended=(
            hybrid(plan_unidirectional, unidirectional_shape, _unidirectional("W"), S=op.FLOAT32),
            dynamic(plan_unidirectional, _DYNAMIC, S=op.FLOAT32),
        ),
    ),
    op.Declaration(
        OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
        since=op.V1_2,
        overloads=(op.overload(*_bidirectional()),),
        variants=float_variants(plan_bidirectional, "S"),
        shape=bidirectional_shape,
        outputs=("T",) * 6,
        output_counts={1: op.V1_2, 2: op.V1_2, 5: op.V1_3, 6: op.V1_3},
        extended=(hybrid(plan_bidirectional, bidirectional_shape, _bidirectional("W"), S=op.FLOAT32),),
    ),
)
