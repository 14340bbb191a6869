"""RNN, UNIDIRECTIONAL_SEQUENCE_RNN, BIDIRECTIONAL_SEQUENCE_RNN and SVDF.

An RNN cell computes activation(input · W + hidden · R + bias); its output is its next hidden state. SVDF stores the
features of the last inputs: it writes the newest into the last column of its memory, computes the weighted sum of the
columns, and shifts them by one.
`recurrent_sequences` has what a sequence adds. float16 is computed in float32 and rounded once, where the reference
rounds at each addition: the HAL's tolerance covers both.

    C1 the input's rank            C3 states: (batch, units), SVDF's (batch, memory size · filters)
    C2 weights and biases match the input and each other
    C4 activation code 0-4 or 6    C5 time major is 0 or 1         C6 SVDF's rank divides the count of filters

C11 and C12 are explained in `recurrent_sequences`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.dynamic_matmul import DynamicWeights, Quantize, packed_weights, product_of_rows
from nnfmq.operations.kernel_adapters import float_variants
from nnfmq.operations.recurrent_sequences import (
    ACTIVATIONS,
    Linking,
    bidirectional_shapes,
    hybrid,
    run_bidirectional,
    swap_time_batch,
    time_major_shape,
)
from nnfmq.operations.shapes import require

Shapes: TypeAlias = tuple[Shape, ...]
Tensors: TypeAlias = tuple[Tensor, ...]


def activation_function(code: int) -> Callable[[Array], Array]:
    """Return the function of an activation code (C4)."""
    require(code in ACTIVATIONS, "C4", f"activation code {code}, allowed are {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[code]


def check_cell(rows: Shape, weights: Shape, recurrent: Shape, bias: Shape, hidden: Shape) -> None:
    """Check C2 and C3 for a step's `rows` (batch, input size)."""
    units = bias[0] if len(bias) == 1 else -1
    shapes, required = (weights, recurrent, bias), ((units, rows[1]), (units, units), (units,))
    require(shapes == required, "C2", f"weights, recurrent weights and bias have shapes {shapes}")
    require(hidden == (rows[0], units), "C3", f"the hidden state has shape {hidden}, required is {(rows[0], units)}")


class PreparedRnnCell(Struct, frozen=True):
    """An RNN cell with copied weights."""

    weights: Array | DynamicWeights
    aux_weights: Array | DynamicWeights | None
    recurrent: Array | DynamicWeights
    bias: Array
    activation: Callable[[Array], Array]
    quantize: Quantize | None

    @classmethod
    def of(
        cls,
        weights: Tensor,
        recurrent: Tensor,
        bias: Tensor,
        activation: int,
        aux_weights: Tensor | None = None,
        quantize: Quantize | None = None,
    ) -> PreparedRnnCell:
        """Copy the weights: those that come with the request may be in another process's memory.

        `quantize`, if set, makes bytes of all rows that are multiplied by weights.
        """
        aux = None if aux_weights is None else packed_weights([aux_weights])
        matrices = packed_weights([weights]), aux, packed_weights([recurrent])
        return cls(*matrices, bias.array.copy(), activation_function(activation), quantize)

    def run_sequence(self, steps: Array, aux: Array | None, hidden: Array) -> tuple[Array, Array]:
        """Run over `steps` (time, batch, size); return all outputs and the last hidden state."""
        sums = product_of_rows(steps, self.weights, self.quantize) + self.bias
        if aux is not None and self.aux_weights is not None:
            sums = sums + product_of_rows(aux, self.aux_weights, self.quantize)
        out = np.empty_like(sums)
        for time, row in enumerate(sums):
            hidden = self.activation(row + product_of_rows(hidden, self.recurrent, self.quantize))
            out[time] = hidden
        return out, hidden


# -- RNN and its sequences --------------------------------------------------------------------------------------------


def rnn_shape(
    input: Shape, weights: Shape, recurrent_weights: Shape, bias: Shape, hidden: Shape, *, activation: int
) -> Shapes:
    """Return the shapes of the hidden state and the output."""
    require(len(input) == 2, "C1", f"the input has shape {input}, required is (batch, input size)")
    activation_function(activation)
    check_cell(input, weights, recurrent_weights, bias, hidden)
    return hidden, hidden


