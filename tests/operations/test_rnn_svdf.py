"""RNN, its sequences and SVDF against the HAL's formulas in float64; their constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.by_name import OMITTED, Use

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.validation import validate_model

Array = npt.NDArray[Any]
RNN, UNI, BIDI, SVDF = (
    OperationType.RNN,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
    OperationType.SVDF,
)
TIME, BATCH, INPUT, UNITS, AUX = 4, 3, 5, 6, 2
FUNCTIONS: Mapping[int, Callable[[Array], Array]] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.minimum(np.maximum(x, -1), 1),
    3: lambda x: np.minimum(np.maximum(x, 0), 6),
    4: np.tanh,
    6: lambda x: 1 / (1 + np.exp(-x)),
}


def drawn(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def cell(prefix: str = "", input_size: int = INPUT, units: int = UNITS, seed: int = 0) -> dict[str, Any]:
    values = drawn(
        seed,
        weights=(units, input_size),
        recurrent_weights=(units, units),
        bias=(units,),
        hidden_state=(BATCH, units),
    )
    return {prefix + name: value for name, value in values.items()}


def defined(cell: Any, x: Array, code: int, prefix: str = "", added: Array | None = None) -> tuple[Array, Array]:
    """Return all outputs of a time-major sequence and the last hidden state, batch by batch."""
    w, r, b, h = (cell[prefix + n].astype(float) for n in ("weights", "recurrent_weights", "bias", "hidden_state"))
    outputs = []
    for time in range(len(x)):
        rows = []
        for batch in range(len(h)):
            total = w @ x[time, batch] + r @ h[batch] + b
            rows.append(FUNCTIONS[code](total if added is None else total + added[time, batch]))
        h = np.array(rows)
        outputs.append(h)
    return np.array(outputs), h


def close(found: Array, expected: Array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


SEQUENCE = drawn(9, input=(TIME, BATCH, INPUT))["input"]
EXTRA = drawn(8, input=(TIME, BATCH, AUX))["input"]


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_one_step_is_the_formula_for_every_activation(activation: int) -> None:
    values = cell()

    hidden, output = Use(RNN, values | {"input": SEQUENCE[0], "activation": activation}, 2).run()

    close(output, defined(values, SEQUENCE[:1], activation)[1])
    np.testing.assert_array_equal(hidden, output)


@pytest.mark.parametrize(("first_type", "tolerance"), [("TENSOR_FLOAT32", 1e-5), ("TENSOR_FLOAT16", 5e-3)])
@pytest.mark.parametrize("output_count", [1, 2])
@pytest.mark.parametrize("time_major", [0, 1])
def test_a_sequence_is_the_formula_step_by_step(
    time_major: int, output_count: int, first_type: str, tolerance: float
) -> None:
    values, x = cell(), SEQUENCE if time_major else SEQUENCE.swapaxes(0, 1)
    arguments = values | {"input": x, "activation": 4, "time_major": time_major}

    output, *state = Use(UNI, arguments, output_count, first_type=OperandType[first_type]).run()

    expected, last = defined(values, SEQUENCE, 4)
    close(output, expected if time_major else expected.swapaxes(0, 1), tolerance)
    assert len(state) == output_count - 1
    for found in state:
        close(found, last, tolerance)


@pytest.mark.parametrize(("code", "counts"), [(UNI, {1: 3, 2: 4}), (BIDI, {1: 3, 2: 3, 3: 4, 4: 4})])
def test_VAL_2_state_outputs_of_a_sequence_need_1_3(code: OperationType, counts: dict[int, int]) -> None:
    values = two("none") | UNI_VALUES

    assert {count: validate_model(Use(code, values, count).model) for count in counts} == counts


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("constants", [(), ("weights", "recurrent_weights", "bias")])
def test_weights_may_be_constants_and_shapes_unknown(constants: tuple[str, ...], known: bool) -> None:
    values = cell()
    arguments = values | {"input": SEQUENCE, "activation": 1, "time_major": 1}

    (output,) = Use(UNI, arguments, 1, constants=constants, known=known).run()

    close(output, defined(values, SEQUENCE, 1)[0])


def two(aux: str) -> dict[str, Any]:
    """Return the arguments of two cells of different sizes, linked in the way that `aux` says."""
    values = cell("fw_") | cell("bw_", AUX if aux == "parallel" else INPUT, UNITS - 2, seed=1)
    values |= {"input": SEQUENCE, "aux_input": None if aux == "none" else EXTRA}
    values |= drawn(4, fw_aux_weights=(UNITS, AUX), bw_aux_weights=(UNITS - 2, AUX))
    if aux != "cross":
        values |= {"fw_aux_weights": None, "bw_aux_weights": None}
    return values | {"activation": 4, "time_major": True, "merge_outputs": False}


def both_defined(values: Any, aux: str) -> tuple[Array, Array, Array, Array]:
    """Return both outputs in the order of time, and both last states."""
    there = EXTRA if aux == "parallel" else SEQUENCE
    added = (None, None)
    if aux == "cross":
        added = tuple(EXTRA.astype(float) @ values[name].T for name in ("fw_aux_weights", "bw_aux_weights"))
    forward, first = defined(values, SEQUENCE, 4, "fw_", added[0])
    backward, second = defined(values, there[::-1], 4, "bw_", None if added[1] is None else added[1][::-1])
    return forward, backward[::-1], first, second


@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("with_states", [True, False])
@pytest.mark.parametrize("aux", ["none", "parallel", "cross"])
def test_two_directions_are_two_sequences(aux: str, with_states: bool, merged: bool, time_major: bool) -> None:
    values = two(aux) | {"merge_outputs": merged, "time_major": time_major}
    expected = both_defined(values, aux)
    turn: Callable[[Array], Array] = (lambda a: a) if time_major else (lambda a: a.swapaxes(0, 1))
    values |= {name: turn(values[name]) for name in ("input", "aux_input") if values[name] is not None}

    found = Use(BIDI, values, (1 if merged else 2) + 2 * with_states).run()

    outputs = [np.concatenate(expected[:2], axis=2)] if merged else list(expected[:2])
    wanted = [turn(output) for output in outputs] + list(expected[2:]) * with_states
    assert len(found) == len(wanted)
    for result, want in zip(found, wanted, strict=True):
        close(result, want)


def test_an_auxiliary_input_that_the_request_leaves_out_is_none() -> None:
    values = two("none")

    (*found,) = Use(BIDI, values | {"aux_input": OMITTED}, 2).run()

    close(found[0], both_defined(values, "none")[0])


# -- SVDF -------------------------------------------------------------------------------------------------------------

MEMORY, RANK = 4, 2
FILTERS = UNITS * RANK


def svdf(**changes: Any) -> dict[str, Any]:
    values = drawn(
        2,
        input=(BATCH, INPUT),
        weights_feature=(FILTERS, INPUT),
        weights_time=(FILTERS, MEMORY),
        bias=(UNITS,),
        state_in=(BATCH, MEMORY * FILTERS),
    )
    return values | {"rank": RANK, "activation": 0} | changes


def svdf_defined(v: Any) -> tuple[Array, Array]:
    memory = v["state_in"].astype(float).reshape(BATCH, FILTERS, MEMORY)
    output = np.zeros((BATCH, UNITS))
    after = np.zeros_like(memory)
    for batch in range(BATCH):
        for filter in range(FILTERS):
            row = [*memory[batch, filter, :-1], v["weights_feature"][filter].astype(float) @ v["input"][batch]]
            output[batch, filter // RANK] += v["weights_time"][filter].astype(float) @ row
            after[batch, filter, :-1] = row[1:]
    bias = 0 if v["bias"] is None else v["bias"]
    return after.reshape(BATCH, -1), FUNCTIONS[v["activation"]](output + bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_svdf_is_its_definition(activation: int, bias: bool) -> None:
    values = svdf(activation=activation) | ({} if bias else {"bias": None})

    state, output = Use(SVDF, values, 2).run()

    expected = svdf_defined(values)
    close(state, expected[0])
    close(output, expected[1])


def test_svdf_shifts_its_memory_by_one_with_each_call() -> None:
    values = svdf()
    first, _ = Use(SVDF, values, 2).run()

    second, output = Use(SVDF, values | {"state_in": first}, 2).run()

    expected = svdf_defined(values | {"state_in": svdf_defined(values)[0]})
    close(second, expected[0])
    close(output, expected[1])


# -- constraints ------------------------------------------------------------------------------------------------------


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


RNN_VALUES = cell() | {"input": SEQUENCE[0], "activation": 0}
UNI_VALUES = cell() | {"input": SEQUENCE, "activation": 0, "time_major": 1}
VIOLATIONS: list[tuple[OperationType, str, dict[str, Any], int]] = [
    (RNN, "C1", RNN_VALUES | {"input": SEQUENCE}, 2),
    (RNN, "C2", RNN_VALUES | {"weights": zeros(UNITS, INPUT + 1)}, 2),
    (RNN, "C2", RNN_VALUES | {"recurrent_weights": zeros(UNITS, INPUT)}, 2),
    (RNN, "C2", RNN_VALUES | {"bias": zeros(UNITS, 1)}, 2),
    (RNN, "C3", RNN_VALUES | {"hidden_state": zeros(BATCH + 1, UNITS)}, 2),
    (RNN, "C4", RNN_VALUES | {"activation": 5}, 2),
    (RNN, "C4", RNN_VALUES | {"activation": -1}, 2),
    (UNI, "C1", UNI_VALUES | {"input": SEQUENCE[0]}, 1),
    (UNI, "C2", UNI_VALUES | {"bias": zeros(1)}, 1),
    (UNI, "C3", UNI_VALUES | {"time_major": 0}, 1),
    (UNI, "C4", UNI_VALUES | {"activation": 7}, 1),
    (UNI, "C5", UNI_VALUES | {"time_major": 2}, 1),
    (BIDI, "C1", two("none") | {"input": SEQUENCE[0]}, 2),
    (BIDI, "C2", two("none") | {"bw_bias": zeros(UNITS)}, 2),
    (BIDI, "C3", two("none") | {"fw_hidden_state": zeros(1, UNITS)}, 2),
    (BIDI, "C4", two("none") | {"activation": 5}, 2),
    (BIDI, "C11", two("cross") | {"fw_aux_weights": None}, 2),
    (BIDI, "C11", two("cross") | {"aux_input": None}, 2),
    (BIDI, "C11", two("cross") | {"bw_aux_weights": zeros(UNITS, AUX)}, 2),
    (BIDI, "C11", two("parallel") | {"aux_input": EXTRA[1:]}, 2),
    (BIDI, "C11", two("parallel") | {"aux_input": EXTRA[..., 0]}, 2),
    (BIDI, "C11", two("cross") | {"aux_input": EXTRA[..., 0]}, 2),
    (BIDI, "C12", two("none"), 1),
    (BIDI, "C12", two("none"), 3),
    (BIDI, "C12", two("none") | {"merge_outputs": True}, 4),
    (SVDF, "C1", svdf(input=zeros(INPUT)), 2),
    (SVDF, "C2", svdf(weights_feature=zeros(FILTERS, INPUT + 1)), 2),
    (SVDF, "C2", svdf(weights_time=zeros(FILTERS + RANK, MEMORY)), 2),
    (SVDF, "C2", svdf(weights_time=zeros(FILTERS)), 2),
    (SVDF, "C2", svdf(bias=zeros(FILTERS)), 2),
    (SVDF, "C3", svdf(state_in=zeros(BATCH, FILTERS)), 2),
    (SVDF, "C4", svdf(activation=8), 2),
    (SVDF, "C6", svdf(rank=0), 2),
    (SVDF, "C6", svdf(rank=5), 2),
]


@pytest.mark.parametrize(("code", "rule", "values", "count"), VIOLATIONS)
def test_recurrent_c1_to_c12_a_violated_constraint_is_named(
    code: OperationType, rule: str, values: dict[str, Any], count: int
) -> None:
    with pytest.raises(GeneralFailure, match=rf"operation 0 \({code.name}\): .*\({rule}\)$"):
        Use(code, values, count).run()


@pytest.mark.parametrize("code", [RNN, UNI])
def test_S5_no_tensor_of_an_rnn_cell_may_be_omitted(code: OperationType) -> None:
    values = (RNN_VALUES if code == RNN else UNI_VALUES) | {"bias": None}

    with pytest.raises(InvalidArgument, match=r"\(S5\)$"):
        Use(code, values, 2).run()
