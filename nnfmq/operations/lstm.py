"""LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM and BIDIRECTIONAL_SEQUENCE_LSTM.

This module has the parameter lists and distributes their tensors; `lstm_cell` has the cell, its constraints (C1 to C11)
and its arithmetic, `recurrent_sequences` has C12. float16 is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.lstm_cell import (
    GATES,
    NO_GATES,
    TENSOR_COUNT,
    LstmTensors,
    cell_parameters,
    check_attributes,
    check_cell,
    gate_parameters,
    pack,
    unchanged,
)
from nnfmq.operations.recurrent_sequences import (
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
Represent: TypeAlias = Callable[[Array], Array]  # applied to all rows that are multiplied by weights
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
    represent: Represent = unchanged,
) -> Run:
    """Plan one step. The scratch buffer's contents are undefined in the HAL; they are zeros here."""
    packed = pack(one_cell(rest)[0], activation, cell_clip, projection_clip, represent)
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


def _aux(prefix: str) -> tuple[op.Parameter, ...]:
    return gate_parameters(prefix + "aux_input_to_{}_weights", optional=GATES)


def _states(prefix: str = "") -> tuple[op.Parameter, ...]:
    return op.data(f"{prefix}output_state_in"), op.data(f"{prefix}cell_state_in")


def _variants(plan: Plan, level: int) -> tuple[op.Variant, ...]:
    return op.Variant({"T": op.F32, "S": op.FLOAT32}, level, plan), op.Variant(
        {"T": op.F16, "S": op.FLOAT16}, op.V1_2, fp16_via_fp32(plan)
    )


_LSTM = (op.data("input"), *cell_parameters(), *_states(), *_CLIPS, *_norms())
_UNIDIRECTIONAL = (
    op.data("input"),
    *cell_parameters(),
    *_states(),
    *_CLIPS,
    op.attribute("time_major", op.BOOL),
    *_norms(),
)
_BIDIRECTIONAL = (
    op.data("input"),
    *(*cell_parameters("fw_"), *cell_parameters("bw_")),
    *(*_states("fw_"), *_states("bw_")),
    op.data("aux_input", optional=True),
    *(*_aux("fw_"), *_aux("bw_")),
    *_CLIPS,
    op.attribute("merge_outputs", op.BOOL),
    op.attribute("time_major", op.BOOL),
    *(*_norms("fw_"), *_norms("bw_")),
)

DECLARATIONS = (
    op.Declaration(
        OperationType.LSTM,
        since=op.V1_0,
        overloads=(op.overload(*_LSTM, level=op.V1_2, also={23: op.V1_0}),),
        variants=_variants(plan_lstm, op.V1_0),
        shape=lstm_shape,
        outputs=("T",) * 4,
        extended=(hybrid(plan_lstm, lstm_shape, _LSTM, S=op.FLOAT32),),
    ),
    op.Declaration(
        OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
        since=op.V1_2,
        overloads=(op.overload(*_UNIDIRECTIONAL),),
        variants=_variants(plan_unidirectional, op.V1_2),
        shape=unidirectional_shape,
        outputs=("T",) * 3,
        output_counts={1: op.V1_2, 3: op.V1_3},
        extended=(
            hybrid(plan_unidirectional, unidirectional_shape, _UNIDIRECTIONAL, S=op.FLOAT32),
            dynamic(plan_unidirectional, S=op.FLOAT32),
        ),
    ),
    op.Declaration(
        OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
        since=op.V1_2,
        overloads=(op.overload(*_BIDIRECTIONAL),),
        variants=_variants(plan_bidirectional, op.V1_2),
        shape=bidirectional_shape,
        outputs=("T",) * 6,
        output_counts={1: op.V1_2, 2: op.V1_2, 5: op.V1_3, 6: op.V1_3},
        extended=(hybrid(plan_bidirectional, bidirectional_shape, _BIDIRECTIONAL, S=op.FLOAT32),),
    ),
)