def plan_rnn(
    input: Tensor,
    weights: Tensor,
    recurrent_weights: Tensor,
    bias: Tensor,
    hidden: Tensor,
    *,
    output: Tensors,
    activation: int,
    quantize: Quantize | None = None,
) -> Run:
    """Plan one step."""
    cell = PreparedRnnCell.of(weights, recurrent_weights, bias, activation, quantize=quantize)

    def run(input: Array, hidden: Array) -> tuple[Array, ...]:
        _, hidden = cell.run_sequence(input[np.newaxis], None, hidden)
        return hidden, hidden

    return run


def unidirectional_shape(
    input: Shape,
    weights: Shape,
    recurrent_weights: Shape,
    bias: Shape,
    hidden: Shape,
    *,
    activation: int,
    time_major: int,
    output_count: int,
) -> Shapes:
    """Return the shapes of the output and, if there are two outputs, of the hidden state."""
    require(time_major in (0, 1), "C5", f"time major is {time_major}, allowed are 0 and 1")
    steps = time_major_shape(input, bool(time_major))
    activation_function(activation)
    check_cell(steps[1:], weights, recurrent_weights, bias, hidden)
    return (time_major_shape((*steps[:2], hidden[1]), bool(time_major)), hidden)[:output_count]


def plan_unidirectional(
    input: Tensor,
    weights: Tensor,
    recurrent_weights: Tensor,
    bias: Tensor,
    hidden: Tensor,
    *,
    output: Tensors,
    activation: int,
    time_major: int,
    output_count: int,
    quantize: Quantize | None = None,
) -> Run:
    """Plan all steps of a sequence."""
    cell = PreparedRnnCell.of(weights, recurrent_weights, bias, activation, quantize=quantize)

    def run(input: Array, hidden: Array) -> tuple[Array, ...]:
        out, hidden = cell.run_sequence(swap_time_batch(input, bool(time_major)), None, hidden)
        return (swap_time_batch(out, bool(time_major)), hidden)[:output_count]

    return run


def bidirectional_shape(
    input: Shape,
    *rest: Shape,
    activation: int,
    time_major: bool,
    merge_outputs: bool,
    output_count: int,
) -> Shapes:
    """Return the shapes of the outputs, two or merged to one, and of the hidden states if they are outputs."""
    *cells, aux, fw_aux, bw_aux = rest
    linking = Linking.of(input, aux, (fw_aux is not None, bw_aux is not None))
    activation_function(activation)
    steps = time_major_shape(input, time_major)
    forward, backward = cells[:4], cells[4:]
    check_cell(steps[1:], *forward)
    check_cell((steps[1], linking.backward[2]), *backward)
    for weights, units in ((fw_aux, forward[2][0]), (bw_aux, backward[2][0])):
        fits = linking.aux is None or weights == (units, linking.aux[2])
        require(fits, "C11", f"auxiliary weights have shape {weights}, the auxiliary input {linking.aux}")
    sizes = (forward[2][0], backward[2][0])
    states = (forward[3], backward[3])
    return bidirectional_shapes(steps, sizes, states, time_major, merge_outputs, output_count)


def plan_bidirectional(
    input: Tensor,
    *rest: Any,
    output: Tensors,
    activation: int,
    time_major: bool,
    merge_outputs: bool,
    output_count: int,
    quantize: Quantize | None = None,
) -> Run:
    """Plan both directions of a sequence."""
    fw_aux, bw_aux = rest[-2:]
    forward = PreparedRnnCell.of(rest[0], rest[1], rest[2], activation, fw_aux, quantize)
    backward = PreparedRnnCell.of(rest[4], rest[5], rest[6], activation, bw_aux, quantize)
    both = (forward.run_sequence, backward.run_sequence)

    def run(input: Array, fw_hidden: Array, bw_hidden: Array, aux: Array | None) -> tuple[Array, ...]:
        states = (fw_hidden, bw_hidden)
        linked = fw_aux is None
        results = run_bidirectional(
            both, (input, aux), states, linked=linked, time_major=time_major, merged=merge_outputs
        )
        return results[:output_count]

    return run


# -- SVDF -------------------------------------------------------------------------------------------------------------


