"""LSTM and its sequence forms against the HAL's formulas, in every variant of the cell; their constraints."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import lstm_definition
from support.by_name import OMITTED, Use

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.validation import validate_model

Array = npt.NDArray[Any]
LSTM, UNI, BIDI = (
    OperationType.LSTM,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
)
TIME, BATCH, INPUT, CELLS, OUTPUT, AUX = 4, 3, 5, 6, 2, 3
GATES = ("input", "forget", "cell", "output")
PLAIN: dict[str, Any] = {"activation": 4, "cell_clip": 0.0, "projection_clip": 0.0}

Variant = frozenset[str]
VARIANTS = [
    frozenset(names)
    for n in range(5)
    for names in itertools.combinations(("cifg", "peephole", "projection", "norm"), n)
]


def name_of(variant: Variant) -> str:
    return "-".join(sorted(variant)) or "plain"


def cell_values(rng: Any, variant: Variant, input_size: int = INPUT, aux_size: int = 0) -> dict[str, Any]:
    """Return all tensors of a cell by name; None for those that the variant lacks."""
    output = OUTPUT if "projection" in variant else CELLS
    values: dict[str, Any] = {}

    def put(name: str, present: bool, *shape: int) -> None:
        values[name] = rng.normal(0, 0.6, shape).astype(np.float32) if present else None

    for gate in GATES:
        here = gate != "input" or "cifg" not in variant
        put(f"input_to_{gate}_weights", here, CELLS, input_size)
        put(f"recurrent_to_{gate}_weights", here, CELLS, output)
        put(f"{gate}_gate_bias", here, CELLS)
        put(f"{gate}_layer_norm_weights", here and "norm" in variant, CELLS)
        put(f"aux_input_to_{gate}_weights", here and aux_size > 0, CELLS, aux_size)
        if gate != "cell":
            put(f"cell_to_{gate}_weights", here and "peephole" in variant, CELLS)
    put("projection_weights", "projection" in variant, output, CELLS)
    put("projection_bias", "projection" in variant, output)
    return values


def states(rng: Any, variant: Variant) -> dict[str, Array]:
    output = OUTPUT if "projection" in variant else CELLS
    return {
        "output_state_in": rng.normal(0, 0.5, (BATCH, output)).astype(np.float32),
        "cell_state_in": rng.normal(0, 0.5, (BATCH, CELLS)).astype(np.float32),
    }


def steps(rng: Any, size: int = INPUT) -> Array:
    return np.asarray(rng.normal(0, 1, (TIME, BATCH, size)).astype(np.float32))


def defined(cell: Any, x: Array, state: Any, aux: Array | None = None, **attributes: Any) -> tuple[Array, Array, Array]:
    wide = {name: None if value is None else value.astype(np.float64) for name, value in cell.items()}
    return lstm_definition.sequence(
        wide, x, state["output_state_in"], state["cell_state_in"], aux, **(PLAIN | attributes)
    )


def close(found: Array, expected: Array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_one_step_is_the_formulas(variant: Variant) -> None:
    rng = np.random.default_rng(len(variant))
    cell, state, x = cell_values(rng, variant), states(rng, variant), steps(rng)[:1]
    values = cell | state | PLAIN | {"input": x[0]}

    scratch, hidden, cells, output = Use(LSTM, values, 4).run()

    expected = defined(cell, x, state)
    assert scratch.shape == (BATCH, CELLS * (3 if "cifg" in variant else 4))
    close(output, expected[0][0])
    np.testing.assert_array_equal(hidden, output)
    close(cells, expected[2])


@pytest.mark.parametrize("activation", [0, 1, 3, 4, 6])
def test_every_activation_and_both_clips_are_applied(activation: int) -> None:
    rng = np.random.default_rng(activation)
    variant = frozenset(["projection"])
    cell, state, x = cell_values(rng, variant), states(rng, variant), steps(rng)[:1]
    attributes: dict[str, Any] = {"activation": activation, "cell_clip": 0.3, "projection_clip": 0.2}

    _, _, cells, output = Use(LSTM, cell | state | attributes | {"input": x[0]}, 4).run()

    expected = defined(cell, x, state, **attributes)
    assert np.abs(expected[2]).max() == 0.3
    close(output, expected[0][0])
    close(cells, expected[2])


def test_the_overload_of_1_0_has_no_layer_normalization_and_needs_level_1() -> None:
    rng = np.random.default_rng(1)
    cell, state, x = cell_values(rng, frozenset()), states(rng, frozenset()), steps(rng)[:1]
    values = {name: value for name, value in cell.items() if "norm" not in name} | state | PLAIN | {"input": x[0]}
    use = Use(LSTM, values, 4).declaring(0, (BATCH, 4 * CELLS))
    for index in (1, 2, 3):
        use.declaring(index, (BATCH, CELLS))

    assert validate_model(use.model) == 1
    close(use.run()[3], defined(cell, x, state)[0][0])


def test_a_projection_bias_may_be_omitted() -> None:
    rng = np.random.default_rng(1)
    variant = frozenset(["projection"])
    cell, state, x = cell_values(rng, variant) | {"projection_bias": None}, states(rng, variant), steps(rng)[:1]

    output = Use(LSTM, cell | state | PLAIN | {"input": x[0]}, 4).run()[3]

    close(output, defined(cell, x, state)[0][0])


@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("output_count", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_a_sequence_is_the_formulas_step_by_step(variant: Variant, output_count: int, time_major: bool) -> None:
    rng = np.random.default_rng(7)
    cell, state, x = cell_values(rng, variant), states(rng, variant), steps(rng)
    sequence = x if time_major else x.swapaxes(0, 1)
    use = Use(UNI, cell | state | PLAIN | {"input": sequence, "time_major": time_major}, output_count)

    output, *after = use.run()

    expected = defined(cell, x, state)
    close(output, expected[0] if time_major else expected[0].swapaxes(0, 1))
    assert len(after) == output_count - 1
    for found, wanted in zip(after, expected[1:], strict=False):
        close(found, wanted)


@pytest.mark.parametrize(("output_count", "level"), [(1, 3), (3, 4)])
def test_VAL_2_state_outputs_of_a_sequence_need_1_3(output_count: int, level: int) -> None:
    rng = np.random.default_rng(7)
    values = (
        cell_values(rng, frozenset()) | states(rng, frozenset()) | PLAIN | {"input": steps(rng), "time_major": True}
    )
    use = Use(UNI, values, output_count).declaring(0, (TIME, BATCH, CELLS))
    for index, shape in enumerate([(BATCH, CELLS)] * (output_count - 1), start=1):
        use.declaring(index, shape)

    assert validate_model(use.model) == level


def test_S3_a_sequence_with_one_of_the_two_states_is_rejected() -> None:
    rng = np.random.default_rng(7)
    values = (
        cell_values(rng, frozenset()) | states(rng, frozenset()) | PLAIN | {"input": steps(rng), "time_major": True}
    )

    with pytest.raises(InvalidArgument, match=r"2 outputs given, allowed are .*\(S3\)$"):
        Use(UNI, values, 2).run()


@pytest.mark.parametrize("how", ["constants", "unknown"])
def test_weights_may_be_constants_and_shapes_unknown(how: str) -> None:
    rng = np.random.default_rng(5)
    variant = frozenset(["cifg", "peephole", "norm"])
    cell, state, x = cell_values(rng, variant), states(rng, variant), steps(rng)
    constants = [name for name, value in cell.items() if value is not None] if how == "constants" else []
    values = cell | state | PLAIN | {"input": x, "time_major": True}

    output, *_ = Use(UNI, values, 3, constants=constants, known=how == "constants").run()

    close(output, defined(cell, x, state)[0])


def test_arguments_that_the_request_leaves_out_are_like_those_that_the_model_lacks() -> None:
    rng = np.random.default_rng(5)
    cell, state, x = cell_values(rng, frozenset(["cifg"])), states(rng, frozenset()), steps(rng)
    values = cell | state | PLAIN | {"input": x, "time_major": True}
    omitted = {name: OMITTED if value is None else value for name, value in values.items()}

    np.testing.assert_array_equal(Use(UNI, omitted, 1).run()[0], Use(UNI, values, 1).run()[0])


def test_float16_is_the_formulas_within_its_precision() -> None:
    rng = np.random.default_rng(5)
    variant = frozenset(["peephole", "projection"])
    cell, state, x = cell_values(rng, variant), states(rng, variant), steps(rng)
    values = cell | state | PLAIN | {"input": x, "time_major": True}

    output, hidden, cells = Use(UNI, values, 3, first_type=OperandType.TENSOR_FLOAT16).run()

    expected = defined(cell, x, state)
    assert output.dtype == hidden.dtype == cells.dtype == np.float16
    close(output, expected[0], 5e-3)
    close(cells, expected[2], 5e-3)


# -- two directions ---------------------------------------------------------------------------------------------------


def both(variants: tuple[Variant, Variant], aux: str, seed: int = 3) -> tuple[dict[str, Any], Any, Any]:
    """Return the arguments of two cells, and for each its tensors, states and what it reads, forward in its time."""
    rng = np.random.default_rng(seed)
    x, extra = steps(rng), steps(rng, AUX)
    cross = aux == "cross"
    forward = cell_values(rng, variants[0], aux_size=AUX if cross else 0)
    backward = cell_values(rng, variants[1], AUX if aux == "parallel" else INPUT, AUX if cross else 0)
    here, there = states(rng, variants[0]), states(rng, variants[1])
    values = prefixed("fw_", forward | here) | prefixed("bw_", backward | there) | PLAIN
    values |= {"input": x, "aux_input": None if aux == "none" else extra, "time_major": True, "merge_outputs": False}
    second = (extra if aux == "parallel" else x)[::-1]
    added = (extra, extra[::-1]) if cross else (None, None)
    return values, (forward, x, here, added[0]), (backward, second, there, added[1])


@pytest.mark.parametrize("aux", ["none", "parallel", "cross"])
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_two_directions_are_two_sequences_of_which_one_runs_from_the_end(variant: Variant, aux: str) -> None:
    values, forward, backward = both((variant, variant), aux)

    found = Use(BIDI, values, 6).run()

    expected, reverse = defined(*forward), defined(*backward)
    close(found[0], expected[0])
    close(found[1], reverse[0][::-1])
    for state, wanted in zip(found[2:], (*expected[1:], *reverse[1:]), strict=True):
        close(state, wanted)


def test_the_two_cells_may_have_different_variants_and_sizes() -> None:
    values, forward, backward = both((frozenset(["projection", "norm"]), frozenset(["cifg", "peephole"])), "none")

    found = Use(BIDI, values, 2).run()

    close(found[0], defined(*forward)[0])
    close(found[1], defined(*backward)[0][::-1])


@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("output_count", [1, 5])
def test_merged_outputs_are_joined_along_their_last_dimension(output_count: int, time_major: bool) -> None:
    values, forward, backward = both((frozenset(["projection"]), frozenset()), "cross")
    values |= {"merge_outputs": True, "time_major": time_major}
    for name in ("input", "aux_input"):
        values[name] = values[name] if time_major else values[name].swapaxes(0, 1)

    found = Use(BIDI, values, output_count).run()

    expected = np.concatenate([defined(*forward)[0], defined(*backward)[0][::-1]], axis=2)
    close(found[0], expected if time_major else expected.swapaxes(0, 1))
    assert len(found) == output_count


# -- constraints ------------------------------------------------------------------------------------------------------


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


CELL_VIOLATIONS: list[tuple[str, dict[str, Any]]] = [
    ("C2", {"input_to_cell_weights": zeros(CELLS, INPUT + 1)}),
    ("C2", {"recurrent_to_output_weights": zeros(CELLS + 1, OUTPUT)}),
    ("C2", {"input_to_output_weights": zeros(CELLS)}),
    ("C2", {"input_to_output_weights": zeros()}),
    ("C2", {"input_to_output_weights": zeros(CELLS), "recurrent_to_output_weights": zeros(CELLS)}),
    ("C3", {"recurrent_to_input_weights": None}),
    ("C3", {"input_gate_bias": None}),
    ("C3", {"input_to_input_weights": None}),
    ("C4", {"cell_to_forget_weights": None}),
    ("C4", {"cell_to_output_weights": zeros(CELLS + 1)}),
    ("C5", {"forget_gate_bias": zeros(CELLS + 1)}),
    ("C6", {"projection_weights": zeros(CELLS, OUTPUT)}),
    ("C6", {"projection_weights": None}),
    ("C6", {"projection_weights": None, "projection_bias": None}),
    ("C6", {"projection_bias": zeros(CELLS)}),
    ("C7", {"cell_layer_norm_weights": None}),
    ("C7", {"output_layer_norm_weights": zeros(1)}),
    ("C8", {"output_state_in": zeros(BATCH, CELLS)}),
    ("C8", {"cell_state_in": zeros(BATCH + 1, CELLS)}),
    ("C9", {"cell_clip": -1.0}),
    ("C9", {"projection_clip": float("nan")}),
    ("C10", {"activation": 2}),
    ("C10", {"activation": -1}),
]
FULL = frozenset(["peephole", "projection", "norm"])


def violation_id(value: Any) -> str:
    return value.lower() if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("rule", "changes"), CELL_VIOLATIONS, ids=violation_id)
def test_N_OPF_9_lstm_c2_to_c10_a_violated_constraint_is_named(rule: str, changes: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    values = cell_values(rng, FULL) | states(rng, FULL) | PLAIN | {"input": zeros(BATCH, INPUT)} | changes

    with pytest.raises(GeneralFailure, match=rf"operation 0 \(LSTM\): .*\({rule}\)$"):
        Use(LSTM, values, 4).run()


def test_N_OPF_9_lstm_c6_a_projection_bias_without_weights_is_rejected() -> None:
    rng = np.random.default_rng(0)
    values = cell_values(rng, frozenset()) | states(rng, frozenset()) | PLAIN | {"input": zeros(BATCH, INPUT)}

    with pytest.raises(GeneralFailure, match=r"operation 0 \(LSTM\): .*\(C6\)$"):
        Use(LSTM, values | {"projection_bias": zeros(CELLS)}, 4).run()


@pytest.mark.parametrize(("code", "count"), [(LSTM, 4), (UNI, 1)])
def test_lstm_c1_an_input_of_another_rank_is_rejected(code: OperationType, count: int) -> None:
    rng = np.random.default_rng(0)
    values = cell_values(rng, FULL) | states(rng, FULL) | PLAIN | {"input": zeros(INPUT)}
    values |= {"time_major": True} if code == UNI else {}

    with pytest.raises(GeneralFailure, match=rf"\({code.name}\): .*\(C1\)$"):
        Use(code, values, count).run()


@pytest.mark.parametrize(
    ("rule", "changes", "count"),
    [
        ("C11", {"aux_input": None}, 2),
        ("C11", {"aux_input": zeros(TIME, BATCH + 1, AUX)}, 2),
        ("C11", {"aux_input": zeros(TIME, BATCH, AUX + 1)}, 2),
        ("C11", {"fw_aux_input_to_cell_weights": None}, 2),
        ("C11", {f"bw_aux_input_to_{gate}_weights": None for gate in GATES}, 2),
        ("C12", {"merge_outputs": True}, 2),
        ("C12", {"merge_outputs": True}, 6),
        ("C12", {}, 1),
        ("C12", {}, 5),
    ],
)
def test_bidirectional_lstm_c11_and_c12_linking_and_merging_are_checked(
    rule: str, changes: dict[str, Any], count: int
) -> None:
    values, *_ = both((FULL, FULL), "cross")

    with pytest.raises(GeneralFailure, match=rf": .*\({rule}\)$"):
        Use(BIDI, values | changes, count).run()


def test_R3_a_sequence_without_steps_is_rejected() -> None:
    rng = np.random.default_rng(0)
    values = cell_values(rng, FULL) | states(rng, FULL) | PLAIN | {"input": zeros(0, BATCH, INPUT), "time_major": True}

    with pytest.raises(GeneralFailure, match=r"\(R3\)$"):
        Use(UNI, values, 1, known=False).run()


@pytest.mark.parametrize("name", ["input_to_forget_weights", "cell_gate_bias", "cell_state_in"])
def test_S5_required_tensors_of_a_cell_must_not_be_omitted(name: str) -> None:
    rng = np.random.default_rng(0)
    values = cell_values(rng, FULL) | states(rng, FULL) | PLAIN | {"input": zeros(BATCH, INPUT), name: None}

    with pytest.raises(InvalidArgument, match=r"\(S5\)$"):
        Use(LSTM, values, 4).run()
