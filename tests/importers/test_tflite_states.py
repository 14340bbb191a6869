"""Variable tensors: states, which are inputs and outputs behind all others, in the order of their use."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Ours
from support.stateful_models import X, two_rnns
from support.tflite_files import Operator, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import LifeTime
from nnfmq.importers import load


def test_states_come_last_in_the_order_in_which_operators_use_them() -> None:
    loaded = load(two_rnns())
    states = [state.tensor for state in loaded.states]
    assert [info.name for info in (*loaded.inputs, *loaded.outputs, *states)] == ["x", "y", "early", "late"]
    assert {(info.shape, info.dtype) for info in (*loaded.inputs, *loaded.outputs, *states)} == {((1, 2), "float32")}


def test_a_state_is_an_input_and_an_output_of_its_operation() -> None:
    main = load(two_rnns()).model.main
    for number, operation in enumerate(main.operations):
        before, after = operation.inputs[4], operation.outputs[0]
        assert operation.type == Op.RNN
        assert (before, after) == (main.input_indexes[1 + number], main.output_indexes[1 + number])
        lifetimes = [main.operands[index].lifetime for index in (before, after)]
        assert lifetimes == [LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT]


def test_a_carried_state_continues_the_cell() -> None:
    run, x = Ours(load(two_rnns())), np.float32([[1, 2]])
    weights, bias = np.arange(4, dtype=np.float32).reshape(2, 2), np.float32([0, 1])
    early = late = np.zeros((1, 2), np.float32)
    for _ in range(3):
        early = x @ weights.T + early @ weights.T + bias
        late = early @ weights.T + late @ weights.T + bias
        np.testing.assert_allclose(run([x]), [late], rtol=1e-6)


def test_a_state_of_two_operators_is_rejected() -> None:
    with pytest.raises(
        InvalidArgument, match=r"operator 1 \(RNN\): tensor 4 \('early'\) is the state of two operators"
    ):
        load(two_rnns(second_state=4))


def test_a_model_without_variables_has_no_states() -> None:
    loaded = load(writer.write([X, X], [Operator("RELU", (0,), (1,))], (0,), (1,)))
    assert loaded.states == ()
