"""RNN, LSTM, sequence and SVDF kernels, compared with the interpreter and with the HAL's vectors.

The vectors' weights come with the request, which no kernel is generated for: here they are constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.by_name import Use
from support.compiled import assert_kernels_agree, outputs_of

from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import DataLocation, LifeTime, Model, OperationType
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.criteria import value_mismatches
from nnfmq.lab.conformance.testmodels import TestModel
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import Role, match

pytestmark = pytest.mark.instruction_sets

LSTM, RNN, SVDF, LSTMS, RNNS, LSTM2, RNN2 = (
    OperationType.LSTM,
    OperationType.RNN,
    OperationType.SVDF,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
)
GATES = ("input", "forget", "cell", "output")
PARTS = ("cifg", "peephole", "projection", "norm")
VARIANTS = [frozenset(names) for count in range(5) for names in itertools.combinations(PARTS, count)]
SIZES = [(1, 3, 1, 1), (3, 1, 17, 40), (1, 9, 70, 8)]  # batch, input, units, output with a projection
LARGE = (2, 60, 160, 64)  # large enough for several threads
PLAIN: dict[str, Any] = {"activation": 4, "cell_clip": 0.0, "projection_clip": 0.0}


def name_of(variant: frozenset[str]) -> str:
    return "-".join(sorted(variant)) or "plain"


def drawn(seed: int, shapes: dict[str, tuple[int, ...] | None]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: None if shape is None else rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()
    }


def cell_of(variant: frozenset[str], size: tuple[int, int, int, int], seed: int = 0) -> dict[str, Any]:
    """Return all tensors and states of an LSTM cell; None for tensors that the variant does not have."""
    batch, inputs, cells, output = size
    output = output if "projection" in variant else cells
    shapes: dict[str, tuple[int, ...] | None] = {}
    for gate in GATES:
        here = gate != "input" or "cifg" not in variant
        shapes[f"input_to_{gate}_weights"] = (cells, inputs) if here else None
        shapes[f"recurrent_to_{gate}_weights"] = (cells, output) if here else None
        shapes[f"{gate}_gate_bias"] = (cells,) if here else None
        shapes[f"{gate}_layer_norm_weights"] = (cells,) if here and "norm" in variant else None
        shapes[f"cell_to_{gate}_weights"] = (cells,) if here and "peephole" in variant else None
    del shapes["cell_to_cell_weights"]
    shapes["projection_weights"] = (output, cells) if "projection" in variant else None
    shapes["projection_bias"] = (output,) if "projection" in variant else None
    shapes |= {"output_state_in": (batch, output), "cell_state_in": (batch, cells)}
    return drawn(seed, shapes)


def model_of(code: OperationType, values: dict[str, Any], *outputs: tuple[int, ...]) -> Model:
    """Return a model of one operation with constant weights; optional tensors are constants, too."""
    data = {p.name for p in REGISTRY[code].overloads[0].parameters if p.role is Role.DATA and not p.optional}
    constants = [name for name, value in values.items() if value is not None and name not in data]
    use = Use(code, values, len(outputs), constants=constants)
    for number, shape in enumerate(outputs):
        use.declaring(number, shape)
    return use.model


def lstm_model(variant: frozenset[str], size: tuple[int, int, int, int], **attributes: Any) -> Model:
    batch, inputs, cells, _ = size
    values = cell_of(variant, size) | PLAIN | {"input": np.zeros((batch, inputs))} | attributes
    hidden = values["output_state_in"].shape
    gates = 3 if "cifg" in variant else 4
    return model_of(LSTM, values, (batch, gates * cells), hidden, (batch, cells), hidden)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant_of_an_lstm_step_matches_the_interpreter(
    variant: frozenset[str], size: tuple[int, int, int, int]
) -> None:
    assert_kernels_agree(lstm_model(variant, size))


@pytest.mark.parametrize("variant", [frozenset(), frozenset(PARTS[:3]), frozenset(PARTS)], ids=name_of)
def test_a_large_lstm_step_matches_the_interpreter(variant: frozenset[str]) -> None:
    assert_kernels_agree(lstm_model(variant, LARGE))


@pytest.mark.parametrize("variant", [frozenset(["projection"]), frozenset(["norm", "projection"])], ids=name_of)
@pytest.mark.parametrize("activation", [0, 1, 3, 4, 6])
def test_activations_and_clips_of_an_lstm_step_match_the_interpreter(variant: frozenset[str], activation: int) -> None:
    attributes = {"activation": activation, "cell_clip": 0.3, "projection_clip": 0.2}

    assert_kernels_agree(lstm_model(variant, (2, 5, 19, 3), **attributes))


def test_a_projection_without_a_bias_matches_the_interpreter() -> None:
    assert_kernels_agree(lstm_model(frozenset(["projection"]), (2, 5, 19, 3), projection_bias=None))


def lstm_sequence(
    variant: frozenset[str], size: tuple[int, int, int, int], time: int, time_major: bool, states: bool = True
) -> Model:
    batch, inputs, cells, _ = size
    steps = (time, batch) if time_major else (batch, time)
    values = cell_of(variant, size) | PLAIN | {"cell_clip": 0.5, "projection_clip": 0.4}
    values |= {"input": np.zeros((*steps, inputs)), "time_major": time_major}
    hidden = values["output_state_in"].shape
    outputs = [(*steps, hidden[1]), hidden, (batch, cells)]
    return model_of(LSTMS, values, *outputs[: 3 if states else 1])


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant_of_an_lstm_sequence_matches_the_interpreter(variant: frozenset[str], time_major: bool) -> None:
    assert_kernels_agree(lstm_sequence(variant, (3, 5, 19, 4), 4, time_major))


@pytest.mark.parametrize("variant", [frozenset(), frozenset(PARTS)], ids=name_of)
def test_a_large_lstm_sequence_without_states_matches_the_interpreter(variant: frozenset[str]) -> None:
    assert_kernels_agree(lstm_sequence(variant, (7, 20, 70, 33), 12, False, states=False))


@pytest.mark.parametrize("variant", [frozenset(), frozenset(PARTS)], ids=name_of)
@pytest.mark.parametrize(("batch", "units"), [(2, 35), (5, 35), (17, 35), (6, 530)])
def test_rows_of_a_batch_have_the_bits_that_they_have_alone(batch: int, units: int, variant: frozenset[str]) -> None:
    """Several rows are multiplied at once: 4 of 5 and of 17 with 32 registers, then the rest.

    Up to 16 take a step together. Of 530 units the weights of the next block are prefetched, but for the projection's.
    """
    size = 20, units, 33
    together, alone = (lstm_sequence(variant, (rows, *size), 2, False) for rows in (batch, 1))
    rng = np.random.default_rng(9)
    inputs = [
        rng.normal(size=together.main.operands[index].dimensions).astype(np.float32)
        for index in together.main.input_indexes
    ]
    program = prepare(alone)
    for outputs in zip(*outputs_of(prepare(together), together, inputs), strict=True):
        row, inputs = [array[:1] for array in inputs], [array[1:] for array in inputs]
        for found, expected in zip(outputs, outputs_of(program, alone, row), strict=True):
            assert found.tobytes() == expected.tobytes()


def basic_cell(size: tuple[int, int, int]) -> dict[str, Any]:
    batch, inputs, units = size
    shapes: dict[str, tuple[int, ...] | None] = {"weights": (units, inputs), "recurrent_weights": (units, units)}
    return drawn(1, shapes | {"bias": (units,), "hidden_state": (batch, units)})


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 9), (1, 64, 196)])
@pytest.mark.parametrize("activation", [0, 1, 2, 3, 4, 6])
def test_an_rnn_step_matches_the_interpreter(activation: int, size: tuple[int, int, int]) -> None:
    batch, inputs, units = size
    values = basic_cell(size) | {"input": np.zeros((batch, inputs)), "activation": activation}

    assert_kernels_agree(model_of(RNN, values, (batch, units), (batch, units)))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("time_major", [0, 1])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 9), (2, 20, 70)])
def test_an_rnn_sequence_matches_the_interpreter(size: tuple[int, int, int], time_major: int, states: bool) -> None:
    time, (batch, inputs, units) = 4, size
    steps = (time, batch) if time_major else (batch, time)
    values = basic_cell(size) | {"input": np.zeros((*steps, inputs)), "activation": 4, "time_major": time_major}
    outputs = [(*steps, units), (batch, units)]

    assert_kernels_agree(model_of(RNNS, values, *outputs[: 2 if states else 1]))


LINKINGS = {"none": (0, 0, 5), "parallel": (4, 0, 4), "cross": (4, 4, 5)}
"""Sizes of the auxiliary input, of its weights, and of the backward direction's input; inputs have 5 elements."""


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def weights_for_aux(way: str, variant: tuple[str, ...], cells: int, size: int) -> dict[str, Any]:
    """Return an LSTM's weights for an auxiliary input of this size, none for size 0."""
    gates = GATES[1:] if "cifg" in variant else GATES
    shapes = {gate: (cells, size) if size and gate in gates else None for gate in GATES}
    return drawn(6, {f"{way}_aux_input_to_{gate}_weights": shape for gate, shape in shapes.items()})