def svdf_shape(
    input: Shape,
    weights_feature: Shape,
    weights_time: Shape,
    bias: Shape | None,
    state: Shape,
    *,
    rank: int,
    activation: int,
) -> Shapes:
    """Return the shapes of the state and the output (batch, units), where units = filters / rank."""
    require(len(input) == 2, "C1", f"the input has shape {input}, required is (batch, input size)")
    activation_function(activation)
    require(len(weights_time) == 2, "C2", f"time weights have shape {weights_time}, required is (filters, memory)")
    filters, memory = weights_time
    require(weights_feature == (filters, input[1]), "C2", f"feature weights {weights_feature} for input {input}")
    require(rank > 0 and filters % rank == 0, "C6", f"rank {rank} does not divide {filters} filters")
    units = filters // rank
    require(bias in (None, (units,)), "C2", f"bias has shape {bias}, required is ({units},)")
    wanted = (input[0], memory * filters)
    require(state == wanted, "C3", f"the state has shape {state}, required is {wanted}")
    return state, (input[0], units)


def plan_svdf(
    input: Tensor,
    weights_feature: Tensor,
    weights_time: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    output: Tensors,
    rank: int,
    activation: int,
    quantize: Quantize | None = None,
) -> Run:
    """Plan one step. `quantize`, if set, makes bytes of the rows that are multiplied by the features' weights."""
    features, times = packed_weights([weights_feature]), weights_time.array.copy()
    added = np.float32(0) if bias is None else bias.array.copy()
    activate = activation_function(activation)

    def run(input: Array, state: Array) -> tuple[Array, ...]:
        memory = state.reshape(len(state), *times.shape).copy()
        memory[..., -1] = product_of_rows(input, features, quantize)
        weighted = (memory * times).sum(axis=2)
        sums = weighted.reshape(len(state), -1, rank).sum(axis=2) + added
        memory[..., :-1] = memory[..., 1:].copy()
        memory[..., -1] = 0
        return memory.reshape(state.shape), activate(sums)

    return run


# -- declarations -----------------------------------------------------------------------------------------------------


def _cell(prefix: str = "", weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    matrices = (op.weight(prefix + name, weights) for name in ("weights", "recurrent_weights"))
    return (*matrices, op.weight(f"{prefix}bias"), op.data(f"{prefix}hidden_state"))


def _one_step(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return (op.data("input"), *_cell(weights=weights), op.attribute("activation"))


def _unidirectional(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return (*_one_step(weights), op.attribute("time_major"))


def _bidirectional(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return (
        op.data("input"),
        *(*_cell("fw_", weights), *_cell("bw_", weights)),
        op.data("aux_input", optional=True),
        *(op.weight(f"{direction}_aux_weights", weights, optional=True) for direction in ("fw", "bw")),
        *(op.attribute("activation"), op.attribute("time_major", op.BOOL), op.attribute("merge_outputs", op.BOOL)),
    )


def _svdf(weights: op.ParameterType = "T") -> tuple[op.Parameter, ...]:
    return (
        op.data("input"),
        op.weight("weights_feature", weights),
        *(op.weight("weights_time"), op.weight("bias", optional=True)),
        op.data("state_in"),
        *(op.attribute("rank"), op.attribute("activation")),
    )


DECLARATIONS = (
    op.Declaration(
        OperationType.RNN,
        since=op.V1_0,
        overloads=(op.overload(*_one_step()),),
        variants=float_variants(plan_rnn, level=op.V1_0),
        shape=rnn_shape,
        outputs=("T", "T"),
        extended=(hybrid(plan_rnn, rnn_shape, _one_step("W")),),
    ),
    op.Declaration(
        OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
        since=op.V1_2,
        overloads=(op.overload(*_unidirectional(), level=op.V1_2),),
        variants=float_variants(plan_unidirectional),
        shape=unidirectional_shape,
        outputs=("T", "T"),
        output_counts={1: op.V1_2, 2: op.V1_3},
        extended=(hybrid(plan_unidirectional, unidirectional_shape, _unidirectional("W")),),
    ),
    op.Declaration(
        OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
        since=op.V1_2,
        overloads=(op.overload(*_bidirectional(), level=op.V1_2),),
        variants=float_variants(plan_bidirectional),
        shape=bidirectional_shape,
        outputs=("T",) * 4,
        output_counts={1: op.V1_2, 2: op.V1_2, 3: op.V1_3, 4: op.V1_3},
        extended=(hybrid(plan_bidirectional, bidirectional_shape, _bidirectional("W")),),
    ),
    op.Declaration(
        OperationType.SVDF,
        since=op.V1_0,
        overloads=(op.overload(*_svdf()),),
        variants=float_variants(plan_svdf, level=op.V1_0),
        shape=svdf_shape,
        outputs=("T", "T"),
        extended=(hybrid(plan_svdf, svdf_shape, _svdf("W")),),
    ),
)