def aux_input(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32) if shape[-1] else None


def both_outputs(steps: tuple[int, ...], sizes: tuple[int, int], merged: bool) -> list[tuple[int, ...]]:
    return [(*steps, sum(sizes))] if merged else [(*steps, size) for size in sizes]


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("linking", LINKINGS)
@pytest.mark.parametrize("variants", [((), ()), (("cifg", "norm"), ("projection", "peephole"))], ids=["plain", "parts"])
def test_bidirectional_lstm_matches_the_interpreter(
    variants: tuple[tuple[str, ...], tuple[str, ...]], linking: str, time_major: bool, merged: bool, states: bool
) -> None:
    time, batch, inputs, aux, weights, read = 3, 2, 5, *LINKINGS[linking]
    steps = (time, batch) if time_major else (batch, time)
    forward = cell_of(frozenset(variants[0]), (batch, inputs, 9, 4))
    backward = cell_of(frozenset(variants[1]), (batch, read, 18, 7), seed=1)
    values = prefixed("fw_", forward) | prefixed("bw_", backward) | PLAIN
    values |= {"input": np.zeros((*steps, inputs)), "aux_input": aux_input((*steps, aux))}
    values |= {"merge_outputs": merged, "time_major": time_major}
    values |= weights_for_aux("fw", variants[0], 9, weights) | weights_for_aux("bw", variants[1], 18, weights)
    after = [values[f"{way}_{name}"].shape for way in ("fw", "bw") for name in ("output_state_in", "cell_state_in")]
    outputs = both_outputs(steps, (after[0][1], after[2][1]), merged)

    assert_kernels_agree(model_of(LSTM2, values, *outputs, *(after if states else [])))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("linking", LINKINGS)
def test_bidirectional_rnn_matches_the_interpreter(linking: str, time_major: bool, merged: bool, states: bool) -> None:
    time, batch, inputs, aux, weights, read = 3, 2, 5, *LINKINGS[linking]
    steps = (time, batch) if time_major else (batch, time)
    values = prefixed("fw_", basic_cell((batch, inputs, 9))) | prefixed("bw_", basic_cell((batch, read, 17)))
    values |= {"input": np.zeros((*steps, inputs)), "aux_input": aux_input((*steps, aux))}
    shapes = {"fw_aux_weights": (9, weights), "bw_aux_weights": (17, weights)}
    values |= drawn(6, shapes if weights else dict.fromkeys(shapes))
    values |= {"activation": 4, "merge_outputs": merged, "time_major": time_major}
    after = [(batch, 9), (batch, 17)] if states else []

    assert_kernels_agree(model_of(RNN2, values, *both_outputs(steps, (9, 17), merged), *after))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("memory", [1, 2, 3, 10, 64])
@pytest.mark.parametrize(("batch", "inputs", "cells", "rank"), [(1, 1, 1, 1), (2, 7, 5, 2), (1, 20, 70, 3)])
def test_svdf_matches_the_interpreter(batch: int, inputs: int, cells: int, rank: int, memory: int, bias: bool) -> None:
    filters = cells * rank
    shapes = {
        "weights_feature": (filters, inputs),
        "weights_time": (filters, memory),
        "bias": (cells,) if bias else None,
    }
    values = drawn(3, shapes | {"state_in": (batch, memory * filters)}) | {"rank": rank, "activation": 4}

    model = model_of(SVDF, values | {"input": np.zeros((batch, inputs))}, (batch, memory * filters), (batch, cells))

    assert_kernels_agree(model)


@pytest.mark.parametrize("activation", [0, 1, 2, 3, 6])
def test_activations_of_svdf_match_the_interpreter(activation: int) -> None:
    shapes = {"weights_feature": (6, 4), "weights_time": (6, 5), "bias": None, "state_in": (2, 30)}
    values = drawn(3, shapes) | {"rank": 2, "activation": activation, "input": np.zeros((2, 4))}

    assert_kernels_agree(model_of(SVDF, values, (2, 30), (2, 3)))


RECURRENT = {code.name for code in (LSTM, RNN, SVDF, LSTMS, RNNS, LSTM2, RNN2)}


def is_recurrent(line: testmodels.Line) -> bool:
    """Return True for a test model that is one recurrent float32 operation and is not expected to fail."""
    main = line["main"]
    if len(main["operations"]) != 1 or line["expectFailure"]:
        return False
    (operation,) = main["operations"]
    return operation["type"] in RECURRENT and main["operands"][operation["inputs"][0]]["type"] == "TENSOR_FLOAT32"


def vectors(folder: Path) -> Iterator[TestModel]:
    for path in testmodels.find_files([folder]):
        yield from (testmodels.read(line) for _, line in testmodels.lines(path) if is_recurrent(line))


def with_constant_weights(test: TestModel) -> tuple[Model, list[Any]]:
    """Return a test model with its weights as constants, and the remaining inputs."""
    main, values = test.model.main, bytearray(test.model.operand_values)
    (operation,), operands = main.operations, list(main.operands)
    declared = [[operands[i] for i in indexes] for indexes in (operation.inputs, operation.outputs)]
    names = dict(zip(operation.inputs, match(REGISTRY[operation.type], *declared).parameters, strict=True))
    given = dict(zip(main.input_indexes, test.inputs, strict=True))
    for index, parameter in names.items():
        here = given.get(index, np.zeros(1))
        is_omitted = here is None or here.size == 0
        if index in given and (parameter.role is not Role.DATA or parameter.optional):
            array = given.pop(index)
            values += bytes(-len(values) % 4)
            place = DataLocation() if is_omitted else DataLocation(0, len(values), array.nbytes)
            lifetime = LifeTime.NO_VALUE if is_omitted else LifeTime.CONSTANT_COPY
            dimensions = () if is_omitted else array.shape
            operands[index] = replace(operands[index], lifetime=lifetime, location=place, dimensions=dimensions)
            values += b"" if is_omitted else array.tobytes()
    graph = replace(main, operands=tuple(operands), input_indexes=tuple(given))
    return replace(test.model, main=graph, operand_values=bytes(values)), list(given.values())


def test_the_hals_vectors_with_constant_weights_pass_with_kernels(data_dir: Path) -> None:
    compiled_ops = []
    for test in vectors(data_dir / "vts"):
        model, inputs = with_constant_weights(test)
        program = prepare(model)

        assert value_mismatches(test, outputs_of(program, model, inputs)) == [], test.name
        assert program.compiled_ops == {0}, test.name
        compiled_ops.append(model.main.operations[0].type.name)

    assert set(compiled_ops) == RECURRENT
    assert len(compiled_ops) > 40
